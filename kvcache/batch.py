"""The batch: one forward pass through a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, SupportsFloat, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache.arrays import AnyArray, Entries, Flags, Layout, Precision, Ranges, as_library_of, check_float_dtype
from kvcache.block import Span, make_spans
from kvcache.errors import shown
from kvcache.layer import FloatDTypeLike, count


class Batch:
    """The tokens of one forward pass, of one sequence or many; `KVCache.batch` makes it.

    A cache has one open batch at a time: until it has ended, `KVCache.batch` raises `CacheBusyError`, or waits if it is
    given a `timeout`. A batch is a transaction. `commit`, or the end of a ``with``, makes its tokens part of their
    sequences; `abort`, or an exception in the ``with``, discards them. Until then, only the batch's own queries see its
    rows. Before the commit, put rows in every layer that has attention and rows of its own. Rows for `CrossAttention`,
    and rows of sequences that are not stored, are optional.

    Methods raise ``ValueError`` once the batch has ended, ``IndexError`` if there is no such layer, or no such token of
    the batch, and ``MemoryError`` if memory is short.

    Examples
    --------
    >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64)
    >>> x = np.ones((3, 2, 8), np.float32)
    >>> with cache.batch(3) as batch:
    ...     out = batch.attend(0, x, x, x)
    >>> cache.seq_len()
    3
    """

    __slots__ = ("__weakref__", "_commit", "_core")

    def __init__(
        self,
        core: _core.Batch,
        commit: Callable[[_core.Batch, Iterable[SupportsIndex] | None], None] | None = None,
    ) -> None:
        self._core = core
        self._commit = commit  # commits the core's batch, given the tokens to keep; None: nothing else is to be done

    def __len__(self) -> int:
        return self._core.num_tokens

    def __repr__(self) -> str:
        return f"<Batch: {count(len(self), 'token')}, {'ended' if self._core.ended else 'open'}>"

    __enter__ = _core.enter_batch
    __exit__ = _core.exit_batch

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Batch can be neither copied nor pickled: commit it, then copy or save() its cache")

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
            The layer's index; the layer must have rows of its own.
        k, v : array
            The rows, ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, v_head_dim]``, of f32, f16 or
            bf16: NumPy arrays, or anything with DLPack on the CPU. They are read in place, with any strides over tokens
            and heads, and converted to the stored type. Broadcast arrays, whose strides are 0, are copied first. Arrays
            of uint8 are rows as ``KVCache.gather(..., raw=True)`` returns them, whose last axis is the bytes of a row
            in the type of the layer; they are stored as they are.
            Leave out `v` if keys hold the values, or if the layer holds keys alone; then it may also have width 0. In a
            layer with a `stride` of n, give rows only of the tokens at positions p with ``(p + 1) % n == 0``, in the
            batch's order: all from `first` on, or the first of them. If there are none, nothing need be put.
        first : int, default 0
            The index in the batch of the arrays' first token. Threads may put different tokens at once.
        seq_id : int, optional
            For `CrossAttention` only: the sequence of the batch whose rows are replaced, by any number of rows; by
            default the only sequence of the batch. Such rows may have any leading axes, ``[..., heads, dim]``, as of an
            image in tiles, or be ``[rows, heads * dim]``.
        layout : {"THD", "HTD", "BHTD"}, default "THD"
            The order of the axes: tokens, heads, dim; heads first; or, for sequences in lock step, ``[batch, heads,
            tokens, dim]``, where token `t` of sequence `b` is token ``b * tokens + t`` of the batch.

        Raises
        ------
        ValueError
            If a shape is wrong, a token was put before, the layer reads another's rows or has no attention, `seq_id` is
            missing or superfluous, or a tensor requires grad or has its negative bit set.
        TypeError
            If `k` or `v` is no array, or has another element type.
        CacheFullError
            If there are more than `max_len` rows for `CrossAttention`, or `max_bytes` would be exceeded.
        """
        self._core.put(layer, k, v, first, seq_id, layout)

    def slots(self, layer: SupportsIndex, *, first: SupportsIndex = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return writable views of the slots of a token, and of the following tokens that lie beside it.

        Use `slots` instead of `put` to compute rows in place; call `written` once the rows are complete.

        Parameters
        ----------
        layer : int
            The layer's index; the layer must have rows of its own, and not `CrossAttention`.
        first : int, default 0
            The index in the batch of the views' first token.

        Returns
        -------
        tuple of numpy.ndarray
            Views of keys and values, ``[num_kv_heads, n, head_dim]`` and ``[num_kv_heads, n, v_head_dim]`` of the
            stored type; for quantised types the bytes of the blocks, as uint8. They are writable until the batch ends.
            If keys hold the values, the second is part of the first.

        Raises
        ------
        ValueError
            If the token was put before, or the layer reads another's rows or has no attention.
        NotSupportedError
            If the policy of the layer is `CrossAttention`, or it stores a type with one scale a row, as int8: views of
            elements would lack the scales, which lie apart. `put` also takes such rows, as uint8.

        Notes
        -----
        Once the batch has ended, the arrays are like views of `KVCache.keys`: read-only, and while they exist,
        `KVCache.compact` and `KVCache.close` raise ``BufferError``. Arrays made of them, such as slices, stay writable:
        drop these with the batch. No other thread may call `put` or `written` for the same layer during the call.

        Examples
        --------
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
        """Declare that the rows of tokens ``[first, first + num_tokens)`` were written to the views of `slots`.

        Raises
        ------
        ValueError
            If one of the tokens was put before.
        """
        self._core.written(layer, first, num_tokens)

    @overload
    def attend(
        self, layer: SupportsIndex, q: npt.NDArray[Any], k: AnyArray | None = None, v: AnyArray | None = None, *,
        first: SupportsIndex = 0, scale: SupportsFloat | None = None, softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None, alibi: AnyArray | None = None, non_causal: Flags | None = None,
        masked: Ranges | None = None, chosen: Entries | None = None, chosen_block: SupportsIndex = 1,
        chosen_tail: bool = False, select: SupportsIndex | None = None, precision: Precision = "stored",
        layout: Layout = "THD", out: AnyArray | None = None, return_lse: Literal[False] = False,
    ) -> npt.NDArray[Any]: ...  # fmt: skip

    @overload
    def attend(
        self, layer: SupportsIndex, q: npt.NDArray[Any], k: AnyArray | None = None, v: AnyArray | None = None, *,
        first: SupportsIndex = 0, scale: SupportsFloat | None = None, softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None, alibi: AnyArray | None = None, non_causal: Flags | None = None,
        masked: Ranges | None = None, chosen: Entries | None = None, chosen_block: SupportsIndex = 1,
        chosen_tail: bool = False, select: SupportsIndex | None = None, precision: Precision = "stored",
        layout: Layout = "THD", out: AnyArray | None = None, return_lse: Literal[True],
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]: ...  # fmt: skip

    @overload
    def attend(
        self, layer: SupportsIndex, q: AnyArray, k: AnyArray | None = None, v: AnyArray | None = None, *,
        first: SupportsIndex = 0, scale: SupportsFloat | None = None, softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None, alibi: AnyArray | None = None, non_causal: Flags | None = None,
        masked: Ranges | None = None, chosen: Entries | None = None, chosen_block: SupportsIndex = 1,
        chosen_tail: bool = False, select: SupportsIndex | None = None, precision: Precision = "stored",
        prior: tuple[AnyArray, AnyArray] | None = None, layout: Layout = "THD",
        out: AnyArray | None = None, return_lse: bool = False,
    ) -> Any: ...  # fmt: skip

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
        masked: Ranges | None = None,
        chosen: Entries | None = None,
        chosen_block: SupportsIndex = 1,
        chosen_tail: bool = False,
        select: SupportsIndex | None = None,
        precision: Precision = "stored",
        prior: tuple[AnyArray, AnyArray] | None = None,
        layout: Layout = "THD",
        out: AnyArray | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Compute attention over the rows that each query may see, in the cache and in this batch.

        A query sees positions up to its own, as the policy of the layer allows; of a batch with parents, it sees its
        ancestors only. The rows of the batch that it sees must have been put in this layer; `k` and `v`, if given, are
        put first. For a sequence that the strategy does not store, rows put here stay until `attend` puts into another
        layer. Rows from `put`, rows that other layers share, and an encoder's rows stay until the batch ends.

        Parameters
        ----------
        layer : int
            The layer's index.
        q : array
            The queries, ``[tokens, num_heads, head_dim]`` of f32, f16 or bf16, in arrays as for `put`; `num_heads` must
            be a multiple of `num_kv_heads`.
        k, v : array, optional
            The rows to put, as for `put`, of the tokens of `q`; with any number of rows for `CrossAttention`.
        first : int, default 0
            The index in the batch of the arrays' first token.
        scale : float, optional
            The factor of the scores; by default ``1 / sqrt(head_dim)``. Required if keys hold the values.
        softcap : float, optional
            The bound of the scores, which become ``softcap * tanh(score / softcap)``, as in Gemma 2.
        sinks : array, optional
            A logit per head, ``[num_heads]`` of f32, that joins the softmax and has no value, as in gpt-oss.
        alibi : array, optional
            A slope per head, ``[num_heads]`` of f32: ``-slope * abs(query position - key position)`` is added to the
            score [1]_.
        non_causal : bool or array of bool, optional
            Whether a query also sees all later positions of its sequence, however far away: windows and chunks hide
            earlier positions alone. One value for all queries, or one per query or per token of the batch. With
            parents, a query sees its ancestors only.
        masked : array_like of int, optional
            Positions that no query of the call sees, such as padding: rows ``(seq_id, begin, end)``, in any order, for
            sequences of the batch. An `end` may exceed all positions. Tokens of the batch that are masked need not have
            been put.
        chosen : array_like of int, optional
            The positions whose rows each token attends to, for models that choose rows: ``[tokens, n]``, or
            ``[tokens, num_kv_heads, n]`` for a choice of each KV head, or ``[tokens, 1, n]``, with n at least 1. A
            token sees a row if its position is listed and if the token would see the row without the list. Other
            entries, such as -1, count for nothing. Order and repeats do not matter. Ascending int32, with negative
            entries at the end, is fastest: other lists are copied and sorted.
        chosen_block : int, default 1
            The positions that an entry of `chosen` stands for: entry b names ``[b * n, (b + 1) * n)``. In a layer with
            a `stride`, an entry names the rows that stand for any of its positions.
        chosen_tail : bool, default False
            Whether a token at position p also sees its incomplete block: positions from ``(p + 1) // n * n`` on. With
            blocks of 1 there are none.
        select : int, optional
            About how many rows a token of a long sequence reads for each KV head, in a layer with `sketch`. It reads
            the first 16 and the last 64 rows that it sees, and of the others the pieces of 4 rows, up to `select` rows,
            that matter most by their sketches [2]_. A token that sees at most ``80 + 2 * select`` rows reads all of
            them, and so does a sequence with more than 8 query tokens in the call. Masked rows do not count. A
            `PrefixCache` keeps no token that selected rows. By default all rows are read.
        precision : {"stored", "int8"}, default "stored"
            How prompts are attended to: as precisely as the rows are stored, or in bytes [3]_ if they are long. In
            bytes a prompt takes 0.45 to 0.73 of the time, by type and processor, and a result is usually off by 1 to
            2 %, as rows of int8 are. It is off by more if a channel of keys, queries or values is far larger than the
            others, most over rows of int8 without a transform, if scores spread widely, or if one of 128 rows outweighs
            the others 500 times. A NaN in a value reaches all elements of a result. Short prompts are attended to
            exactly, because bytes would not be faster: with 8 KV heads of 128 and 32 query heads, bytes begin at 460
            tokens of a sequence in the call over rows of int8, int6 and int4, and at 1,025 over others; behind 8,000
            rows at 13 and 65. Chosen and selected rows, and heads of a dimension that is no multiple of 32, are
            attended to exactly; so is everything on a processor without products of bytes. Rows that a model computes
            behind such a prompt differ from exact ones: a `PrefixCache` needs a fingerprint of its own for them.
        prior : tuple of array, optional
            What another call with `return_lse`, such as one for another layer, gave the same queries: its result, laid
            out and of a type as this call's, and the log-sum-exp. One softmax then spans the rows of both calls.
            `sinks` go to one of them. The result may be `out` itself, which a call that is interrupted leaves
            undefined. If `q` is of f16 or bf16, let the first call write f32 (`out`): a result that is rounded before
            it is joined adds to the error.
        layout : {"THD", "HTD", "BHTD"}, default "THD"
            The order of the axes of `q`, `k`, `v` and the result, as in `put`. In `chosen`, tokens come in the order of
            the batch.
        out : array, optional
            An array for the result, of the type of `q` or f32 and the shape below, that overlaps no other argument,
            except as `prior` says.
        return_lse : bool, default False
            Whether to return also the log-sum-exp of the scores.

        Returns
        -------
        out : numpy.ndarray or torch.Tensor
            The result, ``[tokens, num_heads, v_head_dim]`` of the type of `prior` or else of `q`, or `out` itself; 0 if
            a query sees nothing. It is a tensor of PyTorch if `q` is one, whatever `k` and `v` are, and otherwise an
            array of NumPy. bf16 of NumPy is ``ml_dtypes.bfloat16`` if that is installed, else a type of two bytes,
            which DLPack exports as bf16.
        lse : numpy.ndarray or torch.Tensor
            Only with `return_lse`: the log-sum-exp, ``[tokens, num_heads]`` (or as `layout` says) of f32, a natural
            logarithm that includes sinks; minus infinity if a query sees nothing.

        Raises
        ------
        ValueError
            If a shape is wrong, a visible token of the batch was not put, a token was put before, a required `scale` is
            missing, a tensor requires grad or has its negative bit set, or `out` is read-only or overlaps.
        TypeError
            If an argument is no array, or has another element type.
        CacheFullError
            If a cross-attention layer gets more rows than it may hold, or `max_bytes` would be exceeded.

        Notes
        -----
        Sums are f32. The bits of a token's result depend on the rows that it sees, on which tokens of its sequence are
        in the call, and on how many rows these see. They do not depend on threads, the place of rows, or other
        sequences of the batch. With `chosen`, the bits depend on the rows that it sees alone. Infinities and NaN in
        rows reach the tokens that see them, and no others.

        References
        ----------
        .. [1] Ofir Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
           Extrapolation", ICLR 2022.
        .. [2] Jianyang Gao and Cheng Long, "RaBitQ: Quantizing High-Dimensional Vectors with a Theoretical Error Bound
           for Approximate Nearest Neighbor Search", SIGMOD 2024.
        .. [3] Jintao Zhang et al., "SageAttention: Accurate 8-Bit Attention for Plug-and-play Inference Acceleration",
           ICLR 2025, whose values have 16 bits; here these and the weights have 8, too.

        Examples
        --------
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=1, head_dim=2, max_seq_len=8, dtype="f32")
        >>> k = np.zeros((2, 1, 2), np.float32)
        >>> v = np.array([[[1, 3]], [[5, 7]]], np.float32)
        >>> with cache.batch(2) as batch:
        ...     batch.attend(0, k, k, v)
        array([[[1., 3.]],
        <BLANKLINE>
               [[3., 5.]]], dtype=float32)
        """
        return self._core.attend(
            layer, q, k, v, first, scale, softcap, sinks, alibi, non_causal, masked, chosen, chosen_block, chosen_tail,
            select, precision, prior, layout, out, return_lse,
        )  # fmt: skip

    @overload
    def choose(
        self, layer: SupportsIndex, q: AnyArray, *, width: SupportsIndex, weights: AnyArray | None = None,
        relu: bool = False, scale: SupportsFloat | None = None, num_choices: SupportsIndex = 1,
        block: SupportsIndex = 1, num_first: SupportsIndex = 0, num_local: SupportsIndex = 0,
        among: Entries | None = None, non_causal: Flags | None = None, masked: Ranges | None = None,
        first: SupportsIndex = 0, layout: Layout = "THD", return_scores: Literal[False] = False,
    ) -> npt.NDArray[np.int32]: ...  # fmt: skip

    @overload
    def choose(
        self, layer: SupportsIndex, q: AnyArray, *, width: SupportsIndex, weights: AnyArray | None = None,
        relu: bool = False, scale: SupportsFloat | None = None, num_choices: SupportsIndex = 1,
        block: SupportsIndex = 1, num_first: SupportsIndex = 0, num_local: SupportsIndex = 0,
        among: Entries | None = None, non_causal: Flags | None = None, masked: Ranges | None = None,
        first: SupportsIndex = 0, layout: Layout = "THD", return_scores: Literal[True],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...  # fmt: skip

    @overload
    def choose(
        self, layer: SupportsIndex, q: AnyArray, *, width: SupportsIndex, weights: AnyArray | None = None,
        relu: bool = False, scale: SupportsFloat | None = None, num_choices: SupportsIndex = 1,
        block: SupportsIndex = 1, num_first: SupportsIndex = 0, num_local: SupportsIndex = 0,
        among: Entries | None = None, non_causal: Flags | None = None, masked: Ranges | None = None,
        first: SupportsIndex = 0, layout: Layout = "THD", return_scores: bool,
    ) -> Any: ...  # fmt: skip

    def choose(
        self,
        layer: SupportsIndex,
        q: AnyArray,
        *,
        width: SupportsIndex,
        weights: AnyArray | None = None,
        relu: bool = False,
        scale: SupportsFloat | None = None,
        num_choices: SupportsIndex = 1,
        block: SupportsIndex = 1,
        num_first: SupportsIndex = 0,
        num_local: SupportsIndex = 0,
        among: Entries | None = None,
        non_causal: Flags | None = None,
        masked: Ranges | None = None,
        first: SupportsIndex = 0,
        layout: Layout = "THD",
        return_scores: bool = False,
    ) -> Any:
        """Choose rows for each query token, by the index keys of a layer that holds keys alone.

        The result says which rows `attend` is to read in another layer (`chosen`). Each row that the token sees gets a
        score, the sum over the query heads of ``weights * f(scale * q . k)``, where f is the identity or, with `relu`,
        ``max(0, x)`` [1]_. The `width` rows with the largest scores are chosen, or all rows if there are no more. A
        token sees the same rows as in `attend`; they must have been put.

        Parameters
        ----------
        layer : int
            The index of a layer with ``v_head_dim=0``.
        q : array
            The index queries, ``[tokens, num_heads, head_dim]`` of f32, f16 or bf16, in arrays as for `put`;
            `num_heads` must be a multiple of the layer's `num_kv_heads`.
        width : int
            The number of rows, or blocks, to choose.
        weights : array, optional
            The heads' weights, ``[tokens, num_heads]`` of f32; by default 1.
        relu : bool, default False
            Whether negative products count 0.
        scale : float, optional
            The factor of the products; by default ``1 / sqrt(head_dim)``.
        num_choices : int, default 1
            The number of choices for each token. With 1, all heads choose together. Otherwise each choice has as many
            heads, in order, for instance those of one KV head of the layer that attends. It is a multiple or a divisor
            of `num_kv_heads`.
        block : int, default 1
            The number of positions that are chosen together: entry b stands for positions ``[b * block, (b + 1) *
            block)``. The score of a block is that of its best row. In a layer with a `stride`, it is 1, for rows by
            their positions, or a multiple.
        num_first, num_local : int, default 0
            The number of rows, or blocks, from position 0 on, and up to the token's own, that are chosen before others.
        among : array_like of int, optional
            The only rows, or blocks, that may be chosen, in any order: ``[tokens, n]``, or ``[tokens, num_choices, n]``
            for each choice, with n at least 1. Entries below 0 count for nothing.
        non_causal, masked : optional
            As in `attend`.
        first : int, default 0
            The index in the batch of the first token of `q`.
        layout : {"THD", "HTD", "BHTD"}, default "THD"
            The order of the axes of `q` and, without the last, of `weights`, as in `put`. In `among` and the results,
            tokens come in the order of the batch.
        return_scores : bool, default False
            Whether to return the scores, too.

        Returns
        -------
        chosen : numpy.ndarray
            The positions of the chosen rows, or the numbers of blocks, ``[tokens, num_choices, width]`` of int32, in
            ascending order, with -1 behind them.
        scores : numpy.ndarray
            Only with `return_scores`: the scores of `chosen`, f32 of the same shape, with minus infinity beside -1.

        Raises
        ------
        ValueError
            If a shape or a number is wrong, a visible token of the batch was not put, a tensor requires grad or has its
            negative bit set.
        TypeError
            If an argument is no array, or has another element type.
        NotSupportedError
            If the layer holds values.

        Notes
        -----
        The choice is exact. A larger score is chosen first; of equal scores, which `relu` makes of many rows, the lower
        position. NaN counts as the largest score, so that it reaches the output. The result depends only on the rows
        that a token sees: not on threads, on the place of rows, or on other tokens.

        Keys of int8, int6 and int4 are multiplied as integers, by queries that are rounded to 8 bits. Their scores are
        the same on every processor.

        References
        ----------
        .. [1] DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025.

        Examples
        --------
        >>> layers = [kvcache.Layer(1, 4), kvcache.Layer(1, 4, v_head_dim=0, dtype="f32")]
        >>> cache = kvcache.KVCache(layers, max_seq_len=64)
        >>> keys = np.eye(4, dtype=np.float32)[:, None]
        >>> with cache.batch(4) as batch:
        ...     batch.put(0, keys, keys)
        ...     batch.put(1, keys)
        ...     chosen = batch.choose(1, keys, width=2, num_local=1)
        ...     out = batch.attend(0, keys, chosen=chosen)
        >>> chosen[:, 0]
        array([[ 0, -1],
               [ 0,  1],
               [ 0,  2],
               [ 0,  3]], dtype=int32)
        """
        options = {
            "weights": weights,
            "relu": relu,
            "scale": scale,
            "num_choices": num_choices,
            "block": block,
            "num_first": num_first,
            "num_local": num_local,
            "among": among,
            "non_causal": non_causal,
            "masked": masked,
        }
        return self._core.choose(layer, q, first, width, options, layout, return_scores)

    def dense(
        self,
        layer: SupportsIndex,
        *,
        non_causal: Flags | None = None,
        masked: Ranges | None = None,
        dtype: FloatDTypeLike | None = None,
        layout: Layout = "HTD",
        mask: Literal["f32", "bool"] | None = "f32",
        out: Sequence[Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return all rows that the batch can see in a layer, and a mask, for your own attention.

        Parameters
        ----------
        layer : int
            The layer's index.
        non_causal : bool or array of bool, optional
            Whether a token also sees later positions of its sequence, as in `attend`, for the tokens of the batch.
        masked : array_like of int, optional
            Positions that the mask hides from every token, as in `attend`; their rows are returned all the same.
        dtype : {"f32", "f16", "bf16"}, optional
            The type to convert rows to, f32 by default; also as PyTorch and NumPy name it. With a type of PyTorch's,
            such as ``torch.bfloat16``, the results are tensors.
        layout : {"HTD", "THD", "BHTD"}, default "HTD"
            The order of the axes: ``[num_kv_heads, n, dim]``, ``[n, num_kv_heads, dim]``, or each sequence by itself,
            ``[sequences, num_kv_heads, n, dim]``, where `n` is the number of rows of the longest sequence, and zeros
            that no query sees pad the others. ``"BHTD"`` needs a batch with the same number of tokens of each sequence,
            sequence after sequence.
        mask : {"f32", "bool"} or None, default "f32"
            The kind of mask: f32 to add to the scores, 0 if the token sees the row, else minus infinity; or bool, True
            if it does. None: no mask; for a batch of many sequences it is the largest of the arrays.
        out : tuple of two or three arrays, optional
            Arrays for keys, values and, with three, the mask, in place of new ones, in the shapes below. Keys and
            values may have any of these types, contiguous along the last axis; the mask is contiguous. All may be
            NumPy's or DLPack's, and must not overlap.

        Returns
        -------
        k, v : numpy.ndarray or torch.Tensor
            ``[num_kv_heads, n, head_dim]`` and ``[num_kv_heads, n, v_head_dim]``, or as `layout` says, decoded and
            rotated: for each sequence of the batch, by rising id, its stored rows and the rows put in the batch, in
            order of position. In the layout ``"BHTD"``, the sequences are in the batch's order. The first two of `out`
            if that was given.
        mask : numpy.ndarray, torch.Tensor or None
            ``[tokens, n]``; in the layout ``"BHTD"``, ``[sequences, tokens of each, n]``.

        Raises
        ------
        ValueError
            If `non_causal` does not have one entry per token; there is no such `dtype`, `layout` or `mask`, or `dtype`
            is given with `out`; `out` has another shape, is read-only, or overlaps; or the batch does not suit the
            layout ``"BHTD"``.
        TypeError
            If `non_causal` holds other values than booleans, or `out` other things than arrays of these types.

        Examples
        --------
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
        if mask is not None and not (isinstance(mask, str) and mask in ("f32", "bool")):
            raise ValueError(f"mask={shown(mask)}: must be 'f32', 'bool' or None")
        k, v, seen = as_library_of(dtype, self._core.dense(layer, non_causal, masked, chosen, layout, mask, out))
        return k, v, seen

    def keys(
        self, layer: SupportsIndex, *, seq_id: SupportsIndex | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Return the keys of a sequence in a layer, including the keys put in this batch.

        `KVCache.keys` shows the committed rows. This shows what attention reads: the stored rows of the sequence, then
        the batch's rows that were put so far, in the batch's order. In a layer with `CrossAttention`, rows that were
        put in this batch take the place of stored ones. Which token sees which row is not said here: see `dense`.

        Parameters
        ----------
        layer : int
            The layer's index.
        seq_id : int, optional
            A sequence of the batch; by default the only one.
        copy : bool, optional
            Whether to copy, as in `KVCache.keys`: by default only where there can be no view.

        Returns
        -------
        numpy.ndarray
            The keys, ``[num_kv_heads, len, head_dim]``, as `KVCache.keys` returns them. A view keeps its rows after the
            batch has ended, too, even if it was aborted.

        Raises
        ------
        ValueError
            As in `KVCache.keys`; or if the batch has no token of the sequence, or several sequences and `seq_id` is
            missing; if it restores layers, or the layer has no attention.

        Notes
        -----
        No other thread may put rows in the same layer during the call.

        Examples
        --------
        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64)
        >>> x = np.ones((3, 2, 8), np.float32)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, x, x)
        >>> with cache.batch(1) as batch:
        ...     batch.put(0, x[:1], x[:1])
        ...     batch.keys(0).shape, cache.keys(0).shape
        ((2, 4, 8), (2, 3, 8))
        """
        return _core.rows(self._core.cache, self._core, seq_id, layer, copy, False)

    def values(
        self, layer: SupportsIndex, *, seq_id: SupportsIndex | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Return the values, ``[num_kv_heads, len, v_head_dim]``; arguments and errors are as for `keys`."""
        return _core.rows(self._core.cache, self._core, seq_id, layer, copy, True)

    def spans(self, layer: SupportsIndex, *, seq_id: SupportsIndex | None = None) -> list[Span]:
        """Return views of the rows that `keys` and `values` show, in as many pieces as they lie in.

        They are like the spans of `KVCache.spans`: keys are as they were stored, not rotated by `delta`. Errors are as
        for `keys`.
        """
        return make_spans(_core.spans(self._core.cache, self._core, seq_id, layer))

    def commit(self, keep: Iterable[SupportsIndex] | None = None) -> None:
        """End the batch and make its tokens part of their sequences; do nothing if it has ended already.

        Parameters
        ----------
        keep : iterable of int, optional
            The indices in the batch of the tokens to keep, in any order: the accepted tokens of speculative decoding.
            By default all. Nothing is kept of a sequence that the strategy does not store.

        Raises
        ------
        ValueError
            If a token to keep was not put in some layer, or is given twice; the batch stays open then.
        TypeError
            If an index is no integer.
        CacheBusyError
            If a call in another thread uses the batch.

        Examples
        --------
        Two guesses for the token after the next, of which the second is right:

        >>> cache = kvcache.KVCache(num_layers=1, num_kv_heads=1, head_dim=2, max_seq_len=8)
        >>> x = np.ones((3, 1, 2), np.float32)
        >>> with cache.batch(positions=[0, 1, 1], parents=[-1, 0, 0]) as batch:
        ...     out = batch.attend(0, x, x, x)
        ...     batch.commit(keep=[0, 2])
        >>> cache.positions()
        array([0, 1], dtype=int32)
        """
        if self._commit is None or self._core.ended:
            self._core.commit(keep)
        else:
            self._commit(self._core, keep)

    def abort(self) -> None:
        """End the batch and discard its tokens. Rows that expired when it began stay so.

        Raises
        ------
        CacheBusyError
            If a call in another thread uses the batch.
        """
        self._core.abort()
