/* immintrin.h: AVX-512, AMX and AVX-VNNI where there is AVX2, so that their kernels can be tested.  With -isystem
 * tests/c/emulated -mavx2 -mfma -mf16c -Wno-psabi it is found before the compiler's own; cpuid.h goes with it.
 *
 * SIMDe has most of it; here is what else the kernels use.  Products of bf16 are rounded as the processor does, and
 * take denormals as 0; what it would refuse to do ends the program.
 */
#pragma GCC system_header
#ifndef KVC_TEST_IMMINTRIN_H
#define KVC_TEST_IMMINTRIN_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

typedef union emulated {
    __m512 ps;
    __m512i si;
    __m512bh bh;
    __m256 half_ps[2];
    __m256i half[2];
    __m128i quarter[4];
    float f32[16];
    int32_t i32[16];
    uint32_t u32[16];
    uint16_t u16[32];
    int8_t i8[64];
    uint8_t u8[64];
} emulated;

/* ---- AVX-512 ----------------------------------------------------------------------------------------------------- */

static inline int emulated_rounded(float x) { return _mm_cvtss_si32(_mm_set_ss(x)); }
static inline int emulated_truncated(float x) { return _mm_cvttss_si32(_mm_set_ss(x)); }
static inline uint16_t emulated_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

#define EMULATED_CONVERSION(name, result, to, to_lanes, argument, from, from_lanes, convert) \
    static inline result emulated_##name(argument x) {                                       \
        const emulated y = {.from = x};                                                      \
        emulated z;                                                                          \
        for (int i = 0; i < 16; i++) z.to_lanes[i] = convert(y.from_lanes[i]);               \
        return z.to;                                                                         \
    }

EMULATED_CONVERSION(cvtepi32_ps, __m512, ps, f32, __m512i, si, i32, (float))
EMULATED_CONVERSION(cvtps_epi32, __m512i, si, i32, __m512, ps, f32, emulated_rounded)
EMULATED_CONVERSION(cvttps_epi32, __m512i, si, i32, __m512, ps, f32, emulated_truncated)
EMULATED_CONVERSION(cvtph_ps, __m512, ps, f32, __m256i, half[0], u16, _cvtsh_ss)
EMULATED_CONVERSION(cvtps_ph, __m256i, half[0], u16, __m512, ps, f32, emulated_half)
EMULATED_CONVERSION(cvtepi8_epi32, __m512i, si, i32, __m128i, quarter[0], i8, )
EMULATED_CONVERSION(cvtepu8_epi32, __m512i, si, i32, __m128i, quarter[0], u8, )
EMULATED_CONVERSION(cvtepu16_epi32, __m512i, si, i32, __m256i, half[0], u16, )
EMULATED_CONVERSION(cvtepi32_epi16, __m256i, half[0], u16, __m512i, si, u32, (uint16_t))
EMULATED_CONVERSION(cvtepi32_epi8, __m128i, quarter[0], u8, __m512i, si, u32, (uint8_t))

static inline uint8_t emulated_saturated(uint32_t x) { return x > UINT8_MAX ? UINT8_MAX : (uint8_t)x; }

EMULATED_CONVERSION(cvtusepi32_epi8, __m128i, quarter[0], u8, __m512i, si, u32, emulated_saturated)

static inline float emulated_cvtss_f32(__m512 x) { return (emulated){.ps = x}.f32[0]; }

static inline __m256 emulated_extractf32x8_ps(__m512 x, int half) { return (emulated){.ps = x}.half_ps[half]; }

static inline __m512i emulated_cvtepu8_epi16(__m256i x) {
    const emulated y = {.half = {x}};
    emulated z;
    for (int i = 0; i < 32; i++) z.u16[i] = y.u8[i];
    return z.si;
}

/* Picks lanes within each quarter, by two bits of `order` each. */
static inline __m512i emulated_shuffle_epi32(__m512i x, int order) {
    const emulated y = {.si = x};
    emulated z;
    for (int i = 0; i < 16; i++) z.i32[i] = y.i32[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
    return z.si;
}

static inline __m512 emulated_permute_ps(__m512 x, int order) {
    return (emulated){.si = emulated_shuffle_epi32((emulated){.ps = x}.si, order)}.ps;
}

/* Adds where the mask has a bit; elsewhere gives `otherwise`. */
static inline __m256i emulated_mask_add_epi8(__m256i otherwise, __mmask32 mask, __m256i x, __m256i y) {
    const emulated sum = {.half = {_mm256_add_epi8(x, y)}};
    emulated z = {.half = {otherwise}};
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) z.i8[i] = sum.i8[i];
    return z.half[0];
}

static inline __m512i emulated_srai_epi32(__m512i x, int n) {
    emulated y = {.si = x};
    for (int i = 0; i < 16; i++) y.i32[i] >>= n;
    return y.si;
}

static inline __m512i emulated_dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {
    const emulated a = {.si = x}, b = {.si = y};
    emulated z = {.si = sum};
    for (int i = 0; i < 64; i++) z.i32[i / 4] += a.u8[i] * b.i8[i];
    return z.si;
}

/* Those of AVX-VNNI. */
static inline __m256i emulated_dpbusd_avx_epi32(__m256i sum, __m256i x, __m256i y) {
    const emulated a = {.half = {x}}, b = {.half = {y}};
    emulated z = {.half = {sum}};
    for (int i = 0; i < 32; i++) z.i32[i / 4] += a.u8[i] * b.i8[i];
    return z.half[0];
}

static inline __m256i emulated_dpwssd_avx_epi32(__m256i sum, __m256i x, __m256i y) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
}

/* Elements that are masked are not read. */
static inline __m512i emulated_maskz_loadu_epi16(__mmask32 mask, const void *p) {
    emulated x = {.si = _mm512_setzero_si512()};
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(&x.u16[i], (const char *)p + 2 * i, 2);
    return x.si;
}

static inline __m512 emulated_maskz_loadu_ps(__mmask16 mask, const float *p) {
    emulated x = {.si = _mm512_setzero_si512()};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) x.f32[i] = p[i];
    return x.ps;
}

/* Elements that are masked are not written. */
static inline void emulated_mask_storeu_ps(float *p, __mmask16 mask, __m512 x) {
    const emulated y = {.ps = x};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) p[i] = y.f32[i];
}

#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvttps_epi32 emulated_cvttps_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(x, to_nearest) emulated_cvtps_ph(x)
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtusepi32_epi8 emulated_cvtusepi32_epi8
#define KVC_NO_ASSEMBLY 1
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated_srai_epi32
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32 emulated_shuffle_epi32
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd_avx_epi32
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd_avx_epi32
#define _mm512_cvtss_f32 emulated_cvtss_f32
#define _mm512_extractf32x8_ps emulated_extractf32x8_ps
#undef _mm512_permute_ps
#define _mm512_cvtepu8_epi16 emulated_cvtepu8_epi16
#define _mm512_permute_ps emulated_permute_ps
#define _mm256_mask_add_epi8 emulated_mask_add_epi8
#define _mm512_maskz_loadu_epi16 emulated_maskz_loadu_epi16
#undef _mm512_mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps

/* Lanes less the integers below them, and lanes times powers of two; 0 and the lane, of an infinity below 0. */
static inline __m512 emulated_less_floor(__m512 x) {
    emulated y = {.ps = x};
    for (int i = 0; i < 16; i++) y.f32[i] = isinf(y.f32[i]) ? 0 : y.f32[i] - floorf(y.f32[i]);
    return y.ps;
}

static inline __m512 emulated_scalef_ps(__m512 x, __m512 y) {
    emulated z = {.ps = x};
    const emulated by = {.ps = y};
    for (int i = 0; i < 16; i++) z.f32[i] *= exp2f(floorf(by.f32[i]));
    return z.ps;
}

#define _mm512_reduce_ps(x, floor) emulated_less_floor(x)
#define _mm512_scalef_ps emulated_scalef_ps

/* SIMDe 0.7.4 lacks these names, or their masks, or takes a part of `a | b` for the whole. */
#undef _mm512_madd_epi16
#undef _mm512_roundscale_ps
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_roundscale_ps(x, rounding) simde_mm512_roundscale_ps(x, (rounding))
#define _mm512_shuffle_f32x4 simde_mm512_shuffle_f32x4
#define _mm512_shuffle_i64x2 simde_mm512_shuffle_i32x4

/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

/* Denormal floats are 0, of the same sign, to what follows. */
static inline __m256 emulated_flush_half(__m256 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f), magnitude = _mm256_andnot_ps(sign, x);
    return _mm256_and_ps(x, _mm256_or_ps(sign, _mm256_cmp_ps(magnitude, _mm256_set1_ps(FLT_MIN), _CMP_NLT_UQ)));
}

static inline __m512 emulated_flush(__m512 x) {
    emulated y = {.ps = x};
    for (int half = 0; half < 2; half++) y.half_ps[half] = emulated_flush_half(y.half_ps[half]);
    return y.ps;
}

static inline __m512 emulated_fma(__m512 x, __m512 y, __m512 z) { return emulated_flush(_mm512_fmadd_ps(x, y, z)); }

static inline __m512 emulated_even(__m512i pairs) { return emulated_flush((__m512)_mm512_slli_epi32(pairs, 16)); }

static inline __m512 emulated_odd(__m512i pairs) {
    return emulated_flush((__m512)(pairs & _mm512_set1_epi32((int)0xffff0000)));
}

static inline __m512 emulated_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
    const __m512i a = (__m512i)x, b = (__m512i)y;
    sum = emulated_fma(emulated_odd(a), emulated_odd(b), emulated_flush(sum));
    return emulated_fma(emulated_even(a), emulated_even(b), sum);
}

static inline __m512bh emulated_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    const emulated x[2] = {{.ps = emulated_flush(lower)}, {.ps = emulated_flush(upper)}};
    emulated y;
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = x[i / 16].u32[i % 16], quiet = bits | 0x400000;
        y.u16[i] = (uint16_t)((isnan(x[i / 16].f32[i % 16]) ? quiet : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return y.bh;
}

static inline __m256bh emulated_cvtneps_pbh(__m512 x) {
    const emulated y = {.bh = emulated_cvtne2ps_pbh(x, x)};
    return (__m256bh)y.half[0];
}

#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static _Thread_local struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} emulated_config; /* all 0: there are no tiles */
static _Thread_local __m512i emulated_tiles[8][16];

static inline void emulated_check(int right) {
    if (!right) __builtin_trap();
}

static inline void emulated_tile_release(void) {
    memset(&emulated_config, 0, sizeof emulated_config);
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static inline void emulated_tile_loadconfig(const void *config) {
    emulated_tile_release();
    memcpy(&emulated_config, config, sizeof emulated_config);
    if (!emulated_config.palette)
        emulated_tile_release();
    else
        emulated_check(emulated_config.palette == 1);
    for (int i = 0; i < 16; i++) {
        const int bytes = emulated_config.bytes[i], rows = emulated_config.rows[i];
        emulated_check(i < 8 ? bytes <= 64 && rows <= 16 && !bytes == !rows : !bytes && !rows);
    }
}

static inline void emulated_tile_storeconfig(void *config) { memcpy(config, &emulated_config, sizeof emulated_config); }

static inline void emulated_tile_zero(int t) {
    emulated_check(emulated_config.rows[t]);
    memset(emulated_tiles[t], 0, sizeof emulated_tiles[t]);
}

static inline void emulated_tile_loadd(int t, const void *from, ptrdiff_t stride) {
    emulated_tile_zero(t);
    for (int i = 0; i < emulated_config.rows[t]; i++)
        memcpy(&emulated_tiles[t][i], (const char *)from + i * stride, emulated_config.bytes[t]);
}

static inline void emulated_tile_stored(int t, void *to, ptrdiff_t stride) {
    emulated_check(emulated_config.rows[t]);
    for (int i = 0; i < emulated_config.rows[t]; i++)
        memcpy((char *)to + i * stride, &emulated_tiles[t][i], emulated_config.bytes[t]);
}

typedef struct emulated_pairs { /* numbers of 16 bits, widened: those in the lower halves of 32 bits, and in the upper */
    emulated even, odd;
} emulated_pairs;

static inline emulated_pairs emulated_bf16(__m512i pairs) {
    return (emulated_pairs){{.ps = emulated_even(pairs)}, {.ps = emulated_odd(pairs)}};
}

static inline emulated_pairs emulated_f16(__m512i pairs) {
    const emulated x = {.si = pairs};
    emulated_pairs y;
    for (int i = 0; i < 16; i++) {
        y.even.f32[i] = _cvtsh_ss(x.u32[i] & 0xffff);
        y.odd.f32[i] = _cvtsh_ss((uint16_t)(x.u32[i] >> 16));
    }
    return y;
}

/* Products of f16, and their sums, are no denormals. */
static inline void emulated_tile_dot(int c, int a, int b, emulated_pairs (*widen)(__m512i)) {
    const int rows = emulated_config.rows[c], depth = emulated_config.rows[b];
    emulated_check(c != a && c != b && a != b && rows && depth && emulated_config.rows[a] == rows &&
                   emulated_config.bytes[a] == 4 * depth && emulated_config.bytes[b] == emulated_config.bytes[c]);
    emulated_pairs y[16];
    for (int k = 0; k < depth; k++) y[k] = widen(emulated_tiles[b][k]);
    for (int i = 0; i < rows; i++) {
        const emulated_pairs x = widen(emulated_tiles[a][i]);
        emulated sum = {.ps = emulated_flush((__m512)emulated_tiles[c][i])};
        for (int half = 0; half < 2; half++) {
            __m256 even = _mm256_setzero_ps(), odd = even;
            for (int k = 0; k < depth; k++) {
                even = _mm256_fmadd_ps(_mm256_set1_ps(x.even.f32[k]), y[k].even.half_ps[half], even);
                odd = _mm256_fmadd_ps(_mm256_set1_ps(x.odd.f32[k]), y[k].odd.half_ps[half], odd);
                even = emulated_flush_half(even);
                odd = emulated_flush_half(odd);
            }
            sum.half_ps[half] = emulated_flush_half(sum.half_ps[half] + emulated_flush_half(even + odd));
        }
        emulated_tiles[c][i] = sum.si;
    }
}

static inline void emulated_tile_dpbf16ps(int c, int a, int b) { emulated_tile_dot(c, a, b, emulated_bf16); }
static inline void emulated_tile_dpfp16ps(int c, int a, int b) { emulated_tile_dot(c, a, b, emulated_f16); }

/* Adds products of bytes, with or without signs. */
static inline void emulated_tile_dot_bytes(int c, int a, int b, int a_has_signs, int b_has_signs) {
    const int rows = emulated_config.rows[c], depth = emulated_config.rows[b], columns = emulated_config.bytes[c] / 4;
    emulated_check(c != a && c != b && a != b && rows && depth && emulated_config.rows[a] == rows &&
                   emulated_config.bytes[a] == 4 * depth && emulated_config.bytes[b] == emulated_config.bytes[c]);
    for (int i = 0; i < rows; i++) {
        const uint8_t *const x = (const uint8_t *)&emulated_tiles[a][i];
        int32_t *const sums = (int32_t *)&emulated_tiles[c][i];
        for (int k = 0; k < 4 * depth; k++) {
            const uint8_t *const y = (const uint8_t *)&emulated_tiles[b][k / 4] + k % 4;
            for (int j = 0; j < columns; j++)
                sums[j] += (a_has_signs ? (int8_t)x[k] : x[k]) * (b_has_signs ? (int8_t)y[4 * j] : y[4 * j]);
        }
    }
}

static inline void emulated_tile_dpbssd(int c, int a, int b) { emulated_tile_dot_bytes(c, a, b, 1, 1); }
static inline void emulated_tile_dpbsud(int c, int a, int b) { emulated_tile_dot_bytes(c, a, b, 1, 0); }
static inline void emulated_tile_dpbusd(int c, int a, int b) { emulated_tile_dot_bytes(c, a, b, 0, 1); }

#define _tile_dpbssd emulated_tile_dpbssd
#define _tile_dpbsud emulated_tile_dpbsud
#define _tile_dpbusd emulated_tile_dpbusd
#define _tile_release emulated_tile_release
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_storeconfig emulated_tile_storeconfig
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#define KVC_TILE_DPFP16PS emulated_tile_dpfp16ps

/* ---- the sources ------------------------------------------------------------------------------------------------- */

/* TARGET is an attribute without features.  Nothing keeps a vector in a register: there is none.
 * `__asm__ volatile` stays, `__asm__ __volatile__` does not. */
#define target(features)
#define __asm__(...)
#define __volatile__(...) ("")
#undef __OPTIMIZE__ /* target.h: copies for every use would take minutes to compile */

#endif
