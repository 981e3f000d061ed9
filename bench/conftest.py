"""What the benchmarks share: the table at the end, and measuring in turn."""

import os
import statistics
import sys
import time
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


def quartiles(samples):
    return tuple(statistics.quantiles(samples, n=4, method="inclusive")) if len(samples) > 1 else (samples[0],) * 3


class Figures:
    """Collects lines for the table at the end of the run."""

    def __init__(self, lines):
        self.lines = lines

    def value(self, name, value, wanted="", note=""):
        self.lines.append((name, value, "", "", wanted, note))

    def samples(self, name, samples, unit="", wanted="", note="", quiet=""):
        """The median, and the quartiles as how noisy it was."""
        low, median, high = quartiles(samples)
        self.lines.append((name, f"{median:.2f}{unit and ' ' + unit}", f"{low:.2f} .. {high:.2f}", quiet, wanted, note))

    def ratio(self, name, numerator, denominator, wanted="", note=""):
        """The median of the quotients of two lists of seconds that were measured in turn.

        And the quotient of their fastest tenths: what it would be if nobody else used the machine.
        """
        quiet = statistics.quantiles(numerator, n=10)[0] / statistics.quantiles(denominator, n=10)[0]
        quotients = [a / b for a, b in zip(numerator, denominator, strict=True)]
        self.samples(name, quotients, "", wanted, note, f"{quiet:.2f}")


@pytest.fixture
def figures(request):
    return Figures(request.config.stash.setdefault(LINES, []))


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash.get(LINES, None)
    if not lines:
        return
    import kvcache

    terminalreporter.section("figures")
    kvcache.show_config()
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    terminalreporter.write_line(f"load             {load}\n")
    header = ("figure", "median", "quartiles", "of the fastest", "wanted", "")
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, *lines):
        name, *numbers, wanted, note = line
        cells = [name.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)]
        cells += [wanted.ljust(widths[-2]), note]
        terminalreporter.write_line("  ".join(cells).rstrip())


@pytest.fixture
def in_turn():
    """A function that calls others in turn, as often as fits, and returns what each of them returned."""

    def measure(*functions, seconds=2.0, least=15, most=10_000):
        for function in functions:
            function()
        results = [[] for _ in functions]
        end = time.perf_counter() + seconds
        while len(results[0]) < least or (time.perf_counter() < end and len(results[0]) < most):
            for result, function in zip(results, functions, strict=True):
                result.append(function())
        return results

    return measure
