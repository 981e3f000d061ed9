"""Measure attention over chosen rows, and choosing them: python bench/bench_sparse.py [--models NAMES] [--types TYPES]

Each line is one layer and one decoded token behind that many tokens, in milliseconds. "dense" attends to all rows.
"choose" scores the index keys and chooses; "chosen" attends to the chosen rows. "contiguous" attends to a cache that
holds as many rows and no others. "gain" is dense over choose and chosen together. Calls are timed in turn, and the best
of the rounds counts. Index keys are int8. `--recall` prints instead how many of the positions that f32 keys choose are
chosen with keys of other types, for random keys and queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from figures import Table
from program import Arguments, fastest, fill, put, random

import kvcache

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


def measure(model: Model, dtype: str, num_tokens: int, rounds: int, threads: list[int]) -> list[dict[str, float]]:
    """Return the times of each number of threads."""
    layer = model.layer(dtype)
    layers, width = [layer, kvcache.Layer(1, 128, v_head_dim=0, dtype="int8")], model.width * model.block
    cache = fill(kvcache.KVCache(layers, max_seq_len=num_tokens + 1), num_tokens)
    small = fill(kvcache.KVCache([layer], max_seq_len=width + 1), width)
    query, scale = random(1, model.num_heads, layer.head_dim), layer.head_dim**-0.5
    index_query, weights = random(1, model.index_heads, 128), random(1, model.index_heads)
    times = []
    with cache.batch(1) as batch, small.batch(1) as other:
        put(batch, cache)
        put(other, small)
        options = {"width": model.width, "block": model.block, **model.options}
        if "relu" in options:
            options["weights"] = weights

        def choose() -> np.ndarray:
            return batch.choose(1, index_query, **options)

        chosen = choose()
        for number in threads:
            kvcache.set_num_threads(number)
            found = fastest(
                3 * rounds,
                dense=lambda: batch.attend(0, query, scale=scale),
                choose=choose,
                chosen=lambda: batch.attend(0, query, scale=scale, chosen=chosen, chosen_block=model.block),
                contiguous=lambda: other.attend(0, query, scale=scale),
            )
            times.append(found)
    return times


def recall(num_tokens: int) -> None:
    """Print the recall of each type of index keys, of 64 heads of 128 and a width of 2,048."""
    layers = [kvcache.Layer(1, 128, v_head_dim=0, dtype=dtype) for dtype in ("f32", *RECALLED)]
    cache = fill(kvcache.KVCache(layers, max_seq_len=num_tokens + 1), num_tokens)
    query, weights = random(1, 64, 128), random(1, 64)
    with cache.batch(1) as batch:
        put(batch, cache)
        right, *others = (
            batch.choose(i, query, weights=weights, relu=True, width=2048).ravel() for i in range(len(layers))
        )
    table = Table({"type": "<5", "recall": ">6.4f"})
    for dtype, found in zip(RECALLED, others, strict=True):
        table.line(dtype, np.isin(right, found).mean())


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--models", MODELS, known=MODELS)
    parser.list("--types", ["int8", "bf16"])
    parser.list("--tokens", [32768], int)
    parser.list("--threads", [1], int)
    parser.number("--rounds", 7, "of three calls each")
    parser.add_argument("--recall", action="store_true", help="print how many of the right rows other types choose")
    o = parser.parse_args()
    if o.recall:
        recall(o.tokens[0])
        return
    columns = {"model": "<12", "type": "<5", "tokens": ">7", "threads": ">7"}
    columns |= dict.fromkeys(("dense", "choose", "chosen", "contiguous"), ">8.2f")
    table = Table(columns | {"gain": ">5.1f", "chosen/contiguous": ">8.2f"})
    for name, dtype, num_tokens in itertools.product(o.models, o.types, o.tokens):
        measured = measure(MODELS[name], dtype, num_tokens, o.rounds, o.threads)
        for threads, t in zip(o.threads, measured, strict=True):
            gain = t["dense"] / (t["choose"] + t["chosen"])
            table.line(name, dtype, num_tokens, threads, *t.values(), gain, t["chosen"] / t["contiguous"])


if __name__ == "__main__":
    main()
