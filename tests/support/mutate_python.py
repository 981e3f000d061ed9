"""Change the package's Python in one place at a time, and see whether a test notices: mutation testing.

    python tests/support/mutate_python.py tests/models --only '^kvcache/models' --number 100 [folder]

The tests run once, and coverage.py notes which lines each runs. The seed draws changes among these lines. Each is made
in a copy of the package, and tried by the tests that run its line, the fastest first. Prints the changes that all of
these pass, and their share. `folder` keeps what was measured. Compare two sets of tests with the same seed and --only.
"""

import argparse
import ast
import dataclasses
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.pop(0)  # a coverage.py of tests/support hides the package of this name
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20  # that a change may add to its tests
OTHER = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "Is": "is not", "IsNot": "is"}
OTHER |= {"In": "not in", "NotIn": "in", "And": "or", "Or": "and", "Add": "-", "Sub": "+", "Mult": "+", "FloorDiv": "*"}


@dataclasses.dataclass(frozen=True)
class Change:
    """Another text for a part of a file."""

    path: str
    function: str
    begin: int
    end: int
    new: str

    @property
    def text(self):
        return (ROOT / self.path).read_text()

    @property
    def line(self):
        return self.text.count("\n", 0, self.begin) + 1

    def apply(self):
        return self.text[: self.begin] + self.new + self.text[self.end :]

    @property
    def lines(self):
        """The line before it and after it, without indentation."""
        text = self.text
        begin, end = text.rfind("\n", 0, self.begin) + 1, text.find("\n", self.end)
        both = text[begin:end], text[begin : self.begin] + self.new + text[self.end : end]
        return tuple(" ".join(line.split()) for line in both)

    def rank(self, seed):
        """A random number that stays the same however the code around it changes."""
        return hashlib.sha256(repr((seed, self.path, self.function, self.lines)).encode()).digest()

    def __str__(self):
        return f"{self.path}:{self.line}: {self.lines[0]}  ->  {self.lines[1]}"


def changes_of(path):
    """Yield the changes of a file's functions, annotations, messages of errors and docstrings aside."""
    text = (ROOT / path).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line, column):
        whole = text[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(whole[:column].decode())

    def span(node):
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left, operator, right):
        """The change of an operator between two operands."""
        begin, end = span(left)[1], span(right)[0]
        words = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Add": r"\+", "Sub": "-"}
        words |= {"Mult": r"\*", "FloorDiv": "//", "NotIn": r"not\s+in", "IsNot": r"is\s+not"}
        name = type(operator).__name__
        if name in OTHER and (found := re.search(words.get(name, name.lower()), text[begin:end])):
            yield begin + found.start(), begin + found.end(), OTHER[name]

    def of_node(node):
        match node:
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    yield from between(left, operator, right)
            case ast.BoolOp():
                yield from between(node.values[0], node.op, node.values[1])
            case ast.BinOp():
                yield from between(node.left, node.op, node.right)
            case ast.If() | ast.While() | ast.IfExp():
                yield *span(node.test), f"(not ({ast.get_source_segment(text, node.test)}))"
            case ast.Constant(value=bool()):
                yield *span(node), str(not node.value)
            case ast.Constant(value=int()):
                yield *span(node), str(node.value + 1)
            case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
                yield *span(node.value), "None"
            case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign():
                yield *span(node), "pass"

    def within(node, function):
        if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, inner = node.name, node.body
        else:
            if function:
                yield from (Change(path, function, *change) for change in of_node(node))
            inner = ast.iter_child_nodes(node)
        for child in inner:
            yield from within(child, function)

    return within(ast.parse(text), "")


class Copy:
    """A copy of the package, that tests import."""

    def __init__(self, folder):
        self.folder = folder
        for path in (ROOT / "kvcache").rglob("*"):
            target = folder / path.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in path.parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)

    def put(self, path, text):
        """Give a file another text; None is its own again."""
        target = self.folder / path
        target.unlink()
        if text is None:
            target.symlink_to(ROOT / path)
        else:
            target.write_text(text)

    def run(self, words, plugin=None, seconds=0):
        """Run pytest in a child of this process; return whether all tests pass in time."""
        if not (child := os.fork()):
            code = 1
            try:
                code = run_tests(self.folder, words, plugin, seconds)
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_tests(folder, words, plugin, seconds):
    import pytest

    os.setsid()
    if seconds:  # a change is tried
        signal.alarm(int(seconds))
        for stream in 1, 2:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        quiet = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that preload() imported
        words = [*quiet, "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", f"{temporary}/t", *words]
        return int(pytest.main(words, plugins=[plugin] if plugin else []))


class Measure:
    """Notes the lines of the package that each test runs, and its seconds."""

    def __init__(self, target):
        import coverage

        self.counting = coverage.Coverage(data_file=None, include=[f"{ROOT}/kvcache/*"], config_file=False)
        self.target, self.seconds = target, {}
        self.counting.start()

    def pytest_runtest_logstart(self, nodeid, location):
        self.counting.switch_context(nodeid)
        self.begun = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid, location):
        self.seconds[nodeid] = time.monotonic() - self.begun

    def pytest_sessionfinish(self):
        self.counting.stop()
        data = self.counting.get_data()
        lines = {str(Path(path).relative_to(ROOT)): data.contexts_by_lineno(path) for path in data.measured_files()}
        self.target.write_text(json.dumps([self.seconds, lines]))


class LateMeasure:
    """Begins to measure in the child, where nothing of the package was imported yet."""

    def __init__(self, target):
        self.target = target

    def pytest_configure(self, config):
        config.pluginmanager.register(Measure(self.target))


def preload(words):
    """Import what is the same for all changes."""
    names = ["numpy", "pytest"]
    if "hf" in words or any("hf" in word for word in words):
        names += ["torch", "transformers"]
    for name in names:
        importlib.import_module(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="+", help="words for pytest: files, -m, -k")
    parser.add_argument("--only", default="", help="changes that match this regular expression, as they are printed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=100, help="of changes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no change is begun")
    parser.add_argument("--folder", type=Path, help="keeps what was measured")
    options, more = parser.parse_known_args()
    words = options.tests + more
    preload(words)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Copy(Path(temporary) / "copy")
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / (hashlib.sha256(repr(words).encode()).hexdigest()[:16] + ".json")
        if not target.exists() and (not copy.run(words, LateMeasure(target)) or not target.exists()):
            target.unlink(missing_ok=True)
            sys.exit("the tests fail without a change")
        seconds, lines = json.loads(target.read_text())
        noticed, tried = try_changes(copy, options, seconds, lines)
    print(f"noticed {noticed} of {tried} changes: {100 * noticed / max(tried, 1):.1f} %")


def try_changes(copy, options, seconds, lines):
    """Try changes in order; return how many were noticed, and how many tried."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kvcache").rglob("*.py"))
    changes = [change for path in paths for change in changes_of(path) if re.search(options.only, str(change))]
    changes.sort(key=lambda change: change.rank(options.seed))
    noticed = tried = 0
    end = time.monotonic() + options.seconds
    for change in changes:
        if tried == options.number or time.monotonic() > end:
            break
        tests = [test for test in lines.get(change.path, {}).get(str(change.line), []) if test in seconds]
        tried += 1
        if not tests:
            print(f"{change}\n    unseen: no test runs it", flush=True)
            continue
        copy.put(change.path, change.apply())
        tests.sort(key=seconds.get)
        for some in (tests[:20], tests[20:]):
            if some and not copy.run(["-x", *some], seconds=SECONDS + 3 * sum(map(seconds.get, some))):
                noticed += 1
                break
        else:
            print(f"{change}\n    passes {len(tests)} tests, {tests[-1]} among them", flush=True)
        copy.put(change.path, None)
    return noticed, tried


if __name__ == "__main__":
    main()
