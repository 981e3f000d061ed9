/* score_quantised.h: scores of quantised rows, in integers; part of template.h.
 *
 * Elements of rows are small integers.  Each block of KVC_QUANT_ELEMENTS has a scale; or the row has one (int8), which
 * kernels leave out.  Queries are rounded to int16, so that one instruction multiplies and adds pairs of them.  Sums in
 * a block are exact.  Compared with f32, scores of normal data change by some 3e-5 of their size, whatever the length.
 *
 * A lane is a row.  A group is LANES rows; one or two groups are scored side by side (groups_for), block by block, and
 * a block in pieces of PIECE_BYTES bytes.
 *
 * A prepared query row lies where its dim floats were:
 *
 *     bytes 2 dim             dim / 8               4          the rest
 *     +-----------------------+---------------------+----------+--------+
 *     | int16 elements[dim]   | int32 starts        | f32      | unused |
 *     | block after block     | [one for a block]   | scale    |        |
 *     +-----------------------+---------------------+----------+--------+
 *
 * elements  in units of the row's largest magnitude / INT16_MAX; within a block, pair by pair as element_at says
 * starts    initial value of a block's sum of products; cancels the offset_of(type) that score adds to elements of rows
 * scale     factor that turns a sum over blocks into a score
 */

enum {
    PIECE_BYTES = 16,               /* bytes of a row loaded at once */
    PAIRS = KVC_QUANT_ELEMENTS / 2, /* pairs in a block */
    /* Groups of LANES rows scored together.  Where a product is one instruction, loads of queries would take longer. */
    GROUPS = HAS_AVX_VNNI || ACCUMULATORS / QUERIES / 2 >= 2 ? 2 : 1,
    GROUP_ROWS = GROUPS * LANES,
    MANY_QUERIES = 2 * QUERIES,
    /* Most queries for which rows are unpacked once; MANY_QUERIES take 5 KB a type.  Where a product takes two
     * instructions, unpacking is less of the whole. */
    MOST_QUERIES = HAS_VNNI ? MANY_QUERIES : QUERIES
};

enum { PANEL = KVC_STORED_TYPES }; /* besides types: rows of q8_0 that a set packed for many query rows */

/* Returns how many groups are scored together for num_q queries: one for many, whose sums fill the registers. */
INLINE int groups_for(int num_q) { return num_q > QUERIES ? 1 : GROUPS; }

/* Returns how many of num_q queries are worked on at once: MOST_QUERIES, or up to QUERIES. */
INLINE int queries_at_once(int num_q) { return num_q >= MOST_QUERIES ? MOST_QUERIES : smaller(num_q, QUERIES); }

/* Returns what is added to elements to make them unsigned.  Of 8 bits, only to those with even numbers: they are taken
 * from an int16 by a mask, the odd ones by a shift that keeps their signs. */
INLINE int offset_of(int type) { return kvc_is_8_bits(type) ? 128 : 8; }

/* ---- blocks and their scales ------------------------------------------------------------------------------------- */

enum {
    BLOCKS_AT_ONCE = 8,                            /* blocks of a row that are padded, or weighted, at once */
    COPY_STRIDE = BLOCKS_AT_ONCE * KVC_Q8_0_BYTES, /* between rows that were copied */
};

INLINE int block_bytes(int type) { return (int)bytes_of(type, KVC_QUANT_ELEMENTS); }

/* Returns where the elements of a block begin: behind its scale. */
INLINE int begin_of(int type) { return KVC_TYPES[type].has_row_scale ? 0 : KVC_SCALE_BYTES; }

/* Returns the scales at p and in the row behind it. */
INLINE uint32_t two_scales(const char *p, ptrdiff_t stride) {
    uint16_t first, second;
    memcpy(&first, p, sizeof first);
    memcpy(&second, p + stride, sizeof second);
    return first | (uint32_t)second << 16;
}

/* Copies the scales of a block of n rows, a multiple of 4.  General registers collect four of them: vector instructions
 * would compete with products.  One block at a time, so that this runs beside the products of the block before. */
INLINE void copy_scales(uint16_t scales[GROUP_ROWS], const char *block, ptrdiff_t stride, int n) {
    for (int j = 0; j < n; j += 4, block += 4 * stride) {
        const uint64_t four = two_scales(block, stride) | (uint64_t)two_scales(block + 2 * stride, stride) << 32;
        memcpy(scales + j, &four, sizeof four);
    }
}

/* Copies `bytes` bytes of n rows, and appends rows of zeros up to num_rows, as many as are read at once. */
RARE const char *pad_rows(char to[][COPY_STRIDE], int num_rows, const char *rows, ptrdiff_t stride, int n, int bytes) {
    memset(to, 0, (size_t)num_rows * sizeof *to);
    for (int j = 0; j < n; j++) memcpy(to[j], rows + j * stride, (size_t)bytes);
    return to[0];
}

/* ---- prepared queries -------------------------------------------------------------------------------------------- */

INLINE size_t elements_offset(int block) { return (size_t)block * KVC_QUANT_ELEMENTS * sizeof(int16_t); }

INLINE size_t start_offset(int dim, int block) {
    return (size_t)dim * sizeof(int16_t) + (size_t)block * sizeof(int32_t);
}

INLINE size_t scale_offset(int dim) { return start_offset(dim, dim / KVC_QUANT_ELEMENTS); }

/* Four bytes of a row hold 2 pairs of elements of q8_0 or 4 of q4_0, which pair_of takes from them one by one:
 *
 *     q8_0   e e+1 e+2 e+3                                pairs (e, e+2) (e+1, e+3)
 *     q4_0   the same in the low halves of the bytes,     pairs (e, e+2) (e+16, e+18) (e+1, e+3) (e+17, e+19)
 *            e+16 .. e+19 in the high ones
 */
INLINE int pairs_in_four_bytes(int type) { return kvc_is_8_bits(type) ? 2 : 4; }

/* Returns which element of a block is the first or second of a pair in its bytes [4 * four, 4 * four + 4). */
INLINE int element_at(int type, int four, int pair, int is_second) {
    const int e = 4 * four + 2 * is_second;
    return kvc_is_8_bits(type) ? e + pair : e + pair / 2 + pair % 2 * (KVC_QUANT_ELEMENTS / 2);
}

/* Puts a block's elements in the order in which score takes those of rows.  Returns the sum of the elements that meet
 * elements with an offset.  Copies by vectors, as loads of what was just stored in smaller pieces would wait. */
INLINE int32_t order_block(int type, char *block) {
    const int pairs = pairs_in_four_bytes(type);
    int16_t x[KVC_QUANT_ELEMENTS];
    int32_t sum = 0;
    UNROLL
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i += 2 * LANES) v_store(x + i, v_load(block + i * (int)sizeof *x));
    const int step = kvc_is_8_bits(type) ? 2 : 1;
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i += step) sum += x[i];
    UNROLL
    for (int four = 0; four < PAIRS / pairs; four++) UNROLL
    for (int pair = 0; pair < pairs; pair++) UNROLL
    for (int i = 0; i < 2; i++, block += sizeof *x) memcpy(block, &x[element_at(type, four, pair, i)], sizeof *x);
    return sum;
}

/* Returns 0 if all lanes are 0, and NaN if one is NaN. */
INLINE float zero_or_nan_of(vec x) { return v_equal(x, v_zero()) == (1u << LANES) - 1 ? 0 : NAN; }

/* Returns the unit of a row's elements; NaN if one of them is NaN or infinite. */
INLINE float unit_of(const float *row, int dim) {
    vec largest = v_zero(), zero_or_nan = v_zero();
    for (int d = 0; d < dim; d += LANES) {
        largest = v_max_abs(v_load(row + d), largest);
        zero_or_nan = v_fma(v_load(row + d), v_zero(), zero_or_nan);
    }
    return v_max_lane(largest) / INT16_MAX + zero_or_nan_of(zero_or_nan);
}

/* Rounds a row to int16, in place, puts its blocks in order, and appends the starts and the scale. */
INLINE void prepare_row(int type, float *row, int dim, float unit, float scale) {
    const float inverse = reciprocal(unit), product = unit * scale;
    char *q = (char *)row;
    for (int d = 0; d < dim; d += 2 * LANES)
        i_store_16((int16_t *)(void *)row + d, v_mul(v_load(row + d), v_set(inverse)),
                   v_mul(v_load(row + d + LANES), v_set(inverse)));
    for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++) {
        const int32_t start = -offset_of(type) * order_block(type, q + elements_offset(b));
        memcpy(q + start_offset(dim, b), &start, sizeof start);
    }
    memcpy(q + scale_offset(dim), &product, sizeof product);
}

/* Rounds num_q query rows in place.  Finds some rows' units first, as the steps for one row wait for each other. */
INLINE void prepare(int type, float *q, int q_stride, int num_q, int dim, float scale) {
    float units[MANY_QUERIES];
    for (int first = 0; first < num_q; first += MANY_QUERIES) {
        const int end = smaller(first + MANY_QUERIES, num_q);
        for (int r = first; r < end; r++) units[r - first] = unit_of(q + (ptrdiff_t)r * q_stride, dim);
        for (int r = first; r < end; r++) prepare_row(type, q + (ptrdiff_t)r * q_stride, dim, units[r - first], scale);
    }
}

/* ---- score ------------------------------------------------------------------------------------------------------- */

/* Takes a pair of elements, as int16, from each four bytes; adds offset_of(type). */
INLINE ivec pair_of(int type, ivec x, int pair) {
    if (kvc_is_8_bits(type)) return pair ? i_high_bytes(x) : i_xor_and(x, i_set_16(128), i_set_16(255));
    return pair == 3 ? i_shift(x, 12) : i_and(pair ? i_shift(x, 4 * pair) : x, i_set_16(15));
}

/* Counts the lines to prefetch in half a piece of all groups: about as many as are read. */
INLINE int lines_per_step(int num_q) { return groups_for(num_q) * LANES * PIECE_BYTES / 2 / LINE; }

/* Adds the products of PIECE_BYTES bytes of all groups' rows, of which `piece` is the first row's, with the queries'
 * elements `at_q` bytes into these, to counts[group][query]. */
INLINE void score_piece(int type, int num_q, ivec counts[][MANY_QUERIES], const char *const *q, size_t at_q,
                        const char *piece, ptrdiff_t stride, prefetcher *next) {
    const int num_pairs = pairs_in_four_bytes(type), groups = groups_for(num_q);
    ivec x[GROUPS][4]; /* x[g][i]: bytes [4 * i, 4 * i + 4) of the piece, of the rows of group g */
    UNROLL
    for (int g = 0; g < groups; g++) i_load_rows(x[g], piece + g * LANES * stride, stride);
    UNROLL
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0) prefetch_step(next, lines_per_step(num_q));
        UNROLL
        for (int p = 0; p < num_pairs; p++) {
            ivec y[GROUPS];
            UNROLL
            for (int g = 0; g < groups; g++) y[g] = pair_of(type, x[g][i], p);
            UNROLL
            for (int r = 0; r < num_q; r++) {
                const ivec z = i_set_pair(q[r] + at_q + (size_t)(i * num_pairs + p) * 2 * sizeof(int16_t));
                UNROLL
                for (int g = 0; g < groups; g++) counts[g][r] = i_dot(counts[g][r], y[g], z);
            }
        }
    }
}

/* Adds the products of all groups' rows in block b, times scales, to sums[group][query].  block: of the first row. */
INLINE void score_quant_block(int type, int num_q, vec sums[][MANY_QUERIES], const char *const *q, const char *block,
                              ptrdiff_t stride, const uint16_t *scales, int dim, int b, prefetcher *next) {
    const int num_pieces = kvc_is_8_bits(type) ? 2 : 1, groups = groups_for(num_q);
    ivec counts[GROUPS][MANY_QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int g = 0; g < groups; g++) counts[g][r] = i_set_pair(q[r] + start_offset(dim, b));
    const size_t at_q = elements_offset(b), step = PAIRS * sizeof(int16_t);
    const char *piece = block + begin_of(type);
    if (num_q > QUERIES || HAS_AVX_VNNI) {
        for (int i = 0; i < num_pieces; i++) /* a loop: half the code */
            score_piece(type, num_q, counts, q, at_q + (size_t)i * step, piece + i * PIECE_BYTES, stride, next);
    } else {
        UNROLL
        for (int i = 0; i < num_pieces; i++)
            score_piece(type, num_q, counts, q, at_q + (size_t)i * step, piece + i * PIECE_BYTES, stride, next);
    }
    UNROLL
    for (int g = 0; g < groups; g++) {
        const vec scale = type == KVC_INT8 ? v_zero() : v_load_f16(scales + g * LANES);
        UNROLL
        for (int r = 0; r < num_q; r++) {
            const vec count = v_from_int(counts[g][r]);
            sums[g][r] = type == KVC_INT8 ? v_add(sums[g][r], count) : v_fma(count, scale, sums[g][r]);
        }
    }
}

/* Scores the next rows, as many as groups_for(num_q) groups have, or the `count` rows that are left.  These are copied,
 * BLOCKS_AT_ONCE blocks at a time, and padded with rows of zeros.  block: the first row's, or its copy's. */
INLINE void score_groups(int type, int num_q, float *scores, const char *const *q, const char *rows,
                         ptrdiff_t row_stride, int count, int dim, prefetcher *next) {
    const int num_blocks = dim / KVC_QUANT_ELEMENTS, groups = groups_for(num_q), num_rows = groups * LANES;
    uint16_t scales[GROUP_ROWS]; /* f16 */
    char copies[GROUP_ROWS][COPY_STRIDE];
    vec sums[GROUPS][MANY_QUERIES];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int g = 0; g < groups; g++) sums[g][r] = v_zero();
    const ptrdiff_t stride = count < num_rows ? COPY_STRIDE : row_stride;
    const char *block = rows;
    for (int b = 0; b < num_blocks; b++, block += block_bytes(type)) {
        if (count < num_rows && b % BLOCKS_AT_ONCE == 0)
            block = pad_rows(copies, num_rows, rows + b * block_bytes(type), row_stride, count,
                             smaller(BLOCKS_AT_ONCE, num_blocks - b) * block_bytes(type));
        if (type != KVC_INT8) copy_scales(scales, block, stride, num_rows);
        score_quant_block(type, num_q, sums, q, block, stride, scales, dim, b, next);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) {
        float scale;
        memcpy(&scale, q[r] + scale_offset(dim), sizeof scale);
        UNROLL
        for (int g = 0; g < groups; g++) v_store(scores + r * KVC_SCORES + g * LANES, v_mul(sums[g][r], v_set(scale)));
    }
}

/* Scores all rows for num_q queries, of which there are as many as queries_at_once returns. */
INLINE void score_quantised_rows(int num_q, int type, const score_args *a, kvc_ahead next) {
    const char *q[MANY_QUERIES];
    for (int r = 0; r < num_q; r++) q[r] = (const char *)(a->q + (ptrdiff_t)r * a->q_stride);
    const int num_rows = groups_for(num_q) * LANES, num_groups = (a->n + num_rows - 1) / num_rows;
    const int num_pieces = a->dim / (kvc_is_8_bits(type) ? PIECE_BYTES : 2 * PIECE_BYTES);
    prefetcher p = prefetch_begin(next, a->rows, num_groups * num_pieces * 2 * lines_per_step(num_q));
    for (int j = 0; j < a->n; j += num_rows)
        score_groups(type, num_q, a->scores + j, q, row_at(a->rows, a->row_stride, j), a->row_stride, a->n - j, a->dim,
                     &p);
    prefetch_rest(&p);
}

/* Scores n rows for num_q queries, some queries at a time: a kvc_score_fn, once the type is a constant. */
INLINE void score_quantised(int type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                            int64_t row_stride, int n, int dim, kvc_ahead next) {
    for (int some; num_q; num_q -= some) {
        const score_args a = {scores, q, q_stride, rows, row_stride, n, dim};
        some = queries_at_once(num_q);
        const kvc_ahead part = take_part(&next, some, num_q);
        CALL_WITH_QUERIES(score_quantised_rows, some, MOST_QUERIES, 0, type, &a, part)
        scores += some * KVC_SCORES;
        q += (ptrdiff_t)some * q_stride;
    }
}
