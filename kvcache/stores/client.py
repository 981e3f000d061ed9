"""Stand between prefix caches and a store, so that a fault of the store costs speed and nothing else.

The client calls the store's methods in its own threads: a few read, and one writes and deletes. So neither waits for
the other. Callers wait for reads no longer than they say, and never for writes. Reading and writing have a circuit
breaker each. After some failures in a row the store is left alone for a while, then asked once more, in the background.
Each further failure doubles the while, up to a limit. A store that is full still reads.

All clients of one store share these threads, queues and breakers, and a value that one of them is reading is not read
again. Each client is a tenant. A value that is refused, by the client or whoever asked for it, is deleted. A key is
doomed while its value waits to be deleted, because a cache has forgotten its rows: it counts as missing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvcache.arguments import INT64_MAX
from kvcache.errors import described
from kvcache.stores import calls
from kvcache.stores.doomed import Doomed
from kvcache.stores.reader import Reader
from kvcache.stores.tenant import Tenant
from kvcache.stores.writer import Write, Writer

EXIT_TIMEOUT = 1.0  # seconds for which the interpreter's exit waits for writes

logger = logging.getLogger("kvcache")


@dataclass(frozen=True)
class StoreStats:
    """Counts of what a prefix cache and its store did.

    A key that several prefix caches ask for at once is read for one of them. That one counts the bytes, errors and
    refused values. `reading` and `writing` are the store's, whoever uses it.

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
        Values that were not written: 262,144 were waiting, the store failed or
        was left alone, the cache was closed, or their rows were dropped before.
    written : int
        Values that were written.
    bytes_read, bytes_written : int
        The bytes of the values that the store handed out and took.
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
    reading: bool = True
    writing: bool = True


class StoreClient:
    """Reads from and writes to a store, within bounded time and memory, whatever the store does.

    A few threads use the store at once, for all its clients, and for many keys in one call if it has the methods
    (`kvcache.stores`). No value has more than `most_bytes`: of a longer one, a store with `read_many` reads one byte
    more.

    >>> client = StoreClient({})
    >>> client.put("a key", lambda stored: b"some rows")
    True
    >>> client.flush(timeout=10)
    True
    >>> client.get_many(["a key", "another"], timeout=10)
    {'a key': b'some rows'}
    >>> client.stats.hits, client.stats.misses
    (1, 1)
    """

    def __init__(self, store: MutableMapping[str, bytes], *, most_bytes: int = INT64_MAX - 1) -> None:
        self._tenant = Tenant(most_bytes)  # who reads and writes here
        self._looker = Tenant(most_bytes, only_keys=True)  # for `count`
        self._shared = _shared(store)  # with all clients of the store

    def get_many(
        self, keys: Iterable[str], timeout: float, *, patience: float | None = None, stop_at_miss: bool = False
    ) -> dict[str, bytes]:
        """Return the values that the store hands out for these keys within `timeout` seconds; others are misses.

        Keys are read in this order. Doomed keys are misses, and answers that come later are dropped. With
        `stop_at_miss`, reading ends at the first miss, as keys behind it are of no use; the result may still have some
        of them. The store has failed if it has not answered within `patience` seconds, by default `timeout`: give more
        than `timeout` to wait less than the store may take. If clients differ, the longest patience counts.
        """
        timeout = min(timeout, threading.TIMEOUT_MAX)
        patience = timeout if patience is None else patience
        readable = self._shared.doomed.readable(keys, stop_at_miss)
        return self._shared.reader.get_many(self._tenant, readable, timeout, patience, stop_at_miss)

    def count(self, keys: Sequence[str], timeout: float) -> int:
        """Return how many of the first keys the store has, as far as it says so in time; no value is read."""
        timeout = min(timeout, threading.TIMEOUT_MAX)
        readable = self._shared.doomed.readable(keys, True)
        found = self._shared.reader.get_many(self._looker, readable, timeout, timeout, True)
        return next((i for i, key in enumerate(keys) if key not in found), len(keys))

    def refuse(self, key: str, reason: str) -> None:
        """Count a value that was handed out as corrupt, and as a miss, and delete it."""
        with self._shared.lock:
            self._tenant.counts.update(hits=-1, misses=1, corrupt=1)
        self._shared.refuse(self._tenant, key, reason)

    def put(
        self,
        key: str,
        make_value: Callable[[bytes | None], bytes | None],
        written: Callable[[str], object] | None = None,
        *,
        joins: bool = False,
    ) -> bool:
        """Queue a value to be written, and return whether it was queued; never wait.

        `make_value` gets the value that the store has, if it `joins` them, or None. It returns the value to write, b""
        if there is no need, or None if it is gone. It is called later, in the thread that writes, unless the value is
        dropped before. `written`, which must not raise, is called with the key once the store has the value. If the key
        is doomed, it is read again once the value is stored.
        """
        number = self._shared.doomed.number(key)
        return self._shared.writer.add(Write(self._tenant, key, make_value, written, joins, number))

    def delete(self, key: str) -> bool:
        """Queue the deletion of a key, after the writes that were queued before; return whether it was queued."""
        return self._shared.writer.add(Write(self._tenant, key, None))

    @property
    def num_forgets(self) -> int:
        """The number for `adding`: take it before anything is read."""
        return self._shared.doomed.num_forgets

    def adding(self, num_forgets: int) -> AbstractContextManager[bool]:
        """Open a context that yields whether to add to a cache what was read when `num_forgets` was this.

        It is False if anything was forgotten since. `forgetting` waits for the end of the context.
        """
        return self._shared.doomed.adding(num_forgets)

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[Callable[[Iterable[str]], None]]:
        """Let nobody add what was read until the end of this context; yield a function that takes keys to delete.

        These keys are doomed: no client of the store reads them until they are deleted, see `delete_doomed`.
        """
        try:
            with self._shared.doomed.forgetting(self._tenant) as take:
                yield take
        finally:
            self._shared.stay()

    def doom(self, keys: Iterable[str]) -> None:
        """Doom keys in a forked child, in place of the thread of its parent that was forgetting them."""
        self._shared.doomed.take(keys, self._tenant)

    def delete_doomed(self) -> None:
        """Queue the deletion of all doomed keys, also of those that the store failed to delete before."""
        for key, number in self._shared.doomed.items():
            self._shared.delete(self._tenant, key, number)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued is written or dropped, at most for so many seconds; return whether it is.

        Return False, too, if something that was forgotten is not deleted. `StoreStats.dropped` says whether any value
        was dropped.
        """
        return self._shared.writer.flush(timeout, self._tenant) and not self._shared.doomed.has_any(self._tenant)

    def close(self, timeout: float) -> bool:
        """Take nothing more, and flush; drop what is not written by then. Return what `flush` does.

        From now on every key is a miss. The store itself stays open, and so do its other clients.
        """
        with self._shared.lock:
            self._tenant.is_closed = self._looker.is_closed = True
        is_done = self.flush(timeout)
        self._shared.writer.drop(self._tenant)
        return is_done

    @property
    def stats(self) -> StoreStats:
        """What has happened so far."""
        shared = self._shared
        with shared.lock:
            return StoreStats(
                **self._tenant.counts,
                reading=not shared.reader.worker.breaker.is_open,
                writing=not shared.writer.worker.breaker.is_open,
            )


# ---- what all clients of a store have in common


class _Shared:
    """A store, the threads that use it, and the one warning of it."""

    def __init__(self, store: MutableMapping[str, bytes]) -> None:
        self.store = store
        self.has_warned = False
        self.doomed = Doomed()  # keys that were forgotten, and are not deleted yet
        self.begin()

    def begin(self) -> None:
        """Begin without threads, and with empty queues; again in a forked child, which has no other threads."""
        self.doomed.begin()
        self._deletions: dict[str, tuple[int, Write]] = {}  # of doomed keys: number and deletion queued last
        self.lock = threading.RLock()  # a garbage collection may run anything while it is held
        self.reader = Reader(self.store, self.lock, self.warn, self.refuse)
        self.writer = Writer(self.store, self.lock, self.warn, self.doomed, self._settle)

    def delete(self, tenant: Tenant, key: str, number: int) -> None:
        """Queue the deletion of a doomed key, unless this forgetting has queued it already."""
        with self.lock:
            before, write = self._deletions.get(key, (0, None))
            if before == number and write is not None and not write.is_ended:
                return
            write = Write(tenant, key, None, forgetting=number, is_counted=False)
            if self.writer.add(write):
                self._deletions[key] = number, write

    def _settle(self, key: str, number: int) -> None:
        """Let a key be read again that was deleted, or written anew, after the forgetting of this number."""
        with self.lock:
            self.reader.cut(key)
            if self._deletions.get(key, (0, None))[0] == number:
                del self._deletions[key]
        self.doomed.discard(key, number)
        self.stay()

    def stay(self) -> None:
        """Stay while keys are doomed, though no client may be left: nobody who opens this store later may read them."""
        with _lock:
            (_staying.add if self.doomed else _staying.discard)(self)

    def refuse(self, tenant: Tenant, key: str, reason: str) -> None:
        """Delete a value that is not what was stored."""
        self.writer.add(Write(tenant, key, None, is_counted=False))
        self.warn(f"what it has for {key!r} was refused and deleted: {reason}")

    def warn(self, reason: str | BaseException | None) -> None:
        """Log the first thing to warn of. Called without the lock, because a handler may do anything."""
        with self.lock:
            if reason is None or self.has_warned:
                return
            self.has_warned = True
        with contextlib.suppress(Exception):  # of a handler
            logger.warning(
                "the store %s fails: %s; what it does not hand out is computed, and further failures are only counted",
                calls.name_of(self.store),
                reason if isinstance(reason, str) else described(reason),
            )


# By the id of the store, which may be of a kind that can neither be hashed nor referred to weakly.
_all: weakref.WeakValueDictionary[int, _Shared] = weakref.WeakValueDictionary()
_staying: set[_Shared] = set()  # those that live on without a client
_lock = threading.RLock()  # as above


def _shared(store: MutableMapping[str, bytes]) -> _Shared:
    with _lock:
        found = _all.get(id(store))
        if found is None:
            found = _all[id(store)] = _Shared(store)
        return found


def _alive() -> list[_Shared]:
    return [shared for ref in _all.valuerefs() if (shared := ref()) is not None]


def _begin_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for shared in _alive():
        shared.begin()


def _flush_at_exit() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT
    for shared in _alive():
        shared.writer.flush(max(0.0, deadline - time.monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(_flush_at_exit)
