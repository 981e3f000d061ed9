"""Write models for llama.cpp whose tokens choose rows, in the shapes of real models.

In DeepSeek V3.2 two layers choose rows, each by an indexer of its own. In GLM-5.3 Flash and Qwen 4 indexers pool keys:
two layers choose blocks of rows, and one is recurrent. In DeepSeek V4 one layer chooses rows that stand for 4 tokens,
and one sees all rows that stand for 128. Attention is as large as the real model's, the rest is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from llama_cpp_models import RandomBlocks, add_tensor, add_vocabulary, finish, random_vocabulary

HIDDEN, INNER, VOCABULARY, STREAMS, GROUPS = 256, 256, 320, 4, 4
ROTATED = 64  # elements of a head of DeepSeek V3.2, beside the others
SPARSE_LAYERS = 2
Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SparseShape:
    """The sizes of attention and of the indexer."""

    architecture: str
    num_heads: int
    head_dim: int
    index_heads: int
    num_kv_heads: int = 1
    kv_rank: int = 0  # of latents
    q_rank: int = 256
    index_dim: int = 128
    block: int = 4
    top_k: int = 2048
    recurrent_layer: int = -1  # which one; -1: there is none

    @property
    def num_layers(self) -> int:
        return SPARSE_LAYERS + (self.recurrent_layer >= 0)


SHAPES = {
    shape.architecture: shape
    for shape in (
        SparseShape("deepseek32", 128, 128, 64, kv_rank=512),
        SparseShape("glm-dsa", 128, 128, 64, kv_rank=512),
        SparseShape("glm5-next", 64, 256, 32, kv_rank=512, recurrent_layer=2),
        SparseShape("qwen4exp", 16, 256, 4, num_kv_heads=2, recurrent_layer=0),
        SparseShape("deepseek4", 64, 512, 64, top_k=512),
    )
}


def fields_of_deepseek32(shape: SparseShape) -> dict[str, Any]:
    """Return what a file says of the architectures deepseek32 and glm-dsa alone; ik_llama.cpp requires the last."""
    return {
        "attention.head_count_kv": 1, "attention.q_lora_rank": shape.q_rank, "attention.kv_lora_rank": shape.kv_rank,
        "attention.key_length": shape.kv_rank + ROTATED, "attention.value_length": shape.kv_rank,
        "attention.key_length_mla": shape.head_dim + ROTATED, "attention.value_length_mla": shape.head_dim,
        "rope.dimension_count": ROTATED, "leading_dense_block_count": SPARSE_LAYERS, "expert_count": 1,
        "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.0,
    }  # fmt: skip


def fields_of_glm5(shape: SparseShape) -> dict[str, Any]:
    """Return what a file says of the architecture glm5-next alone."""
    return {
        "attention.head_count_kv": [1, 1, 0], "attention.q_lora_rank": shape.q_rank,
        "attention.kv_lora_rank": shape.kv_rank, "attention.key_length": shape.kv_rank,
        "attention.value_length": shape.kv_rank, "attention.key_length_mla": shape.head_dim,
        "attention.value_length_mla": shape.head_dim, "attention.indexer.kpool": shape.block,
        "rope.dimension_count": 0, "kda.head_dim": 128, "kda.gate_lower_bound": -5.0,
        "leading_dense_block_count": SPARSE_LAYERS + 1, "expert_shared_count": 1, "expert_weights_scale": 1.0,
        "expert_gating_func": 2, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    }  # fmt: skip


def fields_of_qwen4(shape: SparseShape) -> dict[str, Any]:
    """Return what a file says of the architecture qwen4exp alone."""
    return {
        "attention.head_count_kv": shape.num_kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "attention.compress_ratios": [shape.block] * (SPARSE_LAYERS + 1),
        "attention.recurrent_layers": [True, False, False], "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7, "ssm.inner_size": 256, "ssm.state_size": 128,
        "ssm.time_step_rank": 2, "ssm.group_count": 2, "hyper_connection.low_rank": 32,
        "expert_shared_feed_forward_length": 32,
    }  # fmt: skip


def fields_of_deepseek4(shape: SparseShape) -> dict[str, Any]:
    """Return what a file says of the architecture deepseek4 alone."""
    return {
        "attention.head_count_kv": 1, "attention.q_lora_rank": shape.q_rank, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.dimension_count": 64, "attention.sliding_window": 128,
        "attention.compress_ratios": [shape.block, 128], "attention.compress_rope_freq_base": 160_000.0,
        "attention.output_group_count": GROUPS, "attention.output_lora_rank": 64, "expert_shared_count": 1,
        "expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 4, "swiglu_clamp_exp": 10.0,
        "hash_layer_count": 0, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    }  # fmt: skip


def latent_layer(shape: SparseShape, rotated: int) -> Sizes:
    """Return the sizes of tensors of a layer that attends to latents, and chooses them by an indexer."""
    heads, dim, rank = shape.num_heads, shape.head_dim, shape.q_rank
    return {
        "attn_q_a": (rank, HIDDEN), "attn_q_b": (heads * (dim + rotated), rank), "attn_q_a_norm": (rank,),
        "attn_kv_a_mqa": (shape.kv_rank + rotated, HIDDEN), "attn_kv_a_norm": (shape.kv_rank,),
        "attn_k_b": (heads, shape.kv_rank, dim), "attn_v_b": (heads, dim, shape.kv_rank),
        "attn_output": (HIDDEN, heads * dim), "indexer.k_norm": (shape.index_dim,),
        "indexer.k_norm.bias": (shape.index_dim,), "indexer.proj": (shape.index_heads, HIDDEN),
        "indexer.attn_k": (shape.index_dim, HIDDEN),
        "indexer.attn_q_b": (shape.index_heads * shape.index_dim, rank),
    }  # fmt: skip


def sparse_layer_of_glm5(shape: SparseShape) -> Sizes:
    """Return the sizes of tensors of a layer that chooses rows."""
    compressor = {"gate": (shape.index_dim, HIDDEN), "ape": (shape.block, shape.index_dim)}
    return latent_layer(shape, 0) | {f"indexer_compressor_{part}": size for part, size in compressor.items()}


def recurrent_layer_of_glm5(shape: SparseShape) -> Sizes:
    """Return the sizes of tensors of a recurrent layer."""
    inner = 128 * shape.num_heads
    conv = {f"ssm_conv1d_{part}": (inner, 1, 4) for part in "qkv"}
    return conv | {f"attn_{part}": (inner, HIDDEN) for part in "qkv"} | {
        "ssm_f_a": (128, HIDDEN), "ssm_f_b": (inner, 128), "ssm_beta": (shape.num_heads, HIDDEN),
        "ssm_a": (shape.num_heads,), "ssm_dt.bias": (inner,), "ssm_g_a": (128, HIDDEN), "ssm_g_b": (inner, 128),
        "ssm_norm": (128,), "attn_output": (HIDDEN, inner),
    }  # fmt: skip


def sparse_layer_of_qwen4(shape: SparseShape) -> Sizes:
    """Return the sizes of tensors of a layer that chooses rows."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "attn_q": (2 * q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, q),
        "attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,),
        "indexer.q_proj": (shape.index_heads * shape.index_dim, HIDDEN),
        "indexer.k_proj": (shape.index_dim, HIDDEN), "indexer.q_norm": (shape.index_dim,),
        "indexer.k_norm": (shape.index_dim,),
    }  # fmt: skip


RECURRENT_LAYER_OF_QWEN4: Sizes = {
    "attn_qkv": (768, HIDDEN), "attn_gate": (256, HIDDEN), "ssm_conv1d": (768, 4), "ssm_dt.bias": (2,), "ssm_a": (2,),
    "ssm_beta": (2, HIDDEN), "ssm_alpha": (2, HIDDEN), "ssm_norm": (128,), "ssm_out": (HIDDEN, 256),
}  # fmt: skip


ENDS: Sizes = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
FEED_FORWARD: Sizes = {
    "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def mixers() -> Sizes:
    """Return the sizes of what mixes a layer's streams."""
    wide, mixed = STREAMS * HIDDEN, (2 + STREAMS) * STREAMS
    kinds = {"fn": (mixed, wide), "base": (mixed,), "scale": (3,)}
    return {f"hc_{part}_{kind}": size for part in ("attn", "ffn") for kind, size in kinds.items()}


def parts_of_deepseek32(shape: SparseShape) -> Sizes:
    """Return the sizes of all tensors, by their names."""
    layer = FEED_FORWARD | latent_layer(shape, ROTATED)
    return ENDS | {f"blk.{i}.{name}": size for i in range(SPARSE_LAYERS) for name, size in layer.items()}


def parts_of_glm5(shape: SparseShape) -> Sizes:
    """Return the sizes of all tensors, by their names."""
    found: Sizes = dict(ENDS)
    for layer in range(SPARSE_LAYERS + 1):
        kind = recurrent_layer_of_glm5 if layer == shape.recurrent_layer else sparse_layer_of_glm5
        found |= {f"blk.{layer}.{name}": size for name, size in (FEED_FORWARD | mixers() | kind(shape)).items()}
    return found


def parts_of_qwen4(shape: SparseShape) -> Sizes:
    """Return the sizes of all tensors, by their names."""
    wide, rank = STREAMS * HIDDEN, 32
    common: Sizes = {
        "ffn_gate_inp": (2, HIDDEN), "ffn_gate_up_exps": (2, 64, HIDDEN), "ffn_down_exps": (2, HIDDEN, 32),
        "ffn_gate_inp_shexp": (HIDDEN,), "ffn_gate_shexp": (32, HIDDEN), "ffn_up_shexp": (32, HIDDEN),
        "ffn_down_shexp": (HIDDEN, 32),
    }  # fmt: skip
    head = "output_hc"
    for part in ("hc_attn", "hc_ffn", head):
        mixer = {f"{part}_norm": (wide,), f"{part}_down": (rank, wide), f"{part}_up": (wide, rank)}
        common |= mixer if part == head else mixer | {f"{part}_inject": (STREAMS, wide)}
    found: Sizes = {name: common.pop(name) for name in [*common] if name.startswith(head)}
    found |= {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    for layer in range(SPARSE_LAYERS + 1):
        is_sparse = layer != shape.recurrent_layer
        own = sparse_layer_of_qwen4(shape) if is_sparse else RECURRENT_LAYER_OF_QWEN4
        found |= {f"blk.{layer}.{name}": size for name, size in (common | own).items()}
    return found


def layer_of_deepseek4(shape: SparseShape, stride: int) -> Sizes:
    """Return the sizes of tensors of a layer with rows that stand for `stride` tokens."""
    heads, dim, rank, index_dim = shape.num_heads, shape.head_dim, shape.q_rank, shape.index_dim
    series = 2 if stride == shape.block else 1
    found: Sizes = {
        "attn_sinks": (heads,), "attn_q_a": (rank, HIDDEN), "attn_q_a_norm": (rank,), "attn_q_b": (heads * dim, rank),
        "attn_kv": (dim, HIDDEN), "attn_kv_a_norm": (dim,), "attn_output_a": (64 * GROUPS, heads * dim // GROUPS),
        "attn_output_b": (HIDDEN, 64 * GROUPS), "attn_compressor_kv": (series * dim, HIDDEN),
        "attn_compressor_gate": (series * dim, HIDDEN), "attn_compressor_ape": (stride, series * dim),
        "attn_compressor_norm": (dim,),
    }  # fmt: skip
    if stride != shape.block:
        return found
    return found | {
        "indexer.proj": (shape.index_heads, HIDDEN), "indexer.attn_q_b": (shape.index_heads * index_dim, rank),
        "indexer_compressor_kv": (2 * index_dim, HIDDEN), "indexer_compressor_gate": (2 * index_dim, HIDDEN),
        "indexer_compressor_ape": (stride, 2 * index_dim), "indexer_compressor_norm": (index_dim,),
    }  # fmt: skip


def parts_of_deepseek4(shape: SparseShape) -> Sizes:
    """Return the sizes of all tensors, by their names."""
    common: Sizes = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate_inp": (2, HIDDEN), "exp_probs_b.bias": (2,),
        "ffn_gate_exps": (2, 32, HIDDEN), "ffn_up_exps": (2, 32, HIDDEN), "ffn_down_exps": (2, HIDDEN, 32),
        "ffn_gate_shexp": (32, HIDDEN), "ffn_up_shexp": (32, HIDDEN), "ffn_down_shexp": (HIDDEN, 32),
    }  # fmt: skip
    head = {"fn": (STREAMS, STREAMS * HIDDEN), "base": (STREAMS,), "scale": (1,)}
    found: Sizes = ENDS | {f"output_hc_{kind}": size for kind, size in head.items()}
    for layer, stride in enumerate((shape.block, 128)):
        sizes = common | mixers() | layer_of_deepseek4(shape, stride)
        found |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
    return found


PARTS = {
    **dict.fromkeys(("deepseek32", "glm-dsa"), (fields_of_deepseek32, parts_of_deepseek32)),
    "glm5-next": (fields_of_glm5, parts_of_glm5),
    "qwen4exp": (fields_of_qwen4, parts_of_qwen4),
    "deepseek4": (fields_of_deepseek4, parts_of_deepseek4),
}


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a number or an array to what a file says."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write(name: str, folder: Path) -> Path:
    """Write a model into a folder unless it is there, whole or not at all; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.gguf", folder / f"{name}.gguf.part"
    if path.exists():
        return path
    shape = SHAPES[name]
    writer = gguf.GGUFWriter(part, name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    fields = {
        "block_count": shape.num_layers, "context_length": 163_840, "embedding_length": HIDDEN,
        "feed_forward_length": INNER, "vocab_size": VOCABULARY, "attention.head_count": shape.num_heads,
        "attention.indexer.head_count": shape.index_heads, "attention.indexer.key_length": shape.index_dim,
        "attention.indexer.top_k": shape.top_k, "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": 4,
        "hyper_connection.count": STREAMS, "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32,
    }  # fmt: skip
    fields_of, parts_of = PARTS[name]
    fields |= fields_of(shape)
    for key, value in fields.items():
        add_field(writer, f"{name}.{key}", value)
    add_vocabulary(writer, *random_vocabulary(VOCABULARY))
    blocks = RandomBlocks(0)
    for tensor, size in parts_of(shape).items():
        add_tensor(writer, blocks, tensor, size)
    finish(writer)
    return part.replace(path)
