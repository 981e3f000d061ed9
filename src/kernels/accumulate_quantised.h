/* accumulate_quantised.h: sums of quantised rows, weighted, in integers; part of template.h.
 *
 * A row's weight times the scale of its block is rounded to int16 and multiplied with the block's elements, in pairs of
 * rows; nothing is decoded to f32.  Compared with f32, sums of normal data change by some 1e-4 of their size, whatever
 * the number of rows.
 *
 * An example: two rows of a block, one query, a LARGEST_WEIGHT of 32767.
 *
 *     row  weight  scale  weight * scale  rounded  element 0  element 1
 *     0    0.6     0.01   0.006            8192    100        -3
 *     1    0.3     0.08   0.024           32767    -20        50
 *
 * The largest product, 0.024, becomes 32767, so the unit is 0.024 / 32767.  A pair of rows is one multiplication for
 * each element: 8192 * 100 + 32767 * -20 = 163860.  Times the unit, that is 0.12002, where f32 has 0.12.
 *
 * A row with one scale (int8) has weights that include it.  Rows lie in pieces of KVC_PANEL.  A column is an element of
 * rows.  A part is two vectors of columns.  zero_or_nan is 0, or NaN if a factor is not finite: added to the unit.
 */

enum {
    TILE_VECS = KVC_TILE / LANES,
    PANEL_VECS = KVC_PANEL / LANES,
    ROWS_AT_ONCE = 4, /* rows of a step */
    WEIGHTS_AT_ONCE = BLOCKS_AT_ONCE * QUERIES,
    WEIGHTS_BYTES = KVC_TILE *
        3 /* from one query's weights for a block to the next one's: as accumulate_bytes.h needs */
};

/* The factors of the rows' elements in some blocks.  Block b and query r of num_q are number b * num_q + r. */
typedef struct block_weights {
    int16_t rounded[WEIGHTS_AT_ONCE][WEIGHTS_BYTES / sizeof(int16_t)]; /* weights times scales */
    float unit[WEIGHTS_AT_ONCE];                                       /* of sums over these */
} block_weights;

/* Loads the scales of a block of LANES rows. */
INLINE vec load_scale_of_rows(const char *block, ptrdiff_t stride) {
    vec halves[2];
    v_load_scales(halves, block, stride);
    return halves[0];
}

/* Loads the scales of a block of n < LANES rows, and 0 past n, which may be negative. */
RARE vec load_few_scales(const char *block, ptrdiff_t stride, int n) {
    uint16_t scales[LANES] = {0};
    for (int j = 0; j < n; j++) memcpy(&scales[j], block + j * stride, sizeof *scales);
    return v_load_f16(scales);
}

/* Loads the scales of the block `at` bytes into each of n rows, and 0 past n.  Returns zero_or_nan of them. */
INLINE float load_scales(vec scales[TILE_VECS], const kvc_value_piece *pieces, ptrdiff_t at, ptrdiff_t stride, int n) {
    vec zero_or_nan = v_zero();
    const char *block = NULL;
    const int vectors = kvc_padded_rows(n) / LANES;
    for (int i = 0; i < vectors; i++, block += LANES * stride, n -= LANES) {
        if (i % PANEL_VECS == 0) block = (const char *)pieces[i / PANEL_VECS].rows + at;
        scales[i] = n >= LANES ? load_scale_of_rows(block, stride) : load_few_scales(block, stride, n);
        zero_or_nan = v_fma(scales[i], v_zero(), zero_or_nan);
    }
    return zero_or_nan_of(zero_or_nan);
}

/* Loads the scales of a block of a PANEL, where they stand as floats.  Returns zero_or_nan of them. */
INLINE float load_panel_scales(vec *scales, const char *block) {
    vec zero_or_nan = v_zero();
    UNROLL
    for (int i = 0; i < PANEL_VECS; i++) {
        scales[i] = v_load(block + i * (int)sizeof(vec));
        zero_or_nan = v_fma(scales[i], v_zero(), zero_or_nan);
    }
    return zero_or_nan_of(zero_or_nan);
}

/* Returns the largest weights, lane by lane, and sets zero_or_nan of them.  vectors: a multiple of PANEL_VECS. */
INLINE vec largest_weights(const float *weights, int vectors, float *zero_or_nan) {
    vec largest = v_zero(), times_zero = v_zero();
    for (int i = 0; i < vectors; i += PANEL_VECS) UNROLL
    for (int j = i; j < i + PANEL_VECS; j++) {
        const vec x = v_load(weights + j * LANES);
        largest = v_max_abs(x, largest);
        times_zero = v_fma(x, v_zero(), times_zero);
    }
    *zero_or_nan = zero_or_nan_of(times_zero);
    return largest;
}

/* Returns the largest products of weights and scales, a multiple of PANEL_VECS vectors, in each lane. */
INLINE vec largest_products(const float *weights, const vec *scales, int vectors) {
    vec largest = v_zero();
    for (int i = 0; i < vectors; i += PANEL_VECS) UNROLL
    for (int j = i; j < i + PANEL_VECS; j++) {
        largest = v_max_abs(v_mul(v_load(weights + j * LANES), scales[j]), largest);
    }
    return largest;
}

/* Rounds weights times scales, unless these are NULL, times `inverse`. */
INLINE void round_products(int16_t *rounded, const float *weights, const vec *scales, float inverse, int vectors) {
    for (int i = 0; i < vectors; i += PANEL_VECS) UNROLL
    for (int j = i; j < i + PANEL_VECS; j += 2, rounded += 2 * LANES) {
        vec x[2];
        UNROLL
        for (int k = 0; k < 2; k++) {
            x[k] = v_load(weights + (j + k) * LANES);
            if (scales) x[k] = v_mul(x[k], scales[j + k]);
            x[k] = v_mul(x[k], v_set(inverse));
        }
        i_store_16(rounded, x[0], x[1]);
    }
}

/* Finds the units of `num` blocks and queries by their largest products, of which each lane of largest[i] has one, and
 * `inverse`, 1 over the units.  Writes up to a multiple of LANES. */
INLINE void find_units(block_weights *w, vec largest[WEIGHTS_AT_ONCE], float inverse[WEIGHTS_AT_ONCE], int num) {
    for (int i = num; i % 4; i++) largest[i] = v_zero();
    for (int i = 0; i < num; i += LANES) {
        /* smaller products round to nothing */
        const vec x = v_max(v_set(1e-33f), v_max_lanes(largest + i, smaller(num - i, LANES)));
        v_store(inverse + i, v_div(v_set(LARGEST_WEIGHT), x));
        v_store(w->unit + i, v_mul(x, v_set(1.0f / LARGEST_WEIGHT)));
    }
}

/* Whether weights come with the scales of rows. */
INLINE int has_row_scale(int type) { return type != PANEL && KVC_TYPES[type].has_row_scale; }

/* Returns how many bytes a block is behind the one before it: of a PANEL, what stands in the place of row_stride. */
INLINE ptrdiff_t block_stride(int type, const accumulate_args *a) {
    return type == PANEL ? a->row_stride : block_bytes(type);
}

/* Rounds weights times scales to integers for each query and each of `blocks` blocks.  The largest product becomes
 * LARGEST_WEIGHT.  It sets the unit, not the largest weight times the largest scale: otherwise a row of large elements
 * and little weight, even a masked one, would cost all others their digits.  Goes over all blocks and queries three
 * times, because the work for one of them is a chain of few but slow instructions. */
TARGET static void round_weights(int type, int num_q, block_weights *w, accumulate_args *a, ptrdiff_t block,
                                 int blocks) {
    prefetcher next = a->next[0];
    const int is_scaled = has_row_scale(type), vectors = kvc_padded_rows(a->n) / LANES;
    const ptrdiff_t step = block_stride(type, a);
    float zero_or_nan[WEIGHTS_AT_ONCE], inverse[WEIGHTS_AT_ONCE];
    vec largest[WEIGHTS_AT_ONCE], scales[BLOCKS_AT_ONCE][TILE_VECS];
    for (int b = 0, i = 0; b < blocks; b++, block += step) {
        const float of_scales = is_scaled       ? 0
                                : type == PANEL ? load_panel_scales(scales[b], (const char *)a->pieces->rows + block)
                                                : load_scales(scales[b], a->pieces, block, a->row_stride, a->n);
        for (int r = 0; r < num_q; r++, i++) {
            const float *weights = a->weights + r * KVC_SCORES;
            prefetch_line(&next);
            zero_or_nan[i] = of_scales;
            largest[i] = is_scaled ? largest_weights(weights, vectors, &zero_or_nan[i])
                                   : largest_products(weights, scales[b], vectors);
        }
    }
    find_units(w, largest, inverse, blocks * num_q);
    for (int b = 0, i = 0; b < blocks; b++)
        for (int r = 0; r < num_q; r++, i++) {
            const float *weights = a->weights + r * KVC_SCORES;
            prefetch_line(&next);
            w->unit[i] += zero_or_nan[i];
            if (is_scaled)
                round_products(w->rounded[i], weights, NULL, inverse[i], vectors);
            else
                round_products(w->rounded[i], weights, scales[b], inverse[i], vectors);
        }
    a->next[0] = next;
}

enum { PARTS_AT_ONCE = 2 }; /* most parts of a row, two vectors of columns each, that are summed at once */

/* Counts the sums of a column and query: two where few products would wait for each other. */
INLINE int sets_for(int num_q, int parts) { return (HAS_VNNI || HAS_AVX_VNNI) && num_q * parts <= 2 ? 2 : 1; }

/* Adds the products of ROWS_AT_ONCE rows with the queries' weights, in `parts` parts, which are `apart` bytes apart.
 * Row r is at p + r * stride.  w: the first query's weights.  If there are two sets of sums, pairs take turns. */
INLINE void accumulate_rows(int type, int num_q, int parts, ivec (*sums)[PARTS_AT_ONCE][2 * MANY_QUERIES],
                            const char *p, ptrdiff_t stride, int apart, const char *w) {
    UNROLL
    for (int j = 0; j < ROWS_AT_ONCE; j += 2) {
        ivec x[PARTS_AT_ONCE][2];
        UNROLL
        for (int i = 0; i < parts; i++)
            i_load_pairs(type, x[i], p + j * stride + i * apart, p + (j + 1) * stride + i * apart);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const ivec y = i_set_pair(w + r * WEIGHTS_BYTES + j * (int)sizeof(int16_t));
            UNROLL
            for (int i = 0; i < parts; i++) {
                ivec *const to = sums[j / 2 % sets_for(num_q, parts)][i] + 2 * r;
                to[0] = i_dot(to[0], x[i][0], y);
                to[1] = i_dot(to[1], x[i][1], y);
            }
        }
    }
}

/* Multiplies two vectors of acc, `second` floats apart, by queries' factors, and adds a part's sums, times units. */
INLINE void add_sums(int type, int num_q, ivec *sums, float *acc, int acc_stride, int second, const float *factors,
                     const float *unit) {
    UNROLL
    for (int r = 0; r < num_q; r++, acc += acc_stride) {
        const vec factor = v_set(factors[r]), by = v_set(unit[r]);
        ivec *const x = sums + 2 * r;
        i_order(type, x);
        v_store(acc, v_fma(v_from_int(x[0]), by, v_mul(v_load(acc), factor)));
        v_store(acc + second, v_fma(v_from_int(x[1]), by, v_mul(v_load(acc + second), factor)));
    }
}

/* Columns that are summed at once, and their weights: two vectors of a block, or all of two blocks with one scale. */
typedef struct column_set {
    ptrdiff_t block;     /* bytes of a row before the block */
    int element;         /* first element of the block, in a row */
    int first;           /* first column, in the block */
    const char *weights; /* of the first query, rounded */
    const float *unit;   /* [queries] of these */
} column_set;

/* Sums columns over all rows, and adds the sums, times their unit, to acc.  A byte of q4_0 holds a column of the first
 * half of the block, and one of the second half.  So its two vectors of columns are half a block apart in acc. */
INLINE void accumulate_columns(int type, int num_q, int parts, accumulate_args *a, column_set of) {
    ivec sums[2][PARTS_AT_ONCE][2 * MANY_QUERIES];
    const int byte = kvc_is_8_bits(type) ? of.first : of.first / 2;
    const int second = kvc_is_8_bits(type) ? LANES : KVC_QUANT_ELEMENTS / 2;
    const int sets = sets_for(num_q, parts);
    const char *w = of.weights;
    ptrdiff_t stride = a->row_stride;
    char last[ROWS_AT_ONCE][COPY_STRIDE];
    UNROLL
    for (int i = 0; i < sets * PARTS_AT_ONCE; i++) UNROLL
    for (int r = 0; r < 2 * num_q; r++) sums[i / PARTS_AT_ONCE][i % PARTS_AT_ONCE][r] = i_zero();
    for (int i = 0, left = a->n; left > 0; i++, left -= KVC_PANEL) {
        const char *block = (const char *)a->pieces[i].rows + of.block;
        prefetcher next = a->next[i * a->apart]; /* in registers, unlike *a */
        for (int n = smaller(left, KVC_PANEL); n > 0; n -= ROWS_AT_ONCE, block += ROWS_AT_ONCE * stride) {
            if (n < ROWS_AT_ONCE) {
                block = pad_rows(last, ROWS_AT_ONCE, block, stride, n, parts * block_bytes(type));
                stride = COPY_STRIDE;
            }
            prefetch_step(&next, parts * ROWS_AT_ONCE / 2);
            accumulate_rows(type, num_q, parts, sums, block + begin_of(type) + byte, stride, block_bytes(type), w);
            w += ROWS_AT_ONCE * sizeof(int16_t);
        }
        a->next[i * a->apart] = next;
    }
    UNROLL
    for (int i = 0; i < parts; i++) {
#if HAS_VNNI || HAS_AVX_VNNI
        if (sets == 2) UNROLL
        for (int r = 0; r < 2 * num_q; r++) sums[0][i][r] = i_add(sums[0][i][r], sums[1][i][r]);
#endif
        add_sums(type, num_q, sums[0][i], a->acc + of.element + byte + i * KVC_QUANT_ELEMENTS, a->acc_stride, second,
                 a->factor, of.unit);
    }
}

/* Counts the blocks whose columns are summed at once: two where they share weights and there are registers. */
INLINE int blocks_together(int type, int num_q) { return HAS_VNNI && has_row_scale(type) && num_q <= QUERIES ? 2 : 1; }

/* Sums all columns of the rows for num_q queries, as many as queries_at_once returns. */
INLINE void accumulate_quantised_rows(int num_q, int type, accumulate_args *a, int left) {
    const int num_blocks = a->dim / KVC_QUANT_ELEMENTS, together = blocks_together(type, num_q);
    const int blocks_at_once = num_q > QUERIES ? BLOCKS_AT_ONCE * QUERIES / MANY_QUERIES : BLOCKS_AT_ONCE;
    ptrdiff_t block = 0; /* bytes of a row before it */
    block_weights w;
    begin_ahead(a, num_q, left, 2 * num_blocks * num_q, a->dim / (2 * LANES) * ((smaller(a->n, KVC_PANEL) + 1) / 2));
    for (int b = 0; b < num_blocks; b++, block += block_bytes(type)) {
        const int is_scaled = has_row_scale(type), first = is_scaled ? 0 : b % blocks_at_once * num_q;
        if (is_scaled ? b == 0 : first == 0)
            round_weights(type, num_q, &w, a, block, is_scaled ? 1 : smaller(blocks_at_once, num_blocks - b));
        if (together == 2 && b + 2 <= num_blocks) {
            accumulate_columns(type, num_q, together, a,
                               (column_set){block, b * KVC_QUANT_ELEMENTS, 0, (const char *)w.rounded[0], w.unit});
            block += block_bytes(type);
            b++;
            continue;
        }
        for (int c = 0; c < KVC_QUANT_ELEMENTS; c += 2 * LANES) /* a loop: half the code, where LANES are 8 */
            accumulate_columns(
                type, num_q, 1, a,
                (column_set){block, b * KVC_QUANT_ELEMENTS, c, (const char *)w.rounded[first], w.unit + first});
    }
    end_ahead(a);
}

/* Adds n weighted rows to num_q rows of acc, some at a time: a kvc_accumulate_fn, once the type is a constant. */
INLINE void accumulate_quantised(int type, float *acc, int acc_stride, const float *factor, const float *weights,
                                 int num_q, kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    for (int some; num_q; num_q -= some) {
        accumulate_args a = {acc, factor, weights, pieces, row_stride, acc_stride, n, dim, 0, {{0}}};
        some = queries_at_once(num_q);
        CALL_WITH_QUERIES(accumulate_quantised_rows, some, MOST_QUERIES, 0, type, &a, num_q)
        acc += (ptrdiff_t)some * acc_stride;
        factor += some;
        weights += some * KVC_SCORES;
    }
}
