"""Batches that restore some layers (`replaced`), from rows as `gather` returns them.

tests/c/pass/test_restore.c, and random steps in C, hold what a sequence is after them.
"""

import numpy as np
import pytest

import kvcache

STRATEGIES = ["always", "disabled", kvcache.LongSequencesOnly(1000), kvcache.Adaptive()]


def new_cache(strategy="always"):
    policy = [kvcache.FullAttention(), kvcache.SlidingWindow(8)] * 2
    return kvcache.KVCache(4, 2, 8, None, policy=policy, max_sequences=None, dtype="f32", strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_restored_sequence_goes_on_whatever_the_strategy(strategy):
    original, cache = new_cache(), new_cache(strategy)
    rows = np.random.default_rng(1).standard_normal((50, 2, 8)).astype(np.float32)
    for begin, end in ((0, 40), (40, 50)):
        with original.batch(end - begin) as batch:
            for layer in range(4):
                batch.put(layer, rows[begin:end] + layer, rows[begin:end])
    for layers in ([0, 2], [1, 3]):
        positions = original.positions(layer=layers[0])
        order = np.random.default_rng(3).permutation(len(positions))
        with cache.batch(positions=positions[order], replaced=layers) as batch:
            with pytest.raises(ValueError, match="the batch restores rows"):
                batch.attend(layers[0], rows[:8])
            for layer in layers:
                batch.put(layer, *(x[:, order] for x in original.gather(layer)), layout="HTD")
    assert cache.next_position() == 50
    assert cache.can_resume(50)
    for layer, length in enumerate([50, 8, 50, 8]):
        assert cache.seq_len(layer=layer) == length
        np.testing.assert_array_equal(cache.gather(layer), original.gather(layer))
