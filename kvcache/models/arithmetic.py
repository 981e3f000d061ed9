"""Count the parameters of the commonest text decoders from their configurations, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.errors import ModelFileError
from kvcache.models import classes
from kvcache.models.reading import Fields


class Counted(NamedTuple):
    """The number of a model's parameters."""

    total: int
    embedding: int  # the parameters of the input embedding; 0 if it is the output's, too
    head: int = 0  # the parameters of the output, which makes logits of the last token of a prompt alone


@dataclass(frozen=True)
class Family:
    """How the decoders of one model type differ, with the defaults of fields that published files leave out."""

    norms: int = 2  # vectors of `hidden_size` in a layer
    qkv_bias: bool | None = None  # None: attention_bias says so, for the output as well
    mlp_bias: bool = False  # whether the field mlp_bias counts
    has_bias: bool = False  # whether attention_bias is true in a file that does not say
    has_output_bias: bool = True  # with attention_bias
    qk_norm: bool | None = False  # whether queries and keys are normalised, by head_dim factors; None: use_qk_norm
    experts: str = ""  # the field with the number of experts of each layer
    inner: str = "intermediate_size"  # the field with the size of an MLP, or of each expert
    is_multi_head: bool = False  # whether a file without num_key_value_heads has a KV head for each query head
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    is_tied: bool = False
    has_dense: bool = False  # whether the first layers have an MLP in place of experts, and others a shared expert
    expert_bias: bool = False  # whether experts and their router have biases, and heads a sink
    is_latent: bool = False  # whether keys and values are made of latents
    is_hybrid: bool = False  # whether layers are gated: some have a gated delta rule, and all have a shared expert
    vocab_size: int | None = None


FAMILIES = {
    "llama": Family(mlp_bias=True, is_multi_head=True),
    "mistral": Family(qkv_bias=False),
    "mixtral": Family(qkv_bias=False, experts="num_local_experts"),
    "phi3": Family(qkv_bias=False, is_multi_head=True),
    "granite": Family(mlp_bias=True, is_multi_head=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", inner="moe_intermediate_size"),
    "gpt_oss": Family(head_dim=64, has_bias=True, experts="num_local_experts", expert_bias=True),
    "glm4_moe": Family(
        experts="n_routed_experts", inner="moe_intermediate_size", has_dense=True, has_output_bias=False, qk_norm=None
    ),
    "deepseek_v3": Family(
        experts="n_routed_experts", inner="moe_intermediate_size", has_dense=True, is_latent=True, is_multi_head=True
    ),
    "gemma": Family(head_dim=256, is_tied=True),
    "gemma2": Family(norms=4, head_dim=256, is_tied=True),
    "gemma3_text": Family(norms=4, qk_norm=True, head_dim=256, is_tied=True, vocab_size=262_208),
    "qwen3_next": Family(
        qk_norm=True, head_dim=256, experts="num_experts", inner="moe_intermediate_size", is_hybrid=True
    ),
}


# Types whose models have the same parameters as another type's.
ALIKE = {"kimi_k2": "deepseek_v3"}


def count(config: Mapping[str, Any]) -> Counted | None:
    """Return the number of parameters that a configuration gives; None if it needs more than arithmetic."""
    try:
        name = Fields(config, "config").text("model_type")
        fields = Fields({**classes.of(name).defaults, **config}, "config")
        if name == "gemma3":
            return _with_images(fields)
        family = FAMILIES.get(ALIKE.get(name, name))
        is_mixed = bool(fields.get("mlp_only_layers")) or fields.get("decoder_sparse_step", 1) != 1
        return None if family is None or is_mixed else _count(fields, family)
    except ModelFileError:
        return None


def _count(fields: Fields, family: Family) -> Counted:
    """Count the parameters of a decoder of a family."""
    hidden = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers")
    attention = num_layers * (_latent_attention(fields) if family.is_latent else _attention(fields, family))
    if family.is_hybrid:
        attention = _hybrid_attention(fields, family, num_layers)
    num_dense = fields.count("first_k_dense_replace", least=0, most=num_layers) if family.has_dense else 0
    inner = fields.count(family.inner)
    mlp = 3 * hidden * inner  # gate, up and down
    if family.mlp_bias and fields.get("mlp_bias") is True:
        mlp += 2 * inner + hidden
    if family.experts:
        biases = 2 * inner + hidden + 1 if family.expert_bias else 0
        mlp = fields.count(family.experts) * (mlp + biases + hidden)  # the router has a row for each
    if family.has_dense:
        mlp += fields.count("n_shared_experts", least=0) * 3 * hidden * inner
    if family.is_hybrid:
        mlp += 3 * hidden * fields.count("shared_expert_intermediate_size", 512, least=0) + hidden
    dense = num_dense * 3 * hidden * fields.count("intermediate_size") if num_dense else 0
    embedding = fields.count("vocab_size", family.vocab_size) * hidden
    own = 0 if fields.get("tie_word_embeddings", family.is_tied) else embedding  # of the input embedding
    layers = attention + num_layers * family.norms * hidden + (num_layers - num_dense) * mlp + dense
    return Counted(embedding + own + layers + hidden, own, embedding)


def _with_images(fields: Fields) -> Counted | None:
    """Count a Gemma 3 with its encoder of images; None if something is unusual."""
    text, images = fields.part("text_config"), fields.part("vision_config")
    if text is None or images is None or images.get("vision_use_head") is not False:
        return None
    tied = {name: fields.get(name) for name in ("tie_word_embeddings",) if fields.get(name) is not None}
    counted = count({**text.values, "model_type": "gemma3_text", **tied})
    if counted is None:
        return None
    hidden, inner, patch = (images.count(name) for name in ("hidden_size", "intermediate_size", "patch_size"))
    layer = 4 * (hidden + 1) * hidden + 2 * inner * hidden + inner + hidden + 4 * hidden
    embedding = (3 * patch**2 + 1) * hidden + (images.count("image_size") // patch) ** 2 * hidden
    encoder = embedding + images.count("num_hidden_layers") * layer + 2 * hidden
    projector = hidden * Fields({**classes.of("gemma3_text").defaults, **text.values}, "config").count("hidden_size")
    return counted._replace(total=counted.total + encoder + projector + hidden)


def _attention(fields: Fields, family: Family) -> int:
    """Return the parameters of a layer's attention."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    kv_heads = fields.count("num_key_value_heads", heads if family.is_multi_head else None)
    q, kv = heads * head_dim, kv_heads * head_dim
    gate = q if family.is_hybrid else 0  # made beside the queries
    has_bias = fields.get("attention_bias", family.has_bias) is True if family.qkv_bias is None else family.qkv_bias
    # Queries, the output and the gate are as wide as q, keys and values as kv.
    number = hidden * (2 * q + gate + 2 * kv) + (q + gate + 2 * kv if has_bias else 0)
    if family.qkv_bias is None and has_bias and family.has_output_bias:
        number += hidden
    if family.expert_bias:
        number += heads
    if fields.get("use_qk_norm") is True if family.qk_norm is None else family.qk_norm:
        number += 2 * head_dim
    return number


def _hybrid_attention(fields: Fields, family: Family, num_layers: int) -> int:
    """Return the parameters of all layers' attention, most of which have a gated delta rule in its place."""
    kinds = fields.sequence("layer_types")
    if kinds is None:
        num_full = num_layers // fields.count("full_attention_interval", 4)
    else:
        num_full = sum(kind == "full_attention" for kind in kinds)
    hidden, heads = fields.count("hidden_size"), fields.count("linear_num_value_heads")
    dim, kernel = fields.count("linear_value_head_dim"), fields.count("linear_conv_kernel_dim")
    keys, values = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim"), heads * dim
    made = hidden * (2 * keys + 2 * values + 2 * heads)  # a head has a step and a decay
    delta = made + kernel * (2 * keys + values) + 2 * heads + dim + values * hidden
    return num_full * _attention(fields, family) + (num_layers - num_full) * delta


def _latent_attention(fields: Fields) -> int:
    """Return the parameters of a layer's attention over latents."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    rank, q_rank = fields.count("kv_lora_rank"), fields.count("q_lora_rank")
    nope, rotated, v_dim = (fields.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = hidden * q_rank + q_rank + q_rank * heads * (nope + rotated)
    latents = hidden * (rank + rotated) + rank + rank * heads * (nope + v_dim)
    biases = q_rank + rank + rotated + hidden if fields.get("attention_bias") is True else 0
    return queries + latents + heads * v_dim * hidden + biases
