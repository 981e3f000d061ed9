/* neondotprod.c: scores of quantised rows for AArch64 with dot products of bytes (from ARMv8.2 on), and the table, all
 * else of which is as in neon.c.
 *
 * As in score_quantised.h, queries are rounded to about 16 bits, and sums within a block are exact.  But each element
 * of a query is 256 * high + low, of two signed bytes: SDOT adds four products of bytes to a lane, so that rows are
 * neither widened nor moved into columns.
 *
 * A prepared query row lies where its dim floats were: for each block int8 high[KVC_QUANT_ELEMENTS] and
 * low[KVC_QUANT_ELEMENTS], in units of the row's largest magnitude / LARGEST; behind them a factor, an f32, that turns
 * a sum over blocks into a score.
 */
#include "kernels/neon.h"

#ifdef KVC_HAVE_NEON
#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#include "kernels/vector_neon.h"
#include "kernels/template.h"

enum {
    LARGEST = 127 * 256 + 127,
    BLOCK_VECTORS = KVC_QUANT_ELEMENTS / 16, /* of a row */
    PLAIN_QUERIES = 2,                       /* scored at once where sums of all blocks stay in registers */
    DOT_ROWS = LANES,                        /* scored at once, a lane each in the end */
    MOST_ELEMENTS = 1 << 16,                 /* whose products' sum fits a lane */
    LINES_AT_ONCE = 2                        /* prefetched for a block of them: about as many as are read */
};

/* Adds the products of bytes, of four to each lane.  The intrinsic is not there for one function in some compilers. */
INLINE int32x4_t dot(int32x4_t sum, int8x16_t x, int8x16_t y) {
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

INLINE int8x16_t load_16(const void *p) {
    int8x16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Rounds a row, in place. */
INLINE void split_row(float *row, int dim, float unit, float scale) {
    const vec inverse = v_set(reciprocal(unit));
    const float factor = unit * scale;
    char *to = (char *)row; /* never reaches what is still to be read */
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, to += 2 * KVC_QUANT_ELEMENTS) {
        int16_t x[KVC_QUANT_ELEMENTS];
        UNROLL
        for (int i = 0; i < KVC_QUANT_ELEMENTS; i += 2 * LANES)
            i_store_16(x + i, v_mul(v_load(row + d + i), inverse), v_mul(v_load(row + d + i + LANES), inverse));
        UNROLL
        for (int i = 0; i < KVC_QUANT_ELEMENTS; i += 8) {
            const int16x8_t y = vreinterpretq_s16_s8(load_16(x + i));
            const int8x8_t high = vshrn_n_s16(vaddq_s16(y, vdupq_n_s16(128)), 8), low = vmovn_s16(y);
            memcpy(to + i, &high, sizeof high);
            memcpy(to + KVC_QUANT_ELEMENTS + i, &low, sizeof low);
        }
    }
    memcpy(to, &factor, sizeof factor);
}

extern kvc_prepare_fn kvc_prepare_neondotprod;
TARGET void kvc_prepare_neondotprod(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++, q += q_stride)
        split_row(q, dim, unit_of(q, dim) * ((float)INT16_MAX / (float)LARGEST), scale);
}

/* Loads a block's elements. */
INLINE void load_elements(int type, int8x16_t x[BLOCK_VECTORS], const char *block) {
    block += begin_of(type);
    x[0] = load_16(block);
    if (kvc_is_8_bits(type)) {
        x[1] = load_16(block + 16);
        return;
    }
    const uint8x16_t both = vreinterpretq_u8_s8(x[0]);
    x[0] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vdupq_n_s8(8));
    x[1] = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), vdupq_n_s8(8));
}

INLINE int32x4_t dot_block(int32x4_t sum, const int8x16_t x[BLOCK_VECTORS], const char *q) {
    return dot(dot(sum, x[0], load_16(q)), x[1], load_16(q + 16));
}

/* Adds up the lanes of each. */
INLINE int32x4_t add_lanes(const int32x4_t x[DOT_ROWS]) {
    return vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]));
}

/* Rows that are scored at once.  Where fewer are left, the last one stands for those that are not there. */
typedef struct dot_rows {
    const char *at[DOT_ROWS];
} dot_rows;

INLINE dot_rows dot_rows_at(const score_args *a, int first) {
    dot_rows rows;
    for (int j = 0; j < DOT_ROWS; j++) rows.at[j] = row_at(a->rows, a->row_stride, smaller(first + j, a->n - 1));
    return rows;
}

INLINE vec scales_of(const dot_rows *rows, int at) {
    uint16_t bits[DOT_ROWS];
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) memcpy(&bits[j], rows->at[j] + at, sizeof bits[j]);
    return v_load_f16(bits);
}

/* Adds the products of rows whose blocks have scales to sums. */
INLINE void dot_scaled(int num_q, int type, vec sums[QUERIES], const dot_rows *rows, const char *const *q, int dim,
                       prefetcher *next) {
    for (int d = 0, at = 0; d < dim; d += KVC_QUANT_ELEMENTS, at += block_bytes(type)) {
        const vec scale = scales_of(rows, at);
        int8x16_t x[DOT_ROWS][BLOCK_VECTORS];
        prefetch_step(next, LINES_AT_ONCE);
        UNROLL
        for (int j = 0; j < DOT_ROWS; j++) load_elements(type, x[j], rows->at[j] + at);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            int32x4_t counts[DOT_ROWS];
            UNROLL
            for (int j = 0; j < DOT_ROWS; j++) {
                const int32x4_t high = dot_block(i_zero(), x[j], q[r] + 2 * (ptrdiff_t)d);
                counts[j] = dot_block(vshlq_n_s32(high, 8), x[j], q[r] + 2 * (ptrdiff_t)d + KVC_QUANT_ELEMENTS);
            }
            sums[r] = v_fma(v_from_int(add_lanes(counts)), scale, sums[r]);
        }
    }
}

/* Adds the products of rows without scales in elements [begin, end) to sums: lanes are added up once, in the end. */
INLINE void dot_plain(int num_q, vec sums[QUERIES], const dot_rows *rows, const char *const *q, int begin, int end,
                      prefetcher *next) {
    int32x4_t high[QUERIES][DOT_ROWS], low[QUERIES][DOT_ROWS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int j = 0; j < DOT_ROWS; j++) high[r][j] = low[r][j] = i_zero();
    for (int d = begin; d < end; d += KVC_QUANT_ELEMENTS) {
        int8x16_t x[DOT_ROWS][BLOCK_VECTORS];
        prefetch_step(next, LINES_AT_ONCE);
        UNROLL
        for (int j = 0; j < DOT_ROWS; j++) load_elements(KVC_INT8, x[j], rows->at[j] + d);
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int j = 0; j < DOT_ROWS; j++) {
            high[r][j] = dot_block(high[r][j], x[j], q[r] + 2 * (ptrdiff_t)d);
            low[r][j] = dot_block(low[r][j], x[j], q[r] + 2 * (ptrdiff_t)d + KVC_QUANT_ELEMENTS);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        const vec sum = v_fma(v_from_int(add_lanes(high[r])), v_set(256), v_from_int(add_lanes(low[r])));
        sums[r] = v_add(sums[r], sum);
    }
}

/* Scores all rows for num_q queries. */
INLINE void dot_all(int num_q, int type, const score_args *a, kvc_ahead next) {
    const char *q[QUERIES];
    for (int r = 0; r < num_q; r++) q[r] = (const char *)(a->q + (ptrdiff_t)r * a->q_stride);
    const int steps = (a->n + DOT_ROWS - 1) / DOT_ROWS * (a->dim / KVC_QUANT_ELEMENTS);
    prefetcher p = prefetch_begin(next, a->rows, steps * LINES_AT_ONCE);
    for (int j = 0; j < a->n; j += DOT_ROWS) {
        const dot_rows rows = dot_rows_at(a, j);
        vec sums[QUERIES];
        UNROLL
        for (int r = 0; r < num_q; r++) sums[r] = v_zero();
        if (type == KVC_INT8) {
            for (int d = 0; d < a->dim; d += MOST_ELEMENTS)
                dot_plain(num_q, sums, &rows, q, d, smaller(d + MOST_ELEMENTS, a->dim), &p);
        } else {
            dot_scaled(num_q, type, sums, &rows, q, a->dim, &p);
        }
        UNROLL
        for (int r = 0; r < num_q; r++) {
            float factor;
            memcpy(&factor, q[r] + 2 * (ptrdiff_t)a->dim, sizeof factor);
            v_store(a->scores + r * KVC_TILE + j, v_mul(sums[r], v_set(factor)));
        }
    }
    prefetch_rest(&p);
}

/* Is a kvc_score_fn once the type is a constant. */
INLINE void score_dots(int type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                       int64_t row_stride, int n, int dim, kvc_ahead next) {
    for (int some; num_q; num_q -= some, scores += some * KVC_TILE, q += (ptrdiff_t)some * q_stride) {
        const score_args a = {scores, q, q_stride, rows, row_stride, n, dim};
        some = smaller(num_q, type == KVC_INT8 ? PLAIN_QUERIES : QUERIES);
        const kvc_ahead part = take_part(&next, some, num_q);
        CALL_WITH_QUERIES(dot_all, some, QUERIES, 0, type, &a, part)
    }
}

#define DEFINE_SCORE_DOTS(name, type)                                                                              \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        score_dots(type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                              \
    }

DEFINE_SCORE_DOTS(kvc_score_q8_0_neondotprod, KVC_Q8_0)
DEFINE_SCORE_DOTS(kvc_score_q4_0_neondotprod, KVC_Q4_0)
DEFINE_SCORE_DOTS(kvc_score_int8_neondotprod, KVC_INT8)

const kvc_kernels kvc_kernels_neondotprod = {
    .name = "neondotprod",
    .score[KVC_Q8_0] = {kvc_prepare_neondotprod, kvc_score_q8_0_neondotprod},
    .score[KVC_Q4_0] = {kvc_prepare_neondotprod, kvc_score_q4_0_neondotprod},
    .score[KVC_INT8] = {kvc_prepare_neondotprod, kvc_score_int8_neondotprod},
    KVC_NEON_COMMON,
};
#endif
