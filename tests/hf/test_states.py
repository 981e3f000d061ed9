"""Test the sizes of recurrent states against the caches of transformers' models."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, EXPERTS, HYBRID, LINEAR, make, random_tokens  # noqa: E402 - torch may be missing
from support.sparse_models import POOLED, made  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - torch may be missing
from kvcache.models import states  # noqa: E402 - torch may be missing

PLAIN = {name: value for name, value in BASE.items() if name != "head_dim"}
KIMI = {
    **PLAIN, **LINEAR, "num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_experts_per_tok": 2, "num_experts": 4,
}  # fmt: skip
NEMOTRON = {
    **BASE, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
}  # fmt: skip
NGRAMS = {
    "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1, "heads_per_ngram": 2, "eos_token_id": 2,
}  # fmt: skip
BAILING = {
    **PLAIN, "num_key_value_heads": 4, "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "num_local_experts": 4, "layer_group_size": 2,
}  # fmt: skip
DELTA = {
    **BASE, **LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
MORE = {
    "bailing_hybrid": lambda: make(transformers.BailingHybridConfig(**BAILING)),
    "qwen3_5_text": lambda: make(transformers.Qwen3_5TextConfig(**DELTA)),
    "qwen3_5_moe_text": lambda: make(transformers.Qwen3_5MoeTextConfig(**DELTA, **EXPERTS)),
    "kimi_linear": lambda: make(transformers.KimiLinearConfig(**KIMI)),
    "lfm3": lambda: make(transformers.Lfm3Config(**BASE, layer_types=["conv", "full_attention"] * 2)),
    "nemotron_h": lambda: make(transformers.NemotronHConfig(**NEMOTRON)),
    "olmo_hybrid": lambda: make(transformers.OlmoHybridConfig(**BASE, **LINEAR)),
    "zamba": lambda: make(transformers.ZambaConfig(**PLAIN, layers_block_type=["linear_attention", "hybrid"] * 2)),
    "glm5_next": lambda: made("glm5_next", POOLED["glm5_next, recurrent"]),
    "qwen4_exp_text": lambda: made("qwen4_exp_text", {**POOLED["qwen4_exp_text, recurrent"], **NGRAMS}),
}
if hasattr(transformers, "LaraMiniConfig"):  # from 5.24 on
    MORE["lara_mini"] = lambda: make(transformers.LaraMiniConfig(**DELTA, **EXPERTS))
MODELS = {**{name: lambda name=name: make(HYBRID[name]()) for name in HYBRID}, **MORE}


def test_each_type_with_states_is_compared():
    served = {name for name in states.MODELS if name in transformers.CONFIG_MAPPING}
    served.discard("recurrent_gemma")  # it keeps its states itself
    assert served <= {*MODELS, "glm5_next_text"}, served - {*MODELS}


def kept(past):
    """Return the bytes of what a cache of transformers keeps beside rows; the numbers of tokens do not count."""
    layers = [layer for layer in past.layers if hasattr(layer, "conv_states")]
    tensors = [x for layer in layers for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return sum(x.nbytes for x in tensors if x is not None and x.is_floating_point())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_a_cache_of_transformers_keeps(name, dtype):
    model = MODELS[name]().to(dtype)
    past = HFCache(model.config)
    with torch.no_grad():
        model(input_ids=random_tokens(1, 40), use_cache=True, past_key_values=past)
    wanted = sum(state.nbytes_in_transformers(dtype.itemsize) for state in states.read(model.config))
    assert wanted == kept(past) > 0
