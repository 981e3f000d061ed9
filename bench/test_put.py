"""Measure storing 512 tokens against memcpy."""

import numpy as np
import pytest
from driver import Driver
from yardstick import Memory, machine

from kvcache.tools.interleave import cache_size

HEADS, DIM = 8, 128


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
