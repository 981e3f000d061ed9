"""Prefixes of a cache with layers that have a row for every n-th token."""

import dataclasses

import numpy as np
import pytest

from kvcache import FullAttention, KVCache, Layer, PrefixCache, SlidingWindow

N, DIM, BLOCK = 4, 8, 8
STRIDED = Layer(1, DIM, dtype="f32", policy=FullAttention(stride=N), rope=False)
LAYERS = [
    Layer(1, DIM, dtype="f32", rope=False),
    Layer(1, DIM, dtype="f32", policy=SlidingWindow(6), rope=False),
    STRIDED,
    dataclasses.replace(STRIDED, v_head_dim=0),
]


def make(layers=LAYERS, **options):
    return KVCache(layers, block_size=BLOCK, **{"max_sequences": None, **options})


def rows_of(tokens, positions, layer):
    """Rows follow from all tokens up to their own."""
    return np.array(
        [np.random.default_rng((layer, *tokens[: p + 1])).standard_normal((1, DIM)) for p in positions], np.float32
    ).reshape(-1, 1, DIM)


def complete(positions):
    return [int(p) for p in positions if (p + 1) % N == 0]


def feed(cache, seq_id, tokens, end=None):
    positions = range(cache.next_position(seq_id), len(tokens) if end is None else end)
    if not positions:
        return
    with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
        for layer in range(len(cache.layers)):
            k = rows_of(tokens, complete(positions) if layer > 1 else positions, layer)
            batch.put(layer, k) if layer == 3 else batch.put(layer, k, -k)


def check(cache, seq_id, tokens):
    for layer in (2, 3):
        k, _ = cache.gather(layer, seq_id=seq_id)
        np.testing.assert_array_equal(k[0], rows_of(tokens, complete(range(len(tokens))), layer)[:, 0])


@pytest.mark.parametrize("shared", [0, 3, 7, 8, 9, 12, 15, 16, 21, 30])
def test_prompts_that_begin_alike(shared):
    cache = make()
    prefix = PrefixCache(cache, fingerprint="model")
    rng = np.random.default_rng(shared)
    first = rng.integers(100, size=30).tolist()
    second = first[:shared] + rng.integers(100, 200, size=12).tolist()
    seq, _ = prefix.acquire(first)
    feed(cache, seq, first)
    prefix.release(seq, first)
    seq, matched = prefix.acquire(second)
    assert matched == shared
    check(cache, seq, second[:matched])
    feed(cache, seq, second)
    check(cache, seq, second)
    prefix.release(seq, second)
    for tokens in (first, second):
        seq, matched = prefix.acquire([*tokens, 7])
        assert matched == len(tokens)
        check(cache, seq, tokens)
        prefix.release(seq, tokens)


def test_blocks_go_to_a_store_and_back():
    store = {}
    tokens = list(range(37))
    one, other = make(), make()
    prefix = PrefixCache(one, fingerprint="model", store=store)
    seq, _ = prefix.acquire(tokens)
    feed(one, seq, tokens)
    prefix.release(seq, tokens)
    prefix.flush(10)
    assert len(store) == 4
    rows = (2 * BLOCK + 2 * BLOCK + 2 * (BLOCK // N) + BLOCK // N) * DIM * 4
    assert max(map(len, store.values())) == 128 + len(LAYERS) + rows
    prefix = PrefixCache(other, fingerprint="model", store=store)
    seq, matched = prefix.acquire(tokens)
    assert matched == 32
    check(other, seq, tokens[:32])
    feed(other, seq, tokens)
    check(other, seq, tokens)


def test_another_stride_has_other_names():
    tokens = list(range(20))
    names = []
    for stride in (1, 2, 4):
        policy = FullAttention(stride=stride)
        layers = [*LAYERS[:2], *(dataclasses.replace(layer, policy=policy) for layer in LAYERS[2:])]
        names.append(tuple(PrefixCache(make(layers), fingerprint="model").names(tokens)))
    assert len(set(names)) == 3


@pytest.mark.parametrize("limits", [{}, {"capacity": 64}, {"max_bytes": 30_000}], ids=["none", "capacity", "bytes"])
@pytest.mark.parametrize("seed", range(4))
def test_any_prompts(limits, seed):
    """A prompt matches as many tokens as without strided layers. It matches fewer only where blocks were evicted."""
    cache, plain = make(**limits), make(LAYERS[:2])
    prefix, known = PrefixCache(cache, fingerprint="model"), PrefixCache(plain, fingerprint="model")
    rng = np.random.default_rng(seed)
    kept: list[list[int]] = []
    for _ in range(40):
        tokens = rng.integers(1000, size=rng.integers(1, 30)).tolist()
        if kept and rng.random() < 0.6:
            tokens = kept[rng.integers(len(kept))][: rng.integers(1, 20)] + tokens
        seq, matched = prefix.acquire(tokens)
        other, expected = known.acquire(tokens)
        assert matched == expected or (limits and matched < expected)
        check(cache, seq, tokens[:matched])
        step = int(rng.integers(1, 12))
        for end in range(matched + step, len(tokens) + step, step):
            feed(cache, seq, tokens, min(end, len(tokens)))
            feed(plain, other, tokens, min(end, len(tokens)))
        check(cache, seq, tokens)
        held = tokens[: rng.integers(1, len(tokens) + 1)] if rng.random() < 0.3 else tokens
        for keeper, seq_id in ((prefix, seq), (known, other)):
            keeper.note_inexact(seq_id, len(held))
            keeper.release(seq_id, held)
        kept.append(tokens)


def test_checkpoints():
    cache = make()
    prefix = PrefixCache(cache, fingerprint="model", state_bytes=16)
    tokens = list(range(21))
    seq, _ = prefix.acquire(tokens)
    feed(cache, seq, tokens, 13)
    prefix.checkpoint(seq, tokens[:13], b"thirteen")
    feed(cache, seq, tokens)
    prefix.release(seq, tokens)
    seq, matched = prefix.acquire([*tokens[:17], 99])
    assert matched == 13
    assert bytes(prefix.state(seq)) == b"thirteen"
    check(cache, seq, tokens[:13])
    feed(cache, seq, tokens)
    check(cache, seq, tokens)
