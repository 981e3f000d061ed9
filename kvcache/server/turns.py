"""Whose answer begins next: the keys take turns, so that no key waits for all requests of another one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from kvcache.server.errors import ApiError


class Turns:
    """Lets at most `max_running` answers go on, and `max_waiting` others wait.

    The keys take turns: the first waiting answer of each key begins before the second one of any key. Once as many
    wait, only a key that has its share of the waiting answers is refused.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.num_running = self.num_waiting = 0  # answers
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}  # the next key's first

    async def begin(self, key: Hashable, may_refuse: bool = True) -> None:
        """Wait for a turn of this key, to be ended with `end`; raise `ApiError` if too many wait and it may."""
        if self.num_running < self.max_running and not self._queues:
            self.num_running += 1
            return
        share = max(1, self.max_waiting // len(self._queues.keys() | {key})) if self.max_waiting else 0
        if may_refuse and self.num_waiting >= self.max_waiting and len(self._queues.get(key, ())) >= share:
            raise ApiError("too many requests wait: try again later", status=503, code="overloaded")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(turn)
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given the turn, and does not take it
                self.end()
            raise
        finally:
            self.num_waiting -= 1

    def end(self) -> None:
        """End a turn: free ones go to the keys in order."""
        self.num_running -= 1
        while self._queues and self.num_running < self.max_running:
            key, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            del self._queues[key]
            if queue:
                self._queues[key] = queue  # behind the others
            if not turn.done():  # whoever waited may have gone away
                self.num_running += 1
                turn.set_result(None)
