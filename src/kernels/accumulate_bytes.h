/* accumulate_bytes.h: sums of quantised rows, weighted, by products of bytes, for AArch64; part of neondotprod.c,
 * behind score_bytes.h.
 *
 * Weights are rounded as in accumulate_quantised.h, but so that each is 256 * high + low, of two signed bytes.  Rows
 * are moved into columns once for all queries: four rows' elements of a column stand together, and become a lane.
 */

enum {
    COLUMNS = 16, /* summed at once */
    COLUMN_VECTORS = COLUMNS / LANES,
    LOW_DIGITS = KVC_TILE * 2, /* from the high digits of a query's weights to the low ones */
    GROUP_BYTES = DOT_ROWS * KVC_QUANT_ELEMENTS
};

/* Brings the elements of DOT_ROWS rows, which are `stride` vectors apart, into columns. */
INLINE void store_columns(char *to, const int8x16_t *x, int stride) {
    const int8x16_t *y = x + 2 * stride;
    const int16x8_t pairs[2][2] = {
        {vreinterpretq_s16_s8(vzip1q_s8(x[0], x[stride])), vreinterpretq_s16_s8(vzip2q_s8(x[0], x[stride]))},
        {vreinterpretq_s16_s8(vzip1q_s8(y[0], y[stride])), vreinterpretq_s16_s8(vzip2q_s8(y[0], y[stride]))}};
    UNROLL
    for (int i = 0; i < 2; i++, to += COLUMNS * DOT_ROWS / 2) {
        v_store(to, vreinterpretq_f32_s16(vzip1q_s16(pairs[0][i], pairs[1][i])));
        v_store(to + COLUMNS, vreinterpretq_f32_s16(vzip2q_s16(pairs[0][i], pairs[1][i])));
    }
}

/* Brings a block of n rows into columns, group after group of DOT_ROWS rows, and in them COLUMNS after COLUMNS.  The
 * last row stands for those that a group lacks, which weigh nothing. */
INLINE void pack_columns(int type, char *to, const accumulate_args *a, int at, prefetcher *next) {
    const score_args rows = {.rows = a->rows, .row_stride = a->row_stride, .n = a->n};
    for (int j = 0; j < a->n; j += DOT_ROWS, to += GROUP_BYTES) {
        const dot_rows group = dot_rows_at(&rows, j);
        int8x16_t x[DOT_ROWS][BLOCK_VECTORS];
        prefetch_step(next, LINES_AT_ONCE);
        UNROLL
        for (int i = 0; i < DOT_ROWS; i++) load_elements(type, x[i], group.at[i] + at);
        UNROLL
        for (int v = 0; v < BLOCK_VECTORS; v++)
            store_columns(to + v * GROUP_BYTES / BLOCK_VECTORS, x[0] + v, BLOCK_VECTORS);
    }
}

/* Splits the weights of a query and a block, in their place. */
INLINE void split_weights(float *products) {
    char *to = (char *)products;
    UNROLL
    for (int i = 0; i < KVC_TILE; i += 8) split_digits(to + i, to + LOW_DIGITS + i, to + i * (int)sizeof(int16_t));
}

/* Adds the products of COLUMNS columns and digits of the queries' weights to sums. */
INLINE void add_columns(int num_q, int32x4_t (*sums)[COLUMN_VECTORS], const char *columns, const char *digits, int n) {
    for (int j = 0; j < n; j += DOT_ROWS, columns += GROUP_BYTES, digits += DOT_ROWS) {
        int8x16_t x[COLUMN_VECTORS];
        UNROLL
        for (int i = 0; i < COLUMN_VECTORS; i++) x[i] = load_16(columns + i * LANES * DOT_ROWS);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const int8x16_t y = vreinterpretq_s8_s32(i_set_pair(digits + r * WEIGHTS_BYTES));
            UNROLL
            for (int i = 0; i < COLUMN_VECTORS; i++) sums[r][i] = dot(sums[r][i], x[i], y);
        }
    }
}

/* Sums COLUMNS columns over all rows and adds the sums, times their unit, to acc: from element d on. */
INLINE void accumulate_16(int num_q, const accumulate_args *a, int d, const char *columns, const char *digits,
                          const float *unit) {
    int32x4_t sums[QUERIES][COLUMN_VECTORS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < COLUMN_VECTORS; i++) sums[r][i] = i_zero();
    add_columns(num_q, sums, columns, digits, a->n);
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < COLUMN_VECTORS; i++) sums[r][i] = vshlq_n_s32(sums[r][i], 8);
    add_columns(num_q, sums, columns, digits + LOW_DIGITS, a->n);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride + d;
        const vec factor = v_set(a->factor[r]), by = v_set(unit[r]);
        UNROLL
        for (int i = 0; i < COLUMN_VECTORS; i++, acc += LANES)
            v_store(acc, v_fma(v_from_int(sums[r][i]), by, v_mul(v_load(acc), factor)));
    }
}

/* Sums all columns of the rows for num_q queries, of which there are up to QUERIES. */
INLINE void accumulate_byte_rows(int num_q, int type, accumulate_args *a, kvc_ahead next) {
    const int num_blocks = a->dim / KVC_QUANT_ELEMENTS, groups = (a->n + DOT_ROWS - 1) / DOT_ROWS;
    char columns[KVC_TILE * KVC_QUANT_ELEMENTS];
    block_weights w;
    a->next = prefetch_begin(next, a->rows, num_blocks * (groups * LINES_AT_ONCE + 2 * num_q));
    for (int b = 0, at = 0; b < num_blocks; b++, at += block_bytes(type)) {
        const int first = type == KVC_INT8 ? 0 : b % BLOCKS_AT_ONCE * num_q;
        if (type == KVC_INT8 ? b == 0 : first == 0) {
            const int blocks = type == KVC_INT8 ? 1 : smaller(BLOCKS_AT_ONCE, num_blocks - b);
            round_weights(type, num_q, &w, a, (const char *)a->rows + at, blocks);
            for (int i = 0; i < blocks * num_q; i++) split_weights(w.products[i]);
        }
        pack_columns(type, columns, a, at, &a->next);
        for (int c = 0; c < KVC_QUANT_ELEMENTS; c += COLUMNS)
            accumulate_16(num_q, a, b * KVC_QUANT_ELEMENTS + c, columns + c * DOT_ROWS, (const char *)w.products[first],
                          w.unit + first);
    }
    prefetch_rest(&a->next);
}

/* Is a kvc_accumulate_fn once the type is a constant. */
INLINE void accumulate_bytes(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                             const void *rows, int64_t row_stride, int n, int dim, kvc_ahead next) {
    for (int some; num_q; num_q -= some) {
        accumulate_args a = {acc, factor, weights, rows, row_stride, acc_stride, n, dim, {0}};
        some = smaller(num_q, QUERIES);
        const kvc_ahead part = take_part(&next, some, num_q);
        CALL_WITH_QUERIES(accumulate_byte_rows, some, QUERIES, 0, type, &a, part)
        acc += (ptrdiff_t)some * acc_stride;
        factor += some;
        weights += some * KVC_TILE;
    }
}

#define DEFINE_ACCUMULATE_BYTES(name, type)                                                              \
    extern kvc_accumulate_fn name;                                                                       \
    TARGET void name(float *acc, int acc_stride, const float *factor, const float *weights, int num_q,   \
                     const void *rows, int64_t row_stride, int n, int dim, kvc_ahead next) {             \
        accumulate_bytes(type, acc, acc_stride, factor, weights, num_q, rows, row_stride, n, dim, next); \
    }
