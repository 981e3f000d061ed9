/* test.h: what the C tests share.  A test is one program; it fails by returning test_result(). */
#ifndef KVC_TEST_H
#define KVC_TEST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache.h"

static int test_failures;

#ifndef TEST_STOPS /* not 0: a program ends at the first failed check, for who asks only whether one fails */
#define TEST_STOPS 0
#endif

/* Counts a condition that does not hold, and prints the first ones: CHECK(n == 3), CHECKF(n == 3, "n is %d", n). */
#define CHECK(condition) CHECKF(condition, "failed")
#define CHECKF(condition, ...)                                     \
    do {                                                           \
        if (!(condition) && test_failures++ < 20) {                \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            putchar('\n');                                         \
            if (TEST_STOPS) _Exit(1);                              \
        }                                                          \
    } while (0)

/* Checks that a call fails with this status, and a sentence with these parts: the argument and its value. */
#define CHECK_FAILS(call, status, name, value)                                                                        \
    do {                                                                                                              \
        kvc_status got_ = call;                                                                                       \
        const char *text_ = kvc_last_error();                                                                         \
        CHECKF(got_ == (status) && strstr(text_, name) && strstr(text_, value), "%s: %s", kvc_strerror(got_), text_); \
    } while (0)

/* Makes a cache of these layers, otherwise as `config` says; its sizes are filled in. */
static inline kvc_cache *cache_of(const kvc_layer *layers, int32_t num_layers, kvc_config config) {
    kvc_cache *cache = NULL;
    config.struct_size = sizeof config;
    config.layers = layers;
    config.layer_size = sizeof *layers;
    config.num_layers = num_layers;
    CHECKF(kvc_cache_new(&config, &cache) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

/* Describes floats for kvc_put: k is [n][heads][k_dim], and v alike; n = 0: of all tokens from `first` on. */
static inline kvc_put_args float_rows(int32_t first, int32_t n, int64_t heads, int64_t k_dim, int64_t v_dim,
                                      const void *k, const void *v) {
    const int64_t size = sizeof(float);
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .first = first,
                          .num_tokens = n,
                          .k = k,
                          .v = v,
                          .k_token_stride = heads * k_dim * size,
                          .k_head_stride = k_dim * size,
                          .v_token_stride = heads * v_dim * size,
                          .v_head_stride = v_dim * size};
}

/* Describes floats for kvc_attend: q is [n][heads][k_dim], out [n][heads][v_dim]. */
static inline kvc_attend_args float_queries(int64_t heads, int64_t k_dim, int64_t v_dim, const void *q, void *out) {
    const int64_t size = sizeof(float);
    return (kvc_attend_args){.struct_size = sizeof(kvc_attend_args),
                             .q = q,
                             .out = out,
                             .q_token_stride = heads * k_dim * size,
                             .q_head_stride = k_dim * size,
                             .out_token_stride = heads * v_dim * size,
                             .out_head_stride = v_dim * size};
}

/* Describes rows of zeros for kvc_put; n = 0: of all tokens from `first` on.  Rows that are put may overlap: a token
 * begins one float behind the token before it. */
static inline kvc_put_args zero_rows(int32_t first, int32_t n) {
    static float zeros[1 << 20];
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .first = first,
                          .num_tokens = n,
                          .k = zeros,
                          .v = zeros,
                          .k_token_stride = sizeof *zeros,
                          .v_token_stride = sizeof *zeros};
}

static inline void put_floats(kvc_batch *batch, int32_t layer, int32_t first, int32_t n, int64_t heads, int64_t k_dim,
                              int64_t v_dim, const void *k, const void *v) {
    const kvc_put_args args = float_rows(first, n, heads, k_dim, v_dim, k, v);
    CHECKF(kvc_put(batch, layer, &args) == KVC_OK, "%s", kvc_last_error());
}

static inline kvc_stats stats_in(kvc_cache *cache) {
    kvc_stats stats;
    kvc_get_stats(cache, &stats, sizeof stats);
    return stats;
}

/* Returns the largest position of a sequence in any layer; -1 if it holds nothing. */
static inline int32_t last_position(kvc_cache *cache, int64_t seq_id) {
    int32_t first = 0, last = 0;
    CHECK(kvc_position_range(cache, seq_id, -1, &first, &last) == KVC_OK);
    return last;
}

static inline int test_result(void) {
    if (test_failures) printf("%d checks failed\n", test_failures);
    return test_failures != 0;
}

#if defined(_WIN32)
enum { HAS_FORK = 0 };
#else
enum { HAS_FORK = 1 };
#endif

#if defined(__ELF__)
extern void __gcov_dump(void) __attribute__((weak)); /* of a program that counts: coverage.py */
#else
static void (*const __gcov_dump)(void) = NULL;
#endif

/* Ends a child of fork() as _exit does, and keeps what was counted there. */
static inline void end_child(int status) {
    if (__gcov_dump) __gcov_dump();
    _Exit(status);
}

/* Whether all is to be tested of what repeats itself, such as sizes: in `pytest --full`, and in a program that is started
 * by hand. */
static inline int is_full(void) { return !getenv("KVCACHE_TEST_PART"); }

static uint64_t random_state = 1; /* set to an earlier state, it gives the same numbers again */

/* Returns whether a program was called with a seed, from which its random steps begin; nothing else of it runs then. */
static inline int has_seed(int argc, char **argv) {
    if (argc > 1) random_state = strtoull(argv[1], NULL, 10);
    return argc > 1;
}

/* The input of a fuzzer, which decides instead of chance, two bytes at a time. */
static const uint8_t *decisions;
static size_t num_decisions; /* bytes that are left */

/* 64 random bits (splitmix64); every run sees the same. */
static inline uint64_t random_bits(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    if (num_decisions >= 2) {
        z = decisions[0] | (uint64_t)decisions[1] << 8;
        decisions += 2;
        num_decisions -= 2;
    }
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* A random integer of [begin, end). */
static inline int random_int(int begin, int end) { return begin + (int)(random_bits() % (uint64_t)(end - begin)); }

/* A number of [-1, 1) for element d of a row; what: 0 to 3, as keys, values and queries hold different ones. */
static inline float element_of(int what, int64_t id, int32_t position, int d) {
    uint32_t x = (uint32_t)position * 0x9e3779b1u + (uint32_t)(id * 4 + what) * 0x7feb352du + (uint32_t)d * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return (float)((x ^ x >> 15) >> 8) * 0x1p-23f - 1;
}

/* A random number of [-1, 1). */
static inline float random_float(void) { return (float)(random_bits() >> 40) * 0x1p-23f - 1; }

#endif
