"""Measure in C how fast rows are chosen: python bench/bench_choose.py --help.

Each line is interleaved with NumPy, which scores all heads by a product of matrices and chooses by
`numpy.argpartition`: the same rows, except where scores are equal. bench_sparse.py measures whole steps.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # for NumPy, which reads these variables when it is imported

import numpy as np  # noqa: E402
from compiling import CORE, CORE_FLAGS, HERE, Floats, Seconds, build, function  # noqa: E402
from driver import TYPES  # noqa: E402
from figures import Figures, Line, describe_machine, table  # noqa: E402

from kvcache.tools.arguments import parse_tokens  # noqa: E402

DIM, HEADS, WIDTH = 128, 64, 2048  # of DeepSeek V3.2's index
I32, I64, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Shape(ctypes.Structure):
    """`choose_shape` of choose.c."""

    _fields_: ClassVar = [
        *((name, POINTER) for name in ("keys", "q", "weights")),
        *((name, I32) for name in ("num_rows", "num_heads", "dim", "type", "width", "num_threads")),
    ]


class Chooser:
    """choose.c, compiled with the core."""

    def __init__(self) -> None:
        library = build("choose", [HERE / "choose.c", *CORE], CORE_FLAGS)
        self.best = function(library, "choose_best", None, POINTER, I64, I32, POINTER, POINTER, I32, POINTER)
        self.rows = function(library, "choose_rows", I32, ctypes.POINTER(Shape), POINTER, I32, I32, POINTER)
        self.error = function(library, "choose_error", ctypes.c_char_p)

    def time_best(self, scores: Floats, count: int) -> Seconds:
        keys, out, seconds = np.empty(len(scores), np.uint32), np.empty(WIDTH, np.int32), np.empty(count)
        self.best(scores.ctypes.data, len(scores), WIDTH, keys.ctypes.data, out.ctypes.data, count, seconds.ctypes.data)
        return seconds

    def time_rows(
        self, keys: Floats, q: Floats, weights: Floats, dtype: str, threads: int, count: int, *, by_tasks: bool = False
    ) -> Seconds:
        out, seconds = np.empty(WIDTH, np.int32), np.empty(count)
        arrays = (x.ctypes.data for x in (keys, q, weights))
        shape = Shape(*arrays, len(keys), len(q), DIM, TYPES[dtype], WIDTH, threads)
        if self.rows(ctypes.byref(shape), out.ctypes.data, by_tasks, count, seconds.ctypes.data):
            raise RuntimeError(self.error().decode())
        return seconds


def timed(call: Callable[[], object], count: int) -> Seconds:
    seconds = np.empty(count)
    for i in range(count):
        start = time.perf_counter()
        call()
        seconds[i] = time.perf_counter() - start
    return seconds


def milliseconds(seconds: Seconds) -> list[float]:
    return [1e3 * second for second in seconds]


def choices(f: Figures, chooser: Chooser, o: argparse.Namespace) -> None:
    """Score index keys and choose among them."""
    rng = np.random.default_rng(0)
    for rows in o.context:
        keys = rng.standard_normal((rows, DIM), np.float32)
        for heads in o.heads:
            q, weights = rng.standard_normal((heads, DIM), np.float32), rng.random(heads, np.float32)

            def by_numpy(keys: Floats = keys, q: Floats = q, weights: Floats = weights) -> Any:
                scores = np.maximum(keys @ q.T, 0) @ weights
                return np.sort(np.argpartition(-scores, WIDTH)[:WIDTH])

            for dtype in o.dtype:
                for threads in o.threads:
                    name = f"choose {WIDTH} of {rows}, {heads} heads, {dtype}, threads {threads}"
                    ours, peer = [], []
                    for _ in range(o.rounds):
                        ours.append(min(chooser.time_rows(keys, q, weights, dtype, threads, o.repeats)))
                        peer.append(min(timed(by_numpy, 2)))
                    f.samples(name, milliseconds(np.array(ours)), "ms", quiet=f"{min(ours) * 1e3:.2f} ms")
                    f.ratio("  of NumPy's time, on one thread", ours, peer)
                    f.value("  products", f"{rows * heads * DIM / min(ours) / 1e9:.0f} G/s")
            tasks = chooser.time_rows(keys, q, weights, o.dtype[0], 1, o.repeats, by_tasks=True)
            f.samples(f"  {o.dtype[0]}, task by task", milliseconds(tasks), "ms", quiet=f"{tasks.min() * 1e3:.2f} ms")


def best(f: Figures, chooser: Chooser, o: argparse.Namespace) -> None:
    """Choose among scores that are known: random ones, mostly zeros, rising ones."""
    rng = np.random.default_rng(0)
    for rows in o.context:
        scores = rng.standard_normal(rows).astype(np.float32)
        kinds = {
            "random": scores,
            "mostly zeros": np.where(scores > 2.5, scores, 0).astype(np.float32),
            "rising": np.sort(scores),
        }
        for kind, x in kinds.items():
            ours, peer = [], []
            for _ in range(o.rounds):
                ours.append(min(chooser.time_best(x, o.repeats)))
                peer.append(min(timed(lambda x=x: np.sort(np.argpartition(-x, WIDTH)[:WIDTH]), 2)))
            f.samples(f"best {WIDTH} of {rows}, {kind}", milliseconds(np.array(ours)), "ms",
                      quiet=f"{min(ours) * 1e3:.2f} ms")  # fmt: skip
            f.ratio("  of NumPy's time", ours, peer)


SECTIONS = {"choices": choices, "best": best}


def listed(kind: Callable[[str], Any], known: Sequence[str] = ()) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        words = text.split(",")
        for word in words:
            if known and word not in known:
                raise argparse.ArgumentTypeError(f"{word}: not one of {', '.join(known)}")
        return [kind(word) for word in words]

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Lists are separated by commas.")
    parser.add_argument("--only", type=listed(str, list(SECTIONS)), default=list(SECTIONS), metavar="SECTIONS",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--context", type=listed(parse_tokens), default=[32_768, 131_072], metavar="TOKENS")
    parser.add_argument("--heads", type=listed(int), default=[HEADS], metavar="NUMBERS")
    parser.add_argument("--dtype", type=listed(str, list(TYPES)), default=["int8", "bf16", "f16"], metavar="TYPES")
    parser.add_argument("--threads", type=listed(int), default=[1], metavar="NUMBERS")
    parser.add_argument("--rounds", type=int, default=7, help="of kvcache and its yardstick in turn")
    parser.add_argument("--repeats", type=int, default=9, help="in a round, of which the fastest counts")
    o = parser.parse_args()
    lines: list[Line] = []
    chooser = Chooser()
    print(describe_machine())
    for section in o.only:
        SECTIONS[section](Figures(lines), chooser, o)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
