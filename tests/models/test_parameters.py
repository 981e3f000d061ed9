"""Numbers of parameters, which transformers' models give where there is only a configuration."""

import json
import logging
import sys

import numpy as np
import pytest
from support.published_models import GEMMA_27B, QWEN_NEXT

import kvcache
from kvcache.models import arithmetic, gguf, parameters

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


QWEN = {"vocab_size": 151936, "max_window_layers": 28}
GEMMA = {"vocab_size": 256000, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
BY_ARITHMETIC = {
    "Llama-3.1-8B": PUBLISHED["Llama-3.1-8B"],
    "Llama-3.2-1B": PUBLISHED["Llama-3.2-1B"],
    "Mixtral-8x7B": PUBLISHED["Mixtral-8x7B"],
    "Llama-2-7b": ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False}, 6_738_415_616),
    "Mistral-7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "Qwen2.5-7B": (LLAMA | QWEN | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
                   "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
                   7_615_616_512),
    "Qwen3-0.6B": (LLAMA | QWEN | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
                   "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128, "tie_word_embeddings": True},
                   596_049_920),
    "Qwen3-30B-A3B": (LLAMA | QWEN | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_experts": 128, "num_hidden_layers": 48, "head_dim": 128,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "decoder_sparse_step": 1,
                      "mlp_only_layers": []}, 30_532_122_624),
    "gemma-2-2b": (GEMMA | {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
                   "num_hidden_layers": 26, "num_attention_heads": 8}, 2_614_341_888),
    "gemma-3-1b": (GEMMA | {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
                   "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                   "vocab_size": 262144}, 999_885_952),
    "gpt-oss-120b": ({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
                      "vocab_size": 201088, "attention_bias": True}, 116_829_156_672),
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280,
                     "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
                     "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                     "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3},
                    671_026_404_352),
    # As google/gemma-3-27b-it and Qwen/Qwen3-Next-80B-A3B-Instruct have them; the sums of their tensors.
    "gemma-3-27b": (GEMMA_27B, 27_432_406_640),
    "Qwen3-Next-80B": (QWEN_NEXT, 79_674_391_296),
    "Phi-3-mini": ({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064}, 3_821_079_552),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ARITHMETIC)
def test_the_commonest_need_no_torch(name, monkeypatch):
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    config, number = BY_ARITHMETIC[name]
    assert parameters.count(config) == number


@pytest.mark.parametrize(
    ("metadata", "number"),
    [
        ({"total_size": 2000, "total_parameters": 900}, 900),
        ({"total_size": 2000}, 1000),
        ({"total_parameters": 900}, 8_030_261_248),  # no index that a program wrote
        ({}, 8_030_261_248),
        (None, 8_030_261_248),
    ],
)
def test_an_index_of_weights_counts_them(tmp_path, metadata, number):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    assert parameters.count(tmp_path) == parameters.count(tmp_path / "config.json") == number
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    assert parameters.count(tmp_path) == 8_030_261_248


@pytest.mark.parametrize(
    "metadata", [7, {"total_size": -1}, {"total_size": 2**61}, {"total_size": 8, "total_parameters": 1.5}]
)
def test_an_index_of_weights_that_cannot_be(tmp_path, metadata):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata}))
    with pytest.raises(kvcache.ModelFileError, match=r"index\.json.*(metadata|total_size|total_parameters) must be"):
        parameters.count(tmp_path)


def small(model_type, **changes):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "num_local_experts": 3,
        "num_experts": 3,
        "moe_intermediate_size": 48,
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    latents = {"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    sizes |= latents if model_type == "deepseek_v3" else {}
    return sizes | {"model_type": model_type, "pad_token_id": 0} | changes


@pytest.mark.hf
@pytest.mark.filterwarnings("default")  # those of importing transformers
@pytest.mark.parametrize("model_type", arithmetic.FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"mlp_bias": True},
     {"head_dim": 24}, {"use_qk_norm": True}, {"num_key_value_heads": None}],
    ids=str,
)  # fmt: skip
def test_arithmetic_counts_what_transformers_makes(model_type, changes):
    config = {name: value for name, value in small(model_type, **changes).items() if value is not None}
    if model_type == "phi3" and "head_dim" in changes:
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    number = arithmetic.count(config)
    assert number == parameters._made(config, "config") or (number is None and "num_key_value_heads" not in config)
    assert parameters.count(config) == parameters._made(config, "config").total


@pytest.mark.parametrize("dense", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_arithmetic_leaves_layers_of_two_kinds(dense):
    assert arithmetic.count(BY_ARITHMETIC["Qwen3-30B-A3B"][0] | dense) is None


def test_arithmetic_leaves_unusual_encoders():
    with_head = GEMMA_27B | {"vision_config": GEMMA_27B["vision_config"] | {"vision_use_head": True}}
    assert arithmetic.count(with_head) is arithmetic.count(GEMMA_27B | {"vision_config": None}) is None


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
        {"model_type": None},
        {"model_type": ["llama"]},
        {"vocab_size": -1},
        {"vocab_size": "many"},
        {"hidden_size": 2**62},
        {"num_hidden_layers": [1]},
        {"rope_scaling": 3, "model_type": "olmo"},
    ],
)
def test_what_transformers_cannot_make(change, capfd):
    disabled = logging.root.manager.disable
    with pytest.raises(kvcache.NotSupportedError, match=r"^config: transformers cannot make the model \("):
        parameters.count(LLAMA | change)
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == disabled


@pytest.mark.hf
@pytest.mark.parametrize("change", [{}, {"auto_map": {"AutoModel": "other/code--modeling.Novel"}}])
def test_a_type_that_transformers_does_not_know(change):
    with pytest.raises(kvcache.NotSupportedError, match=r"^config: transformers knows no model_type 'novel'$"):
        parameters.count(LLAMA | {"model_type": "novel"} | change)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_packages(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", object()))  # either may not be installed
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(kvcache.NotSupportedError, match=f"^config: counting needs {missing}, which is not installed; "):
        parameters.count(PUBLISHED["gpt2"][0])


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


EXPERT = 3 * 4096 * 14336  # parameters of one in a layer of Mixtral


def read_by(config):
    """Return the parameters that a token reads."""
    found = parameters.parts(config)
    assert found.total == parameters.count(config)
    return found.total - found.unread - found.experts * (1 - found.share_used)


@pytest.mark.parametrize(
    ("config", "read"),
    [
        (PUBLISHED["Llama-3.1-8B"][0], 8_030_261_248 - 128256 * 4096),  # of the input embedding, it reads a row
        (PUBLISHED["Llama-3.2-1B"][0], 1_235_814_400),
        (PUBLISHED["Mixtral-8x7B"][0], 46_571_720_704 - 32 * 6 * EXPERT),
        (PUBLISHED["Mixtral-8x7B"][0] | {"num_experts_per_tok": 3}, 46_571_720_704 - 32 * 5 * EXPERT),
        (BY_ARITHMETIC["Qwen3-30B-A3B"][0] | {"num_experts_per_tok": 8}, 3.34e9 - 151936 * 2048),
    ],
)
def test_a_token_reads_the_experts_that_it_goes_through(config, read):
    assert read_by(config) == pytest.approx(read, rel=1e-3)


def test_experts_are_counted():
    """A token goes through 2 of 8 experts; their routers count as theirs."""
    found = parameters.parts(PUBLISHED["Mixtral-8x7B"][0])
    assert (found.share_used, found.unread, found.head) == (0.25, 32000 * 4096, 32000 * 4096)
    assert found.multiplied == found.total - found.unread - found.experts * 3 // 4
    assert found.experts == 32 * 8 * (EXPERT + 4096)


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_decoder_of_a_model_is_read(monkeypatch, tied):
    """A token of text reads nothing of an image encoder, and one row of an input embedding of its own."""
    decoder, total = 999_885_952, 2_000_000_000
    monkeypatch.setattr(parameters, "count", lambda _: total + (0 if tied else 262144 * 1152))
    config = {"model_type": "gemma3", "text_config": BY_ARITHMETIC["gemma-3-1b"][0], "vision_config": {}}
    assert read_by(config | {"tie_word_embeddings": tied}) == decoder


def test_experts_of_a_part_are_found(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    config, _ = PUBLISHED["Mixtral-8x7B"]
    assert not parameters.has_experts({"model_type": "olmo", "hidden_size": 64})
    assert parameters.has_experts({"model_type": "a model", "text_config": config})
    for may_make in (False, True):
        with pytest.raises(kvcache.NotSupportedError, match="counting needs"):
            parameters.parts({"model_type": "a model", "some_config": config}, may_make)
    seen = []
    monkeypatch.setattr(arithmetic, "count", lambda config: seen.append(config) or arithmetic.Counted(9, 0))
    parameters.parts({"model_type": "a model", "text_config": config | {"moe_topk": [1, 4]}})
    assert [one.get("num_local_experts") for one in seen[1:]] == [8, 4, 8]


@pytest.mark.hf
def test_the_usual_number_of_experts_counts():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 8}
    found = parameters.parts(config)
    assert found == parameters.parts(config | {"n_routed_experts": 256, "num_experts_per_tok": 8})
    assert found.share_used == 8 / 256


def test_experts_of_a_gguf(tmp_path):
    gguf_files = pytest.importorskip("support.gguf_files")
    tensors = [(f"blk.0.{name}.weight", np.zeros(shape, np.float32), None)
               for name, shape in (("attn_q", (64, 64)), ("ffn_up_exps", (8, 64, 64)))]  # fmt: skip
    files = [
        gguf_files.write(tmp_path / "1.gguf", "qwen3moe", {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2},
                         tensors[:1]),
        gguf_files.write(tmp_path / "2.gguf", "qwen3moe", {}, tensors[1:]),
    ]  # fmt: skip
    headers = [gguf.read_header(file) for file in files]
    assert parameters.parts_in_gguf(headers, in_bytes=False) == (9 << 12, 0, 8 << 12, 0.25, 0)
    assert parameters.parts_in_gguf(headers, in_bytes=True) == (9 << 14, 0, 8 << 14, 0.25, 0)
    assert parameters.parts_in_gguf(headers[1:], in_bytes=False) == (8 << 12, 0, 0, 1, 0)


def test_embeddings_of_a_gguf(tmp_path):
    """A row of the input embedding is read; the output's is read as a whole, which may be the same."""
    gguf_files = pytest.importorskip("support.gguf_files")

    def parts(*names):
        tensors = [(f"{name}.weight", np.zeros((8, 64), np.float32), None) for name in names]
        return parameters.parts_in_gguf([gguf.read_header(gguf_files.write(tmp_path / "a.gguf", "llama", {}, tensors))],
                                        in_bytes=True)  # fmt: skip

    assert parts("token_embd").unread == 0
    assert parts("token_embd").head == 8 * 64 * 4
    found = parts("token_embd", "output", "v.blk.0.attn_q", "per_layer_token_embd")
    assert (found.unread, found.head) == (3 * 8 * 64 * 4, 8 * 64 * 4)
