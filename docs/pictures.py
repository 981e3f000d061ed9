"""Draw the pictures of the documentation: python docs/pictures.py.

The pictures of concepts.md show caches made here; the other pictures show figures kept in bench/results.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

import kvcache
import kvcache.plot
from kvcache.block import Block
from kvcache.cache import KVCache
from kvcache.plot import DARK, EM, HUES, LEGEND, LIGHT, MIDDLE, SIZE, WHITE, finish, size_of
from kvcache.policy import CrossAttention, Policy, written

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "bench"))
import plot_attention  # noqa: E402 - the path is set above

FULL, LOCAL = kvcache.FullAttention(), kvcache.SlidingWindow(1024)
POLICIES = (
    FULL,
    kvcache.SlidingWindow(8, num_sink_tokens=2, resume_window=12),
    kvcache.ChunkedAttention(8, resume_window=4),
    kvcache.CrossAttention(16),
)
TYPES = ("f32", "f16", "q8_0", "q4_0")


def visibility() -> Figure:
    """Draw which rows each query sees, and which are kept, as 24 tokens arrive one at a time."""
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    for policy, ax in zip(POLICIES, figure.subplots(1, len(POLICIES)), strict=True):
        draw_visibility(policy, 24, ax)
    return figure


def blocks() -> Figure:
    """Draw a sequence and its extended fork, a sequence with tokens removed, and a cleared sequence's blocks."""
    policy = kvcache.SlidingWindow(40, num_sink_tokens=4)
    cache = kvcache.KVCache(1, 1, 1, None, policy=policy, rope=False, max_sequences=None, block_size=16)
    append(cache, 0, 30)
    cache.fork(0, 1)
    append(cache, 0, 6)
    append(cache, 1, 22)
    append(cache, 2, 20)
    append(cache, 0, 24)
    append(cache, 3, 10)
    cache.remove(6, 12, seq_id=2)
    cache.clear(3)
    return draw_blocks(cache)


def append(cache: kvcache.KVCache, seq_id: int, num_tokens: int) -> None:
    first = cache.next_position(seq_id)
    rows = np.zeros((num_tokens, 1, 1), np.float32)
    with cache.batch(positions=range(first, first + num_tokens), seq_ids=[seq_id] * num_tokens) as batch:
        batch.put(0, rows, rows)


def memory() -> Figure:
    """Draw 32 layers of 8 KV heads of 128 in every type, and with windows of 1,024 in 5 of 6 layers, and in all."""
    policies = {"": FULL, ", 5 of 6 windows": ([LOCAL] * 5 + [FULL]) * 5 + [LOCAL] * 2, ", all windows": LOCAL}
    kinds = [(dtype, "") for dtype in TYPES] + [("f16", policy) for policy in policies if policy]
    caches = {
        dtype + name: kvcache.KVCache(32, 8, 128, 131072, dtype=dtype, policy=policies[name]) for dtype, name in kinds
    }
    figure: Figure = kvcache.plot.memory(caches, 131072).figure
    return figure


def attention() -> Figure:
    """Draw decode attention on the processor whose whole run was kept."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/epyc-zen5.csv")
    return plot_attention.figure(rows, processor)


def llama_cpp() -> Figure:
    """Draw llama.cpp's decoding on the processor where it was measured."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/xeon-amx.csv")
    return plot_attention.llama_cpp(rows, processor)


def long_contexts() -> Figure:
    """Draw transformers' generate() with all rows and with selected rows."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/epyc-zen5.csv")
    return plot_attention.long_contexts(rows, processor)


# ---- what caches hold

# The states of a position in `visibility`, and their colours: lighter where less is seen.
LATER, DROPPED, KEPT, SEEN = range(4)
VISIBILITY = {LATER: ("", WHITE), DROPPED: ("dropped", LIGHT), KEPT: ("only kept", HUES[5]), SEEN: ("seen", HUES[0])}

# The states of a slot in `blocks`. HELD + i: only sequence i holds it, counted by rising id.
FREE, UNFILLED, WASTED, SHARED, HELD = range(5)
STATES = {SHARED: "shared", WASTED: "wasted", UNFILLED: "not filled", FREE: "free"}
COLOURS = {FREE: WHITE, UNFILLED: LIGHT, WASTED: WHITE, SHARED: DARK}


def draw_visibility(policy: Policy, num_tokens: int, ax: Axes) -> None:
    cells = _visible(policy, num_tokens)
    _image(ax, cells, [colour for _, colour in VISIBILITY.values()])
    ax.set_box_aspect(1)
    found = [state for state in (SEEN, KEPT, DROPPED) if (cells == state).any()]
    handles = [Patch(facecolor=VISIBILITY[state][1], label=VISIBILITY[state][0]) for state in found]
    ax.legend(handles=handles, loc="upper right", **LEGEND | {"frameon": True, "framealpha": 1, "edgecolor": WHITE})
    ax.set_title(_title(policy), loc="left", fontsize=SIZE + 0.5)
    finish(ax, "row" if isinstance(policy, CrossAttention) else "position of the key", "position of the query")
    _rule(ax, *cells.shape)


def draw_blocks(cache: KVCache) -> Figure:
    """Draw a row for each block, with the holders of its slots."""
    found = cache.blocks(0)
    ax = Figure(figsize=(6.4, 1.3 + 0.28 * len(found)), layout="constrained").add_subplot()
    seq_ids = sorted({seq_id for block in found for seq_id in block.holders}, key=lambda one: (one is None, one or 0))
    cells = _slots(found, seq_ids)
    colours = [*(COLOURS[state] for state in range(HELD)), *(HUES[i % len(HUES)] for i in range(len(seq_ids)))]
    _image(ax, cells, colours)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    finish(ax, "slot", "block of layer 0")
    handles = _legend(cells, seq_ids)
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(size_of(ax)[0] / EM / SIZE / (longest + 4)))  # a patch and its margin take four more
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=columns, **LEGEND)
    _rule(ax, *cells.shape)
    _frame_white(ax, cells)
    _name_holders(ax, found, colours, cells)
    return ax.figure


def _visible(policy: Policy, num_tokens: int) -> npt.NDArray[np.uint8]:
    """Return the state of each position for each query; ask a cache with this policy."""
    if isinstance(policy, CrossAttention):
        return np.full((num_tokens, policy.max_len), SEEN, np.uint8)
    cells = np.full((num_tokens, num_tokens), LATER, np.uint8)
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
    width, height = size_of(ax)
    for draw, points, n, across in (
        (ax.hlines, height / rows, rows, columns),
        (ax.vlines, width / columns, columns, rows),
    ):
        if points >= 4:
            draw(np.arange(1, n) - 0.5, -0.5, across - 0.5, colors=WHITE, linewidth=0.1 * min(points, 10))


def _frame_white(ax: Axes, cells: npt.NDArray[np.int64]) -> None:
    """Hatch wasted slots and frame free blocks, which are both white."""
    width = 0.05 * min(size_of(ax)[1] / len(cells), 12)
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
    width, height = size_of(ax)
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


def _lightness(colour: str) -> float:
    return float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114)))


# ---- all of them


def draw(folder: Path) -> None:
    for picture in (visibility, blocks, memory, attention, llama_cpp, long_contexts):
        plot_attention.save(picture, folder / f"{picture.__name__}.svg")


if __name__ == "__main__":
    draw(DOCS)
