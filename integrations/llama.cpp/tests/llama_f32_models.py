"""Small random models for llama.cpp in f32, which answer a changed token far differently; some bring a draft head."""

import llama_models
import numpy as np
import pytest

HIDDEN, INNER, DIM, VOCAB = 64, 96, 32, 256
SIZES = {
    "context_length": 4096, "embedding_length": HIDDEN, "feed_forward_length": INNER, "vocab_size": VOCAB,
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": DIM,
    "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": DIM,
}  # fmt: skip
GEMMA4 = {
    "block_count": 2, "attention.key_length_swa": DIM, "attention.value_length_swa": DIM,
    "attention.sliding_window": 64, "attention.sliding_window_pattern": [True, False],
    "attention.shared_kv_layers": 0, "rope.dimension_count_swa": DIM, "rope.freq_base_swa": 10000.0,
}  # fmt: skip
MTP = {"block_count": 3, "nextn_predict_layers": 1}


def write(path, architecture, sizes, layers, others, hidden=HIDDEN):
    """Write a model of such layers, whose tokens are bytes, and return its path."""
    gguf_files = pytest.importorskip("support.gguf_files")
    rng = np.random.default_rng(0)
    tokens, types = llama_models.writer().byte_vocabulary()
    vocabulary = {
        "model": "llama", "tokens": tokens, "scores": [0.0] * VOCAB, "token_type": [int(kind) for kind in types],
        "bos_token_id": 10, "add_bos_token": False, "add_eos_token": False, "add_space_prefix": False,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in (SIZES | sizes).items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    tensors = {"token_embd": (VOCAB, hidden), "output_norm": (hidden,)} | others
    for i, layer in enumerate(layers):
        tensors |= {f"blk.{i}.{name}": size for name, size in layer.items()}
    weights = []
    for name, size in tensors.items():
        full_name = name if name.endswith((".bias", "ssm_a")) else f"{name}.weight"
        values = rng.standard_normal(size, np.float32) * (2 / size[-1] ** 0.5 if len(size) > 1 else 1)
        weights.append((full_name, -abs(values) if name.endswith("ssm_a") else values, None))
    return gguf_files.write(path, architecture, metadata, weights)


def feed_forward(hidden=HIDDEN):
    """Return the sizes of what each layer has beside attention or recurrence."""
    norms = dict.fromkeys(("attn_norm", "post_attention_norm"), (hidden,))
    return norms | {"ffn_gate": (INNER, hidden), "ffn_up": (INNER, hidden), "ffn_down": (hidden, INNER)}


def attention(hidden=HIDDEN):
    sizes = {"attn_q": (2 * DIM, hidden), "attn_q_norm": (DIM,), "attn_output": (hidden, 2 * DIM)}
    return sizes | {"attn_k": (DIM, hidden), "attn_v": (DIM, hidden), "attn_k_norm": (DIM,)} | feed_forward(hidden)


def head_of(layer):
    """Return the sizes of a head (MTP) that is a layer with an input of its own."""
    return layer | {"nextn.eh_proj": (HIDDEN, 2 * HIDDEN), "nextn.enorm": (HIDDEN,), "nextn.hnorm": (HIDDEN,)}


def write_glm4_moe(folder):
    """Write a model of two layers with attention, and a head with two experts."""
    sizes = MTP | {"leading_dense_block_count": 2, "expert_count": 2, "expert_used_count": 1}
    sizes |= {"expert_shared_count": 1, "expert_feed_forward_length": INNER}
    experts = {"ffn_gate_inp": (2, HIDDEN), "exp_probs_b.bias": (2,)}
    for part in ("gate", "up", "down"):
        experts[f"ffn_{part}_exps"] = (2, *feed_forward()[f"ffn_{part}"])
        experts[f"ffn_{part}_shexp"] = feed_forward()[f"ffn_{part}"]
    head = {name: size for name, size in head_of(attention()).items() if not name.startswith("ffn_")} | experts
    return write(folder / "glm4moe.gguf", "glm4moe", sizes, [attention(), attention(), head], {})


def write_qwen35(folder):
    """Write a hybrid model: a recurrent layer, one with attention, and a head."""
    sizes = MTP | {
        "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 32,
        "ssm.time_step_rank": 2, "ssm.group_count": 2, "rope.dimension_sections": [8, 4, 4, 0],
    }  # fmt: skip
    recurrent = feed_forward() | {
        "attn_qkv": (192, HIDDEN), "attn_gate": (64, HIDDEN), "ssm_conv1d": (192, 4), "ssm_dt.bias": (2,),
        "ssm_a": (2,), "ssm_beta": (2, HIDDEN), "ssm_alpha": (2, HIDDEN), "ssm_norm": (32,), "ssm_out": (HIDDEN, 64),
    }  # fmt: skip
    layer = attention() | {"attn_q": (4 * DIM, HIDDEN)}
    return write(folder / "qwen35.gguf", "qwen35", sizes, [recurrent, layer, head_of(layer)], {})


def gemma4_layer(hidden):
    return attention(hidden) | dict.fromkeys(("ffn_norm", "post_ffw_norm"), (hidden,)) | {"layer_output_scale": (1,)}


def write_gemma4(folder):
    """Write a model of two layers: one with a window of 64 tokens, and one without."""
    sizes = GEMMA4 | {"embedding_length_per_layer_input": 0}
    layers = [gemma4_layer(HIDDEN)] * 2
    return write(folder / "gemma4.gguf", "gemma4", sizes, layers, {"rope_freqs": (DIM // 2,)})


def write_gemma4_assistant(folder):
    """Write the head of such a model, which has no rows of its own."""
    hidden = HIDDEN // 2
    sizes = GEMMA4 | {"nextn_predict_layers": 2, "embedding_length": hidden, "embedding_length_out": HIDDEN}
    layers = [{name: size for name, size in gemma4_layer(hidden).items() if name[:6] not in ("attn_k", "attn_v")}] * 2
    others = {"nextn.pre_projection": (hidden, 2 * HIDDEN), "nextn.post_projection": (HIDDEN, hidden)}
    others["rope_freqs"] = (DIM // 2,)
    return write(folder / "assistant.gguf", "gemma4-assistant", sizes, layers, others, hidden)
