"""Measure whether calls take time for what others store: python bench/bench_growth.py [--kinds KINDS] [--calls CALLS]

Public calls of `kvcache.h` that take a cache's mutex are timed beside few kept blocks and beside many (growth.c), in
turn. A line has the median of both and their quotient. "hold" is the longest time for which the call lets another
thread wait that asks for the mutex all the time. A kind says what limits the cache, which is full of kept blocks
then, or what has become of these. In "running", a capacity limits the cache, and most blocks belong to running
sequences; in "running_bytes", max_bytes limits it. In "acquired", no block is kept, and many sequences hold nothing.
In both, max_bytes has room for a prompt of eight blocks, but not for keeping all of them. Calls that need more do not
fit there.

These calls are not timed. `kvc_begin_with` does what `kvc_begin` does. `kvc_plan_run`, `kvc_plan_free`, `kvc_written`
and `kvc_dense_sequences` look at the open batch alone, as `kvc_attend` and `kvc_dense_rows` do. `kvc_load` makes a new
cache, and `kvc_cache_free` frees one.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics

import numpy as np
from compiling import CORE_FLAGS, Library
from figures import Table, keep
from program import Arguments

# The names of growth.c's kinds, in their order, and the kinds with a limit that may refuse a call.
KINDS = ("unlimited", "capacity", "max_bytes", "expired", "pinned", "running", "acquired", "running_bytes")
LIMITED = ("capacity", "max_bytes", "running", "acquired", "running_bytes")
RENAMED = ["-Dpthread_mutex_lock=growth_lock", "-Dpthread_mutex_trylock=growth_trylock"]
RENAMED += ["-Dpthread_mutex_unlock=growth_unlock", "-Dclock_gettime=growth_clock"]
KEPT_IN_PART = 200  # bytes beside a prompt that do not suffice to keep its blocks
MOST_RATIO, MOST_HOLD = 1.3, 1e-3
CLEARING = ("keep", "clear", "prefix_clear", "prefix_free_all")  # calls after which no block is kept


class Growth:
    """The functions of growth.c."""

    def __init__(self) -> None:
        self._c = c = Library("growth", flags=[*CORE_FLAGS, *RENAMED])
        self.calls = {c.growth_name(i).decode(): (i, bool(c.growth_is_of_all(i))) for i in range(c.growth_num_calls())}

    def new(self, kind: str, num_blocks: int) -> ctypes.c_void_p:
        """Make a cache with kept blocks; under max_bytes it is full of them."""
        limit = 0
        if kind in ("max_bytes", "acquired", "running_bytes"):
            limit = self._bytes_without_limit("unlimited" if kind == "max_bytes" else kind, num_blocks)
        if kind in ("acquired", "running_bytes"):
            limit += self._bytes_of_request() + KEPT_IN_PART
        return self._make(kind, num_blocks, limit)

    def _make(self, kind: str, num_blocks: int, limit: int) -> ctypes.c_void_p:
        scene = ctypes.c_void_p()
        self._c.growth_new(KINDS.index(kind), num_blocks, limit, ctypes.byref(scene))
        return scene

    def _bytes_without_limit(self, kind: str, num_blocks: int) -> int:
        scene = self._make(kind, num_blocks, 0)
        size = int(self._c.growth_bytes(scene))
        self.free(scene)
        return size

    def _bytes_of_request(self) -> int:
        """Find how many bytes a prompt of eight blocks takes at least."""
        other = self._bytes_without_limit("acquired", 1)
        low, high = 0, 1 << 16
        while high - low > 1:
            middle = (low + high) // 2
            scene = self._make("acquired", 1, other + middle)
            try:
                self.time(scene, scene, self.calls["commit_long"][0], 1)
                high = middle
            except RuntimeError:
                low = middle
            self.free(scene)
        return high

    def free(self, scene: ctypes.c_void_p) -> None:
        self._c.growth_free(scene)

    def time(self, few: ctypes.c_void_p, many: ctypes.c_void_p, call: int, reps: int) -> tuple[float, float, float]:
        """Return the median seconds beside few blocks and beside many, and the median quotient."""
        seconds = np.empty((2, reps))
        self._c.growth_time(few, many, call, reps, *seconds)
        return (*(statistics.median(row) for row in seconds), statistics.median(seconds[1] / seconds[0]))

    def hold(self, scene: ctypes.c_void_p, call: int, reps: int) -> tuple[float, float]:
        """Return the seconds of a call, and for how long of these at most another thread waits for the mutex."""
        seconds, longest = ctypes.c_double(), ctypes.c_double()
        self._c.growth_hold(scene, call, reps, ctypes.byref(seconds), ctypes.byref(longest))
        return seconds.value, longest.value


class Scenes:
    """A cache with few kept blocks and one with many: made when needed, as some calls drop all blocks."""

    def __init__(self, growth: Growth, kind: str, sizes: tuple[int, int]) -> None:
        self._growth, self._kind, self._sizes = growth, kind, sizes
        self._scenes: list[ctypes.c_void_p] = []

    def get(self) -> list[ctypes.c_void_p]:
        if not self._scenes:
            self._scenes = [self._growth.new(self._kind, size) for size in self._sizes]
        return self._scenes

    def free(self) -> None:
        for scene in self._scenes:
            self._growth.free(scene)
        self._scenes = []


def measure(growth: Growth, kind: str, arguments: argparse.Namespace, table: Table) -> None:
    scenes = Scenes(growth, kind, (arguments.few, arguments.many))
    for name, (call, is_of_all) in growth.calls.items():
        if (arguments.calls and name not in arguments.calls) or (name == "refused" and kind not in LIMITED):
            continue
        few, many = scenes.get()
        try:
            if is_of_all:
                (beside_few, _), (beside_many, hold) = growth.hold(few, call, 1), growth.hold(many, call, 1)
                ratio = "-"
            else:
                beside_few, beside_many, quotient = growth.time(few, many, call, arguments.reps)
                hold = growth.hold(many, call, 5)[1]
                ratio = f"{quotient:.2f}"
        except RuntimeError as error:
            table.line(kind, name, *[None] * 4, str(error))
            continue
        if name in CLEARING:
            scenes.free()
        note = "missed" if hold > MOST_HOLD or (not is_of_all and quotient > MOST_RATIO) else ""
        micro = [f"{value * 1e6:.1f}" for value in (beside_few, beside_many, hold)]
        value = f"{micro[0]} to {micro[1]} µs ({ratio}), hold {micro[2]} µs"
        table.line(kind, name, *micro[:2], ratio, micro[2], note, name=f"{name}, {kind}", type="", value=value)
    scenes.free()


def main() -> None:
    parser = Arguments(__doc__)
    parser.number("--few", 1000, "blocks")
    parser.number("--many", 100_000, "blocks")
    parser.number("--reps", 50)
    parser.list("--kinds", KINDS, known=KINDS)
    parser.list("--calls", [], help="names of calls; default: all")
    parser.kept()
    o = parser.parse_args()
    columns = {"kind": "<14", "call": "<18", "few, µs": ">11", "many, µs": ">11", "quotient": ">8", "hold, µs": ">11"}
    growth, table = Growth(), Table({**columns, "": ""}, "growth")
    for kind in o.kinds:
        measure(growth, kind, o, table)
    if o.json:
        keep(o.json, o.command, table.rows)


if __name__ == "__main__":
    main()
