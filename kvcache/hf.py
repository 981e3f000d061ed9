"""Hugging Face transformers with this cache: `HFCache`, and the attention implementation ``"kvcache"``.

::

    import kvcache.hf

    model.set_attn_implementation("kvcache")
    model.generate(**inputs, past_key_values=kvcache.hf.HFCache(model.config, dtype="q8_0"))

Importing this module registers an attention and a mask function under that name. With them keys and values go from the
model into the cache and are attended over where they lie; with the model's own attention (``"sdpa"``, ``"eager"``) the
cache hands out dense tensors, as any other does. For models with an encoder too there is `HFEncoderDecoderCache`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DummyLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache.cache import Batch, KVCache
from kvcache.errors import NotSupportedError
from kvcache.layer import DType
from kvcache.models.fields import NAMES
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow

__all__ = ["NAME", "HFCache", "HFEncoderDecoderCache"]

NAME = "kvcache"
ATTRIBUTE = "_kvcache_layer"  # of the keys that `HFCache.update` returns: whose they are
# Layers without keys and values of their own, which stay transformers'.
CacheLayer: TypeAlias = LinearAttentionCacheLayerMixin | DummyLayer
BLOCK = 256  # tokens: copied in one go for the model's own attention; what is not filled takes no memory
RESUME = 64  # tokens that a window can be taken back by: assisted decoding drops what it guessed wrong


@dataclass(frozen=True)
class Mask:
    """What a mask would be made of; the kernels know who sees what, all but the padding."""

    padding: torch.Tensor | None  # [batch, tokens so far] of bool, True: a token
    is_plain: bool  # nothing but order, window and padding
    sees_all: bool  # not even order, as in an encoder, or in attention over one
    arguments: dict[str, Any]  # of sdpa_mask
    queries: slice | None = None  # which of them; None: all

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> Mask:
        """Some of the queries, as Gemma 4 takes the last ones in the end."""
        return replace(self, queries=index[2])

    def dense(self) -> torch.Tensor | None:
        """[batch, 1, queries, keys] of bool; None: all see all."""
        mask = sdpa_mask(**{**self.arguments, "allow_is_causal_skip": False})
        return mask if mask is None or self.queries is None else mask[:, :, self.queries]


def make_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **arguments: Any,
) -> Mask:
    """Stand in for a mask; transformers calls this where others make a tensor."""
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    # These tell of functions that were mixed in.
    is_plain = (allow_is_causal_skip or allow_is_bidirectional_skip) and not use_vmap
    arguments |= {"allow_is_bidirectional_skip": allow_is_bidirectional_skip, "use_vmap": use_vmap}
    return Mask(padding, is_plain, allow_is_bidirectional_skip, {**arguments, "attention_mask": attention_mask})


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks for: query ``[batch, heads, tokens, dim]``, out ``[batch, tokens, heads, dim]``."""
    layer: Layer | None = getattr(key, ATTRIBUTE, None)
    if layer is not None:  # else there is no cache, or another one
        if options.get("position_bias") is not None:
            raise NotSupportedError("a position bias is added to the scores of this model: use its eager attention")
        is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
        if layer.knows(attention_mask, is_causal) and not options.get("dropout"):
            padding = attention_mask.padding if isinstance(attention_mask, Mask) else None
            sinks = None if s_aux is None else s_aux.detach()
            given = {"scale": scaling, "softcap": softcap, "sinks": sinks}
            return layer.cache.attend(layer, query, key, value, padding, given), None
        key, value = layer.cache.make_dense(layer, key, value)
    if softcap is not None or s_aux is not None:
        raise NotSupportedError("softcap and sinks need an HFCache and a plain mask: use the eager attention without")
    mask = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
    options = {"dropout": 0.0, **options, "is_causal": mask is None and options.get("is_causal")}
    out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    return out, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)


class Layer(CacheLayerMixin):
    """What transformers takes for one layer of the cache."""

    is_croppable = True
    is_initialized = True  # rows are taken as they come
    supports_early_init = False
    keys: torch.Tensor | None = None  # nobody asks
    values: torch.Tensor | None = None

    def __init__(self, cache: HFCache, index: int) -> None:
        self.cache, self.index = cache, index  # of the core's layers
        self.window = _window_of(cache.policy[index])  # tokens that a query sees at most; 0: all
        self.is_sliding = self.window > 0

    def knows(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        if isinstance(mask, Mask):
            return is_causal and mask.is_plain and not mask.sees_all
        return is_causal and mask is None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.store(self, key_states, value_states)

    def kept(self, seen: int) -> int:
        """How many of the tokens before have columns in a mask."""
        return min(seen, self.window - 1) if self.window else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.cache.get_seq_length()
        return self.kept(seen) + query_length, seen - self.kept(seen)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.cache.batch_size


class CrossLayer(Layer):
    """The same, of attention over an encoder, whose keys and values are stored once and then asked for, in turns."""

    _values: torch.Tensor | None = None  # that go with the keys asked for last

    def knows(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        return mask.is_plain and mask.sees_all if isinstance(mask, Mask) else mask is None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override] # where others have an attribute, which nobody sets
        keys, self._values = self.cache.fetch(self)
        return keys

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override] # as above
        values, self._values = self._values, None
        return self.cache.fetch(self)[1] if values is None else values


class Shared:
    """What an `HFCache` and its copies have in common, beside the rows."""

    def __init__(self) -> None:
        self.seq_ids = itertools.count()
        self.owner: Callable[[], HFCache | None] = lambda: None  # of the forward pass that may be open


class Step:
    """A forward pass."""

    def __init__(self, batch: Batch, real: torch.Tensor | None, num_tokens: int, num_layers: int) -> None:
        self.batch, self.num_tokens, self.num_layers = batch, num_tokens, num_layers
        self.real = real  # [batch, tokens] of bool, where some are padding
        self.has_gaps = False  # some of these lie between others
        self.done: set[int] = set()  # layers

    @property
    def is_whole(self) -> bool:
        return len(self.done) == self.num_layers


class HFCache(Cache):
    """A cache for models of transformers, each row of the batch a sequence.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0"}, default "f16"
        Of the rows.
    policy : policy or list of policies, optional
        Of all layers, or of each; by default what `config` says of them.

    Raises
    ------
    NotSupportedError
        If the model has a layer whose state is neither keys and values nor that of linear attention, or no attention;
        or an encoder.
    ValueError
        If `config` says nothing of heads, or an argument is none that `kvcache.KVCache` takes.
    TypeError
        If `config` is no configuration of transformers.

    Notes
    -----
    Padding is not stored: a token that the attention mask hides when it comes in has no row, so that a query sees the
    rows before it in its own order. Layers of linear attention keep transformers' own state, in the same cache.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: DType = "f16", policy: Policy | Sequence[Policy] | None = None
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {config!r}: give the model's, of transformers")
        self._config = config.get_text_config(decoder=True)  # says which attention the model has now
        if config.is_encoder_decoder or self._config.is_encoder_decoder:
            raise NotSupportedError(f"a {type(config).__name__} has an encoder too: use HFEncoderDecoderCache")
        types, options = get_layer_types_and_kwargs(self._config)
        layers: list[Any] = [_make(i, *layer) for i, layer in enumerate(zip(types, options, strict=True))]
        ours = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, CacheLayer)}  # policies
        if not ours:
            raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
        num_kv_heads, head_dim = zip(*(_shape_of(self._config.per_layer_config[i]) for i in ours), strict=True)
        self._cache = KVCache(
            len(ours),
            num_kv_heads,
            head_dim,
            None,
            dtype=dtype,
            policy=[*ours.values()] if policy is None else policy,
            max_sequences=None,
            block_size=BLOCK,
        )
        self._v_dims = self._cache.v_head_dim
        self._calls = {"kernel": 0, "dense": 0, "fallback": 0}
        self._shared = Shared()
        self._forget()
        for index, i in enumerate(ours):
            layers[i] = self._layer(index)
        super().__init__(layers=layers)

    def _forget(self) -> None:
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._seen = 0  # tokens, padding included
        self._step: Step | None = None
        self._pending: Layer | None = None  # its keys are on their way to `attention`
        self._has_gaps = False  # rows of padding are missing between others
        self._is_packed = False  # or of an encoder's

    def _layer(self, index: int) -> Layer:
        return (CrossLayer if isinstance(self.policy[index], CrossAttention) else Layer)(self, index)

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """What each layer of attention keeps."""
        return self._cache.policy

    @property
    def _others(self) -> list[Any]:
        """Transformers' own layers."""
        return [layer for layer in self.layers if not isinstance(layer, Layer)]

    # ---- a forward pass

    def store(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values ``[batch, heads, tokens, dim]``; return what the attention is given."""
        if not k.is_cpu:
            raise NotSupportedError(f"the keys are on {k.device}: this cache is for models on the CPU")
        self._look(layer)
        if self._pending is not None and self._pending.index < layer.index:
            index, self._pending = self._pending.index, None
            raise RuntimeError(f"the keys of layer {index} did not reach the attention: this model changes them first")
        self._dtype = k.dtype
        if self._attends:
            self._pending = layer
            return self._mark(layer, k), v
        self._calls["dense"] += 1
        return self._put(layer, k, v)

    def _look(self, layer: Layer) -> None:
        """Find out, once in a pass, whether the model's attention is ours; asking takes microseconds."""
        if layer.index == 0 or self._step is None:
            self._attends = self._config._attn_implementation == NAME
        if layer.index == 0:  # a pass begins, whatever became of the one before
            self._pending = None

    def _mark(self, layer: Layer, k: torch.Tensor) -> torch.Tensor:
        """The same, for `attention` to know whose it is."""
        setattr(k, ATTRIBUTE, layer)
        return k

    def has_source(self, index: int) -> bool:
        """Whether a layer has what an encoder made: not so after a pass that did not come to its end."""
        self._settle()
        return bool(self._rows) and self._cache.seq_len(self._rows[0], layer=index) > 0

    def fetch(self, layer: CrossLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention over an encoder is given from the second pass on."""
        if not self._rows:
            raise RuntimeError("nothing was stored of an encoder: run the decoder with what the encoder made first")
        self._look(layer)
        if self._attends:
            return self._mark(layer, torch.empty(0)), torch.empty(0)
        self._calls["dense"] += 1
        return self._source(layer)

    def attend(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store the new tokens of a layer, and attend with the kernels."""
        is_new, self._pending = self._pending is layer, None
        rows: tuple[torch.Tensor, ...] = (k, v) if is_new else ()
        if isinstance(layer, CrossLayer):
            if not is_new and layer.index == 0:
                self._check_source(padding)
            step = self._step_of(layer, q, None)
            if is_new:
                self._put_source(step, layer, k, v, padding)
            rows = ()
        elif is_new:
            step = self._step_of(layer, k, padding)
        elif self._step is not None and layer.index in self._step.done:  # another layer reads the rows of this one
            step = self._step
        else:
            raise RuntimeError(f"layer {layer.index} is read by another before it was written")
        out = self._run(step, layer, q, rows, options)
        step.done.add(layer.index)
        return out

    def make_dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; all its keys and values, for what the kernels do not know."""
        if not self._calls["fallback"]:
            warnings.warn(
                "kvcache: a mask or an option that the kernels do not know; using dense tensors", stacklevel=2
            )
        self._calls["fallback"] += 1
        is_new, self._pending = self._pending is layer, None
        if is_new:
            return self._put(layer, k, v)
        return self._source(layer) if isinstance(layer, CrossLayer) else self._dense(layer, k, v)

    def _source(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """What was stored of an encoder, in an earlier pass."""
        if self._is_packed:
            raise NotSupportedError(
                "the encoder's padding was not stored: go on with the attention 'kvcache', and its masks"
            )
        self._settle()
        return self._stored(layer, self._cache.seq_len(self._rows[0], layer=layer.index))

    def _run(
        self, step: Step, layer: Layer, q: torch.Tensor, rows: tuple[torch.Tensor, ...], options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend, and store the rows of k and v first, if there are any."""
        batch_size, num_heads, num_tokens, head_dim = q.shape
        if num_tokens < step.num_tokens:  # the last ones; the others are thrown away
            wide = q.new_zeros(batch_size, num_heads, step.num_tokens, head_dim)
            wide[:, :, -num_tokens:] = q
            return self._run(step, layer, wide, rows, options)[:, -num_tokens:].contiguous()
        self._calls["kernel"] += 1
        out = q.new_empty(batch_size, num_tokens, num_heads, self._v_dims[layer.index])
        if step.real is None:
            step.batch.attend(layer.index, q, *rows, layout="BHTD", out=out.transpose(1, 2), **options)
            return out
        packed_q, *packed = (x.transpose(1, 2)[step.real] for x in (q, *rows))
        result = q.new_empty(len(packed_q), *out.shape[2:])
        step.batch.attend(layer.index, packed_q, *packed, out=result, **options)
        out.zero_()
        out[step.real] = result
        return out

    def _put(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; all that its mask has columns for, ``[batch, heads, n, dim]``."""
        step = self._step_of(layer, k, None)
        if isinstance(layer, CrossLayer):
            self._put_source(step, layer, k, v, None)
            dense = k, v
        else:
            rows = (k, v) if step.real is None else tuple(x.transpose(1, 2)[step.real] for x in (k, v))
            step.batch.put(layer.index, *rows, layout="BHTD" if step.real is None else "THD")
            dense = self._dense(layer, k, v)
        step.done.add(layer.index)
        return dense

    def _dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored, and the new tokens."""
        if self._has_gaps:
            raise NotSupportedError(
                "padding between tokens was not stored: go on with the attention 'kvcache', and its masks"
            )
        kept = layer.kept(self._seen)
        dense = self._stored(layer, kept, k.shape[2])
        for wide, new in zip(dense, (k, v), strict=True):
            wide[:, :, kept:] = new
        return dense

    def _put_source(
        self, step: Step, layer: CrossLayer, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None
    ) -> None:
        """Store what an encoder made, without its padding."""
        self._is_packed = padding is not None
        for i, row in enumerate(self._rows):
            real = slice(None) if padding is None else padding[i].bool()
            step.batch.put(layer.index, k[i][:, real], v[i][:, real], seq_id=row, layout="HTD")

    def _check_source(self, padding: torch.Tensor | None) -> None:
        """Whether what is stored of an encoder is what a mask shows."""
        if padding is not None and padding.sum(1).tolist() != [self._cache.seq_len(row, layer=0) for row in self._rows]:
            raise ValueError(
                "the encoder's attention_mask must hide what it hid when that was stored; the model's own attention "
                "has all of it stored: go on with that, or reset the cache"
            )

    def _stored(self, layer: Layer, columns: int, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The last rows of a layer, ``[batch, heads, columns, dim]``, and room for some more."""
        i = layer.index
        k, v = (
            torch.empty(len(self._rows), self._cache.num_kv_heads[i], columns + more, dim[i], dtype=self._dtype)
            for dim in (self._cache.head_dim, self._v_dims)
        )
        for b, row in enumerate(self._rows):
            stored = self._cache.seq_len(row, layer=i)
            begin = max(0, columns - stored)
            k[b, :, :begin] = v[b, :, :begin] = 0
            out = k[b, :, begin:columns], v[b, :, begin:columns]
            self._cache.gather(i, seq_id=row, first=stored - columns + begin, out=out)
        return k, v

    def _step_of(self, layer: Layer, k: torch.Tensor, padding: torch.Tensor | None) -> Step:
        """The forward pass that a layer is part of; a new one, if that is done with this layer."""
        if self._step is not None and (layer.index == 0 or layer.index in self._step.done):
            self._end()
        if self._step is None:
            self._step = self._begin(len(k), k.shape[2], padding)
        return self._step

    def _begin(self, batch_size: int, num_tokens: int, padding: torch.Tensor | None) -> Step:
        if self._rows and len(self._rows) != batch_size:
            raise ValueError(f"the batch has {batch_size} rows: the cache was filled with {len(self._rows)}; reset it")
        owner = self._shared.owner()
        if owner is not None:
            owner._end()
        self._shared.owner = weakref.ref(self)
        if not self._rows:
            self._rows = self._new_ids(batch_size)
        real = None if padding is None else self._real_ones(padding, num_tokens)
        counts = [num_tokens] * batch_size if real is None else real.sum(1).tolist()
        positions: list[int] = []
        seq_ids: list[int] = []
        for row, count in zip(self._rows, counts, strict=True):
            begin = self._cache.next_position(row)
            positions.extend(range(begin, begin + count))
            seq_ids.extend([row] * count)
        batch = self._cache.batch(positions=positions, seq_ids=seq_ids)
        step = Step(batch, real, num_tokens, self._cache.num_layers)
        if padding is not None and real is not None:  # else nothing came that could be between others
            is_token = padding[:, : self._seen + num_tokens].bool()
            step.has_gaps = bool((is_token.cummax(1).values & ~is_token).any())
        return step

    def _real_ones(self, padding: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        """Which of the new tokens are; None: all."""
        end = self._seen + num_tokens
        stored = [self._cache.next_position(row) for row in self._rows]
        if padding.shape[1] < end:
            raise ValueError(f"attention_mask has {padding.shape[1]} columns, where there are {end} tokens")
        if padding[:, : self._seen].sum(1).tolist() != stored:
            raise ValueError(
                "attention_mask must hide those of the stored tokens that it hid when they came; the model's own "
                "attention has all of them stored: go on with that, or reset the cache"
            )
        real = padding[:, self._seen : end].bool()
        return None if real.all() else real

    def _end(self) -> None:
        """Keep the tokens of the last forward pass; drop them, where it ended with an error."""
        step, self._step, self._pending = self._step, None, None
        if step is None:
            return
        if not step.is_whole:
            step.batch.abort()
            return
        step.batch.commit()
        self._seen += step.num_tokens
        self._has_gaps |= step.has_gaps

    def _settle(self) -> None:
        """End a forward pass that has been through all layers."""
        if self._step is not None and self._step.is_whole:
            self._end()

    def _new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._shared.seq_ids, count))

    # ---- what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        self._settle()
        return self._seen

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first pass."""
        return len(self._rows) or -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._end()
        for row in self._rows:
            self._cache.clear(row)
        self._forget()
        for layer in self._others:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: `tokens_to_remove` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        self._end()
        for row in self._rows:
            self._cache.truncate(max(0, self._cache.next_position(row) + tokens_to_remove), seq_id=row)
        self._seen = max(0, self._seen + tokens_to_remove)
        self._has_gaps &= self._seen > 0
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i go on from what row ``beam_idx[i]`` has; no row of keys is copied."""
        self._select(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        self._select(torch.arange(len(self._rows))[indices].tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row `repeats` times."""
        self._select([i for i in range(len(self._rows)) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def _select(self, sources: list[int]) -> None:
        self._end()
        rows: list[int] = []
        for source in (self._rows[i] for i in sources):
            if source in rows:
                [row] = self._new_ids(1)
                self._cache.fork(source, row)
                rows.append(row)
            else:
                rows.append(source)
        for row in set(self._rows) - set(rows):
            self._cache.clear(row)
        self._rows = rows

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that goes on from the same tokens; their rows are shared, none is copied."""
        self._end()
        other = copy.copy(self)
        other._rows, other._calls = self._new_ids(len(self._rows)), dict(self._calls)
        for source, row in zip(self._rows, other._rows, strict=True):
            self._cache.fork(source, row)
        other.layers = [
            other._layer(layer.index) if isinstance(layer, Layer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return other

    def __del__(self) -> None:
        if "layers" in vars(self):  # else it was never made; a copy may live on in the same blocks
            self._end()
            for row in self._rows:
                self._cache.clear(row)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows take, bookkeeping included; those of copies are among them."""
        return self._cache.nbytes

    def stats(self) -> dict[str, Any]:
        """What `kvcache.KVCache.stats` says, and how many layers were attended over by which means."""
        return {**self._cache.stats(), "calls": dict(self._calls)}


class Updated(dict[int, bool]):
    """Which layers have what the encoder made. What models write here is not believed: their pass may have failed."""

    def __init__(self, cache: HFCache) -> None:
        super().__init__()
        self.cache = cache

    def get(self, index: int, default: Any = None) -> Any:
        return self.cache.has_source(index)


class HFEncoderDecoderCache(EncoderDecoderCache):
    """A cache for models of transformers that have an encoder and a decoder: two `HFCache`.

    Parameters
    ----------
    config, dtype, policy
        As for `HFCache`; the policy is that of the decoder's attention to itself.
    max_source_len : int, optional
        The most tokens that the encoder may make; by default what `config` says.

    Raises
    ------
    NotSupportedError
        As `HFCache` does.
    ValueError
        As `HFCache` does; or if `config` does not say how long a source may be.
    TypeError
        If `config` is no configuration of transformers.

    Notes
    -----
    Models that add a bias to the scores by position (T5) need their own attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DType = "f16",
        policy: Policy | Sequence[Policy] | None = None,
        max_source_len: int | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {config!r}: give the model's, of transformers")
        if config.model_type.startswith("t5gemma"):
            raise NotSupportedError(f"a {type(config).__name__}'s model makes its own cache for what its encoder made")
        part = config.get_text_config(decoder=True)
        is_part = any(getattr(config, name, None) is part for name in config.sub_configs)
        followed = part if is_part else config  # where both are one, that was a copy
        decoder = followed.get_text_config(decoder=True)
        if decoder.is_encoder_decoder:  # then this is one
            decoder.is_encoder_decoder = False
        if num_layers := getattr(decoder, "num_decoder_layers", None):  # as T5 calls them
            decoder.num_hidden_layers = num_layers
        if max_source_len is None:
            max_source_len = next(
                (n for name in NAMES["max_source_positions"] if (n := getattr(config, name, None))), None
            )
        if max_source_len is None:
            raise ValueError(f"max_source_len=None: a {type(config).__name__} does not say how long a source may be")
        caches = HFCache(decoder, dtype, policy), HFCache(decoder, dtype, CrossAttention(max_source_len))
        for cache in caches:
            cache._config = followed
        super().__init__(*caches)
        self.is_updated = Updated(caches[1])

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: what transformers wants its own caches for, ours can do."""


# ---- configurations


def _shape_of(config: PreTrainedConfig) -> tuple[int, int]:
    """KV heads and the elements of one."""
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        raise ValueError(f"config is a {type(config).__name__} without num_attention_heads: give a decoder's")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def _make(index: int, layer_type: str, options: dict[str, Any]) -> Policy | CacheLayer:
    """The policy of a layer with keys and values; of another, transformers' own layer."""
    window = options.get("sliding_window")
    if layer_type == "full_attention":
        return FullAttention()
    if layer_type == "sliding_attention" and window:
        return SlidingWindow(window, resume_window=window + RESUME)
    if layer_type == "chunked_attention" and window:
        return ChunkedAttention(window, resume_window=RESUME)
    made = DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type)
    if made is not None and issubclass(made, CacheLayer) and not issubclass(made, CacheLayerMixin):
        return made(**options)
    raise NotSupportedError(f"layer {index} is of type {layer_type!r}, which this cache does not serve")


def _window_of(policy: Policy | None) -> int:
    if isinstance(policy, SlidingWindow):
        return policy.window
    return policy.attention_chunk_size if isinstance(policy, ChunkedAttention) else 0
