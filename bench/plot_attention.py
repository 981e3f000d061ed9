"""Draw tokens/s against context, from a run of bench_attention.py, bench_llama_cpp.py or bench_hf.py, or kept figures.

python bench/plot_attention.py bench/results/epyc-zen5.csv attention.svg
python bench/plot_attention.py bench/results/epyc-zen5.csv long_contexts.svg --section long_contexts
python bench/plot_attention.py bench/results/epyc-zen5.csv llama_cpp.svg --section llama_cpp
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from write_results import processors, read

from kvcache.plot import name_ends

LAYERS = 32  # layers of the model that is drawn: 32 query heads, 8 KV heads of 128 (Llama 3.1 8B)
SVG = "http://www.w3.org/2000/svg"
SETTINGS = {"svg.hashsalt": "kvcache", "svg.fonttype": "none", "font.family": "sans-serif"}

# Okabe and Ito's colours, which differ for the colour-blind too; markers and dashes differ as well.
STYLES = {
    "kvcache": ("#0072B2", "-", 2.6),
    "ggml": ("#E69F00", "--", 1.5),
    "torch": ("#56B4E9", "--", 1.5),
    "Hugging Face": ("#CC79A7", "--", 1.5),
    "ONNX Runtime": ("#D55E00", "--", 1.5),
    "OpenVINO": ("#009E73", "--", 1.5),
    "vLLM": ("#000000", "--", 1.5),
    "flash attention": ("#D55E00", "--", 1.5),
    "without it": ("#009E73", "--", 1.5),
    "ik_llama.cpp": ("#CC79A7", "--", 1.5),
    "selected": ("#009E73", "-", 2.6),
    "DynamicCache": ("#CC79A7", "--", 1.5),
}
MARKERS = {"f16": "o", "bf16": "s", "q8_0": "^", "int8": "^", "u8": "^", "fp8": "^", "q4_0": "v", "int4": "v"}
DRAWN = {
    *(("kvcache", dtype) for dtype in ("f16", "q8_0", "q4_0")),
    *(("ggml", dtype) for dtype in ("f16", "q8_0")),
    *(("torch", "bf16"), ("Hugging Face", "bf16"), ("ONNX Runtime", "int8"), ("OpenVINO", "f16"), ("vLLM", "bf16")),
}
LLAMA_CPP = ("f16", "q8_0", "q4_0")  # types that are drawn of llama.cpp
LABELS = {
    **{"torch": "torch by hand", "Hugging Face": "transformers"},
    **{"flash attention": "llama.cpp", "without it": "llama.cpp, no flash"},
    **{"selected": "2,048 rows,", "DynamicCache": "DynamicCache,"},
}
# The panels of a picture: section, beginning of a name, who is drawn for the rest of it, and types.
LONG_CONTEXTS = {
    "transformers, Llama 3.2 1B in bf16": (
        "generate 1b", "", {"kvcache": "kvcache", "kvcache, select=2048": "selected", "DynamicCache": "DynamicCache"},
        ("bf16", "int8"),
    ),
    "llama.cpp, Llama 3.2 1B in Q4_0": (
        "llama_cpp", "decoding with select=2048, ",
        {"all rows": "kvcache", "selected": "selected", "flash attention": "flash attention"}, ("q8_0",),
    ),
}  # fmt: skip

Curves = dict[tuple[str, str], dict[int, float]]


def curves(rows: Sequence[dict[str, Any]], threads: int) -> Curves:
    """Return tokens/s by context, of the fastest mode of each peer and type."""
    found: Curves = defaultdict(dict)
    for row in rows:
        key = row["name"].split(",")[0], row.get("type", "")
        if row["section"] == "peers" and row["threads"] == threads and "seconds" in row and key in DRAWN:
            speed = 1 / (LAYERS * row["seconds"])
            # kvcache's f16 is measured twice, beside two groups of peers: only the first counts.
            if key[0] != "kvcache" or row["context"] not in found[key]:
                found[key][row["context"]] = max(speed, found[key].get(row["context"], 0))
    return found


def figure(rows: Sequence[dict[str, Any]], processor: str = "") -> Figure:
    """Draw the rows with the largest number of threads."""
    threads = max(row["threads"] for row in rows if row["section"] == "peers" and "seconds" in row)
    title = f"Decode attention of {LAYERS} layers, 32 query and 8 KV heads x 128\n{where(threads, processor)}"
    return draw(curves(rows, threads), title)


def llama_cpp(rows: Sequence[dict[str, Any]], processor: str = "") -> Figure:
    """Draw the rows of bench_llama_cpp.py's sections decode and ik-decode with the largest number of threads."""
    rows = [row for row in rows if row["section"] == "llama_cpp" and "rate" in row]
    threads = max(row["threads"] for row in rows)
    found: Curves = defaultdict(dict)
    for row in rows:
        what, _, who = row["name"].partition(", ")
        of_keys, _, of_values = row["type"].partition("/")
        is_drawn = what == "decoding" or (what == "decoding beside ik_llama.cpp" and of_keys == of_values)
        if is_drawn and of_keys in LLAMA_CPP and row["threads"] == threads:
            found[who, of_keys][row["context"]] = row["rate"]
    end = max(max(speeds) for speeds in found.values())
    found = {key: speeds for key, speeds in found.items() if end in speeds}  # else other lines would cross its name
    return draw(found, f"llama.cpp decoding with its own cache and with kvcache\n{where(threads, processor)}")


def long_contexts(rows: Sequence[dict[str, Any]], processor: str = "") -> Figure:
    """Draw a 1 B model with all rows and with selected ones on one thread, of bench_hf.py and bench_llama_cpp.py."""
    panels: dict[str, Curves] = {}
    for title, (section, name, entrants, types) in LONG_CONTEXTS.items():
        panels[title] = defaultdict(dict)
        for row in rows:
            who = entrants.get(row["name"].removeprefix(name))
            if (row["section"], row.get("threads")) == (section, 1) and "rate" in row and who and row["type"] in types:
                panels[title][who, row["type"]][row["context"]] = row["rate"]
    picture = Figure(figsize=(13, 5))
    for axes, (title, found) in zip(picture.subplots(1, len(panels)), panels.items(), strict=True):
        draw_on(axes, found, f"{title}\n{where(1, processor)}", "linear")
    picture.subplots_adjust(wspace=0.6)
    return picture


def where(threads: int, processor: str) -> str:
    return f"{threads} thread{'s' * (threads > 1)}" + (f" of an {processor}" if processor else "")


def draw(found: Curves, title: str) -> Figure:
    picture = Figure(figsize=(9, 5.5))
    draw_on(picture.subplots(), found, title, "log")
    return picture


def draw_on(axes: Axes, found: Curves, title: str, scale: str) -> None:
    for (who, dtype), speeds in found.items():
        colour, dashes, width = STYLES[who]
        contexts = sorted(speeds)
        axes.plot(
            contexts, [speeds[n] for n in contexts], dashes, color=colour, linewidth=width, marker=MARKERS[dtype],
            markersize=5, zorder=3 if width > 2 else 2,
        )  # fmt: skip
    ticks = sorted({context for speeds in found.values() for context in speeds})
    if ticks[0]:
        axes.set_xscale("log", base=2)
    elif len(ticks) > 1:  # a logarithm has no place for the empty context
        axes.set_xscale("symlog", base=2, linthresh=ticks[1])
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.margins(x=0.02)  # less than the thin lines to the names
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s")
    axes.set_title(title, loc="left")
    name_ends(axes, axes.lines, [f"{LABELS.get(who, who)} {dtype}" for who, dtype in found], size=10)


def save(make: Callable[[], Figure], path: Path) -> None:
    """Draw and write a .png, .pdf or .svg; an SVG is made small, and the same figures make the same file."""
    with rc_context(SETTINGS):
        make().savefig(path, bbox_inches="tight", dpi=120)
    if path.suffix == ".svg":
        path.write_text(smaller(path.read_text()) + "\n")


def smaller(text: str) -> str:
    """Return an SVG of matplotlib without metadata and groups that do nothing, and with hundredths of a point."""
    for prefix, space in (("", SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, space)
    root = ElementTree.fromstring(text)
    root.remove(root[0])  # metadata
    shrink(root)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode")


def shrink(element: ElementTree.Element) -> None:
    """Replace groups that do nothing by what they hold, and neighbouring paths of one style by one path."""
    children = list(element)
    element[:] = []
    for child in children:
        shrink(child)
        for name, value in child.items():
            short = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 2):g}", value)
            child.set(name, ("" if short.startswith("data:") else " ").join(short.split()))
        if child.tag == f"{{{SVG}}}g" and child.keys() in ([], ["id"]):
            element.extend(child)
        elif len(element) and child.get("d") and {**child.attrib, "d": ""} == {**element[-1].attrib, "d": ""}:
            element[-1].set("d", f"{element[-1].get('d')} {child.get('d')}")
        else:
            element.append(child)


def kept(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read rows, and the processor's name, from a run (--json of a benchmark) or from a processor's figures."""
    if path.suffix == ".csv":
        return read(path), processors()[path.stem]
    return json.loads(path.read_text())["rows"], ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FIGURES")
    parser.add_argument("target", type=Path, metavar="PICTURE", help="a .svg, .png or .pdf")
    sections = {"peers": figure, "llama_cpp": llama_cpp, "long_contexts": long_contexts}
    parser.add_argument("--section", choices=sections, default="peers", help="default: peers")
    options = parser.parse_args(arguments)
    save(lambda: sections[options.section](*kept(options.source)), options.target)


if __name__ == "__main__":
    main()
