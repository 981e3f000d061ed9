"""Which sequences are stored at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple, SupportsFloat, TypeAlias

from kvcache import system
from kvcache._core import INT32_MAX, integer
from kvcache.system import readable

__all__ = ["Adaptive", "LongSequencesOnly", "Strategy"]


@dataclass(frozen=True)
class LongSequencesOnly:
    """Store a sequence once it is longer than so many tokens: short ones are cheaper to compute again.

    Parameters
    ----------
    threshold : int
        The most tokens that a sequence may have and still not be stored. At least 0.

    Raises
    ------
    ValueError
        If the number is too small or too large.
    TypeError
        If it is no integer.

    Examples
    --------
    Until then `KVCache.next_position` is 0, and the runner feeds the whole sequence:

    >>> import numpy as np
    >>> import kvcache
    >>> cache = kvcache.KVCache(1, 1, 8, 64, strategy=kvcache.LongSequencesOnly(2))
    >>> for length in (1, 2, 3, 4):
    ...     first = cache.next_position()
    ...     x = np.ones((length - first, 1, 8), np.float32)
    ...     with cache.batch(length - first) as batch:
    ...         out = batch.attend(0, x, x, x)
    ...     print(first, cache.seq_len())
    0 0
    0 0
    0 3
    3 4
    """

    threshold: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", integer(self.threshold, "threshold", 0, INT32_MAX))


@dataclass(frozen=True)
class Adaptive:
    """Store a sequence while there is memory enough for all that it may come to, as each of its batches decides anew.

    Free memory is what psutil says is available, or less where a cgroup of the process, of version 1 or 2, has less
    left, and what the cache keeps for reuse. A sequence may come to `max_seq_len` rows in each layer, as far as its
    policy keeps them; where there is no `max_seq_len`, to the tokens it has and those of the batch.

    A sequence that is stored is dropped where it may come to more than ``(1 + fraction) / 2`` of what would be free
    without it, so that one does not come and go as memory does. The batch that decides so still sees all of it; once it
    is committed the sequence holds nothing, its `KVCache.next_position` is 0, and its memory goes back to the system.
    To go on from another position is a `RowsGoneError`.

    Parameters
    ----------
    fraction : float, default 0.5
        How much of the memory that is free a sequence may take that is to be stored, above 0 and at most 1.

    Raises
    ------
    ValueError
        If it is out of range.
    TypeError
        If it is no number.
    ImportError
        If psutil is not installed.

    Examples
    --------
    >>> import kvcache
    >>> cache = kvcache.KVCache(32, 8, 128, 8192, strategy=kvcache.Adaptive(0.25))
    >>> print(cache.explain())
    strategy: Adaptive(fraction=0.25)
    a sequence of 8192 tokens takes 1.0 GiB
    """

    fraction: float = 0.5

    def __post_init__(self) -> None:
        fraction: SupportsFloat = self.fraction
        try:
            if isinstance(fraction, bool | str):
                raise TypeError
            number = float(fraction)
        except (TypeError, ValueError):
            raise TypeError(f"fraction={fraction!r}: a number is needed, not {type(fraction).__name__}") from None
        if not isfinite(number) or not 0 < number <= 1:
            raise ValueError(f"fraction={fraction!r}: must be above 0 and at most 1")
        object.__setattr__(self, "fraction", number)
        system.import_psutil()


Strategy: TypeAlias = Literal["always", "disabled"] | LongSequencesOnly | Adaptive


Outcome: TypeAlias = Literal["stored", "not stored", "dropped"]


class Decision(NamedTuple):
    """What becomes of a sequence when the batch is committed, and why."""

    outcome: Outcome
    why: Callable[[], str]  # who asks is told; putting it into words takes longer than deciding


def decide_never() -> Decision:
    """Decide as "disabled" does."""
    return Decision("not stored", lambda: "the strategy is 'disabled'")


def decide_by_length(strategy: LongSequencesOnly, num_tokens: int) -> Decision:
    """Decide on a sequence that holds nothing, and has so many tokens."""
    stored = num_tokens > strategy.threshold

    def why() -> str:
        words = "is" if stored else "is not"
        return f"its length, {num_tokens} tokens, {words} above the threshold of {strategy.threshold}"

    return Decision("stored" if stored else "not stored", why)


def decide_by_memory(strategy: Adaptive, needed: int, held: int, free: int, source: str) -> Decision:
    """Decide on a sequence that may come to so many bytes and holds some of them, where so many others are free."""
    fraction = (1 + strategy.fraction) / 2 if held else strategy.fraction
    most = int((free + held) * fraction)

    def why() -> str:
        words = "which is at most" if needed <= most else "which is more than"
        where = "would be free without it" if held else "are free"
        return (
            f"it may come to {readable(needed)}, {words} {readable(most)}, the fraction {fraction:g} of the "
            f"{readable(free + held)} that {where} ({source})"
        )

    return Decision("stored" if needed <= most else "dropped" if held else "not stored", why)
