"""Draw the `memory` that a sequence takes in several caches.

::

    import kvcache.plot

    axes = kvcache.plot.memory({"f16": kvcache.KVCache(32, 8, 128, None, dtype="f16")}, 131072)
    axes.figure.savefig("memory.png")

pyplot is not used: this works without a display, and changes no global settings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from kvcache.arguments import INT32_MAX, INT64_MAX, integer
from kvcache.cache import KVCache
from kvcache.system import readable

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator
except ModuleNotFoundError:
    raise ImportError("kvcache.plot draws with matplotlib: pip install 'kvcache[plot]'") from None

__all__ = ["memory"]

# Okabe and Ito's colours, which the colour-blind can tell apart, ordered so that neighbours differ in lightness.
HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
DARK, MIDDLE, LIGHT, WHITE = "#3B3B3B", "#8C8C8C", "#E4E4E4", "#FFFFFF"
SIZE = 8.5  # size of all text in points: legible in a page's column, and in a large picture
LEGEND: dict[str, Any] = {
    "fontsize": SIZE, "frameon": False, "handlelength": 1.5, "handletextpad": 0.5, "labelspacing": 0.3,
    "borderaxespad": 0.4, "columnspacing": 1.2, "alignment": "left",
}  # fmt: skip
FAR = 8  # times all others, or a fraction of them: a line there would squeeze them
UP, DOWN = "\N{UPWARDS ARROW}", "\N{DOWNWARDS ARROW}"
EM = 0.6  # mean width of a character, relative to the text size


def check_file(file: Path) -> None:
    """Refuse a file that no picture can be written to, before anything is computed."""
    kinds = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in kinds:
        raise ValueError(f"{file} is of none of the kinds that can be drawn: {', '.join(kinds)}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} to draw into")


def save(figure: Figure, file: Path) -> None:
    """Write a picture to a file, which an error names."""
    try:
        figure.savefig(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def memory(
    caches: Mapping[str, KVCache],
    max_tokens: SupportsIndex,
    ax: Axes | None = None,
    *,
    sequences: SupportsIndex = 1,
    free: SupportsIndex | None = None,
) -> Axes:
    """Draw the bytes of rows of sequences against the tokens of each: a line for each cache.

    Parameters
    ----------
    caches : mapping of str to KVCache
        The caches to compare, by label. An empty cache takes no memory for rows, so make a cache for each type or
        policy. See `KVCache.most_bytes`.
    max_tokens : int
        The number of tokens at the end of the lines. At least 2.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.
    sequences : int, default 1
        The number of sequences, which share no row. At least 1.
    free : int, optional
        The memory that the rows must fit into, in bytes. It is a horizontal line, or, where that would be so far from
        the others that these had little room, written at the top or the bottom. At least 0.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, both logarithmic: half the bytes is the same distance everywhere.

    Raises
    ------
    ValueError, TypeError
        If there is no cache, a cache stores no rows, a number is out of range, or an argument has the wrong type.

    Examples
    --------
    >>> import kvcache.plot
    >>> caches = {dtype: kvcache.KVCache(32, 8, 128, None, dtype=dtype) for dtype in ("f16", "q8_0")}
    >>> axes = kvcache.plot.memory(caches, 131072)
    >>> [line.get_label() for line in axes.lines]
    ['f16', 'q8_0']
    """
    last = integer(max_tokens, "max_tokens", 2, INT32_MAX)
    number = integer(sequences, "sequences", 1, INT32_MAX)
    limit = None if free is None else integer(free, "free", 0, INT64_MAX)
    _check_caches(caches)
    ax = _axes(ax, 6.4, 4.0)
    tokens = np.unique(np.geomspace(max(1, last / 256), last, 200).round().astype(int))
    lines = [
        ax.plot(
            tokens, [number * cache.most_bytes(n) for n in tokens], label=str(name), linewidth=1.8,
            color=HUES[i % len(HUES)], linestyle=DASHES[i % len(DASHES)],
        )[0]
        for i, (name, cache) in enumerate(caches.items())
    ]  # fmt: skip
    names = [*map(str, caches)]
    low, high = ax.dataLim.intervaly
    if limit is not None and low / FAR <= limit <= high * FAR:
        lines += ax.plot([tokens[0], last], [limit, limit], color=MIDDLE, linewidth=1, label="free")
        names.append("free")
    elif limit is not None:  # lines rise from the lower left to the upper right
        is_above = limit > high
        x, y, across, up = (0.02, 0.97, "left", "top") if is_above else (0.98, 0.03, "right", "baseline")
        text = f"{UP if is_above else DOWN} free: {readable(limit)}"
        ax.text(x, y, text, ha=across, va=up, transform=ax.transAxes, fontsize=SIZE, color=DARK)
    ax.set_xlim(tokens[0], last)
    _use_logarithms(ax)
    finish(ax, "tokens" if number == 1 else "tokens of each", "")
    title = "Memory of one sequence" if number == 1 else f"Memory of {number:,} sequences"
    room = int(size_of(ax)[0] / EM / SIZE)  # characters
    if max(map(len, names)) <= 0.4 * room:
        ax.set_title(title, loc="left", fontsize=SIZE + 0.5)
        name_ends(ax, lines, names, color=DARK)
    else:
        style = LEGEND | {"title": title, "title_fontsize": SIZE + 0.5, "handlelength": 3}
        labels = [textwrap.fill(str(name), max(1, room - 6)) for name in names]  # the line and its margin take six
        ax.legend(lines, labels, loc="lower left", bbox_to_anchor=(0, 1), **style)
    return ax


# ---- drawing


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the given axes, or the axes of a new figure of `width` by `height` inches."""
    if ax is None:
        return Figure(figsize=(width, height), layout="constrained").add_subplot()
    _check_type(ax, "ax", Axes)
    return ax


def _check_type(value: object, name: str, kind: Any) -> None:
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in getattr(kind, "__args__", [kind]))
        raise TypeError(f"{name}={value!r}: must be of type {kinds}")


def _check_caches(caches: Mapping[str, KVCache]) -> None:
    if not isinstance(caches, Mapping):
        raise TypeError(f"caches={caches!r}: must be a mapping of what to call each cache to the cache")
    if not caches:
        raise ValueError("caches={}: must have at least one")
    for name, cache in caches.items():
        _check_type(cache, f"caches[{name!r}]", KVCache)
        if cache.most_bytes(1) == 0:
            raise ValueError(f"caches[{name!r}]={cache!r}: no layer of it stores anything")


def finish(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=SIZE)
    ax.set_ylabel(y, fontsize=SIZE)
    ax.tick_params(labelsize=SIZE)


def size_of(ax: Axes) -> tuple[float, float]:
    """Lay out the figure as drawn so far; return the axes' width and height in points."""
    root = ax.figure.canvas.figure
    root.draw_without_rendering()
    box = ax.get_window_extent()
    return box.width * 72 / root.dpi, box.height * 72 / root.dpi


def _use_logarithms(ax: Axes) -> None:
    """Make axes of tokens and bytes logarithmic, with ticks at whole KiB, MiB and GiB."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(base=4))
        axis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.yaxis.set_major_formatter(lambda y, _: readable(y).replace(".0 ", " "))
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def name_ends(
    ax: Axes, lines: Sequence[Line2D], names: Sequence[str], size: float = SIZE, color: str | None = None
) -> None:
    """Write a name beside the right end of each line, where a thin line leads to it, above or below other names.

    The thin lines stay left of the names, so that they cross none. A name has its line's colour, or `color`. The name
    of a thick line is bold.
    """
    width, height = size_of(ax)
    to_axes = ax.transData + ax.transAxes.inverted()
    ends: dict[float, list[tuple[float, Line2D, str]]] = {}
    for line, name in zip(lines, names, strict=True):
        last = to_axes.transform(np.asarray(line.get_xydata())[-1])
        ends.setdefault(float(last[0]), []).append((float(last[1]), line, name))
    for x, there in ends.items():
        there.sort(key=lambda end: end[0])
        heights = _apart([start for start, _, _ in there], 1.3 * size / height)
        for (start, line, name), y in zip(there, heights, strict=True):
            ax.annotate(
                name, xy=(x + 5 / width, start), xytext=(x + 21 / width, y), xycoords="axes fraction", va="center",
                color=color or line.get_color(), fontsize=size, annotation_clip=False,
                fontweight="bold" if line.get_linewidth() > 2 else "normal",
                arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.8, "relpos": (0, 0.5),
                            "shrinkA": 1, "shrinkB": 1},
            )  # fmt: skip


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Move ascending heights until neighbours are `least` apart; heights that then touch stay around their mean."""
    groups: list[tuple[float, int]] = []  # the height of the lowest, and how many there are
    for height in heights:
        low, number = height, 1
        while groups and groups[-1][0] + groups[-1][1] * least > low:
            below, several = groups.pop()
            low = (below * several + (low - several * least) * number) / (several + number)
            number += several
        groups.append((low, number))
    return [low + i * least for low, number in groups for i in range(number)]
