/* vector_avx2.h: the vector primitives of template.h for AVX2, FMA and F16C.  TARGET is defined before it is included,
 * and
 *
 *   HAS_AVX_VNNI  1 if there are dot products of integers (AVX-VNNI); else it may be left out
 *
 * v_ primitives are of floats, i_ of integers and c_ of bytes.  A half is 128 bits: many instructions work within
 * halves, and results are put in order afterwards.
 */
#include "kernels/x86.h"

enum { LANES = 8, ACCUMULATORS = 12, MATMUL_SUMS = 12, MATMUL_VECTORS = 2 }; /* of 16 registers */

#define HAS_QUADS 1

typedef __m256 vec;

INLINE vec v_zero(void) { return _mm256_setzero_ps(); }

INLINE vec v_set(float x) { return _mm256_set1_ps(x); }

INLINE vec v_load(const void *p) { return _mm256_loadu_ps(p); }

INLINE vec v_keep(vec x) {
    __asm__("" : "+x"(x));
    return x;
}

INLINE void v_store(void *p, vec x) { _mm256_storeu_ps(p, x); }

INLINE void v_store_first(float *p, vec x) { *p = _mm256_cvtss_f32(x); }

INLINE __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE vec v_load_some(const float *p, int count) { return _mm256_maskload_ps(p, first_lanes(count)); }

INLINE void v_store_some(float *p, vec x, int count) { _mm256_maskstore_ps(p, first_lanes(count), x); }

INLINE __m256i add_fifth_bits(__m256i codes, uint32_t bits) {
    const __m256i bit_of = _mm256_set1_epi64x((long long)0x8040201008040201); /* in a byte, for each of 8 elements */
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of), bit_of);
    return _mm256_add_epi8(codes, _mm256_and_si256(_mm256_cmpeq_epi8(set, bit_of), _mm256_set1_epi8(16)));
}

INLINE vec v_set_f16(const void *p) {
    short bits;
    memcpy(&bits, p, sizeof bits);
    return _mm256_cvtph_ps(_mm_set1_epi16(bits));
}

INLINE vec v_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

INLINE void v_store_f16(void *p, vec x) { _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE vec v_load_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

/* Rounds ties to even: adds half of the last bit that stays if that bit is set, and just less than half if not. */
INLINE void v_store_bf16(void *p, vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 quiet = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
    __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i upper_halves =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 2, 3, 6, 7, 10, 11, 14, 15));
    __m256i halves = _mm256_shuffle_epi8(_mm256_castps_si256(y), upper_halves);
    _mm_storeu_si128(p, _mm_unpacklo_epi64(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

INLINE vec v_load_i8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }

INLINE vec v_load_u4(const void *p, int shift) {
    __m256i bytes = _mm256_srl_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)), _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
}

INLINE void v_store_8(void *p, vec x) {
    __m256i low_bytes = _mm256_set1_epi32(0x0c080400);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_cvttps_epi32(x), low_bytes);
    _mm_storel_epi64(p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

/* Truncates 32 floats to bytes.  Packs work within halves, so the int32 are put in order afterwards. */
INLINE code_bytes c_from_floats(const vec x[4]) {
    const __m256i low = _mm256_packs_epi32(_mm256_cvttps_epi32(x[0]), _mm256_cvttps_epi32(x[1])),
                  high = _mm256_packs_epi32(_mm256_cvttps_epi32(x[2]), _mm256_cvttps_epi32(x[3]));
    return (code_bytes)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                                   _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void c_to_floats(vec to[4], code_bytes x) {
    const __m128i halves[2] = {_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)};
    UNROLL
    for (int i = 0; i < 2; i++) {
        to[2 * i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(halves[i]));
        to[2 * i + 1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(halves[i], 8)));
    }
}

INLINE vec v_add(vec x, vec y) { return _mm256_add_ps(x, y); }

INLINE vec v_mul(vec x, vec y) { return _mm256_mul_ps(x, y); }

INLINE vec v_div(vec x, vec y) { return _mm256_div_ps(x, y); }

INLINE vec v_fma(vec x, vec y, vec z) { return _mm256_fmadd_ps(x, y, z); }

INLINE vec v_max(vec x, vec y) { return _mm256_max_ps(x, y); }

INLINE vec v_min(vec x, vec y) { return _mm256_min_ps(x, y); }

INLINE vec v_abs(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

INLINE vec v_max_abs(vec x, vec y) { return _mm256_max_ps(v_abs(x), y); }

INLINE vec v_number(vec x) { return _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q)); }

INLINE vec v_mask(vec x, const void *p) { return _mm256_and_ps(x, _mm256_loadu_ps(p)); }

INLINE uint32_t v_equal(vec x, vec y) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_EQ_OQ)); }

INLINE vec v_count(vec n, vec x, vec y) {
    return _mm256_add_ps(n, _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_GE_OQ), _mm256_set1_ps(1)));
}

INLINE vec v_truncate(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }

/* Adds the float below a half: a half would take the float below it to 1. */
INLINE void v_store_nearest(void *p, vec x) {
    vec sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    v_store_8(p, _mm256_add_ps(x, _mm256_or_ps(_mm256_set1_ps(0x1.fffffep-2f), sign)));
}

INLINE vec v_scale(vec x, vec scale, vec y, vec least) {
    const vec power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(scale), 23));
    return _mm256_and_ps(_mm256_mul_ps(x, power), _mm256_cmp_ps(y, least, _CMP_NLT_UQ));
}

/* Splits x into the integer below, but at least -127, and what is left, which is returned. */
INLINE vec v_split_power(vec *x) {
    const vec limited = _mm256_max_ps(_mm256_set1_ps(-127), *x);
    *x = _mm256_floor_ps(limited);
    return _mm256_sub_ps(limited, *x);
}

INLINE vec v_times_power(vec x, vec n) {
    const __m256i exponents = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponents));
}

INLINE float v_max_lane(vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE float v_sum_lanes(vec x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

/* Returns x0+x2 x1+x3 y0+y2 y1+y3 in each half. */
INLINE vec add_pairs(vec x, vec y) {
    return _mm256_add_ps(_mm256_blend_ps(x, y, 0xcc), _mm256_shuffle_ps(x, y, _MM_SHUFFLE(1, 0, 3, 2)));
}

/* Returns the sums of a, b, c and d, half by half. */
INLINE vec add_halves(vec a, vec b, vec c, vec d) {
    vec x = add_pairs(a, b), y = add_pairs(c, d);
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm256_shuffle_ps(x, y, _MM_SHUFFLE(3, 1, 3, 1)));
}

INLINE vec v_sums(const vec x[LANES]) {
    vec y = add_halves(x[0], x[1], x[2], x[3]), z = add_halves(x[4], x[5], x[6], x[7]);
    return _mm256_add_ps(_mm256_blend_ps(y, z, 0xf0), _mm256_permute2f128_ps(y, z, 0x21));
}

INLINE vec max_pairs(vec x, vec y) {
    return _mm256_max_ps(_mm256_shuffle_ps(x, y, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm256_shuffle_ps(x, y, _MM_SHUFFLE(3, 1, 3, 1)));
}

INLINE void v_store_largest(float *p, const vec x[4]) {
    const vec y = max_pairs(max_pairs(x[0], x[1]), max_pairs(x[2], x[3]));
    _mm_storeu_ps(p, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

INLINE void v_store_sums(float *p, const vec x[4]) {
    const vec y = add_halves(x[0], x[1], x[2], x[3]);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

INLINE vec v_max_lanes(const vec x[LANES], int count) {
    const vec y = max_pairs(max_pairs(x[0], x[1]), max_pairs(x[2], x[3]));
    const vec z = count > 4 ? max_pairs(max_pairs(x[4], x[5]), max_pairs(x[6], x[7])) : y;
    return _mm256_max_ps(_mm256_permute2f128_ps(y, z, 0x20), _mm256_permute2f128_ps(y, z, 0x31));
}

/* Transposes both halves of four vectors. */
INLINE void transpose_halves(vec x[4]) {
    vec a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    vec c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    x[0] = _mm256_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0));
    x[1] = _mm256_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2));
    x[2] = _mm256_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0));
    x[3] = _mm256_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2));
}

INLINE vec v_swap(vec x, int n) {
    if (n == 1) return _mm256_permute_ps(x, _MM_SHUFFLE(2, 3, 0, 1));
    if (n == 2) return _mm256_permute_ps(x, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_permute2f128_ps(x, x, 1);
}

INLINE void v_transpose(vec x[LANES]) {
    transpose_halves(x);
    transpose_halves(x + 4);
    UNROLL
    for (int i = 0; i < 4; i++) {
        vec low = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20), high = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
        x[i] = low;
        x[i + 4] = high;
    }
}

/* ---- integers ---------------------------------------------------------------------------------------------------- */

typedef __m256i ivec;

INLINE ivec i_zero(void) { return _mm256_setzero_si256(); }

INLINE ivec i_set_16(int16_t x) { return _mm256_set1_epi16(x); }

INLINE ivec i_set_pair(const void *p) {
    int pair;
    memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
}

/* Sums are int16, which hold 43 products of two codes with 127: of a word of four codes each. */
enum { CODE_BYTES = 32 };

INLINE ivec i_begin_codes(ivec sum) { return (void)sum, i_zero(); }

INLINE ivec i_dot_codes(ivec sum, ivec x, ivec y) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y)); }

INLINE ivec i_end_codes(ivec sum, ivec some) { return _mm256_add_epi32(sum, _mm256_madd_epi16(some, i_set_16(1))); }

INLINE ivec i_and(ivec x, ivec y) { return _mm256_and_si256(x, y); }

INLINE ivec i_xor_and(ivec x, ivec y, ivec z) { return _mm256_and_si256(_mm256_xor_si256(x, y), z); }

INLINE ivec i_high_bytes(ivec x) { return _mm256_srai_epi16(x, 8); }

INLINE ivec i_shift(ivec x, int n) {
    switch (n) {
    case 2: return _mm256_srli_epi16(x, 2);
    case 4: return _mm256_srli_epi16(x, 4);
    case 6: return _mm256_srli_epi16(x, 6);
    case 8: return _mm256_srli_epi16(x, 8);
    default: return _mm256_srli_epi16(x, 12);
    }
}

#if HAS_AVX_VNNI && defined(KVC_NO_ASSEMBLY)
INLINE ivec i_dot(ivec sum, ivec x, ivec y) { return _mm256_dpwssd_avx_epi32(sum, x, y); }

INLINE ivec i_dot_bytes(ivec sum, ivec x, ivec y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
#elif HAS_AVX_VNNI
/* Around intrinsics GCC copies the sum, there and back. */
INLINE ivec i_dot(ivec sum, ivec x, ivec y) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
    return sum;
}

INLINE ivec i_dot_bytes(ivec sum, ivec x, ivec y) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
    return sum;
}
#else
/* Keeps the sum in its register: otherwise GCC takes new ones, of which there are not enough. */
INLINE ivec i_dot(ivec sum, ivec x, ivec y) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
    __asm__("" : "+x"(sum));
    return sum;
}
#endif

INLINE vec v_from_int(ivec x) { return _mm256_cvtepi32_ps(x); }

INLINE void i_store_16(int16_t *p, vec x, vec y) {
    __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x), _mm256_cvtps_epi32(y)); /* half by half */
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}

/* Loads 16 bytes of rows 0 and 4. */
INLINE ivec load_two(const char *p, ptrdiff_t stride) {
    return _mm256_set_m128i(_mm_loadu_si128((const void *)(p + 4 * stride)), _mm_loadu_si128((const void *)p));
}

/* Loads 16 bytes of eight rows, and transposes their int32: lane j of x[i] is number i of row j. */
INLINE void i_load_rows(ivec x[4], const char *p, ptrdiff_t stride) {
    const char *q = next_row(p, stride), *r = next_row(q, stride), *s = next_row(r, stride);
    ivec a = load_two(p, stride), b = load_two(q, stride), c = load_two(r, stride), d = load_two(s, stride);
    ivec ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    x[0] = _mm256_unpacklo_epi64(ab, cd);
    x[1] = _mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b);
    cd = _mm256_unpackhi_epi32(c, d);
    x[2] = _mm256_unpacklo_epi64(ab, cd);
    x[3] = _mm256_unpackhi_epi64(ab, cd);
}

INLINE void v_load_scales(vec x[2], const char *p, ptrdiff_t stride) {
    __m128i y[2];
    load_eight(y, p, stride);
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = _mm256_cvtph_ps(y[i]);
}

/* Loads elements of two rows as int16, the two of a column side by side; 4-bit codes: low halves to x[0]. */
INLINE void i_load_pairs(int type, ivec x[2], const void *p, const void *q) {
    if (kvc_is_8_bits(type)) {
        const __m128i a = load_16(p), b = load_16(q);
        x[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
        x[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    } else {
        const ivec both = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_loadl_epi64(p), _mm_loadl_epi64(q)));
        x[0] = _mm256_sub_epi16(_mm256_and_si256(both, _mm256_set1_epi16(15)), _mm256_set1_epi16(8));
        x[1] = _mm256_sub_epi16(_mm256_srli_epi16(both, 4), _mm256_set1_epi16(8));
    }
}

INLINE void i_order(int type, ivec x[2]) {
    (void)type;
    (void)x;
}

INLINE ivec i_load(const void *p) { return _mm256_loadu_si256(p); }

INLINE ivec i_begin_quads(const int32_t *p) {
    (void)p;
    return i_zero();
}

INLINE ivec i_set_quad(const void *p) { return i_set_pair(p); }

/* Moves the signs of x to y, as the instruction takes x without; two products fit 16 bits, as none of y is -128. */
INLINE ivec i_dot_quads(ivec sum, ivec x, ivec y) {
    const ivec pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(y, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, i_set_16(1)));
}

#if HAS_AVX_VNNI
INLINE void i_store(void *p, ivec x) { _mm256_storeu_si256(p, x); }

INLINE ivec i_set_32(int32_t x) { return _mm256_set1_epi32(x); }

INLINE ivec i_xor(ivec x, ivec y) { return _mm256_xor_si256(x, y); }

INLINE ivec i_add(ivec x, ivec y) { return _mm256_add_epi32(x, y); }

INLINE ivec i_of_bits(vec x) { return _mm256_castps_si256(x); }

INLINE ivec i_load_quad(const char *p, ptrdiff_t stride, int swaps) {
    const char *const second = p + (swaps ? 2 : 1) * stride, *const third = p + (swaps ? 1 : 2) * stride;
    const __m128i ab = _mm_unpacklo_epi8(_mm_loadl_epi64((const void *)p), _mm_loadl_epi64((const void *)second));
    const __m128i cd =
        _mm_unpacklo_epi8(_mm_loadl_epi64((const void *)third), _mm_loadl_epi64((const void *)(p + 3 * stride)));
    return _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
}
#endif
