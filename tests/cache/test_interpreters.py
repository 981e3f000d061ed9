"""Subinterpreters, and processes by spawn, fork and forkserver."""

import subprocess
import sys

import pytest
from support.programs import run_python

BEGIN = f"import sys; sys.path[:] = {sys.path!r}\n"

# Run in a subinterpreter; prints what it came to.
IMPORT = """
try:
    import kvcache
    cache = kvcache.KVCache(1, 2, 8, 64)
    with cache.batch(3) as batch:
        rows = kvcache._core.np.ones((3, 2, 8), 'f')
        batch.attend(0, rows, rows, rows)
    print(cache.seq_len(), flush=True)
except ImportError as error:
    print(error, flush=True)
"""
IN_ANOTHER = """
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
other = interpreters.create()
run(other, CODE)
interpreters.destroy(other)
"""


def run(code):
    return run_python(code).splitlines()


@pytest.mark.parametrize("first", ["main", "other"])
def test_a_second_interpreter_is_refused_in_words(first):
    """Whichever imports it first goes on; the other one is told what to do."""
    code = BEGIN + IMPORT
    other = IN_ANOTHER.replace("CODE", repr(code))
    said = run(f"{code}\n{other}\n{IMPORT}" if first == "main" else f"{other}\n{IMPORT}")
    refused = [line for line in said if "works in one interpreter of a process" in line]
    assert len(refused) == 1
    assert set(said) - {*refused} == {"3"}


PROCESSES = """
import multiprocessing, os, threading
import numpy as np
import kvcache
from kvcache.stores import DirectoryStore

METHOD, FOLDER = {method!r}, {folder!r}

def rows(tokens):
    return np.ones((tokens, 2, 8), "f")

def feed(cache, tokens, seq_id=0):
    with cache.batch(tokens, seq_ids=[seq_id] * tokens, timeout=None) as batch:
        batch.attend(0, rows(tokens), rows(tokens), rows(tokens))

def child(number):
    feed(kvcache.KVCache(1, 2, 8, 64), 3)
    if METHOD == "fork":  # it has what the parent had, each for itself
        assert cache.seq_len() == 5 and view.shape == (2, 5, 8)
        feed(cache, number)
        cache.truncate(2)
        cache.validate()
        batch.abort() if batch is not None else None
    loaded = kvcache.KVCache.load(FOLDER + "/state", secret=b"a secret")
    assert loaded.seq_len() == 5 and loaded.keys(0).tobytes() == np.ones((2, 5, 8), "f2").tobytes()
    store = DirectoryStore(FOLDER + "/store", max_bytes=4000)
    for i in range(30):
        store[f"{{number:032x}}{{i:032x}}"] = bytes([number]) * 100
        assert store.get(f"{{number:032x}}{{i:032x}}") in (bytes([number]) * 100, None)
    prefix = kvcache.PrefixCache(shared := kvcache.KVCache(1, 2, 8, None, max_sequences=None, block_size=16),
                                 fingerprint="a", store=DirectoryStore(FOLDER + "/prefix"), timeout=60)
    seq_id, matched = prefix.acquire(range(40))
    assert matched in (0, 16, 32)  # the other processes may be between the two blocks
    with shared.batch(positions=range(matched, 40), seq_ids=[seq_id] * (40 - matched)) as mine:
        mine.put(0, rows(40 - matched), rows(40 - matched))
    prefix.release(seq_id, range(40))
    prefix.close(60)
    return os.getpid()

cache = view = batch = None
if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=4)
    feed(cache, 5)
    view = cache.keys(0)
    cache.save(FOLDER + "/state", secret=b"a secret")
    stop = threading.Event()

    def work(seq_id):
        while not stop.is_set():
            feed(cache, 3, seq_id)
            cache.clear(seq_id)

    threads = [threading.Thread(target=work, args=(1 + i,)) for i in range(2 if METHOD == "spawn" else 0)]
    for thread in threads:
        thread.start()
    with context.Pool(3, maxtasksperchild=1) as pool:
        assert os.getpid() not in pool.map(child, range(1, 5), chunksize=1)
        for sent in (cache, cache.batch(1, seq_ids=[3], timeout=None)):
            try:
                pool.apply(child, (sent,))
            except TypeError as error:
                print(str(error).split(":")[0])
            if sent is not cache:
                sent.abort()
    stop.set()
    for thread in threads:
        thread.join()
    assert cache.seq_len() == 5
    store = DirectoryStore(FOLDER + "/store", max_bytes=4000)
    assert 0 < store.nbytes <= 4000
    assert all(value == bytes([int(key[:32], 16)]) * 100 for key, value in store.items())
    prefix = kvcache.PrefixCache(kvcache.KVCache(1, 2, 8, None, max_sequences=None, block_size=16),
                                 fingerprint="a", store=DirectoryStore(FOLDER + "/prefix"), timeout=60)
    print(prefix.acquire(range(40))[1])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes(tmp_path, method):
    """Caches are not sent to processes, but states are. A folder is shared. A forked child has caches of its own."""
    program = tmp_path / "program.py"
    program.write_text(BEGIN + PROCESSES.format(method=method, folder=str(tmp_path)))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "a KVCache cannot be pickled",
        "a Batch can be neither copied nor pickled",
        "32",
    ]


FORKS = """
import os, signal, threading, time
import numpy as np
import kvcache

def rows(tokens):
    return np.ones((tokens, 2, 64), "f")

cache = kvcache.KVCache(1, 2, 64, None, max_sequences=None, num_threads=2, rope=lambda layer, keys, delta: keys)
with cache.batch(300) as batch:
    batch.put(0, rows(300), rows(300))
out = rows(100)

def step():
    with cache.batch(100, seq_ids=[1] * 100, timeout=None) as batch:
        batch.attend(0, out, out, out)
    cache.truncate(0, seq_id=1)

calls = [step, step, lambda: cache.gather(0), lambda: cache.shift(200, None, 1), cache.stats,
         lambda: (cache.fork(0, 2), cache.clear(2)), lambda: cache.keys(0), cache.compact]
stop = threading.Event()

def work(call):
    while not stop.is_set():
        try:
            call()
        except (kvcache.CacheBusyError, BufferError):
            pass

threads = [threading.Thread(target=work, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for _ in range(25):
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it if it hangs
        try:
            cache.validate()
            assert cache.seq_len() == 300
            own = kvcache.KVCache(1, 2, 64, 100)
            with own.batch(9) as batch:
                batch.attend(0, rows(9), rows(9), rows(9))
            cache.fork(0, 7)
            cache.gather(0, seq_id=7)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.002)
stop.set()
for thread in threads:
    thread.join()
cache.validate()
print(cache.seq_len())
"""


def test_a_fork_while_threads_are_in_calls():
    assert run(FORKS) == ["300"]
