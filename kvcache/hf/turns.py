"""`Turns`, which the `HFCache`s of one `KVCache` share: copies of a cache, and caches that a prefix cache serves."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from kvcache import _core
from kvcache.cache import KVCache
from kvcache.errors import CacheBusyError
from kvcache.threads import Condition

STALLED = 300.0  # seconds in which another thread's pass reaches no layer, after which it is taken for lost
LOOK_AGAIN = 0.05  # seconds
LONG = 2.0  # seconds without progress after which garbage is collected, once
T = TypeVar("T")


class Turn(Protocol):
    """The passes of one `HFCache`, whose batch may be open."""

    def runs_elsewhere(self) -> bool:
        """Whether a pass runs in another thread."""

    def last_active(self) -> float:
        """Return when the pass reached a layer, by ``time.monotonic``."""

    def end_for_other(self) -> None:
        """End the pass because a pass of another cache begins in the same memory."""


class Turns:
    """Knows whose batch is open, and hands out ids that no sequence has.

    A `KVCache` has one open batch at a time, and an `HFCache` keeps its batch open until somebody asks for its tokens.
    So a pass that begins ends the complete pass before it, whichever cache made it. It waits for a pass that runs in
    another thread, and for a batch whose cache another thread is collecting.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the passes of all caches
        self.changed = Condition(self.lock)  # told when one is complete or ends
        self.new_id: Callable[[], int] = itertools.count().__next__  # returns an id that no sequence has
        self.owner: Callable[[], Turn | None] = lambda: None  # returns the passes whose batch is open, if any

    @classmethod
    def of(cls, cache: KVCache) -> Turns:
        """Return the `Turns` of a cache, which its prefix caches use as well. It must not keep the cache alive."""
        with _lock:
            turns = _known.setdefault(cache, cls())
            turns.new_id = partial(_core.new_sequence, cache._core)
            return turns

    def take_turn(self, passes: Turn) -> None:
        """Make these the passes whose batch is open; call it with `lock` held."""
        begin, has_collected = time.monotonic(), False
        while (owner := self.owner()) is not None and owner is not passes and owner.runs_elsewhere():
            since = owner.last_active()
            del owner  # so that it can be collected
            self.changed.wait(LOOK_AGAIN)
            idle = time.monotonic() - max(begin, since)
            if idle > LONG and not has_collected:
                has_collected = True
                gc.collect()  # a pass that failed ends with its cache, which may lie in a cycle, such as a traceback's
            if idle > STALLED:
                raise CacheBusyError(
                    f"another thread's forward pass has reached no layer for {STALLED:.0f} s: if it failed, reset its"
                    " HFCache"
                )
        if owner is not None and owner is not passes:
            owner.end_for_other()
        self.owner = weakref.ref(passes)

    def patiently(self, call: Callable[[], T]) -> T:
        """Call what an open batch refuses, with `lock` held. Wait for a batch without an owner."""
        deadline = time.monotonic() + STALLED
        while True:
            try:
                return call()
            except CacheBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_AGAIN)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[KVCache, Turns] = weakref.WeakKeyDictionary()


def clear_finally(cache: KVCache, seq_ids: Iterable[int]) -> None:
    """Clear sequences from a finalizer, which may run in the middle of anything: without a lock of Python's."""
    if cache._core.closed:
        return
    for seq_id in seq_ids:
        cache._core.clear(seq_id, cache._edits)
