"""Rows chosen from Python: the arguments of choose() reach the core, and its arrays. refusals.txt has what is refused.

tests/c/attend/test_choose.c holds what is chosen of every type, policy, tree and instruction set.
"""

import ml_dtypes
import numpy as np
import pytest

import kvcache

HEADS, DIM, TOKENS = 8, 32, 40


def whole(shape, seed, most=4):
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)


def index_layers(dtype="f32"):
    return [kvcache.Layer(2, 16, dtype="f32"), kvcache.Layer(1, DIM, v_head_dim=0, dtype=dtype)]


@pytest.fixture
def fed():
    """A batch of tokens with index keys."""
    batch = kvcache.KVCache(index_layers("bf16"), max_seq_len=TOKENS).batch(TOKENS)
    batch.put(1, whole((TOKENS, 1, DIM), 0))
    return batch


SCORES = np.array([3, 9, -4, 7, 0, 5, -8, 2], np.float32)  # of the rows, for a query of ones


@pytest.mark.parametrize(
    ("options", "chosen", "scores"),
    [
        ({}, [1, 3], [18, 14]),  # the sum of two heads
        ({"scale": 0.5}, [1, 3], [9, 7]),
        ({"weights": [-1, -1]}, [2, 6], [8, 16]),
        ({"weights": [-1, -1], "relu": True}, [2, 4], [0, 0]),
        ({"num_choices": 2, "weights": [1, -1]}, [[1, 3], [2, 6]], [[9, 7], [4, 8]]),
        ({"block": 2}, [0, 1], [18, 14]),
        ({"num_first": 1}, [0, 1], [6, 18]),
        ({"num_local": 1}, [1, 7], [18, 4]),
        ({"among": [6, 2, 4, -1, 500, 4]}, [2, 4], [-8, 0]),
        ({"among": [[6, 2], [1, 0]], "num_choices": 2}, [[2, 6], [0, 1]], [[-4, -8], [3, 9]]),
        ({"masked": [(0, 1, 2)]}, [3, 5], [14, 10]),
        ({"first": 1}, [0, 1], [6, 18]),  # the query is that of token 1
        ({"first": 0}, [0, -1], [6, -np.inf]),
        ({"first": 0, "non_causal": True}, [1, 3], [18, 14]),
    ],
)
def test_arguments(options, chosen, scores):
    options = {"first": len(SCORES) - 1, "num_choices": 1, "scale": 1, **options}
    batch = kvcache.KVCache(index_layers()).batch(len(SCORES))
    batch.put(1, SCORES[:, None, None] * np.eye(1, DIM, dtype=np.float32))
    for name in ("weights", "among"):
        if name in options:
            options[name] = np.array([options[name]], np.int32 if name == "among" else np.float32)
    found = batch.choose(1, np.ones((1, 2, DIM), np.float32), width=2, return_scores=True, **options)
    assert [x.dtype for x in found] == [np.int32, np.float32]
    shape = (1, options["num_choices"], 2)
    for got, wanted in zip(found, (chosen, scores), strict=True):
        np.testing.assert_array_equal(got, np.reshape(wanted, shape))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_queries_of_16_bits_and_any_strides(fed, kind):
    q, weights = whole((TOKENS, HEADS, DIM), 1), whole((HEADS, TOKENS), 2, 2)
    right = fed.choose(1, q, width=7, weights=np.ascontiguousarray(weights.T), relu=True)
    wide = np.zeros((TOKENS, HEADS, 2, DIM), kind)
    wide[:, :, 1] = q
    np.testing.assert_array_equal(fed.choose(1, wide[:, :, 1], width=7, weights=weights.T, relu=True), right)


@pytest.mark.parametrize("layout", ["HTD", "BHTD"])
def test_layouts(layout):
    """Entries come in the order of the batch, whatever the order of axes."""
    cache = kvcache.KVCache(index_layers(), max_seq_len=TOKENS, max_sequences=2)
    batch = cache.batch(2 * TOKENS, seq_ids=np.repeat([3, 4], TOKENS))
    batch.put(1, whole((2 * TOKENS, 1, DIM), 0))
    q, weights = whole((2 * TOKENS, HEADS, DIM), 1), whole((2 * TOKENS, HEADS), 2, 2)
    among = np.random.default_rng(3).integers(-1, TOKENS, (2 * TOKENS, 2, 9))
    options = {"width": 4, "num_choices": 2, "among": among, "return_scores": True}
    right = batch.choose(1, q, weights=weights, **options)
    folded = [x.reshape(2, TOKENS, *x.shape[1:]) if layout == "BHTD" else x for x in (q, weights)]
    turned = [x.swapaxes(-2, -3) if x is folded[0] else x.swapaxes(-1, -2) for x in folded]
    for arrays in (turned, [x.copy() for x in turned]):
        for got, wanted in zip(
            batch.choose(1, arrays[0], weights=arrays[1], layout=layout, **options), right, strict=True
        ):
            np.testing.assert_array_equal(got, wanted)
    with pytest.raises(ValueError, match="weights: an array of shape"):
        batch.choose(1, turned[0], weights=folded[1], layout=layout, **options)
