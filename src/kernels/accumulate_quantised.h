/* accumulate_quantised.h: sums of quantised rows, weighted, in integers; part of template.h.
 *
 * A row's weight times the scale of its block is rounded to int16 and multiplied with the block's elements, in pairs of
 * rows; nothing is decoded to f32.  Compared with f32, sums of normal data change by some 1e-4 of their size, whatever
 * the number of rows.
 */

enum { WEIGHT_BLOCKS = 8 }; /* blocks whose weights are rounded at once */

/* The integers that the rows' elements in some blocks are multiplied by, and the unit of each block's sums. */
typedef struct block_weights {
    int16_t weights[WEIGHT_BLOCKS][QUERIES][KVC_TILE];
    float unit[WEIGHT_BLOCKS][QUERIES];
} block_weights;

/* Loads the scales of a block of n rows, `at` bytes into each, and 0 past n.  Returns 0; NaN if a scale is NaN or
 * infinite. */
INLINE float load_scales(float scales[KVC_TILE], const void *const *rows, int n, size_t at) {
    vec zero_or_nan = v_zero();
    for (int j = 0; j < KVC_TILE; j += LANES) {
        const vec scale = j < n ? v_load_scales(rows + j, at) : v_zero();
        zero_or_nan = v_fma(scale, v_zero(), zero_or_nan);
        v_store(scales + j, scale);
    }
    return v_sum_lanes(zero_or_nan);
}

/* Rounds weights times scales to integers, the largest product to INT16_MAX; returns that product.  It and not the
 * largest weight times the largest scale sets the unit: else a row of large elements and little weight, even a hidden
 * one, would cost all others their digits. */
INLINE float round_products(int16_t *products, const float *weights, const float *scales) {
    vec x[KVC_TILE / LANES], max = v_zero();
    UNROLL
    for (int i = 0; i < KVC_TILE / LANES; i++) {
        x[i] = v_mul(v_load(weights + i * LANES), v_load(scales + i * LANES));
        max = v_max(v_abs(x[i]), max);
    }
    const float largest = v_max_lane(max);
    const vec inverse = v_set(largest > 1e-33f ? INT16_MAX / largest : 0); /* smaller products round to nothing */
    UNROLL
    for (int i = 0; i < KVC_TILE / LANES; i += 2)
        i_store_16(products + i * LANES, v_mul(x[i], inverse), v_mul(x[i + 1], inverse));
    return largest;
}

/* Rounds the weights for num_blocks blocks from element d on; n: rows, padded.  Several blocks at once overlap what is,
 * for each, a chain of few but slow instructions. */
TARGET static void round_weights(int type, int num_q, block_weights *w, const accumulate_args *a, int n, int d,
                                 int num_blocks) {
    float scales[KVC_TILE];
    for (int b = 0; b < num_blocks; b++) {
        const float zero_or_nan = load_scales(scales, a->list, n, bytes_of(type, d + b * KVC_QUANT_ELEMENTS));
        for (int r = 0; r < num_q; r++) {
            const float largest = round_products(w->weights[b][r], a->weights + r * KVC_TILE, scales);
            const float units = (float)(type == KVC_Q8_0 ? INT16_MAX : 16 * INT16_MAX); /* 16: see i_load_pairs */
            w->unit[b][r] = largest / units + zero_or_nan;
        }
    }
}

/* Sums two vectors of columns over all rows and adds the sums, times their unit, to acc.  They begin at column c of the
 * block with element d first; a byte of q4_0 holds columns of the first half of the block and of the second. */
INLINE void accumulate_columns(int type, int num_q, accumulate_args *a, int d, int c, const int16_t weights[][KVC_TILE],
                               const float *unit) {
    ivec sums[2 * QUERIES];
    const int byte = type == KVC_Q8_0 ? c : c / 2, second = type == KVC_Q8_0 ? LANES : KVC_QUANT_ELEMENTS / 2;
    const size_t at = bytes_of(type, d) + KVC_SCALE_BYTES + (size_t)byte;
    prefetcher p = a->next; /* in registers, unlike *a */
    UNROLL
    for (int r = 0; r < 2 * num_q; r++) sums[r] = i_zero();
    for (int j = 0; j < a->n; j += 2) {
        ivec x[2];
        prefetch_step(&p, 1);
        i_load_pairs(type, x, (const char *)a->list[j] + at, (const char *)a->list[j + 1] + at);
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
        const vec factor = v_set(a->factor[r]), by = v_set(unit[r]);
        i_order(type, sums + 2 * r);
        v_store(acc, v_fma(v_from_int(sums[2 * r]), by, v_mul(v_load(acc), factor)));
        v_store(acc + second, v_fma(v_from_int(sums[2 * r + 1]), by, v_mul(v_load(acc + second), factor)));
    }
    a->next = p;
}

/* Sums all columns of the rows for num_q <= QUERIES queries. */
INLINE void accumulate_quantised(int type, int num_q, accumulate_args *a, kvc_ahead next) {
    const int padded = padded_rows(a->n);
    block_weights w;
    a->next = prefetch_begin(next, a->rows, a->dim / (2 * LANES) * ((a->n + 1) / 2));
    for (int d = 0; d < a->dim; d += KVC_QUANT_ELEMENTS) {
        const int b = d / KVC_QUANT_ELEMENTS % WEIGHT_BLOCKS;
        if (b == 0)
            round_weights(type, num_q, &w, a, padded, d, smaller(WEIGHT_BLOCKS, (a->dim - d) / KVC_QUANT_ELEMENTS));
        UNROLL
        for (int c = 0; c < KVC_QUANT_ELEMENTS; c += 2 * LANES)
            accumulate_columns(type, num_q, a, d, c, (const int16_t (*)[KVC_TILE])w.weights[b], w.unit[b]);
    }
    prefetch_rest(&a->next);
}
