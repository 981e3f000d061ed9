"""Keep figures in bench/results/*.csv, and write the table of docs/performance.md from them.

python bench/write_results.py --keep run.json --as epyc-zen5      # add a run that --json of a benchmark wrote
python bench/write_results.py                                     # write the table of docs/performance.md again

A file of bench/results/ belongs to one kind of processor, which processors.csv describes. A row is one figure: the
name, the context, the number of threads and the type say which. It has a quotient, seconds, tokens/s as its rate, or a
value to print unchanged. It also has the day, the commit and the command of its run, and a note.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
PERFORMANCE = ROOT / "docs/performance.md"

RUN = ("seen", "commit", "command")
KEYS = ("section", "name", "context", "threads", "type")  # what says which figure a row is
FIGURES = ("quotient", "bound", "seconds", "rate", "value")
COLUMNS = (*RUN, *KEYS, *FIGURES, "note")
TYPES: dict[str, Any] = {"context": int, "threads": int, "quotient": float, "seconds": float, "rate": float}

# The columns of the table: heading, section, name, type and context.
SPEEDUPS = (
    ("transformers' `DynamicCache`, bf16", "peers", "speedup over Hugging Face", "bf16", 8192),
    ("torch by hand, bf16", "peers", "speedup over torch by hand", "bf16", 8192),
    ("ggml, f16", "peers", "speedup over ggml's fastest path", "f16", 8192),
    ("ggml, q8_0", "peers", "speedup over ggml's fastest path", "q8_0", 8192),
    ("fastest with 16 bits, f16", "peers", "speedup over the fastest peer", "f16", 8192),
    ("fastest with 8 bits, q8_0", "peers", "speedup over the fastest peer", "q8_0", 8192),
    ("kvcache's f16, q8_0", "peers", "speedup over kvcache f16", "q8_0", 8192),
    ("torch's prompts, bf16", "prefill", "speedup over torch's SDPA", "bf16", 4096),
)


# ---- files


def read(path: Path) -> list[Row]:
    """Read the rows of a file; a row has no entry for an empty cell."""
    with path.open(newline="") as file:
        return [{key: TYPES.get(key, str)(text) for key, text in row.items() if text} for row in csv.DictReader(file)]


def write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def processors() -> dict[str, str]:
    """Return the processor of each file."""
    return {row["file"]: row["processor"] for row in read(RESULTS / "processors.csv")}


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) or None for key in KEYS)


def keep(source: Path, name: str) -> None:
    """Add the run that a benchmark's --json wrote to a processor's file, or make that file.

    A figure that was measured before is replaced. If the run has a figure twice, the first counts.
    """
    run = json.loads(source.read_text())
    new: dict[tuple[Any, ...], Row] = {}
    for row in run["rows"]:
        rounded = {key: float(f"{row[key]:.5g}") for key in FIGURES if isinstance(row.get(key), float)}
        new.setdefault(key_of(row), {key: run[key] for key in RUN} | row | rounded | {"note": ""})
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        known = read(RESULTS / "processors.csv")
        known.append({"file": name, "processor": run["machine"], "notes": ""})
        write(RESULTS / "processors.csv", ("file", "processor", "notes"), sorted(known, key=lambda row: row["file"]))
    old = read(path) if path.exists() else []
    write(path, COLUMNS, [*(row for row in old if key_of(row) not in new), *new.values()])


# ---- the table of speedups


def number(value: float) -> str:
    """Format a number with at most three significant digits; 2 as 2.0."""
    text = f"{value:.3g}"
    return f"{text}.0" if len(text) == 1 else text


def speedups() -> list[str]:
    """Make a table with a line for each kind of processor and number of threads."""
    lines = [["processor", "threads", *(heading for heading, *_ in SPEEDUPS)]]
    lines.append(["---"] * len(lines[0]))
    for name, processor in processors().items():
        found = {key_of(row): row["quotient"] for row in read(RESULTS / f"{name}.csv") if "quotient" in row}
        for threads in sorted({threads for section, _, _, threads, _ in found if section == "peers"}):
            keys = [(section, what, context, threads, dtype) for _, section, what, dtype, context in SPEEDUPS]
            cells = [number(found[key]) if key in found else "" for key in keys]
            lines.append([f"[{processor}](../bench/results/{name}.csv)", str(threads), *cells])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def with_speedups(text: str) -> str:
    """Put the table of speedups between its two marks in a page."""
    table = "\n".join(["", "", *speedups(), "", ""])
    return re.sub(r"(?<=<!-- speedups -->).*?(?=<!-- end of speedups -->)", lambda _: table, text, count=1, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="a run to add, of a benchmark's --json")
    parser.add_argument("--as", dest="name", metavar="PROCESSOR", help="the file in bench/results that it is added to")
    options = parser.parse_args(arguments)
    if bool(options.keep) != bool(options.name):
        parser.error("--keep and --as go together")
    if options.keep:
        keep(options.keep, options.name)
    PERFORMANCE.write_text(with_speedups(PERFORMANCE.read_text()))
    print(PERFORMANCE.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
