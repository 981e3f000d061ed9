"""Read each layer's policy and the shape of its rows from a configuration of transformers.

A policy says which positions a layer's queries see; None: the layer keeps no rows of its own. A `Part` is what a cache
keeps of a layer of the model. The layers of its `KVCache` are those with rows, and behind them those beside rows, such
as the keys of an indexer.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from kvcache import KVCache
from kvcache.arguments import INT32_MAX, integer
from kvcache.errors import KVCacheError, NotSupportedError
from kvcache.layer import Layer, count, once_for_each, override, to_transform
from kvcache.models import shapes
from kvcache.models.configuration import text_decoder
from kvcache.models.kinds import COMPRESSED, INDEXED, fields_of_layers
from kvcache.models.shapes import KEYS_ALONE, REFUSED
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow, window_of, written
from kvcache.prefix.cache import MOST_BLOCK_SIZE
from kvcache.rope import RopeLike
from kvcache.selecting import least_tokens, with_sketches

FULL = FullAttention()
INDEX_DIMS = "index_head_dim", "indexer_head_dim"  # names of the number of elements of an indexer's key
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


class Part(NamedTuple):
    """The rows, the state and the keys of an indexer that a cache keeps of a layer."""

    policy: Policy | None = None  # of its keys and values; None: it has none of its own
    own: OwnLayer | None = None  # what transformers itself keeps
    source: int = 0  # the layer whose rows it reads
    beside: Sequence[Layer] = ()  # keys of its indexer; or pairs: rows for several tokens, and what they are made of
    keys_are_values: bool = False


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
    """Return what a configuration says of a decoder alone.

    BART's `num_hidden_layers`, for example, is the encoder's, and the decoder's is called `decoder_layers`. Only for a
    configuration with `is_encoder_decoder` does `get_text_config` give the decoder's fields the common names.
    """
    if "decoder_layers" not in vars(config):
        return config
    both = copy.deepcopy(config)
    both.is_encoder_decoder = True
    decoder = both.get_text_config(decoder=True)
    decoder.is_encoder_decoder = False
    return decoder


def find_decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration for a cache of a model's decoder alone."""
    part = config.get_text_config(decoder=True)
    is_part = any(getattr(config, name, None) is part for name in config.sub_configs)
    whole = part if is_part else config  # `part` is a copy if encoder and decoder have one configuration
    decoder = whole.get_text_config(decoder=True)
    if decoder.is_encoder_decoder:  # then `decoder` is a copy, which may be changed
        decoder.is_encoder_decoder = False
    num_layers = getattr(decoder, "num_decoder_layers", None)  # T5's name of num_hidden_layers
    if num_layers and num_layers != decoder.num_hidden_layers:
        decoder.num_hidden_layers = num_layers
    return decoder


def _named(decoder: PreTrainedConfig) -> dict[str, Any]:
    """Return a decoder's fields under their own names: transformers may have given them those of an encoder."""
    values = decoder.to_dict()
    is_renamed = "encoder_attention_heads" in values and "decoder_attention_heads" not in values
    return {name.replace("encoder_", "decoder_") if is_renamed else name: value for name, value in values.items()}


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
        return Part(FULL, own)
    if attention in INDEXED and any(getattr(config, name, None) for name in INDEX_DIMS):
        sources = getattr(config, "kv_source_layers", None)
        source = index if sources is None else sources[index]
        return Part(FULL if source == index else None, source=source)
    if attention in COMPRESSED:
        policy = SlidingWindow(config.sliding_window, resume_window=config.sliding_window + RESUME)
        return Part(policy, source=index, keys_are_values=True)
    if attention == "sliding_attention" and window:
        policy = SlidingWindow(window, resume_window=window + RESUME)
        return Part(policy, own, keys_are_values=config.model_type in KEYS_ALONE)
    if attention == "chunked_attention" and window:
        return Part(ChunkedAttention(window, resume_window=RESUME), own)
    reason = OTHER_LAYERS.get(layer_type, "this cache does not know it")
    raise NotSupportedError(
        f"a {type(config).__name__} is not served: layer {index} is of type {layer_type!r}: {reason}"
    )


class Reading(NamedTuple):
    """What a configuration says of the layers of its decoder."""

    decoder: PreTrainedConfig  # the part of the configuration that describes it
    parts: list[Part]  # what is kept of each layer
    layers: list[Layer]  # of `KVCache`, for the layers with rows

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have a recurrent state."""
        return any(isinstance(part.own, LinearAttentionLayer) for part in self.parts)


def read_config(config: PreTrainedConfig) -> Reading:
    """Read what a configuration says of the decoder's layers; raise if this cache does not serve them."""
    check_config(config)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise NotSupportedError(f"a {type(config).__name__} has an encoder too: use HFEncoderDecoderCache")
    for part in (config, text):
        check_model(part)
    decoder = decoder_of(text)
    kinds, options = get_layer_types_and_kwargs(decoder)
    kinds = [*map(sys.intern, kinds[: len(options)])]  # an early exit leaves the types of the other layers, too
    parts = [part_of(decoder, i, *layer) for i, layer in enumerate(zip(kinds, options, strict=True))]
    if all(part.policy is None for part in parts):
        raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
    fields = text_decoder(_named(decoder), type(decoder).__name__)
    if not fields.get("num_attention_heads"):
        raise ValueError(f"config is a {type(decoder).__name__} without num_attention_heads: give a decoder's")
    own = fields_of_layers(fields, kinds)
    rows = [layer for _, layer in shapes.rows_of_layers(fields, own, kinds)]
    if decoder.model_type == "falcon" and (decoder.new_decoder_architecture or not decoder.multi_query):
        # A KV head is repeated for its query heads before the cache gets it.
        num_heads = decoder.num_attention_heads
        rows = once_for_each(lambda i: replace(rows[i], num_kv_heads=num_heads), rows)
    beside = shapes.index_layers(fields, own, kinds, rows)
    parts = [part._replace(beside=[one for _, one, _ in beside[i]]) for i, part in enumerate(parts)]
    same = {part.policy: part.policy for part in parts}  # equal policies are then one object
    policies = [same[part.policy] for part in parts]
    layers = once_for_each(lambda i: replace(rows[i], policy=policies[i]), rows, policies)
    return Reading(decoder, parts, [layer for layer in layers if layer.policy is not None])


def ropes_of(config: PreTrainedConfig, cache: KVCache) -> list[RopeLike]:
    """Return the rotation of each layer of a model's cache; None if the configuration does not say it."""
    unknown: list[RopeLike] = [None] * cache.num_layers
    try:
        read = shapes.read(config).layers
    except KVCacheError:
        return unknown
    ropes: list[RopeLike] = [layer.rope for layer in read if layer.policy is not None and layer.share is None]
    return ropes if len(ropes) == cache.num_layers else unknown


def stored_layers(
    read: Reading, dtype: Any, policy: Any, transform: Any, select: Any, arguments: dict[str, Any]
) -> tuple[list[Layer], dict[str, Any]]:
    """Return the layers of a model's `KVCache`, and its other arguments; the given ones are those of `make_kv_cache`.

    The first layers are those of the reading; layers beside these follow.
    """
    transform = to_transform(transform, "transform")
    given = {"dtype": dtype, "k_transform": transform, "v_transform": transform, **arguments}
    layers, others = override(read.layers, given if policy is None else {**given, "policy": policy})
    index_layers = _index_layers(read, layers)
    if select is not None:
        select = integer(select, "select", 1, INT32_MAX)
        if index_layers:
            raise NotSupportedError(
                f"select={select}: a {type(read.decoder).__name__} chooses rows by an indexer: leave select out"
            )
        layers = with_sketches(layers, select, getattr(read.decoder, "max_position_embeddings", None))
    return [*layers, *index_layers], {"max_sequences": None, **others}


def _index_layers(read: Reading, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of `KVCache` beside a model's rows, such as an indexer's keys, which follow its other layers.

    Each has the types of the layer beside whose rows it lies, and keys of single tokens its policy. Inputs of rows that
    stand for several tokens stay exact.
    """
    parts = read.parts
    rows = dict(zip((i for i, part in enumerate(parts) if part.policy is not None), layers, strict=True))
    found = []
    for part in parts:
        if not part.beside:
            continue
        of_rows = rows[part.source]
        if len(part.beside) > 1 and of_rows.policy is not None and of_rows.policy != parts[part.source].policy:
            raise NotSupportedError(
                f"policy={written(of_rows.policy)}: a {type(read.decoder).__name__} pools what each token brings: leave"
                " policy out"
            )
        for layer in part.beside:
            made = replace(of_rows, share=None, rope=None, **{name: getattr(layer, name) for name in SHAPE})
            if isinstance(layer.policy, SlidingWindow):
                policy = replace(layer.policy, resume_window=layer.policy.window + RESUME)
                made = replace(made, policy=policy, k_dtype="f32", k_transform=None)
            elif len(part.beside) == 1:
                made = replace(made, policy=of_rows.policy)
            found.append(made)
    return found


def check_policies(layers: Sequence[Layer]) -> None:
    """Raise ValueError if a layer of a decoder has a policy with which it could not attend over its own tokens."""
    for i, layer in enumerate(layers):
        policy = layer.policy
        if policy is None or isinstance(policy, CrossAttention):
            given = "None" if policy is None else written(policy)
            raise ValueError(
                f"policy: layer {i} has {given}, but attends over its own tokens: give FullAttention, SlidingWindow or"
                " ChunkedAttention (for an encoder's rows there is HFEncoderDecoderCache)"
            )


def block_size_for(policies: Iterable[Policy | None]) -> int:
    """Return the tokens of a block for layers of these policies.

    Attention over a window of 1,024 rows is a twentieth slower in blocks of 64 than in blocks of 256. But a window
    takes up to two blocks more than its rows: so a block is at most a quarter of the shortest window, in steps of 64.
    """
    windows = filter(None, map(window_of, {*policies}))
    return max(LEAST_BLOCK, min([MOST_BLOCK, *(n // 4 // LEAST_BLOCK * LEAST_BLOCK for n in windows)]))


def block_size_of_rows(layers: Sequence[Layer]) -> int:
    """Return the tokens of a block that holds whole rows, for a prefix cache; some size if it refuses such layers."""
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
