"""`Watch`: carries new blocks of a cache's prefix caches to their stores, and measures how fast a model computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex

from kvcache import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcache.cache import KVCache
    from kvcache.stores.client import StoreClient

__all__ = ["Watch", "payload_of", "watch_of"]

FEW_TOKENS = 16  # batches of fewer tokens a sequence say nothing about the speed of prompts


class Watch:
    """Commits the batches of a cache whose prefix caches have stores."""

    def __init__(self, core: _core.Cache) -> None:
        self.tokens_per_second: float | None = None  # of batches of many tokens, recent ones counting most
        self._core = core
        self._clients: dict[int, tuple[StoreClient, Callable[[str], object] | None]] = {}  # by `Prefix.user`
        self._new: deque[tuple[int, str, int]] = deque()  # blocks that wait to be queued
        self._lock = threading.RLock()  # guards the order in which they are

    def add(self, prefix: _core.Prefix, client: StoreClient, written: Callable[[str], object] | None) -> None:
        """Write the new blocks of a prefix to a store from now on; call `written` with the name of each that is."""
        self._clients[prefix.user] = client, written

    def discard(self, user: int) -> None:
        """Forget a prefix that is no more."""
        self._clients.pop(user, None)

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, and queue the blocks that it fills to be written."""
        try:
            core.commit(keep)
        finally:  # it may be committed, too, as when a signal came meanwhile
            self.store_new()
        num_tokens = core.num_tokens
        if num_tokens >= FEW_TOKENS and num_tokens >= FEW_TOKENS * len(set(core.get_seq_ids().tolist())):
            self._measure(num_tokens, time.perf_counter() - begin)

    def store_new(self) -> None:
        """Queue the new full blocks to be written to their stores."""
        _core.take_new_blocks(self._core, self._new)
        if not self._new:
            return
        with self._lock:
            while self._new:
                user, name, block_id = self._new[0]
                if user in self._clients:
                    client, written = self._clients[user]
                    client.put(name, partial(payload_of, self._core, block_id), written)
                self._new.popleft()  # last: a signal's handler that raises before loses nothing

    def _measure(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            rate, before = num_tokens / seconds, self.tokens_per_second
            self.tokens_per_second = rate if before is None else before + (rate - before) / 4


def payload_of(core: _core.Cache, block_id: int) -> list[Buffer] | None:
    """Return the payload of a block; None if it is gone, or the cache is closed."""
    try:
        payload = _core.read_block(core, block_id)
    except ValueError:
        if core.closed:
            return None
        raise
    return None if payload is None else [payload]


_making = threading.Lock()


def watch_of(cache: KVCache) -> Watch:
    """Return the watch of a cache; the first call makes it."""
    with _making:
        watch = cache._follower
        if not isinstance(watch, Watch):
            watch = cache._follower = Watch(cache._core)
        return watch
