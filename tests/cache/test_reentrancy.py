"""A cache or a batch that is ended in the middle of a call: by the garbage collector, by arguments, by functions."""

import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from support.compiling import LIBRARIES, ROOT, SANITIZERS, run

import kvcache

INTRUDER = ROOT / "tests/support/intruder.py"
LOCK = """
#include <Python.h>
#include <stdio.h>
int __real_pthread_mutex_lock(pthread_mutex_t *);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    if (Py_IsInitialized() && PyGILState_Check()) { /* it says 1 while the process exits, too */
        fputs("the mutex is locked by a thread that has the GIL\\n", stderr);
        abort();
    }
    return __real_pthread_mutex_lock(mutex);
}
"""


def intrude(how, **environment):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", INTRUDER, how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    times = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert int(times["KVCache.batch"]) > 2
    assert int(times["Batch.attend"]) > 2


@pytest.mark.parametrize("how", [pytest.param("collector", marks=pytest.mark.full), "arguments"])
def test_nothing_ends_in_the_middle(how):
    """Freed memory is overwritten, so that its use shows; the next test has the address sanitizer for that."""
    allocator = "debug" if sysconfig.get_config_var("Py_GIL_DISABLED") else "malloc"
    intrude(how, PYTHONMALLOC=allocator, MALLOC_PERTURB_="165")


@pytest.fixture(scope="module")
def watched(workshop, tmp_path_factory):
    """What to preload so that the core is one under the address sanitizer, which also says who locks its mutex."""
    if sys.platform != "linux":
        pytest.skip("there is no LD_PRELOAD here")
    command, objects = workshop.core()
    folder, include = tmp_path_factory.mktemp("watched"), sysconfig.get_path("include")
    asan = run(command[0], "-print-file-name=libasan.so").strip()
    if not {*SANITIZERS} <= {*command} or not Path(asan).is_absolute() or not Path(include, "Python.h").exists():
        pytest.skip("there is no address sanitizer to preload, or no Python.h")
    lock, library = folder / "lock.c", folder / "libkvcache.so"
    lock.write_text(LOCK)
    shared = ["-shared", "-Wl,-soname,libkvcache.so", "-Wl,--wrap=pthread_mutex_lock", f"-I{include}"]
    flags = [flag for flag in command if flag != "-static-libasan"]
    run(*flags, *shared, lock, *objects, "-o", library, *LIBRARIES)
    return f"{asan} {library}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["collector", "arguments"])
def test_nothing_freed_is_used_and_nobody_waits_with_the_gil(watched, how):
    intrude(how, LD_PRELOAD=watched, ASAN_OPTIONS="detect_leaks=0")


def test_a_function_that_closes_the_cache():
    """The function runs inside the call that moves keys, which goes on with the cache."""
    raised = []

    def move(layer, keys, delta):
        for end in (cache.close, cache.compact):
            with pytest.raises(kvcache.KVCacheError) as error:
                end()
            raised.append(error.type)
        assert cache.nbytes > 0
        assert cache.positions().tolist() == [0, 1, 2]
        return keys

    cache = kvcache.KVCache(1, 2, 8, 16, rope=move)
    with cache.batch(3) as batch:
        batch.put(0, np.ones((3, 2, 8), np.float32), np.ones((3, 2, 8), np.float32))
    cache.shift(1, None, 2)
    assert raised
    assert set(raised) == {kvcache.CacheBusyError}
    assert cache.positions().tolist() == [0, 3, 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork() here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_calls_of_threads_that_it_has_not():
    inside, go_on = threading.Event(), threading.Event()

    def move(layer, keys, delta):
        inside.set()
        go_on.wait()
        return keys

    cache = kvcache.KVCache(1, 1, 8, 64, rope=move)
    with cache.batch(3) as batch:
        batch.put(0, np.ones((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32))
    thread = threading.Thread(target=cache.shift, args=(0, None, 5))
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        failed = True
        try:
            cache.close()
            failed = False
        finally:
            os._exit(failed)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert cache.next_position() == 8
    cache.close()


def test_parts_that_are_made_without_a_cache():
    """Parts that are made without a cache need not work, but must not crash."""
    with pytest.raises(TypeError):
        kvcache._core.Hold(None, 0, 0)
    kvcache._core.Slots()
    batch = kvcache._core.Batch()
    x = np.ones((1, 2, 8), np.float32)
    for call in (
        lambda: batch.put(0, x, x, 0, None, "THD"),
        lambda: batch.attend(0, x, x, x, 0, *[None] * 7, 1, False, None, "stored", None, "THD", None, False),
        lambda: batch.choose(0, x, 0, 1, {}, "THD", False),
        lambda: batch.slots(0, 0),
        lambda: batch.written(0, 0, 1),
        lambda: batch.dense(0, None, None, None, "HTD", "f32", None),
    ):
        with pytest.raises(ValueError, match="the batch has ended"):
            call()
    batch.commit(None)
    batch.abort()
