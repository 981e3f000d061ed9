"""Write values to a store, and delete some, in a thread that nobody waits for.

A doomed key waits to be deleted, because a cache has forgotten its rows. `kvcache.stores.doomed` knows these keys, and
the number of the forgetting that found each.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from kvcache.stores import calls
from kvcache.stores.doomed import Doomed
from kvcache.stores.tenant import Tenant
from kvcache.stores.worker import Worker, without_frames

MOST_WRITES = 1 << 18  # that wait; rows are copied when they are written, so that one of these takes about 540 bytes

logger = logging.getLogger("kvcache")


@dataclass(eq=False, slots=True)
class Write:
    """A value to write, or, without `make_value`, a key to delete."""

    tenant: Tenant
    key: str
    make_value: Callable[[bytes | None], bytes | None] | None
    written: Callable[[str], object] | None = None  # called with the key once the store has done it
    joins: bool = False  # make_value gets the value that the store has
    forgetting: int = 0  # the number of the forgetting that found the key; 0: the key was not doomed
    is_counted: bool = True  # in the count of `dropped`, if it is dropped
    is_ended: bool = False  # it is done, failed or dropped


def _attempt(call: Callable[[], bool]) -> tuple[bool, BaseException | None]:
    """Call a store; return the answer, or False and what it raised. That may be anything: the thread must not end."""
    try:
        return call(), None
    except BaseException as error:
        return False, without_frames(error)


class Writer:
    """The thread that writes to a store, and what waits for it.

    `warn` takes an error; `settle` takes a doomed key that was deleted or written anew, and the number of its
    forgetting. Both are called without the lock. `worker.queue` has the writes that wait, `_at_work` those of the call
    that goes on.
    """

    def __init__(
        self,
        store: MutableMapping[str, bytes],
        lock: threading.RLock,
        warn: Callable[[BaseException | None], None],
        doomed: Doomed,
        settle: Callable[[str, int], None],
    ) -> None:
        self.store = store
        self._doomed, self._settle = doomed, settle
        self.lock = lock
        self.worker = Worker("write", lock, self._work)
        self._at_work: Sequence[Write] = ()  # writes that the thread does now
        self._warn = warn

    # ---- what callers do

    def add(self, write: Write) -> bool:
        """Queue a write; return whether it was queued."""
        worker = self.worker
        with self.lock:
            is_probe = worker.breaker.is_open
            is_queued = (
                not write.tenant.is_closed
                and len(worker.queue) < MOST_WRITES
                and (not is_probe or worker.breaker.may_probe)
                and worker.add(write)
            )
            if is_queued:
                worker.breaker.probing = is_probe
            else:
                self._note_dropped([write])
        return is_queued

    def flush(self, timeout: float, tenant: Tenant | None = None) -> bool:
        """Wait until what a tenant, or anybody, has queued by now is done or dropped; return whether it is."""
        with self.lock:
            queue: list[Write] = [*self._at_work, *self.worker.queue]
            last = next((write for write in reversed(queue) if tenant is None or write.tenant is tenant), None)
            del queue  # which would keep what they are made of
            return last is None or self.worker.changed.wait_for(
                lambda: last.is_ended, min(timeout, threading.TIMEOUT_MAX)
            )

    def drop(self, tenant: Tenant | None = None) -> None:
        """Drop what is queued, of a tenant or of all."""
        with self.lock:
            queue = list(self.worker.queue)
            writes = [write for write in queue if tenant is None or write.tenant is tenant]
            if writes:
                self.worker.queue.clear()
                self.worker.queue.extend(write for write in queue if write.tenant is not tenant and tenant is not None)
            self._note_dropped(writes)
            self._note_end(writes)
            self.worker.changed.notify_all()

    def _note_dropped(self, writes: Iterable[Write]) -> None:
        for write in writes:
            write.tenant.counts["dropped"] += write.is_counted

    def _note_end(self, writes: Sequence[Write]) -> None:
        for write in writes:
            write.is_ended = True

    # ---- what the thread does

    def _work(self) -> None:
        """Do what one call of the store does. If the store fails too often, drop what is queued."""
        was_asked = False
        writes_many, failure = _attempt(lambda: calls.writes_many(self.store))
        with self.lock:
            writes = self._at_work = self._take(writes_many)
        if failure is None and writes:
            was_asked, failure = _attempt(lambda: self._call(writes))
        with self.lock:
            self._note_answer(writes, was_asked, failure)
            self._note_end(writes)
            self._at_work = ()
            is_left_alone = self.worker.breaker.is_open
        if is_left_alone:
            self.drop()
        self._warn(failure)

    def _note_answer(self, writes: Sequence[Write], was_asked: bool, failure: BaseException | None) -> None:
        """Tell the breaker, and the counts of a tenant, whether the store works; neither if it was not asked."""
        breaker = self.worker.breaker
        if was_asked:
            breaker.succeeded()
        elif failure is not None and writes:
            writes[0].tenant.counts["errors"] += 1
            self._note_dropped(writes)
            breaker.failed()
        breaker.probing = False

    def _take(self, writes_many: bool) -> list[Write]:
        """Take a deletion, or some writes for one call of the store."""
        queue = self.worker.queue
        if not queue:  # dropped meanwhile
            return []
        writes = [queue.popleft()]
        is_value = writes[0].make_value is not None
        most = calls.keys_per_call(writes[0].tenant.value_bytes) if writes_many and is_value else 1
        while queue and len(writes) < most and queue[0].make_value is not None:
            writes.append(queue.popleft())
        return writes

    def _call(self, writes: Sequence[Write]) -> bool:
        """Make values, and store them; or delete a key. Return whether the store was asked."""
        items: dict[str, bytes] = {}
        sources: dict[str, Write] = {}
        gone: list[Write] = []
        for write in writes:
            if write.make_value is None:
                return self._delete(write)
            value = self._make_value(write, self._find_stored(write) if write.joins else None)
            if value:
                items[write.key], sources[write.key] = value, write
            elif value is None:
                gone.append(write)
        if items:
            calls.write_many(self.store, items)
        if gone:
            self._doomed.wait()  # then all keys that were forgotten are among the doomed ones
        with self.lock:
            self._note_dropped(write for write in gone if write.key not in self._doomed)  # else it was forgotten
            for key, value in items.items():
                tenant = sources[key].tenant
                tenant.value_bytes = len(value)
                tenant.counts["written"] += 1
                tenant.counts["bytes_written"] += len(value)
                if (written := sources[key].written) is not None:
                    written(key)
        for key, write in sources.items():
            if write.forgetting:
                self._settle(key, write.forgetting)
        return bool(items)

    def _delete(self, write: Write) -> bool:
        """Delete a key, unless it was written anew since it was forgotten; return whether the store was asked."""
        if write.forgetting and not self._doomed.is_due(write.key, write.forgetting):
            return False
        with contextlib.suppress(KeyError):
            del self.store[write.key]
        if write.forgetting:
            self._settle(write.key, write.forgetting)
        return True

    def _find_stored(self, write: Write) -> bytes | None:
        """Return the value in the store; None if it is missing, or about to be deleted."""
        if write.key in self._doomed:
            return None
        found = calls.read_many(self.store, [write.key], write.tenant.most_to_read)
        return calls.bytes_of(found.get(write.key)) or None

    def _make_value(self, write: Write, stored: bytes | None) -> bytes | None:
        """Return the value to store. It is b"" if the store has all of it, and None if it is gone or cannot be made.

        A mistake of the caller's is not the store's failure.
        """
        assert write.make_value is not None
        try:
            return write.make_value(stored)
        except BaseException:  # as above
            with contextlib.suppress(BaseException):  # of a handler
                logger.exception("the value for %r could not be made, and is not stored", write.key)
            return None
