/* vector_avx512.h: the vector primitives of template.h for AVX-512 (F, BW, DQ, VL).  A file that includes this defines
 *   TARGET        attribute of every function
 *   HAS_VNNI      1 if there are dot products of integers (VNNI), else 0
 *   HAS_DOT_16    1 if there are dot products of bf16; else it may be left out
 *
 * v_ primitives are of floats, i_ of integers, c_ of bytes and b_ of bf16.  A quarter is 128 bits: many instructions
 * work within quarters, and results are put in order afterwards.
 */
#include "kernels/x86.h"

enum { LANES = 16, ACCUMULATORS = 16, MATMUL_SUMS = 24, MATMUL_VECTORS = 4 }; /* of 32 registers */

#define IS_WIDE 1
#define HAS_QUADS HAS_VNNI

typedef __m512 vec;

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }

INLINE vec v_set(float x) { return _mm512_set1_ps(x); }

INLINE vec v_load(const void *p) { return _mm512_loadu_ps(p); }

INLINE vec v_keep(vec x) {
    __asm__ __volatile__("" : "+v"(x));
    return x;
}

INLINE void v_store(void *p, vec x) { _mm512_storeu_ps(p, x); }

INLINE void v_store_first(float *p, vec x) { *p = _mm512_cvtss_f32(x); }

INLINE __mmask16 first_lanes(int count) { return (__mmask16)((1u << count) - 1); }

INLINE vec v_load_some(const float *p, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }

INLINE void v_store_some(float *p, vec x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }

INLINE __m256i add_fifth_bits(__m256i codes, uint32_t bits) {
    return _mm256_mask_add_epi8(codes, bits, codes, _mm256_set1_epi8(16));
}

INLINE vec v_set_f16(const void *p) {
    short bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

INLINE vec v_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

INLINE void v_store_f16(void *p, vec x) { _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE vec v_load_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

/* Rounds ties to even: adds half of the last bit that stays if that bit is set, and just less than half if not. */
INLINE void v_store_bf16(void *p, vec x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __m512i y = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(y, 16)));
}

INLINE vec v_load_i8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }

INLINE vec v_load_u4(const void *p, int shift) {
    __m512i bytes = _mm512_srl_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)), _mm_cvtsi32_si128(shift));
    return _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
}

INLINE void v_store_8(void *p, vec x) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x))); }

INLINE code_bytes c_from_floats(const vec x[2]) {
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x[0]));
    return (code_bytes)_mm256_set_m128i(_mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x[1])), low);
}

INLINE void c_to_floats(vec to[2], code_bytes x) {
    to[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128((__m256i)x)));
    to[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256((__m256i)x, 1)));
}

INLINE vec v_add(vec x, vec y) { return _mm512_add_ps(x, y); }

INLINE vec v_mul(vec x, vec y) { return _mm512_mul_ps(x, y); }

INLINE vec v_div(vec x, vec y) { return _mm512_div_ps(x, y); }

INLINE vec v_fma(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }

INLINE vec v_max(vec x, vec y) { return _mm512_max_ps(x, y); }

INLINE vec v_min(vec x, vec y) { return _mm512_min_ps(x, y); }

INLINE vec v_abs(vec x) { return _mm512_abs_ps(x); }

INLINE vec v_max_abs(vec x, vec y) { return _mm512_range_ps(x, y, 0xb); }

INLINE vec v_number(vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); }

INLINE vec v_mask(vec x, const void *p) { return _mm512_and_ps(x, _mm512_loadu_ps(p)); }

/* The empty assembly keeps the mask's 32 bits in one register: GCC 12 may otherwise store 16 of them to the stack and
 * load 32, where a sanitizer's calls make registers scarce. */
INLINE uint32_t v_equal(vec x, vec y) {
    uint32_t mask = _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ);
    __asm__("" : "+r"(mask));
    return mask;
}

INLINE vec v_count(vec n, vec x, vec y) {
    return _mm512_mask_add_ps(n, _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ), n, _mm512_set1_ps(1));
}

INLINE vec v_truncate(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }

/* Adds the float below a half: a half would take the float below it to 1. */
INLINE void v_store_nearest(void *p, vec x) {
    const __m512i sign = _mm512_set1_epi32(INT32_MIN), half = _mm512_castps_si512(_mm512_set1_ps(0x1.fffffep-2f));
    const __m512i with_sign = _mm512_ternarylogic_epi32(_mm512_castps_si512(x), sign, half, 0xea); /* x & sign | half */
    v_store_8(p, _mm512_add_ps(x, _mm512_castsi512_ps(with_sign)));
}

INLINE vec v_scale(vec x, vec scale, vec y, vec least) {
    const vec power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(scale), 23));
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(y, least, _CMP_NLT_UQ), x, power);
}

INLINE vec v_split_power(vec *x) { return _mm512_reduce_ps(*x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

/* Subnormal results would take 30 times as long. */
INLINE vec v_times_power(vec x, vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126), _CMP_NLT_UQ), x, n);
}

INLINE float v_max_lane(vec x) {
    __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

INLINE float v_sum_lanes(vec x) {
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

INLINE vec v_swap(vec x, int n) {
    if (n == 1) return _mm512_permute_ps(x, _MM_SHUFFLE(2, 3, 0, 1));
    if (n == 2) return _mm512_permute_ps(x, _MM_SHUFFLE(1, 0, 3, 2));
    if (n == 4) return _mm512_shuffle_f32x4(x, x, _MM_SHUFFLE(2, 3, 0, 1));
    return _mm512_shuffle_f32x4(x, x, _MM_SHUFFLE(1, 0, 3, 2));
}

/* Returns x0+x2 y0+y2 x1+x3 y1+y3 in each quarter. */
INLINE vec add_pairs(vec x, vec y) { return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)); }

/* Returns the sums of a, b, c and d, quarter by quarter. */
INLINE vec add_quarters(vec a, vec b, vec c, vec d) {
    __m512d x = _mm512_castps_pd(add_pairs(a, b)), y = _mm512_castps_pd(add_pairs(c, d));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

/* Takes the lower halves of the int32 lanes as x[0], and the upper ones as x[1]. */
INLINE void split_bf16(vec x[2], __m512i both) {
    x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    x[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE void v_load_apart(vec x[2], const void *p) { split_bf16(x, _mm512_loadu_si512(p)); }

/* Moves the even lanes of x[0], then of x[1], to x[0], and the odd ones to x[1]. */
INLINE void v_unzip(vec x[2]) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const vec y = _mm512_permutex2var_ps(x[0], even, x[1]);
    x[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), x[1]);
    x[0] = y;
}

/* Undoes v_unzip: puts the lanes of x[0] and x[1] in turns. */
INLINE void v_zip(vec x[2]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const vec y = _mm512_permutex2var_ps(x[0], low, x[1]);
    x[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
    x[0] = y;
}

INLINE vec v_evens_first(vec x) {
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(order, x);
}

INLINE vec v_load_twice(const void *p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }

/* Loads 16 elements of each of two rows: x[0] and x[1] get 8 of each row, the first ones or, of bf16, the even ones. */
INLINE void v_load_pair(int type, vec x[2], const char *p, const char *q) {
    if (type == KVC_F32) {
        const vec a = v_keep(v_load(p)), b = v_keep(v_load(q));
        x[0] = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 1, 0));
        x[1] = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 2, 3, 2));
    } else if (type == KVC_F16) {
        const __m256i a = load_32(p);
        x[0] = _mm512_cvtph_ps(_mm256_inserti128_si256(a, _mm_loadu_si128((const void *)q), 1));
        x[1] = _mm512_cvtph_ps(_mm256_permute2x128_si256(a, _mm256_loadu_si256((const void *)q), 0x31));
    } else {
        const __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)p));
        split_bf16(x, _mm512_inserti64x4(a, _mm256_loadu_si256((const void *)q), 1));
    }
}

/* Adds up each half of x[0 .. 8): first quarters, then the two quarters of a half, then puts sums in order. */
INLINE vec v_sums(const vec x[LANES / 2]) {
    const vec a = add_quarters(x[0], x[1], x[2], x[3]), b = add_quarters(x[4], x[5], x[6], x[7]);
    const vec halves = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                                     _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
    const __m512i in_turns = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm512_permutexvar_ps(in_turns, halves);
}

INLINE void v_store_halves(float *p, float *q, vec x) {
    _mm256_storeu_ps(p, _mm512_castps512_ps256(x));
    if (q) _mm256_storeu_ps(q, _mm512_extractf32x8_ps(x, 1));
}

/* Transposes the quarters of four vectors. */
INLINE void transpose_quarters(vec x[4]) {
    vec a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    vec c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    x[0] = _mm512_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0));
    x[1] = _mm512_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2));
    x[2] = _mm512_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0));
    x[3] = _mm512_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2));
}

/* Returns the largest of a, b, c and d, quarter by quarter. */
INLINE vec max_quarters(const vec x[4]) {
    const __m512d a = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])));
    const __m512d b = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])));
    return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

INLINE vec max_halves(vec x, vec y) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(x, y, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm512_shuffle_f32x4(x, y, _MM_SHUFFLE(3, 1, 3, 1)));
}

/* Returns the largest lanes of x[0 .. count), a lane each: first of quarters, then of all. */
INLINE vec v_max_lanes(const vec x[LANES], int count) {
    const vec first = max_quarters(x), low = max_halves(first, count > 4 ? max_quarters(x + 4) : first);
    if (count <= 8) return max_halves(low, low);
    const vec third = max_quarters(x + 8);
    return max_halves(low, max_halves(third, count > 12 ? max_quarters(x + 12) : third));
}

INLINE void v_store_largest(float *p, const vec x[4]) {
    const vec y = max_quarters(x);
    const __m256 z = _mm256_max_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1));
    _mm_storeu_ps(p, _mm_max_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1)));
}

INLINE void v_store_sums(float *p, const vec x[4]) {
    const vec y = add_quarters(x[0], x[1], x[2], x[3]);
    const __m256 z = _mm256_add_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1)));
}

INLINE void v_transpose(vec x[LANES]) {
    UNROLL
    for (int i = 0; i < LANES; i += 4) transpose_quarters(x + i);
    UNROLL
    for (int i = 0; i < 4; i++) {
        vec a = _mm512_shuffle_f32x4(x[i], x[i + 4], _MM_SHUFFLE(1, 0, 1, 0));
        vec b = _mm512_shuffle_f32x4(x[i], x[i + 4], _MM_SHUFFLE(3, 2, 3, 2));
        vec c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], _MM_SHUFFLE(1, 0, 1, 0));
        vec d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], _MM_SHUFFLE(3, 2, 3, 2));
        x[i] = _mm512_shuffle_f32x4(a, c, _MM_SHUFFLE(2, 0, 2, 0));
        x[i + 4] = _mm512_shuffle_f32x4(a, c, _MM_SHUFFLE(3, 1, 3, 1));
        x[i + 8] = _mm512_shuffle_f32x4(b, d, _MM_SHUFFLE(2, 0, 2, 0));
        x[i + 12] = _mm512_shuffle_f32x4(b, d, _MM_SHUFFLE(3, 1, 3, 1));
    }
}

/* ---- integers ---------------------------------------------------------------------------------------------------- */

typedef __m512i ivec;

INLINE ivec i_zero(void) { return _mm512_setzero_si512(); }

INLINE ivec i_set_16(int16_t x) { return _mm512_set1_epi16(x); }

INLINE ivec i_set_pair(const void *p) {
    int pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

INLINE ivec i_and(ivec x, ivec y) { return _mm512_and_si512(x, y); }

INLINE ivec i_xor_and(ivec x, ivec y, ivec z) { return _mm512_ternarylogic_epi32(x, y, z, 0x28); }

INLINE ivec i_high_bytes(ivec x) { return _mm512_srai_epi16(x, 8); }

INLINE ivec i_shift(ivec x, int n) {
    switch (n) {
    case 2: return _mm512_srli_epi16(x, 2);
    case 4: return _mm512_srli_epi16(x, 4);
    case 6: return _mm512_srli_epi16(x, 6);
    case 8: return _mm512_srli_epi16(x, 8);
    default: return _mm512_srli_epi16(x, 12);
    }
}

INLINE ivec i_set_16_bytes(const void *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(p)); }

INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }

INLINE void i_store(void *p, ivec x) { _mm512_storeu_si512(p, x); }

INLINE ivec i_set_32(int32_t x) { return _mm512_set1_epi32(x); }

INLINE ivec i_or(ivec x, ivec y) { return _mm512_or_si512(x, y); }

INLINE ivec i_xor(ivec x, ivec y) { return _mm512_xor_si512(x, y); }

INLINE ivec i_add(ivec x, ivec y) { return _mm512_add_epi32(x, y); }

INLINE ivec i_low_bytes(ivec x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }

INLINE ivec i_next_bits(ivec x) { return _mm512_srli_epi32(x, 4); }

INLINE ivec i_join(ivec x, ivec y) { return _mm512_or_si512(_mm512_srli_epi32(x, 16), _mm512_slli_epi32(y, 16)); }

INLINE ivec i_permute_16(ivec x, ivec order) { return _mm512_permutexvar_epi16(order, x); }

INLINE ivec i_look_up(ivec table, ivec x) { return _mm512_shuffle_epi8(table, x); }

INLINE ivec i_add_16(ivec codes, ivec x, ivec bits) {
    return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(x, bits), codes, _mm512_set1_epi8(16));
}

INLINE vec v_from_int(ivec x) { return _mm512_cvtepi32_ps(x); }

INLINE void i_store_16(int16_t *p, vec x, vec y) {
    __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(x), _mm512_cvtps_epi32(y)); /* quarter by quarter */
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed));
}

/* Loads 16 bytes of rows 0 and 4, those of row 0 at p. */
INLINE __m256i load_two(const char *p, ptrdiff_t stride) {
    const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const void *)p));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const void *)(p + 4 * stride)), 1);
}

/* Loads 16 bytes of rows 0, 4, 8 and 12.  Puts halves together first: instructions on 512 bits take twice as long. */
INLINE ivec load_four(const char *p, ptrdiff_t stride) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_two(p, stride)), load_two(p + 8 * stride, stride), 1);
}

/* Swaps lane j of x[i] and lane i of x[j] in each quarter. */
INLINE void transpose_quarters_of(ivec x[4]) {
    const ivec ab = _mm512_unpacklo_epi32(x[0], x[1]), cd = _mm512_unpacklo_epi32(x[2], x[3]);
    const ivec ef = _mm512_unpackhi_epi32(x[0], x[1]), gh = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(ab, cd);
    x[1] = _mm512_unpackhi_epi64(ab, cd);
    x[2] = _mm512_unpacklo_epi64(ef, gh);
    x[3] = _mm512_unpackhi_epi64(ef, gh);
}

INLINE void i_load_rows(ivec x[4], const char *p, ptrdiff_t stride) {
    UNROLL
    for (int i = 0; i < 4; i++, p = next_row(p, stride)) x[i] = load_four(p, stride);
    transpose_quarters_of(x);
}

/* Loads 32 bytes of a row, and of another one behind. */
INLINE ivec load_halves(const char *p, const char *q) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)p)),
                              _mm256_loadu_si256((const void *)q), 1);
}

/* Loads whole rows first: of rows of a multiple of 64 bytes, pieces would come from one bank of the L1 cache. */
INLINE void i_load_long_rows(ivec x[8], const char *p, ptrdiff_t stride) {
    ivec rows[2][4]; /* 0 to 3 and 4 to 7, then the others */
    UNROLL
    for (int half = 0; half < 2; half++, p += 4 * stride) {
        UNROLL
        for (int i = 0; i < 4; i++, p = next_row(p, stride)) rows[half][i] = load_halves(p, p + 4 * stride);
        transpose_quarters_of(rows[half]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(rows[0][i], rows[1][i], _MM_SHUFFLE(2, 0, 2, 0));
        x[4 + i] = _mm512_shuffle_i32x4(rows[0][i], rows[1][i], _MM_SHUFFLE(3, 1, 3, 1));
    }
}

/* Loads 16 bytes of four rows, and puts the four bytes of each column side by side. */
INLINE ivec i_load_quad(const char *p, ptrdiff_t stride, int swaps) {
    const __m512i in_turns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m128i swapped = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    const __m128i in_order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i by_column = _mm512_broadcast_i32x4(swaps ? swapped : in_order);
    const char *q = next_row(p, stride), *r = next_row(q, stride), *s = next_row(r, stride);
    const __m256i a = _mm256_castsi128_si256(_mm_loadu_si128((const void *)p));
    const __m256i b = _mm256_castsi128_si256(_mm_loadu_si128((const void *)r));
    const __m256i first = _mm256_inserti128_si256(a, _mm_loadu_si128((const void *)q), 1);
    const __m256i second = _mm256_inserti128_si256(b, _mm_loadu_si128((const void *)s), 1);
    const ivec rows = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(in_turns, rows), by_column);
}

INLINE void v_from_f16_pairs(vec x[2], ivec both) {
    x[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
    x[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
}

INLINE void v_load_scales(vec x[2], const char *p, ptrdiff_t stride) {
    __m128i low[2], high[2];
    load_eight(low, p, stride);
    load_eight(high, p + 8 * stride, stride);
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = _mm512_cvtph_ps(_mm256_set_m128i(high[i], low[i]));
}

/* Loads 32 elements of two rows as int16, the two of a column side by side; 4-bit codes: low halves to x[0]. */
INLINE void i_load_pairs(int type, ivec x[2], const void *p, const void *q) {
    if (kvc_is_8_bits(type)) {
        const __m256i a = load_32(p), b = load_32(q);
        x[0] = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
        x[1] = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
    } else {
        const __m128i a = load_16(p), b = load_16(q);
        const ivec both = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
        if (KVC_TYPES[type].num_levels) { /* the instruction takes five bits: there are two copies of the levels */
            const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)kvc_levels(type)));
            x[0] = _mm512_permutexvar_epi16(both, _mm512_cvtepi8_epi16(levels));
            x[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), _mm512_cvtepi8_epi16(levels));
            return;
        }
        x[0] = _mm512_sub_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), _mm512_set1_epi16(8));
        x[1] = _mm512_sub_epi16(_mm512_srli_epi16(both, 4), _mm512_set1_epi16(8));
    }
}

/* Puts the columns of q8_0 in order: i_load_pairs leaves [0, 8) and [16, 24) in x[0]. */
INLINE void i_order(int type, ivec x[2]) {
    if (!kvc_is_8_bits(type)) return;
    ivec low = _mm512_shuffle_i64x2(x[0], x[1], _MM_SHUFFLE(1, 0, 1, 0));
    x[1] = _mm512_shuffle_i64x2(x[0], x[1], _MM_SHUFFLE(3, 2, 3, 2));
    x[0] = low;
}

/* Returns x where bits of mask are set, else y. */
INLINE ivec i_select(ivec mask, ivec x, ivec y) { return _mm512_ternarylogic_epi32(mask, x, y, 0xca); }

/* Looks the low six bits of bytes up in a table of 64, with AVX-512 VBMI, where that is. */
#ifdef KVC_NO_ASSEMBLY
INLINE int has_look_up_64(void) { return 0; }

INLINE ivec i_look_up_64(ivec table, ivec x) { return _mm512_permutexvar_epi8(x, table); }
#else
INLINE int has_look_up_64(void) { return kvc_cpu_has_avx512vbmi(); }

INLINE ivec i_look_up_64(ivec table, ivec x) {
    __asm__("vpermb %2, %1, %0" : "=v"(x) : "v"(x), "v"(table));
    return x;
}
#endif

#if HAS_VNNI && defined(KVC_NO_ASSEMBLY)
INLINE ivec i_dot(ivec sum, ivec x, ivec y) { return _mm512_dpwssd_epi32(sum, x, y); }

INLINE ivec i_dot_bytes(ivec sum, ivec x, ivec y) { return _mm512_dpbusd_epi32(sum, x, y); }
#elif HAS_VNNI
/* Around intrinsics GCC copies the sum, there and back. */
INLINE ivec i_dot(ivec sum, ivec x, ivec y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}

INLINE ivec i_dot_bytes(ivec sum, ivec x, ivec y) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
#else
INLINE ivec i_dot(ivec sum, ivec x, ivec y) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y)); }
#endif

#if HAS_VNNI
/* The instruction takes bytes of x without signs: they are 128 larger, and `starts` take off what this adds. */
INLINE ivec i_begin_quads(const int32_t *p) { return i_load(p); }

INLINE ivec i_set_quad(const void *p) { return i_xor(i_set_pair(p), i_set_32((int32_t)0x80808080)); }

INLINE ivec i_dot_quads(ivec sum, ivec x, ivec y) { return i_dot_bytes(sum, x, y); }

enum { CODE_BYTES = 1024 }; /* more than a sketch has */

INLINE ivec i_begin_codes(ivec sum) { return sum; }

INLINE ivec i_dot_codes(ivec sum, ivec x, ivec y) { return i_dot_bytes(sum, x, y); }

INLINE ivec i_end_codes(ivec sum, ivec some) { return (void)sum, some; }
#endif

#if HAS_DOT_16
/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

typedef __m512i bvec;

INLINE __m256i b_load(const void *p, int count) {
    return count == LANES ? _mm256_loadu_si256(p)
                          : _mm512_castsi512_si256(_mm512_maskz_loadu_epi16((1u << count) - 1, p));
}

INLINE bvec b_load_pair(const void *p, const void *q, int count) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(b_load(p, count)), b_load(q, count), 1);
}

INLINE bvec b_load_twice(const void *p, int count) { return _mm512_broadcast_i64x4(b_load(p, count)); }

INLINE vec b_dot(vec sum, bvec x, bvec y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
#endif
