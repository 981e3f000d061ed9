"""Test what `kvcache plan` counts of hybrid models against caches of transformers' models that ran."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, LINEAR  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - torch may be missing
from kvcache.models import shapes  # noqa: E402 - torch may be missing
from kvcache.tools import memory_plan  # noqa: E402 - torch may be missing

# With heads as large as published models have: else the states of convolutions are most of all.
SIZES = {**BASE, "head_dim": 256}
CONFIGS = {
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128
    ),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(
        **SIZES, **LINEAR, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hybrid_model_that_ran_held_what_was_planned(name):
    config = CONFIGS[name]()
    memory = memory_plan.available_memory(config, 0)
    assert memory.states > 0
    (row,) = memory_plan.make(shapes.read(config), memory, context=640, dtypes=["f16"]).rows
    cache = HFCache(config, dtype="f16")
    with torch.no_grad():
        transformers.AutoModelForCausalLM.from_config(config)(torch.ones((1, 640), dtype=int), past_key_values=cache)
    assert 1 <= cache.nbytes / row.needs <= 1.1
