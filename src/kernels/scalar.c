/* scalar.c: the kernels in plain C, written to be read: what every other set is tested against.
 *
 * A block of a quantised type is KVC_QUANT_ELEMENTS elements: a scale (d), an f16, perhaps a minimum or the fifth bits
 * of codes, then the codes.  An element is d * (code - zero), plus the minimum, or d * the level of it.  KVC_INT8,
 * KVC_INT6 and KVC_INT4 have one scale a row, apart, which kernels leave out.  A volatile variable rounds a product
 * before anything is added to it, so that no compiler fuses the two.
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kvcache.h"

/* ---- element types ----------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds bits / 2^shift to nearest, ties to even. */
static uint32_t round_off(uint32_t bits, uint32_t shift) {
    uint32_t half = (uint32_t)1 << (shift - 1), odd = bits >> shift & 1;
    return (bits + half - 1 + odd) >> shift;
}

static float f32_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) /* zero and denormals, all of them normal in f32 */
        return float_of(sign | bits_of((float)fraction * 0x1p-24f));
    if (exponent == 31) /* infinity and NaN, which becomes quiet */
        return float_of(sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0));
    return float_of(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

static uint16_t f16_from_f32(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff, half;
    if (magnitude > 0x7f800000) /* NaN */
        half = 0x7e00 | (magnitude >> 13 & 1023);
    else if (magnitude >= bits_of(65520.0f)) /* from halfway between the largest f16 and 2^16 on */
        half = 0x7c00;
    else if (magnitude >= bits_of(0x1p-14f)) /* what rounding carries out of the fraction belongs to the exponent */
        half = round_off(magnitude - ((127 - 15) << 23), 13);
    else if (magnitude >= bits_of(0x1p-25f)) /* denormals: multiples of 2^-24 */
        half = round_off((magnitude & 0x7fffff) | 0x800000, 126 - (magnitude >> 23));
    else
        half = 0;
    return (uint16_t)(sign | half);
}

static float f32_from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static uint16_t bf16_from_f32(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)round_off(bits, 16);
}

/* ---- quantised types --------------------------------------------------------------------------------------------- */

static float scale_of(const uint8_t *block) {
    uint16_t bits;
    memcpy(&bits, block, sizeof bits);
    return f32_from_f16(bits);
}

static void store_scale(uint8_t *block, float d) {
    uint16_t bits = f16_from_f32(d);
    memcpy(block, &bits, sizeof bits);
}

/* Returns the code of element i of a block of codes of four, five or six bits. */
static int code_at(int type, const uint8_t *block, int i) {
    const uint8_t *nibbles = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    const int code = nibbles[i % KVC_NIBBLE_BYTES] >> (i < KVC_NIBBLE_BYTES ? 0 : 4) & 15;
    if (KVC_TYPES[type].num_levels == 64) return code + (block[i % 8] >> i / 8 * 2 & 3) * 16;
    if (!KVC_TYPES[type].has_fifth_bits) return code;
    uint32_t fifth_bits;
    memcpy(&fifth_bits, nibbles - sizeof fifth_bits, sizeof fifth_bits);
    return code + (int)(fifth_bits >> i & 1) * 16;
}

/* Returns element i of a block of codes of four, five or six bits. */
static float load_code(int type, const uint8_t *block, int i) {
    const int code = code_at(type, block, i);
    const float x =
        scale_of(block) * (float)(type == KVC_IQ4_NL ? KVC_LEVELS_IQ4_NL[code] : code - KVC_TYPES[type].zero);
    return KVC_TYPES[type].has_minimum ? x + scale_of(block + KVC_SCALE_BYTES) : x;
}

/* Returns element i of a row of a quantised type. */
static float load_quantised(int type, const uint8_t *row, int i) {
    if (type == KVC_INT8) return (float)((const int8_t *)row)[i];
    const uint8_t *block = row + kvc_blocks_bytes(type, i);
    int8_t q;
    if (type != KVC_Q8_0) return load_code(type, block, i % KVC_QUANT_ELEMENTS);
    memcpy(&q, block + KVC_SCALE_BYTES + i % KVC_QUANT_ELEMENTS, sizeof q);
    return scale_of(block) * q;
}

/* Returns 1 / d, or 0 if that is infinite. */
static float reciprocal(float d) {
    float x = d != 0 ? 1 / d : 0;
    return isinf(x) ? 0 : x;
}

/* Returns x * id, or 0 if that is NaN.  id: 1 over a scale. */
static float scaled(float x, float id) {
    volatile float product = x * id;
    float y = product;
    return isnan(y) ? 0 : y;
}

/* Returns element i of floats at any address. */
static float float_at(const void *x, int i) {
    float element;
    memcpy(&element, (const char *)x + i * (int)sizeof element, sizeof element);
    return element;
}

/* Compares magnitudes as bits: Clang would turn floats into a maximum, where a signalling NaN counts. */
static float largest(const void *x, int n) {
    uint32_t most = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t magnitude = bits_of(float_at(x, i)) & 0x7fffffff;
        if (most < magnitude && magnitude <= 0x7f800000) most = magnitude;
    }
    return float_of(most);
}

/* Returns the nearest integer, of two the one farther from zero; not by roundf, as MinGW's makes 1 of 0.49999997. */
static int nearest(float x) { return (int)((double)x + (x < 0 ? -0.5 : 0.5)); }

/* Stores n codes of 8 bits. */
static void encode_int8(void *dst, const void *src, int n, float id) {
    for (int i = 0; i < n; i++) ((int8_t *)dst)[i] = (int8_t)nearest(scaled(float_at(src, i), id));
}

/* Rounds n rows of f32 to int8 codes, and sets units, what a code of 1 stands for; NaN if the row has a NaN. */
static void round_rows(int8_t *codes, float *units, const float *rows, int64_t row_stride, int n, int dim) {
    for (int i = 0; i < n; i++, codes += dim, rows = (const float *)((const char *)rows + row_stride)) {
        units[i] = largest(rows, dim) / 127;
        encode_int8(codes, rows, dim, reciprocal(units[i]));
        for (int d = 0; d < dim; d++)
            if (isnan(rows[d])) units[i] = NAN;
    }
}

/* Stores a block's codes of four bits, two in a byte, and fifth bits, if there are any, before them. */
static void store_codes(int type, uint8_t *block, const int codes[KVC_QUANT_ELEMENTS]) {
    uint8_t *nibbles = block + KVC_TYPES[type].bytes - KVC_NIBBLE_BYTES;
    uint32_t fifth_bits = 0;
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) fifth_bits |= (uint32_t)(codes[i] >> 4) << i;
    for (int i = 0; i < KVC_NIBBLE_BYTES; i++)
        nibbles[i] = (uint8_t)((codes[i] & 15) | (codes[i + KVC_NIBBLE_BYTES] & 15) << 4);
    if (KVC_TYPES[type].has_fifth_bits) memcpy(nibbles - sizeof fifth_bits, &fifth_bits, sizeof fifth_bits);
}

/* Returns the code of [0, most] of x * id + zero, rounded. */
static int code_of(float x, float id, float zero, int most) {
    const float sum = scaled(x, id) + (zero + 0.5f); /* no more precise than a float, on any machine */
    const int code = (int)sum;
    return code < most ? code : most;
}

/* Finds the first element of the largest magnitude; 0 if all are 0 or NaN. */
static float first_largest(const float x[KVC_QUANT_ELEMENTS]) {
    float largest = 0;
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++)
        if (fabsf(largest) < fabsf(x[i])) largest = x[i];
    return largest;
}

/* Stores a block of q4_0 or q5_0, whose codes are as far below `zero` as above. */
static void store_symmetric(int type, uint8_t *block, const float x[KVC_QUANT_ELEMENTS]) {
    const int zero = KVC_TYPES[type].zero;
    const float d = first_largest(x) / (float)-zero, id = reciprocal(d);
    const int is_tiny = d != 0 && id == 0 && isfinite(d); /* codes mean nothing then; 0 is what ggml's casts yield */
    int codes[KVC_QUANT_ELEMENTS];
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) codes[i] = is_tiny ? 0 : code_of(x[i], id, (float)zero, 2 * zero - 1);
    store_scale(block, d);
    store_codes(type, block, codes);
}

/* Stores a block of q4_1 or q5_1, whose codes count from the minimum. */
static void store_from_minimum(int type, uint8_t *block, const float x[KVC_QUANT_ELEMENTS]) {
    const int steps = KVC_TYPES[type].has_fifth_bits ? 31 : 15;
    float least = INFINITY, most = -INFINITY;
    int codes[KVC_QUANT_ELEMENTS];
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) {
        const float y = isnan(x[i]) ? 0 : x[i];
        if (y < least || i == 0) least = y;
        if (y > most || i == 0) most = y;
    }
    const float range = most - least; /* rounded to infinity, also by processors that compute with more bits */
    const float d = fabsf(range / (float)steps), id = reciprocal(d);
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) codes[i] = code_of((isnan(x[i]) ? 0 : x[i]) - least, id, 0, steps);
    store_scale(block, d);
    store_scale(block + KVC_SCALE_BYTES, least);
    store_codes(type, block, codes);
}

/* Returns the code of the level of iq4_nl nearest to x; halfway between two, of the upper one. */
static int nearest_level(float x) {
    int code = 0;
    for (int i = 0; i < 15; i++) code += x >= (float)(KVC_LEVELS_IQ4_NL[i] + KVC_LEVELS_IQ4_NL[i + 1]) / 2;
    return code;
}

/* Stores a block of iq4_nl.  The scale is the one of least error, weighted by the elements' squares.  Products are
 * rounded before they are added, as in `scaled`. */
static void store_iq4_nl(uint8_t *block, const float x[KVC_QUANT_ELEMENTS]) {
    const float largest = first_largest(x);
    if (!(fabsf(largest) >= KVC_LEAST_LEVELLED)) {
        store_scale(block, 0);
        memset(block + KVC_SCALE_BYTES, KVC_LEVELS_OF_1, KVC_NIBBLE_BYTES);
        return;
    }
    const float unit = largest / KVC_LEVELS_IQ4_NL[0], id = 1 / unit; /* each rounded, on any machine */
    volatile float by_element, by_level;
    float sum_by_element = 0, sum_by_level = 0;
    int codes[KVC_QUANT_ELEMENTS];
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) {
        const float y = isnan(x[i]) ? 0 : x[i];
        codes[i] = nearest_level(id * y);
        const float level = KVC_LEVELS_IQ4_NL[codes[i]], square = y * y, weighted = square * level;
        by_element = weighted * y;
        by_level = weighted * level;
        sum_by_element += by_element;
        sum_by_level += by_level;
    }
    const float d = sum_by_element / sum_by_level;
    store_scale(block, isnan(d) ? NAN : d);
    store_codes(KVC_IQ4_NL, block, codes);
}

/* ---- elements of any type ---------------------------------------------------------------------------------------- */

static float load(int type, const void *row, int i) {
    if (type >= KVC_FLOAT_TYPES) return load_quantised(type, row, i);
    if (type == KVC_F32) {
        float x;
        memcpy(&x, (const char *)row + i * (int)sizeof x, sizeof x);
        return x;
    }
    uint16_t bits;
    memcpy(&bits, (const char *)row + i * (int)sizeof bits, sizeof bits);
    return type == KVC_F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

static void store(int type, void *row, int i, float x) {
    const uint16_t bits = type == KVC_F16 ? f16_from_f32(x) : bf16_from_f32(x);
    if (type == KVC_F32)
        memcpy((char *)row + i * (int)sizeof x, &x, sizeof x);
    else
        memcpy((char *)row + i * (int)sizeof bits, &bits, sizeof bits);
}

/* Stores elements [i, i + KVC_QUANT_ELEMENTS) of a row of a quantised type. */
static void store_block(int type, void *row, int i, const float x[KVC_QUANT_ELEMENTS]) {
    uint8_t *block = (uint8_t *)row + kvc_blocks_bytes(type, i);
    if (type == KVC_Q8_0) {
        const float d = largest(x, KVC_QUANT_ELEMENTS) / 127;
        store_scale(block, d);
        encode_int8(block + KVC_SCALE_BYTES, x, KVC_QUANT_ELEMENTS, reciprocal(d));
    } else if (type == KVC_IQ4_NL)
        store_iq4_nl(block, x);
    else if (KVC_TYPES[type].has_minimum)
        store_from_minimum(type, block, x);
    else
        store_symmetric(type, block, x);
}

static const void *row_at(const void *rows, int64_t stride, int64_t j) { return (const char *)rows + j * stride; }

/* ---- kernels over rows of any type ------------------------------------------------------------------------------- */

static void quantise(int from, int to, void *dst_row, const void *src_row, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        float x[KVC_QUANT_ELEMENTS];
        for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) x[i] = load(from, src_row, d + i);
        store_block(to, dst_row, d, x);
    }
}

static void convert(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                    int64_t num_rows, int dim) {
    for (int64_t r = 0; r < num_rows; r++) {
        const char *src_row = (const char *)src + r * src_stride;
        char *dst_row = (char *)dst + r * dst_stride;
        if (from == to)
            memcpy(dst_row, src_row, kvc_blocks_bytes(from, dim));
        else if (to >= KVC_FLOAT_TYPES)
            quantise(from, to, dst_row, src_row, dim);
        else
            for (int d = 0; d < dim; d++) store(to, dst_row, d, load(from, src_row, d));
    }
}

/* Returns what the scale is multiplied by for element i of a block. */
static int unpacked_at(int type, const uint8_t *block, int i) {
    if (type == KVC_INT8) return ((const int8_t *)block)[i];
    const int code = code_at(type, block, i), middle = KVC_TYPES[type].has_fifth_bits ? 16 : 8;
    return KVC_TYPES[type].num_levels ? kvc_levels(type)[code] : code - middle;
}

static void unpack(int type, void *dst, const void *rows, int64_t row_stride, const void *scales, int64_t scale_stride,
                   int64_t n, int dim, float *minima) {
    const int has_row_scale = KVC_TYPES[type].has_row_scale;
    const float middle = KVC_TYPES[type].has_fifth_bits ? 16 : 8;
    int8_t *to = dst;
    for (int64_t j = 0; j < n; j++) {
        const uint8_t *block = (const uint8_t *)rows + j * row_stride;
        for (int b = 0; b < dim / KVC_QUANT_ELEMENTS; b++, block += KVC_TYPES[type].bytes) {
            if (!has_row_scale || scales) {
                memcpy(to, has_row_scale ? (const uint8_t *)scales + j * scale_stride : block, KVC_SCALE_BYTES);
                to += KVC_SCALE_BYTES;
            }
            for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) *to++ = (int8_t)unpacked_at(type, block, i);
            if (KVC_TYPES[type].has_minimum)
                minima[b * KVC_TILE + j] = scale_of(block) * middle + scale_of(block + KVC_SCALE_BYTES);
        }
    }
}

/* Returns the code of the level nearest to x, of levels of which half are above 0. */
static int fitted_code(const int8_t *levels, int half, float x) {
    const float twice = fabsf(x) * 2;
    int magnitude = 0;
    for (int i = half; i + 1 < 2 * half; i++) magnitude += !(twice < (float)(levels[i] + levels[i + 1]));
    return x >= 0 ? half + magnitude : half - 1 - magnitude;
}

/* Encodes elements times `inverse` by the nearest levels.  Adds x * level and level * level to sums, for the scale. */
static void encode_fitted(int type, uint8_t *dst, const void *src, int n, float inverse, kvc_level_sums *sums) {
    const int8_t *const levels = kvc_levels(type);
    const int half = KVC_TYPES[type].num_levels / 2;
    for (int d = 0; d < n; d += KVC_QUANT_ELEMENTS) {
        uint8_t *const block = dst + kvc_blocks_bytes(type, d);
        int codes[KVC_QUANT_ELEMENTS];
        for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) {
            const float x = float_at(src, d + i);
            const volatile float in_units = x * inverse; /* volatile: rounded, as in the other kernels */
            codes[i] = fitted_code(levels, half, in_units);
            const float level = levels[codes[i]];
            const volatile float product = x * level;
            sums->products[i % KVC_LANES] += product;
            sums->squares[i % KVC_LANES] += level * level;
        }
        store_codes(type, block, codes);
        for (int i = 0; half > 8 && i < 8; i++) /* the upper two of six bits, in front */
            block[i] =
                (uint8_t)(codes[i] >> 4 | codes[i + 8] >> 4 << 2 | codes[i + 16] >> 4 << 4 | codes[i + 24] >> 4 << 6);
    }
}

static void encode(int type, void *dst, const void *x, int n, float unit, kvc_level_sums *sums) {
    if (KVC_TYPES[type].is_fitted)
        encode_fitted(type, dst, x, n, reciprocal(unit), sums);
    else
        encode_int8(dst, x, n, reciprocal(unit));
}

/* Takes all queries as f32, and prefetches nothing. */
static void score(int type, int q_type, float *scores, const float *q, int q_stride, int num_q, const void *rows,
                  int64_t row_stride, int n, int dim, kvc_ahead next) {
    (void)q_type, (void)next;
    for (int r = 0; r < num_q; r++) {
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int d = 0; d < dim; d++)
                sum += q[(ptrdiff_t)r * q_stride + d] * load(type, row_at(rows, row_stride, j), d);
            scores[r * KVC_SCORES + j] = sum;
        }
    }
}

static void accumulate(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                       kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {
    const int piece = type < KVC_FLOAT_TYPES ? n : KVC_PANEL;
    for (int r = 0; r < num_q; r++) {
        float *sum = acc + (ptrdiff_t)r * acc_stride;
        for (int d = 0; d < dim; d++) sum[d] *= factor[r];
        for (int j = 0; j < n; j++)
            for (int d = 0; d < dim; d++)
                sum[d] +=
                    weights[r * KVC_SCORES + j] * load(type, row_at(pieces[j / piece].rows, row_stride, j % piece), d);
    }
}

static void pack_keys(int type, float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    for (int d = 0; d < dim; d++)
        for (int j = 0; j < KVC_PANEL; j++)
            dst[d * KVC_PANEL + j] = j < n ? load(type, row_at(rows, row_stride, j), d) : 0;
}

static void pack_values(int type, float *dst, int dst_stride, const void *rows, int64_t row_stride, int n, int dim) {
    int padded = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    for (int j = 0; j < n; j++)
        for (int d = 0; d < padded; d++)
            dst[(ptrdiff_t)j * dst_stride + d] = d < dim ? load(type, row_at(rows, row_stride, j), d) : 0;
}

/* ---- kernels over f32 -------------------------------------------------------------------------------------------- */

/* Does what a kvc_softmax_fn does for one query row, and returns its factor. */
static float softmax_row(float *scores, int n, float *max, float *sum) {
    float old_max = *max, new_max = *max, new_sum = 0;
    for (int j = 0; j < n; j++) new_max = scores[j] > new_max ? scores[j] : new_max;
    for (int j = n; j < kvc_padded_rows(n); j++) scores[j] = 0;
    if (new_max == -INFINITY) { /* nothing is visible so far: exp(-inf - -inf) would be NaN */
        for (int j = 0; j < n; j++) {
            scores[j] = isnan(scores[j]) ? scores[j] : 0;
            *sum += scores[j];
        }
        return 1;
    }
    for (int j = 0; j < n; j++) {
        scores[j] = expf(scores[j] - new_max);
        new_sum += scores[j];
    }
    float factor = expf(old_max - new_max);
    *max = new_max;
    *sum = *sum * factor + new_sum;
    return factor;
}

static void times(float *rows, int num_q, int n, const void *by) {
    for (int r = 0; r < num_q; r++)
        for (int j = 0; j < kvc_padded_rows(n); j++) rows[r * KVC_SCORES + j] *= load(KVC_F16, by, j);
}

static void softmax_rows(float *scores, int num_q, int n, float *max, float *sum, float *factor, kvc_ahead next) {
    (void)next;
    for (int r = 0; r < num_q; r++) factor[r] = softmax_row(scores + r * KVC_SCORES, n, &max[r], &sum[r]);
}

static void matmul_rows(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                        int add, kvc_ahead next) {
    (void)next;
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            float sum = add ? c[(ptrdiff_t)i * ldc + j] : 0;
            for (int p = 0; p < k; p++) sum += a[(ptrdiff_t)i * lda + p] * b[(ptrdiff_t)p * ldb + j];
            c[(ptrdiff_t)i * ldc + j] = sum;
        }
    }
}

/* Changes the signs of elements whose number, modulo `order`, has an odd number of digits 3 in base 4. */
static void change_signs(float *x, int n, int order) {
    for (int i = 0; i < n; i++) {
        int is_odd = 0;
        for (int pairs = i % order; pairs; pairs >>= 2) is_odd ^= pairs % 4 == 3;
        if (is_odd) x[i] = -x[i];
    }
}

/* Multiplies by a Hadamard matrix: elements whose numbers differ in one bit become their sum and difference. */
static void hadamard(float *dst, const void *src, int n, kvc_mixing mixing) {
    const int order = mixing.order;
    const float scale = 1 / sqrtf((float)order);
    if (src != dst) memcpy(dst, src, (size_t)n * sizeof *dst);
    if (mixing.has_signs) change_signs(dst, n, order);
    for (int i = 0; i < n; i++) dst[i] *= scale;
    for (int half = 1; half < order; half *= 2)
        for (int i = 0; i < n; i++)
            if (!(i & half)) {
                const float x = dst[i], y = dst[i + half];
                dst[i] = x + y;
                dst[i + half] = x - y;
            }
    if (mixing.has_signs) change_signs(dst, n, order);
}

static void scale_rows(float *q, int q_stride, int num_q, int dim, float by) {
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < dim; d++) q[(ptrdiff_t)r * q_stride + d] *= by;
}

/* Queries stay floats, whatever the type of rows. */
static void prepare(int type, float *q, int q_stride, int num_q, int dim, float scale) {
    (void)type;
    scale_rows(q, q_stride, num_q, dim, scale);
}

#include "kernels/scalar_select.h"
#include "kernels/scalar_bytes.h"

/* ---- the kernels, by name ---------------------------------------------------------------------------------------- */

#define TARGET
#include "kernels/instantiate.h"

DEFINE_CONVERT(kvc_convert_scalar)
DEFINE_UNPACK(kvc_unpack_scalar)
DEFINE_LARGEST(kvc_largest_scalar)
DEFINE_TIMES(kvc_times_scalar)
DEFINE_SCORE(kvc_score_int8_scalar, KVC_INT8)
DEFINE_ACCUMULATE(kvc_accumulate_int8_scalar, KVC_INT8)
DEFINE_ENCODE(kvc_encode_scalar)
DEFINE_ROUND(kvc_round_scalar)

DEFINE_SCORE(kvc_score_f32_scalar, KVC_F32)
DEFINE_SCORE(kvc_score_f16_scalar, KVC_F16)
DEFINE_SCORE(kvc_score_bf16_scalar, KVC_BF16)
DEFINE_ACCUMULATE(kvc_accumulate_f32_scalar, KVC_F32)
DEFINE_ACCUMULATE(kvc_accumulate_f16_scalar, KVC_F16)
DEFINE_ACCUMULATE(kvc_accumulate_bf16_scalar, KVC_BF16)

DEFINE_PACK_KEYS(kvc_pack_keys_f32_scalar, KVC_F32)
DEFINE_PACK_KEYS(kvc_pack_keys_f16_scalar, KVC_F16)
DEFINE_PACK_KEYS(kvc_pack_keys_bf16_scalar, KVC_BF16)
DEFINE_PACK_VALUES(kvc_pack_values_f32_scalar, KVC_F32)
DEFINE_PACK_VALUES(kvc_pack_values_f16_scalar, KVC_F16)
DEFINE_PACK_VALUES(kvc_pack_values_bf16_scalar, KVC_BF16)

DEFINE_SCALE(kvc_scale_scalar)
DEFINE_SOFTMAX(kvc_softmax_scalar)
DEFINE_MATMUL(kvc_matmul_scalar)
DEFINE_HADAMARD(kvc_hadamard_scalar)
DEFINE_RANK(kvc_rank_f32_scalar, KVC_F32)
DEFINE_RANK(kvc_rank_int8_scalar, KVC_INT8)
DEFINE_MAKE_SKETCHES(kvc_make_sketches_scalar)
DEFINE_WEIGH_PIECES(kvc_weigh_pieces_scalar)
DEFINE_SKETCH(kvc_sketch_scalar)

DEFINE_PREPARE(kvc_prepare_q8_0_scalar, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_scalar, KVC_Q4_0)
DEFINE_SCORE(kvc_score_q8_0_scalar, KVC_Q8_0)
DEFINE_SCORE(kvc_score_q4_0_scalar, KVC_Q4_0)
DEFINE_ACCUMULATE(kvc_accumulate_q8_0_scalar, KVC_Q8_0)
DEFINE_ACCUMULATE(kvc_accumulate_q4_0_scalar, KVC_Q4_0)

const kvc_kernels kvc_kernels_scalar = {
    .name = "scalar",
    .convert = kvc_convert_scalar,
    .unpack = kvc_unpack_scalar,
    .largest = kvc_largest_scalar,
    .encode = kvc_encode_scalar,
    .round = kvc_round_scalar,
    .score[KVC_F32] = {kvc_scale_scalar, kvc_score_f32_scalar},
    .score[KVC_F16] = {kvc_scale_scalar, kvc_score_f16_scalar},
    .score[KVC_BF16] = {kvc_scale_scalar, kvc_score_bf16_scalar},
    .accumulate[KVC_F32] = kvc_accumulate_f32_scalar,
    .accumulate[KVC_F16] = kvc_accumulate_f16_scalar,
    .accumulate[KVC_BF16] = kvc_accumulate_bf16_scalar,
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_scalar, kvc_score_q8_0_scalar},
    .score[KVC_Q4_0] = {kvc_prepare_q4_0_scalar, kvc_score_q4_0_scalar},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_scalar,
    .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_scalar,
    .score[KVC_INT8] = {kvc_scale_scalar, kvc_score_int8_scalar},
    .accumulate[KVC_INT8] = kvc_accumulate_int8_scalar,
    .tiler[KVC_F32] =
        KVC_FLOAT_TILER(kvc_scale_scalar, kvc_pack_keys_f32_scalar, kvc_pack_values_f32_scalar, kvc_matmul_scalar),
    .tiler[KVC_F16] =
        KVC_FLOAT_TILER(kvc_scale_scalar, kvc_pack_keys_f16_scalar, kvc_pack_values_f16_scalar, kvc_matmul_scalar),
    .tiler[KVC_BF16] =
        KVC_FLOAT_TILER(kvc_scale_scalar, kvc_pack_keys_bf16_scalar, kvc_pack_values_bf16_scalar, kvc_matmul_scalar),
    .bytes = {pack_bytes, pack_bytes, score_bytes, weigh_bytes, sum_bytes, KVC_BLOCK_QUERIES},
    .matmul = kvc_matmul_scalar,
    .softmax = kvc_softmax_scalar,
    .times = kvc_times_scalar,
    .scale = kvc_scale_scalar,
    .hadamard = kvc_hadamard_scalar,
    .rank[KVC_F32] = kvc_rank_f32_scalar,
    .rank[KVC_INT8] = kvc_rank_int8_scalar,
    .make_sketches = kvc_make_sketches_scalar,
    .sketch = kvc_sketch_scalar,
    .weigh_pieces = kvc_weigh_pieces_scalar,
};
