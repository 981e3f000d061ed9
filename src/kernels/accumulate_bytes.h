/* accumulate_bytes.h: sums of quantised rows, weighted, by products of bytes, for AArch64; part of neondotprod.c and
 * neoni8mm.c, behind score_bytes.h.
 *
 * Weights times the scales of blocks are rounded as in accumulate_quantised.h, but so that each is 256 * high + low, of
 * two signed bytes, its digits.  Rows are moved into columns once for all queries: a column's elements of SUM_ROWS rows
 * stand together.  A unit is what a rounded weight of 1 stands for.
 *
 * For many query rows, values of q8_0 are moved once, to a PANEL: of block after block, the rows' scales, as floats,
 * and the columns.
 *
 * The file of a set defines, after score_bytes.h:
 *
 *   SUM_ROWS                     a multiple of DOT_ROWS that divides KVC_TILE
 *   COLUMNS                      columns summed at once; divides KVC_QUANT_ELEMENTS
 *   DIGITS_APART                 bytes from the high digits of eight weights to the next ones' ...
 *   LOW_DIGITS                   ... and to the low digits of these
 *   store_columns(to, x)         x: of DOT_ROWS rows after the other, four columns in a vector, of 16 columns in all
 *   sum_columns(num_q, sums, columns, digits, n)
 *                                sums COLUMNS columns of n rows, weighted, for each query
 *
 * All sets that have it give the same bits.
 */

enum {
    COLUMN_VECTORS = COLUMNS / LANES,
    GROUP_BYTES = SUM_ROWS * KVC_QUANT_ELEMENTS,
    SCALES_BYTES = KVC_PANEL * sizeof(float),
    VALUES_BYTES = SCALES_BYTES + KVC_PANEL * KVC_QUANT_ELEMENTS /* of a block of values in a PANEL */
};

/* Brings 16 elements of each of DOT_ROWS rows, which are `stride` vectors apart, into columns, four in a vector. */
INLINE void columns_of(int8x16_t to[4], const int8x16_t *x, int stride) {
    const int8x16_t *y = x + 2 * stride;
    const int16x8_t pairs[2][2] = {
        {vreinterpretq_s16_s8(vzip1q_s8(x[0], x[stride])), vreinterpretq_s16_s8(vzip2q_s8(x[0], x[stride]))},
        {vreinterpretq_s16_s8(vzip1q_s8(y[0], y[stride])), vreinterpretq_s16_s8(vzip2q_s8(y[0], y[stride]))}};
    UNROLL
    for (int i = 0; i < 2; i++) {
        to[2 * i] = vreinterpretq_s8_s16(vzip1q_s16(pairs[0][i], pairs[1][i]));
        to[2 * i + 1] = vreinterpretq_s8_s16(vzip2q_s16(pairs[0][i], pairs[1][i]));
    }
}

/* Returns row j of the values. */
INLINE const char *value_at(const accumulate_args *a, int j) {
    return row_at(a->pieces[j / KVC_PANEL].rows, a->row_stride, j % KVC_PANEL);
}

/* Brings a block of n rows into columns, group after group of SUM_ROWS rows, and in them COLUMNS after COLUMNS.  The
 * last row stands in for rows that a group lacks, which weigh nothing.  next: of each piece, as in accumulate_args. */
INLINE void pack_columns(int type, char *to, const accumulate_args *a, int at, prefetcher *next) {
    for (int j = 0; j < a->n; j += SUM_ROWS) {
        int8x16_t x[SUM_ROWS][BLOCK_VECTORS];
        prefetch_step(next + j / KVC_PANEL * a->apart, SUM_ROWS / DOT_ROWS * LINES_AT_ONCE);
        UNROLL
        for (int i = 0; i < SUM_ROWS; i++) load_elements(type, x[i], value_at(a, smaller(j + i, a->n - 1)) + at);
        UNROLL
        for (int v = 0; v < BLOCK_VECTORS; v++, to += GROUP_BYTES / BLOCK_VECTORS) {
            int8x16_t columns[SUM_ROWS];
            UNROLL
            for (int i = 0; i < SUM_ROWS; i += DOT_ROWS) columns_of(columns + i, x[i] + v, BLOCK_VECTORS);
            store_columns(to, columns);
        }
    }
}

/* Splits the rounded weights of n rows, of a query and a block, into digits, eight at a time, in their place. */
INLINE void split_weights(int16_t *rounded, int n) {
    char *to = (char *)rounded;
    const char *from = to;
    for (int j = 0; j < n; j += 8, to += DIGITS_APART, from += 8 * sizeof(int16_t))
        split_digits(to, to + LOW_DIGITS, from);
}

/* Sums COLUMNS columns over all rows and adds the sums, times their unit, to acc: from element d on. */
INLINE void accumulate_columns_of(int num_q, const accumulate_args *a, int d, const char *columns, const char *digits,
                                  const float *unit) {
    int32x4_t sums[QUERIES][COLUMN_VECTORS];
    sum_columns(num_q, sums, columns, digits, a->n);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride + d;
        const vec factor = v_set(a->factor[r]), by = v_set(unit[r]);
        UNROLL
        for (int i = 0; i < COLUMN_VECTORS; i++, acc += LANES)
            v_store(acc, v_fma(v_from_int(sums[r][i]), by, v_mul(v_load(acc), factor)));
    }
}

/* Sums all columns of the rows for num_q queries, of which there are up to QUERIES.  left: these and the queries of
 * later passes, among which begin_ahead shares out what is to be prefetched.  Weights are rounded for BLOCKS_AT_ONCE
 * blocks at a time; but once for all blocks of int8, whose rows have one scale. */
INLINE void accumulate_byte_rows(int num_q, int type, accumulate_args *a, int left) {
    const int num_blocks = a->dim / KVC_QUANT_ELEMENTS, rows = type == PANEL ? 0 : smaller(a->n, KVC_PANEL);
    char moved[KVC_TILE * KVC_QUANT_ELEMENTS];
    block_weights w;
    /* Lines that round_weights prefetches, and lines that pack_columns prefetches for a piece of KVC_PANEL rows. */
    begin_ahead(a, num_q, left, 2 * num_blocks * num_q,
                num_blocks * ((rows + DOT_ROWS - 1) / DOT_ROWS * LINES_AT_ONCE));
    ptrdiff_t block = 0; /* bytes of a row, or of a PANEL, before it */
    for (int b = 0; b < num_blocks; b++, block += block_stride(type, a)) {
        const int first = type == KVC_INT8 ? 0 : b % BLOCKS_AT_ONCE * num_q;
        if (type == KVC_INT8 ? b == 0 : first == 0) {
            const int blocks = type == KVC_INT8 ? 1 : smaller(BLOCKS_AT_ONCE, num_blocks - b);
            round_weights(type, num_q, &w, a, block, blocks);
            for (int i = 0; i < blocks * num_q; i++) split_weights(w.rounded[i], a->n);
        }
        const char *const columns = type == PANEL ? (const char *)a->pieces->rows + block + SCALES_BYTES : moved;
        if (type != PANEL) pack_columns(type, moved, a, (int)block, a->next);
        for (int c = 0; c < KVC_QUANT_ELEMENTS; c += COLUMNS)
            accumulate_columns_of(num_q, a, b * KVC_QUANT_ELEMENTS + c, columns + c * SUM_ROWS,
                                  (const char *)w.rounded[first], w.unit + first);
    }
    end_ahead(a);
}

/* Adds n weighted rows to num_q rows of acc, some at a time: a kvc_accumulate_fn, once the type is a constant. */
INLINE void accumulate_bytes(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                             kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    for (int some; num_q; num_q -= some) {
        accumulate_args a = {acc, factor, weights, pieces, row_stride, acc_stride, n, dim, 0, {{0}}};
        some = smaller(num_q, QUERIES);
        CALL_WITH_QUERIES(accumulate_byte_rows, some, QUERIES, 0, type, &a, num_q)
        acc += (ptrdiff_t)some * acc_stride;
        factor += some;
        weights += some * KVC_SCORES;
    }
}

#define DEFINE_ACCUMULATE_BYTES(name, type)                                                            \
    extern kvc_accumulate_fn name;                                                                     \
    TARGET void name(float *acc, int acc_stride, const float *factor, const float *weights, int num_q, \
                     kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {                    \
        accumulate_bytes(type, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);   \
    }

/* ---- many query rows --------------------------------------------------------------------------------------------- */

/* Packs n values of q8_0 into a PANEL, block after block: the rows' scales, then columns.  Prefetches nothing. */
INLINE void pack_byte_values(float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    kvc_value_piece piece = {rows, {.bytes = 0}};
    const accumulate_args a = {.pieces = &piece, .row_stride = row_stride, .n = n};
    prefetcher none = prefetch_begin((kvc_ahead){.bytes = 0}, rows, 0);
    char *to = (char *)dst;
    for (int d = 0, at = 0; d < dim; d += KVC_QUANT_ELEMENTS, at += KVC_Q8_0_BYTES, to += VALUES_BYTES) {
        vec scales[TILE_VECS];
        (void)load_scales(scales, &piece, at, row_stride, n);
        UNROLL
        for (int i = 0; i < PANEL_VECS; i++) v_store(to + i * (int)sizeof(vec), scales[i]);
        pack_columns(KVC_Q8_0, to + SCALES_BYTES, &a, at, &none);
    }
}

/* Adds n weighted values of dim columns, of a panel, to the sums of num_q query rows. */
INLINE void accumulate_byte_panel(float *acc, int acc_stride, const float *weights, int num_q, const float *panel,
                                  int dim, int n, kvc_ahead next) {
    static const float ONES[QUERIES] = {1, 1, 1, 1};
    for (int some; num_q; num_q -= some, acc += (ptrdiff_t)some * acc_stride, weights += some * KVC_SCORES) {
        some = smaller(num_q, QUERIES);
        kvc_value_piece piece = {panel, take_part(&next, some, num_q)};
        accumulate_bytes(PANEL, acc, acc_stride, ONES, weights, some, &piece, VALUES_BYTES, n, dim);
    }
}

/* Defines the multiplication of tiles of q8_0.  Scores and sums equal those of streamed rows, bit by bit. */
#define DEFINE_BYTE_TILER(set)                                                                                     \
    extern kvc_pack_keys_fn kvc_pack_keys_q8_0_##set;                                                              \
    extern kvc_pack_values_fn kvc_pack_values_q8_0_##set;                                                          \
    extern kvc_matmul_fn kvc_score_panels_##set, kvc_accumulate_panels_##set;                                      \
    TARGET void kvc_pack_keys_q8_0_##set(float *dst, const void *rows, int64_t row_stride, int first, int n,       \
                                         int dim) {                                                                \
        (void)first; /* 0: tiles have KVC_PANEL rows */                                                            \
        pack_byte_keys(dst, rows, row_stride, n, dim);                                                             \
    }                                                                                                              \
    TARGET void kvc_pack_values_q8_0_##set(float *dst, int dst_stride, const void *rows, int64_t row_stride,       \
                                           int first, int n, int dim) {                                            \
        (void)dst_stride, (void)first;                                                                             \
        pack_byte_values(dst, rows, row_stride, n, dim);                                                           \
    }                                                                                                              \
    TARGET void kvc_score_panels_##set(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, \
                                       int n, int k, int add, kvc_ahead next) {                                    \
        (void)ldc, (void)ldb, (void)add; /* scores are KVC_SCORES apart, and not added to others */                \
        score_bytes(PANEL, c, a, lda, m, b, k / KVC_QUANT_ELEMENTS * (KEYS_BYTES / DOT_ROWS), n, k, next);         \
    }                                                                                                              \
    TARGET void kvc_accumulate_panels_##set(float *c, int ldc, const float *a, int lda, const float *b, int ldb,   \
                                            int m, int n, int k, int add, kvc_ahead next) {                        \
        (void)lda, (void)ldb, (void)add; /* weights are KVC_SCORES apart, and sums always added */                 \
        accumulate_byte_panel(c, ldc, a, m, b, n, k, next);                                                        \
    }
