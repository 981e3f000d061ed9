"""Test the threads of the installed library: they end with it, and are torch's where torch has some."""

import subprocess
import sys

import pytest
from support.compiling import compiler, run

import kvcache

PROGRAM = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
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
    if (num_threads() != 4) return 3;
    return kvc_commit_(batch) || kvc_cache_free_(cache) ? 4 : 0;
}

int main(int count, char **arguments) {
    for (int i = 0; i < 20 * (count == 2); i++) {
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return puts(dlerror()), 5;
        if (i % 2) usleep(1000); /* threads sleep in the one round, and spin in the other */
        const int failed = use(library);
        if (failed) return failed;
        dlclose(library);
        if (dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD)) return 6;
        if (num_threads() != 1) return 7;
    }
    return 0;
}
"""

SHARING = """
import os, sys
import torch
import numpy as np
import kvcache

torch.set_num_threads(3)
x = torch.rand(1 << 20)
x.sum()
before = len(os.listdir("/proc/self/task"))
cache = kvcache.KVCache(1, 4, 64, 600, num_threads=3)
rows = np.ones((600, 4, 64), np.float32)
with cache.batch(600) as batch:
    batch.attend(0, rows, rows, rows)
assert len(os.listdir("/proc/self/task")) == before, "the call started threads beside torch's"
if os.fork() == 0:
    cache.remove(0)
    with cache.batch(600) as batch:
        batch.attend(0, rows, rows, rows)
    os._exit(0)
assert os.wait()[1] == 0
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


def test_threads_end_when_the_library_is_unloaded(tmp_path):
    (tmp_path / "unload.c").write_text(PROGRAM)
    run(*compiler(), f"-I{kvcache.get_include()}", tmp_path / "unload.c", "-ldl", "-o", tmp_path / "unload")
    run(tmp_path / "unload", kvcache.get_library())


def test_threads_are_shared_with_torch():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-Pc", SHARING], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
