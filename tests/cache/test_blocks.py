"""KVCache.blocks agrees with what the rest of the cache says of where rows lie."""

import dataclasses

from support.saved_states import feed

import kvcache
from kvcache import Run

FULL = kvcache.FullAttention()


def new_cache(policy=FULL, **options):
    layers = len(policy) if isinstance(policy, list) else 1
    options = {"max_sequences": None, "block_size": 4, "rope": False} | options
    return kvcache.KVCache(layers, 1, 2, None, policy=policy, **options)


def test_append():
    cache = new_cache()
    feed(cache, 0, 6)
    first, second = cache.blocks()
    assert first.nbytes == second.nbytes > 4 * cache.layers[0].bytes_per_token
    assert dataclasses.asdict(first) == {
        "index": 0, "num_slots": 4, "filled": 4, "live": 4, "references": 1, "resident": 4, "is_held": False,
        "nbytes": first.nbytes,
        "holders": {0: [{"slot": 0, "count": 4, "position": 0, "delta": 0, "in_batch": False}]},
    }  # fmt: skip
    assert (second.filled, second.live, second.resident) == (2, 2, 2)
    assert second.holders == {0: [Run(0, 2, 4, 0, False)]}


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
