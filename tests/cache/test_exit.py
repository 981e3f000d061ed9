"""The interpreter ends in the middle of everything: its exit status is the program's, nothing crashes, nobody waits."""

import subprocess
import sys

import pytest

BEGIN = f"""
import atexit, os, sys, threading, time
sys.path[:] = {sys.path!r}
import numpy as np
import kvcache

def new_cache(**arguments):
    cache = kvcache.KVCache(2, 2, 128, None, num_threads=2, dtype="f32", max_sequences=None, **arguments)
    with cache.batch(STORED) as batch:
        for layer in range(2):
            batch.put(layer, rows[:STORED], rows[:STORED])
    return cache

STORED, QUERIES = 2048, 512
rows = np.ones((STORED, 2, 128), np.float32)
queries = np.ones((QUERIES, 8, 128), np.float32)

def start(call, number=1):
    '''Call it again and again in daemon threads; return once each has begun.'''
    begun = threading.Semaphore(0)
    def work():
        begun.release()
        while True:
            try:
                call()
            except (kvcache.KVCacheError, ValueError, OSError, BufferError):
                pass
    for _ in range(number):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(number):
        begun.acquire()
    time.sleep(0.02)

class Last:
    '''Calls something when the interpreter has taken nearly everything apart.'''
    def __init__(self, call):
        self.call, self.write = call, os.write
    def __del__(self):
        self.call()
        self.write(1, b"last")
"""

SCENES = {
    "an open batch": "cache = new_cache(); batch = cache.batch(3); batch.put(0, rows[:3], rows[:3])",
    "an open batch in a with": """
cache = new_cache()
with cache.batch(3) as batch:
    batch.attend(0, queries[:3], rows[:3], rows[:3])
    sys.exit(3)
""",
    "views": """
cache = new_cache()
batch = cache.batch(3)
views = cache.keys(0), cache.spans(1), batch.slots(0), memoryview(cache.values(1)), batch.keys(1)
sys.views = views
""",
    "a cycle": "cache = new_cache(rope=lambda *keys: cache); cache.batch(1); new_cache(rope=lambda *keys: cache)",
    "threads that attend": """
cache = new_cache()
batch = cache.batch(QUERIES)
batch.put(0, rows[:QUERIES], rows[:QUERIES])
start(lambda: batch.attend(0, queries), 3)
""",
    "threads that wait": """
cache = new_cache()
batch = cache.batch(1)
start(lambda: cache.batch(1, timeout=None), 3)
""",
    "threads in every call": """
cache = new_cache(rope=lambda layer, keys, delta: keys)
def step():
    with cache.batch(1, timeout=None) as batch:
        for layer in range(2):
            batch.attend(layer, queries[:1], rows[:1], rows[:1])
for call in (step, lambda: cache.gather(0), lambda: cache.shift(9, None, 1), lambda: cache.keys(1), cache.compact,
             lambda: cache.fork(0, 1), lambda: cache.save(os.devnull + "/no"), cache.stats):
    start(call)
""",
    "a thread in a function": """
cache = new_cache(rope=lambda layer, keys, delta: time.sleep(60))
start(lambda: cache.shift(0, None, 1))
""",
    "atexit": """
cache = new_cache()
batch = cache.batch(3)
@atexit.register
def end():
    batch.abort()
    assert cache.seq_len() == STORED
    cache.close()
    print("last", end="")
""",
    "atexit, with threads": """
cache = new_cache()
batch = cache.batch(QUERIES)
batch.put(0, rows[:QUERIES], rows[:QUERIES])
start(lambda: batch.attend(0, queries), 2)
@atexit.register
def end():
    cache.validate()
    for call in (cache.compact, cache.close):
        try:
            call()
        except kvcache.CacheBusyError:
            print("last"[: 4 if call == cache.close else 0], end="")
""",
    "__del__": "cache = new_cache(); sys.last = Last(lambda: (cache.stats(), cache.batch(1).abort(), cache.close()))",
    "__del__, with threads": """
cache, other = new_cache(), new_cache()
batch, mine = cache.batch(QUERIES), other.batch(4)
batch.put(0, rows[:QUERIES], rows[:QUERIES])
start(lambda: batch.attend(0, queries), 2)
sys.last = Last(lambda: mine.attend(0, queries[:4], rows[:4], rows[:4]))
""",
    "a prefix cache": """
cache = new_cache()
prefix = kvcache.PrefixCache(cache, fingerprint="a", store={})
seq_id, _ = prefix.acquire(range(3000))
start(lambda: prefix.release(prefix.acquire(range(3000))[0], []), 2)
""",
    "a prefix cache in __del__": """
prefix = kvcache.PrefixCache(new_cache(), fingerprint="a", store={})
last = Last(lambda prefix=prefix: (prefix.acquire([1, 2]), prefix.stats, prefix.close(1)))
""",
    "a store in a folder": """
from kvcache.stores import DirectoryStore
cache = kvcache.KVCache(1, 1, 8, None, max_sequences=None, block_size=16)
prefix = kvcache.PrefixCache(cache, fingerprint="a", store=DirectoryStore(sys.argv[1]))
def serve():
    prompt = np.random.randint(0, 9, 64)
    seq_id, begin = prefix.acquire(prompt)
    x = np.ones((64 - begin, 1, 8), np.float32)
    with cache.batch(positions=range(begin, 64), seq_ids=[seq_id] * (64 - begin), timeout=None) as batch:
        batch.put(0, x, x)
    prefix.release(seq_id, prompt)
start(serve, 2)
""",
}
STATUS = {"an open batch in a with": 3}


@pytest.mark.parametrize("scene", SCENES)
def test_the_interpreter_ends(scene, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", BEGIN + SCENES[scene], tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (STATUS.get(scene, 0), "")
    said = "last" if "last" in SCENES[scene] else ""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # without one, CPython 3.13 does not end what sys holds
    ends = has_gil or "sys.last" not in SCENES[scene]
    assert done.stdout in ([said] if ends else [said, ""])
