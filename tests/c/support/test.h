/* test.h: what the C tests share.  A test is one program; it fails by returning test_result(). */
#ifndef KVC_TEST_H
#define KVC_TEST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache.h"

static int test_failures;

/* Counts a condition that does not hold, and prints the first ones: CHECK(n == 3), CHECKF(n == 3, "n is %d", n). */
#define CHECK(condition) CHECKF(condition, "failed")
#define CHECKF(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition) && test_failures++ < 20) {                                                                    \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                     \
            printf(__VA_ARGS__);                                                                                       \
            putchar('\n');                                                                                             \
        }                                                                                                              \
    } while (0)

/* Checks that a call fails with this status, and a sentence with these parts: the argument and its value. */
#define CHECK_FAILS(call, status, name, value)                                                                         \
    do {                                                                                                               \
        kvc_status got_ = call;                                                                                        \
        const char *text_ = kvc_last_error();                                                                          \
        CHECKF(got_ == (status) && strstr(text_, name) && strstr(text_, value), "%s: %s", kvc_strerror(got_), text_);  \
    } while (0)

static inline int test_result(void)
{
    if (test_failures)
        printf("%d checks failed\n", test_failures);
    return test_failures != 0;
}

/* Whether a part is enough of what repeats itself, such as sizes: in `pytest` without --slow. */
static inline int is_quick(void)
{
    const char *part = getenv("KVCACHE_TEST_PART");
    return part && !strcmp(part, "quick");
}

/* Whether all is to be tested: in `pytest --full`, and in a program that is started by hand. */
static inline int is_full(void) { return !getenv("KVCACHE_TEST_PART"); }

/* 64 random bits (splitmix64); every run sees the same. */
static inline uint64_t random_bits(void)
{
    static uint64_t state = 1;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* A random integer of [begin, end). */
static inline int random_int(int begin, int end)
{
    return begin + (int)(random_bits() % (uint64_t)(end - begin));
}

/* A random number of [-1, 1). */
static inline float random_float(void)
{
    return (float)(random_bits() >> 40) * 0x1p-23f - 1;
}

#endif
