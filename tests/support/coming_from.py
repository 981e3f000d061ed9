"""Helpers of the tests of other caches' interfaces."""

from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"


def random_rows(tokens, *, heads=2, dim=8, seed=0):
    """Keys and values that can be told apart: [tokens, heads, dim] of f32, each."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((tokens, heads, dim), np.float32) for _ in range(2))


def store(cache, tokens, *, positions=None, seq_id=0, seed=0):
    """Append tokens, with the same rows in every layer; return these rows, [tokens, heads, dim]."""
    first = cache.next_position(seq_id)
    positions = range(first, first + tokens) if positions is None else positions
    k, v = random_rows(tokens, heads=cache.layers[0].num_kv_heads, dim=cache.layers[0].head_dim, seed=seed)
    with cache.batch(positions=positions, seq_ids=[seq_id] * tokens) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, k, v)
    return k, v
