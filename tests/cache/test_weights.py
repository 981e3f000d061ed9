"""`KVCache.weights`: its arguments reach the core, which tests/c/attend/test_weights.c compares with a softmax.

refusals.txt has what is refused.
"""

import ml_dtypes
import numpy as np
import pytest
from support.rotation import rotated

import kvcache

ROPE = kvcache.Rope([0.5, 0.1])
POSITIONS = np.array([8, 3, 5])
FACTORS = (
    np.random.default_rng(2).integers(-3, 4, (3, 2, 2)).astype(np.float32)
)  # of 3 queries, 2 KV heads, 2 heads each
SINKS = np.array([1, 0, -1, 2], np.float32)


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


def test_queries_are_rotated_and_rows_are_those_of_a_sequence():
    cache, q = kvcache.KVCache(2, 2, 4, max_sequences=None, dtype="f32", rope=ROPE), np.ones((2, 2, 4), np.float32)
    with cache.batch(9, seq_ids=[5] * 9) as batch:
        for layer in range(2):
            batch.put(layer, *[np.random.default_rng(1).standard_normal((9, 2, 4)).astype(np.float32)] * 2)
    at = np.array([3, 7])
    right = cache.weights(1, rotated(q, at[:, None], ROPE).astype(np.float32), at, seq_id=5)
    np.testing.assert_allclose(cache.weights(1, q, at, seq_id=5, rotate=True), right, rtol=1e-5)
    assert cache.weights(1, q).shape == (2, 0)
