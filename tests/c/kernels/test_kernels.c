/* Every kernel of every table this machine can run, against straightforward arithmetic in double. */
#define _DEFAULT_SOURCE /* guarded.h */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"
#include "base/dtype.h"
#ifdef KVC_HAVE_AMX
#include <immintrin.h>
#endif
#include "support/guarded.h"
#include "support/isas.h"
#include "kvcache.h"
#include "support/test.h"

enum { MAX_DIM = 576, MAX_Q = 16, NUM_DIMS = 13, TYPES = KVC_INT8, UNTOUCHED = 12345 };

static const int dims[NUM_DIMS] = {1, 7, 8, 31, 32, 40, 64, 80, 96, 128, 160, 256, MAX_DIM};

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- what rows hold ---------------------------------------------------------------------------------------------- */

static char *guarded_end; /* end of the memory of rows; reading beyond it faults */

/* The largest elements of rows and of their factors.  Over a tile, rows grow by 2^growth, and factors shrink. */
typedef struct sizes {
    float rows, factors;
    int growth;
} sizes;

static const sizes usual = {1, 1, 0}, uneven = {1, 1, 14};

static float growth_at(sizes largest, int j) { return ldexpf(1, largest.growth * j / KVC_TILE); }

/* Rows hold only denormals of their type, or have denormal scales.  Denormal floats are multiplied by numbers so large
 * that products are not denormal, and can be compared. */
static sizes denormal(int type) {
    static const sizes all[] = {[KVC_F32] = {0x1p-127f, 0x1p64f, 0},
                                [KVC_F16] = {0x1p-15f, 1, 0},
                                [KVC_BF16] = {0x1p-127f, 0x1p64f, 0},
                                [KVC_Q8_0] = {0x1p-13f, 1, 0}};
    return all[type < KVC_Q8_0 ? type : KVC_Q8_0];
}

/* The fewest bytes, not 0, that may lie between rows: an element, or a byte. */
static int gap_of(int type) { return type < KVC_FLOAT_TYPES ? (int)kvc_row_bytes(type, 1) : 1; }

/* The levels above 0 that the header says. */
static const int8_t int4_levels[8] = {5, 16, 28, 40, 54, 70, 90, 119};
static const int8_t int6_levels[32] = {1,  3,  6,  9,  12, 15, 18, 21, 24, 27, 30, 33, 36,  39,  42,  45,
                                       48, 52, 56, 60, 64, 68, 72, 76, 81, 86, 91, 97, 103, 110, 118, 127};

/* The factor of the scale in element i of a row. */
static int scaled_at(int type, const uint8_t *row, int i) {
    const uint8_t *block = row + i / KVC_QUANT_ELEMENTS * (int)(kvc_row_bytes(type, KVC_QUANT_ELEMENTS) - 2);
    const int e = i % KVC_QUANT_ELEMENTS;
    if (type == KVC_INT8) return (int8_t)block[e];
    const uint8_t *nibbles = type == KVC_INT6 ? block + 8 : block;
    int code = nibbles[e % 16] >> (e < 16 ? 0 : 4) & 15, half = 8;
    if (type == KVC_INT6) half = 32, code += (block[e % 8] >> 2 * (e / 8) & 3) << 4;
    const int8_t *levels = half == 32 ? int6_levels : int4_levels;
    return code < half ? -levels[half - 1 - code] : levels[code - half];
}

/* A tile of random rows of a type, and their values.  The last row ends at the guard page, or the first one if the
 * stride is negative.  Gaps between rows leave most of them aligned no more than they must be. */
typedef struct tile {
    const char *rows;
    int64_t stride;
    double values[KVC_TILE][MAX_DIM];
} tile;

static tile *tile_new(int type, int n, int dim, sizes largest) {
    static tile t;
    const int is_scaled = type >= KVC_INT8; /* rows of elements alone, which may be any */
    const size_t row_bytes = kvc_row_bytes(type, dim) - (is_scaled ? 2 : 0);
    const int sign = random_int(0, 2) ? 1 : -1;
    t.stride = sign * (int64_t)(row_bytes + (size_t)(random_int(0, 3) * gap_of(type)));
    t.rows = guarded_end - row_bytes - (sign > 0 ? (n - 1) * t.stride : 0);
    for (int j = 0; j < n; j++) {
        float row[MAX_DIM];
        char *stored = guarded_end - row_bytes - (sign > 0 ? n - 1 - j : j) * sign * t.stride;
        const float size = largest.rows * growth_at(largest, j);
        for (size_t i = 0; is_scaled && i < row_bytes; i++) stored[i] = (char)random_int(-128, 128);
        for (int d = 0; is_scaled && d < dim; d++) t.values[j][d] = scaled_at(type, (const uint8_t *)stored, d);
        if (is_scaled) continue;
        for (int d = 0; d < dim; d++)
            row[d] = size * (random_int(0, 50) ? random_float() : random_float() * 0x1p-20f); /* some much smaller */
        kvc_kernels_scalar.convert(KVC_F32, type, stored, 0, row, 0, 1, dim);
        kvc_kernels_scalar.convert(type, KVC_F32, row, 0, stored, 0, 1, dim);
        for (int d = 0; d < dim; d++) t.values[j][d] = row[d];
    }
    return &t;
}

static void fill_to(float *x, size_t n, float size) {
    for (size_t i = 0; i < n; i++) x[i] = size * random_float();
}

static void fill(float *x, size_t n) { fill_to(x, n, 1); }

/* Whether x is y, except for the rounding of a sum of n terms whose magnitudes add up to `size`. */
static int is_close(double x, double y, double size, int n) {
    return fabs(x - y) <= size * (n + 2) * 0.5 * FLT_EPSILON;
}

static const kvc_ahead nothing_ahead = {NULL, 0, 2};

static kvc_ahead ahead_of(const tile *t, int type, int dim) {
    return (kvc_ahead){t ? t->rows : NULL, t ? (int32_t)kvc_row_bytes(type, dim) * random_int(1, 99) : 0,
                       random_int(1, 3)};
}

/* Sums weighted rows.  Pieces of quantised ones lie apart in half of all cases. */
static void accumulate(const kvc_kernels *kernels, int type, float *acc, int acc_stride, const float *factor,
                       const float *weights, int num_q, const char *rows, int64_t stride, int n, int dim,
                       kvc_ahead next) {
    enum { PIECES = KVC_TILE / KVC_PANEL, MOST_BYTES = 700 };
    static char copies[PIECES][KVC_PANEL * MOST_BYTES];
    const int is_quantised = type >= KVC_FLOAT_TYPES, is_apart = is_quantised && random_int(0, 2);
    const size_t row_bytes = kvc_row_bytes(type, dim) - (type >= KVC_INT8 ? 2 : 0);
    kvc_value_piece pieces[PIECES] = {{rows, next}};
    CHECK(!is_quantised || llabs(stride) <= MOST_BYTES);
    for (int j = 0; is_quantised && j < n; j++) {
        const int piece = j / KVC_PANEL, last = (n < (piece + 1) * KVC_PANEL ? n : (piece + 1) * KVC_PANEL) - 1;
        char *copy = copies[PIECES - 1 - piece] + (stride < 0 ? j - last : j % KVC_PANEL) * stride;
        if (is_apart) memcpy(copy, rows + j * stride, row_bytes);
        if (j % KVC_PANEL == 0) pieces[piece] = (kvc_value_piece){is_apart ? copy : rows + j * stride, next};
    }
    kernels->accumulate[type](acc, acc_stride, factor, weights, num_q, pieces, stride, n, dim);
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

/* Converts n elements, as one row, with both tables and compares bit by bit. */
static void check_same(const kvc_kernels *kernels, int from, int to, const void *src, int n) {
    static char ours[1 << 19], plain[1 << 19];
    int elements = kvc_type_elements(to);
    size_t size = kvc_row_bytes(to, elements);
    kernels->convert(from, to, ours, 0, src, 0, 1, n);
    kvc_kernels_scalar.convert(from, to, plain, 0, src, 0, 1, n);
    for (int i = 0; i < n / elements; i++)
        CHECKF(!memcmp(ours + (size_t)i * size, plain + (size_t)i * size, size), "%s: %s to %s, element %d",
               kernels->name, kvc_type_name(from), kvc_type_name(to), i * elements);
}

/* The value of the 16 bits of an f16 or bf16, by the definition of the format. */
static double decoded(int type, uint16_t bits) {
    int fraction_bits = type == KVC_F16 ? 10 : 7, bias = type == KVC_F16 ? 15 : 127;
    int fraction = bits & ((1 << fraction_bits) - 1), exponent = (bits & 0x7fff) >> fraction_bits;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 2 * bias + 1) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

static void test_16_bits(const kvc_kernels *kernels, int type) {
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    kernels->convert(type, KVC_F32, wide, 0, all, 0, 1, 65536);
    kernels->convert(KVC_F32, type, back, 0, wide, 0, 1, 65536);
    for (int i = 0; i < 65536; i++) {
        double x = decoded(type, all[i]);
        uint16_t quiet = type == KVC_F16 ? 0x200 : 0x40;
        CHECKF(isnan(x) ? isnan(wide[i]) : x == wide[i], "%s %s %04x", kernels->name, kvc_type_name(type), (unsigned)i);
        CHECKF(!signbit(wide[i]) == (i < 0x8000), "%s %s %04x", kernels->name, kvc_type_name(type), (unsigned)i);
        CHECKF(back[i] == (isnan(x) ? all[i] | quiet : all[i]), "%s %s %04x came back as %04x", kernels->name,
               kvc_type_name(type), (unsigned)i, (unsigned)back[i]);
    }
    for (int to = 0; to < TYPES; to++) check_same(kernels, type, to, all, 65536);
}

/* Every value of the type is hit, as is what lies halfway between it and the next, and the floats beside these. */
static void test_rounding(const kvc_kernels *kernels, int type) {
    static float x[4][65536];
    static uint16_t y[4][65536];
    uint16_t infinity = type == KVC_F16 ? 0x7c00 : 0x7f80;
    for (int i = 0; i < infinity; i++) {
        double low = decoded(type, (uint16_t)i), high = decoded(type, (uint16_t)(i + 1));
        float half = (float)(isinf(high) ? low + (low - decoded(type, (uint16_t)(i - 1))) / 2 : (low + high) / 2);
        x[0][i] = (float)low;
        x[1][i] = nextafterf(half, 0);
        x[2][i] = half;
        x[3][i] = nextafterf(half, INFINITY);
    }
    kernels->convert(KVC_F32, type, y, 0, x, 0, 1, 4 * 65536);
    for (int i = 0; i < infinity; i++) {
        CHECKF(y[0][i] == i && y[1][i] == i && y[2][i] == i + i % 2 && y[3][i] == i + 1, "%s %s %04x: %04x %04x %04x",
               kernels->name, kvc_type_name(type), (unsigned)i, (unsigned)y[1][i], (unsigned)y[2][i],
               (unsigned)y[3][i]);
    }
}

static void test_convert_bits(const kvc_kernels *kernels) {
    static float x[1 << 16];
    for (int pass = 0; pass < (is_full() ? 32 : 2); pass++) {
        for (int i = 0; i < 1 << 16; i++) {
            uint32_t bits = (uint32_t)random_bits();
            if (pass % 2) /* within the range of f16, and a little beyond */
                bits = (bits & 0x807fffff) | (uint32_t)random_int(127 - 27, 127 + 18) << 23;
            x[i] = float_of(bits);
        }
        for (int to = KVC_F16; to < TYPES; to++) check_same(kernels, KVC_F32, to, x, 1 << 16);
    }
    int n = 0;
    static const uint32_t edges[] = {0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x33000000, 0x33000001,
                                     0x387fffff, 0x38800000, 0x477fefff, 0x477ff000, 0x47800000, 0x7f7fffff,
                                     0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        x[n++] = float_of(edges[i]);
        x[n++] = float_of(edges[i] | 0x80000000);
    }
    check_same(kernels, KVC_F32, KVC_F16, x, n);
    check_same(kernels, KVC_F32, KVC_BF16, x, n);
}

/* Rows with gaps on either side, or without; what lies between destination rows stays. */
static void test_convert_rows(const kvc_kernels *kernels, int from, int to, int dim) {
    enum { ROWS = 3 };
    static char dst[ROWS * (MAX_DIM + 1) * 4], plain[sizeof dst];
    const int64_t src_bytes = (int64_t)kvc_row_bytes(from, dim), dst_bytes = (int64_t)kvc_row_bytes(to, dim);
    for (int gaps = 0; gaps < 4; gaps++) {
        int64_t src_stride = src_bytes + (gaps & 1 ? gap_of(from) : 0);
        int64_t dst_stride = dst_bytes + (gaps & 2 ? gap_of(to) : 0);
        char *src = guarded_end - (ROWS - 1) * src_stride - src_bytes;
        for (int r = 0; r < ROWS; r++) {
            float x[MAX_DIM];
            fill(x, (size_t)dim);
            kvc_kernels_scalar.convert(KVC_F32, from, src + r * src_stride, 0, x, 0, 1, dim);
        }
        memset(dst, 7, sizeof dst);
        memset(plain, 7, sizeof plain);
        kernels->convert(from, to, dst, dst_stride, src, src_stride, ROWS, dim);
        kvc_kernels_scalar.convert(from, to, plain, dst_stride, src, src_stride, ROWS, dim);
        CHECKF(!memcmp(dst, plain, sizeof dst), "%s: %s to %s, dim %d, gaps %d", kernels->name, kvc_type_name(from),
               kvc_type_name(to), dim, gaps);
    }
}

/* ---- quantised rows ---------------------------------------------------------------------------------------------- */

enum { BLOCK = 32, BLOCKS = 8, QUANT_DIM = BLOCK * BLOCKS, LARGEST_BLOCK = 34 };

/* The f16 nearest to x; NaN without a sign. */
static uint16_t nearest_f16(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (!isfinite(x)) return isnan(x) ? 0x7e00 : (uint16_t)(sign | 0x7c00);
    int exponent = x != 0 && ilogb(x) > -14 ? ilogb(x) : -14;
    double bits = (exponent + 14) * 1024 + nearbyint(ldexp(fabs(x), 10 - exponent));
    return (uint16_t)(sign | (bits < 0x7c00 ? (int)bits : 0x7c00));
}

/* The types as the header describes them: bytes before the codes, bits of a code, codes that x is off by, minima. */
static int has_minimum(int type) { return type == KVC_Q4_1 || type == KVC_Q5_1; }

static int bits_of_code(int type) { return type == KVC_Q8_0 ? 8 : type == KVC_Q5_0 || type == KVC_Q5_1 ? 5 : 4; }

static const int levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* The value of code i of a block, without the scale and the minimum. */
static int code_at(int type, const uint8_t *block, int i) {
    const uint8_t *at = block + 2 + 2 * has_minimum(type);
    if (type == KVC_Q8_0) return at[i] < 128 ? at[i] : at[i] - 256;
    uint32_t fifth = 0;
    if (bits_of_code(type) == 5) {
        memcpy(&fifth, at, sizeof fifth);
        at += sizeof fifth;
    }
    int code = (at[i % 16] >> (i < 16 ? 0 : 4) & 15) + (int)(fifth >> i & 1) * 16;
    return type == KVC_IQ4_NL ? levels[code] : has_minimum(type) ? code : code - (1 << bits_of_code(type)) / 2;
}

static void store_bits(int type, uint8_t *block, float d, float minimum, const int *codes) {
    uint16_t halves[2] = {nearest_f16(d), nearest_f16(minimum)};
    uint32_t fifth = 0;
    uint8_t *at = block + 2 + 2 * has_minimum(type);
    memset(block, 0, LARGEST_BLOCK);
    memcpy(block, halves, (size_t)(at - block));
    for (int i = 0; i < BLOCK; i++) fifth |= (uint32_t)(codes[i] >> 4 & 1) << i;
    if (bits_of_code(type) == 5) {
        memcpy(at, &fifth, sizeof fifth);
        at += sizeof fifth;
    }
    for (int i = 0; i < BLOCK; i++)
        if (type == KVC_Q8_0)
            at[i] = (uint8_t)codes[i];
        else
            at[i % 16] |= (uint8_t)((codes[i] & 15) << (i < 16 ? 0 : 4));
}

static int nearest_level(float x) {
    int nearest = 0;
    for (int l = 1; l < 16; l++)
        if (fabs(levels[l] - (double)x) <= fabs(levels[nearest] - (double)x)) nearest = l;
    return nearest;
}

/* Encodes 32 finite elements as iq4_nl. */
static void quantised_to_levels(uint8_t *block, const float *x, float largest) {
    const float d = largest / -127, id = 1 / d; /* each rounded */
    int codes[BLOCK];
    float upper = 0, lower = 0;
    for (int i = 0; i < BLOCK; i++) {
        volatile float w = x[i] * x[i]; /* each product rounded, whatever the compiler would like to do */
        codes[i] = fabsf(largest) < 1e-15f ? 8 : nearest_level(id * x[i]);
        volatile float weighted = w * (float)levels[codes[i]];
        volatile float by_element = weighted * x[i], by_level = weighted * (float)levels[codes[i]];
        upper += by_element;
        lower += by_level;
    }
    store_bits(KVC_IQ4_NL, block, fabsf(largest) < 1e-15f ? 0 : upper / lower, 0, codes);
}

/* Encodes 32 finite elements, by the definition of the types. */
static void quantised(int type, uint8_t block[LARGEST_BLOCK], const float *x) {
    const int half = type == KVC_Q8_0 ? 127 : 1 << (bits_of_code(type) - 1);
    int codes[BLOCK];
    float largest = 0, least = x[0], most = x[0];
    for (int i = 0; i < BLOCK; i++) {
        if (fabsf(x[i]) > fabsf(largest)) largest = x[i];
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    if (type == KVC_IQ4_NL) {
        quantised_to_levels(block, x, largest);
        return;
    }
    const float range = most - least; /* rounded */
    float d = type == KVC_Q8_0    ? fabsf(largest) / 127
              : has_minimum(type) ? range / (float)(2 * half - 1)
                                  : largest / (float)-half;
    float id = fabsf(d) > 0x1p-128f ? 1 / d : 0; /* else the quotient would be infinite */
    const int is_tiny = d != 0 && id == 0 && isfinite(d);
    for (int i = 0; i < BLOCK; i++) {
        const float above = x[i] - least;
        volatile float product = (has_minimum(type) ? above : x[i]) * id;           /* rounded */
        const float sum = product + ((has_minimum(type) ? 0 : (float)half) + 0.5f); /* rounded, also by i386 */
        if (type == KVC_Q8_0)
            codes[i] = (int)((double)product + (product < 0 ? -0.5 : 0.5)); /* MinGW's roundf may be off by 1 */
        else if (has_minimum(type))
            codes[i] = isnan(product) ? 0 : (int)fmin(floor((double)sum), 2 * half - 1);
        else
            codes[i] = is_tiny ? 0 : (int)fmin(floor((double)sum), 2 * half - 1);
    }
    store_bits(type, block, d, least, codes);
}

/* Blocks of 32 finite floats.  d becomes a power of two where `top` and a sign times one is their largest element. */
static float block_random(int i, float top) {
    (void)i, (void)top;
    return random_float();
}

static float block_zero(int i, float top) {
    (void)i, (void)top;
    return random_int(0, 2) ? 0.0f : -0.0f;
}

static float block_same(int i, float top) {
    (void)i;
    return top;
}

static float block_magnitude(int i, float top) /* many of the largest magnitude, of either sign */
{
    return random_int(0, 2) ? block_random(i, top) : random_int(0, 2) ? 1 : -1;
}

static float block_half(int i, float top) /* x / d is halfway between integers, or one float beside that */
{
    if (i == 5) return random_int(0, 2) ? top : -top;
    float x = (float)random_int(-2 * (int)top, 2 * (int)top) / 2;
    return random_int(0, 3) ? x : nextafterf(x, random_int(0, 2) ? top : -top);
}

static float block_one(int i, float top) { return i == 17 ? block_random(i, top) : 0; }

static float block_wide(int i, float top) {
    (void)i, (void)top;
    return ldexpf(random_float(), random_int(-30, 1));
}

static float element(int i, float top, float (*draw)(int, float), float scale) {
    float x = draw(i, top) * scale;
    return fabsf(x) <= FLT_MAX ? x : copysignf(FLT_MAX, x);
}

/* Rows of every kind of block, of sizes from where d is 0 as a float to where it is infinite as an f16. */
static void test_quantise(const kvc_kernels *kernels, int type) {
    static float (*const draws[])(int, float) = {block_random, block_zero, block_same, block_magnitude,
                                                 block_half,   block_one,  block_wide};
    static const float largest[KVC_FLOAT_TYPES] = {FLT_MAX, 65504, 0x1.fep127f};
    enum { DRAWS = sizeof draws / sizeof *draws };
    size_t size = kvc_row_bytes(type, BLOCK);
    float top = type == KVC_Q8_0 ? 127 : 8;
    for (int pass = 0; pass < 300 * DRAWS; pass++) {
        float all[QUANT_DIM], x[QUANT_DIM], stored[QUANT_DIM];
        uint8_t got[BLOCKS * LARGEST_BLOCK], right[LARGEST_BLOCK];
        float scale = ldexpf(1, pass / DRAWS % 2 ? 0 : pass / DRAWS - 150);
        for (int i = 0; i < QUANT_DIM; i++) all[i] = element(i % BLOCK, top, draws[pass % DRAWS], scale);
        for (int from = KVC_F32; from < KVC_FLOAT_TYPES; from++) {
            for (int i = 0; i < QUANT_DIM; i++) x[i] = fmaxf(fminf(all[i], largest[from]), -largest[from]);
            kvc_kernels_scalar.convert(KVC_F32, from, stored, 0, x, 0, 1, QUANT_DIM);
            kvc_kernels_scalar.convert(from, KVC_F32, x, 0, stored, 0, 1, QUANT_DIM);
            kernels->convert(from, type, got, 0, stored, 0, 1, QUANT_DIM);
            for (int b = 0; b < BLOCKS; b++) {
                quantised(type, right, x + b * BLOCK);
                CHECKF(!memcmp(got + (size_t)b * size, right, size), "%s: %s to %s, draw %d times %g", kernels->name,
                       kvc_type_name(from), kvc_type_name(type), pass % DRAWS, (double)scale);
            }
        }
    }
}

/* NaN is stored as 0 and changes nothing else; what shares a block with an infinity becomes NaN. */
static void test_not_finite(const kvc_kernels *kernels, int type) {
    for (int i = 0; i < BLOCK; i++) {
        float x[BLOCK], back[BLOCK];
        uint8_t with_0[LARGEST_BLOCK], with_nan[LARGEST_BLOCK], with_inf[LARGEST_BLOCK];
        fill(x, BLOCK);
        x[i] = 0;
        kernels->convert(KVC_F32, type, with_0, 0, x, 0, 1, BLOCK);
        x[i] = i % 2 ? NAN : -NAN;
        kernels->convert(KVC_F32, type, with_nan, 0, x, 0, 1, BLOCK);
        CHECKF(!memcmp(with_0, with_nan, kvc_row_bytes(type, BLOCK)), "%s %s, element %d", kernels->name,
               kvc_type_name(type), i);
        x[(i + 9) % BLOCK] = i % 3 ? INFINITY : -INFINITY;
        kernels->convert(KVC_F32, type, with_inf, 0, x, 0, 1, BLOCK);
        kernels->convert(type, KVC_F32, back, 0, with_inf, 0, 1, BLOCK);
        check_same(kernels, KVC_F32, type, x, BLOCK);
        for (int j = 0; j < BLOCK; j++)
            CHECKF(isnan(back[j]), "%s %s, element %d: %g", kernels->name, kvc_type_name(type), j, (double)back[j]);
    }
    float nothing[BLOCK];
    for (int i = 0; i < BLOCK; i++) nothing[i] = NAN;
    check_same(kernels, KVC_F32, type, nothing, BLOCK);
}

/* Every scale there is, with random bytes, decoded to every type. */
static void test_dequantise(const kvc_kernels *kernels, int type) {
    for (int scale = 0; scale < 65536; scale++) {
        uint8_t block[LARGEST_BLOCK];
        uint16_t bits = (uint16_t)scale;
        float x[BLOCK];
        for (int i = 2; i < LARGEST_BLOCK; i++) block[i] = (uint8_t)random_int(0, 256);
        memcpy(block, &bits, sizeof bits);
        if (has_minimum(type) && (bits & 0x7c00) == 0x7c00) /* of two NaN, compilers choose which one a sum is */
            block[3] &= 0xbf;                               /* makes the minimum finite */
        kernels->convert(type, KVC_F32, x, 0, block, 0, 1, BLOCK);
        for (int i = 0; i < BLOCK; i++) {
            const int q = code_at(type, block, i);
            uint16_t minimum;
            memcpy(&minimum, block + 2, sizeof minimum);
            const float right =
                (float)(decoded(KVC_F16, bits) * q + (has_minimum(type) ? decoded(KVC_F16, minimum) : 0));
            CHECKF(isnan(right) ? isnan(x[i]) : x[i] == right, "%s %s: scale %04x times %d is %g, not %g",
                   kernels->name, kvc_type_name(type), (unsigned)scale, q, (double)x[i], (double)right);
        }
        check_same(kernels, type, KVC_F16, block, BLOCK);
        check_same(kernels, type, KVC_BF16, block, BLOCK);
    }
}

/* Rows are unpacked to rows of q8_0 that decode to the same elements without minima; nothing else is written. */
static void test_unpack(const kvc_kernels *kernels, int type, int dim) {
    enum { MAX_BLOCKS = MAX_DIM / BLOCK };
    static uint8_t rows[KVC_TILE * (MAX_BLOCKS + 1) * LARGEST_BLOCK], got[KVC_TILE * MAX_BLOCKS * 34 + 1];
    const int n = random_int(1, KVC_TILE + 1), gap = random_int(0, 3);
    const int64_t row_bytes = (int64_t)kvc_row_bytes(type, dim), q8_bytes = (int64_t)kvc_row_bytes(KVC_Q8_0, dim);
    float minima[MAX_BLOCKS * KVC_TILE], x[MAX_DIM], y[MAX_DIM], elements[MAX_DIM];
    for (int j = 0; j < n; j++) {
        fill(elements, (size_t)dim);
        kvc_kernels_scalar.convert(KVC_F32, type, rows + j * (row_bytes + gap), 0, elements, 0, 1, dim);
    }
    fill(minima, MAX_BLOCKS * KVC_TILE);
    memset(got, 7, sizeof got);
    kernels->unpack(type, got, rows, row_bytes + gap, NULL, 0, n, dim, minima);
    CHECK(got[n * q8_bytes] == 7);
    for (int j = 0; j < n; j++) {
        kvc_kernels_scalar.convert(type, KVC_F32, x, 0, rows + j * (row_bytes + gap), 0, 1, dim);
        kvc_kernels_scalar.convert(KVC_Q8_0, KVC_F32, y, 0, got + j * q8_bytes, 0, 1, dim);
        for (int d = 0; d < dim; d++) {
            const double minimum = has_minimum(type) ? minima[d / BLOCK * KVC_TILE + j] : 0;
            const double size = has_minimum(type) ? fabs(minimum) + fabs(x[d]) : 0;
            CHECKF(fabs(y[d] + minimum - x[d]) <= size * FLT_EPSILON, "%s %s dim %d, row %d, element %d: %g, not %g",
                   kernels->name, kvc_type_name(type), dim, j, d, y[d] + minimum, (double)x[d]);
        }
    }
}

/* ---- rows with a scale of their own ------------------------------------------------------------------------------ */

static float inverse_of(float d) { return d != 0 && isfinite(1 / d) ? 1 / d : 0; }

/* Whether x, in units, became what the header says. */
static int is_encoded(int type, float x, int got) {
    if (type == KVC_INT8) return got == (isnan(x) ? 0 : (int)roundf(x));
    const int8_t *levels = type == KVC_INT6 ? int6_levels : int4_levels;
    int nearest = 0;
    for (int i = 1; i < (type == KVC_INT6 ? 32 : 8); i++)
        if (isnan(x) || fabsf(x) * 2 >= (float)(levels[i - 1] + levels[i])) nearest = i;
    return got == (x >= 0 ? levels[nearest] : -levels[nearest]);
}

/* A row becomes the elements that the header says, at any address; nothing else is
 * written.  not_finite: an element of the row; 0: none. */
static void check_encode(const kvc_kernels *kernels, int type, int dim, double size, float not_finite) {
    static char source[MAX_DIM * sizeof(float) + 1];
    float x[MAX_DIM], largest = 0;
    uint8_t got[MAX_DIM + 1];
    kvc_level_sums found = {{0}, {0}}, right = {{0}, {0}};
    const int bytes = (int)kvc_row_bytes(type, dim) - 2;
    fill(x, (size_t)dim);
    for (int d = 0; d < dim; d++) x[d] = (float)(x[d] * size);
    if (not_finite != 0) x[random_int(0, dim)] = not_finite;
    for (int d = 0; d < dim; d++)
        if (fabsf(x[d]) > largest) largest = fabsf(x[d]);
    memcpy(source + 1, x, (size_t)dim * sizeof *x);
    memset(got, 7, sizeof got);
    CHECKF(kernels->largest(source + 1, dim) == largest, "%s dim %d: %g, not %g", kernels->name, dim,
           (double)kernels->largest(source + 1, dim), (double)largest);
    const float unit = largest / 127, inverse = inverse_of(unit);
    kernels->encode(type, got, source + 1, dim, unit, &found);
    CHECK(got[bytes] == 7);
    for (int i = 0; i < dim; i++) {
        const volatile float scaled = x[i] * inverse;
        const int level = scaled_at(type, got, i);
        CHECKF(is_encoded(type, scaled, level), "%s %s dim %d, size %g: element %d, %g, is %d", kernels->name,
               kvc_type_name(type), dim, size, i, (double)x[i], level);
        const volatile float product = x[i] * (float)level;
        right.products[i % KVC_LANES] += type == KVC_INT8 ? 0 : product;
        right.squares[i % KVC_LANES] += type == KVC_INT8 ? 0 : (float)(level * level);
    }
    CHECK(!memcmp(found.squares, right.squares, sizeof right.squares));
    for (int i = 0; i < KVC_LANES; i++) CHECK(found.products[i] == right.products[i] || isnan(right.products[i]));
}

/* Rows whose scales stand apart are unpacked to q8_0 with these in each block, or to int8. */
static void check_unpack_scaled(const kvc_kernels *kernels, int type, int dim, int has_scales) {
    enum { MAX_BLOCKS = MAX_DIM / BLOCK };
    static uint8_t rows[KVC_TILE * (MAX_DIM + 3)], got[KVC_TILE * MAX_BLOCKS * 34 + 1], scales[KVC_TILE * 6];
    const int n = random_int(1, KVC_TILE + 1), step = random_int(2, 7);
    const int stride = (int)kvc_row_bytes(type, dim) - 2 + random_int(0, 3);
    for (size_t i = 0; i < sizeof rows; i++) rows[i] = (uint8_t)random_int(0, 256);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)random_int(0, 256);
    memset(got, 7, sizeof got);
    kernels->unpack(type, got, rows, stride, has_scales ? scales : NULL, step, n, dim, NULL);
    const uint8_t *at = got;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < dim; i++, at++) {
            if (has_scales && i % BLOCK == 0) {
                CHECK(!memcmp(at, scales + j * step, 2));
                at += 2;
            }
            CHECKF((int8_t)*at == scaled_at(type, rows + j * stride, i), "%s %s dim %d, row %d of %d, element %d",
                   kernels->name, kvc_type_name(type), dim, j, n, i);
        }
    CHECK(*at == 7);
}

/* Rows of several sizes, some with halves of a unit, some not finite, become what they become one by one in two steps.
 */
static void check_round(const kvc_kernels *kernels, int dim) {
    enum { MOST_ROWS = 9, MOST_GAP = 3 };
    static float x[MOST_ROWS][MAX_DIM + MOST_GAP];
    int8_t got[MOST_ROWS * MAX_DIM + 1], right[MAX_DIM];
    const int n = random_int(1, MOST_ROWS + 1), stride = dim + random_int(0, MOST_GAP + 1);
    float *const rows = &x[0][0], units[MOST_ROWS + 1];
    for (int j = 0; j < n; j++) {
        const int exponent = random_int(-150, 120), halves = random_int(0, 2);
        for (int d = 0; d < dim; d++)
            rows[j * stride + d] = ldexpf(halves ? (float)random_int(-254, 255) / 2 : random_float(), exponent);
        if (!random_int(0, 4)) rows[j * stride + random_int(0, dim)] = random_int(0, 2) ? NAN : -INFINITY;
    }
    memset(got, 7, sizeof got);
    units[n] = 7;
    kernels->round(got, units, rows, stride * (int64_t)sizeof *rows, n, dim);
    for (int j = 0; j < n; j++) {
        const float *const row = rows + j * stride, unit = kvc_kernels_scalar.largest(row, dim) / 127;
        int has_nan = 0;
        for (int d = 0; d < dim; d++) has_nan |= isnan(row[d]);
        kvc_kernels_scalar.encode(KVC_INT8, right, row, dim, unit, NULL);
        CHECKF(!memcmp(got + j * dim, right, (size_t)dim) && (has_nan ? isnan(units[j]) : units[j] == unit),
               "%s dim %d: row %d of %d, unit %g, not %g", kernels->name, dim, j, n, (double)units[j], (double)unit);
    }
    CHECK(got[n * dim] == 7 && units[n] == 7);
}

static void test_row_scales(const kvc_kernels *kernels) {
    for (int dim = BLOCK; dim <= MAX_DIM; dim += BLOCK) {
        for (int i = 0; i < 20; i++) check_round(kernels, dim);
        for (int type = KVC_INT8; kvc_type_name(type); type++) {
            check_unpack_scaled(kernels, type, dim, 0);
            check_unpack_scaled(kernels, type, dim, 1);
            for (int exponent = -150; exponent < 127; exponent += 3)
                check_encode(kernels, type, dim, ldexp(1, exponent), 0);
            check_encode(kernels, type, dim, 0, 0);
            check_encode(kernels, type, dim, 1, NAN);
            check_encode(kernels, type, dim, 1, -INFINITY);
        }
    }
}

/* ---- score and accumulate ---------------------------------------------------------------------------------------- */

/* The error that 16 bits for a number of [-largest, largest] may have. */
static double step_of(const kvc_kernels *kernels, int type, double largest) {
    return type >= KVC_FLOAT_TYPES && kernels != &kvc_kernels_scalar ? largest * 1.001 / (2 * INT16_MAX) : 0;
}

static double magnitude(const float *x, int n) {
    double largest = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
    return largest;
}

enum { MAX_STRIDE = (MAX_DIM + KVC_LANES - 1) / KVC_LANES * KVC_LANES + 1 };

static const float SCALE = 0.7f;

/* The queries as score wants them for scores times SCALE: as rows of q_type. */
static const float *prepared(const kvc_scorer *scorer, const float *q, int q_stride, int num_q, int dim, int q_type) {
    static float ready[MAX_Q * MAX_STRIDE];
    const int64_t stride = q_stride * (int64_t)sizeof *q;
    kvc_kernels_scalar.convert(KVC_F32, q_type, ready, stride, q, stride, num_q, dim);
    scorer->prepare(ready, q_stride, num_q, dim, SCALE);
    return ready;
}

static float rounded_to(int type, float x) {
    float rounded;
    if (type == KVC_F32) return x;
    kvc_kernels_scalar.convert(KVC_F32, type, &rounded, 0, &x, 0, 1, 1);
    kvc_kernels_scalar.convert(type, KVC_F32, &x, 0, &rounded, 0, 1, 1);
    return x;
}

/* The kernel that scores queries of q_type, which is f32 or the type of the rows. */
static const kvc_scorer *scorer_of(const kvc_kernels *kernels, int type, int q_type) {
    return q_type == KVC_F32 ? &kernels->score[type] : &kernels->score_16[type];
}

static void test_score(const kvc_kernels *kernels, int type, int q_type, int dim, int num_q, int n, sizes largest) {
    static float q[MAX_Q * MAX_STRIDE], scores[MAX_Q * KVC_SCORES];
    const kvc_scorer *scorer = scorer_of(kernels, type, q_type);
    int q_stride = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES + num_q % 2;
    const tile *t = tile_new(type, n, dim, largest);
    for (int i = 0; i < MAX_Q * MAX_STRIDE; i++) {
        const int is_used = i < num_q * q_stride && i % q_stride < dim; /* no others may be */
        q[i] = is_used ? rounded_to(q_type, largest.factors * random_float()) : NAN;
    }
    for (int i = 0; i < MAX_Q * KVC_SCORES; i++) scores[i] = UNTOUCHED;
    scorer->score(scores, prepared(scorer, q, q_stride, num_q, dim, q_type), q_stride, num_q, t->rows, t->stride, n,
                  dim, ahead_of(n % 2 ? t : NULL, type, dim));
    for (int r = 0; r < MAX_Q; r++) {
        const float *row = q + r * q_stride;
        double off = r < num_q ? step_of(kernels, type, magnitude(row, dim)) : 0;
        for (int j = 0; j < KVC_SCORES; j++) {
            double sum = 0, size = 0;
            for (int d = 0; d < dim && r < num_q && j < n; d++) {
                double term = row[d] * t->values[j][d];
                sum += term * SCALE;
                size += fabs(term) + off * fabs(t->values[j][d]) / ((dim + 2) * 0.5 * FLT_EPSILON);
            }
            float got = scores[r * KVC_SCORES + j];
            CHECKF(r >= num_q ? got == UNTOUCHED : j >= n || is_close(got, sum, size, dim),
                   "%s %s%s dim %d, query %d of %d, row %d of %d: %g, not %g", kernels->name, kvc_type_name(type),
                   q_type == KVC_F32 ? "" : " queries", dim, r, num_q, j, n, (double)got, sum);
        }
    }
}

/* The largest product of a row's weight and an element of the block that begins with column d. */
static double largest_product(const float *weights, const tile *t, int n, int d) {
    double largest = 0;
    for (int j = 0; j < n; j++)
        for (int i = d; i < d + BLOCK; i++)
            if (fabs(weights[j] * t->values[j][i]) > largest) largest = fabs(weights[j] * t->values[j][i]);
    return largest;
}

static void test_accumulate(const kvc_kernels *kernels, int type, int dim, int num_q, int n, sizes largest) {
    enum { STRIDE = MAX_DIM + 1 };
    static float acc[MAX_Q][STRIDE], old[MAX_Q][STRIDE], factor[MAX_Q], weights[MAX_Q * KVC_SCORES];
    const tile *t = tile_new(type, n, dim, largest);
    fill(factor, MAX_Q);
    for (int i = 0; i < MAX_Q * KVC_SCORES; i++)
        weights[i] = i % KVC_SCORES < n ? largest.factors * random_float() / growth_at(largest, i % KVC_SCORES) : 0;
    for (int r = 0; r < MAX_Q && largest.growth; r++)
        weights[r * KVC_SCORES + n - 1] = 0; /* the largest row is masked */
    fill_to(&acc[0][0], MAX_Q * STRIDE, largest.rows * largest.factors);
    memcpy(old, acc, sizeof old);
    accumulate(kernels, type, &acc[0][0], STRIDE, factor, weights, num_q, t->rows, t->stride, n, dim,
               ahead_of(n % 2 ? t : NULL, type, dim));
    for (int r = 0; r < MAX_Q; r++) {
        double off = 0; /* the rounding of n products */
        for (int d = 0; d < STRIDE; d++) {
            double sum = (double)old[r][d] * factor[r], size = fabs(sum);
            if (type >= KVC_FLOAT_TYPES && r < num_q && d < dim && d % BLOCK == 0)
                off = n * step_of(kernels, type, largest_product(weights + r * KVC_SCORES, t, n, d));
            for (int j = 0; j < n && r < num_q && d < dim; j++) {
                double term = weights[r * KVC_SCORES + j] * t->values[j][d];
                sum += term;
                size += fabs(term);
            }
            size += off / ((n + 3) * 0.5 * FLT_EPSILON);
            CHECKF(r < num_q && d < dim ? is_close(acc[r][d], sum, size, n + 1) : acc[r][d] == old[r][d],
                   "%s %s dim %d, query %d of %d, column %d, %d rows: %g, not %g", kernels->name, kvc_type_name(type),
                   dim, r, num_q, d, n, (double)acc[r][d], sum);
        }
    }
}

/* The sums over a tile of which the first row's block `block` has this f16 as its scale; the others and the weights are
 * usual. */
static void accumulate_scale(const kvc_kernels *kernels, int type, int block, uint16_t scale, float size, float *acc) {
    enum { N = 37, Q = 5, DIM = 3 * BLOCK };
    static char rows[N * DIM * 2];
    static float weights[Q * KVC_SCORES], factor[Q];
    const int64_t stride = (int64_t)kvc_row_bytes(type, DIM);
    for (int j = 0; j < N; j++) {
        float row[DIM];
        for (int d = 0; d < DIM; d++) row[d] = (float)((j * 31 + d * 17) % 41 - 20);
        kernels->convert(KVC_F32, type, rows + j * stride, 0, row, 0, 1, DIM);
    }
    memcpy(rows + block * (int)kvc_row_bytes(type, BLOCK), &scale, sizeof scale);
    for (int i = 0; i < Q * KVC_SCORES; i++) /* the first row is masked from query 1 */
        weights[i] = i % KVC_SCORES < N && i != KVC_SCORES ? size * (float)(i % 13 + 1) : 0;
    memset(acc, 0, Q * DIM * sizeof *acc);
    accumulate(kernels, type, acc, DIM, factor, weights, Q, rows, stride, N, DIM, nothing_ahead);
}

/* A scale that is not finite makes the columns of its block NaN, and no others.  Small weights change the size of sums
 * and nothing else, down to the smallest weights that matter. */
static void test_scales(const kvc_kernels *kernels, int type) {
    enum { Q = 5, DIM = 3 * BLOCK };
    static float right[Q * DIM], acc[Q * DIM];
    static const uint16_t not_finite[] = {0x7c00, 0xfc00, 0x7e00};
    accumulate_scale(kernels, type, 1, 0x3800, 1, right);
    for (int i = 0; i < 3; i++) {
        accumulate_scale(kernels, type, 1, not_finite[i], 1, acc);
        for (int d = 0; d < Q * DIM; d++)
            CHECKF(d % DIM / BLOCK == 1 ? !isfinite(acc[d]) : acc[d] == right[d], "%s %s: scale %04x, sum %d is %g",
                   kernels->name, kvc_type_name(type), (unsigned)not_finite[i], d, (double)acc[d]);
    }
    for (int exponent = -90; exponent <= 90; exponent += 15) {
        accumulate_scale(kernels, type, 1, 0x3800, ldexpf(1, exponent), acc);
        for (int d = 0; d < Q * DIM; d++)
            CHECKF(fabsf(ldexpf(acc[d], -exponent) - right[d]) <= 1e-5f * fabsf(right[d]) + 1e-3f,
                   "%s %s: weights times 2^%d, sum %d is %g, not %g", kernels->name, kvc_type_name(type), exponent, d,
                   (double)ldexpf(acc[d], -exponent), (double)right[d]);
    }
}

/* A score must not depend on what is computed with it: on the number of queries of a pass, nor on other rows. */
static void test_same_scores(const kvc_kernels *kernels, int type, int q_type, int dim, int num_q) {
    enum { N = 13, Q = 9 };
    static float q[Q * MAX_STRIDE], all[Q * KVC_SCORES];
    const kvc_scorer *scorer = scorer_of(kernels, type, q_type);
    const tile *t = tile_new(type, N, dim, usual);
    fill(q, Q * MAX_STRIDE);
    for (int i = 0; i < Q * MAX_STRIDE; i++) q[i] = rounded_to(q_type, q[i]);
    const float *ready = prepared(scorer, q, MAX_STRIDE, Q, dim, q_type);
    scorer->score(all, ready, MAX_STRIDE, num_q, t->rows, t->stride, N, dim, nothing_ahead);
    for (int r = 0; r < num_q; r++) {
        for (int j = 0; j < N; j++) {
            float scores[KVC_TILE];
            scorer->score(scores, ready + r * MAX_STRIDE, MAX_STRIDE, 1, t->rows + j * t->stride, t->stride, 1, dim,
                          nothing_ahead);
            CHECKF(scores[0] == all[r * KVC_SCORES + j], "%s %s dim %d, %d queries", kernels->name, kvc_type_name(type),
                   dim, num_q);
        }
    }
}

/* A column that accumulate sums must not depend on the columns beside it, nor on the number of queries of a pass. */
static void test_same_sums(const kvc_kernels *kernels, int type, int dim, int num_q) {
    enum { N = 13, Q = 9 };
    static float acc[Q * MAX_DIM], weights[Q * KVC_SCORES], factor[Q];
    const tile *t = tile_new(type, N, dim, usual);
    for (int i = 0; i < Q * KVC_SCORES; i++) weights[i] = i % KVC_SCORES < N ? random_float() : 0;
    memset(acc, 0, sizeof acc);
    accumulate(kernels, type, acc, MAX_DIM, factor, weights, num_q, t->rows, t->stride, N, dim, nothing_ahead);
    for (int r = 0; r < num_q; r++) {
        float alone[MAX_DIM] = {0};
        accumulate(kernels, type, alone, MAX_DIM, factor, weights + r * KVC_SCORES, 1, t->rows, t->stride, N, dim,
                   nothing_ahead);
        CHECKF(!memcmp(alone, acc + r * MAX_DIM, (size_t)dim * sizeof *acc), "%s %s dim %d, %d queries", kernels->name,
               kvc_type_name(type), dim, num_q);
    }
}

/* ---- softmax ----------------------------------------------------------------------------------------------------- */

static float softmax(const kvc_kernels *kernels, float *scores, int n, float *max, float *sum) {
    float factor;
    kernels->softmax(scores, 1, n, max, sum, &factor, nothing_ahead);
    return factor;
}

/* The bits of a row do not depend on what rows it is among. */
/* Heads that fill no vectors of 16 lanes take no longer than with AVX2, as its kernels compute them. */
static void test_odd_heads(const kvc_kernels *kernels) {
#ifdef KVC_HAVE_AVX512
    enum { DIM = 72, PADDED = 80, ODD_ROWS = 40 }; /* queries are scaled in whole vectors */
    static float q[2][PADDED], weights[KVC_SCORES], out[2][2][KVC_SCORES];
    static uint8_t rows[ODD_ROWS * DIM * sizeof(float)];
    const kvc_kernels *const of[] = {kernels, &kvc_kernels_avx2};
    if (strncmp(kernels->name, "avx512", 6) != 0 && strncmp(kernels->name, "amx", 3) != 0) return;
    for (int type = KVC_F32; type <= KVC_BF16; type++) {
        const int64_t stride = (int64_t)kvc_row_bytes(type, DIM);
        for (int i = 0; i < KVC_SCORES; i++) weights[i] = random_float();
        for (int i = 0; i < ODD_ROWS; i++) {
            float row[DIM];
            for (int d = 0; d < DIM; d++) row[d] = random_float();
            kernels->convert(KVC_F32, type, rows + i * stride, 0, row, 0, 1, DIM);
        }
        for (int d = 0; d < DIM; d++) q[0][d] = q[1][d] = random_float();
        for (int i = 0; i < 2; i++) {
            kvc_value_piece piece = {rows, {.bytes = 0}};
            const float factor = 0;
            of[i]->score[type].prepare(q[i], PADDED, 1, DIM, 0.5f);
            of[i]->score[type].score(out[i][0], q[i], PADDED, 1, rows, stride, ODD_ROWS, DIM, (kvc_ahead){.bytes = 0});
            memset(out[i][1], 0, sizeof out[i][1]);
            of[i]->accumulate[type](out[i][1], KVC_SCORES, &factor, weights, 1, &piece, stride, ODD_ROWS, DIM);
        }
        CHECKF(memcmp(out[0][0], out[1][0], ODD_ROWS * sizeof(float)) == 0, "scores of type %d", type);
        CHECKF(memcmp(out[0][1], out[1][1], DIM * sizeof(float)) == 0, "sums of type %d", type);
    }
#else
    (void)kernels;
#endif
}

static void test_softmax_rows(const kvc_kernels *kernels) {
    static float together[MAX_Q * KVC_SCORES], alone[MAX_Q * KVC_SCORES];
    for (int num_q = 1; num_q <= MAX_Q; num_q++) {
        float max[2][MAX_Q], sum[2][MAX_Q], factor[2][MAX_Q];
        int n = random_int(1, KVC_TILE + 1);
        for (int i = 0; i < MAX_Q * KVC_SCORES; i++)
            together[i] = alone[i] = i / KVC_TILE % 5 == 3 ? -INFINITY : 9 * random_float();
        for (int r = 0; r < num_q; r++) {
            max[0][r] = max[1][r] = r % 3 ? random_float() : -INFINITY;
            sum[0][r] = sum[1][r] = r % 3 ? 1 : 0;
        }
        const kvc_ahead ahead = {alone, random_int(1, (int)sizeof alone), num_q % 4 / 2 + 1};
        kernels->softmax(together, num_q, n, max[0], sum[0], factor[0], num_q % 2 ? nothing_ahead : ahead);
        for (int r = 0; r < num_q; r++)
            factor[1][r] = softmax(kernels, alone + r * KVC_SCORES, n, &max[1][r], &sum[1][r]);
        CHECKF(!memcmp(together, alone, sizeof alone) && !memcmp(max[0], max[1], (size_t)num_q * sizeof **max) &&
                   !memcmp(sum[0], sum[1], (size_t)num_q * sizeof **sum) &&
                   !memcmp(factor[0], factor[1], (size_t)num_q * sizeof **factor),
               "%s: %d rows of %d", kernels->name, num_q, n);
    }
}

/* exp over the whole range: scores of two where the other is 0, the largest. */
static void test_exp(const kvc_kernels *kernels) {
    double worst = 0;
    for (float x = 0; x > -110; x -= 0.00037f) {
        float scores[KVC_TILE] = {x, 0}, max = -INFINITY, sum = 0;
        softmax(kernels, scores, 2, &max, &sum);
        double right = exp((double)x);
        int exponent;
        frexp(right, &exponent);
        double error = fabs(scores[0] - right) / ldexp(1, exponent - 24); /* in units in the last place of a float */
        if (x > -86.9f && error > worst) worst = error;
        CHECKF(scores[0] <= 1.7e-38f || x > -87, "%s: exp(%g) is %g", kernels->name, (double)x, (double)scores[0]);
    }
    CHECKF(worst <= 2, "%s: exp is off by %g ulp", kernels->name, worst);
}

/* Several steps of n scores, each drawn by `draw`, against one softmax of all.  Each weight is compared before it is
 * divided by the sum, which world/attention.h does not show. */
static void check_softmax(const kvc_kernels *kernels, int n, float (*draw)(int step)) {
    enum { STEPS = 5 };
    static float scores[STEPS][KVC_TILE], weights[STEPS][KVC_TILE];
    float max = -INFINITY, sum = 0;
    double scale[STEPS], right_max = -INFINITY, right_sum = 0;
    for (int s = 0; s < STEPS; s++) {
        for (int j = 0; j < KVC_TILE; j++) weights[s][j] = scores[s][j] = j < n ? draw(s) : NAN;
        scale[s] = 1;
        float factor = softmax(kernels, weights[s], n, &max, &sum);
        for (int i = 0; i < s; i++) scale[i] *= factor;
        for (int j = 0; j < n; j++)
            if (right_max < scores[s][j]) right_max = scores[s][j];
        CHECKF(max == right_max, "%s: max %g, not %g", kernels->name, (double)max, right_max);
        for (int j = n; j < kvc_padded_rows(n); j++)
            CHECKF(weights[s][j] == 0, "%s: %d of %d is %g", kernels->name, j, n, (double)weights[s][j]);
    }
    for (int s = 0; s < STEPS; s++) {
        for (int j = 0; j < n; j++) {
            double shift = right_max == -INFINITY ? -INFINITY : scores[s][j] - right_max, weight = exp(shift);
            double allowed = weight > 0 ? weight * (1e-6 - shift * FLT_EPSILON) + 2e-38 : 2e-38; /* shift is rounded */
            right_sum += weight;
            CHECKF(fabs(weights[s][j] * scale[s] - weight) <= allowed, "%s: exp(%g - %g) is %g, not %g", kernels->name,
                   (double)scores[s][j], right_max, weights[s][j] * scale[s], weight);
        }
    }
    CHECKF(fabs(sum - right_sum) <= 3e-6 * right_sum, "%s: sum %g, not %g", kernels->name, (double)sum, right_sum);
}

static float draw_usual(int step) { return 8 * random_float() + (float)step; }

static float draw_wide(int step) {
    (void)step;
    return 100 * random_float();
}

static float draw_half_masked(int step) { return step < 2 || random_int(0, 2) ? -INFINITY : random_float(); }

static float draw_masked(int step) {
    (void)step;
    return -INFINITY;
}

static float draw_huge(int step) {
    (void)step;
    return 1e30f;
}

static float draw_far_apart(int step) { return step == 2 ? FLT_MAX : random_int(0, 2) ? -FLT_MAX : 0; }

static void test_softmax(const kvc_kernels *kernels) {
    float (*draws[])(int) = {draw_usual, draw_wide, draw_half_masked, draw_masked, draw_huge, draw_far_apart};
    for (int n = 1; n <= KVC_TILE; n++)
        for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) check_softmax(kernels, n, draws[i]);

    float max = 3, sum = 2, masked[KVC_TILE] = {-INFINITY, -INFINITY};
    float factor = softmax(kernels, masked, 2, &max, &sum);
    CHECK(factor == 1 && max == 3 && sum == 2 && masked[0] == 0 && masked[1] == 0);
    for (int n = 1; n < KVC_TILE; n += 3) { /* NaN is never lost */
        float scores[KVC_TILE] = {0};
        scores[random_int(0, n)] = NAN;
        max = n % 2 ? -INFINITY : 1;
        sum = 1;
        softmax(kernels, scores, n, &max, &sum);
        CHECKF(isnan(sum), "%s: sum %g", kernels->name, (double)sum);
    }
}

/* ---- matmul and what packs for it -------------------------------------------------------------------------------- */

static void test_matmul(const kvc_kernels *kernels, int m, int n, int k, int add) {
    enum { LDB = 80, LDC = 96, MAX_K = 300, LDA = MAX_K + 1, MAX_M = 40 };
    static _Alignas(64) float b[MAX_K * LDB], c[MAX_M * LDC];
    static float a[MAX_M * LDA], old[MAX_M * LDC];
    int padded = (n + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    fill(a, MAX_M * LDA);
    fill(b, MAX_K * LDB);
    fill(c, MAX_M * LDC);
    memcpy(old, c, sizeof old);
    kernels->matmul(c, LDC, a, LDA, b, LDB, m, n, k, add, (kvc_ahead){b, (int32_t)sizeof b, 2});
    for (int i = 0; i < MAX_M; i++) {
        for (int j = 0; j < LDC; j++) {
            double sum = add ? old[i * LDC + j] : 0, size = fabs(sum);
            for (int p = 0; p < k && j < n; p++) {
                double term = (double)a[i * LDA + p] * b[p * LDB + j];
                sum += term;
                size += fabs(term);
            }
            float got = c[i * LDC + j];
            if (i >= m || j >= padded)
                CHECKF(got == old[i * LDC + j], "%s: m %d, n %d wrote [%d, %d]", kernels->name, m, n, i, j);
            else if (j < n)
                CHECKF(is_close(got, sum, size, k + 1), "%s: m %d, n %d, k %d, [%d, %d]: %g, not %g", kernels->name, m,
                       n, k, i, j, (double)got, sum);
        }
    }
}

static void test_pack(const kvc_kernels *kernels, int type, int dim, int n) {
    static _Alignas(64) float keys[MAX_DIM * KVC_PANEL], values[KVC_PANEL * (MAX_DIM + KVC_LANES)];
    int padded = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES, stride = padded + KVC_LANES;
    const tile *t = tile_new(type, n, dim, usual);
    fill(keys, MAX_DIM * KVC_PANEL);
    for (int i = 0; i < KVC_PANEL * stride; i++) values[i] = UNTOUCHED;
    kernels->tiler[type].pack_keys(keys, t->rows, t->stride, 0, n, dim);
    kernels->tiler[type].pack_values(values, stride, t->rows, t->stride, 0, n, dim);
    for (int j = 0; j < KVC_PANEL; j++) {
        for (int d = 0; d < dim; d++)
            CHECKF(keys[d * KVC_PANEL + j] == (j < n ? t->values[j][d] : 0), "%s %s: dim %d, key [%d, %d] of %d",
                   kernels->name, kvc_type_name(type), dim, j, d, n);
        for (int d = 0; d < stride; d++)
            CHECKF(values[j * stride + d] == (j >= n || d >= padded ? UNTOUCHED
                                              : d < dim             ? t->values[j][d]
                                                                    : 0),
                   "%s %s: dim %d, value [%d, %d] of %d", kernels->name, kvc_type_name(type), dim, j, d, n);
    }
}

enum { MAX_M = 72 };

/* Tilers that multiply quantised rows as integers give the bits of the kernels for few query rows. */
static void test_panels(const kvc_kernels *kernels, int type, int dim, int m, int n) {
    enum { STRIDE = MAX_DIM / KVC_CHUNK * KVC_PACKED };
    static _Alignas(64) float panel[STRIDE * KVC_PANEL], scores[MAX_M * KVC_SCORES], right[MAX_M * KVC_SCORES];
    static float q[MAX_M * STRIDE], weights[MAX_M * KVC_SCORES], sums[MAX_M * MAX_DIM], right_sums[MAX_M * MAX_DIM],
        ones[MAX_M];
    const kvc_tiler *tiler = &kernels->tiler[type];
    const tile *t = tile_new(type, n, dim, usual);
    fill(q, MAX_M * STRIDE);
    tiler->prepare(q, STRIDE, m, dim, SCALE);
    for (int i = 0; i < STRIDE * KVC_PANEL; i++) panel[i] = NAN; /* only what was packed is read */
    tiler->pack_keys(panel, t->rows, t->stride, 0, n, dim);
    tiler->score(scores, KVC_SCORES, q, STRIDE, panel, KVC_PANEL, m, n, dim, 0, (kvc_ahead){q, (int32_t)sizeof q, 2});
    kernels->score[type].score(right, q, STRIDE, m, t->rows, t->stride, n, dim, (kvc_ahead){.bytes = 0});
    for (int i = 0; i < m; i++)
        CHECKF(!memcmp(scores + i * KVC_SCORES, right + i * KVC_SCORES, (size_t)n * sizeof *scores),
               "%s %s: dim %d, scores of query row %d of %d, %d keys", kernels->name, kvc_type_name(type), dim, i, m,
               n);
    for (int i = 0; i < STRIDE * KVC_PANEL; i++) panel[i] = NAN;
    tiler->pack_values(panel, MAX_DIM, t->rows, t->stride, 0, n, dim);
    for (int i = 0; i < MAX_M * KVC_SCORES; i++) weights[i] = i % KVC_SCORES < n ? random_float() : 0;
    for (int i = 0; i < MAX_M; i++) ones[i] = 1;
    fill(sums, MAX_M * MAX_DIM);
    memcpy(right_sums, sums, sizeof sums);
    tiler->accumulate(sums, MAX_DIM, weights, KVC_SCORES, panel, MAX_DIM, m, dim, n, 1,
                      (kvc_ahead){q, (int32_t)sizeof q, 2});
    accumulate(kernels, type, right_sums, MAX_DIM, ones, weights, m, t->rows, t->stride, n, dim,
               (kvc_ahead){.bytes = 0});
    CHECKF(!memcmp(sums, right_sums, sizeof sums), "%s %s: dim %d, sums of %d query rows, %d values", kernels->name,
           kvc_type_name(type), dim, m, n);
}

/* ---- many query rows --------------------------------------------------------------------------------------------- */

static void begin(const kvc_kernels *kernels, kvc_former *former) {
    if (kernels->begin) kernels->begin(former);
}

static void end(const kvc_kernels *kernels, const kvc_former *former) {
    if (kernels->end) kernels->end(former);
}

enum { MAX_PADDED = (MAX_DIM + KVC_CHUNK - 1) / KVC_CHUNK * KVC_PACKED };
static const float WEIGH_SCALE = 0.5f;

/* Turns random scores into weights of m rows, which are `stride` floats apart; `right` becomes these, in float64. */
static void weigh(const kvc_tiler *tiler, float *weights, int stride, int m, int n, sizes largest,
                  double (*right)[KVC_WIDE_TILE]) {
    static float max[MAX_M], sum[MAX_M], factor[MAX_M];
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            const float x = largest.factors * random_float();
            weights[i * stride + j] = tiler->weigh ? 8 * random_float() : x;
            right[i][j] = weights[i * stride + j];
        }
        for (int j = n; j < KVC_TILE; j++) weights[i * stride + j] = 0;
        max[i] = -INFINITY;
        sum[i] = 0;
    }
    for (int i = 0; tiler->weigh && i < m; i += KVC_BLOCK_QUERIES)
        tiler->weigh(weights + i * stride, m - i < KVC_BLOCK_QUERIES ? m - i : KVC_BLOCK_QUERIES, n, WEIGH_SCALE,
                     max + i, sum + i, factor + i);
    for (int i = 0; tiler->weigh && i < m; i++)
        for (int j = 0; j < n; j++) right[i][j] = exp(right[i][j] * (double)WEIGH_SCALE - max[i] * log(2));
}

/* Whatever its panels look like: m query rows of q_type by a tile, and weights by its values, against float64.  Where
 * tiles may have more rows than KVC_PANEL, rows [KVC_PANEL, n) are like the first ones. */
static void test_tiler(const kvc_kernels *kernels, const kvc_tiler *tiler, int type, int q_type, int dim, int m, int n,
                       sizes largest) {
    if (!tiler->score) /* rows are decoded first */
        return;
    static _Alignas(64) float panel[MAX_PADDED * KVC_WIDE_TILE], scores[MAX_M * KVC_WEIGHTS_STRIDE];
    static float q[MAX_M * MAX_PADDED], prepared[MAX_M * MAX_PADDED], sums[MAX_M * MAX_PADDED], old[MAX_M * MAX_PADDED];
    static uint16_t narrow[MAX_M * MAX_PADDED];
    static double weights[MAX_M][KVC_WIDE_TILE];
    const int is_packed = kernels->tiler[KVC_F32].weigh != NULL;
    const int is_exact = !tiler->score_bf16 || tiler == &kernels->tiler[KVC_F32]; /* others multiply two parts */
    const int stride = (dim + KVC_CHUNK - 1) / KVC_CHUNK * KVC_PACKED;
    const int values = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    const int scores_stride = is_packed ? KVC_WEIGHTS_STRIDE : KVC_TILE;
    /* Allowed error, relative to the sum of magnitudes; where nothing of a float is left out, of each term. */
    const double scale = q_type == KVC_F32 ? 0.3f : 1, most = is_exact ? FLT_EPSILON : 0x1p-15;
    const double most_of_score = is_exact || (q_type != KVC_F32 && q_type == type) ? FLT_EPSILON * (dim + 2) : most;
    const tile *t = tile_new(type, n < KVC_PANEL ? n : KVC_PANEL, dim, largest);
    kvc_former former;
    fill_to(q, MAX_M * MAX_PADDED, largest.factors);
    if (q_type != KVC_F32) { /* what the caller has is multiplied as it is, and not scaled */
        kernels->convert(KVC_F32, q_type, narrow, 0, q, 0, 1, MAX_M * MAX_PADDED);
        kernels->convert(q_type, KVC_F32, q, 0, narrow, 0, 1, MAX_M * MAX_PADDED);
    }
    for (int i = 0; i < MAX_PADDED * KVC_WIDE_TILE; i++) panel[i] = NAN; /* the tiler reads only what was packed */
    memcpy(prepared, q, sizeof q);
    if (q_type == KVC_F32) tiler->prepare(prepared, stride, m, dim, 0.3f);
    for (int i = 0; q_type != KVC_F32 && i < m; i++) {
        memset(prepared + i * stride, 0, (size_t)stride * sizeof *prepared);
        memcpy(prepared + i * stride, narrow + i * stride, (size_t)dim * sizeof *narrow);
    }
    for (int i = 0; i < n; i += KVC_PANEL)
        tiler->pack_keys(panel, t->rows, t->stride, i, n - i < KVC_PANEL ? n - i : KVC_PANEL, dim);
    begin(kernels, &former);
    (q_type == KVC_BF16 ? tiler->score_bf16 : tiler->score)(scores, scores_stride, prepared, stride, panel,
                                                            is_packed ? dim : KVC_PANEL, m, n, dim, 0,
                                                            (kvc_ahead){q, (int32_t)sizeof q, 2});
    end(kernels, &former);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (int d = 0; d < dim; d++) {
                const double term = scale * q[i * stride + d] * t->values[j % KVC_PANEL][d];
                sum += term;
                size += fabs(term);
            }
            const float got = scores[i * scores_stride + j];
            CHECKF(fabs(got - sum) <= size * most_of_score,
                   "%s %s, queries %s: dim %d, score [%d, %d] of [%d, %d]: %g, not %g", kernels->name,
                   kvc_type_name(type), kvc_type_name(q_type), dim, i, j, m, n, (double)got, sum);
        }
    }
    if (!tiler->accumulate) return;
    for (int i = 0; i < MAX_PADDED * KVC_WIDE_TILE; i++) panel[i] = NAN;
    fill_to(sums, MAX_M * MAX_PADDED, largest.rows * (is_packed ? 1 : largest.factors));
    memcpy(old, sums, sizeof old);
    for (int i = 0; i < n; i += KVC_PANEL)
        tiler->pack_values(panel, values, t->rows, t->stride, i, n - i < KVC_PANEL ? n - i : KVC_PANEL, dim);
    weigh(tiler, scores, scores_stride, m, n, largest, weights);
    begin(kernels, &former);
    tiler->accumulate(sums, values, scores, scores_stride, panel, is_packed ? KVC_WIDE_TILE : values, m, dim, n, 1,
                      (kvc_ahead){.bytes = 0});
    end(kernels, &former);
    for (int i = 0; i < MAX_M; i++) {
        for (int d = 0; d < values; d++) {
            double sum = old[i * values + d], size = fabs(sum);
            for (int j = 0; j < n && d < dim && i < m; j++) {
                const double term = ldexp(weights[i][j] * t->values[j % KVC_PANEL][d], tiler->sum_shift);
                sum += term;
                size += fabs(term);
            }
            const float got = sums[i * values + d];
            CHECKF(i < m && d >= dim ? 1
                   : i >= m          ? got == old[i * values + d]
                                     : fabs(got - sum) <= size * most * (is_exact ? n + (is_packed ? 20 : 2) : 1),
                   "%s %s: dim %d, sum [%d, %d] of [%d, %d]: %g, not %g", kernels->name, kvc_type_name(type), dim, i, d,
                   m, n, (double)got, sum);
        }
    }
}

/* Several steps of n scores, each drawn by `draw`, for each of some rows: their maxima and sums, against float64.  Sums
 * are relative to the maxima that the kernel returns, which are rounded: world/attention.h has none of these. */
static void check_weigh(const kvc_kernels *kernels, const kvc_tiler *tiler, int n, float (*draw)(int step)) {
    enum { STEPS = 4, ROWS = 5 };
    static _Alignas(64) float scores[ROWS * KVC_WEIGHTS_STRIDE];
    static double all[ROWS][STEPS * KVC_WIDE_TILE];
    float max[ROWS], sum[ROWS], factor[ROWS], former[ROWS];
    for (int r = 0; r < ROWS; r++) max[r] = -INFINITY, sum[r] = 0;
    for (int s = 0; s < STEPS; s++) {
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < n; j++)
                all[r][s * n + j] = (double)WEIGH_SCALE * (scores[r * KVC_WEIGHTS_STRIDE + j] = draw(s));
        memcpy(former, max, sizeof max);
        tiler->weigh(scores, ROWS, n, WEIGH_SCALE, max, sum, factor);
        for (int r = 0; r < ROWS; r++) {
            double largest = -INFINITY, right = 0;
            for (int i = 0; i < (s + 1) * n; i++) largest = fmax(largest, all[r][i] / log(2));
            for (int i = 0; i < (s + 1) * n; i++)
                right += max[r] == -INFINITY ? 0 : exp(all[r][i] - (double)max[r] * log(2));
            const double by = max[r] == former[r] ? 1 : exp2((double)former[r] - (double)max[r]);
            CHECKF(max[r] == largest || fabs(max[r] - largest) <= 2e-7 * fabs(largest),
                   "%s: the maximum of rows up to %g is %g", kernels->name, largest, (double)max[r]);
            const double off =
                1e-6 + fabs((double)former[r] - (double)max[r]) * FLT_EPSILON; /* the difference is rounded */
            CHECKF(factor[r] == by || fabs(factor[r] - by) <= off * by + FLT_MIN, "%s: factor %g of maxima %g and %g",
                   kernels->name, (double)factor[r], (double)former[r], (double)max[r]);
            CHECKF(fabs(largest) > 1e6 && isfinite(largest) ? sum[r] >= 1 : fabs(sum[r] - right) <= 4e-6 * right,
                   "%s: sum %g of %d, not %g", kernels->name, (double)sum[r], n, right);
        }
    }
}

static void test_weigh(const kvc_kernels *kernels, const kvc_tiler *tiler) {
    float (*draws[])(int) = {draw_usual, draw_wide, draw_half_masked, draw_masked, draw_huge, draw_far_apart};
    if (!tiler->weigh) return;
    for (int n = 1; n <= KVC_WIDE_TILE; n += n < 40 ? 1 : 27)
        for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) check_weigh(kernels, tiler, n, draws[i]);
    static _Alignas(64) float scores[KVC_WEIGHTS_STRIDE];
    for (int n = 1; n < KVC_WIDE_TILE; n += 9) { /* NaN is never lost */
        float max = n % 2 ? -INFINITY : 1, sum = 1, factor;
        memset(scores, 0, sizeof scores);
        scores[random_int(0, n)] = NAN;
        tiler->weigh(scores, 1, n, 1, &max, &sum, &factor);
        CHECKF(isnan(sum), "%s: sum %g", kernels->name, (double)sum);
    }
}

/* The largest floats are no infinities once they are prepared; they are for AMX (weigh). */
static void test_largest_queries(const kvc_kernels *kernels) {
    enum { DIM = 8, PADDED = KVC_PACKED };
    static _Alignas(64) float panel[PADDED * KVC_PANEL], scores[KVC_TILE];
    const kvc_tiler *tiler = &kernels->tiler[KVC_BF16];
    if (!tiler->score || tiler->weigh) return;
    float q[PADDED] = {FLT_MAX, -FLT_MAX, FLT_MAX}, key[DIM] = {0x1p-126f, -0x1p-126f, 0x1p-126f};
    uint16_t row[DIM];
    kernels->convert(KVC_F32, KVC_BF16, row, 0, key, 0, 1, DIM);
    tiler->prepare(q, PADDED, 1, DIM, 1);
    tiler->pack_keys(panel, row, 0, 0, 1, DIM);
    tiler->score(scores, KVC_SCORES, q, PADDED, panel, KVC_PANEL, 1, 1, DIM, 0, (kvc_ahead){.bytes = 0});
    CHECKF(fabsf(scores[0] - 12) < 0.1f, "%s: %g", kernels->name, (double)scores[0]);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static int has_score_16(const kvc_kernels *kernels, int type) {
    return type < KVC_FLOAT_TYPES && kernels->score_16[type].score;
}

static void test_rows(const kvc_kernels *kernels, int type, int dim) {
    static const int some_n[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 95, 127, 128};
    enum { NUM_N = sizeof some_n / sizeof *some_n };
    for (int num_q = 1; num_q <= MAX_Q; num_q += num_q < 9 ? 1 : 7) {
        for (int i = 0; i < 3; i++) { /* a few of the row counts each time; all in the course of the test */
            int n = some_n[(num_q * 3 + i + dim) % NUM_N];
            test_score(kernels, type, KVC_F32, dim, num_q, n, usual);
            if (has_score_16(kernels, type)) test_score(kernels, type, type, dim, num_q, n, usual);
            test_accumulate(kernels, type, dim, num_q, n, usual);
            test_accumulate(kernels, type, dim, num_q, n, uneven);
        }
    }
    for (int i = 0; i < NUM_N && some_n[i] <= KVC_PANEL; i++) {
        static const int some_m[] = {1, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 72};
        const int m = some_m[(i + dim) % (int)(sizeof some_m / sizeof *some_m)], n = some_n[i];
        const kvc_tiler *tiler = &kernels->tiler[type];
        if (tiler->score && type >= KVC_FLOAT_TYPES && !tiler->weigh) {
            test_panels(kernels, type, dim, m, n);
            continue;
        }
        if (tiler->score && !tiler->score_bf16) test_pack(kernels, type, dim, n);
        test_tiler(kernels, tiler, type, KVC_F32, dim, m, n, usual);
        if (tiler->score_bf16) test_tiler(kernels, tiler, type, KVC_BF16, dim, m, n, usual);
        if (type == KVC_F16 && kernels->tiler_f16.score)
            test_tiler(kernels, &kernels->tiler_f16, type, KVC_F16, dim, m, n, usual);
        if (type == KVC_F32 && kernels->decoded.score)
            test_tiler(kernels, &kernels->decoded, type, KVC_F32, dim, m, n, usual);
    }
    static const int wide_n[] = {65, 96, 128, 131, 192, 255, KVC_WIDE_TILE};
    for (int i = 0; kernels->tiler[type].weigh && i < 3; i++)
        test_tiler(kernels, &kernels->tiler[type], type, KVC_F32, dim, 33, wide_n[(i * 3 + dim) % 7], usual);
    for (int num_q = 1; num_q <= 9; num_q++) {
        test_same_scores(kernels, type, KVC_F32, dim, num_q);
        if (has_score_16(kernels, type)) test_same_scores(kernels, type, type, dim, num_q);
        test_same_sums(kernels, type, dim, num_q);
    }
}

static void test_conversions(const kvc_kernels *kernels, int type, int dim) {
    for (int to = 0; to < TYPES; to++)
        if (dim % kvc_type_elements(to) == 0 && (type == to || type < KVC_FLOAT_TYPES || to < KVC_FLOAT_TYPES))
            test_convert_rows(kernels, type, to, dim);
}

/* No denormal number is taken as 0, except by the processor's own products of bf16.  score_16 uses them, and so do
 * tilers that multiply bf16, which has the range of f32. */
static void test_denormals(const kvc_kernels *kernels, int type, int dim) {
    static const int some_n[] = {1, 5, 16, 27, 64};
    const int is_flushed = (type == KVC_F32 || type == KVC_BF16) && kernels->tiler[type].score_bf16;
    volatile float smallest = FLT_MIN;
    CHECK(smallest / 2 != 0); /* otherwise the expected numbers would be flushed as well */
    for (int i = 0; i < 5; i++) {
        test_score(kernels, type, KVC_F32, dim, i + 1, some_n[i], denormal(type));
        test_accumulate(kernels, type, dim, i + 1, some_n[i], denormal(type));
        if (type == KVC_F16 && has_score_16(kernels, type))
            test_score(kernels, type, type, dim, i + 1, some_n[i], denormal(type));
        if (!is_flushed && (type < KVC_FLOAT_TYPES || kernels->tiler[type].weigh))
            test_tiler(kernels, &kernels->tiler[type], type, KVC_F32, dim, 7 * i + 1, some_n[i], denormal(type));
        if (type == KVC_F16 && kernels->tiler_f16.score)
            test_tiler(kernels, &kernels->tiler_f16, type, KVC_F16, dim, 7 * i + 1, some_n[i], denormal(type));
    }
}

/* Scores and sums of rows without their scales. */
static void test_scaled_rows(const kvc_kernels *kernels, int type, int dim) {
    for (int num_q = 1; num_q <= MAX_Q; num_q++) {
        const int n = random_int(1, KVC_TILE + 1);
        test_score(kernels, type, KVC_F32, dim, num_q, n, usual);
        test_accumulate(kernels, type, dim, num_q, n, usual);
        test_accumulate(kernels, type, dim, num_q, n, uneven);
        if (num_q > 9) continue;
        test_same_scores(kernels, type, KVC_F32, dim, num_q);
        test_same_sums(kernels, type, dim, num_q);
    }
    for (int n = 1; n <= KVC_TILE; n++) {
        test_score(kernels, type, KVC_F32, dim, 4, n, usual);
        test_accumulate(kernels, type, dim, 4, n, usual);
        if (n <= KVC_PANEL && kernels->tiler[type].score) test_panels(kernels, type, dim, random_int(1, MAX_M + 1), n);
    }
}

/* ---- the Hadamard transform ---------------------------------------------------------------------------------------
 */

enum { MAX_ORDER = 1024 };

/* Element (i, j) of Sylvester's matrix: its sign is the parity of the bits that both numbers have. */
static int hadamard_sign(int i, int j) {
    int bits = i & j, sign = 1;
    for (; bits; bits &= bits - 1) sign = -sign;
    return sign;
}

/* The sign that the header says of element i. */
static int sign_at(int i, int order) {
    int sign = 1;
    for (int bits = i % order; bits; bits /= 4) sign = bits % 4 == 3 ? -sign : sign;
    return sign;
}

/* Transforms `num` times `order` floats: against the matrix, in place and from where no byte more may be read, with the
 * bits of the scalar set, and back again. */
static void test_hadamard(const kvc_kernels *kernels, int order, int num, int has_signs) {
    const kvc_mixing mixing = {order, has_signs};
    static float x[3 * MAX_ORDER], y[3 * MAX_ORDER + 1], z[3 * MAX_ORDER];
    const int n = num * order;
    const size_t bytes = (size_t)n * sizeof *x;
    char *src = guarded_end - bytes - num % 2; /* not aligned, or up to the guard */
    fill(x, (size_t)n);
    memcpy(src, x, bytes);
    y[n] = UNTOUCHED;
    kernels->hadamard(y, src, n, mixing);
    CHECK(y[n] == UNTOUCHED);
    for (int i = 0; i < n; i++) {
        double sum = 0, size = 0;
        for (int j = 0; j < order; j++) {
            const int sign = has_signs ? sign_at(i, order) * sign_at(j, order) : 1;
            sum += sign * hadamard_sign(i % order, j) * (double)x[i / order * order + j];
            size += fabs((double)x[i / order * order + j]);
        }
        CHECKF(is_close(y[i], sum / sqrt(order), size / sqrt(order), 12), "%s: order %d, element %d is %g, not %g",
               kernels->name, order, i, (double)y[i], sum / sqrt(order));
    }
    kvc_kernels_scalar.hadamard(z, x, n, mixing);
    CHECKF(!memcmp(z, y, bytes), "%s: order %d", kernels->name, order);
    memcpy(z, x, bytes);
    kernels->hadamard(z, z, n, mixing);
    CHECK(!memcmp(z, y, bytes));
    kernels->hadamard(z, z, n, mixing);
    for (int i = 0; i < n; i++) CHECK(fabsf(z[i] - x[i]) < 1e-6f * (float)order);
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

static void test_kernels(const kvc_kernels *kernels) {
    const int num_dims = is_full() ? NUM_DIMS : 6; /* longer rows take longer, and repeat 128 */
    test_odd_heads(kernels);
    for (int type = KVC_F32; type < TYPES; type++) {
        for (int i = 0; i < num_dims; i++)
            if (dims[i] % kvc_type_elements(type) == 0) test_conversions(kernels, type, dims[i]);
        for (int i = 0; i < num_dims && !kernels->accumulate[type]; i++)
            if (dims[i] % kvc_type_elements(type) == 0) test_unpack(kernels, type, dims[i]);
        if (!kernels->accumulate[type]) continue;
        for (int i = 0; i < num_dims; i++)
            if (dims[i] % kvc_type_elements(type) == 0) test_rows(kernels, type, dims[i]);
        for (int i = 0; i < num_dims && dims[i] <= 128; i++)
            if (dims[i] % kvc_type_elements(type) == 0) test_denormals(kernels, type, dims[i]);
        for (int n = 1; n <= KVC_TILE; n += is_full() || n < KVC_PANEL + 4 ? 1 : 7) {
            int dim = type < KVC_FLOAT_TYPES ? 24 : 32;
            test_score(kernels, type, KVC_F32, dim, 4, n, usual);
            test_accumulate(kernels, type, dim, 4, n, usual);
        }
    }
    for (int type = KVC_FLOAT_TYPES; type < TYPES; type++) {
        test_quantise(kernels, type);
        test_not_finite(kernels, type);
        test_dequantise(kernels, type);
        if (kernels->accumulate[type]) test_scales(kernels, type);
    }
    test_row_scales(kernels);
    for (int type = KVC_INT8; kvc_type_name(type); type++)
        for (int i = 0; i < num_dims && kernels->accumulate[type]; i++)
            if (dims[i] % BLOCK == 0) test_scaled_rows(kernels, type, dims[i]);
    test_16_bits(kernels, KVC_F16);
    test_16_bits(kernels, KVC_BF16);
    test_rounding(kernels, KVC_F16);
    test_rounding(kernels, KVC_BF16);
    test_convert_bits(kernels);
    test_exp(kernels);
    test_softmax(kernels);
    test_softmax_rows(kernels);
    test_largest_queries(kernels);
    for (int type = 0; type < TYPES; type++) test_weigh(kernels, &kernels->tiler[type]);
    for (int order = KVC_QUANT_ELEMENTS; order <= MAX_ORDER; order *= 2)
        for (int num = 1; num <= 3; num++) test_hadamard(kernels, order, num, 0), test_hadamard(kernels, order, num, 1);
    for (int m = 1; m <= 20; m++)
        for (int n = 1; n <= 70; n += n % 16 < 2 ? 1 : 7) test_matmul(kernels, m, n, random_int(1, 65), n % 2);
    test_matmul(kernels, 40, 64, 64, 1);
    for (int k = 127; k <= 300; k += k % 128 < 1 ? 1 : 43) /* longer sums are cut */
        test_matmul(kernels, 13, 70, k, k % 2);
    test_matmul(kernels, 3, 16, 0, 0);
}

static void test_choice(void) {
    const char *wanted = NULL;
    char name[1000] = "";
    setenv("KVCACHE_ISA", "scalar", 1);
    CHECK(kvc_cpu_kernels(&wanted) == &kvc_kernels_scalar && !wanted);
    setenv("KVCACHE_ISA", "avx1024", 1);
    CHECK(!kvc_cpu_kernels(&wanted) && wanted && !strcmp(wanted, "avx1024"));
    setenv("KVCACHE_ISA", memset(name, 'x', sizeof name - 1), 1);
    CHECK(!kvc_cpu_kernels(&wanted));
    unsetenv("KVCACHE_ISA");
    const kvc_kernels *best = kvc_cpu_kernels(&wanted);
    setenv("KVCACHE_ISA", "", 1);
    CHECK(best && kvc_cpu_kernels(&wanted) == best);
    CHECK(best && strstr(KVC_KERNEL_NAMES, best->name));
}

/* ---- what other code of the thread relies on --------------------------------------------------------------------- */

#ifdef KVC_HAVE_AMX
/* A library on the same thread may set the shapes of its tiles once, as ggml does. */
__attribute__((target("amx-tile"))) static void test_tiles_of_the_caller(const kvc_kernels *kernels) {
    static _Alignas(64) float a[4 * KVC_TILE], b[KVC_TILE * KVC_TILE], c[4 * KVC_TILE];
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1, .bytes = {64, 32}, .rows = {16, 3}}, after;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
    kvc_former former;
    kernels->begin(&former);
    kernels->tiler[KVC_F16].score(c, KVC_TILE, a, KVC_TILE, b, KVC_TILE, 4, KVC_TILE, KVC_TILE, 0,
                                  (kvc_ahead){.bytes = 0});
    kernels->end(&former);
    _tile_storeconfig(&after);
    __asm__ volatile("" ::: "memory");
    CHECK(memcmp(&shapes, &after, sizeof shapes) == 0);
    _tile_release();
}
#endif

static void test_isa(void) {
    const char *wanted;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    test_kernels(kernels);
#ifdef KVC_HAVE_AMX
    if (kernels == &kvc_kernels_amx) test_tiles_of_the_caller(kernels);
#endif
}

int main(void) {
    enum { ROWS = 1 << 19 }; /* bytes for them */
    test_choice();
    guarded_end = guarded_new(ROWS);
    for_each_isa(test_isa);
    return test_result();
}
