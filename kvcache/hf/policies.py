"""Read each layer's policy and the shape of its rows from a configuration of transformers."""

from __future__ import annotations

from typing import Any, TypeAlias

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
)

from kvcache.errors import NotSupportedError
from kvcache.policy import ChunkedAttention, FullAttention, Policy, SlidingWindow

# Layers without keys and values, for which transformers' own cache layers are used.
CacheLayer: TypeAlias = LinearAttentionCacheLayerMixin | DummyLayer
RESUME = 64  # tokens by which a window can be cropped: assisted decoding removes wrong guesses


def shape_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of KV heads and the elements of a head."""
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        raise ValueError(f"config is a {type(config).__name__} without num_attention_heads: give a decoder's")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def policy_of(index: int, layer_type: str, options: dict[str, Any]) -> Policy | CacheLayer:
    """Return the policy of a layer with keys and values; for another layer, make transformers' own cache layer."""
    window = options.get("sliding_window")
    if layer_type == "full_attention":
        return FullAttention()
    if layer_type == "sliding_attention" and window:
        return SlidingWindow(window, resume_window=window + RESUME)
    if layer_type == "chunked_attention" and window:
        return ChunkedAttention(window, resume_window=RESUME)
    kind = DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type)
    if kind is not None and issubclass(kind, CacheLayer) and not issubclass(kind, CacheLayerMixin):
        return kind(**options)
    raise NotSupportedError(f"layer {index} is of type {layer_type!r}, which this cache does not serve")


def window_of(policy: Policy | None) -> int:
    """Return the most tokens that a query sees under a policy; 0: all."""
    if isinstance(policy, SlidingWindow):
        return policy.window
    return policy.attention_chunk_size if isinstance(policy, ChunkedAttention) else 0
