"""The checks of `kvcache selftest`: they pass here, and notice what is wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from kvcache.arguments import MAX_THREADS
from kvcache.stores import DirectoryStore
from kvcache.tools import selftest

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache.tools import cli


def outcome():
    return {check.name: check.passed for check in selftest.run()}


@pytest.fixture
def without_kernels(monkeypatch):
    """Leave out the checks of kernels, which take the longest."""
    monkeypatch.setattr(selftest, "instruction_sets", list)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command in this process; return its exit status, and what it printed."""

    def ended(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvcache", "selftest", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, capsys.readouterr().out

    return ended


def test_all_is_right_here(run):
    status, out = run()
    *checks, empty, line = out.splitlines()
    assert (status, empty) == (0, ""), out
    names = [f"kernels, {name}" for name in selftest.instruction_sets()]
    names += ["generation", "threads", "files", *["fork"] * hasattr(os, "fork")]
    assert [check.split(":")[0] for check in checks] == [f"passed  {name}" for name in names]
    assert line == f"{len(names)} of {len(names)} checks passed: {selftest.machine()}"


def test_as_json(run, without_kernels):
    found = json.loads(run("--json")[1])
    assert found["machine"] == selftest.machine()
    assert all(check["passed"] for check in found["checks"])


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("KVCACHE_ISA", "scalar")
    selftest.instruction_sets()
    assert os.environ["KVCACHE_ISA"] == "scalar"


def test_wrong_kernels_are_noticed(run, monkeypatch):
    best = selftest.instruction_sets()[-1]
    right = selftest._attend

    def wrong(dtype, policy, num_tokens):
        out = right(dtype, policy, num_tokens)
        if dtype == "q4_0" and num_tokens == 3 and os.environ.get("KVCACHE_ISA") == best:
            out = out + np.abs(out).max() / 50
        return out

    monkeypatch.setattr(selftest, "_attend", wrong)
    status, out = run()
    assert status == 1
    (failed,) = (line for line in out.splitlines() if line.startswith("FAILED"))
    assert failed.startswith(f"FAILED  kernels, {best}: AssertionError: q4_0, ")


def test_a_wrong_reference_is_noticed(without_kernels, monkeypatch):
    monkeypatch.setattr(selftest, "_attend_plainly", lambda q, k, v, shown: q)
    assert not outcome()["generation"]


def test_results_that_differ_are_noticed(without_kernels, monkeypatch):
    calls = iter(range(10**6))
    monkeypatch.setattr(selftest, "_results", lambda: [np.array(next(calls))])
    failed = {name for name, passed in outcome().items() if not passed}
    assert failed == {"threads", *["fork"] * hasattr(os, "fork")}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_fails_ends(without_kernels, monkeypatch):
    """Else there would be two processes that go on with the checks, and print them."""
    here = os.getpid()
    right = selftest._results

    def results():
        if os.getpid() != here:
            raise MemoryError
        return right()

    monkeypatch.setattr(selftest, "_results", results)
    failed = [name for name, passed in outcome().items() if not passed]
    if os.getpid() != here:
        os._exit(0)
    assert failed == ["fork"]


def test_each_check_is_printed_once_it_is_done():
    """A process that kernels end, as on an instruction that a machine lacks, has said which passed before."""
    code = """
import os
from kvcache.tools import selftest

selftest._check_generation = lambda: os._exit(9)
selftest.main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"passed  kernels, {name}" for name in selftest.instruction_sets()
    ]


def test_no_more_threads_are_tried_than_are_allowed(monkeypatch):
    numbers = []
    monkeypatch.setattr(selftest, "_results", list)
    monkeypatch.setattr(selftest, "get_num_threads", lambda: MAX_THREADS)
    monkeypatch.setattr(selftest, "set_num_threads", numbers.append)
    assert selftest._check_threads() == f"1 to {MAX_THREADS}, and 4 callers, to the bit"
    assert max(numbers) == MAX_THREADS


def test_one_thread_is_not_several(monkeypatch):
    monkeypatch.setattr(selftest, "get_num_threads", lambda: 1)
    assert selftest.machine().endswith("; 1 thread")


def test_a_store_that_loses_values_is_noticed(without_kernels, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "__setitem__", lambda *_: None)
    assert not outcome()["files"]
