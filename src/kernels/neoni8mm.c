/* neoni8mm.c: scores and sums of quantised rows for AArch64 with products of matrices of bytes (I8MM, from ARMv8.6 on),
 * and the table, all else of which is as in neonfhm.c.
 *
 * SMMLA multiplies two rows of 8 bytes by two others, and adds the four sums to the lanes.  The one matrix is of 8
 * elements of two rows, the other of the high and low digits of 8 elements of a query: so lanes are high sums and low
 * sums of rows, in turn, and none of them is added up across a vector.  Sums are of 8 rows of two columns, and the high
 * and low digits of 8 weights.
 */
#include "kernels/neon.h"

#ifdef KVC_HAVE_ARMV8_6
#if defined(__clang__)
#define TARGET __attribute__((target("i8mm")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+i8mm")))
#endif
#define LARGEST_WEIGHT KVC_LARGEST_DIGITS
#include "kernels/vector_neon.h"
#include "kernels/template.h"

enum {
    DIGITS = 8,
    SCALED_QUERIES = MANY_QUERIES,
    PLAIN_QUERIES = MANY_QUERIES,
    BLOCK_VECTORS = KVC_QUANT_ELEMENTS / 16, /* of a row */
    DOT_ROWS = LANES,                        /* scored at once, a lane each in the end */
    ROW_PAIRS = DOT_ROWS / 2,
    PAIR_VECTORS = 2 * BLOCK_VECTORS
};

typedef struct byte_sums {
    int32x4_t pairs[ROW_PAIRS]; /* high and low sums of one row, then of the other */
} byte_sums;

/* Multiplies matrices of bytes.  The intrinsic is not there for one function in some compilers. */
INLINE int32x4_t multiply(int32x4_t sum, int8x16_t x, int8x16_t y) {
    __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

/* Returns the first halves of x and y, or the second ones. */
INLINE int8x16_t zip_halves(int8x16_t x, int8x16_t y, int is_second) {
    const int64x2_t a = vreinterpretq_s64_s8(x), b = vreinterpretq_s64_s8(y);
    return vreinterpretq_s8_s64(is_second ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}

/* Puts 8 elements of a row beside those of the next one. */
INLINE void arrange(int8x16_t x[DOT_ROWS * BLOCK_VECTORS]) {
    UNROLL
    for (int p = 0; p < ROW_PAIRS; p++, x += PAIR_VECTORS) {
        const int8x16_t rows[PAIR_VECTORS] = {x[0], x[1], x[2], x[3]};
        UNROLL
        for (int i = 0; i < PAIR_VECTORS; i++) x[i] = zip_halves(rows[i / 2], rows[BLOCK_VECTORS + i / 2], i % 2);
    }
}

/* Adds the products of a block x of rows, which `arrange` put in order, with a query's digits q. */
INLINE void add_products(byte_sums *sums, const int8x16_t x[DOT_ROWS * BLOCK_VECTORS], const char *q) {
    UNROLL
    for (int i = 0; i < PAIR_VECTORS; i++) {
        const int8x16_t y = load_16(q + i * 2 * DIGITS);
        UNROLL
        for (int p = 0; p < ROW_PAIRS; p++) sums->pairs[p] = multiply(sums->pairs[p], x[p * PAIR_VECTORS + i], y);
    }
}

/* Returns 256 times high sums plus low sums, which are lanes side by side, of two pairs. */
INLINE int32x4_t join(const int32x4_t pairs[2]) {
    const int32x4_t places = {8, 0, 8, 0};
    return vpaddq_s32(vshlq_s32(pairs[0], places), vshlq_s32(pairs[1], places));
}

INLINE int32x4_t count_of(const int8x16_t x[DOT_ROWS * BLOCK_VECTORS], const char *q) {
    byte_sums sums = {0};
    add_products(&sums, x, q);
    return join(sums.pairs);
}

INLINE vec total_of(const byte_sums *sums) {
    const int32x4_t high = vuzp1q_s32(sums->pairs[0], sums->pairs[1]), low = vuzp2q_s32(sums->pairs[0], sums->pairs[1]);
    return v_fma(v_from_int(high), v_set(256), v_from_int(low));
}

#include "kernels/score_bytes.h"

enum { SUM_ROWS = 8, COLUMNS = 8, COLUMN_PAIRS = COLUMNS / 2, DIGITS_APART = 16, LOW_DIGITS = 8 };

/* Puts 8 rows of a column beside those of the next one. */
INLINE void store_columns(char *to, const int8x16_t x[8]) {
    UNROLL
    for (int i = 0; i < 4; i++, to += 2 * sizeof *x) {
        const int32x4_t upper = vreinterpretq_s32_s8(x[i]), lower = vreinterpretq_s32_s8(x[4 + i]);
        store_16(to, vreinterpretq_s8_s32(vzip1q_s32(upper, lower)));
        store_16(to + sizeof *x, vreinterpretq_s8_s32(vzip2q_s32(upper, lower)));
    }
}

/* Sums COLUMNS columns of n rows, weighted, for each query: high and low sums of two columns at a time, then joined. */
INLINE void sum_columns(int num_q, int32x4_t (*sums)[COLUMNS / LANES], const char *columns, const char *digits, int n) {
    int32x4_t pairs[QUERIES][COLUMN_PAIRS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int p = 0; p < COLUMN_PAIRS; p++) pairs[r][p] = i_zero();
    for (int j = 0; j < n; j += SUM_ROWS, columns += SUM_ROWS * KVC_QUANT_ELEMENTS, digits += DIGITS_APART) {
        int8x16_t x[COLUMN_PAIRS];
        UNROLL
        for (int p = 0; p < COLUMN_PAIRS; p++) x[p] = load_16(columns + p * (int)sizeof *x);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const int8x16_t y = load_16(digits + r * WEIGHTS_BYTES);
            UNROLL
            for (int p = 0; p < COLUMN_PAIRS; p++) pairs[r][p] = multiply(pairs[r][p], x[p], y);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int p = 0; p < COLUMN_PAIRS; p += 2) sums[r][p / 2] = join(pairs[r] + p);
}

#include "kernels/accumulate_bytes.h"
#include "kernels/matrix_bytes.h"

TARGET void kvc_prepare_neoni8mm(float *q, int q_stride, int num_q, int dim, float scale) {
    split_rows(q, q_stride, num_q, dim, scale);
}
DEFINE_SCORE_BYTES(kvc_score_q8_0_neoni8mm, KVC_Q8_0)
DEFINE_SCORE_BYTES(kvc_score_q4_0_neoni8mm, KVC_Q4_0)
DEFINE_SCORE_BYTES(kvc_score_int8_neoni8mm, KVC_INT8)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_q8_0_neoni8mm, KVC_Q8_0)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_q4_0_neoni8mm, KVC_Q4_0)
DEFINE_ACCUMULATE_BYTES(kvc_accumulate_int8_neoni8mm, KVC_INT8)
DEFINE_BYTE_TILER(neoni8mm)

const kvc_kernels kvc_kernels_neoni8mm = {
    .name = "neoni8mm",
    KVC_NEON_COMMON,
    KVC_NEON_TILER_BF16,
    KVC_NEON_BYTES(neoni8mm),
    KVC_NEONFHM_F16,
};
#endif
