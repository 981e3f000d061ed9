"""What commits the batches of a `KVCache`, and what is noted of its edits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, SupportsIndex, TypeAlias

from kvcache import _core

__all__ = ["Edit", "Follower"]

# What an edit did: (seq_id, source, is_whole).  seq_id None: every sequence but `source` was dropped.  Else `source` is
# the one that rows were shared from, and is_whole says that nothing is left of what seq_id was.  The core appends it in
# the call that does it, so that no signal's handler comes between.
Edit: TypeAlias = tuple[int | None, int | None, bool]


class Follower(Protocol):
    """Commits the batches of a `KVCache`."""

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, with the tokens to keep; None: all.

        `begin` is the time of ``time.perf_counter`` when the batch had begun.
        """
