"""Measure how much of a cache lies in huge OS pages: python bench/bench_pages.py [--types TYPES] [--tokens NUMBERS]

A line is a cache with one sequence: prompts of 512 tokens, and then 64 tokens, one at a time. It has the bytes that
`KVCache.nbytes` counts, the resident bytes that the cache has added to the process, and the share of these that lies in
huge pages. "time" is the time of a token's attention on one thread, for 4 query heads a KV head, over the time with the
first of `--blocks`. Caches that differ in nothing but their blocks are timed in turn, and the best of the rounds
counts. Blocks of 0 tokens are the default. Linux says which pages are huge.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
from figures import Table
from program import Arguments, fill, put, random
from resident_memory import smaps

import kvcache

MIB, AT_ONCE, DECODED, GROUP, ROUNDS = 1 << 20, 512, 64, 4, 25


def attention_time(cache: kvcache.KVCache) -> float:
    """Return the seconds of attention of one token, in all layers, on one thread."""
    layer = cache.layers[0]
    query = random(1, GROUP * layer.num_kv_heads, layer.head_dim)
    batch = cache.batch(1)
    put(batch, cache)
    begin = time.thread_time()
    for i in range(cache.num_layers):
        batch.attend(i, query)
    seconds = time.thread_time() - begin
    batch.abort()
    return seconds


def compare(table: Table, caches: list[kvcache.KVCache], num_tokens: int) -> None:
    """Fill caches that differ in their blocks, and add a line for each; the last tokens come one at a time."""
    lines = []
    for cache in caches:
        before = smaps()
        fill(cache, num_tokens - DECODED, AT_ONCE)
        fill(cache, num_tokens, 1)
        added = {kind: nbytes - before[kind] for kind, nbytes in smaps().items()}
        lines.append((cache.nbytes / MIB, added["Anonymous"] / MIB, added["AnonHugePages"] / added["Anonymous"]))
    times = np.min([[attention_time(cache) for cache in caches] for _ in range(ROUNDS)], axis=0)
    for cache, line, ratio in zip(caches, lines, times / times[0], strict=True):
        layer = cache.layers[0]
        table.line(layer.k_dtype, layer.head_dim, cache.block_size, num_tokens, *line, ratio)
        cache.close()


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--types", ["f16", "q8_0", "int8", "q4_0", "int4"])
    parser.number("--layers", 8)
    parser.number("--kv-heads", 8)
    parser.list("--heads", [64, 128], int, help="elements of a head")
    parser.list("--blocks", [0, 64], int, help="tokens of a block")
    parser.list("--tokens", [1000, 4000, 16384], int)
    parser.number("--max-seq-len", 16448)
    o = parser.parse_args()
    kvcache.set_num_threads(1)
    columns = {"type": "<5", "heads of": ">8", "blocks of": ">9", "tokens": ">7"}
    table = Table(columns | {"nbytes, MiB": ">6.1f", "resident, MiB": ">6.1f", "huge": ">5.0%", "time": ">5.2f"})
    for dtype, dim, num_tokens in itertools.product(o.types, o.heads, o.tokens):
        shape = o.layers, o.kv_heads, dim, o.max_seq_len
        caches = [kvcache.KVCache(*shape, dtype=dtype, block_size=size or None) for size in o.blocks]
        compare(table, caches, num_tokens)


if __name__ == "__main__":
    main()
