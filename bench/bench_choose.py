"""Measure how fast rows are chosen: python bench/bench_choose.py --help.

Each line is interleaved with NumPy, which scores all heads by a product of matrices and chooses by
`numpy.argpartition`: the same rows, except where scores are equal. bench_sparse.py measures whole steps.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # for NumPy, which reads these variables when it is imported

import numpy as np  # noqa: E402
from driver import TYPES  # noqa: E402
from figures import Figures, describe_machine  # noqa: E402
from program import Arguments, random  # noqa: E402

import kvcache  # noqa: E402
from kvcache.tools.arguments import parse_tokens  # noqa: E402
from kvcache.tools.interleave import rounds, timed  # noqa: E402

DIM, HEADS, WIDTH = 128, 64, 2048  # of DeepSeek V3.2's index


def measure(f: Figures, rows: int, heads: int, dtype: str, threads: int, least: int) -> None:
    """Score the index keys of one layer and choose among them, for one token."""
    keys, q = random(rows, 1, DIM), random(1, heads, DIM)
    weights = np.abs(random(1, heads))
    layer = kvcache.Layer(1, DIM, v_head_dim=0, dtype=dtype)
    cache = kvcache.KVCache([layer], max_seq_len=rows, num_threads=threads)
    with cache.batch(rows - 1) as batch:
        batch.put(0, keys[:-1])
    batch = cache.batch(1)
    batch.put(0, keys[-1:])

    def by_numpy() -> Any:
        scores = np.maximum(keys[:, 0] @ q[0].T, 0) @ weights[0]
        return np.sort(np.argpartition(-scores, WIDTH)[:WIDTH])

    def ours() -> float:
        return timed(batch.choose, 0, q, width=WIDTH, weights=weights, relu=True)[0]

    found, peer = zip(*rounds(ours, lambda: timed(by_numpy)[0], seconds=0, least=least), strict=True)
    batch.abort()
    name = f"choose {WIDTH} of {rows}, {heads} heads, {dtype}, threads {threads}"
    f.samples(name, [1e3 * s for s in found], "ms", quiet=f"{min(found) * 1e3:.2f} ms")
    f.ratio("  of NumPy's time, on one thread", found, peer)
    f.value("  products", f"{rows * heads * DIM / min(found) / 1e9:.0f} G/s")


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--context", [32_768, 131_072], parse_tokens, help="tokens")
    parser.list("--heads", [HEADS], int)
    parser.list("--dtype", ["int8", "bf16", "f16"], known=TYPES)
    parser.list("--threads", [1], int)
    parser.number("--rounds", 30, "of kvcache and NumPy in turn")
    o = parser.parse_args()
    print(describe_machine())
    f = Figures("choose")
    for rows, heads, dtype, threads in itertools.product(o.context, o.heads, o.dtype, o.threads):
        measure(f, rows, heads, dtype, threads, o.rounds)


if __name__ == "__main__":
    main()
