"""Test what `kvcache plan` counts of hybrid models against caches of transformers' models that ran."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, LINEAR  # noqa: E402 - torch may be missing

from kvcache.hf import Engine, HFCache  # noqa: E402 - torch may be missing
from kvcache.models import shapes  # noqa: E402 - torch may be missing
from kvcache.tools import memory_plan, team_plan  # noqa: E402 - torch may be missing

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


def test_an_engine_that_ran_kept_what_was_planned():
    """Windows of running texts hold a tenth of their rows. Prompts are kept whole, in each layer."""
    config = transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=256,
    )
    shape, num_texts, context = shapes.read(config), 3, 640
    options = {"context": context, "dtypes": ["f16"]}
    memory = memory_plan.available_memory(config, 0)
    plan = memory_plan.make(shape, memory, sequences=num_texts, **options)
    (row,) = team_plan.make(shape, plan, plan, prompt=context).rows
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with Engine(model, max_bytes=1 << 30) as engine:
        for text in range(num_texts):
            engine.submit([text + 1] * context, max_new_tokens=1, eos_token_id=-1).result()
        assert 1 <= engine.prefix.cache.nbytes / row.kept_nbytes <= 1.1
    assert row.kept_nbytes > 2 * plan.rows[0].nbytes
