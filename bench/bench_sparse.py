"""Measure attention over chosen rows, and choosing them: python bench/bench_sparse.py [--models NAMES] [--types TYPES]

Each line is one layer and one decoded token behind that many tokens, in milliseconds. "dense" attends to all rows.
"choose" scores the index keys and chooses; "chosen" attends to the chosen rows. "contiguous" attends to a cache that
holds as many rows and no others. "gain" is dense over choose and chosen together. Calls are timed in turn, and the best
of the rounds counts. Index keys are int8. `--recall` prints instead how many of the positions that f32 keys choose are
chosen with keys of other types, for random keys and queries.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import kvcache
from kvcache.tools.interleave import timed

RNG = np.random.default_rng(0)
RECALLED = ("bf16", "f16", "int8", "q8_0", "int6", "q5_0", "int4", "q4_0")


class Model(NamedTuple):
    """The shapes of a published model's sparse layer."""

    num_heads: int
    layer: Callable[[str], kvcache.Layer]
    index_heads: int
    width: int
    block: int = 1
    options: Mapping[str, Any] = MappingProxyType({})  # of choose


def latent(dtype: str) -> kvcache.Layer:
    return kvcache.Layer(1, 576, v_head_dim=512, value_in_key=True, dtype=dtype)


MODELS = {
    "deepseek_v32": Model(128, latent, 64, 2048, options={"relu": True}),
    "glm_moe_dsa": Model(64, latent, 32, 2048, options={"relu": True}),
    "minimax_m3": Model(
        64,
        lambda dtype: kvcache.Layer(4, 128, dtype=dtype),
        4,
        16,
        block=128,
        options={"num_choices": 4, "num_local": 1},
    ),
}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def filled(layers: list[kvcache.Layer], num_tokens: int) -> kvcache.KVCache:
    """Return a cache of random rows, with room for a token more."""
    cache = kvcache.KVCache(layers, max_seq_len=num_tokens + 1)
    while left := num_tokens - cache.next_position():
        with cache.batch(min(left, 4096)) as batch:
            put(batch, cache)
    return cache


def put(batch: kvcache.Batch, cache: kvcache.KVCache) -> None:
    """Put random rows for all tokens of a batch."""
    for i, layer in enumerate(cache.layers):
        k = random(len(batch.positions), layer.num_kv_heads, layer.head_dim)
        batch.put(i, k, None if layer.value_in_key or not layer.v_head_dim else k)


def fastest(call: Callable[[], Any]) -> float:
    """Return the fewest milliseconds of a few calls."""
    return 1e3 * min(timed(call)[0] for _ in range(3))


def measure(model: Model, dtype: str, num_tokens: int, rounds: int, threads: list[int]) -> list[dict[str, float]]:
    """Return the times of each number of threads."""
    layer = model.layer(dtype)
    cache = filled([layer, kvcache.Layer(1, 128, v_head_dim=0, dtype="int8")], num_tokens)
    small = filled([layer], model.width * model.block)
    query, scale = random(1, model.num_heads, layer.head_dim), layer.head_dim**-0.5
    index_query, weights = random(1, model.index_heads, 128), random(1, model.index_heads)
    times: list[dict[str, float]] = [{} for _ in threads]
    with cache.batch(1) as batch, small.batch(1) as other:
        put(batch, cache)
        put(other, small)
        options = {"width": model.width, "block": model.block, **model.options}
        if "relu" in options:
            options["weights"] = weights

        def choose() -> np.ndarray:
            return batch.choose(1, index_query, **options)

        chosen = choose()
        calls = {
            "dense": lambda: batch.attend(0, query, scale=scale),
            "choose": choose,
            "chosen": lambda: batch.attend(0, query, scale=scale, chosen=chosen, chosen_block=model.block),
            "contiguous": lambda: other.attend(0, query, scale=scale),
        }
        for _ in range(rounds):
            for number, best in zip(threads, times, strict=True):
                kvcache.set_num_threads(number)
                for name, call in calls.items():
                    best[name] = min(best.get(name, np.inf), fastest(call))
    return times


def recall(num_tokens: int) -> None:
    """Print the recall of each type of index keys, of 64 heads of 128 and a width of 2,048."""
    layers = [kvcache.Layer(1, 128, v_head_dim=0, dtype=dtype) for dtype in ("f32", *RECALLED)]
    cache = kvcache.KVCache(layers, max_seq_len=num_tokens + 1)
    while left := num_tokens - cache.next_position():
        keys = random(min(left, 4096), 1, 128)
        with cache.batch(len(keys)) as batch:
            for i in range(len(layers)):
                batch.put(i, keys)
    query, weights, key = random(1, 64, 128), random(1, 64), random(1, 1, 128)
    with cache.batch(1) as batch:
        for i in range(len(layers)):
            batch.put(i, key)
        right, *others = (
            batch.choose(i, query, weights=weights, relu=True, width=2048).ravel() for i in range(len(layers))
        )
    for dtype, found in zip(RECALLED, others, strict=True):
        print(f"{dtype:5} {np.isin(right, found).mean():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--types", nargs="+", default=["int8", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recall", action="store_true")
    args = parser.parse_args()
    if args.recall:
        recall(args.tokens[0])
        return
    print("model        type   tokens threads    dense   choose   chosen contiguous  gain  chosen/contiguous")
    for name in args.models:
        for dtype in args.types:
            for num_tokens in args.tokens:
                measured = measure(MODELS[name], dtype, num_tokens, args.rounds, args.threads)
                for threads, t in zip(args.threads, measured, strict=True):
                    print(
                        f"{name:12} {dtype:5} {num_tokens:7} {threads:7} {t['dense']:8.2f} {t['choose']:8.2f}"
                        f" {t['chosen']:8.2f} {t['contiguous']:10.2f} {t['dense'] / (t['choose'] + t['chosen']):5.1f}"
                        f" {t['chosen'] / t['contiguous']:18.2f}"
                    )


if __name__ == "__main__":
    main()
