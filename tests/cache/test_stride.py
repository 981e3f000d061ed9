"""Layers with a row for every n-th token, in Python: whose rows arrays are, by position.

tests/c/edit/test_stride.c holds what becomes of such rows, and tests/c/attend which of them a query sees and chooses.
"""

import dataclasses

import numpy as np

from kvcache import FullAttention, KVCache, Layer

N, DIM, HEADS = 4, 8, 2
PLAIN, STRIDED, KEYS = 0, 1, 2
Q = np.random.default_rng(1).standard_normal((11, HEADS, DIM)).astype(np.float32)


def make():
    """A cache of an ordinary layer, a layer with a stride, and its index keys."""
    strided = Layer(HEADS, DIM, dtype="f32", policy=FullAttention(stride=N))
    keys = dataclasses.replace(strided, num_kv_heads=1, v_head_dim=0)
    return KVCache([Layer(HEADS, DIM, dtype="f32"), strided, keys], max_sequences=None, block_size=8)


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
    put_plain(batch)


def put_plain(batch):
    k = rows_of(batch.positions)
    batch.put(PLAIN, k, -k)


def feed(cache, n):
    with cache.batch(n) as batch:
        put_all(batch)


def check(cache, positions, seq_id=0, tag=0):
    """The strided layers hold rows of these tokens, and only of complete blocks."""
    stored = complete(positions)
    wanted = rows_of(stored, tag).transpose(1, 0, 2)
    for layer in (STRIDED, KEYS):
        assert cache.positions(seq_id=seq_id, layer=layer).tolist() == stored
        found = cache.gather(layer, seq_id=seq_id)[0]
        np.testing.assert_array_equal(found, wanted if layer == STRIDED else wanted[:1])


def test_rows_are_put_with_queries_and_in_parts():
    cache = make()
    for num_tokens in (3, 3, 5):  # the first completes no block
        feed(cache, num_tokens)
        check(cache, range(cache.next_position()))
    cache, k = make(), rows_of(complete(range(11)))
    with cache.batch(11) as batch:
        put_plain(batch)
        out = batch.attend(STRIDED, Q, k, -k)
        np.testing.assert_allclose(out, batch.attend(PLAIN, Q, chosen=[[3, 7]] * 11), atol=1e-6)
        batch.put(KEYS, k[:1, :1])
        batch.put(KEYS, k[1:, :1], first=4)
    check(cache, range(11))


def test_lock_step():
    cache = make()
    k = np.stack([rows_of([3, 7], tag).swapaxes(0, 1) for tag in (5, 2)])
    with cache.batch(positions=[*range(9), *range(9)], seq_ids=[5] * 9 + [2] * 9) as batch:
        batch.put(STRIDED, k, -k, layout="BHTD")
        batch.put(KEYS, k[:, :1], layout="BHTD")
        put_plain(batch)
    for seq_id in (5, 2):
        check(cache, range(9), seq_id, tag=seq_id)


def test_rows_are_written_in_place():
    cache = make()
    with cache.batch(9) as batch:
        k, v = batch.slots(STRIDED, first=3)
        assert k.shape == (HEADS, 2, DIM)
        k[:] = rows_of([3, 7]).transpose(1, 0, 2)
        v[:] = -k
        batch.written(STRIDED, 3, 6)
        batch.put(KEYS, rows_of([3, 7])[:, :1])
        put_plain(batch)
    check(cache, range(9))


def test_rows_are_read_replaced_and_saved_by_position(tmp_path):
    cache = make()
    feed(cache, 20)
    assert cache.get(STRIDED, 6) is None
    np.testing.assert_array_equal(cache.get(STRIDED, 7)[0], rows_of([7])[0])
    np.testing.assert_array_equal(cache.extract(STRIDED, 4, 13)[0], rows_of([7, 11]).transpose(1, 0, 2))
    new = rows_of([7, 11], 9).transpose(1, 0, 2)
    assert cache.inject(STRIDED, 4, new, -new) == 2
    np.testing.assert_array_equal(cache.gather(STRIDED)[0][:, 1:3], new)
    assert [p for span in cache.spans(STRIDED) for p in span.positions.tolist()] == [3, 7, 11, 15, 19]
    cache.save(tmp_path / "state")
    assert KVCache.load(tmp_path / "state").layers == cache.layers


def test_figures_and_words():
    assert repr(FullAttention()) == "FullAttention()"
    assert repr(FullAttention(stride=4)) == "FullAttention(stride=4)"
    layer = make().layers[STRIDED]
    assert layer.most_bytes(1000) == layer.bytes_per_token * 250
    assert FullAttention() == FullAttention(stride=1) != FullAttention(stride=2)
