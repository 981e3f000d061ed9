"""Rows as they are stored: out by gather and extract with raw=True, and in by put, attend and inject, as uint8."""

import ml_dtypes
import numpy as np
import pytest
from support import fake_dlpack, row_types
from support.ggml_blocks import SIZES, blocks, quantised_by_gguf
from support.row_types import hadamard

import kvcache

FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, **{name: size / 32 for name, size in SIZES.items()}}
HEADS, K_DIM, V_DIM, TOKENS = 3, 64, 32, 21
KINDS = "bf16", "q4_0", "int8"  # of floats, of blocks, with a scale for each row


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


@pytest.mark.parametrize(("k_dtype", "v_dtype"), [("q8_0", "f16"), ("bf16", "int6"), ("f32", "q4_1"), ("int4", "q5_1")])
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


def raw_rows(rows, dtype, **options):
    """Return the bytes that a cache makes of rows, and its representation."""
    (k, v), dims = rows, [x.shape[2] for x in rows]
    with kvcache.KVCache(1, HEADS, dims[0], 64, v_head_dim=dims[1], dtype=dtype, **options) as cache:
        feed(cache, k, v)
        return cache.gather(0, raw=True), repr(cache)


@pytest.mark.parametrize("dtype", SIZES)
def test_bytes_are_those_of_ggml(dtype):
    """Rows are ordinary, or have ties, zeros, huge or tiny elements, or one element alone."""
    x = random_rows(dims=(64, 64))[0]
    x[0, 0] = np.arange(64) - 31.5  # many halves once they are scaled
    x[0, 1] = 0
    x[1, 0, :32] = 1e6
    x[1, 0, 32:] = 65504
    x[1, 1] *= 1e-7
    x[2, 0, 1:] = 0
    x[2, 1, :32] = np.linspace(-127, 127, 32)  # a scale of 1
    x[3] = 1e-35
    raw, _ = raw_rows([x, x], dtype)
    assert_same(raw, [np.swapaxes(blocks(x, dtype), 0, 1)] * 2)
    y = random_rows(seed=1, dims=(64, 64))
    raw, _ = raw_rows(y, dtype)
    for found, x in zip(raw, y, strict=True):
        by_gguf = quantised_by_gguf(x, dtype)
        np.testing.assert_array_equal(found, np.swapaxes(blocks(x, dtype) if by_gguf is None else by_gguf, 0, 1))


@pytest.mark.parametrize(("k_dim", "v_dim", "orders"), [(96, 160, (32, 32)), (2048, 192, (1024, 64))])
def test_transforms(k_dim, v_dim, orders):
    """The largest power of two that divides the dimension is the matrix's order: at most 1024, of values 64."""
    rows = random_rows(dims=(k_dim, v_dim))
    plain, _ = raw_rows(rows, "q8_0")
    turned = [np.swapaxes(blocks(hadamard(x, order), "q8_0"), 0, 1) for x, order in zip(rows, orders, strict=True)]
    for transforms in ((None, "hadamard"), ("hadamard", None)):
        options = dict(zip(("k_transform", "v_transform"), transforms, strict=True))
        raw, shown = raw_rows(rows, "q8_0", **options)
        assert_same(raw, [turned[i] if transform else plain[i] for i, transform in enumerate(transforms)])
        assert "hadamard" in shown


def test_types_that_take_no_transform():
    for dtype in ("f16", "int4"):
        raw, shown = raw_rows(random_rows(), dtype, k_transform="hadamard", v_transform="hadamard")
        assert_same(raw, raw_rows(random_rows(), dtype)[0])
        assert "hadamard" not in shown


def test_row_scales_have_no_slots():
    with new_cache("f32", "int6").batch(1) as batch:
        with pytest.raises(kvcache.NotSupportedError, match=r"layer 0 stores int6, whose scales lie apart: put\(\)"):
            batch.slots(0)
        batch.abort()


@pytest.mark.parametrize("dtype", KINDS)
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


@pytest.mark.parametrize("dtype", KINDS)
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
