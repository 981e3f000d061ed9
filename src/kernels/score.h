/* score.h: products of queries with rows; part of template.h.
 *
 * Scores are computed in blocks of num_q queries by num_rows rows, whose sums stay in registers.  Of the two factors,
 * the fewer stay there as well while the others are loaded one by one.
 */

enum { MAX_STEP = 2 }; /* most vectors of a row that a step reads */

/* Vectors of a row that a step reads.  Two of 16-bit elements where they fill a cache line and all queries' vectors fit
 * in registers beside them; with fewer queries and more rows that is slower. */
INLINE int vectors_per_step(int type, int num_q) {
    return LANES * sizeof(uint16_t) * MAX_STEP == LINE && type != KVC_F32 && num_q == QUERIES ? MAX_STEP : 1;
}

/* Adds the products of elements [d, d + LANES), holding the rows' in registers. */
INLINE void score_step_of_rows(int type, int num_q, int num_rows, vec *sums, const score_args *a, const char *rows,
                               int64_t row_stride, int d, prefetcher *next) {
    const int stride = sums_stride(num_rows);
    vec x[MAX_BLOCK_ROWS];
    UNROLL
    for (int j = 0; j < num_rows; j++) x[j] = v_keep(load(type, row_at(rows, row_stride, j), d, LANES));
    UNROLL
    for (int r = 0; r < num_q; r++) {
        if (r < lines_of(type, num_rows)) prefetch_line(next);
        const vec y = v_keep(v_load(a->q + (ptrdiff_t)r * a->q_stride + d));
        UNROLL
        for (int j = 0; j < num_rows; j++) sums[r * stride + j] = v_fma(x[j], y, sums[r * stride + j]);
    }
}

/* Adds the products of elements [d, d + num_vecs * LANES), holding the queries' in registers. */
INLINE void score_step_of_queries(int type, int num_q, int num_rows, int num_vecs, vec *sums, const score_args *a,
                                  const char *rows, int64_t row_stride, int d, prefetcher *next) {
    const int stride = sums_stride(num_rows);
    vec y[QUERIES][MAX_STEP];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < num_vecs; i++) y[r][i] = v_keep(v_load(a->q + (ptrdiff_t)r * a->q_stride + d + i * LANES));
    UNROLL
    for (int j = 0; j < num_rows; j++) UNROLL
    for (int i = 0; i < num_vecs; i++) {
        prefetch_at(next, vector_bytes(type, j * num_vecs + i));
        const vec x = v_keep(load(type, row_at(rows, row_stride, j), d + i * LANES, LANES));
        UNROLL
        for (int r = 0; r < num_q; r++) sums[r * stride + j] = v_fma(x, y[r][i], sums[r * stride + j]);
    }
}

INLINE void score_step(int type, int num_q, int num_rows, int num_vecs, vec *sums, const score_args *a,
                       const char *rows, int64_t row_stride, int d, prefetcher *next) {
    if (num_rows < num_q) /* and num_vecs is 1 */
        score_step_of_rows(type, num_q, num_rows, sums, a, rows, row_stride, d, next);
    else
        score_step_of_queries(type, num_q, num_rows, num_vecs, sums, a, rows, row_stride, d, next);
}

/* Adds the products of all elements that fill vectors. */
INLINE void score_vectors(int type, int num_q, int num_rows, vec *sums, const score_args *a, const char *rows,
                          int64_t row_stride, prefetcher *next) {
    const int num_vecs = vectors_per_step(type, num_q), step = num_vecs * LANES;
    int d = 0;
    for (; d + step <= a->dim; d += step)
        score_step(type, num_q, num_rows, num_vecs, sums, a, rows, row_stride, d, next);
    if (num_vecs > 1 && d + LANES <= a->dim) score_step(type, num_q, num_rows, 1, sums, a, rows, row_stride, d, next);
}

/* Counts the cache lines that scoring num_rows rows loads. */
INLINE int lines_of_block(int type, int q_type, int num_q, int num_rows, int dim) {
    const int num_vecs = q_type == KVC_BF16 ? 2 : vectors_per_step(type, num_q), vecs = dim / LANES;
    return vecs / num_vecs * lines_of(type, num_rows * num_vecs) + vecs % num_vecs * lines_of(type, num_rows);
}

/* Copies `count` totals of each query into the tile. */
INLINE void copy_totals(int num_q, int count, float *scores, const float *totals, int stride) {
    UNROLL
    for (int r = 0; r < num_q; r++) memcpy(scores + r * KVC_TILE, totals + r * stride, (size_t)count * sizeof *totals);
}

/* Returns what the scores of queries prepared as bf16 are multiplied by: it follows the elements of each
 * (score_bf16.h). */
INLINE vec scale_of(const score_args *a) {
    float scale;
    memcpy(&scale, (const char *)a->q + bytes_of(KVC_BF16, a->dim), sizeof scale);
    return v_set(scale);
}

/* Stores the scores of rows [first, first + num_rows): a whole stride, which one instruction copies, where the rows do
 * not end before that; of a repeated row, one. */
INLINE void store_scores(int q_type, int num_q, int num_rows, const score_args *a, int first, const vec *sums) {
    const int stride = sums_stride(num_rows);
    float totals[MAX_SUMS], *scores = a->scores + first;
    UNROLL
    for (int i = 0; i < num_q * stride; i += LANES)
        v_store(totals + i, q_type == KVC_BF16 ? v_mul(v_sums(sums + i), scale_of(a)) : v_sums(sums + i));
    if (first + stride <= a->n)
        copy_totals(num_q, stride, scores, totals, stride);
    else if (a->n < num_rows)
        copy_totals(num_q, 1, scores, totals, stride);
    else
        copy_totals(num_q, num_rows, scores, totals, stride);
}

/* Scores num_rows rows from row `first` on, row_stride bytes apart.  q_type: KVC_BF16 if queries were prepared as bf16,
 * else KVC_F32. */
INLINE void score_block(int type, int q_type, int num_q, int num_rows, const score_args *a, int first,
                        int64_t row_stride, prefetcher *next) {
    const char *rows = row_at(a->rows, a->row_stride, first);
    vec sums[MAX_SUMS];
    UNROLL
    for (int i = 0; i < MAX_SUMS; i++) sums[i] = v_zero();
    if (q_type == KVC_F32) score_vectors(type, num_q, num_rows, sums, a, rows, row_stride, next);
#if HAS_BF16_DOT
    if (q_type == KVC_BF16) score_vectors_bf16(num_q, num_rows, sums, a, rows, row_stride, next);
#endif
    store_scores(q_type, num_q, num_rows, a, first, sums);
}

/* Adds the products of the last `count` elements, from d on, which fill no vector.  Few models have such rows. */
RARE void score_tail(int type, int num_q, float *scores, const float *q, int q_stride, const void *rows,
                     int64_t row_stride, int n, int d, int count) {
    vec y[QUERIES];
    for (int r = 0; r < num_q; r++) y[r] = load(KVC_F32, q + (ptrdiff_t)r * q_stride, d, count);
    for (int j = 0; j < n; j++) {
        vec x = load(type, row_at(rows, row_stride, j), d, count);
        for (int r = 0; r < num_q; r++) scores[r * KVC_TILE + j] += v_sum_lanes(v_mul(x, y[r]));
    }
}

/* Scores all rows for num_q <= QUERIES queries.  The last block begins early enough to be full, and computes some
 * scores again; if there are fewer rows than in a block, each gets a block that repeats it. */
INLINE void score_queries(int type, int q_type, int num_q, score_args a, kvc_ahead next) {
    const int num_rows = block_rows(num_q), repeats = a.n < num_rows, by = repeats ? 1 : num_rows;
    const int num_blocks = (a.n + by - 1) / by;
    prefetcher p = prefetch_begin(next, a.rows, num_blocks * lines_of_block(type, q_type, num_q, num_rows, a.dim));
    for (int j = 0; j < a.n; j += by)
        score_block(type, q_type, num_q, num_rows, &a, smaller(j, a.n - by), repeats ? 0 : a.row_stride, &p);
    prefetch_rest(&p);
    const int tail = tail_of(type, a.dim);
    if (tail && q_type == KVC_F32)
        score_tail(type, num_q, a.scores, a.q, a.q_stride, a.rows, a.row_stride, a.n, a.dim - tail, tail);
}

/* Is a kvc_score_fn once the types are constants. */
INLINE void score(int type, int q_type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                  int64_t row_stride, int n, int dim, kvc_ahead next) {
    if (type >= KVC_FLOAT_TYPES) {
        score_quantised(type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);
        return;
    }
    for (int r = 0; r < num_q; r += QUERIES, next.bytes = 0) { /* the first queries prefetch everything */
        const score_args a = {.scores = scores + r * KVC_TILE,
                              .q = q + (ptrdiff_t)r * q_stride,
                              .q_stride = q_stride,
                              .rows = rows,
                              .row_stride = row_stride,
                              .n = n,
                              .dim = dim};
        switch (smaller(num_q - r, QUERIES)) {
        case 1: score_queries(type, q_type, 1, a, next); break;
        case 2: score_queries(type, q_type, 2, a, next); break;
        case 3: score_queries(type, q_type, 3, a, next); break;
        default: score_queries(type, q_type, 4, a, next);
        }
    }
}
