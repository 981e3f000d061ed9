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
from compiling import CORE, CORE_FLAGS, HERE, build, function
from figures import keep

I32, I64, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
# The names of growth.c's kinds, in their order, and the kinds with a limit that may refuse a call.
KINDS = ("unlimited", "capacity", "max_bytes", "expired", "pinned", "running", "acquired", "running_bytes")
LIMITED = ("capacity", "max_bytes", "running", "acquired", "running_bytes")
RENAMED = ["-Dpthread_mutex_lock=growth_lock", "-Dpthread_mutex_trylock=growth_trylock"]
RENAMED += ["-Dpthread_mutex_unlock=growth_unlock", "-Dclock_gettime=growth_clock"]
KEPT_IN_PART = 200  # bytes beside a prompt that do not suffice to keep its blocks
MOST_RATIO, MOST_HOLD = 1.3, 1e-3
CLEARING = ("keep", "clear", "prefix_clear")  # calls after which no block is kept


class Growth:
    """The functions of growth.c."""

    def __init__(self) -> None:
        library = build("growth", [HERE / "growth.c", *CORE], [*CORE_FLAGS, *RENAMED])
        self._error = function(library, "growth_error", ctypes.c_char_p)
        self._new = function(library, "growth_new", I32, I32, I32, I64, POINTER)
        self._free = function(library, "growth_free", I32, POINTER)
        self._bytes = function(library, "growth_bytes", I64, POINTER)
        self._time = function(library, "growth_time", I32, POINTER, POINTER, I32, I32, POINTER, POINTER)
        self._hold = function(library, "growth_hold", I32, POINTER, I32, I32, POINTER, POINTER)
        name = function(library, "growth_name", ctypes.c_char_p, I32)
        of_all = function(library, "growth_is_of_all", I32, I32)
        num = function(library, "growth_num_calls", I32)()
        self.calls = {name(i).decode(): (i, bool(of_all(i))) for i in range(num)}

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._error().decode())

    def new(self, kind: str, num_blocks: int) -> ctypes.c_void_p:
        """Make a cache with kept blocks; under max_bytes it is full of them."""
        limit = 0
        if kind in ("max_bytes", "acquired", "running_bytes"):
            limit = self._bytes_without_limit("unlimited" if kind == "max_bytes" else kind, num_blocks)
        if kind in ("acquired", "running_bytes"):
            limit += self._bytes_of_request() + KEPT_IN_PART
        return self._make(kind, num_blocks, limit)

    def _make(self, kind: str, num_blocks: int, limit: int) -> ctypes.c_void_p:
        scene = POINTER()
        self._check(self._new(KINDS.index(kind), num_blocks, limit, ctypes.byref(scene)))
        return scene

    def _bytes_without_limit(self, kind: str, num_blocks: int) -> int:
        scene = self._make(kind, num_blocks, 0)
        size = self._bytes(scene)
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
        self._check(self._free(scene))

    def time(self, few: ctypes.c_void_p, many: ctypes.c_void_p, call: int, reps: int) -> tuple[float, float, float]:
        """Return the median seconds beside few blocks and beside many, and the median quotient."""
        seconds = np.empty((2, reps))
        self._check(self._time(few, many, call, reps, seconds[0].ctypes.data, seconds[1].ctypes.data))
        return (*(statistics.median(row) for row in seconds), statistics.median(seconds[1] / seconds[0]))

    def hold(self, scene: ctypes.c_void_p, call: int, reps: int) -> tuple[float, float]:
        """Return the seconds of a call, and for how long of these at most another thread waits for the mutex."""
        seconds, longest = ctypes.c_double(), ctypes.c_double()
        self._check(self._hold(scene, call, reps, ctypes.byref(seconds), ctypes.byref(longest)))
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


def measure(growth: Growth, kind: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    scenes = Scenes(growth, kind, (arguments.few, arguments.many))
    rows = []
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
            print(f"{kind:14}{name:18} {error}", flush=True)
            continue
        if name in CLEARING:
            scenes.free()
        note = "  missed" if hold > MOST_HOLD or (not is_of_all and quotient > MOST_RATIO) else ""
        micro = [f"{value * 1e6:.1f}" for value in (beside_few, beside_many, hold)]
        print(f"{kind:14}{name:18}{micro[0]:>12}{micro[1]:>12}{ratio:>10}{micro[2]:>12}{note}", flush=True)
        value = f"{micro[0]} to {micro[1]} µs ({ratio}), hold {micro[2]} µs"
        rows.append({"section": "growth", "name": f"{name}, {kind}", "type": "", "value": value})
    scenes.free()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=1000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--reps", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--calls", nargs="*", default=[])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    growth = Growth()
    rows: list[dict[str, object]] = []
    print(f"{'kind':14}{'call':18}{'few, us':>12}{'many, us':>12}{'quotient':>10}{'hold, us':>12}")
    for kind in arguments.kinds:
        rows += measure(growth, kind, arguments)
    if arguments.json:
        from pathlib import Path

        keep(Path(arguments.json), "python bench/bench_growth.py", rows)


if __name__ == "__main__":
    main()
