"""Measure attention to rows that sketches select: python bench/bench_select.py [--tokens N,...] [--types TYPES]

Each line is one layer of 8 KV heads and 32 query heads, and one decoded token behind that many tokens, in milliseconds.
Heads have 128 elements, unless --dim says otherwise. "dense" reads all rows. "selected" reads the rows that
`attend(select=...)` finds. "put" puts one token's rows, and "with sketch" does so in a layer that keeps sketches. Calls
are timed in turn, and the best round counts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np

import kvcache
from kvcache.tools.interleave import rounds, timed

RNG = np.random.default_rng(0)
KV_HEADS, HEADS, PIECE = 8, 32, 4096


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def filled(num_tokens: int, dtype: str, num_threads: int, num_layers: int, dim: int) -> kvcache.KVCache:
    """Return a cache of random rows, with room for some tokens more; every second layer keeps sketches."""
    layers = [kvcache.Layer(KV_HEADS, dim, dtype=dtype, rope=False, sketch=i % 2 == 0) for i in range(num_layers)]
    cache = kvcache.KVCache(layers, max_seq_len=num_tokens + 64, num_threads=num_threads)
    rows = random(min(PIECE, num_tokens), KV_HEADS, dim)
    for begin in range(0, num_tokens, len(rows)):
        some = rows[: num_tokens - begin]
        with cache.batch(len(some)) as batch:
            for layer in range(num_layers):
                batch.put(layer, some, some)
    return cache


def best_of(least: int, *calls: Callable[[], object]) -> list[float]:
    """Return the best time of each call, in milliseconds."""
    found = rounds(*(partial(timed, call) for call in calls), seconds=0, least=least)
    return [1e3 * min(seconds for seconds, _ in of_call) for of_call in zip(*found, strict=True)]


def measure(num_tokens: int, dtype: str, num_threads: int, args: argparse.Namespace) -> None:
    num_layers = 2 * args.layers
    cache = filled(num_tokens, dtype, num_threads, num_layers, args.dim)
    q, row = random(1, HEADS, args.dim), random(1, KV_HEADS, args.dim)
    dense_layers, selecting_layers = (itertools.cycle(range(0, num_layers, 2)) for _ in range(2))
    with cache.batch(1) as batch:
        for layer in range(num_layers):
            batch.put(layer, row, row)
        dense, selected = best_of(
            args.rounds,
            lambda: batch.attend(next(dense_layers), q),
            lambda: batch.attend(next(selecting_layers), q, select=args.rows),
        )
    puts = [np.inf, np.inf]
    for _ in range(args.rounds):
        with cache.batch(1) as batch:
            once = best_of(1, lambda: batch.put(1, row, row), lambda: batch.put(0, row, row))
            puts = [min(pair) for pair in zip(puts, once, strict=True)]
            for layer in range(2, num_layers):
                batch.put(layer, row, row)
            batch.abort()
    print(
        f"{dtype:>5} {num_tokens:>7} {num_threads:>8} {dense:>8.2f} {selected:>9.2f} {dense / selected:>6.2f} "
        f"{puts[0]:>8.4f} {puts[1]:>11.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32768,131072", help="contexts, comma-separated (default: %(default)s)")
    parser.add_argument("--types", default="f16,int8", help="types of rows (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2048, help="rows to select (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="elements of a head (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="calls of each kind (default: %(default)s)")
    args = parser.parse_args()
    print(" type  tokens  threads    dense  selected   gain      put with sketch")
    for num_tokens in map(int, args.tokens.split(",")):
        for dtype in args.types.split(","):
            for num_threads in map(int, args.threads.split(",")):
                measure(num_tokens, dtype, num_threads, args)


if __name__ == "__main__":
    main()
