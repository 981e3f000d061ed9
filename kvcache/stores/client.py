"""Stand between a prefix cache and a store, so that a fault of the store costs speed and nothing else.

The store's methods are called by two threads of the client's own, one that reads, and one that writes and deletes, so
that neither waits for the other. Callers wait for reads no longer than they say, and never for writes. Each thread has
a circuit breaker: after some failures in a row the store is left alone for a while, then asked once more, in the
background; whenever that fails, too, the while doubles, up to a limit. A store that is full still reads.

What a store hands out is taken only if it is what was stored (`kvcache.stores.values`); otherwise it is deleted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache.arguments import INT64_MAX
from kvcache.errors import plain
from kvcache.living import Living
from kvcache.stores import values
from kvcache.stores.directory import DirectoryStore
from kvcache.stores.speed import Speed
from kvcache.stores.valkey import ValkeyStore
from kvcache.stores.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["StoreClient", "StoreStats"]

CALL_BYTES, MAX_CALL_KEYS = 8 << 20, 256  # of one call of get_many or set_many, about
MOST_WRITES = 1 << 18  # that wait; rows are copied when they are written, so that one of these takes about 540 bytes
SLOW = "it did not answer in time"
STALE = 30.0  # seconds after which measurements of speed say nothing about now
EXIT_TIMEOUT = 1.0  # seconds for which the interpreter's exit waits for writes

logger = logging.getLogger("kvcache")


@dataclass(frozen=True)
class StoreStats:
    """What happened between a prefix cache and its store.

    Attributes
    ----------
    hits, misses : int
        Keys that were found in time, and keys that were not, for whatever reason.
    errors : int
        Calls of the store that raised.
    timeouts : int
        Reads that were not answered in full within the time that they had.
    corrupt : int
        Values that were not what was stored, and were deleted.
    dropped : int
        Values that were not written: 262,144 were waiting, the store failed or was left alone, the cache was closed, or
        their rows were dropped before.
    written : int
        Values that were written.
    bytes_read, bytes_written : int
        The bytes of rows in the values that the store handed out and took; a value has 128 bytes more.
    latency : float or None
        Seconds that a read takes before bytes flow, of recent reads. None if there were none.
    bandwidth : float or None
        Bytes per second that then flow, checked and all.
    reading, writing : bool
        Whether the store is asked; False while it is left alone because of failures.
    """

    hits: int = 0
    misses: int = 0
    errors: int = 0
    timeouts: int = 0
    corrupt: int = 0
    dropped: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    latency: float | None = None
    bandwidth: float | None = None
    reading: bool = True
    writing: bool = True


@dataclass(eq=False)
class Read:
    """Keys that a caller waits for, or a probe that nobody waits for."""

    keys: list[str]
    begin: float
    patience: float  # seconds after which the store has failed
    answers: int  # of the store so far
    stop_at_miss: bool = False
    found: dict[str, memoryview] = field(default_factory=dict)
    is_done: bool = False  # nobody waits for more of it
    is_judged: bool = False  # whether it failed is known to the breaker


@dataclass(eq=False, slots=True)
class Write:
    """A value to write, or, without `make_value`, a key to delete."""

    key: str
    make_value: Callable[[], Iterable[Buffer] | None] | None


class StoreClient:
    """Reads from and writes to a store, within bounded time and memory, whatever the store does.

    Two threads use the store at once, one to read and one to write. If it has ``get_many(keys)``, which returns a dict
    of what is there, and ``set_many(items)``, which takes a dict, they are called for many keys at once. `digest`
    stands for the model and the shape, and `secret` is the key of the MAC: a value that was stored with others is a
    miss. No payload has more than `most_bytes`: of a longer file, a folder reads no more.

    >>> client = StoreClient({}, digest=b"a model", secret=b"of one tenant")
    >>> client.put("a key", lambda: [b"some rows"])
    True
    >>> client.flush(timeout=10)
    True
    >>> {key: bytes(value) for key, value in client.get_many(["a key", "another"], timeout=10).items()}
    {'a key': b'some rows'}
    >>> client.stats.hits, client.stats.misses
    (1, 1)
    """

    def __init__(
        self,
        store: MutableMapping[str, bytes],
        *,
        digest: bytes,
        secret: bytes | None = None,
        most_bytes: int = INT64_MAX - values.HEADER_SIZE - 1,
    ) -> None:
        if not isinstance(secret, bytes | None):
            raise TypeError(f"secret is a {type(secret).__name__}: bytes are needed, or None for values without a MAC")
        if secret == b"":
            raise ValueError("secret=b'': must not be empty; None stores values without a MAC")
        self._store = store
        self._digest = bytes(digest)
        self._secret = secret
        self._most_bytes = most_bytes
        self._counts = dict.fromkeys(
            ("hits", "misses", "errors", "timeouts", "corrupt", "dropped", "written", "bytes_read", "bytes_written"), 0
        )
        self._speed = Speed()
        self._value_bytes = 1 << 20  # of the latest values, about
        self._has_warned = False
        self._is_closed = False
        self._make_workers()
        _clients.add(self)

    def _make_workers(self) -> None:
        """Begin without threads, and with empty queues; again in a forked child, which has no other threads."""
        self._lock = threading.RLock()  # a garbage collection may run anything while it is held
        self._reading = Worker("read", self._lock, self._work_read)
        self._writing = Worker("write", self._lock, self._work_write)
        self._answers = 0  # of the store to reads

    # ---- what callers use

    def get_many(
        self, keys: Iterable[str], timeout: float, *, patience: float | None = None, stop_at_miss: bool = False
    ) -> dict[str, memoryview]:
        """Return the payloads that the store hands out for these keys within `timeout` seconds; others are misses.

        Keys are read in this order; later answers are dropped. With `stop_at_miss` a key is of no use without those
        before it: reading ends where one is missing, though the same call of the store may have brought more. The store
        has failed if it has not answered within `patience` seconds, by default `timeout`: for callers who wait less
        than it may take.
        """
        keys = list(dict.fromkeys(keys))
        timeout = min(timeout, threading.TIMEOUT_MAX)
        warning = None
        with self._lock:
            read = Read(keys, time.monotonic(), timeout if patience is None else patience, self._answers, stop_at_miss)
            if timeout > 0 and self._admit_read(read):
                try:
                    self._reading.changed.wait_for(lambda: read.is_done, timeout)
                except BaseException:  # such as Ctrl-C
                    read.is_done = True
                    raise
                warning = self._end_wait(read)
            self._counts["hits"] += len(read.found)
            self._counts["misses"] += len(keys) - len(read.found)
        self._warn(warning)
        return read.found

    def seconds_for(self, num_keys: int, nbytes: int) -> float | None:
        """Return how long reading this many values of so many bytes in all will take, by what recent reads took.

        If no read was measured in the last 30 seconds, as long as the one under way has taken already; None if there is
        none: then one is worth trying. Infinity while the store is left alone.
        """
        with self._lock:
            if self._reading.breaker.is_open:
                return None if self._may_probe() else math.inf
            line, now = self._speed.line(), time.monotonic()
            if line is None or now - self._speed.last > STALE:
                return now - self._reading.began if self._reading.is_busy else None
            latency, per_byte = line
            return latency * math.ceil(num_keys / self._keys_per_call("get_many")) + per_byte * nbytes

    def put(self, key: str, make_value: Callable[[], Iterable[Buffer] | None]) -> bool:
        """Queue a value to be written, and return whether it was queued; never wait.

        `make_value` returns the payload, in parts that are joined, or None if there is none any more. It is called
        later, in the thread that writes, unless the value is dropped before.
        """
        return self._queue_write(Write(key, make_value))

    def delete(self, key: str) -> bool:
        """Queue the deletion of a key, after the writes that were queued before; return whether it was queued."""
        return self._queue_write(Write(key, None))

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued is written or dropped, at most for so many seconds; return whether it is.

        `StoreStats.dropped` says whether anything was dropped.
        """
        with self._lock:
            return self._writing.changed.wait_for(lambda: self._writing.is_idle, min(timeout, threading.TIMEOUT_MAX))

    def close(self, timeout: float) -> bool:
        """Take nothing more, and flush; drop what is not written by then. Return what `flush` does.

        From now on every key is a miss. The store itself stays open.
        """
        with self._lock:
            self._is_closed = True
        is_done = self.flush(timeout)
        self._drop_queue()
        return is_done

    @property
    def stats(self) -> StoreStats:
        """What has happened so far."""
        with self._lock:
            latency, per_byte = self._speed.line() or (None, 0.0)
            return StoreStats(
                **self._counts,
                latency=latency,
                bandwidth=1 / per_byte if per_byte else None,
                reading=not self._reading.breaker.is_open,
                writing=not self._writing.breaker.is_open,
            )

    # ---- reading

    def _may_probe(self) -> bool:
        """Return whether the store may be asked once more; not while it has not even answered what it was asked."""
        return self._reading.is_idle and self._reading.breaker.may_probe

    def _admit_read(self, read: Read) -> bool:
        """Queue a read; return whether to wait for it. While the store is left alone, nobody waits for a probe."""
        worker = self._reading
        if self._is_closed or not read.keys:
            return False
        if not worker.breaker.is_open:
            return worker.add(read)
        if self._may_probe():
            worker.breaker.probing = worker.add(Read(read.keys[:1], read.begin, read.patience, read.answers))
        return False

    def _end_wait(self, read: Read) -> str | None:
        """Take what has come. A time-out is a failure, unless the store has answered meanwhile, if only to others.

        If the store still had time, it is judged when it answers. Return what to warn of: not of a time-out, but of the
        store being left alone.
        """
        if read.is_done:
            return None
        read.is_done = True
        self._counts["timeouts"] += 1
        asked = min(read.begin, self._reading.began) if self._reading.is_busy else read.begin
        if read.is_judged or time.monotonic() - asked < read.patience:
            return None
        read.is_judged = True
        return SLOW if self._answers == read.answers and self._reading.breaker.failed() else None

    def _work_read(self) -> None:
        with self._lock:
            read: Read = self._reading.queue.popleft()
            if read.is_done:  # its caller waits no more
                return
        failure = None
        for keys in self._calls(read.keys):
            try:
                is_complete = self._read_call(read, keys)
            except BaseException as error:  # a store may raise anything, and the thread must not end
                failure = error
                break
            if read.is_done or (read.stop_at_miss and not is_complete):
                break
        with self._lock:
            warning = self._end_read(read, failure)
        self._warn(warning)

    def _calls(self, keys: list[str]) -> Iterator[list[str]]:
        """Cut keys for one call of the store each."""
        begin = 0
        while begin < len(keys):
            end = begin + self._keys_per_call("get_many")
            yield keys[begin:end]
            begin = end

    def _keys_per_call(self, verb: str) -> int:
        if not hasattr(self._store, verb):
            return 1
        return max(1, min(CALL_BYTES // max(self._value_bytes, 1), MAX_CALL_KEYS))

    def _read_call(self, read: Read, keys: list[str]) -> bool:
        """Fetch and check the values of some keys; return whether all of them are there."""
        begin = time.perf_counter()
        payloads: dict[str, memoryview] = {}
        refused: list[tuple[str, str]] = []
        sizes = []
        for key, value in self._fetch(keys):
            try:
                payloads[key] = values.unpack(value, key, self._digest, self._secret)
                sizes.append(payloads[key].nbytes)
            except values.ValueRefusedError as error:
                refused.append((key, str(error)))
        seconds = time.perf_counter() - begin
        with self._lock:
            self._answers += 1
            self._speed.add(sum(sizes), seconds)
            if sizes:
                self._value_bytes = sum(sizes) // len(sizes)
            self._counts["bytes_read"] += sum(sizes)
            self._counts["corrupt"] += len(refused)
            if not read.is_done:
                read.found |= payloads
        for key, reason in refused:
            self._warn(f"what it has for {key!r} was refused and deleted: {reason}")
            self.delete(key)
        return len(payloads) == len(keys)

    def _fetch(self, keys: list[str]) -> list[tuple[str, object]]:
        """Return what the store has; None is nothing."""
        get_many = getattr(self._store, "get_many", None)
        if get_many is None:
            found: dict[str, object] = {}
            for key in keys:
                with contextlib.suppress(KeyError):
                    found[key] = self._get(key)
        else:
            found = get_many(keys)
        return [(key, found[key]) for key in keys if found.get(key) is not None]

    def _get(self, key: str) -> object:
        """Return a value; of one that is too long, a part, which is refused as any that was cut."""
        if isinstance(self._store, DirectoryStore):
            return self._store.read(key, values.HEADER_SIZE + self._most_bytes + 1)
        return self._store[key]

    def _end_read(self, read: Read, failure: BaseException | None) -> str | None:
        """Judge a read, unless its caller has; return what to warn of."""
        breaker = self._reading.breaker
        is_judged, read.is_judged, read.is_done = read.is_judged, True, True
        if failure is not None:
            self._counts["errors"] += 1
            if not is_judged:
                breaker.failed()
            return _describe(failure)
        if is_judged:
            return None
        if time.monotonic() > read.begin + read.patience:  # a probe, or a read for which nobody waited so long
            return SLOW if breaker.failed() else None
        breaker.succeeded()
        return None

    # ---- writing

    def _queue_write(self, write: Write) -> bool:
        worker = self._writing
        with self._lock:
            is_probe = worker.breaker.is_open
            is_queued = (
                not self._is_closed
                and len(worker.queue) < MOST_WRITES
                and (not is_probe or worker.breaker.may_probe)
                and worker.add(write)
            )
            if is_queued:
                worker.breaker.probing = is_probe
            elif write.make_value is not None:
                self._counts["dropped"] += 1
        return is_queued

    def _work_write(self) -> None:
        with self._lock:
            writes = self._take_writes()
        failure, was_asked = None, True
        try:
            was_asked = self._write_call(writes)
        except BaseException as error:  # as above
            failure = error
        breaker = self._writing.breaker
        with self._lock:
            if failure is not None:
                self._counts["errors"] += 1
                self._counts["dropped"] += sum(write.make_value is not None for write in writes)
                breaker.failed()
            elif was_asked:
                breaker.succeeded()
            breaker.probing = False
            is_left_alone = breaker.is_open
        if failure is not None:
            self._warn(_describe(failure))
        if is_left_alone:
            self._drop_queue()

    def _take_writes(self) -> list[Write]:
        """Take a deletion, or some writes for one call of the store."""
        queue = self._writing.queue
        if not queue:  # dropped meanwhile
            return []
        writes = [queue.popleft()]
        most = 1 if writes[0].make_value is None else self._keys_per_call("set_many")
        while queue and len(writes) < most and queue[0].make_value is not None:
            writes.append(queue.popleft())
        return writes

    def _write_call(self, writes: Sequence[Write]) -> bool:
        """Make values, and store them; or delete a key. Return whether the store was asked."""
        items, num_gone = {}, 0
        for write in writes:
            if write.make_value is None:
                with contextlib.suppress(KeyError):
                    del self._store[write.key]
                return True
            value = self._make_value(write)
            if value is None:
                num_gone += 1
            else:
                items[write.key] = value
        if items and hasattr(self._store, "set_many"):
            self._store.set_many(items)
        else:
            for key, value in items.items():
                self._store[key] = value
        nbytes = sum(len(value) - values.HEADER_SIZE for value in items.values())
        with self._lock:
            if items:
                self._value_bytes = nbytes // len(items)
            self._counts["dropped"] += num_gone
            self._counts["written"] += len(items)
            self._counts["bytes_written"] += nbytes
        return bool(items)

    def _make_value(self, write: Write) -> bytes | None:
        """Return the value to store. A mistake of the caller's is not the store's failure."""
        assert write.make_value is not None
        try:
            parts = write.make_value()
            return None if parts is None else values.pack(write.key, self._digest, parts, self._secret)
        except BaseException:  # as above
            logger.exception("the value for %r could not be made, and is not stored", write.key)
            return None

    def _drop_queue(self) -> None:
        with self._lock:
            self._counts["dropped"] += sum(write.make_value is not None for write in self._writing.queue)
            self._writing.queue.clear()
            self._writing.changed.notify_all()

    def _warn(self, reason: str | None) -> None:
        """Log the first thing to warn of. Called without the lock, because a handler may do anything."""
        with self._lock:
            if reason is None or self._has_warned:
                return
            self._has_warned = True
        logger.warning(
            "the store %s fails: %s; what it does not hand out is computed, and further failures are only counted",
            self._store if isinstance(self._store, DirectoryStore | ValkeyStore) else type(self._store).__name__,
            reason,
        )


def _describe(error: BaseException) -> str:
    """Return an error's kind and message, cut short: of a store's own it might hold a value."""
    return f"{type(error).__name__}: {plain(error)}" if str(error) else type(error).__name__


# ---- all clients of the process

_clients: Living[StoreClient] = Living()


def _begin_in_child() -> None:
    for client in _clients.alive():
        client._make_workers()


def _flush_at_exit() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT
    for client in _clients.alive():
        client.flush(max(0.0, deadline - time.monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(_flush_at_exit)
