/* elements.h: loading, storing and converting rows of any element type; part of template.h.
 *
 * A block of a quantised type is KVC_QUANT_ELEMENTS elements: a scale, an f16, for some types a minimum or the fifth
 * bits of codes, then the codes (base/dtype.h).  An element is scale * (code - zero), plus the minimum if there is one.
 * Types with levels look a code up in a table instead: fitted codes are those of the nearest levels.  KVC_INT8,
 * KVC_INT6 and KVC_INT4 have one scale a row, apart.  The last elements of a row, which fill no vector, are its tail.
 */

enum { QUANT_VECTORS = KVC_QUANT_ELEMENTS / LANES }; /* vectors of floats that a quantised block decodes to */

INLINE int smaller(int a, int b) { return a < b ? a : b; }

/* ---- blocks of quantised types, decoded -------------------------------------------------------------------------- */

/* Loads elements [i, i + LANES) of a block of q8_0. */
INLINE vec load_q8_0(const char *block, int i) {
    return v_mul(v_set_f16(block), v_load_i8(block + KVC_SCALE_BYTES + i));
}

/* Loads elements [i, i + LANES) of a block of q4_0.  Low halves of bytes are elements 0 to 15, high halves 16 to 31. */
INLINE vec load_q4_0(const char *block, int i) {
    const int half = KVC_QUANT_ELEMENTS / 2;
    vec q = v_load_u4(block + KVC_SCALE_BYTES + i % half, i / half * 4);
    return v_mul(v_set_f16(block), v_add(q, v_set(-8)));
}

/* Loads all elements of a block.  Products of a scale and a code are exact. */
INLINE void load_block(int type, vec x[QUANT_VECTORS], const char *block) {
    if (type == KVC_Q8_0 || type == KVC_Q4_0) {
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++)
            x[i] = type == KVC_Q8_0 ? load_q8_0(block, i * LANES) : load_q4_0(block, i * LANES);
        return;
    }
    char codes[KVC_QUANT_ELEMENTS];
    const vec d = v_set_f16(block), minimum = v_set_f16(block + KVC_SCALE_BYTES);
    unpack_codes(type, codes, block, KVC_TYPES[type].zero);
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) {
        const vec q = v_load_i8(codes + i * LANES);
        x[i] = KVC_TYPES[type].has_minimum ? v_fma(q, d, minimum) : v_mul(q, d);
    }
}

/* ---- blocks of quantised types, encoded -------------------------------------------------------------------------- */

/* Returns 1 / d, or 0 if that is infinite. */
INLINE float reciprocal(float d) {
    float x = d != 0 ? 1 / d : 0;
    return isinf(x) ? 0 : x;
}

INLINE float largest_magnitude(const vec x[QUANT_VECTORS]) {
    vec largest = v_zero();
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) largest = v_max(v_abs(x[i]), largest);
    return v_max_lane(largest);
}

INLINE void store_q8_0(char *block, const vec x[QUANT_VECTORS]) {
    float d = largest_magnitude(x) / 127;
    vec id = v_set(reciprocal(d));
    store_f16(block, d);
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++)
        v_store_nearest(block + KVC_SCALE_BYTES + i * LANES, v_number(v_mul(x[i], id)));
}

/* Finds the first element of the largest magnitude; 0 if all are 0 or NaN. */
INLINE float first_largest(const vec x[QUANT_VECTORS]) {
    float largest = largest_magnitude(x);
    uint32_t positive = 0, negative = 0; /* bit i: element i is largest, -largest */
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) {
        positive |= v_equal(x[i], v_set(largest)) << i * LANES;
        negative |= v_equal(x[i], v_set(-largest)) << i * LANES;
    }
    uint32_t both = positive | negative, first = both & (0 - both);
    return first & ~positive ? -largest : largest;
}

/* Stores a block's codes of four bits, or five, of which the fifth bits stand in a uint32_t before the others. */
INLINE void store_codes(int type, char *block, vec codes[QUANT_VECTORS]) {
    const int half = QUANT_VECTORS / 2;
    char *end = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    if (KVC_TYPES[type].has_fifth_bits) {
        uint32_t fifth_bits = 0;
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) {
            const vec bit = v_truncate(v_mul(codes[i], v_set(1.0f / 16)));
            fifth_bits |= v_equal(bit, v_set(1)) << i * LANES;
            codes[i] = v_fma(bit, v_set(-16), codes[i]);
        }
        memcpy(end - sizeof fifth_bits, &fifth_bits, sizeof fifth_bits);
    }
    UNROLL
    for (int i = 0; i < half; i++) v_store_8(end + i * LANES, v_fma(codes[half + i], v_set(16), codes[i]));
}

/* Rounds x * id + zero to codes of [0, most].  The product must be rounded before `zero` is added: v_number stands
 * between the two, so that no compiler fuses them. */
INLINE vec codes_of(vec x, vec id, float zero, float most) {
    return v_truncate(v_min(v_add(v_number(v_mul(x, id)), v_set(zero + 0.5f)), v_set(most)));
}

/* Stores a block of q4_0 or q5_0, whose codes are as far below `zero` as above. */
INLINE void store_symmetric(int type, char *block, const vec x[QUANT_VECTORS]) {
    const float zero = KVC_TYPES[type].zero, d = first_largest(x) / -zero, inverse = reciprocal(d);
    vec codes[QUANT_VECTORS];
    store_f16(block, d);
    if (d != 0 && inverse == 0 && isfinite(d)) { /* as in scalar.c */
        memset(block + KVC_SCALE_BYTES, 0, (size_t)KVC_TYPES[type].bytes - KVC_SCALE_BYTES);
        return;
    }
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) codes[i] = codes_of(x[i], v_set(inverse), zero, 2 * zero - 1);
    store_codes(type, block, codes);
}

/* Returns the first element that is 0, of either sign. */
RARE float first_zero(const vec x[QUANT_VECTORS]) {
    float all[KVC_QUANT_ELEMENTS];
    for (int i = 0; i < QUANT_VECTORS; i++) v_store(all + i * LANES, x[i]);
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++)
        if (all[i] == 0) return all[i];
    return 0;
}

/* Stores a block of q4_1 or q5_1, whose codes count from the minimum. */
INLINE void store_from_minimum(int type, char *block, const vec elements[QUANT_VECTORS]) {
    const float steps = KVC_TYPES[type].has_fifth_bits ? 31 : 15;
    vec x[QUANT_VECTORS];
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) x[i] = v_number(elements[i]);
    vec most = x[0], least = x[0];
    UNROLL
    for (int i = 1; i < QUANT_VECTORS; i++) {
        most = v_max(x[i], most);
        least = v_min(x[i], least);
    }
    float minimum = -v_max_lane(v_mul(least, v_set(-1)));
    if (minimum == 0) minimum = first_zero(x); /* the sign is stored */
    const float d = fabsf((v_max_lane(most) - minimum) / steps);
    store_f16(block, d);
    store_f16(block + KVC_SCALE_BYTES, minimum);
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++)
        x[i] = codes_of(v_add(x[i], v_set(-minimum)), v_set(reciprocal(d)), 0, steps);
    store_codes(type, block, x);
}

/* Returns the codes of the levels of iq4_nl nearest to x; halfway between two, the upper one. */
INLINE vec nearest_levels(vec x) {
    vec codes[3] = {v_zero(), v_zero(), v_zero()}; /* side by side, as each step waits for the one before */
    UNROLL
    for (int i = 0; i < 15; i++)
        codes[i % 3] = v_count(codes[i % 3], x, v_set((float)(KVC_LEVELS_IQ4_NL[i] + KVC_LEVELS_IQ4_NL[i + 1]) / 2));
    return v_add(v_add(codes[0], codes[1]), codes[2]);
}

enum { LEVELLED_BLOCKS = LANES / 2 }; /* blocks of iq4_nl whose sums are added up side by side */

/* The scale of a block of iq4_nl is a quotient of two sums over its elements, added up in their order: the scale of
 * least error, weighted by the elements' squares. */
typedef struct level_terms {
    float by_element[KVC_QUANT_ELEMENTS], by_level[KVC_QUANT_ELEMENTS];
} level_terms;

/* Stores the codes of a block of iq4_nl. */
INLINE void store_levels(char *block, level_terms *terms, const vec x[QUANT_VECTORS]) {
    const float largest = first_largest(x);
    if (!(fabsf(largest) >= KVC_LEAST_LEVELLED)) { /* a scale of 0 */
        memset(block + KVC_SCALE_BYTES, KVC_LEVELS_OF_1, KVC_NIBBLE_BYTES);
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) {
            v_store(terms->by_element + i * LANES, v_zero());
            v_store(terms->by_level + i * LANES, v_set(1));
        }
        return;
    }
    const vec id = v_set(1 / (largest / KVC_LEVELS_IQ4_NL[0]));
    vec codes[QUANT_VECTORS];
    char levels[KVC_QUANT_ELEMENTS];
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) codes[i] = nearest_levels(v_mul(v_number(x[i]), id));
    store_codes(KVC_IQ4_NL, block, codes);
    unpack_codes(KVC_IQ4_NL, levels, block, 0);
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) {
        const vec element = v_number(x[i]), level = v_load_i8(levels + i * LANES);
        const vec weighted = v_mul(v_mul(element, element), level);
        v_store(terms->by_element + i * LANES, v_mul(weighted, element));
        v_store(terms->by_level + i * LANES, v_mul(weighted, level));
    }
}

/* Stores the scales of num blocks of iq4_nl.  A lane adds up one sum. */
INLINE void store_level_scales(char *blocks, int num, const level_terms *terms) {
    vec sum = v_zero();
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i += LANES) {
        vec x[LANES];
        UNROLL
        for (int b = 0; b < LEVELLED_BLOCKS; b++) {
            x[2 * b] = b < num ? v_load(terms[b].by_element + i) : v_zero();
            x[2 * b + 1] = b < num ? v_load(terms[b].by_level + i) : v_zero();
        }
        v_transpose(x);
        UNROLL
        for (int j = 0; j < LANES; j++) sum = v_add(sum, x[j]);
    }
    float sums[LANES];
    v_store(sums, sum);
    for (int b = 0; b < num; b++, blocks += KVC_TYPES[KVC_IQ4_NL].bytes) {
        const float d = sums[2 * b] / sums[2 * b + 1];
        store_f16(blocks, isnan(d) ? NAN : d);
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Counts the bytes of the first i elements of a row; if it is quantised, of the blocks before that of element i. */
INLINE size_t bytes_of(int type, int i) {
    return (size_t)i / (size_t)KVC_TYPES[type].elements * (size_t)KVC_TYPES[type].bytes;
}

INLINE const void *row_at(const void *rows, int64_t row_stride, int64_t j) {
    return (const char *)rows + j * row_stride;
}

/* Counts the last elements of a row, which fill no vector. */
INLINE int tail_of(int type, int dim) { return type < KVC_FLOAT_TYPES ? dim % LANES : 0; }

INLINE vec load_full(int type, const void *p) {
    return type == KVC_F16 ? v_load_f16(p) : type == KVC_BF16 ? v_load_bf16(p) : v_load(p);
}

INLINE void store_full(int type, void *p, vec x) {
    if (type == KVC_F16)
        v_store_f16(p, x);
    else if (type == KVC_BF16)
        v_store_bf16(p, x);
    else
        v_store(p, x);
}

/* Loads the first `count` elements at p; the other lanes become 0. */
RARE vec load_part(int type, const void *p, int count) {
    float part[LANES] = {0}; /* large enough for any type */
    memcpy(part, p, bytes_of(type, count));
    return load_full(type, part);
}

RARE void store_part(int type, void *p, int count, vec x) {
    float part[LANES];
    store_full(type, part, x);
    memcpy(p, part, bytes_of(type, count));
}

/* Loads elements [i, i + count) of a row and reads nothing else.  count <= LANES; where the type is quantised, it is
 * LANES, and i a multiple of that. */
INLINE vec load(int type, const void *row, int i, int count) {
    const char *p = (const char *)row + bytes_of(type, i);
    if (type == KVC_Q8_0) return load_q8_0(p, i % KVC_QUANT_ELEMENTS);
    if (type == KVC_Q4_0) return load_q4_0(p, i % KVC_QUANT_ELEMENTS);
    return count == LANES ? load_full(type, p) : load_part(type, p, count);
}

/* Stores elements [i, i + count) of a row and writes nothing else.  The type is not quantised. */
INLINE void store(int type, void *row, int i, int count, vec x) {
    char *p = (char *)row + bytes_of(type, i);
    if (count == LANES)
        store_full(type, p, x);
    else
        store_part(type, p, count, x);
}

/* ---- conversion -------------------------------------------------------------------------------------------------- */

TARGET static void copy(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t num_rows,
                        size_t row_bytes) {
    if (dst_stride == (int64_t)row_bytes && src_stride == dst_stride) {
        memcpy(dst, src, (size_t)num_rows * row_bytes);
        return;
    }
    for (int64_t r = 0; r < num_rows; r++)
        copy_row((char *)dst + r * dst_stride, (const char *)src + r * src_stride, row_bytes);
}

/* Load, or store, QUANT_VECTORS vectors of floats. */
INLINE void load_vectors(int type, vec x[QUANT_VECTORS], const char *p) {
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) x[i] = load_full(type, p + bytes_of(type, i * LANES));
}

INLINE void store_vectors(int type, char *p, const vec x[QUANT_VECTORS]) {
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) store_full(type, p + bytes_of(type, i * LANES), x[i]);
}

/* Do what load_vectors and store_vectors do, for a type that is no constant: a branch costs less than further copies of
 * the code that encodes, or decodes, a block. */
INLINE void load_floats(int type, vec x[QUANT_VECTORS], const char *p) {
    switch (type) {
    case KVC_F32: load_vectors(KVC_F32, x, p); break;
    case KVC_F16: load_vectors(KVC_F16, x, p); break;
    default: load_vectors(KVC_BF16, x, p);
    }
}

INLINE void store_floats(int type, char *p, const vec x[QUANT_VECTORS]) {
    switch (type) {
    case KVC_F32: store_vectors(KVC_F32, p, x); break;
    case KVC_F16: store_vectors(KVC_F16, p, x); break;
    default: store_vectors(KVC_BF16, p, x);
    }
}

INLINE void encode_row(int from, int to, char *dst, const char *src, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        vec x[QUANT_VECTORS];
        load_floats(from, x, src + d * KVC_TYPES[from].bytes);
        char *block = dst + bytes_of(to, d);
        if (to == KVC_Q8_0)
            store_q8_0(block, x);
        else if (KVC_TYPES[to].has_minimum)
            store_from_minimum(to, block, x);
        else
            store_symmetric(to, block, x);
    }
}

/* Encodes a row to iq4_nl: codes of LEVELLED_BLOCKS blocks at a time, then their scales. */
INLINE void encode_row_iq4_nl(int from, int to, char *dst, const char *src, int dim) {
    level_terms terms[LEVELLED_BLOCKS];
    for (int d = 0, num; d < dim; d += num * KVC_QUANT_ELEMENTS) {
        num = smaller(LEVELLED_BLOCKS, (dim - d) / KVC_QUANT_ELEMENTS);
        char *const blocks = dst + bytes_of(to, d);
        for (int b = 0; b < num; b++) {
            vec x[QUANT_VECTORS];
            load_floats(from, x, src + (d + b * KVC_QUANT_ELEMENTS) * KVC_TYPES[from].bytes);
            store_levels(blocks + b * KVC_TYPES[to].bytes, &terms[b], x);
        }
        store_level_scales(blocks, num, terms);
    }
}

INLINE void decode_row(int from, int to, char *dst, const char *src, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        vec x[QUANT_VECTORS];
        load_block(from, x, src + bytes_of(from, d));
        store_floats(to, dst + d * KVC_TYPES[to].bytes, x);
    }
}

INLINE void convert_row(int from, int to, char *dst, const char *src, int dim) {
    int tail = tail_of(from, dim), d = 0;
    for (; d < dim - tail; d += LANES) store(to, dst, d, LANES, load(from, src, d, LANES));
    if (tail) store(to, dst, d, tail, load(from, src, d, tail));
}

/* Defines a kvc_convert_fn that calls convert_a_row(from, to, dst, src, dim) for each row. */
#define DEFINE_CONVERT_ROWS(name, convert_a_row, from, to)                                                          \
    APART void name(int from_type, int to_type, void *dst, int64_t dst_stride, const void *src, int64_t src_stride, \
                    int64_t num_rows, int dim) {                                                                    \
        (void)from_type, (void)to_type;                                                                             \
        for (int64_t r = 0; r < num_rows; r++)                                                                      \
            convert_a_row(from, to, (char *)dst + r * dst_stride, (const char *)src + r * src_stride, dim);         \
    }
APART kvc_convert_fn convert_f32_f16, convert_f32_bf16, convert_f16_f32, convert_f16_bf16, convert_bf16_f32,
    convert_bf16_f16, encode_q8_0, encode_q4_0, encode_q4_1, encode_q5_0, encode_q5_1, encode_iq4_nl, decode_q8_0,
    decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1, decode_iq4_nl;
DEFINE_CONVERT_ROWS(convert_f32_f16, convert_row, KVC_F32, KVC_F16)
DEFINE_CONVERT_ROWS(convert_f32_bf16, convert_row, KVC_F32, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_f16_f32, convert_row, KVC_F16, KVC_F32)
DEFINE_CONVERT_ROWS(convert_f16_bf16, convert_row, KVC_F16, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_bf16_f32, convert_row, KVC_BF16, KVC_F32)
DEFINE_CONVERT_ROWS(convert_bf16_f16, convert_row, KVC_BF16, KVC_F16)
DEFINE_CONVERT_ROWS(encode_q8_0, encode_row, from_type, KVC_Q8_0)
DEFINE_CONVERT_ROWS(encode_q4_0, encode_row, from_type, KVC_Q4_0)
DEFINE_CONVERT_ROWS(encode_q4_1, encode_row, from_type, KVC_Q4_1)
DEFINE_CONVERT_ROWS(encode_q5_0, encode_row, from_type, KVC_Q5_0)
DEFINE_CONVERT_ROWS(encode_q5_1, encode_row, from_type, KVC_Q5_1)
DEFINE_CONVERT_ROWS(encode_iq4_nl, encode_row_iq4_nl, from_type, KVC_IQ4_NL)
DEFINE_CONVERT_ROWS(decode_q8_0, decode_row, KVC_Q8_0, to_type)
DEFINE_CONVERT_ROWS(decode_q4_0, decode_row, KVC_Q4_0, to_type)
DEFINE_CONVERT_ROWS(decode_q4_1, decode_row, KVC_Q4_1, to_type)
DEFINE_CONVERT_ROWS(decode_q5_0, decode_row, KVC_Q5_0, to_type)
DEFINE_CONVERT_ROWS(decode_q5_1, decode_row, KVC_Q5_1, to_type)
DEFINE_CONVERT_ROWS(decode_iq4_nl, decode_row, KVC_IQ4_NL, to_type)

/* Returns what converts rows of one type to another type.  A quantised type is converted to or from floats only, by a
 * function that asks for the type of floats itself.  NULL: the types are the same, or have one scale a row. */
INLINE kvc_convert_fn *converter_of(int from, int to) {
    static kvc_convert_fn *const of_floats[KVC_FLOAT_TYPES][KVC_FLOAT_TYPES] = {
        [KVC_F32] = {NULL, convert_f32_f16, convert_f32_bf16},
        [KVC_F16] = {convert_f16_f32, NULL, convert_f16_bf16},
        [KVC_BF16] = {convert_bf16_f32, convert_bf16_f16, NULL}};
    static kvc_convert_fn *const decoders[KVC_STORED_TYPES] = {[KVC_Q8_0] = decode_q8_0, [KVC_Q4_0] = decode_q4_0,
                                                               [KVC_Q4_1] = decode_q4_1, [KVC_Q5_0] = decode_q5_0,
                                                               [KVC_Q5_1] = decode_q5_1, [KVC_IQ4_NL] = decode_iq4_nl};
    static kvc_convert_fn *const encoders[KVC_STORED_TYPES] = {[KVC_Q8_0] = encode_q8_0, [KVC_Q4_0] = encode_q4_0,
                                                               [KVC_Q4_1] = encode_q4_1, [KVC_Q5_0] = encode_q5_0,
                                                               [KVC_Q5_1] = encode_q5_1, [KVC_IQ4_NL] = encode_iq4_nl};
    if (to >= KVC_FLOAT_TYPES) return encoders[to];
    return from >= KVC_FLOAT_TYPES ? decoders[from] : of_floats[from][to];
}

INLINE void convert(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                    int64_t num_rows, int dim) {
    if (from == to)
        copy(dst, dst_stride, src, src_stride, num_rows, bytes_of(from, dim));
    else
        converter_of(from, to)(from, to, dst, dst_stride, src, src_stride, num_rows, dim);
}

/* ---- rows with a scale of their own ------------------------------------------------------------------------------ */

/* Multiplies column j of num_q rows of scores, or weights, by number j of `by`, which are f16. */
INLINE void times(float *rows, int num_q, int n, const void *by) {
    for (int j = 0; j < kvc_padded_rows(n); j += LANES) {
        const vec x = v_load_f16((const uint16_t *)by + j);
        for (int r = 0; r < num_q; r++) v_store(rows + r * KVC_SCORES + j, v_mul(v_load(rows + r * KVC_SCORES + j), x));
    }
}

/* Returns the largest magnitude of n floats, leaving out NaN. */
INLINE float largest(const void *x, int n) {
    vec most = v_zero();
    for (int i = 0; i < n; i += LANES)
        most = v_max(v_abs(load_full(KVC_F32, (const char *)x + bytes_of(KVC_F32, i))), most);
    return v_max_lane(most);
}

INLINE void encode_int8(char *dst, const char *src, int n, vec inverse) {
    for (int i = 0; i < n; i += LANES) {
        const vec x = load_full(KVC_F32, src + bytes_of(KVC_F32, i));
        v_store_nearest(dst + i, v_number(v_mul(x, inverse)));
    }
}

/* Stores a block's codes of int4, below 16, or of int6, below 64, whose upper two bits stand in front. */
INLINE void store_planes(int type, char *block, code_bytes codes) {
    typedef uint8_t nibble_bytes __attribute__((vector_size(KVC_NIBBLE_BYTES)));
    nibble_bytes halves[2];
    memcpy(halves, &codes, sizeof halves);
    const nibble_bytes nibbles = (halves[0] & 15) | (halves[1] << 4);
    memcpy(block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES, &nibbles, sizeof nibbles);
    if (KVC_TYPES[type].num_levels < 64) return;
    uint64_t x[4]; /* bits 4 and 5 of elements [8 * i, 8 * i + 8), a byte each */
    codes >>= 4;
    memcpy(x, &codes, sizeof x);
    const uint64_t bits = x[0] | x[1] << 2 | x[2] << 4 | x[3] << 6;
    memcpy(block, &bits, sizeof bits);
}

/* Twice the middles between levels above 0, as a search asks for them: step s, from 0 on, for one of 1 << s. */
static const uint8_t MIDDLES_INT4[8 + 12] = {0, 94, 44, 160, 21, 68, 124, 209};
static const uint8_t MIDDLES_INT6[32] = {0, 93, 45, 157, 21, 69, 124, 200, 9,   33,  57,  81,  108, 140, 177, 228,
                                         4, 15, 27, 39,  51, 63, 75,  87,  100, 116, 132, 148, 167, 188, 213, 245};

/* Returns the codes of the levels nearest to x; halfway, of the level of larger magnitude.  Levels are symmetric: finds
 * the magnitude's level by a binary search over middles, for all elements at once, then mirrors codes of negative x. */
INLINE code_bytes fitted_codes(int type, const vec x[QUANT_VECTORS]) {
    const int half = KVC_TYPES[type].num_levels / 2;
    vec twice[QUANT_VECTORS], is_positive[QUANT_VECTORS];
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) {
        twice[i] = v_min(v_abs(v_add(x[i], x[i])), v_set(255));
        is_positive[i] = v_count(v_zero(), x[i], v_zero());
    }
    const code_bytes size = c_from_floats(twice);
    code_bytes codes = {0};
    UNROLL
    for (int num = 1; num < half; num *= 2) {
        const uint8_t *const middles = (type == KVC_INT4 ? MIDDLES_INT4 : MIDDLES_INT6) + num;
        codes = codes + codes - (code_bytes)(size >= c_look_up(middles, codes));
    }
    return (codes + (uint8_t)half) ^ ((code_bytes)(c_from_floats(is_positive) == 0) & (uint8_t)(2 * half - 1));
}

/* Returns the levels that codes stand for: looks up 16 levels at a time, and takes those of the codes in that range. */
INLINE code_bytes decode_levels(int type, code_bytes codes) {
    const int8_t *const levels = kvc_levels(type);
    code_bytes found = c_look_up(levels, codes & 15);
    UNROLL
    for (int i = 16; i < KVC_TYPES[type].num_levels; i += 16) {
        const code_bytes above = (code_bytes)(codes >= (uint8_t)i);
        found = (found & ~above) | (c_look_up(levels + i, codes & 15) & above);
    }
    return found;
}

/* Encodes n floats of a row of levels.  Adds x * level and level * level to sums, for the row's scale. */
INLINE void encode_fitted(int type, char *dst, const char *src, int n, vec inverse, kvc_level_sums *sums) {
    enum { SUMS = KVC_LANES / LANES };
    vec products[SUMS], squares[SUMS];
    UNROLL
    for (int i = 0; i < SUMS; i++) {
        products[i] = v_load(sums->products + i * LANES);
        squares[i] = v_load(sums->squares + i * LANES);
    }
    for (; n; n -= KVC_QUANT_ELEMENTS, src += KVC_QUANT_ELEMENTS * sizeof(float), dst += KVC_TYPES[type].bytes) {
        vec x[QUANT_VECTORS], in_units[QUANT_VECTORS], levels[QUANT_VECTORS];
        load_vectors(KVC_F32, x, src);
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) in_units[i] = v_mul(x[i], inverse);
        const code_bytes codes = fitted_codes(type, in_units);
        store_planes(type, dst, codes);
        c_to_floats(levels, decode_levels(type, codes));
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) {
            products[i % SUMS] = v_add(products[i % SUMS], v_mul(x[i], levels[i]));
            squares[i % SUMS] = v_add(squares[i % SUMS], v_mul(levels[i], levels[i]));
        }
    }
    UNROLL
    for (int i = 0; i < SUMS; i++) {
        v_store(sums->products + i * LANES, products[i]);
        v_store(sums->squares + i * LANES, squares[i]);
    }
}

/* Encodes n floats, in units of `unit`, as a part of a row of int8, int6 or int4. */
INLINE void encode(int type, void *dst, const void *src, int n, float unit, kvc_level_sums *sums) {
    const vec inverse = v_set(reciprocal(unit));
    switch (type) {
    case KVC_INT8: encode_int8(dst, src, n, inverse); break;
    case KVC_INT6: encode_fitted(KVC_INT6, dst, src, n, inverse, sums); break;
    default: encode_fitted(KVC_INT4, dst, src, n, inverse, sums);
    }
}

/* ---- unpacking --------------------------------------------------------------------------------------------------- */

/* Returns half of the range of a type's codes. */
INLINE int middle_of(int type) { return KVC_TYPES[type].has_fifth_bits ? 16 : 8; }

INLINE void unpack_row(int type, char *dst, const char *row, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        memcpy(dst, row, KVC_SCALE_BYTES);
        unpack_codes(type, dst + KVC_SCALE_BYTES, row, type == KVC_IQ4_NL ? 0 : middle_of(type));
        dst += KVC_TYPES[KVC_Q8_0].bytes;
        row += KVC_TYPES[type].bytes;
    }
}

/* Finds the minima of one block of n rows, the first of which is at p, that unpacked rows lack: the stored minimum plus
 * scale * middle, as the middle is taken off codes. */
INLINE void unpack_minima(int type, float *minima, const char *p, int64_t row_stride, int64_t n) {
    const vec middle = v_set((float)middle_of(type));
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES, p += LANES * row_stride) {
        vec halves[2];
        v_load_scales(halves, p, row_stride);
        v_store(minima + j, v_fma(halves[0], middle, halves[1]));
    }
    for (; j < n; j++, p += row_stride)
        v_store_first(minima + j, v_fma(v_set_f16(p), middle, v_set_f16(p + KVC_SCALE_BYTES)));
}

/* scale: NULL for rows without. */
INLINE void unpack_scaled_row(int type, char *dst, const char *row, const char *scale, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS, dst += KVC_QUANT_ELEMENTS, row += KVC_TYPES[type].bytes) {
        if (scale) memcpy(dst, scale, KVC_SCALE_BYTES), dst += KVC_SCALE_BYTES;
        if (type == KVC_INT8)
            memcpy(dst, row, KVC_QUANT_ELEMENTS);
        else
            unpack_codes(type, dst, row, 0);
    }
}

/* Unpacks n rows of codes to q8_0, or to int8 if scales is NULL, and the minima that these lack (kvc_unpack_fn). */
INLINE void unpack(int type, void *dst, const void *rows, int64_t row_stride, const void *scales, int64_t scale_stride,
                   int64_t n, int dim, float *minima) {
    const size_t bytes = bytes_of(KVC_TYPES[type].has_row_scale && !scales ? KVC_INT8 : KVC_Q8_0, dim);
    const char *scale = scales;
    for (int64_t j = 0; j < n; j++, scale = scale ? scale + scale_stride : NULL) {
        char *to = (char *)dst + (size_t)j * bytes;
        const char *row = (const char *)rows + j * row_stride;
        switch (type) {
        case KVC_Q4_0: unpack_row(KVC_Q4_0, to, row, dim); break;
        case KVC_Q4_1: unpack_row(KVC_Q4_1, to, row, dim); break;
        case KVC_Q5_0: unpack_row(KVC_Q5_0, to, row, dim); break;
        case KVC_Q5_1: unpack_row(KVC_Q5_1, to, row, dim); break;
        case KVC_IQ4_NL: unpack_row(KVC_IQ4_NL, to, row, dim); break;
        case KVC_INT8: unpack_scaled_row(KVC_INT8, to, row, scale, dim); break;
        case KVC_INT6: unpack_scaled_row(KVC_INT6, to, row, scale, dim); break;
        default: unpack_scaled_row(KVC_INT4, to, row, scale, dim);
        }
    }
    if (KVC_TYPES[type].has_minimum)
        for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++)
            unpack_minima(type, minima + b * KVC_TILE, (const char *)rows + b * KVC_TYPES[type].bytes, row_stride, n);
}
