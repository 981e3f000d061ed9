/* threads.c: see threads.h. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares sched_getaffinity */
#endif
#include "base/threads.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/compiler.h"
#include "base/status.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

/* ---- the number of threads: OMP_NUM_THREADS, or the physical cores this process may use -------------------------- */

static atomic_int chosen_threads; /* by kvc_set_num_threads; 0: none */

kvc_status kvc_set_num_threads(int32_t num_threads) {
    if (num_threads < 0 || num_threads > KVC_MOST_THREADS)
        return kvc_fail(KVC_ERR_INVALID, "num_threads is %d: it must be between 1 and %d, or 0 for the default",
                        num_threads, KVC_MOST_THREADS);
    atomic_store(&chosen_threads, num_threads);
    return KVC_OK;
}

#if defined(_OPENMP)

#if defined(__linux__)
/* Returns the first number in a file, or -1. */
static long read_number(const char *path) {
    long number = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    if (fscanf(file, "%ld", &number) != 1) number = -1;
    fclose(file);
    return number;
}

/* Counts the processors this process may run on, one for each core: hyperthreads share the path to memory. */
static int allowed_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return omp_get_num_procs();
    int cores = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list", cpu);
        const long first = read_number(path);
        if (first < 0 || (size_t)first == cpu || first >= CPU_SETSIZE || !CPU_ISSET((size_t)first, &allowed)) cores++;
    }
    return cores;
}

/* Returns how many processors' time the control group grants, rounded up; 0: no limit. */
static int quota_cores(void) {
    long quota = -1, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r"); /* version 2 */
    if (file) {
        if (fscanf(file, "%ld %ld", &quota, &period) != 2) quota = -1;
        fclose(file);
    } else {
        quota = read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
        period = read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    }
    return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

static int usable_cores(void) {
    const int cores = allowed_cores(), quota = quota_cores();
    return quota && quota < cores ? quota : cores;
}
#else
static int usable_cores(void) { return omp_get_num_procs(); }
#endif

static int32_t default_threads(void) {
    if (getenv("OMP_NUM_THREADS")) return omp_get_max_threads();
    static atomic_int cores; /* every thread stores the same value */
    int known = atomic_load(&cores);
    if (!known) {
        known = usable_cores();
        if (known < 1) known = 1;
        atomic_store(&cores, known);
    }
    return known;
}

/* Whether this process is the child of a fork().  It lacks the threads of its parent's OpenMP pool, and would wait for
 * them for ever. */
static atomic_int forked;

void kvc_threads_forked(void) { atomic_store(&forked, 1); }

int32_t kvc_num_threads(void) {
    if (omp_in_parallel() || atomic_load(&forked)) return 1;
    const int32_t chosen = atomic_load(&chosen_threads);
    return chosen ? chosen : default_threads();
}

/* ---- parallel loops ---------------------------------------------------------------------------------------------- */

void kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context) {
    if (num_threads > num_tasks) num_threads = (int32_t)num_tasks;
    if (num_threads <= 1 || omp_in_parallel() || atomic_load(&forked)) {
        for (int64_t i = 0; i < num_tasks; i++) task(context, i);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t i = 0; i < num_tasks; i++) task(context, i);
}

#else /* no OpenMP */

void kvc_threads_forked(void) {}

int32_t kvc_num_threads(void) { return 1; }

void kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context) {
    (void)num_threads;
    for (int64_t i = 0; i < num_tasks; i++) task(context, i);
}

#endif

/* ---- waiting for a time ------------------------------------------------------------------------------------------ */

static const int64_t SECOND = 1000000000; /* in nanoseconds */

int64_t kvc_now(void) {
#if defined(_WIN32)
    return (int64_t)GetTickCount64() * 1000000;
#else
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
#endif
}

#if defined(__APPLE__)
int kvc_signal_init(kvc_signal *s) { return pthread_cond_init(s, NULL); }
#elif !defined(_WIN32)
int kvc_signal_init(kvc_signal *s) {
    pthread_condattr_t clock;
    int failed = pthread_condattr_init(&clock);
    if (failed) return failed;
    failed = pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    if (!failed) failed = pthread_cond_init(s, &clock);
    pthread_condattr_destroy(&clock);
    return failed;
}
#endif

void kvc_signal_wait_until(kvc_signal *s, kvc_mutex *m, int64_t time) {
    const int64_t start = kvc_now(), longest = 3600 * SECOND;
    const int64_t wait = time - start < longest ? time - start : longest;
    if (wait <= 0) return;
#if defined(_WIN32)
    SleepConditionVariableSRW(s, m, (DWORD)((wait + 999999) / 1000000), 0);
#elif defined(__APPLE__)
    pthread_cond_timedwait_relative_np(s, m, &(struct timespec){wait / SECOND, wait % SECOND});
#else
    pthread_cond_timedwait(s, m, &(struct timespec){(start + wait) / SECOND, (start + wait) % SECOND});
#endif
}

/* ---- calls that end early ---------------------------------------------------------------------------------------- */

static KVC_THREAD_LOCAL char thread_mark; /* its address identifies the thread */

enum { POLL_NS = 40000000 }; /* between two polls */

void kvc_watch_init(kvc_watch *watch, kvc_poll_fn *poll, void *user) {
    watch->poll = poll;
    watch->user = user;
    watch->caller = &thread_mark;
    watch->next = poll ? kvc_now() + POLL_NS : 0;
    atomic_init(&watch->stopped, 0);
}

int kvc_watch_ask(kvc_watch *watch) {
    if (!watch->poll) return 0;
    if (atomic_load_explicit(&watch->stopped, memory_order_relaxed)) return 1;
    if (watch->caller != &thread_mark || kvc_now() < watch->next) return 0;
    const int stop = watch->poll(watch->user) != 0;
    if (stop) atomic_store_explicit(&watch->stopped, 1, memory_order_relaxed);
    watch->next = kvc_now() + POLL_NS;
    return stop;
}
