/* score.h: products of queries with rows; part of template.h.
 *
 * Scores are computed in blocks of num_q queries by num_vecs vectors of rows.  A vector is LANES floats of ROWS rows:
 * of one row or, if IS_WIDE, LANES / 2 floats of each of two rows.  So LANES elements of these rows are ROWS vectors.
 * The products of all of them go to one vector of sums, as their lanes belong to the same rows: sums[r * stride + v],
 * for query r and vector v.  Sums stay in registers, and their lanes are added up in the end.  Of the two factors, the
 * fewer stay in registers, too, while the others are loaded one by one.
 */

/* Loads elements [d, d + LANES) of the rows of vector v of a block, into ROWS vectors. */
INLINE void load_rows(int type, vec x[ROWS], int v, const char *rows, int64_t row_stride, int d) {
#if IS_WIDE
    const char *p = row_at(rows, row_stride, 2 * v), *q = row_at(rows, row_stride, 2 * v + 1);
    v_load_pair(type, x, p + bytes_of(type, d), q + bytes_of(type, d));
#else
    x[0] = load(type, row_at(rows, row_stride, v), d, LANES);
#endif
    UNROLL
    for (int i = 0; i < ROWS; i++) x[i] = v_keep(x[i]);
}

/* Loads elements [d, d + LANES) of query r, to be multiplied by what load_rows loads. */
INLINE void load_query(vec y[ROWS], const score_args *a, int r, int d) {
    const float *q = a->q + (ptrdiff_t)r * a->q_stride + d;
#if IS_WIDE
    y[0] = v_keep(v_load_twice(q));
    y[1] = v_keep(v_load_twice(q + LANES / 2));
#else
    y[0] = v_keep(v_load(q));
#endif
}

#if IS_WIDE
/* Scales queries for rows of bf16, whose even elements load_rows puts before the odd ones: so are the queries'. */
INLINE void scale_evens_first(float *q, int q_stride, int num_q, int dim, float by) {
    for (int r = 0; r < num_q; r++) {
        float *row = q + (ptrdiff_t)r * q_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec x = v_mul(v_load(row + d), v_set(by));
            v_store(row + d, d + LANES <= dim ? v_evens_first(x) : x);
        }
    }
}
#endif

/* Adds the products of elements [d, d + LANES), holding those of all rows in registers, and of one query at a time. */
INLINE void score_step_of_rows(int type, int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                               int64_t row_stride, int d, prefetcher *next) {
    const int stride = sums_stride(num_vecs), lines = lines_of(type, num_vecs * ROWS);
    vec x[MAX_BLOCK_VECS][ROWS];
    UNROLL
    for (int v = 0; v < num_vecs; v++) load_rows(type, x[v], v, rows, row_stride, d);
    UNROLL
    for (int r = 0; r < num_q; r++) {
        vec y[ROWS];
        if (r * lines / num_q != (r + 1) * lines / num_q) prefetch_line(next);
        load_query(y, a, r, d);
        UNROLL
        for (int i = 0; i < ROWS; i++) UNROLL
        for (int v = 0; v < num_vecs; v++) sums[r * stride + v] = v_fma(x[v][i], y[i], sums[r * stride + v]);
    }
}

/* Adds the products of elements [d, d + LANES), holding the queries' in registers, one vector of rows at a time. */
INLINE void score_step_of_queries(int type, int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                                  int64_t row_stride, int d, prefetcher *next) {
    const int stride = sums_stride(num_vecs);
    vec y[FLOAT_QUERIES][ROWS];
    UNROLL
    for (int r = 0; r < num_q; r++) load_query(y[r], a, r, d);
    UNROLL
    for (int v = 0; v < num_vecs; v++) {
        vec x[ROWS];
        UNROLL
        for (int i = 0; i < ROWS; i++) prefetch_at(next, vector_bytes(type, v * ROWS + i));
        load_rows(type, x, v, rows, row_stride, d);
        UNROLL
        for (int i = 0; i < ROWS; i++) UNROLL
        for (int r = 0; r < num_q; r++) sums[r * stride + v] = v_fma(x[i], y[r][i], sums[r * stride + v]);
    }
}

/* Adds the products of all elements that fill vectors. */
INLINE void score_vectors(int type, int num_q, int num_vecs, vec *sums, const score_args *a, const char *rows,
                          int64_t row_stride, prefetcher *next) {
    for (int d = 0; d + LANES <= a->dim; d += LANES)
        if (num_vecs < num_q)
            score_step_of_rows(type, num_q, num_vecs, sums, a, rows, row_stride, d, next);
        else
            score_step_of_queries(type, num_q, num_vecs, sums, a, rows, row_stride, d, next);
}

/* Counts the cache lines that scoring a block loads. */
INLINE int lines_of_block(int type, int q_type, int num_vecs, int dim) {
    const int step = q_type == KVC_F32 ? LANES : 2 * LANES / ROWS; /* elements of a row that are multiplied at once */
    return dim / step * lines_of(type, num_vecs * ROWS * step / LANES);
}

/* Copies `count` totals of each query into the tile. */
INLINE void copy_totals(int num_q, int count, float *scores, const float *totals, int stride) {
    UNROLL
    for (int r = 0; r < num_q; r++)
        memcpy(scores + r * KVC_SCORES, totals + r * stride, (size_t)count * sizeof *totals);
}

/* Copies one total of each query, in a block that is one row, repeated. */
RARE void copy_first_totals(int num_q, float *scores, const float *totals, int stride) {
    for (int r = 0; r < num_q; r++) scores[r * KVC_SCORES] = totals[r * stride];
}

/* Returns what the scores of queries of 16 bits are multiplied by: it follows the elements of each (score_16.h). */
INLINE vec scale_of(const score_args *a) {
    float scale;
    memcpy(&scale, (const char *)a->q + bytes_of(KVC_BF16, a->dim), sizeof scale);
    return v_set(scale);
}

/* Stores the scores of a block of rows that begins with row `first`.  Copies a whole stride of each query, by one
 * instruction, unless rows end before that; of a repeated row, one score.  Halves of vectors are stored directly. */
INLINE void store_scores(int q_type, int num_q, int num_vecs, const score_args *a, int first, const vec *sums) {
    const int vecs_stride = sums_stride(num_vecs), stride = vecs_stride * ROWS, num_rows = num_vecs * ROWS;
    const int repeats = a->n < num_rows, are_halves = IS_WIDE && 2 * stride == LANES;
    float totals[MAX_SUMS * ROWS], *scores = a->scores + first;
    UNROLL
    for (int i = 0; i < num_q * vecs_stride; i += LANES / ROWS) {
        const vec sum = v_sums(sums + i), x = q_type == KVC_F32 ? sum : v_mul(sum, scale_of(a));
#if IS_WIDE
        const int r = i / vecs_stride; /* the first query in this vector */
        int is_one = repeats;
        __asm__("" : "+r"(is_one)); /* else Clang makes two loops of this one, and unrolls neither */
        if (are_halves && !is_one)
            v_store_halves(scores + r * KVC_SCORES, r + 1 < num_q ? scores + (r + 1) * KVC_SCORES : NULL, x);
        else
#endif
            v_store(totals + i * ROWS, x);
    }
    if (repeats)
        copy_first_totals(num_q, scores, totals, stride);
    else if (!are_halves && (stride == num_rows || first + stride <= a->n))
        copy_totals(num_q, stride, scores, totals, stride);
    else if (!are_halves)
        copy_totals(num_q, num_rows, scores, totals, stride);
}

/* Scores num_vecs vectors of rows from row `first` on, row_stride bytes apart; 0 repeats the row.  q_type: KVC_F32, or
 * the rows' type if queries have it, too. */
INLINE void score_block(int type, int q_type, int num_q, int num_vecs, const score_args *a, int first,
                        int64_t row_stride, prefetcher *next) {
    const char *rows = row_at(a->rows, a->row_stride, first);
    vec sums[MAX_SUMS];
    UNROLL
    for (int i = 0; i < MAX_SUMS; i++) sums[i] = v_zero();
    if (q_type == KVC_F32) score_vectors(type, num_q, num_vecs, sums, a, rows, row_stride, next);
#if HAS_DOT_16
    if (q_type != KVC_F32) score_vectors_16(type, num_q, num_vecs, sums, a, rows, row_stride, next);
#endif
    store_scores(q_type, num_q, num_vecs, a, first, sums);
}

/* Adds the products of the last `count` elements, from d on, which fill no vector.  Few models have such rows. */
RARE void score_tail(int type, int num_q, float *scores, const float *q, int q_stride, const void *rows,
                     int64_t row_stride, int n, int d, int count) {
    vec y[FLOAT_QUERIES];
    for (int r = 0; r < num_q; r++) y[r] = load(KVC_F32, q + (ptrdiff_t)r * q_stride, d, count);
    for (int j = 0; j < n; j++) {
        vec x = load(type, row_at(rows, row_stride, j), d, count);
        for (int r = 0; r < num_q; r++) scores[r * KVC_SCORES + j] += v_sum_lanes(v_mul(x, y[r]));
    }
}

/* Scores all rows for num_q <= FLOAT_QUERIES queries.  The last block begins early enough to be full, and computes some
 * scores again.  If there are fewer rows than in a block, each row gets a block that repeats it. */
INLINE void score_queries(int num_q, int type, int q_type, score_args a, kvc_ahead next) {
    const int num_vecs = block_vecs(num_q), num_rows = num_vecs * ROWS, repeats = a.n < num_rows;
    const int by = repeats ? 1 : num_rows, num_blocks = (a.n + by - 1) / by;
    prefetcher p = prefetch_begin(next, a.rows, num_blocks * lines_of_block(type, q_type, num_vecs, a.dim));
    for (int j = 0; j < a.n; j += by)
        score_block(type, q_type, num_q, num_vecs, &a, smaller(j, a.n - by), repeats ? 0 : a.row_stride, &p);
    prefetch_rest(&p);
    const int tail = tail_of(type, a.dim);
    if (tail && q_type == KVC_F32)
        score_tail(type, num_q, a.scores, a.q, a.q_stride, a.rows, a.row_stride, a.n, a.dim - tail, tail);
}

/* Scores n rows for num_q queries, some at a time: a kvc_score_fn, once the types are constants. */
INLINE void score(int type, int q_type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                  int64_t row_stride, int n, int dim, kvc_ahead next) {
    if (type >= KVC_FLOAT_TYPES) {
        score_quantised(type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);
        return;
    }
    const int most = q_type == KVC_F32 ? most_queries(type) : QUERIES;
    for (int r = 0, some; r < num_q; r += some) {
        some = smaller(num_q - r, most);
        const score_args a = {.scores = scores + r * KVC_SCORES,
                              .q = q + (ptrdiff_t)r * q_stride,
                              .q_stride = q_stride,
                              .rows = rows,
                              .row_stride = row_stride,
                              .n = n,
                              .dim = dim};
        const kvc_ahead part = take_part(&next, some, num_q - r);
        CALL_WITH_QUERIES(score_queries, some, most, 1, type, q_type, a, part)
    }
}
