/* The kernels by which rows are ranked: every set of this machine against arithmetic in double, and, for int8, against
 * the bits of the scalar set. */
#define _DEFAULT_SOURCE /* guarded.h */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"
#include "support/guarded.h"
#include "support/isas.h"
#include "support/test.h"

enum { MAX_DIM = 160, MAX_LANES = 320, MAX_CHOICES = 32, UNTOUCHED = 12345 };

static char *guarded_end; /* end of the memory of rows; reading beyond it faults */

/* Queries of heads, and rows, as numbers and as they are stored. */
typedef struct ranked {
    kvc_rank_query query;
    uint32_t packed[MAX_DIM * MAX_LANES], masks[MAX_LANES];
    float weights[MAX_LANES], by[KVC_TILE];
    int32_t starts[MAX_LANES];
    double q[MAX_LANES][MAX_DIM], k[KVC_TILE][MAX_DIM];
    const char *rows;
    int64_t stride;
} ranked;

static ranked r;

/* Stores element d of a row of a type, and returns it as a number. */
static double store(int type, char *row, int d) {
    const float x = random_float();
    if (type == KVC_INT8) return ((int8_t *)row)[d] = (int8_t)random_int(-128, 128);
    float y;
    char *at = row + d * (int)kvc_row_bytes(type, 1);
    kvc_kernels_scalar.convert(KVC_F32, type, at, 0, &x, 0, 1, 1);
    kvc_kernels_scalar.convert(type, KVC_F32, &y, 0, at, 0, 1, 1);
    return y;
}

static void make_queries(int type, int dim, int choices, int heads, int lanes) {
    const int bytes = type == KVC_INT8 ? 1 : (int)kvc_row_bytes(type, 1);
    r.query = (kvc_rank_query){.packed = r.packed,
                               .weights = r.weights,
                               .masks = r.masks,
                               .starts = r.starts,
                               .num_steps = dim * bytes / KVC_STEP_BYTES,
                               .num_lanes = (choices * lanes + KVC_LANES - 1) / KVC_LANES * KVC_LANES,
                               .choice_lanes = lanes,
                               .relu = random_int(0, 2)};
    memset(r.packed, 0, sizeof r.packed);
    for (int h = 0; h < r.query.num_lanes; h++) {
        char row[MAX_DIM * 4];
        const int is_head = h / lanes < choices && h % lanes < heads;
        int sum = 0;
        r.masks[h] = is_head ? UINT32_MAX : 0;
        r.weights[h] = is_head ? random_float() : 0;
        for (int d = 0; d < dim; d++) {
            r.q[h][d] = store(type, row, d);
            if (type == KVC_INT8 && r.q[h][d] == -128) r.q[h][d] = ((int8_t *)row)[d] = -127;
            sum += (int)r.q[h][d];
        }
        for (int i = 0; is_head && i < r.query.num_steps; i++)
            memcpy(&r.packed[i * r.query.num_lanes + h], row + i * KVC_STEP_BYTES, KVC_STEP_BYTES);
        r.starts[h] = is_head ? -128 * sum : 0;
    }
}

static void make_rows(int type, int dim, int n) {
    const int64_t bytes = type == KVC_INT8 ? dim : (int64_t)kvc_row_bytes(type, dim);
    r.stride = bytes + random_int(0, 3) * (type == KVC_INT8 ? 1 : (int)kvc_row_bytes(type, 1));
    r.rows = guarded_end - bytes - (n - 1) * r.stride;
    for (int j = 0; j < n; j++) {
        r.by[j] = random_float();
        for (int d = 0; d < dim; d++) r.k[j][d] = store(type, (char *)r.rows + j * r.stride, d);
    }
}

/* Compares the score of row j for a choice with arithmetic in double. */
static void check_score(const char *name, int type, int dim, int c, int j, float score) {
    const int lanes = r.query.choice_lanes;
    double sum = 0, size = 0;
    for (int h = c * lanes; h < (c + 1) * lanes; h++) {
        double product = 0, magnitude = 0;
        for (int d = 0; d < dim; d++) {
            product += r.q[h][d] * r.k[j][d];
            magnitude += fabs(r.q[h][d] * r.k[j][d]);
        }
        product *= (double)r.by[j];
        if (r.query.relu && product < 0) product = 0;
        sum += r.masks[h] ? product * (double)r.weights[h] : 0;
        size += fabs(magnitude * (double)r.by[j] * (double)r.weights[h]);
    }
    CHECKF(fabs(sum - (double)score) <= size * (dim + lanes + 2) * 0.5 * FLT_EPSILON,
           "%s: %s, %d elements, %d lanes, row %d is %g, not %g", name, kvc_type_name(type), dim, lanes, j,
           (double)score, sum);
}

/* choices: of `heads` heads each, which take `lanes` lanes. */
static void test_ranks(const kvc_kernels *kernels, int type, int dim, int choices, int heads, int lanes, int n) {
    static float scores[MAX_CHOICES * KVC_SCORES], plain[MAX_CHOICES * KVC_SCORES];
    make_queries(type, dim, choices, heads, lanes);
    make_rows(type, dim, n);
    const int num = r.query.num_lanes / lanes, padded = (n + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    for (int i = 0; i < MAX_CHOICES * KVC_SCORES; i++) scores[i] = UNTOUCHED;
    kernels->rank[type](scores, &r.query, r.rows, r.stride, r.by, n);
    for (int c = 0; c < choices; c++)
        for (int j = 0; j < n; j++) check_score(kernels->name, type, dim, c, j, scores[c * KVC_SCORES + j]);
    for (int i = 0; i < MAX_CHOICES * KVC_SCORES; i++)
        if (i >= num * KVC_SCORES || i % KVC_SCORES >= padded) CHECK(scores[i] == UNTOUCHED);
    if (type != KVC_INT8) return;
    kvc_kernels_scalar.rank[type](plain, &r.query, r.rows, r.stride, r.by, n);
    for (int c = 0; c < choices; c++)
        CHECKF(!memcmp(scores + c * KVC_SCORES, plain + c * KVC_SCORES, (size_t)n * sizeof *plain),
               "%s: choice %d of %d lanes differs from the scalar set", kernels->name, c, lanes);
}

/* Rows that are no numbers spoil no empty lane, and a NaN stays one. */
static void test_not_finite(const kvc_kernels *kernels, int relu) {
    float scores[4 * KVC_SCORES];
    make_queries(KVC_F32, 2, 3, 3, 4);
    make_rows(KVC_F32, 2, 3);
    const float keys[3][2] = {{INFINITY, 0}, {-INFINITY, 0}, {NAN, 1}};
    r.query.relu = relu;
    for (int j = 0; j < 3; j++) {
        memcpy((char *)r.rows + j * r.stride, keys[j], sizeof keys[j]);
        r.by[j] = 1;
    }
    for (int h = 0; h < 12; h++) {
        const float q[2] = {1, 2};
        r.weights[h] = 1;
        for (int d = 0; r.masks[h] && d < 2; d++) memcpy(&r.packed[d * r.query.num_lanes + h], &q[d], sizeof q[d]);
    }
    kernels->rank[KVC_F32](scores, &r.query, r.rows, r.stride, r.by, 3);
    for (int c = 0; c < 3; c++) {
        CHECK(scores[c * KVC_SCORES] == INFINITY);
        CHECK(scores[c * KVC_SCORES + 1] == (relu ? 0 : -INFINITY));
        CHECK(isnan(scores[c * KVC_SCORES + 2]));
    }
}

static void test_isa(void) {
    static const struct {
        int choices, heads, lanes;
    } shapes[] = {{1, 1, 1},   {16, 1, 1},  {4, 2, 2},     {5, 3, 4},    {2, 8, 8},   {3, 5, 8},
                  {1, 16, 16}, {1, 9, 16},  {4, 16, 16},   {1, 32, 32},  {1, 40, 48}, {2, 33, 48},
                  {1, 64, 64}, {2, 64, 64}, {1, 100, 112}, {1, 128, 128}};
    const char *wanted;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    for (int type = 0; type < KVC_STORED_TYPES; type++) {
        if (!kernels->rank[type]) continue;
        const int dims[] = {type == KVC_INT8 ? 32 : type == KVC_BF16 ? 2 : 1, type == KVC_INT8 ? 96 : 26, 128};
        for (int s = 0; s < (int)(sizeof shapes / sizeof *shapes); s++)
            for (int d = 0; d < 3; d++)
                test_ranks(kernels, type, dims[d], shapes[s].choices, shapes[s].heads, shapes[s].lanes,
                           random_int(0, 2) ? random_int(1, KVC_TILE + 1) : KVC_TILE);
        for (int n = 1; n <= 40; n++) test_ranks(kernels, type, 64, 1, 64, 64, n);
    }
    for (int relu = 0; relu < 2; relu++) test_not_finite(kernels, relu);
}

int main(void) {
    guarded_end = guarded_new(1 << 18);
    for_each_isa(test_isa);
    return test_result();
}
