"""Measure in C how fast rows are chosen: python bench/bench_choose.py --help.

Each line is interleaved with NumPy, which scores all heads by a product of matrices and chooses by
`numpy.argpartition`: the same rows, except where scores are equal. bench_sparse.py measures whole steps.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # for NumPy, which reads these variables when it is imported

import numpy as np  # noqa: E402
from compiling import Floats, Library, Seconds  # noqa: E402
from driver import TYPES  # noqa: E402
from figures import Figures, describe_machine  # noqa: E402
from program import Arguments  # noqa: E402

from kvcache.tools.arguments import parse_tokens  # noqa: E402
from kvcache.tools.interleave import timed  # noqa: E402

DIM, HEADS, WIDTH = 128, 64, 2048  # of DeepSeek V3.2's index


class Chooser:
    """choose.c, compiled with the core."""

    def __init__(self) -> None:
        self._c = Library("choose")

    def time_best(self, scores: Floats, count: int) -> Seconds:
        keys, out, seconds = np.empty(len(scores), np.uint32), np.empty(WIDTH, np.int32), np.empty(count)
        self._c.choose_best(scores, len(scores), WIDTH, keys, out, count, seconds)
        return seconds

    def time_rows(
        self, keys: Floats, q: Floats, weights: Floats, dtype: str, threads: int, count: int, *, by_tasks: bool = False
    ) -> Seconds:
        out, seconds = np.empty(WIDTH, np.int32), np.empty(count)
        addresses = (x.ctypes.data for x in (keys, q, weights))
        shape = self._c.struct("choose_shape")(*addresses, len(keys), len(q), DIM, TYPES[dtype], WIDTH, threads)
        self._c.choose_rows(ctypes.byref(shape), out, by_tasks, count, seconds)
        return seconds


def best_of_two(call: Callable[[], object]) -> float:
    return min(timed(call)[0] for _ in range(2))


def add_times(f: Figures, name: str, seconds: Sequence[float]) -> None:
    f.samples(name, [1e3 * s for s in seconds], "ms", quiet=f"{min(seconds) * 1e3:.2f} ms")


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
                        peer.append(best_of_two(by_numpy))
                    add_times(f, name, ours)
                    f.ratio("  of NumPy's time, on one thread", ours, peer)
                    f.value("  products", f"{rows * heads * DIM / min(ours) / 1e9:.0f} G/s")
            tasks = chooser.time_rows(keys, q, weights, o.dtype[0], 1, o.repeats, by_tasks=True)
            add_times(f, f"  {o.dtype[0]}, task by task", tasks)


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
                peer.append(best_of_two(lambda x=x: np.sort(np.argpartition(-x, WIDTH)[:WIDTH])))
            add_times(f, f"best {WIDTH} of {rows}, {kind}", ours)
            f.ratio("  of NumPy's time", ours, peer)


SECTIONS = {"choices": choices, "best": best}


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--only", SECTIONS, known=SECTIONS)
    parser.list("--context", [32_768, 131_072], parse_tokens, help="tokens")
    parser.list("--heads", [HEADS], int)
    parser.list("--dtype", ["int8", "bf16", "f16"], known=TYPES)
    parser.list("--threads", [1], int)
    parser.number("--rounds", 7, "of kvcache and its yardstick in turn")
    parser.number("--repeats", 9, "in a round, of which the fastest counts")
    o = parser.parse_args()
    print(describe_machine())
    f, chooser = Figures("choose"), Chooser()
    for section in o.only:
        SECTIONS[section](f, chooser, o)


if __name__ == "__main__":
    main()
