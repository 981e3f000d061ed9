"""Measure decode attention from cache against multiply-adds, and run every section of bench_attention.py once."""

import json

import bench_attention
import entrants
import numpy as np
import pytest
from driver import FLOATS
from entrants import Shape, in_cache, multiplying

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
        "relative error, bf16 queries",
    }
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["rows"]) == len(rows)
    assert set(run) == {"command", "seen", "commit", "machine", "rows"}


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
