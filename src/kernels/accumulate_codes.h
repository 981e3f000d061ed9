/* accumulate_codes.h: sums of rows of codes of four or five bits, weighted, in integers; part of template.h, where
 * HAS_VNNI.
 *
 * A row's weight times the scale of its block is rounded to int16, as in accumulate_quantised.h.  Codes of four rows, a
 * quad, are interleaved at a time, and unpacked as bytes, before they become int16: codes with a fifth bit less 16,
 * others as the levels that they stand for.  What elements have beside that is their block's minimum (load_heads): of
 * that, weights times minima are added to all columns of the block.
 */

enum {
    QUAD = 4,      /* rows that are interleaved */
    QUAD_LINES = 2 /* prefetched for these, of a block: as many as they fill */
};

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* The factors of the rows' elements in some blocks, and the terms that are added to the sums. */
typedef struct code_weights {
    block_weights rounded;
    float minima[WEIGHTS_AT_ONCE]; /* the sum of weights times minima; numbered as in block_weights */
    uint32_t fifth_bits[BLOCKS_AT_ONCE][KVC_TILE];
} code_weights;

/* Loads the heads of a block, `at` bytes into n rows, and 0 past n.  Returns 0, or NaN if a scale is not finite. */
INLINE float load_tile_heads(int type, vec scales[TILE_VECS], vec minima[TILE_VECS], uint32_t *fifth_bits,
                             const kvc_value_piece *piece, ptrdiff_t at, ptrdiff_t stride, int n) {
    char copies[LANES][COPY_STRIDE];
    vec zero_or_nan = v_zero();
    for (int i = 0; n > 0; piece++) {
        const char *block = (const char *)piece->rows + at;
        for (int v = 0; v < PANEL_VECS; v++, i++, block += LANES * stride, n -= LANES) {
            ivec bits = i_zero();
            if (n < LANES) {
                block = pad_rows(copies, LANES, block, stride, n > 0 ? n : 0, PIECE_BYTES);
                stride = COPY_STRIDE;
            }
            load_heads(type, &scales[i], &minima[i], &bits, block, stride);
            i_store(fifth_bits + i * LANES, bits);
            zero_or_nan = v_fma(scales[i], v_zero(), zero_or_nan);
        }
    }
    return zero_or_nan_of(zero_or_nan);
}

/* Returns weights times minima, added up in each lane. */
INLINE vec multiply_minima(const float *weights, const vec minima[TILE_VECS], int vectors) {
    vec sum = v_zero();
    for (int i = 0; i < vectors; i++) sum = v_fma(v_load(weights + i * LANES), minima[i], sum);
    return sum;
}

/* Adds up the lanes of each of LANES vectors. */
INLINE vec add_up_lanes(const vec x[LANES]) {
    vec halves[2] = {v_sums(x), v_sums(x + LANES / 2)};
    v_unzip(halves);
    return v_add(halves[0], halves[1]);
}

/* Rounds weights times scales as round_weights does, and adds up weights times minima where the type has minima. */
INLINE void round_code_weights(int type, int num_q, code_weights *to, accumulate_args *a, ptrdiff_t block, int blocks) {
    block_weights *const w = &to->rounded;
    const int has_minimum = KVC_TYPES[type].has_minimum, vectors = kvc_padded_rows(a->n) / LANES;
    prefetcher next = a->next[0];
    float zero_or_nan[BLOCKS_AT_ONCE], inverse[WEIGHTS_AT_ONCE];
    vec largest[WEIGHTS_AT_ONCE], sums[WEIGHTS_AT_ONCE], scales[BLOCKS_AT_ONCE][TILE_VECS];
    for (int b = 0, i = 0; b < blocks; b++, block += block_bytes(type)) {
        vec minima[TILE_VECS];
        zero_or_nan[b] =
            load_tile_heads(type, scales[b], minima, to->fifth_bits[b], a->pieces, block, a->row_stride, a->n);
        for (int r = 0; r < num_q; r++, i++) {
            const float *weights = a->weights + r * KVC_SCORES;
            prefetch_line(&next);
            largest[i] = largest_products(weights, scales[b], vectors);
            sums[i] = has_minimum ? multiply_minima(weights, minima, vectors) : v_zero();
        }
    }
    find_units(w, largest, inverse, blocks * num_q);
    for (int i = blocks * num_q; i % LANES; i++) sums[i] = v_zero();
    for (int i = 0; i < blocks * num_q; i += LANES) v_store(to->minima + i, add_up_lanes(sums + i));
    for (int b = 0, i = 0; b < blocks; b++)
        for (int r = 0; r < num_q; r++, i++) {
            w->unit[i] += zero_or_nan[b];
            prefetch_line(&next);
            round_products(w->rounded[i], a->weights + r * KVC_SCORES, scales[b], inverse[i], vectors);
        }
    a->next[0] = next;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* The place of the fifth bit of a byte of i_load_quad, in columns from `column` on: its byte among the bits of four
 * rows, and its bit in that byte.  Bytes 0 to 3 of a lane are of rows 0, 2, 1 and 3. */
INLINE ivec fifth_bytes_of(int column) {
#define OF_COLUMN(byte) byte, byte + 8, byte + 4, byte + 12
#define OF_FOUR(byte) OF_COLUMN(byte), OF_COLUMN(byte), OF_COLUMN(byte), OF_COLUMN(byte)
    static const uint8_t BYTES[KVC_QUANT_ELEMENTS * QUAD] = {OF_FOUR(0), OF_FOUR(0), OF_FOUR(1), OF_FOUR(1),
                                                             OF_FOUR(2), OF_FOUR(2), OF_FOUR(3), OF_FOUR(3)};
#undef OF_FOUR
#undef OF_COLUMN
    return i_load(BYTES + column * QUAD);
}

INLINE ivec each_of_eight_bits(void) {
    static const uint32_t BITS[LANES] = {0x01010101, 0x02020202, 0x04040404, 0x08080808, 0x10101010, 0x20202020,
                                         0x40404040, 0x80808080, 0x01010101, 0x02020202, 0x04040404, 0x08080808,
                                         0x10101010, 0x20202020, 0x40404040, 0x80808080};
    return i_load(BITS);
}

/* Unpacks what i_load_quad loaded to to[half of the block][pair of rows], as int16. */
INLINE void unpack_quad(int has_fifth_bits, ivec to[2][2], ivec x, ivec levels, ivec fifth_bits) {
    UNROLL
    for (int i = 0; i < 2; i++) {
        const ivec half = i ? i_shift(x, 4) : x;
        const ivec y = has_fifth_bits /* a code less 16 */
                           ? i_add_16(i_or(half, i_set_16((int16_t)0xf0f0)),
                                      i_look_up(fifth_bits, fifth_bytes_of(i * LANES)), each_of_eight_bits())
                           : i_look_up(levels, i_and(half, i_set_16(0x0f0f)));
        to[i][0] = i_low_bytes(y);
        to[i][1] = i_high_bytes(y);
    }
}

/* ---- accumulate -------------------------------------------------------------------------------------------------- */

/* A block of a tile's rows, and where its sums go. */
typedef struct code_block {
    ptrdiff_t codes; /* bytes of a row before its codes */
    const code_weights *w;
    const uint32_t *fifth_bits;
    ivec levels;
    int first; /* number of the first query's weights */
    int d;     /* first column of acc */
} code_block;

/* Counts the sums of a column and query: two where one query's products would wait for each other. */
INLINE int code_sets_for(int num_q) { return num_q == 1 ? 2 : 1; }

/* Adds the products of two pairs of rows with num_q queries' weights, w the first query's.  If there are two sets of
 * sums, each pair has its own. */
INLINE void multiply_quad(int num_q, ivec (*sums)[MANY_QUERIES][2], ivec x[2][2], const char *w) {
    UNROLL
    for (int i = 0; i < 2; i++) UNROLL
    for (int r = 0; r < num_q; r++) {
        const ivec y = i_set_pair(w + r * WEIGHTS_BYTES + i * (int)(2 * sizeof(int16_t)));
        ivec *const to = sums[i % code_sets_for(num_q)][r];
        UNROLL
        for (int half = 0; half < 2; half++) to[half] = i_dot(to[half], x[half][i], y);
    }
}

/* Adds up the products of a block of all values with the weights of num_q queries.  w: the first query's. */
INLINE void multiply_values(int has_fifth_bits, int num_q, ivec (*to)[2], accumulate_args *a, const code_block *b,
                            const char *w) {
    const int sets = code_sets_for(num_q);
    const ivec levels = b->levels;
    ivec sums[2][MANY_QUERIES][2];
    char last[QUAD][COPY_STRIDE];
    ptrdiff_t stride = a->row_stride;
    UNROLL
    for (int i = 0; i < sets; i++) UNROLL
    for (int r = 0; r < num_q; r++) sums[i][r][0] = sums[i][r][1] = i_zero();
    for (int i = 0, j = 0; j < a->n; i++) {
        const char *p = (const char *)a->pieces[i].rows + b->codes;
        prefetcher next = a->next[i * a->apart]; /* in registers, unlike *a */
        for (const int end = smaller(j + KVC_PANEL, a->n); j < end; j += QUAD) {
            ivec x[2][2];
            if (end - j < QUAD) {
                p = pad_rows(last, QUAD, p, stride, end - j, KVC_NIBBLE_BYTES);
                stride = COPY_STRIDE;
            }
            prefetch_step(&next, QUAD_LINES);
            unpack_quad(has_fifth_bits, x, i_load_quad(p, stride, /* swaps */ 1), levels,
                        has_fifth_bits ? i_set_16_bytes(b->fifth_bits + j) : i_zero());
            multiply_quad(num_q, sums, x, w);
            p += QUAD * stride;
            w += QUAD * sizeof(int16_t);
        }
        a->next[i * a->apart] = next;
    }
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int half = 0; half < 2; half++)
        to[r][half] = sets == 2 ? i_add(sums[0][r][half], sums[1][r][half]) : sums[0][r][half];
}

/* Adds the sums of a block to acc, for num_q queries from query `first` on, as many as queries_at_once returns. */
INLINE void accumulate_code_block(int type, int first, int num_q, accumulate_args *a, const code_block *b) {
    const int number = b->first + first;
    const char *w = (const char *)b->w->rounded.rounded[number];
    ivec sums[MANY_QUERIES][2];
    switch (KVC_TYPES[type].has_fifth_bits ? -num_q : num_q) {
    case 1: multiply_values(0, 1, sums, a, b, w); break;
    case 2: multiply_values(0, 2, sums, a, b, w); break;
    case 3: multiply_values(0, 3, sums, a, b, w); break;
    case 4: multiply_values(0, 4, sums, a, b, w); break;
    case MANY_QUERIES: multiply_values(0, MANY_QUERIES, sums, a, b, w); break;
    case -1: multiply_values(1, 1, sums, a, b, w); break;
    case -2: multiply_values(1, 2, sums, a, b, w); break;
    case -3: multiply_values(1, 3, sums, a, b, w); break;
    case -4: multiply_values(1, 4, sums, a, b, w); break;
    default: multiply_values(1, MANY_QUERIES, sums, a, b, w);
    }
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)(first + r) * a->acc_stride + b->d;
        const vec factor = v_set(a->factor[first + r]), unit = v_set(b->w->rounded.unit[number + r]);
        const vec minima = v_set(b->w->minima[number + r]);
        UNROLL
        for (int half = 0; half < 2; half++, acc += LANES)
            v_store(acc, v_fma(v_from_int(sums[r][half]), unit, v_fma(v_load(acc), factor, minima)));
    }
}

/* Sums all columns of the rows for num_q queries, CODE_QUERIES at most. */
INLINE void accumulate_code_columns(int type, int num_q, accumulate_args *a, int left) {
    const int num_blocks = a->dim / KVC_QUANT_ELEMENTS, passes = (num_q + MOST_QUERIES - 1) / MOST_QUERIES;
    const int blocks_at_once = smaller(BLOCKS_AT_ONCE, WEIGHTS_AT_ONCE / num_q);
    ptrdiff_t block = 0; /* bytes of a row before it */
    const ivec levels = levels_of(type);
    code_weights w;
    begin_ahead(a, num_q, left, 2 * num_blocks * num_q,
                num_blocks * passes * QUAD_LINES * ((smaller(a->n, KVC_PANEL) + QUAD - 1) / QUAD));
    for (int b = 0; b < num_blocks; b++, block += block_bytes(type)) {
        const int at = b % blocks_at_once;
        if (at == 0) round_code_weights(type, num_q, &w, a, block, smaller(blocks_at_once, num_blocks - b));
        const code_block values = {block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES,
                                   &w,
                                   w.fifth_bits[at],
                                   levels,
                                   at * num_q,
                                   b * KVC_QUANT_ELEMENTS};
        for (int r = 0, some; r < num_q; r += some) {
            some = queries_at_once(num_q - r);
            accumulate_code_block(type, r, some, a, &values);
        }
    }
    end_ahead(a);
}

/* Adds n weighted rows to num_q rows of acc, some at a time: a kvc_accumulate_fn, once the type is a constant. */
APART void accumulate_codes(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                            kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    for (int some; num_q; num_q -= some) {
        accumulate_args a = {acc, factor, weights, pieces, row_stride, acc_stride, n, dim, 0, {{0}}};
        some = smaller(num_q, CODE_QUERIES);
        accumulate_code_columns(type, some, &a, num_q);
        acc += (ptrdiff_t)some * acc_stride;
        factor += some;
        weights += some * KVC_SCORES;
    }
}
