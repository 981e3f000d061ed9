/* hash.c: the checksum of saved states.  Written from the specification of XXH64 in xxHash's doc/xxhash_spec.md.  Bytes
 * are added in stripes of 32, eight bytes to each of four sums, the lanes.  The rest is added at the end. */
#include "base/hash.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define PRIME_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME_3 UINT64_C(0x165667B19E3779F9)
#define PRIME_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME_5 UINT64_C(0x27D4EB2F165667C5)

enum {
    STRIPE = 32, /* bytes; eight for each lane */
    AHEAD = 1024 /* bytes; from memory, the sums alone would have too few lines on their way: half as fast */
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

/* ---- stripes ----------------------------------------------------------------------------------------------------- */

#if defined(__SSE2__)
enum { CAN_STREAM = 1 };
static inline void stream(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < STRIPE; i += 16)
        _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
}
static inline void end_stream(void) { _mm_sfence(); } /* other threads see what was streamed before what follows */
#else
enum { CAN_STREAM = 0 };
static inline void stream(const uint8_t *from, uint8_t *to) { (void)from, (void)to; }
static inline void end_stream(void) {}
#endif

/* Adds whole stripes to the sums; streams them to `to` as well unless it is NULL. */
static inline void add_stripes(uint64_t lanes[4], const uint8_t *p, size_t size, uint8_t *to) {
    uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    for (const uint8_t *end = p + size; p < end; p += STRIPE) {
        PREFETCH((const char *)((uintptr_t)p + AHEAD)); /* perhaps past the end, which does no harm */
        a = mix(a, read_64(p));
        b = mix(b, read_64(p + 8));
        c = mix(c, read_64(p + 16));
        d = mix(d, read_64(p + 24));
        if (!to) continue;
        stream(p, to);
        to += STRIPE;
    }
    lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d;
}

static void add_and_copy(uint64_t lanes[4], const uint8_t *p, size_t size, uint8_t *to) {
    if (to && CAN_STREAM && (uintptr_t)to % 16 == 0) {
        add_stripes(lanes, p, size, to);
        end_stream();
        return;
    }
    add_stripes(lanes, p, size, /* to */ NULL);
    if (to) memcpy(to, p, size);
}

/* ---- the hash ---------------------------------------------------------------------------------------------------- */

void kvc_hash_begin(kvc_hasher *hasher, uint64_t seed) {
    *hasher = (kvc_hasher){.lanes = {seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1}, .seed = seed};
}

void kvc_hash_add(kvc_hasher *hasher, const void *data, size_t size, void *copy) {
    const uint8_t *p = data;
    uint8_t *to = copy;
    const size_t held = (size_t)(hasher->size % STRIPE), room = STRIPE - held, first = size < room ? size : room;
    hasher->size += size;
    if (held) {
        memcpy(hasher->rest + held, p, first);
        if (to) memcpy(to, p, first);
        if (first < room) return;
        add_stripes(hasher->lanes, hasher->rest, STRIPE, /* to */ NULL);
        p += first;
        to = to ? to + first : NULL;
        size -= first;
    }
    const size_t whole = size / STRIPE * STRIPE;
    add_and_copy(hasher->lanes, p, whole, to);
    memcpy(hasher->rest, p + whole, size - whole);
    if (to) memcpy(to + whole, p + whole, size - whole);
}

/* Returns the sum of all stripes, of which there is one or more. */
static uint64_t sum_lanes(const uint64_t lanes[4]) {
    uint64_t sum = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (int i = 0; i < 4; i++) sum = merge(sum, lanes[i]);
    return sum;
}

uint64_t kvc_hash_end(const kvc_hasher *hasher) {
    const uint8_t *p = hasher->rest, *end = p + hasher->size % STRIPE;
    uint64_t sum = hasher->size >= STRIPE ? sum_lanes(hasher->lanes) : hasher->seed + PRIME_5;
    sum += hasher->size;
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

uint64_t kvc_hash(const void *data, size_t size, uint64_t seed) {
    kvc_hasher hasher;
    kvc_hash_begin(&hasher, seed);
    kvc_hash_add(&hasher, data, size, /* copy */ NULL);
    return kvc_hash_end(&hasher);
}
