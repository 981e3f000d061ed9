"""What `kvcache plan` computes of a model, without a run of the command."""

import copy

import pytest
from support.published_models import PUBLISHED

from kvcache.models import shapes
from kvcache.tools import memory_plan

CONTEXT = 131_072
BLOCKS = {"sparse_topk_blocks": 16, "sparse_block_size": 128}
CHOSEN = 2_048  # rows


def bytes_read(config, context):
    """Return the bytes that attention is said to read for a token."""
    shape = shapes.read(config)
    memory = memory_plan.Memory(1 << 40, "the machine", 0, "there is no model", None)
    plan = memory_plan.make(shape, memory, context=context, dtypes=["f16"], rates={"f16": 1e9})
    return 1e9 / plan.rows[0].tokens_per_second, [layer.most_bytes(context) for layer in shape.layers], shape.chosen


@pytest.mark.parametrize(("name", "num_choosing"), [("DeepSeek V3.2", 61), ("MiniMax M3", 57)])
def test_chosen_rows_alone_are_read(name, num_choosing):
    """Of layers that choose, as many rows count as they choose; of index keys and of other layers, all."""
    config = copy.deepcopy(PUBLISHED[name].config)
    if name == "MiniMax M3":
        config["text_config"]["sparse_attention_config"] |= BLOCKS
    read, own, chosen = bytes_read(config, CONTEXT)
    assert chosen.count(CHOSEN) == num_choosing
    wanted = [nbytes * CHOSEN / CONTEXT if rows else nbytes for nbytes, rows in zip(own, chosen, strict=True)]
    assert read == pytest.approx(sum(wanted))
    short, own, _ = bytes_read(config, CHOSEN // 2)
    assert short == pytest.approx(sum(own))


def test_layers_that_do_not_choose_are_read_as_a_whole():
    read, own, chosen = bytes_read(PUBLISHED["Llama 3.1 8B"].config, CONTEXT)
    assert read == pytest.approx(sum(own))
    assert set(chosen) == {None}
