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
    return not {cache.layers[layer].k_dtype, cache.layers[layer].v_dtype}.isdisjoint(types)


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
        sees = visible(cache.layers[layer].policy, positions[mine], stored)
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
    like = cache.layers[layer]
    dims = like.head_dim, like.v_head_dim
    k, v = (random(rng, n, like.num_kv_heads, dim) for dim in dims)
    return k, None if like.value_in_key else v


def run(cache, rng, positions, heads, *, seq_ids=None, layer=0, q_dtype="f32", **options):
    """Appends tokens, random ones, attends over them, and checks the result."""
    n = len(positions)
    seq_ids = [0] * n if seq_ids is None else seq_ids
    q = random(rng, n, heads, cache.layers[layer].head_dim).astype(DTYPES[q_dtype])
    k, v = random_rows(cache, rng, n, layer)
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        out, lse = batch.attend(layer, q, k, v, return_lse=True, **options)
        check(cache, batch, layer, positions, seq_ids, q, out, lse, **options)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    assert out.shape == (n, heads, cache.layers[layer].v_head_dim)
    return out, lse


def prefill(cache, rng, count, heads, **options):
    start = cache.next_position()
    return run(cache, rng, range(start, start + count), heads, **options)


# ---- what is added to the softmax


@pytest.mark.parametrize("q_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("dtype", [*DTYPES, *QUANTISED])
def test_prompts_of_two_bytes(isa, rng, q_dtype, dtype):
    """With AMX, such queries are multiplied as they are unless something changes them or needs scaled scores."""
    sinks = np.array([0, 9, -2, 5], np.float32)
    changes = [{"scale": 0.5}, {"scale": -0.5}, {"softcap": 2.0}, {"alibi": sinks / 8}, {"sinks": sinks}]
    for k_transform in (None, "hadamard") if dtype in QUANTISED else (None,):
        rope = kvcache.Rope(0.1 ** np.arange(32))
        cache = kvcache.KVCache(1, 2, 64, 1024, dtype=dtype, k_transform=k_transform, rope=rope)
        prefill(cache, rng, 130, 4, q_dtype=q_dtype)
        for options in changes:
            prefill(cache, rng, 30, 4, q_dtype=q_dtype, **options)
        cache.remove(64, 72)  # those behind move
        prefill(cache, rng, 30, 4, q_dtype=q_dtype)


# ---- batches


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
    options = {"scale": 192**-0.5} if cache.layers[0].value_in_key else {}
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
        heads = cache.layers[0].num_kv_heads * draw(st.integers(1, 9), "group")
        stored = now_and_then(draw, st.just(0), st.integers(400, 1300))  # over the edges of parts, too
        if stored:
            with cache.batch(stored) as batch:
                batch.put(0, *random_rows(cache, rng, stored))
        run_random(draw, rng, cache, heads, 10 if stored else 70)


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


@pytest.fixture(params=[(1100, 1), (1100, 2), (1500, 33)], ids=["one", "few", "many"])
def feed(request, rng):
    return Feed(rng, *request.param)


# ---- processes and threads


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
