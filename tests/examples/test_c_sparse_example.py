"""examples/sparse.c: a token reads a few rows of many, and the one that it looks for is among them."""

import pytest
from support.compiling import ROOT, runner_of


@pytest.fixture(scope="module")
def sparse(build):
    """Return a function that runs the program with some arguments."""
    return runner_of(build(ROOT / "examples/sparse.c"))


@pytest.mark.parametrize(("tokens", "read"), [("1", 2), ("63", 64), ("64", 64), ("5000", 64)])
def test_the_hidden_row_is_read(sparse, tokens, read):
    done = sparse(tokens)
    hidden, all_rows = int(tokens) // 3, int(tokens) + 1
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"read {read} of {all_rows} rows, with the hidden one at position {hidden}: yes\n"


@pytest.mark.parametrize("arguments", [("0",), ("x",), ("100001",), ("1", "2")])
def test_bad_arguments_are_refused(sparse, arguments):
    done = sparse(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: sparse [TOKENS], of 1 to 100000\n"
