"""`kvcache plan --users` adds to a plan what a team gets: kept prompts, its speed, the time to a first token."""

import json
import sys
from dataclasses import replace

import pytest
from support.published_models import GEMMA_27B, PUBLISHED, QWEN_NEXT

from kvcache import NotSupportedError
from kvcache.models import shapes
from kvcache.tools import bench, memory_plan, rates, team_plan, weighing

pytest.importorskip("typer")
pytest.importorskip("rich")

from support.command import run_here

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
         "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1000, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"}  # fmt: skip
GEMMA = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 256,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}  # fmt: skip
GIB = 1 << 30


def known(shape, memory=1e18, weights=1e18, attention=1e18):
    """Return rates of a machine; by default it takes no time."""
    kinds = {rates.Kind.of(layer, heads) for layer, heads in zip(shape.layers, shape.num_heads, strict=True)}
    rows = {(kind, "f16"): memory for kind in kinds}
    prompts = rates.PromptRates(weights, "made up", {(kind, "f16"): attention for kind in kinds})
    return rates.Rates(memory, "made up", rows, {}, prompts)


def team(config, *, users=10, context=4096, prompt=4096, **speeds):
    shape = shapes.read(config)
    options = {"context": context, "dtypes": ["f16"], "rates": known(shape, **speeds)}
    memory = memory_plan.available_memory(config, None, 1 << 40)
    plans = [memory_plan.make(shape, memory, sequences=n, **options) for n in (users, 1)]
    return team_plan.make(shape, *plans, prompt=prompt, rates=options["rates"])


# ---- memory


def plan_of(tmp_path, config, *options):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return run_here("plan", tmp_path, *options)


OTHER = ["--users", 10, "--context", "32k", "--prompt", "4k", "--memory", "256GB", "--bandwidth", "200GB/s"]


def test_kept_prompts_of_a_model_with_windows(tmp_path, monkeypatch):
    """Gemma 3 27B has 62 layers of 16 KV heads of 128, 52 of them with a window of 1,024 tokens."""
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    row, tokens = 2 * 2 * 16 * 128, 32 * 1024
    made = json.loads(plan_of(tmp_path, GEMMA_27B, *OTHER, "--dtype", "f16", "--json").stdout)
    (running,), (kept,) = made["rows"], made["team"]["rows"]
    assert running["nbytes"] == 10 * row * (10 * tokens + 52 * 1024)
    assert kept["kept_nbytes"] == 10 * row * 62 * tokens
    assert kept["kept_needs"] == kept["kept_nbytes"] + 2 * 27_432_406_640
    lines = plan_of(tmp_path, GEMMA_27B, *OTHER, "--dtype", "f16").stdout.splitlines()
    line = next(line for line in lines if line.startswith("f16 "))
    assert line.split() == ["f16", "29.1", "GiB", "80.4", "GiB", "yes", "155.0", "GiB", "206.1", "GiB", "yes"]


def test_kept_states_of_a_hybrid_model(tmp_path, monkeypatch):
    """Qwen3-Next keeps a state each 2,048 tokens, and one at the end: of 36 layers of 32 heads of 128 * 128."""
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    made = json.loads(plan_of(tmp_path, QWEN_NEXT, *OTHER, "--dtype", "f16", "--json").stdout)
    assert made["team"]["kept_states"] == 10 * 17 * made["memory"]["states"] == 10 * 17 * 36 * 2_195_456
    (running,), (kept,) = made["rows"], made["team"]["rows"]
    assert kept["kept_nbytes"] == running["nbytes"]
    assert kept["kept_needs"] == running["needs"] + made["team"]["kept_states"]
    text = plan_of(tmp_path, QWEN_NEXT, *OTHER).stdout
    assert "12.5 GiB of kept states" in " ".join(text.split())


def test_kept_prompts_may_not_fit():
    shape = shapes.read(GEMMA)
    needs = 10 * 8192 * sum(layer.bytes_per_token for layer in shape.layers)
    for free in (needs, needs - 1):
        plan = memory_plan.make(shape, memory_plan.Memory(free, "as given"), context=8192, sequences=10, dtypes=["f16"])
        (row,) = team_plan.make(shape, plan, plan, prompt=1).rows
        assert plan.rows[0].fits
        assert row.kept_fits is (free == needs)


def test_no_prompts_are_kept_behind_an_encoder():
    shape = shapes.read({**PUBLISHED["Whisper large v3"].config})
    plan = memory_plan.make(shape, memory_plan.Memory(1 << 40, "as given"), context=100, dtypes=["f16"])
    with pytest.raises(NotSupportedError, match="users=1: no prompts are kept of this whisper"):
        team_plan.make(shape, plan, plan, prompt=1)


# ---- tokens/s


def test_many_users_are_limited_by_computing():
    """A step reads weights once for all, and multiplies them by a token of each user."""
    config, number = LLAMA, weighing.weigh(LLAMA).multiplied
    assert number == weighing.weigh(LLAMA).num_parameters - 1000 * 512  # without the input embedding
    shape, memory = shapes.read(config), memory_plan.available_memory(config, None, 1 << 40)
    for users, seconds in ((1, 2 * number / 1e9), (10, 2 * number / 1e9), (100, 200 * number / 5e10)):
        speeds = replace(known(shape, weights=5e10), memory=1e9)
        plan = memory_plan.make(shape, memory, context=10, sequences=users, dtypes=["f16"], rates=speeds)
        assert plan.rows[0].tokens_per_second == pytest.approx(users / seconds)


# ---- the first token


def test_each_token_of_a_prompt_is_multiplied_by_the_weights_except_the_output():
    found = weighing.weigh(LLAMA)
    assert found.head == 1000 * 512
    (row,) = team(LLAMA, weights=1e9).rows
    passes = 8 * team_plan.PASS * 4
    assert row.new_seconds == pytest.approx(2 * 4096 * (found.multiplied - found.head) / 1e9 + passes)
    assert row.known_seconds == pytest.approx(2 * 64 * (found.multiplied - found.head) / 1e9 + passes / 8)


def test_a_pass_reads_the_weights():
    (row,) = team(LLAMA, memory=1e9).rows
    read = weighing.weigh(LLAMA).read / 1e9 + 4 * team_plan.PASS
    assert row.new_seconds == pytest.approx(8 * read)
    assert row.known_seconds == pytest.approx(read)


def test_a_pass_reads_the_experts_that_its_tokens_choose(monkeypatch):
    monkeypatch.setattr(team_plan, "PASS", 0)
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (row,) = team(mixtral, prompt=512, memory=1e9).rows
    found = weighing.weigh(mixtral)
    assert row.new_seconds == pytest.approx((found.nbytes - 2 * 1000 * 512) / 1e9)


def test_tokens_of_a_prompt_see_the_tokens_before_them(monkeypatch):
    """A layer of 8 heads multiplies keys and values of 64 elements for each pair of tokens."""
    monkeypatch.setattr(team_plan, "PASS", 0)
    (row,) = team(LLAMA, attention=1e9).rows
    pairs = 4096 * 4096 / 2, 64 * (4096 - 32)
    for seconds, number in zip((row.new_seconds, row.known_seconds), pairs, strict=True):
        assert seconds == pytest.approx(4 * 8 * 2 * 2 * 64 * number / 1e9, rel=1e-3)


def test_tokens_of_a_prompt_see_a_window(monkeypatch):
    monkeypatch.setattr(team_plan, "PASS", 0)
    (row,) = team(GEMMA, attention=1e9).rows
    pairs = 4096 * 4096 / 2 + 3 * (1024 * 1024 / 2 + 3072 * 1024)
    assert row.new_seconds == pytest.approx(8 * 2 * 2 * 256 * pairs / 1e9, rel=1e-3)


def test_tokens_of_a_prompt_choose_rows(monkeypatch):
    """DeepSeek V3.2 has 61 layers of 128 heads over 2,048 latents of 576, and 64 heads over index keys of 128."""
    monkeypatch.setattr(team_plan, "PASS", 0)
    shape = shapes.read(PUBLISHED["DeepSeek V3.2"].config)
    memory = memory_plan.Memory(1 << 40, "as given")
    seconds = team_plan.seconds_of(shape, shape.layers, memory, known(shape, attention=1e9), 0, 4096)
    chosen, pairs = 2048 * 2048 / 2 + 2048 * 2048, 4096 * 4096 / 2
    assert seconds == pytest.approx(61 * 2 * (128 * (576 + 512) * chosen + 64 * 128 * pairs) / 1e9, rel=1e-3)


def test_a_short_prompt_is_fed_whole():
    made = team(LLAMA, prompt=5)
    assert made.new_tokens == 5
    assert made.rows[0].known_seconds == made.rows[0].new_seconds


@pytest.mark.parametrize("change", [{"multiplied": None}, {"weights_read": None}])
def test_parameters_that_are_not_counted(change):
    shape = shapes.read(LLAMA)
    memory = replace(memory_plan.available_memory(LLAMA, None, 1 << 40), **change)
    assert team_plan.seconds_of(shape, shape.layers, memory, known(shape), 0, 10) is None


# ---- what is measured


def test_prompts_are_measured_in_the_type_of_the_weights(monkeypatch):
    monkeypatch.setattr(rates, "PRODUCTS", 1)
    found, library = rates.multiply_rate("f32", 1)
    assert found > 0
    assert library in ("torch in f32", "NumPy in f32")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert rates.multiply_rate("bf16", 1)[1] == "NumPy in f32"
    types = [weighing.multiplied_type(LLAMA, given) for given in (None, "f16", "q4_0", 10**9)]
    assert types == ["bf16", "f16", "f32", "bf16"]
    assert weighing.multiplied_type({**LLAMA, "torch_dtype": None}, None) == "f32"


def test_attention_of_prompts_is_measured():
    shape = bench.Shape(num_heads=2, num_kv_heads=1, head_dim=32, context=64, threads=1)
    found = bench.prompt_rates(shape, ["f16", "int8"], 0.01)
    assert [*found] == ["f16", "int8"]
    assert min(found.values()) > 0
    keys_alone = replace(shape, v_head_dim=0)
    assert bench.prompt_rates(keys_alone, ["f16"], 0.01)["f16"] > 0


def test_more_cores_compute_prompts_faster():
    kind = rates.Kind(4, 64, 64, False)
    one = rates.Rates(20e9, "measured here", {(kind, "f16"): 5e9}, {},
                      rates.PromptRates(1e11, "torch in bf16", {(kind, "f16"): 6e10}))  # fmt: skip
    found = rates.of_cores(100e9, 64, one).prompts
    assert (found.weights, found.attention) == (64e11, {(kind, "f16"): 64 * 6e10})
    assert found.library == "torch in bf16"


# ---- the command


def test_a_team_s_plan_fits_80_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, seconds: 1e12)
    monkeypatch.setattr(bench, "decode_rates", lambda shape, dtypes, _: dict.fromkeys(dtypes, 1e12))
    monkeypatch.setattr(bench, "prompt_rates", lambda shape, dtypes, _: dict.fromkeys(dtypes, 1e12))
    monkeypatch.setattr(rates, "multiply_rate", lambda dtype, threads: (1e12, f"torch in {dtype}"))
    text = plan_of(tmp_path, GEMMA_27B, "--users", "1_000", "--context", "128k", "--window", "100_000").stdout
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "prompts are multiplied by weights at 1,000 GFLOP/s (by torch in bf16)" in words
    assert "1,000 users, each with a text of 131,072 tokens" in words
    assert "first token: estimated, of a prompt of 131,072 tokens alone. new: nothing is kept; known: all but" in words
    assert "Layers with a window keep all of them, too" in words
    assert sum(line.startswith("f16 ") for line in text.splitlines()) == 4  # memory and speed, with and without windows


def test_a_bandwidth_says_nothing_of_prompts(tmp_path):
    words = " ".join(plan_of(tmp_path, LLAMA, *OTHER).stdout.split())
    assert "first token: not known from --bandwidth alone; give --cores as well" in words
    words = " ".join(plan_of(tmp_path, LLAMA, "--users", 2, "--context", 100, "--no-measure").stdout.split())
    assert "first token" not in words
    assert "running: keys and values of 2 texts of 100 tokens, all answered at once" in words


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--users", 0], "'--users': 0 is not in the range from 1 to 2147483646"),
        (["--users", 2, "--prompt", 0], "'--prompt': 0 is not in the range from 1 to 2147483646"),
        (
            ["--users", 2, "--prompt", "4k"],
            "--prompt: 4,096 tokens are more than the context of 1,024: give at most as",
        ),
        (["--users", 2, "--sequences", 3], "--users: 2 users have 2 sequences: leave --sequences 3 out"),
        (["--prompt", 9], "--prompt: it needs --users, who send such prompts"),
    ],
)
def test_what_a_team_s_plan_refuses(tmp_path, options, says):
    done = plan_of(tmp_path, LLAMA, "--context", "1k", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
