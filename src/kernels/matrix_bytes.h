/* matrix_bytes.h: products of many query rows with a tile in bytes, by the matrices of neoni8mm.c, of which it is a
 * part.  Weights are those of neondotprod.c.
 *
 *     a panel of keys      of each 8 elements, KVC_BYTE_TILE rows, of each row the 8
 *     a panel of values    of each 8 rows, all columns, of each column the 8
 *
 * SMMLA multiplies 8 bytes of two query rows by those of two columns of the panel, and USMMLA takes the former without
 * signs: weights.  So half as many instructions as of dot products do.
 */

enum {
    ROW_PAIRS_AT_ONCE = 4, /* of query rows, multiplied by ... */
    COLUMN_PAIRS_AT_ONCE = 4,
    COLUMNS_AT_ONCE = 2 * COLUMN_PAIRS_AT_ONCE,
    BYTES_AT_ONCE = 16, /* of a query row or of weights, loaded at once */
    STEP = 8            /* bytes along the sum */
};

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Puts 8 elements of a row beside those of the next one. */
TARGET void kvc_pack_byte_keys_neoni8mm(void *panel, const void *rows, int64_t row_stride, int first, int n, int dim) {
    for (int j = 0; j < n; j += 2) {
        const char *const row = row_at(rows, row_stride, j);
        char *to = (char *)panel + (first + j) * STEP;
        for (int d = 0; d < dim; d += BYTES_AT_ONCE) {
            const int8x16_t x = load_16(row + d), y = load_16(row + row_stride + d);
            UNROLL
            for (int half = 0; half < 2; half++, to += KVC_BYTE_TILE * STEP) store_16(to, zip_halves(x, y, half));
        }
    }
}

/* Puts 8 rows of a column beside those of the next one: the lower or upper halves of 8 rows of 16 columns. */
INLINE void store_column_halves(char *to, const int8x16_t x[STEP], int is_second) {
    int8x16_t y[STEP / 2], z[2];
    UNROLL
    for (int i = 0; i < STEP / 2; i++) y[i] = is_second ? vzip2q_s8(x[i], x[i + 4]) : vzip1q_s8(x[i], x[i + 4]);
    UNROLL
    for (int half = 0; half < 2; half++) { /* of these columns */
        UNROLL
        for (int i = 0; i < 2; i++) z[i] = half ? vzip2q_s8(y[i], y[i + 2]) : vzip1q_s8(y[i], y[i + 2]);
        store_16(to + half * 2 * (int)sizeof *z, vzip1q_s8(z[0], z[1]));
        store_16(to + (half * 2 + 1) * (int)sizeof *z, vzip2q_s8(z[0], z[1]));
    }
}

TARGET void kvc_pack_byte_values_neoni8mm(void *panel, const void *rows, int64_t row_stride, int first, int n,
                                          int dim) {
    char *to = (char *)panel + (ptrdiff_t)first * dim;
    for (int j = 0; j < n; j += STEP)
        for (int d = 0; d < dim; d += 16, to += 16 * STEP) {
            int8x16_t x[STEP];
            UNROLL
            for (int i = 0; i < STEP; i++) x[i] = load_16((const char *)row_at(rows, row_stride, j + i) + d);
            store_column_halves(to, x, 0);
            store_column_halves(to + 8 * STEP, x, 1);
        }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Multiplies matrices of bytes, x without signs. */
INLINE int32x4_t multiply_weights(int32x4_t sum, int8x16_t x, int8x16_t y) {
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

/* Multiplies `bytes` bytes of pairs of rows, which are at `rows`, by as much of COLUMNS_AT_ONCE columns of a panel,
 * whose steps are `apart` bytes apart.  sums: of each pair of rows and of columns, first row first. */
INLINE void multiply_row_pairs(int is_keys, int num_pairs, int32x4_t (*sums)[COLUMN_PAIRS_AT_ONCE],
                               const char *const *rows, const char *panel, ptrdiff_t apart, int bytes) {
    UNROLL
    for (int p = 0; p < num_pairs; p++) UNROLL
    for (int c = 0; c < COLUMN_PAIRS_AT_ONCE; c++) sums[p][c] = i_zero();
    for (int i = 0; i < bytes; i += BYTES_AT_ONCE) {
        int8x16_t x[ROW_PAIRS_AT_ONCE][2];
        UNROLL
        for (int p = 0; p < num_pairs; p++) {
            const int8x16_t upper = load_16(rows[2 * p] + i), lower = load_16(rows[2 * p + 1] + i);
            x[p][0] = zip_halves(upper, lower, 0);
            x[p][1] = zip_halves(upper, lower, 1);
        }
        UNROLL
        for (int half = 0; half < 2; half++, panel += apart) UNROLL
        for (int c = 0; c < COLUMN_PAIRS_AT_ONCE; c++) {
            const int8x16_t y = load_16(panel + c * (int)sizeof y);
            UNROLL
            for (int p = 0; p < num_pairs; p++) {
                sums[p][c] =
                    is_keys ? multiply(sums[p][c], x[p][half], y) : multiply_weights(sums[p][c], x[p][half], y);
                load_later(&panel, &sums[p][c]);
            }
        }
    }
}

/* Returns the sums of a row of a pair, the first or second, and of the columns of two pairs. */
INLINE vec sums_of_row(const int32x4_t sums[2], int is_second) {
    return v_from_int(
        vreinterpretq_s32_s8(zip_halves(vreinterpretq_s8_s32(sums[0]), vreinterpretq_s8_s32(sums[1]), is_second)));
}

/* Sets rows[0 .. 2 num_pairs) to num_q rows, and to the last one behind. */
INLINE void find_rows(const char **rows, int num_pairs, const void *first, ptrdiff_t stride, int num_q) {
    UNROLL
    for (int r = 0; r < 2 * num_pairs; r++) rows[r] = (const char *)first + smaller(r, num_q - 1) * stride;
}

/* Scores n keys for num_q query rows, up to twice num_pairs. */
INLINE void score_row_pairs(int num_pairs, int num_q, float *scores, const float *q, int q_stride, const char *panel,
                            const float *units, int n, int dim) {
    const char *rows[2 * ROW_PAIRS_AT_ONCE];
    find_rows(rows, num_pairs, (const char *)q + KVC_BYTE_CODES, q_stride * (ptrdiff_t)sizeof *q, num_q);
    for (int j = 0; j < n; j += COLUMNS_AT_ONCE) {
        int32x4_t sums[ROW_PAIRS_AT_ONCE][COLUMN_PAIRS_AT_ONCE];
        multiply_row_pairs(1, num_pairs, sums, rows, panel + j * STEP, KVC_BYTE_TILE * STEP, dim);
        UNROLL
        for (int r = 0; r < 2 * num_pairs; r++) {
            kvc_byte_query query;
            if (r >= num_q) break;
            memcpy(&query, q + (ptrdiff_t)r * q_stride, sizeof query);
            UNROLL
            for (int c = 0; c < COLUMN_PAIRS_AT_ONCE; c += 2) {
                const vec unit = v_load(units + j + 2 * c), sum = sums_of_row(sums[r / 2] + c, r % 2);
                v_store(scores + r * KVC_BYTE_SCORES + j + 2 * c, v_mul(v_mul(sum, unit), v_set(query.unit)));
            }
        }
    }
}

/* Sums n weighted values for num_q query rows, up to twice num_pairs. */
INLINE void sum_row_pairs(int num_pairs, int num_q, float *acc, int acc_stride, const float *factor, const float *unit,
                          const float *weights, const char *panel, int n, int dim) {
    const char *rows[2 * ROW_PAIRS_AT_ONCE];
    find_rows(rows, num_pairs, weights, KVC_BYTE_SCORES * (ptrdiff_t)sizeof *weights, num_q);
    for (int d = 0; d < dim; d += COLUMNS_AT_ONCE) {
        int32x4_t sums[ROW_PAIRS_AT_ONCE][COLUMN_PAIRS_AT_ONCE];
        multiply_row_pairs(0, num_pairs, sums, rows, panel + d * STEP, (ptrdiff_t)dim * STEP, n);
        UNROLL
        for (int r = 0; r < 2 * num_pairs; r++) {
            if (r >= num_q) break;
            UNROLL
            for (int c = 0; c < COLUMN_PAIRS_AT_ONCE; c += 2) {
                float *const to = acc + (ptrdiff_t)r * acc_stride + d + 2 * c;
                v_store(to, v_fma(sums_of_row(sums[r / 2] + c, r % 2), v_set(unit[r]),
                                  v_mul(v_load(to), v_set(factor[r]))));
            }
        }
    }
}

TARGET void kvc_score_bytes_neoni8mm(float *scores, const float *q, int q_stride, int num_q, const void *panel,
                                     const float *units, int n, int dim) {
    const int padded = kvc_padded_rows(n);
    for (int some; num_q; num_q -= some, scores += some * KVC_BYTE_SCORES, q += (ptrdiff_t)some * q_stride) {
        some = num_q >= 2 * ROW_PAIRS_AT_ONCE ? 2 * ROW_PAIRS_AT_ONCE : smaller(num_q, 2);
        if (some > 2)
            score_row_pairs(ROW_PAIRS_AT_ONCE, 2 * ROW_PAIRS_AT_ONCE, scores, q, q_stride, panel, units, padded, dim);
        else
            score_row_pairs(1, some, scores, q, q_stride, panel, units, padded, dim);
    }
}

TARGET void kvc_sum_bytes_neoni8mm(float *acc, int acc_stride, const float *factor, const float *unit,
                                   const float *weights, int num_q, const void *panel, int n, int dim) {
    const int padded = kvc_padded_rows(n);
    for (int r = 0, some; r < num_q; r += some) {
        float *const to = acc + (ptrdiff_t)r * acc_stride;
        const float *const from = weights + r * KVC_BYTE_SCORES;
        some = num_q - r >= 2 * ROW_PAIRS_AT_ONCE ? 2 * ROW_PAIRS_AT_ONCE : smaller(num_q - r, 2);
        if (some > 2)
            sum_row_pairs(ROW_PAIRS_AT_ONCE, 2 * ROW_PAIRS_AT_ONCE, to, acc_stride, factor + r, unit + r, from, panel,
                          padded, dim);
        else
            sum_row_pairs(1, some, to, acc_stride, factor + r, unit + r, from, panel, padded, dim);
    }
}
