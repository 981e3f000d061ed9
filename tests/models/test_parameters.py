"""Numbers of parameters, which transformers' models give where there is only a configuration."""

import logging
import sys

import pytest

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
TIED = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
# Configurations as they are published, and the models' numbers of parameters.
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-3.2-1B": (LLAMA | TIED | {"tie_word_embeddings": True}, 1_235_814_400),
    "Mixtral-8x7B": (LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}, 46_702_792_704),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "t5-small": ({"model_type": "t5"}, 60_506_624),
}


@pytest.mark.hf
@pytest.mark.filterwarnings("default")  # those of importing transformers
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    config, number = PUBLISHED[name]
    assert parameters.count(config) == number
    packed = {"dtype": "float3", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert parameters.count(config | packed) == number


@pytest.mark.hf
def test_all_parts_of_a_model_are_counted():
    from transformers import LlavaConfig

    config = LlavaConfig()
    assert parameters.count(config) == parameters.count(config.to_dict()) > parameters.count(config.text_config)


@pytest.mark.hf
@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "novel"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"model_type": "novel", "auto_map": {"AutoModel": "other/code--modeling.Novel"}},
        {"vocab_size": -1},
        {"vocab_size": "many"},
        {"hidden_size": 2**62},
        {"num_hidden_layers": [1]},
        {"rope_scaling": 3},
    ],
)
def test_what_transformers_cannot_make(change, capfd):
    disabled = logging.root.manager.disable
    with pytest.raises(kvcache.NotSupportedError, match=r"^config: transformers cannot make the model \("):
        parameters.count(LLAMA | change)
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == disabled


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_packages(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", object()))  # either may not be installed
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(kvcache.NotSupportedError, match=f"^config: counting needs {missing}, which is not installed$"):
        parameters.count(LLAMA)


@pytest.mark.hf
@pytest.mark.filterwarnings("default")  # those of importing transformers
def test_models_of_too_many_modules_are_not_made(monkeypatch):
    """A file may ask for any number of layers of an encoder."""
    small = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 10}
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = {"model_type": "whisper", "decoder_layers": 1, **small}
    monkeypatch.setattr(parameters, "MAX_MODULES", 500, raising=False)
    assert parameters.count(config | {"encoder_layers": 2}) > 0
    with pytest.raises(kvcache.NotSupportedError, match="more than 500 modules"):
        parameters.count(config | {"encoder_layers": 1000})
    monkeypatch.undo()
    assert parameters.count(config | {"encoder_layers": 100}) > 0
