"""The table that every program of this folder prints and keeps, and the statistics in it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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


def write_now(line: str) -> None:
    print(line, flush=True)


class Table:
    """Writes each line at once, as columns or in Markdown, and keeps its figure as a row of bench/results.

    A column has a heading and a format, such as "<12" or ">8.2f". A cell is a text, a number, or None for none.
    """

    def __init__(
        self, columns: Mapping[str, str], section: str = "", *, markdown: bool = False,
        write: Callable[[str], object] = write_now,
    ) -> None:  # fmt: skip
        self.section, self._write, self._markdown = section, write, markdown
        self.rows: list[Row] = []
        formats = [re.fullmatch(r"([<>^]?)(\d*)(.*)", form) for form in columns.values()]
        self._formats = [
            (form[1], max(len(name), int(form[2] or 0)), form[3]) for name, form in zip(columns, formats, strict=True)
        ]
        self.heading(*columns)

    def heading(self, *names: str) -> None:
        """Write the names of the columns, the next ones of the same widths."""
        self.line(*names)
        if self._markdown:
            self._write("|" + "---|" * len(names))

    def line(self, *cells: object, **row: object) -> None:
        """Write a line, and keep a row if one is given: at least its name, and a value, rate, quotient or seconds."""
        texts = []
        for cell, (align, width, form) in zip(cells, self._formats, strict=False):
            text = cell if isinstance(cell, str) else "" if cell is None else format(cell, form)
            texts.append(text if self._markdown else f"{text:{align}{width}}")
        self._write(f"| {' | '.join(texts)} |" if self._markdown else "  ".join(texts).rstrip())
        if row:
            self.rows.append({"section": self.section, **row})


FIGURE = {"figure": "<60", "median": ">11", "quartiles": "^18", "fastest": ">9", "wanted": "<12", "": ""}


class Figures(Table):
    """A table of samples: medians, quartiles, and quotients of interleaved samples."""

    def __init__(self, section: str, write: Callable[[str], object] = write_now) -> None:
        super().__init__(FIGURE, section, write=write)

    def value(self, name: str, value: str, wanted: str = "", note: str = "", spread: str = "", quiet: str = "") -> None:
        self.line(name, value, spread, quiet, wanted, note, name=name.strip(), value=value)

    def samples(
        self, name: str, samples: Sequence[float], unit: str = "", wanted: str = "", note: str = "", quiet: str = ""
    ) -> None:
        """Add the median of samples, and their quartiles, which show how noisy the machine was."""
        low, median, high = quartiles(samples)
        self.value(name, f"{median:.2f}{unit and ' ' + unit}", wanted, note, f"{low:.2f} .. {high:.2f}", quiet)

    def ratio(
        self, name: str, numerator: Sequence[float], denominator: Sequence[float], wanted: str = "", note: str = ""
    ) -> None:
        """Add the median quotient of two interleaved lists of seconds, and the quotient of their fastest tenths."""
        quiet = f"{quiet_quotient(numerator, denominator):.2f}"
        self.samples(name, quotients(numerator, denominator), "", wanted, note, quiet)


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
