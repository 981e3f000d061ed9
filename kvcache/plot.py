"""Draw pictures of a cache: the `memory` of a sequence, the `visibility` under a policy, the `blocks` of a layer.

::

    import kvcache.plot

    axes = kvcache.plot.visibility(kvcache.SlidingWindow(8, num_sink_tokens=2), 32)
    axes.figure.savefig("window.png")

Each function draws into the given matplotlib axes, or into the axes of a new figure, and returns the axes. No function
uses pyplot: they work without a display, and change no global settings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvcache.arguments import INT32_MAX, INT64_MAX, integer
from kvcache.block import Block
from kvcache.cache import KVCache
from kvcache.policy import CrossAttention, FullAttention, Policy, written
from kvcache.system import readable

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
except ModuleNotFoundError:
    raise ImportError("kvcache.plot draws with matplotlib: pip install 'kvcache[plot]'") from None

__all__ = ["blocks", "memory", "visibility"]

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

# The states of a position in `visibility`, and their colours: lighter where less is seen.
LATER, DROPPED, KEPT, SEEN = range(4)
VISIBILITY = {LATER: ("", WHITE), DROPPED: ("dropped", LIGHT), KEPT: ("only kept", HUES[5]), SEEN: ("seen", HUES[0])}

# The states of a slot in `blocks`. HELD + i: only sequence i holds it, counted by rising id.
FREE, UNFILLED, WASTED, SHARED, HELD = range(5)
STATES = {SHARED: "shared", WASTED: "wasted", UNFILLED: "not filled", FREE: "free"}
COLOURS = {FREE: WHITE, UNFILLED: LIGHT, WASTED: WHITE, SHARED: DARK}


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
    _finish(ax, "tokens" if number == 1 else "tokens of each", "")
    title = "Memory of one sequence" if number == 1 else f"Memory of {number:,} sequences"
    room = int(_size(ax)[0] / EM / SIZE)  # characters
    if max(map(len, names)) <= 0.4 * room:
        ax.set_title(title, loc="left", fontsize=SIZE + 0.5)
        name_ends(ax, lines, names, color=DARK)
    else:
        style = LEGEND | {"title": title, "title_fontsize": SIZE + 0.5, "handlelength": 3}
        labels = [textwrap.fill(str(name), max(1, room - 6)) for name in names]  # the line and its margin take six
        ax.legend(lines, labels, loc="lower left", bbox_to_anchor=(0, 1), **style)
    return ax


def visibility(policy: Policy, num_tokens: SupportsIndex, ax: Axes | None = None) -> Axes:
    """Draw which rows each query sees, and which are kept, as tokens arrive one at a time.

    Parameters
    ----------
    policy : FullAttention, SlidingWindow, ChunkedAttention or CrossAttention
        The policy.
    num_tokens : int
        The number of tokens, each with its query. At least 1.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with an image: a row for each query, a column for each position (for `CrossAttention`, each of
        `max_len` rows). 0: no row yet; 1: row was dropped; 2: row is kept, not seen; 3: row is seen. A row that stands
        for several positions (``FullAttention(stride=n)``) shows at each of them.

    Raises
    ------
    ValueError, TypeError
        If `num_tokens` is out of range, or an argument has the wrong type.

    Examples
    --------
    >>> import kvcache.plot
    >>> axes = kvcache.plot.visibility(kvcache.SlidingWindow(2, num_sink_tokens=1, resume_window=3), 5)
    >>> print(axes.images[0].get_array())
    [[3 0 0 0 0]
     [3 3 0 0 0]
     [3 3 3 0 0]
     [3 2 3 3 0]
     [3 1 2 3 3]]
    """
    _check_type(policy, "policy", Policy)
    cells = _visible(policy, integer(num_tokens, "num_tokens", 1, INT32_MAX))
    ax = _axes(ax, 4.4, 4.4)
    _image(ax, cells, [colour for _, colour in VISIBILITY.values()])
    ax.set_box_aspect(1)
    found = [state for state in (SEEN, KEPT, DROPPED) if (cells == state).any()]
    handles = [Patch(facecolor=VISIBILITY[state][1], label=VISIBILITY[state][0]) for state in found]
    ax.legend(handles=handles, loc="upper right", **LEGEND | {"frameon": True, "framealpha": 1, "edgecolor": WHITE})
    ax.set_title(_title(policy), loc="left", fontsize=SIZE + 0.5)
    _finish(ax, "row" if isinstance(policy, CrossAttention) else "position of the key", "position of the query")
    _rule(ax, *cells.shape)
    return ax


def blocks(cache: KVCache, layer: SupportsIndex = 0, ax: Axes | None = None) -> Axes:
    """Draw where the rows of a layer lie: a row of the picture for each block, with the holders of its slots.

    Parameters
    ----------
    cache : KVCache
        The cache. See `KVCache.blocks`.
    layer : int, default 0
        The layer's index; the layers of one policy share blocks.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with an image: a row for each block, a column for each slot. 0: the block is free; 1: not yet filled;
        2: wasted; 3: held by several sequences; from 4 on: the index, by rising id, of the only sequence that holds it.
        Ids are written into the cells if they fit.

    Raises
    ------
    IndexError, TypeError
        If there is no such layer, or an argument has the wrong type.

    Examples
    --------
    >>> import kvcache.plot
    >>> cache = kvcache.KVCache(1, 1, 2, 64, max_sequences=2, block_size=4)
    >>> with cache.batch(3) as batch:
    ...     batch.put(0, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
    >>> cache.copy_prefix(0, 1, 2)
    >>> kvcache.plot.blocks(cache).images[0].get_array().tolist()
    [[3, 3, 4, 1]]
    """
    _check_type(cache, "cache", KVCache)
    found = cache.blocks(layer)
    ax = _axes(ax, 6.4, min(1.3 + 0.28 * len(found), 8.0))
    if not found:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "no blocks yet", ha="center", va="center", transform=ax.transAxes, fontsize=SIZE)
        return ax
    seq_ids = sorted({seq_id for block in found for seq_id in block.holders}, key=lambda one: (one is None, one or 0))
    cells = _slots(found, seq_ids)
    colours = [*(COLOURS[state] for state in range(HELD)), *(HUES[i % len(HUES)] for i in range(len(seq_ids)))]
    _image(ax, cells, colours)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    _finish(ax, "slot", f"block of layer {int(layer)}")
    handles = _legend(cells, seq_ids)
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(_size(ax)[0] / EM / SIZE / (longest + 4)))  # a patch and its margin take four more
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=columns, **LEGEND)
    _rule(ax, *cells.shape)
    _frame_white(ax, cells)
    _name_holders(ax, found, colours, cells)
    return ax


# ---- the cells of the images


def _visible(policy: Policy, num_tokens: int) -> npt.NDArray[np.uint8]:
    """Return the state of each position for each query; ask a cache with this policy."""
    if isinstance(policy, CrossAttention):
        return np.full((num_tokens, policy.max_len), SEEN, np.uint8)
    cells = np.full((num_tokens, num_tokens), LATER, np.uint8)
    if isinstance(policy, FullAttention) and policy.stride > 1:  # a cache needs another layer beside it
        positions = np.arange(num_tokens)
        cells[positions < (positions[:, None] + 1) // policy.stride * policy.stride] = SEEN
        return cells
    row = np.zeros((1, 1, 1), np.float32)
    with KVCache(1, 1, 1, None, dtype="f32", policy=policy) as cache:
        for query in range(num_tokens):
            with cache.batch(1) as batch:
                batch.put(0, row, row)
                held = [*cache.positions().tolist(), query]
                cells[query, :query] = DROPPED
                cells[query, held] = np.where(batch.dense(0)[2][0] == 0, SEEN, KEPT)
    return cells


def _slots(found: Sequence[Block], seq_ids: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """Return the state of each slot of each block."""
    cells = np.full((len(found), found[0].num_slots), FREE)
    for block in found:
        if block.is_free:
            continue
        cells[block.index] = UNFILLED
        cells[block.index, : block.filled] = WASTED
        for seq_id, runs in block.holders.items():
            for run in runs:
                part = cells[block.index, run.slot : run.slot + run.count]
                part[:] = np.where(part == WASTED, HELD + seq_ids.index(seq_id), SHARED)
    return cells


def _name_of(seq_id: int | None) -> str:
    """Return what a holder of rows is called."""
    return "kept" if seq_id is None else str(seq_id)


def _holders(block: Block) -> list[str]:
    """Return, for each filled slot, the ids of the sequences that hold it."""
    names: list[list[str]] = [[] for _ in range(block.filled)]
    for seq_id, runs in block.holders.items():
        for run in runs:
            for slot in range(run.slot, run.slot + run.count):
                names[slot].append(_name_of(seq_id))
    return [", ".join(name) for name in names]


def _stretches(values: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Return each stretch of equal values: the value, the stretch's begin, its length."""
    found, first = [], 0
    for value, group in groupby(values):
        found.append((value, first, len(list(group))))
        first += found[-1][2]
    return found


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


def _finish(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=SIZE)
    ax.set_ylabel(y, fontsize=SIZE)
    ax.tick_params(labelsize=SIZE)


def _size(ax: Axes) -> tuple[float, float]:
    """Lay out the figure as drawn so far; return the axes' width and height in points."""
    root = ax.figure.canvas.figure
    root.draw_without_rendering()
    box = ax.get_window_extent()
    return box.width * 72 / root.dpi, box.height * 72 / root.dpi


def _title(policy: Policy) -> str:
    """Format a policy as a title: its name, and its numbers below."""
    name, _, given = written(policy).rstrip(")").partition("(")
    return "\n".join([name, *textwrap.wrap(given, 30)])


def _image(ax: Axes, cells: npt.NDArray[Any], colours: Sequence[str]) -> None:
    ax.imshow(
        cells, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5, interpolation="none", aspect="auto"
    )
    ax.autoscale(False)
    ax.spines[:].set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 4, 8, 10]))


def _rule(ax: Axes, rows: int, columns: int) -> None:
    """Draw thin lines between cells if the cells are large enough."""
    width, height = _size(ax)
    for draw, points, n, across in (
        (ax.hlines, height / rows, rows, columns),
        (ax.vlines, width / columns, columns, rows),
    ):
        if points >= 4:
            draw(np.arange(1, n) - 0.5, -0.5, across - 0.5, colors=WHITE, linewidth=0.1 * min(points, 10))


def _frame_white(ax: Axes, cells: npt.NDArray[np.int64]) -> None:
    """Hatch wasted slots and frame free blocks, which are both white."""
    width = 0.05 * min(_size(ax)[1] / len(cells), 12)
    for row, states in enumerate(cells):
        for state, first, count in _stretches(states.tolist()):
            if state in (WASTED, FREE):
                box = Rectangle((first - 0.5, row - 0.42), count, 0.84, zorder=3, clip_on=False, **_frame(state, width))
                ax.add_patch(box)


def _frame(state: int, width: float) -> dict[str, Any]:
    frame = {"facecolor": COLOURS[state], "edgecolor": MIDDLE, "linewidth": width}
    return frame | {"hatch": "//////"} if state == WASTED else frame


def _legend(cells: npt.NDArray[np.int64], seq_ids: Sequence[int | None]) -> list[Patch]:
    """Return the entries of a legend: the sequences, and the states that occur."""
    handles = []
    for i, hue in enumerate(HUES[: len(seq_ids)]):
        same = [_name_of(seq_id) for seq_id in seq_ids[i :: len(HUES)]]
        names = ", ".join(same[:3]) + (" …" if len(same) > 3 else "")
        handles.append(Patch(facecolor=hue, label=f"sequence{'s' * (len(same) > 1)} {names}"))
    for state, words in STATES.items():
        if (cells == state).any():
            frame = _frame(state, 0.6) if state in (WASTED, FREE) else {"facecolor": COLOURS[state]}
            handles.append(Patch(label=words, **frame))
    return handles


def _name_holders(ax: Axes, found: Sequence[Block], colours: Sequence[str], cells: npt.NDArray[np.int64]) -> None:
    """Write the ids of holders where they fit."""
    width, height = _size(ax)
    for block in found if height / len(found) >= 1.2 * SIZE else []:
        for name, first, count in _stretches(_holders(block)):
            if not name or len(name) * EM * SIZE > count * width / cells.shape[1]:
                continue
            colour = colours[cells[block.index, first]]
            ax.text(
                first + (count - 1) // 2, block.index, name, ha="center", va="center", fontsize=SIZE - 0.5,
                color=WHITE if _lightness(colour) < 0.4 else "black", zorder=4,
                bbox={"facecolor": colour, "linewidth": 0, "pad": 0.5},
            )  # fmt: skip


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


def _lightness(colour: str) -> float:
    return float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114)))


def name_ends(
    ax: Axes, lines: Sequence[Line2D], names: Sequence[str], size: float = SIZE, color: str | None = None
) -> None:
    """Write a name beside the right end of each line, where a thin line leads to it, above or below other names.

    The thin lines stay left of the names, so that they cross none. A name has its line's colour, or `color`. The name
    of a thick line is bold.
    """
    width, height = _size(ax)
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
