/* rank.c: ranks the rows of a task's token: see rank.h.
 *
 * To rank a row is to give it a key for each choice: its score, as an integer of the same order.  A choice has some
 * query heads, whose scores are added up, each in a lane of vectors (kvc_rank_query).  A lane has a weight, by which
 * its scores are multiplied, and a mask: all bits set, or 0 if it is empty.  For int8 it has a start, to which products
 * are added.  A delta is how far rows were moved since their keys were rotated, and delta_index its number, 0 for none.
 * Queries are rotated for it.  A tile lists its rows as stretches: rows at equal distances in memory.
 */
#include "attend/rank.h"

#include <math.h>

#include "attend/step.h"
#include "attend/topk.h"
#include "rows/copy.h"
#include "rows/rope.h"

/* ---- queries ----------------------------------------------------------------------------------------------------- */

/* Returns the type as which kernels rank keys with this delta; bf16 only if queries are, and need not be rotated. */
static int32_t rank_as(const kvc_ranking *k, int32_t delta_index) {
    enum { MOST_BYTES = 1 << 16 }; /* of int8, whose products' sum fits a lane */
    const kvc_call *c = &k->call;
    const int32_t type = c->layer->k_type, dim = c->plan->k_dim;
    if (KVC_TYPES[type].has_row_scale && dim <= MOST_BYTES) return KVC_INT8;
    const int is_bf16 = type == KVC_BF16 && k->args->q_type == KVC_BF16 && !delta_index;
    return is_bf16 && dim % 2 == 0 && c->kernels->rank[KVC_BF16] ? KVC_BF16 : KVC_F32;
}

/* Returns the lane of a query head, counted over the lanes of all KV heads. */
static int32_t lane_of(const kvc_ranking *k, int32_t head) {
    const int32_t per_kv = k->lanes.choices * k->lanes.heads, in_kv = head % per_kv;
    return head / per_kv * k->lanes.num + in_kv / k->lanes.heads * k->lanes.choice_lanes + in_kv % k->lanes.heads;
}

/* Returns the queries of a KV head, which are packed in steps of KVC_STEP_BYTES, as type `as`. */
static kvc_rank_query query_of(const kvc_task *t, int32_t head, int32_t as) {
    const kvc_ranking *k = kvc_ranking_of(t);
    const kvc_plan *plan = k->call.plan;
    const kvc_choosing *at = &plan->choosing;
    const size_t lane = (size_t)head * (size_t)k->lanes.num;
    return (kvc_rank_query){.packed = t->workspace + at->packed + lane * (size_t)plan->k_dim,
                            .weights = t->workspace + at->weights + lane,
                            .masks = (uint32_t *)(void *)(t->workspace + at->masks) + lane,
                            .starts = (int32_t *)(void *)(t->workspace + at->starts) + lane,
                            .num_steps = (int32_t)(kvc_blocks_bytes(as, plan->k_dim) / KVC_STEP_BYTES),
                            .num_lanes = k->lanes.num,
                            .choice_lanes = k->lanes.choice_lanes,
                            .relu = k->args->relu};
}

/* Converts a query head to floats in t->q, rotates it for a delta, and multiplies it by the matrix of stored keys. */
static const float *load_query(const kvc_task *t, const char *q, int32_t delta_index) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim;
    c->kernels->convert(kvc_ranking_of(t)->args->q_type, KVC_F32, t->q, 0, q, 0, 1, dim);
    if (delta_index)
        kvc_rope_rotate(c->rope, c->angles + (size_t)(delta_index - 1) * (size_t)c->plan->deltas.angles_stride, t->q);
    if (c->k_mixing.order) c->kernels->hadamard(t->q, t->q, dim, c->k_mixing);
    return t->q;
}

/* Packs the query of one head into its lane.  For int8, the head's unit becomes a part of its weight. */
static void pack_head(const kvc_task *t, int32_t head, int32_t as, int32_t delta_index) {
    const kvc_ranking *k = kvc_ranking_of(t);
    const kvc_choose_args *a = k->args;
    const int32_t lane = lane_of(k, head), token = t->tokens[0] - k->call.plan->args.first;
    const kvc_rank_query query = query_of(t, lane / k->lanes.num, as);
    const int64_t of_q = kvc_token_offset(token, a->tokens_per_sequence, a->q_token_stride, a->q_batch_stride),
                  of_weight =
                      kvc_token_offset(token, a->tokens_per_sequence, a->weights_token_stride, a->weights_batch_stride);
    const char *q = (const char *)a->q + of_q + head * a->q_head_stride, *row = q;
    float weight = 1;
    if (a->weights)
        memcpy(&weight, (const char *)a->weights + of_weight + head * a->weights_head_stride, sizeof weight);
    if (as != KVC_BF16) row = (const char *)load_query(t, q, delta_index);
    if (as == KVC_INT8) {
        int8_t *const codes = (int8_t *)(t->workspace + k->call.plan->attending.rows);
        int32_t sum = 0;
        float unit;
        k->call.kernels->round(codes, &unit, (const float *)(const void *)row, 0, 1, k->call.plan->k_dim);
        weight *= unit;
        for (int32_t d = 0; d < k->call.plan->k_dim; d++) sum += codes[d];
        ((int32_t *)(void *)(t->workspace + k->call.plan->choosing.starts))[lane] = -128 * sum; /* kvc_rank_query */
        row = (const char *)codes;
    }
    t->workspace[k->call.plan->choosing.weights + (size_t)lane] = weight;
    char *to = (char *)(uintptr_t)query.packed + lane % k->lanes.num * KVC_STEP_BYTES;
    for (int32_t i = 0; i < query.num_steps; i++, row += KVC_STEP_BYTES, to += query.num_lanes * KVC_STEP_BYTES)
        memcpy(to, row, KVC_STEP_BYTES);
}

/* Packs the token's queries into lanes, in the type that ranks keys of this delta, unless they are packed for it. */
static void pack_queries(kvc_task *t, int32_t delta_index) {
    const kvc_ranking *k = kvc_ranking_of(t);
    const kvc_plan *plan = k->call.plan;
    const kvc_choosing *at = &plan->choosing;
    const size_t lanes = (size_t)plan->num_kv_heads * (size_t)k->lanes.num;
    if (t->delta_index == delta_index) return;
    if (t->delta_index == KVC_UNPREPARED) { /* no delta yet: clears all lanes, of which empty ones stay 0 */
        memset(t->workspace + at->packed, 0, lanes * (size_t)plan->k_dim * sizeof(float));
        memset(t->workspace + at->weights, 0, lanes * sizeof(float));
        memset(t->workspace + at->masks, 0, lanes * sizeof(uint32_t));
        memset(t->workspace + at->starts, 0, lanes * sizeof(int32_t));
        for (int32_t h = 0; h < plan->args.num_heads; h++)
            memset(t->workspace + at->masks + lane_of(k, h), 0xff, sizeof(uint32_t)); /* the lane counts */
    }
    for (int32_t h = 0; h < plan->args.num_heads; h++) pack_head(t, h, rank_as(k, delta_index), delta_index);
    t->delta_index = delta_index;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Rows as a kernel takes them. */
typedef struct kernel_rows {
    const void *first;
    int64_t stride;
} kernel_rows;

/* Returns the keys of a tile as kernels rank them: where they lie, or copied to the workspace. */
static kernel_rows rows_of(const kvc_task *t, const kvc_tile *tile, int32_t as) {
    const kvc_call *c = t->call;
    const int32_t type = c->layer->k_type, dim = c->plan->k_dim;
    const int64_t stride = (int64_t)kvc_blocks_bytes(as, dim);
    char *const first = (char *)(t->workspace + c->plan->attending.rows), *to = first;
    const kvc_stretch *at = tile->stretches;
    if (as == type && at->n >= tile->n) return (kernel_rows){at->first[0], at->step[0]};
    for (int64_t n = 0; n < tile->n; to += at->n * stride, n += at++->n) {
        const kvc_rows rows = {type, (char *)(uintptr_t)at->first[0],  at->step[0],
                               0,    (char *)(uintptr_t)at->scales[0], at->scale_step};
        if (as == type)
            for (int64_t i = 0; i < at->n; i++) memcpy(to + i * stride, rows.first + i * rows.row, (size_t)stride);
        else if (as == KVC_INT8)
            c->kernels->unpack(type, to, rows.first, rows.row, NULL, 0, at->n, dim, /* minima */ NULL);
        else
            kvc_decode_rows(c->kernels, (float *)(void *)to, stride, &rows, at->n, dim);
    }
    return (kernel_rows){first, stride};
}

/* Fills in what the products of each row are multiplied by: the scale of scores, times the row's scale if it has one.
 * If queries were scaled instead, rounding would make equal products differ. */
static void find_factors(const kvc_task *t, const kvc_tile *tile, int32_t as, float factors[KVC_TILE]) {
    const kvc_call *c = t->call;
    uint8_t copies[KVC_TILE][KVC_SCALE_BYTES];
    for (int32_t j = 0; j < tile->n; j++) factors[j] = 1;
    if (as == KVC_INT8)
        c->kernels->convert(KVC_F16, KVC_F32, factors, 0, kvc_scales_of(tile, 0, copies), 0, 1, tile->n);
    for (int32_t j = 0; j < tile->n; j++) factors[j] *= c->scale;
}

/* Adds a KV head's scores of the rows of a tile to its choices' totals, which a choice's first KV head sets. */
static void add_scores(const kvc_task *t, int32_t head, const float *scores, int32_t n, float *totals) {
    const kvc_ranking *k = kvc_ranking_of(t);
    const int32_t kv_heads = k->call.plan->num_kv_heads, num_choices = k->args->num_choices;
    const int32_t sharing = num_choices < kv_heads ? kv_heads / num_choices : 1; /* KV heads of a choice */
    for (int32_t i = 0; i < k->lanes.choices; i++, scores += KVC_SCORES) {
        float *const total = totals + (head / sharing * k->lanes.choices + i) * KVC_SCORES;
        for (int32_t j = 0; j < n; j++) total[j] = head % sharing ? total[j] + scores[j] : scores[j];
    }
}

/* Scores a tile for all choices, KV head by KV head.  rows: a cursor before the tile.  Returns the totals. */
static const float *score_tile(kvc_task *t, const kvc_cursor *rows) {
    const kvc_call *c = t->call;
    const kvc_choosing *at = &c->plan->choosing;
    float *const scores = t->workspace + c->plan->attending.scores, *const totals = t->workspace + at->totals;
    float factors[KVC_TILE];
    kvc_tile tile;
    for (int32_t head = 0; head < c->plan->num_kv_heads; head++) {
        kvc_cursor own = *rows;
        own.head = head;
        kvc_next_tile(&tile, &own);
        const int32_t delta_index = c->rope ? tile.delta_index : 0, as = rank_as(kvc_ranking_of(t), delta_index);
        pack_queries(t, delta_index);
        const kernel_rows keys = rows_of(t, &tile, as);
        const kvc_rank_query query = query_of(t, head, as);
        find_factors(t, &tile, as, factors);
        c->kernels->rank[as](scores, &query, keys.first, keys.stride, factors, tile.n);
        add_scores(t, head, scores, tile.n, totals);
    }
    return totals;
}

/* Writes the keys of a tile's rows. */
static void write_keys(const kvc_task *t, kvc_tile *tile, const float *totals, uint32_t *keys, int64_t stride) {
    const kvc_call *c = t->call;
    const kvc_visible seen = kvc_visible_to(c, t->tokens[0]);
    const int sees_all = kvc_sees_whole_tile(c, tile, &seen);
    if (!sees_all) kvc_locate_rows(tile, c->plan->order);
    for (int32_t i = 0; i < kvc_ranking_of(t)->args->num_choices; i++, keys += stride, totals += KVC_SCORES) {
        for (int32_t j = 0; j < tile->n; j++) keys[j] = kvc_key_of(totals[j]);
        for (int32_t j = 0; !sees_all && j < tile->n; j++)
            if (!kvc_sees_row(c, tile, &seen, j)) keys[j] = KVC_NO_KEY;
    }
}

int kvc_rank_rows(kvc_task *t, kvc_cursor rows, uint32_t *keys, int64_t stride) {
    kvc_tile tile;
    rows.changes_to_mix = 0; /* no tile is mixed, so no key is rotated: products of int8 stay exact */
    for (;;) {
        if (kvc_is_cancelled(t->call)) return 0;
        if (!rows.num_rows) return 1;
        const kvc_cursor begin = rows;
        kvc_next_tile(&tile, &rows);
        if (rows.num_rows) kvc_prefetch_keys(t, rows); /* they are decoded at once, before they are ranked */
        if (!kvc_sees_nothing_of(t->call, &tile, t->tokens[0]))
            write_keys(t, &tile, score_tile(t, &begin), keys, stride);
        else
            for (int32_t i = 0; i < kvc_ranking_of(t)->args->num_choices; i++)
                memset(keys + i * stride, 0, (size_t)tile.n * sizeof *keys);
        keys += tile.n;
    }
}
