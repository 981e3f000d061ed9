"""`KVCache.weights`: its arguments reach the core, which tests/c/attend/test_weights.c compares with a softmax."""

import ml_dtypes
import numpy as np
import pytest

import kvcache

ROPE = kvcache.Rope([0.5, 0.1])
POSITIONS = np.array([8, 3, 5])
FACTORS = (
    np.random.default_rng(2).integers(-3, 4, (3, 2, 2)).astype(np.float32)
)  # of 3 queries, 2 KV heads, 2 heads each
SINKS = np.array([1, 0, -1, 2], np.float32)


def filled(**options):
    cache = kvcache.KVCache(2, 2, 4, 64, **options)
    rows = np.random.default_rng(1).standard_normal((9, 2, 4)).astype(np.float32)
    with cache.batch(9) as batch:
        for layer in range(2):
            batch.put(layer, rows, rows if cache.layers[layer].v_head_dim else None)
    return cache


@pytest.mark.parametrize(
    ("options", "score"),
    [
        ({}, lambda x: x / 2),
        ({"scale": 2.0}, lambda x: 2 * x),
        ({"softcap": 1.5}, lambda x: 1.5 * np.tanh(x / 2 / 1.5)),
        ({"sinks": SINKS}, lambda x: x / 2),
    ],
    ids=["plain", "scale", "softcap", "sinks"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_the_weight_of_one_row(reduce, dtype, options, score):
    """The row at position 4 has the query's factor as its product, and all others have 0."""
    cache = kvcache.KVCache(1, 2, 4, dtype="f32")
    keys = np.zeros((9, 2, 4), np.float32)
    keys[4, :, 2] = 1
    with cache.batch(9) as batch:
        batch.put(0, keys, keys)
    q = np.zeros((3, 4, 2, 4), dtype)
    q[:, :, 1, 2] = FACTORS.reshape(3, 4)
    own = np.exp(score(FACTORS))
    rest = np.exp(SINKS.reshape(2, 2)) if "sinks" in options else 0
    for positions in (None, POSITIONS):
        seen = (np.full(3, 9) if positions is None else POSITIONS + 1)[:, None, None]
        right = np.where(seen > 4, own / (own + seen - 1 + rest), 0)
        found = cache.weights(0, q[:, :, 1], positions, reduce=reduce, **options)
        np.testing.assert_allclose(found[:, 4], getattr(right, reduce)((0, 2)), rtol=1e-5)


def test_rotation():
    cache, q = filled(dtype="float32", rope=ROPE), np.ones((2, 2, 4), np.float32)
    angles = np.outer([7, 11], ROPE.inv_freq)[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = np.concatenate([q[..., :2] * cos - q[..., 2:] * sin, q[..., 2:] * cos + q[..., :2] * sin], -1)
    right = cache.weights(1, rotated.astype(np.float32), [7, 11])
    np.testing.assert_allclose(cache.weights(1, q, [7, 11], rotate=True), right, rtol=1e-5)
    with pytest.raises(kvcache.NotSupportedError, match="rotated"):
        filled().weights(1, q, [7, 11], rotate=True)


def test_an_empty_sequence_and_a_fork():
    cache, q = filled(), np.ones((2, 2, 4), np.float32)
    assert cache.weights(0, q, seq_id=5).shape == (2, 0)
    cache.fork(0, 5)
    np.testing.assert_array_equal(cache.weights(0, q, seq_id=5), cache.weights(0, q))


def test_refused():
    cache, q = filled(), np.ones((2, 2, 4), np.float32)
    calls = {
        r"reduce='mean': must be 'sum' or 'max'": lambda: cache.weights(0, q, reduce="mean"),
        r"len\(positions\)=3: must be the number of queries, which is 2": lambda: cache.weights(0, q, [1, 2, 3]),
        r"q: .* multiple of 2": lambda: cache.weights(0, q[:, :1]),
        r"softcap=0: must be": lambda: cache.weights(0, q, softcap=0),
        r"sinks: an array of 3 numbers, where q has 2 heads": lambda: cache.weights(0, q, sinks=np.ones(3, np.float32)),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(kvcache.NotSupportedError, match="keys alone"):
        filled(v_head_dim=0).weights(0, q)
    window = filled(policy=kvcache.SlidingWindow(3))
    with pytest.raises(kvcache.RowsGoneError):
        window.weights(0, q, [8, 4])
