"""Hugging Face transformers with this cache: `HFCache`, and the attention implementation ``"kvcache"``.

::

    import kvcache.hf

    model.set_attn_implementation("kvcache")
    model.generate(**inputs, past_key_values=kvcache.hf.HFCache(model.config, dtype="q8_0"))

Importing this module registers an attention and a mask function under that name. With them keys and values go from the
model into the cache and are attended over where they lie; with the model's own attention (``"sdpa"``, ``"eager"``) the
cache hands out dense tensors, as any other does.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache.cache import Batch, KVCache
from kvcache.errors import NotSupportedError
from kvcache.layer import DType
from kvcache.policy import ChunkedAttention, FullAttention, Policy, SlidingWindow

__all__ = ["NAME", "HFCache"]

NAME = "kvcache"
ATTRIBUTE = "_kvcache_layer"  # of the keys that `HFCache.update` returns: whose they are
# Layers without keys and values of their own, which stay transformers'.
CacheLayer: TypeAlias = LinearAttentionCacheLayerMixin | DummyLayer
RESUME = 64  # tokens that a window can be taken back by: assisted decoding drops what it guessed wrong


class Mask(NamedTuple):
    """What a mask would be made of; the kernels know who sees what, all but the padding."""

    padding: torch.Tensor | None  # [batch, tokens so far] of bool, True: a token
    is_plain: bool  # nothing but order, window and padding
    arguments: dict[str, Any]  # of sdpa_mask

    def dense(self) -> torch.Tensor | None:
        """[batch, 1, queries, keys] of bool."""
        return sdpa_mask(**{**self.arguments, "allow_is_causal_skip": False})


def make_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **arguments: Any,
) -> Mask:
    """Stand in for a mask; transformers calls this where others make a tensor."""
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    is_plain = allow_is_causal_skip and not use_vmap  # these tell of functions that were mixed in
    return Mask(padding, is_plain, {**arguments, "attention_mask": attention_mask, "use_vmap": use_vmap})


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
        is_known = not isinstance(attention_mask, torch.Tensor) and (attention_mask is None or attention_mask.is_plain)
        is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
        if is_known and is_causal and options.get("position_bias") is None and not options.get("dropout"):
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
    supports_early_init = False

    def __init__(self, cache: HFCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index  # of the core's layers
        self.window = _window_of(cache.policy[index])  # tokens that a query sees at most; 0: all
        self.is_sliding = self.window > 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: rows are taken as they come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.store(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.cache.get_seq_length()
        kept = min(seen, self.window - 1) if self.window else seen
        return kept + query_length, seen - kept

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.cache.batch_size


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
        If the model has a layer whose state is neither keys and values nor that of linear attention, or no attention.
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
        self._config = config.get_text_config(decoder=True)
        types, options = get_layer_types_and_kwargs(self._config)
        made = [_make(i, *layer) for i, layer in enumerate(zip(types, options, strict=True))]
        ours = [i for i, layer in enumerate(made) if not isinstance(layer, CacheLayer)]
        policies = [layer for layer in made if not isinstance(layer, CacheLayer)]
        if not ours:
            raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
        shapes = [_shape_of(self._config.per_layer_config[i]) for i in ours]
        self._cache = KVCache(
            len(ours),
            [num_kv_heads for num_kv_heads, _ in shapes],
            [head_dim for _, head_dim in shapes],
            None,
            dtype=dtype,
            policy=policies if policy is None else policy,
            max_sequences=None,
        )
        self._calls = {"kernel": 0, "dense": 0, "fallback": 0}
        self._shared = Shared()
        self._forget()
        indices = iter(range(len(ours)))
        super().__init__(layers=[x if isinstance(x, CacheLayer) else Layer(self, next(indices)) for x in made])

    def _forget(self) -> None:
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._seen = 0  # tokens, padding included
        self._step: Step | None = None
        self._pending: Layer | None = None  # its keys are on their way to `attention`

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
        if k.device.type != "cpu":
            raise NotSupportedError(f"the keys are on {k.device}: this cache is for models on the CPU")
        if self._pending is not None and self._pending.index < layer.index:
            index, self._pending = self._pending.index, None
            raise RuntimeError(f"the keys of layer {index} did not reach the attention: this model changes them first")
        if self._config._attn_implementation != NAME:
            self._calls["dense"] += 1
            return self._put(layer, k, v)
        setattr(k, ATTRIBUTE, layer)
        self._pending = layer
        return k, v

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
        if not is_new:  # another layer reads the rows of this one
            return self._attend_again(layer, q, v, options)
        step = self._step_of(layer, k, padding)
        out = self._run(step, layer, q, k, v, options)
        step.done.add(layer.index)
        return out

    def make_dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; all its keys and values, for what the kernels do not know."""
        if not self._calls["fallback"]:
            warnings.warn(
                "kvcache: a mask or an option that the kernels do not know; using dense tensors", stacklevel=2
            )
        self._calls["fallback"] += 1
        self._pending = None
        return self._put(layer, k, v)

    def _attend_again(self, layer: Layer, q: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if self._step is None or layer.index not in self._step.done:
            raise RuntimeError(f"layer {layer.index} is read by another before it was written")
        return self._run(self._step, layer, q, None, v, options)

    def _run(
        self,
        step: Step,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend, and store k and v first, unless k is None."""
        self._calls["kernel"] += 1
        rows = (k, v) if k is not None else ()
        out = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3])
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
        if step.real is None:
            step.batch.put(layer.index, k, v, layout="BHTD")
            new = [k.shape[2]] * len(k)
        else:
            step.batch.put(layer.index, *(x.transpose(1, 2)[step.real] for x in (k, v)))
            new = step.real.sum(1).tolist()
        stored = [
            len(self._cache.positions(seq_id=row, layer=layer.index)) + n
            for row, n in zip(self._rows, new, strict=True)
        ]
        columns = layer.get_mask_sizes(k.shape[2])[0]
        dense = step.batch.dense(layer.index)[:2]
        step.done.add(layer.index)
        wide = [self._spread(torch.from_numpy(x), stored, columns, k.dtype) for x in dense]
        return wide[0], wide[1]

    def _spread(self, rows: torch.Tensor, stored: list[int], columns: int, dtype: torch.dtype) -> torch.Tensor:
        """From ``[heads, rows by rising id, dim]`` to ``[batch, heads, columns, dim]``, the last rows last."""
        wide = rows.new_zeros(len(stored), len(rows), columns, rows.shape[2], dtype=dtype)
        end = 0
        for b in sorted(range(len(stored)), key=self._rows.__getitem__):
            end += stored[b]
            n = min(stored[b], columns)
            wide[b, :, columns - n :] = rows[:, end - n : end]
        return wide

    def _step_of(self, layer: Layer, k: torch.Tensor, padding: torch.Tensor | None) -> Step:
        """The forward pass that a layer is part of; a new one, if that is done with this layer."""
        if self._step is not None and layer.index in self._step.done:
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
        return Step(batch, real, num_tokens, len(self.policy))

    def _real_ones(self, padding: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        """Which of the new tokens are; None: all."""
        end = self._seen + num_tokens
        stored = [self._cache.next_position(row) for row in self._rows]
        if padding.shape[1] < end or padding[:, : self._seen].sum(1).tolist() != stored:
            raise ValueError(
                f"attention_mask is {list(padding.shape)} and must have {end} columns, and hide of the stored tokens "
                "those that it hid when they came"
            )
        real = padding[:, self._seen : end]
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

    def _new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._shared.seq_ids, count))

    # ---- what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        if self._step is not None and self._step.is_whole:
            self._end()
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
            Layer(other, layer.index) if isinstance(layer, Layer) else copy.deepcopy(layer, memo)
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
