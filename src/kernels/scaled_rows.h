/* scaled_rows.h: products of rows that have one scale, which kernels leave out (kvc_times_fn), in bytes; part of
 * avx512vnni.c.
 *
 * What rows are multiplied by, query rows or weights, is rounded to 16 bits: two digits, signed bytes, of which the
 * high one counts 256.  vpdpbusd adds four products of bytes to a lane, if the rows' are not negative: so SHIFT is
 * added to those, and SHIFT times the sum of the digits taken off.  Sums are exact.  Scores are off by 3e-5 of the size
 * of normal data, sums by 1e-4.  A quad is four elements or rows that are multiplied at once, FOUR.
 *
 * Rows are moved into panels first, as int8 plus SHIFT, whatever their type, so that one loop multiplies all types.
 * Values for a few query rows are multiplied without a panel.
 *
 *     keys      of PANEL_ROWS rows, of each four elements, two vectors whose lanes are 16 rows each
 *     values    of KVC_QUANT_ELEMENTS columns, of each four rows, two vectors whose lanes are 16 columns each
 */

enum {
    SHIFT = 128,
    LARGEST_DIGITS = LARGEST_WEIGHT, /* what two digits can count */
    FOUR = 4,                        /* elements that are multiplied at once */
    PANEL_BYTES = 2 * LANES * FOUR,  /* of four elements of PANEL_ROWS keys, or columns of values */
    DIGIT_BYTES = 2 * FOUR,          /* digits of four numbers: the high ones, then the low ones */
    PANEL_ELEMENTS = 512,            /* of keys: moved at once, and products of these added up as integers */
    PANEL_QUADS = KVC_TILE / FOUR,
    PIECE_QUADS = KVC_PANEL / FOUR,
    SCALED_QUERIES = 6, /* multiplied at once */
    /* Lines that are prefetched while a block of LANES keys, or of four values, is moved, and while four elements are
     * multiplied: about as many as are read meanwhile. */
    LINES_PER_KEYS = 4,
    LINES_PER_STEP = 1
};

/* Besides types: int6 where one instruction looks 64 levels up. */
enum { INT6_AT_ONCE = KVC_STORED_TYPES };

INLINE int stored_as(int type) { return type == INT6_AT_ONCE ? KVC_INT6 : type; }
INLINE int unpacked_as(int type) { return type == KVC_INT6 && has_look_up_64() ? INT6_AT_ONCE : type; }

/* What follows a row of digits: what cancels SHIFT in sums with the high and the low ones, and their unit. */
typedef struct digits_end {
    int32_t start[2];
    float unit;
} digits_end;

/* ---- digits ------------------------------------------------------------------------------------------------------ */

/* Rounds 2 * LANES floats, and splits them into digits.  Each quarter of a vector is packed by itself, to four high
 * digits of x, four of y, and the low ones of x and y. */
INLINE void store_digits(char *to, vec x, vec y) {
    const ivec both = _mm512_packs_epi32(_mm512_cvtps_epi32(x), _mm512_cvtps_epi32(y));
    const ivec high = i_high_bytes(_mm512_add_epi16(both, i_set_16(SHIFT)));
    v_store(to, v_evens_first(_mm512_castsi512_ps(_mm512_packs_epi16(high, i_low_bytes(both)))));
}

/* Adds SHIFT times digits to a sum: of high digits in even lanes, of low ones in odd lanes. */
INLINE ivec add_shifted(ivec sum, const char *digits) {
    return i_dot_bytes(sum, i_set_32((int32_t)0x80808080), i_load(digits));
}

/* Sets end->start to what cancels a sum of add_shifted: minus the sum of its even lanes, and of its odd ones. */
INLINE void cancel_shifted(digits_end *end, ivec sum) {
    sum = i_add(sum, _mm512_shuffle_i64x2(sum, sum, _MM_SHUFFLE(1, 0, 3, 2)));
    sum = i_add(sum, _mm512_shuffle_i64x2(sum, sum, _MM_SHUFFLE(2, 3, 0, 1)));
    sum = i_add(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
    _mm_storel_epi64((void *)end->start, _mm512_castsi512_si128(_mm512_sub_epi32(i_zero(), sum)));
}

/* Returns 256 times the high digits' sum and the low ones', as floats. */
INLINE vec sum_of_digits(ivec high, ivec low) { return v_fma(v_from_int(high), v_set(256), v_from_int(low)); }

/* ---- panels ------------------------------------------------------------------------------------------------------ */

/* Turns the 64 bytes of x, of several rows, into their elements plus SHIFT: to[0], or, of types with two elements in a
 * byte, to[0] of low halves and to[1] of high ones.  high: the upper two bits of codes of int6, for to[0] and to[1]. */
INLINE void shift_codes(int type, ivec *to, ivec x, const ivec high[2]) {
    const ivec shift = i_set_32((int32_t)0x80808080), mask = i_set_16(0x0f0f);
    if (type == KVC_INT8) {
        to[0] = i_xor(x, shift);
        return;
    }
    if (type == INT6_AT_ONCE) {
        const ivec levels = i_xor(i_load(KVC_LEVELS_INT6), shift);
        to[0] = i_look_up_64(levels, i_select(mask, x, _mm512_slli_epi16(high[0], 4)));
        to[1] = i_look_up_64(levels, i_select(mask, i_shift(x, 4), _mm512_slli_epi16(high[1], 4)));
        return;
    }
    const ivec codes[2] = {i_and(x, mask), i_and(i_shift(x, 4), mask)};
    UNROLL
    for (int i = 0; i < 2; i++) {
        to[i] = i_look_up(i_set_16_bytes(kvc_levels(type)), codes[i]);
        if (type == KVC_INT6) {
            const __mmask64 odd = _mm512_test_epi8_mask(high[i], i_set_16(0x0101));
            const __mmask64 upper = _mm512_test_epi8_mask(high[i], i_set_16(0x0202));
            ivec above = i_look_up(i_set_16_bytes(kvc_levels(type) + 32), codes[i]);
            to[i] = _mm512_mask_shuffle_epi8(to[i], odd, i_set_16_bytes(kvc_levels(type) + 16), codes[i]);
            above = _mm512_mask_shuffle_epi8(above, odd, i_set_16_bytes(kvc_levels(type) + 48), codes[i]);
            to[i] = _mm512_mask_mov_epi8(to[i], upper, above);
        }
        to[i] = i_xor(to[i], shift);
    }
}

/* Moves a block of LANES keys into a panel. */
INLINE void pack_key_bytes(int type, char *to, const char *block, ptrdiff_t stride) {
    ivec x[8], high[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
    if (type == KVC_INT8) {
        i_load_long_rows(x, block, stride);
        UNROLL
        for (int i = 0; i < 8; i++) {
            ivec bytes;
            shift_codes(type, &bytes, x[i], high);
            i_store(to + i * PANEL_BYTES, bytes);
        }
        return;
    }
    if (stored_as(type) == KVC_INT6) i_load_rows(high, block, stride);
    i_load_rows(x, block + block_bytes(stored_as(type)) - PIECE_BYTES, stride);
    UNROLL
    for (int i = 0; i < 4; i++) {
        ivec bytes[2];
        const ivec bits[2] = {i / 2 ? _mm512_srli_epi32(high[i % 2], 2) : high[i % 2],
                              _mm512_srli_epi32(high[i % 2], i / 2 ? 6 : 4)};
        shift_codes(type, bytes, x[i], bits);
        i_store(to + i * PANEL_BYTES, bytes[0]);
        i_store(to + (4 + i) * PANEL_BYTES, bytes[1]);
    }
}

/* Loads a block of columns of four values, as they stand in a panel. */
INLINE void load_values(int type, ivec bytes[2], const char *block, ptrdiff_t stride) {
    ivec high[2] = {i_zero(), i_zero()};
    if (type == KVC_INT8) {
        shift_codes(type, bytes, i_load_quad(block, stride, /* swaps */ 0), high);
        shift_codes(type, bytes + 1, i_load_quad(block + PIECE_BYTES, stride, /* swaps */ 0), high);
    } else {
        if (stored_as(type) == KVC_INT6) {
            /* Lanes 0 to 7 of what is loaded have bits of columns j, j + 8, j + 16 and j + 24. */
            const ivec bits = i_load_quad(block, stride, /* swaps */ 0),
                       twice = _mm512_shuffle_i64x2(bits, bits, _MM_SHUFFLE(1, 0, 1, 0));
            const ivec by = _mm512_inserti64x4(i_zero(), _mm256_set1_epi32(2), 1);
            high[0] = _mm512_srlv_epi32(twice, by);
            high[1] = _mm512_srli_epi32(high[0], 4);
        }
        shift_codes(type, bytes, i_load_quad(block + block_bytes(stored_as(type)) - PIECE_BYTES, stride, /* swaps */ 0),
                    high);
    }
}

INLINE void pack_value_bytes(int type, char *to, const char *block, ptrdiff_t stride) {
    ivec bytes[2];
    load_values(type, bytes, block, stride);
    i_store(to, bytes[0]);
    i_store(to + LANES * FOUR, bytes[1]);
}

/* Moves num elements of up to PANEL_ROWS keys, from an element on that begins a block. */
INLINE void pack_keys_of(int type, char *to, const char *rows, ptrdiff_t stride, int n, int num, prefetcher *next) {
    prefetcher p = *next;
    char copies[LANES][COPY_STRIDE];
    for (int j = 0; j < PANEL_ROWS; j += LANES, to += LANES * FOUR, rows += LANES * stride) {
        const char *block = rows;
        for (int d = 0; d < num; d += KVC_QUANT_ELEMENTS, block += block_bytes(stored_as(type))) {
            char *const panel = to + d / FOUR * PANEL_BYTES;
            prefetch_step(&p, LINES_PER_KEYS);
            if (j + LANES <= n)
                pack_key_bytes(type, panel, block, stride);
            else
                pack_key_bytes(type, panel,
                               pad_rows(copies, LANES, block, stride, n > j ? n - j : 0, block_bytes(stored_as(type))),
                               COPY_STRIDE);
        }
    }
    *next = p;
}

/* Moves a block of columns of n values. */
INLINE void pack_values_of(int type, char *to, const char *block, ptrdiff_t stride, int n, prefetcher *next) {
    prefetcher p = *next;
    char copies[FOUR][COPY_STRIDE];
    for (int j = 0; j < n; j += FOUR, to += PANEL_BYTES, block += FOUR * stride) {
        prefetch_step(&p, LINES_PER_STEP);
        if (j + FOUR <= n)
            pack_value_bytes(type, to, block, stride);
        else
            pack_value_bytes(type, to, pad_rows(copies, FOUR, block, stride, n - j, block_bytes(stored_as(type))),
                             COPY_STRIDE);
    }
    *next = p;
}

/* Move keys, or values, into a panel, of a type that is no constant. */
APART void pack_keys_of_type(int type, char *to, const char *rows, ptrdiff_t stride, int n, int num, prefetcher *next) {
    switch (unpacked_as(type)) {
    case KVC_INT8: pack_keys_of(KVC_INT8, to, rows, stride, n, num, next); break;
    case INT6_AT_ONCE: pack_keys_of(INT6_AT_ONCE, to, rows, stride, n, num, next); break;
    case KVC_INT6: pack_keys_of(KVC_INT6, to, rows, stride, n, num, next); break;
    default: pack_keys_of(KVC_INT4, to, rows, stride, n, num, next);
    }
}

APART void pack_values_of_type(int type, char *to, const char *block, ptrdiff_t stride, int n, prefetcher *next) {
    switch (unpacked_as(type)) {
    case KVC_INT8: pack_values_of(KVC_INT8, to, block, stride, n, next); break;
    case INT6_AT_ONCE: pack_values_of(INT6_AT_ONCE, to, block, stride, n, next); break;
    case KVC_INT6: pack_values_of(KVC_INT6, to, block, stride, n, next); break;
    default: pack_values_of(KVC_INT4, to, block, stride, n, next);
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Multiplies the quads in lanes of x by the digits `at` bytes into each of num_q rows of digits, and adds products to
 * sums[row][digit][vector].  Rows of digits are `stride` bytes apart; third: rows 0 and 3 of them (row_from). */
INLINE void multiply_four(int num_q, ivec (*sums)[2][2], const char *const third[2], ptrdiff_t stride, ptrdiff_t at,
                          const ivec x[2]) {
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int digit = 0; digit < 2; digit++) {
        const ivec y = i_set_pair(row_from(third, stride, r) + at + digit * FOUR);
        UNROLL
        for (int v = 0; v < 2; v++) sums[r][digit][v] = i_dot_bytes(sums[r][digit][v], x[v], y);
    }
}

/* Multiplies all quads of a panel by num_q rows of digits, `stride` bytes apart, and adds products to the sums.  steps:
 * the number of quads. */
INLINE void multiply_panel(int num_q, ivec (*sums)[2][2], const char *digits, ptrdiff_t stride, const char *panel,
                           int steps, prefetcher *next) {
    const char *third[2] = {digits, digits + 3 * stride}; /* rows 0 and 3: the others' addresses follow (row_from) */
    prefetcher p = *next;
    __asm__("" : "+r"(third[0]), "+r"(third[1])); /* so that compilers do not compute one from the other */
    for (int i = 0; i < steps; i++, panel += PANEL_BYTES) {
        const ivec x[2] = {i_load(panel), i_load(panel + LANES * FOUR)};
        prefetch_step(&p, LINES_PER_STEP);
        multiply_four(num_q, sums, third, stride, i * DIGIT_BYTES, x);
    }
    *next = p;
}

/* Sets sums to what cancels SHIFT: the starts in the digits_end of each row, `stride` bytes apart. */
INLINE void begin_sums(int num_q, ivec (*sums)[2][2], const char *ends, ptrdiff_t stride) {
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int digit = 0; digit < 2; digit++)
        sums[r][digit][0] = sums[r][digit][1] = i_set_pair(ends + r * stride + digit * (int)sizeof(int32_t));
}

/* Calls f(num_q, ...) with num_q as a constant. */
#define CALL_WITH_SCALED_QUERIES(f, num_q, ...) \
    if ((num_q) == SCALED_QUERIES)              \
        f(SCALED_QUERIES, __VA_ARGS__);         \
    else                                        \
        CALL_WITH_QUERIES(f, num_q, QUERIES, 0, __VA_ARGS__)

/* Returns how many of num_q rows are multiplied by a panel at once, and how often that goes over it for all. */
INLINE int scaled_at_once(int num_q) { return num_q >= SCALED_QUERIES ? SCALED_QUERIES : smaller(num_q, QUERIES); }
INLINE int scaled_passes(int num_q) {
    return num_q / SCALED_QUERIES + (num_q % SCALED_QUERIES + QUERIES - 1) / QUERIES;
}

/* ---- score ------------------------------------------------------------------------------------------------------- */

/* Returns the bytes of dim elements' digits, with a digits_end behind every PANEL_ELEMENTS, whose sums fit 32 bits. */
INLINE ptrdiff_t digits_bytes(int dim) {
    return dim / FOUR * DIGIT_BYTES + dim / PANEL_ELEMENTS * (ptrdiff_t)sizeof(digits_end);
}

/* Rounds query rows to digits, which stand where the floats were.  Finds the units of some rows first. */
INLINE void prepare_scaled(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int some; num_q; num_q -= some, q += (ptrdiff_t)some * q_stride) {
        float units[MANY_QUERIES];
        some = smaller(num_q, MANY_QUERIES);
        for (int r = 0; r < some; r++) units[r] = unit_of(q + (ptrdiff_t)r * q_stride, dim);
        for (int r = 0; r < some; r++) {
            const float unit = units[r] * ((float)INT16_MAX / (float)LARGEST_DIGITS),
                        *row = q + (ptrdiff_t)r * q_stride;
            const vec inverse = v_set(reciprocal(unit));
            digits_end end = {{0, 0}, unit * scale};
            ivec shifted = i_zero();
            char *to = (char *)(q + (ptrdiff_t)r * q_stride);
            for (int d = 0; d < dim;) {
                store_digits(to, v_mul(v_load(row + d), inverse), v_mul(v_load(row + d + LANES), inverse));
                shifted = add_shifted(shifted, to);
                to += KVC_QUANT_ELEMENTS / FOUR * DIGIT_BYTES;
                d += KVC_QUANT_ELEMENTS;
                if (d % PANEL_ELEMENTS && d < dim) continue;
                cancel_shifted(&end, shifted);
                memcpy(to, &end, sizeof end);
                to += sizeof end;
                shifted = i_zero();
            }
        }
    }
}

/* Where the scores of query rows over PANEL_ROWS keys go. */
typedef struct scaled_scores {
    float *scores;
    int stride; /* floats from row to row */
    int first;  /* the first element of those that are multiplied, which are added to what is there */
} scaled_scores;

INLINE void finish_scores(int num_q, ivec (*sums)[2][2], const scaled_scores *to, const char *ends, ptrdiff_t stride) {
    UNROLL
    for (int r = 0; r < num_q; r++, ends += stride) UNROLL
    for (int v = 0; v < 2; v++) {
        float unit, *const scores = to->scores + (ptrdiff_t)r * to->stride + v * LANES;
        memcpy(&unit, ends + offsetof(digits_end, unit), sizeof unit);
        const vec x = v_mul(sum_of_digits(sums[r][0][v], sums[r][1][v]), v_set(unit));
        v_store(scores, to->first ? v_add(v_load(scores), x) : x);
    }
}

/* Scores a panel of num elements of keys, up to PANEL_ELEMENTS. */
INLINE void score_scaled_panel(int num_q, const scaled_scores *to, const char *q, ptrdiff_t q_bytes, const char *panel,
                               int num, prefetcher *next) {
    ivec sums[SCALED_QUERIES][2][2];
    const char *const digits = q + digits_bytes(to->first), *const ends = digits + num / FOUR * DIGIT_BYTES;
    begin_sums(num_q, sums, ends, q_bytes);
    multiply_panel(num_q, sums, digits, q_bytes, panel, num / FOUR, next);
    finish_scores(num_q, sums, to, ends, q_bytes);
}

APART void score_panel_for_queries(int num_q, scaled_scores to, const char *q, ptrdiff_t q_bytes, const char *panel,
                                   int num, prefetcher *next) {
    for (int some; num_q; num_q -= some, q += some * q_bytes, to.scores += (ptrdiff_t)some * to.stride) {
        some = scaled_at_once(num_q);
        CALL_WITH_SCALED_QUERIES(score_scaled_panel, some, &to, q, q_bytes, panel, num, next)
    }
}

/* Scores n rows for num_q queries, panel by panel: a kvc_score_fn, once the type is known. */
APART void score_scaled(int type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                        int64_t row_stride, int n, int dim, kvc_ahead ahead) {
    _Alignas(64) char panel[PANEL_ELEMENTS / FOUR * PANEL_BYTES];
    const int panels = (n + PANEL_ROWS - 1) / PANEL_ROWS;
    const int lines = PANEL_ROWS / LANES * (dim / KVC_QUANT_ELEMENTS) * LINES_PER_KEYS +
                      dim / FOUR * LINES_PER_STEP * scaled_passes(num_q);
    prefetcher next = prefetch_begin(ahead, rows, panels * lines);
    for (int j = 0; j < n; j += PANEL_ROWS)
        for (int first = 0; first < dim; first += PANEL_ELEMENTS) {
            const int num = smaller(PANEL_ELEMENTS, dim - first);
            const char *const block = (const char *)row_at(rows, row_stride, j) + kvc_blocks_bytes(type, first);
            const scaled_scores to = {scores + j, KVC_SCORES, first};
            pack_keys_of_type(type, panel, block, row_stride, n - j, num, &next);
            score_panel_for_queries(num_q, to, (const char *)q, q_stride * (ptrdiff_t)sizeof *q, panel, num, &next);
        }
    prefetch_rest(&next);
}

/* ---- accumulate -------------------------------------------------------------------------------------------------- */

/* The weights of a query row over a tile. */
typedef struct scaled_weights {
    char digits[PANEL_QUADS * DIGIT_BYTES];
    digits_end end;
} scaled_weights;

/* Rounds the weights of num_q query rows and n values, `stride` floats apart: some side by side, as each step waits for
 * the one before.  A unit is NaN if a weight is NaN or infinite. */
APART void round_scaled_weights(int num_q, scaled_weights *to, const float *weights, int stride, int n) {
    const int end = kvc_padded_rows(n);
    for (int first = 0; first < num_q; first += QUERIES) {
        const int some = smaller(num_q - first, QUERIES);
        vec largest[QUERIES], zero_or_nan[QUERIES];
        float most[QUERIES], inverse[QUERIES];
        UNROLL
        for (int r = 0; r < QUERIES; r++) {
            const float *row = weights + (ptrdiff_t)(first + smaller(r, some - 1)) * stride;
            largest[r] = zero_or_nan[r] = v_zero();
            for (int j = 0; j < end; j += LANES) {
                largest[r] = v_max_abs(v_load(row + j), largest[r]);
                zero_or_nan[r] = v_fma(v_load(row + j), v_zero(), zero_or_nan[r]);
            }
        }
        v_store_largest(most, largest);
        const __m128 x = _mm_max_ps(_mm_set1_ps(1e-33f), _mm_loadu_ps(most)); /* smaller weights round to nothing */
        _mm_storeu_ps(inverse, _mm_div_ps(_mm_set1_ps((float)LARGEST_DIGITS), x));
        _mm_storeu_ps(most, _mm_mul_ps(x, _mm_set1_ps(1.0f / (float)LARGEST_DIGITS)));
        for (int r = 0; r < some; r++) {
            scaled_weights *const w = &to[first + r];
            const float *row = weights + (ptrdiff_t)(first + r) * stride;
            const vec by = v_set(inverse[r]);
            ivec shifted = i_zero();
            w->end.unit = most[r] + zero_or_nan_of(zero_or_nan[r]);
            for (int j = 0; j < end; j += 2 * LANES) {
                char *const digits = w->digits + j / FOUR * DIGIT_BYTES;
                store_digits(digits, v_mul(v_load(row + j), by), v_mul(v_load(row + j + LANES), by));
                shifted = add_shifted(shifted, digits);
            }
            cancel_shifted(&w->end, shifted);
        }
    }
}

/* Adds sums over values to KVC_QUANT_ELEMENTS columns of num_q rows of acc. */
INLINE void finish_values(int num_q, ivec (*sums)[2][2], float *acc, int acc_stride, const float *factor,
                          const scaled_weights *w) {
    UNROLL
    for (int r = 0; r < num_q; r++, acc += acc_stride) UNROLL
    for (int v = 0; v < 2; v++) {
        const vec sum = sum_of_digits(sums[r][0][v], sums[r][1][v]), old = v_load(acc + v * LANES);
        v_store(acc + v * LANES, v_fma(sum, v_set(w[r].end.unit), v_mul(old, v_set(factor[r]))));
    }
}

/* Adds a block of columns of n values, weighted, to num_q rows of acc, without a panel: it pays for more rows only. */
INLINE void accumulate_scaled_block(int num_q, int type, accumulate_args *a, int d, const scaled_weights *w) {
    ivec sums[QUERIES][2][2];
    char copies[FOUR][COPY_STRIDE];
    const char *const third[2] = {w->digits, w->digits + 3 * sizeof *w};
    ptrdiff_t stride = a->row_stride;
    begin_sums(num_q, sums, (const char *)&w->end, sizeof *w);
    for (int i = 0, left = a->n, at = 0; left > 0; i++, left -= KVC_PANEL) {
        const char *block = (const char *)a->pieces[i].rows + kvc_blocks_bytes(stored_as(type), d);
        prefetcher next = a->next[i * a->apart]; /* in registers, unlike *a */
        for (int n = smaller(left, KVC_PANEL); n > 0; n -= FOUR, block += FOUR * stride, at += DIGIT_BYTES) {
            ivec x[2];
            if (n < FOUR) {
                block = pad_rows(copies, FOUR, block, stride, n, block_bytes(stored_as(type)));
                stride = COPY_STRIDE;
            }
            prefetch_step(&next, 2 * LINES_PER_STEP);
            load_values(type, x, block, stride);
            multiply_four(num_q, sums, third, sizeof *w, at, x);
        }
        a->next[i * a->apart] = next;
    }
    finish_values(num_q, sums, a->acc + d, a->acc_stride, a->factor, w);
}

INLINE void accumulate_scaled_blocks(int num_q, int type, accumulate_args *a, const scaled_weights *w) {
    for (int d = 0; d < a->dim; d += KVC_QUANT_ELEMENTS) accumulate_scaled_block(num_q, type, a, d, w);
}

/* Adds a panel of num_quads times four values, weighted, to KVC_QUANT_ELEMENTS columns of num_q rows of acc.  next: of
 * each piece, as in accumulate_args. */
INLINE void accumulate_scaled_panel(int num_q, float *acc, int acc_stride, const float *factor, const scaled_weights *w,
                                    const char *panel, int num_quads, prefetcher *next, int apart) {
    ivec sums[SCALED_QUERIES][2][2];
    begin_sums(num_q, sums, (const char *)&w->end, sizeof *w);
    for (int i = 0; i < num_quads; i += PIECE_QUADS, next += apart)
        multiply_panel(num_q, sums, w->digits + i * DIGIT_BYTES, sizeof *w, panel + i * PANEL_BYTES,
                       smaller(num_quads - i, PIECE_QUADS), next);
    finish_values(num_q, sums, acc, acc_stride, factor, w);
}

APART void accumulate_panel_for_queries(int num_q, float *acc, int acc_stride, const float *factor,
                                        const scaled_weights *w, const char *panel, int num_quads, prefetcher *next,
                                        int apart) {
    for (int some; num_q; num_q -= some, acc += (ptrdiff_t)some * acc_stride, factor += some, w += some) {
        some = scaled_at_once(num_q);
        CALL_WITH_SCALED_QUERIES(accumulate_scaled_panel, some, acc, acc_stride, factor, w, panel, num_quads, next,
                                 apart)
    }
}

/* Adds all columns of the values, weighted, to num_q rows of acc, by way of panels. */
INLINE void accumulate_by_panels(int num_q, int type, accumulate_args *a, const scaled_weights *w) {
    _Alignas(64) char panel[PANEL_QUADS * PANEL_BYTES];
    for (int d = 0; d < a->dim; d += KVC_QUANT_ELEMENTS) {
        for (int i = 0, left = a->n; left > 0; i++, left -= KVC_PANEL)
            pack_values_of_type(type, panel + i * PIECE_QUADS * PANEL_BYTES,
                                (const char *)a->pieces[i].rows + kvc_blocks_bytes(stored_as(type), d), a->row_stride,
                                smaller(left, KVC_PANEL), &a->next[i * a->apart]);
        accumulate_panel_for_queries(num_q, a->acc + d, a->acc_stride, a->factor, w, panel, (a->n + FOUR - 1) / FOUR,
                                     a->next, a->apart);
    }
}

/* Adds n weighted rows to num_q rows of acc, some at a time: a kvc_accumulate_fn, once the type is known. */
INLINE void accumulate_scaled(int type, float *acc, int acc_stride, const float *factor, const float *weights,
                              int num_q, kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    const int steps = dim / KVC_QUANT_ELEMENTS * ((smaller(n, KVC_PANEL) + FOUR - 1) / FOUR);
    scaled_weights w[KVC_BLOCK_QUERIES];
    for (int some; num_q; num_q -= some) {
        accumulate_args a = {acc, factor, weights, pieces, row_stride, acc_stride, n, dim, 0, {{0}}};
        some = smaller(num_q, KVC_BLOCK_QUERIES);
        if (type != KVC_INT6 && (some <= QUERIES || some == MANY_QUERIES)) { /* as words: fewer instructions */
            CALL_WITH_QUERIES(accumulate_quantised_rows, some, MANY_QUERIES, 0, type, &a, num_q)
            return;
        }
        begin_ahead(&a, some, num_q, 0, steps * LINES_PER_STEP * (1 + scaled_passes(some)));
        round_scaled_weights(some, w, weights, KVC_SCORES, n);
        if (some <= QUERIES && has_look_up_64()) {
            CALL_WITH_QUERIES(accumulate_scaled_blocks, some, QUERIES, 0, INT6_AT_ONCE, &a, w)
        } else {
            accumulate_by_panels(some, type, &a, w);
        }
        end_ahead(&a);
        acc += (ptrdiff_t)some * acc_stride;
        factor += some;
        weights += some * KVC_SCORES;
    }
}

/* ---- many query rows --------------------------------------------------------------------------------------------- */

/* Is a kvc_pack_keys_fn once the type is known.  Makes a panel of each PANEL_ROWS rows, one behind the other.  A panel
 * has PANEL_BYTES for each four elements.  Nothing is prefetched, because the rows are not read a second time. */
INLINE void pack_scaled_keys(int type, float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    prefetcher none = prefetch_begin((kvc_ahead){.bytes = 0}, rows, 0);
    const int panel_bytes = dim / FOUR * PANEL_BYTES;
    char *panel = (char *)dst;
    for (int done = 0; done < n; done += PANEL_ROWS, panel += panel_bytes)
        pack_keys_of_type(type, panel, row_at(rows, row_stride, done), row_stride, n - done, dim, &none);
}

/* Packs n values into panels, one for each block of columns: a kvc_pack_values_fn, once the type is known. */
INLINE void pack_scaled_values(int type, float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    prefetcher none = prefetch_begin((kvc_ahead){.bytes = 0}, rows, 0);
    char *to = (char *)dst;
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, to += (n + FOUR - 1) / FOUR * PANEL_BYTES)
        pack_values_of_type(type, to, (const char *)rows + kvc_blocks_bytes(stored_as(type), d), row_stride, n, &none);
}

/* Is a kvc_matmul_fn without ldb and add: scores n keys for m query rows.  q has digits, as prepare_scaled leaves them,
 * and keys has panels of pack_scaled_keys: neither has floats.  A whole panel of scores is written for the last keys,
 * too.  Of long keys, PANEL_ELEMENTS elements are multiplied at a time: the first ones set the scores, and further ones
 * (`first` is not 0) add to them. */
INLINE void score_scaled_panels(float *c, int ldc, const float *q, int q_stride, const float *keys, int m, int n,
                                int dim, kvc_ahead ahead) {
    const char *panel = (const char *)keys;
    const int panels = (n + PANEL_ROWS - 1) / PANEL_ROWS, steps = panels * (dim / FOUR) * scaled_passes(m);
    prefetcher next = prefetch_begin(ahead, keys, steps * LINES_PER_STEP); /* a step multiplies four elements */
    for (int j = 0; j < n; j += PANEL_ROWS)
        for (int first = 0, num; first < dim; first += num, panel += num / FOUR * PANEL_BYTES) {
            num = smaller(PANEL_ELEMENTS, dim - first);
            score_panel_for_queries(m, (scaled_scores){c + j, ldc, first}, (const char *)q,
                                    q_stride * (ptrdiff_t)sizeof *q, panel, num, &next);
        }
    prefetch_rest(&next);
}

/* Is a kvc_matmul_fn: adds n weighted values of dim columns to the sums of m query rows. */
INLINE void accumulate_scaled_panels(float *acc, int acc_stride, const float *weights, int lda, const float *values,
                                     int m, int dim, int n, kvc_ahead ahead) {
    static const float ONES[SCALED_QUERIES] = {1, 1, 1, 1, 1, 1};
    const int num_quads = (n + FOUR - 1) / FOUR, steps = dim / KVC_QUANT_ELEMENTS * num_quads;
    scaled_weights w[SCALED_QUERIES];
    prefetcher next = prefetch_begin(ahead, values, steps * LINES_PER_STEP * scaled_passes(m));
    for (int some; m; m -= some, acc += (ptrdiff_t)some * acc_stride, weights += (ptrdiff_t)some * lda) {
        const char *panel = (const char *)values;
        some = scaled_at_once(m);
        round_scaled_weights(some, w, weights, lda, n);
        for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, panel += num_quads * PANEL_BYTES)
            accumulate_panel_for_queries(some, acc + d, acc_stride, ONES, w, panel, num_quads, &next, /* apart */ 0);
    }
    prefetch_rest(&next);
}

/* Defines the kernels of a type that has one scale a row. */
#define DEFINE_SCALED(type, TYPE)                                                                                     \
    extern kvc_score_fn kvc_score_##type##_avx512vnni;                                                                \
    extern kvc_accumulate_fn kvc_accumulate_##type##_avx512vnni;                                                      \
    extern kvc_pack_keys_fn kvc_pack_keys_##type##_avx512vnni;                                                        \
    extern kvc_pack_values_fn kvc_pack_values_##type##_avx512vnni;                                                    \
    TARGET void kvc_score_##type##_avx512vnni(float *scores, const float *q, int q_stride, int num_q,                 \
                                              const void *rows, int64_t row_stride, int n, int dim, kvc_ahead next) { \
        score_scaled(TYPE, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                               \
    }                                                                                                                 \
    TARGET void kvc_accumulate_##type##_avx512vnni(float *acc, int acc_stride, const float *factor,                   \
                                                   const float *weights, int num_q, kvc_value_piece *pieces,          \
                                                   int64_t row_stride, int n, int dim) {                              \
        accumulate_scaled(TYPE, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);                 \
    }                                                                                                                 \
    TARGET void kvc_pack_keys_##type##_avx512vnni(float *dst, const void *rows, int64_t row_stride, int first, int n, \
                                                  int dim) {                                                          \
        (void)first; /* 0 */                                                                                          \
        pack_scaled_keys(TYPE, dst, rows, row_stride, n, dim);                                                        \
    }                                                                                                                 \
    TARGET void kvc_pack_values_##type##_avx512vnni(float *dst, int dst_stride, const void *rows, int64_t row_stride, \
                                                    int first, int n, int dim) {                                      \
        (void)dst_stride, (void)first;                                                                                \
        pack_scaled_values(TYPE, dst, rows, row_stride, n, dim);                                                      \
    }
