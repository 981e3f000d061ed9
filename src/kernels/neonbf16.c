/* neonbf16.c: scores of bf16 queries, and tiles of bf16, for AArch64 with products of bf16 (from ARMv8.6 on), and the
 * table, all else of which is as in neoni8mm.c.
 *
 * BFDOT adds two products to a lane, BFMMLA four: it multiplies two rows of 4 elements by two others, and adds the four
 * sums to the lanes.  Products are exact, but denormals count as 0, and sums are rounded to odd: by less than a unit in
 * the last place, where others are off by up to half of one.
 *
 * Tiles are multiplied as in amx.c: of query rows and weights, each float is the sum of two bf16, and query rows of
 * bf16 that need not be rotated or transformed are one, as the caller has them.
 *
 *     a panel, of BLOCK keys, or columns of values, after the other     for each 4 elements, or rows, a vector of each
 *                                                                       two keys, or columns
 *     BLOCK query rows, or rows of weights                              for each 4 elements, for each part, the same
 */
#include "kernels/neon.h"

#ifdef KVC_HAVE_ARMV8_6
#if defined(__clang__)
#define TARGET __attribute__((target("bf16")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+bf16")))
#endif
#define HAS_DOT_16 1
#include "kernels/vector_neon.h"

/* The intrinsic is not there for one function in some compilers. */
INLINE vec b_dot(vec sum, bvec x, bvec y) {
    __asm__("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

#include "kernels/template.h"

enum {
    BLOCK = 8, /* rows and columns that are multiplied at once */
    PAIRS_AT_ONCE = BLOCK / 2,
    STEP = 4, /* elements that are multiplied at once */
    STEP_BYTES = PAIRS_AT_ONCE * (int)sizeof(bvec),
    MOST_PARTS = 2
};

/* Returns the steps of k elements, an even number: those past k are 0. */
INLINE int steps_of(int k) { return (k + 2 * STEP - 1) / (2 * STEP) * 2; }

INLINE bvec b_load(const char *p) { return vreinterpretq_u16_s8(load_16(p)); }

INLINE void b_store(char *p, bvec x) { store_16(p, vreinterpretq_s8_u16(x)); }

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Loads elements [d, d + 8) of row j, which are 0 past row n and element dim. */
INLINE bvec load_8(const void *rows, int64_t row_stride, int j, int n, int d, int dim) {
    if (j >= n) return vdupq_n_u16(0);
    const char *const at = (const char *)row_at(rows, row_stride, j) + d * (int)sizeof(uint16_t);
    return d + 8 <= dim ? b_load(at) : b_load_some(at, dim - d);
}

/* Replaces infinities by the largest bf16, so that no part of a query row that is 0 makes a NaN of them. */
INLINE bvec within_bf16(bvec x) {
    const bvec is_infinite = vceqq_u16(vandq_u16(x, vdupq_n_u16(0x7fff)), vdupq_n_u16(0x7f80));
    return vaddq_u16(x, is_infinite); /* plus 0xffff: minus 1 */
}

/* Packs n keys into a panel: for each 4 elements, two keys side by side. */
TARGET static void kvc_pack_keys_bf16_neonbf16(float *dst, const void *rows, int64_t row_stride, int first, int n,
                                               int dim) {
    char *to = (char *)dst;
    (void)first; /* 0: tiles have KVC_PANEL rows */
    for (int j = 0; j < n; j += BLOCK)
        for (int d = 0; d < dim; d += 2 * STEP, to += 2 * STEP_BYTES) {
            UNROLL
            for (int i = 0; i < BLOCK; i += 2) {
                const bvec upper = within_bf16(load_8(rows, row_stride, j + i, n, d, dim));
                const bvec lower = within_bf16(load_8(rows, row_stride, j + i + 1, n, d, dim));
                const uint64x2_t x = vreinterpretq_u64_u16(upper), y = vreinterpretq_u64_u16(lower);
                b_store(to + i / 2 * (int)sizeof(bvec), vreinterpretq_u16_u64(vzip1q_u64(x, y)));
                b_store(to + STEP_BYTES + i / 2 * (int)sizeof(bvec), vreinterpretq_u16_u64(vzip2q_u64(x, y)));
            }
        }
}

/* Packs n values into a panel: for each 4 rows, two columns side by side.  Transposes 4 rows of 8 columns at a time. */
TARGET static void kvc_pack_values_bf16_neonbf16(float *dst, int dst_stride, const void *rows, int64_t row_stride,
                                                 int first, int n, int dim) {
    char *to = (char *)dst;
    (void)dst_stride, (void)first;
    for (int d = 0; d < dim; d += BLOCK)
        for (int j = 0; j < steps_of(n) * STEP; j += STEP, to += STEP_BYTES) {
            bvec x[STEP];
            UNROLL
            for (int i = 0; i < STEP; i++) x[i] = load_8(rows, row_stride, j + i, n, d, dim);
            const uint32x4_t upper[2] = {vreinterpretq_u32_u16(vzip1q_u16(x[0], x[1])),
                                         vreinterpretq_u32_u16(vzip2q_u16(x[0], x[1]))};
            const uint32x4_t lower[2] = {vreinterpretq_u32_u16(vzip1q_u16(x[2], x[3])),
                                         vreinterpretq_u32_u16(vzip2q_u16(x[2], x[3]))};
            UNROLL
            for (int i = 0; i < 2; i++) {
                char *const at = to + i * 2 * (int)sizeof(bvec);
                b_store(at, vreinterpretq_u16_u32(vzip1q_u32(upper[i], lower[i])));
                b_store(at + sizeof(bvec), vreinterpretq_u16_u32(vzip2q_u32(upper[i], lower[i])));
            }
        }
}

/* Multiplies query rows by scale.  Limits floats to the largest bf16, as others would be split into inf and -inf. */
TARGET static void kvc_prepare_tile_neonbf16(float *q, int q_stride, int num_q, int dim, float scale) {
    const vec most = v_set(0x1.fep127f), least = v_set(-0x1.fep127f);
    scale_rows(q, q_stride, num_q, dim, scale);
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < dim; d += LANES) {
            float *at = q + (ptrdiff_t)r * q_stride + d;
            v_store(at, v_max(least, v_min(most, v_load(at)))); /* a NaN stays, as the second operand */
        }
}

/* Rounds the floats of x and y to bf16, those of x first. */
INLINE bvec b_from_floats(vec x, vec y) {
    bvec both;
    __asm__("bfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s" : "=&w"(both) : "w"(x), "w"(y));
    return both;
}

/* Stores the floats of x and y as bf16, and, STEP_BYTES behind, what rounding took off, as bf16, too. */
INLINE void store_parts(char *to, vec x, vec y) {
    const bvec upper = b_from_floats(x, y);
    const vec rest_x = vsubq_f32(x, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(upper), 16)));
    const vec rest_y = vsubq_f32(y, vreinterpretq_f32_u32(vshll_high_n_u16(upper, 16)));
    b_store(to, upper);
    b_store(to + STEP_BYTES, b_from_floats(rest_x, rest_y));
}

INLINE vec load_4(const float *row, int p, int k) {
    return p + STEP <= k ? v_load(row + p) : v_load_some(row + p, p < k ? k - p : 0);
}

/* Packs `steps` steps of `rows` rows, from element p of k on: floats in two parts, or bf16 in one, with zeros behind
 * element k.  Packs BLOCK rows: the last row stands for rows that are not there. */
INLINE void pack_rows(int parts, char *to, const float *a, int lda, int rows, int p, int k, int steps) {
    for (int i = 0; i < BLOCK; i += 2, to += sizeof(bvec)) {
        const float *const x = a + (ptrdiff_t)smaller(i, rows - 1) * lda;
        const float *const y = a + (ptrdiff_t)smaller(i + 1, rows - 1) * lda;
        for (int s = 0; s < steps; s++) {
            char *const at = to + s * parts * STEP_BYTES;
            const int d = p + s * STEP;
            if (parts == 1)
                b_store(at, vcombine_u16(load_halves((const uint16_t *)x + d), load_halves((const uint16_t *)y + d)));
            else
                store_parts(at, load_4(x, d, k), load_4(y, d, k));
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

INLINE vec multiply(vec sum, bvec x, bvec y) {
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

/* Stores the first or second row of sums, each of which is of two rows and two columns; or adds it to c. */
INLINE void store_row(float *c, const vec sums[PAIRS_AT_ONCE], int is_second, int add) {
    UNROLL
    for (int j = 0; j < PAIRS_AT_ONCE; j += 2, c += LANES) {
        const vec x = is_second ? high_halves(sums[j], sums[j + 1]) : low_halves(sums[j], sums[j + 1]);
        v_store(c, add ? v_add(v_load(c), x) : x);
    }
}

/* Multiplies BLOCK rows, of which `rows` are stored, by BLOCK columns. */
INLINE void multiply_block(int parts, float *c, int ldc, int rows, const char *a, const char *b, int steps, int add) {
    vec sums[PAIRS_AT_ONCE][PAIRS_AT_ONCE];
    UNROLL
    for (int i = 0; i < PAIRS_AT_ONCE; i++) UNROLL
    for (int j = 0; j < PAIRS_AT_ONCE; j++) sums[i][j] = v_zero();
    for (; steps; steps--, b += STEP_BYTES) {
        bvec x[PAIRS_AT_ONCE];
        UNROLL
        for (int j = 0; j < PAIRS_AT_ONCE; j++) x[j] = b_load(b + j * (int)sizeof *x);
        UNROLL
        for (int i = 0; i < parts * PAIRS_AT_ONCE; i++, a += sizeof(bvec)) {
            const bvec y = b_load(a);
            vec *const of_row = sums[i % PAIRS_AT_ONCE];
            UNROLL
            for (int j = 0; j < PAIRS_AT_ONCE; j++) of_row[j] = multiply(of_row[j], y, x[j]);
        }
    }
    UNROLL
    for (int i = 0; i < BLOCK; i++, c += ldc)
        if (i < rows) store_row(c, sums[i / 2], i % 2, add);
}

/* Multiplies m rows by a panel of n columns.  Rows have floats, split into two parts, or bf16 in one part. */
INLINE void multiply_pairs(int parts, float *c, int ldc, const float *a, int lda, const float *b, int m, int n, int k,
                           int add, kvc_ahead next) {
    enum { MOST_STEPS = MATMUL_DEPTH / STEP };
    char packed[MOST_PARTS * MOST_STEPS * STEP_BYTES];
    const int all_steps = steps_of(k);
    shares all = shares_of(next, (int64_t)(all_steps + MOST_STEPS - 1) / MOST_STEPS * ((m + BLOCK - 1) / BLOCK));
    for (int first = 0; first < all_steps; first += MOST_STEPS)
        for (int i = 0; i < m; i += BLOCK) {
            const int rows = smaller(BLOCK, m - i), steps = smaller(MOST_STEPS, all_steps - first);
            const char *panel = (const char *)b + (ptrdiff_t)first * STEP_BYTES;
            prefetch_share(&all);
            pack_rows(parts, packed, a + (ptrdiff_t)i * lda, lda, rows, first * STEP, k, steps);
            for (int j = 0; j < n; j += BLOCK, panel += (ptrdiff_t)all_steps * STEP_BYTES)
                multiply_block(parts, c + (ptrdiff_t)i * ldc + j, ldc, rows, packed, panel, steps, add || first);
        }
}

#define DEFINE_MULTIPLY_PAIRS(name, parts)                                                                            \
    TARGET static void name(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k, \
                            int add, kvc_ahead next) {                                                                \
        (void)ldb;                                                                                                    \
        multiply_pairs(parts, c, ldc, a, lda, b, m, n, k, add, next);                                                 \
    }

DEFINE_PREPARE_16(kvc_prepare_bf16_neonbf16)
DEFINE_SCORE_16(kvc_score_bf16_neonbf16, KVC_BF16)
DEFINE_MULTIPLY_PAIRS(kvc_multiply_1_by_1_neonbf16, 1)
DEFINE_MULTIPLY_PAIRS(kvc_multiply_2_by_1_neonbf16, 2)

const kvc_kernels kvc_kernels_neonbf16 = {
    .name = "neonbf16",
    KVC_NEON_COMMON,
    KVC_NEON_BYTES(neoni8mm),
    KVC_NEONFHM_F16,
    .score_16[KVC_BF16] = {kvc_prepare_bf16_neonbf16, kvc_score_bf16_neonbf16},
    .tiler[KVC_BF16] = {.prepare = kvc_prepare_tile_neonbf16,
                        .pack_keys = kvc_pack_keys_bf16_neonbf16,
                        .pack_values = kvc_pack_values_bf16_neonbf16,
                        .score = kvc_multiply_2_by_1_neonbf16,
                        .accumulate = kvc_multiply_2_by_1_neonbf16,
                        .score_bf16 = kvc_multiply_1_by_1_neonbf16},
};
#endif
