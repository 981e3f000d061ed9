"""`Fetching`: gets blocks from a store, if that takes less time than to compute them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache import _core
    from kvcache.prefix.keys import Arrays
    from kvcache.prefix.watch import Watch
    from kvcache.stores.client import StoreClient

__all__ = ["Fetching"]

FETCH_BYTES = 64 << 20  # of blocks from the store that wait to be added
MOST_WAIT = 1.0  # seconds for a block that another thread gets, which an interrupt may have kept from saying so
FIRST_SECONDS = 0.2  # to wait for the first block while nobody knows how fast the model computes


class Fetching:
    """Gets blocks of a prefix from a store; waits no longer than `timeout` seconds for it."""

    def __init__(
        self, prefix: _core.Prefix, client: StoreClient, watch: Watch, timeout: float, sizes: tuple[int, int]
    ) -> None:
        self._prefix, self._client, self._watch, self._timeout = prefix, client, watch, timeout
        self._block_size, self._nbytes = sizes  # tokens and bytes of a block
        self._getting: dict[tuple[int, str], threading.Lock] = {}  # held, for first blocks of what is read and added
        self.num_fetched = 0  # tokens

    def fetch(self, tokens: Arrays, num_tokens: int) -> None:
        """Get the full blocks of a prompt's first tokens that follow the blocks in memory."""
        num_forgets = self._client.num_forgets
        first, missing = self._prefix.missing(*tokens, num_tokens)
        timeout = self._time_for(len(missing))
        deadline = time.monotonic() + timeout
        num = at_once = max(1, FETCH_BYTES // self._nbytes)
        if self._watch.tokens_per_second is None:  # a store that hangs shows it by one block
            num, timeout = 1, min(timeout, FIRST_SECONDS)
        while missing and timeout > 0:
            with self._alone(missing[0], timeout) as is_alone:
                if is_alone and not self._fetch_part(tokens, first, missing[:num], timeout, num_forgets):
                    break
            if is_alone:  # these are there now, though not known where the store has no state behind them, either
                first, missing = first + num, missing[num:]
            else:  # fewer, as others have added some
                first, missing = self._prefix.missing(*tokens, num_tokens)
            num, timeout = at_once, deadline - time.monotonic()

    def _fetch_part(self, tokens: Arrays, first: int, names: list[str], timeout: float, num_forgets: int) -> bool:
        """Read blocks from the store and add them, up to the first missing block. Return whether all were found.

        None is added once a prompt was forgotten: it may have been read before that.
        """
        found = self._client.get_many(names, timeout, patience=self._timeout, stop_at_miss=True)
        for i, name in enumerate(names):
            with self._client.adding(num_forgets) as may_add:
                if not may_add or name not in found or not self._prefix.add(*tokens, first + i, found[name]):
                    return False
            self.num_fetched += self._block_size
        return True

    @contextmanager
    def _alone(self, name: str, timeout: float) -> Iterator[bool]:
        """Let others who need the same block next wait; or, if another gets it, wait for that one, and yield False."""
        key, own = (os.getpid(), name), threading.Lock()  # a forked child does not have its parent's threads
        own.acquire()
        other = self._getting.setdefault(key, own)
        if other is not own:
            is_done = other.acquire(timeout=min(timeout, MOST_WAIT))
            if is_done:
                other.release()
            if is_done or timeout < MOST_WAIT:
                yield False
                return
            self._getting[key] = own
        try:
            yield True
        finally:
            if self._getting.get(key) is own:
                self._getting.pop(key, None)
            own.release()

    def _time_for(self, num_blocks: int) -> float:
        """Return the seconds for which to wait for blocks from the store; 0: computing them takes no longer."""
        if not num_blocks:
            return 0.0
        rate = self._watch.tokens_per_second
        if rate is None:
            return self._timeout
        compute = num_blocks * self._block_size / rate
        fetch = self._client.seconds_for(num_blocks, num_blocks * self._nbytes)
        return 0.0 if fetch is not None and fetch >= compute else min(self._timeout, compute)
