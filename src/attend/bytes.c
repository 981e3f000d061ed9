/* bytes.c: attends to a tile for many query rows in bytes: see bytes.h.
 *
 * Each query row, key and value has int8 codes, and a unit, which is what a code of 1 stands for.  Keys and values of a
 * tile are packed into panels, the form that kernels multiply.  Rows of int8, int6 and int4 have codes already, and one
 * scale, their unit (k_as or v_as is KVC_INT8).  Other rows are decoded, and rounded.  Query rows and keys are
 * multiplied by a Hadamard matrix first: mixed.
 */
#include "attend/bytes.h"

#include <math.h>
#include <string.h>

#include "attend/seen.h"
#include "attend/step.h"

/* ---- rows of int8 ------------------------------------------------------------------------------------------------ */

/* What a task needs while it makes rows of int8, in the last quarters of the workspace's copies of rows. */
typedef struct scratch {
    int8_t *codes; /* [KVC_PANEL] rows */
    float *rows;   /* [ROUNDED_ROWS] */
} scratch;

static scratch scratch_of(const kvc_task *t) {
    const kvc_attending *at = &t->call->plan->attending;
    const size_t widest = (size_t)kvc_larger(at->q_stride, at->acc_stride);
    float *const rows = t->workspace + at->rows;
    return (scratch){(int8_t *)(rows + 2 * KVC_PANEL * widest), rows + 3 * KVC_PANEL * widest};
}

enum { ROUNDED_ROWS = 16 }; /* that are decoded, mixed and rounded together, so that they stay in the L1 cache */

/* Rounds up to ROUNDED_ROWS rows of f32 to int8, mixed first unless mixing's order is 0.  Fills in their units.
 * Mixes all rows in one call if they follow each other. */
static void round_rows(const kvc_task *t, kvc_kernel_rows rows, int32_t dim, kvc_mixing mixing, int8_t *codes,
                       float *units) {
    const kvc_kernels *kernels = t->call->kernels;
    const int64_t bytes = dim * (int64_t)sizeof(float), at_once = rows.stride == bytes ? rows.num : 1;
    if (mixing.order) {
        float *const mixed = scratch_of(t).rows;
        for (int64_t i = 0; i < rows.num; i += at_once)
            kernels->hadamard(mixed + i * dim, (const char *)rows.first + i * rows.stride, (int)at_once * dim, mixing);
        rows.first = mixed;
        rows.stride = bytes;
    }
    kernels->round(codes, units, rows.first, rows.stride, (int)rows.num, dim);
}

/* Packs rows into a panel, as rows from `first` on; with zeros up to a multiple of KVC_LANES. */
static void pack(const kvc_task *t, kvc_pack_bytes_fn *pack_rows, void *panel, kvc_kernel_rows rows, int32_t first,
                 int32_t dim) {
    const int32_t n = (int32_t)rows.num, padded = (int32_t)kvc_align_up((uint64_t)n, KVC_LANES);
    int8_t *const codes = scratch_of(t).codes;
    if (n == padded) {
        pack_rows(panel, rows.first, rows.stride, first, n, dim);
        return;
    }
    for (int32_t i = 0; i < n && rows.first != codes; i++)
        memcpy(codes + i * dim, (const char *)rows.first + i * rows.stride, (size_t)dim);
    memset(codes + n * dim, 0, (size_t)((padded - n) * dim));
    pack_rows(panel, codes, dim, first, padded, dim);
}

/* Sets units to the scales of a tile's rows that are stored as int8, and zeros behind. */
static void load_units(const kvc_task *t, const kvc_tile *tile, int is_value, float *units) {
    uint8_t copies[KVC_TILE][KVC_SCALE_BYTES];
    t->call->kernels->convert(KVC_F16, KVC_F32, units, 0, kvc_scales_of(tile, is_value, copies), 0, 1,
                              kvc_padded_rows(tile->n));
}

/* Packs the keys of a tile, and fills in their units.  Keys stored mixed still are, unless they are rotated. */
static void pack_keys(const kvc_task *t, const kvc_tile *tile, float *units) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const int is_rotated = kvc_rotates_keys(t, tile), is_stored = t->k_as == KVC_INT8 && !is_rotated;
    const int is_transformed = c->k_mixing.order && !is_rotated;
    const kvc_mixing mixing = is_transformed ? (kvc_mixing){0, 0} : c->byte_mixing;
    int8_t *const codes = scratch_of(t).codes;
    kvc_row_place at = {tile->segment, tile->offset};
    kvc_walk keys = kvc_walk_keys(t, tile);
    if (is_stored) load_units(t, tile, 0, units);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        kvc_kernel_rows rows = {codes, plan->k_dim, n};
        if (is_stored) rows = kvc_take_keys(t, tile, &at, &keys, n);
        for (int32_t j = 0; j < n && !is_stored; j += ROUNDED_ROWS)
            round_rows(t, kvc_take_keys(t, tile, &at, &keys, kvc_smaller(n - j, ROUNDED_ROWS)), plan->k_dim, mixing,
                       codes + j * plan->k_dim, units + i + j);
        pack(t, c->kernels->bytes.pack_keys, t->workspace + plan->attending.keys, rows, i, plan->k_dim);
    }
}

/* Values of smaller units, below 1.1e-16, count as 0: sums of exp over such a unit would not be finite. */
static const float LEAST_UNIT = 0x1p-60f;

/* Rounds the next n values to int8; with codes of 0 if their unit is below LEAST_UNIT. */
static void round_values(const kvc_task *t, kvc_walk *values, int32_t n, int8_t *codes, float *units) {
    const int32_t dim = t->call->plan->v_dim;
    for (int32_t i = 0; i < n; i += ROUNDED_ROWS)
        round_rows(t, kvc_take_rows(t, values, kvc_smaller(n - i, ROUNDED_ROWS)), dim, (kvc_mixing){0, 0},
                   codes + i * dim, units + i);
    for (int32_t i = 0; i < n; i++)
        if (units[i] < LEAST_UNIT) memset(codes + i * dim, 0, (size_t)dim);
}

/* Packs the values of a tile, and fills in their units. */
static void pack_values(const kvc_task *t, const kvc_tile *tile, float *units) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const int is_stored = t->v_as == KVC_INT8;
    int8_t *const codes = scratch_of(t).codes;
    kvc_walk values = kvc_walk_values(t, tile);
    if (is_stored) load_units(t, tile, 1, units);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        kvc_kernel_rows rows = {codes, plan->v_dim, n};
        if (is_stored)
            rows = kvc_take_rows(t, &values, n);
        else
            round_values(t, &values, n, codes, units + i);
        pack(t, c->kernels->bytes.pack_values, t->workspace + plan->attending.values, rows, i, plan->v_dim);
    }
}

/* ---- units of values --------------------------------------------------------------------------------------------- */

/* Returns the logarithm of a normal number, right to about 1e-7: x is scaled to about 1, where log(x) = 2 artanh(s). */
static float log_of(float x) {
    const float ln_2 = 0.693147180559945309f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t above = bits - 0x3f3504f3; /* of the root of 1/2 */
    const int32_t exponent = (int32_t)(above >> 23) - (above >> 31 ? 512 : 0);
    bits -= (uint32_t)exponent << 23;
    memcpy(&x, &bits, sizeof x);
    const float s = (x - 1) / (x + 1), z = s * s;
    return (float)exponent * ln_2 + s * (2 + z * (2.0f / 3 + z * (2.0f / 5 + z * (2.0f / 7 + z * (2.0f / 9)))));
}

/* Sets the logarithms of n units, and 1 over them, as weights take them; NaN for values that are not finite. */
static void take_units(kvc_byte_units *to, const float *units, int32_t n) {
    for (int32_t j = 0; j < n; j++) {
        const float unit = units[j] > LEAST_UNIT ? units[j] : LEAST_UNIT;
        const float nan_or_0 = units[j] - units[j];
        to->logs[j] = log_of(unit) + nan_or_0;
        to->inverses[j] = 1 / unit + nan_or_0;
    }
    for (int32_t j = n; j < kvc_padded_rows(n); j++) to->logs[j] = to->inverses[j] = 0;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Attends to a packed tile with query rows [first, end) of a task. */
static void attend_block(const kvc_task *t, kvc_tile *tile, int32_t first, int32_t end, const float *k_units,
                         const kvc_byte_units *v_units) {
    const kvc_call *c = t->call;
    const kvc_byte_kernels *bytes = &c->kernels->bytes;
    const kvc_attending *at = &c->plan->attending;
    const int32_t num = end - first;
    float *const scores = t->workspace + at->scores, unit[KVC_BLOCK_QUERIES];
    bytes->score(scores, t->q + (size_t)first * (size_t)at->q_stride, at->q_stride, num, t->workspace + at->keys,
                 k_units, tile->n, c->plan->k_dim);
    if (!tile->is_seen || c->changes_scores) kvc_change_scores(t, tile, first, end, scores, KVC_BYTE_SCORES);
    bytes->weigh(scores, num, tile->n, v_units, t->max + first, t->sum + first, t->factor + first, unit);
    bytes->sum(t->acc + (size_t)first * (size_t)at->acc_stride, at->acc_stride, t->factor + first, unit, scores, num,
               t->workspace + at->values, tile->n, c->plan->v_dim);
}

void kvc_multiply_bytes(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    const kvc_call *c = all->call;
    float k_units[KVC_BYTE_TILE], units[KVC_BYTE_TILE];
    kvc_byte_units v_units;
    kvc_query_rows_for(all, current);
    const kvc_task t = kvc_view_that_sees(all, current);
    const int32_t num = t.num_query_rows, at_once = c->kernels->bytes.queries;
    if (num) {
        pack_keys(&t, current, k_units);
        pack_values(&t, current, units);
        take_units(&v_units, units, current->n);
    }
    kvc_next_tile(next, upcoming);
    kvc_walk next_keys = kvc_walk_keys(&t, next), next_values = kvc_walk_values(&t, next);
    const int32_t blocks = num ? (num + at_once - 1) / at_once : 1, ahead = (next->n + blocks - 1) / blocks;
    kvc_former former;
    if (c->kernels->begin) c->kernels->begin(&former);
    for (int32_t first = 0, end; first < num; first = end) {
        end = (int32_t)kvc_smaller(num, first + at_once);
        kvc_prefetch(kvc_take_ahead(c, &next_keys, ahead));
        kvc_prefetch(kvc_take_ahead(c, &next_values, ahead));
        attend_block(&t, current, first, end, k_units, &v_units);
    }
    if (c->kernels->end) c->kernels->end(&former);
}
