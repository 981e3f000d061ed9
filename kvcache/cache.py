"""The cache, and the batch: a forward pass through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    overload,
)

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache._core import INT32_MAX, INT64_MAX, MAX_THREADS, integer
from kvcache.policy import FullAttention, Policy, SlidingWindow

__all__ = ["AnyArray", "Batch", "DType", "KVCache", "Layout", "Span"]

DType: TypeAlias = Literal["f32", "f16", "bf16"]
Layout: TypeAlias = Literal["THD", "HTD"]
T = TypeVar("T")


class SupportsDLPack(Protocol):
    """An array of any library that can hand its memory over, as NumPy's and PyTorch's can."""

    def __dlpack__(self) -> Any: ...


class SupportsArray(Protocol):
    """What NumPy can make an array of."""

    def __array__(self) -> npt.NDArray[Any]: ...


AnyArray: TypeAlias = npt.NDArray[Any] | SupportsDLPack | SupportsArray

MAX_LAYERS = 1 << 20  # the limits of the core, for messages that name the arguments as they are called here
MAX_DIM = 1 << 20


class Layer(NamedTuple):
    """What one layer stores."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_dtype: DType
    v_dtype: DType
    policy: Policy

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        types = self.k_dtype if self.v_dtype == self.k_dtype else f"{self.k_dtype}/{self.v_dtype}"
        return f"{_count(self.num_kv_heads, 'KV head')} x {dims}, {types}, {self.policy!r}"


class KVCache:
    """The keys and values of the tokens that a model has seen, for one sequence or many.

    Parameters
    ----------
    num_layers : int
        How many attention layers the model has.
    num_kv_heads : int or sequence of int
        KV heads; this and whatever else says "or sequence" takes one value for all layers or one per layer.
    head_dim : int or sequence of int
        Elements of one key of one head.
    max_seq_len : int or None
        How many rows one sequence may hold in one layer; None: no limit.
    v_head_dim : int or sequence of int, optional
        Elements of one value of one head; by default `head_dim`.
    dtype : {"f32", "f16", "bf16"} or sequence of these, default "f16"
        The type that rows are stored as.
    k_dtype, v_dtype : {"f32", "f16", "bf16"} or sequence of these, optional
        The type of keys, or of values, where that is not `dtype`.
    policy : FullAttention or SlidingWindow or sequence of these, default FullAttention()
        Which positions a query may see, and so which rows are kept.
    max_sequences : int or None, default 1
        How many sequences may hold rows; None: no limit. It is looked at when a batch begins: to fork needs no room.
    capacity : int, optional
        How many tokens all sequences together may hold in any layer, those that several share counted once. By default
        ``max_seq_len * max_sequences``, and no limit where one of these is None.
    max_bytes : int, optional
        A hard limit of `nbytes`. By default there is none.
    block_size : int, optional
        Tokens in a block, the unit of allocation and of sharing. By default `max_seq_len`, so that a sequence lies in
        one piece, where that is given, there may be one sequence only, and every layer sees everything; else 64.
    num_threads : int, optional
        How many threads one call uses; by default `get_num_threads` at the time of the call.

    Raises
    ------
    ValueError
        If a number is too small or too large, a name is unknown, or a sequence has not one entry per layer.
    TypeError
        If an argument is of the wrong type: an integer must be one, neither a float nor a bool.
    MemoryError
        If there is not enough for the bookkeeping. Rows take no memory before they are needed.

    Notes
    -----
    Any thread may call any method. An open batch owns its sequences: to edit these, to compact or to close the cache
    raises `CacheBusyError` until it is committed or aborted; other sequences may be edited freely. The GIL is released
    while rows are stored, copied, moved or attended over.

    A sequence is named by any 64-bit integer. One that holds nothing is empty, not unknown: to look at it yields 0, -1
    or no rows, to edit it does nothing. The other methods raise ``ValueError`` once the cache is closed.

    Examples
    --------
    Two layers of four query heads and two KV heads. A prompt of three tokens, then one token more:

    >>> import numpy as np
    >>> import kvcache
    >>> rng = np.random.default_rng(0)
    >>> cache = kvcache.KVCache(num_layers=2, num_kv_heads=2, head_dim=8, max_seq_len=64)
    >>> for tokens in (3, 1):
    ...     with cache.batch(tokens) as batch:
    ...         for layer in range(2):
    ...             q = rng.standard_normal((tokens, 4, 8), np.float32)
    ...             k = rng.standard_normal((tokens, 2, 8), np.float32)
    ...             out = batch.attend(layer, q, k, k)
    >>> out.shape, out.dtype
    ((1, 4, 8), dtype('float32'))
    >>> cache.seq_len(), cache.next_position()
    (4, 4)
    """

    __slots__ = (
        "__weakref__",
        "_block_size",
        "_capacity",
        "_core",
        "_layers",
        "_max_bytes",
        "_max_seq_len",
        "_max_sequences",
        "_num_threads",
    )

    def __init__(
        self,
        num_layers: SupportsIndex,
        num_kv_heads: SupportsIndex | Sequence[SupportsIndex],
        head_dim: SupportsIndex | Sequence[SupportsIndex],
        max_seq_len: SupportsIndex | None,
        *,
        v_head_dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: DType | Sequence[DType] = "f16",
        k_dtype: DType | Sequence[DType] | None = None,
        v_dtype: DType | Sequence[DType] | None = None,
        policy: Policy | Sequence[Policy] = FullAttention(),  # noqa: B008  (frozen)
        max_sequences: SupportsIndex | None = 1,
        capacity: SupportsIndex | None = None,
        max_bytes: SupportsIndex | None = None,
        block_size: SupportsIndex | None = None,
        num_threads: SupportsIndex | None = None,
    ) -> None:
        n = integer(num_layers, "num_layers", 1, MAX_LAYERS)
        k_dims = _per_layer(head_dim, "head_dim", n, _dim)
        dtypes = _per_layer(dtype, "dtype", n, _dtype)
        self._layers = list(
            map(
                Layer,
                _per_layer(num_kv_heads, "num_kv_heads", n, _dim),
                k_dims,
                k_dims if v_head_dim is None else _per_layer(v_head_dim, "v_head_dim", n, _dim),
                dtypes if k_dtype is None else _per_layer(k_dtype, "k_dtype", n, _dtype),
                dtypes if v_dtype is None else _per_layer(v_dtype, "v_dtype", n, _dtype),
                _per_layer(policy, "policy", n, _policy),
            )
        )
        self._max_seq_len = _limit(max_seq_len, "max_seq_len", INT32_MAX - 1)
        self._max_sequences = _limit(max_sequences, "max_sequences", INT32_MAX)
        self._max_bytes = _limit(max_bytes, "max_bytes", INT64_MAX)
        self._num_threads = _limit(num_threads, "num_threads", MAX_THREADS)
        self._core = _core.Cache(
            [_core_layer(layer) for layer in self._layers],
            self._max_seq_len or 0,
            self._max_sequences or 0,
            _limit(capacity, "capacity", INT64_MAX) or 0,
            self._max_bytes or 0,
            _limit(block_size, "block_size", INT32_MAX - 1) or 0,
            self._num_threads or 0,
        )
        self._capacity = self._core.capacity()  # where they were left to the core
        self._block_size = self._core.block_size()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        layers = " + ".join(f"{_count(n, 'layer')} of {layer}" for layer, n in Counter(map(str, self._layers)).items())
        if self._core.closed:
            return f"<KVCache: {layers}; closed>"
        sequences = self.sequences
        tokens = _count(sum(self.seq_len(seq_id) for seq_id in sequences), "token")
        limit = f", max_seq_len {self._max_seq_len}" if self._max_seq_len is not None else ""
        return f"<KVCache: {layers}{limit}; {tokens} in {_count(len(sequences), 'sequence')}, {_size(self.nbytes)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KVCache can be neither pickled nor copied: keep the tokens and feed them again, gather() the rows, "
            "or fork() a sequence"
        )

    # -- what it was made as

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    @property
    def num_kv_heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return tuple(layer.num_kv_heads for layer in self._layers)

    @property
    def head_dim(self) -> tuple[int, ...]:
        """Elements of a key of one head, in each layer."""
        return tuple(layer.head_dim for layer in self._layers)

    @property
    def v_head_dim(self) -> tuple[int, ...]:
        """Elements of a value of one head, in each layer."""
        return tuple(layer.v_head_dim for layer in self._layers)

    @property
    def k_dtype(self) -> tuple[DType, ...]:
        """The type that keys are stored as, in each layer."""
        return tuple(layer.k_dtype for layer in self._layers)

    @property
    def v_dtype(self) -> tuple[DType, ...]:
        """The type that values are stored as, in each layer."""
        return tuple(layer.v_dtype for layer in self._layers)

    @property
    def policy(self) -> tuple[Policy, ...]:
        """The policy of each layer."""
        return tuple(layer.policy for layer in self._layers)

    @property
    def max_seq_len(self) -> int | None:
        """How many rows one sequence may hold in one layer; None: no limit."""
        return self._max_seq_len

    @property
    def max_sequences(self) -> int | None:
        """How many sequences may hold rows; None: no limit."""
        return self._max_sequences

    @property
    def capacity(self) -> int | None:
        """How many tokens all sequences together may hold in any layer; None: no limit."""
        return self._capacity

    @property
    def max_bytes(self) -> int | None:
        """The limit of `nbytes`; None: no limit."""
        return self._max_bytes

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_threads(self) -> int | None:
        """How many threads one call uses; None: `get_num_threads` at the time of the call."""
        return self._num_threads

    # -- a forward pass

    def batch(
        self,
        n: SupportsIndex | None = None,
        *,
        positions: Iterable[SupportsIndex] | None = None,
        seq_ids: Iterable[SupportsIndex] | None = None,
    ) -> Batch:
        """Begin a forward pass: make room for its tokens in every layer, and evict what no later query can see.

        It does so wholly, or raises and changes nothing. Give exactly one of `n` and `positions`.

        Parameters
        ----------
        n : int, optional
            The next `n` tokens of sequence 0: they stand at `next_position` and after it.
        positions : iterable of int, optional
            The position of each token in its sequence.
        seq_ids : iterable of int, optional
            The sequence of each of the `positions`; by default they are all of sequence 0.

        Returns
        -------
        Batch
            To be used in a ``with``, or ended by `Batch.commit` or `Batch.abort`.

        Raises
        ------
        CacheFullError
            If `max_seq_len`, `max_sequences`, `capacity` or `max_bytes` would be passed.
        RowsGoneError
            If a token would see rows that were evicted.
        CacheBusyError
            While another batch is open.
        ValueError
            If a position is negative, there is no token, or `seq_ids` has not one entry per position.
        TypeError
            If something is no integer, or `n` and `positions` are given both or neither.
        MemoryError
            If there is not enough.

        Examples
        --------
        >>> import kvcache
        >>> cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=None)
        >>> batch = cache.batch(positions=[0, 1, 0], seq_ids=[7, 7, 8])
        >>> len(batch), batch.positions, batch.seq_ids
        (3, array([0, 1, 0], dtype=int32), array([7, 7, 8]))
        >>> batch.abort()
        """
        if (n is None) == (positions is None):
            raise TypeError("batch() takes exactly one of n, the number of next tokens of sequence 0, and positions")
        if n is not None and seq_ids is not None:
            raise TypeError("seq_ids goes with positions: n is the number of next tokens of sequence 0")
        return Batch(self._core.begin(n, positions, seq_ids))

    # -- reading rows

    def keys(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the stored keys of a sequence in a layer, in order of arrival, as they are stored.

        Parameters
        ----------
        layer : int
            Which layer.
        seq_id : int, default 0
            Which sequence.
        copy : bool, optional
            False: a view without a copy. True: a copy. None, the default: a view where that is possible, else a copy.

        Returns
        -------
        numpy.ndarray
            Of shape ``[num_kv_heads, len, head_dim]`` and of the stored type; bf16 as ``ml_dtypes.bfloat16`` where
            that is installed, else as two bytes that go out through DLPack. A view is read-only and keeps its rows as
            they are, whatever becomes of the sequence; while it is there, `compact` and `close` raise ``BufferError``.

        Raises
        ------
        ValueError
            If `copy` is False and the rows do not lie in one piece: `spans` has a view of each.
        IndexError
            If there is no such layer.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(1, 2, 8, 64, dtype="f32")
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 2, 8), np.float32), np.ones((3, 2, 8), np.float32))
        >>> cache.keys(0, copy=False).shape
        (2, 3, 8)
        """
        return self._core.rows(seq_id, layer, copy, False)

    def values(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the stored values, ``[num_kv_heads, len, v_head_dim]``; for the rest see `keys`."""
        return self._core.rows(seq_id, layer, copy, True)

    def get(
        self, layer: SupportsIndex, position: SupportsIndex, *, seq_id: SupportsIndex = 0
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """Return the key and the value of one token, as new f32 arrays.

        Parameters
        ----------
        layer : int
            Which layer.
        position : int
            Which token; of several at one position, the latest.
        seq_id : int, default 0
            Which sequence.

        Returns
        -------
        tuple of numpy.ndarray or None
            ``[num_kv_heads, head_dim]`` and ``[num_kv_heads, v_head_dim]``; None where the layer does not hold it.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If `position` is negative.
        """
        return self._core.get(seq_id, layer, position)

    def gather(
        self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0, dtype: DType = "f32"
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return copies of all keys and values of a sequence in a layer, in order of arrival.

        Parameters
        ----------
        layer : int
            Which layer.
        seq_id : int, default 0
            Which sequence.
        dtype : {"f32", "f16", "bf16"}, default "f32"
            What the rows are converted to.

        Returns
        -------
        tuple of numpy.ndarray
            ``[num_kv_heads, len, head_dim]`` and ``[num_kv_heads, len, v_head_dim]``.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If there is no such `dtype`.
        """
        return self._core.gather(seq_id, layer, _core.TYPES[_dtype(dtype, "dtype")])

    def spans(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0) -> list[Span]:
        """Return the stored rows of a sequence in a layer where they lie, in order of arrival.

        Returns
        -------
        list of Span
            With views as `keys` returns them; together they are all rows.

        Raises
        ------
        IndexError
            If there is no such layer.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(1, 2, 8, 64, block_size=16)
        >>> with cache.batch(20) as batch:
        ...     batch.put(0, np.ones((20, 2, 8), np.float32), np.ones((20, 2, 8), np.float32))
        >>> [span.k.shape for span in cache.spans(0)]
        [(2, 16, 8), (2, 4, 8)]
        """
        return [
            Span(k, v, np.arange(first, first + rows, dtype=np.int32), delta)
            for k, v, first, rows, delta in self._core.spans(seq_id, layer)
        ]

    def positions(self, *, seq_id: SupportsIndex = 0, layer: SupportsIndex = 0) -> npt.NDArray[np.int32]:
        """Return the positions of a sequence's rows in a layer, in order of arrival."""
        return self._core.positions(seq_id, layer)

    # -- looking at sequences

    @property
    def sequences(self) -> list[int]:
        """The ids of the sequences that hold rows, ascending."""
        return self._core.sequences()

    def seq_len(self, seq_id: SupportsIndex = 0, *, layer: SupportsIndex | None = None) -> int:
        """Return how many rows a sequence holds in a layer, by default in the one that keeps most."""
        return self._core.seq_len(seq_id, layer)

    def first_position(self, seq_id: SupportsIndex = 0) -> int:
        """Return the smallest position of which some layer holds a row; -1 where nothing is stored."""
        return self._core.first_position(seq_id)

    def last_position(self, seq_id: SupportsIndex = 0) -> int:
        """Return the largest position of which some layer holds a row; -1 where nothing is stored."""
        return self._core.last_position(seq_id)

    def next_position(self, seq_id: SupportsIndex = 0) -> int:
        """Return where the runner goes on from: `last_position` + 1, and so 0 where nothing is stored."""
        return self._core.next_position(seq_id)

    def can_resume(self, position: SupportsIndex, *, seq_id: SupportsIndex = 0) -> bool:
        """Say whether a sequence can go on from a position.

        It can if that is at most `next_position`, and no row that a query there or later would see was evicted.

        Examples
        --------
        >>> import kvcache
        >>> cache = kvcache.KVCache(1, 2, 8, 64, policy=kvcache.SlidingWindow(4))
        >>> cache.can_resume(0), cache.can_resume(1)
        (True, False)
        """
        return self._core.can_resume(seq_id, position)

    # -- editing sequences

    def copy_prefix(self, src: SupportsIndex, dst: SupportsIndex, length: SupportsIndex) -> None:
        """Make `dst` the rows of `src` at positions below `length`, whatever it held before.

        No row is copied: the two share them until one drops them, and each appends to its own. That needs no room: how
        many sequences there may be is looked at when the next batch begins.

        Raises
        ------
        CacheBusyError
            If one of the two is part of an open batch.
        ValueError
            If `src` and `dst` are the same, or `length` is negative.
        """
        self._core.copy_prefix(src, dst, length)

    def fork(self, src: SupportsIndex, dst: SupportsIndex) -> None:
        """Make `dst` share all rows of `src`; for the rest see `copy_prefix`.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=2)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 2, 8), np.float32), np.ones((3, 2, 8), np.float32))
        >>> cache.fork(0, 1)
        >>> cache.sequences, cache.seq_len(1), cache.stats()["live_slots"]
        ([0, 1], 3, 3)
        """
        self._core.fork(src, dst)

    def keep(self, seq_id: SupportsIndex) -> None:
        """Forget every sequence but this one.

        Raises
        ------
        CacheBusyError
            If one of the others is part of an open batch.
        """
        self._core.keep(seq_id)

    def clear(self, seq_id: SupportsIndex | None = None) -> None:
        """Forget one sequence, by default all. Memory is kept for reuse; `compact` gives it back.

        Raises
        ------
        CacheBusyError
            If one of them is part of an open batch.
        """
        self._core.clear(seq_id)

    def remove(
        self,
        begin: SupportsIndex = 0,
        end: SupportsIndex | None = None,
        *,
        seq_id: SupportsIndex = 0,
        shift: bool = True,
    ) -> None:
        """Drop the rows of a sequence at positions ``[begin, end)``.

        Parameters
        ----------
        begin : int, default 0
            The first position to drop.
        end : int, optional
            Where to stop; by default all after `begin` are dropped.
        seq_id : int, default 0
            Which sequence.
        shift : bool, default True
            Whether later tokens move down by ``end - begin``; if not, a gap stays.

        Raises
        ------
        NotSupportedError
            If later tokens would have to move: their keys would have to be rotated.
        CacheBusyError
            If the sequence is part of an open batch.
        ValueError
            If `begin` is negative or `end` is below it.
        """
        self._core.remove(seq_id, begin, end, shift)

    def truncate(self, length: SupportsIndex, *, seq_id: SupportsIndex = 0) -> None:
        """Drop the rows of a sequence at positions of `length` and more.

        Raises
        ------
        CacheBusyError
            If the sequence is part of an open batch.
        ValueError
            If `length` is negative.
        """
        self._core.truncate(seq_id, length)

    # -- memory

    def compact(self) -> None:
        """Move rows together so that no block has holes, and give the memory this frees back.

        Raises
        ------
        CacheBusyError
            While a batch is open.
        BufferError
            While a view of rows is there.
        MemoryError
            If there is not enough to move them.
        """
        self._core.compact()

    def close(self) -> None:
        """Free everything; a second time does nothing. The end of a ``with`` does it too.

        Raises
        ------
        CacheBusyError
            While a batch is open, or a call runs in another thread.
        BufferError
            While a view of rows is there.
        """
        self._core.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache holds, bookkeeping included."""
        return self._core.nbytes()

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of rows when `capacity` tokens are stored in every layer; None where there is no limit."""
        return self._core.capacity_bytes()

    @property
    def utilization(self) -> float:
        """Tokens held as a fraction of `capacity`; where that has no limit, of what the blocks there are can hold."""
        return self._core.utilization()

    def stats(self) -> dict[str, int]:
        """Return counters since the cache was made, and what it holds now.

        Returns
        -------
        dict
            ``batches`` and ``tokens`` committed, batches ``aborted``; ``rows_evicted``, ``rows_moved`` and
            ``compactions``; blocks whose memory was taken, reused and given back: ``blocks_opened``, ``blocks_reused``,
            ``blocks_returned``. Now: ``live_slots`` hold a token, ``wasted_slots`` wait for a compaction,
            ``blocks_in_use`` and ``blocks_free``. Rows, slots and blocks are summed over the layer groups (the layers
            of one policy), not over layers.
        """
        return self._core.stats()

    def validate(self) -> None:
        """Check every invariant of the bookkeeping; meant for tests.

        Raises
        ------
        KVCacheError
            If one does not hold: which, and why.
        """
        self._core.validate()


class Batch:
    """The tokens of one forward pass, of one sequence or many; `KVCache.batch` makes it.

    It is a transaction: `commit`, or the end of a ``with``, makes its tokens part of their sequences; `abort`, or an
    exception in the ``with``, and they never were. Before that, its rows are seen by its own queries only. The rows
    of every layer have to be put before the commit.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcache
    >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64)
    >>> x = np.ones((3, 2, 8), np.float32)
    >>> with cache.batch(3) as batch:
    ...     out = batch.attend(0, x, x, x)
    >>> cache.seq_len()
    3
    """

    __slots__ = ("__weakref__", "_core")

    def __init__(self, core: _core.Batch) -> None:
        self._core = core

    def __len__(self) -> int:
        return self._core.num_tokens

    def __repr__(self) -> str:
        return f"<Batch: {_count(len(self), 'token')}, {'ended' if self._core.ended else 'open'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._core.abort()
            return
        try:
            self._core.commit()
        except Exception:
            self._core.abort()
            raise

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """The position of each token, read-only."""
        return self._core.positions

    @property
    def seq_ids(self) -> npt.NDArray[np.int64]:
        """The sequence of each token, read-only."""
        return self._core.get_seq_ids()

    def put(
        self, layer: SupportsIndex, k: AnyArray, v: AnyArray, *, first: SupportsIndex = 0, layout: Layout = "THD"
    ) -> None:
        """Store keys and values of one layer.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : array
            ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, v_head_dim]``, of f32, f16 or bf16: NumPy
            arrays, or anything with DLPack on the CPU. They are read where they lie, with any strides over tokens and
            heads, and converted to the stored type on the way.
        first : int, default 0
            The token of the batch that the arrays begin with. Threads may put different tokens at once.
        layout : {"THD", "HTD"}, default "THD"
            The order of the axes: tokens, heads, dim; or heads first.

        Raises
        ------
        IndexError
            If there is no such layer, or `first` and the tokens given pass the end of the batch.
        ValueError
            If a shape is wrong, a token was put before, a tensor requires grad, or the batch has ended.
        TypeError
            If something is no array, or one of another element type.
        """
        self._core.put(layer, k, v, first, layout)

    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: AnyArray,
        k: AnyArray | None = None,
        v: AnyArray | None = None,
        *,
        first: SupportsIndex = 0,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None,
        alibi: AnyArray | None = None,
        layout: Layout = "THD",
        out: AnyArray | None = None,
        return_lse: Literal[False] = False,
    ) -> npt.NDArray[Any]: ...

    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: AnyArray,
        k: AnyArray | None = None,
        v: AnyArray | None = None,
        *,
        first: SupportsIndex = 0,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None,
        alibi: AnyArray | None = None,
        layout: Layout = "THD",
        out: AnyArray | None = None,
        return_lse: Literal[True],
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]: ...

    def attend(
        self,
        layer: SupportsIndex,
        q: AnyArray,
        k: AnyArray | None = None,
        v: AnyArray | None = None,
        *,
        first: SupportsIndex = 0,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None,
        alibi: AnyArray | None = None,
        layout: Layout = "THD",
        out: AnyArray | None = None,
        return_lse: bool = False,
    ) -> npt.NDArray[Any] | tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Attend over all that each query may see: the stored rows of its sequence, and those of this batch.

        A query sees positions up to its own, as far as the policy of the layer shows them. The rows of the batch that
        it can see must have been put in this layer; `k` and `v` put those of the query tokens first.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array
            ``[tokens, num_heads, head_dim]`` of f32, f16 or bf16, where `num_heads` is a multiple of `num_kv_heads`;
            the same arrays as in `put` will do.
        k, v : array, optional
            As in `put`, of as many tokens as `q`.
        first : int, default 0
            The token of the batch that the arrays begin with.
        scale : float, optional
            What scores are multiplied by; by default ``1 / sqrt(head_dim)``.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``, as in Gemma 2.
        sinks : array, optional
            ``[num_heads]`` of f32: a logit per head that joins the softmax and has no value, as in gpt-oss.
        alibi : array, optional
            ``[num_heads]`` of f32: ``slope * (key position - query position)`` is added to the score [1]_.
        layout : {"THD", "HTD"}, default "THD"
            The order of the axes of `q`, `k`, `v` and the result: tokens, heads, dim; or heads first.
        out : array, optional
            Where the result goes: of the type of `q` and of the shape below, and overlapping no other argument.
        return_lse : bool, default False
            Whether to return the log-sum-exp of the scores too.

        Returns
        -------
        out : numpy.ndarray
            ``[tokens, num_heads, v_head_dim]`` of the type of `q`, or `out` itself; 0 where a query sees nothing. bf16
            as ``ml_dtypes.bfloat16`` where that is installed, else as two bytes that go out through DLPack.
        lse : numpy.ndarray
            Only with `return_lse`: ``[tokens, num_heads]`` (or heads first) of f32, natural logarithms, sinks included;
            minus infinity where a query sees nothing.

        Raises
        ------
        IndexError
            If there is no such layer, or `first` and the tokens given pass the end of the batch.
        ValueError
            If a shape is wrong, a visible token of the batch was not put, a token was put before, a tensor requires
            grad, `out` cannot be written to or overlaps, or the batch has ended.
        TypeError
            If something is no array, or one of another element type.
        MemoryError
            If there is not enough to work in.

        Notes
        -----
        Sums are kept in f32. The bits of the result depend on nothing but the sequence itself: not on threads, on where
        rows lie, or on who else is in the batch.

        References
        ----------
        .. [1] Ofir Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
           Extrapolation", ICLR 2022.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=1, head_dim=2, max_seq_len=8, dtype="f32")
        >>> k = np.zeros((2, 1, 2), np.float32)
        >>> v = np.array([[[1, 3]], [[5, 7]]], np.float32)
        >>> with cache.batch(2) as batch:
        ...     batch.attend(0, k, k, v)
        array([[[1., 3.]],
        <BLANKLINE>
               [[3., 5.]]], dtype=float32)
        """
        result: npt.NDArray[Any] | tuple[npt.NDArray[Any], npt.NDArray[np.float32]]
        result = self._core.attend(layer, q, k, v, first, scale, softcap, sinks, alibi, layout, out, return_lse)
        return result

    def commit(self) -> None:
        """End the batch: its tokens are part of their sequences. Once it has ended, this does nothing.

        Raises
        ------
        ValueError
            If a token was not put in some layer; the batch is still open then.
        CacheBusyError
            If a call is using the batch in another thread.
        """
        self._core.commit()

    def abort(self) -> None:
        """End the batch: its tokens never were. Rows that it evicted as it began stay evicted.

        Raises
        ------
        CacheBusyError
            If a call is using the batch in another thread.
        """
        self._core.abort()


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Span:
    """Stored rows that follow each other in memory and in position; `KVCache.spans` makes it.

    Attributes
    ----------
    k : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, head_dim]``.
    v : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, v_head_dim]``.
    positions : numpy.ndarray
        The position of each row, int32.
    delta : int
        How far these positions are from those that the keys were rotated for.
    """

    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    positions: npt.NDArray[np.int32]
    delta: int

    def __repr__(self) -> str:
        return f"Span(k {self.k.shape}, v {self.v.shape}, positions from {self.positions[0]}, delta {self.delta})"


def _per_layer(value: Any, name: str, num_layers: int, convert: Callable[[Any, str], T]) -> list[T]:
    """One value for each layer, from one for all or a sequence of them."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [convert(value, name)] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"len({name})={len(value)}: must be num_layers, which is {num_layers}")
    return [convert(one, f"{name}[{layer}]") for layer, one in enumerate(value)]


def _dim(value: Any, name: str) -> int:
    return integer(value, name, 1, MAX_DIM)


def _dtype(value: Any, name: str) -> DType:
    if isinstance(value, str) and value in _core.TYPES:
        return value  # type: ignore[return-value]
    raise ValueError(f"{name}={value!r}: must be 'f32', 'f16' or 'bf16'")


def _policy(value: Any, name: str) -> Policy:
    if isinstance(value, FullAttention | SlidingWindow):
        return value
    raise TypeError(f"{name}={value!r}: must be a FullAttention or a SlidingWindow")


def _limit(value: Any, name: str, most: int) -> int | None:
    return None if value is None else integer(value, name, 1, most)


def _core_layer(layer: Layer) -> tuple[int, int, int, int, int, tuple[int, int, int] | None]:
    policy = layer.policy
    window = None
    if isinstance(policy, SlidingWindow):
        window = (policy.window, policy.num_sink_tokens, policy.resume_window or policy.window)
    k_type, v_type = _core.TYPES[layer.k_dtype], _core.TYPES[layer.v_dtype]
    return layer.num_kv_heads, layer.head_dim, layer.v_head_dim, k_type, v_type, window


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _size(nbytes: float) -> str:
    """For people: 1536 is 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.{0 if units[0] == 'B' else 1}f} {units[0]}"
