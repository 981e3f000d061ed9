/* threads.c: the lock, the clock, the number of threads of a call, and calls that end early.  A threading layer is
 * whose threads run the tasks of a call: this library's own, or OpenMP's.  OpenMP may bind its threads to places, which
 * are sets of processors.  A poll is a call of the caller's function that asks whether a call is to end early. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares sched_getaffinity */
#endif
#include "base/threads.h"

#include <ctype.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/compiler.h"
#include "base/environment.h"
#include "base/openmp.h"
#include "base/status.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif

/* ---- whose threads run tasks: OpenMP's or this library's own ----------------------------------------------------- */

static const char *const LAYERS[] = {"own", "openmp"};
#if defined(_OPENMP) || defined(KVC_OPENMP_OF_PROCESS)
enum { OWN, OPENMP, NUM_LAYERS };
#define LAYER_NAMES "own and openmp"
#else
enum { OWN, NUM_LAYERS, OPENMP = NUM_LAYERS }; /* OPENMP: no layer of this build */
#define LAYER_NAMES "own"
#endif

static atomic_int known_layer = -1; /* of the environment; -1: not known yet */

/* Returns the layer that KVCACHE_THREADS names, or -1 if this build lacks it; if it is not set, the build's last one.
 */
static int layer_of_environment(void) {
    const char *name = kvc_environment("KVCACHE_THREADS");
    int layer = NUM_LAYERS - 1;
    while (name && *name && layer >= 0 && strcmp(name, LAYERS[layer]) != 0) layer--;
    return layer;
}

/* Returns the layer of the environment (-1: unknown, read again next time), or OWN if OpenMP's threads do not work. */
static int current_layer(void) {
    int layer = atomic_load(&known_layer);
    if (layer < 0) atomic_store(&known_layer, layer = layer_of_environment());
    return layer == OPENMP && !kvc_openmp_works() ? OWN : layer;
}

kvc_status kvc_threads_check(void) {
    if (current_layer() >= 0) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "KVCACHE_THREADS is %s: this build has " LAYER_NAMES,
                    kvc_environment("KVCACHE_THREADS"));
}

int kvc_uses_openmp(void) { return current_layer() == OPENMP; }

const char *kvc_threading_layer(void) {
    const int layer = current_layer();
    return layer < 0 ? NULL : LAYERS[layer];
}

/* ---- the number of threads: OMP_NUM_THREADS, or the physical cores this process may use -------------------------- */

static atomic_int chosen_threads; /* by kvc_set_num_threads; 0: none */

kvc_status kvc_set_num_threads(int32_t num_threads) {
    if (num_threads < 0 || num_threads > KVC_MOST_THREADS)
        return kvc_fail(KVC_ERR_INVALID, "num_threads is %d: it must be between 1 and %d, or 0 for the default",
                        num_threads, KVC_MOST_THREADS);
    atomic_store(&chosen_threads, num_threads);
    return KVC_OK;
}

static int online_processors(void) {
#if defined(_WIN32)
    return (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
#else
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

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

/* Counts the processors this process may run on, one for each core: hyperthreads share the path to memory.  If OpenMP
 * binds its threads, counts their places: the calling thread may then run on one place alone. */
static int allowed_cores(void) {
    const int places = kvc_openmp_num_places();
    if (places > 0) return places;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return online_processors();
    int cores = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list", cpu);
        const long first = read_number(path);
        /* Counts the first processor of a core that is allowed, or each if the file says nothing. */
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

int kvc_usable_cores(void) {
    const int cores = allowed_cores(), quota = quota_cores();
    return quota && quota < cores ? quota : cores;
}
#elif defined(_WIN32)
/* Counts the cores that the process's affinity allows, which Windows says for up to 64 processors (one group). */
int kvc_usable_cores(void) {
    DWORD_PTR allowed = 0, all = 0;
    DWORD size = 0;
    int cores = 0;
    if (GetActiveProcessorGroupCount() > 1 || !GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all))
        allowed = (DWORD_PTR)-1;
    GetLogicalProcessorInformationEx(RelationProcessorCore, NULL, &size);
    char *const list = malloc(size ? size : 1);
    if (list && GetLogicalProcessorInformationEx(RelationProcessorCore, (void *)list, &size))
        for (DWORD i = 0; i < size;) {
            const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *core = (const void *)(list + i);
            cores += (core->Processor.GroupMask[0].Mask & allowed) != 0;
            i += core->Size;
        }
    free(list);
    return cores ? cores : online_processors();
}
#elif defined(__APPLE__)
/* Counts the fast cores alone (perflevel0) if a processor has slow ones too: threads on fast cores would have to wait
 * for threads on slow ones at the end of each call. */
int kvc_usable_cores(void) {
    int cores = 0;
    size_t size = sizeof cores;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &cores, &size, NULL, 0) == 0 && cores > 0) return cores;
    size = sizeof cores;
    if (sysctlbyname("hw.physicalcpu", &cores, &size, NULL, 0) == 0 && cores > 0) return cores;
    return online_processors();
}
#else
int kvc_usable_cores(void) { return online_processors(); }
#endif

/* Returns the first number in a variable of OpenMP, which may be a list with a number for each level of nesting.
 * Returns 0 if there is no number from 1 to KVC_MOST_THREADS. */
static int32_t number_of_environment(const char *name) {
    const char *value = kvc_environment(name);
    if (!value) return 0;
    char *end;
    const long number = strtol(value, &end, 10);
    while (isspace((unsigned char)*end)) end++;
    return end != value && (!*end || *end == ',') && number > 0 && number <= KVC_MOST_THREADS ? (int32_t)number : 0;
}

static int32_t default_threads(void) {
    static atomic_int known; /* every thread stores the same value */
    int32_t number = atomic_load(&known);
    if (!number) {
        number = number_of_environment("OMP_NUM_THREADS");
        if (!number) number = kvc_usable_cores();
        if (number < 1) number = 1;
        if (number > KVC_MOST_THREADS) number = KVC_MOST_THREADS;
        atomic_store(&known, number);
    }
    return number;
}

int32_t kvc_thread_limit(void) {
    static atomic_int known; /* for own threads; every thread stores the same value */
    if (kvc_uses_openmp()) return kvc_openmp_thread_limit();
    int32_t limit = atomic_load(&known);
    if (!limit) {
        limit = number_of_environment("OMP_THREAD_LIMIT");
        if (!limit) limit = KVC_MOST_THREADS;
        atomic_store(&known, limit);
    }
    return limit;
}

static atomic_int forked; /* this process is the child of a fork() */

void kvc_threads_forked(void) { atomic_store(&forked, 1); }

int kvc_is_alone(void) { return atomic_load(&forked) || kvc_openmp_in_region(); }

int32_t kvc_num_threads(void) {
    if (kvc_is_alone()) return 1;
    const int32_t chosen = atomic_load(&chosen_threads), number = chosen ? chosen : default_threads();
    const int32_t most = !chosen && kvc_uses_openmp() ? kvc_openmp_num_threads() : kvc_thread_limit();
    return number < most ? number : most;
}

/* ---- waiting for a time ------------------------------------------------------------------------------------------ */

static const int64_t SECOND = 1000000000; /* in nanoseconds */

int64_t kvc_now(void) {
#if defined(_WIN32)
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    const int64_t second = frequency.QuadPart; /* some GHz: a remainder times SECOND fits 64 bits */
    return count.QuadPart / second * SECOND + count.QuadPart % second * SECOND / second;
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

void kvc_nap(void) {
#if defined(_WIN32)
    Sleep(1);
#else
    nanosleep(&(struct timespec){0, 1000}, NULL);
#endif
}

void kvc_signal_wait_until(kvc_signal *s, kvc_mutex *m, int64_t time) {
    const int64_t start = kvc_now(), longest = 3600 * SECOND;
    const int64_t wait = time - start < longest ? time - start : longest;
    if (wait <= 0) return;
#if defined(_WIN32)
    SleepConditionVariableSRW(s, m, (DWORD)((wait + 999999) / 1000000), 0);
#elif defined(__APPLE__)
    pthread_cond_timedwait_relative_np(s, m, &(struct timespec){wait / SECOND, wait % SECOND});
#else
    const int64_t end = start + wait;
    pthread_cond_timedwait(s, m, &(struct timespec){(time_t)(end / SECOND), (long)(end % SECOND)});
#endif
}

/* ---- calls that end early ---------------------------------------------------------------------------------------- */

static KVC_THREAD_LOCAL char thread_mark; /* its address identifies the thread */

enum { POLL_NS = 40000000 }; /* between two polls */

void kvc_poll_timer_init(kvc_poll_timer *timer, kvc_poll_fn *poll, void *user) {
    timer->poll = poll;
    timer->user = user;
    timer->caller = &thread_mark;
    timer->next = poll ? kvc_now() + POLL_NS : 0;
    atomic_init(&timer->stopped, 0);
}

int kvc_poll_timer_was_stopped(const kvc_poll_timer *timer) {
    return atomic_load_explicit(&timer->stopped, memory_order_relaxed);
}

int kvc_poll_timer_is_due(const kvc_poll_timer *timer) {
    if (!timer->poll || kvc_poll_timer_was_stopped(timer) || timer->caller != &thread_mark) return 0;
    return kvc_now() >= timer->next || KVC_BUGGIFY();
}

int kvc_poll_timer_ask(kvc_poll_timer *timer) {
    return kvc_poll_timer_is_due(timer) ? kvc_poll_timer_poll(timer) : kvc_poll_timer_was_stopped(timer);
}

int kvc_poll_timer_poll(kvc_poll_timer *timer) {
    const int stop = timer->poll(timer->user) != 0;
    if (stop) atomic_store_explicit(&timer->stopped, 1, memory_order_relaxed);
    timer->next = kvc_now() + POLL_NS;
    return stop;
}
