"""Layers with windows or chunks hold more while a batch is open. `most_bytes`, `explain` and `Adaptive` count it."""

import pytest
from support.saved_states import feed

import kvcache
from kvcache import ChunkedAttention, FullAttention, SlidingWindow

HEADS, DIM, BLOCK = 2, 32, 64


def make(policy=None, num_layers=1, **arguments):
    policy = SlidingWindow(256) if policy is None else policy
    arguments = {"dtype": "f16", "block_size": BLOCK, "max_seq_len": None, "max_sequences": None, **arguments}
    return kvcache.KVCache(num_layers, HEADS, DIM, policy=policy, **arguments)


@pytest.mark.parametrize("max_seq_len", [None, 256, 300])
@pytest.mark.parametrize("policy", [SlidingWindow(256), ChunkedAttention(200, resume_window=56)])
def test_most_bytes_counts_every_row_of_an_open_batch(policy, max_seq_len):
    """`max_seq_len` bounds no batch of layers that keep no more rows."""
    cache = make(policy, num_layers=2, max_seq_len=max_seq_len)
    token = cache.most_bytes(1)
    for num_tokens in (256, 5_000, 20_000):
        with cache.batch(num_tokens) as batch:
            held = cache.stats()["live_slots"] * token
            assert held <= cache.most_bytes(cache.next_position() + num_tokens, batch_tokens=num_tokens)
            assert held >= cache.most_bytes(num_tokens, batch_tokens=num_tokens)
            batch.abort()
    assert cache.most_bytes(20_000) == 256 * token


def test_max_seq_len_bounds_the_batch_where_one_layer_keeps_more():
    for policy in ([FullAttention(), SlidingWindow(256)], [SlidingWindow(301), SlidingWindow(256)]):
        cache = make(policy, num_layers=2, max_seq_len=300, max_sequences=1)
        assert cache.room() == cache.room(7) == 300
        assert cache.most_bytes(20_000, batch_tokens=20_000) == 300 * cache.most_bytes(1)


def test_explain_says_what_an_open_batch_holds():
    cache = make([FullAttention(), SlidingWindow(256), SlidingWindow(256)], num_layers=3, max_seq_len=4_096)
    line = "until it is committed, a batch takes up to {} more for each token, in layers with windows or chunks"
    assert cache.explain().splitlines() == [
        "strategy: always",
        "every sequence is stored",
        line.format("512 B"),
    ]
    adaptive = make(ChunkedAttention(256), max_seq_len=256, strategy=kvcache.Adaptive())
    assert adaptive.explain().splitlines()[1:] == [
        "a sequence of 256 tokens takes 64.0 KiB",
        line.format("256 B"),
    ]
    assert "until" not in make(FullAttention()).explain()
    assert "until" not in make(strategy="disabled").explain()  # a batch holds the rows of one layer


@pytest.mark.parametrize("max_seq_len", [None, 256])
def test_adaptive_counts_what_an_open_batch_holds(monkeypatch, max_seq_len):
    monkeypatch.setattr("kvcache.system.available_memory", lambda: (20 << 20, "a test"))
    cache = make(num_layers=2, max_seq_len=max_seq_len, strategy=kvcache.Adaptive(0.5))
    long = 40_000  # 19.5 MiB of rows, of which the windows keep 256 KiB
    assert cache.most_bytes(long) < 1 << 20
    assert cache.most_bytes(long, batch_tokens=long) == long * cache.most_bytes(1)
    feed(cache, 0, long)
    assert cache.seq_len() == 0
    assert "is not stored" in cache.explain()
    for _ in range(10):
        feed(cache, 0, 4_000)
        assert cache.nbytes < 10 << 20
    assert cache.seq_len() == 256
    assert "is stored" in cache.explain()
