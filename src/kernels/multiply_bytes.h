/* multiply_bytes.h: products of many query rows with a tile in bytes, for sets that add four products of bytes to a
 * lane by one instruction.  Each row has int8 codes, and a unit, which is what a code of 1 stands for.
 *
 *     a panel of keys      of each four elements, KVC_BYTE_TILE rows, of each row the four
 *     a panel of values    of each four rows, all columns, of each column the four
 *
 * i_dot_bytes of template.h takes one factor without signs: keys, to which SHIFT_BYTES adds 128, and weights.  ARM's
 * instructions take both with signs, or both without: there values get the 128.
 *
 * A set's file defines before it
 *
 *   BYTE_QUERIES         query rows that are multiplied by BYTE_VECTORS vectors at once: 6, or 3 where there are 16
 *                        registers
 *   store_weights(p, x)  rounds the floats of x[0 .. EXPS) to bytes at p
 *
 * and, with SHIFTS_VALUES as 1,
 *
 *   STEPS_AT_ONCE        fours of bytes of a query row or of weights in a vector
 *   load_steps(p)        these, from p
 *   dot_keys(sum, x, y, step)  dot_values(sum, x, y, step)
 *                        adds to each lane the products of four bytes of a panel's x and four number `step` of y
 *   load_later(p, x)     keeps compilers from loading by p before x is known
 *   sum_weights(p, n)    the sum of n weights, a multiple of KVC_PANEL
 */

#ifndef SHIFTS_VALUES
#define SHIFTS_VALUES 0
enum { STEPS_AT_ONCE = 1 };

INLINE ivec load_steps(const void *p) { return i_set_pair(p); }

INLINE void load_later(const char **p, ivec *x) { (void)p, (void)x; }

INLINE ivec dot_keys(ivec sum, ivec x, ivec y, int step) {
    (void)step;
    return i_dot_bytes(sum, x, y);
}

INLINE ivec dot_values(ivec sum, ivec x, ivec y, int step) {
    (void)step;
    return i_dot_bytes(sum, y, x);
}
#endif

enum {
    BYTE_VECTORS = 4,                  /* of columns of a panel */
    FOUR_BYTES = 4,                    /* multiplied at once */
    SUM_VECTORS = KVC_LANES / LANES,   /* in which terms of a sum are added up */
    SHIFT_BYTES = (int32_t)-0x7f7f7f80 /* 0x80 in each byte */
};

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Packs FOUR_BYTES * LANES elements of LANES keys, or `some` of these elements: transposes words of four. */
INLINE void pack_words(char *to, const char *rows, int64_t stride, int some) {
    vec x[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++)
        x[i] = some == LANES ? v_load(row_at(rows, stride, i)) : v_load_some(row_at(rows, stride, i), some);
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++)
        if (i < some)
            i_store(to + i * KVC_BYTE_TILE * FOUR_BYTES,
                    i_xor(i_of_bits(x[i]), i_set_32(SHIFTS_VALUES ? 0 : SHIFT_BYTES)));
}

/* Packs n keys of int8 into a panel, as rows from `first` on. */
INLINE void pack_key_words(char *panel, const char *rows, int64_t row_stride, int first, int n, int dim) {
    for (int j = 0; j < n; j += LANES, rows += LANES * row_stride)
        for (int d = 0; d < dim; d += FOUR_BYTES * LANES) {
            char *const to = panel + (ptrdiff_t)d * KVC_BYTE_TILE + (first + j) * FOUR_BYTES;
            if (dim - d >= FOUR_BYTES * LANES)
                pack_words(to, rows + d, row_stride, LANES);
            else
                pack_words(to, rows + d, row_stride, KVC_QUANT_ELEMENTS / FOUR_BYTES);
        }
}

/* Packs n values of int8 into a panel, as rows from `first` on. */
INLINE void pack_value_words(char *panel, const char *rows, int64_t row_stride, int first, int n, int dim) {
    panel += (ptrdiff_t)first * dim;
    for (int j = 0; j < n; j += FOUR_BYTES, rows += FOUR_BYTES * row_stride, panel += FOUR_BYTES * dim)
        for (int d = 0; d < dim; d += LANES)
            i_store(panel + d * FOUR_BYTES,
                    i_xor(i_load_quad(rows + d, row_stride, /* swaps */ 0), i_set_32(SHIFTS_VALUES ? SHIFT_BYTES : 0)));
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Rows of bytes, by the addresses of rows 0 and 3: from each of these, processors reach three rows by one register. */
typedef struct byte_rows {
    const char *third[2];
    ptrdiff_t stride;
} byte_rows;

INLINE byte_rows byte_rows_at(const void *first, ptrdiff_t stride) {
    byte_rows rows = {{first, (const char *)first + 3 * stride}, stride};
    __asm__("" : "+r"(rows.third[0]), "+r"(rows.third[1]));
    return rows;
}

INLINE const char *byte_row(const byte_rows *rows, int r) { return rows->third[r / 3] + r % 3 * rows->stride; }

/* Multiplies `steps` times four bytes of each of num_q rows by as much of a panel, whose steps are `apart` bytes apart,
 * in num_vectors vectors of columns; adds them to sums.  steps is a multiple of STEPS_AT_ONCE. */
INLINE void multiply_bytes(int is_keys, int num_q, int num_vectors, ivec (*sums)[BYTE_VECTORS], byte_rows rows,
                           const char *panel, ptrdiff_t apart, int steps) {
    for (int i = 0; i < steps; i += STEPS_AT_ONCE) {
        ivec y[BYTE_QUERIES];
        UNROLL
        for (int r = 0; r < num_q; r++) y[r] = load_steps(byte_row(&rows, r) + i * FOUR_BYTES);
        UNROLL
        for (int step = 0; step < STEPS_AT_ONCE; step++, panel += apart) UNROLL
        for (int v = 0; v < num_vectors; v++) {
            const ivec x = i_load(panel + v * LANES * FOUR_BYTES);
            UNROLL
            for (int r = 0; r < num_q; r++) {
                sums[r][v] = is_keys ? dot_keys(sums[r][v], x, y[r], step) : dot_values(sums[r][v], x, y[r], step);
                load_later(&panel, &sums[r][v]);
            }
        }
    }
}

/* Scores n keys for num_q query rows. */
INLINE void score_byte_rows(int num_q, float *scores, const float *q, int q_stride, const char *panel,
                            const float *units, int n, int dim) {
    const ptrdiff_t stride = q_stride * (ptrdiff_t)sizeof *q;
    const byte_rows rows = byte_rows_at((const char *)q + KVC_BYTE_CODES, stride);
    kvc_byte_query queries[BYTE_QUERIES];
    for (int r = 0; r < num_q; r++) memcpy(&queries[r], q + (ptrdiff_t)r * q_stride, sizeof *queries);
    for (int j = 0; j < n; j += BYTE_VECTORS * LANES) {
        ivec sums[BYTE_QUERIES][BYTE_VECTORS];
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int v = 0; v < BYTE_VECTORS; v++) sums[r][v] = i_set_32(SHIFTS_VALUES ? 0 : -128 * queries[r].sum);
        multiply_bytes(1, num_q, BYTE_VECTORS, sums, rows, panel + j * FOUR_BYTES, KVC_BYTE_TILE * FOUR_BYTES,
                       dim / FOUR_BYTES);
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int v = 0; v < BYTE_VECTORS; v++)
            v_store(scores + r * KVC_BYTE_SCORES + j + v * LANES,
                    v_mul(v_mul(v_from_int(sums[r][v]), v_load(units + j + v * LANES)), v_set(queries[r].unit)));
    }
}

/* Multiplies num_vectors vectors of columns of n values by the weights of num_q query rows, and adds the sums, times
 * units, to acc.  starts: what sums begin with, which cancels the 128 of shifted values. */
INLINE void sum_byte_columns(int num_q, int num_vectors, float *acc, int acc_stride, const float *factor,
                             const float *unit, const int32_t *starts, byte_rows weights, const char *panel, int n,
                             int dim) {
    ivec sums[BYTE_QUERIES][BYTE_VECTORS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int v = 0; v < num_vectors; v++) sums[r][v] = i_set_32(starts[r]);
    multiply_bytes(0, num_q, num_vectors, sums, weights, panel, (ptrdiff_t)dim * FOUR_BYTES, n / FOUR_BYTES);
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int v = 0; v < num_vectors; v++) {
        float *const to = acc + (ptrdiff_t)r * acc_stride + v * LANES;
        v_store(to, v_fma(v_from_int(sums[r][v]), v_set(unit[r]), v_mul(v_load(to), v_set(factor[r]))));
    }
}

/* Adds n weighted values to num_q rows of acc.  dim is a multiple of KVC_QUANT_ELEMENTS: two vectors or more. */
INLINE void sum_byte_rows(int num_q, float *acc, int acc_stride, const float *factor, const float *unit,
                          const float *weights, const char *panel, int n, int dim) {
    const byte_rows rows = byte_rows_at(weights, KVC_BYTE_SCORES * (ptrdiff_t)sizeof *weights);
    int32_t starts[BYTE_QUERIES] = {0};
    int d = 0;
#if SHIFTS_VALUES
    for (int r = 0; r < num_q; r++) starts[r] = -128 * sum_weights(byte_row(&rows, r), n);
#endif
    for (; d + BYTE_VECTORS * LANES <= dim; d += BYTE_VECTORS * LANES)
        sum_byte_columns(num_q, BYTE_VECTORS, acc + d, acc_stride, factor, unit, starts, rows, panel + d * FOUR_BYTES,
                         n, dim);
    if (BYTE_VECTORS * LANES > KVC_QUANT_ELEMENTS && d < dim)
        sum_byte_columns(num_q, BYTE_VECTORS / 2, acc + d, acc_stride, factor, unit, starts, rows,
                         panel + d * FOUR_BYTES, n, dim);
}

/* Scores n packed keys for num_q query rows, BYTE_QUERIES at a time, and one by one what is left. */
INLINE void score_in_bytes(float *scores, const float *q, int q_stride, int num_q, const char *panel,
                           const float *units, int n, int dim) {
    const int padded = kvc_padded_rows(n);
    int r = 0;
    for (; r + BYTE_QUERIES <= num_q; r += BYTE_QUERIES)
        score_byte_rows(BYTE_QUERIES, scores + r * KVC_BYTE_SCORES, q + (ptrdiff_t)r * q_stride, q_stride, panel, units,
                        padded, dim);
    for (; r < num_q; r++)
        score_byte_rows(1, scores + r * KVC_BYTE_SCORES, q + (ptrdiff_t)r * q_stride, q_stride, panel, units, padded,
                        dim);
}

/* Adds n packed values, weighted, to num_q rows of acc, BYTE_QUERIES at a time, and one by one what is left. */
INLINE void sum_in_bytes(float *acc, int acc_stride, const float *factor, const float *unit, const float *weights,
                         int num_q, const char *panel, int n, int dim) {
    const int padded = kvc_padded_rows(n);
    int r = 0;
    for (; r + BYTE_QUERIES <= num_q; r += BYTE_QUERIES)
        sum_byte_rows(BYTE_QUERIES, acc + (ptrdiff_t)r * acc_stride, acc_stride, factor + r, unit + r,
                      weights + r * KVC_BYTE_SCORES, panel, padded, dim);
    for (; r < num_q; r++)
        sum_byte_rows(1, acc + (ptrdiff_t)r * acc_stride, acc_stride, factor + r, unit + r,
                      weights + r * KVC_BYTE_SCORES, panel, padded, dim);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* Adds the logarithms of values' units to a row's scores.  Returns the largest of the sums, lane by lane. */
INLINE vec add_logs(float *row, const float *logs, int padded) {
    vec largest = v_set(-INFINITY);
    for (int j = 0; j < padded; j += LANES) {
        const vec x = v_add(v_load(row + j), v_load(logs + j));
        v_store(row + j, x);
        largest = v_max(x, largest);
    }
    return largest;
}

/* Adds up the lanes of SUM_VECTORS vectors as kvc_add_up does. */
INLINE float add_up_vectors(vec x[SUM_VECTORS]) {
    if (SUM_VECTORS == 4) {
        float sums[LANES];
        v_store(sums, v_add(v_add(x[0], x[SUM_VECTORS / 2]), v_add(x[SUM_VECTORS / 4], x[SUM_VECTORS - 1])));
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
    return v_sum_lanes(SUM_VECTORS == 2 ? v_add(x[0], x[SUM_VECTORS - 1]) : x[0]);
}

/* Turns a row's scores after add_logs into weights, and returns the sum of exp times 1 over the values' units. */
INLINE float weigh_row_in_bytes(float *row, const kvc_byte_units *units, int padded, float max) {
    const vec shift = v_set(max == -INFINITY ? 0 : -max); /* where nothing is visible, weights become 0 */
    vec totals[SUM_VECTORS];
    char *to = (char *)row;
    UNROLL
    for (int i = 0; i < SUM_VECTORS; i++) totals[i] = v_zero();
    for (int j = 0; j < padded; j += EXPS * LANES, to += EXPS * LANES) {
        vec x[EXPS];
        UNROLL
        for (int i = 0; i < EXPS; i++) x[i] = v_add(v_load(row + j + i * LANES), shift);
        exp_negative(EXPS, x);
        UNROLL
        for (int i = 0; i < EXPS; i++) {
            totals[i % SUM_VECTORS] = v_fma(x[i], v_load(units->inverses + j + i * LANES), totals[i % SUM_VECTORS]);
            x[i] = v_mul(x[i], v_set(255));
        }
        store_weights(to, x);
    }
    return add_up_vectors(totals);
}

/* A kvc_weigh_bytes_fn: turns scores into weights, LANES rows at a time, as the steps for one would wait. */
INLINE void weigh_in_bytes(float *scores, int num_q, int n, const kvc_byte_units *units, float *max, float *sum,
                           float *factor, float *unit) {
    const int padded = kvc_padded_rows(n);
    for (int r = 0; n < padded && r < num_q; r++)
        for (int j = n; j < padded; j++) scores[r * KVC_BYTE_SCORES + j] = -INFINITY;
    for (int first = 0, count; first < num_q; first += count) {
        float *const rows = scores + first * KVC_BYTE_SCORES, maxima[KVC_LANES], totals[KVC_LANES];
        count = smaller(LANES, num_q - first);
        for (int r = 0; r < count; r += 4) {
            vec x[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                x[i] = r + i < count ? add_logs(rows + (r + i) * KVC_BYTE_SCORES, units->logs, padded) : x[0];
            v_store_largest(maxima + r, x);
        }
        for (int r = 0; r < count; r++)
            totals[r] = weigh_row_in_bytes(rows + r * KVC_BYTE_SCORES, units, padded, maxima[r]);
        const vec own = v_load_some(maxima, count), before = v_load_some(max + first, count), now = v_max(own, before);
        vec changes[2] = {v_number(v_fma(now, v_set(-1), before)), /* 0 where both are infinite */
                          v_number(v_fma(now, v_set(-1), own))};
        exp_negative(2, changes);
        v_store_some(max + first, now, count);
        v_store_some(factor + first, changes[0], count);
        v_store_some(unit + first, v_mul(changes[1], v_set(1.0f / 255)), count);
        v_store_some(sum + first,
                     v_fma(v_load_some(sum + first, count), changes[0], v_mul(v_load_some(totals, count), changes[1])),
                     count);
    }
}

/* The kernels of a set, and the line of its table. */
#define DEFINE_BYTES(set)                                                                                        \
    TARGET void kvc_pack_byte_keys_##set(void *panel, const void *rows, int64_t row_stride, int first, int n,    \
                                         int dim) {                                                              \
        pack_key_words(panel, rows, row_stride, first, n, dim);                                                  \
    }                                                                                                            \
    TARGET void kvc_pack_byte_values_##set(void *panel, const void *rows, int64_t row_stride, int first, int n,  \
                                           int dim) {                                                            \
        pack_value_words(panel, rows, row_stride, first, n, dim);                                                \
    }                                                                                                            \
    TARGET void kvc_score_bytes_##set(float *scores, const float *q, int q_stride, int num_q, const void *panel, \
                                      const float *units, int n, int dim) {                                      \
        score_in_bytes(scores, q, q_stride, num_q, panel, units, n, dim);                                        \
    }                                                                                                            \
    TARGET void kvc_weigh_bytes_##set(float *scores, int num_q, int n, const kvc_byte_units *units, float *max,  \
                                      float *sum, float *factor, float *unit) {                                  \
        weigh_in_bytes(scores, num_q, n, units, max, sum, factor, unit);                                         \
    }                                                                                                            \
    TARGET void kvc_sum_bytes_##set(float *acc, int acc_stride, const float *factor, const float *unit,          \
                                    const float *weights, int num_q, const void *panel, int n, int dim) {        \
        sum_in_bytes(acc, acc_stride, factor, unit, weights, num_q, panel, n, dim);                              \
    }
