"""`Follower`, which commits the batches of a `KVCache`, and `Edit`, a note of what an edit did to a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, SupportsIndex, TypeAlias

from kvcache import _core

# An edit: (seq_id, source, is_whole).  If seq_id is None, every sequence except `source` was dropped.  Otherwise seq_id
# shares rows of `source`, and is_whole says that nothing of its former rows is left.  The core appends it in the call
# that does it, so that no signal's handler comes between.
Edit: TypeAlias = tuple[int | None, int | None, bool]


class Follower(Protocol):
    """Commits the batches of a `KVCache`."""

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, with the tokens to keep; None: all.

        `begin` is the time of ``time.perf_counter`` when the batch had begun.
        """
