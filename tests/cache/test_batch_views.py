"""`Batch.keys`, `values` and `spans`: what the open batch holds, where attention reads it."""

import gc

import numpy as np
import pytest

import kvcache


def rows(n, seed=0, heads=2, dim=8):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, n, heads, dim)).astype(np.float32)


def feed(cache, n, seed=0, **how):
    k, v = rows(n, seed)
    with cache.batch(n, **how) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, k, v)
    return k, v


def shown(k):
    return k.swapaxes(0, 1)


def test_a_view_includes_the_running_token():
    cache = kvcache.KVCache(2, 2, 8, 64, dtype="f32")
    k, v = feed(cache, 5)
    more_k, more_v = rows(1, 1)
    with cache.batch(1) as batch:
        assert batch.keys(0).shape == (2, 5, 8)  # nothing was put yet
        batch.put(0, more_k, more_v)
        keys, values = batch.keys(0, copy=False), batch.values(0, copy=False)
        assert np.array_equal(shown(keys), np.concatenate([k, more_k]))
        assert np.array_equal(shown(values), np.concatenate([v, more_v]))
        assert np.shares_memory(keys, cache.keys(0, copy=False))
        assert not keys.flags.writeable
        (span,) = batch.spans(0)
        assert span.positions.tolist() == [0, 1, 2, 3, 4, 5]
        assert span.delta == 0
        assert batch.keys(1).shape == cache.keys(0).shape == (2, 5, 8)
        batch.put(1, more_k, more_v)
    assert np.shares_memory(keys, cache.keys(0, copy=False))
    assert np.array_equal(keys, cache.keys(0))
    assert np.array_equal(values, cache.values(0))


def test_the_only_sequence_of_a_batch_is_meant():
    cache = kvcache.KVCache(1, 2, 8, max_sequences=4, dtype="f32")
    k, v = rows(3)
    with cache.batch(3, seq_ids=[7, 7, 7]) as batch:
        batch.put(0, k, v)
        assert np.array_equal(shown(batch.keys(0)), k)
        assert np.array_equal(shown(batch.values(0)), v)
        assert [span.positions.tolist() for span in batch.spans(0)] == [[0, 1, 2]]


def test_a_view_keeps_the_rows_of_an_aborted_batch():
    cache = kvcache.KVCache(1, 2, 8, 64, dtype="f32")
    k, v = rows(3)
    batch = cache.batch(3)
    batch.put(0, k, v)
    keys = batch.keys(0)
    batch.abort()
    feed(cache, 8, 2)
    assert np.array_equal(shown(keys), k)
    with pytest.raises(BufferError):
        cache.compact()
    del keys
    gc.collect()
    cache.compact()
    cache.validate()
    with pytest.raises(ValueError, match="the batch has ended"):
        batch.keys(0)


def test_what_cannot_be_shown():
    policy = [kvcache.FullAttention(), kvcache.FullAttention(), None]
    cache = kvcache.KVCache(3, 2, 32, 64, dtype=["q8_0", "bf16", "f32"], policy=policy)
    with cache.batch(1) as batch:
        batch.put(0, *rows(1, dim=32))
        batch.put(1, *rows(1, dim=32))
        with pytest.raises(ValueError, match=r"q8_0, which no array can show: dense\(\) decodes it"):
            batch.keys(0)
        assert batch.keys(1).shape == (2, 1, 32)
        assert batch.keys(1).itemsize == 2
        with pytest.raises(ValueError, match="layer 2 has no attention"):
            batch.spans(2)
    with cache.batch(positions=[0], replaced=[0, 1]) as batch:
        batch.put(0, *rows(1, dim=32))
        batch.put(1, *rows(1, dim=32))
        with pytest.raises(ValueError, match="restores"):
            batch.values(1)
