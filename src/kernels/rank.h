/* rank.h: scores by which rows are chosen; part of template.h.
 *
 * A choice is some query heads, whose weighted products with a row add up to the row's score.  A step is KVC_STEP_BYTES
 * of a row.  A group is KVC_LANES lanes.
 *
 * Lanes are query heads, and a step of a row is broadcast to all of them.  So nothing is added up across lanes before
 * the heads' products are weighed: once for a row, not once for each head.  For KVC_LANES rows at a time these sums are
 * transposed, which makes lanes rows again.
 */

enum {
    GROUP_VECTORS = KVC_LANES / LANES, /* of KVC_LANES lanes: a group */
    MOST_GROUPS = IS_WIDE ? 4 : 1,     /* multiplied at once, by ... */
    FEW_ROWS = 4,                      /* rows, or ... */
    MANY_ROWS = 8,                     /* where they are one group or two, and IS_WIDE */
    RANK_SUMS = 16                     /* vectors that products are added up in, at most */
};

/* Sets x[row * num + v] to the products of rows and `num` vectors of lanes, from `lane` on. */
INLINE void rank_floats(int type, int num_rows, int num, vec *x, const char *const *rows, const kvc_rank_query *q,
                        int lane) {
    const char *packed = (const char *)q->packed + (ptrdiff_t)lane * KVC_STEP_BYTES;
    const ptrdiff_t stride = (ptrdiff_t)q->num_lanes * KVC_STEP_BYTES;
    UNROLL
    for (int i = 0; i < num_rows * num; i++) x[i] = v_zero();
    for (ptrdiff_t at = 0; at < (ptrdiff_t)q->num_steps * KVC_STEP_BYTES; at += KVC_STEP_BYTES, packed += stride) {
        vec y[MOST_GROUPS * GROUP_VECTORS];
        UNROLL
        for (int v = 0; v < num; v++) y[v] = v_keep(v_load(packed + v * (int)sizeof *y));
        UNROLL
        for (int r = 0; r < num_rows; r++) {
#if HAS_DOT_16 && IS_WIDE
            if (type == KVC_BF16) {
                const bvec pair = i_set_pair(rows[r] + at);
                UNROLL
                for (int v = 0; v < num; v++) x[r * num + v] = b_dot(x[r * num + v], pair, (bvec)y[v]);
                continue;
            }
#endif
            float element;
            memcpy(&element, rows[r] + at, sizeof element);
            UNROLL
            for (int v = 0; v < num; v++) x[r * num + v] = v_fma(v_set(element), y[v], x[r * num + v]);
        }
    }
    (void)type;
}

#if HAS_QUADS
/* Does what rank_floats does for int8: a step is a quad, four elements. */
INLINE void rank_bytes(int num_rows, int num, vec *x, const char *const *rows, const kvc_rank_query *q, int lane) {
    const char *packed = (const char *)q->packed + (ptrdiff_t)lane * KVC_STEP_BYTES;
    const ptrdiff_t stride = (ptrdiff_t)q->num_lanes * KVC_STEP_BYTES;
    ivec sums[RANK_SUMS];
    UNROLL
    for (int r = 0; r < num_rows; r++) UNROLL
    for (int v = 0; v < num; v++) sums[r * num + v] = i_begin_quads(q->starts + lane + v * LANES);
    for (ptrdiff_t at = 0; at < (ptrdiff_t)q->num_steps * KVC_STEP_BYTES; at += KVC_STEP_BYTES, packed += stride) {
        ivec y[MOST_GROUPS * GROUP_VECTORS];
        UNROLL
        for (int v = 0; v < num; v++) y[v] = i_load(packed + v * (int)sizeof *y);
        UNROLL
        for (int r = 0; r < num_rows; r++) {
            const ivec quad = i_set_quad(rows[r] + at);
            UNROLL
            for (int v = 0; v < num; v++) sums[r * num + v] = i_dot_quads(sums[r * num + v], quad, y[v]);
        }
    }
    UNROLL
    for (int i = 0; i < num_rows * num; i++) x[i] = v_from_int(sums[i]);
}
#endif

/* Adds the weighed products of rows and `groups` groups of lanes, from `lane` on, to sums[row][KVC_LANES]. */
INLINE void rank_groups(int type, int num_rows, int groups, float (*sums)[KVC_LANES], const char *const *rows,
                        const kvc_rank_query *q, const float *by, int lane) {
    const int num = groups * GROUP_VECTORS;
    vec x[RANK_SUMS];
#if HAS_QUADS
    if (type == KVC_INT8)
        rank_bytes(num_rows, num, x, rows, q, lane);
    else
#endif
        rank_floats(type, num_rows, num, x, rows, q, lane);
    UNROLL
    for (int r = 0; r < num_rows; r++) UNROLL
    for (int v = 0; v < num; v++) {
        float *const sum = sums[r] + v % GROUP_VECTORS * LANES;
        const int at = lane + v * LANES;
        vec y = v_mul(x[r * num + v], v_set(by[r]));
        if (q->relu) y = v_max(v_zero(), y);
        /* Kept apart from the sum, as compilers would make an fma of both, which rounds once. */
        y = v_keep(v_mask(v_mul(y, v_load(q->weights + at)), q->masks + at));
        v_store(sum, v_add(v_load(sum), y));
    }
}

/* Adds up the lanes of LANES rows, `width` lanes of each choice, to a vector of scores of each choice. */
INLINE void fold_heads(float *scores, float (*sums)[KVC_LANES], int width) {
    const int parts = width > LANES ? width / LANES : 1, inner = smaller(width, LANES);
    for (int v = 0; v < GROUP_VECTORS; v += parts) {
        vec x[LANES];
        UNROLL
        for (int r = 0; r < LANES; r++) {
            const float *from = sums[r] + v * LANES;
            x[r] = v_load(from);
            if (parts == 2) x[r] = v_add(x[r], v_load(from + LANES));
            if (parts == 4)
                x[r] =
                    v_add(v_add(x[r], v_load(from + 2 * LANES)), v_add(v_load(from + LANES), v_load(from + 3 * LANES)));
        }
        v_transpose(x);
        for (int half = inner / 2; half; half /= 2)
            for (int i = 0; i + half < LANES; i++)
                if (i % inner < half) x[i] = v_add(x[i], x[i + half]);
        for (int i = 0; i < LANES; i += inner, scores += KVC_SCORES) v_store(scores, x[i]);
    }
}

/* Ranks KVC_LANES rows for the lanes of one group's choices, or of one choice. */
INLINE void rank_lanes(int type, float *scores, const kvc_rank_query *q, const char *const *rows, const float *by,
                       int lane) {
    const int end = lane + (q->choice_lanes < KVC_LANES ? KVC_LANES : q->choice_lanes);
    float sums[KVC_LANES][KVC_LANES] = {{0}};
    for (int groups; lane < end; lane += groups * KVC_LANES) {
        const int left = (end - lane) / KVC_LANES;
        groups = left >= MOST_GROUPS ? MOST_GROUPS : IS_WIDE && left >= 2 ? 2 : 1;
        if (groups == 4)
            for (int r = 0; r < KVC_LANES; r += FEW_ROWS)
                rank_groups(type, FEW_ROWS, IS_WIDE ? 4 : 1, sums + r, rows + r, q, by + r, lane);
        else if (groups == 2)
            for (int r = 0; r < KVC_LANES; r += MANY_ROWS)
                rank_groups(type, IS_WIDE ? MANY_ROWS : 1, IS_WIDE ? 2 : 1, sums + r, rows + r, q, by + r, lane);
        else
            for (int r = 0; r < KVC_LANES; r += IS_WIDE ? MANY_ROWS : FEW_ROWS)
                rank_groups(type, IS_WIDE ? MANY_ROWS : FEW_ROWS, 1, sums + r, rows + r, q, by + r, lane);
    }
    for (int r = 0; r < KVC_LANES; r += LANES) {
        if (q->choice_lanes >= KVC_LANES)
            fold_heads(scores + r, sums + r, KVC_LANES);
        else
            fold_heads(scores + r, sums + r, q->choice_lanes);
    }
}

/* Scores n rows for all choices, KVC_LANES at a time: a kvc_rank_fn.  The last row stands for rows that are lacking. */
INLINE void rank(int type, float *scores, const kvc_rank_query *q, const void *rows, int64_t row_stride,
                 const float *by, int n) {
    for (int j = 0; j < n; j += KVC_LANES) {
        const char *at[KVC_LANES];
        float factors[KVC_LANES];
        float *to = scores + j;
        for (int r = 0; r < KVC_LANES; r++) {
            const int row = smaller(j + r, n - 1);
            at[r] = row_at(rows, row_stride, row);
            factors[r] = by[row];
        }
        for (int lane = 0; lane < q->num_lanes;) {
            const int is_long = q->choice_lanes >= KVC_LANES;
            rank_lanes(type, to, q, at, factors, lane);
            lane += is_long ? q->choice_lanes : KVC_LANES;
            to += (is_long ? 1 : KVC_LANES / q->choice_lanes) * KVC_SCORES;
        }
    }
}
