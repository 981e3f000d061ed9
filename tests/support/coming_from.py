"""The tables of docs/coming-from.md: the tests in tests/ports/ run each of their lines, as it stands there."""

import ast
import copy
import re
from pathlib import Path

import numpy as np
import pytest

import kvcache

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"


class Line:
    """One line of a table; calling it runs it."""

    def __init__(self, code):
        self.code = code

    def __call__(self, **names):
        """Run the line with these names beside copy's, NumPy's and kvcache's; return its value, or what it assigns."""
        scope = {"copy": copy, "np": np} | {name: getattr(kvcache, name) for name in kvcache.__all__} | names
        shapes = (["num_layers", "n_layers"], ["num_kv_heads", "num_heads", "n_heads"], ["head_dim"])
        scope["shape"] = [names[name] for either in shapes for name in either if name in names]
        statements = ast.parse(self.code).body
        if len(statements) == 1 and isinstance(statements[0], ast.Expr):
            return eval(self.code, scope)
        exec(self.code, scope)
        targets = [statement.targets[0] for statement in statements if isinstance(statement, ast.Assign)]
        return eval(ast.unparse(targets[-1]), scope) if targets else None


class Table:
    """The table under a heading of the page; every row is to be claimed by a test, with `row`."""

    def __init__(self, heading):
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", PAGE.read_text(), re.M | re.S)[1]
        rows = re.findall(r"^\| (.+?) \| `([^`]+)` \| (?:.* )?\|$", section, re.M)
        self.rows = {there.replace("`", ""): Line(code) for there, code in rows}
        assert len(self.rows) == len(re.findall(r"^\| ", section, re.M)) - 1, "a row is malformed, or there twice"
        self.claimed = []

    def row(self, there):
        """Say that a test checks this row: it gets the line as its argument `run`."""
        self.claimed.append(there)
        return pytest.mark.parametrize("run", [pytest.param(self.rows[there], id=there)])

    def all_claimed(self):
        """Return a test that every row has one, and one only."""

        def test():
            assert sorted(self.claimed) == sorted(self.rows)

        return test


def random_rows(tokens, *, heads=2, dim=8, seed=0):
    """Keys and values that can be told apart: [tokens, heads, dim] of f32, each."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((tokens, heads, dim), np.float32) for _ in range(2))


def store(cache, tokens, *, positions=None, seq_id=0, seed=0):
    """Append tokens, with the same rows in every layer; return these rows, [tokens, heads, dim]."""
    first = cache.next_position(seq_id)
    positions = range(first, first + tokens) if positions is None else positions
    k, v = random_rows(tokens, heads=cache.layers[0].num_kv_heads, dim=cache.layers[0].head_dim, seed=seed)
    with cache.batch(positions=positions, seq_ids=[seq_id] * tokens) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, k, v)
    return k, v
