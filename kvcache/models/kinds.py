"""The type of each layer, from the fields of a model's configuration: what it sees, or that it stores nothing."""

from __future__ import annotations

from kvcache.errors import NotSupportedError, plain, shown
from kvcache.models.fields import Fields
from kvcache.models.reading import MAX_LAYERS

__all__ = ["NO_ROPE_EVERY", "SLIDING", "STATELESS", "layer_types", "rotates_by_interval"]

# Every n-th layer uses full attention, the others a window (model type: n).
FULL_EVERY = {
    "afmoe": 4, "cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6,
    "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2,
}  # fmt: skip
# Attentions per layer, where there are several; each is a layer of the cache.
ATTENTIONS = {"longcat_flash": 2}
# Types for which every layer has the window that a GGUF names.
SLIDING_EVERYWHERE = {"llama", "mistral", "mistral3", "phi3", "starcoder2"}
# Types of layers that store no keys and values.
STATELESS = {"linear_attention", "conv", "mamba", "recurrent", "dummy", "moe", "mlp"}
FULL = {"full_attention", "attention", "hybrid"}  # a hybrid layer has another state as well
SLIDING = {"sliding_attention", "hybrid_sliding"}
# Every n-th layer rotates no keys (model type: n).
NO_ROPE_EVERY = {"llama4_text": 4, "smollm3": 4}


def layer_types(config: Fields) -> list[str]:
    """Return Hugging Face's type of each layer."""
    listed = config.get("layer_types")
    default = len(listed) if isinstance(listed, list) else None
    num_layers = config.count("num_hidden_layers", default, most=MAX_LAYERS)
    num_layers *= ATTENTIONS.get(config.text("model_type", ""), 1)
    kinds = config.sequence("layer_types", num_layers)
    if kinds is None:
        return [_kind(config, i) for i in range(num_layers)]
    for i, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in STATELESS | FULL | SLIDING | {"chunked_attention"}:
            raise NotSupportedError(f"{config.source}: layer {i} is of type {shown(kind)}, which no policy stands for")
    return kinds


def _kind(config: Fields, layer: int) -> str:
    """Derive the type of a layer whose type the file does not name."""
    if config.get("attention_chunk_size") is not None:  # as in Llama 4
        return "chunked_attention" if rotates_by_interval(config, layer) else "full_attention"
    if _has_rows(config, layer):
        return "sliding_attention" if _slides(config, layer) else "full_attention"
    return "linear_attention"


def _has_rows(config: Fields, layer: int) -> bool:
    """Whether a layer has attention: some models have layers without it."""
    if config.get("attn_layer_period") is not None:
        return layer % config.count("attn_layer_period") == config.count("attn_layer_offset", 0, least=0)
    if config.get("full_attention_interval") is not None:
        return (layer + 1) % config.count("full_attention_interval") == 0
    if config.get("model_type") == "bamba":
        return layer in (config.sequence("attn_layer_indices") or ())
    blocks = config.sequence("block_types")
    return not blocks or blocks[layer % len(blocks)] == "attention"


def _slides(config: Fields, layer: int) -> bool:
    """Whether a layer with attention has a window."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return False
    model_type = config.text("model_type", "")
    pattern = config.get("sliding_window_pattern", FULL_EVERY.get(model_type))
    if isinstance(pattern, str):  # such as "LLLG": three layers with a window, one without
        return not pattern or pattern[layer % len(pattern)] != "G"
    if pattern is not None:
        return (layer + 1) % config.count("sliding_window_pattern", pattern) != 0
    if config.get("gguf_architecture") is not None and model_type not in SLIDING_EVERYWHERE:
        raise NotSupportedError(
            f"{config.source}: it names a window, but not which layers of a {plain(model_type)} have it: give a policy"
        )
    first = config.count("max_window_layers", 0, least=0) if config.get("use_sliding_window") else 0
    return layer >= first


def rotates_by_interval(config: Fields, layer: int) -> bool:
    """Whether a layer rotates keys, by ``no_rope_layers`` (0: it does not), else by ``no_rope_layer_interval``."""
    listed = config.get("no_rope_layers")
    if listed:
        rotating = config.sequence("no_rope_layers", layer + 1)
        return rotating is not None and bool(rotating[layer])
    every = config.count("no_rope_layer_interval", NO_ROPE_EVERY.get(config.text("model_type", "")))
    return (layer + 1) % every != 0
