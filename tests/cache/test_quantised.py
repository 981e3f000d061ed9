"""Quantised types: byte for byte ggml's blocks of 32, in everything that a cache does."""

import numpy as np
import pytest
from support.ggml_blocks import NAMES, SIZES, blocks, decoded, quantised_by_gguf

import kvcache

HEADS, DIM = 2, 64


def samples(n=8, seed=0):
    """Ordinary rows, and some that are not: ties, zeros, huge, tiny, one element only."""
    x = np.random.default_rng(seed).standard_normal((n, HEADS, DIM)).astype(np.float32)
    x[0, 0] = np.arange(DIM) - 31.5  # many halves once they are scaled
    x[0, 1] = 0
    x[1, 0, :32] = 1e6
    x[1, 0, 32:] = 65504
    x[1, 1] = 1e-7 * x[1, 1]
    x[2, 0, 1:] = 0
    x[2, 1, :32] = np.linspace(-127, 127, 32)  # a scale of 1
    x[3, 0] = -np.abs(x[3, 0])
    x[3, 1] = 1e-35
    return x


def new_cache(k_dtype, v_dtype=None, **options):
    return kvcache.KVCache(1, HEADS, DIM, 64, k_dtype=k_dtype, v_dtype=v_dtype or k_dtype, **options)


def stored(x, name):
    """The bytes that the cache makes of keys."""
    cache = new_cache(name)
    batch = cache.batch(len(x))
    slots, _ = batch.slots(0)
    batch.put(0, x, x)
    return slots


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name):
    x = samples()
    np.testing.assert_array_equal(stored(x, name), np.swapaxes(blocks(x, name), 0, 1))
    x = np.random.default_rng(1).standard_normal((50, HEADS, DIM)).astype(np.float32)
    np.testing.assert_array_equal(stored(x, name), np.swapaxes(blocks(x, name), 0, 1))
    by_gguf = quantised_by_gguf(x, name)
    if by_gguf is not None:
        np.testing.assert_array_equal(stored(x, name), np.swapaxes(by_gguf, 0, 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_decoded(name, dtype):
    x = np.delete(samples(), 1, 0).astype(dtype)
    cache = new_cache("f16", name)
    with cache.batch(len(x)) as batch:
        batch.put(0, x, x)
    with np.errstate(invalid="ignore"):
        expected = np.swapaxes(decoded(blocks(x, name), name), 0, 1)
    np.testing.assert_array_equal(cache.gather(0)[1], expected)
    np.testing.assert_array_equal(cache.gather(0, dtype="f16")[1], expected.astype(np.float16))
    np.testing.assert_array_equal(cache.extract(0, 2, 4)[1], expected[:, 2:4])
    np.testing.assert_array_equal(cache.get(0, 3)[1], expected[:, 3])
    assert [(layer.k_dtype, layer.v_dtype) for layer in cache.layers] == [("f16", name)]
    assert f"f16/{name}" in repr(cache)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_counted(name):
    assert new_cache(name).capacity_bytes == 64 * HEADS * 2 * DIM // 32 * SIZES[name]


def error(out, q, keys, values):
    """The error of attention over all rows of one KV head: out, q [heads, dim], keys and values [rows, dim]."""
    scores = np.einsum("hd,nd->hn", q.astype(np.float64), keys) * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ values.astype(np.float64)
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)
