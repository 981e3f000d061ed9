/* neondotprod.c: scores and sums of quantised rows for AArch64 with dot products of bytes (from ARMv8.2 on), and the
 * table, all else of which is as in neon.c.  SDOT adds four products of bytes to a lane.  What rows are multiplied by,
 * a query or weights, has 16 bits: two digits, signed bytes, of which the high one counts 256 (score_bytes.h). */
#include "kernels/neon.h"

#ifdef KVC_HAVE_NEON
#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define HAS_DOT_BYTES 1
#define LARGEST_WEIGHT KVC_LARGEST_DIGITS
#include "kernels/vector_neon.h"
#include "kernels/template.h"

enum {
    DIGITS = KVC_QUANT_ELEMENTS,
    SCALED_QUERIES = QUERIES,
    PLAIN_QUERIES = 2,
    BLOCK_VECTORS = KVC_QUANT_ELEMENTS / 16, /* of a row */
    DOT_ROWS = LANES                         /* scored at once, a lane each in the end */
};

typedef struct byte_sums {
    int32x4_t high[DOT_ROWS], low[DOT_ROWS];
} byte_sums;

/* Adds the products of bytes, of four to each lane. */
INLINE int32x4_t dot(int32x4_t sum, int8x16_t x, int8x16_t y) {
    return i_dot_quads(sum, vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y));
}

INLINE int32x4_t dot_block(int32x4_t sum, const int8x16_t x[BLOCK_VECTORS], const char *q) {
    return dot(dot(sum, x[0], load_16(q)), x[1], load_16(q + 16));
}

/* Adds up the lanes of each. */
INLINE int32x4_t add_lanes(const int32x4_t x[DOT_ROWS]) {
    return vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]));
}

INLINE void arrange(int8x16_t x[DOT_ROWS * BLOCK_VECTORS]) { (void)x; }

/* Adds the products of a block x of DOT_ROWS rows with a query's: q has DIGITS high digits, then as many low ones. */
INLINE void add_products(byte_sums *sums, const int8x16_t x[DOT_ROWS * BLOCK_VECTORS], const char *q) {
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) {
        sums->high[j] = dot_block(sums->high[j], x + j * BLOCK_VECTORS, q);
        sums->low[j] = dot_block(sums->low[j], x + j * BLOCK_VECTORS, q + DIGITS);
    }
}

/* Returns the products of a block of DOT_ROWS rows with a query's digits, a lane for each row. */
INLINE int32x4_t count_of(const int8x16_t x[DOT_ROWS * BLOCK_VECTORS], const char *q) {
    int32x4_t counts[DOT_ROWS];
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) {
        const int32x4_t high = dot_block(i_zero(), x + j * BLOCK_VECTORS, q);
        counts[j] = dot_block(vshlq_n_s32(high, 8), x + j * BLOCK_VECTORS, q + DIGITS);
    }
    return add_lanes(counts);
}

INLINE vec total_of(const byte_sums *sums) {
    return v_fma(v_from_int(add_lanes(sums->high)), v_set(256), v_from_int(add_lanes(sums->low)));
}

#include "kernels/score_bytes.h"

enum { SUM_ROWS = DOT_ROWS, COLUMNS = 16, DIGITS_APART = 8, LOW_DIGITS = KVC_TILE * 2 };

INLINE void store_columns(char *to, const int8x16_t x[4]) {
    UNROLL
    for (int i = 0; i < 4; i++) store_16(to + i * (int)sizeof *x, x[i]);
}

/* Adds the products of COLUMNS columns of n rows with the high, or low, digits of the queries' weights to sums. */
INLINE void add_columns(int num_q, int32x4_t (*sums)[COLUMNS / LANES], const char *columns, const char *digits, int n) {
    for (int j = 0; j < n; j += SUM_ROWS, columns += SUM_ROWS * KVC_QUANT_ELEMENTS, digits += SUM_ROWS) {
        int8x16_t x[COLUMNS / LANES];
        UNROLL
        for (int i = 0; i < COLUMNS / LANES; i++) x[i] = load_16(columns + i * (int)sizeof *x);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const int8x16_t y = vreinterpretq_s8_s32(i_set_pair(digits + r * WEIGHTS_BYTES));
            UNROLL
            for (int i = 0; i < COLUMNS / LANES; i++) sums[r][i] = dot(sums[r][i], x[i], y);
        }
    }
}

/* Sums COLUMNS columns of n rows, weighted: by the high digits of weights, times 256, then by the low ones. */
INLINE void sum_columns(int num_q, int32x4_t (*sums)[COLUMNS / LANES], const char *columns, const char *digits, int n) {
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < COLUMNS / LANES; i++) sums[r][i] = i_zero();
    add_columns(num_q, sums, columns, digits, n);
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < COLUMNS / LANES; i++) sums[r][i] = vshlq_n_s32(sums[r][i], 8);
    add_columns(num_q, sums, columns, digits + LOW_DIGITS, n);
}

#include "kernels/accumulate_bytes.h"

#define SHIFTS_VALUES 1
enum { BYTE_QUERIES = 4, STEPS_AT_ONCE = 4 };

INLINE ivec load_steps(const void *p) { return i_load(p); }

#define DOT_WITH(instruction, lane) __asm__(instruction " %0.4s, %1.16b, %2.4b[" lane "]" : "+w"(sum) : "w"(x), "w"(y))

/* Adds the products of bytes of x with four bytes of y, number `step`, which is a part of the instruction. */
INLINE ivec dot_keys(ivec sum, ivec x, ivec y, int step) {
    if (step == 0) DOT_WITH("sdot", "0");
    if (step == 1) DOT_WITH("sdot", "1");
    if (step == 2) DOT_WITH("sdot", "2");
    if (step == 3) DOT_WITH("sdot", "3");
    return sum;
}

INLINE ivec dot_values(ivec sum, ivec x, ivec y, int step) {
    if (step == 0) DOT_WITH("udot", "0");
    if (step == 1) DOT_WITH("udot", "1");
    if (step == 2) DOT_WITH("udot", "2");
    if (step == 3) DOT_WITH("udot", "3");
    return sum;
}

/* Returns the sum of n weights, bytes without signs: their dot products with ones. */
INLINE int32_t sum_weights(const char *p, int n) {
    const ivec ones = i_set_32(0x01010101);
    ivec sum = i_zero();
    for (int i = 0; i < n; i += 4 * LANES) {
        const ivec x = i_load(p + i);
        __asm__("udot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(ones));
    }
    return vaddvq_s32(sum);
}

INLINE void store_weights(void *p, const vec x[EXPS]) {
    const uint16x8_t low = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x[0])), vmovn_u32(vcvtnq_u32_f32(x[1])));
    const uint16x8_t high = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x[2])), vmovn_u32(vcvtnq_u32_f32(x[3])));
    const uint8x16_t bytes = vcombine_u8(vmovn_u16(low), vmovn_u16(high));
    memcpy(p, &bytes, sizeof bytes);
}

#include "kernels/multiply_bytes.h"

DEFINE_BYTES(neondotprod)

TARGET void kvc_prepare_neondotprod(float *q, int q_stride, int num_q, int dim, float scale) {
    split_rows(q, q_stride, num_q, dim, scale);
}
DEFINE_SCORE_BYTES(kvc_score_q8_0_neondotprod, KVC_Q8_0)
DEFINE_SCORE_BYTES(kvc_score_q4_0_neondotprod, KVC_Q4_0)
DEFINE_SCORE_BYTES(kvc_score_int8_neondotprod, KVC_INT8)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_q8_0_neondotprod, KVC_Q8_0)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_q4_0_neondotprod, KVC_Q4_0)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_int8_neondotprod, KVC_INT8)
DEFINE_BYTE_TILER(neondotprod)
DEFINE_RANK(kvc_rank_int8_neondotprod, KVC_INT8)
DEFINE_SKETCH(kvc_sketch_neondotprod)

const kvc_kernels kvc_kernels_neondotprod = {
    .name = "neondotprod",
    KVC_NEON_COMMON,
    KVC_NEON_TILER_BF16,
    KVC_NEON_BYTES(neondotprod),
};
#endif
