"""Threads that use one object at the same moment: where Python has no GIL, nothing else keeps them apart."""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import sysconfig
import threading
import time

import numpy as np
import pytest

import kvcache

THREADS = 5
ROUNDS = 12
X = np.ones((1, 2, 8), np.float32)
BF16 = """
import threading
import numpy as np
import kvcache

cache = kvcache.KVCache(1, 1, 8, 64, dtype="bf16")
with cache.batch(3) as batch:
    batch.put(0, np.ones((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32))
barrier, types = threading.Barrier(8), []

def read():
    barrier.wait()
    types.append(cache.keys(0).dtype)

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(types) == 8 and len(set(types)) == 1, types
"""


@pytest.fixture(autouse=True)
def _often():
    """Let threads take turns as often as can be, where there is a GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*calls):
    """Call functions, each in a thread, all at one moment; return what each returned, or the exception it raised."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    def run(i):
        barrier.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def again(call, end, *allowed):
    """Return a function that makes a call 20 times, or until `end` is set; it may raise these errors."""

    def run():
        for _ in range(20):
            if end.is_set():
                break
            with contextlib.suppress(*allowed):
                call()

    return run


def only(results, *expected):
    """Raise the first exception of `results` that is not of an expected type."""
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, expected):
            raise result


def new_cache(**arguments):
    policy = [kvcache.FullAttention(), kvcache.SlidingWindow(6, num_sink_tokens=1)]
    return kvcache.KVCache(2, 2, 8, policy=policy, max_sequences=None, block_size=8, num_threads=1, **arguments)


def feed(cache, tokens, seq_id=0):
    x = np.random.default_rng(seq_id).standard_normal((tokens, 2, 8), np.float32)
    with cache.batch(tokens, seq_ids=[seq_id] * tokens, timeout=None) as batch:
        return [batch.attend(layer, x, x, x) for layer in range(2)]


def view(cache, seq_id=0):
    """Make views, and read them; what they show stays, whatever other threads do."""
    k, v = cache.keys(0, seq_id=seq_id, copy=False), cache.values(0, seq_id=seq_id, copy=False)
    spans = cache.spans(1, seq_id=seq_id)
    before = [array.copy() for array in (k, v, *(span.k for span in spans))]
    for array, expected in zip((k, v, *(span.k for span in spans)), before, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_sequences_of_their_own_beside_readers():
    """Each thread generates what it would alone, while others read, look on, copy and make and drop views."""
    serial, cache, end = new_cache(), new_cache(), threading.Event()
    expected = [[feed(serial, n, seq_id) for n in (9, 1, 1, 5)] for seq_id in range(1, THREADS)]
    feed(cache, 5)

    def serve(seq_id):
        for _ in range(ROUNDS):
            outs = [feed(cache, n, seq_id) for n in (9, 1, 1, 5)]
            np.testing.assert_array_equal(outs[0], expected[seq_id - 1][0])
            np.testing.assert_array_equal(outs[3], expected[seq_id - 1][3])
            cache.fork(seq_id, seq_id + 100)
            cache.truncate(15, seq_id=seq_id + 100)
            cache.clear(seq_id)
            cache.clear(seq_id + 100)

    def serve_all():
        try:
            only(at_once(*(lambda seq_id=seq_id: serve(seq_id) for seq_id in range(1, THREADS))))
        finally:
            end.set()

    readers = [
        cache.stats,
        cache.blocks,
        cache.__repr__,
        cache.validate,
        lambda: (cache.sequences, cache.nbytes, cache.utilization, cache.positions(), cache.next_position()),
        lambda: view(cache),
        lambda: cache.gather(0),
        lambda: copy.copy(cache).close(),
    ]
    only(at_once(serve_all, *(again(read, end, kvcache.CacheBusyError, BufferError) for read in readers)))
    cache.clear()
    cache.validate()
    assert cache.stats()["live_slots"] == 0


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_batch_that_many_threads_end(end):
    """One thread ends the batch. The others are refused, or find that it has ended."""
    cache = new_cache()
    for i in range(1, ROUNDS):
        batch = cache.batch(1)
        for layer in range(2):
            batch.put(layer, X, X)
        only(at_once(*[getattr(batch, end)] * THREADS), kvcache.CacheBusyError)
        assert cache.next_position() == (i if end == "commit" else 0)
        assert cache.stats()["batches" if end == "commit" else "aborted"] == i
    cache.validate()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_batch_that_ends_while_threads_work_on_it(end):
    """The batch ends between calls. Later calls say so."""
    cache = new_cache()
    for _ in range(ROUNDS):
        begin = cache.next_position()
        batch = cache.batch(THREADS)

        def work(token, batch=batch, begin=begin):
            for layer in range(2):
                batch.put(layer, X, X, first=token)
                batch.attend(layer, X, first=token, masked=[(0, 0, begin + token)])
            return batch.positions, batch.seq_ids

        works = [lambda token=token, work=work: work(token) for token in range(THREADS)]
        ends = again(getattr(batch, end), threading.Event(), kvcache.CacheBusyError, ValueError)
        for result in at_once(*works, ends):
            if isinstance(result, ValueError):
                assert "the batch has ended" in str(result)
            elif isinstance(result, Exception) and not isinstance(result, kvcache.CacheBusyError):
                raise result
        batch.abort()
    cache.validate()


def test_slots_of_a_batch_that_ends():
    """No view is writable once the batch has ended, however late it was made."""
    cache = new_cache()
    for _ in range(ROUNDS):
        batch = cache.batch(THREADS)
        slots = [lambda token=token, batch=batch: batch.slots(0, first=token) for token in range(THREADS)]
        results = at_once(*slots, batch.abort)
        only(results, kvcache.CacheBusyError, ValueError)
        batch.abort()
        views = [view for found in results if isinstance(found, tuple) for view in found]
        assert not any(view.flags.writeable for view in views)
        results.clear(), views.clear()  # the traceback of an exception holds them as well
        cache.compact()


def test_a_cache_that_closes_while_threads_use_it():
    """It closes between calls, and never within one; then every call says so."""
    for i in range(ROUNDS // 4):
        cache, end = new_cache(), threading.Event()
        feed(cache, 9)
        ids = itertools.count(1)

        def close(cache=cache, end=end):
            while True:
                try:
                    cache.close()
                except (kvcache.CacheBusyError, BufferError):
                    time.sleep(0)
                else:
                    end.set()
                    return

        calls = [
            cache.stats,
            lambda cache=cache: view(cache),
            lambda cache=cache, ids=ids: feed(cache, 3, next(ids)),
            lambda cache=cache: cache.fork(0, -1),
            lambda cache=cache: copy.copy(cache).close(),
        ]
        allowed = kvcache.CacheBusyError, BufferError, ValueError
        working = [again(call, end, *allowed) for call in calls]
        only(at_once(*working, *[close] * (1 + i % 2)))
        with pytest.raises(ValueError, match="closed"):
            cache.stats()


def test_views_that_die_while_the_cache_closes():
    for _ in range(ROUNDS):
        cache = new_cache()
        feed(cache, 9)
        views = [[cache.keys(0), cache.values(0)] for _ in range(THREADS)]
        only(at_once(*(held.clear for held in views), cache.close), BufferError, kvcache.CacheBusyError)
        cache.close()


def test_batches_that_are_dropped_while_the_cache_closes():
    for _ in range(ROUNDS):
        cache = new_cache()
        held = [cache.batch(1)]
        only(at_once(held.clear, *[cache.close] * 2), kvcache.CacheBusyError)
        cache.close()


def test_the_first_arrays_of_bf16():
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", BF16], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_import_leaves_the_gil_off():
    code = "import sys, kvcache; assert not sys._is_gil_enabled()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
