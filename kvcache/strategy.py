"""Strategies, which say what sequences are stored: the values, and `Decider`, which decides for a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache import _core, system
from kvcache._core import INT32_MAX, integer
from kvcache.arguments import spelt, to_float
from kvcache.errors import RowsGoneError
from kvcache.follower import Edit
from kvcache.layer import Sizes
from kvcache.system import readable


@spelt
@dataclass(frozen=True)
class LongSequencesOnly:
    """Store a sequence once it is longer than a threshold: short sequences are cheaper to compute again.

    The length is known from the batch: the largest position of the sequence in it, plus 1. So feed a prompt in one
    batch, in whose calls `first` may cut it in pieces, or in batches of which the first is longer than the threshold. A
    batch that does not begin at `KVCache.next_position`, because the pieces before it were not stored, is a
    `RowsGoneError`. Until it ends, a batch takes the memory of its rows in all layers, stored or not, and counts for
    every limit.

    Parameters
    ----------
    threshold : int
        The tokens of the longest sequence that is not stored. At least 0.

    Raises
    ------
    ValueError, TypeError
        If the number is too small or too large, or no integer.

    Examples
    --------
    Until a sequence is stored, its `KVCache.next_position` is 0, and the runner feeds all of it again:

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


@spelt
@dataclass(frozen=True)
class Adaptive:
    """Store a sequence while its largest size fits in free memory; each batch with the sequence decides anew.

    Free memory is the machine's available memory, or the rest of a cgroup's limit (version 1 or 2) if that is less.
    Memory that the cache keeps for reuse is added. Linux tells available memory in /proc/meminfo, psutil elsewhere. The
    largest size of a sequence is the bytes of the rows that each layer's policy keeps of `max_seq_len` tokens; without
    `max_seq_len`, of its stored tokens and the batch's. The tokens of the batch count in layers with windows, too,
    which hold them until it is committed.

    A stored sequence is dropped when its largest size exceeds ``(1 + fraction) / 2`` of the memory that would be free
    without it. The higher limit keeps a sequence from being dropped and stored in turn while free memory varies. The
    batch that drops a sequence still sees all of it. Once the batch is committed, the sequence holds nothing, its
    `KVCache.next_position` is 0, and its memory goes back to the system. A batch that continues from another position
    raises `RowsGoneError`, as it does if earlier tokens were not stored.

    A sequence that is not stored still needs memory for its batch, in all layers, until the batch ends. 512 tokens of
    32 layers with 8 KV heads of 128 take 64 MiB in f16. If that is too much, take the strategy ``"always"``, feed fewer
    tokens at a time, and clear the sequence at the end.

    Parameters
    ----------
    fraction : float, default 0.5
        The fraction of free memory that a sequence to be stored may take, above 0 and at most 1.

    Raises
    ------
    ValueError, TypeError
        If `fraction` is out of range, or no number.
    ImportError
        If the system has no /proc/meminfo, and psutil is not installed.

    Examples
    --------
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
    """The fate of a sequence when the batch is committed, and the reason."""

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


def describe(strategy: Strategy, sizes: Sizes) -> list[str]:
    """Return the lines that describe a strategy of a cache whose layers have these sizes."""
    lines = [f"strategy: {strategy}"]
    if strategy == "disabled":
        return [*lines, "no sequence is stored"]
    if strategy == "always":
        lines.append("every sequence is stored")
    if isinstance(strategy, Adaptive) and sizes.max_seq_len is not None:
        lines.append(f"a sequence of {sizes.max_seq_len} tokens takes {readable(sizes.most_bytes(sizes.max_seq_len))}")
    if more := sizes.most_bytes(INT32_MAX, 1) - sizes.most_bytes(INT32_MAX):  # in layers that let rows go
        lines.append(
            f"until it is committed, a batch takes up to {readable(more)} more for each token, in layers with windows "
            "or chunks"
        )
    return lines


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
    fraction = (1 + strategy.fraction) / 2 if held else strategy.fraction  # what is stored is not dropped so soon
    most = int((free + held) * fraction)

    def why() -> str:
        words = "which is at most" if needed <= most else "which is more than"
        where = "would be free without it" if held else "are free"
        return (
            f"it may come to {readable(needed)}, {words} {readable(most)}, the fraction {fraction:g} of the "
            f"{readable(free + held)} that {where} ({source})"
        )

    return Decision("stored" if needed <= most else "dropped" if held else "not stored", why)


class Decider:
    """Decides for a cache whose strategy is not "always" which sequences of each batch are stored.

    Parameters
    ----------
    strategy : {"disabled"}, LongSequencesOnly or Adaptive
        The rule.
    core : _core.Cache
        The cache, which it follows.
    sizes : Sizes
        The sizes of its layers.
    """

    def __init__(self, strategy: Strategy, core: _core.Cache, sizes: Sizes) -> None:
        self._strategy, self._core, self._sizes = strategy, core, sizes
        self._decisions: dict[int, Decision] = {}  # the latest decision on each sequence, oldest first
        self._most_decisions = 64
        self._dropped: set[int] = set()  # sequences that Adaptive dropped or did not store, to be fed again whole
        self._open: dict[int, Decision] = {}  # those of the open batch
        self.edits: deque[Edit] = deque()

    def copy(self, core: _core.Cache) -> Decider:
        """Return a decider for a copy of the cache."""
        other = Decider(self._strategy, core, self._sizes)
        other._decisions, other._dropped = dict(self._decisions), set(self._dropped)
        other._most_decisions = self._most_decisions
        return other

    def decide(
        self, found: dict[int, Decision], positions: npt.NDArray[np.int32], seq_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Decide on each sequence of a new batch, and add the decisions to `found`.

        Return for each token whether its sequence is not stored; None: all are stored.
        """
        ids, whose, num_tokens = np.unique(seq_ids, return_inverse=True, return_counts=True)
        first, last = np.full(len(ids), INT32_MAX), np.full(len(ids), -1)
        np.minimum.at(first, whose, positions)
        np.maximum.at(last, whose, positions)
        free: tuple[int, str] | None = None
        columns = (column.tolist() for column in (ids, num_tokens, first, last))
        for seq_id, tokens, begin, end in zip(*columns, strict=True):
            held = self._core.seq_len(seq_id, None)
            if not held:
                was_dropped = seq_id in self._dropped
                check_all_fed(self._strategy, seq_id, begin, self._core.next_position(seq_id), was_dropped)
            if isinstance(self._strategy, LongSequencesOnly) and not held:
                found[seq_id] = decide_by_length(self._strategy, end + 1)
            elif isinstance(self._strategy, Adaptive):
                free = free or self._free_memory()
                needed = self._sizes.most_bytes(max(self._sizes.max_seq_len or 0, held + tokens), tokens)
                found[seq_id] = decide_by_memory(self._strategy, needed, self._sizes.most_bytes(held), *free)
            elif not held:
                found[seq_id] = Decision("not stored", lambda: "the strategy is 'disabled'")
        unstored = [seq_id for seq_id, decision in found.items() if decision.outcome != "stored"]
        return np.isin(seq_ids, unstored) if unstored else None

    def _free_memory(self) -> tuple[int, str]:
        """Return the number of free bytes, the cache's own free blocks included, and the source of the limit."""
        free, source = system.available_memory()
        stats = self._core.stats()
        kept, blocks = stats["blocks_free"], stats["blocks_free"] + stats["blocks_in_use"]
        return free + (self._core.nbytes() * kept // blocks if blocks else 0), source

    def begun(self, found: dict[int, Decision]) -> None:
        """Keep the decisions on a batch that is open now, for `explain`, and log them."""
        import logging  # here, because it would slow `import kvcache` down, and only strategies need it

        self._open = found
        logger = logging.getLogger("kvcache")
        for seq_id, decision in found.items():
            before = self._decisions.pop(seq_id, None)
            self._decisions[seq_id] = decision
            level = logging.DEBUG if before and before.outcome == decision.outcome else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(level, "sequence %d is %s: %s", seq_id, decision.outcome, decision.why())
        if len(self._decisions) > self._most_decisions:
            self._forget_decisions()

    def commit(self, begin: float, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch, and note which sequences it drops."""
        found = self._open  # before another batch can begin
        is_adaptive = isinstance(self._strategy, Adaptive)  # else what holds nothing begins at next_position anyway
        stored = {seq_id for seq_id, decision in found.items() if decision.outcome == "stored"}
        dropped = found.keys() - stored - self._dropped if is_adaptive else set()
        self._dropped |= dropped  # before they are: in between, a signal's handler may raise
        try:
            core.commit(keep)
        except BaseException:
            if not core.ended:
                self._dropped -= dropped
            raise
        if is_adaptive:
            self._dropped -= {seq_id for seq_id in stored if self._core.next_position(seq_id)}  # 0: no token was kept

    def note_edits(self) -> None:
        """Forget decisions on sequences that begin anew; what shares rows of a dropped one lacks them, too."""
        with suppress(IndexError):  # there are no more; other threads may note some
            while True:
                seq_id, source, is_whole = self.edits.popleft()
                self._edited(seq_id, source, is_whole)

    def _edited(self, seq_id: int | None, source: int | None, is_whole: bool) -> None:
        """Note an edit, as `kvcache.follower.Edit` describes it."""
        if seq_id is None:
            for one in list(self._decisions):  # a copy: other threads may add some
                if one != source:
                    self._decisions.pop(one, None)
            self._dropped &= set() if source is None else {source}  # at once
            return
        held = self._core.seq_len(seq_id, None)
        if is_whole or (held and seq_id in self._dropped):
            self._dropped.discard(seq_id)
            self._decisions.pop(seq_id, None)
        if source in self._dropped and (is_whole or not held):
            self._dropped.add(seq_id)
            if (decision := self._decisions.get(source)) is not None:
                self._decisions[seq_id] = decision

    def _forget_decisions(self) -> None:
        """Forget decisions, except on sequences that hold rows, and the latest 8 on other sequences, not stored."""
        alive = set(self._core.sequences())
        decisions = list(self._decisions.copy().items())  # other threads, and finalizers, may add some
        others = [seq_id for seq_id, (outcome, _) in decisions if outcome != "stored"]
        kept = alive.union([seq_id for seq_id in others if seq_id not in alive][-8:])
        self._decisions = {seq_id: it for seq_id, it in decisions if seq_id in kept}
        self._most_decisions = 64 + 2 * len(self._decisions)

    def explain(self) -> str:
        """Describe the strategy and its decisions, as `KVCache.explain` says."""
        lines = describe(self._strategy, self._sizes)
        self._forget_decisions()
        for seq_id, (outcome, why) in [] if self._strategy == "disabled" else self._decisions.copy().items():
            verb = "is" if outcome != "dropped" else "was" if seq_id in self._dropped else "is to be"
            lines.append(f"sequence {seq_id} {verb} {outcome}: {why()}")
        return "\n".join(lines)
