"""Measure the quality that a type or a policy costs: the loss of the repository's model over its text.

python bench/bench_quality.py             # a minute or two
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvcache import ChunkedAttention, FullAttention, KVCache, SlidingWindow
from kvcache.models.tokenizer import load_tokenizer
from kvcache.runner import Llama, mean_loss, read_windows

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
TYPES = [
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("f16", "q4_0"),
    ("q4_0", "q8_0"),
    ("q4_0", "q4_0"),
]
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
    print(f"{'keys':6}{'values':8}{'bytes/token':>12}{'loss':>10}{'change':>10}")
    exact = 0.0
    for k_dtype, v_dtype in TYPES:
        value, nbytes = loss(model, texts, k_dtype=k_dtype, v_dtype=v_dtype)
        exact = exact or value
        print(f"{k_dtype:6}{v_dtype:8}{nbytes // len(texts[0]):12,}{value:10.4f}{value - exact:+10.4f}", flush=True)
    print(f"\n{'policy, f32':70}{'bytes':>12}{'loss':>10}{'change':>10}")
    for policy in POLICIES:
        value, nbytes = loss(model, texts, dtype="f32", policy=policy)
        print(f"{policy!r:70}{nbytes:12,}{value:10.4f}{value - exact:+10.4f}", flush=True)


if __name__ == "__main__":
    main()
