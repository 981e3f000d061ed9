/* score_codes.h: scores of rows of codes of four or five bits, in integers; part of template.h, where HAS_VNNI.
 *
 * As in score_quantised.h, queries are rounded to int16, and a lane is a row.  But codes are moved into columns in
 * memory, by one copy of the code for all types, and unpacked from there a quarter of a block at a time, by a loop of
 * which there is a copy for each kind of code and number of queries: with all of it unrolled, a type would take 20 KB.
 *
 * A key's block has a scale, perhaps a minimum and the fifth bits of codes (its head), then codes of four bits, two in
 * a byte.  A prepared query row lies where its dim floats were: a code_query for each block, and behind them the
 * factor, an f32, that turns a sum over blocks into a score.
 */

enum {
    CODE_GROUPS = 2,
    CODE_ROWS = CODE_GROUPS * LANES,
    CODE_QUERIES = 32, /* most queries for which codes are moved into columns once */
    QUARTERS = 4,      /* of a block's codes: four bytes of each row */
    CODE_LINES = 3     /* prefetched for a quarter: as many as CODE_ROWS rows of the longest type fill */
};

/* A block of a prepared query row. */
typedef struct code_query {
    int16_t elements[KVC_QUANT_ELEMENTS]; /* in units of the row's largest magnitude / INT16_MAX; in order_of_codes */
    int32_t start;                        /* initial value of a sum of products, which cancels code_offset */
    float sum;                            /* of the elements, unrounded, in these units */
} code_query;

/* A block of CODE_ROWS rows.  Lane j of group g belongs to row g * LANES + j. */
typedef struct code_keys {
    ivec codes[QUARTERS][CODE_GROUPS], fifth_bits[CODE_GROUPS], levels;
    vec scales[CODE_GROUPS], minima[CODE_GROUPS]; /* minima: of codes less middle_of(type) */
} code_keys;

/* Whether a type is scored and summed here. */
INLINE int is_of_codes(int type) { return type > KVC_Q4_0; }

/* Returns what is added to the elements of keys, so that they are not negative. */
INLINE int code_offset(int type) { return KVC_TYPES[type].has_fifth_bits ? 16 : 128; }

/* Returns what codes of four bits stand for, times the scale, beside the minimum of codes less middle_of(type). */
INLINE ivec levels_of(int type) {
    static const int8_t LESS_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return i_set_16_bytes(type == KVC_IQ4_NL ? KVC_LEVELS_IQ4_NL : LESS_8);
}

/* ---- prepared queries -------------------------------------------------------------------------------------------- */

/* Returns the elements of a block in the order in which score takes those of rows: as element_at says of q4_0. */
INLINE const uint16_t *order_of_codes(void) {
    static const uint16_t ORDER[KVC_QUANT_ELEMENTS] = {0, 2,  16, 18, 1, 3,  17, 19, 4,  6,  20, 22, 5,  7,  21, 23,
                                                       8, 10, 24, 26, 9, 11, 25, 27, 12, 14, 28, 30, 13, 15, 29, 31};
    return ORDER;
}

/* Rounds a query row in place, and adds up the elements of each block, as they are and rounded.  Does so for AT_ONCE
 * blocks at a time, as each sum over lanes is a chain of slow instructions. */
INLINE void prepare_code_row(int offset, float *row, int dim, float unit, float scale) {
    enum { AT_ONCE = LANES / 4 };
    const vec inverse = v_set(reciprocal(unit));
    const float factor = unit * scale;
    const ivec order = i_load(order_of_codes());
    char *to = (char *)row; /* never reaches what is still to be read */
    for (int d = 0; d < dim; d += AT_ONCE * KVC_QUANT_ELEMENTS) {
        const int count = smaller(AT_ONCE, (dim - d) / KVC_QUANT_ELEMENTS);
        vec sums[LANES / 2]; /* of a block's elements, and of them rounded, which are exact */
        float added[LANES];
        for (int b = count; b < AT_ONCE; b++) sums[2 * b] = sums[2 * b + 1] = v_zero();
        for (int b = 0; b < count; b++) {
            const float *from = row + d + b * KVC_QUANT_ELEMENTS;
            const vec x = v_mul(v_load(from), inverse), y = v_mul(v_load(from + LANES), inverse);
            char *elements = to + (size_t)b * sizeof(code_query);
            i_store_16((int16_t *)(void *)elements, x, y);
            const ivec rounded = i_load(elements);
            i_store(elements, i_permute_16(rounded, order));
            sums[2 * b] = v_add(x, y);
            sums[2 * b + 1] = v_from_int(i_dot(i_zero(), rounded, i_set_16(1)));
        }
        const vec halves = v_sums(sums);
        v_store(added, v_add(halves, v_swap(halves, 1)));
        for (int b = 0; b < count; b++, to += sizeof(code_query)) {
            const int32_t start = -offset * (int32_t)added[4 * b + 2];
            memcpy(to + offsetof(code_query, start), &start, sizeof start);
            memcpy(to + offsetof(code_query, sum), &added[4 * b], sizeof *added);
        }
    }
    memcpy(to, &factor, sizeof factor);
}

/* Rounds num_q query rows in place.  Finds some rows' units first, as the steps for one row wait for each other. */
APART void prepare_codes(int type, float *q, int q_stride, int num_q, int dim, float scale) {
    float units[MANY_QUERIES];
    for (int first = 0; first < num_q; first += MANY_QUERIES) {
        const int end = smaller(first + MANY_QUERIES, num_q);
        for (int r = first; r < end; r++) units[r - first] = unit_of(q + (ptrdiff_t)r * q_stride, dim);
        for (int r = first; r < end; r++)
            prepare_code_row(code_offset(type), q + (ptrdiff_t)r * q_stride, dim, units[r - first], scale);
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Loads the heads of a block of LANES rows: scales, minima of codes less middle_of(type), fifth bits.  Moves 16 bytes
 * of each row into columns, more than these, but on both vector ports, where interleaving scales takes one. */
INLINE void load_heads(int type, vec *scales, vec *minima, ivec *fifth_bits, const char *block, ptrdiff_t stride) {
    ivec x[4];
    vec halves[2];
    i_load_rows(x, block, stride);
    v_from_f16_pairs(halves, x[0]);
    *scales = halves[0];
    *minima = v_fma(halves[0], v_set((float)middle_of(type)), halves[1]);
    if (KVC_TYPES[type].has_fifth_bits) /* they begin 4 or 2 bytes behind the scale */
        *fifth_bits = KVC_TYPES[type].has_minimum ? x[1] : i_join(x[0], x[1]);
}

/* Loads a block of CODE_ROWS rows. */
INLINE void load_keys(int type, code_keys *to, const char *block, ptrdiff_t stride) {
    const char *codes = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    for (int g = 0; g < CODE_GROUPS; g++, block += LANES * stride, codes += LANES * stride) {
        ivec x[QUARTERS];
        i_load_rows(x, codes, stride);
        UNROLL
        for (int i = 0; i < QUARTERS; i++) to->codes[i][g] = x[i];
        load_heads(type, &to->scales[g], &to->minima[g], &to->fifth_bits[g], block, stride);
    }
}

/* Unpacks a quarter of a block of LANES rows to four pairs of elements, with code_offset added, in order_of_codes.
 *
 * A lane of x is four bytes of a row.  Byte e has the code of element e in its low half, and the code of element 16 + e
 * in its high half.  The same lane of fifth_bits has bit e for element e, and bit 16 + e for element 16 + e; each is
 * worth 16.  Without fifth bits, a code is looked up in `levels`, which have code_offset added.  An example of a row:
 *
 *     x            bytes 21 43 65 87     low halves 1 3 5 7, high halves 2 4 6 8
 *     fifth_bits   00010002              bits 1 and 16: elements 1 and 16 get 16 more
 *     elements     1 19 5 7, and 16 on: 18 4 6 8
 *     to           (1, 5) (18, 6) (19, 7) (4, 8)     even and odd bytes, as a pair is multiplied by one instruction
 */
INLINE void unpack_quarter(int has_fifth_bits, ivec to[4], ivec x, ivec levels, ivec fifth_bits) {
    /* For each of four rows, four times the byte that has its bits 0 to 7.  Bits 16 to 23 are two bytes further. */
    static const uint8_t BYTES[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const ivec mask = i_set_16(0x0f0f), bit_of_byte = i_set_32(0x08040201);
    const ivec halves[2] = {i_and(x, mask), i_and(i_shift(x, 4), mask)};
    UNROLL
    for (int i = 0; i < 2; i++) {
        const ivec bytes = i_xor(i_set_16_bytes(BYTES), i_set_16((int16_t)(i * 0x0202)));
        const ivec elements = has_fifth_bits ? i_add_16(halves[i], i_look_up(fifth_bits, bytes), bit_of_byte)
                                             : i_look_up(levels, halves[i]);
        to[i] = i_and(elements, i_set_16(255));
        to[i + 2] = i_shift(elements, 8);
    }
}

/* ---- score ------------------------------------------------------------------------------------------------------- */

/* Adds the products of a block of keys and of num_q queries, scaled, to sums[query][group].  q: the first query's
 * block, the others q_bytes from one to the next. */
INLINE void score_code_keys(int has_fifth_bits, int num_q, vec (*sums)[CODE_GROUPS], const code_keys *keys,
                            const char *q, ptrdiff_t q_bytes, int has_minimum, prefetcher *next) {
    ivec counts[MANY_QUERIES][CODE_GROUPS], fifth_bits[CODE_GROUPS];
    UNROLL
    for (int g = 0; g < CODE_GROUPS; g++) fifth_bits[g] = has_fifth_bits ? keys->fifth_bits[g] : i_zero();
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int g = 0; g < CODE_GROUPS; g++) counts[r][g] = i_set_pair(q + r * q_bytes + offsetof(code_query, start));
    const ivec levels = keys->levels;
    const char *at = q;
    for (int i = 0; i < QUARTERS; i++, at += 4 * 2 * sizeof(int16_t)) {
        ivec x[CODE_GROUPS][4];
        prefetch_step(next, CODE_LINES);
        UNROLL
        for (int g = 0; g < CODE_GROUPS; g++) {
            unpack_quarter(has_fifth_bits, x[g], keys->codes[i][g], levels, fifth_bits[g]);
            if (has_fifth_bits) fifth_bits[g] = i_next_bits(fifth_bits[g]);
        }
        UNROLL
        for (int p = 0; p < 4; p++) UNROLL
        for (int r = 0; r < num_q; r++) {
            const ivec y = i_set_pair(at + r * q_bytes + p * (int)(2 * sizeof(int16_t)));
            UNROLL
            for (int g = 0; g < CODE_GROUPS; g++) counts[r][g] = i_dot(counts[r][g], x[g][p], y);
        }
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        UNROLL
        for (int g = 0; g < CODE_GROUPS; g++) sums[r][g] = v_fma(v_from_int(counts[r][g]), keys->scales[g], sums[r][g]);
        if (!has_minimum) continue;
        float sum;
        memcpy(&sum, q + r * q_bytes + offsetof(code_query, sum), sizeof sum);
        UNROLL
        for (int g = 0; g < CODE_GROUPS; g++) sums[r][g] = v_fma(v_set(sum), keys->minima[g], sums[r][g]);
    }
}

/* Does what score_code_keys does for num_q queries, as many as queries_at_once returns. */
INLINE void score_code_block(int type, int num_q, vec (*sums)[CODE_GROUPS], const code_keys *keys, const char *q,
                             ptrdiff_t q_bytes, prefetcher *next) {
    const int has_minimum = KVC_TYPES[type].has_minimum;
    prefetcher p = *next; /* in registers */
    switch (KVC_TYPES[type].has_fifth_bits ? -num_q : num_q) {
    case 1: score_code_keys(0, 1, sums, keys, q, q_bytes, has_minimum, &p); break;
    case 2: score_code_keys(0, 2, sums, keys, q, q_bytes, has_minimum, &p); break;
    case 3: score_code_keys(0, 3, sums, keys, q, q_bytes, has_minimum, &p); break;
    case 4: score_code_keys(0, 4, sums, keys, q, q_bytes, has_minimum, &p); break;
    case MANY_QUERIES: score_code_keys(0, MANY_QUERIES, sums, keys, q, q_bytes, has_minimum, &p); break;
    case -1: score_code_keys(1, 1, sums, keys, q, q_bytes, has_minimum, &p); break;
    case -2: score_code_keys(1, 2, sums, keys, q, q_bytes, has_minimum, &p); break;
    case -3: score_code_keys(1, 3, sums, keys, q, q_bytes, has_minimum, &p); break;
    case -4: score_code_keys(1, 4, sums, keys, q, q_bytes, has_minimum, &p); break;
    default: score_code_keys(1, MANY_QUERIES, sums, keys, q, q_bytes, has_minimum, &p);
    }
    *next = p;
}

/* Scores `count` rows, CODE_ROWS at most, from row `first` on. */
INLINE void score_code_rows(int type, const score_args *a, int num_q, int first, prefetcher *next) {
    const int num_blocks = a->dim / KVC_QUANT_ELEMENTS, count = a->n - first;
    const ptrdiff_t q_bytes = a->q_stride * (ptrdiff_t)sizeof(float);
    const char *const rows = row_at(a->rows, a->row_stride, first), *block = rows;
    const ptrdiff_t stride = count < CODE_ROWS ? COPY_STRIDE : a->row_stride;
    char copies[CODE_ROWS][COPY_STRIDE];
    vec sums[CODE_QUERIES][CODE_GROUPS];
    code_keys keys;
    keys.levels = i_xor(levels_of(type), i_set_16((int16_t)0x8080)); /* plus 128 */
    for (int r = 0; r < num_q; r++) UNROLL
    for (int g = 0; g < CODE_GROUPS; g++) sums[r][g] = v_zero();
    for (int b = 0; b < num_blocks; b++, block += block_bytes(type)) {
        if (count < CODE_ROWS && b % BLOCKS_AT_ONCE == 0)
            block = pad_rows(copies, CODE_ROWS, rows + b * block_bytes(type), a->row_stride, count,
                             smaller(BLOCKS_AT_ONCE, num_blocks - b) * block_bytes(type));
        load_keys(type, &keys, block, stride);
        const char *q = (const char *)a->q + (size_t)b * sizeof(code_query);
        for (int r = 0, some; r < num_q; r += some, q += some * q_bytes) {
            some = queries_at_once(num_q - r);
            score_code_block(type, some, sums + r, &keys, q, q_bytes, next);
        }
    }
    for (int r = 0; r < num_q; r++) {
        float factor;
        const float *q = a->q + (ptrdiff_t)r * a->q_stride;
        memcpy(&factor, (const char *)q + (size_t)num_blocks * sizeof(code_query), sizeof factor);
        UNROLL
        for (int g = 0; g < CODE_GROUPS; g++)
            v_store(a->scores + r * KVC_SCORES + first + g * LANES, v_mul(sums[r][g], v_set(factor)));
    }
}

/* Scores n rows for num_q queries, some queries at a time: a kvc_score_fn, once the type is a constant. */
APART void score_codes(int type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                       int64_t row_stride, int n, int dim, kvc_ahead next) {
    for (int some; num_q; num_q -= some) {
        const score_args a = {scores, q, q_stride, rows, row_stride, n, dim};
        some = smaller(num_q, CODE_QUERIES);
        const kvc_ahead part = take_part(&next, some, num_q);
        const int steps = (n + CODE_ROWS - 1) / CODE_ROWS * (dim / KVC_QUANT_ELEMENTS) * QUARTERS;
        prefetcher p = prefetch_begin(part, rows, steps * CODE_LINES * ((some + MOST_QUERIES - 1) / MOST_QUERIES));
        for (int j = 0; j < n; j += CODE_ROWS) score_code_rows(type, &a, some, j, &p);
        prefetch_rest(&p);
        scores += some * KVC_SCORES;
        q += (ptrdiff_t)some * q_stride;
    }
}
