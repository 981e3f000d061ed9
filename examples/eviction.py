"""Policies of eviction in ten lines each, and what they cost the model in this folder.

A policy returns how important each token of a prompt is; `kvcache.eviction.evict` keeps the most important ones.

    python examples/eviction.py        # the loss of the text behind a prompt, of which a quarter is kept
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvcache import KVCache
from kvcache.eviction import Asked, Prompt, Queries, evict, future, kvzip, mean_importance
from kvcache.runner import Llama, feed_again, mean_loss

MODEL = Path(__file__).resolve().parent / "model"
PROMPT, TOKENS = 1536, 512  # bytes of the prompt, and of the text behind it


def window(prompt: Prompt):
    """Keep the first and the last tokens (StreamingLLM, arXiv:2309.17453): nothing is asked."""
    return np.arange(prompt.num_rows)


def tova(prompt: Prompt):
    """Ask the last token (TOVA, arXiv:2401.06104)."""

    def weights(layer):
        asked = prompt.latest(layer)
        return prompt.weights(layer, replace(asked, q=asked.q[-1:], positions=asked.positions[-1:]))

    return mean_importance(map(weights, prompt.layers))


def snapkv(prompt: Prompt):
    """Ask the last 32 tokens, and keep neighbours together (SnapKV, arXiv:2404.14469)."""

    def weights(layer):
        found = np.pad(prompt.weights(layer, prompt.latest(layer)), [(0, 0), (2, 2)], mode="edge")
        return np.lib.stride_tricks.sliding_window_view(found, 5, axis=1).mean(-1)

    return mean_importance(map(weights, prompt.layers))


def h2o(prompt: Prompt):
    """Add up the weights that the prompt gave (H2O, arXiv:2306.14048), of one token in 32."""
    return mean_importance(prompt.weights(layer, prompt.picked(layer)) for layer in prompt.layers)


def expected_attention(prompt: Prompt):
    """Take the queries to come for normally distributed (Expected Attention, arXiv:2510.00636)."""
    behind = prompt.cache.next_position(prompt.seq_id) + np.arange(512, dtype=np.int32)

    def weights(layer):
        asked, keys = prompt.picked(layer), prompt.cache.keys(layer, seq_id=prompt.seq_id, copy=True)
        (n, num_heads, dim) = asked.q.shape
        q = prompt.moved(asked, layer, np.zeros(n, np.int32)).q.astype(np.float32)  # without a rotation
        turn = Asked(np.tile(np.eye(dim, dtype=np.float32), (512, 1, 1)), np.zeros(512, np.int32), {})
        turns = prompt.moved(turn, layer, behind).q.mean(0)  # the mean rotation of the next 512 tokens
        found = np.zeros(keys.shape[:2])
        for head in range(num_heads):
            key = keys[head * len(keys) // num_heads]
            mean, spread = q[:, head].mean(0) @ turns, turns.T @ np.cov(q[:, head].T) @ turns
            score = key @ mean / np.sqrt(dim) + ((key @ spread) * key).sum(1) / dim / 2
            found[head * len(keys) // num_heads] += np.exp(score - score.max()) / np.exp(score - score.max()).sum()
        return found * np.linalg.norm(prompt.cache.values(layer, seq_id=prompt.seq_id, copy=True), axis=-1)

    return mean_importance(map(weights, prompt.layers))


POLICIES = {
    "window": window,
    "TOVA": tova,
    "SnapKV": snapkv,
    "H2O by sample": h2o,
    "Expected Attention": expected_attention,
    "future": future,
    "kvzip": kvzip,
}


def main():
    model, text = Llama.load(MODEL), (MODEL / "eval.txt").read_bytes()
    prompt, behind = text[:PROMPT], text[PROMPT : PROMPT + TOKENS]
    queries = Queries()
    with KVCache.from_config(MODEL, dtype="f32", max_sequences=None) as cache:
        model.forward(prompt, cache, last_only=True, queries=queries)
        print(f"{'all tokens':20} {mean_loss(model.forward(behind, cache), [*behind]):.4f} nats a byte")
        cache.truncate(PROMPT)
        for name, policy in POLICIES.items():
            cache.fork(0, 1)
            queries.fork(0, 1)
            evict(cache, policy, 0.25, seq_id=1, queries=queries, again=partial(feed_again, model, cache, prompt, 1))
            print(f"{name:20} {mean_loss(model.forward(behind, cache, seq_id=1), [*behind]):.4f}")
            cache.clear(1)


if __name__ == "__main__":
    main()
