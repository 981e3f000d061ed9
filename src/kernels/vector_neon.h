/* vector_neon.h: the vector primitives of template.h for AArch64, with what every such processor has (base ARMv8-A).
 * TARGET is defined before it is included, and
 *
 *   HAS_DOT_16    1 if there are dot products of f16 or bf16; else it may be left out
 *   HAS_DOT_BYTES 1 if there are dot products of int8; else it may be left out
 *
 * v_ primitives are of floats, i_ of integers, c_ of bytes and b_ of 16 bits.
 */
#include <arm_neon.h>
#include <stddef.h>
#include <string.h>

#include "base/dtype.h"
#include "kernels/target.h"

enum { LANES = 4, ACCUMULATORS = 16, MATMUL_SUMS = 16, MATMUL_VECTORS = 4 }; /* of 32 registers */

#define HAS_QUADS 1

typedef float32x4_t vec;

/* Memory is read and written through memcpy, which becomes one instruction: the intrinsics' arguments would have to be
 * aligned to their elements and of their type. */

INLINE vec v_zero(void) { return vdupq_n_f32(0); }

INLINE vec v_set(float x) { return vdupq_n_f32(x); }

INLINE vec v_load(const void *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE vec v_keep(vec x) {
    __asm__("" : "+w"(x));
    return x;
}

INLINE void v_store(void *p, vec x) { memcpy(p, &x, sizeof x); }

INLINE void v_store_first(float *p, vec x) { *p = vgetq_lane_f32(x, 0); }

INLINE vec v_load_some(const float *p, int count) {
    float x[LANES] = {0};
    for (int i = 0; i < count; i++) x[i] = p[i];
    return v_load(x);
}

INLINE void v_store_some(float *p, vec y, int count) {
    float x[LANES];
    v_store(x, y);
    for (int i = 0; i < count; i++) p[i] = x[i];
}

INLINE uint16x4_t load_halves(const void *p) {
    uint16x4_t halves;
    memcpy(&halves, p, sizeof halves);
    return halves;
}

INLINE int8x16_t load_16(const void *p) {
    int8x16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_16(void *p, int8x16_t x) { memcpy(p, &x, sizeof x); }

INLINE vec f32_from_f16(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

INLINE uint16x4_t f16_from_f32(vec x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

INLINE vec v_set_f16(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return f32_from_f16(vdup_n_u16(bits));
}

INLINE vec v_load_f16(const void *p) { return f32_from_f16(load_halves(p)); }

INLINE void v_store_f16(void *p, vec x) {
    uint16x4_t halves = f16_from_f32(x);
    memcpy(p, &halves, sizeof halves);
}

INLINE void store_f16(void *p, float x) {
    uint16_t bits = vget_lane_u16(f16_from_f32(v_set(x)), 0);
    memcpy(p, &bits, sizeof bits);
}

INLINE vec v_load_bf16(const void *p) {
    uint16x8_t halves = vcombine_u16(load_halves(p), vdup_n_u16(0));
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), halves)); /* lower halves are 0 */
}

/* Rounds ties to even: adds half of the last bit that stays if that bit is set, and just less than half if not. */
INLINE void v_store_bf16(void *p, vec x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    uint16x4_t halves = vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
    memcpy(p, &halves, sizeof halves);
}

/* Loads LANES bytes, and LANES zeros behind them. */
INLINE uint8x8_t load_bytes(const void *p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vreinterpret_u8_u32(vset_lane_u32(bytes, vdup_n_u32(0), 0));
}

INLINE vec v_load_i8(const void *p) {
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

INLINE vec v_load_u4(const void *p, int shift) {
    uint8x8_t shifted = vshl_u8(load_bytes(p), vdup_n_s8((int8_t)-shift)); /* to the right */
    uint16x8_t wide = vmovl_u8(vand_u8(shifted, vdup_n_u8(15)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

INLINE void v_store_8(void *p, vec x) {
    uint16x4_t narrow = vmovn_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(x)));
    uint8x8_t narrower = vmovn_u16(vcombine_u16(narrow, narrow));
    uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(narrower), 0);
    memcpy(p, &bytes, sizeof bytes);
}

INLINE vec v_add(vec x, vec y) { return vaddq_f32(x, y); }

INLINE vec v_mul(vec x, vec y) { return vmulq_f32(x, y); }

INLINE vec v_div(vec x, vec y) { return vdivq_f32(x, y); }

INLINE vec v_fma(vec x, vec y, vec z) { return vfmaq_f32(z, x, y); }

/* Returns x where the mask is set, else y.  The mask is masked from Clang, which would turn it and a comparison into
 * FMAXNM where y is no NaN; that yields NaN where x is a signalling one. */
INLINE vec choose(uint32x4_t mask, vec x, vec y) {
    __asm__("" : "+w"(mask));
    return vbslq_f32(mask, x, y);
}

INLINE vec v_max(vec x, vec y) { return choose(vcgtq_f32(x, y), x, y); }

INLINE vec v_min(vec x, vec y) { return choose(vcltq_f32(x, y), x, y); }

INLINE vec v_abs(vec x) { return vabsq_f32(x); }

INLINE vec v_max_abs(vec x, vec y) { return v_max(v_abs(x), y); }

INLINE vec v_number(vec x) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vceqq_f32(x, x))); }

INLINE vec v_mask(vec x, const void *p) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(v_load(p))));
}

INLINE uint32_t v_equal(vec x, vec y) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vceqq_f32(x, y), bits));
}

INLINE vec v_count(vec n, vec x, vec y) {
    return vaddq_f32(n, vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, y), vreinterpretq_u32_f32(vdupq_n_f32(1)))));
}

INLINE vec v_truncate(vec x) { return vrndq_f32(x); }

INLINE void v_store_nearest(void *p, vec x) { v_store_8(p, vrndaq_f32(x)); }

INLINE vec v_scale(vec x, vec scale, vec y, vec least) {
    const vec power = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(scale), 23));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(x, power)), vcltq_f32(y, least)));
}

/* Splits x into the integer below, but at least -127, and what is left, which is returned. */
INLINE vec v_split_power(vec *x) {
    const vec limited = v_max(vdupq_n_f32(-127), *x);
    *x = vrndmq_f32(limited);
    return vsubq_f32(limited, *x);
}

INLINE vec v_times_power(vec x, vec n) {
    const int32x4_t exponents = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), exponents));
}

INLINE float v_max_lane(vec x) { return vmaxvq_f32(x); }

INLINE float v_sum_lanes(vec x) { return vaddvq_f32(x); }

INLINE vec v_max_lanes(const vec x[LANES], int count) {
    (void)count; /* at least 1, so all are there */
    return vpmaxq_f32(vpmaxq_f32(x[0], x[1]), vpmaxq_f32(x[2], x[3]));
}

INLINE vec v_sums(const vec x[LANES]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

INLINE void v_store_largest(float *p, const vec x[4]) { v_store(p, v_max_lanes(x, LANES)); }

INLINE void v_store_sums(float *p, const vec x[4]) { v_store(p, v_sums(x)); }

/* Puts the first halves of x and y together. */
INLINE vec low_halves(vec x, vec y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); }

INLINE vec high_halves(vec x, vec y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); }

INLINE vec v_swap(vec x, int n) { return n == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }

INLINE void v_transpose(vec x[LANES]) {
    vec even = vtrn1q_f32(x[0], x[1]), odd = vtrn2q_f32(x[0], x[1]); /* lanes of x[0] and x[1], alternating */
    vec even_below = vtrn1q_f32(x[2], x[3]), odd_below = vtrn2q_f32(x[2], x[3]);
    x[0] = low_halves(even, even_below);
    x[1] = low_halves(odd, odd_below);
    x[2] = high_halves(even, even_below);
    x[3] = high_halves(odd, odd_below);
}

INLINE void copy_row(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

/* ---- integers ---------------------------------------------------------------------------------------------------- */

typedef int32x4_t ivec;

INLINE int16x8_t halves_of(ivec x) { return vreinterpretq_s16_s32(x); }

INLINE ivec i_zero(void) { return vdupq_n_s32(0); }

INLINE ivec i_set_16(int16_t x) { return vreinterpretq_s32_s16(vdupq_n_s16(x)); }

INLINE ivec i_set_pair(const void *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return vdupq_n_s32(pair);
}

INLINE ivec i_and(ivec x, ivec y) { return vandq_s32(x, y); }

INLINE ivec i_xor_and(ivec x, ivec y, ivec z) { return vandq_s32(veorq_s32(x, y), z); }

INLINE ivec i_high_bytes(ivec x) { return vreinterpretq_s32_s16(vshrq_n_s16(halves_of(x), 8)); }

INLINE ivec i_shift(ivec x, int n) {
    return vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(x), vdupq_n_s16((int16_t)-n)));
}

INLINE ivec i_dot(ivec sum, ivec x, ivec y) {
    const int32x4_t low = vmull_s16(vget_low_s16(halves_of(x)), vget_low_s16(halves_of(y)));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(halves_of(x), halves_of(y))));
}

INLINE vec v_from_int(ivec x) { return vcvtq_f32_s32(x); }

INLINE void i_store_16(int16_t *p, vec x, vec y) {
    const int16x8_t packed = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x)), vqmovn_s32(vcvtnq_s32_f32(y)));
    memcpy(p, &packed, sizeof packed);
}

/* Truncates 32 floats to bytes: to int32, then to int16, then to bytes. */
INLINE code_bytes c_from_floats(const vec x[8]) {
    uint8x16_t halves[2];
    code_bytes both;
    UNROLL
    for (int i = 0; i < 2; i++) {
        uint16x8_t narrow[2];
        UNROLL
        for (int j = 0; j < 2; j++)
            narrow[j] = vcombine_u16(vmovn_u32(vcvtq_u32_f32(x[4 * i + 2 * j])),
                                     vmovn_u32(vcvtq_u32_f32(x[4 * i + 2 * j + 1])));
        halves[i] = vcombine_u8(vmovn_u16(narrow[0]), vmovn_u16(narrow[1]));
    }
    memcpy(&both, halves, sizeof both);
    return both;
}

/* Sets eight floats to eight int16. */
INLINE void floats_from_16(vec to[2], int16x8_t x) {
    to[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
    to[1] = vcvtq_f32_s32(vmovl_high_s16(x));
}

/* NEON has no step from int8 to int32: 16 bytes become twice 8 int16, and these four times 4 floats. */
INLINE void c_to_floats(vec to[8], code_bytes x) {
    int8x16_t halves[2];
    memcpy(halves, &x, sizeof halves);
    UNROLL
    for (int i = 0; i < 2; i++, to += 4) {
        floats_from_16(to, vmovl_s8(vget_low_s8(halves[i])));
        floats_from_16(to + 2, vmovl_high_s8(halves[i]));
    }
}

INLINE code_bytes c_look_up(const void *table, code_bytes x) {
    uint8x16_t entries, halves[2];
    memcpy(&entries, table, sizeof entries);
    memcpy(halves, &x, sizeof halves);
    UNROLL
    for (int i = 0; i < 2; i++) halves[i] = vqtbl1q_u8(entries, halves[i]);
    memcpy(&x, halves, sizeof x);
    return x;
}

/* Finishes 16 codes, from element `first` on: looks levels up, or adds fifth bits, whichever the type has. */
INLINE uint8x16_t finish_codes(int type, uint8x16_t low, const char *bits, int first) {
    if (KVC_TYPES[type].num_levels == 64) {
        uint8x16x4_t levels;
        uint8x8_t high;
        memcpy(&levels, kvc_levels(type), sizeof levels);
        memcpy(&high, bits, sizeof high);
        const uint8x16_t both = vshlq_u8(vcombine_u8(high, high), vcombine_s8(vdup_n_s8((int8_t)(4 - first / 4)),
                                                                              vdup_n_s8((int8_t)(2 - first / 4))));
        return vqtbl4q_u8(levels, vorrq_u8(low, vandq_u8(both, vdupq_n_u8(0x30))));
    }
    if (KVC_TYPES[type].num_levels) {
        uint8x16_t levels;
        memcpy(&levels, kvc_levels(type), sizeof levels);
        return vqtbl1q_u8(levels, low);
    }
    if (!KVC_TYPES[type].has_fifth_bits) return low;
    const uint8x8_t bit_of = vcreate_u8(0x8040201008040201); /* in a byte, for each of 8 elements */
    uint8_t byte[2];
    memcpy(byte, bits, sizeof byte);
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(byte[0]), vdup_n_u8(byte[1]));
    const uint8x16_t set = vtstq_u8(spread, vcombine_u8(bit_of, bit_of));
    return vorrq_u8(low, vandq_u8(set, vdupq_n_u8(16)));
}

INLINE void unpack_codes(int type, char *dst, const char *block, int by) {
    const char *nibbles = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    uint8x16_t both;
    memcpy(&both, nibbles, sizeof both);
    const int is_six = KVC_TYPES[type].num_levels == 64;
    uint8x16_t first = finish_codes(type, vandq_u8(both, vdupq_n_u8(15)), is_six ? block : nibbles - 4, 0);
    uint8x16_t second = finish_codes(type, vshrq_n_u8(both, 4), is_six ? block : nibbles - 2, 16);
    first = vsubq_u8(first, vdupq_n_u8((uint8_t)by));
    second = vsubq_u8(second, vdupq_n_u8((uint8_t)by));
    memcpy(dst, &first, sizeof first);
    memcpy(dst + sizeof first, &second, sizeof second);
}

INLINE void i_load_rows(ivec x[4], const char *p, ptrdiff_t stride) {
    vec y[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) y[i] = v_load(p + i * stride);
    v_transpose(y);
    UNROLL
    for (int i = 0; i < LANES; i++) x[i] = vreinterpretq_s32_f32(y[i]);
}

INLINE void v_load_scales(vec x[2], const char *p, ptrdiff_t stride) {
    uint16_t bits[2][LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) {
        memcpy(&bits[0][i], p + i * stride, sizeof bits[0][i]);
        memcpy(&bits[1][i], p + i * stride + sizeof bits[0][i], sizeof bits[1][i]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = v_load_f16(bits[i]);
}

/* Loads 8 elements of two rows as int16, the two of a column side by side; 4-bit codes: low halves to x[0]. */
INLINE void i_load_pairs(int type, ivec x[2], const void *p, const void *q) {
    const size_t bytes = kvc_is_8_bits(type) ? 8 : 4;
    uint64_t one = 0, two = 0;
    memcpy(&one, p, bytes);
    memcpy(&two, q, bytes);
    if (kvc_is_8_bits(type)) {
        const int8x8_t a = vcreate_s8(one), b = vcreate_s8(two);
        x[0] = vreinterpretq_s32_s16(vmovl_s8(vzip1_s8(a, b)));
        x[1] = vreinterpretq_s32_s16(vmovl_s8(vzip2_s8(a, b)));
    } else {
        const uint8x8_t both = vzip1_u8(vcreate_u8(one), vcreate_u8(two));
        const int8x8_t low = vreinterpret_s8_u8(vand_u8(both, vdup_n_u8(15)));
        const int8x8_t high = vreinterpret_s8_u8(vshr_n_u8(both, 4));
        x[0] = vreinterpretq_s32_s16(vsubl_s8(low, vdup_n_s8(8)));
        x[1] = vreinterpretq_s32_s16(vsubl_s8(high, vdup_n_s8(8)));
    }
}

INLINE void i_order(int type, ivec x[2]) {
    (void)type;
    (void)x;
}

INLINE ivec i_load(const void *p) {
    ivec x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE ivec i_begin_quads(const int32_t *p) {
    (void)p;
    return i_zero();
}

INLINE ivec i_set_quad(const void *p) { return i_set_pair(p); }

/* Keeps compilers from loading by *p before *x is known: GCC loads all first, and has no registers for that. */
INLINE void load_later(const char **p, ivec *x) { __asm__("" : "+r"(*p), "+w"(*x)); }

#if HAS_DOT_BYTES
INLINE void i_store(void *p, ivec x) { memcpy(p, &x, sizeof x); }

INLINE ivec i_set_32(int32_t x) { return vdupq_n_s32(x); }

INLINE ivec i_xor(ivec x, ivec y) { return veorq_s32(x, y); }

INLINE ivec i_of_bits(vec x) { return vreinterpretq_s32_f32(x); }

/* Loads 4 bytes of four rows, and puts the four bytes of each column side by side, perhaps rows 1 and 2 swapped. */
INLINE ivec i_load_quad(const char *p, ptrdiff_t stride, int swaps) {
    const char *const second = p + (swaps ? 2 : 1) * stride, *const third = p + (swaps ? 1 : 2) * stride;
    const uint8x8_t even = vzip1_u8(load_bytes(p), load_bytes(third)),
                    odd = vzip1_u8(load_bytes(second), load_bytes(p + 3 * stride));
    return vreinterpretq_s32_u8(vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd)));
}

/* The intrinsic is not there for one function in some compilers. */
INLINE ivec i_dot_quads(ivec sum, ivec x, ivec y) {
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}
#else
/* Two products fit 16 bits, as none of y is -128. */
INLINE ivec i_dot_quads(ivec sum, ivec x, ivec y) {
    const int8x16_t a = vreinterpretq_s8_s32(x), b = vreinterpretq_s8_s32(y);
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    return vpadalq_s16(sum, pairs);
}
#endif

enum { CODE_BYTES = 1024 }; /* more than a sketch has */

INLINE ivec i_begin_codes(ivec sum) { return sum; }

INLINE ivec i_dot_codes(ivec sum, ivec x, ivec y) { return i_dot_quads(sum, x, y); }

INLINE ivec i_end_codes(ivec sum, ivec some) { return (void)sum, some; }

/* ---- 16 bits ----------------------------------------------------------------------------------------------------- */

#if HAS_DOT_16
typedef uint16x8_t bvec;

INLINE bvec b_load_some(const void *p, int count) {
    uint16_t x[2 * LANES] = {0};
    memcpy(x, p, (size_t)count * sizeof *x);
    bvec y;
    memcpy(&y, x, sizeof y);
    return y;
}
#endif
