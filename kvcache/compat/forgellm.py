"""forgellm_runtime's ``kv_cache``: token-major f32 rows of one sequence, appended layer by layer, then advanced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, Rows, check_index, read_rows, to_integer

__all__ = ["KVCache"]

BLOCK = 512  # tokens: `k` copies block by block, and a smaller block takes more time than its bytes


def join(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays one after the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class KVCache(Copied):
    """Keys and values of one sequence, which grows without a limit.

    Append the rows of a token, or of several, in every layer, and advance once for each token. Appended rows are
    read at once. Layers may have rows of different numbers of tokens meanwhile.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        The shape of the model.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcache.compat.forgellm import KVCache
    >>> cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4)
    >>> for layer in range(2):
    ...     cache.append(layer, np.ones(8), np.ones(8))
    >>> cache.k(0).shape, cache.len()
    ((8,), 0)
    >>> cache.advance()
    >>> cache.len()
    1
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.cache = kvcache.KVCache(
            num_layers, num_kv_heads, head_dim, None, dtype="f32", block_size=BLOCK
        )  #: the cache below, with the tokens up to `len`, or more, in sequence 0
        self._waiting: list[list[Rows]] = [[] for _ in range(self.cache.num_layers)]  # rows of tokens to come, by layer
        self._len = 0

    def __repr__(self) -> str:
        shape = f"{self.num_layers()}, {self.cache.layers[0].num_kv_heads}, {self.cache.layers[0].head_dim}"
        return f"<forgellm.KVCache({shape}): {self._len} tokens>"

    @classmethod
    def with_capacity(cls, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int) -> Self:
        """Return a cache that has the memory for `max_seq_len` tokens, and grows beyond them."""
        self = cls(num_layers, num_kv_heads, head_dim)
        if to_integer("max_seq_len", max_seq_len, 0):
            self.cache.reserve(max_seq_len)
        return self

    def append(self, layer: int, k_data: npt.ArrayLike, v_data: npt.ArrayLike) -> None:
        """Append rows of the next token, or tokens, in a layer.

        Parameters
        ----------
        layer : int
            The layer's index.
        k_data, v_data : array_like
            `entry_size` numbers each, in any shape; of several tokens a multiple of it, token after token.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If the numbers are those of no whole token, or of different numbers of tokens.
        """
        check_index("layer", layer, self.num_layers())
        shape = -1, self.cache.layers[0].num_kv_heads, self.cache.layers[0].head_dim
        k, v = read_rows(k_data, "k_data", *shape), read_rows(v_data, "v_data", *shape)
        if len(k) != len(v):
            raise ValueError(f"v_data: {v.size} numbers, where k_data has {k.size}; give the same tokens")
        self._waiting[layer].append((k.copy(), v.copy()))

    def advance(self) -> None:
        """Go on to the next token.

        Raises
        ------
        ValueError
            If a layer has no rows of the token.
        """
        if self._len == self.cache.seq_len():
            self._store()
        self._len += 1

    def k(self, layer: int) -> npt.NDArray[Any]:
        """Return the keys of a layer, all that were appended: a copy, flat, in the order token, head, element."""
        return self._rows(layer, 0)

    def v(self, layer: int) -> npt.NDArray[Any]:
        """Return the values of a layer, as `k` does keys."""
        return self._rows(layer, 1)

    def len(self) -> int:
        """Return the number of tokens, up to the last `advance`."""
        return self._len

    def is_empty(self) -> bool:
        """Return whether there is no token."""
        return self.len() == 0

    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.cache.num_layers

    def entry_size(self) -> int:
        """Return the numbers of one token's keys in a layer: heads times elements."""
        return self.cache.layers[0].num_kv_heads * self.cache.layers[0].head_dim

    def clear(self) -> None:
        """Forget all tokens, and what was appended since the last `advance`."""
        self.cache.clear()
        for waiting in self._waiting:
            waiting.clear()
        self._len = 0

    def clone(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)

    def _store(self) -> None:
        """Store the tokens that every layer has rows of."""
        missing = [layer for layer, waiting in enumerate(self._waiting) if not waiting]
        if missing:
            raise ValueError(
                f"advance(): layers {missing} have no rows of token {self._len}; append them in every layer first"
            )
        joined = [[join(parts) for parts in zip(*waiting, strict=True)] for waiting in self._waiting]
        num_tokens = min(len(k) for k, _ in joined)
        with self.cache.batch(num_tokens) as batch:
            for layer, (k, v) in enumerate(joined):
                batch.put(layer, k[:num_tokens], v[:num_tokens])
        for waiting, (k, v) in zip(self._waiting, joined, strict=True):
            waiting[:] = [(k[num_tokens:], v[num_tokens:])] if len(k) > num_tokens else []

    def _rows(self, layer: int, which: int) -> npt.NDArray[Any]:
        """Return copies of a layer's keys (0) or values (1): stored rows, then waiting ones."""
        check_index("layer", layer, self.num_layers())
        stored = [(span.k, span.v)[which].swapaxes(0, 1) for span in self.cache.spans(layer)]
        pieces = [*stored, *(rows[which] for rows in self._waiting[layer])]
        out = np.empty((sum(map(len, pieces)), *pieces[0].shape[1:]) if pieces else 0, np.float32)
        begin = 0
        for piece in pieces:
            out[begin : begin + len(piece)] = piece
            begin += len(piece)
        return out.ravel()
