"""Measure what a prefix cache gets from a store: python bench/bench_stores.py [URL...]

Without an address, the stores are a dictionary and a temporary folder. An address is, for example,
valkey://localhost:6379/0. The client writes and reads values, with CRC-32 and with a MAC, interleaved with memcpy of
the same bytes. Rates are medians of the rounds, and quotients are medians of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import MutableMapping

from kvcache import stores
from kvcache.stores.client import StoreClient
from kvcache.system import parse_bytes, readable
from kvcache.tools.interleave import rounds, timed

LONG = 600.0


def measure(
    name: str, store: MutableMapping[str, bytes], secret: bytes | None, value: bytes, keys: list[str], seconds: float
) -> None:
    nbytes = len(value) * len(keys)
    client = StoreClient(store, digest=b"bench", secret=secret)

    def write() -> None:
        for key in keys:
            client.put(key, lambda: [value])
        if not client.flush(LONG) or client.stats.dropped:
            raise SystemExit(f"{name} did not take the values: {client.stats}")

    def read() -> None:
        if len(client.get_many(keys, LONG)) < len(keys):
            raise SystemExit(f"{name} did not return the values: {client.stats}")

    def copy() -> None:
        [bytearray(value) for _ in keys]

    def miss() -> None:
        client.get_many(["nothing"], LONG)

    calls = [lambda call=call: timed(call)[0] for call in (write, read, copy, miss)]
    found = list(zip(*rounds(*calls, seconds=seconds, least=5), strict=True))
    client.close(LONG)
    rates = [statistics.median(nbytes / each for each in times) / 1e9 for times in found[:3]]
    quotient = statistics.median(copied / taken for taken, copied in zip(found[1], found[2], strict=True))
    kind = "MAC" if secret else "CRC"
    miss_us = statistics.median(found[3]) * 1e6
    print(
        f"{name:30} {kind} {readable(len(value)):>9}{rates[0]:8.2f}{rates[1]:8.2f}{rates[2]:8.2f}"
        f"{quotient:9.2f}{miss_us:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="*", help="addresses of stores")
    parser.add_argument("--size", nargs="+", default=["256KiB", "8MiB"], help="bytes of a value (256KiB 8MiB)")
    parser.add_argument("--seconds", type=float, default=3, help="of each line (3)")
    arguments = parser.parse_args()
    print(f"{'store':30} {'':3} {'value':>9}{'write':>8}{'read':>8}{'memcpy':>8}{'of copy':>9}{'miss µs':>9}   GB/s")
    with tempfile.TemporaryDirectory() as folder:
        opened: dict[str, MutableMapping[str, bytes]] = {url: stores.open(url) for url in arguments.url}
        opened = opened or {"a dictionary": {}, "a folder": stores.open(f"dir:{folder}")}
        for size in map(parse_bytes, arguments.size):
            keys = [f"bench {size} {i}" for i in range(max(4, min(256, (64 << 20) // size)))]
            for secret in (None, b"secret"):
                for name, store in opened.items():
                    measure(name, store, secret, os.urandom(size), keys, arguments.seconds)
                    for key in keys:
                        store.pop(key, None)


if __name__ == "__main__":
    main()
