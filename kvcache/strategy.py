"""Strategies, which say what sequences are stored: the values, and the rules that `KVCache._decide` asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kvcache import system
from kvcache._core import INT32_MAX, integer
from kvcache.arguments import to_float
from kvcache.errors import RowsGoneError
from kvcache.system import readable

__all__ = ["Adaptive", "LongSequencesOnly", "Strategy"]


@dataclass(frozen=True)
class LongSequencesOnly:
    """Store a sequence once it is longer than a threshold: short sequences are cheaper to compute again.

    The length is known from the batch: the largest position of the sequence in it, plus 1. So feed a prompt in one
    batch, in whose calls `first` may cut it in pieces, or in batches of which the first is longer than the threshold. A
    batch that does not begin at `KVCache.next_position`, because the pieces before it were not stored, is a
    `RowsGoneError`.

    Parameters
    ----------
    threshold : int
        The tokens of the longest sequence that is not stored. At least 0.

    Raises
    ------
    ValueError
        If the number is too small or too large.
    TypeError
        If it is no integer.

    Examples
    --------
    Until a sequence is stored, its `KVCache.next_position` is 0, and the runner feeds all of it again:

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
    """Store a sequence while its largest size fits in free memory; each batch with the sequence decides anew.

    Free memory is what the machine has available (Linux says so in /proc/meminfo; psutil elsewhere), or the rest of a
    cgroup's limit (version 1 or 2) if that is less, plus the memory that the cache keeps for reuse. The largest size of
    a sequence is the bytes of the rows that each layer's policy keeps of `max_seq_len` tokens; without `max_seq_len`,
    of its stored tokens and the batch's. The tokens of the batch count in layers with windows, too, which hold them
    until it is committed.

    A stored sequence is dropped when its largest size exceeds ``(1 + fraction) / 2`` of the memory that would be free
    without it: the higher limit keeps a sequence from being dropped and stored in turn as free memory varies. The batch
    that drops a sequence still sees all of it. Once the batch is committed, the sequence holds nothing, its
    `KVCache.next_position` is 0, and its memory goes back to the system. To go on from another position is a
    `RowsGoneError`, as it is where the tokens before were not stored.

    Parameters
    ----------
    fraction : float, default 0.5
        The fraction of free memory that a sequence to be stored may take, above 0 and at most 1.

    Raises
    ------
    ValueError
        If `fraction` is out of range.
    TypeError
        If `fraction` is no number.
    ImportError
        If the system has no /proc/meminfo, and psutil is not installed.

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
        number = to_float(self.fraction, "fraction")
        if not 0 < number <= 1:
            raise ValueError(f"fraction={self.fraction!r}: must be above 0 and at most 1")
        object.__setattr__(self, "fraction", number)
        system.machine_memory()


Strategy: TypeAlias = Literal["always", "disabled"] | LongSequencesOnly | Adaptive


Outcome: TypeAlias = Literal["stored", "not stored", "dropped"]


class Decision(NamedTuple):
    """What happens to a sequence when the batch is committed, and the reason."""

    outcome: Outcome
    why: Callable[[], str]  # a function, because putting the reason into words takes longer than deciding


def check_all_fed(strategy: Strategy, seq_id: int, position: int, next_position: int, was_dropped: bool) -> None:
    """Raise if a batch of a sequence that holds nothing begins behind tokens that were fed and are not stored."""
    if was_dropped and position:
        raise RowsGoneError(
            f"a token at position {position} of sequence {seq_id} would see rows that are gone: the sequence was "
            "dropped or not stored, as explain() says; feed all of it, from next_position on, or clear it first"
        )
    if position > next_position and not isinstance(strategy, Adaptive):
        raise RowsGoneError(
            f"a token at position {position} of sequence {seq_id} would not see those before it: they were not stored, "
            f"as explain() says; feed all of it, from next_position, {next_position}, on, in one batch"
        )


def describe(strategy: Strategy, max_seq_len: int | None, most: int, more: int) -> list[str]:
    """Return the lines that describe a strategy.

    `most` are the bytes that a sequence of `max_seq_len` tokens may take, `more` those of a token of an open batch in
    layers that let rows go.
    """
    lines = [f"strategy: {strategy}"]
    if strategy == "disabled":
        return [*lines, "no sequence is stored"]
    if strategy == "always":
        lines.append("every sequence is stored")
    if isinstance(strategy, Adaptive) and max_seq_len is not None:
        lines.append(f"a sequence of {max_seq_len} tokens takes {readable(most)}")
    if more:
        lines.append(
            f"until it is committed, a batch takes up to {readable(more)} more for each token, in layers with windows "
            "or chunks"
        )
    return lines


def decide_never() -> Decision:
    """Decide under the strategy "disabled"."""
    return Decision("not stored", lambda: "the strategy is 'disabled'")


def decide_by_length(strategy: LongSequencesOnly, num_tokens: int) -> Decision:
    """Decide on a sequence of `num_tokens` tokens that holds nothing yet."""
    stored = num_tokens > strategy.threshold

    def why() -> str:
        words = "is" if stored else "is not"
        return f"its length, {num_tokens} tokens, {words} above the threshold of {strategy.threshold}"

    return Decision("stored" if stored else "not stored", why)


def decide_by_memory(strategy: Adaptive, needed: int, held: int, free: int, source: str) -> Decision:
    """Decide on a sequence that may need `needed` bytes and holds `held`, while `free` other bytes are free.

    `source` names the limit: the machine's or a cgroup's.
    """
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
