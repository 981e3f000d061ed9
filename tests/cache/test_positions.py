"""Tokens move by shift, divide, remove, extract and inject. Keys are rotated late, at once, or by a function."""

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from support.rotation import rotated

import kvcache

HEADS, DIM = 2, 16
FREQS = 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
ROPES = {
    "halves": kvcache.Rope(FREQS),
    "interleaved": kvcache.Rope(FREQS, interleaved=True),
    "the other way": kvcache.Rope(-FREQS),
    "slice": kvcache.Rope(FREQS[:3], first_dim=4),
    "interleaved slice": kvcache.Rope(FREQS[2:5].tolist(), True, np.int8(10)),
}


def raw(n, seed=0):
    """Keys without rotation and values, [n, HEADS, DIM]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)


def new_cache(rope, num_layers=1, dtype="f32", **options):
    return kvcache.KVCache(num_layers, HEADS, DIM, None, dtype=dtype, rope=rope, max_sequences=None, **options)


def feed(cache, keys, values, positions, rope=None, seq_id=0):
    positions = np.asarray(positions)
    if rope is not None:
        keys = rotated(keys, positions[:, None], rope).astype(np.float32)
    with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, keys, values)


def check_rows(cache, keys, values, rope=None, seq_id=0, atol=2e-6):
    """Return whether each row is its key, rotated for its position."""
    positions = cache.positions(seq_id=seq_id)
    if rope is not None:
        keys = rotated(keys, positions[:, None], rope)
    k, v = cache.gather(0, seq_id=seq_id)
    np.testing.assert_allclose(k, np.swapaxes(keys, 0, 1), atol=atol)
    np.testing.assert_array_equal(v, np.swapaxes(values, 0, 1))
    cache.validate()


# ---- Rope as a value


def test_a_rope_is_a_value():
    rope = ROPES["halves"]
    assert rope == kvcache.Rope(FREQS.tolist()) == kvcache.Rope(iter(FREQS.tolist()), np.False_, np.int64(0))
    assert hash(rope) == hash(kvcache.Rope(tuple(FREQS)))
    assert rope != kvcache.Rope(FREQS, interleaved=True)
    assert rope.inv_freq == tuple(FREQS)
    assert (rope.interleaved, rope.first_dim) == (False, 0)
    assert kvcache.Rope(np.ones(1, np.float16)).inv_freq == (1.0,)
    assert repr(kvcache.Rope([0.5])) == "Rope(1 frequency of 0.5, interleaved=False, first_dim=0)"
    assert repr(rope).startswith("Rope(8 frequencies from 1 to 0.000316")
    with pytest.raises(AttributeError):
        rope.first_dim = 1


def test_ropes_of_a_cache():
    def function(layer, keys, delta):
        return keys

    ropes = [None, False, ROPES["halves"], function]
    cache = new_cache(ropes, num_layers=4)
    assert tuple(layer.rope for layer in cache.layers) == tuple(ropes)
    for text in ("no rotation", "Rope(8 frequencies", "rope function"):
        assert text in repr(cache)


# ---- moving


@pytest.mark.parametrize("name", ROPES)
def test_remove_moves_later_tokens(name):
    rope, (keys, values) = ROPES[name], raw(12)
    cache = new_cache(rope)
    feed(cache, keys, values, range(12), rope)
    cache.remove(1, 4)
    cache.remove(6, 8)
    assert cache.positions().tolist() == list(range(7))
    stay = [0, 4, 5, 6, 7, 8, 11]
    check_rows(cache, keys[stay], values[stay], rope)
    assert {span.delta for span in cache.spans(0)} == {0, -3, -5}
    assert cache.next_position() == 7
    assert cache.can_resume(7)


# ---- views


def test_keys_that_wait_for_their_rotation_have_no_view():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope)
    feed(cache, keys, values, range(6), rope)
    cache.remove(0, 2)
    with pytest.raises(ValueError, match=r"copy=False.* -2.*copy=None"):
        cache.keys(0, copy=False)
    assert cache.values(0, copy=False).shape == (HEADS, 4, DIM)
    for copy in (None, True):
        k = cache.keys(0, copy=copy)
        assert k.flags.owndata
        np.testing.assert_allclose(np.swapaxes(k, 0, 1), rotated(keys[2:], np.arange(4)[:, None], rope), atol=2e-6)
    stored = np.swapaxes(cache.spans(0)[0].k, 0, 1)
    np.testing.assert_allclose(stored, rotated(keys[2:], np.arange(2, 6)[:, None], rope), atol=2e-6)


# ---- functions


def test_a_function_moves_keys():
    calls = []

    def move(layer, keys, delta):
        calls.append((layer, keys.shape, keys.dtype, delta))
        return keys + (10 * delta + layer)

    cache = new_cache(move, num_layers=2, block_size=4)
    keys, values = raw(6)
    feed(cache, keys, values, range(6))
    cache.shift(2, None, 3)
    assert {(layer, delta) for layer, _, _, delta in calls} == {(0, 3), (1, 3)}
    assert {dtype for _, _, dtype, _ in calls} == {np.dtype(np.float32)}
    for layer in range(2):
        assert sum(shape[1] for at, shape, _, _ in calls if at == layer) == 4
        k = np.swapaxes(cache.gather(layer)[0], 0, 1)
        np.testing.assert_array_equal(k[:2], keys[:2])
        np.testing.assert_array_equal(k[2:], keys[2:] + np.float32(30 + layer))
    cache.divide(5, None, 2)
    assert cache.positions().tolist() == [0, 1, 2, 3, 3, 4]
    moves = np.array([2 - 5, 3 - 6, 3 - 7, 4 - 8], np.float32)[:, None, None]
    np.testing.assert_allclose(
        np.swapaxes(cache.gather(0)[0], 0, 1)[2:], keys[2:] + 30 + 10 * moves, rtol=1e-6, atol=1e-5
    )
    assert cache.keys(0).shape == (HEADS, 6, DIM)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_function_may_return_any_float(dtype):
    cache = new_cache(lambda layer, keys, delta: np.asfortranarray(keys * 2, dtype))
    feed(cache, np.ones((3, HEADS, DIM), np.float32), np.ones((3, HEADS, DIM), np.float32), range(3))
    cache.shift(0, None, 1)
    assert (cache.keys(0) == 2).all()


def test_a_function_may_keep_what_it_gets():
    got = []

    def move(layer, keys, delta):
        got.append(keys)
        return keys

    cache = new_cache(move)
    keys, values = raw(3)
    feed(cache, keys, values, range(3))
    cache.shift(0, None, 5)
    del cache
    gc.collect()
    np.testing.assert_array_equal(np.concatenate(got, 1), np.swapaxes(keys, 0, 1))


def test_errors_of_a_function_in_threads():
    """Each thread gets its own."""
    barrier = threading.Barrier(2, timeout=30)

    def fail(layer, keys, delta):
        barrier.wait()
        raise KeyError(delta)

    cache = new_cache(fail)
    keys, values = raw(3)
    for seq_id in (1, 2):
        feed(cache, keys, values, range(3), seq_id=seq_id)
    caught = {}

    def edit(seq_id):
        try:
            cache.shift(0, None, seq_id, seq_id=seq_id)
        except KeyError as error:
            caught[seq_id] = error.args

    threads = [threading.Thread(target=edit, args=(seq_id,)) for seq_id in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught == {1: (1,), 2: (2,)}
    check_rows(cache, keys, values, seq_id=1)


def test_a_function_that_knows_its_cache_does_not_keep_it():
    class Mover:
        def __call__(self, layer, keys, delta):
            return keys

    mover = Mover()
    cache = mover.cache = new_cache(mover)
    feed(cache, *raw(3), range(3))
    mover.batch = cache.batch(1)
    gone = weakref.ref(mover)
    del mover, cache
    gc.collect()
    assert gone() is None


# ---- extract and inject


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_inject_of_any_array(dtype):
    cache = new_cache(False)
    feed(cache, *raw(4), range(4))
    k = np.arange(HEADS * 2 * DIM).reshape(DIM, 2, HEADS).T.astype(dtype)
    assert cache.inject(0, 1, k, -k) == 2
    assert cache.inject(0, 1, k[::-1], -k[..., ::-1], seq_id=5, skip_missing=True) == 0  # holds nothing
    got = cache.extract(0, 1, 3)
    np.testing.assert_array_equal(got[0], k.astype(np.float32))
    np.testing.assert_array_equal(got[1], -k.astype(np.float32))
    assert cache.sequences == [0]
