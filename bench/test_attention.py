"""Measure decode attention against read bandwidth and multiply-adds, and the cost of a call from Python."""

import json
import time

import bench_attention
import entrants
import numpy as np
import pytest
from attention_report import wanted
from driver import FLOATS, TYPES
from entrants import TINY, TINY_LAYERS, Shape, core, in_cache, multiplying, tiny_attend, tiny_step

import kvcache

HEADS, DIM = 8, 128


def test_the_whole_table(tmp_path, monkeypatch):
    """Run every section of bench_attention.py, at sizes at which its figures mean nothing."""
    small = "--context=128,256 --threads=1 --dtype=f16,bf16,q8_0 --prefill=64,128 --seconds=0.01 --no-peers --memory=1"
    monkeypatch.setattr(entrants, "working_set", 0)  # put back at the end
    rows = bench_attention.main([*small.split(), f"--json={tmp_path / 'run.json'}"])
    assert {row["section"] for row in rows} == set(bench_attention.SECTIONS)
    assert all(row["quotient"] < 5e-4 for row in rows if row["section"] == "error")
    quotients = {row["name"] for row in rows if row.get("wanted") and "quotient" in row}
    assert quotients >= {
        "cost over kvcache f16",
        "prompt, window of 64, GQA 4, cost over its share",
        "attend with its put, from Python, cost over the C call without",
        "relative error, bf16 queries",
    }
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["rows"]) == len(rows)
    assert set(run) == {"command", "seen", "commit", "machine", "rows"}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_with_two_deltas(figures, interleave, dtype, threads):
    """Decode over 8,192 tokens of which half moved down when others were removed, against 8,192 that never moved."""
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
    q, row = (rng.standard_normal((1, heads, DIM), np.float32) for heads in (32, HEADS))

    def attend(seq_id):
        batch = cache.batch(positions=[tokens], seq_ids=[seq_id])
        batch.put(0, row, row)
        start = time.perf_counter()
        batch.attend(0, q)
        seconds = time.perf_counter() - start
        batch.abort()
        return seconds

    one, two = interleave(lambda: attend(0), lambda: attend(1), seconds=1)
    name = f"decode with two deltas, 8,192 tokens, {dtype}, {threads} thread{'s' * (threads > 1)}"
    figures.ratio(name, two, one, "<= 1.05", f"over one with none; {1e6 * np.median(one):.0f} µs")


@pytest.mark.parametrize("tokens", [128, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_from_cache(figures, interleave, dtype, tokens):
    """Decode in one layer again and again with one thread, against the machine's multiply-adds."""
    shape = Shape(tokens, dtype)
    attention, machine = in_cache(shape, tokens), multiplying(1)
    # Seconds per stored token, and per multiply-add.
    ours, products = interleave(lambda: attention.run(1)[0], lambda: machine.run(1)[0], seconds=1)
    figures.samples(f"decode, {tokens} tokens in cache, {dtype}", [HEADS / s / 1e6 for s in ours], "rows/µs")
    work = shape.multiply_adds / tokens
    share = [work * b / a for a, b in zip(ours, products, strict=True)]
    note = f"{work / np.median(ours) / 1e9:.1f} G/s of {1e-9 / np.median(products):.1f}"
    figures.samples("    of the machine's multiply-adds", share, note=note)


def test_tiny_attend_from_python(figures, interleave):
    """Attend for 1 token over 16 stored tokens, 1 head x 16, put included, beside the C call."""
    attention, step = tiny_attend(), tiny_step()
    with core(TINY, layers=TINY_LAYERS) as bare:
        python, whole, c = interleave(
            lambda: attention.run(1)[0], lambda: step.run(1)[0], lambda: np.median(bare.run(TINY_LAYERS)), seconds=1
        )
    figures.samples(
        "attend of 1 token, 16 stored, with put, Python", [1e6 * s for s in python], "µs", wanted("tiny attend")
    )
    figures.samples("    with batch, plan and commit", [1e6 * s for s in whole], "µs")
    figures.samples("attend of 1 token, 16 stored, C", [1e6 * s for s in c], "µs", note="without put")
