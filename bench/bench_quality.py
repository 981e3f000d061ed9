"""Measure the quality that a type, without and with a Hadamard transform, or a policy costs.

The repository's model reads texts that it was not trained on. It does so as it is, and with outliers: some channels of
its keys are 10 to 30 times as large, as in many models. A line compares its predictions with predictions over f32 rows:

  loss        change of the mean negative log-likelihood of a token
  divergence  Kullback-Leibler divergence of the next token's probabilities, in nats: mean, and 99.9 % quantile
  best kept   share of tokens after which the likeliest next token is the same

python bench/bench_quality.py             # ten minutes; prints the tables of docs/choosing.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvcache import ChunkedAttention, KVCache, SlidingWindow
from kvcache.layer import DTYPES, DType, bytes_of_token, stored_as
from kvcache.models.tokenizer import load_tokenizer
from kvcache.models.weights import F32
from kvcache.runner import Fidelity, Llama, fidelity, read_windows

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
MIXES: list[tuple[DType, DType]] = [
    ("f16", "q4_0"),
    ("q8_0", "q4_0"),
    ("int8", "int6"),
    ("int8", "int4"),
    ("int6", "int4"),
    ("q5_1", "iq4_nl"),
    ("q4_0", "q8_0"),
]
TYPES = [*((dtype, dtype) for dtype in DTYPES if dtype != "f32"), *MIXES]
HADAMARD = {"k_transform": "hadamard", "v_transform": "hadamard"}
POLICIES = [
    SlidingWindow(1024),
    SlidingWindow(512),
    SlidingWindow(512, num_sink_tokens=4),
    SlidingWindow(128),
    SlidingWindow(128, num_sink_tokens=4),
    ChunkedAttention(512),
]
OUTLIER_PAIRS = 2  # pairs of rotated channels of a head, of 32
FIGURES = ("loss", "divergence", "99.9 %", "best kept")


def with_outliers(model: Llama, seed: int = 0) -> Llama:
    """Return a model that computes the same, with some channels of its keys 10 to 30 times as large.

    Keys are multiplied by a factor and queries divided by it, before their rotation. Channels that are rotated together
    share a factor, so that scores do not change.
    """
    c, rng = model.config, np.random.default_rng(seed)
    layers = []
    for layer in model.layers:
        factors = np.ones((c.num_kv_heads, 2, c.head_dim // 2), np.float32)
        for head in factors:
            head[:, rng.choice(c.head_dim // 2, OUTLIER_PAIRS, replace=False)] = rng.uniform(10, 30, OUTLIER_PAIRS)
        of_queries = 1 / np.repeat(factors, c.num_heads // c.num_kv_heads, axis=0)
        rows = np.concatenate([of_queries, factors, np.ones_like(factors)]).reshape(-1, 1)
        layers.append(replace(layer, qkv=layer.qkv * rows))
    return Llama(c, model.embedding, layers, model.norm, model.head)


class Setting:
    """A model and texts, with its predictions over f32 rows."""

    def __init__(self, model: Llama, texts: Sequence[Sequence[int]]) -> None:
        self.model, self.texts = model, texts
        self.logits = list(self._passes(dtype="f32"))
        self.exact = fidelity(self.logits, self.logits, texts)

    def _passes(self, **options: Any) -> Iterator[F32]:
        for text in self.texts:
            with KVCache.from_config(MODEL, **options) as cache:
                yield self.model.forward(text, cache)

    def cells(self, **options: Any) -> list[str]:
        """Return the `FIGURES` of a cache with these options."""
        return shown(fidelity(self._passes(**options), self.logits, self.texts), self.exact)


def shown(found: Fidelity, exact: Fidelity) -> list[str]:
    """Return the `FIGURES`, with the loss as its excess over the exact model's."""
    return [
        f"{100 * (found.loss / exact.loss - 1):+.2f} %",
        f"{found.divergence:.1e}",
        f"{found.divergence_999:.1e}",
        f"{100 * found.best_kept:.2f} %",
    ]


def print_row(*cells: str) -> None:
    """Print a row of a table in Markdown."""
    print("|", " | ".join(cells), "|", flush=True)


def print_head(*cells: str) -> None:
    print_row(*cells)
    print("|" + "---|" * len(cells))


def print_types(settings: Sequence[Setting]) -> None:
    """Print a row for each type or mix of types, without and, where that makes a difference, with a transform."""
    print_head("keys", "values", "Hadamard", "bits", *FIGURES, *(f"outliers: {name}" for name in FIGURES))
    head_dim = settings[0].model.config.head_dim
    for k_dtype, v_dtype in TYPES:
        bits = 8 * bytes_of_token(1, head_dim, head_dim, k_dtype, v_dtype) / (2 * head_dim)
        transformable = any(stored_as(dtype, "hadamard") != dtype for dtype in (k_dtype, v_dtype))
        for transform in ({}, HADAMARD) if transformable else ({},):
            options = {"k_dtype": k_dtype, "v_dtype": v_dtype, **transform}
            figures = [cell for setting in settings for cell in setting.cells(**options)]
            print_row(f"`{k_dtype}`", f"`{v_dtype}`", "yes" if transform else "", f"{bits:g}", *figures)


def print_policies(setting: Setting) -> None:
    """Print a row for each policy, over f32 rows."""
    print_head("policy", "rows kept", *FIGURES)
    num_tokens = len(setting.texts[0])
    whole = KVCache.from_config(MODEL, dtype="f32").most_bytes(num_tokens)
    for policy in POLICIES:
        kept = num_tokens * KVCache.from_config(MODEL, dtype="f32", policy=policy).most_bytes(num_tokens) / whole
        print_row(f"`{policy!r}`", f"{kept:,.0f}", *setting.cells(dtype="f32", policy=policy))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = Llama.load(MODEL)
    texts = read_windows(MODEL / "eval.txt", load_tokenizer(MODEL), model.config.max_seq_len)
    plain, outliers = Setting(model, texts), Setting(with_outliers(model), texts)
    print(f"{len(texts)} texts of {len(texts[0]):,} tokens; loss with f32 {plain.exact.loss:.4f} nats a token\n")
    print_types([plain, outliers])
    print()
    print_policies(plain)


if __name__ == "__main__":
    main()
