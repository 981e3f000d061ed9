"""`Follower`: what a cache tells of its batches and edits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol, SupportsIndex, TypeAlias

from kvcache import _core

__all__ = ["Edit", "Follower"]

Edit: TypeAlias = tuple[int | None, int, int | None, bool]  # of `Follower.edits`


class Follower(Protocol):
    """Commits the batches of a `KVCache`, and is told when rows of a sequence are changed or dropped.

    Attributes
    ----------
    edits : deque of tuple or None
        What was done to sequences and is not noted yet, oldest first: ``(seq_id, position, source, is_whole)``. The
        core appends it in the call that does it, so that nothing comes between, such as a signal's handler that raises.
        None, where whoever follows need not know.

        Rows of a sequence at positions from this one on were changed, or of every one but `source` (None). `source`:
        the rows were shared from this sequence. `is_whole`: nothing is left of what the sequence was.
    """

    @property
    def edits(self) -> deque[Edit] | None: ...  # noqa: D102

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, with the tokens to keep; None: all.

        `begin` is the time of ``time.perf_counter`` when the batch had begun.
        """

    def note_edits(self) -> None:
        """Note what is in `edits`, and remove it from there."""
