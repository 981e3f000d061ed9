/* Kernels of prompts in bytes: those of every set give the bits of the scalar ones, and these are right.  What they
 * read and write ends at memory that faults. */
#define _DEFAULT_SOURCE /* guarded.h */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"
#include "kvcache.h"
#include "support/guarded.h"
#include "support/isas.h"
#include "support/test.h"

enum { MOST_DIM = 576, MOST_Q = KVC_BLOCK_QUERIES, TILE = KVC_BYTE_TILE, MOST_GAP = 40 };
enum { ROOM = TILE * (MOST_DIM + MOST_GAP), Q_ROOM = MOST_Q * 1000 * (int)sizeof(float) };

/* Ends of memory.  Of what two sets write, each has its own. */
static char *rows_end, *q_end, *units_end, *byte_units_end, *factors_end, *panel_end[2], *scores_end[2], *acc_end[2];
static char *max_end[2], *sum_end[2], *factor_end[2], *unit_end[2];

static float *floats_before(char *end, int n) { return (float *)(void *)(end - (size_t)n * sizeof(float)); }

/* Whether numbers have the same bits, or both are NaN. */
static int is_same(float x, float y) { return isnan(x) ? isnan(y) : !memcmp(&x, &y, sizeof x); }

/* What codes are. */
enum { ANY_CODES, LARGEST_CODES, CODE_KINDS };

/* A code from `least` on: -127, or -128, which only stored rows of int8 may hold. */
static int8_t random_code(int kind, int least) {
    if (kind == ANY_CODES) return (int8_t)random_int(least, 128);
    return (int8_t)(random_int(0, 2) ? 127 : random_int(least, -126));
}

/* ---- scores and sums --------------------------------------------------------------------------------------------- */

/* A number for a scale or a factor: mostly usual, sometimes extreme; with `any`, also none or infinite. */
static float random_unit(int any) {
    static const float odd[] = {0, 0x1p-149f, 0x1p-126f, 1e-30f, 1e30f, FLT_MAX, INFINITY, NAN};
    return random_int(0, 8) ? fabsf(random_float()) : odd[random_int(0, any ? 8 : 6)];
}

/* A tile of random rows of int8, side by side or not, in rising or falling memory. */
static const char *rows_new(int n, int dim, int kind, int64_t *stride) {
    const int sign = random_int(0, 2) ? 1 : -1;
    *stride = sign * (dim + random_int(0, 3) * random_int(0, MOST_GAP / 2));
    const char *const first = rows_end - dim - (sign > 0 ? (n - 1) * *stride : 0);
    for (int j = 0; j < n; j++)
        for (int d = 0; d < dim; d++) *((char *)first + j * *stride + d) = (char)random_code(kind, -128);
    return first;
}

/* Packs rows as attention does, into a panel of garbage. */
static void *pack(kvc_pack_bytes_fn *pack_rows, char *end, const char *rows, int64_t stride, int n, int dim) {
    static char copy[KVC_PANEL * MOST_DIM];
    const size_t size = (size_t)(TILE * ((dim + KVC_BYTE_CODES - 1) / KVC_BYTE_CODES * KVC_BYTE_CODES));
    for (size_t i = 0; i < size; i++) *(end - 1 - i) = (char)random_int(-128, 128);
    for (int i = 0; i < n; i += KVC_PANEL) {
        const int some = n - i < KVC_PANEL ? n - i : KVC_PANEL, padded = (some + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
        memset(copy, 0, sizeof copy);
        for (int j = 0; j < some; j++) memcpy(copy + j * dim, rows + (i + j) * stride, (size_t)dim);
        if (some == padded)
            pack_rows(end - size, rows + i * stride, stride, i, some, dim);
        else
            pack_rows(end - size, copy, dim, i, padded, dim);
    }
    return end - size;
}

/* Query rows whose memory ends behind the zeros. */
static const float *queries_new(int num_q, int dim, int kind, int *stride) {
    const int room = KVC_BYTE_CODES + (dim + KVC_BYTE_CODES - 1) / KVC_BYTE_CODES * KVC_BYTE_CODES;
    *stride = room / (int)sizeof(float) + random_int(0, 3) * 16;
    float *const q = floats_before(q_end, (num_q - 1) * *stride + room / (int)sizeof(float));
    for (int r = 0; r < num_q; r++) {
        char *const row = (char *)(q + r * *stride);
        int8_t *const codes = (int8_t *)row + KVC_BYTE_CODES;
        kvc_byte_query query = {random_unit(1) * (random_int(0, 2) ? 1 : -1), 0};
        memset(row, 0, (size_t)room);
        for (int d = 0; d < dim; d++) query.sum += codes[d] = random_code(kind, -127);
        memcpy(row, &query, sizeof query);
    }
    return q;
}

/* Checks scores against sums of integers. */
static void check_scores(const float *scores, const float *q, int q_stride, int num_q, const char *rows, int64_t stride,
                         const float *units, int n, int dim) {
    for (int r = 0; r < num_q; r++)
        for (int j = 0; j < n; j++) {
            const int8_t *const codes = (const int8_t *)(q + r * q_stride) + KVC_BYTE_CODES;
            kvc_byte_query query;
            int32_t sum = 0;
            memcpy(&query, q + r * q_stride, sizeof query);
            for (int d = 0; d < dim; d++) sum += codes[d] * (int8_t)rows[j * stride + d];
            const float product = (float)sum * units[j], right = product * query.unit,
                        got = scores[r * KVC_BYTE_SCORES + j];
            CHECKF(is_same(got, right), "query %d of %d, key %d of %d, dim %d: %a, not %a", r, num_q, j, n, dim,
                   (double)got, (double)right);
        }
}

static void test_score(const kvc_kernels *kernels, int n, int num_q, int dim, int kind) {
    const kvc_kernels *const sets[] = {&kvc_kernels_scalar, kernels};
    const int padded = kvc_padded_rows(n);
    float *const units = floats_before(units_end, padded);
    int64_t stride;
    int q_stride;
    const char *const rows = rows_new(n, dim, kind, &stride);
    const float *const q = queries_new(num_q, dim, kind, &q_stride);
    for (int j = 0; j < padded; j++) units[j] = random_unit(1);
    for (int i = 0; i < 2; i++) {
        const kvc_byte_kernels *bytes = &sets[i]->bytes;
        float *const scores = floats_before(scores_end[i], (num_q - 1) * KVC_BYTE_SCORES + padded);
        const void *panel = pack(bytes->pack_keys, panel_end[i], rows, stride, n, dim);
        bytes->score(scores, q, q_stride, num_q, panel, units, n, dim);
        check_scores(scores, q, q_stride, num_q, rows, stride, units, n, dim);
    }
}

/* Checks sums against sums of integers. */
static void check_sums(const float *acc, const float *before, int acc_stride, const float *factor, const float *unit,
                       const float *weights, int num_q, const char *rows, int64_t stride, int n, int dim) {
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < acc_stride && (r < num_q - 1 || d < dim); d++) {
            const float was = before[r * acc_stride + d], got = acc[r * acc_stride + d];
            int32_t sum = 0;
            for (int j = 0; j < n && d < dim; j++)
                sum += ((const uint8_t *)(weights + r * KVC_BYTE_SCORES))[j] * (int8_t)rows[j * stride + d];
            const float old = was * factor[r], right = d < dim ? fmaf((float)sum, unit[r], old) : was;
            CHECKF(is_same(got, right), "query %d of %d, column %d of %d, %d rows: %a, not %a", r, num_q, d, dim, n,
                   (double)got, (double)right);
        }
}

static void test_sum(const kvc_kernels *kernels, int n, int num_q, int dim, int kind) {
    static float before[MOST_Q * (MOST_DIM + MOST_GAP)];
    const kvc_kernels *const sets[] = {&kvc_kernels_scalar, kernels};
    const int acc_stride = dim + random_int(0, 3) * KVC_LANES, size = (num_q - 1) * acc_stride + dim;
    const int padded = kvc_padded_rows(n);
    float *const factor = floats_before(factors_end, 2 * num_q), *const unit = factor + num_q;
    float *const weights = floats_before(scores_end[0], (num_q - 1) * KVC_BYTE_SCORES + padded / (int)sizeof(float));
    int64_t stride;
    const char *const rows = rows_new(n, dim, kind, &stride);
    for (int r = 0; r < num_q; r++) {
        uint8_t *const row = (uint8_t *)(weights + r * KVC_BYTE_SCORES);
        factor[r] = random_unit(0), unit[r] = random_unit(0);
        memset(row, 0, (size_t)padded);
        for (int j = 0; j < n; j++) row[j] = (uint8_t)(kind == ANY_CODES ? random_int(0, 256) : 255 - random_int(0, 2));
    }
    for (int i = 0; i < size; i++) before[i] = random_float() * random_unit(1);
    for (int i = 0; i < 2; i++) {
        const kvc_byte_kernels *bytes = &sets[i]->bytes;
        float *const acc = floats_before(acc_end[i], size);
        memcpy(acc, before, (size_t)size * sizeof *acc);
        const void *panel = pack(bytes->pack_values, panel_end[i], rows, stride, n, dim);
        bytes->sum(acc, acc_stride, factor, unit, weights, num_q, panel, n, dim);
        check_sums(acc, before, acc_stride, factor, unit, weights, num_q, rows, stride, n, dim);
    }
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* A step of the softmax: what a kvc_weigh_bytes_fn takes, and what it makes of it. */
typedef struct step {
    float *scores, *max, *sum, *factor, *unit;
} step;

/* What scores and units are. */
enum { USUAL, MASKED, ALL_MASKED, EXTREME, NOT_FINITE, SCORE_KINDS };

static step step_at(int i, int num_q, int padded) {
    return (step){floats_before(scores_end[i], (num_q - 1) * KVC_BYTE_SCORES + padded),
                  floats_before(max_end[i], num_q), floats_before(sum_end[i], num_q),
                  floats_before(factor_end[i], num_q), floats_before(unit_end[i], num_q)};
}

static float random_score(int kind) {
    static const float extremes[] = {-FLT_MAX, -1e30f, -88, -87, -1e-30f, 0, 1e-30f, 87, 1e30f, 0x1.8p126f};
    static const float odd[] = {INFINITY, NAN, -INFINITY, FLT_MAX};
    if (kind == ALL_MASKED || (kind == MASKED && random_int(0, 3))) return -INFINITY;
    if (kind == EXTREME && !random_int(0, 3)) return extremes[random_int(0, 10)];
    if (kind == NOT_FINITE && !random_int(0, 20)) return odd[random_int(0, 4)];
    return 20 * random_float();
}

/* Scores, and what was before.  In one row of five another kind of scores stands, so that rows differ. */
static void step_fill(const step *s, int num_q, int n, int padded, int kind) {
    for (int r = 0; r < num_q; r++) {
        const int own = random_int(0, 5) ? kind : random_int(0, NOT_FINITE);
        for (int j = 0; j < padded; j++) s->scores[r * KVC_BYTE_SCORES + j] = j < n ? random_score(own) : NAN;
        const int is_first = !random_int(0, 3);
        s->max[r] = is_first ? -INFINITY : kind == EXTREME ? random_score(EXTREME) : 20 * random_float();
        s->sum[r] = is_first ? 0 : ldexpf(1 + fabsf(random_float()), random_int(-20, 60));
        s->factor[r] = s->unit[r] = NAN;
    }
}

static void step_copy(const step *to, const step *from, int num_q, int padded) {
    memcpy(to->scores, from->scores, (size_t)((num_q - 1) * KVC_BYTE_SCORES + padded) * sizeof *to->scores);
    memcpy(to->max, from->max, (size_t)num_q * sizeof *to->max);
    memcpy(to->sum, from->sum, (size_t)num_q * sizeof *to->sum);
}

static const kvc_byte_units *units_new(int n, int padded, int kind) {
    kvc_byte_units *const units = (kvc_byte_units *)(void *)(byte_units_end - sizeof *units);
    for (int j = 0; j < TILE; j++) {
        const int exponent = kind == EXTREME ? random_int(-60, 120) : random_int(-12, 3);
        const float unit = ldexpf(1 + fabsf(random_float()), exponent), odd = kind == NOT_FINITE && !random_int(0, 40);
        units->logs[j] = j < n ? (odd ? NAN : logf(unit)) : j < padded ? 0 : NAN;
        units->inverses[j] = j < n ? (odd ? NAN : 1 / unit) : j < padded ? 0 : NAN;
    }
    return units;
}

/* Checks a row's weights and sums against arithmetic in double, unless the row has scores that are not finite. */
static void check_row(const step *was, const step *got, int r, int n, int padded, const kvc_byte_units *units) {
    const uint8_t *const weights = (const uint8_t *)(got->scores + r * KVC_BYTE_SCORES);
    const float *const row = was->scores + r * KVC_BYTE_SCORES;
    float own = -INFINITY, x[TILE];
    double sum = 0;
    for (int j = 0; j < n; j++) {
        x[j] = row[j] + units->logs[j];
        if (isnan(x[j]) || x[j] == INFINITY) {
            CHECKF(isnan(got->sum[r]), "row %d: the sum is %g", r, (double)got->sum[r]);
            return;
        }
        if (x[j] > own) own = x[j];
    }
    const float now = own > was->max[r] ? own : was->max[r];
    const double part = own == -INFINITY ? now == -INFINITY : exp((double)(own - now));
    const double factor = was->max[r] == -INFINITY ? now == -INFINITY : exp((double)(was->max[r] - now));
    for (int j = 0; j < n; j++) {
        const double e = own == -INFINITY ? 0 : exp((double)(x[j] - own));
        sum += e * (double)units->inverses[j];
        CHECKF(fabs(weights[j] - 255 * e) <= 0.5 + 1e-4, "weight %d is %d, not %g", j, weights[j], 255 * e);
    }
    for (int j = n; j < padded; j++) CHECKF(!weights[j], "weight %d of %d is %d", j, n, weights[j]);
    sum = sum * part + (double)was->sum[r] * factor;
    const double floor = 1e-36 * (1 + (double)was->sum[r] + sum); /* exp of less than -87 counts 0 */
    CHECKF(got->max[r] == now, "the maximum is %g, not %g", (double)got->max[r], (double)now);
    CHECKF(fabs((double)got->factor[r] - factor) <= 1e-6 * factor + 2e-38, "%g, %g", (double)got->factor[r], factor);
    CHECKF(fabs((double)got->unit[r] * 255 - part) <= 1e-6 * part + 2e-38, "%g, %g", (double)got->unit[r] * 255, part);
    CHECKF(fabs((double)got->sum[r] - sum) <= 1e-5 * sum + floor + 1e-36 * TILE * 0x1p60,
           "row %d: the sum is %g, not %g", r, (double)got->sum[r], sum);
}

static void test_weigh(const kvc_kernels *kernels, int n, int num_q, int kind) {
    static float scores[MOST_Q * KVC_BYTE_SCORES], max[MOST_Q], sum[MOST_Q], factor[MOST_Q], unit[MOST_Q];
    const int padded = kvc_padded_rows(n);
    const step given = {scores, max, sum, factor, unit}, plain = step_at(0, num_q, padded),
               own = step_at(1, num_q, padded);
    const kvc_byte_units *const units = units_new(n, padded, kind);
    step_fill(&given, num_q, n, padded, kind);
    step_copy(&plain, &given, num_q, padded);
    step_copy(&own, &given, num_q, padded);
    kvc_kernels_scalar.bytes.weigh(plain.scores, num_q, n, units, plain.max, plain.sum, plain.factor, plain.unit);
    kernels->bytes.weigh(own.scores, num_q, n, units, own.max, own.sum, own.factor, own.unit);
    for (int r = 0; r < num_q; r++) {
        check_row(&given, &plain, r, n, padded, units);
        CHECKF(is_same(own.sum[r], plain.sum[r]), "%s: kind %d, %d rows, query %d of %d: the sum is %a, not %a",
               kernels->name, kind, n, r, num_q, (double)own.sum[r], (double)plain.sum[r]);
        if (isnan(plain.sum[r])) continue; /* the rest counts for nothing */
        CHECKF(!memcmp(own.scores + r * KVC_BYTE_SCORES, plain.scores + r * KVC_BYTE_SCORES, (size_t)padded) &&
                   is_same(own.max[r], plain.max[r]) && is_same(own.factor[r], plain.factor[r]) &&
                   is_same(own.unit[r], plain.unit[r]),
               "%s: kind %d, %d rows, query %d of %d: max %a, %a, factor %a, %a, unit %a, %a", kernels->name, kind, n,
               r, num_q, (double)own.max[r], (double)plain.max[r], (double)own.factor[r], (double)plain.factor[r],
               (double)own.unit[r], (double)plain.unit[r]);
    }
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

static void test_all(const kvc_kernels *kernels, int n, int num_q, int dim) {
    for (int kind = 0; kind < CODE_KINDS; kind++) {
        test_score(kernels, n, num_q, dim, kind);
        test_sum(kernels, n, num_q, dim, kind);
    }
    for (int kind = 0; kind < SCORE_KINDS; kind++) test_weigh(kernels, n, num_q, kind);
}

static void test_isa(void) {
    const char *wanted;
    const kvc_kernels *const kernels = kvc_cpu_kernels(&wanted);
    if (!kernels->bytes.score) {
        printf("%s has no products of bytes\n", kernels->name);
        return;
    }
    CHECKF(kernels->bytes.queries >= 1 && kernels->bytes.queries <= MOST_Q, "%d", kernels->bytes.queries);
    for (int n = 1; n <= TILE; n += is_full() || n <= KVC_PANEL ? 1 : 7) /* others fill panels alike */
        test_all(kernels, n, random_int(1, MOST_Q + 1), 32);
    for (int num_q = 1; num_q <= MOST_Q; num_q++) test_all(kernels, random_int(1, TILE + 1), num_q, 96);
    for (int dim = 32; dim <= MOST_DIM; dim += 32)
        for (int i = 0; i < (is_full() ? 40 : 2); i++)
            test_all(kernels, random_int(1, TILE + 1), random_int(1, MOST_Q + 1), dim);
}

int main(void) {
    const size_t scores = MOST_Q * KVC_BYTE_SCORES * sizeof(float);
    rows_end = guarded_new(ROOM);
    q_end = guarded_new(Q_ROOM);
    units_end = guarded_new(TILE * sizeof(float));
    byte_units_end = guarded_new(sizeof(kvc_byte_units));
    factors_end = guarded_new(2 * MOST_Q * sizeof(float));
    for (int i = 0; i < 2; i++) {
        panel_end[i] = guarded_new(ROOM);
        scores_end[i] = guarded_new(scores);
        acc_end[i] = guarded_new(MOST_Q * (MOST_DIM + MOST_GAP) * sizeof(float));
        max_end[i] = guarded_new(MOST_Q * sizeof(float));
        sum_end[i] = guarded_new(MOST_Q * sizeof(float));
        factor_end[i] = guarded_new(MOST_Q * sizeof(float));
        unit_end[i] = guarded_new(MOST_Q * sizeof(float));
    }
    for_each_isa(test_isa);
    return test_result();
}
