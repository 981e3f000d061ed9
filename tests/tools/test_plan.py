"""`kvcache plan` computes memory and speed of a model: here without running the command."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from support.published_models import PUBLISHED

from kvcache import ChunkedAttention, KVCache, Layer, NotSupportedError, SlidingWindow, selecting
from kvcache.models import shapes
from kvcache.tools import bench, memory_plan, rates, weighing

CONTEXT = 131_072
BLOCKS = {"sparse_topk_blocks": 16, "sparse_block_size": 128}
CHOSEN = 2_048  # rows
MEMORY = memory_plan.Memory(1 << 40, "the machine")


def kinds_of(shape):
    return {rates.Kind.of(layer, heads) for layer, heads in zip(shape.layers, shape.num_heads, strict=True)}


def bytes_read(config, context):
    """Return the bytes that attention is said to read for a token."""
    shape = shapes.read(config)
    known = rates.Rates(1e9, "made up", {(kind, "f16"): 1e9 for kind in kinds_of(shape)}, {})
    plan = memory_plan.make(shape, MEMORY, context=context, dtypes=["f16"], rates=known)
    return 1e9 / plan.rows[0].tokens_per_second, [layer.most_bytes(context) for layer in shape.layers], shape.chosen


@pytest.mark.parametrize(("name", "num_choosing"), [("DeepSeek V3.2", 61), ("MiniMax M3", 57)])
def test_chosen_rows_alone_are_read(name, num_choosing):
    """Layers that choose count only the rows that they choose. Index keys and other layers count all rows."""
    config = copy.deepcopy(PUBLISHED[name].config)
    if name == "MiniMax M3":
        config["text_config"]["sparse_attention_config"] |= BLOCKS
    read, own, chosen = bytes_read(config, CONTEXT)
    assert chosen.count(CHOSEN) == num_choosing
    wanted = [nbytes * CHOSEN / CONTEXT if rows else nbytes for nbytes, rows in zip(own, chosen, strict=True)]
    assert read == pytest.approx(sum(wanted))
    short, own, _ = bytes_read(config, CHOSEN // 2)
    assert short == pytest.approx(sum(own))


def test_a_token_has_its_share_of_a_row_for_several():
    glm5 = {"model_type": "glm5_next_text", "num_hidden_layers": 4, "kv_lora_rank": 512, "num_attention_heads": 4}
    glm5 |= {"index_kpool": 16, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "hidden_size": 64}
    (row,) = planned(glm5, CONTEXT, select=None)
    assert row.bytes_per_token == 2 * (512 + 128 // 16 + 2 * 128)  # in f16
    assert row.nbytes == 2 * (512 * CONTEXT + 128 * CONTEXT // 16 + 2 * 128 * 16)
    read, (*_, kv, pooled, inputs), chosen = bytes_read(glm5, CONTEXT)
    assert chosen[3] == 2048 + 15
    assert read == pytest.approx(kv * (2048 + 15) / CONTEXT + pooled + inputs)


def test_layers_that_do_not_choose_are_read_as_a_whole():
    read, own, chosen = bytes_read(PUBLISHED["Llama 3.1 8B"].config, CONTEXT)
    assert read == pytest.approx(sum(own))
    assert set(chosen) == {None}


def planned(config, context, dtype="f16", select=2048, **options):
    """Return the rows of a plan: without selected rows, and with them."""
    plan = memory_plan.make(
        shapes.read(config), MEMORY, context=context, dtypes=[dtype], select=select, **options
    )  # fmt: skip
    return plan.rows


def test_sketches_and_selected_rows_are_read():
    """Llama 3.1 8B has 32 layers of 8 KV heads of 128; a sketch of a head takes 34 bytes, and f16 rows of it 512."""
    config = PUBLISHED["Llama 3.1 8B"].config
    by_kind = {(kind, "f16"): 1e9 for kind in kinds_of(shapes.read(config))}
    known = rates.Rates(2e9, "made up", by_kind, {"f16": bench.SelectRates(sketches=5e8, rows=2.5e8)})
    dense, selecting = planned(config, CONTEXT, rates=known)
    row, sketch = 8 * 512, 8 * 34
    assert (dense.policy, selecting.policy) == (memory_plan.AS_IT_IS, "select=2048")
    assert (dense.num_selecting, dense.sketch_nbytes, dense.read_nbytes) == (0, 0, 32 * row * CONTEXT)
    assert (selecting.num_selecting, selecting.sketch_nbytes) == (30, 30 * sketch * CONTEXT)
    assert selecting.nbytes == dense.nbytes + selecting.sketch_nbytes
    assert selecting.bytes_per_token == 32 * row + 30 * sketch
    read = 2 * row * CONTEXT, 30 * sketch * CONTEXT, 30 * row * (2048 + 80)
    assert selecting.read_nbytes == sum(read)
    assert 1 / selecting.tokens_per_second == pytest.approx(read[0] / 1e9 + read[1] / 5e8 + read[2] / 2.5e8)
    assert 1 / dense.tokens_per_second == pytest.approx(dense.nbytes / 1e9)


@pytest.mark.parametrize(("context", "select"), [(selecting.SELECT_FROM - 1, 16), (9000, 4461), (9000, 5000)])
def test_short_texts_are_read_as_a_whole(context, select):
    dense, selecting = planned(PUBLISHED["Llama 3.1 8B"].config, context, select=select, rates=rates.given(1e9))
    assert selecting.read_nbytes == dense.read_nbytes == dense.nbytes
    assert selecting.tokens_per_second == pytest.approx(dense.tokens_per_second)
    assert selecting.sketch_nbytes > 0


@pytest.mark.parametrize("select", [16, 40, 150])
def test_as_many_rows_are_planned_as_attention_reads(monkeypatch, select):
    tokens = 320
    monkeypatch.setattr(selecting, "SELECT_FROM", tokens)
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((tokens, 1, 32), np.float32), np.eye(tokens, dtype=np.float32)[:, None]
    layer = Layer(1, 32, v_head_dim=tokens, dtype="f32", sketch=True)
    with KVCache([layer], max_seq_len=tokens) as cache:
        with cache.batch(tokens - 1) as batch:
            batch.put(0, keys[:-1], values[:-1])
        with cache.batch(1) as batch:
            out = batch.attend(0, keys[-1:], keys[-1:], values[-1:], select=select)
    assert np.count_nonzero(out) == selecting.rows_read(select, tokens)


def test_layers_that_cannot_select_are_read_as_they_are():
    """Layers with windows have no sketches, and the first two layers of attention do not count those without any."""
    kinds = [None, SlidingWindow(512), None, SlidingWindow(8192), ChunkedAttention(4096)]
    layers = [Layer(2, 64, policy=policy) for policy in kinds]
    made = selecting.with_sketches([*layers, Layer(2, 64), Layer(2, 64, share=5)], 16)
    assert [layer.sketch for layer in made] == [False] * 5 + [True, True]


def test_a_layer_reads_another_s_rows_as_that_one_does():
    own = Layer(2, 64)
    made = selecting.with_sketches([own, own, own, Layer(2, 64, share=0), Layer(2, 64, share=2)], 16)
    assert [layer.sketch for layer in made] == [False, False, True, False, True]
    KVCache(made)


@pytest.mark.parametrize(
    ("name", "says"),
    [("DeepSeek V3.2", "select=2048: this deepseek_v32 chooses rows by an indexer"),
     ("DeepSeek V3", "select=2048: no layer of the model can select rows")],
)  # fmt: skip
def test_models_that_cannot_select(name, says):
    with pytest.raises(NotSupportedError, match=says):
        planned(PUBLISHED[name].config, CONTEXT)


# ---- all that a model needs

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
         "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1000, "tie_word_embeddings": True}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128}  # fmt: skip
GEMMA = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 256,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}  # fmt: skip


def first_layers(name):
    """Return the shape of a published model with six of its layers, and those beside them."""
    shape = shapes.read(PUBLISHED[name].config)
    kept = [i for i in range(len(shape.layers)) if i < 6 or shape.num_layers <= i < shape.num_layers + 6]
    lists = {part: tuple(getattr(shape, part)[i] for i in kept) for part in ("layers", "num_heads", "chosen")}
    return replace(shape, **lists, num_layers=6)


def most_held(layers, context, sequences):
    """Return the most bytes that a cache holds while prompts run, one after the other, 512 tokens at once."""
    cache, most = KVCache(layers, max_sequences=sequences), 0
    for seq_id in range(sequences):
        for begin in range(0, context, 512):
            n = min(512, context - begin)
            with cache.batch(n, seq_ids=[seq_id] * n) as batch:
                for i, layer in enumerate(layers):
                    keys, values = (
                        np.ones((n, layer.num_kv_heads, dim), np.float32) for dim in (layer.head_dim, layer.v_head_dim)
                    )
                    batch.put(i, keys, None if layer.value_in_key or not layer.v_head_dim else values)
                most = max(most, cache.nbytes)
    return most


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dtype", ["f16", "int6/int4"])
@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Gemma 3 1B", "gpt-oss 20B", "Mistral 7B v0.1", "DeepSeek V3.2"])
def test_a_cache_that_ran_held_what_was_planned(name, dtype, sequences):
    shape, context = first_layers(name), 5000
    dtype = "int4" if memory_plan.why_not(shape, dtype) else dtype
    (row,) = memory_plan.make(shape, MEMORY, context=context, sequences=sequences, dtypes=[dtype]).rows
    layers = memory_plan.variants(shape, dtype, None, None)[memory_plan.AS_IT_IS]
    assert 1 <= most_held(layers, context, sequences) / row.needs <= 1.1


def test_all_that_is_needed_counts():
    """Memory is just enough for a context if weights, rows, states and the rows of a prompt in windows fit."""
    shape = shapes.read(GEMMA)
    fixed, rows, prompt = 10**9 + 3 * 10**6, 3 * sum(layer.most_bytes(4096) for layer in shape.layers), 3 * 512 * 2048
    for free in (fixed + rows + prompt, fixed + rows + prompt - 1):
        memory = memory_plan.Memory(free, "as given", 10**9, states=10**6)
        (row,) = memory_plan.make(shape, memory, context=4096, sequences=3, dtypes=["f16"]).rows
        assert (row.nbytes, row.prompt_nbytes, row.needs) == (rows, prompt, fixed + rows + prompt)
        assert row.fits is (free == row.needs)
        assert row.longest_context == (4096 if row.fits else 4095)


@pytest.mark.parametrize("missing", [{"weights": None}, {"states": None}])
def test_what_is_not_counted_may_not_fit(missing):
    for free, fits in ((1 << 40, None), (1, False)):
        memory = replace(memory_plan.Memory(free, "as given"), **missing)
        assert {row.fits for row in memory_plan.make(shapes.read(LLAMA), memory, context=100).rows} == {fits}


def test_states_are_counted():
    memory = memory_plan.available_memory(QWEN, 0, 1 << 40)
    assert memory.states == 3 * 4 * (3 * (2 * 4 + 8) * 128 + 8 * 128 * 128)
    assert memory.states_source == "in 3 layers"
    unknown = {**LLAMA, "model_type": "new", "layer_types": ["linear_attention", "full_attention"] * 2}
    memory = memory_plan.available_memory(unknown, 0, 1 << 40)
    assert memory.states is None
    assert "recurrent states of the model_type 'new' are unknown" in memory.states_source


# ---- the speed of a step


def rates_of(shape, by_type, memory=1e9):
    """Return rates at which all layers are read alike."""
    by_kind = {(kind, dtype): rate for kind in kinds_of(shape) for dtype, rate in by_type.items()}
    return rates.Rates(memory, "made up", by_kind, {})


@pytest.mark.parametrize("sequences", [1, 10])
def test_a_step_reads_weights_once_and_states_and_rows_of_all_sequences(sequences):
    memory = memory_plan.Memory(1 << 40, "as given", 10**9, weights_read=10**8, states=10**6)
    shape = shapes.read(LLAMA)
    options = {"context": 1000, "sequences": sequences, "dtypes": ["int6/int4"]}
    options["rates"] = rates_of(shape, {"int6": 1e8, "int4": 2e8})
    keys, values = (4 * 1000 * Layer(2, 64, v_head_dim=0, dtype=dtype).bytes_per_token for dtype in ("int6", "int4"))
    (row,) = memory_plan.make(shape, memory, **options).rows
    assert row.read_nbytes == keys + values == row.nbytes / sequences
    seconds = 10**8 / 1e9 + sequences * (2 * 10**6 / 1e9 + keys / 1e8 + values / 2e8)
    assert row.tokens_per_second == pytest.approx(sequences / seconds)
    (row,) = memory_plan.make(shape, replace(memory, weights_read=None), **options).rows
    assert row.tokens_per_second is None


def test_tokens_of_several_sequences_go_through_more_experts():
    """Of 8 experts, with 2 for a token, 10 tokens that choose at random leave 0.75^10."""
    memory = memory_plan.Memory(1 << 40, "as given", 900, weights_read=100 + 200, experts=800, share_used=0.25)
    assert memory.read_together(1) == 300
    assert memory.read_together(2) == 100 + 800 * 7 / 16
    assert memory.read_together(10) == pytest.approx(100 + 800 * (1 - 0.75**10))


def test_the_most_sequences_that_fit():
    shape, (fixed, states) = shapes.read(GEMMA), (10**9, 10**6)
    each = sum(layer.most_bytes(4096) for layer in shape.layers)
    for spare, wanted in ((-1, 6), (0, 7)):
        free = fixed + 7 * (each + states) + 3 * 512 * 2048 + spare
        memory = memory_plan.Memory(free, "as given", fixed, states=states)
        (row,) = memory_plan.make(shape, memory, context=4096, dtypes=["f16"]).rows
        assert row.most_sequences == wanted
        (row,) = memory_plan.make(shape, memory, context=4096, sequences=7, dtypes=["f16"]).rows
        assert row.fits is (wanted == 7)
    assert memory_plan.make(shape, replace(memory, free=1), context=4096).rows[0].most_sequences == 0


@pytest.mark.parametrize(
    ("name", "is_known"),
    [("Llama 3.1 8B", True), ("Mixtral 8x7B", True), ("gpt-oss 20B", True), ("Gemma 3 4B", True),
     ("DeepSeek V3", False), ("DeepSeek V3.2", False), ("DeepSeek V2 Lite", False), ("Kimi Linear", False),
     ("Falcon 7B", False)],
)  # fmt: skip
def test_a_bandwidth_says_nothing_of_rows_that_many_queries_read(name, is_known):
    """Computing limits attention over latents and index keys."""
    (row,) = planned(PUBLISHED[name].config, CONTEXT, select=None, rates=rates.given(1e9))
    assert row.tokens_per_second is None or row.tokens_per_second == pytest.approx(1e9 / row.read_nbytes)
    assert (row.tokens_per_second is not None) is is_known


def test_cores_compute_as_fast_as_those_that_were_measured():
    latents, keys = rates.Kind(128, 576, 512, True), rates.Kind(64, 128, 0, False)
    measured = rates.Rates(20e9, "measured here", {(latents, "int8"): 4e8, (keys, "int8"): 3e9},
                           {"int8": bench.SelectRates(5e8, 25e9)})  # fmt: skip
    found = rates.of_cores(100e9, 64, measured)
    assert found.memory == 100e9
    assert (found.of_rows(latents, "int8"), found.of_rows(keys, "int8")) == (64 * 4e8, 100e9)
    assert (found.of_sketches("int8"), found.of_selected("int8")) == (32e9, 100e9)
    assert "64 cores" in found.source


def test_each_kind_of_layer_is_measured(monkeypatch):
    """Latents and index keys have rates of their own; weights, the rate of memory."""
    asked = []
    monkeypatch.setattr(
        bench, "decode_rates", lambda shape, dtypes, _: asked.append(shape) or dict.fromkeys(dtypes, 1e8)
    )
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, seconds: 3e10)
    shape = shapes.read(PUBLISHED["DeepSeek V3.2"].config)
    found = rates.measure(shape, ["int8"], context=CONTEXT, threads=2)
    assert [(one.num_heads, one.head_dim, one.v_dim, one.threads) for one in asked] == [
        (128, 576, 512, 2),
        (64, 128, 0, 2),
    ]
    assert (found.memory, {*found.rows.values()}) == (3e10, {1e8})
    assert {*found.rows} == {(kind, "int8") for kind in kinds_of(shape)}


# ---- the weights of a step

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = 4 * 8 * (3 * 512 * 2048 + 512)  # parameters


def test_a_token_reads_the_experts_that_it_goes_through():
    dense, mixed = (memory_plan.available_memory(config, "f16", 1 << 40) for config in (LLAMA, MIXTRAL))
    assert dense.weights_read == dense.weights
    assert (mixed.experts, mixed.share_used) == (2 * EXPERTS, 0.25)
    assert mixed.weights - mixed.weights_read == 2 * EXPERTS * 3 // 4
    assert memory_plan.available_memory(LLAMA, 0, 1 << 40).weights_read == 0
    assert memory_plan.available_memory({**MIXTRAL, "quantization_config": 4}, None, 1 << 40).weights_read is None


def test_a_token_reads_a_row_of_the_input_embedding():
    untied = {**LLAMA, "tie_word_embeddings": False}
    found = weighing.weigh(untied, "f16")
    assert found.nbytes - found.read == 2 * 1000 * 512
    assert weighing.weigh(untied, 10**9).read == round(10**9 * found.read / found.nbytes)


PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.mark.parametrize(("given", "is_mixed"), [(None, True), ("mxfp4", True), (10**9, True), ("q4_0", False)])
def test_experts_may_be_packed_alone(given, is_mixed):
    """As gpt-oss has it: the other parameters stay bf16."""
    config = {**MIXTRAL, "dtype": "bfloat16", "quantization_config": PACKED}
    found = weighing.weigh(config, given)
    others = weighing.weigh(MIXTRAL, "f16").num_parameters - EXPERTS
    experts = EXPERTS // 32 * (17 if is_mixed else 18)
    others = 2 * others if is_mixed else -(-others // 32) * 18
    scale = found.nbytes / (experts + others)
    assert scale == 1 or given == 10**9
    assert found.read == pytest.approx(scale * (others + experts / 4), abs=1)
    assert found.experts == pytest.approx(scale * experts, abs=1)
    if given != 10**9:
        assert found.source.endswith(", experts in mxfp4, others in bf16" if is_mixed else "in q4_0")


def test_weights_that_are_packed_alike():
    found = weighing.weigh({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    assert found.nbytes == found.num_parameters
    assert found.source.endswith("parameters in fp8")


# ---- types


def test_types_that_a_plan_has_by_default():
    shape = shapes.read(LLAMA)
    usual = ["f16", "int8", "int6", "int6/int4", "int4"]
    for dtype, own in (("bfloat16", ["bf16"]), ("float16", []), ("float8_e4m3fn", []), (None, [])):
        assert memory_plan.usual_types(shape, {**LLAMA, "dtype": dtype}) == own + usual
    assert memory_plan.every_type(shape) == [*shape.dtypes, "int6/int4"]
    latents = shapes.read(PUBLISHED["DeepSeek V3"].config)
    assert memory_plan.usual_types(latents) == ["f16", "int8", "int6", "int4"]
    assert "values of this deepseek_v3 lie in its keys" in memory_plan.why_not(latents, "int6/int4")
    assert memory_plan.why_not(latents, "int8/int8") is None
