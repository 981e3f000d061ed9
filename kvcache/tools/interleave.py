"""Measuring in turn, so that whatever else the machine does meanwhile slows all that is compared, and not one of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcache.runtime import get_num_threads

__all__ = ["Entrant", "cache_size", "compete", "layers_of", "rounds"]

ROUND = 0.02  # seconds that one entrant has before it is the next one's turn, unless one call takes longer
SETTLE = 0.01  # seconds until threads of the last one have stopped spinning, where there are any
MOST_ROUNDS = 10_000

T = TypeVar("T")


@dataclass(eq=False)
class Entrant:
    """What has its turn: `run` returns the seconds of each of so many calls, of which `layers` see other memory."""

    name: str
    run: Callable[[int], Sequence[float]]
    layers: int = 1
    error: Callable[[], float] | None = None
    kind: str = ""  # of a peer: its type
    first: float = 0.0  # seconds of a call, where one was made


def rounds(*functions: Callable[[], T], seconds: float, least: int) -> Iterator[list[T]]:
    """Call functions in turn, `least` times or as often as fits; yield what they returned, round by round."""
    end = time.perf_counter() + seconds
    for done in range(MOST_ROUNDS):
        if done >= least and time.perf_counter() >= end:
            return
        yield [function() for function in functions]


def compete(entrants: Sequence[Entrant], seconds: float, *, threads: int, least: int = 5) -> Iterator[list[float]]:
    """Run entrants in turn; yield the median of the calls of each one's turn, round by round."""

    def turn(entrant: Entrant) -> Callable[[], float]:
        first = entrant.first or entrant.run(1)[0]  # what happens once has happened then
        if first < 10 * ROUND:
            first = statistics.median(entrant.run(min(2, entrant.layers)))
        calls = max(1, min(entrant.layers, round(ROUND / first)))

        def run() -> float:
            time.sleep(SETTLE if threads > 1 else 0)
            return float(statistics.median(entrant.run(calls)))

        return run

    yield from rounds(*[turn(entrant) for entrant in entrants], seconds=seconds, least=least)


def cache_size() -> int:
    """Bytes of the last-level caches that a call can use: one for each of its threads, if there are so many."""
    caches: dict[tuple[int, str], int] = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, cpus, size = ((cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        except OSError:  # not every system says all of it
            continue
        caches[int(level), cpus] = int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    last = max((level for level, _ in caches), default=0)
    sizes = sorted((size for (level, _), size in caches.items() if level == last), reverse=True)
    return sum(sizes[: get_num_threads()]) or 32 << 20


def layers_of(nbytes: float, working_set: int) -> int:
    """As many layers of so many bytes as make a working set, so that each is in memory when its turn comes."""
    return max(1, -(-working_set // int(nbytes)))
