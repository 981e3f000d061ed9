"""Rows chosen from Python: what choose() takes and returns, against brute force over whole numbers.

tests/c/attend/test_choose.c holds what is chosen of every type, policy, tree and instruction set.
"""

import ml_dtypes
import numpy as np
import pytest

import kvcache

HEADS, DIM, TOKENS = 8, 32, 40


def whole(shape, seed, most=4):
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)


def index_layers(dtype="f32", kv_heads=1, **options):
    return [
        kvcache.Layer(2, 16, dtype="f32", **options),
        kvcache.Layer(kv_heads, DIM, v_head_dim=0, dtype=dtype, **options),
    ]


def feed(cache, tokens, kv_heads=1, seq_id=0, seed=0):
    keys = whole((tokens, kv_heads, DIM), seed)
    batch = cache.batch(tokens, seq_ids=[seq_id] * tokens)
    x = whole((tokens, 2, 16), seed)
    batch.put(0, x, x)
    batch.put(1, keys)
    return batch, keys


def brute(q, keys, position, width, *, weights=None, relu=False, choices=1, block=1, first=0, local=0, among=None):
    """Choose for one token at a position over keys [rows, kv_heads, dim]: [choices, width], with scores."""
    heads, kv_heads = len(q), keys.shape[1]
    chosen, scores = np.full((choices, width), -1), np.full((choices, width), -np.inf)
    for c in range(choices):
        found = {}
        for row in range(position + 1):
            score = 0.0
            for h in range(c * heads // choices, (c + 1) * heads // choices):
                product = float(q[h].astype(np.float64) @ keys[row, h * kv_heads // heads])
                score += (1 if weights is None else float(weights[h])) * (max(0, product) if relu else product)
            entry = row // block
            found[entry] = max(score, found.get(entry, -np.inf))
        own = position // block
        entries = [e for e in found if among is None or e in among]
        entries.sort(key=lambda e: (not (e < first or own - local < e <= own), -found[e], e))
        kept = sorted(entries[:width])
        chosen[c, : len(kept)], scores[c, : len(kept)] = kept, [found[e] for e in kept]
    return chosen, scores


OPTIONS = [
    {},
    {"relu": True},
    {"relu": True, "weighed": True, "local": 2},
    {"choices": 2},
    {"choices": 8, "block": 4, "first": 1},
    {"block": 8, "local": 1, "relu": True},
    {"among": [39, 3, -1, 12, 3, 500]},
    {"among": [39, 3, -1, 12, 3, 500], "choices": 2},
]


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("width", [1, 5, 39, 40, 41])
def test_choices_are_those_of_brute_force(kv_heads, options, width):
    options = dict(options)
    cache = kvcache.KVCache(index_layers(kv_heads=kv_heads), max_seq_len=TOKENS)
    batch, keys = feed(cache, TOKENS, kv_heads)
    q = whole((TOKENS, HEADS, DIM), 1)
    weights = whole((TOKENS, HEADS), 2, 2) if options.pop("weighed", False) else None
    among = options.get("among")
    chosen, scores = batch.choose(
        1,
        q,
        width=width,
        weights=weights,
        relu=options.get("relu", False),
        scale=1,
        num_choices=options.get("choices", 1),
        block=options.get("block", 1),
        num_first=options.get("first", 0),
        num_local=options.get("local", 0),
        among=None if among is None else [among] * TOKENS,  # for all choices
        return_scores=True,
    )
    assert (chosen.dtype, scores.dtype) == (np.int32, np.float32)
    for t in range(TOKENS):
        right = brute(q[t], keys, t, width, weights=None if weights is None else weights[t], **options)
        np.testing.assert_array_equal(chosen[t], right[0])
        np.testing.assert_array_equal(scores[t], right[1])
    batch.abort()


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_queries_of_16_bits_and_any_strides(kind):
    cache = kvcache.KVCache(index_layers("bf16"), max_seq_len=TOKENS)
    batch, _ = feed(cache, TOKENS)
    q = whole((TOKENS, HEADS, DIM), 1)
    weights = whole((HEADS, TOKENS), 2, 2)
    right = batch.choose(1, q, width=7, weights=np.ascontiguousarray(weights.T), relu=True)
    wide = np.zeros((TOKENS, HEADS, 2, DIM), kind)
    wide[:, :, 1] = q
    np.testing.assert_array_equal(batch.choose(1, wide[:, :, 1], width=7, weights=weights.T, relu=True), right)
    batch.abort()


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
    batch.abort()


@pytest.mark.hf
def test_tensors_of_pytorch():
    import torch

    cache = kvcache.KVCache(index_layers("bf16"), max_seq_len=TOKENS)
    batch, _ = feed(cache, TOKENS)
    q, weights = whole((TOKENS, HEADS, DIM), 1), whole((TOKENS, HEADS), 2, 2)
    right = batch.choose(1, q, width=7, weights=weights)
    got = batch.choose(1, torch.tensor(q).bfloat16(), width=7, weights=torch.tensor(weights))
    np.testing.assert_array_equal(got, right)
    among = torch.tensor([[3, 5, 9]] * TOKENS)
    np.testing.assert_array_equal(batch.choose(1, q, width=3, among=among)[-1, 0], [3, 5, 9])
    batch.abort()


def test_what_is_chosen_can_be_attended_to():
    cache = kvcache.KVCache(index_layers(), max_seq_len=TOKENS)
    batch, _ = feed(cache, TOKENS)
    q = whole((TOKENS, 2, 16), 5)
    index_q = whole((TOKENS, HEADS, DIM), 1)
    chosen = batch.choose(1, index_q, width=TOKENS)
    np.testing.assert_allclose(batch.attend(0, q, chosen=chosen), batch.attend(0, q), rtol=1e-5)
    few = batch.choose(1, index_q, width=3, num_choices=2)
    assert not np.allclose(batch.attend(0, q, chosen=few), batch.attend(0, q))
    batch.abort()


def test_forks_see_their_own_rows_and_masked_rows_are_never_chosen():
    cache = kvcache.KVCache(index_layers(), max_sequences=2, block_size=4)
    batch, keys = feed(cache, TOKENS)
    batch.commit()
    cache.fork(0, 1)
    with cache.batch(4, seq_ids=[0, 0, 1, 1]) as batch:
        own = whole((4, 1, DIM), 9)
        x = np.zeros((4, 2, 16), np.float32)
        batch.put(0, x, x)
        batch.put(1, own)
        q = whole((4, HEADS, DIM), 1)
        chosen = batch.choose(1, q, width=6, scale=1, masked=[(1, 10, 20)], relu=True)
        for t in range(4):
            rows = np.concatenate([keys, own[t // 2 * 2 : t + 1]])
            among = [row for row in range(len(rows)) if t < 2 or not 10 <= row < 20]
            right, _ = brute(q[t], rows, len(rows) - 1, 6, relu=True, among=among)
            np.testing.assert_array_equal(chosen[t], right)
        one = batch.choose(1, q[2:3], first=2, width=6, scale=1, masked=[(1, 10, 20)], relu=True)
        np.testing.assert_array_equal(one[0], chosen[2])
        later = batch.choose(1, q, width=TOKENS + 2, non_causal=True)
        assert list(later[0, 0, -2:]) == [TOKENS, TOKENS + 1]


# ---- what is refused


@pytest.fixture
def batch():
    made, _ = feed(kvcache.KVCache(index_layers(kv_heads=2), max_seq_len=TOKENS), 3, 2)
    yield made
    made.abort()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 0}, ValueError, "width=0"),
        ({"width": 2.5}, TypeError, "width"),
        ({"num_choices": 3}, ValueError, "num_choices is 3: it must divide num_heads, 8"),
        ({"num_choices": 0}, ValueError, "num_choices=0"),
        ({"num_choices": 2**31 - 1}, ValueError, "num_choices=2147483647"),
        ({"block": 0}, ValueError, "block=0"),
        ({"num_first": -1}, ValueError, "num_first=-1"),
        ({"num_local": -1}, ValueError, "num_local=-1"),
        ({"scale": np.nan}, ValueError, "scale=nan"),
        ({"weights": np.ones((3, 7), np.float32)}, ValueError, r"weights: an array of shape \(3, 7\)"),
        ({"weights": np.ones((3, 8), np.float16)}, TypeError, "weights: one float32 number per token"),
        ({"among": np.ones((3, 2))}, TypeError, "among: elements of type float64"),
        ({"among": [[1], [2]]}, ValueError, r"among: an array of shape \(2, 1\), where \(3, n\) is needed"),
        ({"among": np.ones((3, 0), int)}, ValueError, r"\(3, 0\), where .* \(3, 1, n\), with n at least 1"),
        ({"among": np.ones((3, 2, 5), int)}, ValueError, r"among: an array of shape \(3, 2, 5\)"),
        ({"relu": 1}, TypeError, "relu=1"),
        ({"return_scores": "yes"}, TypeError, "return_scores='yes'"),
        ({"masked": [(0, 5, 1)]}, ValueError, r"masked\[0\]"),
        ({"non_causal": [True]}, ValueError, "non_causal: 1 booleans"),
        ({"first": 1}, IndexError, "3 tokens"),
    ],
)
def test_bad_arguments(batch, options, error, message):
    q = np.ones((3, 8, DIM), np.float32)
    with pytest.raises(error, match=message):
        batch.choose(1, q, **{"width": 2, **options})


def test_layers_and_queries_that_cannot_choose(batch):
    with pytest.raises(
        kvcache.NotSupportedError, match=r"layer 0 holds values: rows are chosen by a layer of keys alone"
    ):
        batch.choose(0, np.ones((3, 2, 16), np.float32), width=1)
    with pytest.raises(kvcache.NotSupportedError, match="layer 0 holds values"):  # the queries suit layer 1
        batch.choose(0, np.ones((3, 8, DIM), np.float32), width=1)
    with pytest.raises(ValueError, match=r"\(3, 8, 31\), where \(tokens, a multiple of 2, 32\) is needed"):
        batch.choose(1, np.ones((3, 8, DIM - 1), np.float32), width=1)
    with pytest.raises(ValueError, match=r"q: an array of shape \(3, 3, 32\)"):
        batch.choose(1, np.ones((3, 3, DIM), np.float32), width=1)
    batch.abort()
    with pytest.raises(ValueError, match="the batch has ended"):
        batch.choose(1, np.ones((3, 2, DIM), np.float32), width=1)


def test_rows_must_have_been_put():
    cache = kvcache.KVCache(index_layers(), max_seq_len=TOKENS)
    batch = cache.batch(2)
    batch.put(1, whole((1, 1, DIM), 0))
    batch.choose(1, np.ones((1, HEADS, DIM), np.float32), width=1)
    with pytest.raises(ValueError, match="token 1 of the batch is seen but was not put in layer 1: put its rows first"):
        batch.choose(1, np.ones((2, HEADS, DIM), np.float32), width=1)
    batch.abort()
