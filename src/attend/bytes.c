/* bytes.c: see bytes.h. */
#include "attend/bytes.h"

#include <math.h>
#include <string.h>

#include "attend/queries.h"
#include "attend/seen.h"
#include "attend/walk.h"

/* ---- rows of int8 ------------------------------------------------------------------------------------------------ */

/* What a task needs while it makes rows of int8, in the last quarters of the workspace's copies of rows. */
typedef struct scratch {
    int8_t *codes; /* [KVC_PANEL] rows */
    float *row;
} scratch;

static scratch scratch_of(const kvc_task *t) {
    const kvc_attending *at = &t->call->plan->attending;
    const size_t widest = (size_t)kvc_larger(at->q_stride, at->acc_stride);
    float *const rows = t->workspace + at->rows;
    return (scratch){(int8_t *)(rows + 2 * KVC_PANEL * widest), rows + 3 * KVC_PANEL * widest};
}

/* Rounds rows of f32 to int8, mixed first unless mixing's order is 0.  scales: what a code of 1 of each stands for. */
static kvc_kernel_rows round_rows(const kvc_task *t, kvc_kernel_rows rows, int32_t dim, kvc_mixing mixing,
                                  float *scales) {
    const kvc_kernels *kernels = t->call->kernels;
    const scratch to = scratch_of(t);
    for (int64_t i = 0; i < rows.num; i++) {
        const float *row = (const float *)(const void *)((const char *)rows.first + i * rows.stride);
        if (mixing.order) {
            kernels->hadamard(to.row, row, dim, mixing);
            row = to.row;
        }
        scales[i] = kvc_quantise_row(kernels, to.codes + i * dim, row, dim);
    }
    return (kvc_kernel_rows){to.codes, dim, rows.num};
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

/* Sets scales to those of a tile's rows that are stored as int8, and zeros behind. */
static void load_scales(const kvc_task *t, const kvc_tile *tile, int is_value, float *scales) {
    uint8_t copies[KVC_TILE][KVC_SCALE_BYTES];
    t->call->kernels->convert(KVC_F16, KVC_F32, scales, 0, kvc_scales_of(tile, is_value, copies), 0, 1,
                              kvc_padded_rows(tile->n));
}

static void pack_keys(const kvc_task *t, const kvc_tile *tile, float *scales) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const int is_mixed = kvc_delta_index_of(t, tile) == KVC_MIXED, is_stored = t->k_as == KVC_INT8 && !is_mixed;
    const int is_transformed = c->k_mixing.order && !is_mixed;
    const kvc_mixing mixing = is_transformed ? (kvc_mixing){0, 0} : c->byte_mixing;
    kvc_row_place at = {tile->segment, tile->offset};
    kvc_walk keys = kvc_walk_keys(t, tile);
    if (is_stored) load_scales(t, tile, 0, scales);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        kvc_kernel_rows rows = is_mixed ? (kvc_kernel_rows){kvc_rotate_tile_keys(t, tile, &at, n),
                                                            plan->attending.q_stride * (int64_t)sizeof(float), n}
                                        : kvc_take_rows(t, &keys, n);
        if (!is_stored) rows = round_rows(t, rows, plan->k_dim, mixing, scales + i);
        pack(t, c->kernels->bytes.pack_keys, t->workspace + plan->attending.keys, rows, i, plan->k_dim);
    }
}

static void pack_values(const kvc_task *t, const kvc_tile *tile, float *scales) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const int is_stored = t->v_as == KVC_INT8;
    kvc_walk values = kvc_walk_values(t, tile);
    if (is_stored) load_scales(t, tile, 1, scales);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        kvc_kernel_rows rows = kvc_take_rows(t, &values, n);
        if (!is_stored) rows = round_rows(t, rows, plan->v_dim, (kvc_mixing){0, 0}, scales + i);
        pack(t, c->kernels->bytes.pack_values, t->workspace + plan->attending.values, rows, i, plan->v_dim);
    }
}

/* ---- scales of values -------------------------------------------------------------------------------------------- */

/* Values below this are as good as 0: sums of exp over a smaller scale would not be finite. */
static const float LEAST_SCALE = 0x1p-60f;

/* Returns the logarithm of a normal number, right to about 1e-7. */
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

/* Makes of the scales of n values what weights take.  Of a value that is not finite, both are NaN. */
static void take_scales(kvc_byte_scales *to, const float *scales, int32_t n) {
    for (int32_t j = 0; j < n; j++) {
        const float scale = scales[j] > LEAST_SCALE ? scales[j] : LEAST_SCALE;
        const float nan_or_0 = (scales[j] - scales[j]);
        to->logs[j] = log_of(scale) + nan_or_0;
        to->inverses[j] = 1 / scale + nan_or_0;
    }
    for (int32_t j = n; j < kvc_padded_rows(n); j++) to->logs[j] = to->inverses[j] = 0;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

void kvc_prepare_bytes(const kvc_task *t) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim;
    int8_t *const codes = scratch_of(t).codes;
    const size_t padded = (size_t)kvc_align_up((uint64_t)dim, KVC_BYTE_CODES);
    memset(codes + dim, 0, padded - (size_t)dim);
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *const row = t->q + (size_t)r * (size_t)c->plan->attending.q_stride;
        kvc_byte_query query = {kvc_quantise_row(c->kernels, codes, row, dim) * c->scale, 0};
        for (int32_t d = 0; d < dim; d++) query.sum += codes[d];
        memcpy(row, &query, sizeof query);
        memcpy((char *)row + KVC_BYTE_CODES, codes, padded);
    }
}

/* Attends to a packed tile with query rows [first, end) of a task. */
static void attend_block(const kvc_task *t, kvc_tile *tile, int32_t first, int32_t end, const float *k_scales,
                         const kvc_byte_scales *v_scales) {
    const kvc_call *c = t->call;
    const kvc_byte_kernels *bytes = &c->kernels->bytes;
    const kvc_attending *at = &c->plan->attending;
    const int32_t num = end - first;
    float *const scores = t->workspace + at->scores, unit[KVC_BLOCK_QUERIES];
    bytes->score(scores, t->q + (size_t)first * (size_t)at->q_stride, at->q_stride, num, t->workspace + at->keys,
                 k_scales, tile->n, c->plan->k_dim);
    if (!tile->is_seen || c->changes_scores) kvc_change_scores(t, tile, first, end, scores, KVC_BYTE_SCORES);
    bytes->weigh(scores, num, tile->n, v_scales, t->max + first, t->sum + first, t->factor + first, unit);
    bytes->sum(t->acc + (size_t)first * (size_t)at->acc_stride, at->acc_stride, t->factor + first, unit, scores, num,
               t->workspace + at->values, tile->n, c->plan->v_dim);
}

void kvc_multiply_bytes(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    const kvc_call *c = all->call;
    float k_scales[KVC_BYTE_TILE], scales[KVC_BYTE_TILE];
    kvc_byte_scales v_scales;
    kvc_query_rows_for(all, current);
    const kvc_task t = kvc_view_that_sees(all, current);
    const int32_t num = t.num_query_rows, at_once = c->kernels->bytes.queries;
    if (num) {
        pack_keys(&t, current, k_scales);
        pack_values(&t, current, scales);
        take_scales(&v_scales, scales, current->n);
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
        attend_block(&t, current, first, end, k_scales, &v_scales);
    }
    if (c->kernels->end) c->kernels->end(&former);
}
