"""What the `HFCache`s of one `KVCache` share: the copies of one, and those that one prefix cache serves."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvcache.errors import CacheBusyError

if TYPE_CHECKING:
    from kvcache.cache import KVCache
    from kvcache.hf.cache import HFCache

STALLED = 300.0  # seconds in which another thread's pass reaches no layer, after which it is taken for lost
LOOK_AGAIN = 0.05  # seconds
LONG = 2.0  # seconds without progress after which garbage is collected, once


class Shared:
    """Knows whose batch is open, and hands out ids that no sequence has.

    A `KVCache` has one open batch at a time, and an `HFCache` keeps its batch open until somebody asks for its tokens.
    So a pass that begins ends the complete pass before it, whosever that is, and waits for one that runs in another
    thread.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards the passes of all caches; told when one is complete or ends
        self.new_id: Callable[[], int] = itertools.count().__next__  # returns an id that no sequence has
        self._owner: Callable[[], HFCache | None] = lambda: None  # returns the cache whose batch is open, if any

    @classmethod
    def of(cls, cache: KVCache, new_id: Callable[[], int]) -> Shared:
        """Return the one of a cache that others may use as well."""
        with _lock:
            shared = _known.setdefault(cache, cls())
            shared.new_id = new_id
            return shared

    def take_turn(self, cache: HFCache) -> None:
        """Make a cache the one whose batch is open; call it with `changed` held."""
        begin, has_collected = time.monotonic(), False
        while (owner := self._owner()) is not None and owner is not cache and owner.runs_elsewhere():
            since = owner.last_active()
            del owner  # so that it can be collected
            self.changed.wait(LOOK_AGAIN)
            idle = time.monotonic() - max(begin, since)
            if idle > LONG and not has_collected:
                has_collected = True
                gc.collect()  # a pass that failed ends with its cache, which lies in a cycle with its layers
            if idle > STALLED:
                raise CacheBusyError(
                    f"another thread's forward pass has reached no layer for {STALLED:.0f} s: if it failed, reset its"
                    " HFCache"
                )
        if owner is not None and owner is not cache:
            owner.end_for_other()
        self._owner = weakref.ref(cache)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[KVCache, Shared] = weakref.WeakKeyDictionary()


def clear_finally(cache: KVCache, seq_ids: Iterable[int]) -> None:
    """Clear sequences from a finalizer, which may run in the middle of anything: without a lock of Python's."""
    if cache._core.closed:
        return
    for seq_id in seq_ids:
        cache._core.clear(seq_id)
        if cache._follower is not None:
            cache._follower.forget_later(seq_id)
