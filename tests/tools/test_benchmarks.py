"""The benchmarks installed with the package: what they time, what they skip, and which input they refuse."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections import defaultdict
from pathlib import Path

import pytest

from kvcache.benchmarks import OPTIONS
from kvcache.tools.peers import KINDS

pytest.importorskip("pytest_benchmark")

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples/numpy_cache.py").read_text()

WRONG = '''
import numpy as np
from numpy_cache import NumPyCache

class Forgets(NumPyCache):
    """Keeps nothing of the first token of each batch."""
    def put(self, layer, k, v):
        v = v.copy()
        v[0] = 0
        super().put(layer, k, v)

class Keeps(NumPyCache):
    def remove(self, begin, end):
        pass

class Mixes(NumPyCache):
    def gather(self, layer):
        return super().gather(0)

class SeesLater(NumPyCache):
    def attend(self, layer, q):
        return np.concatenate([super(SeesLater, self).attend(layer, one[None]) for one in q])

class OnlyBegins:
    def begin(self, num_tokens, seq_id=0):
        pass
'''
TINY = ["--context=40", "--num-layers=2", "--num-heads=4", "--num-kv-heads=2", "--head-dim=32", "--prompt=8"]
SUBJECTS = ["append", "window step", "fork", "remove", "compact", "gather", "decode attention", "prompt attention"]

ONCE = ["--benchmark-max-time=0", "--benchmark-min-rounds=1", "--benchmark-json=out.json"]


def timed(folder):
    """Rows of the JSON that a run left, which leaves none if nothing was timed."""
    path = folder / "out.json"
    return json.loads(path.read_text())["benchmarks"] if path.exists() else []


@pytest.fixture
def run(tmp_path):
    """A function that runs pytest in a folder that holds the example; what it printed, and its status."""
    (tmp_path / "numpy_cache.py").write_text(EXAMPLE)

    def run(*options, plugin=("-p", "kvcache.benchmarks")):
        command = [sys.executable, "-m", "pytest", *plugin, "--pyargs", "kvcache.benchmarks", "-rs", *options]
        others = ("PYTEST_", "PY_COLORS", "FORCE_COLOR")  # which change what is printed
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment["COLUMNS"] = "300"  # what the summary's lines are cut to
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr, done.returncode

    return run


@pytest.mark.full
def test_groups_in_json(run, tmp_path):
    printed, status = run(
        *TINY, "--dtype=f32,q8_0", "--implementation=numpy_cache:NumPyCache", "--benchmark-max-time=0",
        "--benchmark-min-rounds=2", "--benchmark-json=out.json", "-W", "error", "--strict-config", "--strict-markers",
    )  # fmt: skip
    assert status == 0, printed
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["machine_info"]["kvcache"]["build"]
    beside = defaultdict(set)
    for row in record["benchmarks"]:
        subject, _, sizes = row["group"].partition(", ")
        assert sizes == f"40 tokens, 2 layers of 4/2 heads x 32, {row['extra_info']['dtype']}"
        assert row["stats"]["rounds"] == 2
        if "test_peer" not in row["name"]:
            beside[subject, row["extra_info"]["dtype"]].add(row["param"].rpartition("-")[2])
    both = {"kvcache", "numpy_cache:NumPyCache"}
    for subject in SUBJECTS:
        assert beside.pop((subject, "f32")) == ({"kvcache"} if subject in ("fork", "compact") else both)
        assert beside.pop((subject, "q8_0")) == {"kvcache"}
    assert not beside
    for reason in ("it stores f32 only", "it has no fork", "it has no compact"):
        assert reason in printed


def test_peers_are_beside_ours_or_skipped(run, tmp_path):
    printed, status = run(*TINY, "--dtype=f32,q8_0", "-k=test_peer", *ONCE)
    assert status in (0, 5), printed  # 5: none is installed
    for key, kind in KINDS.items():
        missing = f"{kind.name} is not installed: {kind.install}" in printed
        assert missing != any(f"decode-{key}-" in row["name"] for row in timed(tmp_path))


def test_a_wrong_implementation_is_refused(run, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    wrong = {
        "Forgets": {"append", "window_step", "remove", "gather", "decode", "prompt"},
        "Keeps": {"remove"},
        "Mixes": {"gather"},
        "SeesLater": {"prompt"},
    }
    given = [f"--implementation=wrong:{name}" for name in wrong]
    printed, status = run(*TINY, "--dtype=f32", *given, "-k=wrong", "-rfs", *ONCE)
    assert status == 1, printed
    refused = set(re.findall(r"^FAILED .*::test_(\w+)\[.*wrong:(\w+)\] .*not timed: ", printed, re.M))
    assert refused == {(subject, name) for name, subjects in wrong.items() for subject in subjects}
    names = " ".join(row["name"] for row in timed(tmp_path))
    assert not any(f"test_{subject}[40-f32-wrong:{name}]" in names for subject, name in refused)
    assert "test_append[40-f32-wrong:Keeps]" in names


@pytest.mark.slow
def test_without_options_and_times(run):
    """Benchmarks are collected, with default sizes, by a pytest that knows none of their options."""
    printed, status = run("--collect-only", "-q", plugin=())
    assert status == 0, printed
    assert "test_decode[8192-q8_0-kvcache]" in printed
    assert "test_decode[1024-f32-kvcache]" in printed


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--implementation=numpy_cache"], "--implementation numpy_cache: give a module and a class"),
        slow(["--implementation=:NumPyCache"], "--implementation :NumPyCache: give a module and a class"),
        slow(["--implementation=.numpy_cache:NumPyCache"], "give a module and a class"),
        slow(["--implementation=numpy_cache:Other"], "no attribute 'Other'"),
        slow(["--implementation=no_such_module:Cache"], "No module named 'no_such_module'"),
        slow(["--implementation=wrong:OnlyBegins"], "it has no put, attend, commit"),
        slow(["--context=0"], "'0' is no number from 1 to"),
        slow(["--context=16"], "--context 16: must be 32 at least"),
        slow(["--num-heads=6", "--num-kv-heads=4"], "--num-heads 6: must be a multiple of --num-kv-heads, 4"),
        (["-p", "no:benchmark"], "pip install pytest-benchmark"),
    ],
)
def test_bad_options(run, tmp_path, options, says):
    (tmp_path / "wrong.py").write_text(WRONG)
    printed, status = run(*options)
    assert status == pytest.ExitCode.USAGE_ERROR
    [error] = [line for line in printed.splitlines() if says in line]
    assert error.startswith("ERROR: ") or "error: argument" in error
    assert "Traceback" not in printed


def test_importing_the_package_does_not_load_them():
    code = "import sys, kvcache; print('kvcache.benchmarks' in sys.modules)"
    assert subprocess.run([sys.executable, "-Pc", code], capture_output=True, text=True).stdout == "False\n"


def test_contexts_as_people_write_them():
    assert OPTIONS["context"].read("1k,8K,1_024,300") == (1024, 8192, 1024, 300)
    assert OPTIONS["prompt"].read("2k") == 2048
    with pytest.raises(ArgumentTypeError, match="'8q' is no whole number"):
        OPTIONS["context"].read("1k,8q")
