/* step.c: see step.h. */
#include "attend/step.h"

#include "attend/bytes.h"
#include "attend/minima.h"
#include "attend/multiply.h"
#include "attend/queries.h"
#include "attend/walk.h"

/* Attends to the tile `current`.  On the way, takes the tile `next` off the cursor `upcoming`, and prefetches its keys.
 * It does so no earlier, because a tile's rows push listed stretches out of the L1 cache. */
typedef void attend_tile_fn(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

/* Scores a tile, and prefetches its values. */
static void score_tile(kvc_task *t, const kvc_tile *tile) {
    const kvc_call *c = t->call;
    const int32_t stride = c->plan->attending.q_stride, dim = c->plan->k_dim;
    kvc_score_fn *const score = kvc_scorer_of(t, tile)->score;
    const float *q = kvc_query_rows_for(t, tile);
    kvc_walk keys = kvc_walk_keys(t, tile), values = kvc_walk_values(t, tile);
    if (kvc_delta_index_of(t, tile) == KVC_MIXED) {
        kvc_row_place at = {tile->segment, tile->offset};
        score(t->scores, q, stride, t->num_query_rows, kvc_rotate_tile_keys(t, tile, &at, tile->n),
              stride * (int64_t)sizeof *q, tile->n, dim, kvc_take_ahead(c, &values, tile->n));
        return;
    }
    float *scores = t->scores;
    while (keys.left) {
        const kvc_kernel_rows k = kvc_take_some(t, &keys);
        score(scores, q, stride, t->num_query_rows, k.first, k.stride, (int)k.num, dim,
              kvc_take_ahead(c, &values, k.num));
        scores += k.num;
    }
    if (KVC_TYPES[t->k_as].has_row_scale) kvc_times_scales(t, tile, 0);
    if (kvc_key_minima_apart(t, tile)) kvc_score_minima(t, tile->n);
}

/* Adds a tile's quantised values, weighted, to acc, and prefetches the remaining keys of the next tile, some with each
 * piece of values.  If the keys for a piece lie in several stretches, a kernel takes a part of the columns at a time.
 * It prefetches none of these keys evenly; so they are at least prefetched in parts. */
static void accumulate_quantised(const kvc_task *t, kvc_walk *values, kvc_walk *keys) {
    enum { PARTS = 4 };
    const kvc_call *c = t->call;
    const int32_t type = t->v_as, dim = c->plan->v_dim, n = (int32_t)values->left;
    kvc_value_piece pieces[KVC_TILE / KVC_PANEL];
    const int64_t stride = kvc_take_values(t, values, pieces);
    const int is_cut = kvc_is_in_stretches(keys, KVC_PANEL),
              is_even = keys->left && kvc_rows_behind(&keys->place) >= keys->left;
    const int32_t parts = is_cut ? PARTS : 1, ahead = is_cut ? KVC_PANEL / PARTS : is_even ? KVC_TILE : KVC_PANEL;
    const int32_t columns = (dim / parts + KVC_QUANT_ELEMENTS - 1) / KVC_QUANT_ELEMENTS * KVC_QUANT_ELEMENTS;
    for (int32_t d = 0, some; d < dim; d += some) {
        some = (int32_t)kvc_smaller(columns, dim - d);
        for (int32_t i = 0; i < n; i += KVC_PANEL) {
            const int is_last = d + some == dim && i + KVC_PANEL >= n;
            kvc_value_piece *const piece = &pieces[i / KVC_PANEL];
            piece->rows = (const uint8_t *)piece->rows + (d ? kvc_blocks_bytes(type, columns) : 0);
            piece->next = kvc_take_ahead(c, keys, is_last ? KVC_TILE : ahead);
        }
        c->kernels->accumulate[type](t->acc + d, c->plan->attending.acc_stride, t->factor, t->scores, t->num_query_rows,
                                     pieces, stride, n, some);
    }
}

/* Adds a tile's values of floats, which are taken stretch by stretch. */
static void accumulate_floats(const kvc_task *t, kvc_walk *values, kvc_walk *keys) {
    const kvc_call *c = t->call;
    const float *weights = t->scores;
    while (values->left) {
        const kvc_kernel_rows v = kvc_take_some(t, values);
        kvc_value_piece piece = {v.first, kvc_take_ahead(c, keys, values->left ? v.num : KVC_TILE)};
        c->kernels->accumulate[t->v_as](t->acc, c->plan->attending.acc_stride, t->factor, weights, t->num_query_rows,
                                        &piece, v.stride, (int)v.num, c->plan->v_dim);
        weights += v.num;
        for (int32_t r = 0; values->left && r < t->num_query_rows; r++) t->factor[r] = 1; /* acc is multiplied once */
    }
}

/* Adds a tile's values, weighted, to acc, and prefetches the remaining keys of the next tile. */
static void accumulate_tile(const kvc_task *t, const kvc_tile *tile, kvc_walk *keys) {
    kvc_walk values = kvc_walk_values(t, tile);
    if (KVC_TYPES[t->v_as].has_row_scale) kvc_times_scales(t, tile, 1);
    if (t->v_as < KVC_FLOAT_TYPES)
        accumulate_floats(t, &values, keys);
    else
        accumulate_quantised(t, &values, keys);
    if (t->v_lacks_minima) kvc_accumulate_minima(t, tile->n);
}

/* Attends to a tile for few query rows: each row is read once for all of them. */
static void stream_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    score_tile(t, current);
    kvc_next_tile(next, upcoming);
    kvc_walk keys = kvc_walk_keys(t, next);
    if (next->layout->num_scales) kvc_prefetch_scales(t->call, next);
    const kvc_ahead ahead = kvc_take_few_ahead(t->call, &keys, t->num_query_rows * (current->n / KVC_LANES));
    if (!current->is_seen || t->call->changes_scores)
        kvc_change_scores(t, current, 0, t->num_query_rows, t->scores, KVC_SCORES);
    t->call->kernels->softmax(t->scores, t->num_query_rows, current->n, t->max, t->sum, t->factor, ahead);
    accumulate_tile(t, current, &keys);
}

/* Attends to a tile by one token after the other, because a masked value is infinite or NaN.  Times its weight of 0,
 * it would give NaN.  The result has the same bits as if the masked value were a number. */
static void attend_apart(kvc_task *t, attend_tile_fn *attend_tile, kvc_tile *current, kvc_tile *next,
                         kvc_cursor *upcoming) {
    const int32_t heads = t->call->plan->parts.heads;
    kvc_cursor nothing = {.layout = t->call->layout};
    kvc_tile own, none;
    kvc_query_rows_for(t, current);
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        kvc_task view = kvc_view_of(t, r, heads);
        kvc_clear_unseen(&view, current, &own);
        attend_tile(&view, &own, r ? &none : next, r ? &nothing : upcoming);
    }
}

int kvc_is_cancelled(kvc_call *c) {
    const volatile int32_t *cancel = c->args->cancel;
    if (cancel && atomic_load_explicit((const volatile _Atomic int32_t *)cancel, memory_order_relaxed)) return 1;
    return kvc_poll_timer_ask(&c->timer);
}

int kvc_attend_rows(kvc_task *t, kvc_cursor rows, kvc_cursor ahead) {
    static attend_tile_fn *const ways[] = {stream_tile, kvc_multiply_tile, kvc_multiply_bytes};
    attend_tile_fn *const attend = ways[t->slice->tiled];
    const kvc_visible common = kvc_visible_to_all(t);
    kvc_tile tiles[2], *current = tiles, *next = tiles + 1;
    if (kvc_is_cancelled(t->call)) return 0;
    kvc_next_tile(current, &rows);
    while (current->n) {
        const int is_last = !rows.num_rows;
        kvc_cursor *upcoming = is_last ? &ahead : &rows;
        current->is_seen = kvc_sees_whole_tile(t->call, current, &common);
        if (!current->is_seen && kvc_spoils_others(t, current, &common))
            attend_apart(t, attend, current, next, upcoming);
        else
            attend(t, current, next, upcoming);
        if (is_last) break;
        if (t->slice->tiled && kvc_is_cancelled(t->call)) return 0; /* streamed tasks are short */
        kvc_tile *const done = current;
        current = next;
        next = done;
    }
    return 1;
}

void kvc_prefetch_keys(const kvc_task *t, kvc_cursor rows) {
    kvc_tile tile;
    kvc_next_tile(&tile, &rows);
    kvc_walk keys = kvc_walk_keys(t, &tile);
    kvc_prefetch(kvc_take_ahead(t->call, &keys, tile.n));
}
