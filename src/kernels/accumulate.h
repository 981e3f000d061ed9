/* accumulate.h: sums of rows, weighted; part of template.h.
 *
 * Sums are computed in blocks of up to QUERIES queries by as many vectors of columns as the accumulators allow, over
 * all rows.  Of the factors, weights or vectors of a row, the fewer stay in registers while the others are loaded one
 * by one.
 *
 *     sums[r * num_vecs + i]     query r, columns [d + i * LANES, d + (i + 1) * LANES)
 */

enum {
    BLOCK_VECS = 4,                         /* most vectors of columns of a block, but for ... */
    WIDE_VECS = LANES < 16 ? BLOCK_VECS : 8 /* ... the one of 16-lane vectors that covers a row of 128 */
};

/* Adds row j, from column d on, holding its vectors in registers. */
INLINE void accumulate_step_of_rows(int type, int num_q, int num_vecs, vec *sums, const accumulate_args *a,
                                    const char *row, int j, int d, prefetcher *next) {
    vec x[WIDE_VECS];
    UNROLL
    for (int i = 0; i < num_vecs; i++) x[i] = v_keep(load(type, row, d + i * LANES, LANES));
    UNROLL
    for (int r = 0; r < num_q; r++) {
        if (r < lines_of(type, num_vecs)) prefetch_line(next);
        const vec y = v_set(a->weights[r * KVC_TILE + j]);
        UNROLL
        for (int i = 0; i < num_vecs; i++) sums[r * num_vecs + i] = v_fma(x[i], y, sums[r * num_vecs + i]);
    }
}

/* Adds row j, from column d on, holding its weights in registers. */
INLINE void accumulate_step_of_weights(int type, int num_q, int num_vecs, vec *sums, const accumulate_args *a,
                                       const char *row, int j, int d, prefetcher *next) {
    vec y[QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) y[r] = v_set(a->weights[r * KVC_TILE + j]);
    UNROLL
    for (int i = 0; i < num_vecs; i++) {
        prefetch_at(next, vector_bytes(type, i));
        const vec x = v_keep(load(type, row, d + i * LANES, LANES));
        UNROLL
        for (int r = 0; r < num_q; r++) sums[r * num_vecs + i] = v_fma(x, y[r], sums[r * num_vecs + i]);
    }
}

/* Sums num_vecs vectors of columns, from d on, over all rows. */
INLINE void accumulate_block(int type, int num_q, int num_vecs, accumulate_args *a, int d) {
    prefetcher p = a->next; /* in registers, unlike *a */
    vec sums[ACCUMULATORS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < num_vecs; i++)
        sums[r * num_vecs + i] =
            v_mul(v_load(a->acc + (ptrdiff_t)r * a->acc_stride + d + i * LANES), v_set(a->factor[r]));
    const char *row = a->rows;
    for (int j = 0; j < a->n; j++, row += a->row_stride) {
        if (num_vecs < num_q)
            accumulate_step_of_rows(type, num_q, num_vecs, sums, a, row, j, d, &p);
        else
            accumulate_step_of_weights(type, num_q, num_vecs, sums, a, row, j, d, &p);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < num_vecs; i++)
        v_store(a->acc + (ptrdiff_t)r * a->acc_stride + d + i * LANES, sums[r * num_vecs + i]);
    a->next = p;
}

/* Sums the last `count` columns, from d on, which fill no vector.  Few models have such rows. */
RARE void accumulate_tail(int type, int num_q, const accumulate_args *a, int d, int count) {
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride;
        vec sum = v_mul(load(KVC_F32, acc, d, count), v_set(a->factor[r]));
        for (int j = 0; j < a->n; j++)
            sum = v_fma(load(type, row_at(a->rows, a->row_stride, j), d, count), v_set(a->weights[r * KVC_TILE + j]),
                        sum);
        store(KVC_F32, acc, d, count, sum);
    }
}

/* Returns the vectors of columns in the next block, of num_vecs that are left: WIDE_VECS where there are registers for
 * their sums, as longer parts of a row are read faster; else a number that makes the blocks about equally wide. */
INLINE int block_width(int num_q, int num_vecs) {
    const int most = ACCUMULATORS / num_q;
    if (num_vecs >= WIDE_VECS && most >= WIDE_VECS) return WIDE_VECS;
    const int blocks = (num_vecs + smaller(most, BLOCK_VECS) - 1) / smaller(most, BLOCK_VECS);
    return (num_vecs + blocks - 1) / blocks;
}

/* Sums all columns for num_q <= QUERIES queries. */
INLINE void accumulate_queries(int type, int num_q, accumulate_args *a, kvc_ahead next) {
    const int most = ACCUMULATORS / num_q, num_vecs = a->dim / LANES, tail = tail_of(type, a->dim);
    int lines = 0, d = 0;
    for (int i = 0, width; i < num_vecs; i += width) {
        width = block_width(num_q, num_vecs - i);
        lines += lines_of(type, width);
    }
    a->next = prefetch_begin(next, a->rows, lines * a->n);
    for (int i = 0, width; i < num_vecs; i += width, d += width * LANES) {
        width = block_width(num_q, num_vecs - i);
        switch (width) {
        case 1: accumulate_block(type, num_q, 1, a, d); break;
        case 2: accumulate_block(type, num_q, smaller(2, most), a, d); break;
        case 3: accumulate_block(type, num_q, smaller(3, most), a, d); break;
        case 4: accumulate_block(type, num_q, smaller(4, most), a, d); break;
        default: accumulate_block(type, num_q, most < WIDE_VECS ? 1 : WIDE_VECS, a, d);
        }
    }
    prefetch_rest(&a->next);
    if (tail) accumulate_tail(type, num_q, a, d, tail);
}

/* Is a kvc_accumulate_fn once the type is a constant. */
INLINE void accumulate(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                       const void *rows, int64_t row_stride, int n, int dim, kvc_ahead next) {
    if (type >= KVC_FLOAT_TYPES) {
        accumulate_quantised(type, acc, acc_stride, factor, weights, num_q, rows, row_stride, n, dim, next);
        return;
    }
    for (int r = 0; r < num_q; r += QUERIES, next.bytes = 0) { /* the first queries prefetch everything */
        accumulate_args a = {.acc = acc + (ptrdiff_t)r * acc_stride,
                             .factor = factor + r,
                             .weights = weights + r * KVC_TILE,
                             .rows = rows,
                             .row_stride = row_stride,
                             .acc_stride = acc_stride,
                             .n = n,
                             .dim = dim};
        switch (smaller(num_q - r, QUERIES)) {
        case 1: accumulate_queries(type, 1, &a, next); break;
        case 2: accumulate_queries(type, 2, &a, next); break;
        case 3: accumulate_queries(type, 3, &a, next); break;
        default: accumulate_queries(type, 4, &a, next);
        }
    }
}
