"""Measure decode attention beside programs that keep cores busy: kvcache and peers, each compared with itself alone.

KVCACHE_THREADS=own, in the environment, measures the library's own threads in a build with OpenMP.
"""

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from entrants import KINDS
from figures import Table
from program import Arguments, fill, put, random

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
    cache = kvcache.KVCache(1, KV_HEADS, DIM, context, dtype=dtype, num_threads=threads)
    fill(cache, context - 1)
    q = random(1, HEADS, DIM)

    def run(count: int) -> list[float]:
        batch, seconds = cache.batch(1), []
        put(batch, cache)
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
    parser = Arguments(__doc__)
    parser.number("--neighbours", 1, "busy programs")
    parser.list("--context", [1024, 8192], int, help="tokens")
    parser.list("--threads", [len(os.sched_getaffinity(0)), 1], int)
    parser.add_argument("--torch", action="store_true", help="kvcache alone, with a product of torch before each call")
    parser.number("--seconds", 30.0, "for each context and number of threads")
    o = parser.parse_args()
    neighbours = Neighbours(o.neighbours)
    columns = {
        "tokens": ">7,",
        "threads": ">7",
        "": "<20",
        "type": "<5",
        "alone, µs": ">9.0f",
        "beside others": ">9.0f",
    }
    table = Table({**columns, "cost": ">5.1f"})
    try:
        for threads, context in itertools.product(o.threads, o.context):
            compare(table, context, threads, neighbours, o)
    finally:
        neighbours.close()


def compare(table: Table, context: int, threads: int, neighbours: Neighbours, args: argparse.Namespace) -> None:
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
    for entrant, times in zip(entrants, found, strict=True):
        alone, busy = (1e6 * statistics.median(times[key]) for key in (False, True))
        table.line(context, threads, entrant.name, entrant.kind, alone, busy, busy / alone)


if __name__ == "__main__":
    main()
