"""Measure the quality that a type, without and with a Hadamard transform, or a policy costs: the loss of the
repository's model over its text.

python bench/bench_quality.py             # a few minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from kvcache import ChunkedAttention, FullAttention, KVCache, SlidingWindow
from kvcache.layer import DTYPES, DType, suits
from kvcache.models.tokenizer import load_tokenizer
from kvcache.runner import Llama, mean_loss, read_windows

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
MIXES: list[tuple[DType, DType]] = [("q8_0", "q4_0"), ("f16", "q4_0"), ("q4_0", "q8_0")]
TYPES = [*((dtype, dtype) for dtype in DTYPES), *MIXES]
POLICIES = [
    FullAttention(),
    SlidingWindow(1024),
    SlidingWindow(512),
    SlidingWindow(512, num_sink_tokens=4),
    SlidingWindow(128),
    SlidingWindow(128, num_sink_tokens=4),
    ChunkedAttention(512),
]


def loss(model: Llama, texts: list[list[int]], **options: object) -> tuple[float, int]:
    """Return nats per token, and the bytes of rows at the end of a text."""
    losses = []
    for text in texts:
        with KVCache.from_config(MODEL, **options) as cache:
            losses.append(mean_loss(model.forward(text, cache), text))
            nbytes = cache.most_bytes(len(text))
    return float(np.mean(losses)), nbytes


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = Llama.load(MODEL)
    texts = read_windows(MODEL / "eval.txt", load_tokenizer(MODEL), model.config.max_seq_len)
    print(f"{len(texts)} texts of {len(texts[0]):,} tokens\n")
    print(f"{'keys':8}{'values':8}{'bytes/token':>12}{'loss':>10}{'change':>10}{'hadamard':>12}{'change':>10}")
    exact = 0.0
    for k_dtype, v_dtype in TYPES:
        value, nbytes = loss(model, texts, k_dtype=k_dtype, v_dtype=v_dtype)
        exact = exact or value
        line = f"{k_dtype:8}{v_dtype:8}{nbytes // len(texts[0]):12,}{value:10.4f}{value - exact:+10.4f}"
        if not (suits(k_dtype, 1) and suits(v_dtype, 1)):  # one of them is quantised
            hadamard: Any = {"k_transform": "hadamard", "v_transform": "hadamard"}
            value, _ = loss(model, texts, k_dtype=k_dtype, v_dtype=v_dtype, **hadamard)
            line += f"{value:12.4f}{value - exact:+10.4f}"
        print(line, flush=True)
    print(f"\n{'policy, f32':70}{'bytes':>12}{'loss':>10}{'change':>10}")
    for policy in POLICIES:
        value, nbytes = loss(model, texts, dtype="f32", policy=policy)
        print(f"{policy!r:70}{nbytes:12,}{value:10.4f}{value - exact:+10.4f}", flush=True)


if __name__ == "__main__":
    main()
