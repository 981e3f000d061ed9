"""Batch.attend against a softmax in float64 over the rows that the cache says it stores.

How far f32 may be off. Let u = 2^-24, half a unit in the last place. A score is a sum of head_dim products. No running
sum of it is larger than B = scale |q| |k|; those of random signs come to B only as a random walk does, and each
addition errs by at most u times the running sum, mostly by less than half of that, with random sign as well: together
by some 0.3 u B, and never by 2 u B. Softcap and ALiBi add some u of the numbers they work with. By as much, relatively,
errs a weight, and by a few u of its own (exp is right to 2 ulp); and the output, a mean of values under these weights,
by as much of the largest value. Adding up n weighted values rounds n times at random: sqrt(n) / 2 u. Altogether

    error of an output <= u (2 B + A + sqrt(n) / 2 + 4) max |v|,

A being the softcap and the largest ALiBi term that counts. That is 5e-7 to 4e-6 of the largest value for the shapes
below. What is stored as another type is exact in f32, so the same holds for it. An output that is returned as f16 or
bf16 is rounded once more, by at most half a unit in its last place.

That bound is loose for an output much smaller than the values. As the signs of normal data are random, an output over
many rows is about as large as the norm of p |v|, p being the weights. The signs of the errors are random as well, and
the norm of an output's error is at most RELATIVE of that. Where products are made in 16 bits, this is the bound
checked: rounding a query to 16 bits moves scores by some 3e-5, rounding weights moves their sum by up to 1e-4 of the
largest. With 8 bits scores would be off by 5e-3.
"""

import math
import multiprocessing
import os
import threading
import time
import typing

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.isas import ISA_PARAMS, ISAS, using

import kvcache

U = 2.0**-24
RELATIVE = {"exact": 1e-5, "16 bits": 5e-4}
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
QUANTISED = ["q8_0", "q4_0"]
SLIDING = kvcache.SlidingWindow


@pytest.fixture(params=ISA_PARAMS)
def isa(request, monkeypatch):
    """The instruction set of the caches that the test makes."""
    monkeypatch.setenv("KVCACHE_ISA", request.param)
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# ---- the other way to compute it


def visible(policy, q_positions, positions):
    """[queries, rows]: who sees what."""
    q, p = np.asarray(q_positions)[:, None], np.asarray(positions)[None]
    if isinstance(policy, kvcache.FullAttention):
        return p <= q
    if isinstance(policy, kvcache.ChunkedAttention):
        return (p <= q) & (p >= q - q % policy.attention_chunk_size)
    return (p <= q) & ((p > q - policy.window) | (p < policy.num_sink_tokens))


class Answer(typing.NamedTuple):
    out: np.ndarray  # [T, H, DV]
    lse: np.ndarray  # [T, H]
    bound: float  # of the error, in u of max |v|
    spread: np.ndarray  # [T, H] the norm of the weights
    size: np.ndarray  # [T, H] the norm of the weights times |v|


def softmax(q, k, v, sees, distance, *, scale=None, softcap=None, sinks=None, alibi=None):
    """q [T, H, D], k [KV, N, D], v [KV, N, DV]"""
    tokens, heads, dim = q.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    q = q.reshape(tokens, len(k), heads // len(k), dim)
    scale = dim**-0.5 if scale is None else scale
    s = scale * np.einsum("tkgd,knd->tkgn", q, k).reshape(tokens, heads, -1)
    bound = 2 * abs(scale) * np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
        bound += softcap
    bias = 0 if alibi is None else np.asarray(alibi, float)[:, None] * -np.abs(distance)[:, None]
    s = np.where(sees[:, None], s + bias, -np.inf)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, float)
    top = np.maximum(s.max(-1), sink)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top[..., None])
    bound += np.abs(bias * (p > 1e-9)).max()  # only rows with a weight count
    total = p.sum(-1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    p /= np.where(total, total, 1)[..., None]
    by_kv_head = p.reshape(*q.shape[:3], -1)
    out = np.einsum("tkgn,knd->tkgd", by_kv_head, v).reshape(tokens, heads, -1)
    size = np.sqrt(np.einsum("tkgn,kn->tkg", by_kv_head**2, (v**2).sum(-1))).reshape(tokens, heads)
    return Answer(out, lse, bound + math.sqrt(k.shape[1]) / 2 + 4, np.linalg.norm(p, axis=-1), size)


def in_16_bits(cache, layer):
    """Whether rows are multiplied so; in tiles of many query rows, AMX takes two bf16 of 8 each."""
    isa = kvcache.show_config("dicts")["isa"]
    amx = [*QUANTISED, "f16", "bf16"]
    types = {"scalar": [], "amx": amx, "amxfp16": amx}.get(isa, QUANTISED)
    return not {cache.k_dtype[layer], cache.v_dtype[layer]}.isdisjoint(types)


def check(cache, batch, layer, positions, seq_ids, q, out, lse, **options):
    """Compares the results of an open batch with the softmax over the rows that are stored, and its own."""
    positions, seq_ids = np.asarray(positions), np.asarray(seq_ids)
    all_k, all_v, _ = batch.dense(layer, mask=None)
    begin = 0
    for seq_id in np.unique(seq_ids):
        mine = seq_ids == seq_id
        stored = np.sort(np.concatenate([cache.positions(seq_id=seq_id, layer=layer), positions[mine]]))
        k, v = all_k[:, begin : begin + len(stored)], all_v[:, begin : begin + len(stored)]
        begin += len(stored)
        sees = visible(cache.policy[layer], positions[mine], stored)
        seen = sees.any(0)  # how large the others are must not matter
        k, v, stored, sees = k[:, seen], v[:, seen], stored[seen], sees[:, seen]
        distance = stored[None] - positions[mine][:, None].astype(float)
        expected = softmax(q[mine], k, v, sees, distance, **options)
        compare(out[mine], lse[mine], expected, np.abs(v).max(), is_exact=not in_16_bits(cache, layer))


def compare(out, lse, expected, largest_value, *, is_exact):
    relative = RELATIVE["exact" if is_exact else "16 bits"]
    rounding = np.full_like(expected.out, 2.0**-110)  # weights below e^-87 are 0
    if out.dtype != np.float32:
        # Half a unit in the last place of the result, which is 2^-11 or 2^-8 of it, or of f16's smallest normal.
        rounding = np.maximum(np.abs(expected.out) * (ml_dtypes.finfo(out.dtype).eps / 2), 2.0**-25)
    error = np.abs(out.astype(np.float64) - expected.out)
    if is_exact:
        assert_within(error, rounding + expected.bound * U * largest_value)
    tolerance = max(relative, expected.bound * U) * expected.size
    assert_within(np.linalg.norm(error, axis=-1), np.linalg.norm(rounding, axis=-1) + tolerance)
    tolerance = expected.bound * U + (0 if is_exact else relative * expected.spread)
    assert_within(np.abs(lse - expected.lse), tolerance + 4 * U * np.abs(expected.lse))


def assert_within(error, tolerance):
    assert (error <= tolerance).all(), f"off by {(error / tolerance).max():.3g} of what may be"


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def random_rows(cache, rng, n, layer=0):
    k, v = (random(rng, n, cache.num_kv_heads[layer], dims[layer]) for dims in (cache.head_dim, cache.v_head_dim))
    return k, None if cache.value_in_key[layer] else v


def run(cache, rng, positions, heads, *, seq_ids=None, layer=0, q_dtype="f32", **options):
    """Appends tokens, random ones, attends over them, and checks the result."""
    n = len(positions)
    seq_ids = [0] * n if seq_ids is None else seq_ids
    q = random(rng, n, heads, cache.head_dim[layer]).astype(DTYPES[q_dtype])
    k, v = random_rows(cache, rng, n, layer)
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        out, lse = batch.attend(layer, q, k, v, return_lse=True, **options)
        check(cache, batch, layer, positions, seq_ids, q, out, lse, **options)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    assert out.shape == (n, heads, cache.v_head_dim[layer])
    return out, lse


def prefill(cache, rng, count, heads, **options):
    start = cache.next_position()
    return run(cache, rng, range(start, start + count), heads, **options)


# ---- types and shapes


@pytest.mark.parametrize("v_dtype", DTYPES)
@pytest.mark.parametrize("k_dtype", DTYPES)
def test_types(isa, rng, k_dtype, v_dtype):
    cache = kvcache.KVCache(1, 2, 40, 512, v_head_dim=24, k_dtype=k_dtype, v_dtype=v_dtype)
    prefill(cache, rng, 150, 6)
    for tokens in (1, 2, 5, 20):
        prefill(cache, rng, tokens, 6)
    assert cache.keys(0).dtype == DTYPES[k_dtype]
    assert cache.values(0).dtype == DTYPES[v_dtype]


HEAD_DIMS = (1, 8, 40, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shapes(isa, rng, head_dim, group):
    """Every head_dim with every ratio of heads; the values of another head_dim, and now and then of another type."""
    i = HEAD_DIMS.index(head_dim)
    v_head_dim = HEAD_DIMS[(i + group) % len(HEAD_DIMS)]
    dtype, kv_heads = list(DTYPES)[(i + group) % 3], 1 + group % 2
    cache = kvcache.KVCache(1, kv_heads, head_dim, 128, v_head_dim=v_head_dim, dtype=dtype)
    for tokens in (67, 1, 3):
        prefill(cache, rng, tokens, kv_heads * group)


@pytest.mark.parametrize("v_head_dim", [1, 3, 7, 9, 15, 17, 31, 33, 65])
@pytest.mark.parametrize("head_dim", [2, 5, 7, 9, 16, 23, 33, 127])
def test_odd_dims(isa, rng, head_dim, v_head_dim):
    cache = kvcache.KVCache(1, 1, head_dim, 128, v_head_dim=v_head_dim, dtype=list(DTYPES)[v_head_dim % 3])
    for tokens in (19, 1, 2):
        prefill(cache, rng, tokens, 3)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_number_of_queries(isa, rng, group):
    cache = kvcache.KVCache(1, 1, 16, None, dtype="f32")
    prefill(cache, rng, 70, group)
    for tokens in range(1, 71):
        run(cache, rng, range(70, 70 + tokens), group)
        cache.truncate(70)


EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2048, 2049)


@pytest.mark.parametrize("length", EDGES)
def test_lengths(isa, rng, length):
    """Lengths that a query sees, around the edges of tiles and parts."""
    cache = kvcache.KVCache(1, 2, 24, None, v_head_dim=16, dtype="f16", block_size=48)
    if length > 1:
        with cache.batch(length - 1) as batch:
            batch.put(0, random(rng, length - 1, 2, 24), random(rng, length - 1, 2, 16))
    for tokens in (1, 4, 40):
        prefill(cache, rng, tokens, 4)
        cache.truncate(length - 1)


# ---- what is added to the softmax


@pytest.mark.parametrize("tokens", [1, 3, 30])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"scale": -0.125},
        {"scale": 1e-6},
        {"softcap": 0.5},
        {"softcap": 50.0},
        {"sinks": np.array([0, 1, -2, 5], np.float32)},
        {"sinks": np.array([-np.inf, 0, -np.inf, -100], np.float32)},
        {"sinks": np.full(4, 300, np.float32)},
        {"sinks": np.full(4, -np.inf, np.float32)},
        {"alibi": np.array([0.5, 0.25, 0, -0.01], np.float32)},
        {"alibi": np.array([8, 0.001, -8, 1], np.float32)},
        {
            "scale": 0.3, "softcap": 2.0, "sinks": np.array([1, 2, -np.inf, 0], np.float32),
            "alibi": np.array([0.5, 0.01, 0, 0.1], np.float32),
        },
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_options(isa, rng, options, tokens):
    for policy in (kvcache.FullAttention(), SLIDING(40, num_sink_tokens=3)):
        cache = kvcache.KVCache(1, 2, 32, 1024, dtype="f32", policy=policy)
        with cache.batch(600) as batch:
            batch.put(0, random(rng, 600, 2, 32), random(rng, 600, 2, 32))
        prefill(cache, rng, tokens, 4, **options)


def test_sinks_of_minus_infinity_are_none(isa, rng):
    q, k = random(rng, 20, 4, 8), random(rng, 20, 2, 8)
    with kvcache.KVCache(1, 2, 8, 64).batch(20) as batch:
        for tokens in (20, 1):
            out, lse = batch.attend(0, q[:tokens], *([k, k] if tokens == 20 else []), return_lse=True)
            same, same_lse = batch.attend(0, q[:tokens], sinks=np.full(4, -np.inf, np.float32), return_lse=True)
            np.testing.assert_array_equal(out, same)
            np.testing.assert_array_equal(lse, same_lse)


@pytest.mark.parametrize("tokens", [1, 30])
def test_a_sink_that_is_everything(isa, rng, tokens):
    cache = kvcache.KVCache(1, 1, 8, 64, dtype="f32")
    out, lse = prefill(cache, rng, tokens, 2, sinks=np.full(2, 1e30, np.float32))
    assert (out == 0).all()
    assert (lse == np.float32(1e30)).all()


@pytest.mark.parametrize("q_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_queries_of_two_bytes(isa, rng, q_dtype, dtype):
    cache = kvcache.KVCache(1, 2, 40, 1024, v_head_dim=17, dtype=dtype)
    for tokens in (600, 1, 4, 40):
        prefill(cache, rng, tokens, 6, q_dtype=q_dtype)


@pytest.mark.parametrize("q_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("dtype", [*DTYPES, *QUANTISED])
def test_prompts_of_two_bytes(isa, rng, q_dtype, dtype):
    """With AMX, such queries are multiplied as they are unless something changes them or needs scaled scores."""
    sinks = np.array([0, 9, -2, 5], np.float32)
    changes = [{"scale": 0.5}, {"scale": -0.5}, {"softcap": 2.0}, {"alibi": sinks / 8}, {"sinks": sinks}]
    for k_transform in (None, "hadamard") if dtype in QUANTISED else (None,):
        rope = kvcache.Rope(0.1 ** np.arange(32))
        cache = kvcache.KVCache(1, 2, 64, 1024, dtype=dtype, k_transform=k_transform, rope=rope)
        prefill(cache, rng, 300, 4, q_dtype=q_dtype)
        for options in changes:
            prefill(cache, rng, 30, 4, q_dtype=q_dtype, **options)
        cache.remove(64, 72)  # those behind move
        prefill(cache, rng, 30, 4, q_dtype=q_dtype)


# ---- extremes


@pytest.fixture(params=["f32", "f16", *QUANTISED])
def dtype(request):
    return request.param


def as_stored(batch):
    """Keys and values of one KV head."""
    return (rows[0].astype(np.float64) for rows in batch.dense(0)[:2])


def assert_near(result, expected, dtype):
    """The same; but for the 16 bits of what quantised rows are multiplied by."""
    np.testing.assert_allclose(result, expected, rtol=1e-4 if dtype in QUANTISED else 0)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e10, 1e17])
def test_huge_scores(isa, rng, dtype, tokens, size):
    """Scores so far apart that one row has all the weight; they are exact, so that it is known which."""
    n, dim = 700, 32 if dtype in QUANTISED else 8
    size = np.float32(2.0 ** round(math.log2(size)))
    k, v = np.zeros((n, 1, dim), np.float32), random(rng, n, 1, dim)
    k[:, 0, 0] = rng.permutation(n).astype(np.float32) - n // 2
    q = np.zeros((tokens, 2, dim), np.float32)
    q[:, 0, 0], q[:, 1, 0] = size, -size
    for order in (k, np.sort(k, 0), -np.sort(-k, 0)):  # the largest somewhere, last, first
        cache = kvcache.KVCache(1, 1, dim, None, dtype=dtype)
        with cache.batch(n) as batch:
            batch.put(0, order, v)
            out, lse = batch.attend(0, q, scale=size, first=n - tokens, return_lse=True)
            keys, values = as_stored(batch)
        for t in range(tokens):
            seen = keys[: n - tokens + t + 1, 0]
            assert_near(out[t, 0], values[seen.argmax()], dtype)
            assert_near(out[t, 1], values[seen.argmin()], dtype)
            assert_near(lse[t], np.array([seen.max(), -seen.min()]) * float(size) ** 2, dtype)


def test_equal_huge_scores(isa, dtype):
    """All weights are 1: sums and the mean of small integers are exact."""
    dim, v_dim = (32, 32) if dtype in QUANTISED else (1, 4)
    largest = 3e18 if dtype == "f32" else 2.0**14
    k, v = np.zeros((1024, 1, dim), np.float32), np.zeros((1024, 1, v_dim), np.float32)
    v[:] = np.arange(1024)[:, None, None] % 8
    for key in (largest, -largest, 0):
        k[..., 0] = key
        with kvcache.KVCache(1, 1, dim, None, v_head_dim=v_dim, dtype=dtype).batch(1024) as batch:
            batch.put(0, k, v)
            keys, values = as_stored(batch)
            for tokens in (1, 40):
                q = np.full((tokens, 1, dim), 2.0**61, np.float32)
                out, lse = batch.attend(0, q, first=1024 - tokens, scale=1, return_lse=True)
                assert_near(out[-1, 0], values.mean(0), dtype)
                assert_near(lse[-1], np.float32(keys[0, 0] * q[0, 0, 0]) + np.float32(math.log(1024)), dtype)


@pytest.mark.parametrize("tokens", [1, 20])
def test_nothing_to_see(isa, rng, dtype, tokens):
    """A query whose scores are all minus infinity sees nothing: 0, and the log of no sum. Scores can also overflow."""
    n, key = 600, -np.inf if dtype == "f32" else -(2.0**14)
    with kvcache.KVCache(1, 1, 32, None, dtype=dtype).batch(n) as batch:
        batch.put(0, np.full((n, 1, 32), key, np.float32), random(rng, n, 1, 32))
        q = np.full((tokens, 2, 32), 2.0**120, np.float32)
        out, lse = batch.attend(0, q, first=n - tokens, scale=1, return_lse=True)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        sinks = np.array([2, -np.inf], np.float32)
        out, lse = batch.attend(0, q, first=n - tokens, scale=1, return_lse=True, sinks=sinks)
        assert (out == 0).all()
        assert (lse == sinks).all()


@pytest.mark.parametrize("stored", [1, 64, 600])
@pytest.mark.parametrize("tokens", [1, 20])
def test_rows_that_no_query_sees(isa, rng, dtype, tokens, stored):
    """Later positions that are stored already count for nothing, however large; a tile may hold nothing else."""
    largest = {"f32": 1e30, "f16": 6e4, "q8_0": 8e6, "q4_0": 5e5}[dtype]
    cache, alone = (kvcache.KVCache(1, 1, 32, None, dtype=dtype) for _ in range(2))
    with cache.batch(positions=range(100, 100 + stored)) as batch:
        batch.put(0, np.full((stored, 1, 32), 1e4, np.float32), np.full((stored, 1, 32), largest, np.float32))
    q, k, v = random(rng, tokens, 2, 32), random(rng, tokens, 1, 32), random(rng, tokens, 1, 32)
    with cache.batch(positions=range(tokens)) as batch:
        out = batch.attend(0, q, k, v)
    with alone.batch(tokens) as batch:
        np.testing.assert_array_equal(batch.attend(0, q, k, v), out)
    run(cache, rng, [99 - tokens, *range(20, 19 + tokens)], 2)


@pytest.mark.parametrize("tokens", [2, 40])
def test_equal_positions_see_each_other(isa, rng, tokens):
    cache = kvcache.KVCache(1, 1, 16, None, dtype="f32")
    run(cache, rng, [5] * tokens, 2)
    run(cache, rng, [5] * tokens, 2)
    run(cache, rng, rng.integers(0, 9, tokens).tolist(), 2)
    run(cache, rng, range(2**31 - 1 - tokens, 2**31 - 1), 2, alibi=np.array([0, 1], np.float32))


# ---- windows


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("sinks", [0, 1, 70])
def test_windows(isa, rng, window, sinks):
    policies = [SLIDING(window, num_sink_tokens=sinks), SLIDING(window, sinks, window + 30), kvcache.FullAttention()]
    cache = kvcache.KVCache(3, 1, 16, None, dtype="f32", policy=policies, block_size=16)
    for tokens in (150, 1, 30, 3, 90, 1):
        start = cache.next_position()
        q, k, v = random(rng, tokens, 2, 16), random(rng, tokens, 1, 16), random(rng, tokens, 1, 16)
        with cache.batch(tokens) as batch:
            results = [batch.attend(layer, q, k, v, return_lse=True) for layer in range(3)]
            for layer, (out, lse) in enumerate(results):
                check(cache, batch, layer, range(start, start + tokens), [0] * tokens, q, out, lse)
    assert cache.stats()["rows_evicted"] > 0
    cache.validate()


# ---- batches


def ragged(rng, cache, lengths, heads):
    """Feed sequences of these lengths, and check a batch that continues each by a few tokens."""
    for seq_id, length in enumerate(lengths):
        if length:
            run(cache, rng, range(length), heads, seq_ids=[seq_id] * length)
    counts = [1 + (7 * i) % 23 if i % 3 else 1 for i in range(len(lengths))]
    tokens = [(length + i, s) for s, length in enumerate(lengths) for i in range(counts[s])]
    order = rng.permutation(len(tokens))
    positions, seq_ids = zip(*[tokens[i] for i in order], strict=True)
    run(cache, rng, positions, heads, seq_ids=seq_ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_batches(isa, rng, dtype):
    cache = kvcache.KVCache(1, 2, 20, None, dtype=dtype, max_sequences=None, block_size=16)
    ragged(rng, cache, [0, 1, 5, 63, 64, 65, 200, 2, 0, 17, 600, 31], 6)


def test_ragged_windows(isa, rng):
    policy = SLIDING(50, num_sink_tokens=2)
    cache = kvcache.KVCache(1, 1, 20, None, dtype="f32", max_sequences=None, block_size=16, policy=policy)
    ragged(rng, cache, [0, 1, 5, 63, 64, 65, 200, 2, 0, 17, 300, 31], 4)


@pytest.mark.parametrize("tokens", [3, 30])
def test_layouts_and_out(isa, rng, tokens):
    q, k, v = random(rng, tokens, 6, 24), random(rng, tokens, 2, 24), random(rng, tokens, 2, 10)
    heads_first = [x.swapaxes(0, 1) for x in (q, k, v)]
    results = []
    for arrays, layout in (
        ((q, k, v), "THD"),
        (heads_first, "HTD"),
        ([np.ascontiguousarray(x) for x in heads_first], "HTD"),
        ((q[::-1].copy()[::-1], np.asfortranarray(k)[:, :, :].copy(), v), "THD"),
    ):
        with kvcache.KVCache(1, 2, 24, 64, v_head_dim=10).batch(tokens) as batch:
            results.append(batch.attend(0, *arrays, layout=layout, return_lse=True))
            shape = results[-1][0].shape
            apart = np.zeros((2 * shape[0], 3 * shape[1], 32), np.float32)[::2, ::3, 5:15]
            for out in (np.empty(shape, np.float32), apart):
                assert batch.attend(0, arrays[0], layout=layout, out=out) is out
                np.testing.assert_array_equal(out, results[-1][0])
    for (out, lse), htd in zip(results, (False, True, True, False), strict=True):
        np.testing.assert_array_equal(out.swapaxes(0, 1) if htd else out, results[0][0])
        np.testing.assert_array_equal(lse.swapaxes(0, 1) if htd else lse, results[0][1])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_token_ranges(isa, rng, size):
    """A batch worked off in ranges, each of which sees the ones before."""
    n = 150
    q, k, v = random(rng, n, 4, 16), random(rng, n, 2, 16), random(rng, n, 2, 16)
    cache = kvcache.KVCache(2, 2, 16, None, dtype="f32", policy=[kvcache.FullAttention(), SLIDING(33)])
    run_ranges = range(0, n, size)
    with cache.batch(n) as batch:
        results = [
            [batch.attend(layer, q[i : i + size], k[i : i + size], v[i : i + size], first=i, return_lse=True)
             for i in run_ranges]
            for layer in range(2)
        ]  # fmt: skip
        for layer in range(2):
            out, lse = (np.concatenate(parts) for parts in zip(*results[layer], strict=True))
            check(cache, batch, layer, range(n), [0] * n, q, out, lse)


def test_many_tokens_per_range_of_one_sequence_among_others(isa, rng):
    """A range of a batch may hold some tokens of a sequence, and leave others of it to the next range."""
    positions, seq_ids = [0, 0, 1, 2, 1, 3, 2, 4], [3, 1, 3, 3, 1, 3, 1, 3]
    q, k, v = random(rng, 8, 2, 16), random(rng, 8, 1, 16), random(rng, 8, 1, 16)
    cache = kvcache.KVCache(1, 1, 16, None, dtype="f32", max_sequences=None)
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        batch.put(0, k, v)
        parts = [batch.attend(0, q[a:b], first=a, return_lse=True) for a, b in ((0, 3), (3, 7), (7, 8))]
        out, lse = (np.concatenate(part) for part in zip(*parts, strict=True))
        check(cache, batch, 0, positions, seq_ids, q, out, lse)


@st.composite
def policies(draw):
    """Draw a policy that keeps a sequence's last token, so that it can resume after others were fed."""
    kind = draw(st.sampled_from(["full", "window", "chunks"]))
    if kind == "full":
        return kvcache.FullAttention()
    if kind == "window":
        return SLIDING(draw(st.integers(2, 150)), draw(st.integers(0, 70)))
    return kvcache.ChunkedAttention(draw(st.integers(1, 150)), draw(st.integers(1, 70)))


def now_and_then(draw, usual, other):
    return draw(other if draw(st.integers(0, 9)) == 9 else usual)


@st.composite
def stored_rows(draw):
    """Draw the type of rows and their number of elements, now and then a size that models have."""
    dtype = draw(st.sampled_from([*DTYPES, *QUANTISED]))
    dims = st.integers(1, 3).map(lambda blocks: 32 * blocks) if dtype in QUANTISED else st.integers(1, 90)
    return dtype, now_and_then(draw, dims, st.sampled_from([128, 256]))


@st.composite
def shapes(draw):
    """Heads and rows of a layer. Those of MLA, now and then: values are the first part of the keys."""
    if draw(st.integers(0, 19)) == 19:
        return {
            "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True,
            "dtype": draw(st.sampled_from([*DTYPES, *QUANTISED])),
        }  # fmt: skip
    (k_dtype, head_dim), (v_dtype, v_head_dim) = draw(stored_rows()), draw(stored_rows())
    return {
        "num_kv_heads": draw(st.integers(1, 3)), "head_dim": head_dim, "v_head_dim": v_head_dim,
        "k_dtype": k_dtype, "v_dtype": v_dtype,
    }  # fmt: skip


def random_options(draw, rng, cache, heads):
    options = {"scale": 192**-0.5} if cache.value_in_key[0] else {}
    if draw(st.booleans(), "with softcap"):
        options["softcap"] = draw(st.floats(0.5, 50), "softcap")
    if draw(st.booleans(), "with sinks"):
        options["sinks"] = random(rng, heads)
    if draw(st.booleans(), "with alibi"):
        options["alibi"] = random(rng, heads) / 8
    return options


def run_random(draw, rng, cache, heads, most):
    """Run batches of up to `most` tokens of each of some sequences."""
    options = random_options(draw, rng, cache, heads)
    q_dtype = draw(st.sampled_from(["f32", "f32", "f16", "bf16"]), "q_dtype")
    for _ in range(draw(st.integers(1, 3), "batches")):
        positions, seq_ids = [], []
        for seq_id in draw(st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=3), "sequences"):
            start, tokens = cache.next_position(seq_id), draw(st.integers(1, most), "tokens")
            positions += range(start, start + tokens)
            seq_ids += [seq_id] * tokens
        run(cache, rng, positions, heads, seq_ids=seq_ids, q_dtype=q_dtype, **options)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_random_shapes(data, seed):
    rng, draw = np.random.default_rng(seed), data.draw
    with using(draw(st.sampled_from(ISAS), "isa")):
        cache = kvcache.KVCache(
            1, **draw(shapes(), "shape"), max_seq_len=None, policy=draw(policies(), "policy"), max_sequences=None,
            block_size=draw(st.sampled_from([1, 3, 16, 64, 1000]), "block_size"),
            num_threads=draw(st.integers(1, 3), "num_threads"),
        )  # fmt: skip
        heads = cache.num_kv_heads[0] * draw(st.integers(1, 9), "group")
        stored = now_and_then(draw, st.just(0), st.integers(400, 1300))  # over the edges of parts, too
        if stored:
            with cache.batch(stored) as batch:
                batch.put(0, *random_rows(cache, rng, stored))
        run_random(draw, rng, cache, heads, 10 if stored else 70)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_forks(data, seed):
    """Sequences that share rows in any way: right together, and to the last bit what each gives alone."""
    rng, draw = np.random.default_rng(seed), data.draw
    with using(draw(st.sampled_from(ISAS), "isa")):
        cache = kvcache.KVCache(
            1, 2, 32, None, dtype=draw(st.sampled_from([*DTYPES, *QUANTISED]), "dtype"), max_sequences=None,
            policy=draw(st.sampled_from([kvcache.FullAttention(), SLIDING(600, 3, resume_window=9999)]), "policy"),
            block_size=draw(st.sampled_from([1, 16, 64, 5000]), "block_size"),
            num_threads=draw(st.integers(1, 3), "num_threads"),
        )  # fmt: skip
    num, heads = draw(st.integers(2, 8), "sequences"), 2 * draw(st.integers(1, 5), "group")
    for seq_id in range(num):
        if seq_id and draw(st.integers(0, 9), "is fork"):
            source = draw(st.integers(0, seq_id - 1), "source")
            cache.copy_prefix(source, seq_id, draw(st.integers(0, cache.next_position(source)), "shared"))
            source, begin = draw(st.integers(0, seq_id - 1), "more from"), cache.next_position(seq_id)
            cache.share_range(source, seq_id, draw(st.integers(begin, begin + 99), "begin"), begin + 400)
        if own := draw(st.integers(0, 150 if seq_id else 1300), "own"):
            rows, start = random(rng, own, 2, 32), cache.next_position(seq_id)
            with cache.batch(positions=range(start, start + own), seq_ids=[seq_id] * own) as batch:
                batch.put(0, rows, -rows)
    seq_ids = [seq_id for seq_id in range(num) for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 9]), "tokens"))]
    seq_ids = np.array(seq_ids or [0])
    positions = np.array([cache.next_position(s) + np.sum(seq_ids[:i] == s) for i, s in enumerate(seq_ids)])
    q, k, v = random(rng, len(seq_ids), heads, 32), *(random(rng, len(seq_ids), 2, 32) for _ in range(2))
    alone = []
    for seq_id in np.unique(seq_ids):
        mine = seq_ids == seq_id
        batch = cache.batch(positions=positions[mine], seq_ids=seq_ids[mine])
        alone.append(batch.attend(0, q[mine], k[mine], v[mine], return_lse=True))
        batch.abort()
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        out, lse = batch.attend(0, q, k, v, return_lse=True)
        check(cache, batch, 0, positions, seq_ids, q, out, lse)
    assert_same((out, lse), tuple(np.concatenate(part) for part in zip(*alone, strict=True)))


# ---- the same bits


class Feed:
    """The same tokens for several caches: rows of sequence 0, and queries for its end."""

    def __init__(self, rng, length, tokens, kv_heads=2, group=4, dim=64):
        self.length, self.tokens = length, tokens
        self.q = random(rng, tokens, kv_heads * group, dim)
        self.k, self.v = random(rng, length, kv_heads, dim), random(rng, length, kv_heads, dim)

    def cache(self, **options):
        options = {"dtype": "f16", "max_sequences": None} | options
        return kvcache.KVCache(1, self.k.shape[1], self.k.shape[2], None, **options)

    def append(self, cache, begin, end, seq_id=0):
        with cache.batch(positions=range(begin, end), seq_ids=[seq_id] * (end - begin)) as batch:
            batch.put(0, self.k[begin:end], self.v[begin:end])

    def last(self, cache, seq_id=0, company=()):
        """Attends with the last tokens, alone or beside a token each of other sequences, before or behind them."""
        begin, n = self.length - self.tokens, self.tokens
        others = [cache.next_position(s) for s in company]
        positions, seq_ids = [*others, *range(begin, self.length)], [*company, *[seq_id] * n]
        batch = cache.batch(positions=positions, seq_ids=seq_ids)
        first = len(others)
        if others:
            batch.put(0, self.k[:first], self.v[:first])
        batch.put(0, self.k[begin:], self.v[begin:], first=first)
        q = np.concatenate([np.resize(self.q, (first, *self.q.shape[1:])), self.q])
        out, lse = batch.attend(0, q, return_lse=True)
        batch.abort()
        return out[first:], lse[first:]

    def result(self, **options):
        cache = self.cache(**options)
        self.append(cache, 0, self.length - self.tokens)
        return self.last(cache)


def assert_same(result, expected):
    np.testing.assert_array_equal(result[0], expected[0])
    np.testing.assert_array_equal(result[1], expected[1])


POLICIES = {"full": kvcache.FullAttention(), "window": SLIDING(700, num_sink_tokens=5)}


@pytest.fixture(params=[(1100, 1), (1100, 2), (1500, 33)], ids=["one", "few", "many"])
def feed(request, rng):
    return Feed(rng, *request.param)


@pytest.mark.parametrize("policy", POLICIES)
def test_any_number_of_threads(isa, feed, policy):
    results = [feed.result(policy=POLICIES[policy], num_threads=n) for n in (1, 2, 3, 8)]
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_any_block_size(isa, feed, policy):
    expected = feed.result(policy=POLICIES[policy], block_size=feed.length)
    for block_size in (1, 3, 16, 64, 500):
        assert_same(feed.result(policy=POLICIES[policy], block_size=block_size), expected)


def test_holes_and_compact(isa, feed):
    """Rows that lie scattered among those of another sequence, with holes when that is gone, and moved together."""
    expected = feed.result(block_size=16)
    cache = feed.cache(block_size=16)
    end = feed.length - feed.tokens
    for begin in range(0, end, 37):
        feed.append(cache, begin, min(begin + 37, end))
        cache.fork(0, 1) if begin == 0 else None
        feed.append(cache, cache.next_position(1), cache.next_position(1) + 5, seq_id=1)
    assert_same(feed.last(cache), expected)
    cache.fork(0, 2)
    assert_same(feed.last(cache, seq_id=2), expected)
    cache.clear(1)
    assert_same(feed.last(cache), expected)
    moved = cache.stats()["rows_moved"]
    cache.compact()
    assert cache.stats()["rows_moved"] > moved
    assert_same(feed.last(cache), expected)
    assert_same(feed.last(cache, seq_id=2), expected)
    cache.validate()


def test_removed_positions(isa, feed):
    """Rows that were removed leave no trace: as if they had never been put."""
    end = feed.length - feed.tokens
    cache, never = feed.cache(block_size=16), feed.cache(block_size=64)
    feed.append(cache, 0, end)
    for position in range(0, end, 11):
        cache.remove(position, position + 4, shift=False)
        if position + 4 < end:
            feed.append(never, position + 4, min(position + 11, end))
    assert cache.positions().tolist() == never.positions().tolist()
    expected = feed.last(never)
    assert_same(feed.last(cache), expected)
    cache.compact()
    assert_same(feed.last(cache), expected)


HOLES = {
    "every second": lambda n: np.arange(n) % 2 == 0,
    "every third": lambda n: np.arange(n) % 3 == 0,
    "at random": lambda n: np.random.default_rng(7).random(n) < 0.5,
}


@pytest.mark.parametrize("holes", HOLES)
def test_holes_of_one_slot(isa, feed, holes):
    """Rows between holes are read in place where they lie evenly, else copied: the bits of rows without holes."""
    end = feed.length - feed.tokens
    is_hole = HOLES[holes](end)
    dense = feed.cache(block_size=feed.length)
    for position in np.flatnonzero(~is_hole).tolist():
        feed.append(dense, position, position + 1)
    expected = feed.last(dense)
    for block_size in (1, 8, 64, feed.length):
        cache = feed.cache(block_size=block_size)
        feed.append(cache, 0, end)
        for position in np.flatnonzero(is_hole).tolist():
            cache.remove(position, position + 1, shift=False)
        assert_same(feed.last(cache), expected)


def test_alone_or_in_company(isa, feed):
    expected = feed.result()
    cache = feed.cache(num_threads=2)
    feed.append(cache, 0, feed.length - feed.tokens, seq_id=5)
    for seq_id, length in ((1, 3), (9, 700), (3, 64), (-4, 1)):
        feed.append(cache, 0, length, seq_id)
    for company in ([1], [9, 3], [77], [1, 9, 3, -4, 77]):
        assert_same(feed.last(cache, seq_id=5, company=company), expected)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 20), length=st.integers(1, 700))
def test_arrival_in_any_batches(seed, tokens, length):
    """However the rows came, in whatever blocks."""
    rng = np.random.default_rng(seed)
    feed = Feed(rng, length + tokens, tokens, dim=16)
    expected = feed.result(num_threads=1)
    cache = feed.cache(block_size=int(rng.integers(1, 100)), num_threads=2)
    done = 0
    while done < length:
        count = min(length - done, int(rng.integers(1, 200)))
        feed.append(cache, done, done + count)
        done += count
        if rng.random() < 0.2:
            cache.fork(0, int(rng.integers(1, 4)))
    assert_same(feed.last(cache), expected)


# ---- processes and threads


def in_child(cache, q, k, queue):
    kvcache.set_num_threads(4)
    with cache.batch(positions=range(600, 640)) as batch:
        out = batch.attend(0, q, k, k)
    cache.validate()
    queue.put((out, cache.keys(0, copy=True), kvcache.get_num_threads()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # from Python 3.12 on, beside threads
def test_a_child_after_fork_computes_right(rng):
    """The threads that the parent has are not there in the child, which must not wait for them."""
    cache = kvcache.KVCache(1, 4, 64, 1024, dtype="f32", num_threads=4)
    k = random(rng, 640, 4, 64)
    q = random(rng, 40, 8, 64)
    with cache.batch(600) as batch:
        batch.attend(0, random(rng, 600, 8, 64), k[:600], k[:600])  # so that there are threads
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(cache, q, k[600:], queue), daemon=True)
    child.start()
    try:
        assert queue_has(queue, child, timeout=60), "the child hangs, or died"
        out, keys, num_threads = queue.get()
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        child.close()
        queue.close()
    with cache.batch(positions=range(600, 640)) as batch:
        np.testing.assert_array_equal(batch.attend(0, q, k[600:], k[600:]), out)
    np.testing.assert_array_equal(keys, cache.keys(0))
    assert num_threads == 1


def queue_has(queue, child, timeout):
    """Waits until something was sent, or the child is gone."""
    ready = multiprocessing.connection.wait([queue._reader, child.sentinel], timeout)
    return queue._reader in ready


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "policy",
    [kvcache.FullAttention(), SLIDING(90, 3, resume_window=800), kvcache.ChunkedAttention(100, resume_window=800)],
)
def test_shared_rows_give_the_bits_of_rows_put_in_their_order(rng, policy, dtype):
    """Sequence 0 is put together from ranges of others, which come in no order of positions."""
    ranges = [(40, 60), (120, 700), (0, 30), (60, 120), (30, 40)]
    order = [position for begin, end in ranges for position in range(begin, end)]
    k, v, q = random(rng, 705, 2, 64), random(rng, 705, 2, 64), random(rng, 5, 8, 64)
    results = []
    for shares in (False, True):
        cache = kvcache.KVCache(1, 2, 64, None, dtype=dtype, policy=policy, max_sequences=None, block_size=16)
        positions, seq_ids = order, [0] * 700
        if shares:  # one batch for all, so that none evicts what another put
            positions = sorted(range(700), key=lambda p: p % 3) + order[:20]
            seq_ids = [1] * 234 + [2] * 233 + [3] * 233 + [0] * 20
        with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
            batch.put(0, k[positions], v[positions])
        for begin, end in ranges[1:] if shares else []:
            for position in range(begin, end):
                cache.share_range(1 + position % 3, 0, position, position + 1)
        assert cache.positions().tolist() == order
        with cache.batch(positions=range(700, 705)) as batch:
            results.append(batch.attend(0, q, k[700:], v[700:], return_lse=True))
            results.append(batch.attend(0, q, hidden=[(0, 50, 65), (0, 600, 650)], return_lse=True))
        assert cache.positions()[-5:].tolist() == list(range(700, 705))
    assert_same(results[0], results[2])
    assert_same(results[1], results[3])


def test_edits_beside_attention(rng):
    """One thread attends with sequence 0; another forks and clears others, which share its blocks."""
    feed = Feed(rng, 1200, 3)
    expected = feed.result(num_threads=2)
    cache = feed.cache(block_size=16, num_threads=2)
    end = feed.length - feed.tokens
    feed.append(cache, 0, end)
    cache.fork(0, 1)
    done, failures, edits = threading.Event(), [], [0]

    def edit(kind, dst, length):
        match kind:
            case 0:
                cache.fork(1, dst)
            case 1:
                cache.copy_prefix(1, dst, length)
            case 2:
                cache.clear(dst)
            case 3:
                cache.remove(length // 2, length, seq_id=dst, shift=False)
            case 4:
                cache.truncate(length, seq_id=dst)
            case 5:
                cache.validate()
            case 6:
                cache.share_range(1, dst, length // 2, length)

    def keep_editing():
        numbers = np.random.default_rng(1)
        try:
            while not done.is_set():
                edit(*(int(numbers.integers(*bounds)) for bounds in ((0, 7), (2, 9), (0, end))))
                edits[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=keep_editing)
    thread.start()
    try:
        rounds, deadline = 0, time.monotonic() + 30
        while rounds < 20 or (edits[0] <= 20 and thread.is_alive() and time.monotonic() < deadline):
            rounds += 1
            with cache.batch(positions=range(end, feed.length)) as batch:
                batch.put(0, feed.k[end:], feed.v[end:])
                for _ in range(5):
                    assert_same(batch.attend(0, feed.q, return_lse=True), expected)
                batch.abort()
    finally:
        done.set()
        thread.join()
    assert not failures
    assert edits[0] > 20
    assert cache.positions().tolist() == cache.positions(seq_id=1).tolist() == list(range(end))
    cache.validate()
    assert_same(feed.last(cache), expected)
    assert_same(feed.last(cache, seq_id=1), expected)
