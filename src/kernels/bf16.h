/* bf16.h: scores of bf16 queries and rows, where the processor multiplies pairs of bf16 (DOT_BF16); part of template.h.
 *
 * Nothing is decoded to f32: half as many instructions.  The products are exact, but for denormals, which are 0 here.
 */

enum { PAIRED = 2 * LANES }; /* elements in a vector */

/* A query row becomes dim bf16, followed by what scores are multiplied by. */
TARGET static void prepare_dots(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++) {
        char *row = (char *)(q + (ptrdiff_t)r * q_stride);
        convert_row(KVC_F32, KVC_BF16, row, row, dim);
        memcpy(row + bytes_of(KVC_BF16, dim), &scale, sizeof scale);
    }
}

/* Adds the products of elements [d, d + count) to sums[query][row]. */
INLINE void dot_step(int num_q, int num_rows, vec *sums, const float *q, int q_stride, const void *const *rows, int d,
                     int count) {
    const int pitch = pitch_of(num_rows);
    bvec x[MAX_BREADTH];
    UNROLL
    for (int j = 0; j < num_rows; j++) x[j] = b_load((const char *)rows[j] + bytes_of(KVC_BF16, d), count);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        const bvec y = b_load((const char *)(q + (ptrdiff_t)r * q_stride) + bytes_of(KVC_BF16, d), count);
        UNROLL
        for (int j = 0; j < num_rows; j++) sums[r * pitch + j] = b_dot(sums[r * pitch + j], x[j], y);
    }
}

INLINE void add_dots(int num_q, int num_rows, vec *sums, const float *q, int q_stride, const void *const *rows, int dim,
                     ahead *next) {
    int d = 0;
    for (; d + PAIRED <= dim; d += PAIRED) {
        ask(next);
        dot_step(num_q, num_rows, sums, q, q_stride, rows, d, PAIRED);
    }
    if (d < dim) dot_step(num_q, num_rows, sums, q, q_stride, rows, d, dim - d);
}

INLINE void scale_scores(int num_q, float *scores, const float *q, int q_stride, int n, int dim) {
    for (int r = 0; r < num_q; r++) {
        float scale, *row = scores + r * KVC_TILE;
        memcpy(&scale, (const char *)(q + (ptrdiff_t)r * q_stride) + bytes_of(KVC_BF16, dim), sizeof scale);
        for (int j = 0; j < n; j += LANES) v_store(row + j, v_mul(v_load(row + j), v_set(scale)));
    }
}
