/* score_bf16.h: scores of queries and rows of bf16, where the processor multiplies pairs of bf16 (HAS_BF16_DOT); part
 * of template.h.
 *
 * Nothing is decoded to f32, which halves the instructions.  Products are exact, except that denormals count as 0.
 */

/* Appends what scores are multiplied by to query rows of bf16. */
INLINE void prepare_bf16(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++)
        memcpy((char *)(q + (ptrdiff_t)r * q_stride) + bytes_of(KVC_BF16, dim), &scale, sizeof scale);
}

/* Adds the products of elements [d, d + count) to the sums. */
INLINE void score_step_bf16(int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                            int64_t row_stride, int d, int count, prefetcher *next) {
    const int stride = sums_stride(num_vecs);
    bvec x[MAX_BLOCK_VECS];
    UNROLL
    for (int v = 0; v < num_vecs; v++) {
        const char *p = row_at(rows, row_stride, 2 * v), *q = row_at(rows, row_stride, 2 * v + 1);
        x[v] = b_load_pair(p + bytes_of(KVC_BF16, d), q + bytes_of(KVC_BF16, d), count);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        const char *q = (const char *)(a->q + (ptrdiff_t)r * a->q_stride) + bytes_of(KVC_BF16, d);
        UNROLL
        for (int v = r * num_vecs / num_q; v < (r + 1) * num_vecs / num_q; v++) prefetch_line(next);
        const bvec y = b_load_twice(q, count);
        UNROLL
        for (int v = 0; v < num_vecs; v++) sums[r * stride + v] = b_dot(sums[r * stride + v], x[v], y);
    }
}

/* Adds the products of all elements. */
INLINE void score_vectors_bf16(int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                               int64_t row_stride, prefetcher *next) {
    int d = 0;
    for (; d + LANES <= a->dim; d += LANES) score_step_bf16(num_q, num_vecs, sums, a, rows, row_stride, d, LANES, next);
    if (d < a->dim) score_step_bf16(num_q, num_vecs, sums, a, rows, row_stride, d, a->dim - d, next);
}
