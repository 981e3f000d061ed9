"""Evict tokens by their importance, if quantised rows still take too much memory.

A policy says how important each token of a sequence is. `evict` asks it, keeps the most important tokens, and drops the
rows of all others. No policy is a default of a cache: published ones rank in opposite order on different models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import INT32_MAX, integer, to_float
from kvcache.arrays import AnyArray
from kvcache.cache import KVCache
from kvcache.errors import NotSupportedError, shown
from kvcache.layer import Layer
from kvcache.policy import CrossAttention, FullAttention, SlidingWindow, window_of
from kvcache.rope import Rope, RopeLike

__all__ = [
    "Asked",
    "Policy",
    "Prompt",
    "Queries",
    "check_share",
    "choose",
    "evict",
    "future",
    "kvzip",
    "layers_with_all",
    "mean_importance",
    "stream",
]

F32: TypeAlias = NDArray[np.float32]
Positions: TypeAlias = NDArray[np.int32]

FIRST = 4  # tokens that are always kept: models attend to them, whatever they are
LAST = 32  # tokens that are always kept, too
EVERY = 32  # tokens of a prompt, one of which is asked about the others
HORIZON = 512  # positions behind a prompt from which `future` asks
AGAIN = 256  # tokens of a prompt that are fed again at once


@dataclass(frozen=True)
class Asked:
    """Queries of a sequence's tokens in a layer, as attention took them, with what else attention was given.

    Attributes
    ----------
    q : ndarray of float16 or float32, shape [n, num_heads, head_dim]
        The queries, rotated for their positions.
    positions : ndarray of int32, shape [n]
        Where they stand, ascending.
    options : dict
        ``scale``, ``softcap`` and ``sinks`` of `kvcache.Batch.attend`, as far as they were given.
    """

    q: NDArray[Any]
    positions: Positions
    options: dict[str, Any]


@dataclass
class _Noted:
    """The queries that `Queries` keeps of a sequence in a layer, in chunks with their positions."""

    picked: deque[tuple[NDArray[Any], Positions]] = field(default_factory=deque)  # of one token in `every`
    latest: deque[tuple[NDArray[Any], Positions]] = field(default_factory=deque)  # of the last tokens, or more
    options: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> _Noted:
        """Return the same queries in lists of their own; the arrays, which nothing changes, are shared."""
        return _Noted(deque(self.picked), deque(self.latest), self.options)


class Queries:
    """Queries of a prompt, which a model's runner notes for policies.

    Kept are the queries of one token in `every`, and of the last tokens, as float16 if it has room for them.

    Parameters
    ----------
    every : int, default 32
        How many tokens there are to each one whose query is kept; 1 keeps all.
    last : int, default 32
        The number of last tokens whose queries are kept, too.
    """

    def __init__(self, every: SupportsIndex = EVERY, last: SupportsIndex = LAST) -> None:
        self._every, self._last = integer(every, "every", 1, INT32_MAX), integer(last, "last", 0, INT32_MAX)
        self._noted: dict[tuple[int, int], _Noted] = {}

    def note(
        self,
        layer: int,
        q: NDArray[Any],
        positions: NDArray[Any],
        *,
        seq_id: int = 0,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None,
    ) -> None:
        """Note the queries of tokens that a model feeds in a layer, beside `kvcache.Batch.attend`.

        Earlier queries at the first of these positions, or behind it, are forgotten: the sequence has gone back.

        Parameters
        ----------
        q : ndarray of float, shape [n, num_heads, head_dim]
            The queries, rotated for their positions.
        positions : ndarray of int, shape [n]
            Where the tokens stand, ascending.
        scale, softcap, sinks
            As `kvcache.Batch.attend` is given them.

        Raises
        ------
        ValueError
            If the shapes do not match, there are no tokens, or `positions` are not integers that ascend.
        """
        _check_noted(q, positions)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks}
        noted = self._noted.setdefault((seq_id, layer), _Noted())
        noted.options = {name: value for name, value in options.items() if value is not None}
        for chunks in (noted.picked, noted.latest):
            _cut(chunks, int(positions[0]))
        is_picked = positions % self._every == self._every // 2
        if is_picked.any():
            noted.picked.append((_narrow(q[is_picked]), positions[is_picked].astype(np.int32)))
        if self._last:
            noted.latest.append((_narrow(q[-self._last :]), positions[-self._last :].astype(np.int32)))
        held = sum(len(chunk[1]) for chunk in noted.latest)
        while noted.latest and held - len(noted.latest[0][1]) >= self._last:
            held -= len(noted.latest.popleft()[1])

    def picked(self, layer: int, seq_id: int = 0) -> Asked | None:
        """Return the queries of one token in `every`; None if there are none."""
        return self._asked(layer, seq_id, lambda noted: noted.picked)

    def latest(self, layer: int, seq_id: int = 0) -> Asked | None:
        """Return the queries of the last tokens; None if there are none."""
        found = self._asked(layer, seq_id, lambda noted: noted.latest)
        return found and Asked(found.q[-self._last :], found.positions[-self._last :], found.options)

    def _asked(
        self, layer: int, seq_id: int, chunks_of: Callable[[_Noted], Iterable[tuple[NDArray[Any], Positions]]]
    ) -> Asked | None:
        """Return the queries of chunks that `chunks_of` takes from what is noted; None if there are none."""
        noted = self._noted.get((seq_id, layer))
        chunks = [] if noted is None else [*chunks_of(noted)]
        if noted is None or not chunks:
            return None
        q, positions = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        return Asked(q, positions, noted.options)

    def fork(self, source: int, seq_id: int) -> None:
        """Give a sequence the queries of another one, which it goes on from."""
        for (of, layer), noted in [*self._noted.items()]:
            if of == source:
                self._noted[seq_id, layer] = noted.copy()

    def __deepcopy__(self, memo: object) -> Queries:
        """Return queries of the same tokens, which share the arrays."""
        copied = Queries(self._every, self._last)
        for (seq_id, layer), noted in [*self._noted.items()]:
            copied._noted[seq_id, layer] = noted.copy()
        return copied

    def forget(self, seq_id: int) -> None:
        """Forget the queries of a sequence."""
        for key in [key for key in self._noted if key[0] == seq_id]:
            del self._noted[key]


def _check_noted(q: NDArray[Any], positions: NDArray[Any]) -> None:
    for name, value in (("q", q), ("positions", positions)):
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name}: a NumPy array is needed, not {type(value).__name__}")
    if q.ndim != 3 or positions.shape != q.shape[:1] or not len(q):
        raise ValueError(
            f"q of shape {q.shape} and positions of shape {positions.shape}: [n, num_heads, head_dim] and [n] are"
            " needed, with n at least 1"
        )
    if positions.dtype.kind not in "iu" or (positions[1:] < positions[:-1]).any():
        raise ValueError(f"positions={shown(positions.tolist())}: must be integers that ascend")


def _narrow(q: NDArray[Any]) -> NDArray[Any]:
    """Return queries as float16, or as float32 if float16 has no room for them."""
    with np.errstate(over="ignore"):
        narrow = q.astype(np.float16)
    return narrow if np.isfinite(narrow).all() else q.astype(np.float32)


def _cut(chunks: deque[tuple[NDArray[Any], Positions]], position: int) -> None:
    """Drop queries at `position` and behind it."""
    while chunks and chunks[-1][1][-1] >= position:
        q, positions = chunks.pop()
        num_before = int(np.searchsorted(positions, position))
        if num_before:
            chunks.append((q[:num_before], positions[:num_before]))


class Prompt:
    """A sequence, for whose tokens a policy returns how important each is.

    Parameters
    ----------
    cache, seq_id
        The cache, and the sequence.
    queries : Queries, optional
        The queries of its tokens that were noted.
    again : callable, optional
        A function that feeds the prompt once more, some tokens at a time, each time behind a fork of the sequence. It
        yields the fork, and all queries of these tokens.
    ropes : sequence of Rope, False or None, optional
        How the queries of each layer are rotated; by default as the layers of the cache say.

    Attributes
    ----------
    num_rows : int
        The number of tokens whose rows the sequence holds.
    layers : tuple of int
        The layers that keep the rows of all tokens, and so can say how important each is.
    """

    def __init__(
        self,
        cache: KVCache,
        seq_id: int = 0,
        queries: Queries | None = None,
        again: Callable[[], Iterator[tuple[int, Queries]]] | None = None,
        ropes: Iterable[RopeLike] | None = None,
    ) -> None:
        self.cache, self.seq_id, self._queries, self._again = cache, seq_id, queries, again
        self._ropes = [layer.rope for layer in cache.layers] if ropes is None else [*ropes]
        self.layers = layers_with_all(cache.layers)
        self.positions: Positions = cache.positions(seq_id=seq_id, layer=self.layers[0])
        self.num_rows = len(self.positions)
        self._end = cache.next_position(seq_id)

    def picked(self, layer: int) -> Asked:
        """Return the queries of one token in so many, as `Queries` noted them; raise ValueError if there are none."""
        return self._held(None if self._queries is None else self._queries.picked(layer, self.seq_id), layer)

    def latest(self, layer: int) -> Asked:
        """Return the queries of the last tokens; raise ValueError if none were noted."""
        return self._held(None if self._queries is None else self._queries.latest(layer, self.seq_id), layer)

    def _held(self, asked: Asked | None, layer: int) -> Asked:
        """Return the queries of tokens that the sequence still holds: it may have gone back since they were noted."""
        count = 0 if asked is None else int(np.searchsorted(asked.positions, self._end))
        return self._noted(asked and Asked(asked.q[:count], asked.positions[:count], asked.options), layer)

    def _noted(self, asked: Asked | None, layer: int) -> Asked:
        """Return queries; raise ValueError if there are none."""
        if asked is None or not len(asked.positions):
            raise ValueError(
                f"no queries of sequence {self.seq_id} were noted in layer {layer}, which the policy needs: note them"
                " while the model reads the prompt (in transformers, by `HFCache.note_queries` and the attention"
                " 'kvcache'); what a prefix cache holds is not read"
            )
        return asked

    def again(self) -> Iterator[tuple[int, Queries]]:
        """Feed the prompt once more, some tokens at a time: yield a fork of the sequence, and their queries in it."""
        if self._again is None:
            raise ValueError(
                "the policy needs the prompt fed once more: give `again`, a function that does so (in transformers,"
                " `model` and `input_ids`)"
            )
        return self._again()

    def moved(self, asked: Asked, layer: int, positions: Positions) -> Asked:
        """Return queries as if they stood at other positions: rotated by the distance.

        Raises
        ------
        NotSupportedError
            If the frequencies of the layer's rotation are not known.
        """
        rope = self._ropes[layer]
        if rope is False:
            return Asked(asked.q, positions, asked.options)
        if not isinstance(rope, Rope):
            raise NotSupportedError(
                f"queries of layer {layer} cannot be moved: it needs a `Rope`; give it to the cache"
            )
        q = asked.q.astype(np.float32)
        distances = positions.astype(np.int64) - asked.positions
        return Asked(_rotate(q, distances, rope), positions, asked.options)

    def weights(
        self, layer: int, asked: Asked, reduce: Literal["sum", "max"] = "sum", *, seq_id: int | None = None
    ) -> F32:
        """Return the weights that queries give to the rows, ``[num_kv_heads, num_rows]``, as `KVCache.weights` does.

        `seq_id` is a fork of `again`, whose rows behind the prompt's share the weights, and are left out.
        """
        found = self.cache.weights(
            layer, asked.q, asked.positions, seq_id=self.seq_id if seq_id is None else seq_id, reduce=reduce,
            **asked.options,
        )  # fmt: skip
        return found[:, : self.num_rows]


def layers_with_all(layers: Iterable[Layer]) -> tuple[int, ...]:
    """Return which layers keep the rows of all tokens; raise NotSupportedError if none does."""
    found = tuple(i for i, layer in enumerate(layers) if layer.policy == FullAttention() and layer.v_head_dim)
    if not found:
        raise NotSupportedError(
            "no layer of the cache keeps the rows of all tokens, so there are none to drop: make it without windows"
        )
    return found


def _rotate(q: F32, distances: NDArray[np.int64], rope: Rope) -> F32:
    """Rotate queries ``[queries, heads, dim]`` by distances ``[queries]``: the elements `a` and `b` of each pair."""
    num_pairs, step = len(rope.inv_freq), 2 if rope.interleaved else 1
    a = rope.first_dim + step * np.arange(num_pairs)
    b = a + (1 if rope.interleaved else num_pairs)
    angles = distances[:, None, None] * np.array(rope.inv_freq)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rotated = q.copy()
    rotated[..., a] = q[..., a] * cos - q[..., b] * sin
    rotated[..., b] = q[..., b] * cos + q[..., a] * sin
    return rotated


Policy: TypeAlias = Callable[[Prompt], NDArray[Any]]  # returns how important each row is, [num_rows]


def mean_importance(weights: Iterable[F32]) -> F32:
    """Return one importance for each token: the mean of weights over layers and KV heads, each scaled to the sum 1.

    Parameters
    ----------
    weights : iterable of ndarray of float, shape [num_kv_heads, num_rows]
        The weights in each layer.

    Returns
    -------
    ndarray of float32, shape [num_rows]

    Raises
    ------
    ValueError
        If there are no weights.
    """
    scaled: list[F32] = [
        (each / np.maximum(each.sum(1, keepdims=True), np.finfo(np.float32).tiny)).mean(0) for each in weights
    ]
    if not scaled:
        raise ValueError("weights: those of one layer or more are needed, not of none")
    mean: F32 = np.mean(scaled, 0, dtype=np.float32)
    return mean


def future(prompt: Prompt) -> F32:
    """Return how important tokens are to later tokens: the largest weight that a query of the prompt would give.

    Every 32nd token lends its query. The query is moved to a position behind the prompt. It is Expected Attention [1]_
    with the queries themselves in the place of their distribution. The prompt's queries must have
    been noted (`Queries`).

    References
    ----------
    .. [1] Alessio Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
       Distribution", arXiv:2510.00636, 2025.
    """
    begin = prompt._end
    room = max(1, min(HORIZON, (prompt.cache.max_seq_len or INT32_MAX) - begin))

    def weights(layer: int) -> F32:
        asked = prompt.picked(layer)
        num_queries = len(asked.positions)
        behind = begin + np.arange(num_queries) * room // num_queries
        return prompt.weights(layer, prompt.moved(asked, layer, behind.astype(np.int32)), "max")

    return mean_importance(map(weights, prompt.layers))


def kvzip(prompt: Prompt) -> F32:
    """Return how important tokens are to a model that repeats the prompt: the largest weight that a query gives [1]_.

    The prompt is fed once more, which costs about what reading it did. It needs `again`.

    References
    ----------
    .. [1] Jang-Hyun Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
       arXiv:2505.23416, 2025.
    """
    largest: dict[int, F32] = {}
    for seq_id, queries in prompt.again():
        for layer in prompt.layers:
            asked = prompt._noted(queries.picked(layer, seq_id), layer)
            weights = prompt.weights(layer, asked, "max", seq_id=seq_id)
            largest[layer] = np.maximum(largest.get(layer, 0), weights)
    return mean_importance(largest.values())


def evict(
    cache: KVCache,
    policy: Policy,
    keep: SupportsFloat = 0.25,
    *,
    seq_id: int = 0,
    queries: Queries | None = None,
    again: Callable[[], Iterator[tuple[int, Queries]]] | None = None,
) -> Positions:
    """Keep the most important tokens of a sequence, and drop the rows of all others in all layers.

    The first 4 tokens and the last 32 are always kept. `KVCache.compact` then gives the memory back. Tokens keep their
    positions (`KVCache.keep_positions`). No later question finds a dropped token, so do not evict before the question
    is known.

    Parameters
    ----------
    policy : callable
        `future`, `kvzip`, or a function of a `Prompt` that returns how important each token is, ``[num_rows]``.
    keep : float, default 0.25
        The share of the tokens that is kept, above 0 and at most 1.
    queries, again
        What the policy needs, as `Prompt` says.

    Returns
    -------
    ndarray of int32
        The positions that were kept.

    Raises
    ------
    NotSupportedError
        If no layer keeps the rows of all tokens, or the policy needs a rotation that is not known.
    ValueError
        If `keep` is out of range, the policy lacks what it needs, or it returns something else than a number for each
        token. Nothing has changed then.
    """
    prompt = Prompt(cache, seq_id, queries, again)
    kept = choose(prompt, policy, keep)
    cache.keep_positions(kept, seq_id=seq_id)
    return kept


def choose(prompt: Prompt, policy: Policy, keep: SupportsFloat) -> Positions:
    """Return the positions of the tokens that `evict` keeps, ascending."""
    share = check_share(keep)
    num_kept = max(FIRST + LAST, round(share * prompt.num_rows))
    if num_kept >= prompt.num_rows:
        return prompt.positions
    if not callable(policy):
        raise TypeError(f"policy={shown(policy)}: a function of a `Prompt` is needed, such as `future` or `kvzip`")
    found = np.asarray(policy(prompt))
    if found.shape != (prompt.num_rows,) or found.dtype.kind not in "fiu":
        raise ValueError(
            f"the policy returned an array {found.dtype} of shape {found.shape}: a number for each of the"
            f" {prompt.num_rows} tokens is needed"
        )
    between = prompt.positions[FIRST:-LAST]
    importance = np.where(np.isnan(found), -np.inf, found.astype(np.float64))[FIRST:-LAST]
    order = np.argsort(-importance, kind="stable")[: num_kept - FIRST - LAST]  # of equals, the earlier one stays
    return np.concatenate([prompt.positions[:FIRST], np.sort(between[order]), prompt.positions[-LAST:]])


def check_share(keep: SupportsFloat) -> float:
    """Return the share of tokens to keep; raise ValueError unless it is above 0 and at most 1."""
    share = to_float(keep, "keep")
    if not 0 < share <= 1:
        raise ValueError(f"keep={share!r}: must be above 0 and at most 1, which keeps all tokens")
    return share


def stream(cache: KVCache, window: SupportsIndex, *, num_sink_tokens: SupportsIndex = FIRST, seq_id: int = 0) -> int:
    """Keep the first tokens of a sequence and the last ones, and close the gap between them: StreamingLLM [1]_.

    Call it before each batch, or now and then. The first tokens move up, next to the others: no distance exceeds what
    the model was trained for, and a text goes on without end. No row is copied or rotated. Positions grow for ever; the
    caller rotates new tokens for them.

    Parameters
    ----------
    window : int
        The number of last tokens that stay, at least 1.
    num_sink_tokens : int, default 4
        The number of first tokens that stay.

    Returns
    -------
    int
        The number of tokens that were dropped.

    Raises
    ------
    NotSupportedError
        If no layer keeps the rows of all tokens, or the `rope` of a layer is neither a `Rope` nor False, or a layer has
        sink tokens of its own.
    ValueError
        If a number is too small, or a layer with a window would see first tokens that it has lost. Nothing has changed
        then.

    References
    ----------
    .. [1] Guangxuan Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.
    """
    window = integer(window, "window", 1, INT32_MAX)
    num_sinks = integer(num_sink_tokens, "num_sink_tokens", 0, INT32_MAX)
    held = cache.positions(seq_id=seq_id, layer=layers_with_all(cache.layers)[0])
    num_dropped = max(0, len(held) - num_sinks - window)
    if num_sinks:
        _check_moving_up(cache, window, held, seq_id)
    if num_dropped:
        cache.remove(int(held[num_sinks]), int(held[num_sinks + num_dropped]), shift=False, seq_id=seq_id)
        held = np.delete(held, slice(num_sinks, num_sinks + num_dropped))
    if num_sinks and len(held) > num_sinks:  # also a gap that an earlier call left, because it failed here
        gap = int(held[num_sinks] - held[num_sinks - 1]) - 1
        if gap:
            cache.shift(int(held[0]), int(held[num_sinks - 1]) + 1, gap, seq_id=seq_id)
    return num_dropped


def _check_moving_up(cache: KVCache, window: int, held: Positions, seq_id: int) -> None:
    """Raise if the first tokens of a sequence cannot stand right before its last `window` tokens."""
    for i, layer in enumerate(cache.layers):
        policy, sees = layer.policy, window_of(layer.policy)
        if policy is None or isinstance(policy, CrossAttention):
            continue
        if layer.rope is not False and not isinstance(layer.rope, Rope):  # a function's keys: rounded at each call
            raise NotSupportedError(f"the first tokens cannot move up: layer {i} needs a `Rope`; give it to the cache")
        if isinstance(policy, SlidingWindow) and policy.num_sink_tokens:
            raise NotSupportedError(f"the first tokens cannot move up: layer {i} keeps sink tokens of its own")
        if window < sees and len(held) and cache.first_position(seq_id, layer=i) > held[0]:
            raise ValueError(
                f"window={window}: must be at least {sees}, as layer {i} sees so many tokens, and has lost the first"
            )
