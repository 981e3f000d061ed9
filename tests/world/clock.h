/* clock.h: the core's clock is the world's, for drivers of one thread, which the linker diverts to it. */
#ifndef WORLD_CLOCK_H
#define WORLD_CLOCK_H

#include <time.h>

#include "world.h"

int __wrap_clock_gettime(clockid_t which, struct timespec *now);
int __wrap_clock_gettime(clockid_t which, struct timespec *now) {
    (void)which;
    now->tv_sec = 1000 + w.o.ms / 1000;
    now->tv_nsec = w.o.ms % 1000 * 1000000;
    return 0;
}

#endif
