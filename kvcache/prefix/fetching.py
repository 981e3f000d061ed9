"""`Fetching`: gets blocks from a store.

Threads that need the same blocks take turns: the one that holds the lock of the first block reads and adds them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache import _core
    from kvcache.prefix.keys import Arrays
    from kvcache.stores.client import StoreClient

FETCH_BYTES = 64 << 20  # of blocks from the store that wait to be added
MOST_WAIT = 1.0  # seconds for a block that another thread gets, which an interrupt may have kept from saying so


class Fetching:
    """Gets blocks of a prefix from a store; waits no longer than `timeout` seconds for it.

    `num_forgets` of the client rises when a prompt is forgotten. Blocks that were read before it rose are not added.
    """

    def __init__(self, prefix: _core.Prefix, client: StoreClient, timeout: float, block_size: int, nbytes: int) -> None:
        self._prefix, self._client, self._timeout = prefix, client, timeout
        self._block_size, self._nbytes = block_size, nbytes  # nbytes: of a value
        self._getting: dict[tuple[int, str], threading.Lock] = {}  # held, for first blocks of what is read and added
        self.num_fetched = 0  # tokens

    def fetch(self, tokens: Arrays, num_tokens: int) -> None:
        """Get the full blocks of a prompt's first tokens that follow the blocks in memory."""
        num_forgets = self._client.num_forgets
        missing = self._missing(tokens, num_tokens)
        timeout, deadline = self._timeout, time.monotonic() + self._timeout
        num = max(1, FETCH_BYTES // self._nbytes)
        while missing and timeout > 0:
            with self._alone(missing[0], timeout) as is_alone:
                if is_alone and not self._fetch_part(tokens, num_tokens, missing[:num], timeout, num_forgets):
                    break
            # If this thread added the part, the rest is left. `_missing` might list the part again: with recurrent
            # states, known tokens end at the last state. Otherwise another thread may have added some.
            missing = missing[num:] if is_alone else self._missing(tokens, num_tokens)
            timeout = deadline - time.monotonic()

    def _missing(self, tokens: Arrays, num_tokens: int) -> list[str]:
        """Return the names of the full blocks behind the known ones, among the first tokens of a prompt."""
        ids, digests = tokens
        first = ids[:num_tokens], None if digests is None else digests[:num_tokens]
        num_known = self._prefix.lookup(*first)[0] // self._block_size
        return self._prefix.names(*first)[num_known:] if num_known < num_tokens // self._block_size else []

    def _fetch_part(self, tokens: Arrays, num_tokens: int, names: list[str], timeout: float, num_forgets: int) -> bool:
        """Read blocks from the store and add them, up to the first missing block. Return whether all were found.

        None is added once a prompt was forgotten: it may have been read before that.
        """
        found = self._client.get_many(names, timeout, patience=self._timeout, stop_at_miss=True)
        there = [*takewhile(found.__contains__, names)]
        with self._client.adding(num_forgets) as may_add:
            if not may_add or not there:
                return False
            values = [found[name] for name in there]
            fetched, num_used, refusal = self._prefix.fetch(*tokens, num_tokens, bytes.fromhex("".join(there)), values)
        self.num_fetched += fetched
        if refusal is not None:
            self._client.refuse(there[num_used - 1], refusal)
        return refusal is None and num_used == len(names)

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
