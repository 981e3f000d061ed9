"""Measure decode attention beside programs that keep cores busy: kvcache and peers, each compared with itself alone.

KVCACHE_THREADS=own, in the environment, measures the library's own threads in a build with OpenMP.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from entrants import KINDS

import kvcache
from kvcache.tools.interleave import Entrant
from kvcache.tools.peers import Peers, tasks

PAUSE = 0.03  # seconds in which the previous entrant's threads stop spinning
SLICE = 0.1  # seconds that an entrant runs in a round
HEADS, KV_HEADS, DIM = 32, 8, 128
TYPES = ("f16", "q8_0")  # of kvcache
OFFERS = {"torch": [("sdpa", "bf16"), ("matmul", "bf16")], "ggml": [("flash", "f16")]}


class Neighbours:
    """Processes that compute without end, while they are let."""

    def __init__(self, count: int) -> None:
        self._all = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        self.let(False)

    def let(self, run: bool) -> None:
        for each in self._all:
            each.send_signal(signal.SIGCONT if run else signal.SIGSTOP)

    def close(self) -> None:
        for each in self._all:
            each.kill()
            each.wait()


def work_of_torch(threads: int) -> Callable[[], object]:
    """Return a product of torch's, as a layer of a model computes it between two calls."""
    import torch

    torch.set_num_threads(threads)
    x, weight = torch.rand(1, 2048), torch.rand(2048, 2048)
    return lambda: x @ weight


def attending(context: int, threads: int, dtype: str, between: Callable[[], object]) -> Entrant:
    """Return an entrant that attends with one query over rows of a type, and does something else before each call."""
    rng = np.random.default_rng(0)
    cache = kvcache.KVCache(1, KV_HEADS, DIM, context, dtype=dtype, num_threads=threads)
    rows = rng.standard_normal((context, KV_HEADS, DIM), np.float32)
    q = rng.standard_normal((1, HEADS, DIM), np.float32)
    with cache.batch(context - 1) as batch:
        batch.put(0, rows[1:], rows[1:])

    def run(count: int) -> list[float]:
        batch, seconds = cache.batch(1), []
        batch.put(0, rows[:1], rows[:1])
        for _ in range(count):
            start = time.perf_counter()
            between()
            batch.attend(0, q)
            seconds.append(time.perf_counter() - start)
        batch.abort()
        return seconds

    return Entrant(f"kvcache, {kvcache.get_threading_layer()}", run, kind=dtype)


def run(entrant: Entrant, calls: int) -> float:
    """Return the mean seconds of a call: what a generation takes; a median would hide calls that wait for cores."""
    time.sleep(PAUSE)
    return statistics.fmean(entrant.run(calls))


def measure(entrants: list[Entrant], neighbours: Neighbours, seconds: float) -> list[dict[bool, list[float]]]:
    """Return each entrant's mean seconds of a call, alone and beside the neighbours, in interleaved rounds."""
    calls = [max(1, round(SLICE / run(entrant, 20))) for entrant in entrants]
    found: list[dict[bool, list[float]]] = [{False: [], True: []} for _ in entrants]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0][True]) < 3:
        for busy in (False, True):
            neighbours.let(busy)
            for entrant, count, times in zip(entrants, calls, found, strict=True):
                times[busy].append(run(entrant, count))
        neighbours.let(False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neighbours", type=int, default=1, help="busy programs (default: 1)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--threads", type=int, nargs="+", default=[len(os.sched_getaffinity(0)), 1])
    parser.add_argument("--torch", action="store_true", help="kvcache alone, with a product of torch before each call")
    parser.add_argument("--seconds", type=float, default=30, help="for each table (default: 30)")
    args = parser.parse_args()
    neighbours = Neighbours(args.neighbours)
    try:
        for threads in args.threads:
            for context in args.context:
                table(context, threads, neighbours, args)
    finally:
        neighbours.close()


def table(context: int, threads: int, neighbours: Neighbours, args: argparse.Namespace) -> None:
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "context": context, "num_tokens": 1}
    with Peers({} if args.torch else {key: KINDS[key] for key in OFFERS}, print) as peers:
        wanted = [
            (key, task)
            for key, offers in OFFERS.items()
            if not args.torch
            for task in tasks(offers, threads=threads, working_set=1, **shape)
        ]
        between = work_of_torch(threads) if args.torch else lambda: None
        ours = [attending(context, threads, dtype, between) for dtype in TYPES]
        entrants = [*ours, *peers.set_up(wanted)]
        found = measure(entrants, neighbours, args.seconds)
    print(f"{context:,} tokens, {threads} threads: microseconds of a call alone, beside others, and their ratio")
    for entrant, times in zip(entrants, found, strict=True):
        alone, busy = (1e6 * statistics.median(times[key]) for key in (False, True))
        print(f"  {entrant.name:20} {entrant.kind:5} {alone:10.0f} {busy:10.0f} {busy / alone:7.1f}", flush=True)


if __name__ == "__main__":
    main()
