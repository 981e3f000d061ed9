/* x86.h: primitives that the instruction sets of x86 share.  TARGET is defined before it is included. */
#include <immintrin.h>
#include <stddef.h>
#include <string.h>

#include "base/dtype.h"
#include "kernels/target.h"

INLINE void store_f16(void *p, float x) {
    uint16_t bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
    memcpy(p, &bits, sizeof bits);
}

/* Copies long rows by the processor's own instruction, which does not read the cache lines that it overwrites.  It is
 * slow to begin, and the address sanitizer does not see it. */
INLINE void copy_row(void *dst, const void *src, size_t bytes) {
#ifndef HAVE_ADDRESS_SANITIZER
    if (bytes >= 256) {
        __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
        return;
    }
#endif
    memcpy(dst, src, bytes);
}

/* Adds 16 to those of 32 bytes whose bit is set.  In the header of each set's vectors. */
INLINE __m256i add_fifth_bits(__m256i codes, uint32_t bits);

/* Returns, for each byte of x, which is below 16, that of a table of 16. */
INLINE __m256i look_up_levels(const int8_t *levels, __m256i x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)levels)), x);
}

INLINE code_bytes c_look_up(const void *table, code_bytes x) { return (code_bytes)look_up_levels(table, (__m256i)x); }

/* Takes all low halves of bytes, then all high ones; looks levels up, or adds fifth bits. */
INLINE void unpack_codes(int type, char *dst, const char *block, int by) {
    const char *nibbles = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)nibbles));
    const __m256i shifted = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i low = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
    __m256i codes = low;
    if (KVC_TYPES[type].num_levels) codes = look_up_levels(kvc_levels(type), low);
    if (KVC_TYPES[type].num_levels == 64) {
        int64_t bits; /* 4 and 5 */
        memcpy(&bits, block, sizeof bits);
        const __m256i quarters = _mm256_srlv_epi64(_mm256_set1_epi64x(bits), _mm256_setr_epi64x(0, 2, 4, 6));
        const __m256i high = _mm256_and_si256(quarters, _mm256_set1_epi8(3));
        UNROLL
        for (int i = 1; i < 4; i++)
            codes = _mm256_blendv_epi8(codes, look_up_levels(kvc_levels(type) + 16 * i, low),
                                       _mm256_cmpeq_epi8(high, _mm256_set1_epi8((char)i)));
    }
    if (by) codes = _mm256_sub_epi8(codes, _mm256_set1_epi8((char)by));
    if (KVC_TYPES[type].has_fifth_bits) {
        uint32_t bits;
        memcpy(&bits, nibbles - sizeof bits, sizeof bits);
        codes = add_fifth_bits(codes, bits);
    }
    _mm256_storeu_si256((void *)dst, codes);
}

/* Returns p + stride.  Hides the sum from compilers, which hold the distance of every row to the first in a register
 * otherwise, or reload it from the stack. */
INLINE const char *next_row(const char *p, ptrdiff_t stride) {
    p += stride;
    __asm__("" : "+r"(p));
    return p;
}

/* Loads an f16 of each of eight rows to x[0], and the one behind it to x[1].  Three addresses reach all rows. */
INLINE void load_eight(__m128i x[2], const char *p, ptrdiff_t stride) {
    const char *const third = next_row(p, 3 * stride), *const sixth = next_row(third, 3 * stride);
    __m128i y[8];
    UNROLL
    for (int i = 0; i < 8; i++) {
        int bytes; /* _mm_loadu_si32 is wrong in GCC 11 */
        memcpy(&bytes, (i < 3 ? p : i < 6 ? third : sixth) + i % 3 * stride, sizeof bytes);
        y[i] = _mm_cvtsi32_si128(bytes);
    }
    UNROLL
    for (int i = 0; i < 8; i += 2) y[i] = _mm_unpacklo_epi16(y[i], y[i + 1]);
    const __m128i low = _mm_unpacklo_epi32(y[0], y[2]), high = _mm_unpacklo_epi32(y[4], y[6]);
    x[0] = _mm_unpacklo_epi64(low, high);
    x[1] = _mm_unpackhi_epi64(low, high);
}

/* load_16 and load_32 load once what two instructions need: half of such loads cross cache lines. */
INLINE __m128i load_16(const void *p) {
    __m128i x = _mm_loadu_si128(p);
    __asm__("" : "+x"(x));
    return x;
}

INLINE __m256i load_32(const void *p) {
    __m256i x = _mm256_loadu_si256(p);
    __asm__("" : "+v"(x));
    return x;
}
