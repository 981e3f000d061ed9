"""Section `floor` of bench_attention.py: what this machine allows for each kernel, beside what the kernels take.

The floor of a kernel is the time of the instructions that it cannot do without (floors.py) when none waits (mixes.py).
Beside it stand its parts, each alone: products, conversions, shuffles and loads on their ports, and all instructions
at the rate at which the core issues any. From memory the limit is the larger of the floor and reading the same bytes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
PARTS = {
    "products": ("product", "pairs", "quads", "bf16 pairs"),
    "conversions": ("from f16", "from int", "logic", "shift", "insert", "add", "add pairs", "round", "power"),
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


class Floors:
    """The floors of all kernels for some types and numbers of query heads, measured in interleaved rounds."""

    def __init__(
        self, vectors: Vectors, dtypes: Sequence[str], queries: Sequence[int], dim: int, seconds: float
    ) -> None:
        self._keys = [(kernel, dtype, q) for kernel in floors.KERNELS for dtype in dtypes for q in queries]
        ways = [floors.KERNELS[kernel](dtype, dim, q, vectors) for kernel, dtype, q in self._keys]
        each = [Counter({kind: 1}) for kind in vectors.asm]
        mixes = [mix for key in ways for mix in key]
        compiled = Mixes(vectors, each + mixes)
        numbers = range(len(each + mixes))
        measured = rounds(lambda: [compiled.cycle(), *map(compiled.seconds, numbers)], seconds=seconds, least=10)
        self.cycle, *best = (min(times) for times in zip(*(one for (one,) in measured), strict=True))
        self.costs = {kind: best[i] / self.cycle for i, kind in enumerate(vectors.asm)}
        self._found: dict[tuple[str, str, int], Floor] = {}
        at = len(each)
        for key, some in zip(self._keys, ways, strict=True):
            fastest = min(range(len(some)), key=lambda i: best[at + i])
            self._found[key] = Floor(best[at + fastest] / self.cycle, some[fastest], self.costs)
            at += len(some)

    def __getitem__(self, key: tuple[str, str, int]) -> Floor:
        return self._found[key]

    def all_kernels(self, dtype: str, queries: int) -> float:
        """Return the cycles of a row in all kernels, which work one after the other."""
        return sum(self[kernel, dtype, queries].cycles for kernel in floors.KERNELS)


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


def of_kernels(report: Report, found: Floors, shape: Shape, queries: int) -> None:
    """Add a line for each kernel alone, and for a call, over rows in cache."""
    kernels = {name: Kernel(name, shape.dtype, shape.head_dim, queries, ROWS) for name in floors.KERNELS}
    entrants = [Entrant(name, lambda count, k=kernel: k.run(20 * count)) for name, kernel in kernels.items()]
    *alone, call = report.compete([*entrants, in_cache(shape)], 1)
    for kernel in kernels.values():
        kernel.close()
    small = replace(shape, context=ROWS)
    for name, seconds in zip(kernels, alone, strict=True):
        floor = found[name, shape.dtype, queries]
        line(report, f"{NAMES[name]}, in cache", small, queries, seconds, found, floor.cycles, floor.note())
    per_call = [s * ROWS / shape.num_kv_heads for s in call]  # of one KV head
    line(report, "a call, in cache", small, queries, per_call, found, found.all_kernels(shape.dtype, queries))


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
                floor = found.all_kernels(shape.dtype, q) * found.cycle * shape.context * shape.num_kv_heads / n
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
    vectors = vectors_of(show_config("dicts")["isa"])
    if not vectors:
        print(f"    no floor for kernels without vectors ({show_config('dicts')['isa']})")
        return
    found = Floors(vectors, o.dtype, o.queries, Shape.head_dim, 3 * o.seconds)
    describe(report, found, working_set_bytes())
    context = min(o.context, key=lambda n: abs(n - 8192))
    for dtype in o.dtype:
        for queries in o.queries:
            shape = Shape(context, dtype, num_heads=queries * Shape.num_kv_heads)
            of_kernels(report, found, shape, queries)
        from_memory(report, found, Shape(context, dtype), o.queries, o.threads)
