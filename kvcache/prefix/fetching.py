"""Get blocks from the store, and queue new ones to be written there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvcache import _core
from kvcache.errors import CacheFullError
from kvcache.prefix.tree import Node, Tree

if TYPE_CHECKING:
    from kvcache.stores.client import StoreClient

__all__ = ["Fetching"]

FETCH_BYTES = 64 << 20  # of blocks from the store that wait to be added
MOST_WAIT = 1.0  # seconds for a block that another thread adds, which an interrupt may have kept from saying so


class Fetching:
    """Carries blocks between a tree and the store, if there is one; waits no longer than a time for it."""

    def __init__(self, tree: Tree, client: StoreClient | None, timeout: float) -> None:
        self._core, self._watch, self._rows, self._block_size = tree.core, tree.watch, tree.rows, tree.block_size
        self._tree, self._client, self._timeout = tree, client, timeout
        self._adding: dict[tuple[int, bytes], threading.Event] = {}  # blocks of which rows are being copied
        self.num_fetched = 0  # tokens

    def store_new(self) -> None:
        """Queue the new full blocks to be written to the store. With the lock held."""
        for node in self._tree.take_new():
            if self._client is not None and node.end - node.begin == self._block_size:
                self._client.put(node.key.hex(), partial(self._rows.read, node.seq_id, node.begin, node.end))

    def fetch(self, keys: list[bytes], contents: list[bytes]) -> None:
        """Get blocks from the store that follow those that are there, if that takes less time than to compute them."""
        if self._client is None:
            return
        with self._watch.lock:
            path = self._tree.alive(self._tree.walk(keys))
            _core.touch(self._core, [node.seq_id for node in path])
        missing, begin = keys[len(path) :], len(path)
        timeout = self._time_for(self._client, len(missing))
        if not timeout:
            return
        deadline = time.monotonic() + timeout
        at_once = max(1, FETCH_BYTES // self._rows.nbytes(self._block_size))
        for i in range(0, len(missing), at_once):
            part = missing[i : i + at_once]
            hexes = [key.hex() for key in part]
            found = self._client.get_many(hexes, timeout, patience=self._timeout, stop_at_miss=True)
            payloads = [(key, found.get(key.hex())) for key in part]
            timeout = deadline - time.monotonic()
            if not self._import_all(path, payloads, contents[begin + i :]) or timeout <= 0:
                break

    def _time_for(self, client: StoreClient, num_blocks: int) -> float:
        """Return the seconds for which to wait for blocks from the store; 0: computing them takes no longer."""
        if not num_blocks:
            return 0.0
        rate = self._watch.tokens_per_second
        if rate is None:
            return self._timeout
        compute = num_blocks * self._block_size / rate
        fetch = client.seconds_for(num_blocks, num_blocks * self._rows.nbytes(self._block_size))
        return 0.0 if fetch is not None and fetch >= compute else min(self._timeout, compute)

    def _import_all(
        self, path: list[Node], payloads: list[tuple[bytes, memoryview | None]], contents: list[bytes]
    ) -> bool:
        """Add blocks from the store to a path, up to one that is missing, or for which there is no room.

        Rows are copied without the lock, which every commit takes. Return whether all blocks were added.
        """
        pinned, num_found = [node.seq_id for node in path], len(path)
        try:
            _core.pin(self._core, pinned, True)
            for (key, payload), content in zip(payloads, contents, strict=False):
                with self._alone(key):
                    node = self._known(key)
                    if node is None and payload is not None:
                        seq_id = self._watch.new_retained()
                        self._watch.importing.add(seq_id)
                        pinned.append(seq_id)  # first: it is made pinned
                        if self._import(seq_id, len(path) * self._block_size, payload):
                            node = self._add(key, content, path[-1] if path else self._tree.root, seq_id)
                if node is None:
                    return False
                path.append(node)
        except BaseException:
            for seq_id in pinned[num_found:][-1:]:  # perhaps no node has it yet
                self._core.clear(seq_id)
            raise
        finally:
            _core.pin(self._core, pinned, False)
            self._watch.importing.difference_update(pinned)
        return True

    @contextmanager
    def _alone(self, key: bytes) -> Iterator[None]:
        """Wait while another thread adds the same block, and let others wait: each would take memory for its rows."""
        name, added = (os.getpid(), key), threading.Event()  # a forked child does not have its parent's threads
        while (other := self._adding.setdefault(name, added)) is not added:
            if not other.wait(MOST_WAIT):
                self._adding[name] = added
        try:
            yield
        finally:
            if self._adding.get(name) is added:
                self._adding.pop(name, None)
            added.set()

    def _known(self, key: bytes) -> Node | None:
        with self._watch.lock:
            node = self._tree.by_key.get(key)
            return node if node is not None and self._tree.is_alive(node) else None

    def _import(self, seq_id: int, begin: int, payload: memoryview) -> bool:
        """Make a retained sequence, pinned, of a block's rows; return False if there is no room, or they do not fit."""
        try:
            return self._rows.write(seq_id, begin, begin + self._block_size, payload)
        except BaseException as error:
            self._core.clear(seq_id)
            if not isinstance(error, (CacheFullError, MemoryError)):
                raise
        return False

    def _add(self, key: bytes, content: bytes, parent: Node, seq_id: int) -> Node | None:
        """Add a block from the store; return None, and drop it, if the block before was dropped meanwhile."""
        with self._watch.lock, self._watch:
            if parent not in self._tree:
                self._core.clear(seq_id)
                return None
            self.num_fetched += self._block_size
            return self._tree.add(key, content, parent, seq_id, is_stored=True)
