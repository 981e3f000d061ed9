/* time.h: short waits, for the tests in C. */
#include_next <time.h>

#ifndef TEST_WINDOWS_TIME_H
#define TEST_WINDOWS_TIME_H

#include <windows.h>

/* Waits; MinGW's own function ignores everything below a millisecond. */
static inline int sleep_for(const struct timespec *time, struct timespec *left) {
    LARGE_INTEGER frequency, start, now;
    (void)left;
    QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&start);
    const double wait = (double)time->tv_sec + (double)time->tv_nsec * 1e-9;
    do {
        SwitchToThread();
        QueryPerformanceCounter(&now);
    } while ((double)(now.QuadPart - start.QuadPart) < wait * (double)frequency.QuadPart);
    return 0;
}

#undef nanosleep
#define nanosleep sleep_for

#endif
