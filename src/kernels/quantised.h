/* quantised.h: score and accumulate for quantised rows, in integers; part of template.h.
 *
 * Elements are small integers, of which blocks of KVC_QUANT_ELEMENTS share a scale.  Queries, and the weights that
 * values are summed up with, become 16 bits wide, so that an instruction multiplies and adds pairs of them, twice as
 * many as of floats; nothing is decoded to f32.  Sums within a block are exact.  Against f32, the scores of normal data
 * change by some 3e-5 and what is summed up by 1e-4 of their size, whatever the length.
 */

enum {
    PIECE = 16,                                      /* bytes of elements that are loaded at once */
    PAIRS = KVC_QUANT_ELEMENTS / 2,                  /* of a block */
    GROUPS = ACCUMULATORS / QUERIES / 2 < 2 ? 1 : 2, /* of LANES rows that are scored together */
    BLOCKS = 8,                                      /* whose weights are rounded at once */
    ROW_MULTIPLE = 32,                               /* that rows are padded to */
    MOST = INT16_MAX
};

/* By how much the unsigned integers that score works with are larger than the elements. */
INLINE int offset_of(int type) { return type == KVC_Q8_0 ? 128 : 8; }

INLINE int padded_rows(int n) { return (n + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE; }

/* Rows past n are the last one again. */
TARGET static const void *const *pad_rows(const void *const *rows, int n, const void *padded[KVC_TILE]) {
    if (n == padded_rows(n)) return rows;
    for (int j = 0; j < padded_rows(n); j++) padded[j] = rows[smaller(j, n - 1)];
    return padded;
}

/* ---- queries ---------------------------------------------------------------------------------------------------- */

/* What a query row becomes: where its f32 elements were, dim int16 in pairs, in the order in which score wants them;
 * then, of every block, the int32 that score begins to count at; then what its sums are multiplied by. */
INLINE const char *starts_of(const char *q, int dim) { return q + (size_t)dim * sizeof(int16_t); }
INLINE const char *scale_of_query(const char *q, int dim) {
    return starts_of(q, dim) + (size_t)dim / KVC_QUANT_ELEMENTS * sizeof(int32_t);
}

/* Four int16, the two in the middle changing places: of bytes in the same order, those with an even number are a pair
 * of unsigned int16 where the others are masked, and those with an odd one where they are shifted. */
INLINE uint64_t even_first(uint64_t x) {
    const uint64_t second = (uint64_t)0xffff << 16, third = second << 16;
    return (x & ~(second | third)) | (x >> 16 & second) | (x << 16 & third);
}

/* Puts the int16 of a block into the order in which score meets them. */
INLINE void order_pairs(int type, char *block) {
    enum { FOURS = KVC_QUANT_ELEMENTS / 4, HALF = FOURS / 2 };
    uint64_t four[FOURS], pairs[FOURS];
    memcpy(four, block, sizeof four);
    for (int i = 0; i < FOURS; i++) four[i] = even_first(four[i]);
    for (int i = 0; i < HALF; i++) { /* of a byte of q4_0, the low bits are an element of the first half */
        const uint64_t low = four[i], high = four[HALF + i];
        pairs[2 * i] = (uint32_t)low | high << 32;
        pairs[2 * i + 1] = low >> 32 | high >> 32 << 32;
    }
    memcpy(block, type == KVC_Q8_0 ? four : pairs, sizeof four);
}

INLINE void prepare_row(int type, float *row, int dim, float by) {
    char *q = (char *)row;
    vec largest = v_zero(), nothing = v_zero(); /* NaN where there is one, or an infinity */
    for (int d = 0; d < dim; d += LANES) {
        largest = v_max(v_abs(v_load(row + d)), largest);
        nothing = v_fma(v_load(row + d), v_zero(), nothing);
    }
    const float max = v_max_lane(largest), scale = max / MOST + v_sum_lanes(nothing), inverse = reciprocal(scale);
    for (int d = 0; d < dim; d += 2 * LANES)
        i_store_16((int16_t *)(void *)q + d, v_mul(v_load(row + d), v_set(inverse)),
                   v_mul(v_load(row + d + LANES), v_set(inverse)));
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) order_pairs(type, q + (size_t)d * sizeof(int16_t));
    char *end = q + (size_t)dim * sizeof(int16_t);
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, end += sizeof(int32_t)) {
        int16_t whole[KVC_QUANT_ELEMENTS];
        int32_t sum = 0;
        memcpy(whole, q + (size_t)d * sizeof *whole, sizeof whole);
        for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) sum += whole[i];
        const int32_t start = -offset_of(type) * sum;
        memcpy(end, &start, sizeof start);
    }
    const float product = scale * by;
    memcpy(end, &product, sizeof product);
}

INLINE void prepare(int type, float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++) prepare_row(type, q + (ptrdiff_t)r * q_stride, dim, scale);
}

/* ---- score ------------------------------------------------------------------------------------------------------ */

/* Pair p of 2 or 4 that lie in the same bytes, as unsigned integers. */
INLINE ivec pair_of(int type, ivec x, int p) {
    if (type == KVC_Q8_0) return p ? i_shift(x, 8) : i_and(x, i_set_16(255));
    return p == 3 ? i_shift(x, 12) : i_and(p ? i_shift(x, 4 * p) : x, i_set_16(15));
}

/* Adds the products of 16 bytes of elements of GROUPS * LANES rows, the first pair of which is `pair`, to
 * sums[group][query]. */
INLINE void score_bytes(int type, int num_q, ivec sums[][QUERIES], const char *const *q, const void *const *rows,
                        size_t at, int pair, ahead *next) {
    const int depth = type == KVC_Q8_0 ? 2 : 4;
    ivec x[GROUPS][4];
    UNROLL
    for (int g = 0; g < GROUPS; g++) i_load_rows(x[g], rows + g * LANES, at);
    UNROLL
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0) ask(next);
        UNROLL
        for (int g = 0; g < GROUPS; g++)
            if (type == KVC_Q8_0) x[g][i] = i_xor(x[g][i], i_set_16((int16_t)0x8080));
        UNROLL
        for (int p = 0; p < depth; p++) {
            ivec y[GROUPS];
            UNROLL
            for (int g = 0; g < GROUPS; g++) y[g] = pair_of(type, x[g][i], p);
            UNROLL
            for (int r = 0; r < num_q; r++) {
                const ivec z = i_set_pair(q[r] + (size_t)(pair + i * depth + p) * 2 * sizeof(int16_t));
                UNROLL
                for (int g = 0; g < GROUPS; g++) sums[g][r] = i_dot(sums[g][r], y[g], z);
            }
        }
    }
}

/* Scores of GROUPS * LANES rows. */
INLINE void score_group(int type, int num_q, float *scores, const char *const *q, const void *const *rows, int dim,
                        ahead *next) {
    vec sums[GROUPS][QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int g = 0; g < GROUPS; g++) sums[g][r] = v_zero();
    for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++) {
        const size_t at = bytes_of(type, b * KVC_QUANT_ELEMENTS);
        const int num_pieces = type == KVC_Q8_0 ? 2 : 1;
        ivec counts[GROUPS][QUERIES];
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int g = 0; g < GROUPS; g++) counts[g][r] = i_set_pair(starts_of(q[r], dim) + (size_t)b * sizeof(int32_t));
        UNROLL
        for (int i = 0; i < num_pieces; i++)
            score_bytes(type, num_q, counts, q, rows, at + KVC_SCALE_BYTES + (size_t)i * PIECE,
                        b * PAIRS + i * PAIRS / 2, next);
        UNROLL
        for (int g = 0; g < GROUPS; g++) {
            const vec scale = v_load_scales(rows + g * LANES, at);
            UNROLL
            for (int r = 0; r < num_q; r++) sums[g][r] = v_fma(v_from_int(counts[g][r]), scale, sums[g][r]);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float scale;
        memcpy(&scale, scale_of_query(q[r], dim), sizeof scale);
        UNROLL
        for (int g = 0; g < GROUPS; g++) v_store(scores + r * KVC_TILE + g * LANES, v_mul(sums[g][r], v_set(scale)));
    }
}

INLINE void score_quantised(int type, int num_q, float *scores, const float *q, int q_stride, const void *const *rows,
                            int n, int dim, kvc_ahead next) {
    const char *queries[QUERIES];
    for (int r = 0; r < num_q; r++) queries[r] = (const char *)(q + (ptrdiff_t)r * q_stride);
    const int num_groups = (n + GROUPS * LANES - 1) / (GROUPS * LANES), elements = type == KVC_Q8_0 ? PIECE : 2 * PIECE;
    ahead after = ahead_of(next, n, num_groups * (dim / elements) * 2); /* two steps to a piece */
    for (int j = 0; j < n; j += GROUPS * LANES) score_group(type, num_q, scores + j, queries, rows + j, dim, &after);
}

/* ---- accumulate ------------------------------------------------------------------------------------------------- */

/* What the rows' elements of some blocks are multiplied by, as integers, and what the sums of these are multiplied by.
 */
typedef struct block_weights {
    int16_t weights[BLOCKS][QUERIES][KVC_TILE];
    float scale[BLOCKS][QUERIES];
} block_weights;

/* Of a block of all rows, and 0 past n.  Returns 0; NaN if any is NaN or infinite. */
INLINE float load_scales(float scales[KVC_TILE], const void *const *rows, int n, size_t at) {
    vec nothing = v_zero();
    for (int j = 0; j < KVC_TILE; j += LANES) {
        const vec scale = j < n ? v_load_scales(rows + j, at) : v_zero();
        nothing = v_fma(scale, v_zero(), nothing);
        v_store(scales + j, scale);
    }
    return v_sum_lanes(nothing);
}

/* Weights times scales, as integers of which the largest is MOST; returns what that stands for.  The largest product
 * sets the step: with the largest weight and the largest scale, a row of large elements and little weight, even one
 * that is hidden, would cost all others their digits. */
INLINE float round_products(int16_t *products, const float *weights, const float *scales) {
    vec x[KVC_TILE / LANES], max = v_zero();
    UNROLL
    for (int i = 0; i < KVC_TILE / LANES; i++) {
        x[i] = v_mul(v_load(weights + i * LANES), v_load(scales + i * LANES));
        max = v_max(v_abs(x[i]), max);
    }
    const float largest = v_max_lane(max);
    const vec inverse = v_set(largest > 1e-33f ? MOST / largest : 0); /* less is nothing beside the rest */
    UNROLL
    for (int i = 0; i < KVC_TILE / LANES; i += 2)
        i_store_16(products + i * LANES, v_mul(x[i], inverse), v_mul(x[i + 1], inverse));
    return largest;
}

/* The weights for num_blocks blocks from element d on.  For all first: each takes a chain of few but slow instructions.
 */
TARGET static void round_weights(int type, int num_q, block_weights *w, const accumulate_args *a, int n, int d,
                                 int num_blocks) {
    float scales[KVC_TILE];
    for (int b = 0; b < num_blocks; b++) {
        const float nothing = load_scales(scales, a->rows, n, bytes_of(type, d + b * KVC_QUANT_ELEMENTS));
        for (int r = 0; r < num_q; r++) {
            const float largest = round_products(w->weights[b][r], a->weights + r * KVC_TILE, scales);
            w->scale[b][r] = largest / (float)(type == KVC_Q8_0 ? MOST : 16 * MOST) + nothing; /* i_load_pairs */
        }
    }
}

/* Adds up two vectors of columns over all rows, from column c of the block with element d on, and adds the sums, times
 * scale, to acc.  A byte holds the columns c and c + half a block where elements take half of one. */
INLINE void accumulate_columns(int type, int num_q, accumulate_args *a, int d, int c, const int16_t weights[][KVC_TILE],
                               const float *scale) {
    ivec sums[2 * QUERIES];
    const int byte = type == KVC_Q8_0 ? c : c / 2, second = type == KVC_Q8_0 ? LANES : KVC_QUANT_ELEMENTS / 2;
    const size_t at = bytes_of(type, d) + KVC_SCALE_BYTES + (size_t)byte;
    ahead next = a->next;
    UNROLL
    for (int r = 0; r < 2 * num_q; r++) sums[r] = i_zero();
    for (int j = 0; j < a->n; j += 2) {
        ivec x[2];
        ask(&next);
        i_load_pairs(type, x, (const char *)a->rows[j] + at, (const char *)a->rows[j + 1] + at);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const ivec w = i_set_pair(&weights[r][j]);
            sums[2 * r] = i_dot(sums[2 * r], x[0], w);
            sums[2 * r + 1] = i_dot(sums[2 * r + 1], x[1], w);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride + d + byte;
        const vec factor = v_set(a->factor[r]), by = v_set(scale[r]);
        i_order(type, sums + 2 * r);
        v_store(acc, v_fma(v_from_int(sums[2 * r]), by, v_mul(v_load(acc), factor)));
        v_store(acc + second, v_fma(v_from_int(sums[2 * r + 1]), by, v_mul(v_load(acc + second), factor)));
    }
    a->next = next;
}

INLINE void accumulate_quantised(int type, int num_q, accumulate_args *a, kvc_ahead next) {
    const int padded = padded_rows(a->n);
    block_weights w;
    a->next = ahead_of(next, a->n, a->dim / (2 * LANES) * ((a->n + 1) / 2));
    for (int d = 0; d < a->dim; d += KVC_QUANT_ELEMENTS) {
        const int b = d / KVC_QUANT_ELEMENTS % BLOCKS;
        if (b == 0) round_weights(type, num_q, &w, a, padded, d, smaller(BLOCKS, (a->dim - d) / KVC_QUANT_ELEMENTS));
        UNROLL
        for (int c = 0; c < KVC_QUANT_ELEMENTS; c += 2 * LANES)
            accumulate_columns(type, num_q, a, d, c, (const int16_t (*)[KVC_TILE])w.weights[b], w.scale[b]);
    }
}
