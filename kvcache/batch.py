"""The batch: one forward pass through a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache.arrays import AnyArray, Flags, FloatDType, Layout, check_float_dtype
from kvcache.layer import count

__all__ = ["Batch"]


class Batch:
    """The tokens of one forward pass, of one sequence or many; `KVCache.batch` makes it.

    It is a transaction: `commit`, or the end of a ``with``, makes its tokens part of their sequences; `abort`, or an
    exception in the ``with``, and they never were. Before that, its rows are seen by its own queries only. The rows
    of every layer have to be put before the commit: not of those that share another's rows, nor of those without
    attention; and where the policy is `CrossAttention` they need not be, nor those of a sequence that is not stored.

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

    __slots__ = ("__weakref__", "_core", "_done")

    def __init__(self, core: _core.Batch, done: Callable[[], None] | None = None) -> None:
        self._core = core
        self._done = done  # to be called once it was committed

    def __len__(self) -> int:
        return self._core.num_tokens

    def __repr__(self) -> str:
        return f"<Batch: {count(len(self), 'token')}, {'ended' if self._core.ended else 'open'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._core.abort()
            return
        try:
            self.commit()
        except BaseException:
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
        self,
        layer: SupportsIndex,
        k: AnyArray,
        v: AnyArray | None = None,
        *,
        first: SupportsIndex = 0,
        seq_id: SupportsIndex | None = None,
        layout: Layout = "THD",
    ) -> None:
        """Store keys and values of one layer.

        Parameters
        ----------
        layer : int
            Which layer; one that has rows of its own.
        k, v : array
            ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, v_head_dim]``, of f32, f16 or bf16: NumPy
            arrays, or anything with DLPack on the CPU. They are read where they lie, with any strides over tokens and
            heads, and converted to the stored type on the way. `v` is left out where values lie in the keys.
        first : int, default 0
            The token of the batch that the arrays begin with. Threads may put different tokens at once.
        seq_id : int, optional
            Where the policy is `CrossAttention`: the sequence of the batch whose rows these are, any number of them,
            which replace those it had; by default the only one of the batch. They may be ``[any, tokens, heads, dim]``
            there, too, as of an image in tiles.
        layout : {"THD", "HTD", "BHTD"}, default "THD"
            The order of the axes: tokens, heads, dim; heads first; or, for sequences in lock step, ``[batch, heads,
            tokens, dim]``, where token `t` of sequence `b` is token ``b * tokens + t`` of the batch.

        Raises
        ------
        IndexError
            If there is no such layer, or `first` and the tokens given pass the end of the batch.
        ValueError
            If a shape is wrong, a token was put before, the layer shares another's rows or has no attention, `seq_id`
            is wanted or is not, a tensor requires grad, or the batch has ended.
        TypeError
            If something is no array, or one of another element type.
        CacheFullError
            If there are more than `max_len` rows for `CrossAttention`, or `max_bytes` would be passed.
        """
        self._core.put(layer, k, v, first, seq_id, layout)

    def slots(self, layer: SupportsIndex, *, first: SupportsIndex = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the memory of a token's rows, and of those after it that lie beside it, to be written to.

        That is for what computes rows where they are to lie, instead of `put`; call `written` when they are there.

        Parameters
        ----------
        layer : int
            Which layer; one that has rows of its own, of tokens.
        first : int, default 0
            The token of the batch that the arrays begin with.

        Returns
        -------
        tuple of numpy.ndarray
            ``[num_kv_heads, n, head_dim]`` and ``[num_kv_heads, n, v_head_dim]`` of the stored type; of a quantised one
            the bytes of its blocks, as uint8. They can be written to until the batch ends. Where values lie in the
            keys, the second is part of the first.

        Raises
        ------
        IndexError
            If there is no such layer, or no such token.
        ValueError
            If the token was put before, the layer shares another's rows or has no attention, or the batch has ended.
        NotSupportedError
            If the policy of the layer is `CrossAttention`.

        Notes
        -----
        Once the batch has ended, such an array is like a view that `KVCache.keys` returns: read-only, and while it is
        there, `KVCache.compact` and `KVCache.close` raise ``BufferError``. Arrays made of it, such as slices, can still
        be written to: let go of them with the batch. No other thread may put, or say that it wrote, tokens of the same
        layer while this looks which of them lie side by side.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64)
        >>> with cache.batch(3) as batch:
        ...     k, v = batch.slots(0)
        ...     k[:], v[:] = 1, 2
        ...     batch.written(0, 0, k.shape[1])
        >>> cache.values(0)[0, :, 0]
        array([2., 2., 2.], dtype=float16)
        """
        return self._core.slots(layer, first)

    def written(self, layer: SupportsIndex, first: SupportsIndex, num_tokens: SupportsIndex) -> None:
        """Say that the rows of tokens ``[first, first + num_tokens)`` were written to where `slots` showed.

        Raises
        ------
        IndexError
            If there is no such layer, or no such token.
        ValueError
            If one of the tokens was put before, or the batch has ended.
        """
        self._core.written(layer, first, num_tokens)

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
        non_causal: Flags | None = None,
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
        non_causal: Flags | None = None,
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
        non_causal: Flags | None = None,
        layout: Layout = "THD",
        out: AnyArray | None = None,
        return_lse: bool = False,
    ) -> npt.NDArray[Any] | tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Attend over all that each query may see: the stored rows of its sequence, and those of this batch.

        A query sees positions up to its own, as far as the policy of the layer shows them, and of a batch with parents
        its ancestors. The rows of the batch that it can see must have been put in this layer; `k` and `v` put those of
        the query tokens first. Of a sequence that the strategy does not store, they stay until this puts in another
        layer; what `put` puts stays until the batch ends, and so do rows that other layers share, and an encoder's.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array
            ``[tokens, num_heads, head_dim]`` of f32, f16 or bf16, where `num_heads` is a multiple of `num_kv_heads`;
            the same arrays as in `put` will do.
        k, v : array, optional
            As in `put`, of as many tokens as `q`; of any number where the policy is `CrossAttention`.
        first : int, default 0
            The token of the batch that the arrays begin with.
        scale : float, optional
            What scores are multiplied by; by default ``1 / sqrt(head_dim)``. Needed where values lie in the keys.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``, as in Gemma 2.
        sinks : array, optional
            ``[num_heads]`` of f32: a logit per head that joins the softmax and has no value, as in gpt-oss.
        alibi : array, optional
            ``[num_heads]`` of f32: ``slope * (key position - query position)`` is added to the score [1]_.
        non_causal : bool or array of bool, optional
            Whether a query sees later positions of its sequence too: all of them, or those with True among as many as
            there are queries, or tokens in the batch. Of a batch with parents it sees no more than its ancestors.
        layout : {"THD", "HTD", "BHTD"}, default "THD"
            The order of the axes of `q`, `k`, `v` and the result: tokens, heads, dim; heads first; or, for sequences in
            lock step, ``[batch, heads, tokens, dim]`` as in `put`.
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
            Only with `return_lse`: ``[tokens, num_heads]`` (or as `layout` says) of f32, natural logarithms, sinks
            included; minus infinity where a query sees nothing.

        Raises
        ------
        IndexError
            If there is no such layer, or `first` and the tokens given pass the end of the batch.
        ValueError
            If a shape is wrong, a visible token of the batch was not put, a token was put before, `scale` is needed and
            not given, a tensor requires grad, `out` cannot be written to or overlaps, or the batch has ended.
        TypeError
            If something is no array, or one of another element type.
        RowsGoneError
            If a token that is visible is of a sequence that is not stored, and its rows of the layer are gone.
        CacheFullError
            If a cross-attention layer is given more rows than it may hold, or `max_bytes` would be passed.
        MemoryError
            If there is not enough to work in.

        Notes
        -----
        Sums are kept in f32. The bits of a token's result depend on nothing but the rows it sees and which tokens of
        its sequence are in the call: not on threads, on where rows lie, or on who else is in the batch. (Infinities
        and NaN in rows may make NaN, for tokens of the call that do not see them, too.)

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
        result = self._core.attend(
            layer, q, k, v, first, scale, softcap, sinks, alibi, non_causal, layout, out, return_lse
        )
        return result

    def dense(
        self,
        layer: SupportsIndex,
        *,
        non_causal: Flags | None = None,
        dtype: FloatDType | None = None,
        layout: Layout = "HTD",
        mask: Literal["f32", "bool"] | None = "f32",
        out: Sequence[Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return all rows that the batch might see in a layer, and who sees which, for an attention of your own.

        Parameters
        ----------
        layer : int
            Which layer.
        non_causal : bool or array of bool, optional
            As in `attend`, for the tokens of the batch.
        dtype : {"f32", "f16", "bf16"}, optional
            What the rows are converted to, f32 by default.
        layout : {"HTD", "THD", "BHTD"}, default "HTD"
            How the rows lie: ``[num_kv_heads, n, dim]``, ``[n, num_kv_heads, dim]``, or each sequence by itself,
            ``[sequences, num_kv_heads, n, dim]``, where `n` is that of the sequence with most rows, and zeros, which
            nobody sees, come after those of the others. The tokens of the batch come sequence after sequence then, as
            many of each.
        mask : {"f32", "bool"} or None, default "f32"
            Which kind: to be added to the scores, 0 where the token sees the row, else minus infinity; or true where it
            does. None: no mask, which for a batch of many sequences is the largest of the arrays.
        out : tuple of two or three arrays, optional
            Where keys and values go, in place of new arrays, and, if there are three, the mask: in the shapes below.
            Keys and values of any of these types, NumPy's or DLPack's, with any strides but that of the last axis; the
            mask NumPy's, contiguous. None may lie within another.

        Returns
        -------
        k, v : numpy.ndarray
            ``[num_kv_heads, n, head_dim]`` and ``[num_kv_heads, n, v_head_dim]``, or as `layout` says, decoded and
            rotated: for each sequence of the batch, by rising id, its stored rows and those of the batch that were put,
            in order of position. In the layout ``"BHTD"``, the sequences come in the order in which the batch names
            them. The first two of `out` if that was given.
        mask : numpy.ndarray or None
            ``[tokens, n]``; in the layout ``"BHTD"``, ``[sequences, tokens of each, n]``, over the rows of the
            sequence.

        Raises
        ------
        IndexError
            If there is no such layer.
        ValueError
            If `non_causal` has not one entry per token; there is no such `dtype`, `layout` or `mask`, or `dtype` is
            given beside `out`; `out` is of another shape, read-only, or overlaps; the layout is ``"BHTD"`` and the
            sequences have not as many tokens each, side by side; or the batch has ended.
        TypeError
            If `non_causal` holds anything but booleans, or `out` anything but arrays of these types.
        RowsGoneError
            If rows are gone of a sequence that is not stored, as `attend` put them and then those of another layer.
        MemoryError
            If there is not enough.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=1, head_dim=2, max_seq_len=8, dtype="f32")
        >>> batch = cache.batch(2)
        >>> batch.put(0, np.ones((2, 1, 2), np.float32), np.ones((2, 1, 2), np.float32))
        >>> k, v, mask = batch.dense(0)
        >>> k.shape, v.shape
        ((1, 2, 2), (1, 2, 2))
        >>> mask
        array([[  0., -inf],
               [  0.,   0.]], dtype=float32)
        >>> batch.dense(0, mask="bool")[2]
        array([[ True, False],
               [ True,  True]])
        >>> k, v, mask = batch.dense(0, dtype="f16", layout="BHTD")
        >>> k.shape, k.dtype, mask.shape
        ((1, 1, 2, 2), dtype('float16'), (1, 2, 2))
        >>> batch.abort()
        """
        chosen = None if dtype is None else check_float_dtype(dtype, "dtype")
        if chosen is not None and out is not None:
            raise ValueError(f"dtype={dtype!r}: rows are converted to the type of out; leave it out")
        if mask is not None and mask not in ("f32", "bool"):
            raise ValueError(f"mask={mask!r}: must be 'f32', 'bool' or None")
        return self._core.dense(layer, non_causal, chosen, layout, mask, out)

    def commit(self, keep: Iterable[SupportsIndex] | None = None) -> None:
        """End the batch: its tokens are part of their sequences. Once it has ended, this does nothing.

        Parameters
        ----------
        keep : iterable of int, optional
            The tokens that do become part of them, by their index in the batch, in any order: the accepted ones of
            those that were speculated. By default all. Of what a strategy does not store nothing is kept.

        Raises
        ------
        ValueError
            If a token that is kept was not put in some layer, or is given twice; the batch is still open then.
        IndexError
            If there is no such token.
        TypeError
            If something is no integer.
        CacheBusyError
            If a call is using the batch in another thread.

        Examples
        --------
        Two guesses for the token after the next, of which the second is right:

        >>> import numpy as np
        >>> import kvcache
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=1, head_dim=2, max_seq_len=8)
        >>> x = np.ones((3, 1, 2), np.float32)
        >>> with cache.batch(positions=[0, 1, 1], parents=[-1, 0, 0]) as batch:
        ...     out = batch.attend(0, x, x, x)
        ...     batch.commit(keep=[0, 2])
        >>> cache.positions()
        array([0, 1], dtype=int32)
        """
        if self._core.commit(keep) and self._done is not None:
            self._done()

    def abort(self) -> None:
        """End the batch: its tokens never were. Rows that it evicted as it began stay evicted.

        Raises
        ------
        CacheBusyError
            If a call is using the batch in another thread.
        """
        self._core.abort()
