/* The kernels of sketches, by which rows are selected: every set of this machine against arithmetic in double, and
 * against the bits of the scalar set. */
#define _DEFAULT_SOURCE /* guarded.h */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"
#include "support/guarded.h"
#include "support/isas.h"
#include "support/test.h"

enum { MAX_DIM = 1024, MAX_KEYS = 70, MAX_Q = 33, UNTOUCHED = 12345, CACHE_LINE = 64 };

static char *guarded_end, *codes_end; /* ends of memory; reading beyond them faults */
static float keys[MAX_KEYS * MAX_DIM];

static int code_of(const uint8_t *sketch, int d) { return sketch[d / 32 * 8 + d % 8] >> d % 32 / 8 * 2 & 3; }

static double scale_of(const uint8_t *sketch, int dim) {
    float scale;
    kvc_kernels_scalar.convert(KVC_F16, KVC_F32, &scale, 0, sketch + dim / 4, 0, 1, 1);
    return (double)scale;
}

/* Keys of several sizes, with a large element, and one of zeros. */
static void make_keys(int n, int dim) {
    for (int i = 0; i < n; i++) {
        const float size = ldexpf(1, random_int(-12, 8));
        for (int d = 0; d < dim; d++) keys[i * dim + d] = i == 5 ? 0 : size * random_float();
        keys[i * dim + random_int(0, dim)] *= i % 3 ? 1 : 20;
    }
}

static void check_sketch(const char *name, const uint8_t *sketch, const float *key, int dim) {
    double squares = 0, products = 0;
    for (int d = 0; d < dim; d++) squares += (double)key[d] * (double)key[d];
    const double most = 0.98 * sqrt(squares / dim);
    for (int d = 0; d < dim; d++) {
        const double x = (double)key[d], least = fmin(fabs(x), fabs(fabs(x) - most));
        const int code = (x > -most) + (x > 0) + (x > most), found = code_of(sketch, d);
        products += x * (found - 1.5);
        CHECKF(found == code || least <= 1e-6 * most, "%s: element %d of %d has code %d, not %d", name, d, dim, found,
               code);
    }
    const double scale = squares == 0 ? 0 : squares / products;
    CHECKF(fabs(scale_of(sketch, dim) - scale) <= scale * (1.0 / 2048 + 1e-5) + 1.0 / (1 << 25),
           "%s: the scale of %d elements is %g, not %g", name, dim, scale_of(sketch, dim), scale);
}

/* Makes sketches of n keys that lie `gap` bytes apart, and writes nothing else. */
static void test_make(const kvc_kernels *kernels, int n, int dim, int gap) {
    static uint8_t sketches[MAX_KEYS * MAX_DIM], plain[MAX_KEYS * MAX_DIM];
    const int bytes = dim / 4 + KVC_SCALE_BYTES, stride = bytes + gap;
    const size_t size = (size_t)(n * dim) * sizeof *keys;
    make_keys(n, dim);
    char *const given = guarded_end - size;
    memcpy(given, keys, size);
    memset(sketches, 0xa5, sizeof sketches);
    memset(plain, 0xa5, sizeof plain);
    kernels->make_sketches(sketches + gap, stride, (const float *)(const void *)given, n, dim);
    kvc_kernels_scalar.make_sketches(plain + gap, stride, keys, n, dim);
    for (int i = 0; i < n; i++) check_sketch(kernels->name, sketches + gap + i * stride, keys + i * dim, dim);
    CHECKF(!memcmp(sketches, plain, sizeof plain), "%s: sketches of %d keys of %d differ from the scalar set's",
           kernels->name, n, dim);
}

/* A key with an element that is no number, or not finite, has a scale that is no number. */
static void test_not_finite(const kvc_kernels *kernels) {
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 4; i++) {
        uint8_t sketch[64 / 4 + KVC_SCALE_BYTES], plain[sizeof sketch];
        make_keys(1, 64);
        keys[17 * i] = bad[i];
        kernels->make_sketches(sketch, 0, keys, 1, 64);
        kvc_kernels_scalar.make_sketches(plain, 0, keys, 1, 64);
        CHECK(isnan(scale_of(sketch, 64)) && !memcmp(sketch, plain, sizeof plain));
    }
    make_keys(1, 32);
    for (int d = 0; d < 32; d++) keys[d] = 1e6f;
    uint8_t sketch[32 / 4 + KVC_SCALE_BYTES];
    kernels->make_sketches(sketch, 0, keys, 1, 32);
    CHECK(scale_of(sketch, 32) == (double)KVC_LARGEST_F16);
}

static size_t codes_size(int num_q, int dim) {
    const int step = 4 * KVC_SKETCH_STEP;
    return (size_t)((num_q + KVC_LANES - 1) / KVC_LANES * KVC_LANES * ((dim + step - 1) / step * step));
}

/* Scores as the caller of a kvc_sketch_fn does. */
static void score(const kvc_kernels *kernels, float *scores, const kvc_sketch_query *q, int num_q, const uint8_t *rows,
                  int by, int dim) {
    const int is_tiled = kernels->tiled_sketches && num_q >= kernels->tiled_sketches;
    kvc_former former;
    if (is_tiled) kernels->begin(&former);
    kernels->sketch(scores, q, num_q, rows, by, dim);
    if (is_tiled) kernels->end(&former);
}

/* Each query has the bits that it has alone. */
static void check_alone(const kvc_kernels *kernels, const float *scores, const kvc_sketch_query *q, int num_q,
                        const uint8_t *rows, int by, int dim) {
    static float alone[KVC_SCORES];
    static int8_t codes[KVC_LANES * MAX_DIM];
    for (int r = 0; r < num_q; r++) {
        const kvc_sketch_query one = {codes, q->scales + r, q->offsets + r, q->stride};
        memcpy(codes, q->codes + r * q->stride, (size_t)q->stride);
        score(kernels, alone, &one, 1, rows, by, dim);
        CHECKF(!memcmp(alone, scores + r * KVC_SCORES, KVC_PANEL * sizeof *alone),
               "%s: query %d of %d, of %d elements, has other scores alone", kernels->name, r, num_q, dim);
    }
}

/* Scores for num_q queries of rows `gap` bytes apart, behind which a cache line may be read.  Row 9 has the largest
 * codes, and so has the first query.  Behind the queries is garbage, up to a multiple of KVC_LANES. */
static void test_scores(const kvc_kernels *kernels, int num_q, int dim, int gap) {
    static float scores[MAX_Q * KVC_SCORES], plain[MAX_Q * KVC_SCORES];
    float scales[MAX_Q], offsets[MAX_Q];
    const int bytes = dim / 4 + KVC_SCALE_BYTES, by = bytes + gap, step = 4 * KVC_SKETCH_STEP;
    int8_t *const codes = (int8_t *)codes_end - codes_size(num_q, dim);
    const kvc_sketch_query query = {codes, scales, offsets, (dim + step - 1) / step * step};
    uint8_t *const rows = (uint8_t *)guarded_end - CACHE_LINE - bytes - (KVC_PANEL - 1) * by;
    memset(codes, 0x5a, codes_size(num_q, dim));
    memset(codes, 0, (size_t)(num_q * query.stride));
    for (int r = 0; r < num_q; r++) {
        int sum = 0;
        for (int d = 0; d < dim; d++)
            sum += codes[r * query.stride + d] = (int8_t)(r ? random_int(-127, 128) : num_q % 2 ? 127 : -127);
        scales[r] = random_float();
        offsets[r] = -1.5f * (float)sum;
    }
    make_keys(KVC_PANEL, dim);
    kvc_kernels_scalar.make_sketches(rows, by, keys, KVC_PANEL, dim);
    memset(rows + 9 * by, 0xff, (size_t)dim / 4);
    for (int i = 0; i < MAX_Q * KVC_SCORES; i++) scores[i] = plain[i] = UNTOUCHED;
    score(kernels, scores, &query, num_q, rows, by, dim);
    check_alone(kernels, scores, &query, num_q, rows, by, dim);
    for (int r = 0; r < num_q; r++)
        for (int j = 0; j < KVC_PANEL; j++) {
            double sum = 0;
            for (int d = 0; d < dim; d++) sum += codes[r * query.stride + d] * (code_of(rows + j * by, d) - 1.5);
            const double exact = sum * scale_of(rows + j * by, dim) * (double)scales[r];
            const double score = (double)scores[r * KVC_SCORES + j % 4 * KVC_LANES + j / 4];
            CHECKF(fabs(score - exact) <= 2 * FLT_EPSILON * fabs(exact),
                   "%s: query %d of %d, row %d of %d is %g, not %g", kernels->name, r, num_q, j, dim, score, exact);
        }
    kvc_kernels_scalar.sketch(plain, &query, num_q, rows, by, dim);
    CHECKF(!memcmp(scores, plain, sizeof plain), "%s: %d queries of %d differ from the scalar set", kernels->name,
           num_q, dim);
}

enum { NUM_TILES = 3, STRIDE = NUM_TILES * KVC_LANES + 8 };

/* Compares a query's weights, and their sums, with those of its scores. */
static void check_weights(const char *name, const float *scores, const float *pieces, const float *sums, int num_tiles,
                          float exponent) {
    double right[KVC_LANES] = {0};
    for (int i = 0; i < num_tiles * KVC_LANES; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++) {
            const double score = (double)scores[i / KVC_LANES * KVC_PANEL + k * KVC_LANES + i % KVC_LANES];
            CHECK(!(score * 1.442695 > (double)exponent + KVC_SLACK + 0.001));
            sum += exp(score) / exp2(isinf(exponent) ? 0 : (double)exponent);
        }
        right[i % KVC_LANES] += sum;
        const double found = (double)pieces[i];
        CHECKF(isnan(sum) ? isnan(found) : fabs(found - sum) <= 1.1e-4 * sum + 5e-38, "%s: piece %d weighs %g, not %g",
               name, i, found, sum);
    }
    for (int i = num_tiles * KVC_LANES; i < STRIDE; i++) CHECK(pieces[i] == UNTOUCHED);
    for (int i = 0; i < KVC_LANES; i++)
        CHECKF(isnan(right[i]) ? isnan(sums[i]) : fabs((double)sums[i] - right[i]) <= 1.1e-4 * right[i] + 5e-38,
               "%s: lane %d sums to %g, not %g", name, i, (double)sums[i], right[i]);
}

/* Weighs the pieces of some tiles.  The second has larger scores, but none that raises an exponent; the third has one.
 * Some rows are hidden or no numbers; nothing is seen of the first tile of a query. */
static void test_weigh(const kvc_kernels *kernels, int num_q, int bad) {
    static float scores[MAX_Q * KVC_SCORES], all[MAX_Q][NUM_TILES * KVC_PANEL], pieces[MAX_Q * STRIDE];
    float exponents[MAX_Q], sums[MAX_Q * KVC_LANES] = {0};
    for (int r = 0; r < num_q; r++) exponents[r] = -INFINITY;
    for (int i = 0; i < MAX_Q * STRIDE; i++) pieces[i] = UNTOUCHED;
    for (int tile = 0; tile < NUM_TILES; tile++) {
        for (int i = 0; i < MAX_Q * KVC_SCORES; i++) scores[i] = (float)(5 + 8 * (tile == 1)) * random_float();
        for (int r = 0; r < num_q; r++) {
            for (int j = 0; j < KVC_PANEL; j += 3) scores[r * KVC_SCORES + j] = bad ? -INFINITY : -200;
            if (bad) scores[r * KVC_SCORES + 7] = NAN;
        }
        if (tile == 2) scores[(num_q - 1) * KVC_SCORES + 40] = 50;
        for (int j = 0; bad && j < KVC_PANEL && !tile; j++) scores[j] = -INFINITY;
        kernels->weigh_pieces(pieces, STRIDE, tile * KVC_LANES, scores, num_q, exponents, sums);
        for (int r = 0; r < num_q; r++) {
            memcpy(all[r] + tile * KVC_PANEL, scores + r * KVC_SCORES, KVC_PANEL * sizeof *scores);
            CHECK(isinf(exponents[r]) ? !r && bad && !tile : exponents[r] == truncf(exponents[r]));
            check_weights(kernels->name, all[r], pieces + r * STRIDE, sums + r * KVC_LANES, tile + 1, exponents[r]);
        }
    }
    CHECK(exponents[num_q - 1] == 72 && (num_q == 1 || exponents[0] < 40)); /* 50 * log2(e) */
}

/* Weights rise with scores, have no weight far below, and are no numbers where there is an infinite score. */
static void test_rising(const kvc_kernels *kernels) {
    static float scores[KVC_SCORES], pieces[KVC_LANES], sums[KVC_LANES];
    float exponent = 0, before = 0;
    for (int i = 0; i < 4000; i++) {
        for (int j = 0; j < KVC_PANEL; j++) scores[j] = -120 + (float)(16 * i + j % KVC_LANES) * (136.0f / 64000);
        kernels->weigh_pieces(pieces, 0, 0, scores, 1, &exponent, sums);
        for (int j = 0; j < KVC_LANES; before = pieces[j++])
            CHECKF(pieces[j] >= before || scores[j] < -87, "%s: %g weighs %g, less weighs %g", kernels->name,
                   (double)scores[j], (double)pieces[j], (double)before);
        CHECK(exponent == 0 && (scores[0] > -105 || pieces[0] == 0));
    }
    scores[3] = INFINITY;
    kernels->weigh_pieces(pieces, 0, 0, scores, 1, &exponent, sums);
    CHECK(isinf(exponent) && isnan(pieces[3]) && pieces[2] == 0);
}

static void test_isa(void) {
    static const int dims[] = {32, 64, 96, 128, 160, 192, 256, 288, 512, 544, 1024};
    static const int queries[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 17, 20, 31, 32, MAX_Q};
    const char *wanted;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    for (int i = 0; i < (int)(sizeof dims / sizeof *dims); i++) {
        for (int n = 1; n <= MAX_KEYS / 4; n += n < 4 ? 1 : 13) test_make(kernels, n, dims[i], random_int(0, 6));
        for (int j = 0; j < (int)(sizeof queries / sizeof *queries); j++)
            if (queries[j] <= 13 || dims[i] <= 128 || dims[i] == 256 || queries[j] == MAX_Q)
                test_scores(kernels, queries[j], dims[i], random_int(0, 6));
    }
    test_not_finite(kernels);
    test_rising(kernels);
    for (int num_q = 1; num_q <= 13; num_q++) test_weigh(kernels, num_q, 0), test_weigh(kernels, num_q, 1);
}

int main(void) {
    guarded_end = guarded_new(1 << 19);
    codes_end = guarded_new(codes_size(MAX_Q, MAX_DIM));
    for_each_isa(test_isa);
    return test_result();
}
