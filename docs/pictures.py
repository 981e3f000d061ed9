"""Draw the pictures of the documentation: python docs/pictures.py.

The pictures of concepts.md show caches made here; the other pictures show figures kept in bench/results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import kvcache
import kvcache.plot

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "bench"))
import plot_attention  # noqa: E402 - the path is set above

FULL, LOCAL = kvcache.FullAttention(), kvcache.SlidingWindow(1024)
POLICIES = (
    FULL,
    kvcache.SlidingWindow(8, num_sink_tokens=2, resume_window=12),
    kvcache.ChunkedAttention(8, resume_window=4),
    kvcache.CrossAttention(16),
)
TYPES = ("f32", "f16", "q8_0", "q4_0")


def visibility() -> Figure:
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    for policy, ax in zip(POLICIES, figure.subplots(1, len(POLICIES)), strict=True):
        kvcache.plot.visibility(policy, 24, ax)
    return figure


def blocks() -> Figure:
    """Draw a sequence and its extended fork, a sequence with tokens removed, and a cleared sequence's blocks."""
    policy = kvcache.SlidingWindow(40, num_sink_tokens=4)
    cache = kvcache.KVCache(1, 1, 1, None, policy=policy, rope=False, max_sequences=None, block_size=16)
    append(cache, 0, 30)
    cache.fork(0, 1)
    append(cache, 0, 6)
    append(cache, 1, 22)
    append(cache, 2, 20)
    append(cache, 0, 24)
    append(cache, 3, 10)
    cache.remove(6, 12, seq_id=2)
    cache.clear(3)
    figure: Figure = kvcache.plot.blocks(cache).figure
    return figure


def append(cache: kvcache.KVCache, seq_id: int, num_tokens: int) -> None:
    first = cache.next_position(seq_id)
    rows = np.zeros((num_tokens, 1, 1), np.float32)
    with cache.batch(positions=range(first, first + num_tokens), seq_ids=[seq_id] * num_tokens) as batch:
        batch.put(0, rows, rows)


def memory() -> Figure:
    """Draw 32 layers of 8 KV heads of 128 in every type, and with windows of 1,024 in 5 of 6 layers, and in all."""
    policies = {"": FULL, ", 5 of 6 windows": ([LOCAL] * 5 + [FULL]) * 5 + [LOCAL] * 2, ", all windows": LOCAL}
    kinds = [(dtype, "") for dtype in TYPES] + [("f16", policy) for policy in policies if policy]
    caches = {
        dtype + name: kvcache.KVCache(32, 8, 128, 131072, dtype=dtype, policy=policies[name]) for dtype, name in kinds
    }
    figure: Figure = kvcache.plot.memory(caches, 131072).figure
    return figure


def attention() -> Figure:
    """Draw decode attention on the processor whose whole run was kept."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/epyc-zen5.csv")
    return plot_attention.figure(rows, processor)


def llama_cpp() -> Figure:
    """Draw llama.cpp's decoding on the processor where it was measured."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/xeon-amx.csv")
    return plot_attention.llama_cpp(rows, processor)


def long_contexts() -> Figure:
    """Draw transformers' generate() with all rows and with selected rows."""
    rows, processor = plot_attention.kept(DOCS.parent / "bench/results/epyc-zen5.csv")
    return plot_attention.long_contexts(rows, processor)


def draw(folder: Path) -> None:
    for picture in (visibility, blocks, memory, attention, llama_cpp, long_contexts):
        plot_attention.save(picture, folder / f"{picture.__name__}.svg")


if __name__ == "__main__":
    draw(DOCS)
