"""Small random models with sparse attention, and what the logits of a text are with a cache.

An indexer has 16 heads or more, because its scores are zeros and tie if it has few. Then a model chooses otherwise in a
pass of one token than in a long one, also with transformers' own cache. A choice has fewer tokens than the prompts.
"""

from functools import cache
from typing import Any

import torch
import transformers

TOPK = 8
LATENT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": TOPK, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPS = {"n_group": 1, "topk_group": 1}
WINDOWS = {f"swa_{name}": value for name, value in {
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 48, "head_dim": 48,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}.items()}  # fmt: skip
BLOCKS = {
    name: LATENT[name] for name in LATENT if not name.startswith(("index_", "q_lora", "kv_lora", "qk_", "v_head", "n_"))
}
EIGHT = {
    "num_hidden_layers": 8, "kv_source_layers": [0, 1, 1, 3, 1, 1, 6, 3], "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "indexer_types": ["full", "full", "shared", "full", "full", "shared", "shared", "full"],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**LATENT, **GROUPS, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**LATENT, **GROUPS, "first_k_dense_replace": 1, "index_topk_freq": 2, "index_skip_topk_offset": 2},
    "axk2": {**LATENT, "gated_norm_rank": 4},
    "hy_v4": {**LATENT, **GROUPS, "hc_mult": 2},
    "dots3_note_text": {
        **LATENT, **GROUPS, **WINDOWS, "head_dim": 48, "sliding_window": 12,
        "layer_types": ["indexed_attention"] * 2 + ["sliding_attention"] * 2,
    },
    "mistral_large4": {**LATENT, **GROUPS, **EIGHT, "first_k_dense_replace": 1},
    "minimax_m3_vl_text": {
        **BLOCKS, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16, "num_local_experts": 4,
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 32,
        "index_block_size": 4, "index_topk_blocks": 3, "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
    },
}  # fmt: skip
CHANGES["mistral_large4"].pop("q_lora_rank")
# Models whose indexers pool the keys of several tokens. Real ones have recurrent layers, too, which cannot be cropped.
GLM5: dict[str, Any] = {
    **LATENT, **GROUPS, "qk_rope_head_dim": 0, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4,
    "hc_mult": 2, "indexer_types": ["full", "full", "shared", "full"], "layer_types": ["indexed_attention"] * 4,
}  # fmt: skip
QWEN4: dict[str, Any] = {
    **BLOCKS, "num_key_value_heads": 2, "head_dim": 32, "indexer_n_heads": 16, "indexer_kv_heads": 1,
    "indexer_head_dim": 32, "indexer_budget": TOPK, "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
    },
    "layer_types": ["indexed_attention"] * 4,
}  # fmt: skip
MIXED = ["linear_attention", "indexed_attention"] * 2
POOLED: dict[str, dict[str, Any]] = {
    "glm5_next": GLM5,
    "glm5_next, recurrent": {**GLM5, "indexer_types": ["full"] * 4, "layer_types": MIXED},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp_text, recurrent": {**QWEN4, "layer_types": MIXED},
}
COMPRESSED: dict[str, Any] = {
    **BLOCKS, "head_dim": 64, "q_lora_rank": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 3, "hc_mult": 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}, "num_hash_layers": 1,
    "qk_rope_head_dim": 16, "num_key_value_heads": 1, "layer_types": [
        "sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2
    ],
}  # fmt: skip
EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
EYES_OF_GLM5 = {
    "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "image_size": 16, "patch_size": 8,
    "out_hidden_size": 64, "projection_intermediate_size": 32,
}  # fmt: skip


@cache
def model_of(name: str, attention: str = "eager") -> Any:
    """Make a model of this name."""
    return made(name, {**CHANGES, **POOLED, "deepseek_v4": COMPRESSED}[name], attention)


def with_attention(name: str, attention: str) -> Any:
    """Return the model of this name, with this attention."""
    model = model_of(name)
    model.set_attn_implementation(attention)
    return model


def made(name: str, changes: dict[str, Any], attention: str = "eager") -> Any:
    """Make a model, with weights so large that a logit depends on the rows that were chosen."""
    kind = name.partition(",")[0]
    vision = {"mistral_large4": {"model_type": "pixtral", **EYES}, "glm5_next": EYES_OF_GLM5}.get(kind)
    if vision:
        config = transformers.CONFIG_MAPPING[kind](text_config=changes, vision_config=vision)
    else:
        config = transformers.CONFIG_MAPPING[kind](**changes)
    auto: Any = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.08)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            parameter.data.normal_()
    return model


def tokens_of(rows: int, length: int, seed: int = 7) -> torch.Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, past: Any, tokens: torch.Tensor, ends: list[int], mask: torch.Tensor | None = None) -> Any:
    """Feed the text in passes that end at these columns, behind what the cache has; return all logits."""
    begin, found = past.get_seq_length(), []
    for end in ends:
        given = {"input_ids": tokens[:, begin:end], "use_cache": True, "past_key_values": past}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            given |= {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        with torch.no_grad():
            found.append(model(**given).logits)
        begin = end
    return torch.cat(found, 1)


def their_cache(model: Any) -> Any:
    """Return transformers' own cache."""
    return transformers.DynamicCache(config=model.config)


WANTED: dict[tuple[str, ...], Any] = {}


def theirs(name: str, tokens: torch.Tensor, ends: list[int], mask: torch.Tensor | None = None) -> Any:
    """Return the logits with transformers' own cache, which are the same for each attention of ours."""
    key = name, str(tokens.tolist()), str(ends), str(None if mask is None else mask.tolist())
    if key not in WANTED:
        model = with_attention(name, "eager")
        WANTED[key] = logits_of(model, their_cache(model), tokens, ends, mask)
    return WANTED[key]


TOLERANCE = 4e-6  # of the largest logit, by which `off` measures: float32 rows beside transformers' own cache


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference of logits, as a part of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())
