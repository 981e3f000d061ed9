"""Draws what bench_attention.py's section peers measured: tokens/s against context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

LAYERS = 32  # of the model whose decode attention is drawn: 32 query heads, 8 KV heads of 128 (Llama 3.1 8B)

# Okabe and Ito's colours, which differ for the colour-blind too; markers and dashes tell lines apart without them.
STYLES = {
    "kvcache": ("#0072B2", "-", 2.6),
    "ggml": ("#E69F00", "--", 1.5),
    "torch": ("#56B4E9", "--", 1.5),
    "Hugging Face": ("#CC79A7", "--", 1.5),
    "ONNX Runtime": ("#D55E00", "--", 1.5),
    "OpenVINO": ("#009E73", "--", 1.5),
    "vLLM": ("#000000", "--", 1.5),
}
MARKERS = {"f16": "o", "bf16": "s", "q8_0": "^", "int8": "^", "u8": "^", "fp8": "^", "q4_0": "v"}
DRAWN = {
    *(("kvcache", kind) for kind in ("f16", "q8_0", "q4_0")),
    *(("ggml", kind) for kind in ("f16", "q8_0")),
    *(("torch", "bf16"), ("Hugging Face", "bf16"), ("ONNX Runtime", "int8"), ("OpenVINO", "f16"), ("vLLM", "bf16")),
}
NAMES = {"torch": "torch by hand"}


def curves(rows: Sequence[dict], threads: int) -> dict[tuple[str, str], dict[int, float]]:
    """Tokens/s by context, of the fastest mode of each peer and type."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        key = row["name"].split(",")[0], row["type"]
        if row["section"] == "peers" and row["threads"] == threads and "seconds" in row and key in DRAWN:
            speed = 1 / (LAYERS * row["seconds"])
            # The fastest mode of a peer; of ours the first, as one that is measured twice would have two chances.
            if key[0] != "kvcache" or row["context"] not in found[key]:
                found[key][row["context"]] = max(speed, found[key].get(row["context"], 0))
    return found


def apart(heights: Sequence[float], least: float) -> list[float]:
    """The same heights, ascending, moved so that neighbours are `least` apart."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    shift = sum(a - b for a, b in zip(moved, heights, strict=True)) / max(1, len(moved))
    return [height - shift for height in moved]


def plot(rows: Sequence[dict], path: Path) -> None:
    """Of the largest number of threads there is."""
    threads = max(row["threads"] for row in rows if row["section"] == "peers")
    found = curves(rows, threads)
    mpl.rcParams |= {"svg.hashsalt": "kvcache", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    figure, axes = plt.subplots(figsize=(9, 5.5))
    for (who, kind), speeds in found.items():
        colour, dashes, width = STYLES[who]
        contexts = sorted(speeds)
        axes.plot(
            contexts, [speeds[n] for n in contexts], dashes, color=colour, linewidth=width, marker=MARKERS[kind],
            markersize=5, zorder=3 if who == "kvcache" else 2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({context for speeds in found.values() for context in speeds})
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s")
    plural = "s" * (threads > 1)
    axes.set_title(
        f"Decode attention of {LAYERS} layers, 32 query and 8 KV heads x 128, {threads} thread{plural}", loc="left"
    )
    _label(axes, found, ticks[-1])
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
    plt.close(figure)


def _label(axes: plt.Axes, found: dict[tuple[str, str], dict[int, float]], last: int) -> None:
    """A line's name at its end, with a thin line to it where names would overlap."""
    ends = sorted((speeds[last], key) for key, speeds in found.items() if last in speeds)
    to_axes = axes.transData.transform
    low, high = (axes.transAxes.transform((0, y))[1] for y in (0, 1))
    heights = [(to_axes((last, speed))[1] - low) / (high - low) for speed, _ in ends]
    right = axes.transAxes.inverted().transform(to_axes((last, ends[0][0])))[0] if ends else 1
    for height, (speed, (who, kind)), start in zip(apart(heights, 0.05), ends, heights, strict=True):
        del speed
        colour = STYLES[who][0]
        axes.annotate(
            f"{NAMES.get(who, who)} {kind}", xy=(right + 0.01, start), xytext=(1.03, height), xycoords="axes fraction",
            textcoords="axes fraction", va="center", color=colour, annotation_clip=False,
            fontweight="bold" if who == "kvcache" else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip
