/* clock.h: seconds.  Define _GNU_SOURCE before the first header. */
#ifndef KVC_BENCH_CLOCK_H
#define KVC_BENCH_CLOCK_H

#include <time.h>

static inline double read_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double now(void) { return read_clock(CLOCK_MONOTONIC); }
static inline double processor(void) { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

#endif
