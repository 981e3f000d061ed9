"""`kvcache plan` computes memory and speed of a model: here without running the command."""

import copy

import numpy as np
import pytest
from support.published_models import PUBLISHED

from kvcache import ChunkedAttention, KVCache, Layer, NotSupportedError, SlidingWindow, selecting
from kvcache.models import shapes
from kvcache.tools import bench, memory_plan

CONTEXT = 131_072
BLOCKS = {"sparse_topk_blocks": 16, "sparse_block_size": 128}
CHOSEN = 2_048  # rows
MEMORY = memory_plan.Memory(1 << 40, "the machine")


def bytes_read(config, context):
    """Return the bytes that attention is said to read for a token."""
    shape = shapes.read(config)
    plan = memory_plan.make(shape, MEMORY, context=context, dtypes=["f16"], rates=memory_plan.Rates.of_bandwidth(1e9))
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
    rates = memory_plan.Rates(1e9, "made up", {"f16": 1e9}, {"f16": bench.SelectRates(sketches=5e8, rows=2.5e8)})
    dense, selecting = planned(PUBLISHED["Llama 3.1 8B"].config, CONTEXT, rates=rates)
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
    dense, selecting = planned(PUBLISHED["Llama 3.1 8B"].config, context, select=select, rates=memory_plan.Rates.of_bandwidth(1e9))
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
