"""Check an implementation before it is timed: compare its results with a float64 softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.benchmarks import Case, Implementation

Floats: TypeAlias = npt.NDArray[np.float32]

CHECKED_HEADS, CHECKED_TOKENS = 8, 3  # the most heads and tokens of a call that are compared
SHARP = 20.0  # the score that a query aims at with its key
LIMITS = {"f32": 1e-3, "f16": 2e-2, "q4_0": 0.5, "int4": 0.5}  # largest relative error; 0.15 for all other types


def limit(dtype: str) -> float:
    """Return the largest relative error of a row of attention."""
    return LIMITS.get(dtype, 0.15)


def check(name: str, error: float, dtype: str) -> None:
    """Raise AssertionError, not to be timed, if a result's relative error exceeds the limit of the type, or is NaN."""
    if not error <= limit(dtype):
        raise AssertionError(f"not timed: {name} is off by {error:.3g}, where {dtype} may be by {limit(dtype):.3g}")


@functools.lru_cache(maxsize=1)
def _pool(tokens: int, num_kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    k, v = np.random.default_rng(0).standard_normal((2, tokens, num_kv_heads, head_dim), np.float32)
    return k, v


class Known:
    """An implementation of a case, and the tokens of its sequences, so that exact results are known.

    A token is a number, which says its rows.
    """

    def __init__(self, make: Callable[[Case], Implementation], case: Case) -> None:
        self.case = case
        self.cache: Any = make(case)
        self.tokens: dict[int, list[int]] = {0: []}
        self._next = 0
        self._pool = _pool(case.max_seq_len + case.max_sequences, case.num_kv_heads, case.head_dim)

    def rows(self, layer: int, tokens: list[int]) -> tuple[Floats, Floats]:
        """Return the keys and values of tokens in a layer; they differ from layer to layer."""
        numbers = (np.array(tokens) + 17 * layer) % len(self._pool[0])
        return self._pool[0][numbers], self._pool[1][numbers]

    def next_rows(self, num_tokens: int = 1, seq_id: int = 0) -> list[tuple[Floats, Floats]]:
        """Return the rows of a sequence's next tokens, by layer, and count them as stored."""
        tokens = [*range(self._next, self._next + num_tokens)]
        self._next += num_tokens
        self.tokens[seq_id] += tokens
        return [self.rows(layer, tokens) for layer in range(self.case.num_layers)]

    def open(self, num_tokens: int = 1, seq_id: int = 0) -> None:
        """Begin a batch, and put its rows in all layers."""
        rows = self.next_rows(num_tokens, seq_id)
        self.cache.begin(num_tokens, seq_id)
        for layer, (k, v) in enumerate(rows):
            self.cache.put(layer, k, v)

    def append(self, num_tokens: int = 1, seq_id: int = 0) -> None:
        """Store tokens."""
        self.open(num_tokens, seq_id)
        self.cache.commit()

    def fork(self) -> None:
        """Fork sequence 0 into sequence 1."""
        self.cache.fork(0, 1)
        self.tokens[1] = self.tokens[0].copy()

    def remove(self, begin: int, end: int) -> None:
        """Remove tokens of sequence 0."""
        self.cache.remove(begin, end)
        del self.tokens[0][begin:end]

    def check(self, seq_id: int = 0) -> None:
        """Append a token, and compare the result of its attention with the exact one."""
        self.open(1, seq_id)
        self.check_batch(1, seq_id)
        self.cache.commit()

    def check_batch(self, num_tokens: int, seq_id: int = 0) -> None:
        """Compare attention of the open batch with the exact one, in the first and in the last layer."""
        for layer in {0, self.case.num_layers - 1}:
            targets, q = self._queries(layer, num_tokens, seq_id)
            out = np.asarray(self.cache.attend(layer, q), np.float64)
            if out.shape != q.shape:
                raise AssertionError(f"not timed: attention returned {out.shape}, where queries are {q.shape}")
            for t in np.linspace(0, num_tokens - 1, min(num_tokens, CHECKED_TOKENS), dtype=int):
                for head in self._heads():
                    exact = self._exact(layer, seq_id, num_tokens - 1 - int(t), head, q[t, head])
                    error = float(np.linalg.norm(out[t, head] - exact) / np.linalg.norm(exact))
                    what = f"attention of head {head} in layer {layer}, aimed at token {targets[t, head]:,},"
                    check(what, error, self.case.dtype)

    def check_gathered(self, layer: int) -> None:
        """Compare the gathered rows of sequence 0."""
        for name, rows, exact in zip(
            ("keys", "values"), self.cache.gather(layer), self.rows(layer, self.tokens[0]), strict=True
        ):
            found, wanted = np.asarray(rows, np.float32), exact.transpose(1, 0, 2)
            if found.shape != wanted.shape:
                raise AssertionError(f"not timed: gathered {name} are {found.shape}, where {wanted.shape} are stored")
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            check(f"one of the gathered {name} in layer {layer}", error, self.case.dtype)

    def queries(self, num_tokens: int) -> Floats:
        """Return queries of the open batch, whose tokens are of sequence 0."""
        return self._queries(0, num_tokens, 0)[1]

    def _heads(self) -> range:
        return range(0, self.case.num_heads, -(-self.case.num_heads // CHECKED_HEADS))

    def _queries(self, layer: int, num_tokens: int, seq_id: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return a target token for each query, and queries that score high for the targets' keys.

        Any token that was ever stored may be a target, so that a result changes if a removed or a later token is seen.
        The first heads aim at the latest and the first stored token, and at the latest removed token.
        """
        case, held = self.case, self.tokens[seq_id]
        targets = np.random.default_rng(layer).integers(0, self._next, (num_tokens, case.num_heads))
        gone = max({*range(self._next)}.difference(held), default=held[0])
        for head, target in zip(self._heads(), (held[-1], held[0], gone, held[max(0, len(held) - 2)]), strict=False):
            targets[:, head] = target
        k, _ = self.rows(layer, [*targets.ravel()])
        k = k.reshape(num_tokens, case.num_heads, case.num_kv_heads, case.head_dim)
        heads = np.arange(case.num_heads)
        q = k[:, heads, heads // (case.num_heads // case.num_kv_heads)] * np.float32(
            min(2, SHARP * case.head_dim**-0.5)
        )
        return targets, np.ascontiguousarray(q)

    def _exact(self, layer: int, seq_id: int, later: int, head: int, q: Floats) -> npt.NDArray[np.float64]:
        """Compute exact attention of a query that has `later` tokens after it in its sequence."""
        case = self.case
        held = self.tokens[seq_id][: len(self.tokens[seq_id]) - later]
        seen = held[-case.window :] if case.window else held
        numbers = (np.array(seen) + 17 * layer) % len(self._pool[0])
        kv_head = head // (case.num_heads // case.num_kv_heads)
        k, v = (pool[numbers, kv_head].astype(np.float64) for pool in self._pool)
        scores = k @ q.astype(np.float64) * case.head_dim**-0.5
        weights = np.exp(scores - scores.max())
        exact: npt.NDArray[np.float64] = weights @ v / weights.sum()
        return exact
