"""Caches with every kind of layer and sequence, and what they hold; `python saved_states.py FILE` saves one.

tests/support/states has files of each version of the format, written by this program. Version-N-TYPE has a type with a
scale for each row, version-N-keys has layers of keys alone. Once a release has written such a file, it is never written
anew: every later version of the library must load it.
"""

import functools
import sys
from pathlib import Path

import numpy as np

import kvcache

STATES = Path(__file__).with_name("states")
TOKENS = {0: [3, 1, 4, 1, 5], 7: [2, 7]}
FINGERPRINT = "golden 1"
SECRET = b"a secret"


def varied_cache():
    """Make a cache of few rows: exact numbers, so that every machine stores the same bytes."""
    cache = kvcache.KVCache(
        7,
        [2, 1, 1, 2, 1, 1, 1],
        [4, 32, 8, 32, 4, 4, 8],
        None,
        v_head_dim=[3, 32, 4, 64, 2, 4, 4],
        value_in_key=[False, False, True, False, False, False, True],
        k_dtype=["f16", "q8_0", "bf16", "q4_0", "f32", "f32", "bf16"],
        v_dtype=["f32", "q8_0", "bf16", "f16", "f32", "f32", "bf16"],
        k_transform=[None, "hadamard", None, None, None, None, None],
        v_transform=[None, "hadamard", None, None, None, None, None],
        policy=[
            kvcache.FullAttention(),
            kvcache.SlidingWindow(4, 2, 6),
            kvcache.FullAttention(),
            kvcache.ChunkedAttention(4, 1),
            kvcache.CrossAttention(5),
            None,
            kvcache.FullAttention(),
        ],
        share=[None, None, None, None, None, None, 2],
        rope=[kvcache.Rope([1.0, 0.25], True), False, False, False, None, None, False],
        max_sequences=None,
        block_size=4,
        num_threads=1,
    )
    return filled(cache)


def scaled_cache(dtype, dim=64):
    """Make a cache of rows with a scale each: of keys and values, of values, of keys of `dim` that hold the values."""
    cache = kvcache.KVCache(
        4,
        [2, 1, 1, 1],
        [32, 4, dim, 32],
        None,
        v_head_dim=[64, 32, 32, 32],
        value_in_key=[False, False, True, False],
        k_dtype=[dtype, "f16", dtype, dtype],
        v_dtype=dtype,
        k_transform=[None, None, None, "hadamard"],
        v_transform=[None, None, None, "hadamard"],
        policy=[
            kvcache.FullAttention(),
            kvcache.SlidingWindow(4, 2, 6),
            kvcache.FullAttention(),
            kvcache.CrossAttention(5),
        ],
        rope=[kvcache.Rope([1.0, 0.25], True), False, False, None],
        max_sequences=None,
        block_size=4,
        num_threads=1,
    )
    return filled(cache)


def keys_cache():
    """Make a cache of layers with values and of layers of keys alone, in groups of several policies."""
    window, chunks = kvcache.SlidingWindow(4, 2, 6), kvcache.ChunkedAttention(4, 1)
    rope = kvcache.Rope([1.0, 0.25], True)
    layers = [
        kvcache.Layer(2, 4, v_head_dim=3, dtype="f32", rope=rope),
        kvcache.Layer(1, 64, v_head_dim=0, dtype="int8", k_transform="hadamard", rope=rope),
        kvcache.Layer(1, 8, v_head_dim=4, value_in_key=True, dtype="bf16", policy=window, rope=False),
        kvcache.Layer(1, 32, v_head_dim=0, dtype="q8_0", policy=window, rope=False),
        kvcache.Layer(2, 4, v_head_dim=0, dtype="f16", policy=chunks, rope=False),
        kvcache.Layer(1, 64, v_head_dim=0, dtype="int8", k_transform="hadamard", rope=rope, share=1),
        kvcache.Layer(1, 4, v_head_dim=0, policy=None),
    ]
    return filled(kvcache.KVCache(layers, max_sequences=None, block_size=4, num_threads=1))


def filled(cache):
    feed(cache, 0, 11)
    cache.fork(0, 7)
    cache.shift(6, None, 5, seq_id=7)
    feed(cache, 7, 2)
    cache.remove(4, 5, shift=False)
    cache.batch(2, seq_ids=[0, 7]).abort()  # which expires what their next tokens do not see
    feed(cache, -3, 1)
    return cache


def feed(cache, seq_id, num_tokens):
    with cache.batch(num_tokens, seq_ids=[seq_id] * num_tokens) as batch:
        for layer, like in enumerate(cache.layers):
            if like.policy is None or like.share is not None:
                continue
            first = int(batch.positions[0])
            is_cross = isinstance(like.policy, kvcache.CrossAttention)
            rows = [
                ((np.arange(n * heads * dim) * 7 + first + layer) % 31 - 15).reshape(n, heads, dim).astype("f4") / 8
                for n in [3 if is_cross else num_tokens]
                for heads in [like.num_kv_heads]
                for dim in (like.head_dim, like.v_head_dim)
            ]
            batch.put(
                layer,
                *rows[: 2 if like.v_head_dim and not like.value_in_key else 1],
                **({"seq_id": seq_id} if is_cross else {}),
            )


def everything(cache):
    """All that can be seen of a cache, statistics aside."""
    found = []
    for seq_id in [*cache.sequences, 99]:
        following = cache.next_position(seq_id=seq_id)
        found.append((seq_id, following, [cache.can_resume(p, seq_id=seq_id) for p in range(following + 2)]))
        for layer in range(cache.num_layers):
            if cache.layers[layer].policy is None:
                continue
            k, v = cache.gather(layer, seq_id=seq_id, raw=True)
            found.append((layer, cache.positions(layer=layer, seq_id=seq_id).tolist(), k.tobytes(), v.tobytes()))
    return found


CACHES = {
    "version-1": varied_cache,
    "version-1-int8": functools.partial(scaled_cache, "int8"),
    "version-1-int6": functools.partial(scaled_cache, "int6", 96),
    "version-1-int4": functools.partial(scaled_cache, "int4", 96),
    "version-1-keys": keys_cache,
}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    CACHES[path.name]().save(path, tokens=TOKENS, fingerprint=FINGERPRINT, secret=SECRET)
