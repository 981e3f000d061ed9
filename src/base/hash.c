/* hash.c: see hash.h.  Written from the specification of XXH64 in xxHash's doc/xxhash_spec.md. */
#include "base/hash.h"

#include <string.h>

#define PRIME_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME_3 UINT64_C(0x165667B19E3779F9)
#define PRIME_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME_5 UINT64_C(0x27D4EB2F165667C5)

enum {
    LANES = 4,
    STRIPE = 8 * LANES, /* bytes */
    AHEAD = 1024        /* bytes; from memory, the sums alone would have too few lines on their way: half as fast */
};

#if defined(__GNUC__)
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) (void)(p)
#endif

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t read_64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint32_t read_32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint64_t mix(uint64_t sum, uint64_t lane) { return rotate(sum + lane * PRIME_2, 31) * PRIME_1; }

static inline uint64_t merge(uint64_t sum, uint64_t lane) { return (sum ^ mix(0, lane)) * PRIME_1 + PRIME_4; }

/* Returns the sum of all whole stripes; there is at least one. */
static uint64_t hash_stripes(const uint8_t *p, size_t num_stripes, uint64_t seed) {
    uint64_t a = seed + PRIME_1 + PRIME_2, b = seed + PRIME_2, c = seed, d = seed - PRIME_1;
    for (; num_stripes; num_stripes--, p += STRIPE) {
        PREFETCH((const char *)((uintptr_t)p + AHEAD)); /* perhaps past the end, which does no harm */
        a = mix(a, read_64(p));
        b = mix(b, read_64(p + 8));
        c = mix(c, read_64(p + 16));
        d = mix(d, read_64(p + 24));
    }
    const uint64_t sum = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    return merge(merge(merge(merge(sum, a), b), c), d);
}

uint64_t kvc_hash(const void *data, size_t size, uint64_t seed) {
    const uint8_t *p = data, *end = p + size;
    uint64_t sum = size >= STRIPE ? hash_stripes(p, size / STRIPE, seed) : seed + PRIME_5;
    p += size / STRIPE * STRIPE;
    sum += size;
    for (; end - p >= 8; p += 8) sum = rotate(sum ^ mix(0, read_64(p)), 27) * PRIME_1 + PRIME_4;
    if (end - p >= 4) {
        sum = rotate(sum ^ read_32(p) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        p += 4;
    }
    for (; p < end; p++) sum = rotate(sum ^ *p * PRIME_5, 11) * PRIME_1;
    sum = (sum ^ sum >> 33) * PRIME_2;
    sum = (sum ^ sum >> 29) * PRIME_3;
    return sum ^ sum >> 32;
}
