"""Measure how much of a cache lies in huge OS pages: python bench/bench_pages.py [--types TYPES] [--tokens NUMBERS]

A line is a cache with one sequence: prompts of 512 tokens, and then 64 tokens, one at a time. It has the bytes that
`KVCache.nbytes` counts, the resident bytes that the cache has added to the process, and the share of these that lies in
huge pages. "time" is the time of a token's attention on one thread, for 4 query heads a KV head, over the time with the
first of `--blocks`. Caches that differ in nothing but their blocks are timed in turn, and the best of the rounds
counts. Blocks of 0 tokens are the default. Linux says which pages are huge.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import kvcache

MIB, AT_ONCE, DECODED, GROUP, ROUNDS = 1 << 20, 512, 64, 4, 25


def memory() -> dict[str, int]:
    """Return the process's bytes of memory, by kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def random_rows(num_tokens: int, num_heads: int, dim: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_tokens, num_heads, dim), np.float32)


def fill(cache: kvcache.KVCache, num_tokens: int) -> None:
    """Store random rows of that many tokens, the last of which come one at a time."""
    rows = random_rows(AT_ONCE, cache.layers[0].num_kv_heads, cache.layers[0].head_dim)
    while left := num_tokens - cache.next_position():
        n = min(AT_ONCE, left - DECODED) if left > DECODED else 1
        with cache.batch(n) as batch:
            for layer in range(cache.num_layers):
                batch.put(layer, rows[:n], rows[:n])


def attention_time(cache: kvcache.KVCache) -> float:
    """Return the seconds of attention of one token, in all layers, on one thread."""
    layer = cache.layers[0]
    row = random_rows(1, layer.num_kv_heads, layer.head_dim)
    query = random_rows(1, GROUP * layer.num_kv_heads, layer.head_dim)
    batch = cache.batch(1)
    for i in range(cache.num_layers):
        batch.put(i, row, row)
    begin = time.thread_time()
    for i in range(cache.num_layers):
        batch.attend(i, query)
    seconds = time.thread_time() - begin
    batch.abort()
    return seconds


def compare(caches: list[kvcache.KVCache], num_tokens: int) -> None:
    """Fill caches that differ in their blocks, and print a line for each."""
    lines = []
    for cache in caches:
        before = memory()
        fill(cache, num_tokens)
        added = {kind: nbytes - before[kind] for kind, nbytes in memory().items()}
        lines.append((cache.nbytes / MIB, added["Anonymous"] / MIB, added["AnonHugePages"] / added["Anonymous"]))
    times = np.min([[attention_time(cache) for cache in caches] for _ in range(ROUNDS)], axis=0)
    for cache, (nbytes, resident, share), ratio in zip(caches, lines, times / times[0], strict=True):
        layer = cache.layers[0]
        print(
            f"{layer.k_dtype:5} {layer.head_dim:8} {cache.block_size:9} {num_tokens:7} {nbytes:6.1f} MiB"
            f" {resident:6.1f} MiB {share:5.0%} {ratio:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0", "int8", "q4_0", "int4"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128], metavar="ELEMENTS")
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 64], metavar="TOKENS")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 16384])
    parser.add_argument("--max-seq-len", type=int, default=16448)
    args = parser.parse_args()
    kvcache.set_num_threads(1)
    print(f"{'type':5} {'heads of':>8} {'blocks of':>9} {'tokens':>7} {'nbytes':>10} {'resident':>10}  huge  time")
    for dtype in args.types:
        for dim in args.heads:
            shape = args.layers, args.kv_heads, dim, args.max_seq_len
            for num_tokens in args.tokens:
                caches = [kvcache.KVCache(*shape, dtype=dtype, block_size=size or None) for size in args.blocks]
                compare(caches, num_tokens)
                for cache in caches:
                    cache.close()


if __name__ == "__main__":
    main()
