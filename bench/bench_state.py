"""Save and restore a cache, beside what copies and writes as many bytes: ratios, measured in turns.

Restoring is compared with copying the mapped file to new memory, because restored rows take new memory, and to memory
that was written before. Saving is compared with writing as many bytes to a file of the same folder, and fsync.

    python bench/bench_state.py --tokens 4096 --threads 2 --rounds 5
"""

import argparse
import mmap
import os
import tempfile
from collections import defaultdict

import numpy as np

import kvcache
from kvcache.tools.interleave import timed

PIECE = 4 << 20  # bytes written at once


def write(path, size):
    """Write as many bytes, and wait until the disk has them."""
    data = memoryview(bytes(PIECE))
    with open(path, "wb", buffering=0) as file:
        for done in range(0, size, PIECE):
            file.write(data[: size - done])
        os.fsync(file.fileno())


def fill(cache, num_tokens):
    like = cache.layers[0]
    rows = np.random.default_rng(0).standard_normal((256, like.num_kv_heads, like.head_dim)).astype("f4")
    for _ in range(0, num_tokens, 256):
        with cache.batch(256) as batch:
            for layer in range(cache.num_layers):
                batch.put(layer, rows, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where files are written; by default a temporary folder")
    options = parser.parse_args()
    cache = kvcache.KVCache(
        options.layers, 8, 128, None, max_sequences=None, dtype=options.dtype, num_threads=options.threads
    )
    fill(cache, options.tokens)
    seconds = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = f"{folder}/state"
        for _ in range(options.rounds):
            seconds["save"].append(timed(lambda: cache.save(path))[0])
            size = os.path.getsize(path)
            seconds["write, fsync"].append(timed(lambda size=size: write(f"{folder}/other", size))[0])
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = np.frombuffer(data, np.uint8)
                view[::4096].sum()  # in the page cache, and mapped
                took, copied = timed(view.copy)
                seconds["copy to new memory"].append(took)
                seconds["copy"].append(timed(lambda copied=copied, view=view: np.copyto(copied, view))[0])
                del view, copied
            took, other = timed(lambda: kvcache.KVCache.load(path, num_threads=options.threads))
            seconds["load"].append(took)
            other.restore(path)  # in place of the same: the old rows' memory is free then
            seconds["restore again"].append(timed(lambda other=other: other.restore(path))[0])
            other.close()
    best = {name: min(times) for name, times in seconds.items()}
    print(f"{size / 1e6:.0f} MB of {options.dtype}, {options.threads} threads; best of {options.rounds}")
    for name, took in best.items():
        print(f"{name:20} {size / 1e9 / took:6.2f} GB/s")
    print(f"save over writing and fsync       {best['write, fsync'] / best['save']:.2f}")
    print(f"load over copying to new memory   {best['copy to new memory'] / best['load']:.2f}")
    print(f"restore again over copying        {best['copy'] / best['restore again']:.2f}")


if __name__ == "__main__":
    main()
