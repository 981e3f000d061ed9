"""The garbage collector at every object that is made, in whichever thread: no answer changes, nothing stays."""

import gc
import time
import weakref

import numpy as np
import pytest
from support.interrupts import in_a_thread
from support.prefixes import POLICIES, feed, make_cache, rows_of, serve

import kvcache

PROMPT = [*range(50)]


@pytest.fixture
def at_every_object():
    threshold = gc.get_threshold()
    gc.freeze()  # objects of other tests are not looked at
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def tangle(cache, prefix):
    """Make garbage in cycles: an open batch, views, a prefix cache with rows, and what follows the cache."""
    batch = cache.batch(positions=[0, 1], seq_ids=[800, 800])
    other = kvcache.PrefixCache(cache, fingerprint="another")
    seq_id, _ = other.acquire(PROMPT)
    knot = [batch, batch.slots(0), other, cache, prefix, seq_id]
    knot.append(knot)


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.usefixtures("at_every_object")
def test_what_is_found_is_right(kind):
    cache = make_cache(kind, rope=False)
    prefix = kvcache.PrefixCache(cache, fingerprint="a", store={})
    for _ in range(3):
        for prompt in (PROMPT, [*PROMPT[:30], 7, 8, 9], PROMPT[5:]):
            tangle(cache, prefix)
            gc.collect()  # the batch is ended by it
            serve(prefix, cache, prompt, [1, 2, 3])
    assert prefix.acquire(PROMPT)[1] == 49
    cache.validate()
    assert cache.next_position(800) == 0


@pytest.mark.parametrize("strategy", ["disabled", kvcache.LongSequencesOnly(3), kvcache.Adaptive()], ids=str)
@pytest.mark.usefixtures("at_every_object")
def test_a_strategy_decides_alike(strategy):
    cache = kvcache.KVCache(2, 1, 2, 64, dtype="f32", max_sequences=None, strategy=strategy)
    for tokens in (2, 5):
        with cache.batch(tokens, seq_ids=[tokens] * tokens) as batch:
            for layer in range(2):
                rows = rows_of(PROMPT, 0, tokens, layer)
                out = batch.attend(layer, rows, rows, rows)
                assert np.array_equal(out[0], rows[0])
        cache.fork(tokens, 9, missing_ok=True)
        cache.clear(9)
    stored = {"disabled": 0, "Adaptive": 2, "LongSequencesOnly": 1}
    assert len(cache.sequences) == stored[strategy if strategy == "disabled" else type(strategy).__name__]
    cache.validate()


def make_garbage():
    """Return weak references to what only a cycle keeps: a cache, by its own function, and a prefix cache in use."""
    kept = []
    cache = make_cache(rope=lambda layer, keys, delta: keys if kept else None)
    kept.append(cache)
    prefix = kvcache.PrefixCache(cache, fingerprint="a", store={})
    serve(prefix, cache, PROMPT)
    seq_id, matched = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, matched, 50)
    tangle(cache, prefix)
    assert prefix.flush(60)
    return [weakref.ref(each) for each in (cache, prefix, prefix._watch)]


def test_what_one_thread_made_is_collected_in_another():
    gc.disable()
    try:
        made = make_garbage()
        in_a_thread(gc.collect)
        deadline = time.monotonic() + 60  # the thread that wrote to the store may be on its last line still
        while any(each() is not None for each in made) and time.monotonic() < deadline:
            time.sleep(0.05)
            gc.collect()
        assert not [each() for each in made if each() is not None]
    finally:
        gc.enable()
