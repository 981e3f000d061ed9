"""Read values from a store for all who ask, each key once at a time, in a few threads.

A request is a `Read`, and waits until each of its keys has an answer. Reads take turns: a thread takes the next keys of
a read, enough for one call of the store. It leaves out keys that are flying: another thread is reading them. The
answers go to every read that waits for these keys. Keys are told apart by `Tenant.name`.

A store that fails is left alone: its breaker is open. A probe is a read that asks it once more; nobody waits for that.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from functools import partial

from kvcache.stores import calls
from kvcache.stores.tenant import Tenant
from kvcache.stores.worker import Worker, without_frames
from kvcache.threads import Living

NUM_THREADS = 8
ASKED_AT_ONCE = 8  # keys, one after the other, so that a slow store shows its answers
SLOW = "it did not answer in time"


@dataclass(eq=False)
class Read:
    """Keys that a caller waits for, or a probe that nobody waits for."""

    tenant: Tenant
    wanted: dict[str, int]  # the keys without an answer, in the order asked for, and their places in it
    begin: float
    answers: int  # that the store had given when it began
    stop_at_miss: bool = False
    is_probe: bool = False
    found: dict[str, bytes] = field(default_factory=dict)
    is_queued: bool = False
    is_done: bool = False  # nobody waits for more of it
    is_judged: bool = False  # the breaker has been told that the store failed to answer it


@dataclass(eq=False)
class Call:
    """A call of the store, for some keys of a read, and what it brings."""

    read: Read
    keys: list[str]
    begin: float
    end: float = 0.0
    values: dict[str, bytes] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    failure: BaseException | None = None

    def run(self, store: MutableMapping[str, bytes]) -> None:
        """Fetch the values; or find the first keys that are there."""
        tenant = self.read.tenant
        if tenant.only_keys:
            self.values = dict.fromkeys(itertools.takewhile(partial(calls.has, store), self.keys), b"")
            return
        for key, value in calls.read_many(store, self.keys, tenant.most_to_read).items():
            found = calls.bytes_of(value)
            if 0 < len(found) <= tenant.most_bytes:
                self.values[key] = found
            else:
                self.refused.append(key)


class Reader:
    """The threads that read from a store, and the callers that wait for them.

    `warn` takes what happened or an error, and `refuse` a tenant, a key, and why its value was not taken. Both are
    called without the lock.
    """

    def __init__(
        self,
        store: MutableMapping[str, bytes],
        lock: threading.RLock,
        warn: Callable[[str | BaseException | None], None],
        refuse: Callable[[Tenant, str, str], None],
    ) -> None:
        self.store = store
        self.lock = lock
        self.worker = Worker("read", lock, self._work, NUM_THREADS)
        self.answers = 0  # how many the store has given
        self._answered = -math.inf  # when the store last did
        self._tenants: Living[Tenant] = Living()  # those who have asked
        self._reads_many = False  # whether it reads many keys in one call
        self._waiting: dict[tuple[object, ...], dict[Read, None]] = {}  # reads, by the names of their keys
        self._flying: set[tuple[object, ...]] = set()  # the names of keys that are being read
        self._cuts: dict[tuple[object, ...], float] = {}  # when the values of flying keys were deleted
        self._warn, self._refuse = warn, refuse

    # ---- what callers do

    def get_many(
        self, tenant: Tenant, keys: Iterable[str], timeout: float, patience: float, stop_at_miss: bool
    ) -> dict[str, bytes]:
        """Return the values that the store hands out for these keys within `timeout` seconds."""
        wanted = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        num_keys, warning = len(wanted), None
        with self.lock:
            tenant.patience = patience
            self._tenants.add(tenant)
            read = Read(tenant, wanted, time.monotonic(), self.answers, stop_at_miss)
            try:
                if timeout > 0 and self._admit(read):
                    self.worker.changed.wait_for(lambda: read.is_done, timeout)
                    warning = self._end_wait(read)
            except BaseException:  # such as Ctrl-C
                self._end(read)
                raise
            tenant.counts["hits"] += len(read.found)
            tenant.counts["misses"] += num_keys - len(read.found)
        self._warn(warning)
        return read.found

    def _admit(self, read: Read) -> bool:
        """Queue a read; return whether to wait for it. While the store is left alone, nobody waits for a probe."""
        if read.tenant.is_closed or not read.wanted:
            return False
        breaker = self.worker.breaker
        if not breaker.is_open:
            return self._queue(read)
        if self.worker.is_idle and breaker.may_probe:  # no earlier question is unanswered
            first = dict(itertools.islice(read.wanted.items(), 1))
            probe = Read(read.tenant, first, read.begin, read.answers, is_probe=True)
            breaker.probing = self._queue(probe)
        return False

    def _queue(self, read: Read) -> bool:
        """Let a read wait for its keys, and give it a turn; return False if there can be no thread for it."""
        for key in read.wanted:  # first, as a queued read that waits for nothing would be called again and again
            self._waiting.setdefault(read.tenant.name(key), {})[read] = None
        read.is_queued = self.worker.add(read)
        if not read.is_queued:
            self._forget(read, read.wanted)
        return read.is_queued

    def _end_wait(self, read: Read) -> str | None:
        """Take what has come. A time-out is a failure, unless the store has answered meanwhile, if only to others.

        If the store still had time, it is judged when it answers. Return what to warn of: not of a time-out, but of the
        store being left alone.
        """
        if read.is_done:
            return None
        self._end(read)
        read.tenant.counts["timeouts"] += 1
        asked = min(read.begin, self.worker.since or math.inf)
        if read.is_judged or not self._is_late(time.monotonic() - max(asked, self._answered), read.tenant):
            return None
        read.is_judged = True
        return SLOW if self.answers == read.answers and self.worker.breaker.failed() else None

    def _is_late(self, seconds: float, tenant: Tenant) -> bool:
        """Return whether an answer after so many seconds is later than any tenant's patience."""
        if seconds < tenant.patience:
            return False
        return all(seconds >= other.patience for other in self._tenants.alive() if not other.is_closed)

    def _end(self, read: Read) -> None:
        """Let nobody wait for a read, or for its unanswered keys."""
        read.is_done = True
        self._forget(read, read.wanted)

    def _forget(self, read: Read, keys: Iterable[str]) -> None:
        """Let a read wait for these keys no more."""
        for key in keys:
            name = read.tenant.name(key)
            waiting = self._waiting.get(name, {})
            waiting.pop(read, None)
            if not waiting:
                self._waiting.pop(name, None)

    def cut(self, key: str) -> None:
        """Let no read that begins from now on take a value of a key that is being read. Called with the lock."""
        for name in self._flying:
            if name[-1] == key:
                self._cuts[name] = time.monotonic()

    # ---- what the threads do

    def _work(self) -> None:
        reads_many, failure = False, None
        try:
            reads_many = calls.reads_many(self.store)
        except BaseException as error:  # a store may raise anything, and the thread must not end
            failure = without_frames(error)
        with self.lock:
            self._reads_many = reads_many
            call = self._take()
        if call is None:
            return
        call.failure = failure
        if failure is None:
            try:
                call.run(self.store)
            except BaseException as error:  # as above
                call.failure = without_frames(error)
        call.end = time.monotonic()
        with self.lock:
            warning = self._land(call)
        for key in call.refused:
            self._refuse(call.read.tenant, key, "it is empty, longer than any value, or not bytes")
        self._warn(warning)

    def _take(self) -> Call | None:
        """Take the next keys of the read whose turn it is.

        A read whose next key is being read waits for that: it is queued again with the answer.
        """
        queue = self.worker.queue
        while queue:
            read: Read = queue.popleft()
            read.is_queued = False
            if read.is_done:  # its caller waits no more
                continue
            if self.worker.breaker.is_open and not read.is_probe:
                self._end(read)
                continue
            keys = self._next_keys(read)
            if keys:
                self._flying.update(map(read.tenant.name, keys))
                return Call(read, keys, time.monotonic())
        return None

    def _next_keys(self, read: Read) -> list[str]:
        """Return the next keys of a read for one call, up to the first that is flying."""
        tenant, most = read.tenant, 1
        if tenant.only_keys:
            most = ASKED_AT_ONCE
        elif self._reads_many:
            most = calls.keys_per_call(tenant.value_bytes)
        some = itertools.islice(read.wanted, most)
        return list(itertools.takewhile(lambda key: tenant.name(key) not in self._flying, some))

    def _land(self, call: Call) -> str | BaseException | None:
        """Give what a call brought to all who wait for it; judge the store, and return what to warn of."""
        tenant = call.read.tenant
        names = {key: tenant.name(key) for key in call.keys}
        self._flying.difference_update(names.values())
        if call.failure is None:
            sizes = [len(value) for value in call.values.values()]
            self.answers, self._answered = self.answers + 1, call.end
            if sizes and not tenant.only_keys:
                tenant.value_bytes = sum(sizes) // len(sizes)
            tenant.counts["bytes_read"] += sum(sizes)
            tenant.counts["corrupt"] += len(call.refused)
        else:
            tenant.counts["errors"] += 1
        reads = dict.fromkeys([call.read])
        for key, name in names.items():
            cut = self._cuts.pop(name, math.inf)
            for read in self._waiting.pop(name, ()):
                reads[read] = None
                if read.begin >= cut:  # it waits for another call
                    self._waiting.setdefault(name, {})[read] = None
                else:
                    self._answer(read, key, call.values.get(key))
        for read in reads:
            if call.failure is not None or not read.wanted:
                self._end(read)
            elif not read.is_done and not read.is_queued:
                read.is_queued = True
                self.worker.queue.append(read)
        return self._judge(call)

    def _answer(self, read: Read, key: str, value: bytes | None) -> None:
        """Take the answer to one of a read's keys. With `stop_at_miss`, keys behind a miss are no longer wanted."""
        place = read.wanted.pop(key)
        if value is not None:
            read.found[key] = value
        elif read.stop_at_miss:
            behind = [other for other, at in read.wanted.items() if at > place]
            self._forget(read, behind)
            for other in behind:
                del read.wanted[other]

    def _judge(self, call: Call) -> str | BaseException | None:
        """Tell the breaker how a call went, unless a caller's time-out has; return what to warn of."""
        breaker, read = self.worker.breaker, call.read
        if call.failure is not None:
            if not read.is_judged:
                breaker.failed()
            return call.failure
        if read.is_judged:
            return None
        if self._is_late(call.end - call.begin, read.tenant):  # a probe, or a read for which nobody waited so long
            return SLOW if breaker.failed() else None
        breaker.succeeded()
        return None
