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


def test_pieces_are_copied_and_tokens_in_between_may_be_missing():
    cache = kvcache.KVCache(1, 2, 8, 64, dtype="f32", block_size=4)
    k, v = feed(cache, 6)
    more_k, more_v = rows(5, 1)
    with cache.batch(5) as batch:
        batch.put(0, more_k[:1], more_v[:1])
        batch.put(0, more_k[3:], more_v[3:], first=3)
        keys = np.concatenate([k, more_k[:1], more_k[3:]])
        assert np.array_equal(shown(batch.keys(0)), keys)
        assert np.concatenate([span.positions for span in batch.spans(0)]).tolist() == [*range(7), 9, 10]
        assert np.array_equal(np.concatenate([shown(span.k) for span in batch.spans(0)]), keys)
        with pytest.raises(ValueError, match="pieces"):
            batch.keys(0, copy=False)
        assert batch.keys(0, copy=True).flags.writeable
        batch.put(0, more_k[1:3], more_v[1:3], first=1)
        assert np.array_equal(shown(batch.values(0)), np.concatenate([v, more_v]))


def test_moved_keys_are_rotated_and_new_ones_are_not():
    cache = kvcache.KVCache(1, 2, 8, 64, dtype="f32", rope=kvcache.Rope(10_000.0 ** -(np.arange(4) / 4)))
    feed(cache, 6)
    cache.remove(1, 3)
    new_k, new_v = rows(1, 3)
    with cache.batch(1) as batch:
        batch.put(0, new_k, new_v)
        assert [span.delta for span in batch.spans(0)] == [0, -2, 0]
        assert np.array_equal(shown(batch.keys(0)), np.concatenate([shown(cache.keys(0)), new_k]))
        with pytest.raises(ValueError, match="moved"):
            batch.keys(0, copy=False)


def test_sequences_of_a_batch():
    cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=None, dtype="f32")
    feed(cache, 2, seq_ids=[7, 7])
    feed(cache, 2, 5, seq_ids=[9, 9])
    k, v = rows(3, 1)
    with cache.batch(3, seq_ids=[7, 8, 7]) as batch:
        batch.put(0, k, v)
        assert np.array_equal(shown(batch.keys(0, seq_id=7))[2:], k[[0, 2]])
        assert np.array_equal(shown(batch.keys(0, seq_id=8)), k[[1]])
        with pytest.raises(ValueError, match="seq_id=None: the batch has 2 sequences"):
            batch.keys(0)
        with pytest.raises(ValueError, match="seq_id is 9: the batch has no token of that sequence"):
            batch.values(0, seq_id=9)
        with pytest.raises(IndexError):
            batch.spans(1, seq_id=7)


def test_rows_that_an_encoder_was_given_take_the_place_of_stored_ones():
    policy = [kvcache.FullAttention(), kvcache.CrossAttention(8)]
    cache = kvcache.KVCache(2, 2, 8, 64, dtype="f32", policy=policy)
    x = rows(1)
    for n in (5, 3):
        image = rows(n, n)
        with cache.batch(1) as batch:
            batch.put(0, *x)
            if n == 3:
                assert batch.keys(1).shape == (2, 5, 8)
            batch.put(1, *image)
            assert np.array_equal(shown(batch.keys(1)), image[0])


@pytest.mark.parametrize("strategy", ["disabled", kvcache.LongSequencesOnly(40)])
def test_sequences_that_are_not_stored(strategy):
    cache = kvcache.KVCache(2, 2, 8, 64, dtype="f32", strategy=strategy)
    k, v = rows(5)
    with cache.batch(5) as batch:
        batch.attend(0, k, k, v)
        keys = batch.keys(0, copy=False)
        assert np.array_equal(shown(keys), k)
        batch.attend(1, k, -k, v)
        assert np.array_equal(shown(batch.keys(1)), -k)
        assert np.array_equal(shown(keys), k)  # the view keeps the rows
        del keys
        gc.collect()
    cache.validate()
    with cache.batch(5) as batch:
        batch.attend(0, k, k, v)
        batch.attend(1, k, -k, v)
        with pytest.raises(kvcache.RowsGoneError):
            batch.keys(0)
    cache.close()


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
