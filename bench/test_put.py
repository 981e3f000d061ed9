"""Measure storing tokens: many against memcpy, and one from Python against the C call."""

import time

import numpy as np
import pytest
from driver import Driver
from yardstick import Memory, machine

import kvcache
from kvcache.tools.interleave import cache_size

LAYERS, HEADS, DIM = 32, 8, 128


def test_put_of_one_token_from_python(figures, interleave):
    """Measure the cost of a put from Python above the C call, which is timed in C."""
    steps = 16  # steps of one round; the memory of their rows has been touched before
    driver = Driver(LAYERS, HEADS, DIM, 4096, num_threads=1)
    driver.append(1024)
    driver.truncate(512)
    cache = kvcache.KVCache(LAYERS, HEADS, DIM, 4096, num_threads=1)
    k = np.random.default_rng(0).standard_normal((1, HEADS, DIM), np.float32)
    v = k + 1
    with cache.batch(1024) as batch:
        for layer in range(LAYERS):
            batch.put(layer, np.repeat(k, 1024, axis=0), np.repeat(v, 1024, axis=0))
    cache.truncate(512)

    def from_c():
        seconds = driver.steps(steps)[1]
        driver.truncate(512)
        return float(np.median(seconds))

    def from_python():
        seconds = []
        for _ in range(steps):
            with cache.batch(1) as batch:
                put = batch.put
                start = time.perf_counter()
                for layer in range(LAYERS):
                    put(layer, k, v)
                seconds.append((time.perf_counter() - start) / LAYERS)
        cache.truncate(512)
        return float(np.median(seconds))

    c, python = interleave(from_c, from_python)
    driver.close()
    micro = [1e6 * (a - b) for a, b in zip(python, c, strict=True)]
    figures.samples("put of 1 token, C", [1e6 * s for s in c], "µs")
    figures.samples("put of 1 token, Python", [1e6 * s for s in python], "µs")
    figures.samples("put of 1 token, Python above C", micro, "µs", "<= 1.5", "loop over the layers included")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("where", ["memory", "cache"])
@pytest.mark.parametrize(("dtype", "wanted"), [("f32", 0.8), ("f16", 0.5), ("bf16", 0.5)])
def test_put_of_512_tokens(figures, interleave, dtype, wanted, where, threads):
    """Put f32 rows, against memcpy of the bytes read; from memory, go round many sources and layers."""
    tokens = 512
    nbytes = 2 * tokens * HEADS * DIM * 4
    layers = max(8, -(-4 * cache_size() // nbytes)) if where == "memory" else 1
    source, target = Memory(nbytes * layers), Memory(nbytes * layers)
    source.floats()[:] = np.resize(np.random.default_rng(0).standard_normal(100_003, np.float32), nbytes * layers // 4)
    driver = Driver(layers, HEADS, DIM, tokens, dtype, num_threads=threads)
    layer = 0

    def put_all():
        return driver.put(tokens, source.address, nbytes if layers > 1 else 0)

    def copy():
        nonlocal layer
        layer = (layer + 1) % layers
        at = layer * nbytes
        return machine().copy(target.address + at, source.address + at, nbytes, threads)[0]

    if layers == 1:
        # Time the second of two calls in a row, which finds source and target in the cache.
        def put_once():
            put_all()
            return put_all()[0]

        def copy_once():
            copy()
            return copy()

        ours, copies = interleave(put_once, copy_once, seconds=1)
    else:
        # A batch puts all layers, then as many copies follow.
        ours, copies = interleave(
            lambda: float(np.median(put_all())), lambda: np.median([copy() for _ in range(layers)])
        )
    driver.close()
    name = f"put of 512 tokens, f32 to {dtype}, from {where}, {threads} thread{'s' * (threads > 1)}"
    rate = f"memcpy {nbytes / np.median(copies) / 1e9:.1f} GB/s"
    figures.ratio(name, copies, ours, f">= {wanted}", f"of memcpy's rate; {rate}")
