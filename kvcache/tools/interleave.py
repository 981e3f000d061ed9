"""Interleave measurements, so that other load on the machine slows all that is compared alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvcache.runtime import get_num_threads

ROUND = 0.02  # seconds that an entrant runs in a round, unless one call takes longer
PAUSE = 0.01  # seconds in which the previous entrant's threads stop spinning
MOST_ROUNDS = 10_000

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Entrant:
    """Something to measure: `run(n)` returns the seconds of `n` calls, which cycle over the memory of `layers`."""

    name: str
    run: Callable[[int], Sequence[float]]
    layers: int = 1
    error: Callable[[], float] | None = None
    kind: str = ""  # the element type
    first: float = 0.0  # seconds of a call made before; 0: none was made


def timed(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[float, T]:
    """Call a function; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = call(*arguments, **options)
    return time.perf_counter() - start, result


def rounds(*functions: Callable[[], T], seconds: float, least: int) -> Iterator[list[T]]:
    """Call functions one after the other, at least `least` rounds and `seconds` long; yield each round's results."""
    end = time.perf_counter() + seconds
    for done in range(MOST_ROUNDS):
        if done >= least and time.perf_counter() >= end:
            return
        yield [function() for function in functions]


def compete(entrants: Sequence[Entrant], seconds: float, *, threads: int, least: int = 5) -> Iterator[list[float]]:
    """Run entrants one after the other; yield, for each round, the median seconds of each one's calls."""

    def calibrate(entrant: Entrant) -> Callable[[], float]:
        """Return a function that runs an entrant for about ROUND, and returns the median seconds of its calls."""
        first = entrant.first or entrant.run(1)[0]  # includes work done once only
        if first < 10 * ROUND:
            first = statistics.median(entrant.run(min(2, entrant.layers)))
        calls = max(1, min(entrant.layers, round(ROUND / first)))

        def run() -> float:
            time.sleep(PAUSE if threads > 1 else 0)
            return float(statistics.median(entrant.run(calls)))

        return run

    yield from rounds(*[calibrate(entrant) for entrant in entrants], seconds=seconds, least=least)


def cache_size() -> int:
    """Return the bytes of last-level cache that a call can use: of at most one cache per thread, the largest first."""
    caches: dict[tuple[int, str], int] = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, cpus, size = ((cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        except OSError:  # some systems lack one of the three files
            continue
        caches[int(level), cpus] = int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    last = max((level for level, _ in caches), default=0)
    sizes = sorted((size for (level, _), size in caches.items() if level == last), reverse=True)
    return sum(sizes[: get_num_threads()]) or 32 << 20


def layers_of(nbytes: float, working_set: int) -> int:
    """Return how many layers of `nbytes` fill a working set, so that each is read from memory, not from cache."""
    return max(1, -(-working_set // int(nbytes)))
