/* yardstick.c: measures how fast this machine copies, reads, multiplies and adds, which figures are divided by.
 *
 * Threads wait as the cache's do (kvc_parallel), so that neither's spin while the other is measured. */
#include "driver.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "base/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
#endif

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { HUGE_PAGE = 2 << 20, COLLAPSE = 25 /* MADV_COLLAPSE, which older headers lack */ };

static size_t whole_pages(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

/* Maps memory at a multiple of 2 MiB and writes to every page.  Returns NULL without memory.  With `huge`, small pages
 * are joined to huge ones where the system can, as the cache does with pages that are filled. */
EXPORT void *ys_map(size_t bytes, int huge) {
    bytes = whole_pages(bytes);
    char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(p, before);
    p += before;
    munmap(p + bytes, HUGE_PAGE - before);
    for (size_t i = 0; i < bytes; i += 64) p[i] = (char)(i >> 12);
    if (huge) madvise(p, bytes, COLLAPSE);
    return p;
}

EXPORT void ys_unmap(void *p, size_t bytes) { munmap(p, whole_pages(bytes)); }

/* ---- copying ----------------------------------------------------------------------------------------------------- */

typedef struct copying {
    char *dst;
    const char *src;
    size_t n, part; /* bytes: in all, of each thread */
} copying;

static void copy_part(void *context, int64_t t) {
    const copying *c = context;
    const size_t begin = (size_t)t * c->part, rest = begin < c->n ? c->n - begin : 0;
    if (rest) memcpy(c->dst + begin, c->src + begin, rest < c->part ? rest : c->part);
}

/* Copies n bytes by memcpy, each thread an equal part. */
EXPORT void ys_copy(void *dst, const void *src, size_t n, int threads, int reps, double *seconds) {
    copying c = {dst, src, n, (n / (size_t)threads + 63) / 64 * 64};
    if (threads == 1) c.part = n;
    for (int r = 0; r < reps; r++) {
        const double start = now();
        kvc_parallel(threads, threads, copy_part, &c);
        seconds[r] = now() - start;
    }
}

/* ---- reading: several loops, of which the caller takes the fastest ----------------------------------------------- */

/* Reads n bytes, a multiple of 4,096 * STREAMS.  Returns a number that depends on every byte. */
typedef uint64_t read_fn(const char *p, size_t n);

/* Defines a loop that reads STREAMS equal stretches side by side, 64 bytes of each at a time, so that several OS pages
 * are in flight.  It prefetches PREFETCH bytes ahead (past the end does no harm), or nothing if that is 0. */
#define READER(name, ATTRIBUTES, vec, zero, load, add, STREAMS, PREFETCH)        \
    ATTRIBUTES static uint64_t name(const char *p, size_t n) {                   \
        vec sum[4] = {zero, zero, zero, zero};                                   \
        const size_t stretch = n / (STREAMS), step = sizeof(vec);                \
        for (size_t i = 0; i < stretch; i += 4 * step)                           \
            for (size_t s = 0; s < (STREAMS); s++) {                             \
                const char *at = p + s * stretch + i;                            \
                for (size_t line = 0; (PREFETCH) && line < 4 * step; line += 64) \
                    __builtin_prefetch(at + (PREFETCH) + line);                  \
                sum[0] = add(sum[0], load((const void *)at));                    \
                sum[1] = add(sum[1], load((const void *)(at + step)));           \
                sum[2] = add(sum[2], load((const void *)(at + 2 * step)));       \
                sum[3] = add(sum[3], load((const void *)(at + 3 * step)));       \
            }                                                                    \
        const vec all = add(add(sum[0], sum[1]), add(sum[2], sum[3]));           \
        uint64_t lanes[sizeof(vec) / 8], result = 0;                             \
        memcpy(lanes, &all, sizeof all);                                         \
        for (size_t i = 0; i < sizeof(vec) / 8; i++) result += lanes[i];         \
        return result;                                                           \
    }

#define READERS(name, ATTRIBUTES, vec, zero, load, add)              \
    READER(name##_1_0, ATTRIBUTES, vec, zero, load, add, 1, 0)       \
    READER(name##_1_1k, ATTRIBUTES, vec, zero, load, add, 1, 1024)   \
    READER(name##_1_4k, ATTRIBUTES, vec, zero, load, add, 1, 4096)   \
    READER(name##_1_16k, ATTRIBUTES, vec, zero, load, add, 1, 16384) \
    READER(name##_4_0, ATTRIBUTES, vec, zero, load, add, 4, 0)       \
    READER(name##_4_512, ATTRIBUTES, vec, zero, load, add, 4, 512)   \
    READER(name##_4_2k, ATTRIBUTES, vec, zero, load, add, 4, 2048)

#define READERS_LISTED(name, supported)                                                                            \
    {#name ", 1 stream", name##_1_0, supported}, {#name ", 1 stream, 1 KiB ahead", name##_1_1k, supported},        \
        {#name ", 1 stream, 4 KiB ahead", name##_1_4k, supported},                                                 \
        {#name ", 1 stream, 16 KiB ahead", name##_1_16k, supported}, {#name ", 4 streams", name##_4_0, supported}, \
        {#name ", 4 streams, 512 B ahead", name##_4_512, supported}, {                                             \
        #name ", 4 streams, 2 KiB ahead", name##_4_2k, supported                                                   \
    }

static int any(void) { return 1; }

#if defined(__x86_64__)
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static int has_avx512(void) { return __builtin_cpu_supports("avx512f"); }
READERS(sse2, , __m128i, _mm_setzero_si128(), _mm_loadu_si128, _mm_add_epi64)
READERS(avx2, AVX2, __m256i, _mm256_setzero_si256(), _mm256_loadu_si256, _mm256_add_epi64)
READERS(avx512, AVX512, __m512i, _mm512_setzero_si512(), _mm512_loadu_si512, _mm512_add_epi64)
#else
static uint64_t load_word(const void *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}
static uint64_t add_words(uint64_t x, uint64_t y) { return x + y; }
READERS(plain, , uint64_t, 0, load_word, add_words)
#endif

static const struct {
    const char *name;
    read_fn *read;
    int (*supported)(void);
} readers[] = {
#if defined(__x86_64__)
    READERS_LISTED(sse2, any), READERS_LISTED(avx2, has_avx2), READERS_LISTED(avx512, has_avx512)
#else
    READERS_LISTED(plain, any)
#endif
};

/* Returns the name of a reading loop: NULL past the last loop, "" for a loop that this machine cannot run. */
EXPORT const char *ys_reader(int i) {
    if (i < 0 || (size_t)i >= sizeof readers / sizeof *readers) return NULL;
    return readers[i].supported() ? readers[i].name : "";
}

static volatile uint64_t kept; /* results, so that no loop is optimised away */

typedef struct reading {
    read_fn *read;
    const char *p;
    size_t part; /* bytes of each thread */
    _Atomic uint64_t sum;
} reading;

static void read_part(void *context, int64_t t) {
    reading *r = context;
    r->sum += r->read(r->p + (size_t)t * r->part, r->part);
}

/* Reads n bytes by one of the loops, each thread an equal part.  n is a multiple of 4,096 * 4 * threads. */
EXPORT void ys_read(int reader, const void *p, size_t n, int threads, int reps, double *seconds) {
    reading all = {.read = readers[reader].read, .p = p, .part = n / (size_t)threads};
    for (int r = 0; r < reps; r++) {
        const double start = now();
        kvc_parallel(threads, threads, read_part, &all);
        seconds[r] = now() - start;
        kept += all.sum;
    }
}

/* Reads n rows of row_bytes bytes, a multiple of 8, that lie `stride` bytes apart.  Prefetches each row AHEAD rows
 * earlier, as attention does where it goes from row to row; past the end this does no harm. */
EXPORT void ys_read_rows(const void *p, size_t n, size_t row_bytes, size_t stride, int reps, double *seconds) {
    enum { AHEAD = 64, LINE = 64 };
    for (int r = 0; r < reps; r++) {
        uint64_t sum = 0;
        const double start = now();
        for (size_t i = 0; i < n; i++) {
            const char *row = (const char *)p + i * stride;
            for (size_t at = 0; at < row_bytes; at += LINE) __builtin_prefetch(row + AHEAD * stride + at, 0, 2);
            for (size_t at = 0; at < row_bytes; at += sizeof sum) {
                uint64_t word;
                memcpy(&word, row + at, sizeof word);
                sum += word;
            }
        }
        seconds[r] = now() - start;
        kept += sum;
    }
}

/* ---- multiplying and adding -------------------------------------------------------------------------------------- */

enum { ROUNDS = 4096, SUMS = 12 }; /* sums: more than latency times throughput of any processor so far */

#define MULTIPLIER(name, ATTRIBUTES, vec, set, fma)                                       \
    ATTRIBUTES static float name(float factor) {                                          \
        vec sums[SUMS], x = set(factor), y = set(0.5F);                                   \
        for (int i = 0; i < SUMS; i++) sums[i] = set((float)i);                           \
        for (int r = 0; r < ROUNDS; r++)                                                  \
            for (int i = 0; i < SUMS; i++) sums[i] = fma(sums[i], x, y);                  \
        float result = 0;                                                                 \
        for (int i = 0; i < SUMS; i++) {                                                  \
            float lanes[sizeof(vec) / sizeof(float)];                                     \
            memcpy(lanes, &sums[i], sizeof lanes);                                        \
            for (size_t j = 0; j < sizeof lanes / sizeof *lanes; j++) result += lanes[j]; \
        }                                                                                 \
        return result;                                                                    \
    }

static float set_scalar(float x) { return x; }
static float fma_scalar(float x, float y, float z) { return x * y + z; }
MULTIPLIER(multiply_scalar, , float, set_scalar, fma_scalar)
#if defined(__x86_64__)
MULTIPLIER(multiply_avx2, AVX2, __m256, _mm256_set1_ps, _mm256_fmadd_ps)
MULTIPLIER(multiply_avx512, AVX512, __m512, _mm512_set1_ps, _mm512_fmadd_ps)

/* As the cache's kernels do, by assembly: intrinsics move sums. */
AVX512 static float multiply_bytes_avx512(float factor) {
    __m512i sums[SUMS], x = _mm512_castps_si512(_mm512_set1_ps(factor)), y = _mm512_set1_epi32(1);
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_set1_epi32(i);
    for (int r = 0; r < ROUNDS; r++)
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(x), "v"(y));
#pragma GCC unroll 12
    for (int i = 1; i < SUMS; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    return (float)_mm512_reduce_add_epi32(sums[0]);
}
#endif

typedef struct multiplying {
    float (*multiply)(float);
    _Atomic uint64_t sum;
} multiplying;

static void multiply_part(void *context, int64_t t) {
    multiplying *m = context;
    (void)t;
    m->sum += (uint64_t)m->multiply(0.5F);
}

/* Calls f with the argument 0.5 on each of the threads. */
static void time_multiply(float (*f)(float), int threads, int reps, double *seconds) {
    multiplying all = {.multiply = f};
    for (int r = 0; r < reps; r++) {
        const double start = now();
        kvc_parallel(threads, threads, multiply_part, &all);
        seconds[r] = now() - start;
        kept += all.sum;
    }
}

/* Multiplies and adds f32 in vectors of `lanes` floats on each of the threads.  Returns the number of multiply-adds in
 * a repetition, or 0 if this machine lacks these vectors. */
EXPORT double ys_multiply_add(int lanes, int threads, int reps, double *seconds) {
    float (*multiply)(float) = lanes == 1 ? multiply_scalar : NULL;
#if defined(__x86_64__)
    if (lanes == 8 && has_avx2()) multiply = multiply_avx2;
    if (lanes == 16 && has_avx512()) multiply = multiply_avx512;
#endif
    if (!multiply) return 0;
    time_multiply(multiply, threads, reps, seconds);
    return (double)ROUNDS * SUMS * lanes * threads;
}

/* Multiplies bytes and adds four products to each lane, in the widest vectors that have an instruction for it, on each
 * of the threads.  Returns the number of products in a repetition, or 0 if this machine lacks the instruction. */
EXPORT double ys_multiply_bytes(int threads, int reps, double *seconds) {
#if defined(__x86_64__)
    if (has_avx512() && __builtin_cpu_supports("avx512vnni")) {
        time_multiply(multiply_bytes_avx512, threads, reps, seconds);
        return (double)ROUNDS * SUMS * 64 * threads;
    }
#endif
    (void)threads, (void)reps, (void)seconds;
    return 0;
}
