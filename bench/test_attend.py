"""Decoding: one query against the speed at which the machine reads, and what a call costs from Python."""

import time

import numpy as np
import pytest
from yardstick import TYPES, Driver, Memory, cache_size, machine

import kvcache

NUM_HEADS, HEADS, DIM = 32, 8, 128
ITEM = {"f32": 4, "f16": 2, "bf16": 2}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_from_memory(figures, in_turn, dtype, threads):
    """8,192 tokens, 32 heads over 8 KV heads x 128, over as many layers as make four times the last-level cache."""
    tokens = 8192
    nbytes = 2 * tokens * HEADS * DIM * ITEM[dtype]
    layers = max(2, -(-4 * cache_size() // nbytes))
    driver = Driver(layers, HEADS, DIM, tokens, dtype, num_threads=threads)
    driver.append(tokens - 1)
    memory = Memory(layers * nbytes)
    reader = machine().best_reader(memory, nbytes, threads)

    def attend():
        return driver.attend(NUM_HEADS, threads, 1)[0]

    def read():
        return [machine().read(reader, memory.address + i * nbytes, nbytes, threads)[0] for i in range(layers)]

    ours, theirs = (np.ravel(samples) for samples in in_turn(attend, read))
    driver.close()
    name = f"decode, 8,192 tokens, {dtype}, {threads} thread{'s' * (threads > 1)}"
    wanted = ">= 0.35" if dtype == "f16" else ""
    gbs = nbytes / np.median(theirs) / 1e9
    note = f"of read bandwidth; {1e6 * np.median(ours):.0f} µs; read {gbs:.1f} GB/s ({machine().readers()[reader]})"
    figures.ratio(name, theirs, ours, wanted, note)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [*TYPES, "q8_0", "q4_0"])
def test_decode_with_two_deltas(figures, in_turn, dtype, threads):
    """8,192 tokens, of which the second half moved down when some were removed, against as many that never moved."""
    tokens, removed = 8192, 10
    cache = kvcache.KVCache(
        1, HEADS, DIM, None, dtype=dtype, max_sequences=2, block_size=tokens + 64, num_threads=threads,
        rope=kvcache.Rope(10_000.0 ** -(np.arange(DIM // 2) / (DIM // 2))),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for seq_id, count in enumerate((tokens, tokens + removed)):
        rows = rng.standard_normal((count, HEADS, DIM), np.float32)
        with cache.batch(positions=range(count), seq_ids=[seq_id] * count) as batch:
            batch.put(0, rows, rows)
    cache.remove(tokens // 2, tokens // 2 + removed, seq_id=1)
    q, row = (rng.standard_normal((1, heads, DIM), np.float32) for heads in (NUM_HEADS, HEADS))

    def attend(seq_id):
        batch = cache.batch(positions=[tokens], seq_ids=[seq_id])
        batch.put(0, row, row)
        start = time.perf_counter()
        batch.attend(0, q)
        seconds = time.perf_counter() - start
        batch.abort()
        return seconds

    one, two = in_turn(lambda: attend(0), lambda: attend(1), seconds=1)
    name = f"decode with two deltas, 8,192 tokens, {dtype}, {threads} thread{'s' * (threads > 1)}"
    figures.ratio(name, two, one, "<= 1.05", f"of one with none; {1e6 * np.median(one):.0f} µs")


@pytest.mark.parametrize("tokens", [128, 512])
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_from_cache(figures, in_turn, dtype, tokens):
    """One layer again and again, on one thread; against the machine's multiply-adds."""
    driver = Driver(1, HEADS, DIM, tokens, dtype)
    driver.append(tokens - 1)
    lanes = next(lanes for lanes in (16, 8, 1) if machine().multiply_add(lanes, 1)[0])
    work = 2 * tokens * NUM_HEADS * DIM  # multiply-adds

    def attend():
        return driver.attend(NUM_HEADS, 1, 20).min()

    def multiply():
        count, seconds = machine().multiply_add(lanes, 1, 20)
        return seconds.min() / count

    ours, theirs = in_turn(attend, multiply, seconds=1)
    driver.close()
    rates = [tokens * HEADS / s / 1e6 for s in ours]
    note = f"{1e6 * np.median(ours):.0f} µs"
    figures.samples(f"decode, {tokens} tokens in cache, {dtype}", rates, "rows/µs", note=note)
    share = [work * b / a for a, b in zip(ours, theirs, strict=True)]
    note = f"{work / np.median(ours) / 1e9:.1f} G/s of {1e-9 / np.median(theirs):.1f} with {lanes} lanes"
    figures.samples("    of the machine's multiply-adds", share, note=note)


def test_tiny_attend_from_python(figures, in_turn):
    """1 token, 16 stored, 1 head x 16, put included; against the C calls."""
    stored, layers = 16, 16
    q = np.ones((1, 1, 16), np.float32)
    cache = kvcache.KVCache(layers, 1, 16, 64, num_threads=1)
    with cache.batch(stored) as batch:
        for layer in range(layers):
            batch.put(layer, np.repeat(q, stored, axis=0), np.repeat(q, stored, axis=0))
    driver = Driver(layers, 1, 16, 64)
    driver.append(stored)

    def python():
        with cache.batch(1) as batch:
            attend = batch.attend
            attend(0, q, q, q)  # which makes the plan
            start = time.perf_counter()
            for layer in range(1, layers):
                attend(layer, q, q, q)
            seconds = (time.perf_counter() - start) / (layers - 1)
        cache.truncate(stored)
        return seconds

    def c():
        return float(np.median(driver.attend(1, 1, 4)[1:]))

    ours, theirs = in_turn(python, c, seconds=1)
    driver.close()
    figures.samples("attend of 1 token, 16 stored, with put, Python", [1e6 * s for s in ours], "µs")
    figures.samples("attend of 1 token, 16 stored, C", [1e6 * s for s in theirs], "µs", note="without put")
