/* multiply.c: attends to a tile for many query rows, by products of floats or as stored: see multiply.h.
 *
 * The keys of a tile are packed into one panel of the workspace, its values into another: the form that matrix products
 * take.  A kvc_tiler has the kernels that pack and multiply.  If it has `weigh`, that kernel makes weights of scores,
 * for a block of KVC_BLOCK_QUERIES query rows at a time.  Otherwise all query rows are one block.
 */
#include "attend/multiply.h"

#include "attend/minima.h"
#include "attend/seen.h"
#include "attend/step.h"

/* Some query rows of a task and their scores over a tile, which are `stride` floats apart. */
typedef struct query_block {
    int32_t first, end;
    float *scores;
    int32_t stride;
} query_block;

/* Packs the keys of a tile into the workspace's panel. */
static void pack_keys(const kvc_task *t, const kvc_tile *tile, kvc_pack_keys_fn *pack) {
    const kvc_plan *plan = t->call->plan;
    kvc_row_place at = {tile->segment, tile->offset};
    kvc_walk keys = kvc_walk_keys(t, tile);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        const kvc_kernel_rows rows = kvc_take_keys(t, tile, &at, &keys, n);
        pack(t->workspace + plan->attending.keys, rows.first, rows.stride, i, n, plan->k_dim);
    }
}

/* Packs the values of a tile into the workspace's panel. */
static void pack_values(const kvc_task *t, const kvc_tile *tile, kvc_pack_values_fn *pack) {
    const kvc_plan *plan = t->call->plan;
    kvc_walk values = kvc_walk_values(t, tile);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_PANEL);
        const kvc_kernel_rows rows = kvc_take_rows(t, &values, n);
        pack(t->workspace + plan->attending.values, plan->attending.acc_stride, rows.first, rows.stride, i, n,
             plan->v_dim);
    }
}

/* Turns a block's scores, times scale, into weights.  Where a query row's maximum rose, scales its row of acc. */
static void weigh_block(const kvc_task *t, kvc_tile *tile, const query_block *b, float scale, kvc_weigh_fn *weigh) {
    const kvc_kernels *kernels = t->call->kernels;
    const kvc_plan *plan = t->call->plan;
    const int32_t first = b->first, num = b->end - first;
    if (!weigh && scale != 1) kernels->scale(b->scores, b->stride, num, tile->n, scale);
    if (!tile->is_seen || t->call->changes_scores) kvc_change_scores(t, tile, first, b->end, b->scores, b->stride);
    if (weigh)
        weigh(b->scores, num, tile->n, scale, t->max + first, t->sum + first, t->factor + first);
    else
        kernels->softmax(b->scores, num, tile->n, t->max + first, t->sum + first, t->factor + first,
                         (kvc_ahead){.bytes = 0});
    for (int32_t r = first; r < b->end; r++)
        if (t->factor[r] != 1)
            kernels->scale(t->acc + (size_t)r * (size_t)plan->attending.acc_stride, 0, 1, plan->v_dim, t->factor[r]);
}

void kvc_multiply_tile(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    const kvc_call *c = all->call;
    const kvc_plan *plan = c->plan;
    const kvc_attending *workspace = &plan->attending;
    kvc_query_rows_for(all, current);
    const kvc_task view = kvc_view_that_sees(all, current), *t = &view;
    const kvc_tiler *values = kvc_value_tiler(t);
    const kvc_key_product keys = kvc_product_of(t, kvc_delta_index_of(t, current));
    const int32_t num = t->num_query_rows, at_once = values->weigh ? KVC_BLOCK_QUERIES : num;
    const int32_t k_room = values->weigh ? plan->k_dim : KVC_PANEL, /* ldb of the panels: kvc_tiler */
        v_room = values->weigh ? KVC_WIDE_TILE : workspace->acc_stride;
    pack_keys(t, current, keys.pack);
    kvc_next_tile(next, upcoming);
    kvc_walk next_keys = kvc_walk_keys(t, next), next_values = kvc_walk_values(t, next);
    const int32_t blocks = num ? (num + at_once - 1) / at_once : 1, ahead = (next->n + blocks - 1) / blocks;
    query_block b = {0, 0, values->weigh ? t->workspace + workspace->scores : t->scores,
                     values->weigh ? KVC_WEIGHTS_STRIDE : KVC_SCORES};
    kvc_former former;
    if (c->kernels->begin) c->kernels->begin(&former);
    for (; b.first < num; b.first = b.end) {
        b.end = (int32_t)kvc_smaller(num, b.first + at_once);
        keys.score(b.scores, b.stride, t->q + (size_t)b.first * (size_t)workspace->q_stride, workspace->q_stride,
                   t->workspace + workspace->keys, k_room, b.end - b.first, current->n, plan->k_dim, 0,
                   kvc_take_ahead(c, &next_keys, ahead));
        /* If `weigh` is not set, this block is all query rows. */
        if (KVC_TYPES[t->k_as].has_row_scale && kvc_delta_index_of(t, current) != KVC_MIXED)
            kvc_times_scales(t, current, KVC_KEYS);
        if (kvc_key_minima_apart(t, current)) kvc_score_minima(t, current->n);
        weigh_block(t, current, &b, keys.scale, values->weigh);
        if (KVC_TYPES[t->v_as].has_row_scale) kvc_times_scales(t, current, KVC_VALUES);
        if (!b.first) pack_values(t, current, values->pack_values); /* once, for all blocks */
        values->accumulate(t->acc + (size_t)b.first * (size_t)workspace->acc_stride, workspace->acc_stride, b.scores,
                           b.stride, t->workspace + workspace->values, v_room, b.end - b.first, plan->v_dim, current->n,
                           1, kvc_take_ahead(c, &next_values, ahead));
    }
    if (t->v_lacks_minima) kvc_accumulate_minima(t, current->n);
    if (c->kernels->end) c->kernels->end(&former);
}
