"""Layers with a row for every n-th token, in Python: whose rows arrays are, by position, and what is refused.

tests/c/edit/test_stride.c holds what becomes of such rows, and tests/c/attend which of them a query sees and chooses.
"""

import dataclasses

import numpy as np
import pytest

import kvcache
from kvcache import FullAttention, KVCache, Layer, NotSupportedError

N, DIM, HEADS = 4, 8, 2
PLAIN, STRIDED, KEYS = 0, 1, 2
Q = np.random.default_rng(1).standard_normal((11, HEADS, DIM)).astype(np.float32)


def layers(rope=False, stride=N):
    """An ordinary layer, a layer with a stride, and its index keys."""
    strided = Layer(HEADS, DIM, dtype="f32", policy=FullAttention(stride=stride), rope=rope)
    return [
        Layer(HEADS, DIM, dtype="f32", rope=rope),
        strided,
        dataclasses.replace(strided, num_kv_heads=1, v_head_dim=0),
    ]


def make(rope=False, **options):
    return KVCache(layers(rope), **{"max_sequences": None, "block_size": 8, **options})


def rows_of(positions, tag=0):
    """The keys of tokens at these positions, the same in each layer; their values are the negated keys."""
    rows = [np.random.default_rng((p, tag)).standard_normal((HEADS, DIM)) for p in positions]
    return np.array(rows, np.float32).reshape(-1, HEADS, DIM)


def complete(positions):
    return [int(p) for p in positions if (p + 1) % N == 0]


def put_all(batch):
    k = rows_of(complete(batch.positions))
    batch.put(STRIDED, k, -k)
    batch.put(KEYS, k[:, :1])
    k = rows_of(batch.positions)
    batch.put(PLAIN, k, -k)


def feed(cache, n):
    with cache.batch(n) as batch:
        put_all(batch)


def check(cache, positions):
    """The strided layers hold rows of these tokens, and only of complete blocks."""
    stored = complete(positions)
    for layer in (STRIDED, KEYS):
        assert cache.positions(layer=layer).tolist() == stored
        assert cache.seq_len(layer=layer) == len(stored)
        wanted = rows_of(stored).transpose(1, 0, 2)
        np.testing.assert_array_equal(cache.gather(layer)[0], wanted if layer == STRIDED else wanted[:1])


def test_a_batch_that_completes_no_block_puts_no_rows():
    cache = make()
    for at in range(2):
        feed(cache, 3)
        check(cache, range(3 * at + 3))


def test_rows_are_put_with_queries_and_in_parts():
    cache, k = make(), rows_of(complete(range(11)))
    with cache.batch(11) as batch:
        batch.put(PLAIN, rows_of(range(11)), -rows_of(range(11)))
        out = batch.attend(STRIDED, Q, k, -k)
        np.testing.assert_allclose(out, batch.attend(PLAIN, Q, chosen=[[3, 7]] * 11), atol=1e-6)
        batch.put(KEYS, k[:1, :1])
        with pytest.raises(ValueError, match="put in layer 2 before"):
            batch.put(KEYS, k[1:, :1], first=3)
        batch.put(KEYS, k[1:, :1], first=4)
    check(cache, range(11))


def test_the_number_of_rows_must_be_right():
    k, positions = rows_of(range(3)), [*range(8)]
    with make().batch(8) as batch:
        for call in (
            lambda: batch.put(STRIDED, k, k),
            lambda: batch.attend(STRIDED, Q[:8], k, k),
            lambda: batch.put(STRIDED, rows_of(positions), rows_of(positions)),
        ):
            with pytest.raises(ValueError, match="takes one for each position"):
                call()
        batch.put(PLAIN, rows_of(positions), rows_of(positions))
        with pytest.raises(ValueError, match="token 3 of the batch was not put in layer 1"):
            batch.commit()
        batch.abort()


def test_lock_step():
    cache = make()
    k = np.stack([rows_of([3, 7], 1), rows_of([3, 7], 2)]).transpose(0, 2, 1, 3)
    with cache.batch(positions=[*range(9), *range(9)], seq_ids=[5] * 9 + [2] * 9) as batch:
        batch.put(STRIDED, k, -k, layout="BHTD")
        batch.put(KEYS, k[:, :1], layout="BHTD")
        batch.put(PLAIN, rows_of(range(18)), rows_of(range(18)))
    for b, seq_id in enumerate([5, 2]):
        np.testing.assert_array_equal(cache.gather(STRIDED, seq_id=seq_id)[0], k[b])
        np.testing.assert_array_equal(cache.gather(KEYS, seq_id=seq_id)[0], k[b, :1])


def test_rows_are_written_in_place():
    cache = make()
    with cache.batch(9) as batch:
        with pytest.raises(ValueError, match="token 0 of the batch, at position 0, has no row in layer 1"):
            batch.slots(STRIDED)
        k, v = batch.slots(STRIDED, first=3)
        assert k.shape == (HEADS, 2, DIM)
        k[:] = rows_of([3, 7]).transpose(1, 0, 2)
        v[:] = -k
        batch.written(STRIDED, 3, 6)
        batch.put(KEYS, rows_of([3, 7])[:, :1])
        batch.put(PLAIN, rows_of(range(9)), rows_of(range(9)))
    check(cache, range(9))


def test_choices_name_rows_by_their_positions_or_blocks():
    cache = make()
    feed(cache, 37)
    with cache.batch(6) as batch:
        put_all(batch)
        q = np.tile(rows_of([11])[0, :1], (6, 1, 1)) * 10  # the row at 11 is the best by far
        assert (batch.choose(KEYS, q, width=1) == 11).all()
        assert (batch.choose(KEYS, q, width=1, block=4) == 2).all()
        with pytest.raises(ValueError, match="multiple of the layer's stride"):
            batch.choose(KEYS, q, width=1, block=6)
        whole = batch.attend(STRIDED, Q[:6], chosen=[[7, 11]] * 6)
        for entries, options in (([4, 8], {}), ([1, 2], {"chosen_block": 4}), ([3, 5], {"chosen_block": 2})):
            np.testing.assert_array_equal(batch.attend(STRIDED, Q[:6], chosen=[entries] * 6, **options), whole)


def test_rows_are_read_and_replaced_by_position():
    cache = make()
    feed(cache, 20)
    assert cache.get(STRIDED, 6) is None
    np.testing.assert_array_equal(cache.get(STRIDED, 7)[0], rows_of([7])[0])
    np.testing.assert_array_equal(cache.extract(STRIDED, 4, 13)[0], rows_of([7, 11]).transpose(1, 0, 2))
    new = rows_of([7, 11, 15], 9).transpose(1, 0, 2)
    assert cache.inject(STRIDED, 4, new[:, :2], -new[:, :2]) == 2
    np.testing.assert_array_equal(cache.gather(STRIDED)[0][:, 1:3], new[:, :2])
    with pytest.raises(IndexError, match="layer 1: 23 to 27"):
        cache.inject(STRIDED, 16, new, new)
    assert [p for span in cache.spans(STRIDED) for p in span.positions.tolist()] == [3, 7, 11, 15, 19]
    runs = [run for block in cache.blocks(STRIDED) for run in block.holders.get(0, [])]
    assert [(run.position, run.count) for run in runs] == [(3, 5)]
    assert cache.weights(STRIDED, Q[:3], positions=[2, 8, 12]).shape == (HEADS, 5)
    with cache.batch(4) as batch:
        put_all(batch)
        k, _, mask = batch.dense(STRIDED)
        np.testing.assert_array_equal(k[:, -1], rows_of([23])[0])
        assert np.isfinite(mask).sum(axis=-1).tolist() == [5, 5, 5, 6]


def test_saved_states(tmp_path):
    cache = make()
    feed(cache, 15)
    cache.save(tmp_path / "state")
    with KVCache.load(tmp_path / "state") as loaded:
        assert loaded.layers == cache.layers
        feed(loaded, 6)
        check(loaded, range(21))
    words = r"stride=4\) in the file, and FullAttention\(stride=2\) in the cache"
    with pytest.raises(kvcache.StateFormatError, match=words):
        KVCache(layers(stride=2)).restore(tmp_path / "state")


def test_what_a_stride_does_not_go_with():
    cache = make()
    feed(cache, 12)
    for call in (lambda: cache.remove(4, 6), lambda: cache.shift(8, None, 3)):
        with pytest.raises(NotSupportedError, match="would cut some of its rows"):
            call()
    with pytest.raises(NotSupportedError, match="no layer has a row for each token"):
        KVCache(layers()[1:])
    with pytest.raises(ValueError, match="stride=0"):
        FullAttention(stride=0)
    with pytest.raises(NotSupportedError, match="not each token has a row to select"):
        Layer(2, 32, dtype="f16", sketch=True, policy=FullAttention(stride=2))
    with pytest.raises(NotSupportedError, match="a block_size that is a multiple"):
        kvcache.PrefixCache(make(block_size=6), fingerprint="model")
    with pytest.raises(NotSupportedError, match="reuse_min_tokens is 16"):
        kvcache.PrefixCache(make(rope=kvcache.Rope((1.0, 0.5))), fingerprint="model", reuse_min_tokens=16)


def test_figures_and_words():
    assert repr(FullAttention()) == "FullAttention()"
    assert repr(FullAttention(stride=4)) == "FullAttention(stride=4)"
    layer = layers()[STRIDED]
    assert layer.most_bytes(1000) == layer.bytes_per_token * 250
    assert FullAttention() == FullAttention(stride=1) != FullAttention(stride=2)
