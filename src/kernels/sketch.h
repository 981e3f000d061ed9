/* sketch.h: makes sketches (rows/sketch.h), by which rows are selected, and scores them; part of template.h.
 *
 * A sketch has a code of 0 to 3 for each element of a key, two bits, which stands for code - 1.5, and a scale, an f16.
 * Four rows are a piece.  weigh_pieces turns scores into weights: 2^(score * log2(e) - exponent of the query).
 *
 * To score them, lanes are rows.  Codes of two bits are taken from their bytes by shifts and a mask, and multiplied as
 * bytes without signs.  A few query rows take them from registers.  For many query rows they are stored.
 */

/* Writes the codes of KVC_QUANT_ELEMENTS elements: four in a byte, elements i, i + 8, i + 16 and i + 24 in byte i. */
INLINE void store_sketch_codes(char *to, const vec x[QUANT_VECTORS]) {
    const code_bytes codes = c_from_floats(x);
    uint64_t quarters[4];
    memcpy(quarters, &codes, sizeof quarters);
    quarters[0] |= quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6; /* within bytes, as codes are below 4 */
    memcpy(to, quarters, sizeof *quarters);
}

/* Makes the sketch of a key.  An element's code is 3 less the number of thresholds -most, 0 and most not below it. */
INLINE void make_sketch(char *to, const float *key, int dim) {
    enum { SUMS = KVC_LANES / LANES };
    vec squares[SUMS], products[SUMS];
    float lanes[KVC_LANES];
    UNROLL
    for (int i = 0; i < SUMS; i++) squares[i] = products[i] = v_zero();
    for (int d = 0; d < dim; d += KVC_LANES) UNROLL
    for (int i = 0; i < SUMS; i++) {
        const vec x = v_load(key + d + i * LANES);
        squares[i] = v_add(squares[i], v_mul(x, x));
    }
    UNROLL
    for (int i = 0; i < SUMS; i++) v_store(lanes + i * LANES, squares[i]);
    const float sum = kvc_add_up(lanes), most = kvc_sketch_threshold(sum, dim);
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, to += KVC_QUANT_ELEMENTS / 4) {
        vec x[QUANT_VECTORS], codes[QUANT_VECTORS];
        load_vectors(KVC_F32, x, (const char *)(key + d));
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) {
            const vec above = v_count(v_count(v_zero(), v_set(most), x[i]), v_zero(), x[i]);
            const vec not_below = v_count(above, v_set(-most), x[i]); /* thresholds that are not below x */
            const vec level = v_fma(not_below, v_set(-1), v_set(1.5f));
            products[i % SUMS] = v_add(products[i % SUMS], v_mul(x[i], level));
            codes[i] = v_fma(not_below, v_set(-1), v_set(3));
        }
        store_sketch_codes(to, codes);
    }
    UNROLL
    for (int i = 0; i < SUMS; i++) v_store(lanes + i * LANES, products[i]);
    store_f16(to, kvc_sketch_scale(sum, kvc_add_up(lanes)));
}

INLINE void make_sketches(void *to, int64_t stride, const float *keys, int n, int dim) {
    for (int i = 0; i < n; i++) make_sketch((char *)to + i * stride, keys + (ptrdiff_t)i * dim, dim);
}

#if HAS_QUADS
enum { SKETCH_VECTORS = IS_WIDE ? 4 : 1 }; /* of rows, that are multiplied at once */

/* Adds the products of num_q queries with the codes in bytes [begin, end) of sketches to sums[vector * num_q + query].
 * Sketches of vectors begin one row apart at `from`, those of lanes four rows apart. */
INLINE void add_codes(int num_q, ivec *sums, const kvc_sketch_query *q, const char *from, ptrdiff_t stride, int begin,
                      int end) {
    const ivec mask = i_set_16(0x0303);
    for (int byte = begin; byte < end; byte += KVC_SKETCH_STEP) {
        ivec x[SKETCH_VECTORS][4];
        UNROLL
        for (int v = 0; v < SKETCH_VECTORS; v++) i_load_rows(x[v], from + v * stride + byte, 4 * stride);
        for (int word = 0; word < 4; word++) {
            const int8_t *codes = q->codes + (byte + 4 * word) / 8 * KVC_QUANT_ELEMENTS + 4 * word % 8;
            UNROLL
            for (int part = 0; part < 4; part++, codes += 8) {
                ivec y[SKETCH_VECTORS];
                UNROLL
                for (int v = 0; v < SKETCH_VECTORS; v++)
                    y[v] = i_and(part ? i_shift(x[v][word], 2 * part) : x[v][word], mask);
                UNROLL
                for (int r = 0; r < num_q; r++) {
                    const ivec quad = i_set_pair(codes + r * q->stride);
                    UNROLL
                    for (int v = 0; v < SKETCH_VECTORS; v++)
                        sums[v * num_q + r] = i_dot_codes(sums[v * num_q + r], y[v], quad);
                }
            }
        }
    }
}

INLINE vec load_sketch_scales(const char *p, ptrdiff_t stride) {
    vec scales[2];
    v_load_scales(scales, p, stride);
    return scales[0];
}

/* Turns sums of products of codes to scores for query r. */
INLINE vec scores_of(ivec sums, vec scales, const kvc_sketch_query *q, int r) {
    const vec exact = v_add(v_from_int(sums), v_set(q->offsets[r]));
    return v_mul(v_mul(exact, scales), v_set(q->scales[r]));
}

/* Scores the rows of a tile for num_q queries, in parts.  A part has rows 4 (at + i) + k, for lanes i, vectors k. */
INLINE void score_all_sketches(int num_q, float *scores, const kvc_sketch_query *q, const char *rows, ptrdiff_t stride,
                               int dim) {
    for (int part = 0; part < KVC_LANES / LANES * (4 / SKETCH_VECTORS); part++) {
        int at = part / (4 / SKETCH_VECTORS) * LANES, first = part % (4 / SKETCH_VECTORS) * SKETCH_VECTORS;
        const char *from = rows + (4 * at + first) * stride;
        ivec sums[SKETCH_VECTORS * QUERIES];
        UNROLL
        for (int i = 0; i < SKETCH_VECTORS * num_q; i++) sums[i] = i_zero();
        for (int byte = 0; byte < dim / 4; byte += CODE_BYTES) {
            ivec some[SKETCH_VECTORS * QUERIES];
            UNROLL
            for (int i = 0; i < SKETCH_VECTORS * num_q; i++) some[i] = i_begin_codes(sums[i]);
            add_codes(num_q, some, q, from, stride, byte, smaller(dim / 4, byte + CODE_BYTES));
            UNROLL
            for (int i = 0; i < SKETCH_VECTORS * num_q; i++) sums[i] = i_end_codes(sums[i], some[i]);
        }
        UNROLL
        for (int v = 0; v < SKETCH_VECTORS; v++) {
            const vec scales = load_sketch_scales(from + v * stride + dim / 4, 4 * stride);
            UNROLL
            for (int r = 0; r < num_q; r++)
                v_store(scores + r * KVC_SCORES + (first + v) * KVC_LANES + at,
                        scores_of(sums[v * num_q + r], scales, q, r));
        }
    }
}

/* ---- many query rows --------------------------------------------------------------------------------------------- */

enum { MOST_UNPACKED = 512 /* elements: keys that are longer are rare, and would take too much of the stack */ };

/* The codes of SKETCH_VECTORS vectors of rows, each in a byte, in quads of 4 elements; and the scales of these rows. */
typedef struct unpacked_sketches {
    ivec quads[MOST_UNPACKED / 4][SKETCH_VECTORS];
    vec scales[SKETCH_VECTORS];
} unpacked_sketches;

/* Returns the queries from r on. */
INLINE kvc_sketch_query queries_from(const kvc_sketch_query *q, int r) {
    return (kvc_sketch_query){q->codes + (ptrdiff_t)r * q->stride, q->scales + r, q->offsets + r, q->stride};
}

/* Unpacks the sketches of rows that begin at `from`.  The next lane's sketch is 4 rows behind, the next vector's one
 * row.  Leaves garbage in quads past the last element, up to a multiple of KVC_SKETCH_STEP. */
INLINE void unpack_sketches(unpacked_sketches *to, const char *from, ptrdiff_t stride, int dim) {
    const ivec mask = i_set_16(0x0303);
    for (int v = 0; v < SKETCH_VECTORS; v++, from += stride) {
        for (int byte = 0; byte < dim / 4; byte += KVC_SKETCH_STEP) {
            ivec x[4];
            i_load_rows(x, from + byte, 4 * stride);
            UNROLL
            for (int word = 0; word < 4; word++) UNROLL
            for (int part = 0; part < 4; part++)
                to->quads[byte + word / 2 * 8 + part * 2 + word % 2][v] =
                    i_and(part ? i_shift(x[word], 2 * part) : x[word], mask);
        }
        to->scales[v] = load_sketch_scales(from + dim / 4, 4 * stride);
    }
}

/* Scores unpacked rows for QUERIES queries.  Sums of CODE_BYTES bytes may have another form (i_dot_codes). */
INLINE void score_unpacked(float *scores, const kvc_sketch_query *q, const unpacked_sketches *rows, int dim) {
    ivec sums[SKETCH_VECTORS * QUERIES];
    UNROLL
    for (int i = 0; i < SKETCH_VECTORS * QUERIES; i++) sums[i] = i_zero();
    for (int begin = 0, end; begin < dim / 4; begin = end) {
        ivec some[SKETCH_VECTORS * QUERIES];
        end = smaller(dim / 4, begin + CODE_BYTES);
        UNROLL
        for (int i = 0; i < SKETCH_VECTORS * QUERIES; i++) some[i] = i_begin_codes(sums[i]);
        for (int i = begin; i < end; i++) UNROLL
        for (int r = 0; r < QUERIES; r++) {
            const ivec quad = i_set_pair(q->codes + r * q->stride + 4 * i);
            UNROLL
            for (int v = 0; v < SKETCH_VECTORS; v++)
                some[v * QUERIES + r] = i_dot_codes(some[v * QUERIES + r], rows->quads[i][v], quad);
        }
        UNROLL
        for (int i = 0; i < SKETCH_VECTORS * QUERIES; i++) sums[i] = i_end_codes(sums[i], some[i]);
    }
    UNROLL
    for (int v = 0; v < SKETCH_VECTORS; v++) UNROLL
    for (int r = 0; r < QUERIES; r++)
        v_store(scores + r * KVC_SCORES + v * KVC_LANES, scores_of(sums[v * QUERIES + r], rows->scales[v], q, r));
}

/* Scores the rows of a tile for num_q queries, a multiple of QUERIES. */
APART void score_unpacked_sketches(float *scores, const kvc_sketch_query *q, int num_q, const char *rows,
                                   ptrdiff_t stride, int dim) {
    unpacked_sketches codes;
    for (int part = 0; part < KVC_LANES / LANES * (4 / SKETCH_VECTORS); part++) {
        int at = part / (4 / SKETCH_VECTORS) * LANES, first = part % (4 / SKETCH_VECTORS) * SKETCH_VECTORS;
        unpack_sketches(&codes, rows + (4 * at + first) * stride, stride, dim);
        for (int r = 0; r < num_q; r += QUERIES) {
            const kvc_sketch_query some = queries_from(q, r);
            score_unpacked(scores + r * KVC_SCORES + first * KVC_LANES + at, &some, &codes, dim);
        }
    }
}

INLINE void score_sketches(float *scores, const kvc_sketch_query *q, int num_q, const void *rows, int64_t row_stride,
                           int dim) {
    const int unpacked = num_q < 2 * QUERIES || dim > MOST_UNPACKED ? 0 : num_q / QUERIES * QUERIES;
    if (unpacked) score_unpacked_sketches(scores, q, unpacked, rows, row_stride, dim);
    for (int r = unpacked, n; r < num_q; r += n) {
        const kvc_sketch_query some = queries_from(q, r);
        float *const to = scores + r * KVC_SCORES;
        n = smaller(num_q - r, QUERIES);
        if (n == 4)
            score_all_sketches(4, to, &some, rows, row_stride, dim);
        else if (n == 3)
            score_all_sketches(3, to, &some, rows, row_stride, dim);
        else if (n == 2)
            score_all_sketches(2, to, &some, rows, row_stride, dim);
        else
            score_all_sketches(1, to, &some, rows, row_stride, dim);
    }
}
#endif

static const float LOG2_E = 1.44269504f;

/* Replaces x < 128 by 2^x, to 1.1e-4 of it, or by 0 far below.  x = n + f with n an integer and f of [0, 1), and 2^f is
 * a polynomial that is exact for 0 and 1 and rises, so that weights rise with scores. */
INLINE void exp2_roughly(int count, vec *x) {
    vec f[4], p[4];
    UNROLL
    for (int i = 0; i < count; i++) f[i] = v_split_power(x + i);
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(v_set(0.078267966f), f[i], v_set(0.226307679f));
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], f[i], v_set(0.695424355f));
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], f[i], v_set(1));
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_times_power(p[i], x[i]);
}

/* A weight is 2^(score * LOG2_E - *exponent).  Raises *exponent to the whole part of largest * LOG2_E.  The weights of
 * num pieces so far, and their sums in KVC_LANES lanes, are multiplied by 2^(before - *exponent). */
APART void raise_exponent(float *exponent, float *sums, float *pieces, int num, float largest) {
    const float before = *exponent;
    v_store_first(exponent, v_truncate(v_set(largest * LOG2_E)));
    vec by = v_set(before - *exponent);
    exp2_roughly(1, &by); /* exactly, for a whole number */
    for (int i = 0; i < KVC_LANES; i += LANES) v_store(sums + i, v_mul(v_load(sums + i), by));
    for (int i = 0; i < num; i += LANES) v_store(pieces + i, v_mul(v_load(pieces + i), by));
}

/* Turns a tile's scores into weights of pieces.  Raises a query's exponent first only if a score is far above it. */
INLINE void weigh_pieces(float *pieces, int64_t stride, int first, const float *scores, int num_q, float *exponents,
                         float *sums) {
    for (int r = 0; r < num_q; r++, pieces += stride, scores += KVC_SCORES, sums += KVC_LANES) {
        const vec limit = v_set((exponents[r] + KVC_SLACK) * (1 / LOG2_E));
        vec most = limit;
        UNROLL
        for (int i = 0; i < KVC_PANEL; i += LANES) most = v_max(v_load(scores + i), most);
        if (v_equal(most, limit) != (1u << LANES) - 1)
            raise_exponent(exponents + r, sums, pieces, first, v_max_lane(most));
        const vec shift = v_set(exponents[r] == -INFINITY ? 0 : -exponents[r]);
        for (int at = 0; at < KVC_LANES; at += LANES) {
            vec x[4];
            UNROLL
            for (int k = 0; k < 4; k++) x[k] = v_fma(v_load(scores + k * KVC_LANES + at), v_set(LOG2_E), shift);
            exp2_roughly(4, x);
            const vec piece = v_add(v_add(x[0], x[1]), v_add(x[2], x[3]));
            v_store(pieces + first + at, piece);
            v_store(sums + at, v_add(v_load(sums + at), piece));
        }
    }
}
