"""The table of attention's speed: it prints and keeps lines, and knows the figures that are wanted."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from driver import FLOATS, TYPES
from entrants import Entrant, Peers, Shape, compete
from figures import Row, Table, quartiles, quiet_quotient, quotients

BLOCKED = tuple(dtype for dtype in TYPES if dtype not in FLOATS)  # types whose rows are blocks of 32 elements

# The wanted values of figures, by name, or by name and type. Two numbers: with one thread, and with two.
WANTED = {
    "share of the limit f32": "- >= 0.9",
    "share of the limit f16": ">= 0.8 0.9",
    "share of the limit bf16": "- >= 0.9",
    "speedup over kvcache f16 q8_0": ">= 1.5 1.6",
    "speedup over kvcache f16 q4_0": ">= 2.4",
    "speedup over the fastest peer f16": ">= 3.3 2.3",
    "speedup over the fastest peer bf16": ">= 3.3 2.3",
    "speedup over the fastest peer q8_0": ">= 3.0 2.2",
    "speedup over ggml's fastest path f16": ">= 3",
    "speedup over ggml's fastest path q8_0": ">= 10",
    "speedup over ggml's fastest path q4_0": ">= 10",
    "speedup over torch by hand": ">= 2.5",
    "speedup over Hugging Face f16": ">= 20",
    "speedup over Hugging Face bf16": ">= 20",
    "share of the machine's f32 multiply-adds": ">= 0.7",
    "cost over kvcache f16 bf16": "<= 1",
    "cost over kvcache f16 q8_0": "<= 1.15",
    "cost over kvcache f16 q4_0": "<= 1.15",
    "blocks of 64": "<= 1.05",
    "every second slot a hole": "<= 1.15",
    "prompt in a window": "1",
    "relative error f32": "< 1e-5",
    "relative error": "< 5e-4",
}

COLUMNS = {
    "figure": "<60", "tokens": ">7,", "type": "<8", "threads": ">7", "µs": ">11,.1f", "quotient": ">8",
    "quartiles": "^16", "fastest": ">7", "wanted": "<8", "": "",
}  # fmt: skip

Samples = Sequence[float]


def wanted(figure: str, dtype: str = "") -> str:
    return WANTED.get(f"{figure} {dtype}", WANTED.get(figure, ""))


@dataclass
class Report:
    """Prints lines at once, and keeps the data of each line as a row."""

    options: argparse.Namespace
    peers: Peers
    rows: list[Row] = field(default_factory=list)

    def open(self, section: str, title: str) -> None:
        print(f"\n{title}\n", flush=True)
        self.table = Table(COLUMNS, section)

    def line(
        self, name: str, shape: Shape, seconds: Samples = (), quotient: tuple[Samples, Samples] | float | None = None,
        want: str = "", note: str = "", **data: object,
    ) -> None:  # fmt: skip
        """Add a line with the median seconds of a call, and a quotient of two interleaved samples.

        The quotient is shown as its median over the rounds, its quartiles, and the quotient of the fastest tenths.
        """
        row: Row = {"name": name.strip(), "context": shape.context}
        row |= {"type": shape.type, "threads": shape.threads, "wanted": want, "note": note, **data}
        micro, numbers = None, ["", "", ""]
        if len(seconds):
            row["seconds"] = statistics.median(seconds)
            micro = 1e6 * row["seconds"]
        if isinstance(quotient, tuple):
            low, middle, high = quartiles(quotients(*quotient))
            row |= {"quotient": middle, "low": low, "high": high, "fastest": quiet_quotient(*quotient)}
            numbers = [f"{middle:.3g}", f"{low:.3g} .. {high:.3g}", f"{row['fastest']:.3g}"]
        elif quotient is not None:
            row["quotient"] = quotient
            numbers[0] = f"{quotient:.2g}"
        self.table.line(name, shape.context, shape.type, shape.threads, micro, *numbers, want, note, **row)
        self.rows.append(self.table.rows[-1])

    def compete(self, some: Sequence[Entrant], threads: int, least: int = 5) -> list[list[float]]:
        """Interleave entrants, for the time that --seconds asks for; return their samples."""
        seconds = self.options.seconds * max(1, len(some) / 2)
        return compete(some, seconds, threads, least)
