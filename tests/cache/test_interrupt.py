"""Ctrl-C during a call ends it and leaves everything as it was."""

import pytest
from support.programs import run_python

# The beginning of every program below. A commit is refused differently while another thread's call uses the batch and
# while none does, because not everything is put: so it tells when the call is at work.
BEGIN = """
import contextlib, os, signal, sys, threading, time
import numpy as np
import kvcache

STORED, QUERIES, THREADS = 16384, 1024, {threads}
cache = kvcache.KVCache(2, 2, 128, None, num_threads=THREADS, dtype="f32")
rng = np.random.default_rng(0)
k = rng.standard_normal((STORED, 2, 128), np.float32)
with cache.batch(STORED) as batch:
    batch.put(0, k, k)
    batch.put(1, k, k)
batch = cache.batch(QUERIES)
calling, ended = threading.Event(), threading.Event()
q = np.repeat(k[:QUERIES], 16, axis=1)

def is_working():
    try:
        batch.commit()
    except kvcache.CacheBusyError:
        return True
    except ValueError:
        return False

def attend(*arguments, **keywords):
    while True:
        try:
            return batch.attend(*arguments, **keywords)
        except kvcache.CacheBusyError:  # is_working was ending it
            pass

def send_when_working():
    global sent
    calling.wait()
    while not is_working():
        if ended.is_set():  # this thread did not run as long as the call took
            return
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(call):
    calling.clear()
    ended.clear()
    sender = threading.Thread(target=send_when_working)
    sender.start()
    try:
        calling.set()
        call()
        ended.set()
        sender.join()
    except KeyboardInterrupt:
        print(f"{{1000 * (time.perf_counter() - sent):.0f}} ms after the signal")
        sender.join()
        return True
    return False
"""


def run(code, threads):
    print(run_python(BEGIN.format(threads=threads) + code))


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_attend(threads):
    """An interrupted attend has put nothing, and can be called again; its result is unfinished."""
    code = """
out = np.full_like(q, np.nan)
while not interrupted(lambda: attend(0, q, k[:QUERIES], k[:QUERIES], out=out)):
    batch.abort()
    batch = cache.batch(QUERIES)
    out[:] = np.nan
assert np.isnan(out).any()
assert repr(batch).endswith("open>") and cache.seq_len() == STORED
cache.validate()
try:
    batch.attend(0, q[:1])
except ValueError as error:
    assert "was not put" in str(error)
else:
    raise AssertionError("the rows are still there")
again = batch.attend(0, q[:3], k[:3], k[:3])
assert np.isfinite(again).all()
batch.put(0, k[3:QUERIES], k[3:QUERIES], first=3)
batch.put(1, k[:QUERIES], k[:QUERIES])
batch.commit()
assert cache.seq_len() == STORED + QUERIES
assert np.array_equal(cache.keys(0)[:, STORED:], k[:QUERIES].transpose(1, 0, 2))
cache.validate()
"""
    run(code, threads)


def test_choose():
    """An interrupted choose leaves the batch open, and can be called again."""
    code = """
batch.abort()
index = kvcache.Layer(1, 64, v_head_dim=0, dtype="f32")
cache = kvcache.KVCache([index, index], num_threads=2)
keys = np.random.default_rng(0).standard_normal((STORED, 1, 64), np.float32)
batch = cache.batch(STORED)  # is not committed, as layer 1 has no keys
batch.put(0, keys)
q = np.repeat(keys[-4096:], 64, axis=1)
while not interrupted(lambda: batch.choose(0, q, first=STORED - 4096, width=8)):
    pass
assert repr(batch).endswith("open>")
assert batch.choose(0, q[-1:], first=STORED - 1, width=1).item() == STORED - 1
batch.abort()
cache.validate()
"""
    run(code, 2)


def test_weights():
    """A handler runs during the call, and ends it."""
    code = """
ran = []
def handle(*_):
    try:
        cache.close()
    except kvcache.CacheBusyError as error:
        if "while a batch is open" in str(error):  # between two calls
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
    ran.append("inside")
    raise KeyboardInterrupt
queries = np.tile(q, (8, 1, 1))
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    while True:
        cache.weights(0, queries)
except KeyboardInterrupt:
    pass
assert ran == ["inside"]
batch.abort()
cache.validate()
cache.close()
"""
    run(code, 2)


def test_with_aborts():
    code = """
def step():
    with contextlib.suppress(ValueError), batch:  # which layer 1 lacks, unless an interrupt aborts it
        attend(0, q, k[:QUERIES], k[:QUERIES])
while not interrupted(step):
    batch = cache.batch(QUERIES)
assert repr(batch).endswith("ended>") and cache.seq_len() == STORED
cache.validate()
cache.close()
"""
    run(code, 2)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_handler_that_does_not_raise(threads):
    """A handler runs in the middle of the call, may use the cache but not end it, and changes no result."""
    code = """
QUERIES //= 8
seen, results = [], []

def handle(number, frame):
    if not is_working():  # the call has ended: it is too late
        return
    for end in (batch.abort, batch.commit, cache.close):
        try:
            end()
        except kvcache.CacheBusyError:
            seen.append(cache.seq_len())

signal.signal(signal.SIGINT, handle)
while not seen:
    batch.abort()
    batch = cache.batch(QUERIES)
    results.clear()
    assert not interrupted(lambda: results.append(attend(0, q[:QUERIES], k[:QUERIES], k[:QUERIES])))
assert seen == [STORED] * 3, seen
assert np.array_equal(results[0], batch.attend(0, q[:QUERIES]))
"""
    run(code, threads)


def test_in_another_thread():
    """Signals are the main thread's: the call goes on, and ends as ever."""
    code = """
QUERIES //= 8
results = []
done = threading.Event()
def work():
    results.append(attend(0, q[:QUERIES], k[:QUERIES], k[:QUERIES]))
    done.set()
while True:
    batch.abort()
    batch = cache.batch(QUERIES)
    done.clear()
    threading.Thread(target=work).start()
    if interrupted(done.wait):
        break
done.wait()
assert np.array_equal(results[-1], batch.attend(0, q[:QUERIES]))
"""
    run(code, 2)
