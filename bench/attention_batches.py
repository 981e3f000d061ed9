"""The section "batches" of bench_attention.py: batches and layouts of rows, each as a cost over the plain case."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace

import numpy as np
from attention_report import Report, wanted
from entrants import Entrant, Shape, attending, empty, filled, reading_rows, set_up
from figures import quotients
from yardstick import Memory


def cost(report: Report, name: str, shape: Shape, one: Entrant, plain: Entrant, want: str, note: str = "") -> None:
    """Add a line for the time of an entrant, divided by the time of the plain case."""
    one_s, plain_s = report.compete([one, plain], shape.threads)
    note = f"{1e6 * statistics.median(plain_s):,.1f} µs" + (note and f"; {note}")
    report.line(name, shape, one_s, (one_s, plain_s), want, note)


def blocks_of_64(report: Report, shape: Shape) -> None:
    contiguous, blocks = filled(shape), filled(shape, block_size=64)
    with contiguous, blocks:
        one, other = (attending(shape, driver) for driver in (blocks, contiguous))
        cost(report, "blocks of 64, cost over one block", shape, one, other, wanted("blocks of 64"))


def every_second_row(report: Report, shape: Shape) -> None:
    """Add a line for a cache full of holes, with the cost of only reading such rows in the line's note.

    Reading costs more because the processor also fetches neighbouring cache lines, which are holes.
    """
    contiguous, holes = filled(shape), filled(replace(shape, context=2 * shape.context), shape.layers)
    holes.drop_every_second()
    memory = Memory(shape.nbytes * shape.layers, huge=True)
    entrants = [
        *(attending(shape, driver) for driver in (holes, contiguous)),
        *(reading_rows(shape, memory, step) for step in (2, 1)),
    ]
    with contiguous, holes:
        holes_s, plain_s, apart_s, together_s = report.compete(entrants, shape.threads)
    read = statistics.median(quotients(apart_s, together_s))
    note = f"{1e6 * statistics.median(plain_s):,.1f} µs; reading such rows, with 1 thread: {read:.3g}"
    name, want = "every second slot a hole, cost over none", wanted("every second slot a hole")
    report.line(name, shape, holes_s, (holes_s, plain_s), want, note, only_read=read)


def prompt_in_a_window(report: Report, shape: Shape) -> None:
    """Add lines for prompts in a window, divided by the plain time's share for products that the window shows.

    A cost above 1 means that hidden products are computed too.
    """
    tokens, context = report.options.prefill
    sizes = [size for size in (64, 1024) if size <= context - tokens]
    for num_heads in (8, 32):
        plain = replace(shape, context=context, num_tokens=tokens, num_heads=num_heads)
        with contextlib.ExitStack() as stack:
            # 0: no window, in a cache made alike, so that rows lie in the same kind of pages
            drivers = [stack.enter_context(empty(plain, window=size)) for size in (0, *sizes)]
            for driver in drivers:
                driver.append(context - tokens)
            plain_s, *windows_s = report.compete([attending(plain, driver) for driver in drivers], shape.threads)
        for size, seconds in zip(sizes, windows_s, strict=True):
            visible = size / (context - (tokens - 1) / 2)
            name = f"prompt, window of {size:,}, GQA {num_heads // 8}, cost over its share"
            note = f"{visible:.1%} of {1e6 * statistics.median(plain_s):,.0f} µs, {tokens} tokens without a window"
            share = [visible * s for s in plain_s]
            report.line(name, plain, seconds, (seconds, share), wanted("prompt in a window"), note, visible=visible)


def append(report: Report, shape: Shape) -> None:
    """Add lines for storing one token in C: the put in one layer, and the layer's share of begin and commit."""
    layers, steps = 32, 16
    driver = empty(shape, shape.context + 1024, layers)
    driver.append(shape.context)

    def run(_: int) -> list[float]:
        begins, puts, commits = driver.steps(steps)
        driver.truncate(shape.context)
        return [float(np.median(puts + (begins + commits) / layers))]

    kind = shape.dtype if shape.dtype in ("f16", "f32", "bf16") else ""
    offers = [("ggml", ("append", shape.dtype))] + ([("transformers", ("append", kind))] if kind else [])
    with driver, report.peers:
        others = set_up(report.peers, offers, shape)
        ours_s, *others_s = report.compete([Entrant("append", run), *others], shape.threads)
    report.line("append of 1 token", shape, ours_s, None, "", "begin, put and commit, a layer")
    for peer, seconds in zip(others, others_s, strict=True):
        name = f"append of 1 token, speedup over {peer.name}"
        report.line(name, replace(shape, dtype=peer.kind), seconds, (seconds, ours_s))


FIGURES = (blocks_of_64, every_second_row, prompt_in_a_window, append)


def batches(report: Report) -> None:
    report.open("batches", "Batches, and how rows lie: costs over the plain case; 1 is none the worse")
    o = report.options
    context = min(o.context, key=lambda n: abs(n - 8192))
    for threads in o.threads:
        for dtype in o.dtype if o.every_type else [t for t in ("f16", "q8_0") if t in o.dtype]:
            shape = Shape(context, dtype, threads)
            for figure in FIGURES:
                figure(report, shape)
