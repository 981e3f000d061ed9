/* rounding.h: rounds rows of f32 to int8, in units of a 127th of their largest magnitude; part of template.h. */

enum { ROUNDED_ROWS = 4 }; /* that are rounded side by side: what one row does waits for what it did before */

/* Finds the largest magnitudes of ROUNDED_ROWS rows.  Returns whether all of their elements are finite. */
INLINE int largest_of_rows(float *to, const float *const rows[ROUNDED_ROWS], int dim) {
    vec most[ROUNDED_ROWS], zeros = v_zero(); /* NaN once an element is not finite */
    UNROLL
    for (int i = 0; i < ROUNDED_ROWS; i++) most[i] = v_zero();
    for (int d = 0; d < dim; d += LANES) UNROLL
    for (int i = 0; i < ROUNDED_ROWS; i++) {
        const vec x = v_load(rows[i] + d);
        most[i] = v_max(v_abs(x), most[i]);
        zeros = v_fma(x, v_zero(), zeros);
    }
    v_store_largest(to, most);
    return v_sum_lanes(zeros) == 0;
}

RARE int has_nan(const float *row, int dim) {
    int found = 0;
    for (int d = 0; d < dim; d++) found |= row[d] != row[d];
    return found;
}

/* Rounds n rows to int8 codes, and sets their units; NaN for rows that have a NaN. */
INLINE void round_rows(int8_t *codes, float *units, const float *rows, int64_t row_stride, int n, int dim) {
    for (int first = 0; first < n; first += ROUNDED_ROWS) {
        float largest[ROUNDED_ROWS];
        const float *row[ROUNDED_ROWS];
        for (int i = 0; i < ROUNDED_ROWS; i++) row[i] = row_at(rows, row_stride, smaller(first + i, n - 1));
        const int are_finite = largest_of_rows(largest, row, dim);
        for (int i = 0; i < smaller(ROUNDED_ROWS, n - first); i++, codes += dim) {
            const float unit = largest[i] / 127;
            const vec inverse = v_set(reciprocal(unit));
            *units++ = are_finite || !has_nan(row[i], dim) ? unit : NAN;
            if (are_finite)
                for (int d = 0; d < dim; d += LANES) v_store_nearest(codes + d, v_mul(v_load(row[i] + d), inverse));
            else
                encode_int8((char *)codes, (const char *)row[i], dim, inverse);
        }
    }
}
