"""KVCache.blocks agrees with what the rest of the cache says of where rows lie."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

import kvcache
from kvcache import Run

FULL = kvcache.FullAttention()


def feed(cache, seq_id, num_tokens):
    first = cache.next_position(seq_id)
    with cache.batch(positions=range(first, first + num_tokens), seq_ids=[seq_id] * num_tokens) as batch:
        put(cache, batch)


def put(cache, batch):
    for layer in range(cache.num_layers):
        batch.put(layer, *np.ones((2, len(batch), 1, 2), np.float32))


def new_cache(policy=FULL, **options):
    layers = len(policy) if isinstance(policy, list) else 1
    options = {"max_sequences": None, "block_size": 4, "rope": False} | options
    return kvcache.KVCache(layers, 1, 2, None, policy=policy, **options)


def check(cache):
    """All that blocks() says follows from positions() and stats()."""
    layers = range(cache.num_layers)
    stats, sums = cache.stats(), Counter()
    for layer in layers:
        blocks = cache.blocks(layer)
        held = {}
        for i, block in enumerate(blocks):
            slots = Counter(
                slot
                for runs in block.holders.values()
                for run in runs
                for slot in range(run.slot, run.slot + run.count)
            )
            assert block.index == i
            assert block.live == len(slots)
            assert block.references == max(slots.values(), default=0)
            assert block.is_free == (not slots and not block.is_held)
            assert max(slots, default=-1) < block.filled <= block.resident <= block.num_slots
            for seq_id, runs in block.holders.items():
                held.setdefault(seq_id, []).extend(
                    p for run in runs for p in range(run.position, run.position + run.count)
                )
            if cache.layers[layer].policy not in [other.policy for other in cache.layers[:layer]]:
                sums["live_slots"] += block.live
                sums["wasted_slots"] += block.filled - block.live
                sums["blocks_free" if block.is_free else "blocks_in_use"] += 1
        assert list(held) == list(dict.fromkeys(seq_id for block in blocks for seq_id in block.holders))
        assert {seq_id: sorted(positions) for seq_id, positions in held.items()} == {
            seq_id: sorted(cache.positions(seq_id=seq_id, layer=layer).tolist())
            for seq_id in cache.sequences
            if cache.seq_len(seq_id, layer=layer)
        }
    for name in ("live_slots", "wasted_slots", "blocks_in_use", "blocks_free"):
        assert sums[name] == stats[name]
    cache.validate()


def test_an_empty_cache_has_none():
    assert new_cache().blocks() == []


def test_append():
    cache = new_cache()
    feed(cache, 0, 6)
    first, second = cache.blocks()
    assert dataclasses.asdict(first) == {
        "index": 0, "num_slots": 4, "filled": 4, "live": 4, "references": 1, "resident": 4, "is_held": False,
        "holders": {0: [{"slot": 0, "count": 4, "position": 0, "delta": 0, "in_batch": False}]},
    }  # fmt: skip
    assert (second.filled, second.live, second.resident) == (2, 2, 2)
    assert second.holders == {0: [Run(0, 2, 4, 0, False)]}
    check(cache)


def test_fork():
    cache = new_cache()
    feed(cache, 5, 6)
    cache.fork(5, -1)
    feed(cache, 5, 1)
    feed(cache, -1, 2)
    assert [block.references for block in cache.blocks()] == [2, 2, 1]
    assert cache.blocks()[1].holders == {
        -1: [Run(0, 2, 4, 0, False), Run(3, 1, 6, 0, False)],
        5: [Run(0, 3, 4, 0, False)],
    }
    assert list(cache.blocks()[2].holders) == [-1]
    check(cache)


def test_clear_and_compact():
    cache = new_cache()
    for seq_id in range(3):
        feed(cache, seq_id, 6)
    cache.remove(1, 5, seq_id=1)
    check(cache)
    cache.clear(0)
    check(cache)
    assert [block.is_free for block in cache.blocks()] == [True, True, False, False, False, False]
    assert cache.blocks()[0].resident == 4  # kept for reuse, with its memory
    cache.compact()
    check(cache)
    assert all(block.live == block.filled == block.resident for block in cache.blocks())
    assert not any(block.is_free for block in cache.blocks())
    cache.clear()
    cache.compact()
    assert cache.blocks() == []


def test_a_batch_holds_its_slots():
    cache = new_cache()
    feed(cache, 0, 3)
    with cache.batch(2) as batch:
        put(cache, batch)
        assert cache.blocks()[0].holders == {0: [Run(0, 3, 0, 0, False), Run(3, 1, 3, 0, True)]}
        assert cache.blocks()[1].holders == {0: [Run(0, 1, 4, 0, True)]}
    assert cache.blocks()[0].holders == {0: [Run(0, 4, 0, 0, False)]}
    check(cache)


def test_a_view_holds_its_block():
    cache = new_cache(dtype="f32")
    feed(cache, 0, 3)
    view = cache.keys(0, copy=False)
    cache.clear()
    (block,) = cache.blocks()
    assert block.is_held
    assert not block.is_free
    assert (block.live, block.filled, block.holders) == (0, 3, {})
    del view
    assert cache.blocks()[0].is_free


def test_cross_attention_and_layers_that_share():
    cross, full = kvcache.CrossAttention(6), kvcache.FullAttention()
    cache = kvcache.KVCache(4, 1, 2, None, policy=[full, cross, full, None], share=[None, None, 0, None], block_size=4)
    with cache.batch(2) as batch:
        batch.put(0, *np.ones((2, 2, 1, 2), np.float32))
        batch.put(1, *np.ones((2, 5, 1, 2), np.float32))
    assert cache.blocks(2) == cache.blocks(0)
    assert [(block.num_slots, block.live) for block in cache.blocks(1)] == [(6, 5)]
    assert cache.blocks(3) == []


@pytest.mark.parametrize("layer", [1, -1])
def test_no_such_layer(layer):
    with pytest.raises(IndexError, match=rf"layer={layer}: the layers are 0 to 0"):
        new_cache().blocks(layer)


def test_a_closed_cache_has_none():
    cache = new_cache()
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache.blocks()
