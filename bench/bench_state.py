"""Save and restore a cache, beside what copies and writes as many bytes: ratios, measured in turns.

Restoring is compared with copying the mapped file to new memory, because restored rows take new memory, and to memory
that was written before. Saving is compared with writing as many bytes to a file of the same folder, and fsync.

    python bench/bench_state.py --tokens 4096 --threads 2 --rounds 5
"""

import mmap
import os
import tempfile

import numpy as np
from figures import Table
from program import Arguments, fill

import kvcache
from kvcache.tools.interleave import timed

OVER = {"save": "write, fsync", "load": "copy to new memory", "restore again": "copy"}  # what each is compared with
PIECE = 4 << 20  # bytes written at once


def write(path, size):
    """Write as many bytes, and wait until the disk has them."""
    data = memoryview(bytes(PIECE))
    with open(path, "wb", buffering=0) as file:
        for done in range(0, size, PIECE):
            file.write(data[: size - done])
        os.fsync(file.fileno())


def main():
    parser = Arguments(__doc__)
    parser.number("--tokens", 4096)
    parser.number("--layers", 16)
    parser.add_argument("--dtype", default="f16", help="of rows")
    parser.number("--threads", 1)
    parser.number("--rounds", 5, "of which the best counts")
    parser.add_argument("--folder", help="where files are written; by default a temporary folder")
    o = parser.parse_args()
    cache = kvcache.KVCache(o.layers, 8, 128, None, max_sequences=None, dtype=o.dtype, num_threads=o.threads)
    fill(cache, o.tokens)
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        rounds = [measure(cache, folder, o.threads) for _ in range(o.rounds)]
        size = os.path.getsize(f"{folder}/state")
    best = {name: min(each[name] for each in rounds) for name in rounds[0]}
    table = Table({f"{size / 1e6:.0f} MB": "<20", "GB/s": ">6.2f", "over": "<20", "quotient": ">8.2f"})
    for name, seconds in best.items():
        other = OVER.get(name)
        table.line(name, size / 1e9 / seconds, other or "", best[other] / seconds if other else None)


def measure(cache, folder, threads):
    """Return the seconds of each of these, once."""
    path = f"{folder}/state"
    seconds = {"save": timed(cache.save, path)[0]}
    seconds["write, fsync"] = timed(write, f"{folder}/other", os.path.getsize(path))[0]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = np.frombuffer(data, np.uint8)
        view[::4096].sum()  # in the page cache, and mapped
        seconds["copy to new memory"], copied = timed(view.copy)
        seconds["copy"] = timed(np.copyto, copied, view)[0]
        del view, copied
    seconds["load"], other = timed(kvcache.KVCache.load, path, num_threads=threads)
    other.restore(path)  # in place of the same: the old rows' memory is free then
    seconds["restore again"] = timed(other.restore, path)[0]
    other.close()
    return seconds


if __name__ == "__main__":
    main()
