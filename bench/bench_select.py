"""Measure attention to rows that sketches select: python bench/bench_select.py [--tokens N,...] [--types TYPES]

Each line is one layer of 8 KV heads and 32 query heads, and one decoded token behind that many tokens, in milliseconds.
Heads have 128 elements, unless --dim says otherwise. "dense" reads all rows. "selected" reads the rows that
`attend(select=...)` finds. "put" puts one token's rows, and "with sketch" does so in a layer that keeps sketches. Calls
are timed in turn, and the best round counts.

With --forks 8 a call has one token of each of 8 forks. Nine tenths of their queries' variance is the same: so the forks
select 30 % as many different rows as rows. SmolLM2 with 8 questions behind a text of 4,096 tokens selects 28 to 32 %.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from figures import Table
from program import Arguments, fastest, fill, put, random

import kvcache

KV_HEADS, HEADS = 8, 32
ALIKE = 0.9  # what forks' queries have in common of their variance


def measure(table: Table, num_tokens: int, dtype: str, num_threads: int, o: argparse.Namespace) -> None:
    num_layers = 2 * o.layers  # every second one keeps sketches
    layers = [kvcache.Layer(KV_HEADS, o.dim, dtype=dtype, rope=False, sketch=i % 2 == 0) for i in range(num_layers)]
    cache = kvcache.KVCache(layers, max_seq_len=num_tokens + 64, max_sequences=o.forks, num_threads=num_threads)
    fill(cache, num_tokens)
    for i in range(1, o.forks):
        cache.fork(0, i)
    q = (ALIKE**0.5 * random(1, HEADS, o.dim) + (1 - ALIKE) ** 0.5 * random(o.forks, HEADS, o.dim)).astype(np.float32)
    row = random(1, KV_HEADS, o.dim)
    dense_layers, selecting_layers = (itertools.cycle(range(0, num_layers, 2)) for _ in range(2))
    with cache.batch(o.forks, seq_ids=range(o.forks)) as batch:
        put(batch, cache)
        times = fastest(
            o.rounds,
            dense=lambda: batch.attend(next(dense_layers), q),
            selected=lambda: batch.attend(next(selecting_layers), q, select=o.rows),
        )
    puts = []
    for _ in range(o.rounds):
        batch = cache.batch(1)
        puts.append(fastest(1, plain=lambda: batch.put(1, row, row), sketch=lambda: batch.put(0, row, row)))  # noqa: B023
        batch.abort()
    plain, sketch = (min(each[name] for each in puts) for name in ("plain", "sketch"))
    gain = times["dense"] / times["selected"]
    table.line(dtype, num_tokens, num_threads, times["dense"], times["selected"], gain, plain, sketch)


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--tokens", [32768, 131072], int, help="contexts")
    parser.list("--types", ["f16", "int8"], help="of rows")
    parser.list("--threads", [1, 2], int)
    parser.number("--rows", 2048, "rows to select")
    parser.number("--dim", 128, "elements of a head")
    parser.number("--layers", 2, "layers of each kind")
    parser.number("--forks", 1, "of the sequence, with a token each")
    parser.number("--rounds", 20, "calls of each kind")
    o = parser.parse_args()
    columns = {"type": "<5", "tokens": ">7", "threads": ">7", "dense": ">8.2f", "selected": ">8.2f", "gain": ">6.2f"}
    table = Table(columns | {"put": ">8.4f", "with sketch": ">8.4f"})
    for shape in itertools.product(o.tokens, o.types, o.threads):
        measure(table, *shape, o)


if __name__ == "__main__":
    main()
