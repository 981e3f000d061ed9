"""Ollama's ``kvcache``, v0.15.4: causal, sliding, chunked and encoder caches, and a wrapper of several caches.

Shapes are NumPy's: what is ``[head_dim, heads, tokens]`` there is ``[tokens, heads, head_dim]`` here, the same bytes.
The shape of the model is told to `Cache.init`, where a backend is given there. A pass is a forward pass of the model,
an open batch of the cache below. A member is a cache of a wrapper, or the cache itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, check_index, to_integer, to_integers

__all__ = [
    "MAX_INT32",
    "Cache",
    "CacheConfig",
    "Causal",
    "CausalOptions",
    "EncoderCache",
    "ErrKvCacheFull",
    "ErrNotSupported",
    "WrapperCache",
    "new_causal_cache",
    "new_chunked_attention_cache",
    "new_encoder_cache",
    "new_swa_cache",
    "new_swa_mem_cache",
    "new_wrapper_cache",
]

MAX_INT32 = 2**31 - 1
ErrKvCacheFull = kvcache.CacheFullError
ErrNotSupported = kvcache.NotSupportedError


@dataclass(frozen=True)
class CacheConfig:
    """What your own attention needs to know of the arrays that `Cache.get` returns."""

    cache_padding: int = 1  #: the number of rows is a multiple of it; the mask hides those that were added
    permuted_v: bool = False  #: values are ``[heads, head_dim, rows]``
    mask_dtype: Literal["f32", "f16"] = "f32"

    def __post_init__(self) -> None:
        to_integer("cache_padding", self.cache_padding, 1)
        if not isinstance(self.permuted_v, bool):
            raise TypeError(f"permuted_v={self.permuted_v!r}: a bool is needed, not {type(self.permuted_v).__name__}")
        if self.mask_dtype not in ("f32", "f16"):
            raise ValueError(f"mask_dtype={self.mask_dtype!r}: must be 'f32' or 'f16'")


@dataclass(frozen=True)
class CausalOptions:
    """Which tokens of the batch also see later tokens of their sequence."""

    except_: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "except_", tuple(to_integers("except_", self.except_)))


@dataclass
class _Pass:
    """State that the caches of one model share: its rows, the forward pass, and the layer at hand."""

    cache: kvcache.KVCache
    members: tuple[Cache, ...]
    layer_types: list[int]  # by layer, the member that it is of
    batch: kvcache.Batch | None = None
    layer: int = 0
    layer_type: int = 0  # of a wrapper: the cache that is chosen
    given: set[int] = field(default_factory=set)  # the layers that have the rows of the pass
    shapes: dict[int, Any] = field(default_factory=dict)  # by layer, those in which an encoder's rows were put
    undo: list[Callable[[], None]] = field(default_factory=list)  # called, the last first, if the pass is forgotten

    def open_batch(self) -> kvcache.Batch:
        """Return the batch of the forward pass."""
        if self.batch is None:
            raise ValueError("no forward pass: call start_forward() first, with reserve=False")
        return self.batch

    def batch_for(self, member: Cache) -> kvcache.Batch:
        """Return the batch of the forward pass; raise ``ValueError`` if the layer at hand is of another cache."""
        batch, number = self.open_batch(), self.layer_types[self.layer]
        if self.members[number] is not member:
            raise ValueError(
                f"layer {self.layer} is of caches[{number}], and another one is asked: call set_layer_type({number}) "
                "first, or say by the layer_types of init() which layer is of which cache"
            )
        return batch

    @property
    def source(self) -> int:
        """The layer that has the rows of the layer at hand."""
        share = self.cache.layers[self.layer].share
        return self.layer if share is None else share

    def end(self) -> None:
        """Make the pass part of its sequences; where a layer was left out, raise and forget the pass."""
        batch, self.batch = self.batch, None
        undo, self.undo = self.undo, []
        self.given.clear()
        try:
            with batch or nullcontext():
                pass
        except BaseException:
            for each in reversed(undo):
                each()
            raise


class Cache(Copied):
    """The calls of all caches: `init`, then `start_forward` for each pass, and in each layer `set_layer`, `put`, `get`.

    A pass becomes part of its sequences at the next call that begins one, asks or edits. If a layer was left out, this
    call raises ``ValueError``, and the pass is forgotten.
    """

    _shared: _Pass | None = None
    _config: CacheConfig | None = None

    def __init__(self, shift: Any = None) -> None:
        self._shift = shift

    def init(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "f16",
        max_sequences: int = 1,
        capacity: int,
        max_batch: int | None = None,
        v_head_dim: int | None = None,
        layer_types: Sequence[int] | None = None,
        share: Sequence[int | None] | None = None,
    ) -> None:
        """Make the cache.

        Parameters
        ----------
        num_layers, num_kv_heads, head_dim : int
            The shape of the model.
        dtype : str, default "f16"
            The element type, any that `kvcache.KVCache` stores.
        max_sequences : int, default 1
            The most sequences.
        capacity : int
            The tokens that there is room for, for each sequence; one may use the room of all.
        max_batch : int, optional
            The most tokens of a pass. If every layer has a window, there is room for what the windows keep and for one
            such pass, which may be more than `capacity`, or less. By default `capacity` alone counts.
        v_head_dim : int, optional
            The elements of a value's head, if not `head_dim`.
        layer_types : sequence of int, optional
            For `WrapperCache`: which of its caches each layer is of; by default they take turns.
        share : sequence of int or None, optional
            For layers that `get` and never `put`: the earlier layer whose rows each one reads; None for the others.

        Raises
        ------
        ValueError
            If a window's memory is smaller than the window, an encoder's cache is for several sequences, or
            `layer_types` has more or fewer layers.
        IndexError
            If there is no such cache as `layer_types` says.
        """
        members = self._members()
        sizes = {"num_layers": num_layers, "max_sequences": max_sequences, "capacity": capacity}
        num_layers, max_sequences, capacity = (to_integer(name, value, 1) for name, value in sizes.items())
        if layer_types is None:
            layer_types = [layer % len(members) for layer in range(num_layers)]
        layer_types = to_integers("layer_types", layer_types)
        room = max_sequences * capacity
        kept = [each._kept(max_sequences, capacity) for each in members]
        if max_batch is not None:
            batch = to_integer("max_batch", max_batch, 1)
            most = max(filter(None, kept), default=0)
            # A sequence that is not in the pass has one more row, which the next token does not see.
            room = room if None in kept else max_sequences * most + max_sequences - 1 + batch
        padding = max((each._config or CacheConfig()).cache_padding for each in members)
        if len(layer_types) != num_layers:
            raise ValueError(f"len(layer_types)={len(layer_types)}: must be num_layers, which is {num_layers}")
        for layer, number in enumerate(layer_types):
            check_index(f"layer_types[{layer}]", number, len(members))
        cache = kvcache.KVCache(
            num_layers,
            num_kv_heads,
            head_dim,
            None,
            v_head_dim=v_head_dim,
            dtype=dtype,
            policy=[members[number]._policy(max_sequences, capacity) for number in layer_types],
            rope=[members[number]._shift for number in layer_types],
            share=share,
            max_sequences=max_sequences,
            capacity=-(-room // padding) * padding,
        )
        shared = _Pass(cache, members, layer_types)
        for each in (self, *members):
            each._shared = shared
            each._removed(-1, MAX_INT32)  # an encoder's rows are those of a cache that was made before

    def set_config(self, config: CacheConfig) -> None:
        """Say what `get` is to return; once, before `init`. That of a `WrapperCache` is for all of its caches.

        Raises
        ------
        TypeError
            If `config` is no `CacheConfig`.
        ValueError
            If the cache was made, or it, or one of those in a wrapper, has a configuration already.
        """
        if not isinstance(config, CacheConfig):
            raise TypeError(f"set_config({config!r}): a CacheConfig is needed, which says what get() returns")
        if self._shared is not None:
            raise ValueError("set_config(): the cache was made; call it before init()")
        for member in self._members():
            if member._config is not None:
                raise ValueError(
                    f"set_config(): {type(member).__name__} has {member._config} already; call it once, of a wrapper "
                    "or of the caches in it"
                )
        for member in self._members():
            member._config = config

    def __repr__(self) -> str:
        if self._shared is None:
            return f"<ollama.{type(self).__name__}: not made yet>"
        cache = self._shared.cache
        return f"<ollama.{type(self).__name__}: {len(cache.sequences)} sequences, {cache.num_layers} layers>"

    @property
    def cache(self) -> kvcache.KVCache:
        """The cache below."""
        return self._pass().cache

    @property
    def dtype(self) -> str:
        """The element type of keys and values, which `init` was given."""
        return self.cache.layers[0].k_dtype

    def close(self) -> None:
        """Free all memory."""
        shared = self._pass()
        if shared.batch is not None:
            shared.batch.abort()
        shared.cache.close()

    def start_forward(
        self,
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        *,
        multimodal: Sequence[int] = (),
        reserve: bool = False,
    ) -> None:
        """Begin a forward pass, and make the one before part of its sequences.

        Parameters
        ----------
        positions : sequence of int
            The position of each token.
        sequences : sequence of int, optional
            The sequence of each token; by default 0 for all.
        multimodal : sequence of int, optional
            The tokens, by index, that stand for something an encoder has encoded.
        reserve : bool, default False
            Whether to take the memory of as many tokens, and begin nothing.

        Raises
        ------
        ErrKvCacheFull
            If the tokens do not fit; nothing has expired then.
        kvcache.RowsGoneError
            If a token would see rows that have expired, which the original attends without; ask `can_resume` first.
        ValueError
            If a layer was left out in the pass before, which is forgotten then.
        IndexError
            If `multimodal` names a token that there is not.
        """
        shared = self._pass()
        positions = to_integers("positions", positions)
        multimodal = to_integers("multimodal", multimodal)
        shared.end()
        if reserve:
            shared.cache.reserve(len(positions))
            return
        for token in multimodal:
            check_index("multimodal", token, len(positions))
        seq_ids = [0] * len(positions) if sequences is None else sequences
        shared.batch = shared.cache.batch(positions=positions, seq_ids=seq_ids)
        shared.layer_type = 0
        for member in self._members():
            member._start(positions, multimodal)

    def set_layer(self, layer: int) -> None:
        """Choose the layer that `put` and `get` are for.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        check_index("layer", layer, self.cache.num_layers)
        self._pass().layer = layer

    def put(self, key: Any, value: Any) -> None:
        """Store the rows of the pass in the layer, ``[tokens, heads, dim]`` each.

        Raises
        ------
        ValueError
            If there is no pass, a shape is wrong, the layer has its rows already, or it is of another cache of a
            wrapper.
        """
        shared = self._pass()
        shared.batch_for(self).put(shared.layer, key, value)
        shared.given.add(shared.layer)

    def get(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Return copies of all rows that the pass can see in the layer.

        Returns
        -------
        k, v : numpy.ndarray
            ``[rows, heads, dim]`` each, of the sequences in the pass, in order of position; of the stored type, f32 for
            quantised ones and bf16. `CacheConfig` says what else.
        mask : numpy.ndarray or None
            ``[tokens, rows]``, 0 where a token sees a row, else minus infinity; None for an encoder's rows.

        Raises
        ------
        ValueError
            If there is no pass, the layer has no rows of it, or it is of another cache of a wrapper.
        """
        raise NotImplementedError

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Share the tokens of `src_seq` below position `length` with `dst_seq`, in place of what that held.

        If `src_seq` holds nothing, `dst_seq` is empty afterwards.

        Raises
        ------
        kvcache.RowsGoneError
            If a token at `length` would miss rows that have expired.
        ValueError
            If the two are the same.
        """
        self._ended().copy_prefix(src_seq, dst_seq, length, missing_ok=True)

    def can_resume(self, seq: int, pos: int) -> bool:
        """Return whether a token at `pos` would see all that it is to see."""
        return self._ended().can_resume(pos, seq_id=seq)

    def remove(self, seq: int, begin: int, end: int = MAX_INT32) -> None:
        """Drop the tokens at positions `begin` to `end` - 1, and move later ones there; all of it, or nothing.

        Raises
        ------
        ErrNotSupported
            If tokens would have to move, and the cache has no `shift`.
        kvcache.RowsGoneError
            If a token at the new end would miss rows that have expired: where `can_resume` is false, drop all.
        """
        begin, end = to_integer("begin", begin), to_integer("end", end)
        cache = self._ended()
        if end == MAX_INT32:
            cache.truncate(begin, seq_id=seq)
        else:
            cache.remove(begin, end, seq_id=seq)
        if not cache.sequences:
            begin, end = -1, MAX_INT32  # an encoder's rows are gone, too, also those that stand for no token
        for member in self._members():
            member._removed(begin, end)

    def _pass(self) -> _Pass:
        if self._shared is None:
            raise ValueError("the cache was not made: call init() first")
        return self._shared

    def _ended(self) -> kvcache.KVCache:
        self._pass().end()
        return self._pass().cache

    def _members(self) -> tuple[Cache, ...]:
        return (self,)

    def _policy(self, max_sequences: int, capacity: int) -> Any:
        """Return the policy of the member's layers."""
        raise NotImplementedError

    def _kept(self, max_sequences: int, capacity: int) -> int | None:
        """Return how many rows of a sequence's tokens stay behind a pass; None if all do."""
        raise NotImplementedError

    def _start(self, positions: Sequence[int], multimodal: Sequence[int]) -> None:
        pass

    def _removed(self, begin: int, end: int) -> None:
        pass


class Causal(Cache):
    """Rows of tokens: `new_causal_cache` and its like make it.

    Parameters
    ----------
    shift : Rope, callable or None
        How keys are moved: what `kvcache.KVCache` takes as `rope`.
    window, memory, chunk : int, optional
        As for the functions.
    """

    def __init__(
        self, shift: Any = None, *, window: int | None = None, memory: int | None = None, chunk: int | None = None
    ) -> None:
        super().__init__(shift)
        self._window = None if window is None else to_integer("window", window, 0)
        self._memory = None if memory is None else to_integer("memory", memory, 0)
        self._chunk = None if chunk is None else to_integer("chunk", chunk, 1)
        self._except: Sequence[int] = ()

    def set_causal(self, options: CausalOptions) -> None:
        """Let some tokens of the pass see later ones, for every `get` until the next pass."""
        if not isinstance(options, CausalOptions):
            raise TypeError(f"set_causal({options!r}): CausalOptions are needed, which name the tokens")
        for token in options.except_:
            check_index("except_", token, len(self._pass().open_batch()))
        self._except = options.except_

    def put(self, key: Any, value: Any) -> None:  # noqa: D102 - as in `Cache`
        tokens = len(self._pass().batch_for(self))
        for name, rows in (("key", key), ("value", value)):
            if np.shape(rows)[:1] != (tokens,):
                raise ValueError(f"{name}: an array of shape {np.shape(rows)}, where the pass has {tokens} tokens")
        super().put(key, value)

    def get(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:  # noqa: D102 - as in `Cache`
        shared = self._pass()
        batch, config = shared.batch_for(self), self._config or CacheConfig()
        if shared.source not in shared.given:
            raise ValueError(
                f"layer {shared.layer} has no rows of this pass: put them first; a layer that only reads another one's "
                "is to be told to init(), by share"
            )
        stored = shared.cache.layers[shared.layer].k_dtype
        lifted = np.isin(np.arange(len(batch)), self._except)
        k, v, mask = batch.dense(
            shared.layer, non_causal=lifted, layout="THD", dtype="f16" if stored == "f16" else "f32"
        )
        more = -len(k) % config.cache_padding
        k, v = (np.pad(rows, ((0, more), (0, 0), (0, 0))) for rows in (k, v))
        mask = np.pad(mask, ((0, 0), (0, more)), constant_values=-np.inf)
        if config.permuted_v:
            v = np.ascontiguousarray(v.transpose(1, 2, 0))
        return k, v, mask.astype(np.float16 if config.mask_dtype == "f16" else np.float32, copy=False)

    def _policy(self, max_sequences: int, capacity: int) -> Any:
        # A window of Ollama's does not count the token itself, as this package's does.
        everything = max_sequences * capacity
        if self._chunk is not None:
            return kvcache.ChunkedAttention(self._chunk, resume_window=max(everything, self._chunk))
        if self._window is None:
            return kvcache.FullAttention()
        memory = self._kept(max_sequences, capacity)
        if memory is None:
            memory = max(everything, self._window)
        if memory < self._window:
            raise ValueError(f"memory={memory}: must be at least the window, which is {self._window}")
        return kvcache.SlidingWindow(self._window + 1, resume_window=memory + 1)

    def _kept(self, max_sequences: int, capacity: int) -> int | None:
        if self._window is None:
            return None
        memory = self._window if self._memory is None else self._memory
        if max_sequences > 1:
            memory = max(memory, self._window + 1)
        return memory if memory < capacity else None

    def _start(self, positions: Sequence[int], multimodal: Sequence[int]) -> None:
        self._except = ()


class EncoderCache(Cache):
    """Rows of something that was encoded, of one sequence; every token sees all of them. `new_encoder_cache` makes it.

    Parameters
    ----------
    max_len : int
        The most rows.
    """

    def __init__(self, max_len: int) -> None:
        super().__init__(shift=False)
        self._max_len = max_len
        self._position = self._cached_position = -1
        self._cached = False

    def put(self, key: Any, value: Any) -> None:
        """Store rows in the layer, in place of those before: ``[..., heads, dim]`` each, or ``[rows, heads * dim]``.

        With `CacheConfig.permuted_v`, they are ``[..., rows, heads, dim]``.
        """
        if self._config is not None and self._config.permuted_v and np.ndim(value) < 3:
            raise ValueError(
                f"value: an array of shape {np.shape(value)}, where permuted_v needs [..., rows, heads, dim]"
            )
        super().put(key, value)
        shared = self._pass()
        shared.undo.append(partial(self._know, shared.shapes.copy(), self._cached, self._cached_position))
        shared.shapes[shared.layer] = tuple(key.shape), tuple(value.shape)
        self._cached, self._cached_position = True, self._position

    def get(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Return copies of the rows in the layer, in the shape in which they were put, and None.

        Raises
        ------
        ValueError
            If there is no pass, no rows were put, or the layer is of another cache of a wrapper.
        """
        shared = self._pass()
        batch = shared.batch_for(self)
        dtype: Any = "f16" if shared.cache.layers[shared.layer].k_dtype == "f16" else "f32"
        k, v, _ = batch.dense(shared.layer, layout="THD", dtype=dtype, mask=None)
        if not len(k):
            raise ValueError(f"layer {shared.layer} has no rows: put an encoder's first")
        k, v = (rows.reshape(shape) for rows, shape in zip((k, v), shared.shapes[shared.source], strict=True))
        if self._config is not None and self._config.permuted_v:
            v = np.ascontiguousarray(np.moveaxis(v, -3, -1))
        return k, v, None

    def encoder_cached(self) -> bool:
        """Return whether there are rows, and the token they stand for was not removed."""
        return self._cached

    def can_resume(self, seq: int, pos: int) -> bool:
        """Return True."""
        return True

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Raise: the rows are of one sequence.

        Raises
        ------
        ErrNotSupported
            Always.
        """
        raise ErrNotSupported(
            "copy_prefix(): an encoder's rows are of one sequence here; KVCache.copy_prefix shares them"
        )

    def remove(self, seq: int, begin: int, end: int = MAX_INT32) -> None:
        """Say that the rows are no longer wanted, if the token they stand for is removed; they can still be read."""
        self._removed(to_integer("begin", begin), to_integer("end", end))

    def _policy(self, max_sequences: int, capacity: int) -> Any:
        if max_sequences > 1:
            raise ValueError(
                f"max_sequences={max_sequences}: an encoder's rows are of one sequence here; kvcache.CrossAttention "
                "has rows for each"
            )
        return kvcache.CrossAttention(self._max_len)

    def _kept(self, max_sequences: int, capacity: int) -> int | None:
        return 0

    def _start(self, positions: Sequence[int], multimodal: Sequence[int]) -> None:
        if multimodal:
            self._position = positions[multimodal[-1]]

    def _know(self, shapes: dict[int, Any], cached: bool, position: int) -> None:
        self._pass().shapes, self._cached, self._cached_position = shapes, cached, position

    def _removed(self, begin: int, end: int) -> None:
        if begin <= self._cached_position < end:
            self._cached = False


class WrapperCache(Cache):
    """A cache for layers of several kinds. A forward pass fits in all of these, or changes none.

    Parameters
    ----------
    *caches : Causal or EncoderCache
        The caches, each an argument; `init` says which layer is of which.

    Raises
    ------
    TypeError
        If one of them is something else, such as a list, or a `WrapperCache`.
    ValueError
        If there is none.
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        if not caches:
            raise ValueError("WrapperCache(): takes at least one cache")
        for i, each in enumerate(caches):
            if not isinstance(each, (Causal, EncoderCache)):
                raise TypeError(f"caches[{i}]={each!r}: must be a Causal or an EncoderCache; give each as an argument")
        self._caches = caches

    def set_layer_type(self, layer_type: int) -> None:
        """Choose the cache that `put`, `get` and `underlying_cache` are of, by its number; each pass begins with 0.

        Raises
        ------
        IndexError
            If there is no such cache.
        """
        check_index("layer_type", layer_type, len(self._caches))
        self._pass().layer_type = layer_type

    def underlying_cache(self) -> Cache:
        """Return the cache that was chosen."""
        return self._caches[self._pass().layer_type]

    def put(self, key: Any, value: Any) -> None:  # noqa: D102 - as in `Cache`
        self.underlying_cache().put(key, value)

    def get(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:  # noqa: D102 - as in `Cache`
        return self.underlying_cache().get()

    def _members(self) -> tuple[Cache, ...]:
        return self._caches


def new_causal_cache(shift: Any = None) -> Causal:
    """Return a cache whose tokens see all earlier ones."""
    return Causal(shift)


def new_swa_cache(window_size: int, shift: Any = None) -> Causal:
    """Return a cache whose tokens see themselves and `window_size` earlier ones."""
    return Causal(shift, window=to_integer("window_size", window_size, 0))


def new_swa_mem_cache(window_size: int, memory_size: int, shift: Any = None) -> Causal:
    """Return a cache as `new_swa_cache` does, which keeps `memory_size` tokens behind a batch, to go back to."""
    return Causal(
        shift, window=to_integer("window_size", window_size, 0), memory=to_integer("memory_size", memory_size, 0)
    )


def new_chunked_attention_cache(chunk_size: int, shift: Any = None) -> Causal:
    """Return a cache whose tokens see the earlier tokens of their chunk of `chunk_size` positions."""
    return Causal(shift, chunk=to_integer("chunk_size", chunk_size, 1))


def new_encoder_cache(max_len: int = 2**16) -> EncoderCache:
    """Return a cache for at most `max_len` rows of an encoder."""
    return EncoderCache(max_len)


def new_wrapper_cache(*caches: Cache) -> WrapperCache:
    """Return a cache for layers of several kinds."""
    return WrapperCache(*caches)
