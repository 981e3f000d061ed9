"""Batch.attend against a softmax in float64: each option and type of query reaches the core. Its errors, for every
type, policy and instruction set, are measured in C (tests/c/attend)."""

import ml_dtypes
import numpy as np
import pytest
from support.attention import attend, weigh

import kvcache

HEADS, KV_HEADS, DIM, V_DIM, TOKENS = 6, 2, 24, 10, 9


def rows(seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((tokens, heads, dim)).astype(np.float32)
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5},
        {"scale": -0.5},
        {"softcap": 2.0},
        {"sinks": np.linspace(-2, 3, HEADS, dtype=np.float32)},
        {"alibi": np.linspace(0, 0.5, HEADS, dtype=np.float32)},
    ],
    ids=str,
)
def test_options(options, dtype):
    options = options.copy()
    q, k, v = rows()
    q = q.astype(dtype)
    with kvcache.KVCache(1, KV_HEADS, DIM, 64, v_head_dim=V_DIM, dtype="f32").batch(TOKENS) as batch:
        out, lse = batch.attend(0, q, k, v, return_lse=True, **options)
    apart = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
    seen = apart >= 0, -options.pop("alibi", np.zeros(HEADS))[:, None, None] * apart
    expected, (_, expected_lse) = attend(q, k, v, *seen, **options), weigh(q, k, *seen, **options)
    assert (out.dtype, lse.dtype, out.shape) == (dtype, np.float32, (TOKENS, HEADS, V_DIM))
    np.testing.assert_allclose(out.astype(float), expected, atol=1e-5 + 2 * float(ml_dtypes.finfo(dtype).eps))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_precision(monkeypatch):
    """In bytes an answer is less precise, in 16 tokens behind 300 rows. tests/c/attend/test_bytes.c says when."""
    monkeypatch.setenv("KVCACHE_ISA", "scalar")  # which multiplies bytes
    rng, outs = np.random.default_rng(16), []
    q, k, v = (rng.standard_normal((316, heads, 64)).astype(np.float32) for heads in (8, 1, 1))
    for precision in ("stored", "int8"):
        cache = kvcache.KVCache(1, 1, 64, 316, dtype="int8")
        with cache.batch(300) as batch:
            batch.put(0, k[:300], v[:300])
        with cache.batch(16) as batch:
            outs.append(batch.attend(0, q[300:], k[300:], v[300:], precision=precision))
    assert 1e-3 < np.linalg.norm(outs[1] - outs[0]) / np.linalg.norm(outs[0]) < 0.03


@pytest.mark.parametrize("layout", ["THD", "HTD", "BHTD"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_prior(dtype, layout):
    """A call joins the result for another layer in its softmax; either call may get the sinks."""
    q, k, v = (x.swapaxes(0, 1) if layout != "THD" else x for x in rows())
    q, k, v = (x[None] if layout == "BHTD" else x for x in (q.astype(dtype), k, v))
    sinks = np.linspace(-2, 3, HEADS, dtype=np.float32)
    early, late = [(0, 0, 4)], [(0, 4, TOKENS)]
    with kvcache.KVCache(3, KV_HEADS, DIM, 64, v_head_dim=V_DIM, dtype="f32").batch(TOKENS) as batch:
        for layer in range(3):
            batch.put(layer, k, v, layout=layout)
        options = {"layout": layout, "return_lse": True}
        whole, whole_lse = batch.attend(0, q, sinks=sinks, **options)
        prior = batch.attend(1, q, sinks=sinks, masked=late, **options)
        out, lse = batch.attend(2, q, masked=early, prior=prior, **options)
        tolerance = 1e-6 if dtype == np.float32 else 0.02
        np.testing.assert_allclose(out.astype(float), whole.astype(float), atol=tolerance)
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-6 if dtype == np.float32 else 1e-3)
        prior = batch.attend(1, q, masked=late, **options)
        in_place = batch.attend(2, q, masked=early, sinks=sinks, prior=prior, out=prior[0], layout=layout)
        assert in_place is prior[0]
        np.testing.assert_allclose(in_place.astype(float), whole.astype(float), atol=tolerance)


@pytest.mark.parametrize("layout", ["THD", "BHTD"])
def test_results_of_floats(layout):
    """Queries of 16 bits may have results of float32, which are joined without being rounded."""
    q, k, v = (x.swapaxes(0, 1)[None] if layout == "BHTD" else x for x in rows())
    q = q.astype(ml_dtypes.bfloat16)
    early, late = [(0, 0, 4)], [(0, 4, TOKENS)]
    with kvcache.KVCache(2, KV_HEADS, DIM, 64, v_head_dim=V_DIM, dtype="f32").batch(TOKENS) as batch:
        for layer in range(2):
            batch.put(layer, k, v, layout=layout)
        options = {"layout": layout, "return_lse": True}
        whole, part = (np.empty((*q.shape[:-1], V_DIM), np.float32) for _ in range(2))
        rounded, _ = batch.attend(0, q, **options)
        assert batch.attend(0, q, out=whole, layout=layout) is whole
        np.testing.assert_array_equal(whole.astype(ml_dtypes.bfloat16), rounded)
        prior = batch.attend(1, q, masked=late, out=part, **options)
        joined = batch.attend(0, q, masked=early, prior=prior, layout=layout)
        assert joined.dtype == np.float32
        np.testing.assert_allclose(joined, whole, atol=1e-6)


@pytest.mark.hf
def test_tensors_of_floats():
    import torch

    q, k, v = (torch.tensor(x) for x in rows())
    with kvcache.KVCache(1, KV_HEADS, DIM, 64, v_head_dim=V_DIM, dtype="f32").batch(TOKENS) as batch:
        batch.put(0, k, v)
        out, lse = batch.attend(0, q.bfloat16(), out=torch.empty(TOKENS, HEADS, V_DIM), return_lse=True)
        joined = batch.attend(0, q.bfloat16(), prior=(out, lse))
        assert joined.dtype == torch.float32
        torch.testing.assert_close(joined, out)  # each row counts twice


# The machine chooses one; the other one multiplies panels.
@pytest.mark.parametrize("isa", [None, pytest.param("avx512vnni", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("dtype", ["int8", "int6", "int4"])
@pytest.mark.parametrize(("dim", "precision"), [(1 << 18, "stored"), (1 << 18, "int8"), (1 << 16, "int8")])
def test_long_heads(dim, precision, dtype, tokens, isa, monkeypatch):
    """Products of many elements, all of one sign, do not overflow where they are added up as integers."""
    if isa:
        monkeypatch.setenv("KVCACHE_ISA", isa)
        try:
            kvcache.KVCache(1, 1, 32, 64)
        except kvcache.NotSupportedError:
            pytest.skip(f"this processor lacks {isa}")
    x = np.ones((tokens, 1, dim), np.float32)
    v = np.ones((tokens, 1, 32), np.float32)
    with kvcache.KVCache(1, 1, dim, 64, v_head_dim=32, k_dtype=dtype, v_dtype="f32").batch(tokens) as batch:
        _, lse = batch.attend(0, x, x, v, scale=1 / dim, precision=precision, return_lse=True)
    np.testing.assert_allclose(lse[:, 0], 1 + np.log(np.arange(1, tokens + 1)), atol=0.01)
