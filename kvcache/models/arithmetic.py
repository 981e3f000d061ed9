"""Count the parameters of the commonest text decoders from their configurations, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.errors import ModelFileError
from kvcache.models.fields import Fields
from kvcache.models.reading import MAX_LAYERS

__all__ = ["Counted", "count"]


class Counted(NamedTuple):
    """The number of a model's parameters."""

    total: int
    embedding: int  # the parameters of the input embedding; 0 if it is the output's, too


@dataclass(frozen=True)
class Family:
    """How the decoders of one model type differ, with the defaults of fields that published files leave out."""

    norms: int = 2  # vectors of `hidden_size` in a layer
    qkv_bias: bool | None = None  # None: attention_bias says so, for the output as well
    mlp_bias: bool = False  # whether the field mlp_bias counts
    qk_norm: bool = False  # whether queries and keys are normalised, each by head_dim factors
    experts: str = ""  # the field with the number of experts of each layer
    inner: str = "intermediate_size"  # the field with the size of an MLP, or of each expert
    is_multi_head: bool = False  # whether a file without num_key_value_heads has a KV head for each query head
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    is_tied: bool = False


FAMILIES = {
    "llama": Family(mlp_bias=True, is_multi_head=True),
    "mistral": Family(qkv_bias=False),
    "mixtral": Family(qkv_bias=False, experts="num_local_experts"),
    "phi3": Family(qkv_bias=False, is_multi_head=True),
    "granite": Family(mlp_bias=True, is_multi_head=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", inner="moe_intermediate_size"),
    "gemma": Family(head_dim=256, is_tied=True),
    "gemma2": Family(norms=4, head_dim=256, is_tied=True),
    "gemma3_text": Family(norms=4, qk_norm=True, head_dim=256, is_tied=True),
}


def count(config: Mapping[str, Any]) -> Counted | None:
    """Return the number of parameters that a configuration gives; None if it needs more than arithmetic."""
    fields = Fields(config, "config")
    try:
        family = FAMILIES.get(fields.text("model_type"))
        is_mixed = bool(fields.get("mlp_only_layers")) or fields.get("decoder_sparse_step", 1) != 1
        return None if family is None or is_mixed else _count(fields, family)
    except ModelFileError:
        return None


def _count(fields: Fields, family: Family) -> Counted:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    kv_heads = fields.count("num_key_value_heads", heads if family.is_multi_head else None)
    q, kv = heads * head_dim, kv_heads * head_dim
    has_bias = fields.get("attention_bias") is True if family.qkv_bias is None else family.qkv_bias
    attention = hidden * (2 * q + 2 * kv) + (q + 2 * kv if has_bias else 0)
    if family.qkv_bias is None and has_bias:
        attention += hidden
    if family.qk_norm:
        attention += 2 * head_dim
    inner = fields.count(family.inner)
    mlp = 3 * hidden * inner
    if family.mlp_bias and fields.get("mlp_bias") is True:
        mlp += 2 * inner + hidden
    if family.experts:
        mlp = fields.count(family.experts) * (mlp + hidden)  # the router has a row for each
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    embedding = fields.count("vocab_size") * hidden
    own = 0 if fields.get("tie_word_embeddings", family.is_tied) else embedding
    return Counted(embedding + own + num_layers * (attention + mlp + family.norms * hidden) + hidden, own)
