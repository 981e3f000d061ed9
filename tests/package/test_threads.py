"""Test the threads of the installed library: OpenMP's, as its variables and threadpoolctl say, or its own."""

import os
import shutil
import subprocess
import sys

import pytest
from support.compiling import ENVIRONMENT, FLAGS, LIBRARIES, OPENMP, ROOT, compiler, run

import kvcache

PROGRAM = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <kvcache.h>

enum { N = 600, HEADS = 4, DIM = 64 };

static int num_threads(void) {
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) n += task->d_name[0] != '.';
    closedir(tasks);
    return n;
}

#define LOAD(name) __typeof__(&name) name##_ = dlsym(library, #name)

static int use(void *library) {
    static float x[N][HEADS][DIM], out[N][HEADS][DIM];
    LOAD(kvc_cache_new); LOAD(kvc_cache_free); LOAD(kvc_begin); LOAD(kvc_attend); LOAD(kvc_commit);
    const kvc_layer layer = {.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM};
    const kvc_config config = {.struct_size = sizeof config, .layers = &layer, .layer_size = sizeof layer,
                               .num_layers = 1, .max_seq_len = N, .num_threads = 4};
    const int64_t head = sizeof **x, token = sizeof *x;
    const kvc_put_args put = {.struct_size = sizeof put, .num_tokens = N, .k = x, .v = x, .k_token_stride = token,
                              .k_head_stride = head, .v_token_stride = token, .v_head_stride = head};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = HEADS, .num_tokens = N};
    const kvc_attend_args args = {.struct_size = sizeof args, .q = x, .out = out, .q_token_stride = token,
                                  .q_head_stride = head, .out_token_stride = token, .out_head_stride = head,
                                  .put = &put};
    kvc_cache *cache;
    kvc_batch *batch;
    static int32_t positions[N];
    for (int i = 0; i < N; i++) positions[i] = i;
    if (kvc_cache_new_(&config, &cache)) return 1;
    if (kvc_begin_(cache, N, positions, NULL, NULL, &batch) || kvc_attend_(batch, &plan, &args)) return 2;
    if (num_threads() < 2) return 3;
    return kvc_commit_(batch) || kvc_cache_free_(cache) ? 4 : 0;
}

int main(int count, char **arguments) {
    const int own = getenv("KVCACHE_THREADS") != NULL;
    for (int i = 0; i < 20 * (count == 2); i++) {
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return puts(dlerror()), 5;
        if (i % 2) usleep(1000); /* threads sleep in the one round, and spin in the other */
        const int failed = use(library);
        if (failed) return failed;
        dlclose(library);
        if (dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD)) return 6;
        while (own && num_threads() != 1) usleep(1000); /* the system lists a thread for a moment after its end */
    }
    return 0;
}
"""

FUNCTIONS = """
import os, sys
import numpy as np
import kvcache
from kvcache import _core

def threads():
    return len(os.listdir("/proc/self/task"))

def attend(num_threads=None, cache=None):
    cache = cache or kvcache.KVCache(1, 4, 64, 1200, num_threads=num_threads)
    rows = np.ones((1200, 4, 64), np.float32)
    with cache.batch(1200) as batch:
        batch.attend(0, rows, rows, rows)
    return cache
"""

needs_openmp = pytest.mark.skipif(
    "OpenMP 20" not in kvcache.show_config("dicts")["build"], reason="built without OpenMP"
)
shares_openmp = pytest.mark.skipif("no OpenMP" in kvcache.show_config("dicts")["build"], reason="built without OpenMP")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


def run_python(code, imports="os", before="", **environment):
    """Return the words that a fresh interpreter prints, which imports these modules in this order.

    It runs `before` when it has imported those, and kvcache only afterwards.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KVCACHE_THREADS"))}
    done = subprocess.run(
        [sys.executable, "-Pc", f"import {imports}\n{before}{FUNCTIONS}{code}"],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


# A fresh interpreter whose first calls were held up by another program may have run them on the library's own threads.
def until_shared(code, **options):
    """Run code that prints how many threads it added, until that is 0, in at most ten interpreters."""
    for _ in range(10):
        *words, added = run_python(code, **options)
        if added == "0":
            return words
    pytest.fail(f"{added} threads were added, at each of ten times")


@pytest.mark.parametrize("layer", ["own", None])
def test_the_library_can_be_unloaded(tmp_path, monkeypatch, layer):
    (tmp_path / "unload.c").write_text(PROGRAM)
    run(*compiler(), f"-I{kvcache.get_include()}", tmp_path / "unload.c", "-ldl", "-o", tmp_path / "unload")
    if layer:
        monkeypatch.setitem(ENVIRONMENT, "KVCACHE_THREADS", layer)
    run(tmp_path / "unload", kvcache.get_library())


def test_own_threads_are_chosen():
    assert run_python("print(kvcache.get_threading_layer())", KVCACHE_THREADS="own") == ["own"]
    code = "before = threads(); attend(3); print(threads() - before)"
    assert run_python(code, KVCACHE_THREADS="own") == ["2"]


@needs_openmp
def test_openmp_is_the_default():
    assert run_python("print(kvcache.get_threading_layer())") == ["openmp"]
    assert run_python("print(kvcache.get_threading_layer())", KVCACHE_THREADS="") == ["openmp"]


def test_bad_choices_are_refused():
    code = """
assert kvcache.get_threading_layer() is None
assert kvcache.show_config("dicts")["threading_layer"] is None
try:
    attend()
except kvcache.NotSupportedError as error:
    print(error)
"""
    words = " ".join(run_python(code, KVCACHE_THREADS="workers"))
    assert "KVCACHE_THREADS is workers: this build has own" in words


@needs_openmp
@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "3", "OMP_THREAD_LIMIT": "2"}, 2),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_PLACES": "{0}", "OMP_PROC_BIND": "true"}, 1),
    ],
)
def test_variables_of_openmp(environment, number):
    assert run_python("print(kvcache.get_num_threads())", **environment) == [str(number)]


@needs_openmp
def test_the_thread_limit_bounds_what_is_asked_for():
    code = "before = threads(); attend(8); print(before + 1 - threads())"
    assert until_shared(code, OMP_THREAD_LIMIT="2") == []


def test_the_thread_limit_bounds_own_threads():
    environment = {"KVCACHE_THREADS": "own", "OMP_THREAD_LIMIT": "2"}
    code = "before = threads(); attend(8); print(kvcache.get_num_threads(), threads() - before)"
    assert run_python(code, OMP_NUM_THREADS="3", **environment) == ["2", "1"]
    code = "kvcache.set_num_threads(8); print(kvcache.get_num_threads())"
    assert run_python(code, **environment) == ["2"]


@needs_openmp
def test_binding_does_not_count_as_affinity():
    """OpenMP binds the main thread, too, as soon as it is loaded."""
    code = "print(os.sched_getaffinity(0) == {0}, kvcache.get_num_threads())"
    environment = {"OMP_PROC_BIND": "true", "OMP_PLACES": "{0},{0},{0}"}
    is_bound, number = run_python(code, **environment)
    assert (is_bound, number) in [("True", "3"), ("True", str(os.cpu_count()))]


@needs_openmp
@pytest.mark.skipif(kvcache.get_num_threads() < 2, reason="there is one processor")
def test_the_runtime_that_starts_first_has_all_places():
    pytest.importorskip("sklearn")
    code = "attend(); print(kvcache.get_num_threads() > 1)"
    assert run_python(code, imports="sklearn.cluster, kvcache", OMP_PROC_BIND="true") == ["True"]


@pytest.mark.parametrize("name", ["gcc", "clang"])
@pytest.mark.parametrize("is_bound", [False, True])
def test_places_count_where_threads_are_bound(tmp_path, name, is_bound):
    """LLVM's runtime has a place of all processors where it binds no thread."""
    if not shutil.which(name):
        pytest.skip(f"there is no {name} here")
    program = tmp_path / "places.c"
    program.write_text(
        '#include <omp.h>\n#include "base/openmp.h"\n'
        f"int main(void) {{ return kvc_openmp_num_places() != ({int(is_bound)} ? omp_get_num_places() : 0); }}"
    )
    command = [name, *FLAGS, program, ROOT / "src/base/openmp.c", OPENMP, *LIBRARIES, "-o", tmp_path / "places"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"there is no OpenMP for {name} here")
    environment = {"OMP_PROC_BIND": "true"} if is_bound else {}
    subprocess.run([tmp_path / "places"], env=ENVIRONMENT | environment, check=True)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_build_that_links_to_no_openmp_uses_the_programs(tmp_path, name):
    """As wheels do: the calls run in regions once the process has a runtime, and a cache looks for it."""
    program, core = tmp_path / "program", tmp_path / "openmp.o"
    (tmp_path / "main.c").write_text("""
#include <omp.h>
#include "base/openmp.h"
#include "kvcache.h"
static void note(void *team) { if (omp_get_thread_num() == 0) *(int *)team = omp_get_num_threads(); }
int main(void) {
    int team = 0;
    if (kvc_openmp_works()) return 1;
    kvc_openmp_run(note, &team, 3);
    if (team != 1) return 2;
    kvc_openmp_find();
    if (!kvc_openmp_works()) return 3;
    kvc_openmp_run(note, &team, 3);
    return team == 3 && kvc_openmp_num_threads() == omp_get_max_threads() ? 0 : 4;
}
""")
    if not shutil.which(name):
        pytest.skip(f"there is no {name} here")
    run(name, *FLAGS, "-DKVC_OPENMP_OF_PROCESS", "-c", ROOT / "src/base/openmp.c", "-o", core)
    command = [name, *FLAGS, tmp_path / "main.c", core, OPENMP, *LIBRARIES, "-o", program]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"there is no OpenMP for {name} here")
    subprocess.run([program], env=ENVIRONMENT, check=True)


@needs_openmp
def test_threadpoolctl():
    pytest.importorskip("threadpoolctl")
    code = """
from threadpoolctl import threadpool_info, threadpool_limits
attend()
assert "openmp" in [pool["user_api"] for pool in threadpool_info()]
before = threads()
with threadpool_limits(1):
    attend()
    print(kvcache.get_num_threads(), threads() - before)
print(kvcache.get_num_threads())
"""
    assert run_python(code, OMP_NUM_THREADS="4") == ["1", "0", "4"]


@pytest.mark.hf
@shares_openmp
@pytest.mark.parametrize("order", ["torch, kvcache", "kvcache, torch"])
def test_threads_are_shared_with_torch(order):
    code = """
torch.set_num_threads(3)
torch.rand(1 << 20).sum()
before = threads()
attend(3)
print(threads() - before)
if os.fork() == 0:
    attend(3)
    os._exit(0)
assert os.wait()[1] == 0
"""
    until_shared(code, imports=order)


@shares_openmp
@pytest.mark.parametrize("order", ["sklearn.cluster, kvcache", "kvcache, sklearn.cluster"])
def test_threads_are_shared_with_scikit_learn(order):
    pytest.importorskip("sklearn")
    code = """
sklearn.cluster.KMeans(4, n_init=1).fit(np.random.rand(4000, 8))
before = threads()
attend(2)
print(threads() - before)
"""
    until_shared(code, imports=order, OMP_NUM_THREADS="2")


@pytest.mark.hf
@needs_openmp
@pytest.mark.parametrize(
    "order",
    ["sklearn.cluster, torch, kvcache", pytest.param("kvcache, sklearn.cluster, torch", marks=pytest.mark.slow)],
)
def test_torchs_threads_come_before_scikit_learns(order):
    pytest.importorskip("sklearn")
    code = """
torch.set_num_threads(2)
torch.rand(1 << 20).sum()
before = threads()
attend(2)
print(threads() - before)
"""
    until_shared(code, imports=order)


FORK = """
torch.set_num_threads(3)
torch.rand(1 << 20).sum()
if os.fork():
    sys.exit(os.wait()[1] != 0)
signal.alarm(60)
"""


@pytest.mark.hf
@pytest.mark.parametrize(("imports", "before", "code"), [("torch, kvcache", "", FORK), ("torch", FORK, "")])
def test_a_child_of_a_process_without_caches(imports, before, code):
    """The child has none of the team that its parent had, and must not wait for it, whichever loaded the library."""
    code += """
attend(3)
assert kvcache.get_threading_layer() == "own"
os._exit(0)
"""
    assert run_python(code, imports=f"os, signal, sys, {imports}", before=before) == []
