"""What the benchmarks share: the table at the end, and measuring in turn."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

# What is measured is what was installed, unless the checkout has the compiled half in place.
ROOT = HERE.parent
os.environ["PYTHONSAFEPATH"] = "1"
if not any((ROOT / "kvcache").glob("_core.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

LINES = pytest.StashKey()


@pytest.fixture
def figures(request):
    from figures import Figures

    return Figures(request.config.stash.setdefault(LINES, []))


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash.get(LINES, None)
    if not lines:
        return
    from figures import table

    import kvcache

    terminalreporter.section("figures")
    kvcache.show_config()
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    terminalreporter.write_line(f"load             {load}\n")
    for line in table(lines):
        terminalreporter.write_line(line)


@pytest.fixture
def in_turn():
    """A function that calls others in turn, as often as fits, and returns what each of them returned."""
    from kvcache.tools.interleave import rounds

    def call(*functions, seconds=2.0, least=15):
        return [list(each) for each in zip(*rounds(*functions, seconds=seconds, least=least), strict=True)]

    return call
