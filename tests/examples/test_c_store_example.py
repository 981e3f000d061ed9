"""examples/store.c: the next process finds in a folder what the first one left there."""

import re

import pytest
from support.compiling import ROOT, runner_of

TEXT = "To be, or not to be, that is the question: "  # 43 tokens, two blocks of 16 and a piece


@pytest.fixture(scope="module")
def serve(build):
    """Return a function that runs the program with some arguments."""
    return runner_of(build(ROOT / "examples/store.c"))


def numbers_of(done):
    assert (done.returncode, done.stderr) == (0, "")
    return [int(number) for number in re.findall(r"\d+", done.stdout)]


def test_the_next_process_finds_what_the_first_one_left(serve, tmp_path):
    folder = tmp_path / "prefixes"
    assert numbers_of(serve(folder, TEXT)) == [0, 43, 0, 2]
    assert numbers_of(serve(folder, TEXT)) == [32, 43, 32, 0]
    assert numbers_of(serve(folder, TEXT[:20] + 300 * "x")) == [16, 320, 16, 19]
    assert numbers_of(serve(folder, TEXT[:20] + 300 * "x")) == [304, 320, 304, 1]


def test_a_store_that_fails_costs_speed_alone(serve, tmp_path):
    folder = tmp_path / "prefixes"
    serve(folder, TEXT)
    for path in folder.glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    done = serve(folder, TEXT)
    assert done.returncode == 0
    assert "not fetched: the value is not what was stored" in done.stderr
    assert done.stdout.startswith("0 of 43 tokens")
    assert numbers_of(serve(folder, TEXT)) == [32, 43, 32, 0]


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", ""], ["/dev/null/a", "b"]])
def test_what_cannot_be_served(serve, arguments):
    done = serve(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("store: ")
