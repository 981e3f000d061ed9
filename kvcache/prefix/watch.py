"""`Watch`: carries new blocks of a cache's prefix caches to their stores.

The core lists new full blocks, each with the number of its prefix (`Prefix.user`), its name, and an id. The id says
later, in the thread that writes, which rows to copy.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, SupportsIndex

from kvcache import _core
from kvcache.threads import Living

if TYPE_CHECKING:
    from kvcache.cache import KVCache


class Owner(Protocol):
    """A prefix cache."""

    def _begin_in_child(self) -> None: ...


class _Written(NamedTuple):
    """A prefix whose new blocks are written to a store."""

    owner: weakref.ref[Owner]  # the prefix cache, which blocks that wait to be written keep alive
    put: Callable[..., object]  # queues a block


class Watch:
    """Commits the batches of a cache whose prefix caches have stores."""

    def __init__(self, core: _core.Cache) -> None:
        self._core = core  # the cache
        self._written: dict[int, _Written] = {}  # by `Prefix.user`
        self._new: deque[tuple[int, str, int]] = deque()  # blocks to be queued: number of the prefix, name, id
        self.begin()
        _watches.add(self)

    def begin(self) -> None:
        """Begin with locks that nobody has; again in a forked child, which lacks the threads that may have had them."""
        self._lock = threading.RLock()  # guards the order in which they are
        self.forgetting = threading.RLock()  # held while a prefix cache takes the names of blocks that it forgets
        for written in self._written.values():
            if (owner := written.owner()) is not None:
                owner._begin_in_child()

    def add(self, user: int, owner: Owner, put: Callable[..., object]) -> None:
        """Write the new blocks of a prefix from now on: by `put`, with the name of each and how to make its value.

        Each block that waits to be written keeps the owner alive, and so all its blocks stay.
        """
        self._written[user] = _Written(weakref.ref(owner), put)

    def discard(self, user: int) -> None:
        """Forget a prefix that is no more."""
        self._written.pop(user, None)

    def commit(self, _begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, and queue the blocks that it fills to be written."""
        try:
            core.commit(keep)
        finally:  # it may be committed, too, as when a signal came meanwhile
            self.store_new()

    def store_new(self) -> None:
        """Queue the new full blocks to be written to their stores."""
        _core.take_new_blocks(self._core, self._new)
        if not self._new:
            return
        with self._lock:
            while self._new:
                user, name, block_id = self._new[0]
                found = self._written.get(user)
                owner = None if found is None else found.owner()
                if found is not None and owner is not None:
                    found.put(name, partial(value_of, self._core, block_id, name, owner))
                self._new.popleft()  # last: a signal's handler that raises before loses nothing


def value_of(core: _core.Cache, block_id: int, name: str, owner: object, stored: bytes | None) -> bytes | None:
    """Return the value of a block, joined with the stored one; b"" if that has all of it, None if the block is gone.

    A block stays while its owner is alive and the cache is open.
    """
    try:
        return _core.pack_block(core, block_id, bytes.fromhex(name), stored)
    except ValueError:
        if core.closed:
            return None
        raise


_watches: Living[Watch] = Living()
_making = threading.Lock()


def _begin_in_child() -> None:
    global _making
    _making = threading.Lock()
    for watch in _watches.alive():
        watch.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


def watch_of(cache: KVCache) -> Watch:
    """Return the watch of a cache; the first call makes it."""
    with _making:
        watch = cache._follower
        if not isinstance(watch, Watch):
            watch = cache._follower = Watch(cache._core)
        return watch
