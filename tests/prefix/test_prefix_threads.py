"""Many request threads at once, and room for half of what they leave behind."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.prefixes import feed, make_cache, rows_of

import kvcache

PROMPTS = [[100 * i + j for j in range(60)] for i in range(16)]


def attend(cache, seq_id, tokens, begin, end):
    """Feed tokens [begin, end) in one batch, and return the last one's output in every layer."""
    outputs = []
    with cache.batch(positions=range(begin, end), seq_ids=[seq_id] * (end - begin), timeout=None) as batch:
        for layer in range(cache.num_layers):
            rows = rows_of(tokens, begin, end, layer) / 2048
            batch.put(layer, rows, rows)
            outputs.append(batch.attend(layer, rows[-1:], first=end - begin - 1))
    return np.concatenate(outputs)


def uncached(tokens):
    with make_cache("hybrid") as cache:
        attend(cache, 0, tokens, 0, len(tokens) - 1)
        return attend(cache, 0, tokens, len(tokens) - 1, len(tokens))


@pytest.mark.parametrize("num_requests", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_requests(num_requests):
    """No error and no leak, and the bits of a run without a prefix cache."""
    cache = make_cache("hybrid", capacity=32 * 100 + 500, num_threads=1)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    tails = [[-i, *range(i % 7)] for i in range(40)]
    requests = [p + tail for p in PROMPTS for tail in tails]
    answers = [uncached(tokens) for tokens in requests]

    def serve(i):
        choose = random.Random(i)
        if choose.random() < 0.8:
            which = choose.randrange(len(requests))
            tokens, answer = requests[which], answers[which]
        else:
            tokens = [choose.randrange(1 << 40) for _ in range(choose.randint(2, 70))]
            answer = None
        seq_id, matched = prefix.acquire(tokens)
        last = len(tokens) - 1
        if matched < last:
            attend(cache, seq_id, tokens, matched, last)
        out = attend(cache, seq_id, tokens, last, last + 1)
        assert np.array_equal(out, uncached(tokens) if answer is None else answer)
        prefix.release(seq_id, tokens)

    with ThreadPoolExecutor(32) as pool:
        for _ in pool.map(serve, range(num_requests)):
            pass
    assert cache.sequences == []
    assert prefix.stats.sequences == 0
    assert prefix.stats.hits > num_requests // 2
    assert cache.stats()["live_slots"] <= 3 * cache.capacity
    prefix.clear()
    assert (cache.stats()["live_slots"], cache.stats()["retained"]) == (0, 0)
    cache.validate()


def test_prefix_caches_that_come_and_go_beside_commits():
    """Commits go on while other threads make and drop prefix caches."""
    cache = make_cache("full", num_threads=1)
    stop = threading.Event()

    def come_and_go(i):
        while not stop.is_set():
            prefix = kvcache.PrefixCache(cache, fingerprint=f"model {i}")
            seq_id, matched = prefix.acquire(PROMPTS[i])
            feed(cache, seq_id, PROMPTS[i], matched, 59)
            prefix.release(seq_id, PROMPTS[i][:59])

    def commit(seq_id):
        try:
            for _ in range(100):
                feed(cache, seq_id, PROMPTS[0], 0, 60, step=20)
                cache.clear(seq_id)
        finally:
            stop.set()

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(come_and_go, i) for i in range(4)]
        both = [pool.submit(commit, 1 << 40 | i) for i in range(2)]
        for future in both + others:
            future.result()
    cache.validate()
