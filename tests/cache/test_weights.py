"""`KVCache.weights`: its arguments reach the core, which tests/c/attend/test_weights.c compares with a softmax."""

import ml_dtypes
import numpy as np
import pytest

import kvcache

ROPE = kvcache.Rope([0.5, 0.1])


def filled(**options):
    cache = kvcache.KVCache(2, 2, 4, 64, **options)
    rows = np.random.default_rng(1).standard_normal((9, 2, 4)).astype(np.float32)
    with cache.batch(9) as batch:
        for layer in range(2):
            batch.put(layer, rows, rows if cache.layers[layer].v_head_dim else None)
    return cache


def expected(cache, q, positions, reduce, *, scale=0.5, softcap=None, sinks=None):
    keys, at = cache.gather(1)[0].astype(np.float64), cache.positions(layer=1)
    scores = scale * np.einsum("tghd,gjd->tghj", q.astype(np.float64).reshape(len(q), 2, -1, 4), keys)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    found = np.exp(np.where(at <= np.reshape(positions, (-1, 1, 1, 1)), scores, -np.inf))
    rest = 0 if sinks is None else np.exp(np.reshape(sinks, (2, -1, 1)))
    found /= found.sum(-1, keepdims=True) + rest
    return getattr(found, reduce)((0, 2))


OPTIONS = [{}, {"scale": 2.0}, {"softcap": 1.5}, {"sinks": np.array([1, 0, -1, 2], np.float32)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_weights(reduce, dtype, options):
    cache = filled(dtype="float32")
    q = np.random.default_rng(2).standard_normal((3, 4, 4)).astype(dtype)
    for positions in (None, [8, 3, 5]):
        found = cache.weights(1, q[:, ::-1], positions, reduce=reduce, **options)
        right = expected(cache, q[:, ::-1], [9] * 3 if positions is None else positions, reduce, **options)
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)


def test_rotation():
    cache, q = filled(dtype="float32", rope=ROPE), np.ones((2, 2, 4), np.float32)
    angles = np.outer([7, 11], ROPE.inv_freq)[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = np.concatenate([q[..., :2] * cos - q[..., 2:] * sin, q[..., 2:] * cos + q[..., :2] * sin], -1)
    found = cache.weights(1, q, [7, 11], rotate=True)
    np.testing.assert_allclose(found, expected(cache, rotated, [7, 11], "sum"), rtol=1e-5)
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
