"""Numbers of parameters from configurations: those of published models, and those of transformers' own."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.models import parameters

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
# Configurations as they are published, and the models' numbers of parameters.
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-3.2-1B": (
        {
            **LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        7_615_616_512,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "Mixtral-8x7B": ({**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}, 46_702_792_704),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "head_dim": 256,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
        },
        671_026_404_352,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "sliding_window": 128,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
        20_914_757_184,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    config, number = PUBLISHED[name]
    assert parameters.count(config) == number


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_moe", "gpt2", "t5"])
def test_a_field_that_is_missing_is_named(name):
    config = next((config for config, _ in PUBLISHED.values() if config["model_type"] == name), {"model_type": name})
    with pytest.raises(kvcache.ModelFileError, match="there is no field"):
        parameters.count(
            {key: value for key, value in config.items() if key not in ("vocab_size", "num_attention_heads")}
        )


def test_types_and_layers_that_are_not_known():
    for config in ({**LLAMA, "model_type": "novel"}, {**LLAMA, "layer_types": ["conv", "full_attention"] * 16}):
        with pytest.raises(kvcache.NotSupportedError, match="is not known"):
            parameters.count(config)


def test_of_a_model_of_several_parts():
    part = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    whole = {"model_type": "llava", "text_config": part, "vision_config": {}, "tie_word_embeddings": False}
    assert parameters.count(whole) == PUBLISHED["Llama-3.1-8B"][1]


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**40,
    1.5,
    "x",
    "gated",
    [],
    [1] * 64,
    ["sparse", 3],
    {},
    {"a": 1},
    [None] * 64,
]
FIELDS = sorted(
    {name for config, _ in PUBLISHED.values() for name in config} | {*parameters.INNER, *parameters.EXPERTS}
)


@given(
    st.sampled_from(sorted(PUBLISHED)), st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=4)
)
def test_hostile_configurations(name, changes):
    with contextlib.suppress(kvcache.KVCacheError):
        assert parameters.count(PUBLISHED[name][0] | changes) >= 0
