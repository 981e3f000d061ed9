/* score_16.h: scores of queries and rows of the same type of 16 bits, f16 or bf16, where the processor multiplies such
 * (HAS_DOT_16); part of template.h.  A vector has 2 * LANES elements of one row or, if IS_WIDE, of two, a half each.
 *
 * Nothing is decoded to f32, which halves the instructions.  Products are exact, except that denormals of bf16 count
 * as 0.  Their sum is scaled in the end, as a scaled query would have to be rounded again: so products of bf16 overflow
 * where those of a scaled query of f32 would not.
 */

enum { STEP_16 = 2 * LANES / ROWS }; /* elements of a row that are multiplied at once */

/* Appends what scores are multiplied by to query rows of 16 bits. */
INLINE void prepare_16(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++)
        memcpy((char *)(q + (ptrdiff_t)r * q_stride) + bytes_of(KVC_BF16, dim), &scale, sizeof scale);
}

/* Loads `count` elements of row v.  If IS_WIDE, loads rows 2 * v and 2 * v + 1.  p: elements of row 0. */
INLINE bvec load_rows_16(const char *p, int64_t row_stride, int v, int count) {
#if IS_WIDE
    return b_load_pair(row_at(p, row_stride, 2 * v), row_at(p, row_stride, 2 * v + 1), count);
#else
    return b_load_some(row_at(p, row_stride, v), count);
#endif
}

/* Loads `count` elements of a query, to be multiplied by what load_rows_16 loads: if IS_WIDE, into both halves. */
INLINE bvec load_query_16(const char *p, int count) {
#if IS_WIDE
    return b_load_twice(p, count);
#else
    return b_load_some(p, count);
#endif
}

/* Adds the products of elements [d, d + count) to the sums. */
INLINE void score_step_16(int type, int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                          int64_t row_stride, int d, int count, prefetcher *next) {
    const int stride = sums_stride(num_vecs), lines = lines_of(type, 2 * num_vecs);
    bvec x[MAX_BLOCK_VECS];
    UNROLL
    for (int v = 0; v < num_vecs; v++) x[v] = load_rows_16(rows + bytes_of(type, d), row_stride, v, count);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        UNROLL
        for (int i = r * lines / num_q; i < (r + 1) * lines / num_q; i++) prefetch_line(next);
        const bvec y = load_query_16((const char *)(a->q + (ptrdiff_t)r * a->q_stride) + bytes_of(type, d), count);
        UNROLL
        for (int v = 0; v < num_vecs; v++) sums[r * stride + v] = b_dot(sums[r * stride + v], x[v], y);
    }
}

/* Adds the products of all elements. */
INLINE void score_vectors_16(int type, int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                             int64_t row_stride, prefetcher *next) {
    int d = 0;
    for (; d + STEP_16 <= a->dim; d += STEP_16)
        score_step_16(type, num_q, num_vecs, sums, a, rows, row_stride, d, STEP_16, next);
    if (d < a->dim) score_step_16(type, num_q, num_vecs, sums, a, rows, row_stride, d, a->dim - d, next);
}
