"""Batches that restore some layers: what a sequence is after them, and goes on as."""

import numpy as np
import pytest

import kvcache

WINDOW = 8
POLICY = [
    kvcache.FullAttention(),
    kvcache.SlidingWindow(WINDOW),
    kvcache.FullAttention(),
    kvcache.SlidingWindow(WINDOW),
]
FULL, WINDOWS = [0, 2], [1, 3]


def new_cache(policy=None, **options):
    policy = policy or POLICY
    return kvcache.KVCache(4, 2, 8, None, policy=policy, max_sequences=None, dtype="f32", block_size=16, **options)


def rows(layer, positions, heads=2):
    """What tokens put: the same wherever, and whenever, they are fed."""
    positions = np.asarray(positions)[:, None, None]
    return np.sin(positions * 1.7 + layer + np.arange(heads)[:, None] * 3 + np.arange(8) * 0.37).astype(np.float32)


def feed(cache, begin, end, seq_id=0):
    """Feed positions [begin, end); return what the tokens attend to in each layer."""
    positions = range(begin, end)
    with cache.batch(positions=positions, seq_ids=[seq_id] * (end - begin)) as batch:
        return [batch.attend(i, rows(9, positions, 4), rows(i, positions), rows(i, positions)) for i in range(4)]


def save(cache, layer):
    """The positions of a layer's rows, and the rows, [num_kv_heads, tokens, head_dim]."""
    return cache.positions(layer=layer), cache.gather(layer)


def restore(cache, saved, layers, seq_id=0):
    positions = saved[layers[0]][0]
    order = np.random.default_rng(3).permutation(len(positions))
    with cache.batch(positions=positions[order], seq_ids=[seq_id] * len(order), replaced=layers) as batch:
        for layer in layers:
            batch.put(layer, *(x[:, order] for x in saved[layer][1]), layout="HTD")


def assert_alike(cache, seq_id, original, position):
    original.fork(0, 99)
    for count in (1, 5, 12):
        ours, theirs = feed(cache, position, position + count, seq_id), feed(original, position, position + count, 99)
        np.testing.assert_array_equal(ours, theirs)
        position += count


def test_a_state_goes_on_as_the_original_did():
    original, cache = new_cache(), new_cache()
    feed(original, 0, 40)
    feed(original, 40, 50)
    feed(cache, 0, 70)
    saved = [save(original, layer) for layer in range(4)]
    assert [len(positions) for positions, _ in saved] == [50, 8, 50, 8]
    restore(cache, saved, FULL)
    with pytest.raises(kvcache.RowsGoneError, match=r"layer [01] lacks"):
        cache.batch(1)
    restore(cache, saved, WINDOWS)
    assert cache.next_position() == 50
    assert cache.can_resume(50)
    assert [cache.seq_len(layer=layer) for layer in range(4)] == [50, 8, 50, 8]
    assert_alike(cache, 0, original, 50)
    cache.validate()


def test_whatever_the_strategy_it_is_stored():
    saving = new_cache()
    feed(saving, 0, 20)
    for strategy in ("disabled", kvcache.LongSequencesOnly(1000), kvcache.Adaptive()):
        cache = new_cache(strategy=strategy)
        for layers in (FULL, WINDOWS):
            restore(cache, [save(saving, layer) for layer in range(4)], layers)
        assert cache.seq_len() == 20
        assert_alike(cache, 0, saving, 20) if not isinstance(strategy, str) else None


def test_nothing_attends_in_it():
    cache = new_cache()
    feed(cache, 0, 20)
    batch = cache.batch(positions=[0, 1], replaced=FULL)
    x = rows(0, [0, 1])
    for call in (
        lambda: batch.attend(0, x),
        lambda: batch.attend(0, x, x, x),
        lambda: batch.dense(0),
    ):
        with pytest.raises(ValueError, match="the batch restores rows"):
            call()
    with pytest.raises(ValueError, match="layer 1 is not among the layers that the batch restores"):
        batch.put(1, x, x)
    with pytest.raises(ValueError, match="layer 1 is not among the layers that the batch restores"):
        batch.slots(1)
    with pytest.raises(ValueError, match="token 0 of the batch was not put in layer 0"):
        batch.commit()
    batch.abort()
