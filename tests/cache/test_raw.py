"""Rows as they are stored: out by gather and extract with raw=True, and in by put, attend and inject, as uint8."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import fake_dlpack, row_types
from support.ggml_blocks import SIZES
from support.row_types import TYPES

import kvcache

FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, **{name: size / 32 for name, size in SIZES.items()}}
HEADS, K_DIM, V_DIM, TOKENS = 3, 64, 32, 21


def row_bytes(dtype, dim):
    return row_types.row_bytes(dtype, dim) if dtype in row_types.NAMES else dim * BYTES[dtype]


ROPE = kvcache.Rope(10_000.0 ** (-np.arange(0, 32, 2) / 32))


def new_cache(k_dtype="q8_0", v_dtype="q4_0", **options):
    options = {"v_head_dim": V_DIM, "max_sequences": 3, "block_size": 4, "rope": ROPE} | options
    return kvcache.KVCache(1, HEADS, K_DIM, 64, k_dtype=k_dtype, v_dtype=v_dtype, **options)


def random_rows(tokens=TOKENS, seed=0, dims=(K_DIM, V_DIM)):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((tokens, HEADS, dim)).astype(np.float32) for dim in dims]


def feed(cache, *rows, seq_id=0, **options):
    tokens = rows[0].shape[1 if options.get("layout") == "HTD" else 0]
    with cache.batch(tokens, seq_ids=[seq_id] * tokens) as batch:
        batch.put(0, *rows, **options)


def fed(k_dtype="q8_0", v_dtype="q4_0", tokens=TOKENS, **options):
    cache = new_cache(k_dtype, v_dtype, **options)
    feed(cache, *random_rows(tokens))
    return cache


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == np.uint8
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("k_dtype", "v_dtype"), list(zip(TYPES, [*TYPES[1:], TYPES[0]], strict=True)))
def test_round_trip(k_dtype, v_dtype):
    cache, other = fed(k_dtype, v_dtype), new_cache(k_dtype, v_dtype)
    k, v = raw = cache.gather(0, raw=True)
    assert (k.shape, v.shape) == (
        (HEADS, TOKENS, row_bytes(k_dtype, K_DIM)),
        (HEADS, TOKENS, row_bytes(v_dtype, V_DIM)),
    )
    for rows, dtype, stored in ((k, k_dtype, cache.keys), (v, v_dtype, cache.values)):
        if dtype in FLOATS:
            np.testing.assert_array_equal(rows.view(FLOATS[dtype]), stored(0))
    assert_same(cache.gather(0, first=5, raw=True), [k[:, 5:], v[:, 5:]])
    feed(other, k, v, layout="HTD")
    feed(other, k.swapaxes(0, 1), v.swapaxes(0, 1), seq_id=1)
    for seq_id in (0, 1):
        assert_same(other.gather(0, seq_id=seq_id, raw=True), raw)
        for x, y in zip(other.gather(0, seq_id=seq_id), cache.gather(0), strict=True):
            np.testing.assert_array_equal(x, y)
    feed(other, *random_rows(seed=1), seq_id=2)
    assert other.inject(0, 0, k, v, seq_id=2) == TOKENS
    assert_same(other.gather(0, seq_id=2, raw=True), raw)


@pytest.mark.parametrize("dtype", row_types.NAMES)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 32), (128, 96), (1024, 192), (1536, 2080)])
def test_row_scales(tmp_path, dtype, k_dim, v_dim):
    """A row is codes and, behind them, one f16 scale; in saved states the two are tensors of their own."""
    rows = random_rows(dims=(k_dim, v_dim))
    for x in rows:
        x[..., 3] *= 30
        x[4] += 10
        x[5] = 0 if dtype != "int8" else 1
        x[6] *= 1e-5
    with kvcache.KVCache(1, HEADS, k_dim, 64, v_head_dim=v_dim, dtype=dtype) as cache:
        feed(cache, *rows)
        raw = cache.gather(0, raw=True)
        for i, x in enumerate(rows):
            expected, decoded = row_types.encoded(x.swapaxes(0, 1), dtype)
            np.testing.assert_array_equal(raw[i], expected)
            np.testing.assert_array_equal(cache.gather(0)[i], decoded)
        with cache.batch(1) as batch:
            with pytest.raises(
                kvcache.NotSupportedError, match=rf"layer 0 stores {dtype}, whose scales lie apart: put\(\)"
            ):
                batch.slots(0)
            batch.put(0, *random_rows(1, dims=(k_dim, v_dim)))
        cache.save(tmp_path / "state")
        tensors = load_file(tmp_path / "state")
        for name, x in zip("kv", cache.gather(0, raw=True), strict=True):
            elements = x[..., :-2].view(np.int8 if dtype == "int8" else np.uint8)
            np.testing.assert_array_equal(tensors[f"layer.0.{name}"], elements)
            np.testing.assert_array_equal(tensors[f"layer.0.{name}.scale"], x[..., -2:].view(np.float16)[..., 0])
        with kvcache.KVCache.load(tmp_path / "state") as other:
            assert_same(other.gather(0, raw=True), cache.gather(0, raw=True))


@pytest.mark.parametrize("dtype", row_types.NAMES)
def test_values_in_keys(dtype):
    """A value may be the beginning of its key where whole blocks of the key's matrix are in it."""
    (k, _), q = random_rows(dims=(96, 32)), np.ones((TOKENS, HEADS, 96), np.float32)
    with kvcache.KVCache(1, HEADS, 96, 64, v_head_dim=64, dtype=dtype, value_in_key=True) as cache:
        with cache.batch(TOKENS) as batch:
            out = batch.attend(0, q, k, scale=0.1)
        _, decoded = row_types.encoded(k.swapaxes(0, 1), dtype)
        for found, expected in zip(cache.gather(0), (decoded, decoded[..., :64]), strict=True):
            np.testing.assert_array_equal(found, expected)
        scores = np.einsum("thd,hsd->hts", q, decoded) * 0.1
        scores[:, ~np.tri(TOKENS, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out, np.einsum("hts,hsd->thd", weights, decoded[..., :64]), atol=1e-3)
    if dtype != "int8":
        with pytest.raises(ValueError, match="must be a multiple of 64"):
            kvcache.KVCache(1, HEADS, 64, 64, v_head_dim=32, dtype=dtype, value_in_key=True)


@pytest.mark.parametrize("dtype", ["int6", "int4"])
@pytest.mark.parametrize("element", [np.nan, np.inf, -np.inf, 1e30, 2e8])
def test_rows_that_are_no_numbers(dtype, element):
    """A row with an element that no scale reaches, or that is no number, is NaN; other rows stay."""
    cache, rows = new_cache(dtype, dtype), random_rows(2)
    for x in rows:
        x[1, 1, 5] = element
    feed(cache, *rows)
    for x in cache.gather(0):
        np.testing.assert_array_equal(np.isnan(x).any(-1), [[False, False], [False, True], [False, False]])
        np.testing.assert_array_equal(np.isfinite(x).all(-1), [[True, True], [True, False], [True, True]])


@pytest.mark.parametrize("dtype", TYPES)
def test_out(dtype):
    """Into arrays of the caller: heads first or last, with gaps, through DLPack."""
    cache = fed(dtype, dtype)
    k, v = cache.gather(0, raw=True)
    by_token = [np.empty((TOKENS, HEADS, x.shape[2]), np.uint8) for x in (k, v)]
    views = tuple(x.swapaxes(0, 1) for x in by_token)
    assert cache.gather(0, raw=True, out=views) is views
    assert_same(views, [k, v])
    gaps = [np.full((HEADS, TOKENS, x.shape[2] + 4), 7, np.uint8) for x in (k, v)]
    wrapped = tuple(fake_dlpack.Array(x[..., :-4], 1) for x in gaps)  # 1: unsigned integers
    cache.gather(0, raw=True, out=wrapped)
    assert_same([x[..., :-4] for x in gaps], [k, v])
    assert all((x[..., -4:] == 7).all() for x in gaps)
    other = new_cache(dtype, dtype)
    with other.batch(TOKENS) as batch:
        batch.put(0, *wrapped, layout="HTD")
    assert_same(other.gather(0, raw=True), [k, v])


@pytest.mark.parametrize("dtype", TYPES)
def test_any_address(dtype):
    """Bytes of a file need no alignment to go in."""
    k, v = fed(dtype, dtype).gather(0, raw=True)
    state = b"x" + k.tobytes() + v.tobytes()
    at = np.frombuffer(state, np.uint8)[1:]
    other = new_cache(dtype, dtype)
    feed(other, at[: k.size].reshape(k.shape), at[k.size :].reshape(v.shape), layout="HTD")
    assert_same(other.gather(0, raw=True), [k, v])
    spread = [np.repeat(x, 2, -1)[..., ::2] for x in (k, v)]  # bytes that are not adjacent are copied first
    assert other.inject(0, 0, *spread) == TOKENS
    assert_same(other.gather(0, raw=True), [k, v])


def test_what_is_refused():
    cache = fed()
    k, v = cache.gather(0, raw=True)
    floats, _ = cache.gather(0)
    calls = {
        "put": lambda *rows: batch.put(0, *rows, layout="HTD"),
        "attend": lambda *rows: batch.attend(0, floats, *rows, layout="HTD"),
        "inject": lambda *rows: cache.inject(0, 0, *rows),
    }
    other = new_cache()
    batch = other.batch(TOKENS)
    for call in calls.values():
        with pytest.raises(ValueError, match=r"k: .*\(3, 21, 67\).*\(3, tokens, 68\).*q8_0, as they are stored"):
            call(k[..., :-1], v)
        with pytest.raises(ValueError, match=r"v: .*\(2, 21, 18\).*\(3, tokens, 18\).*q4_0"):
            call(k, v[:2])
        with pytest.raises(TypeError, match="k: elements of type uint8, where float32"):
            call(k[..., :64], v)
        with pytest.raises(TypeError, match="k: elements of type int8"):
            call(k.view(np.int8), v)
        with pytest.raises(ValueError, match="k and v: of 21 and 20 tokens"):
            call(k, v[:, 1:])
    with pytest.raises(TypeError, match="q: elements of type uint8"):
        batch.attend(0, k, k, v, layout="HTD")
    batch.put(0, k, v, layout="HTD")  # nothing was put
    batch.commit()
    assert_same(cache.gather(0, raw=True), [k, v])
    with pytest.raises(ValueError, match="dtype='f16': raw=True"):
        cache.gather(0, dtype="f16", raw=True)
    with pytest.raises(TypeError, match="elements of type uint8"):
        cache.gather(0, out=(k, v))
    with pytest.raises(TypeError, match=r"out\[0\]: elements of type float32, where raw=True needs uint8"):
        cache.gather(0, out=(floats, v), raw=True)
    with pytest.raises(ValueError, match=r"out\[1\]: .*\(3, 21, 18\)"):
        cache.gather(0, out=(k, k), raw=True)
    with pytest.raises(ValueError, match=r"q8_0, which no array can show.*raw=True"):
        cache.keys(0)
