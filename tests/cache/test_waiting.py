"""A cache has one open batch at a time: other threads wait for it, and need no lock of their own."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.programs import run_python

import kvcache

REQUESTS, STEPS = 8, 12


def new_cache(**arguments):
    policy = [kvcache.FullAttention(), kvcache.SlidingWindow(6, num_sink_tokens=1)]
    return kvcache.KVCache(2, 2, 8, 64, policy=policy, max_sequences=REQUESTS, num_threads=1, **arguments)


def generate(cache, seq_id):
    """A prompt, then a token a step, each made of the token before; return what every step attended to."""
    x = np.random.default_rng(seq_id).standard_normal((5, 2, 8), np.float32)
    outs = []
    for _ in range(STEPS):
        with cache.batch(len(x), seq_ids=[seq_id] * len(x), timeout=None) as batch:
            for layer in range(2):
                x = batch.attend(layer, x, x, x)
        outs.append(x)
        x = x[-1:]
    return np.concatenate(outs)


def feed(cache, n, seq_id=0, timeout=0):
    rows = np.ones((n, 2, 8), np.float32)
    with cache.batch(n, seq_ids=[seq_id] * n, timeout=timeout) as batch:
        for layer in range(2):
            batch.put(layer, rows, rows)


@pytest.mark.parametrize("strategy", ["always", "disabled", kvcache.LongSequencesOnly(7), kvcache.Adaptive()], ids=str)
def test_request_threads_generate_what_each_would_alone(strategy):
    serial, cache = new_cache(strategy=strategy), new_cache(strategy=strategy)
    expected = [generate(serial, seq_id) for seq_id in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        got = list(pool.map(lambda seq_id: generate(cache, seq_id), range(REQUESTS)))
    np.testing.assert_array_equal(got, expected)
    assert cache.stats()["batches"] == REQUESTS * STEPS
    cache.validate()


def test_without_a_timeout_it_is_refused_and_says_what_to_do():
    cache = new_cache()
    open_batch = cache.batch(1)
    for timeout in ({}, {"timeout": 0}, {"timeout": 0.0}):
        with pytest.raises(kvcache.CacheBusyError, match=r"one at a time: commit or abort it first, or give a timeout"):
            cache.batch(1, seq_ids=[1], **timeout)
    with pytest.raises(kvcache.CacheBusyError, match="longer timeout than 2 ms"):
        cache.batch(1, seq_ids=[1], timeout=0.0011)
    open_batch.abort()
    assert cache.stats()["aborted"] == 1
    for timeout in (0, 1e-9, np.float32(2), 3, 1e300, math.inf, None):  # a free cache needs no wait
        cache.batch(1, timeout=timeout).abort()


def waiting(cache, *arguments, **keywords):
    """A call of batch() in a thread, once that waits: the future of what it returns or raises."""
    future, begun = ThreadPoolExecutor(1), threading.Event()

    def begin():
        begun.set()
        while True:
            try:
                return cache.batch(*arguments, **keywords)
            except kvcache.CacheBusyError as error:
                if "another thread is closing" not in str(error):  # is_in_call was at it
                    raise

    result = future.submit(begin)
    begun.wait()
    while True:  # a call that does not wait is refused in a way of its own once others wait, and nothing is open
        time.sleep(0.001)
        if result.done() or is_in_call(cache):
            return result


def is_in_call(cache):
    try:
        cache.close()
    except kvcache.CacheBusyError as error:
        return "a call in another thread" in str(error)
    raise AssertionError("a batch is open, so that the cache cannot be closed")


def test_a_cache_is_not_closed_under_a_thread_that_waits():
    cache = new_cache()
    first = cache.batch(1)
    second = waiting(cache, 1, seq_ids=[1], timeout=None)
    with pytest.raises(kvcache.CacheBusyError, match="a call in another thread is using the cache; close it when"):
        cache.close()
    first.abort()
    second.result().abort()
    cache.close()


def test_one_that_does_not_fit_gives_way_to_the_next():
    cache = new_cache()
    first = cache.batch(60)
    too_long = waiting(cache, 65, timeout=None, seq_ids=[1] * 65)
    with ThreadPoolExecutor(1) as pool:
        after_it = pool.submit(feed, cache, 4, seq_id=1, timeout=None)
        first.abort()
        with pytest.raises(kvcache.CacheFullError, match="max_seq_len 64"):
            too_long.result()
    after_it.result()
    assert cache.next_position(1) == 4


def test_ctrl_c_ends_the_wait():
    code = """
import os, signal, threading, time
import kvcache

cache = kvcache.KVCache(1, 1, 8, 64, max_sequences=2)
open_batch = cache.batch(1)

def is_in_call():
    try:
        cache.close()  # refused, as a batch is open
    except kvcache.CacheBusyError as error:
        return "a call in another thread" in str(error)

def send():
    while not is_in_call():  # a signal before the call would end the program just so
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

def is_interrupted(timeout):
    while True:
        try:
            cache.batch(1, seq_ids=[1], timeout=timeout)
        except kvcache.CacheBusyError:  # is_in_call was closing it
            continue
        except KeyboardInterrupt:
            return True
        return False

for timeout in (None, 1000):
    sender = threading.Thread(target=send)
    sender.start()
    assert is_interrupted(timeout)
    sender.join()
    assert cache.sequences == [] and len(open_batch) == 1
open_batch.abort()
cache.batch(1, seq_ids=[1], timeout=None).abort()
cache.close()
"""
    run_python(code)
