"""The floors that bench_attention.py prints count what kernels cannot do without, on every kind of processor."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


@pytest.fixture
def floors(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("floors", "mixes", "compiling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import floors

    return floors


@pytest.fixture
def vectors(floors):
    import mixes

    return mixes.vectors_of


def test_counts_of_a_row_of_floats(floors, vectors):
    """128 elements are 8 vectors of 16, which 4 queries multiply; their 4 sums of 16 lanes are added up by pairs.

    With two rows in a vector 8 lanes are left to add up, and what they come to is put in order.
    """
    whole, halves = floors.score("f16", 128, 4, vectors("avx512"))
    same = {"from f16": 8, "product": 32, "load": 8, "store": 0.25, "prefetch": 4}
    assert whole == same | {"shuffle": 7.5, "add": 3.75}
    assert halves == same | {"insert": 8, "shuffle": 3.5 + 0.25, "add": 1.75}
    (mix,) = floors.accumulate("f32", 128, 2, vectors("avx2"))
    assert (mix["product"], mix["broadcast"], mix["prefetch"]) == (32 + 32 / 64, 8, 8)


def test_counts_of_a_quantised_row(floors, vectors):
    """Words are 32 to a vector and bytes 64, of which each is multiplied by a high and a low byte."""
    words, quads = floors.score("q8_0", 128, 4, vectors("avx512vnni"))
    assert words["pairs"] == quads["quads"] == 16
    assert words.total() > quads.total()  # bytes are not widened
    (words,) = floors.score("q8_0", 128, 4, vectors("avx512"))  # no products of bytes
    assert words["pairs"] == 16


def test_eight_queries_take_two_passes_and_prefetch_once(floors, vectors):
    for dtype in ("f32", *floors.QUANTISED):
        for kernel in (floors.score, floors.accumulate):
            for four, eight in zip(*(kernel(dtype, 128, q, vectors("avx512")) for q in (4, 8)), strict=True):
                prefetches = four.pop("prefetch")
                assert eight.pop("prefetch") == prefetches == floors.row_bytes(dtype, 128) / 64
                assert eight == {kind: 2 * count for kind, count in four.items()}


def test_eight_queries_convert_rows_of_16_bits_once(floors, vectors):
    for kernel in (floors.score, floors.accumulate):
        for isa, conversions in {"avx512": 8, "avx2": 32}.items():
            mix = kernel("f16", 128, 8, vectors(isa))[0]
            assert (mix["from f16"], mix["prefetch"]) == (conversions, 4)


def test_eight_queries_unpack_quantised_rows_once_with_vnni(floors, vectors):
    for dtype in floors.QUANTISED:
        for four, eight, nine in zip(*(floors.score(dtype, 128, q, vectors("amx")) for q in (4, 8, 9)), strict=True):
            assert eight["shuffle"] == four["shuffle"] == nine["shuffle"] / 2


def test_the_softmax_is_that_of_the_kernels(floors, vectors):
    """Each exponential takes one instruction for each line of exp_negative, and one more vector what came before."""
    (mix,) = floors.softmax("f16", 128, 16, vectors("avx512"))
    text = (ROOT / "src/kernels/softmax.h").read_text()
    body = text[text.index("exp_negative(int count") : text.index("/* Sets the scores")]
    polynomial = int(re.search(r"f < (\d+)", body)[1]) - 1  # all steps but the first, which stands apart
    products = body.count("v_fma(") - 1 + polynomial + 1  # v_scale multiplies once
    assert mix["product"] == products * (1 + 1 / floors.TILE)
    assert mix["shift"] == mix["compare"] == 1 + 1 / floors.TILE


def test_a_call_prepares_queries_and_divides_sums(floors, vectors):
    v = vectors("avx512vnni")
    assert floors.output("f16", 128, 4, v) == [{"load": 32, "product": 32, "store": 64}]
    assert floors.prepared_queries("f16", 128, 4, v) == [{"load": 32, "product": 32, "store": 32}]
    (quantised,) = floors.prepared_queries("q8_0", 128, 4, v)
    assert (quantised["product"], quantised["from int"], quantised["pairs"]) == (64, 32, 16)


def test_every_stored_type_has_counts(floors):
    from kvcache.layer import DTYPES, bytes_of_token

    for dtype in DTYPES:
        assert 2 * floors.row_bytes(dtype, 128) == bytes_of_token(1, 128, 128, dtype, dtype)


def test_constants_are_those_of_the_kernels(floors):
    template, kernels = ((ROOT / "src/kernels" / name).read_text() for name in ("template.h", "kernels.h"))
    assert int(re.search(r"\bQUERIES = (\d+)", template)[1]) == floors.QUERIES
    assert int(re.search(r"\bFLOAT_QUERIES = IS_WIDE \? (\d+)", template)[1]) == floors.WIDE_QUERIES
    assert int(re.search(r"\bKVC_TILE = (\d+)", kernels)[1]) == floors.TILE


def test_accumulators_are_those_of_the_kernels(vectors):
    for isa in ("avx2", "avx512", "neon"):
        found = re.search(r"LANES = (\d+), ACCUMULATORS = (\d+)", (ROOT / f"src/kernels/vector_{isa}.h").read_text())
        assert (vectors(isa).lanes, vectors(isa).accumulators) == (int(found[1]), int(found[2]))
    assert vectors("scalar") is None


def test_loops_have_what_was_counted(floors, vectors):
    from collections import Counter

    v = vectors("avx512")
    rows, loop = v.loop(Counter({"product": 3, "shuffle": 1, "store": 0.25}))
    kinds = Counter(line.split()[0] for line in loop)
    assert kinds == {"vfmadd231ps": 3 * rows, "vpunpckldq": rows, "vmovups": round(rows / 4)}
    assert len({line.split(",")[-1] for line in loop if line.startswith("vfma")}) == v.sums  # none waits for its sum


@pytest.mark.parametrize(("isa", "compiler"), [("amx", "x86_64-linux-gnu-gcc"), ("avx2", "x86_64-linux-gnu-gcc"),
                                               ("neon", "aarch64-linux-gnu-gcc")])  # fmt: skip
def test_every_instruction_assembles(floors, vectors, tmp_path, isa, compiler):
    from mixes import source

    if not shutil.which(compiler):
        pytest.skip(f"needs {compiler}")
    v = vectors(isa)
    mixes = [v.loop(floors.total(*(floors.times({kind: 1}, 1) for kind in v.asm)))[1]]
    (tmp_path / "mixes.c").write_text(source(v, mixes))
    subprocess.run(
        [compiler, "-std=c11", "-Wall", "-Werror", "-c", "mixes.c", "-o", "mixes.o"], cwd=tmp_path, check=True
    )


@pytest.mark.full
def test_the_section_of_the_benchmark(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs a compiler")
    command = "bench/bench_attention.py --only floor --dtype f16,q8_0,q4_1 --queries 1,4 --threads 1 --context 256"
    run = subprocess.run(
        [sys.executable, *command.split(), "--memory", "1", "--seconds", "0.01", "--json", str(tmp_path / "run.json")],
        cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "no floor for kernels without vectors" in run.stdout:
        return
    assert "cycles of an instruction: " in run.stdout
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    names = [f"{q}: {name}" for q in ("1 query", "4 queries") for name in
             ("scoring, in cache", "softmax, in cache", "summing, in cache", "a call, in cache")]  # fmt: skip
    for dtype in ("f16", "q8_0", "q4_1"):
        of_type = [row for row in rows if row.get("type") == dtype]
        assert [row["name"] for row in of_type] == [*names, "1 query: from memory", "4 queries: from memory"]
        assert all(row["quotient"] > 0 and row["seconds"] > 0 for row in of_type)
        assert all(row["floor_cycles"] > 0 for row in of_type[:8])
