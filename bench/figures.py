"""Collect figures as lines of a table, and print the table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Line = tuple[str, str, str, str, str, str]
HEADER: Line = ("figure", "median", "quartiles", "fastest", "wanted", "")


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def quotients(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Divide interleaved samples round by round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def quiet_quotient(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Divide the fastest tenths, to estimate the quotient on a machine without other load."""
    if len(numerator) == 1:
        return numerator[0] / denominator[0]
    fast, other = (statistics.quantiles(samples, n=10, method="inclusive")[0] for samples in (numerator, denominator))
    return fast / other


class Figures:
    """The lines of the table."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines

    def value(self, name: str, value: str, wanted: str = "", note: str = "") -> None:
        self.lines.append((name, value, "", "", wanted, note))

    def samples(
        self, name: str, samples: Sequence[float], unit: str = "", wanted: str = "", note: str = "", quiet: str = ""
    ) -> None:
        """Add the median of samples, and their quartiles, which show how noisy the machine was."""
        low, median, high = quartiles(samples)
        self.lines.append((name, f"{median:.2f}{unit and ' ' + unit}", f"{low:.2f} .. {high:.2f}", quiet, wanted, note))

    def ratio(
        self, name: str, numerator: Sequence[float], denominator: Sequence[float], wanted: str = "", note: str = ""
    ) -> None:
        """Add the median quotient of two interleaved lists of seconds, and the quotient of their fastest tenths."""
        quiet = f"{quiet_quotient(numerator, denominator):.2f}"
        self.samples(name, quotients(numerator, denominator), "", wanted, note, quiet)


def table(lines: Sequence[Line], header: Line = HEADER, widths: Sequence[int] = ()) -> list[str]:
    """Format lines as columns, each as wide as its longest cell, or as `widths` asks if that is more."""
    wide = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    wide = [max(pair) for pair in zip(wide, widths or wide, strict=True)]
    printed = []
    for name, *numbers, wanted, note in (header, *lines):
        cells = [name.ljust(wide[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, wide[1:], strict=False)]
        cells += [wanted.ljust(wide[-2]), note]
        printed.append("  ".join(cells).rstrip())
    return printed


# ---- keeping


def describe_machine() -> str:
    from kvcache import show_config
    from kvcache.tools.interleave import cache_size

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown processor")
    isa = show_config("dicts")["isa"]
    return f"{processor}, {os.cpu_count()} cores, last-level cache {cache_size() >> 20} MiB, {isa}"


def checked_out() -> str:
    """Return the commit that is measured, marked as dirty if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def new_file(text: str) -> Path:
    """Read the path of a file that a run writes at its end; refuse a path that cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def keep(path: Path, command: str, rows: Sequence[Row]) -> None:
    """Write a run for bench/write_results.py; its command is kept without the files that it writes."""
    command = re.sub(r" --(json|figures-json|output|plot)[= ]\S+", "", command)
    run = {"command": command, "seen": datetime.date.today().isoformat(), "commit": checked_out()}
    path.write_text(json.dumps({**run, "machine": describe_machine(), "rows": rows}, indent=1) + "\n")
