/* driver.h: what the C sources of the benchmarks share.  Include it before any other header.
 *
 * Functions marked EXPORT are called from Python, which reads their types from their declarations (compiling.py).  Each
 * stands on lines of its own, and writes the seconds of each of its repetitions. */
#ifndef KVC_BENCH_DRIVER_H
#define KVC_BENCH_DRIVER_H

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime, MAP_ANONYMOUS */
#endif
#include <stdlib.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                          \
    do {                                   \
        const kvc_status status_ = (call); \
        if (status_) return status_;       \
    } while (0)

static inline double read_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double now(void) { return read_clock(CLOCK_MONOTONIC); }

static inline void *allocate(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p) abort();
    return p;
}

#endif
