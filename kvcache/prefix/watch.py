"""Note what happens to the sequences of a cache, for the prefix caches that share its memory."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np

from kvcache import _core
from kvcache.errors import CacheBusyError
from kvcache.follower import Edit
from kvcache.living import Living

if TYPE_CHECKING:
    from kvcache.cache import KVCache

__all__ = ["Listener", "Watch", "watch_of"]

FIRST_RETAINED = 1 << 62  # ids of retained sequences, which a user hardly uses, begin here
FEW_TOKENS = 16  # batches of fewer tokens a sequence say nothing about the speed of prompts


class Listener(Protocol):
    """A part of a prefix cache, which is told what happens to sequences; with the lock of its `Watch` held."""

    def fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Retain the blocks that a batch fills; by sequence, the positions of its tokens."""

    def undo_fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Drop the blocks that were retained of a batch which could not be committed."""

    def filled(self) -> None:
        """Note that a batch was committed, whose blocks were retained."""

    def edited(self, seq_id: int | None, position: int) -> None:
        """Note that rows of a sequence from a position on were changed; None: all sequences are gone."""

    def start_over(self) -> None:
        """Forget all blocks, whose rows are dropped: a change was broken off, and left who knows what."""


class Watch:
    """The `Follower` of a cache that has prefix caches: calls these around each commit, and after each edit.

    A change of what prefix caches keep is made ``with watch.lock, watch:``. If an exception ends it, such as a signal's
    handler raises anywhere, the next change begins by forgetting all that they keep, for it may be half done.
    """

    def __init__(self, core: _core.Cache) -> None:
        self.lock = threading.RLock()  # guards the prefix caches of the cache; held briefly
        self.tokens_per_second: float | None = None  # of batches of many tokens, recent ones counting most
        self.edits: deque[Edit] = deque()
        self.importing: set[int] = set()  # retained sequences that no listener knows yet, and that are wanted
        self.is_torn = False  # a change was broken off
        self._core = core
        self._listeners: Living[Listener] = Living()
        self._retained = itertools.count(FIRST_RETAINED)
        self._sequences = itertools.count()
        _watches.add(self)

    def add(self, listener: Listener) -> None:
        """Call this prefix cache as long as it exists."""
        with self.lock:
            self._listeners.add(listener)

    def new_retained(self) -> int:
        """Return an id for a retained sequence: one that nobody uses."""
        return self._next_unused(self._retained)

    def new_sequence(self) -> int:
        """Return an id for a sequence that nobody uses."""
        return self._next_unused(self._sequences)

    def _next_unused(self, ids: Iterator[int]) -> int:
        return next(seq_id for seq_id in ids if not self._is_used(seq_id))

    def _is_used(self, seq_id: int) -> bool:
        """Whether a sequence holds anything, or has tokens in the open batch."""
        if self._core.seq_len(seq_id, None) or self._core.next_position(seq_id):
            return True
        try:
            self._core.remove(seq_id, 0, 0, False)  # raises if a batch has the sequence
        except CacheBusyError:
            return True
        return False

    def __enter__(self) -> None:
        """Begin a change, with the lock held: note the edits, and forget what may be half done."""
        if self._core.closed:
            return
        if self.is_torn:
            self._start_over()
        while self.edits:
            edit = self.edits[0]
            seq_id, position, *_ = edit
            for listener in self._listeners.alive():
                listener.edited(seq_id, position)
            if self.edits and self.edits[0] is edit:  # else a finalizer came in between, and did the same
                self.edits.popleft()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, MemoryError):  # which leaves all as it was
            self.is_torn = True

    def _start_over(self) -> None:
        for listener in self._listeners.alive():
            listener.start_over()
        for seq_id in set(_core.retained(self._core)) - self.importing:
            self._core.clear(seq_id)
        self.is_torn = False

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Retain the blocks that a batch fills around its commit: before it, unless only some of its tokens are kept.

        Once it is committed, another thread's batch may begin, for which rows expire that no window reaches any
        more.
        """
        seq_ids, whose = np.unique(core.get_seq_ids(), return_inverse=True)
        first, last = np.full(len(seq_ids), _core.INT32_MAX), np.full(len(seq_ids), -1)
        np.minimum.at(first, whose, core.positions)
        np.maximum.at(last, whose, core.positions)
        bounds = zip(first.tolist(), (last + 1).tolist(), strict=True)
        ranges = dict(zip(seq_ids.tolist(), bounds, strict=True))
        with self.lock:
            with self:
                listeners = self._listeners.alive()
                for listener in listeners if keep is None else ():
                    listener.fill(ranges)
            try:
                core.commit(keep)
            except BaseException:  # it may be committed, too, as when a signal came meanwhile
                with self:
                    for listener in listeners:
                        listener.undo_fill(ranges)
                raise
            with self:
                if keep is not None:
                    ranges = {seq_id: (low, self._core.next_position(seq_id)) for seq_id, (low, _) in ranges.items()}
                    for listener in listeners:
                        listener.fill(ranges)
                for listener in listeners:
                    listener.filled()
        if core.num_tokens >= FEW_TOKENS * len(seq_ids):
            self._measure(core.num_tokens, time.perf_counter() - begin)

    def _measure(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            rate, before = num_tokens / seconds, self.tokens_per_second
            self.tokens_per_second = rate if before is None else before + (rate - before) / 4

    # ---- edits

    def note_edits(self) -> None:
        """Pass on what `edits` says."""
        with self.lock, self:
            pass


_making = threading.Lock()
_watches: Living[Watch] = Living()
_held: list[Watch] = []  # while the process forks


def watch_of(cache: KVCache) -> Watch:
    """Return the watch of a cache; the first call makes it."""
    with _making:
        watch = cache._follower
        if not isinstance(watch, Watch):
            watch = cache._follower = Watch(cache._core)
        return watch


def _hold_all() -> None:
    """Let no other thread be in the middle of a change when the process forks."""
    _making.acquire()
    for watch in _watches.alive():
        watch.lock.acquire()
        _held.append(watch)


def _release_all() -> None:
    while _held:
        _held.pop().lock.release()
    _making.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
