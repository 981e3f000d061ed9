"""Test the sizes of recurrent states: of published models, by hand, and of a GGUF beside its config.json."""

from typing import Any, NamedTuple

import pytest
from support import gguf_files

import kvcache
from kvcache.models import shapes, states
from kvcache.models.states import State

HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
L, F = "linear_attention", "full_attention"
QWEN = {
    "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


class Model(NamedTuple):
    """A model's configuration, the metadata that llama.cpp's converter makes of it, and the sizes of its states."""

    config: dict[str, Any]
    architecture: str
    metadata: dict[str, Any]
    layers: int  # layers with a state
    conv: int  # elements of one of them, as llama.cpp's n_embd_r and n_embd_s
    recurrent: int


def delta(inner, groups, size, heads):
    """Return the metadata of a state space."""
    sizes = {"conv_kernel": 4, "inner_size": inner, "group_count": groups, "state_size": size, "time_step_rank": heads}
    return {f"ssm.{name}": value for name, value in sizes.items()}


MODELS = {
    "Qwen3.6 27B": Model(
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 64, **QWEN}},
        "qwen35", {"block_count": 64, HEADS: 24, KV_HEADS: 4, **delta(6144, 16, 128, 48)},
        48, 3 * 10240, 48 * 128 * 128,
    ),
    "LFM2 1.2B": Model(
        {"model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
         "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3},
        "lfm2", {"block_count": 16, HEADS: 32, "shortconv.l_cache": 3, "embedding_length": 2048,
                 KV_HEADS: [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)]},
        10, 2 * 2048, 0,
    ),
    "Falcon-H1 0.5B": Model(
        {"model_type": "falcon_h1", "num_hidden_layers": 36, "hidden_size": 1024, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
         "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
        "falcon-h1", {"block_count": 36, HEADS: 8, KV_HEADS: 2, **delta(1536, 1, 128, 24)},
        36, 3 * (1536 + 2 * 128), 1536 * 128,
    ),
    "Granite 4.0 H tiny": Model(
        {"model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 1536, "num_attention_heads": 12,
         "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1,
         "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
         "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]},
        "granitehybrid", {"block_count": 40, HEADS: 12, **delta(3072, 1, 128, 48),
                          KV_HEADS: [4 if i in (5, 15, 25, 35) else 0 for i in range(40)]},
        36, 3 * (3072 + 2 * 128), 3072 * 128,
    ),
    "Jamba 1.5 mini": Model(
        {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
        "jamba", {"block_count": 32, HEADS: 32, KV_HEADS: [8 if i % 8 == 4 else 0 for i in range(32)],
                  "ssm.conv_kernel": 4, "ssm.inner_size": 8192, "ssm.state_size": 16, "ssm.time_step_rank": 256},
        28, 3 * 8192, 8192 * 16,
    ),
    "Nemotron-H 8B": Model(
        {"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
         "conv_kernel": 4, "hybrid_override_pattern": "M-M-M*-M"},
        "nemotron_h", {"block_count": 8, HEADS: 32, KV_HEADS: [0, 0, 0, 0, 0, 8, 0, 0],
                       "feed_forward_length": [0, 21504, 0, 21504, 0, 0, 21504, 0], **delta(8192, 8, 128, 128)},
        4, 3 * (8192 + 2 * 8 * 128), 8192 * 128,
    ),
    "Bamba 9B": Model(
        {"model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64,
         "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
        "granitehybrid", {"block_count": 32, HEADS: 32, **delta(8192, 1, 128, 128),
                          KV_HEADS: [8 if i in (9, 18, 27) else 0 for i in range(32)]},
        29, 3 * (8192 + 2 * 128), 8192 * 128,
    ),
    "Kimi Linear": Model(
        {"model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32,
         "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 72,
         "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                                "short_conv_kernel_size": 4}},
        "kimi-linear", {"block_count": 27, HEADS: 32, "attention.kv_lora_rank": 512, "attention.key_length": 576,
                        "rope.dimension_count": 64, "kda.head_dim": 128, "ssm.conv_kernel": 4,
                        KV_HEADS: [1 if i + 1 in (4, 8, 12, 16, 20, 24, 27) else 0 for i in range(27)]},
        20, 3 * 3 * 4096, 32 * 128 * 128,
    ),
    "MiniMax Text 01": Model(
        {"model_type": "minimax_text_01", "num_hidden_layers": 80, "hidden_size": 6144, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10},
        "minimax-01", {"block_count": 80, HEADS: 64, KV_HEADS: 8, "attention.key_length": 128},
        70, 0, 64 * 128 * 128,
    ),
    "PLaMo 2 8B": Model(
        {"model_type": "plamo2", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 4, "hidden_size_per_head": 128, "mamba_num_heads": 64, "mamba_step": 2},
        "plamo2", {"block_count": 32, HEADS: 32, KV_HEADS: [0, 4] * 16, **delta(8192, 0, 64, 64)},
        16, 3 * 8192, 8192 * 64,
    ),
    "Qwen3.8 Flash Next": Model(
        {"model_type": "qwen4_exp_text", "num_hidden_layers": 8, **QWEN, "hc_count": 4, "ple_layer_ids": [2],
         "ple_conv_kernel_size": 4, "ngram_size": 3, "indexer_n_heads": 16, "indexer_head_dim": 128,
         "indexer_budget": 2048, "indexer_compress_ratio": 4, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "qwen4exp", {"block_count": 8, HEADS: 24, KV_HEADS: 4, "embedding_length": 5120, "hyper_connection.count": 4,
                     "ple.layers": [1], "ple.conv_kernel": 4, "ple.ngram_size": 3, **delta(6144, 16, 128, 48),
                     "attention.indexer.head_count": 16, "attention.indexer.key_length": 128,
                     "attention.indexer.top_k": 2048},
        6, 3 * 10240, 48 * 128 * 128,
    ),
}  # fmt: skip
FURTHER = {
    "Zamba2 1.2B": (
        {"model_type": "zamba2", "num_hidden_layers": 38, "hidden_size": 2048, "num_attention_heads": 32,
         "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1,
         "hybrid_layer_ids": [5, 11, 17, 23, 29, 35]},
        38, State(3 * (4096 + 2 * 64), 4096 * 64, 4 * (4096 + 2 * 64)),
    ),
    "RecurrentGemma 2B": (
        {"model_type": "recurrent_gemma", "num_hidden_layers": 26, "hidden_size": 2560, "num_attention_heads": 10,
         "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4},
        18, State(3 * 2560, 2560, 3 * 2560),
    ),
    "OLMo hybrid 7B": (
        {"model_type": "olmo_hybrid", "num_hidden_layers": 32, "hidden_size": 3840, "num_attention_heads": 30,
         "num_key_value_heads": 30},
        24, State(3 * (2 * 2880 + 5760), 30 * 96 * 192, 4 * (2 * 2880 + 5760)),
    ),
    "ZAYA1 8B, first revision": (
        {"model_type": "zaya", "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 8, "head_dim": 128,
         "num_key_value_heads": 2, "zaya_layers": ["a", 16, "a", 16]},
        2, State(2 * 1280, 128, 2 * 1280, is_f32=False),
    ),
    "ZAYA1 8B": (
        {"model_type": "zaya", "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 128},
        40, State(2 * 1280, 128, 2 * 1280, is_f32=False),
    ),
}  # fmt: skip


def counted(found):
    return [state for state in found if state != State()]


def gguf_of(folder, name):
    model = MODELS[name]
    usual = {"context_length": 4096, "embedding_length": 4096, "attention.key_length": 128}
    metadata = {f"{model.architecture}.{key}": value for key, value in {**usual, **model.metadata}.items()}
    return gguf_files.write(folder / "model.gguf", model.architecture, metadata)


@pytest.mark.parametrize("name", MODELS)
def test_states_of_a_gguf_and_of_its_configuration(tmp_path, name):
    model, path = MODELS[name], gguf_of(tmp_path, name)
    ngrams = [3 * 3 * 4 * 5120 if i == 1 and model.architecture == "qwen4exp" else 0 for i in range(model.layers)]
    for source in (model.config, path):
        found = states.read(source)
        sizes = [(state.conv, state.recurrent) for state in counted(found)]
        assert sizes == [(model.conv + more, model.recurrent) for more in ngrams]
        layers = shapes.read(source).layers
        assert len(found) <= len(layers)
        if model.architecture != "falcon-h1":
            assert all((layer.policy is None) or state == State() for layer, state in zip(layers, found, strict=False))
    assert states.read(path) == states.read(model.config)


def test_bytes_are_those_that_llama_cpp_logs():
    assert round(sum(state.nbytes for state in states.read(MODELS["Qwen3.6 27B"].config)) / 2**20, 2) == 149.62


@pytest.mark.parametrize("name", FURTHER)
def test_further_states(name):
    config, layers, state = FURTHER[name]
    assert counted(states.read(config)) == [state] * layers


def test_models_without_states(tmp_path):
    llama = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert states.read(llama) == (State(), State())
    blocks = [{"attention": {"no_op": False, "n_heads_in_group": 1}}, {"attention": {"no_op": True}}]
    assert states.read({**llama, "model_type": "nemotron-nas", "block_configs": blocks}) == (State(), State())
    metadata = {"deci.block_count": 2, f"deci.{HEADS}": [4, 0], f"deci.{KV_HEADS}": [4, 0]}
    path = gguf_files.write(tmp_path / "model.gguf", "deci", {**metadata, "deci.embedding_length": 64})
    assert states.read(path) == (State(), State())


def test_a_state_that_nobody_knows():
    config = {"model_type": "new", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    with pytest.raises(kvcache.NotSupportedError, match="recurrent states of the model_type 'new' are unknown"):
        states.read({**config, "layer_types": [L, F]})


def test_fields_that_cannot_be():
    config = MODELS["Qwen3.6 27B"].config["text_config"]
    with pytest.raises(kvcache.ModelFileError, match="linear_num_value_heads must be a whole number"):
        states.read({**config, "linear_num_value_heads": 0})
