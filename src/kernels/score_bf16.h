/* score_bf16.h: scores of queries prepared as bf16 and rows of bf16, where the processor multiplies pairs of bf16
 * (HAS_BF16_DOT); part of template.h.
 *
 * Nothing is decoded to f32, which halves the instructions.  Products are exact, except that denormals count as 0.
 */

enum { BF16_LANES = 2 * LANES };

/* A prepared query row lies where its dim floats were: dim bf16, then the f32 that scores are multiplied by. */
INLINE void prepare_bf16(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++) {
        float *row = q + (ptrdiff_t)r * q_stride;
        convert_row(KVC_F32, KVC_BF16, (char *)row, (const char *)row, dim);
        memcpy((char *)row + bytes_of(KVC_BF16, dim), &scale, sizeof scale);
    }
}

/* Adds the products of elements [d, d + count) to the sums. */
INLINE void score_step_bf16(int num_q, int num_rows, vec *sums, const score_args *a, const char *rows,
                            int64_t row_stride, int d, int count, prefetcher *next) {
    const int stride = sums_stride(num_rows);
    bvec x[MAX_BLOCK_ROWS];
    UNROLL
    for (int j = 0; j < num_rows; j++) x[j] = b_load(rows + j * row_stride + bytes_of(KVC_BF16, d), count);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        UNROLL
        for (int j = r * num_rows / num_q; j < (r + 1) * num_rows / num_q; j++) prefetch_line(next);
        const bvec y = b_load((const char *)(a->q + (ptrdiff_t)r * a->q_stride) + bytes_of(KVC_BF16, d), count);
        UNROLL
        for (int j = 0; j < num_rows; j++) sums[r * stride + j] = b_dot(sums[r * stride + j], x[j], y);
    }
}

/* Adds the products of all elements. */
INLINE void score_vectors_bf16(int num_q, int num_rows, vec *sums, const score_args *a, const char *rows,
                               int64_t row_stride, prefetcher *next) {
    int d = 0;
    for (; d + BF16_LANES <= a->dim; d += BF16_LANES)
        score_step_bf16(num_q, num_rows, sums, a, rows, row_stride, d, BF16_LANES, next);
    if (d < a->dim) score_step_bf16(num_q, num_rows, sums, a, rows, row_stride, d, a->dim - d, next);
}
