"""The number of a model's parameters, from its configuration alone.

`count` adds up the matrices that the configuration's sizes imply. The tables of this module hold what a configuration
leaves to its reader, by model type: which norms and biases there are, whether the MLP is gated, whether the output uses
the embedding. The tests compare every type of `TRAITS` with transformers' own model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvcache.errors import NotSupportedError, shown
from kvcache.models import gguf, shapes
from kvcache.models.fields import Fields, read_config
from kvcache.policy import CrossAttention

__all__ = ["count", "in_gguf"]

# What a model type has beside the matrices of queries, keys, values and output, a gated MLP, and two norms a layer:
#
# 0, 1, 3, 4          this many norms in a layer; 0: norms without weights
# norm_bias, qkv_bias, out_bias, mlp_bias, head_bias
#                     biases of norms, of a layer's matrices, and of the output's; `attention_bias` and the like in a
#                     file say the same
# no_out_bias         none of the attention's output, where the file says `attention_bias`
# head_norms          norms of queries and keys, over the elements of a head; wide_norms: over all heads
# sinks               a learned logit of each query head
# twofold_queries     a gate beside each query
# plain               an MLP of two matrices, without a gate
# router_bias         a bias of the router
# shared_expert       one more expert, which every token uses
# shared_gate         a gate of the shared expert
# positions           learned positions; positions+2: two more of them
# embedding_norm      a norm after the embedding
# tied                the output uses the embedding, unless the file says otherwise
_TYPES = {
    "": (
        "aria_text bamba cwm deepseek_v2 deepseek_v3 diffllama glm4_moe_lite granite granitemoe granitemoehybrid "
        "granitemoeshared helium internlm3 iquestcoder jamba llama ministral ministral3 mistral mistral4 mixtral phi3 "
        "solar_open"
    ),
    "0": "olmo",
    "3": "axk1 bitnet",
    "4": "hyperclovax",
    "head_norms": (
        "dots1 exaone4 exaone_moe hunyuan_v1_dense hy_v3 mellum minimax_m3_vl_text qwen3 qwen3_moe qwen3_vl_text"
    ),
    "no_out_bias": "glm glm4_moe glm4v_moe_text seed_oss",
    "norm_bias": "phimoe stablelm",
    "plain": "arcee",
    "qkv_bias": "qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text",
    "shared_expert": "llama4_text",
    "shared_gate": "qwen2_moe",
    "sinks": "granitemoe_swa",
    "tied": "ernie4_5 gemma minicpm3 mt5 smollm3 t5 umt5 vaultgemma youtu",
    "wide_norms": "flex_olmo minimax_m2 olmo2 olmo3 olmoe",
    "0 plain": "nanochat",
    "1 tied": "cohere cohere2 cohere2_moe",
    "4 no_out_bias": "glm4",
    "4 qkv_bias": "glm4v_text",
    "4 tied": "gemma2",
    "embedding_norm tied": "modernbert-decoder",
    "head_norms plain": "apertus",
    "head_norms router_bias": "laguna",
    "head_norms shared_expert": "hunyuan_v1_moe",
    "head_norms sinks": "flint",
    "head_norms tied": "lfm2 lfm2_moe qwen3_vl_moe_text",
    "head_norms twofold_queries": "qwen3_5_text",
    "norm_bias plain": "jais2 nemotron",
    "plain tied": "mpt",
    "router_bias tied": "ernie4_5_moe",
    "sinks tied": "granite_swa",
    "4 head_norms tied": "gemma3_text gemma3n_text gemma4_text gemma4_unified_text lfm3",
    "head_norms shared_gate twofold_queries": "qwen3_5_moe_text qwen3_next",
    "mlp_bias norm_bias plain": "gpt_neox",
    "mlp_bias router_bias sinks": "gpt_oss",
    "norm_bias plain tied": "gpt_neox_japanese starcoder2",
    "1 norm_bias plain tied": "falcon",
    "4 head_norms router_bias twofold_queries": "afmoe",
    "norm_bias plain positions+2 tied": "opt",
    "1 head_bias mlp_bias norm_bias plain": "codegen gptj",
    "mlp_bias norm_bias out_bias plain qkv_bias": "persimmon",
    "mlp_bias norm_bias out_bias plain positions tied": "gpt_neo",
    "mlp_bias norm_bias out_bias plain qkv_bias tied": "m2m_100 xglm",
    "1 head_bias mlp_bias norm_bias out_bias plain qkv_bias": "phi",
    "embedding_norm mlp_bias norm_bias out_bias plain qkv_bias tied": "bloom",
    "mlp_bias norm_bias out_bias plain positions qkv_bias tied": (
        "blenderbot blenderbot-small gpt2 gpt_bigcode marian openai-gpt pegasus whisper"
    ),
    "mlp_bias norm_bias out_bias plain positions+2 qkv_bias tied": "bart biogpt plbart",
    "embedding_norm mlp_bias norm_bias out_bias plain positions+2 qkv_bias tied": "mbart",
}
TRAITS = {name: frozenset(traits.split()) for traits, names in _TYPES.items() for name in names.split()}

# Fields of the same meaning; the first one present counts.
INNER = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner", "d_ff")
DENSE_INNER = ("intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size")  # beside experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERT_INNER = ("moe_intermediate_size",)
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_INNER = ("shared_expert_intermediate_size", "shared_intermediate_size")
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # the first ones, without experts
SPARSE_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq")


def count(source: Any) -> int:
    """Count the parameters of a model's text decoder, and of its encoder.

    Parameters
    ----------
    source : path, mapping, or configuration of transformers
        What `kvcache.models.fields.read_config` takes.

    Returns
    -------
    int
        The number of parameters, without those of other parts, such as a vision tower.

    Raises
    ------
    ModelFileError
        If a field is missing or impossible.
    NotSupportedError
        If the model's type is none of those whose matrices are known.

    Examples
    --------
    >>> count({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    ...        "intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": False})
    82752
    """
    return _Model(read_config(source)).count()


def in_gguf(header: gguf.Header) -> int:
    """Count the elements of all tensors of a GGUF file."""
    return sum(math.prod(tensor.shape) for tensor in header.tensors.values())


class _Model:
    """A model whose parts are counted, each from the fields that size it."""

    def __init__(self, config: Fields) -> None:
        self.type = config.text("model_type", "model")
        if self.type not in TRAITS:
            raise NotSupportedError(f"{config.source}: which matrices a {shown(self.type)} has is not known")
        self.config = config
        self.traits = TRAITS[self.type]
        self.hidden = config.count("hidden_size")
        self.shape = shapes.read(config, 1)
        self.num_layers = sum(not isinstance(policy, CrossAttention) for policy in self.shape.policy)
        self.layers = config.by_layer(self.num_layers)

    def has(self, trait: str, *fields: str) -> bool:
        """Whether the type has a trait, or the file sets one of these fields."""
        return trait in self.traits or any(self.config.get(field) is True for field in fields)

    def first(self, names: tuple[str, ...], default: int, layer: int | None = None) -> int:
        """Return the first of these fields that there is; for a layer, its own, or its entry of a list."""
        fields = self.config if layer is None else self.layers[layer]
        for name in names:
            value = fields.get(name)
            if layer is not None and isinstance(value, list | tuple):
                return Fields({name: (fields.sequence(name, self.num_layers) or [])[layer]}, fields.source).count(name)
            if value is not None:
                return fields.count(name, least=0)
        return default

    def count(self) -> int:
        """Count all parameters."""
        total = self.embeddings() + sum(map(self.layer, range(self.num_layers)))
        if self.type in EXTRA:
            total += EXTRA[self.type](self)
        return total + self.encoder() if self.config.get("is_encoder_decoder") else total

    def embeddings(self) -> int:
        """Count the embedding, the positions, the last norm and the output."""
        vocab = self.config.count("vocab_size")
        tied = self.config.get("tie_word_embeddings", "tied" in self.traits)
        total = vocab * self.hidden * (1 if tied else 2) + self.norm() * (1 + self.has("embedding_norm"))
        return total + vocab * self.has("head_bias", "lm_head_bias") + self.positions("max_position_embeddings")

    def positions(self, name: str) -> int:
        """Count learned positions, of which a field says the number."""
        if not self.has("positions") and not self.has("positions+2"):
            return 0
        return (self.config.count(name) + 2 * self.has("positions+2")) * self.hidden

    def norm(self) -> int:
        return 0 if self.has("0") else self.hidden * (1 + self.has("norm_bias"))

    def layer(self, i: int) -> int:
        total = next((int(trait) for trait in self.traits if trait.isdecimal()), 2) * self.norm()
        if self.shape.policy[i] is None:
            total += self.state(i)
        else:
            total += self.latent_attention(i) if self.shape.value_in_key[i] else self.attention(i)
        if self.config.get("is_encoder_decoder"):
            total += self.attention(i) + self.norm()  # cross-attention
        inner = self.inner(i)
        if not self.first(EXPERTS, 0):
            return total + self.mlp(inner)
        return total + (self.experts(inner) if self.is_sparse(i) else self.mlp(self.first(DENSE_INNER, inner)))

    # ---- attention

    def state(self, i: int) -> int:
        """Count what a layer without keys and values has in the place of attention."""
        if self.type not in STATEFUL:
            raise NotSupportedError(f"{self.config.source}: which matrices layer {i} has is not known")
        return STATEFUL[self.type](self)

    def attention(self, i: int) -> int:
        """Count the matrices of queries, keys, values and output, with biases and norms."""
        shape, hidden = self.shape, self.hidden
        heads, head_dim, v_dim = shape.num_heads[i], shape.head_dim[i], shape.v_head_dim[i]
        own = shape.share[i] is None  # else it reads the rows of another layer
        q = heads * head_dim * (1 + self.has("twofold_queries"))
        k, v = (own * shape.num_kv_heads[i] * dim for dim in (head_dim, v_dim))
        total = hidden * (q + k + v) + heads * v_dim * hidden
        biases = "attention_bias", "use_bias", "bias", "enable_bias"
        total += (q + k + v) * self.has("qkv_bias", "qkv_bias", "use_qkv_bias", *biases)
        total += hidden * (self.has("out_bias", *biases) and not self.has("no_out_bias"))
        total += (1 + own) * head_dim * self.has("head_norms") + (heads * head_dim + k) * self.has("wide_norms")
        return total + heads * self.has("sinks")

    def latent_attention(self, i: int) -> int:
        """Count the matrices of attention through latents (MLA), with the latents' norms."""
        config, hidden, heads = self.config, self.hidden, self.shape.num_heads[i]
        rank, rotated = self.shape.v_head_dim[i], self.shape.head_dim[i] - self.shape.v_head_dim[i]
        plain, v_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
        q = heads * (plain + rotated)
        q_rank = self.first(("q_lora_rank",), 0)
        total = q_rank * (hidden + 1 + q) if q_rank else hidden * q
        total += hidden * (rank + rotated) + rank
        return total + rank * heads * (plain + v_dim) + heads * v_dim * hidden

    # ---- MLP and experts

    def inner(self, i: int) -> int:
        """Return the width of a layer's MLP."""
        config, inner = self.config, self.first(INNER, 4 * self.hidden, i)
        if config.get("block_auto_adjust_ff_dim") is not True:
            return inner
        step = config.count("block_multiple_of")  # LFM2 takes two thirds, in steps
        return step * math.ceil(int(config.positive("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3)) / step)

    def is_gated(self) -> bool:
        default = "relu" if self.type == "t5" else "gated"
        return not self.has("plain") and self.config.text("feed_forward_proj", default).startswith("gated")

    def mlp(self, inner: int) -> int:
        into = 2 if self.is_gated() else 1  # matrices [inner, hidden]; one more is [hidden, inner]
        biased = self.has("mlp_bias", "mlp_bias", "use_bias", "bias", "enable_bias")
        return (into + 1) * self.hidden * inner + biased * (into * inner + self.hidden)

    def experts(self, inner: int) -> int:
        """Count a router, its experts, and the expert that every token uses."""
        inner = self.first(EXPERT_INNER, inner)
        num_experts = self.first(EXPERTS, 0)
        shared = self.first(SHARED_INNER, inner * self.first(SHARED_EXPERTS, int(self.has("shared_expert"))))
        total = num_experts * (self.mlp(inner) + self.hidden + self.has("router_bias"))
        return total + (self.mlp(shared) if shared else 0) + self.hidden * self.has("shared_gate")

    def is_sparse(self, i: int) -> bool:
        """Whether a layer of a model with experts has them in the place of an MLP."""
        config = self.config
        kinds, listed = config.sequence("mlp_layer_types"), config.sequence("moe_layers")
        if kinds is not None:
            return kinds[i : i + 1] == ["sparse"]
        if listed is not None:
            return i in listed
        if config.get("expert_layer_period") is not None:
            return i % config.count("expert_layer_period") == config.count("expert_layer_offset", 0, least=0)
        dense = i < self.first(DENSE_LAYERS, 0) or i in (config.sequence("mlp_only_layers") or ())
        return not dense and (i + 1) % max(1, self.first(SPARSE_EVERY, 1)) == 0

    # ---- encoders

    def encoder(self) -> int:
        """Count an encoder whose layers are the decoder's without cross-attention."""
        num_layers = self.first(("encoder_layers", "num_layers"), self.num_layers)
        inner = self.first(("encoder_ffn_dim",), self.first(INNER, 4 * self.hidden))
        total = num_layers * (2 * self.norm() + self.attention(0) + self.mlp(inner))
        total += self.norm() * (1 + self.has("embedding_norm"))
        if self.type != "whisper":
            return total + self.positions("max_position_embeddings")
        convolutions = 3 * self.hidden * (self.config.count("num_mel_bins") + self.hidden) + 2 * self.hidden
        return total + convolutions + self.positions("max_source_positions")


# ---- layers without keys and values


def _gated_delta(model: _Model) -> int:
    """Count a layer of linear attention by the gated delta rule."""
    config, heads = model.config, model.config.count("linear_num_value_heads")
    k = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
    v = heads * config.count("linear_value_head_dim")
    convolution = (2 * k + v) * config.count("linear_conv_kernel_dim")
    matrices = model.hidden * (2 * k + 3 * v + 2 * heads)  # queries, keys, values, gate, output, and two per head
    return matrices + convolution + 2 * heads + config.count("linear_value_head_dim")


def _short_convolution(model: _Model) -> int:
    return model.hidden * (4 * model.hidden + model.config.count("conv_L_cache"))


def _mamba(model: _Model) -> int:
    config, hidden = model.config, model.hidden
    inner, state = hidden * config.count("mamba_expand"), config.count("mamba_d_state")
    rank = config.count("mamba_dt_rank", math.ceil(hidden / 16))
    matrices = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner
    return matrices + inner * (config.count("mamba_d_conv") + 1 + state + 1 + 1) + rank + 2 * state


def _mamba2(model: _Model) -> int:
    config, hidden = model.config, model.hidden
    inner, heads = hidden * config.count("mamba_expand"), config.count("mamba_n_heads")
    convolved = inner + 2 * config.count("mamba_n_groups") * config.count("mamba_d_state")
    matrices = hidden * (inner + convolved + heads) + inner * hidden
    return matrices + convolved * (config.count("mamba_d_conv") + 1) + 3 * heads + inner


STATEFUL: dict[str, Callable[[_Model], int]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_convolution),
    **dict.fromkeys(("bamba", "granitemoehybrid"), _mamba2),
    "jamba": _mamba,
}


# ---- what single types have beside all this


def _inputs_by_layer(model: _Model) -> int:
    """Count the embedding that each layer of Gemma 3n and Gemma 4 adds, with its gate and its projections."""
    size = model.first(("hidden_size_per_layer_input",), 0)
    if not size:
        return 0
    vocab = model.first(("vocab_size_per_layer_input",), model.config.count("vocab_size"))
    return model.num_layers * (size * (vocab + 3 * model.hidden) + model.hidden) + size


def _gemma3n(model: _Model) -> int:
    """Count the streams that Gemma 3n predicts and corrects (AltUp), and its low-rank layers (Laurel)."""
    hidden, streams = model.hidden, model.config.count("altup_num_inputs")
    by_layer = 2 * hidden * model.config.count("laurel_rank") + hidden  # Laurel
    by_layer += streams**2 + streams**3 + (streams + 2) * hidden
    return _inputs_by_layer(model) + model.num_layers * by_layer + 2 * (streams - 1) * hidden**2


def _opt(model: _Model) -> int:
    """Count what projects embeddings that are smaller than the model, and subtract what they lack."""
    size = model.first(("word_embed_proj_dim",), model.hidden)
    return (
        0
        if size == model.hidden
        else 2 * size * model.hidden - model.config.count("vocab_size") * (model.hidden - size)
    )


EXTRA: dict[str, Callable[[_Model], int]] = {
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _inputs_by_layer),
    "gemma3n_text": _gemma3n,
    "modernbert-decoder": lambda model: model.hidden**2 + model.norm() + model.config.count("vocab_size"),
    "opt": _opt,
}
