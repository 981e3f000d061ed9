/* elements.h: loading, storing and converting rows of any element type; part of template.h. */

enum { QUANT_VECTORS = KVC_QUANT_ELEMENTS / LANES }; /* vectors of floats that a quantised block decodes to */

INLINE int smaller(int a, int b) { return a < b ? a : b; }

/* ---- quantised blocks ------------------------------------------------------------------------------------------- */

/* Loads elements [i, i + LANES) of a block of q8_0. */
INLINE vec load_q8_0(const char *block, int i) {
    return v_mul(v_set_f16(block), v_load_i8(block + KVC_SCALE_BYTES + i));
}

/* Loads elements [i, i + LANES) of a block of q4_0: its bytes' low halves are the first half of the elements, the high
 * ones the second. */
INLINE vec load_q4_0(const char *block, int i) {
    const int half = KVC_QUANT_ELEMENTS / 2;
    vec q = v_load_u4(block + KVC_SCALE_BYTES + i % half, i / half * 4);
    return v_mul(v_set_f16(block), v_add(q, v_set(-8)));
}

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
        v_store_8(block + KVC_SCALE_BYTES + i * LANES, v_round_away(v_number(v_mul(x[i], id))));
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

/* Rounds x * id to codes of four bits.  The product must be rounded before 8.5 is added: v_number stands between the
 * two, so that no compiler fuses them. */
INLINE vec nibbles(vec x, vec id) { return v_truncate(v_min(v_add(v_number(v_mul(x, id)), v_set(8.5f)), v_set(15))); }

INLINE void store_q4_0(char *block, const vec x[QUANT_VECTORS]) {
    const int half = QUANT_VECTORS / 2;
    float d = first_largest(x) / -8, inverse = reciprocal(d);
    vec id = v_set(inverse);
    store_f16(block, d);
    if (d != 0 && inverse == 0 && isfinite(d)) { /* as in scalar.c */
        memset(block + KVC_SCALE_BYTES, 0, KVC_QUANT_ELEMENTS / 2);
        return;
    }
    UNROLL
    for (int i = 0; i < half; i++)
        v_store_8(block + KVC_SCALE_BYTES + i * LANES, v_fma(nibbles(x[half + i], id), v_set(16), nibbles(x[i], id)));
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Counts the bytes of the first i elements of a row; if it is quantised, of the blocks before that of element i. */
INLINE size_t bytes_of(int type, int i) {
    if (type == KVC_Q8_0) return (size_t)i / KVC_QUANT_ELEMENTS * KVC_Q8_0_BYTES;
    if (type == KVC_Q4_0) return (size_t)i / KVC_QUANT_ELEMENTS * KVC_Q4_0_BYTES;
    return (size_t)i * (type == KVC_F32 ? sizeof(float) : sizeof(uint16_t));
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

/* ---- conversion ------------------------------------------------------------------------------------------------- */

TARGET static void copy(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t num_rows,
                        size_t row_bytes) {
    if (dst_stride == (int64_t)row_bytes && src_stride == dst_stride) {
        memcpy(dst, src, (size_t)num_rows * row_bytes);
        return;
    }
    for (int64_t r = 0; r < num_rows; r++)
        copy_row((char *)dst + r * dst_stride, (const char *)src + r * src_stride, row_bytes);
}

/* Loads what becomes a block.  The type need not be a constant: a branch costs less than a copy of what encodes it. */
INLINE void load_floats(int type, vec x[QUANT_VECTORS], const char *p) {
    if (type == KVC_F32) {
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) x[i] = v_load(p + bytes_of(KVC_F32, i * LANES));
    } else if (type == KVC_F16) {
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) x[i] = v_load_f16(p + bytes_of(KVC_F16, i * LANES));
    } else {
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) x[i] = v_load_bf16(p + bytes_of(KVC_BF16, i * LANES));
    }
}

INLINE void encode_row(int from, int to, char *dst, const char *src, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        vec x[QUANT_VECTORS];
        load_floats(from, x, src + bytes_of(from, d));
        if (to == KVC_Q8_0)
            store_q8_0(dst + bytes_of(to, d), x);
        else
            store_q4_0(dst + bytes_of(to, d), x);
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
DEFINE_CONVERT_ROWS(convert_f32_f16, convert_row, KVC_F32, KVC_F16)
DEFINE_CONVERT_ROWS(convert_f32_bf16, convert_row, KVC_F32, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_f16_f32, convert_row, KVC_F16, KVC_F32)
DEFINE_CONVERT_ROWS(convert_f16_bf16, convert_row, KVC_F16, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_bf16_f32, convert_row, KVC_BF16, KVC_F32)
DEFINE_CONVERT_ROWS(convert_bf16_f16, convert_row, KVC_BF16, KVC_F16)
DEFINE_CONVERT_ROWS(encode_q8_0, encode_row, from_type, KVC_Q8_0)
DEFINE_CONVERT_ROWS(encode_q4_0, encode_row, from_type, KVC_Q4_0)
DEFINE_CONVERT_ROWS(convert_q8_0_f32, convert_row, KVC_Q8_0, KVC_F32)
DEFINE_CONVERT_ROWS(convert_q8_0_f16, convert_row, KVC_Q8_0, KVC_F16)
DEFINE_CONVERT_ROWS(convert_q8_0_bf16, convert_row, KVC_Q8_0, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_q4_0_f32, convert_row, KVC_Q4_0, KVC_F32)
DEFINE_CONVERT_ROWS(convert_q4_0_f16, convert_row, KVC_Q4_0, KVC_F16)
DEFINE_CONVERT_ROWS(convert_q4_0_bf16, convert_row, KVC_Q4_0, KVC_BF16)

/* Chooses what converts; NULL: nothing, as the types are the same. */
INLINE kvc_convert_fn *converter_of(int from, int to) {
    static kvc_convert_fn *const to_floats[KVC_STORED_TYPES][KVC_FLOAT_TYPES] = {
        [KVC_F32] = {NULL, convert_f32_f16, convert_f32_bf16},
        [KVC_F16] = {convert_f16_f32, NULL, convert_f16_bf16},
        [KVC_BF16] = {convert_bf16_f32, convert_bf16_f16, NULL},
        [KVC_Q8_0] = {convert_q8_0_f32, convert_q8_0_f16, convert_q8_0_bf16},
        [KVC_Q4_0] = {convert_q4_0_f32, convert_q4_0_f16, convert_q4_0_bf16}};
    static kvc_convert_fn *const to_blocks[KVC_STORED_TYPES] = {[KVC_Q8_0] = encode_q8_0, [KVC_Q4_0] = encode_q4_0};
    return from == to ? NULL : to >= KVC_FLOAT_TYPES ? to_blocks[to] : to_floats[from][to];
}

INLINE void convert(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                    int64_t num_rows, int dim) {
    if (from == to)
        copy(dst, dst_stride, src, src_stride, num_rows, bytes_of(from, dim));
    else
        converter_of(from, to)(from, to, dst, dst_stride, src, src_stride, num_rows, dim);
}
