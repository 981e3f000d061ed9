"""forgellm_runtime's ``kv_cache``: token-major f32 rows of one sequence, appended layer by layer, then advanced."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, Running, read_rows, to_integer

__all__ = ["KVCache"]


class KVCache(Copied):
    """Keys and values of one sequence, which grows without a limit.

    Append the rows of a token in every layer, then advance. What was appended is read at once.

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
        self._running = Running(kvcache.KVCache(num_layers, num_kv_heads, head_dim, None, dtype="f32"))

    @classmethod
    def with_capacity(cls, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int) -> Self:
        """Return a cache that has the memory for `max_seq_len` tokens, and grows beyond them."""
        self = cls(num_layers, num_kv_heads, head_dim)
        if to_integer("max_seq_len", max_seq_len, 0):
            self.cache.reserve(max_seq_len)
        return self

    @property
    def cache(self) -> kvcache.KVCache:
        """The cache below, with the tokens up to `len` in sequence 0."""
        return self._running.cache

    def append(self, layer: int, k_data: npt.ArrayLike, v_data: npt.ArrayLike) -> None:
        """Append the running token's rows in a layer.

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
            If the numbers are of no whole token, of another number of tokens than in the layers before, or the layer
            has its rows already.
        """
        shape = -1, self.cache.layers[0].num_kv_heads, self.cache.layers[0].head_dim
        self._running.put(layer, read_rows(k_data, "k_data", *shape), read_rows(v_data, "v_data", *shape))

    def advance(self) -> None:
        """Go on to the next token.

        Raises
        ------
        ValueError
            If a layer has no rows of the running token.
        """
        if self._running.batch is None:
            raise ValueError("advance(): nothing was appended; append the token's rows in every layer first")
        self._running.commit()

    def k(self, layer: int) -> npt.NDArray[Any]:
        """Return the keys of a layer, all that were appended: a copy, flat, in the order token, head, element."""
        return self._running.rows(layer)[0].swapaxes(0, 1).flatten()

    def v(self, layer: int) -> npt.NDArray[Any]:
        """Return the values of a layer, as `k` does keys."""
        return self._running.rows(layer)[1].swapaxes(0, 1).flatten()

    def len(self) -> int:
        """Return the number of tokens, up to the last `advance`."""
        return self.cache.seq_len()

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
        """Forget all tokens, and the running one."""
        self._running.clear()

    def clone(self) -> Self:
        """Return an independent copy.

        Raises
        ------
        kvcache.CacheBusyError
            If a token is running: advance first.
        """
        return copy.copy(self)
