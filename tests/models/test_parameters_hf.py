"""Numbers of parameters, against transformers' own models on the device "meta", which allocates nothing."""

import warnings

import pytest

from kvcache.models import parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402 - needs transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402 - needs transformers

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

HEADED = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM"]
# What is not counted, or too much, of types whose numbers are not the same.
NEARLY = {
    "apertus": "two numbers of each activation",
    "axk1": "the last norm of some layers",
    "bitnet": "the norm within an MLP is wider than the others",
    "diffllama": "the weights of the second attention",
    "gpt_neox_japanese": "the bias of the last attention",
    "laguna": "a gate of each head",
    "lfm3": "a gate of each head",
    "marian": "it has no norms outside of layers",
    "modernbert-decoder": "a norm of the output",
    "openai-gpt": "it has no last norm",
    "persimmon": "norms of queries and keys",
    **dict.fromkeys(["mt5", "t5", "umt5"], "biases by distance"),
    "whisper": "keys have no bias",
}
FLAT = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
}  # types of older files, and whose text part they are
# Arguments without which a class cannot be made, or no layer has keys and values.
ARGUMENTS = {
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
SMALL = {
    "hidden_size": 256,
    "n_embd": 256,
    "d_model": 256,
    "intermediate_size": 328,
    "moe_intermediate_size": 104,
    "n_inner": 328,
    "ffn_dim": 328,
    "decoder_ffn_dim": 328,
    "encoder_ffn_dim": 200,
    "d_ff": 328,
    "num_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_attention_heads": 8,
    "num_heads": 8,
    "n_head": 8,
    "n_heads": 8,
    "head_dim": 32,
    "rotary_dim": 16,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "moe_num_experts": 12,
}


def number(config):
    """Make the model that transformers has for a configuration; return its number of parameters."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in HEADED]
    made = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_config(config) if made is None else made(config)
    model.tie_weights()
    has_output = made is not None or getattr(config, "tie_word_embeddings", False)
    return model.num_parameters() + (0 if has_output else config.vocab_size * config.hidden_size)


def check(name, config, most):
    found, expected = parameters.count(config), number(config)
    if name not in NEARLY:
        assert found == expected
    assert abs(found - expected) <= most * expected


# Types whose tests are quick, and differ most from each other.
QUICK = {"bart", "bamba", "deepseek_v3", "falcon", "gemma4_text", "gpt2", "gpt_oss", "jamba", "llama", "llama4_text"}
QUICK |= {"lfm2", "olmo2", "phi", "qwen2", "qwen3_moe", "qwen3_next", "t5", "whisper"}
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in parameters.TRAITS
    if name not in FLAT
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in parameters.TRAITS if name not in FLAT])
def test_sizes_that_classes_have_by_default(name):
    """Most are a published model's."""
    check(name, CONFIG_MAPPING[name](**ARGUMENTS.get(name, {})), 0.001)


@pytest.mark.parametrize("name", NAMES)
def test_small_sizes(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = ARGUMENTS.get(name, {})
        known = CONFIG_MAPPING[name](**arguments).to_dict()
        small = {field: value for field, value in SMALL.items() if known.get(field)}
        groups = known.get("num_key_value_heads") not in (None, known.get("num_attention_heads"))
        if known.get("num_key_value_heads"):
            small["num_key_value_heads"] = 2 if groups else 8
        check(name, CONFIG_MAPPING[name](**{**arguments, **small}), 0.02)


@pytest.mark.parametrize("name", ["mistral3", "qwen2_5_vl"])
def test_models_of_several_parts(name):
    """The text decoder is counted, with an output as the whole model says, not the part."""
    config = CONFIG_MAPPING[name]()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    others = ("vision", "visual", "projector")
    named = model.named_parameters()
    text = [tensor.numel() for path, tensor in named if not any(other in path for other in others)]
    assert parameters.count(config) == sum(text)


@pytest.mark.parametrize("name", FLAT)
def test_older_files(name):
    config = CONFIG_MAPPING[FLAT[name]]()
    assert parameters.count({**config.to_dict(), "model_type": name}) == parameters.count(config)


def test_outputs_that_use_the_embedding():
    """Where a file does not say so, what the class says counts."""
    for name in [name for name in parameters.TRAITS if name not in FLAT]:
        config = CONFIG_MAPPING[name](**ARGUMENTS.get(name, {}))
        assert ("tied" in parameters.TRAITS[name]) == getattr(config, "tie_word_embeddings", False), name
