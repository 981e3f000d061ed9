/* score_bytes.h: scores of quantised rows by products of bytes, for AArch64; part of neondotprod.c and neoni8mm.c.
 *
 * As in score_quantised.h, queries are rounded to about 16 bits, and sums within a block are exact.  But each element
 * of a query is 256 * high + low, of two signed bytes, its digits, so that rows are neither widened nor moved into
 * columns.  DOT_ROWS rows are scored at once, each block as BLOCK_VECTORS vectors of 16 bytes.  Rows of int8 have no
 * scales here (plain), others one for each block (scaled).
 *
 * A prepared query row lies where its dim floats were: for each DIGITS elements int8 high[DIGITS] and low[DIGITS], in
 * units of the row's largest magnitude / KVC_LARGEST_DIGITS; behind them a factor, an f32, that turns a sum over blocks
 * into a score.
 *
 * For many query rows, keys of q8_0 are arranged once, in a PANEL: of DOT_ROWS rows after the other, of block after
 * block: the rows' scales, as floats, and the elements, as add_products takes them.
 *
 * The file of a set defines, after template.h:
 *
 *   DIGITS                   elements of a query whose high digits stand together; divides KVC_QUANT_ELEMENTS
 *   SCALED_QUERIES           most queries scored at once, where blocks have scales, ...
 *   PLAIN_QUERIES            ... and where sums of all blocks stay in registers; 1 to 4, or 8
 *   byte_sums                sums of products of the digits of a query with DOT_ROWS rows, at first all 0
 *   arrange(x)               puts a block of DOT_ROWS rows, each BLOCK_VECTORS vectors, in the order of add_products
 *   add_products(sums, x, q) adds the products of a block to what *sums points to
 *   count_of(x, q)           the products of a block, as integers: a lane for each row
 *   total_of(sums)           the same of sums, as floats
 *
 * All sets that have it give the same bits.
 */

enum {
    MOST_ELEMENTS = 1 << 16, /* whose products' sum fits a lane */
    LINES_AT_ONCE = 2,       /* prefetched for a block of DOT_ROWS rows: about as many as are read */
    KEYS_BYTES = DOT_ROWS * (int)(sizeof(float) + KVC_QUANT_ELEMENTS) /* of a block of DOT_ROWS keys in a PANEL */
};

/* Splits eight int16 into their high and low digits, which may take the place of these int16. */
INLINE void split_digits(char *to_high, char *to_low, const void *from) {
    const int16x8_t x = vreinterpretq_s16_s8(load_16(from));
    const int8x8_t high = vshrn_n_s16(vaddq_s16(x, vdupq_n_s16(128)), 8), low = vmovn_s16(x);
    memcpy(to_high, &high, sizeof high);
    memcpy(to_low, &low, sizeof low);
}

/* Rounds a query row, in place, to digits and the factor behind them. */
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
            char *digits = to + i / DIGITS * 2 * DIGITS + i % DIGITS;
            split_digits(digits, digits + DIGITS, x + i);
        }
    }
    memcpy(to, &factor, sizeof factor);
}

/* Rounds num_q query rows to digits, in place, so that scores are multiplied by scale. */
INLINE void split_rows(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++, q += q_stride)
        split_row(q, dim, unit_of(q, dim) * ((float)INT16_MAX / (float)KVC_LARGEST_DIGITS), scale);
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

/* Rows that are scored at once.  Where fewer are left, the last one stands for those that are not there. */
typedef struct dot_rows {
    const char *at[DOT_ROWS];
} dot_rows;

INLINE dot_rows dot_rows_at(const score_args *a, int first) {
    dot_rows rows;
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) rows.at[j] = row_at(a->rows, a->row_stride, smaller(first + j, a->n - 1));
    return rows;
}

/* Loads a block of DOT_ROWS rows, `at` bytes behind their beginnings, as add_products takes it. */
INLINE void load_bytes_of(int type, int8x16_t x[DOT_ROWS * BLOCK_VECTORS], const dot_rows *rows, int at) {
    if (type == PANEL) {
        UNROLL
        for (int i = 0; i < DOT_ROWS * BLOCK_VECTORS; i++) x[i] = load_16(rows->at[0] + at + (i + 1) * (int)sizeof *x);
        return;
    }
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) load_elements(type, x + j * BLOCK_VECTORS, rows->at[j] + at);
    arrange(x);
}

/* Returns how many bytes a block of rows is behind the one before it. */
INLINE int next_block(int type) { return type == PANEL ? KEYS_BYTES : block_bytes(type); }

INLINE vec scales_of(int type, const dot_rows *rows, int at) {
    if (type == PANEL) return v_load(rows->at[0] + at);
    uint16_t bits[DOT_ROWS];
    UNROLL
    for (int j = 0; j < DOT_ROWS; j++) memcpy(&bits[j], rows->at[j] + at, sizeof bits[j]);
    return v_load_f16(bits);
}

/* Keeps compilers from loading the digits of several queries before they multiply any, for want of registers. */
INLINE void one_by_one(void) { __asm__ volatile("" : : : "memory"); }

/* Adds the products of rows whose blocks have scales to sums. */
INLINE void score_scaled(int num_q, int type, vec *sums, const dot_rows *rows, const char *const *q, int dim,
                         prefetcher *next) {
    for (int d = 0, at = 0; d < dim; d += KVC_QUANT_ELEMENTS, at += next_block(type)) {
        const vec scale = scales_of(type, rows, at);
        int8x16_t x[DOT_ROWS * BLOCK_VECTORS];
        prefetch_step(next, LINES_AT_ONCE);
        load_bytes_of(type, x, rows, at);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            one_by_one();
            sums[r] = v_fma(v_from_int(count_of(x, q[r] + 2 * (ptrdiff_t)d)), scale, sums[r]);
        }
    }
}

/* Adds the products of rows without scales in elements [begin, end) to sums: lanes are added up once, in the end. */
INLINE void score_plain(int num_q, vec *sums, const dot_rows *rows, const char *const *q, int begin, int end,
                        prefetcher *next) {
    byte_sums products[MANY_QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) products[r] = (byte_sums){0};
    for (int d = begin; d < end; d += KVC_QUANT_ELEMENTS) {
        int8x16_t x[DOT_ROWS * BLOCK_VECTORS];
        prefetch_step(next, LINES_AT_ONCE);
        load_bytes_of(KVC_INT8, x, rows, d);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            one_by_one();
            add_products(&products[r], x, q[r] + 2 * (ptrdiff_t)d);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) sums[r] = v_add(sums[r], total_of(&products[r]));
}

/* Scores all rows for num_q queries. */
INLINE void score_all(int num_q, int type, const score_args *a, kvc_ahead next) {
    const char *q[MANY_QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) q[r] = (const char *)(a->q + (ptrdiff_t)r * a->q_stride);
    const int steps = (a->n + DOT_ROWS - 1) / DOT_ROWS * (a->dim / KVC_QUANT_ELEMENTS);
    prefetcher p = prefetch_begin(next, a->rows, steps * LINES_AT_ONCE);
    for (int j = 0; j < a->n; j += DOT_ROWS) {
        const dot_rows rows = dot_rows_at(a, j);
        vec sums[MANY_QUERIES];
        UNROLL
        for (int r = 0; r < num_q; r++) sums[r] = v_zero();
        if (type == KVC_INT8) {
            for (int d = 0; d < a->dim; d += MOST_ELEMENTS)
                score_plain(num_q, sums, &rows, q, d, smaller(d + MOST_ELEMENTS, a->dim), &p);
        } else {
            score_scaled(num_q, type, sums, &rows, q, a->dim, &p);
        }
        UNROLL
        for (int r = 0; r < num_q; r++) {
            float factor;
            memcpy(&factor, q[r] + 2 * (ptrdiff_t)a->dim, sizeof factor);
            v_store(a->scores + r * KVC_SCORES + j, v_mul(sums[r], v_set(factor)));
        }
    }
    prefetch_rest(&p);
}

/* Scores n rows for num_q queries, some queries at a time: a kvc_score_fn, once the type is a constant. */
INLINE void score_bytes(int type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                        int64_t row_stride, int n, int dim, kvc_ahead next) {
    const int most = type == KVC_INT8 ? PLAIN_QUERIES : SCALED_QUERIES;
    for (int some; num_q; num_q -= some, scores += some * KVC_SCORES, q += (ptrdiff_t)some * q_stride) {
        const score_args a = {scores, q, q_stride, rows, row_stride, n, dim};
        some = num_q >= most ? most : smaller(num_q, QUERIES);
        const kvc_ahead part = take_part(&next, some, num_q);
        CALL_WITH_QUERIES(score_all, some, most, 0, type, &a, part)
    }
}

/* Packs n keys of q8_0 into a PANEL: for each DOT_ROWS rows, each block's scales, then its elements as arranged. */
INLINE void pack_byte_keys(float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    const score_args a = {.rows = rows, .row_stride = row_stride, .n = n};
    char *to = (char *)dst;
    for (int j = 0; j < n; j += DOT_ROWS) {
        const dot_rows group = dot_rows_at(&a, j);
        for (int d = 0, at = 0; d < dim; d += KVC_QUANT_ELEMENTS, at += KVC_Q8_0_BYTES, to += KEYS_BYTES) {
            int8x16_t x[DOT_ROWS * BLOCK_VECTORS];
            load_bytes_of(KVC_Q8_0, x, &group, at);
            v_store(to, scales_of(KVC_Q8_0, &group, at));
            UNROLL
            for (int i = 0; i < DOT_ROWS * BLOCK_VECTORS; i++) store_16(to + (i + 1) * (int)sizeof *x, x[i]);
        }
    }
}

#define DEFINE_SCORE_BYTES(name, type)                                                                             \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        score_bytes(type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                             \
    }
