"""Measure the first write after a fork, and memory after compacting."""

import time

import numpy as np
import pytest
from resident_memory import measure_in_child

import kvcache


def fill(cache, tokens, seq_id=0):
    """Append tokens whose rows are zeros, which need no memory of their own outside the cache."""
    at = cache.next_position(seq_id)
    for done in range(0, tokens, 512):
        n = min(512, tokens - done)
        with cache.batch(positions=range(at + done, at + done + n), seq_ids=[seq_id] * n) as batch:
            for layer, like in enumerate(cache.layers):
                x = np.zeros((n, like.num_kv_heads, like.head_dim), np.float32)
                batch.put(layer, x, x)


def test_first_write_of_the_second_sharer(figures, interleave):
    """Continue both sides of a fork in the middle of a block: first the original, then the fork, which copies."""
    layers = 32
    cache = kvcache.KVCache(layers, 8, 128, None, block_size=64, max_sequences=None)
    fill(cache, 1024 + 32)
    x = np.ones((1, 8, 128), np.float32)

    def write(seq_id):
        start = time.perf_counter()
        with cache.batch(positions=[1024 + 32], seq_ids=[seq_id]) as batch:
            for layer in range(layers):
                batch.put(layer, x, x)
        return time.perf_counter() - start

    def first():
        cache.truncate(1024 + 32)
        cache.clear(1)
        cache.fork(0, 1)
        return write(0)

    moved = cache.stats()["rows_moved"]
    ones, others = interleave(first, lambda: write(1), seconds=1)
    figures.ratio(
        "second sharer's first write, cost over the first's", others, ones, note=f"one token, {layers} layers"
    )
    copied = (cache.stats()["rows_moved"] - moved) / (len(ones) + 1)
    figures.value("rows copied by it", f"{copied:.0f}", "<= 64")
    assert copied <= 64


@pytest.mark.parametrize("block_size", [None, 64])
def test_memory_after_compact(figures, block_size):
    resident, nbytes, before = measure_in_child(
        f"""
        x = np.ones((512, 8, 128), np.float32)
        start = resident()
        cache = kvcache.KVCache(4, 8, 128, 8192, block_size={block_size})
        for _ in range(16):
            with cache.batch(512) as batch:
                for layer in range(4):
                    batch.put(layer, x, x)
        for position in range(1, 8192, 2):
            cache.remove(position, position + 1, shift=False)
        before = resident() - start
        cache.compact()
        result.extend([resident() - start, cache.nbytes, before])
        """
    )
    where = f"blocks of {block_size}" if block_size else "contiguous"
    note = f"{resident / 2**20:.1f} MiB, before {before / 2**20:.1f}"
    figures.value(f"resident / nbytes after compact, {where}", f"{resident / nbytes:.3f}", "0.95 .. 1.05", note)
