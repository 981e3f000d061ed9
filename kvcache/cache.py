"""`KVCache`: begins batches; reads, edits and counts the rows that sequences hold.

A method hands its arguments to the same method of ``_core``, the cache of the C core. Every edit gets the list `_edits`
as well. The core appends what it did (`kvcache.follower.Edit`), and the strategy reads the list in `_note_edits`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsFloat, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache._core import INT32_MAX, INT64_MAX, MAX_THREADS, integer
from kvcache.arguments import check_names
from kvcache.arrays import AnyArray, Precision, SupportsDLPack, as_library_of, check_float_dtype
from kvcache.batch import Batch
from kvcache.block import Block, Run, Span, make_spans
from kvcache.errors import CacheBusyError
from kvcache.follower import Edit, Follower
from kvcache.layer import (
    PER_LAYER,
    DTypeLike,
    FloatDTypeLike,
    Layer,
    Sizes,
    Transform,
    check_layers,
    count,
    make_layers,
    once_for_each,
    override,
)
from kvcache.policy import FullAttention, Policy
from kvcache.rope import RopeLike
from kvcache.saveable import Saveable
from kvcache.strategy import Adaptive, Decider, Decision, LongSequencesOnly, Strategy, describe
from kvcache.system import readable


class KVCache(Saveable):
    """The keys and values of a model's tokens, for one sequence or many.

    ``KVCache([Layer(8, 128)] * 32)`` is ``KVCache(32, 8, 128)``.

    Parameters
    ----------
    num_layers : int or sequence of Layer
        The number of layers of the model; or the layers, in place of all arguments that are as in `Layer`.
    num_kv_heads, head_dim : int or sequence of int
        As in `Layer`: one value for all layers, or one per layer.
    v_head_dim, value_in_key, dtype, k_dtype, v_dtype, k_transform, v_transform, policy, rope, sketch : optional
        As in `Layer`: one value for all layers, or a sequence of one per layer.
    share : sequence of int or None, optional
        As in `Layer`: for each layer, the index of the layer whose rows it reads; None: its own.
    max_seq_len : int, optional
        The most rows that a sequence may hold in a layer between batches; by default no limit. In layers whose window
        with its sinks, or chunk, is no longer, a batch may have any number of tokens.
    max_sequences : int or None, default 1
        The most sequences that may hold rows, in any layer; None: no limit. Checked when a batch begins, not by forks
        and edits.
    capacity : int, optional
        The most tokens that all sequences together may hold in a layer, shared tokens counted once. By default
        ``max_seq_len * max_sequences``; no limit if one of these is None. A limit of its own counts all tokens of a
        batch that is open; the default one, those that `max_seq_len` lets stay.
    max_bytes : int, optional
        The limit of the memory for rows, recurrent states and prompts; by default none. It must hold one block for
        each policy of the layers. A block counts whole (`Block.nbytes`) while it has a row or a view keeps it. Lists
        come on top in `nbytes`: some hundred bytes for each sequence, and for each block of a prompt up to the last
        one that a `PrefixCache` keeps.
        While `restore` reads, what it loads may exceed the limit.
    block_size : int, optional
        The number of tokens in a block, the unit of allocation and of sharing. By default 64. More if `max_seq_len` is
        given, `max_bytes` is not, `max_sequences` is 1 and no layer has a window or chunks: `max_seq_len`, so that the
        sequence lies in one piece; at most 2048 if all rows are quantised, because full blocks are read faster.
    strategy : {"always", "disabled"}, LongSequencesOnly or Adaptive, default "always"
        The rule for which sequences are stored. If a sequence is not stored, its `next_position` stays 0, the runner
        feeds all of it again, and each batch attends over itself; rows that `Batch.attend` puts take the memory of one
        layer.
    num_threads : int, optional
        The number of threads of a call; by default `get_num_threads` at the time of the call.

    Raises
    ------
    ValueError
        If a number is out of range, a name is unknown, a sequence does not have one entry per layer, or arguments
        contradict each other.

    Notes
    -----
    A cache has one open batch at a time, which may have tokens of many sequences. Any thread may call any method.
    Threads that serve a request each need no lock of their own: ``batch(..., timeout=None)`` waits until the open batch
    has ended. An open batch owns its sequences: editing these raises `CacheBusyError` until the batch is committed or
    aborted, and so do `room`, `reserve`, `compact`, `close` and copying the cache; other sequences may be
    edited. Every method that may wait for another thread, or that stores, copies, moves or attends over rows, releases
    the GIL; nothing here needs one.

    Destructors, weak references and arguments that convert themselves may call any method while another runs. A cache
    that they close, or a batch that they end, is closed for the rest of that method (``ValueError``). While the core is
    at work, closing raises `CacheBusyError`.

    Signal handlers run in the main thread during `Batch.attend`, `Batch.choose` and `Batch.put`, and while `batch`
    waits, about every 40 ms. If a handler raises, as Python's handler of Ctrl-C does, the call ends and has put, or
    begun, nothing. An open batch stays open, and the call can be repeated. During other methods, handlers run once
    these return.

    A sequence is named by any 64-bit integer, `seq_id`. An unused id names an empty sequence: reading it yields 0, -1
    or no rows, and editing it does nothing. A layer is named by its index. Positions ``[begin, end)`` do not include
    `end`; None: the end of the sequence.

    Methods raise ``ValueError`` once the cache is closed, and for a negative position or an `end` below `begin`. They
    raise ``IndexError`` if there is no such layer, ``TypeError`` for an argument of the wrong type, and ``MemoryError``
    if memory is short. A method that raises changes nothing.

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
        "_decider",
        "_follower",
        "_layers",
        "_max_bytes",
        "_max_seq_len",
        "_max_sequences",
        "_num_threads",
        "_prompts",
        "_sizes",
        "_strategy",
    )

    @overload
    def __init__(
        self, num_layers: Sequence[Layer], *, max_seq_len: SupportsIndex | None = None,
        max_sequences: SupportsIndex | None = 1, capacity: SupportsIndex | None = None,
        max_bytes: SupportsIndex | None = None, block_size: SupportsIndex | None = None, strategy: Strategy = "always",
        num_threads: SupportsIndex | None = None,
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self, num_layers: SupportsIndex, num_kv_heads: SupportsIndex | Sequence[SupportsIndex],
        head_dim: SupportsIndex | Sequence[SupportsIndex], max_seq_len: SupportsIndex | None = None, *,
        v_head_dim: SupportsIndex | Sequence[SupportsIndex] | None = None, value_in_key: bool | Sequence[bool] = False,
        dtype: DTypeLike | Sequence[DTypeLike] = "f16", k_dtype: DTypeLike | Sequence[DTypeLike] | None = None,
        v_dtype: DTypeLike | Sequence[DTypeLike] | None = None,
        k_transform: Transform | Sequence[Transform | None] | None = None,
        v_transform: Transform | Sequence[Transform | None] | None = None,
        policy: Policy | Sequence[Policy | None] | None = FullAttention(),  # noqa: B008  (frozen)
        share: Sequence[SupportsIndex | None] | None = None, rope: RopeLike | Sequence[RopeLike] = None,
        sketch: bool | Sequence[bool] = False,
        max_sequences: SupportsIndex | None = 1, capacity: SupportsIndex | None = None,
        max_bytes: SupportsIndex | None = None, block_size: SupportsIndex | None = None, strategy: Strategy = "always",
        num_threads: SupportsIndex | None = None,
    ) -> None: ...  # fmt: skip

    @check_names("KVCache", PER_LAYER)
    def __init__(
        self,
        num_layers: SupportsIndex | Sequence[Layer],
        num_kv_heads: Any = None,
        head_dim: Any = None,
        max_seq_len: SupportsIndex | None = None,
        *,
        max_sequences: SupportsIndex | None = 1,
        capacity: SupportsIndex | None = None,
        max_bytes: SupportsIndex | None = None,
        block_size: SupportsIndex | None = None,
        strategy: Strategy = "always",
        num_threads: SupportsIndex | None = None,
        **per_layer: Any,
    ) -> None:
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        given = {name: value for name, value in sizes.items() if value is not None} | per_layer
        has_layers = isinstance(num_layers, Sequence) and not isinstance(num_layers, str)
        self._layers = tuple((check_layers if has_layers else make_layers)(num_layers, given))
        self._strategy = _check_strategy(strategy)
        self._max_seq_len = _limit(max_seq_len, "max_seq_len", INT32_MAX - 1)
        self._max_sequences = _limit(max_sequences, "max_sequences", INT32_MAX)
        self._max_bytes = _limit(max_bytes, "max_bytes", INT64_MAX)
        self._sizes = Sizes(self._layers, self._max_seq_len)
        self._num_threads = _limit(num_threads, "num_threads", MAX_THREADS)
        self._capacity = _limit(capacity, "capacity", INT64_MAX)
        self._block_size = _limit(block_size, "block_size", INT32_MAX - 1) or 0
        self._prompts: Precision = "stored"  # how a model attends to prompts here, where `kvcache.hf` knows it
        self._core = self._make_core(None)
        self._capacity = self._core.capacity()  # read back the core's defaults
        self._block_size = self._core.block_size()
        self._decider = None if strategy == "always" else Decider(self._strategy, self._core, self._sizes)
        self._follower: Follower | None = self._decider  # or a Watch of prefix caches with stores, which need "always"

    def _make_core(self, original: _core.Cache | None) -> _core.Cache:
        """Make an empty cache of the core, or a copy of `original`."""
        return _core.Cache(
            once_for_each(lambda i: self._layers[i].for_core(), self._layers),
            self._max_seq_len or 0,
            self._max_sequences or 0,
            self._capacity or 0,
            self._max_bytes or 0,
            self._block_size,
            self._num_threads or 0,
            original,
        )

    @classmethod
    def from_config(cls, config: Any, *, max_source_len: int | None = None, **overrides: Any) -> Self:
        """Make a cache for a model, from its files.

        Parameters
        ----------
        config : path, mapping, or configuration of transformers
            A Hugging Face folder, its ``config.json``, or a GGUF; or the content of a ``config.json``.
        max_source_len : int, optional
            The most tokens, or frames, that an encoder is given; by default the files' number. Ignored without an
            encoder.
        **overrides
            Arguments of `KVCache`, such as `dtype`, that replace those from the files.

        Returns
        -------
        KVCache
            A cache for the text decoder: its layers with their KV heads, policies (windows, chunks), shared rows,
            latents (MLA) and RoPE, and its context length. For a model with an encoder: the decoder's layers, then a
            cross-attention layer for each of them.

        Raises
        ------
        ModelFileError
            If a file is missing, is of another format, or holds impossible values.
        NotSupportedError
            If a layer keeps a state that no policy describes. Rotations that depend on the length of the sequence, such
            as dynamic NTK and LongRoPE, are accepted; moving such keys raises this error, and it names the rotation.
        TypeError, ValueError
            As `KVCache` does, of an override.

        Examples
        --------
        >>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512,
        ...           "num_key_value_heads": 2, "max_position_embeddings": 4096, "rope_theta": 10000.0}
        >>> kvcache.KVCache.from_config(config, dtype="q8_0").layers[1].head_dim
        64
        """
        from kvcache.models import shapes  # not loaded by `import kvcache`

        shape = shapes.read(config, max_source_len)
        layers, others = override(shape.layers, overrides)
        return cls(layers, **{"max_seq_len": shape.max_seq_len, **others})

    def __enter__(self) -> Self:
        self._core.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (CacheBusyError, BufferError):
            if kind is None:  # else raise the exception of the `with` block, which may have left a batch open
                raise

    def __repr__(self) -> str:
        layers = " + ".join(f"{count(n, 'layer')} of {layer}" for layer, n in Counter(map(str, self._layers)).items())
        if self._core.closed:
            return f"<KVCache: {layers}; closed>"
        sequences = self.sequences
        tokens = count(sum(self.seq_len(seq_id) for seq_id in sequences), "token")
        limit = f", max_seq_len {self._max_seq_len}" if self._max_seq_len is not None else ""
        return f"<KVCache: {layers}{limit}; {tokens} in {count(len(sequences), 'sequence')}, {readable(self.nbytes)}>"

    def __copy__(self) -> Self:
        """Return an independent cache with the same content.

        Rows are copied block by block, and stay shared where they are. The copy has the original's configuration,
        strategy and rope functions; its `stats` begin at 0, and views stay the original's. ``copy.deepcopy`` does the
        same.

        Examples
        --------
        >>> import copy
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
        >>> other = copy.copy(cache)
        >>> cache.truncate(1)
        >>> cache.seq_len(), other.seq_len()
        (1, 3)
        """
        other = type(self).__new__(type(self))
        for name in set(KVCache.__slots__) - {"__weakref__", "_core", "_decider", "_follower"}:
            setattr(other, name, getattr(self, name))
        other._core = self._make_core(self._core)
        other._follower = other._decider = None if self._decider is None else self._decider.copy(other._core)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KVCache cannot be pickled: save() it to a file; copy.copy() makes an independent cache in this process"
        )

    # -- configuration

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers: shape and types of their rows, policy, and rotation."""
        return self._layers

    @property
    def strategy(self) -> Strategy:
        """The rule for which sequences are stored."""
        return self._strategy

    @property
    def max_seq_len(self) -> int | None:
        """The most rows that a sequence may hold in a layer; None: no limit."""
        return self._max_seq_len

    @property
    def max_sequences(self) -> int | None:
        """The most sequences that may hold rows; None: no limit."""
        return self._max_sequences

    @property
    def capacity(self) -> int | None:
        """The most tokens that all sequences together may hold in a layer; None: no limit."""
        return self._capacity

    @property
    def max_bytes(self) -> int | None:
        """The limit of the memory for rows, recurrent states and prompts, in whole blocks; None: no limit."""
        return self._max_bytes

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self._block_size

    @property
    def num_threads(self) -> int | None:
        """The number of threads of a call; None: `get_num_threads` at the time of the call."""
        return self._num_threads

    # -- a forward pass

    def batch(
        self,
        n: SupportsIndex | None = None,
        *,
        positions: Iterable[SupportsIndex] | None = None,
        seq_ids: Iterable[SupportsIndex] | None = None,
        parents: Iterable[SupportsIndex] | None = None,
        timeout: SupportsFloat | None = 0,
        replaced: Iterable[SupportsIndex] | None = None,
    ) -> Batch:
        """Begin a forward pass: rows that no later query can see expire, and the tokens take slots in every layer.

        Give exactly one of `n` and `positions`.

        Parameters
        ----------
        n : int, optional
            The number of tokens, which continue their sequences, each at its `next_position`.
        positions : iterable of int, optional
            The position of each token in its sequence.
        seq_ids : iterable of int, optional
            The sequence of each token; by default 0 for all.
        parents : iterable of int, optional
            The parent of each token, for trees of tokens in speculative decoding [1]_: the index in the batch of an
            earlier token of the same sequence; -1: the token follows the stored tokens. Of the batch, a token then sees
            itself and its ancestors only. `Batch.commit` takes the accepted tokens.
        timeout : float or None, default 0
            The most seconds to wait while another batch is open, or keys are being rewritten; None: as long as it
            takes. Calls that wait begin in the order in which they came, and continue sequences as they are then;
            Ctrl-C ends the wait. A thread that waits for a batch that it would have to end itself waits in vain. A
            strategy decides before the call waits.
        replaced : iterable of int, optional
            Layers whose saved rows the batch puts in place of what its sequences held there; other layers stay as they
            are, and get no rows. Give `positions`, in any order, and no `parents`. Tokens arrive by rising position,
            those at the same one, as `divide` leaves them, in the order given. Layers of one policy are restored
            together; those that share rows follow. Nothing attends in such a batch. Rows that one layer has and another
            lacks are as gone as expired ones until that layer is restored, too, or the sequence is truncated. These
            sequences are stored under any strategy.

        Returns
        -------
        Batch
            The open batch. Use it in a ``with``, or end it by `Batch.commit` or `Batch.abort`.

        Raises
        ------
        CacheFullError
            If `max_seq_len`, `max_sequences`, `capacity` or `max_bytes` would be exceeded.
        RowsGoneError
            If a token would see rows that have expired, that `Adaptive` dropped with the sequence, or that
            `LongSequencesOnly` or "disabled" did not store: such a sequence is fed from `next_position` on, in one
            batch.
        CacheBusyError
            If `timeout` has passed, or is 0 and other threads wait to begin.
        ValueError
            If a position or `timeout` is negative, there is no token or more than 16,777,216, `seq_ids` or `parents`
            does not have one entry per token, or a parent is no earlier token of the same sequence; if `replaced` names
            no layer with rows of its own, or not all of a policy, or `parents` are given.
        TypeError
            If both or neither of `n` and `positions` are given, or `n` and `replaced`.

        References
        ----------
        .. [1] Xupeng Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
           Inference and Verification", ASPLOS 2024.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=None)
        >>> batch = cache.batch(positions=[0, 1, 0], seq_ids=[7, 7, 8])
        >>> len(batch), batch.positions, batch.seq_ids
        (3, array([0, 1, 0], dtype=int32), array([7, 7, 8]))
        >>> batch.abort()
        """
        if (n is None) == (positions is None):
            raise TypeError("batch() takes exactly one of n, the number of next tokens, and positions")
        if replaced is not None and positions is None:
            raise TypeError("a batch that restores layers takes the positions of their rows, not n")
        if replaced is not None and parents is not None:
            raise ValueError("parents are given: a batch that restores layers has no trees")
        found: dict[int, Decision] = {}
        decider = self._decider if replaced is None else None
        decide = None if decider is None else partial(decider.decide, found)
        core = self._core.begin(n, positions, seq_ids, parents, timeout, decide, replaced)
        try:
            if decider is not None:
                decider.begun(found)
            if self._follower is None:
                return Batch(core)
            commit = partial(self._follower.commit, time.perf_counter()) if replaced is None else self._commit_restored
            return Batch(core, commit)
        except BaseException:  # of a signal's handler: the error's traceback would keep the batch open
            core.abort()
            raise

    def _commit_restored(self, core: _core.Batch, keep: Iterable[SupportsIndex] | None) -> None:
        """Commit a batch that restores sequences.  The other layers of sequences that it does not make stay."""
        seq_ids = set(core.get_seq_ids().tolist())
        core.commit(keep, self._edits, [(one, None, not self.next_position(one)) for one in seq_ids])
        self._note_edits()

    @property
    def _edits(self) -> deque[Edit] | None:
        """The list to which the core appends edits for the strategy; None without one."""
        return None if self._decider is None else self._decider.edits

    def _note_edits(self) -> None:
        """Let the strategy note the edit that was made."""
        if self._decider is not None:
            self._decider.note_edits()

    def explain(self) -> str:
        """Describe the strategy and its decisions on sequences that hold rows, and on the latest that were not stored.

        If layers have windows or chunks, say also how many bytes each token of a batch may take until it is committed
        (`most_bytes` with `batch_tokens`).
        """
        self._core.check_open()
        if self._decider is not None:
            return self._decider.explain()
        return "\n".join(describe(self._strategy, self._sizes))

    # -- reading rows

    def keys(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the stored keys of a sequence in a layer, in order of arrival, rotated for their present positions.

        Parameters
        ----------
        copy : bool, optional
            Whether to copy. False: return a view. True: return a copy. None, the default: a view if possible, else a
            copy. Keys that were moved have no view, because they are rotated on the way.

        Returns
        -------
        numpy.ndarray
            The keys, ``[num_kv_heads, len, head_dim]`` of the stored type; bf16 is ``ml_dtypes.bfloat16`` if that is
            installed, else a type of two bytes, which DLPack exports as bf16. A view is read-only and keeps its rows,
            whatever becomes of the sequence; while it exists, `compact` and `close` raise ``BufferError``.

        Raises
        ------
        ValueError
            If `copy` is False and the rows do not lie in one piece (`spans` has a view of each piece), or were moved;
            or if the type is quantised, which no array can show (`gather` decodes it, or
            copies its bytes).
        """
        return _core.rows(self._core, None, seq_id, layer, copy, False)

    def values(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the stored values, ``[num_kv_heads, len, v_head_dim]``; arguments and errors are as for `keys`."""
        return _core.rows(self._core, None, seq_id, layer, copy, True)

    def get(
        self, layer: SupportsIndex, position: SupportsIndex, *, seq_id: SupportsIndex = 0
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """Return the key, rotated for its present position, and the value of a token, as new f32 arrays.

        If several tokens have the position, the latest counts.

        Returns
        -------
        tuple of numpy.ndarray or None
            The key ``[num_kv_heads, head_dim]`` and the value ``[num_kv_heads, v_head_dim]``; None if the layer does
            not hold the token.
        """
        return self._core.get(seq_id, layer, position)

    def gather(
        self,
        layer: SupportsIndex,
        *,
        seq_id: SupportsIndex = 0,
        first: SupportsIndex = 0,
        dtype: FloatDTypeLike | None = None,
        out: tuple[SupportsDLPack | npt.NDArray[Any], SupportsDLPack | npt.NDArray[Any]] | None = None,
        raw: bool = False,
    ) -> tuple[Any, Any]:
        """Return copies of the keys and values of a sequence in a layer, in order of arrival: decoded, or as stored.

        Parameters
        ----------
        first : int, default 0
            The index of the first row to copy.
        dtype : {"f32", "f16", "bf16"}, optional
            The type to convert rows to, f32 by default; also as PyTorch and NumPy name it. With a type of PyTorch's,
            such as ``torch.bfloat16``, the results are tensors.
        out : tuple of two arrays, optional
            Arrays for keys and values, in place of new ones, whose length is the number of rows to copy: of any of
            these types, or of uint8 if `raw`, NumPy's or DLPack's, contiguous along the last axis, and not overlapping.
        raw : bool, default False
            Whether to copy rows in the types in which they are stored, byte for byte. `Batch.put`, `Batch.attend` and
            `inject` take such rows. Keys that were moved are rotated and encoded anew in the copy.

        Returns
        -------
        tuple of numpy.ndarray or torch.Tensor
            The keys ``[num_kv_heads, n, head_dim]``, rotated for their present positions, and the values
            ``[num_kv_heads, n, v_head_dim]``; or `out`. If `raw`, whatever the types, the rows are bytes,
            ``[num_kv_heads, n, bytes of a row]`` of uint8.

        Raises
        ------
        ValueError
            If there is no such `dtype`, or it is given with `out` or `raw`; if `first` is negative or past the last
            row; if `out` has another shape, more rows than there are, is read-only, or overlaps.

        Examples
        --------
        A layer of q8_0, 34 bytes for 32 elements, token after token, each with all its heads, as llama.cpp saves them:

        >>> cache = kvcache.KVCache(1, 2, 64, 16, dtype="q8_0")
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 2, 64), np.float32), np.ones((3, 2, 64), np.float32))
        >>> k, v = np.empty((2, 3, 2, 68), np.uint8)
        >>> rows = cache.gather(0, raw=True, out=(k.swapaxes(0, 1), v.swapaxes(0, 1)))
        """
        if _core.flag(raw, "raw") and dtype is not None:
            raise ValueError(f"dtype={dtype!r}: raw=True copies rows in the stored type; leave it out")
        chosen = None if dtype is None else check_float_dtype(dtype, "dtype")
        result: tuple[Any, Any] = as_library_of(dtype, self._core.gather(seq_id, layer, first, chosen, out, raw))
        return result

    def weights(
        self,
        layer: SupportsIndex,
        q: AnyArray,
        positions: Iterable[SupportsIndex] | None = None,
        *,
        seq_id: SupportsIndex = 0,
        reduce: Literal["sum", "max"] = "sum",
        rotate: bool = False,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat | None = None,
        sinks: AnyArray | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the softmax weights that queries give to the stored rows of a sequence.

        They say which tokens matter to these queries: a policy that evicts tokens by their importance keeps those with
        the largest weights (`keep_positions`). Only keys are read. A query sees what a token at its position would see
        of the stored rows; other rows get a weight of 0 from it.

        Parameters
        ----------
        q : array
            The queries, ``[n, num_heads, head_dim]`` of f32, f16 or bf16.
        positions : iterable of int, optional
            Where the queries stand. By default they all stand at `next_position`, behind all rows.
        reduce : {'sum', 'max'}, default 'sum'
            What becomes of the weights that the queries, and the query heads of a KV head, give to a row.
        rotate : bool, default False
            Whether the queries carry no rotation, and are rotated for `positions` by the layer's `Rope`.
        scale, softcap, sinks
            As in `Batch.attend`.

        Returns
        -------
        numpy.ndarray
            f32 weights ``[num_kv_heads, rows]``, rows in the order of `positions`.

        Raises
        ------
        NotSupportedError
            If the layer holds keys alone, or `rotate` needs frequencies that `rope` does not give.
        RowsGoneError
            If a query would see rows that have expired.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.zeros((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
        >>> cache.weights(0, np.ones((2, 1, 2), np.float32), [1, 2]).round(2)
        array([[0.83, 0.83, 0.33]], dtype=float32)
        """
        return _core.weigh_rows(self._core, layer, q, positions, seq_id, reduce, rotate, scale, softcap, sinks)

    @overload
    def extract(
        self, layer: SupportsIndex, begin: SupportsIndex, end: SupportsIndex, *, seq_id: SupportsIndex = 0,
        raw: Literal[False] = False,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...  # fmt: skip

    @overload
    def extract(
        self, layer: SupportsIndex, begin: SupportsIndex, end: SupportsIndex, *, seq_id: SupportsIndex = 0,
        raw: Literal[True],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...  # fmt: skip

    def extract(
        self,
        layer: SupportsIndex,
        begin: SupportsIndex,
        end: SupportsIndex,
        *,
        seq_id: SupportsIndex = 0,
        raw: bool = False,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return copies of the keys and values at positions ``[begin, end)``, and zeros where nothing is stored.

        If several rows have one position, the latest counts. In a layer with a `stride` of n, row i belongs to
        block ``begin // n + i``, and the number of rows is ``end // n - begin // n``.

        Parameters
        ----------
        raw : bool, default False
            Whether to copy rows as they are stored, as in `gather`.

        Returns
        -------
        tuple of numpy.ndarray
            The keys ``[num_kv_heads, end - begin, head_dim]``, rotated for their present positions, and the values
            ``[num_kv_heads, end - begin, v_head_dim]``, as f32; if `raw`, bytes as from `gather`.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(positions=[1]) as batch:
        ...     batch.put(0, np.ones((1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32))
        >>> cache.extract(0, 0, 3)[0]
        array([[[0., 0.],
                [1., 1.],
                [0., 0.]]], dtype=float32)
        """
        result: tuple[npt.NDArray[Any], npt.NDArray[Any]] = self._core.extract(seq_id, layer, begin, end, raw)
        return result

    def inject(
        self,
        layer: SupportsIndex,
        begin: SupportsIndex,
        k: AnyArray,
        v: AnyArray | None = None,
        *,
        seq_id: SupportsIndex = 0,
        skip_missing: bool = False,
    ) -> int:
        """Replace stored keys and values at positions from `begin` on.

        If several rows have one position, the latest is replaced. Views, and other sequences that share the rows, keep
        the former ones. In a layer with a `stride`, the first row belongs to the block with position `begin`.

        Parameters
        ----------
        k, v : array
            The new rows, ``[num_kv_heads, n, head_dim]`` and ``[num_kv_heads, n, v_head_dim]``, of f32, f16 or bf16, or
            bytes, as in `Batch.put`; keys are rotated for these positions. Leave out `v` if keys hold the values, or if
            the layer holds keys alone.
        skip_missing : bool, default False
            Whether to skip positions where nothing is stored, instead of raising.

        Returns
        -------
        int
            The number of replaced rows: the number of given rows, less those that were skipped.

        Raises
        ------
        IndexError
            If nothing is stored at some positions, which the message names.
        ValueError
            If a shape is wrong, or the layer reads another's rows or has no attention.
        NotSupportedError
            If the policy of the layer is `CrossAttention`, whose rows `Batch.put` replaces.
        CacheFullError
            If shared rows have to be copied, and `capacity` or `max_bytes` would be exceeded.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
        >>> cache.inject(0, 1, np.zeros((1, 4, 2), np.float32), np.zeros((1, 4, 2), np.float32), skip_missing=True)
        2
        >>> cache.values(0)[0, :, 0]
        array([1., 0., 0.], dtype=float16)
        """
        num_replaced = self._core.inject(seq_id, layer, begin, k, v, skip_missing, self._edits)
        self._note_edits()
        return num_replaced

    def spans(self, layer: SupportsIndex, *, seq_id: SupportsIndex = 0) -> list[Span]:
        """Return views of the stored rows of a sequence in a layer, in order of arrival.

        The spans together have all rows. Their views are like views of `keys`, but show the stored keys, not rotated by
        `delta`. A quantised type is a ``ValueError``, as no array can show it (`gather` decodes).
        """
        return make_spans(_core.spans(self._core, None, seq_id, layer))

    def positions(self, *, seq_id: SupportsIndex = 0, layer: SupportsIndex = 0) -> npt.NDArray[np.int32]:
        """Return the positions of a sequence's rows in a layer, in order of arrival."""
        return self._core.positions(seq_id, layer)

    # -- inspecting sequences

    @property
    def sequences(self) -> list[int]:
        """The ids of the sequences that hold tokens, ascending; sequences with an encoder's rows only are left out."""
        return self._core.sequences()

    def seq_len(self, seq_id: SupportsIndex = 0, *, layer: SupportsIndex | None = None) -> int:
        """Return the number of rows that a sequence holds in a layer, by default of tokens in the layer with most."""
        return self._core.seq_len(seq_id, layer)

    def first_position(self, seq_id: SupportsIndex = 0, *, layer: SupportsIndex | None = None) -> int:
        """Return the smallest position with a row in a layer (None: in any layer); -1 if the sequence is empty."""
        return self._core.position_range(seq_id, layer)[0]

    def last_position(self, seq_id: SupportsIndex = 0, *, layer: SupportsIndex | None = None) -> int:
        """Return the largest position with a row in a layer (None: in any layer); -1 if the sequence is empty."""
        return self._core.position_range(seq_id, layer)[1]

    def next_position(self, seq_id: SupportsIndex = 0) -> int:
        """Return the position at which the runner continues.

        It is `last_position` + 1, or what follows the latest tokens if all their rows have expired; 0 if nothing was
        stored.
        """
        return self._core.next_position(seq_id)

    def can_resume(self, position: SupportsIndex, *, seq_id: SupportsIndex = 0) -> bool:
        """Return whether a sequence can continue from a position.

        It can if the position is at most `next_position`, and no row that a query from there on sees has expired. A
        cache that holds an encoder's rows only, and no tokens, can at any position. `truncate` drops what stands there.
        """
        return self._core.can_resume(seq_id, position)

    # -- editing sequences

    def copy_prefix(
        self, src: SupportsIndex, dst: SupportsIndex, length: SupportsIndex, *, missing_ok: bool = False
    ) -> None:
        """Replace what `dst` holds by the rows of `src` at positions below `length`, and by an encoder's rows.

        No row is copied: the two sequences share the rows until one drops them, and each appends rows of its own.
        `max_sequences` is checked when the next batch begins, not here.

        Parameters
        ----------
        length : int
            With 0, `dst` shares what an encoder gave `src`, if anything, and no token.
        missing_ok : bool, default False
            Whether a `src` that holds nothing empties `dst`, instead of raising ``ValueError``. It does anyway if
            `length` is 0, and under a strategy that does not store every sequence.

        Raises
        ------
        RowsGoneError
            If `dst` could not continue at `length`, as a token there would see rows that have expired.
        ValueError
            If `src` and `dst` are the same, or `length` is above 0 and `src` holds nothing.
        """
        end = integer(length, "length", 0, INT32_MAX)
        self._copy(partial(self._core.copy_prefix, src, dst, end, self._edits), src, dst, missing_ok)

    def fork(self, src: SupportsIndex, dst: SupportsIndex, *, missing_ok: bool = False) -> None:
        """Make `dst` share all rows of `src`; arguments and errors are as for `copy_prefix`."""
        self._copy(partial(self._core.fork, src, dst, self._edits), src, dst, missing_ok)

    def _copy(self, copy: Callable[[], None], src: SupportsIndex, dst: SupportsIndex, missing_ok: bool) -> None:
        """Call `copy`; if `src` may hold nothing, and it is refused, copy a prefix of 0 tokens."""
        self._share(copy, partial(self._core.copy_prefix, src, dst, 0, self._edits), missing_ok)
        self._note_edits()

    def _share(self, share: Callable[[], None], share_nothing: Callable[[], None], missing_ok: bool) -> None:
        """Call `share`; if it is refused where sequences may hold nothing, call `share_nothing`, which allows that.

        It raises again if something else was wrong.
        """
        may_lack = _core.flag(missing_ok, "missing_ok") or self._strategy != "always"
        is_refused = False
        try:
            share()
        except ValueError:
            if not may_lack:
                raise
            is_refused = True
        if is_refused:
            share_nothing()

    def share_range(
        self,
        src: SupportsIndex,
        dst: SupportsIndex,
        begin: SupportsIndex = 0,
        end: SupportsIndex | None = None,
        *,
        missing_ok: bool = False,
    ) -> None:
        """Add the rows of `src` at positions ``[begin, end)`` to `dst`, behind what it holds.

        No row is copied, as in `copy_prefix`. Rows that `dst` shares already are left out, so that sharing twice does
        no harm; an encoder's rows are added where `dst` has none. Rows that have expired of `src` there are missing in
        `dst` as well: see `can_resume`.

        Parameters
        ----------
        missing_ok : bool, default False
            Whether it is no error, as under a strategy that does not store every sequence, that neither holds anything.

        Raises
        ------
        ValueError
            If `src` and `dst` are the same; if `dst` holds another row than `src` at one of these positions, in some
            layer; or, as in `fork`, if neither holds anything, all positions are shared, and `missing_ok` is False.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=3)
        >>> with cache.batch(positions=[0, 1, 2, 0, 1, 2], seq_ids=[0, 0, 0, 1, 1, 1]) as batch:
        ...     batch.put(0, np.ones((6, 2, 8), np.float32), np.ones((6, 2, 8), np.float32))
        >>> cache.share_range(0, 2, 0, 2)
        >>> cache.share_range(1, 2, 2)
        >>> cache.positions(seq_id=2).tolist(), cache.stats()["live_slots"]
        ([0, 1, 2], 6)
        """
        share = partial(self._core.share_range, src, dst, begin)

        def share_nothing() -> None:  # the core refuses sequences that hold nothing only if all positions are shared
            is_all = end is None or end == INT32_MAX
            may_be_none = is_all and not {src, dst} & {*self._core.sequences()}
            share(INT32_MAX - 1 if may_be_none else end, self._edits)

        self._share(partial(share, end, self._edits), share_nothing, missing_ok)
        self._note_edits()

    def keep(self, seq_id: SupportsIndex) -> None:
        """Forget every sequence but this one."""
        self._core.keep(seq_id, self._edits)
        self._note_edits()

    def clear(self, seq_id: SupportsIndex | None = None) -> None:
        """Forget one sequence, by default all. Memory is kept for reuse; `compact` gives it back."""
        self._core.clear(seq_id, self._edits)
        self._note_edits()

    def remove(
        self,
        begin: SupportsIndex = 0,
        end: SupportsIndex | None = None,
        *,
        seq_id: SupportsIndex = 0,
        shift: bool = True,
    ) -> None:
        """Drop the rows of a sequence at positions ``[begin, end)``; with its last token, an encoder's rows, too.

        Parameters
        ----------
        shift : bool, default True
            Whether later tokens move down by ``end - begin``, as by `shift`; else a gap stays. After each removal,
            stored keys have one more distance from their rotation; hundreds of different distances slow attention
            down. So drop 64 tokens at a time rather than one.

        Raises
        ------
        NotSupportedError
            If later tokens have to move, and `rope` was not given.
        RowsGoneError
            If there are no later tokens, and the sequence could not continue at `begin`, as in `truncate`.
        CacheFullError
            As in `shift`.

        Notes
        -----
        A layer with a window holds no rows before it. If the removal reaches into the window, the next token may see
        positions that have expired, and `batch` raises RowsGoneError: ask `can_resume`, or give `resume_window`.
        """
        self._core.remove(seq_id, begin, end, shift, self._edits)
        self._note_edits()

    def keep_positions(self, positions: Iterable[SupportsIndex], *, seq_id: SupportsIndex = 0) -> None:
        """Drop all rows of a sequence's tokens except those at these positions, in all layers at once.

        Kept rows stay at their positions, and gaps between them stay gaps. Attention then has the bits of a cache that
        was given the kept rows alone. The time does not depend on the number of gaps. Forks keep their rows. `compact`
        gives the memory between kept rows back.

        Parameters
        ----------
        positions : iterable of int
            In any order. Positions at which the sequence holds no row count for nothing. If the last tokens are not
            listed, the sequence continues behind the last position that is. An empty list ends the sequence.

        Raises
        ------
        RowsGoneError
            If the sequence could not continue behind the last listed position, as in `truncate`.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(9) as batch:
        ...     batch.put(0, np.ones((9, 1, 2), np.float32), np.ones((9, 1, 2), np.float32))
        >>> cache.keep_positions([0, 1, 5, 8])
        >>> cache.positions(), cache.next_position()
        (array([0, 1, 5, 8], dtype=int32), 9)
        """
        self._core.keep_positions(seq_id, positions, self._edits)
        self._note_edits()

    def shift(
        self, begin: SupportsIndex, end: SupportsIndex | None, delta: SupportsIndex, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Move the tokens of a sequence at positions ``[begin, end)`` by `delta`.

        Tokens that would move below 0 are dropped. With a `Rope`, or without rotation, no row is changed or copied:
        attention rotates queries instead, and methods that return keys rotate these. With a function as `rope`, the
        moved keys are rewritten, and keys that sequences share are copied first.

        Raises
        ------
        NotSupportedError
            If `rope` was not given.
        ValueError
            If a position would be too large.
        CacheFullError
            If rows have to be copied, and `capacity` or `max_bytes` would be exceeded.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64, rope=kvcache.Rope([1.0]))
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
        >>> cache.shift(1, None, 10)
        >>> cache.positions()
        array([ 0, 11, 12], dtype=int32)
        """
        self._core.shift(seq_id, begin, end, delta, self._edits)
        self._note_edits()

    def divide(
        self, begin: SupportsIndex, end: SupportsIndex | None, divisor: SupportsIndex, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Divide the positions ``[begin, end)`` of a sequence by `divisor`, rounding down, as self-extend does [1]_.

        Several tokens then have the same position. Rotated keys are rewritten to new memory, and their former memory is
        freed once all of them are.

        Raises
        ------
        NotSupportedError
            If `rope` was not given.
        ValueError
            If `divisor` is below 1.
        CacheFullError
            As in `shift`.

        References
        ----------
        .. [1] Hongye Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning", ICML 2024.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 2, 64, rope=False)
        >>> with cache.batch(5) as batch:
        ...     batch.put(0, np.ones((5, 1, 2), np.float32), np.ones((5, 1, 2), np.float32))
        >>> cache.divide(0, None, 2)
        >>> cache.positions()
        array([0, 0, 1, 1, 2], dtype=int32)
        """
        self._core.divide(seq_id, begin, end, divisor, self._edits)
        self._note_edits()

    def truncate(self, length: SupportsIndex, *, seq_id: SupportsIndex = 0) -> None:
        """Drop the rows of a sequence at positions from `length` on, where the sequence then continues.

        A sequence that holds fewer tokens is left as it is. 0 ends the sequence, as `clear` does: with its last token,
        an encoder's rows go, too (`copy_prefix` with length 0 makes another sequence hold them before). 0 is always
        possible; so is any position that `can_resume` confirms, and any within the sinks of every layer with a window.

        Raises
        ------
        RowsGoneError
            If the sequence could not continue at `length`, as a token there would see rows that have expired. The
            message says how far back is possible; a larger `resume_window` keeps more.
        """
        self._core.truncate(seq_id, length, self._edits)
        self._note_edits()

    # -- memory

    def reserve(self, num_tokens: SupportsIndex, *, seq_id: SupportsIndex = 0) -> None:
        """Allocate the memory for `num_tokens` more tokens of a sequence, at least 1.

        The next batches, up to `num_tokens` tokens together, then allocate nothing for rows or bookkeeping, and cause
        no page fault: the memory is resident. It stays reserved until it is used, by any sequence, `compact` gives it
        back, or other rows need it under `max_bytes`. Rows expire and are compacted as by `batch`.

        Free memory of the cache counts, so that calls for several sequences do not add up: the largest of these
        reservations remains. For several sequences, make a cache that `capacity` limits, not `max_seq_len`, and reserve
        the sum of their tokens, each rounded up to whole blocks, in one call.

        Raises
        ------
        CacheFullError
            If a batch of `num_tokens` tokens would exceed `max_seq_len`, `max_sequences`, `capacity` or `max_bytes`.
        RowsGoneError
            If the next token would see rows that are gone.
        ValueError
            If `num_tokens` is below 1.
        """
        self._core.reserve(num_tokens, seq_id)

    def room(self, seq_id: SupportsIndex = 0) -> int:
        """Return the most tokens of a sequence with which a batch can begin now, from `next_position` on.

        One more is refused. It is at most 16,777,216, and 0 if the next token would see rows that are gone. Under a
        `SlidingWindow` or `ChunkedAttention`, as many may fit again once these are committed: feed a longer prompt in
        pieces.

        Examples
        --------
        >>> cache = kvcache.KVCache(1, 1, 8, 4, policy=kvcache.SlidingWindow(4), capacity=16)
        >>> cache.room()
        16
        >>> prompt = np.ones((40, 1, 8), np.float32)
        >>> while len(prompt):
        ...     n = min(len(prompt), cache.room())
        ...     with cache.batch(n) as batch:
        ...         batch.put(0, prompt[:n], prompt[:n])
        ...     prompt = prompt[n:]
        >>> cache.next_position()
        40
        """
        return self._core.room(seq_id)

    def compact(self) -> None:
        """Move rows together so that no block has holes, and give the freed memory back."""
        self._core.compact()

    def close(self) -> None:
        """Free everything. A second call does nothing; the end of a ``with`` calls it."""
        self._core.close()

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the cache holds, bookkeeping included."""
        return self._core.nbytes()

    @property
    def capacity_bytes(self) -> int | None:
        """The bytes of the rows of `capacity` tokens in every layer, at most 2**63 - 1; None without that limit."""
        return self._core.capacity_bytes()

    def most_bytes(self, num_tokens: SupportsIndex, *, batch_tokens: SupportsIndex = 0) -> int:
        """Return the most bytes of rows that a sequence of `num_tokens` tokens holds, over all layers.

        Windows and chunks count as full, an encoder's rows as `max_len`. If `max_seq_len` bounds batches, no layer
        holds more. Partly filled blocks and bookkeeping come on top: at most two blocks for each window, or three with
        sinks. Free blocks come on top too, at most the number that the last batch took. Rows that sequences share are
        stored once.

        `batch_tokens` of them belong to an open batch: until it is committed, layers with windows hold these tokens
        beside their windows. The default, 0, gives the bytes that the sequence holds between batches.

        Examples
        --------
        >>> cache = kvcache.KVCache(32, 8, 128, 131072, dtype="f16")
        >>> cache.most_bytes(1), cache.most_bytes(131072) / 2**30
        (131072, 16.0)
        """
        self._core.check_open()
        tokens = integer(num_tokens, "num_tokens", 0, INT32_MAX)
        at_once = integer(batch_tokens, "batch_tokens", 0, INT32_MAX)
        return self._sizes.most_bytes(tokens, at_once)

    @property
    def utilization(self) -> float:
        """The tokens held, as a fraction of `capacity`; without that limit, of the slots of the allocated blocks.

        Tokens that can be evicted from a `PrefixCache` do not count. It is above 1 while a batch is open of more tokens
        than windows keep, where `capacity` was not given.
        """
        return self._core.utilization()

    def stats(self) -> dict[str, int]:
        """Return counters since the cache was made, and the present numbers of slots and blocks.

        Returns
        -------
        dict
            Counters: ``batches`` and ``tokens`` committed, batches ``aborted``; ``rows_expired``; ``rows_evicted``
            from a `PrefixCache` to make room; ``rows_moved`` by ``compactions``; ``rows_copied`` before a change (by
            `divide`, by `shift` if `rope` is a function, and by `inject` of shared rows);
            ``blocks_opened``, ``blocks_reused`` and ``blocks_returned``, whose memory was allocated, reused and given
            back. Present numbers: ``live_slots``, which hold a token; ``wasted_slots``, which wait for a compaction;
            ``blocks_in_use`` and ``blocks_free``; blocks ``retained`` by a `PrefixCache`, and ``evictable_slots``,
            which only these hold. Rows, slots and blocks are summed over layer groups (the layers of one policy), not
            over layers.
        """
        return self._core.stats()

    def blocks(self, layer: SupportsIndex = 0) -> list[Block]:
        """Return the blocks that hold the rows of a layer and its group, all at one moment.

        The layers of one policy share blocks. Blocks in use and blocks kept for reuse are listed, by index.

        Examples
        --------
        Six tokens in blocks of four, and a fork; then each of the two appends a token:

        >>> cache = kvcache.KVCache(1, 1, 2, 64, max_sequences=2, block_size=4)
        >>> with cache.batch(6) as batch:
        ...     batch.put(0, np.ones((6, 1, 2), np.float32), np.ones((6, 1, 2), np.float32))
        >>> cache.fork(0, 1)
        >>> with cache.batch(positions=[6, 6], seq_ids=[0, 1]) as batch:
        ...     batch.put(0, np.ones((2, 1, 2), np.float32), np.ones((2, 1, 2), np.float32))
        >>> [(block.index, block.references, list(block.holders)) for block in cache.blocks()]
        [(0, 2, [0, 1]), (1, 2, [0, 1])]
        >>> cache.blocks()[1].holders[0]
        [Run(slot=0, count=3, position=4, delta=0, in_batch=False)]
        >>> cache.blocks()[1].holders[1][1].slot  # its token 6; the other two are shared
        3
        """
        blocks, runs = self._core.blocks(layer)
        holders: list[dict[int | None, list[Run]]] = [{} for _ in blocks]
        for run in runs:
            block, seq_id = run[:2]
            holders[block].setdefault(seq_id, []).append(Run(*run[2:]))
        return [Block(i, *fields, held) for i, (fields, held) in enumerate(zip(blocks, holders, strict=True))]

    def validate(self) -> None:
        """Check every invariant of the bookkeeping, for tests.

        Raises
        ------
        KVCacheError
            If an invariant does not hold; the message says which, and why.
        """
        self._core.validate()


def _limit(value: Any, name: str, most: int) -> int | None:
    return None if value is None else integer(value, name, 1, most)


def _check_strategy(value: Any) -> Strategy:
    if isinstance(value, LongSequencesOnly | Adaptive) or (isinstance(value, str) and value in ("always", "disabled")):
        return cast(Strategy, value)
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"strategy={value!r}: must be 'always', 'disabled', a LongSequencesOnly or an Adaptive")
