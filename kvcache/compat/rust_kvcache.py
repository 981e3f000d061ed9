"""``KvCache`` and ``PagedKvCache``, head-major f32 in Rust: one head of one position is stored at a time.

The running token is the one behind the stored tokens: the token of the open batch, whose slots are written in place. In
private methods, `which` is 0 for keys and 1 for values.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, Rows, Running, check_index, read_rows, to_integer

__all__ = ["KvCache", "PagedKvCache"]


class KvCache(Copied):
    """Keys and values of one sequence of at most `max_seq_len` tokens, zeros where nothing was stored.

    The next token is the one at `seq_len`; its rows are read as soon as they are stored. `advance` makes it part of
    the sequence. Storing at a later position makes the tokens before part of it, with zeros for what was not stored.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        The shape of the model.
    max_seq_len : int
        The most tokens.
    dtype : {"f32", "f16"}, default "f32"
        The element type: ``KvCachePolicy::Standard`` and ``Fp16``.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcache.compat.rust_kvcache import KvCache
    >>> cache = KvCache(num_layers=1, num_kv_heads=2, head_dim=4, max_seq_len=16)
    >>> for head in range(2):
    ...     cache.store_key(0, head, 0, np.full(4, head))
    ...     cache.store_value(0, head, 0, np.full(4, head))
    >>> cache.keys_for(0, 1, 1)
    array([[1., 1., 1., 1.]], dtype=float32)
    >>> cache.advance()
    >>> cache.seq_len()
    1
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int, *, dtype: Any = "f32"
    ) -> None:
        if dtype not in ("f32", "f16"):
            raise ValueError(f"dtype={dtype!r}: must be 'f32' or 'f16'; kvcache.KVCache stores others")
        self._start(num_layers, num_kv_heads, head_dim, max_seq_len, dtype=dtype)

    def _start(self, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int, **options: Any) -> None:
        length = to_integer("max_seq_len", max_seq_len, 1)
        self._running = Running(kvcache.KVCache(num_layers, num_kv_heads, head_dim, length, **options))
        self._slots: list[Rows] = []  # of the running token, in each layer: [heads, 1, dim]
        self._seq_len = 0

    def __repr__(self) -> str:
        return f"<rust_kvcache.{type(self).__name__}: {self.seq_len()} of {self.max_seq_len()} tokens>"

    @property
    def cache(self) -> kvcache.KVCache:
        """The cache below, with the tokens before the running one in sequence 0."""
        return self._running.cache

    def store_key(self, layer: int, head: int, pos: int, key: npt.ArrayLike) -> None:
        """Store the key of one head at a position.

        Parameters
        ----------
        layer, head, pos : int
            Where to store it: at any position below `max_seq_len`, stored before or not.
        key : array_like
            ``[head_dim]``.

        Raises
        ------
        IndexError
            If there is no such layer, head or position.
        ValueError
            If the length of `key` is not `head_dim`.
        """
        self._store(0, layer, head, pos, key)

    def store_value(self, layer: int, head: int, pos: int, value: npt.ArrayLike) -> None:
        """Store the value of one head at a position, as `store_key` does a key."""
        self._store(1, layer, head, pos, value)

    def keys_for(self, layer: int, head: int, seq_len: int) -> npt.NDArray[Any]:
        """Return the keys of one head at positions 0 to `seq_len` - 1, the running token's included.

        Returns
        -------
        numpy.ndarray
            ``[seq_len, head_dim]``, contiguous and read-only: a view of what is stored, or a copy where zeros stand
            for what is not.

        Raises
        ------
        IndexError
            If there is no such layer or head.
        ValueError
            If `seq_len` is negative.
        """
        return self._head(0, layer, head, seq_len)

    def values_for(self, layer: int, head: int, seq_len: int) -> npt.NDArray[Any]:
        """Return the values of one head, as `keys_for` does its keys."""
        return self._head(1, layer, head, seq_len)

    def extract_block(self, layer: int, start_pos: int, block_size: int) -> Rows:
        """Return copies of the keys and values at `block_size` positions.

        Returns
        -------
        tuple of numpy.ndarray
            ``[num_kv_heads * block_size * head_dim]`` of f32 each, in the order head, position, element; zeros where
            nothing is stored, and past `max_seq_len`.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If `start_pos` is negative, or `block_size` below 1.
        """
        start_pos, block_size = self._check_block(layer, start_pos, block_size)
        blocks = np.zeros((2, self.num_kv_heads(), block_size, self.head_dim()), np.float32)
        for block, rows in zip(blocks, self._running.rows(layer), strict=True):
            part = rows[:, start_pos : start_pos + block_size]
            block[:, : part.shape[1]] = part
        return blocks[0].ravel(), blocks[1].ravel()

    def inject_block(
        self, layer: int, start_pos: int, block_size: int, keys: npt.ArrayLike, values: npt.ArrayLike
    ) -> None:
        """Store keys and values at `block_size` positions, in the order that `extract_block` returns.

        Rows past `max_seq_len` are left out. `seq_len` stays as it is.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If an array does not have as many numbers, `start_pos` is negative, or `block_size` below 1.
        """
        start_pos, block_size = self._check_block(layer, start_pos, block_size)
        shape = self.num_kv_heads(), block_size, self.head_dim()
        rows = read_rows(keys, "keys", *shape), read_rows(values, "values", *shape)
        if start_pos < self.max_seq_len():
            self._grow(min(start_pos + block_size, self.max_seq_len()))
            self.cache.inject(layer, start_pos, *rows, skip_missing=True)

    def advance(self) -> None:
        """Make the running token part of the sequence. Rows that it lacks are zeros.

        Raises
        ------
        kvcache.CacheFullError
            If there are `max_seq_len` tokens.
        """
        if self._seq_len == self.cache.seq_len():
            self._begin()
            self._commit()
        self._seq_len += 1

    def set_seq_len(self, n: int) -> None:
        """Set the number of tokens, at most to `max_seq_len`: drop those behind it, or add tokens of zeros.

        Raises
        ------
        ValueError
            If `n` is negative.
        """
        self._seq_len = min(to_integer("n", n, 0), self.max_seq_len())
        self._grow(self._seq_len)
        self.cache.truncate(self._seq_len)

    def clear(self) -> None:
        """Forget all tokens, and keep the memory."""
        self._slots = []
        self._running.clear()
        self._seq_len = 0

    def seq_len(self) -> int:
        """Return the number of tokens."""
        return self._seq_len

    def max_seq_len(self) -> int:
        """Return the most tokens."""
        return self.cache.max_seq_len or 0

    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.cache.num_layers

    def num_kv_heads(self) -> int:
        """Return the number of heads."""
        return self.cache.layers[0].num_kv_heads

    def head_dim(self) -> int:
        """Return the elements of a head."""
        return self.cache.layers[0].head_dim

    def memory_bytes(self) -> int:
        """Return the bytes of the rows of `max_seq_len` tokens; `cache.nbytes` are taken so far."""
        return self.cache.capacity_bytes or 0

    def utilization_ratio(self) -> float:
        """Return the number of tokens by the most there may be."""
        return self._seq_len / self.max_seq_len()

    def _begin(self) -> None:
        """Begin the token behind what is stored, with zeros in every layer."""
        if self._running.batch is not None:
            return
        batch = self._running.begin(1)
        try:
            self._slots = [batch.slots(layer) for layer in range(self.cache.num_layers)]
            for layer, (k, v) in enumerate(self._slots):
                k[:] = v[:] = 0
                batch.written(layer, 0, 1)
        except BaseException:
            self._slots = []
            self._running.discard()
            raise

    def _commit(self) -> None:
        self._slots = []
        self._running.commit()

    def _grow(self, length: int) -> None:
        """Make `length` tokens part of what is stored, if there are not as many: the running one, then zeros."""
        self._commit()
        missing = length - self.cache.seq_len()
        if missing > 0:
            zeros = np.zeros((2, missing, self.num_kv_heads(), self.head_dim()), np.float32)
            for layer in range(self.cache.num_layers):
                self._running.put(layer, *zeros)
            self._running.commit()

    def _store(self, which: int, layer: int, head: int, pos: int, row: npt.ArrayLike) -> None:
        """Store a head of the running token, or replace a head of a stored one."""
        self._check_head(layer, head)
        check_index("pos", pos, self.max_seq_len())
        new = read_rows(row, ("key", "value")[which], 1, self.head_dim())[0]
        if pos > self.cache.seq_len():
            self._grow(pos)
        if pos == self.cache.seq_len():
            self._begin()
            self._slots[layer][which][head, 0] = new
        else:
            self._commit()
            rows = self.cache.extract(layer, pos, pos + 1)
            rows[which][head, 0] = new
            self.cache.inject(layer, pos, *rows)

    def _check_head(self, layer: int, head: int) -> None:
        check_index("layer", layer, self.num_layers())
        check_index("head", head, self.num_kv_heads())

    def _check_block(self, layer: int, start_pos: int, block_size: int) -> tuple[int, int]:
        check_index("layer", layer, self.num_layers())
        return to_integer("start_pos", start_pos, 0), to_integer("block_size", block_size, 1)

    def _head(self, which: int, layer: int, head: int, seq_len: int) -> npt.NDArray[Any]:
        """Return the rows of a head at the first positions, and zeros where nothing is stored."""
        self._check_head(layer, head)
        seq_len = to_integer("seq_len", seq_len, 0)
        rows = self._running.rows(layer)[which][head, :seq_len]
        if len(rows) < seq_len:
            rows = np.concatenate([rows, np.zeros((seq_len - len(rows), self.head_dim()), rows.dtype)])
            rows.flags.writeable = False
        return rows


class PagedKvCache(KvCache):
    """A `KvCache` in pages, of which memory is taken as they are needed.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, max_seq_len : int
        As for `KvCache`; pages are of 256 tokens.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int) -> None:
        self._start(num_layers, num_kv_heads, head_dim, max_seq_len, dtype="f32", block_size=256)

    @classmethod
    def with_page_size(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int, page_size: int
    ) -> Self:
        """Return a cache with pages of `page_size` tokens."""
        self = cls.__new__(cls)
        page_size = to_integer("page_size", page_size, 1)
        self._start(num_layers, num_kv_heads, head_dim, max_seq_len, dtype="f32", block_size=page_size)
        return self

    def clear(self) -> None:
        """Forget all tokens, and free all pages."""
        super().clear()
        self.cache.compact()

    def keys_for(self, layer: int, head: int, seq_len: int) -> npt.NDArray[Any]:
        """Return a copy of the keys of one head at positions 0 to `seq_len` - 1, ``[seq_len, head_dim]``."""
        return super().keys_for(layer, head, seq_len).copy()

    def values_for(self, layer: int, head: int, seq_len: int) -> npt.NDArray[Any]:
        """Return a copy of the values of one head, as `keys_for` does its keys."""
        return super().values_for(layer, head, seq_len).copy()

    def page_size(self) -> int:
        """Return the tokens of a page."""
        return self.cache.block_size

    def total_pages(self) -> int:
        """Return the number of pages in use; a page here holds every head of every layer."""
        return self.cache.stats()["blocks_in_use"]

    def memory_usage_bytes(self) -> int:
        """Return the bytes that are taken, bookkeeping included."""
        return self.cache.nbytes

    def utilization_ratio(self) -> float:
        """Return the part of the pages in use that holds tokens."""
        pages = self.total_pages()
        return self._seq_len / (pages * self.page_size()) if pages else 0.0
