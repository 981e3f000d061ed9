/* accumulate.h: sums of rows, weighted: acc = acc * factor + sum of weight * row; part of template.h.
 *
 * A column is an element of rows and of acc.  Sums are computed over all rows in blocks of up to FLOAT_QUERIES queries
 * by as many vectors of LANES columns as the ACCUMULATORS registers allow.  The factors are weights and vectors of a
 * row.  The fewer of the two stay in registers while the others are loaded one by one.
 *
 *     sums[r * num_vecs + i]     query r, columns [d + i * LANES, d + (i + 1) * LANES)
 */

enum {
    BLOCK_VECS = 4,                         /* most vectors of columns of a block, except for ... */
    WIDE_VECS = LANES < 16 ? BLOCK_VECS : 8 /* ... the block of 16-lane vectors that covers a row of 128 */
};

/* Vectors of columns that are loaded together: two of bf16 take as many instructions as one, if the first has the even
 * columns and the second the odd ones.  With fewer registers that is slower. */
INLINE int vecs_at_once(int type, int num_vecs) { return IS_WIDE && type == KVC_BF16 && num_vecs > 1 ? 2 : 1; }

/* Loads num vectors of columns, from p on. */
INLINE void load_columns(int type, int num, vec *x, const char *p) {
#if IS_WIDE
    if (num == 2)
        v_load_apart(x, p);
    else
#endif
        x[0] = load(type, p, 0, LANES);
    UNROLL
    for (int i = 0; i < num; i++) x[i] = v_keep(x[i]);
}

/* Adds row j, weighted, holding the row's vectors in registers.  row: its element in the block's first column. */
INLINE void accumulate_step_of_rows(int type, int num_q, int num_vecs, vec *sums, const accumulate_args *a,
                                    const char *row, int j, prefetcher *next) {
    const int lines = lines_of(type, num_vecs), num = vecs_at_once(type, num_vecs);
    vec x[WIDE_VECS];
    UNROLL
    for (int i = 0; i < num_vecs; i += num) load_columns(type, num, x + i, row + vector_bytes(type, i));
    UNROLL
    for (int r = 0; r < num_q; r++) {
        if (r * lines / num_q != (r + 1) * lines / num_q) prefetch_line(next);
        const vec y = v_set(a->weights[r * KVC_SCORES + j]);
        UNROLL
        for (int i = 0; i < num_vecs; i++) sums[r * num_vecs + i] = v_fma(x[i], y, sums[r * num_vecs + i]);
    }
}

/* Adds row j, weighted, holding its weights for all queries in registers. */
INLINE void accumulate_step_of_weights(int type, int num_q, int num_vecs, vec *sums, const accumulate_args *a,
                                       const char *row, int j, prefetcher *next) {
    const int num = vecs_at_once(type, num_vecs);
    vec y[FLOAT_QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) y[r] = v_set(a->weights[r * KVC_SCORES + j]);
    UNROLL
    for (int i = 0; i < num_vecs; i += num) {
        vec x[2];
        UNROLL
        for (int k = 0; k < num; k++) prefetch_at(next, vector_bytes(type, i + k));
        load_columns(type, num, x, row + vector_bytes(type, i));
        UNROLL
        for (int k = 0; k < num; k++) UNROLL
        for (int r = 0; r < num_q; r++) sums[r * num_vecs + i + k] = v_fma(x[k], y[r], sums[r * num_vecs + i + k]);
    }
}

/* Brings the sums of a query from the order of columns to that of load_columns, even ones first, or back. */
INLINE void reorder_sums(int type, int num_vecs, vec *sums, int is_back) {
#if IS_WIDE
    UNROLL
    for (int i = 0; i < num_vecs; i += 2)
        if (vecs_at_once(type, num_vecs - i) == 2) {
            if (is_back)
                v_zip(sums + i);
            else
                v_unzip(sums + i);
        }
#else
    (void)type, (void)num_vecs, (void)sums, (void)is_back;
#endif
}

/* Sums num_vecs vectors of columns, from d on, over all rows. */
INLINE void accumulate_block(int type, int num_q, int num_vecs, accumulate_args *a, int d) {
    prefetcher p = a->next[0]; /* in registers, unlike *a */
    vec sums[ACCUMULATORS];
    UNROLL
    for (int r = 0; r < num_q; r++) {
        const float *acc = a->acc + (ptrdiff_t)r * a->acc_stride + d;
        UNROLL
        for (int i = 0; i < num_vecs; i++) sums[r * num_vecs + i] = v_mul(v_load(acc + i * LANES), v_set(a->factor[r]));
        reorder_sums(type, num_vecs, sums + r * num_vecs, /* is_back */ 0);
    }
    const char *row = (const char *)a->pieces->rows + bytes_of(type, d);
    for (int j = 0; j < a->n; j++, row += a->row_stride) {
        if (num_vecs < num_q)
            accumulate_step_of_rows(type, num_q, num_vecs, sums, a, row, j, &p);
        else
            accumulate_step_of_weights(type, num_q, num_vecs, sums, a, row, j, &p);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        reorder_sums(type, num_vecs, sums + r * num_vecs, /* is_back */ 1);
        UNROLL
        for (int i = 0; i < num_vecs; i++)
            v_store(a->acc + (ptrdiff_t)r * a->acc_stride + d + i * LANES, sums[r * num_vecs + i]);
    }
    a->next[0] = p;
}

/* Sums the last `count` columns, from d on, which fill no vector.  Few models have such rows. */
RARE void accumulate_tail(int type, int num_q, const accumulate_args *a, int d, int count) {
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride;
        vec sum = v_mul(load(KVC_F32, acc, d, count), v_set(a->factor[r]));
        for (int j = 0; j < a->n; j++)
            sum = v_fma(load(type, row_at(a->pieces->rows, a->row_stride, j), d, count),
                        v_set(a->weights[r * KVC_SCORES + j]), sum);
        store(KVC_F32, acc, d, count, sum);
    }
}

/* Whether blocks may be three vectors wide. */
INLINE int has_thirds(int type, int num_q) { return num_q <= QUERIES && vecs_at_once(type, 3) == 1; }

/* Returns the vectors of columns in the next block, of num_vecs that are left: WIDE_VECS where there are registers for
 * their sums, as longer parts of a row are read faster; else a number that makes the blocks about equally wide, or, of
 * vectors that are loaded two at a time, a power of two. */
INLINE int block_width(int type, int num_q, int num_vecs) {
    const int most = smaller(ACCUMULATORS / num_q, BLOCK_VECS);
    if (num_vecs >= WIDE_VECS && ACCUMULATORS / num_q >= WIDE_VECS) return WIDE_VECS;
    if (!has_thirds(type, num_q)) return num_vecs >= 4 && most >= 4 ? 4 : num_vecs >= 2 ? 2 : 1;
    const int blocks = (num_vecs + most - 1) / most;
    return (num_vecs + blocks - 1) / blocks;
}

/* Sums all columns for num_q <= FLOAT_QUERIES queries. */
INLINE void accumulate_queries(int num_q, int type, accumulate_args *a, kvc_ahead next) {
    const int most = ACCUMULATORS / num_q, num_vecs = a->dim / LANES, tail = tail_of(type, a->dim);
    int lines = 0, d = 0;
    for (int i = 0, width; i < num_vecs; i += width) {
        width = block_width(type, num_q, num_vecs - i);
        lines += lines_of(type, width);
    }
    a->next[0] = prefetch_begin(next, a->pieces->rows, lines * a->n);
    for (int i = 0, width; i < num_vecs; i += width, d += width * LANES) {
        width = block_width(type, num_q, num_vecs - i);
        switch (width) { /* widths that do not occur are not compiled */
        case 1: accumulate_block(type, num_q, 1, a, d); break;
        case 2:
            if (most >= 2) accumulate_block(type, num_q, 2, a, d);
            break;
        case 3:
            if (most >= 3 && has_thirds(type, num_q)) accumulate_block(type, num_q, 3, a, d);
            break;
        case 4:
            if (most >= 4) accumulate_block(type, num_q, 4, a, d);
            break;
        default:
            if (most >= WIDE_VECS) accumulate_block(type, num_q, WIDE_VECS, a, d);
        }
    }
    prefetch_rest(&a->next[0]);
    if (tail) accumulate_tail(type, num_q, a, d, tail);
}

/* Adds n weighted rows to num_q rows of acc, some at a time: a kvc_accumulate_fn, once the type is a constant. */
INLINE void accumulate(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                       kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    if (type >= KVC_FLOAT_TYPES) {
        accumulate_quantised(type, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);
        return;
    }
    for (int r = 0, some; r < num_q; r += some) {
        some = smaller(num_q - r, most_queries(type));
        accumulate_args a = {.acc = acc + (ptrdiff_t)r * acc_stride,
                             .factor = factor + r,
                             .weights = weights + r * KVC_SCORES,
                             .pieces = pieces,
                             .row_stride = row_stride,
                             .acc_stride = acc_stride,
                             .n = n,
                             .dim = dim};
        const kvc_ahead part = take_part(&pieces->next, some, num_q - r);
        CALL_WITH_QUERIES(accumulate_queries, some, most_queries(type), 1, type, &a, part)
    }
}
