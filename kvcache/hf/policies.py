"""Read each layer's policy and the shape of its rows from a configuration of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from kvcache import KVCache
from kvcache.errors import KVCacheError, NotSupportedError
from kvcache.layer import Layer, count
from kvcache.models import shapes
from kvcache.models.configuration import NAMES
from kvcache.models.kinds import COMPRESSED, INDEXED, SLIDING
from kvcache.models.shapes import KEYS_ALONE, LATENTS_ALONE, MORE_KV_HEADS, REFUSED
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow, written
from kvcache.prefix.cache import MOST_BLOCK_SIZE
from kvcache.rope import RopeLike
from kvcache.selecting import least_tokens

# Layers whose state transformers itself keeps: a recurrent state, or nothing.
OwnLayer: TypeAlias = LinearAttentionLayer | DummyLayer
SHAPE = ("num_kv_heads", "head_dim", "v_head_dim", "value_in_key", "policy")  # fields of a layer of `KVCache`
LEAST_BLOCK, MOST_BLOCK = 64, 256  # tokens in a block of a cache
RESUME = 64  # tokens by which a window can be cropped: assisted decoding removes wrong guesses

# Types of models that do not use a given cache, or take only a cache of their own class, and the reason.
UNSERVED = {
    **REFUSED,
    "blt": REFUSED["blt_local_decoder"],
    "flaubert": "it takes a cache as another argument",
    "mllama": "some of its layers keep rows of an image",
    "mllama_text_model": "some of its layers keep rows of an image",
    "openai-gpt": "it keeps nothing between passes",
    "pi0": "it makes actions of a robot, no text",
    "recurrent_gemma": "it keeps the state of its recurrent layers itself",
    "t5gemma": "it makes its own cache for what its encoder made",
    "t5gemma2": "it makes its own cache for what its encoder made",
    "xlm": "it takes a cache as another argument",
    "xlnet": "it keeps hidden states, not keys and values",
}
# Types of layers with a recurrent state, and the attention that they have beside it.
RECURRENT = {
    "conv": None,
    "linear_attention": None,
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}
# Types of models whose recurrent layers begin anew in a pass of several tokens.
BY_ONE_TOKEN = {"jamba", "zamba"}
# Types of layers that this cache does not serve, and the reason.
OTHER_LAYERS = {
    "reference_sliding_attention": "it has a window that some tokens never leave",
}


class Pooling(NamedTuple):
    """How a model makes a row of what several tokens bring."""

    block: int  # the tokens that a row stands for
    span: int  # the tokens that it is made of: the last of them are the block
    input_dim: int  # elements that a token brings
    dim: int  # elements of a row
    is_key: bool  # whether it is a key of an indexer; else it is a key and a value


class Part(NamedTuple):
    """The rows, the state and the keys of an indexer that a cache keeps of a layer."""

    policy: Policy | None = None  # of its keys and values; None: it has none of its own
    own: OwnLayer | None = None  # what transformers itself keeps
    index_beside: int | None = None  # the layer beside whose rows the keys of its indexer lie; None: it has no indexer
    keys_are_values: bool = False
    pools: tuple[Pooling, ...] = ()  # the rows beside that stand for several tokens: the last are an indexer's keys

    @property
    def num_beside(self) -> int:
        """The number of layers of the `KVCache` beside the layer of rows: two for each pooling, as inputs are kept."""
        return 2 * len(self.pools) if self.pools else self.index_beside is not None


def check_config(config: Any) -> None:
    """Raise TypeError unless this is a model's configuration."""
    if isinstance(config, torch.nn.Module):
        raise TypeError(f"config is a model, a {type(config).__name__}: give its configuration, model.config")
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config is {config!r}: give the model's, model.config")


def check_model(config: PreTrainedConfig) -> None:
    """Raise if a model cannot use this cache, whatever its layers are."""
    if config.model_type in UNSERVED:
        raise NotSupportedError(f"a {type(config).__name__} is not served: {UNSERVED[config.model_type]}")


def both_ways(config: PreTrainedConfig) -> str:
    """Return what of a configuration lets tokens see later ones, so that their rows depend on these; "": nothing."""
    if not getattr(config, "is_causal", True):
        return f"is_causal={config.is_causal!r}"
    field = "use_bidirectional_attention"  # "vision": of images alone
    value = getattr(config, field, None)
    return f"{field}={value!r}" if value in (True, "all") else ""


def rotation_by_length(config: PreTrainedConfig) -> str:
    """Return which rotation of a configuration changes with the length of the text, and so do rows; "": none."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in [rope, *rope.values()] if isinstance(part, dict)}
    return next((f"rope_type={kind!r}" for kind in ("dynamic", "longrope") if kind in kinds), "")


def decoder_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return what a configuration says of a decoder alone: BART and its like then count the encoder's layers."""
    if "decoder_layers" not in vars(config):
        return config
    both = copy.deepcopy(config)
    both.is_encoder_decoder = True
    decoder = both.get_text_config(decoder=True)
    decoder.is_encoder_decoder = False
    return decoder


def layer_of(config: PreTrainedConfig, index: int, layer_type: str, policy: Policy) -> Layer:
    """Return the layer for the rows that an attention gives the cache.

    An attention with latents (MLA) gives the latents as keys, and the rotated elements, which all heads share, as
    values. Its rows hold both, the latents first.
    """
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        raise ValueError(f"config is a {type(config).__name__} without num_attention_heads: give a decoder's")
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        rotates = config.model_type not in LATENTS_ALONE or config.no_rope_layers[index]
        dim = rank + (config.qk_rope_head_dim if rotates else 0)
        return Layer(1, dim, v_head_dim=rank, value_in_key=True, policy=policy)
    head_dim = next((dim for name in NAMES["head_dim"] if (dim := getattr(config, name, None))), None)
    head_dim = head_dim or config.hidden_size // num_heads
    if config.model_type in KEYS_ALONE:
        return Layer(1, head_dim, v_head_dim=head_dim, value_in_key=True, policy=policy)
    v_head_dim = getattr(config, "v_head_dim", None) or head_dim
    return Layer(_num_kv_heads(config, layer_type, num_heads), head_dim, v_head_dim=v_head_dim, policy=policy)


def _num_kv_heads(config: PreTrainedConfig, layer_type: str, num_heads: int) -> int:
    """Return the number of KV heads of a layer without latents."""
    if config.model_type == "falcon":  # with the new architecture, a KV head is repeated for its query heads first
        return 1 if config.multi_query and not config.new_decoder_architecture else num_heads
    more = MORE_KV_HEADS.get(config.model_type, 1) if layer_type in SLIDING else 1
    return more * (getattr(config, "num_key_value_heads", None) or num_heads)


def part_of(config: PreTrainedConfig, index: int, layer_type: str, options: dict[str, Any]) -> Part:
    """Return what a cache keeps of a layer."""
    window = options.get("sliding_window")
    if layer_type == "dummy":
        return Part(own=DummyLayer())
    own = LinearAttentionLayer(options["number_of_states"]) if layer_type in RECURRENT else None
    attention = RECURRENT.get(layer_type, layer_type)
    if attention is None:
        return Part(own=own)
    if attention == "full_attention":
        return Part(FullAttention(), own)
    if attention in INDEXED and (getattr(config, "index_head_dim", None) or _poolings_of(config)):
        return _indexed_part(config, index)
    if attention in COMPRESSED:
        policy = SlidingWindow(config.sliding_window, resume_window=config.sliding_window + RESUME)
        return Part(policy, None, index, keys_are_values=True, pools=_compressions_of(config, attention))
    if attention == "sliding_attention" and window:
        policy = SlidingWindow(window, resume_window=window + RESUME)
        return Part(policy, own, keys_are_values=config.model_type in KEYS_ALONE)
    if attention == "chunked_attention" and window:
        return Part(ChunkedAttention(window, resume_window=RESUME), own)
    reason = OTHER_LAYERS.get(layer_type, "this cache does not know it")
    raise NotSupportedError(
        f"a {type(config).__name__} is not served: layer {index} is of type {layer_type!r}: {reason}"
    )


def _indexed_part(config: PreTrainedConfig, index: int) -> Part:
    """Return what a cache keeps of a layer that chooses rows.

    It may use another layer's choice, or read another layer's rows.
    """
    kinds, sources = getattr(config, "indexer_types", None), getattr(config, "kv_source_layers", None)
    beside = index if sources is None else sources[index]
    has_indexer = kinds is None or kinds[index] != "shared"
    policy = FullAttention() if beside == index else None
    return Part(policy, None, beside, pools=_poolings_of(config)) if has_indexer else Part(policy)


def _poolings_of(config: PreTrainedConfig) -> tuple[Pooling, ...]:
    """Return how the indexers of a model pool keys; empty: they do not.

    GLM-5.3 Flash pools keys by gates. Qwen 4 rotates a pooled key for the block's first token, so that a token comes
    with its cosines and sines.
    """
    if config.model_type == "glm5_next_text":
        block, dim, input_dim = config.index_kpool, config.index_head_dim, 2 * config.index_head_dim
    elif config.model_type == "qwen4_exp_text" and config.indexer_head_dim:
        num_rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        block, dim = config.indexer_compress_ratio, config.indexer_head_dim
        input_dim = dim + 2 * num_rotated
    else:
        return ()
    return (Pooling(block, block, input_dim, dim, is_key=True),)


def _compressions_of(config: PreTrainedConfig, layer_type: str) -> tuple[Pooling, ...]:
    """Return how DeepSeek V4 compresses tokens to rows, by gates. Rows that it chooses are made of two blocks each."""
    block, dim, key_dim = config.compress_rates[layer_type], config.head_dim, config.index_head_dim
    if layer_type == "heavily_compressed_attention":
        return (Pooling(block, block, 2 * dim, dim, is_key=False),)
    rows = Pooling(block, 2 * block, 4 * dim, dim, is_key=False)
    return rows, Pooling(block, 2 * block, 4 * key_dim, key_dim, is_key=True)


def window_of(policy: Policy | None) -> int:
    """Return the most tokens that a query sees under a policy; 0: all."""
    if isinstance(policy, SlidingWindow):
        return policy.window
    return policy.attention_chunk_size if isinstance(policy, ChunkedAttention) else 0


def parts_of(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[Part], list[str]]:
    """Return the part of a configuration that describes the decoder, and of each layer what is kept, and its type."""
    check_config(config)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise NotSupportedError(f"a {type(config).__name__} has an encoder too: use HFEncoderDecoderCache")
    for part in (config, text):
        check_model(part)
    decoder = decoder_of(text)
    types, options = get_layer_types_and_kwargs(decoder)
    parts = [part_of(decoder, i, *layer) for i, layer in enumerate(zip(types, options, strict=True))]
    if all(part.policy is None for part in parts):
        raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
    return decoder, parts, types


def layers_of(config: PreTrainedConfig) -> list[Layer]:
    """Return the layers of `KVCache` for a model's keys and values."""
    decoder, parts, types = parts_of(config)
    policies = {i: part.policy for i, part in enumerate(parts) if part.policy is not None}
    return [layer_of(decoder.per_layer_config[i], i, types[i], policy) for i, policy in policies.items()]


def ropes_of(config: PreTrainedConfig, cache: KVCache) -> list[RopeLike]:
    """Return the rotation of each layer of a model's cache; None if the configuration does not say it."""
    unknown: list[RopeLike] = [None] * cache.num_layers
    try:
        read = shapes.read(config).layers
    except KVCacheError:
        return unknown
    ropes: list[RopeLike] = [layer.rope for layer in read if layer.policy is not None and layer.share is None]
    return ropes if len(ropes) == cache.num_layers else unknown


def index_layers_of(config: PreTrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of `KVCache` beside a model's rows, such as an indexer's keys, which follow its other layers.

    Each has the policy of the layer beside whose rows the keys lie, and the type of that layer's keys. Rows that
    stand for several tokens have a second layer, of their inputs.
    """
    decoder, parts, _ = parts_of(config)
    rows = dict(zip((i for i, part in enumerate(parts) if part.policy is not None), layers, strict=True))
    found = []
    for i, part in enumerate(parts):
        if part.index_beside is None:
            continue
        beside = rows[part.index_beside]
        keys_of = partial(replace, beside, num_kv_heads=1, v_head_dim=0, value_in_key=False, share=None, rope=None)
        if part.pools and beside.policy is not None and beside.policy != parts[part.index_beside].policy:
            raise NotSupportedError(
                f"policy={written(beside.policy)}: a {type(decoder).__name__} pools what each token brings: leave"
                " policy out"
            )
        for pooling in part.pools:
            found += _pooled_layers(pooling, keys_of)
        if not part.pools:
            found.append(keys_of(head_dim=decoder.per_layer_config[i].index_head_dim))
    return found


def _pooled_layers(pooling: Pooling, keys_of: Callable[..., Layer]) -> list[Layer]:
    """Return the layer for rows that stand for several tokens, and the layer for their inputs, which stay exact."""
    values = {} if pooling.is_key else {"v_head_dim": pooling.dim, "value_in_key": True}
    pooled = keys_of(head_dim=pooling.dim, policy=FullAttention(stride=pooling.block), **values)
    window = SlidingWindow(pooling.span, resume_window=pooling.span + RESUME)
    return [pooled, keys_of(head_dim=pooling.input_dim, policy=window, k_dtype="f32", k_transform=None)]


def check_policies(layers: Sequence[Layer]) -> None:
    """Raise ValueError for a policy that lets no layer of a decoder attend over its own tokens."""
    for i, policy in enumerate(layer.policy for layer in layers):
        if policy is None or isinstance(policy, CrossAttention):
            given = "None" if policy is None else written(policy)
            raise ValueError(
                f"policy: layer {i} has {given}, but attends over its own tokens: give FullAttention, SlidingWindow or"
                " ChunkedAttention (for an encoder's rows there is HFEncoderDecoderCache)"
            )


def block_size_for(policies: Any) -> int:
    """Return the tokens of a block for layers of these policies, or of this one.

    Attention over a window of 1,024 rows is a twentieth slower in blocks of 64 than in blocks of 256. But a window
    takes up to two blocks more than its rows: so a block is at most a quarter of the shortest window, in steps of 64.
    """
    given = policies if isinstance(policies, Sequence) else [policies]
    windows = [policy.window for policy in given if isinstance(policy, SlidingWindow)]
    windows += [policy.attention_chunk_size for policy in given if isinstance(policy, ChunkedAttention)]
    return max(LEAST_BLOCK, min([MOST_BLOCK, *(n // 4 // LEAST_BLOCK * LEAST_BLOCK for n in windows)]))


def block_size_of_rows(layers: Sequence[Layer]) -> int:
    """Return the tokens of a block that holds whole rows, for a prefix cache; if they do not fit, it refuses them."""
    unit = math.lcm(*(getattr(layer.policy, "stride", 1) for layer in layers))
    block = -(-LEAST_BLOCK // unit) * unit
    return block if block <= MOST_BLOCK_SIZE else LEAST_BLOCK


def _types(layer: Layer) -> str:
    """Describe how a layer stores rows, by arguments of `HFCache` or `KVCache`."""
    parts = []
    for name in ("dtype", "transform"):
        of_keys, of_values = getattr(layer, f"k_{name}"), getattr(layer, f"v_{name}")
        if of_keys == of_values:
            parts += [f"{name}={of_keys!r}"] if of_keys else []
        else:
            parts += [f"k_{name}={of_keys!r}", f"v_{name}={of_values!r}"]
    return ", ".join(parts)


def describe_selection(cache: KVCache, select: int) -> str:
    """Describe in which layers rows are selected, and from how many tokens on."""
    layers = sum(layer.sketch for layer in cache.layers)
    return f"select={select} in {count(layers, 'layer')}, once each text has {count(least_tokens(select), 'token')}"


def describe(cache: KVCache, seq_ids: Sequence[int]) -> str:
    """Describe a cache by the arguments of `HFCache`, and by the rows that layers keep of these sequences.

    Layers of keys alone lie beside others, and are not counted.
    """
    parts = list(dict.fromkeys(map(_types, (layer for layer in cache.layers if layer.policy is not None))))
    attending = {
        i: layer.policy for i, layer in enumerate(cache.layers) if layer.policy is not None and layer.v_head_dim
    }
    for policy in dict.fromkeys(attending.values()):
        layers = [i for i, own in attending.items() if own == policy]
        rows = max((cache.seq_len(seq_id, layer=layer) for seq_id in seq_ids for layer in layers), default=0)
        kept = f", {count(rows, 'row')} of a sequence kept" if rows else ""
        parts.append(f"{count(len(layers), 'layer')} with policy={written(policy)}{kept}")
    return "; ".join(parts)
