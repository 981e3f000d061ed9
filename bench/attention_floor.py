"""What this machine allows for each kernel; section `floor` of bench_attention.py: beside it what the kernels take.

The floor of a kernel is the time of the instructions that it cannot do without (floors.py) when none waits (mixes.py).
Beside it stand its parts, each alone: products, conversions, shuffles and loads on their ports, and all instructions
at the rate at which the core issues any. From memory the limit is the larger of the floor and reading the same bytes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import floors
from attention_report import Report, wanted
from driver import Kernel
from entrants import Entrant, Shape, attending, filled, in_cache, own_pages, reading, working_set_bytes
from figures import quotients
from mixes import Mix, Mixes, Vectors, vectors_of
from yardstick import Memory, machine

from kvcache import show_config
from kvcache.tools.interleave import rounds

ROWS = 128  # of a kernel alone; they stay in a cache of the core
STREAMED = 32  # most query rows for which each stored row is read once (KVC_STREAM_QUERIES); for more, rows are packed
PARTS = {
    "products": ("product", "pairs", "quads", "bf16 pairs"),
    "conversions": ("from f16", "from int", "logic", "shift", "insert", "add", "add pairs", "compare"),
    "shuffles": ("shuffle",),
    "loads": ("load", "broadcast", "prefetch"),
}
NAMES = {"score": "scoring", "accumulate": "summing", "softmax": "softmax"}


@dataclass
class Floor:
    """What one row costs a kernel: in all, and by parts."""

    cycles: float
    mix: Mix
    costs: dict[str, float]  # cycles of an instruction of each kind

    def note(self) -> str:
        """Say what the parts take alone."""
        parts = {
            name: sum(count * self.costs[kind] for kind, count in self.mix.items() if kind in kinds)
            for name, kinds in PARTS.items()
        }
        alone = ", ".join(f"{name} {cycles:.1f}" for name, cycles in parts.items() if cycles)
        return f"{alone}, issue {self.mix.total() * self.costs['any']:.1f}"


Key: TypeAlias = tuple[str, str, int, int]  # a kernel, the type and elements of its rows, query rows


def query_rows(shape: Shape) -> int:
    return shape.num_heads // shape.num_kv_heads * shape.num_tokens


def is_streamed(shape: Shape) -> bool:
    return query_rows(shape) <= STREAMED


def keys_of(shape: Shape) -> list[Key]:
    """Return the kernels that attend to a row of a KV head, one after the other."""
    queries = query_rows(shape)
    k, v = (shape.dtype, shape.head_dim), (shape.v_type or shape.dtype, shape.v_dim or shape.head_dim)
    return [("score", *k, queries), ("softmax", *k, queries), ("accumulate", *v, queries)]


def ends_of(shape: Shape) -> list[Key]:
    """Return what a call does once for a KV head: it prepares queries and divides the output."""
    queries = query_rows(shape)
    return [
        ("queries", shape.dtype, shape.head_dim, queries),
        ("output", shape.v_type or shape.dtype, shape.v_dim or shape.head_dim, queries),
    ]


class Floors:
    """The floors of the kernels that some shapes need, measured in interleaved rounds."""

    def __init__(self, vectors: Vectors, shapes: Iterable[Shape], seconds: float) -> None:
        keys = list(dict.fromkeys(key for shape in shapes for key in (*keys_of(shape), *ends_of(shape))))
        ways = [(floors.KERNELS | floors.ENDS)[kernel](*rest, vectors) for kernel, *rest in keys]
        each = [Counter({kind: 1}) for kind in vectors.asm]
        mixes = [mix for key in ways for mix in key]
        compiled = Mixes(vectors, each + mixes)
        numbers = range(len(each + mixes))
        measured = rounds(lambda: [compiled.cycle(), *map(compiled.seconds, numbers)], seconds=seconds, least=10)
        self.cycle, *best = (min(times) for times in zip(*(one for (one,) in measured), strict=True))
        self.costs = {kind: best[i] / self.cycle for i, kind in enumerate(vectors.asm)}
        self._found: dict[Key, Floor] = {}
        at = len(each)
        for key, some in zip(keys, ways, strict=True):
            fastest = min(range(len(some)), key=lambda i: best[at + i])
            self._found[key] = Floor(best[at + fastest] / self.cycle, some[fastest], self.costs)
            at += len(some)

    def of_kernels(self, shape: Shape) -> dict[str, Floor]:
        return {key[0]: self._found[key] for key in keys_of(shape)}

    def cycles(self, shape: Shape) -> float:
        """Return the cycles of a row in a call: all kernels, one after the other, and the row's share of both ends."""
        ends = sum(self._found[key].cycles for key in ends_of(shape))
        return sum(floor.cycles for floor in self.of_kernels(shape).values()) + ends / shape.context

    def seconds(self, shape: Shape) -> float:
        """Return what a call takes at least."""
        return self.cycles(shape) * self.cycle * shape.context * shape.num_kv_heads / shape.threads


def floors_of(shapes: Iterable[Shape], seconds: float) -> Floors | None:
    """Return the floors of the kernels in use; None for kernels without vectors."""
    vectors = vectors_of(show_config("dicts")["isa"])
    return Floors(vectors, shapes, seconds) if vectors else None


# ---- the machine


def describe(report: Report, found: Floors, nbytes: int) -> None:
    """Print and keep what an instruction costs here, and how many lines can be on their way from memory."""
    latency, each = machine().latency(Memory(nbytes, huge=True))
    costs = ", ".join(f"{kind} {cost:.2f}" for kind, cost in found.costs.items())
    values = {
        "clock": f"{1e-9 / found.cycle:.2f} GHz",
        "cycles of an instruction": costs,
        f"a line of {nbytes >> 20} MiB": f"{1e9 * latency:.0f} ns, {1e9 * each:.1f} ns for each of many: "
        f"{latency / each:.0f} on their way at once, {64e-9 / each:.1f} GB/s without prefetching",
    }
    for name, value in values.items():
        report.rows.append({"section": report.section, "name": name, "value": value})
        print(f"    {name}: {value}", flush=True)


# ---- lines


def of_kernels(report: Report, found: Floors, shape: Shape) -> None:
    """Add a line for each kernel alone, and for a call, over rows in cache."""
    parts, queries = found.of_kernels(shape), query_rows(shape)
    kernels = {name: Kernel(name, shape.dtype, shape.head_dim, queries, ROWS) for name in parts}
    entrants = [Entrant(name, lambda count, k=kernel: k.run(20 * count)) for name, kernel in kernels.items()]
    *alone, call = report.compete([*entrants, in_cache(shape)], 1)
    for kernel in kernels.values():
        kernel.close()
    small = replace(shape, context=ROWS)
    for (name, floor), seconds in zip(parts.items(), alone, strict=True):
        line(report, f"{NAMES[name]}, in cache", small, queries, seconds, found, floor.cycles, floor.note())
    per_call = [s * ROWS / shape.num_kv_heads for s in call]  # of one KV head
    line(report, "a call, in cache", small, queries, per_call, found, found.cycles(small))


def of_queries(num: int) -> str:
    return f"{num} quer{'y' if num == 1 else 'ies'}"


def line(
    report: Report, name: str, shape: Shape, queries: int, seconds: Sequence[float], found: Floors, floor: float,
    note: str = "",
) -> None:  # fmt: skip
    """Add a line for `seconds` of the shape's rows in one KV head, over the floor of a row."""
    limit = [floor * found.cycle * shape.context] * len(seconds)
    cycles = min(seconds) / shape.context / found.cycle
    said = f"{cycles:.1f} cycles a row, floor {floor:.1f}{note and ': ' + note}"
    want = wanted(name) if queries >= floors.QUERIES else ""  # for fewer, what a call takes beside its rows counts more
    data = {"cycles": cycles, "floor_cycles": floor}
    report.line(f"{of_queries(queries)}: {name}", shape, seconds, (seconds, limit), want, said, **data)


def from_memory(report: Report, found: Floors, shape: Shape, queries: Sequence[int], threads: Sequence[int]) -> None:
    """Add lines for decoding over rows from memory, over the larger of reading them and the kernels' floor."""
    with own_pages() as are_huge, filled(replace(shape, threads=max(threads))) as driver:
        huge = are_huge(shape.nbytes * shape.layers)
        for n in threads:
            readers = reading(shape.nbytes, n, huge)
            for q in queries:
                asked = replace(shape, threads=n, num_heads=q * shape.num_kv_heads)
                ours, *read = report.compete([attending(asked, driver), *readers], n)
                best = min(read, key=statistics.median)
                floor = found.seconds(asked)
                bound = "memory" if statistics.median(best) >= floor else "kernels"
                limit = best if bound == "memory" else [floor] * len(ours)
                name = "from memory"
                said = (
                    f"of {bound}; reads {shape.nbytes / statistics.median(best) / 1e9:.1f} GB/s, "
                    f"{1e6 * statistics.median(best):,.0f} µs; the kernels' floor {1e6 * floor:,.0f} µs"
                )
                report.line(
                    f"{of_queries(q)}: {name}", asked, ours, (ours, limit), wanted(name), said, bound=bound,
                    floor_seconds=floor, over_reading=statistics.median(quotients(ours, best)),
                )  # fmt: skip


def floor(report: Report) -> None:
    o = report.options
    report.open("floor", "What this machine allows, for one KV head x 128: times over it, 1 is the limit")
    context = min(o.context, key=lambda n: abs(n - 8192))
    shapes = [Shape(context, dtype, num_heads=q * Shape.num_kv_heads) for dtype in o.dtype for q in o.queries]
    found = floors_of(shapes, 3 * o.seconds)
    if not found:
        print(f"    no floor for kernels without vectors ({show_config('dicts')['isa']})")
        return
    describe(report, found, working_set_bytes())
    for dtype in o.dtype:
        for shape in shapes:
            if shape.dtype == dtype:
                of_kernels(report, found, shape)
        from_memory(report, found, Shape(context, dtype), o.queries, o.threads)
