"""The protocol of a peer, a process that does the same work with another package, and times itself.

The peer reads a line and answers with a line, which begins with "ok", or with "no: " and the reason:

    shape ID MODE TYPE THREADS NUM_HEADS NUM_KV_HEADS HEAD_DIM CONTEXT NUM_TOKENS NUM_LAYERS
                    set up a task
    run ID COUNT    answer the seconds of attention in each of the next COUNT layers, cyclically
    error ID        answer ||out - exact|| / ||exact|| of layer 0, in float64, for the values before quantisation

Between lines a peer waits for input, so that others can be measured meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Task:
    """A task for a peer; its fields have the order of a line ``shape``."""

    mode: str
    type: str
    threads: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int  # tokens that are attended over; the last num_tokens are the batch's
    num_tokens: int
    num_layers: int

    def random(self, *shape: int, seed: int) -> Floats:
        """Return normal numbers, the same for the same seed and shape."""
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def queries(self) -> Floats:
        """Return queries, ``[num_tokens, num_heads, head_dim]``."""
        return self.random(self.num_tokens, self.num_heads, self.head_dim, seed=1)

    def rows(self, seed: int) -> Floats:
        """Return keys (seed 2) or values (3), ``[num_kv_heads, context, head_dim]``."""
        return self.random(self.num_kv_heads, self.context, self.head_dim, seed=seed)


@dataclass
class Work:
    """The functions that do a task."""

    run: Callable[[int], list[float]]  # attends in the next n layers, and returns the seconds of each
    out: Callable[[], npt.NDArray[Any]]  # attends in layer 0, and returns [num_tokens, num_heads, head_dim]
    kept: Any = None  # objects that must live as long as the functions


def error(task: Task, out: npt.NDArray[np.float64]) -> float:
    """Return the relative error of the last token's output, over every third head."""
    q, k, v = task.queries()[-1].astype(np.float64), task.rows(2), task.rows(3)
    group = task.num_heads // task.num_kv_heads
    difference = size = 0.0
    for head in range(0, task.num_heads, 3):
        scores = k[head // group].astype(np.float64) @ q[head] / np.sqrt(task.head_dim)
        weights = np.exp(scores - scores.max())
        exact = weights @ v[head // group].astype(np.float64) / weights.sum()
        difference += ((out[-1, head] - exact) ** 2).sum()
        size += (exact**2).sum()
    return float(np.sqrt(difference / size))


def rotate(layers: int, call: Callable[[int], object]) -> Callable[[int], list[float]]:
    """Make `Work.run` of a function that attends in one layer: cycle over the layers, and time each."""
    next_layer = 0

    def run(count: int) -> list[float]:
        nonlocal next_layer
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            call(next_layer)
            seconds.append(time.perf_counter() - start)
            next_layer = (next_layer + 1) % layers
        return seconds

    return run


def serve(set_up: Callable[[Task], Work]) -> None:
    """Answer lines until the input ends; `set_up` raises NotImplementedError for a task that is not supported."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps a library's prints out of the answers
    works: dict[str, tuple[Task, Work]] = {}
    for line in sys.stdin:
        verb, key, *words = line.split()
        try:
            if verb == "shape":
                works.pop(key, None)  # the task that had the ID before
                gc.collect()
                task = Task(words[0], words[1], *map(int, words[2:]))
                works[key] = task, set_up(task)
                answer = ""
            elif verb == "run":
                answer = " ".join(f"{seconds:.9f}" for seconds in works[key][1].run(int(words[0])))
            elif verb == "error":
                task, work = works[key]
                answer = f"{error(task, work.out().astype(np.float64)):.3e}"
            else:
                raise ValueError(f"no verb {verb!r}")
            print("ok", answer, file=answers)
        except Exception as reason:
            print("no:", repr(reason).replace("\n", " ")[:300], file=answers)
