"""The speed of attention, as one table: python bench/bench_attention.py --help.

Everything on a line was measured in turn in one run: ours, the yardsticks, the peers, and again from the start. Where
it says "of", a figure is a median of quotients taken turn by turn.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # for float64 references; no threads of NumPy's beside what is measured

# Imports stand below this (E402), as NumPy reads those variables when it is imported.

import entrants  # noqa: E402
import numpy as np  # noqa: E402
from entrants import (  # noqa: E402
    KINDS,
    QUANTISED,
    SINGLES,
    SIXTEEN_BITS,
    TINY,
    TINY_LAYERS,
    Entrant,
    Peers,
    Shape,
    compete,
    core,
    filled,
    in_cache,
    layers_of,
    multiplying,
    ours,
    own_pages,
    reading,
    reading_rows,
    set_up,
    tiny_attend,
    tiny_step,
)
from figures import quartiles, quiet_quotient, quotients  # noqa: E402
from yardstick import ROOT, TYPES, Driver, Memory, machine  # noqa: E402

from kvcache.tools.interleave import cache_size  # noqa: E402

BLOCKED = ("q8_0", "q4_0")  # types whose rows are blocks of 32 elements
CONTEXTS = [1024, 8192, 32_768, 131_072]

# What is wanted, by figure, or by figure and type.  Two numbers: on one thread, and on two.
WANTED = {
    "decode f32": "- >= 0.9",
    "decode f16": ">= 0.8 0.9",
    "decode bf16": "- >= 0.9",
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
    "prefill": ">= 0.7",
    "prefill of ggml": "> 1",
    "prefill of torch": "> 1",
    "prefill by our f16 bf16": "<= 1",
    "prefill by our f16 q8_0": "<= 1.15",
    "prefill by our f16 q4_0": "<= 1.15",
    "tiny attend": "< 5 µs",
    "ragged": "<= 1.18",
    "blocks of 64": "<= 1.05",
    "every second slot a hole": "<= 1.15",
    "window": "1",
    "prompt in a window": "1",
    "length": "1",
    "error f32": "< 1e-5",
    "error": "< 5e-4",
}


def wanted(*words: str) -> str:
    return WANTED.get(" ".join(words), WANTED.get(words[0], ""))


Samples = Sequence[float]


@dataclass
class Report:
    """Prints lines as they come, and keeps the rows behind them."""

    options: argparse.Namespace
    peers: Peers
    rows: list[dict[str, object]] = field(default_factory=list)
    section: str = ""

    def open(self, section: str, title: str) -> None:
        self.section = section
        print(f"\n{title}\n", flush=True)
        self._print(("", "tokens", "type", "threads", "µs", "quotient", "quartiles", "fastest", "wanted", ""))

    def _print(self, cells: Sequence[str]) -> None:
        widths = "<32", ">7", "<8", ">7", ">11", ">8", "^16", ">7", "<8", ""
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    def line(
        self, name: str, shape: Shape, seconds: Samples = (), quotient: tuple[Samples, Samples] | float | None = None,
        want: str = "", note: str = "", **data: object,
    ) -> None:  # fmt: skip
        """Seconds of a call, and a quotient turn by turn: its median, its quartiles, and that of the fastest tenths."""
        row: dict[str, object] = {"section": self.section, "name": name.strip(), "context": shape.context}
        row |= {"type": shape.type, "threads": shape.threads, "wanted": want, "note": note, **data}
        numbers = ["", "", "", ""]
        if len(seconds):
            row["seconds"] = statistics.median(seconds)
            numbers[0] = f"{1e6 * statistics.median(seconds):,.1f}"
        if isinstance(quotient, tuple):
            low, middle, high = quartiles(quotients(*quotient))
            row |= {"quotient": middle, "low": low, "high": high, "fastest": quiet_quotient(*quotient)}
            numbers[1:] = f"{middle:.3g}", f"{low:.3g} .. {high:.3g}", f"{row['fastest']:.3g}"
        elif quotient is not None:
            row["quotient"] = quotient
            numbers[1] = f"{quotient:.2g}"
        self.rows.append(row)
        self._print((name, f"{shape.context:,}", shape.type, str(shape.threads), *numbers, want, note))

    def compete(self, some: Sequence[Entrant], threads: int, least: int = 5) -> list[list[float]]:
        seconds = self.options.seconds * max(1, len(some) / 2)
        return compete(some, seconds, threads, least)


# ---- decoding: against reading the same bytes, and against multiplying and adding


def against_the_machine(report: Report, shape: Shape, name: str, want: str = "") -> None:
    """One line: attention against what bounds it."""
    with own_pages() as are_huge, core(shape) as us:
        readers = reading(shape.nbytes, shape.threads, are_huge(shape.nbytes * shape.layers))
        us_s, *readers_s, multiply_s, cached_s = report.compete(
            [us, *readers, multiplying(shape.threads), in_cache(shape)], shape.threads
        )
    best, reader = min(zip(readers_s, readers, strict=True), key=lambda pair: statistics.median(pair[0]))
    floor = [min(multiply_s) * shape.multiply_adds] * len(us_s)  # a ceiling is what was reached at best
    bound = "memory" if statistics.median(best) >= statistics.median(floor) else "multiply-adds"
    of = best if bound == "memory" else floor
    rate = shape.num_kv_heads / statistics.median(cached_s) / 1e6
    read = statistics.median(best)
    note = (
        f"of {bound}; reads {shape.nbytes / read / 1e9:.1f} GB/s, {1e6 * read:,.0f} µs ({reader.name}), multiply-adds "
        f"{1e6 * statistics.median(floor):,.0f} µs; in cache {rate:.3g} rows/µs and core"
    )
    report.line(
        name, shape, us_s, (of, us_s), want, note, bound=bound, read_seconds=read,
        floor_seconds=statistics.median(floor), rows_per_us_in_cache=rate,
        of_reading=statistics.median(quotients(best, us_s)),
    )  # fmt: skip


def decode(report: Report) -> None:
    report.open("decode", "Decoding: one query of 32 heads over 8 KV heads x 128, of what bounds it")
    o = report.options
    for context in o.context:
        for threads in o.threads:
            for dtype in o.dtype:
                shape = Shape(context, dtype, threads)
                against_the_machine(report, shape, "decode", wanted("decode", dtype))


# ---- peers


# Which of our types a peer's is compared with, where we have none of the same name.
COMPARED = {"int8": "q8_0", "u8": "q8_0", "fp8": "q8_0", "int4": "q4_0", "u4": "q4_0"}


def peers_group(report: Report, context: int, threads: int, dtypes: Sequence[str], offers: Sequence[tuple]) -> None:
    """Some of our types and the peers that they are compared with."""
    shape = Shape(context, dtypes[0], threads)
    with contextlib.ExitStack() as stack:
        mine = [stack.enter_context(core(replace(shape, dtype=dtype))) for dtype in dtypes]
        stack.enter_context(report.peers)
        theirs = set_up(report.peers, offers, shape)
        samples = report.compete([*mine, *theirs], threads)
        errors = [peer.error() if peer.error else 0.0 for peer in theirs]
    ours_s = dict(zip(dtypes, samples, strict=False))
    for dtype, seconds in ours_s.items():
        report.line("kvcache", replace(shape, dtype=dtype), seconds)
        if dtype in BLOCKED and "f16" in ours_s:
            name = "speedup over kvcache f16"
            report.line(f"  {name}", replace(shape, dtype=dtype), (), (ours_s["f16"], seconds), wanted(name, dtype))
    found = {}
    for peer, seconds, error in zip(theirs, samples[len(mine) :], errors, strict=True):
        base = COMPARED.get(peer.kind, peer.kind)
        base = base if base in ours_s else dtypes[0]
        note = f"by our {base}; error {error:.1e}"
        report.line(
            f"    {peer.name}", replace(shape, dtype=peer.kind), seconds, (seconds, ours_s[base]), "", note, error=error
        )
        found[peer] = seconds
    summary(report, shape, found, ours_s)


def summary(report: Report, shape: Shape, found: dict[Entrant, list[float]], ours_s: dict[str, list[float]]) -> None:
    """The fastest of some peers, by ours."""

    def fastest(name: str, base: str, *starts: str, kinds: Sequence[str] = ()) -> None:
        """Of the peers whose names start so, and of these types if any are given."""
        some = {p: s for p, s in found.items() if p.name.startswith(starts) and (not kinds or p.kind in kinds)}
        if some and base in ours_s:
            peer = min(some, key=lambda peer: statistics.median(some[peer]))
            quotient = some[peer], ours_s[base]
            report.line(f"  {name}", replace(shape, dtype=base), (), quotient, wanted(name, base), peer.name)

    names = [kind.name for kind in KINDS.values() if kind.name != "Hugging Face"]
    for base in ours_s:
        if base in BLOCKED:
            fastest("speedup over the fastest peer", base, *names)
            fastest("speedup over ggml's fastest path", base, "ggml", kinds=[base])
        elif not set(BLOCKED) & set(ours_s):
            fastest("speedup over the fastest peer", base, *names)
            fastest("speedup over ggml's fastest path", base, "ggml")
            fastest("speedup over torch by hand", base, "torch")
            fastest("speedup over Hugging Face", base, "Hugging Face", kinds=[base])


def peers(report: Report) -> None:
    report.open("peers", "Decoding: peers by ours, same shape; over 1: ours is faster")
    o = report.options
    for context in o.context:
        for threads in o.threads:
            groups = [
                (["f32"], SINGLES),
                (["f16", "bf16"], SIXTEEN_BITS),
                (["f16", "q8_0", "q4_0"], QUANTISED),
            ]
            for dtypes, offers in groups:
                chosen = [dtype for dtype in dtypes if dtype in o.dtype]
                if chosen and (chosen != ["f16"] or "bf16" in dtypes):
                    peers_group(report, context, threads, chosen, offers)


# ---- prompts


def prefill(report: Report) -> None:
    o = report.options
    tokens, context = o.prefill
    report.open("prefill", f"Prefill: {tokens} tokens, the last of {context:,}, of the machine's f32 multiply-adds")
    for threads in o.threads:
        for dtype in o.dtype:
            shape = Shape(context, dtype, threads, num_tokens=tokens)
            modes = ["flash"] if dtype in BLOCKED else ["flash", "matmul"]
            offers = [("ggml", (mode, dtype)) for mode in modes]
            offers += [("torch", ("sdpa", dtype if dtype in ("f32", "f16", "bf16") else "bf16"))]
            with core(shape) as us, report.peers:
                theirs = set_up(report.peers, offers, shape)
                us_s, multiply_s, *theirs_s = report.compete([us, multiplying(threads), *theirs], threads, least=3)
            work = shape.multiply_adds
            flops = 2e-9 * work / statistics.median(us_s)
            best = 2e-9 / min(multiply_s)
            note = f"{2e-9 * work:.1f} GFLOP: {flops:.1f} of {best:.1f} GFLOP/s"
            of = [min(multiply_s) * work] * len(us_s)
            report.line(f"prefill of {tokens}", shape, us_s, (of, us_s), wanted("prefill", dtype), note)
            for peer, seconds in zip(theirs, theirs_s, strict=True):
                want = wanted("prefill of " + peer.name.split(",")[0], dtype)
                other = replace(shape, dtype=peer.kind)
                report.line(f"    {peer.name}", other, seconds, (seconds, us_s), want, f"by our {dtype}")
        prefill_by_type(report, Shape(context, "f16", threads, num_tokens=tokens))


def prefill_by_type(report: Report, shape: Shape) -> None:
    """Our types by our f16: in turn with each other, as lines of different runs are not to be divided."""
    dtypes = [dtype for dtype in report.options.dtype if dtype != shape.dtype]
    if not dtypes or shape.dtype not in report.options.dtype:
        return
    with contextlib.ExitStack() as stack:
        each = [stack.enter_context(core(replace(shape, dtype=dtype))) for dtype in (shape.dtype, *dtypes)]
        base_s, *samples = report.compete(each, shape.threads)
    for dtype, seconds in zip(dtypes, samples, strict=True):
        want, note = wanted("prefill by our f16", dtype), f"of {1e6 * statistics.median(base_s):,.0f} µs"
        report.line(f"{dtype} by our f16", replace(shape, dtype=dtype), seconds, (seconds, base_s), want, note)


# ---- other shapes

MLA = {"head_dim": 576, "v_dim": 512, "value_in_key": True, "num_kv_heads": 1}
SHAPES: list[tuple[str, dict[str, object]]] = [
    ("head_dim 64", {"head_dim": 64}),
    ("head_dim 80", {"head_dim": 80}),
    ("head_dim 96", {"head_dim": 96}),
    ("head_dim 256", {"head_dim": 256}),
    ("1 query head a KV head", {"num_heads": 8}),
    ("7 query heads a KV head", {"num_heads": 28, "num_kv_heads": 4}),
    ("16 query heads a KV head", {"num_heads": 64, "num_kv_heads": 4}),
    ("MLA 576/512, 16 query heads", MLA | {"num_heads": 16}),
    ("MLA 576/512, 128 query heads", MLA | {"num_heads": 128}),
    ("V in q8_0", {"v_type": "q8_0"}),
    ("3 query tokens", {"num_tokens": 3}),
    ("5 query tokens", {"num_tokens": 5}),
]


def shapes(report: Report) -> None:
    report.open("shapes", "Other shapes: one query of 32 heads over 8 KV heads x 128 but for what is named")
    o = report.options
    context = min(o.context, key=lambda n: abs(n - 8192))
    for name, change in SHAPES:
        for threads in o.threads:
            for dtype in o.dtype if o.every_type else [t for t in ("f16", "q8_0") if t in o.dtype]:
                shape = replace(Shape(context, dtype, threads), **change)
                if (dtype in BLOCKED and shape.head_dim % 32) or shape.v_type == dtype:
                    continue
                against_the_machine(report, shape, name, wanted(name, dtype))


# ---- batches, and how rows lie


def pair(report: Report, name: str, shape: Shape, one: Entrant, other: Entrant, want: str, note: str) -> None:
    """A line for `one` by `other`."""
    one_s, other_s = report.compete([one, other], shape.threads)
    note = f"by {note}: {1e6 * statistics.median(other_s):,.1f} µs"
    report.line(name, shape, one_s, (one_s, other_s), want, note)


@contextlib.contextmanager
def closing(*drivers: Driver) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in drivers:
            driver.close()


def ragged(report: Report, shape: Shape) -> None:
    longest = max(320, round(shape.context * 10_000 / 8192))
    lengths = np.linspace(10, longest, 32).astype(int)
    total = int(lengths.sum())
    whole = replace(shape, context=total)
    batch = Driver(layers_of(whole.nbytes), 8, 128, 0, shape.dtype, max_sequences=0, num_threads=shape.threads)
    for seq_id, length in enumerate(lengths):
        batch.append(int(length) - 1, seq_id)
    alone = filled(whole, block_size=64, max_seq_len=0)
    with closing(batch, alone):
        note = f"one sequence in blocks of 64; 32 of 10 to {longest:,}"
        many, one = ours(shape, batch, num_seqs=32), ours(whole, alone)
        pair(report, "32 sequences, ragged", whole, many, one, wanted("ragged"), note)


def shared_prefix(report: Report, shape: Shape, count: int = 8, own: int = 64) -> None:
    layers = layers_of(shape.nbytes * count)
    options = {"max_sequences": 0, "num_threads": shape.threads}
    shared, apart = (Driver(layers, 8, 128, 0, shape.dtype, **options) for _ in range(2))
    shared.append(shape.context - own)
    for seq_id in range(count):
        if seq_id:
            shared.fork(0, seq_id)
        apart.append(shape.context - 1, seq_id)
    for seq_id in range(count):
        shared.append(own - 1, seq_id)
    with closing(shared, apart):
        one, other = (ours(shape, driver, num_seqs=count) for driver in (shared, apart))
        note = f"{count} with prefixes of their own"
        pair(report, f"{count} sequences, prefix shared", shape, one, other, wanted("shared prefix"), note)


def lie_of_rows(report: Report, shape: Shape) -> None:
    contiguous, blocks = filled(shape), filled(shape, block_size=64)
    with closing(contiguous, blocks):
        one, other = (ours(shape, driver) for driver in (blocks, contiguous))
        pair(report, "blocks of 64", shape, one, other, wanted("blocks of 64"), "one block")


def every_second_row(report: Report, shape: Shape) -> None:
    """Beside what such rows cost to read when nothing is done with them: lines that are fetched beside others."""
    name = "every second slot a hole"
    contiguous, holes = filled(shape), filled(replace(shape, context=2 * shape.context), shape.layers)
    holes.drop_every_second()
    memory = Memory(shape.nbytes * shape.layers, huge=True)
    entrants = [
        *(ours(shape, driver) for driver in (holes, contiguous)),
        *(reading_rows(shape, memory, step) for step in (2, 1)),
    ]
    with closing(contiguous, holes):
        us_s, other_s, apart_s, together_s = report.compete(entrants, shape.threads)
    read = statistics.median(quotients(apart_s, together_s))
    note = f"by one block: {1e6 * statistics.median(other_s):,.1f} µs; only read, on 1 thread: {read:.3g}"
    report.line(name, shape, us_s, (us_s, other_s), wanted(name), note, only_read=read)


def window(report: Report, shape: Shape, sinks: int = 4) -> None:
    size = min(4096, shape.context // 2)
    held = replace(shape, context=size)
    lengths = 2 * size, 32 * size
    drivers = []
    for length in lengths:
        driver = Driver(
            held.layers, 8, 128, 0, shape.dtype, window=size, num_sink_tokens=sinks, num_threads=shape.threads
        )
        driver.append(length)
        drivers.append(driver)
    with closing(*drivers):
        short, long = (ours(held, driver) for driver in drivers)
        name, note = f"window of {size:,}, {sinks} sinks", f"the same at {lengths[0]:,} tokens"
        pair(report, name, replace(shape, context=lengths[1]), long, short, wanted("window"), note)


def prompt_in_a_window(report: Report, shape: Shape) -> None:
    """By as much of the time without a window as the products that it leaves: what computes the others shows."""
    tokens, context = report.options.prefill
    sizes = [size for size in (64, 1024) if size <= context - tokens]
    for num_heads in (8, 32):
        plain = replace(shape, context=context, num_tokens=tokens, num_heads=num_heads)
        drivers = []
        for size in (0, *sizes):  # 0: none; rows lie in the same kind of pages in all
            drivers.append(Driver(plain.layers, 8, 128, 0, shape.dtype, window=size, num_threads=shape.threads))
            drivers[-1].append(context - tokens)
        with closing(*drivers):
            plain_s, *windows_s = report.compete([ours(plain, driver) for driver in drivers], shape.threads)
        for size, seconds in zip(sizes, windows_s, strict=True):
            visible = size / (context - (tokens - 1) / 2)
            name = f"prompt, window of {size:,}, GQA {num_heads // 8}"
            note = f"by {visible:.1%} of {1e6 * statistics.median(plain_s):,.0f} µs, {tokens} tokens without a window"
            left = [visible * s for s in plain_s]
            report.line(name, plain, seconds, (seconds, left), wanted("prompt in a window"), note, visible=visible)


def lengths(report: Report, shape: Shape) -> None:
    """Of a token, which would be the same at any length; and off the line that fits best, which may start above 0."""
    chosen = sorted(report.options.context)
    with contextlib.ExitStack() as stack:
        each = [stack.enter_context(core(replace(shape, context=context))) for context in chosen]
        samples = report.compete(each, shape.threads)
    for context, seconds, off in zip(chosen, samples, off_the_line(chosen, samples), strict=True):
        ratio = [chosen[0] * a for a in seconds], [context * a for a in samples[0]]
        note = f"by that at {chosen[0]:,}; {100 * off:+.1f} % off a straight line"
        report.line(
            "a token, by length", replace(shape, context=context), seconds, ratio, wanted("length"), note, off_line=off
        )


def off_the_line(contexts: Sequence[int], samples: Sequence[Samples]) -> list[float]:
    """How far medians are above the straight line that is least far from them, as shares of it."""
    medians = np.array([statistics.median(seconds) for seconds in samples])
    line = np.polyval(np.polyfit(contexts, medians, min(1, len(contexts) - 1), w=1 / medians), contexts)
    return (medians / line - 1).tolist()


def append(report: Report, shape: Shape) -> None:
    """One token stored, in C: begin and commit shared out over the layers, and put."""
    layers, steps = 32, 16
    driver = Driver(layers, 8, 128, shape.context + 1024, shape.dtype, num_threads=shape.threads)
    driver.append(shape.context)

    def run(_: int) -> list[float]:
        begins, puts, commits = driver.steps(steps)
        driver.truncate(shape.context)
        return [float(np.median(puts + (begins + commits) / layers))]

    kind = shape.dtype if shape.dtype in ("f16", "f32", "bf16") else ""
    offers = [("ggml", ("append", shape.dtype))] + ([("transformers", ("append", kind))] if kind else [])
    with closing(driver), report.peers:
        theirs = set_up(report.peers, offers, shape)
        us_s, *theirs_s = report.compete([Entrant("append", run), *theirs], shape.threads)
    report.line("append of 1 token", shape, us_s, None, wanted("append"), "begin, put and commit, a layer")
    for peer, seconds in zip(theirs, theirs_s, strict=True):
        want = wanted("append", peer.name.split()[0])
        report.line(f"    {peer.name}", replace(shape, dtype=peer.kind), seconds, (seconds, us_s), want, "by ours")


BATCHES = (ragged, shared_prefix, lie_of_rows, every_second_row, window, prompt_in_a_window, lengths, append)


def batches(report: Report) -> None:
    report.open("batches", "Batches, and how rows lie: by the plain case; 1 is none the worse")
    o = report.options
    context = min(o.context, key=lambda n: abs(n - 8192))
    for threads in o.threads:
        for dtype in o.dtype if o.every_type else [t for t in ("f16", "q8_0") if t in o.dtype]:
            shape = Shape(context, dtype, threads)
            for figure in BATCHES:
                figure(report, shape)


# ---- calls from Python


def tiny(report: Report) -> None:
    report.open("tiny", "A call from Python: 1 token over 16 that are stored, 1 head x 16")
    with core(TINY, layers=TINY_LAYERS) as bare:
        attend_s, step_s, bare_s = report.compete([tiny_attend(), tiny_step(), bare], TINY.threads)
    note = f"put included; by the C call without: {1e6 * statistics.median(bare_s):.2f} µs"
    report.line("attend, Python", TINY, attend_s, (attend_s, bare_s), wanted("tiny attend"), note)
    report.line("    a step of one layer", TINY, step_s, None, "", "batch, plan, put, attend and commit")


# ---- error


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in float64: q [heads, dim], k and v [KV heads, rows, dim]."""
    group = len(q) // len(k)
    out = np.empty((len(q), v.shape[2]))
    for head, (keys, values) in enumerate(zip(k, v, strict=True)):
        mine = slice(head * group, (head + 1) * group)
        scores = q[mine].astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[mine] = weights @ values.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return out


def rounded(x: np.ndarray) -> np.ndarray:
    """To bf16 and back, to the nearest and of two to the even one."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def error_of(driver: Driver, shape: Shape, q_type: str) -> float:
    """Of one token, by its queries' type.

    Where the output is bf16, its own rounding would hide all else.  So what it should be is rounded too: the roundings
    of two numbers differ, now by a whole step and mostly not at all, on average by what the numbers differ by.
    """
    q, out, k, v = driver.attend_and_show(shape.num_heads, shape.threads, shape.context, q_type)
    right = exact(q, k, v)
    if q_type == "bf16":
        return float(np.abs(out - rounded(right)).sum() / np.abs(right).sum())
    return float(np.linalg.norm(out - right) / np.linalg.norm(right))


def error(report: Report) -> None:
    report.open(
        "error", "Error: ||out - exact|| / ||exact||, exact in float64 over the stored values, unit normal data"
    )
    o = report.options
    context = max(o.context)
    for dtype in o.dtype:
        shape = Shape(context, dtype, max(o.threads))
        driver = Driver(1, 8, 128, context, dtype, num_threads=shape.threads)
        with closing(driver):
            driver.append(context - 1, fresh=True)
            report.line("error", shape, (), error_of(driver, shape, "f32"), wanted("error", dtype))
            if dtype == "bf16":  # what the other sections time; another kernel, where the processor multiplies bf16
                note = "|out - exact| / |exact|, summed, out being bf16 and exact rounded as it is"
                relative = error_of(driver, shape, "bf16")
                report.line("error, bf16 queries", shape, (), relative, wanted("error", dtype), note)


# ---- the command

SECTIONS: dict[str, Callable[[Report], None]] = {
    "decode": decode,
    "peers": peers,
    "prefill": prefill,
    "shapes": shapes,
    "batches": batches,
    "tiny": tiny,
    "error": error,
}


def listed(kind: Callable[[str], object], known: Sequence[object] = ()) -> Callable[[str], list]:
    """A comma-separated list, as the type of an option."""

    def parse(text: str) -> list:
        values = [kind(word.replace("_", "") if kind is int else word) for word in text.split(",")]
        for value in values:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value}: not one of {', '.join(map(str, known))}")
        return values

    return parse


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Lists are separated by commas.")
    parser.add_argument("--only", type=listed(str, list(SECTIONS)), default=list(SECTIONS), metavar="SECTIONS",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--dtype", type=listed(str, list(TYPES)), metavar="TYPES", help=f"of {', '.join(TYPES)}")
    parser.add_argument("--context", type=listed(int), default=CONTEXTS, metavar="TOKENS", help="numbers of tokens")
    parser.add_argument("--threads", type=listed(int), default=[1, 2], metavar="NUMBERS")
    parser.add_argument("--prefill", type=listed(int), default=[512, 4096], metavar="N,CONTEXT", help="of a prompt")
    parser.add_argument(
        "--memory", type=int, default=0, metavar="MIB", help="that layers take turns in; four times the cache"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line, more or less")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="other people's code")
    parser.add_argument("--with", dest="kinds", type=listed(str, list(KINDS)), default=list(KINDS), metavar="PEERS",
                        help=f"of {', '.join(KINDS)}")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the run, for bench/write_results.py")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens/s against context, of the section peers")
    o = parser.parse_args(arguments)
    entrants.working_set = o.memory << 20
    o.every_type = o.dtype is not None
    o.dtype = o.dtype or list(TYPES)
    o.command = " ".join(["python bench/bench_attention.py", *(sys.argv[1:] if arguments is None else arguments)])
    if o.plot and "peers" not in o.only:
        parser.error("--plot draws what the section peers measures")
    return o


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown processor")
    cache = cache_size() >> 20
    return f"{cpu}, {os.cpu_count()} cores, last-level cache {cache} MiB, vectors of {machine().lanes} floats"


def checked_out() -> str:
    """The commit that is measured, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def keep(path: Path, command: str, rows: list[dict[str, object]]) -> None:
    """Write a run as bench/write_results.py takes it."""
    run = {"command": command, "seen": datetime.date.today().isoformat(), "commit": checked_out()}
    path.write_text(json.dumps({**run, "machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    o = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that rows are kept and peers end
    print(describe_machine())
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    kinds = {key: KINDS[key] for key in o.kinds} if o.peers else {}
    with Peers(kinds, lambda text: print(f"    {text}")) as installed:
        report = Report(o, installed)
        try:
            for section in o.only:
                SECTIONS[section](report)
        finally:
            if o.json:
                keep(o.json, o.command, report.rows)
    if o.plot:
        import plot_attention

        with plot_attention.rc_context(plot_attention.SETTINGS):
            plot_attention.save(plot_attention.figure(report.rows), o.plot)
    return report.rows


if __name__ == "__main__":
    main()
