"""Fixtures of the benchmarks: interleaved measuring, and the table of figures at the end."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

# Measure the installed package, unless the checkout has a compiled module of its own.
ROOT = HERE.parent
os.environ["PYTHONSAFEPATH"] = "1"
if not any((ROOT / "kvcache").glob("_core.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

FIGURES = pytest.StashKey()  # the table, and its lines


def pytest_addoption(parser):
    help = "keep the table of figures, for bench/write_results.py"
    parser.addoption("--figures-json", type=Path, metavar="FILE", help=help)


@pytest.fixture
def figures(request):
    from figures import Figures

    stash = request.config.stash
    if FIGURES not in stash:
        lines = []
        stash[FIGURES] = Figures("pytest", lines.append), lines
    return stash[FIGURES][0]


def pytest_terminal_summary(terminalreporter, config):
    table, lines = config.stash.get(FIGURES, (None, []))
    if not table:
        return
    from figures import keep

    import kvcache

    terminalreporter.section("figures")
    kvcache.show_config()
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    terminalreporter.write_line(f"load             {load}\n")
    for line in lines:
        terminalreporter.write_line(line)
    if path := config.getoption("--figures-json"):
        keep(path, " ".join(["pytest", *map(str, config.invocation_params.args)]), table.rows)


@pytest.fixture
def interleave():
    """Return a function that calls functions in rounds, as often as time allows, and returns each one's results."""
    from kvcache.tools.interleave import rounds

    def call(*functions, seconds=2.0, least=15):
        return [list(each) for each in zip(*rounds(*functions, seconds=seconds, least=least), strict=True)]

    return call
