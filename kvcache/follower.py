"""`Follower`: what a cache tells of its batches and edits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, SupportsIndex

from kvcache import _core

__all__ = ["Follower"]


class Follower(Protocol):
    """Is told by a `KVCache` when a batch is committed, and when rows of a sequence are changed or dropped."""

    def commit(self, begin: float, core: _core.Batch, keeps_all: bool) -> AbstractContextManager[None]:
        """Return the context in which a batch is committed.

        `begin` is the time of ``time.perf_counter`` when the batch had begun; `keeps_all` is False if only some of its
        tokens are kept.
        """

    def edited(
        self, seq_id: int | None, position: int, *, is_moved: bool = False, source: SupportsIndex | None = None,
        is_whole: bool = False,
    ) -> None:  # fmt: skip
        """Note that rows of a sequence at positions from this one on were changed, or of every one but `source` (None).

        `is_moved`: the remaining rows were computed behind other tokens, and are not kept. `source`: the rows were
        shared from this sequence, with its inexact position. `is_whole`: nothing is left of what the sequence was.
        """

    def forget_later(self, seq_id: int) -> None:
        """Note that a finalizer cleared a sequence: it may run in the middle of anything, and takes no lock."""
