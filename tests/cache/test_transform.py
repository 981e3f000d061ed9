"""k_transform and v_transform: rows are multiplied by a Hadamard matrix where they are quantised, and back."""

import copy

import numpy as np
import pytest
from support.ggml_blocks import NAMES, STEPS, blocks, decoded
from support.row_types import hadamard

import kvcache

HEADS = 2
HADAMARD = {"k_transform": "hadamard", "v_transform": "hadamard"}
ROPE_DIM = 32


def key_order(dim):
    return min(dim & -dim, 1024)


def value_order(dim):
    return min(dim & -dim, 64)


def rows(n, *dims, seed=0):
    """Rows with an element that is much larger than the others, as keys of real models have."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((n, HEADS, dim)).astype(np.float32) for dim in dims]
    for x in made:
        x[..., 3] *= 30
    return made


def new_cache(dim, dtype, v_dim=None, **options):
    return kvcache.KVCache(1, HEADS, dim, 64, v_head_dim=v_dim, dtype=dtype, **{**HADAMARD, **options})


def filled(k, v, dtype, **options):
    cache = new_cache(k.shape[-1], dtype, v.shape[-1], **options)
    with cache.batch(len(k)) as batch:
        batch.put(0, k, v)
    return cache


def by_head(x):
    return np.swapaxes(x, 0, 1)


def encoded(x, name, order):
    return blocks(hadamard(x, order), name)


def through(x, name, order):
    """What rows are once they were stored and read."""
    return hadamard(decoded(encoded(x, name, order), name), order)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (128, 256), (96, 160), (192, 32), (2048, 128), (1536, 64)])
def test_bytes(name, k_dim, v_dim):
    """The largest power of two that divides the dimension is the matrix's order, of values at most 64."""
    k, v = rows(9, k_dim, v_dim)
    cache = filled(k, v, name)
    raw = cache.gather(0, raw=True)
    np.testing.assert_array_equal(raw[0], by_head(encoded(k, name, key_order(k_dim))))
    np.testing.assert_array_equal(raw[1], by_head(encoded(v, name, value_order(v_dim))))
    for found, x, order in zip(cache.gather(0), (k, v), (key_order(k_dim), value_order(v_dim)), strict=True):
        np.testing.assert_array_equal(found, by_head(through(x, name, order)))


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [*((dtype, (24, 7)) for dtype in ("f32", "f16", "bf16")), *((dtype, (64, 32)) for dtype in ("int6", "int4"))],
)
def test_floats_and_types_with_a_matrix_of_their_own_take_no_other(dtype, dims):
    k, v = rows(5, *dims)
    plain, cache = (filled(k, v, dtype, **options) for options in ({"k_transform": None, "v_transform": None}, {}))
    for one, other in zip(plain.gather(0, raw=True), cache.gather(0, raw=True), strict=True):
        np.testing.assert_array_equal(one, other)
    assert dtype in repr(cache)
    assert "hadamard" not in repr(cache)


@pytest.mark.parametrize("given", [np.float32, np.float16])
def test_rows_are_handed_out_as_they_came(given):
    k, v = (x.astype(given) for x in rows(8, 64, 96))
    cache = filled(k, v, "q8_0", max_sequences=2)
    expected = [by_head(through(x, "q8_0", order)) for x, order in ((k, 64), (v, 32))]
    for found, x in zip(cache.gather(0, dtype="f16"), expected, strict=True):
        np.testing.assert_array_equal(found, x.astype(np.float16))
    for found, x in zip(cache.extract(0, 2, 5), expected, strict=True):
        np.testing.assert_array_equal(found, x[:, 2:5])
    for found, x in zip(cache.get(0, 3), expected, strict=True):
        np.testing.assert_array_equal(found, x[:, 3])
    cache.fork(0, 1)
    for found, x in zip(copy.copy(cache).gather(0, seq_id=1), expected, strict=True):
        np.testing.assert_array_equal(found, x)
    cache.compact()
    with cache.batch(1) as batch:
        batch.put(0, k[:1], v[:1])
        for found, x in zip(batch.dense(0)[:2], expected, strict=True):
            np.testing.assert_array_equal(found[:, :8], x)
    assert [(layer.k_transform, layer.v_transform) for layer in cache.layers] == [("hadamard", "hadamard")]
    assert "hadamard q8_0" in repr(cache)


@pytest.mark.parametrize("name", NAMES)
def test_raw_rows_are_as_stored(name):
    """What raw=True hands out can be put, injected or written in place in another such cache."""
    k, v = rows(6, 128, 128)
    cache = filled(k, v, name)
    raw = cache.gather(0, raw=True)
    by_token = [by_head(x) for x in raw]
    other = new_cache(128, name)
    with other.batch(6) as batch:
        slots = batch.slots(0)
        batch.put(0, *(x[:3] for x in by_token))
        for slot, x in zip(slots, raw, strict=True):
            slot[:, 3:] = x[:, 3:]
        batch.written(0, 3, 3)
    assert all(np.array_equal(x, y) for x, y in zip(other.gather(0), cache.gather(0), strict=True))
    other.inject(0, 2, *(np.ascontiguousarray(x[:, :3]) for x in raw))
    assert all(np.array_equal(x[:, 2:5], y[:, :3]) for x, y in zip(other.gather(0), cache.gather(0), strict=True))


def rope():
    return kvcache.Rope(10_000.0 ** (-np.arange(0, ROPE_DIM, 2) / ROPE_DIM))


@pytest.mark.parametrize("name", NAMES)
def test_a_function_moves_keys_as_given(name):
    def negate(layer, keys, delta):
        seen.append(keys.copy())
        return -keys

    seen = []
    k, v = rows(4, 64, 64)
    cache = filled(k, v, name, rope=negate)
    before = cache.gather(0)
    cache.shift(0, None, 5)
    np.testing.assert_array_equal(np.concatenate(seen, 1), before[0])
    np.testing.assert_allclose(cache.gather(0)[0], -before[0], atol=np.abs(k).max() * STEPS[name])


def test_layers_of_their_own():
    k, v = rows(4, 64, 64)
    cache = kvcache.KVCache(
        3, HEADS, 64, 64, dtype="q4_0",
        k_transform=[None, "hadamard", "hadamard"], v_transform=["hadamard", None, None],
        policy=[kvcache.FullAttention(), kvcache.FullAttention(), kvcache.CrossAttention(9)],
    )  # fmt: skip
    with cache.batch(4) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
        batch.put(2, k, v, seq_id=0)
    plain, turned = ([by_head(through(x, "q4_0", order)) for x in (k, v)] for order in (1, 64))
    expected = [(plain[0], turned[1]), (turned[0], plain[1]), (turned[0], plain[1])]
    for layer in range(3):
        for found, x in zip(cache.gather(layer), expected[layer], strict=True):
            np.testing.assert_array_equal(found, x)
    assert "q4_0/hadamard q4_0" in repr(cache)
