"""Print tables of the figures kept in bench/results/*.json, and write the one of docs/performance.md.

python bench/write_results.py epyc-zen5                           # print every table of a kind of processor
python bench/write_results.py --keep run.json --as epyc-zen5      # add a run: what --json of a benchmark wrote
python bench/write_results.py                                     # write the table of docs/performance.md again

A file of bench/results/ belongs to one kind of processor and holds runs. A run is a command, its day, the commit that
it measured, and lines of tables. A line has a name, a context and a number of threads, and for each type a quotient,
seconds, tokens/s as its rate, or a value to print unchanged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import Row, lines_of, rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
PERFORMANCE = ROOT / "docs/performance.md"
TYPES = ("f32", "f16", "bf16", "fp8", "int8", "u8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "int6", "int4")

Record = dict[str, Any]

# The heading of each section's table, and the explanation below it.
SECTIONS = {
    "peers": (
        "Decoding, beside other people's code",
        "A speedup is the other's time by kvcache's, both interleaved in one run: over 1, kvcache is faster.",
    ),
    "decode": (
        "Decoding, as a share of what bounds it",
        "One query of 32 heads over 8 KV heads x 128. 1 is a kernel that takes as long as reading the same bytes or "
        "than the multiply-adds, whichever takes longer.",
    ),
    "prefill": (
        "Prompts",
        "512 tokens, the last of 4,096. A speedup is the other's time by kvcache's.",
    ),
    "shapes": ("Other shapes", "Shares of what bounds them, at 8,192 tokens."),
    "batches": ("Batches, and how rows lie", "Costs over the plain case: 1 is none the worse."),
    "error": ("Error", "Against float64 over the stored values."),
    "llama_cpp": (
        "llama.cpp",
        "The shape of a 1 B Llama, random Q4_0 weights. A speedup is the time with llama.cpp's own cache by that with "
        "kvcache, both interleaved in one run; its default is flash attention. Beside ik_llama.cpp it is its time by "
        "llama.cpp's with kvcache; attention alone is what the context adds.",
    ),
    "costs": ("How costs grow", ""),
    "growth": (
        "Beside what others store",
        "Microseconds of a call beside 1,000 kept blocks and beside 100,000, their quotient, and for how long "
        "at most it lets another thread wait for the mutex.",
    ),
    "tiny": ("A call from Python", ""),
    "installed": ("Bookkeeping", ""),
    "put": ("Storing, windows, edits and imports", ""),
    "pytest": ("Figures of pytest bench", ""),
}


# ---- tables


def number(value: float) -> str:
    """Format a number with at most three significant digits; 2 as 2.0."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{text}.0" if len(text) == 1 else text


def quotient(row: Row) -> str:
    return f"{number(row['quotient'])} {row['bound']}" if row.get("bound") else number(row["quotient"])


def microseconds(row: Row) -> str:
    return number(1e6 * row["seconds"])


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def by_type(rows: Sequence[Row], cell: Callable[[Row], str]) -> list[str]:
    """Make a table with a line for each name, context and number of threads, and a column for each type."""
    types = [dtype for dtype in TYPES if any(row.get("type") == dtype for row in rows)]
    others = sorted({row.get("type", "") for row in rows} - {*types, ""})
    columns = [*types, *others] or [""]
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        context, threads = (f"{row[key]:,}" if key in row else "" for key in ("context", "threads"))
        lines.setdefault((row["name"], context, threads), {})[row.get("type") or columns[0]] = cell(row)
    cells = [[*key, *(found.get(dtype, "") for dtype in columns)] for key, found in lines.items()]
    return markdown(["", "tokens", "threads", *columns], cells)


def tables(rows: Sequence[Row]) -> list[list[str]]:
    """Make the tables of a run: quotients, seconds, rates, and values."""
    found = []
    if quotients := [row for row in rows if "quotient" in row]:
        found.append(by_type(quotients, quotient))
    if seconds := [row for row in rows if "seconds" in row]:
        found.append(["Microseconds of one layer:", "", *by_type(seconds, microseconds)])
    if rates := [row for row in rows if "rate" in row]:
        found.append(["Tokens/s:", "", *by_type(rates, lambda row: number(row["rate"]))])
    if values := [row for row in rows if "value" in row]:
        found.append(markdown(["", "seen"], [[row["name"], row["value"]] for row in values]))
    return found


def page(record: Record) -> str:
    """Make the Markdown page of one kind of processor."""
    lines = [f"# {record['processor']}", "", record["machine"], ""]
    lines += [line for note in record["notes"] for line in (note, "")]
    for run in record["runs"]:
        rows = rows_of(run["lines"])
        title, meaning = SECTIONS[rows[0]["section"]]
        source = "transcribed from docs/performance.md of" if run.get("transcribed") else "measured at"
        lines += [f"## {title}", "", f"`{run['command']}`, {run['seen']}, {source} commit {run['commit']}.", ""]
        lines += [line for text in (meaning, run.get("note", "")) if text for line in (text, "")]
        for table in tables(rows):
            lines += [*table, ""]
    return "\n".join(lines)


# ---- the table of speedups

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


def speedups(records: dict[str, Record]) -> list[str]:
    """Make a table with a line for each kind of processor and number of threads; the last run's figure counts."""
    lines = []
    for name, record in records.items():
        rows = [row for run in record["runs"] for row in rows_of(run["lines"]) if "quotient" in row]
        for threads in sorted({row["threads"] for row in rows if row["section"] == "peers"}):
            cells = []
            for _, *wanted in SPEEDUPS:
                keys = ("section", "name", "type", "context", "threads")
                found = [row for row in rows if [row.get(key) for key in keys] == [*wanted, threads]]
                cells.append(number(found[-1]["quotient"]) if found else "")
            lines.append([f"[{record['processor']}](../bench/results/{name}.json)", str(threads), *cells])
    return markdown(["processor", "threads", *(heading for heading, *_ in SPEEDUPS)], lines)


def with_speedups(text: str, records: dict[str, Record]) -> str:
    """Put the table of speedups between its two marks in a page."""
    table = "\n".join(["", "", *speedups(records), "", ""])
    return re.sub(r"(?<=<!-- speedups -->).*?(?=<!-- end of speedups -->)", lambda _: table, text, count=1, flags=re.S)


# ---- the command


def load() -> dict[str, Record]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def text_of(record: Record) -> str:
    """Format a record as JSON with a line of a table on each line, so that a diff shows the lines that changed."""
    marked = {**record, "runs": [{**run, "lines": "<lines>"} for run in record["runs"]]}
    text = json.dumps(marked, indent=1, ensure_ascii=False)
    for run in record["runs"]:
        lines = ",\n".join(f"    {json.dumps(line, ensure_ascii=False)}" for line in run["lines"])
        text = text.replace('"<lines>"', f"[\n{lines}\n   ]", 1)
    return text + "\n"


def keep(source: Path, name: str) -> None:
    """Add the run that a benchmark's --json wrote to a processor's file, or make that file."""
    run = json.loads(source.read_text())
    rows, machine = run.pop("rows"), run.pop("machine")
    path = RESULTS / f"{name}.json"
    record = {"processor": machine, "machine": machine, "notes": [], "runs": []}
    if path.exists():
        record = json.loads(path.read_text())
    record["runs"].append({**run, "lines": lines_of(rows)})
    path.write_text(text_of(record))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processors", nargs="*", metavar="PROCESSOR", help="a file in bench/results to print")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="a run to add, of a benchmark's --json")
    parser.add_argument("--as", dest="name", metavar="PROCESSOR", help="the file in bench/results that it is added to")
    options = parser.parse_args(arguments)
    if bool(options.keep) != bool(options.name):
        parser.error("--keep and --as go together")
    if options.keep:
        keep(options.keep, options.name)
    records = load()
    for name in options.processors:
        if name not in records:
            parser.error(f"there is no {name!r}: give some of {', '.join(records)}")
        print(page(records[name]))
    if options.keep or not options.processors:
        PERFORMANCE.write_text(with_speedups(PERFORMANCE.read_text(), records))
        print(PERFORMANCE.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
