/* matmul_quantised.h: products of many query rows with a tile of rows of q8_0, in integers, for vectors of 16 lanes and
 * products that take one instruction; part of avx512vnni.c.
 *
 * Computes what score_quantised.h and accumulate_quantised.h compute, but unpacks rows once for all query rows.  A
 * block is KVC_QUANT_ELEMENTS elements with one scale, a unit what a rounded weight of 1 stands for.
 *
 *     a panel of keys      of PANEL_ROWS rows after the other, of block after block: the rows' scales, as floats; then,
 *                          of each pair of elements, two vectors of 16 rows each
 *     a panel of values    of block after block: what to add to units, 0 or NaN; the rows' scales, as floats; then, of
 *                          each pair of rows, two vectors of 16 columns each
 */

enum {
    PANEL_ROWS = 2 * LANES,
    KEY_BLOCK = (2 + 2 * PAIRS) * LANES,                         /* floats that a block of PANEL_ROWS keys takes */
    VALUE_BLOCK = LANES + KVC_PANEL + KVC_PANEL / 2 * 2 * LANES, /* floats that a block of all values takes */
    VALUE_PAIRS = LANES + KVC_PANEL,                             /* floats before its pairs */
    PRODUCT_QUERIES = 6                                          /* query rows that are multiplied at once */
};

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Packs a block of LANES keys. */
APART void pack_key_block(float *dst, const char *block, ptrdiff_t stride) {
    v_store(dst, load_scale_of_rows(block, stride));
    dst += PANEL_ROWS;
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i += PIECE_BYTES) {
        ivec x[4];
        i_load_rows(x, block + KVC_SCALE_BYTES + i, stride);
        UNROLL
        for (int pair = 0; pair < PIECE_BYTES / 2; pair++, dst += PANEL_ROWS)
            i_store(dst, pair_of(KVC_Q8_0, x[pair / 2], pair % 2));
    }
}

/* Packs n keys of q8_0 into a panel.  Rows past n, up to a multiple of PANEL_ROWS, have scales of 0. */
INLINE void pack_quantised_keys(float *dst, const char *rows, int64_t row_stride, int n, int dim) {
    char copies[LANES][COPY_STRIDE];
    const int num_blocks = dim / KVC_QUANT_ELEMENTS;
    for (int j = 0; j < (n + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS; j += LANES) {
        float *to = dst + (ptrdiff_t)(j / PANEL_ROWS) * num_blocks * KEY_BLOCK + j % PANEL_ROWS;
        const char *block = rows + j * row_stride;
        for (int b = 0; b < num_blocks; b++, to += KEY_BLOCK, block += KVC_Q8_0_BYTES)
            if (j + LANES <= n)
                pack_key_block(to, block, row_stride);
            else
                pack_key_block(to, pad_rows(copies, LANES, block, row_stride, n - j, KVC_Q8_0_BYTES), COPY_STRIDE);
    }
}

/* Packs n values of q8_0 into a panel.  If n is odd, the last row stands beside itself, but then weighs nothing. */
INLINE void pack_quantised_values(float *dst, const char *rows, ptrdiff_t stride, int n, int dim) {
    for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++, rows += KVC_Q8_0_BYTES, dst += VALUE_BLOCK) {
        vec zero_or_nan = v_zero();
        for (int j = 0; j < KVC_PANEL; j += LANES) { /* as load_scales does, unrolled, in 900 bytes more */
            const char *first = rows + j * stride;
            const vec scales =
                j + LANES <= n ? load_scale_of_rows(first, stride) : load_few_scales(first, stride, n - j);
            v_store(dst + LANES + j, scales);
            zero_or_nan = v_fma(scales, v_zero(), zero_or_nan);
        }
        dst[0] = zero_or_nan_of(zero_or_nan);
        const char *at = rows + KVC_SCALE_BYTES;
        for (int j = 0; j < n; j += 2, at += 2 * stride) {
            ivec x[2];
            i_load_pairs(KVC_Q8_0, x, at, j + 1 < n ? at + stride : at);
            i_store(dst + VALUE_PAIRS + j * LANES, x[0]);
            i_store(dst + VALUE_PAIRS + (j + 1) * LANES, x[1]);
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Returns row r of rows `stride` bytes apart, by one of two addresses: the first row's and that of row 3.  From these,
 * processors reach three rows each without a register for each. */
INLINE const char *row_from(const char *const third[2], ptrdiff_t stride, int r) {
    return third[r / 3] + r % 3 * stride;
}

/* Scores PANEL_ROWS keys for num_q query rows, which are `stride` bytes apart. */
INLINE void score_panel(int num_q, float *c, int ldc, const char *q, ptrdiff_t stride, const float *panel, int dim) {
    vec sums[PRODUCT_QUERIES][2];
    const char *third[2] = {q, q + 3 * stride};
    __asm__("" : "+r"(third[0]), "+r"(third[1]));
    UNROLL
    for (int r = 0; r < num_q; r++) sums[r][0] = sums[r][1] = v_zero();
    for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++, panel += KEY_BLOCK) {
        ivec counts[PRODUCT_QUERIES][2];
        UNROLL
        for (int r = 0; r < num_q; r++)
            counts[r][0] = counts[r][1] = i_set_pair(row_from(third, stride, r) + start_offset(dim, b));
        const float *pairs = panel + PANEL_ROWS;
        ptrdiff_t at_q = (ptrdiff_t)elements_offset(b);
        for (int pair = 0; pair < PAIRS; pair++, at_q += 2 * (int)sizeof(int16_t), pairs += PANEL_ROWS) {
            const ivec x = i_load(pairs), y = i_load(pairs + LANES);
            UNROLL
            for (int r = 0; r < num_q; r++) {
                const ivec z = i_set_pair(row_from(third, stride, r) + at_q);
                counts[r][0] = i_dot(counts[r][0], x, z);
                counts[r][1] = i_dot(counts[r][1], y, z);
            }
        }
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int g = 0; g < 2; g++) sums[r][g] = v_fma(v_from_int(counts[r][g]), v_load(panel + g * LANES), sums[r][g]);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float scale;
        memcpy(&scale, row_from(third, stride, r) + scale_offset(dim), sizeof scale);
        UNROLL
        for (int g = 0; g < 2; g++) v_store(c + (ptrdiff_t)r * ldc + g * LANES, v_mul(sums[r][g], v_set(scale)));
    }
}

/* Scores PANEL_ROWS keys for `rows` query rows at a time, as long as that many are left. */
#define SCORE_ROWS_OF(rows)                                                                 \
    for (; i + rows <= m; i += rows) {                                                      \
        prefetch_share(next);                                                               \
        score_panel(rows, c + (ptrdiff_t)i * ldc, ldc, q + i * stride, stride, panel, dim); \
    }

INLINE void score_panel_for_all(float *c, int ldc, const char *q, ptrdiff_t stride, const float *panel, int m, int dim,
                                shares *next) {
    int i = 0;
    SCORE_ROWS_OF(6)
    SCORE_ROWS_OF(2)
    SCORE_ROWS_OF(1)
}

/* Is a kvc_matmul_fn: scores n keys for m query rows. */
INLINE void score_quantised_panels(float *c, int ldc, const float *q, int q_stride, const float *panel, int m, int n,
                                   int dim, kvc_ahead next) {
    shares all =
        shares_of(next, (int64_t)(n + PANEL_ROWS - 1) / PANEL_ROWS * ((m + PRODUCT_QUERIES - 1) / PRODUCT_QUERIES));
    for (int j = 0; j < n; j += PANEL_ROWS, panel += dim / KVC_QUANT_ELEMENTS * KEY_BLOCK)
        score_panel_for_all(c + j, ldc, (const char *)q, q_stride * (ptrdiff_t)sizeof *q, panel, m, dim, &all);
}

/* Rounds the weights of num_q query rows, times the scales of a panel's next `blocks` blocks, as round_weights does. */
APART void round_panel_weights(int num_q, block_weights *w, const float *weights, int lda, const float *panel,
                               int blocks) {
    float inverse[WEIGHTS_AT_ONCE];
    vec largest[WEIGHTS_AT_ONCE], scales[BLOCKS_AT_ONCE][PANEL_VECS];
    for (int b = 0, i = 0; b < blocks; b++) {
        UNROLL
        for (int v = 0; v < PANEL_VECS; v++) scales[b][v] = v_load(panel + b * VALUE_BLOCK + (1 + v) * LANES);
        for (int r = 0; r < num_q; r++, i++)
            largest[i] = largest_products(weights + (ptrdiff_t)r * lda, scales[b], PANEL_VECS);
    }
    find_units(w, largest, inverse, blocks * num_q);
    for (int b = 0, i = 0; b < blocks; b++)
        for (int r = 0; r < num_q; r++, i++) {
            w->unit[i] += panel[b * VALUE_BLOCK];
            round_products(w->rounded[i], weights + (ptrdiff_t)r * lda, scales[b], inverse[i], PANEL_VECS);
        }
}

/* Adds the products of num_q query rows' weights, w the first's, with a block of num_pairs pairs of values, to acc. */
INLINE void accumulate_panel(int num_q, float *acc, int acc_stride, const float *pairs, int num_pairs, const char *w,
                             const float *unit) {
    ivec sums[2 * PRODUCT_QUERIES];
    UNROLL
    for (int r = 0; r < 2 * num_q; r++) sums[r] = i_zero();
    for (int p = 0; p < num_pairs; p++, pairs += PANEL_ROWS, w += 2 * sizeof(int16_t)) {
        const ivec x = i_load(pairs), y = i_load(pairs + LANES);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const ivec z = i_set_pair(w + r * WEIGHTS_BYTES);
            sums[2 * r] = i_dot(sums[2 * r], x, z);
            sums[2 * r + 1] = i_dot(sums[2 * r + 1], y, z);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++, acc += acc_stride) {
        i_order(KVC_Q8_0, sums + 2 * r);
        UNROLL
        for (int i = 0; i < 2; i++)
            v_store(acc + i * LANES, v_fma(v_from_int(sums[2 * r + i]), v_set(unit[r]), v_load(acc + i * LANES)));
    }
}

/* Adds n weighted values to all columns of num_q query rows. */
INLINE void accumulate_panels_for(int num_q, float *acc, int acc_stride, const float *weights, int lda,
                                  const float *panel, int dim, int n) {
    enum { AT_ONCE = WEIGHTS_AT_ONCE / PRODUCT_QUERIES };
    block_weights w;
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, panel += VALUE_BLOCK) {
        const int blocks = (dim - d) / KVC_QUANT_ELEMENTS, first = d / KVC_QUANT_ELEMENTS % AT_ONCE * num_q;
        if (first == 0) round_panel_weights(num_q, &w, weights, lda, panel, smaller(AT_ONCE, blocks));
        accumulate_panel(num_q, acc + d, acc_stride, panel + VALUE_PAIRS, (n + 1) / 2, (const char *)w.rounded[first],
                         w.unit + first);
    }
}

/* Adds values for `rows` query rows at a time, as long as that many are left. */
#define ACCUMULATE_ROWS_OF(rows)                                                                                    \
    for (; i + rows <= m; i += rows) {                                                                              \
        prefetch_share(&all);                                                                                       \
        accumulate_panels_for(rows, acc + (ptrdiff_t)i * acc_stride, acc_stride, weights + (ptrdiff_t)i * lda, lda, \
                              panel, dim, n);                                                                       \
    }

/* Is a kvc_matmul_fn: adds n weighted values of dim columns to the sums of m query rows. */
INLINE void accumulate_quantised_panels(float *acc, int acc_stride, const float *weights, int lda, const float *panel,
                                        int m, int dim, int n, kvc_ahead next) {
    shares all = shares_of(next, (m + PRODUCT_QUERIES - 1) / PRODUCT_QUERIES);
    int i = 0;
    ACCUMULATE_ROWS_OF(6)
    ACCUMULATE_ROWS_OF(2)
    ACCUMULATE_ROWS_OF(1)
}
