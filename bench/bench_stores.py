"""Measure what a prefix cache gets from a store: python bench/bench_stores.py [URL...]

Without an address, the stores are a dictionary and a temporary folder. An address is, for example,
valkey://localhost:6379/0. A prefix cache writes the blocks of a prompt and another one reads them, with CRC-32 and with
a MAC, interleaved with memcpy of the same bytes. Rates are medians of the rounds, and quotients are medians of the
rounds' quotients.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import MutableMapping

import numpy as np
from figures import Table
from program import Arguments

import kvcache
from kvcache import stores
from kvcache.system import parse_bytes, readable
from kvcache.tools.interleave import rounds, timed

LONG = 600.0
BLOCK, HEAD_DIM = 16, 64  # one layer of f16


def measure(
    table: Table, name: str, store: MutableMapping[str, bytes], secret: bytes | None, size: int, seconds: float
) -> None:
    num_heads, num_blocks = max(1, size // (BLOCK * HEAD_DIM * 4)), max(4, min(256, (64 << 20) // size))
    prompt, nbytes = range(num_blocks * BLOCK + 1), num_blocks * BLOCK * num_heads * HEAD_DIM * 4
    value = bytes(nbytes // num_blocks)
    rows = np.random.default_rng(0).standard_normal((len(prompt), num_heads, HEAD_DIM), np.float32).astype(np.float16)

    def make() -> tuple[kvcache.KVCache, kvcache.PrefixCache]:
        cache = kvcache.KVCache(1, num_heads, HEAD_DIM, None, dtype="f16", max_sequences=None, block_size=BLOCK)
        return cache, kvcache.PrefixCache(cache, fingerprint="bench", store=store, secret=secret, timeout=LONG)

    def write() -> float:
        cache, prefix = make()
        with cache.batch(positions=prompt, seq_ids=[0] * len(prompt)) as batch:
            batch.put(0, rows, rows)

        def end() -> bool:
            prefix.release(0, prompt)
            return prefix.flush(LONG)

        taken, is_written = timed(end)
        if not is_written:
            raise SystemExit(f"{name} did not take the values: {prefix.stats}")
        return taken

    def read() -> float:
        _, prefix = make()
        taken, (_, matched) = timed(lambda: prefix.acquire(prompt))
        if matched < len(prompt) - 1:
            raise SystemExit(f"{name} did not return the values: {prefix.stats}")
        return taken

    def copy() -> float:
        return timed(lambda: [bytearray(value) for _ in range(num_blocks)])[0]

    def miss() -> float:
        _, prefix = make()
        return timed(lambda: prefix.acquire([-1] * (BLOCK + 1)))[0]

    found = list(zip(*rounds(write, read, copy, miss, seconds=seconds, least=5), strict=True))
    rates = [statistics.median(nbytes / each for each in times) / 1e9 for times in found[:3]]
    quotient = statistics.median(copied / taken for taken, copied in zip(found[1], found[2], strict=True))
    kind, miss_us = "MAC" if secret else "CRC", statistics.median(found[3]) * 1e6
    table.line(name, kind, readable(len(value)), *rates, quotient, miss_us)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("url", nargs="*", help="addresses of stores")
    parser.list("--size", ["256KiB", "8MiB"], help="bytes of a value")
    parser.number("--seconds", 3.0, "of each line")
    o = parser.parse_args()
    columns = {
        "store": "<30",
        "": "<3",
        "value": ">9",
        **dict.fromkeys(("write GB/s", "read GB/s", "memcpy GB/s"), ">8.2f"),
    }
    table = Table({**columns, "of copy": ">8.2f", "miss µs": ">8.0f"})
    with tempfile.TemporaryDirectory() as folder:
        opened: dict[str, MutableMapping[str, bytes]] = {url: stores.open(url) for url in o.url}
        opened = opened or {"a dictionary": {}, "a folder": stores.open(f"dir:{folder}")}
        for size in map(parse_bytes, o.size):
            for secret in (None, b"secret"):
                for name, store in opened.items():
                    measure(table, name, store, secret, size, o.seconds)


if __name__ == "__main__":
    main()
