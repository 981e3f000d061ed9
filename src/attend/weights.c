/* weights.c: kvc_weights: the softmax weights that given queries give to the rows of a sequence.
 *
 * A query row is one query head of one query.  The query rows of a KV head are taken in blocks.  Rows are taken in
 * tiles: up to KVC_TILE rows in order of arrival, with one delta, which is how far they were moved since their keys
 * were rotated.  A tile's weights are padded to a multiple of KVC_LANES.  A part is the tiles of one thread, and a desk
 * is its memory.  Two passes over the tiles make a block's weights:
 *   1. Score a tile, and take a step of the softmax from its own maximum.  This leaves exp(score - maximum), which is
 *      stored, the maximum and the sum of each query row.
 *   2. Multiply what was stored by exp(maximum of the tile - maximum of all) / sum of all, and reduce over the block.
 * So a row is scored once.  Scoring it twice instead, which needs no memory, takes 1.9 times as long.
 *
 * Tiles follow from the order of rows and from their deltas, blocks from the number of rows.  So sums are made in the
 * same order for any number of threads and wherever rows lie.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "attend/work.h"
#include "cache/check.h"
#include "cache/waiting.h"
#include "read/snapshot.h"
#include "rows/rope.h"
#include "rows/stride.h"

enum {
    MOST_QUERIES = 128,   /* query rows of a block, ... */
    FEWEST_QUERIES = 16,  /* ... and fewest of all but the last, ... */
    MOST_FLOATS = 1 << 24 /* ... for which so many weights are stored */
};

/* Rows side by side, in order of arrival, whose keys have the same delta. */
typedef struct tile {
    int64_t at;           /* index of the first row, where each tile before it counts as a whole number of KVC_LANES */
    int64_t first;        /* index of the first row */
    int32_t run, offset;  /* it is row `offset` of this run */
    int32_t n, low, high; /* number of rows; their smallest and largest position */
} tile;

/* The memory of one thread. */
typedef struct desk {
    float *q, *rows, *panel, *scores, *max, *sum, *factor, *totals;
    uint8_t *scales; /* [KVC_TILE] f16, of keys with one scale a row */
    float *angles;   /* of the layer's rope */
    kvc_rope_table table;
    int32_t delta; /* the deltas of keys for which q is prepared */
    int32_t is_prepared;
} desk;

/* A call, and the block of query rows that is worked on. */
typedef struct weighing {
    kvc_weights_args args;
    kvc_poll_timer timer;
    atomic_int was_cancelled;
    const kvc_kernels *kernels;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_policy *policy;
    int32_t stride;
    const kvc_rope *rope;
    kvc_mixing mixing;
    kvc_snapshot from;
    float scale;
    int32_t next;                           /* kvc_next_position of the sequence */
    int32_t group, num_parts, most_queries; /* query heads of a KV head, threads, and query rows of a block */
    int32_t q_stride;
    int64_t num_tiles;
    tile *tiles;
    float *weights;         /* [rows][queries] of each tile: [queries][n, rounded up] from tile.at * queries on */
    float *maxima, *sums;   /* [num_tiles][most_queries] */
    float *highest, *total; /* [most_queries] over all tiles */
    desk *desks;            /* [num_parts] */
    int32_t head, num_queries;
    const kvc_scorer *scorer; /* scores keys for few query rows; NULL: there are many */
    const kvc_tiler *tiler;   /* scores keys for many query rows */
    int32_t k_as;             /* the type as which kernels take keys: their own, or decoded to f32 */
    int64_t first_query;      /* query row r of the block is query (first_query + r) / group */
} weighing;

/* ---- queries ----------------------------------------------------------------------------------------------------- */

static int32_t query_of(const weighing *w, int32_t r) { return (int32_t)((w->first_query + r) / w->group); }

static int32_t head_of(const weighing *w, int32_t r) {
    return w->head * w->group + (int32_t)((w->first_query + r) % w->group);
}

static int32_t position_of(const weighing *w, int32_t query) {
    return w->args.positions ? w->args.positions[query] : w->next;
}

/* Rotates num query rows by a distance in positions. */
static void rotate(const weighing *w, desk *d, int32_t distance, float *rows, int32_t num) {
    if (!w->rope || !distance) return;
    kvc_rope_angles_from(&d->table, w->rope, distance, d->angles);
    for (int32_t r = 0; r < num; r++) kvc_rope_rotate(w->rope, d->angles, rows + (size_t)r * (size_t)w->q_stride);
}

/* Prepares the block's query rows for keys that were moved by a delta, unless that is done: converts, rotates,
 * multiplies by the matrix of stored keys, and brings them into the kernel's form. */
static void prepare_queries(const weighing *w, desk *d, int32_t delta) {
    const kvc_weights_args *a = &w->args;
    const int32_t dim = w->layer->k_dim;
    if (!w->rope) delta = 0;
    if (d->is_prepared && d->delta == delta) return;
    for (int32_t r = 0; r < w->num_queries; r++) {
        float *const row = d->q + (size_t)r * (size_t)w->q_stride;
        const int32_t query = query_of(w, r);
        const char *q = (const char *)a->q + query * a->q_token_stride + head_of(w, r) * a->q_head_stride;
        memset(row + dim, 0, (size_t)((KVC_CHUNK - dim % KVC_CHUNK) % KVC_CHUNK) * sizeof *row);
        w->kernels->convert(a->q_type, KVC_F32, row, 0, q, 0, 1, dim);
        if (a->rotates) rotate(w, d, position_of(w, query), row, 1);
    }
    rotate(w, d, -delta, d->q, w->num_queries);
    for (int32_t r = 0; w->mixing.order && r < w->num_queries; r++) {
        float *const row = d->q + (size_t)r * (size_t)w->q_stride;
        w->kernels->hadamard(row, row, dim, w->mixing);
    }
    kvc_prepare_fn *const prepare = w->scorer ? w->scorer->prepare : w->tiler->prepare;
    prepare(d->q, w->q_stride, w->num_queries, dim, w->scale);
    d->delta = delta;
    d->is_prepared = 1;
}

/* ---- scoring a tile ---------------------------------------------------------------------------------------------- */

/* A place in the rows of a snapshot. */
typedef struct place {
    const kvc_run *run;
    int32_t offset;
} place;

/* Takes up to `most` rows that lie one after the other, perhaps of several runs; returns their number. */
static int32_t take_stretch(place *p, int32_t most) {
    const kvc_block *block = p->run->block;
    const int32_t slot = p->run->slot + p->offset;
    int32_t n = 0;
    for (;;) {
        const int32_t left = p->run->count - p->offset, taken = left < most - n ? left : most - n;
        n += taken;
        p->offset += taken;
        if (taken == left) p->run++, p->offset = 0;
        if (n == most || p->run->block != block || p->run->slot + p->offset != slot + n) return n;
    }
}

/* Keys as kernels take them. */
typedef struct kernel_keys {
    const void *first;
    int64_t stride;
} kernel_keys;

/* Takes the next n keys of a tile, from its row `first` on, as rows of type k_as: where they lie, or copied or decoded.
 * Copies their scales to the desk, where rows have one each. */
static kernel_keys take_keys(const weighing *w, desk *d, place *p, int32_t first, int32_t n) {
    const int32_t dim = w->layer->k_dim;
    const int is_decoded = w->k_as != w->layer->k_type;
    const int64_t bytes = (int64_t)kvc_blocks_bytes(w->k_as, dim);
    char *to = (char *)d->rows;
    for (int32_t done = 0, some; done < n; done += some, to += some * bytes) {
        const kvc_rows keys =
            kvc_stored_rows(w->layer, w->layout, p->run->block->rows, p->run->slot + p->offset, KVC_KEYS);
        const kvc_rows of_head = kvc_row_of(&keys, 0, w->head);
        some = take_stretch(p, n - done);
        if (KVC_TYPES[w->k_as].has_row_scale)
            memcpy(d->scales + (first + done) * KVC_SCALE_BYTES, of_head.scales, (size_t)some * KVC_SCALE_BYTES);
        if (some == n && !is_decoded) return (kernel_keys){of_head.first, of_head.row};
        if (is_decoded)
            kvc_decode_rows(w->kernels, (float *)(void *)to, bytes, &of_head, some, dim);
        else
            memcpy(to, of_head.first, (size_t)some * (size_t)bytes);
    }
    return (kernel_keys){d->rows, bytes};
}

/* Scores a tile for few query rows: each key is read once for all of them. */
static void stream_tile(const weighing *w, desk *d, const tile *t, place *p) {
    const kernel_keys keys = take_keys(w, d, p, 0, t->n);
    const kvc_ahead next = {(const char *)keys.first + t->n * keys.stride, (int32_t)(t->n * keys.stride), 2};
    w->scorer->score(d->scores, d->q, w->q_stride, w->num_queries, keys.first, keys.stride, t->n, w->layer->k_dim,
                     keys.first == d->rows ? (kvc_ahead){.bytes = 0} : next);
}

/* Scores a tile for many query rows: keys are packed into panels, and multiplied. */
static void multiply_tile(const weighing *w, desk *d, const tile *t, place *p) {
    const kvc_tiler *tiler = w->tiler;
    const int32_t dim = w->layer->k_dim;
    kvc_former former;
    if (w->kernels->begin) w->kernels->begin(&former);
    for (int32_t i = 0, n; i < t->n; i += n) {
        n = t->n - i < KVC_PANEL ? t->n - i : KVC_PANEL;
        const kernel_keys keys = take_keys(w, d, p, i, n);
        tiler->pack_keys(d->panel, keys.first, keys.stride, tiler->weigh ? i : 0, n, dim);
        if (!tiler->weigh)
            tiler->score(d->scores + i, KVC_SCORES, d->q, w->q_stride, d->panel, KVC_PANEL, w->num_queries, n, dim, 0,
                         (kvc_ahead){.bytes = 0});
    }
    for (int32_t r = 0, num; tiler->weigh && r < w->num_queries; r += num) {
        num = w->num_queries - r < KVC_BLOCK_QUERIES ? w->num_queries - r : KVC_BLOCK_QUERIES;
        tiler->score(d->scores + r * KVC_SCORES, KVC_SCORES, d->q + (size_t)r * (size_t)w->q_stride, w->q_stride,
                     d->panel, dim, num, t->n, dim, 0, (kvc_ahead){.bytes = 0});
    }
    if (w->kernels->end) w->kernels->end(&former);
}

/* Scores a tile for the block's query rows. */
static void score_tile(const weighing *w, desk *d, const tile *t) {
    place p = {w->from.runs + t->run, t->offset};
    prepare_queries(w, d, p.run->delta);
    if (w->scorer)
        stream_tile(w, d, t, &p);
    else
        multiply_tile(w, d, t, &p);
    if (!KVC_TYPES[w->k_as].has_row_scale) return;
    memset(d->scales + t->n * KVC_SCALE_BYTES, 0, (size_t)(kvc_padded_rows(t->n) - t->n) * KVC_SCALE_BYTES);
    w->kernels->times(d->scores, w->num_queries, t->n, d->scales);
}

/* Sets the scores of a tile's rows that a query does not see to -inf, in its `num` query rows. */
static void hide_unseen(const weighing *w, const tile *t, int32_t position, float *scores, int32_t num) {
    const int32_t low = kvc_policy_lowest(w->policy, position), sinks = kvc_policy_sinks(w->policy),
                  last = kvc_last_row(position, w->stride);
    if (w->policy->kind == KVC_CROSS || (t->high <= last && t->low >= low)) return;
    const kvc_run *run = w->from.runs + t->run;
    for (int32_t j = 0, offset = t->offset; j < t->n; j++) {
        const int32_t p = run->position + offset;
        const int is_seen = p <= last && (p >= low || p < sinks);
        for (int32_t r = 0; !is_seen && r < num; r++) scores[r * KVC_SCORES + j] = -INFINITY;
        if (++offset == run->count) run++, offset = 0;
    }
}

/* Applies the softcap to the scores of a tile, and hides the rows that queries do not see. */
static void change_scores(const weighing *w, desk *d, const tile *t) {
    const float cap = w->args.softcap;
    for (int32_t r = 0; cap > 0 && r < w->num_queries; r++)
        for (int32_t j = 0; j < t->n; j++)
            d->scores[r * KVC_SCORES + j] = cap * tanhf(d->scores[r * KVC_SCORES + j] / cap);
    for (int32_t r = 0, num; r < w->num_queries; r += num) {
        const int32_t query = query_of(w, r);
        for (num = 1; r + num < w->num_queries && query_of(w, r + num) == query;) num++;
        hide_unseen(w, t, position_of(w, query), d->scores + r * KVC_SCORES, num);
    }
}

/* Returns the floats of a tile's weights of one query row. */
static int32_t stride_of(const tile *t) { return (t->n + KVC_LANES - 1) / KVC_LANES * KVC_LANES; }

static float *weights_of(const weighing *w, const tile *t) { return w->weights + t->at * w->num_queries; }

/* Returns the first of `num` things that are a part's share. */
static int64_t share_of(const weighing *w, int64_t num, int64_t part) { return part * num / w->num_parts; }

/* Returns whether the call is to end early: the caller's flag is set, or the poll says so. */
static int is_cancelled(weighing *w) {
    const volatile _Atomic int32_t *flag = (const volatile _Atomic int32_t *)w->args.cancel;
    if ((flag && atomic_load(flag)) || kvc_snapshot_poll(&w->from, &w->timer)) atomic_store(&w->was_cancelled, 1);
    return atomic_load(&w->was_cancelled);
}

/* Makes the weights of a part's tiles, relative to each tile's own maxima, unless the call is cancelled: pass 1. */
static void weigh_part(void *context, int64_t part) {
    weighing *w = context;
    desk *d = &w->desks[part];
    d->is_prepared = 0;
    for (int64_t i = share_of(w, w->num_tiles, part); i < share_of(w, w->num_tiles, part + 1); i++) {
        const tile *t = &w->tiles[i];
        const int32_t stride = stride_of(t);
        float *weights = weights_of(w, t), *const max = w->maxima + i * w->most_queries,
              *const sum = w->sums + i * w->most_queries;
        if (is_cancelled(w)) return;
        for (int32_t r = 0; r < w->num_queries; r++) max[r] = -INFINITY, sum[r] = 0;
        score_tile(w, d, t);
        change_scores(w, d, t);
        w->kernels->softmax(d->scores, w->num_queries, t->n, max, sum, d->factor, (kvc_ahead){.bytes = 0});
        for (int32_t r = 0; r < w->num_queries; r++, weights += stride)
            memcpy(weights, d->scores + r * KVC_SCORES, (size_t)stride * sizeof *weights);
    }
}

/* ---- reducing ---------------------------------------------------------------------------------------------------- */

/* Returns exp(max - highest); 0 if no row has a score, so that max is -inf. */
static float rest_of(float max, float highest) { return max == -INFINITY ? 0 : expf(max - highest); }

/* Finds the maximum and the sum of each query row over all tiles. */
static void add_up(const weighing *w) {
    for (int32_t r = 0; r < w->num_queries; r++) {
        const float sink = w->args.sinks ? w->args.sinks[head_of(w, r)] : -INFINITY;
        float highest = sink;
        double total = 0;
        for (int64_t i = 0; i < w->num_tiles; i++) highest = fmaxf(highest, w->maxima[i * w->most_queries + r]);
        for (int64_t i = 0; i < w->num_tiles; i++)
            total += (double)(w->sums[i * w->most_queries + r] * rest_of(w->maxima[i * w->most_queries + r], highest));
        w->highest[r] = highest;
        w->total[r] = (float)(total + (double)rest_of(sink, highest));
    }
}

/* Returns the larger number; NaN if one is NaN. */
static float larger(float a, float b) { return a >= b || isnan(a) ? a : b; }

/* Makes weights NaN, except zeros: rows that the query row does not see have a weight of 0. */
static void spoil(float *weights, int32_t num) {
    for (int32_t j = 0; j < num; j++) weights[j] = weights[j] == 0 ? 0 : NAN;
}

/* Reduces the weights of a tile over the block's query rows to d->totals: a sum or a maximum for each row. */
static void reduce_tile(const weighing *w, desk *d, int64_t i) {
    const tile *t = &w->tiles[i];
    const int32_t stride = stride_of(t);
    const float *max = w->maxima + i * w->most_queries;
    float *weights = weights_of(w, t);
    for (int32_t r = 0; r < w->num_queries; r++) {
        const float rest = rest_of(max[r], w->highest[r]);
        d->factor[r] = rest == 0 ? 0 : rest / w->total[r];
        if (!isnan(d->factor[r])) continue;
        spoil(weights + r * stride, t->n);
        d->factor[r] = 1;
    }
    if (w->args.reduction == KVC_REDUCE_SUM) {
        w->kernels->matmul(d->totals, stride, d->factor, w->num_queries, weights, stride, 1, t->n, w->num_queries, 0,
                           (kvc_ahead){.bytes = 0});
        return;
    }
    memset(d->totals, 0, (size_t)stride * sizeof(float));
    for (int32_t r = 0; r < w->num_queries; r++, weights += stride)
        for (int32_t j = 0; j < stride; j++) d->totals[j] = larger(d->totals[j], weights[j] * d->factor[r]);
}

/* Reduces a part's tiles into the caller's array: pass 2.  The first block sets the array, the others add to it. */
static void reduce_part(void *context, int64_t part) {
    const weighing *w = context;
    desk *d = &w->desks[part];
    for (int64_t i = share_of(w, w->num_tiles, part); i < share_of(w, w->num_tiles, part + 1); i++) {
        const tile *t = &w->tiles[i];
        float *const to = (float *)(void *)((char *)w->args.weights + w->head * w->args.weights_head_stride) + t->first;
        reduce_tile(w, d, i);
        for (int32_t j = 0; j < t->n; j++)
            if (!w->first_query)
                to[j] = d->totals[j];
            else if (w->args.reduction == KVC_REDUCE_SUM)
                to[j] += d->totals[j];
            else
                to[j] = larger(to[j], d->totals[j]);
    }
}

/* Chooses the kernels for a block of num_queries query rows, and the type as which they take keys. */
static void choose_kernels(weighing *w, int32_t num_queries) {
    const kvc_kernels *kernels = w->kernels;
    const int32_t type = w->layer->k_type;
    w->num_queries = num_queries;
    w->scorer = NULL;
    w->k_as = KVC_F32;
    if (num_queries <= KVC_STREAM_QUERIES) {
        if (kernels->score[type].score) w->k_as = type;
        w->scorer = &kernels->score[w->k_as];
        return;
    }
    if (kernels->tiler[type].score) w->k_as = type;
    w->tiler = w->k_as != type && kernels->decoded.score ? &kernels->decoded : &kernels->tiler[w->k_as];
}

static kvc_status weigh_all(weighing *w) {
    const int64_t all = (int64_t)w->args.num_queries * w->group;
    for (w->head = 0; w->head < w->layer->num_kv_heads; w->head++)
        for (w->first_query = 0; w->first_query < all; w->first_query += w->num_queries) {
            const int64_t left = all - w->first_query;
            choose_kernels(w, left < w->most_queries ? (int32_t)left : w->most_queries);
            kvc_parallel(w->num_parts, w->num_parts, weigh_part, w);
            if (atomic_load(&w->was_cancelled))
                return kvc_fail(KVC_ERR_CANCELLED, "the weighing of rows was cancelled");
            add_up(w);
            kvc_parallel(w->num_parts, w->num_parts, reduce_part, w);
        }
    return KVC_OK;
}

/* ---- tiles and memory -------------------------------------------------------------------------------------------- */

/* Lists the tiles of a list of runs; only counts them if `tiles` is NULL.  Returns their number, and sets *padded_rows
 * to the sum of their rows, each padded to a multiple of KVC_LANES. */
static int64_t list_tiles(const kvc_run_list *list, tile *tiles, int64_t *padded_rows) {
    const kvc_run *const runs = kvc_runs_begin(list);
    int64_t num = 0, row = 0;
    tile t = {.n = 0};
    *padded_rows = 0;
    for (int32_t r = 0; r < list->num; r++)
        for (int32_t offset = 0, some; offset < runs[r].count; offset += some) {
            if (t.n && (row % KVC_TILE == 0 || runs[r].delta != runs[t.run].delta)) {
                if (tiles) tiles[num] = t;
                *padded_rows += stride_of(&t);
                num++;
                t.n = 0;
            }
            const int32_t position = runs[r].position + offset, room = (int32_t)(KVC_TILE - row % KVC_TILE);
            some = runs[r].count - offset < room ? runs[r].count - offset : room;
            if (!t.n)
                t = (tile){.at = *padded_rows, .first = row, .run = r, .offset = offset, .low = position, .high = -1};
            if (position < t.low) t.low = position;
            if (position + some - 1 > t.high) t.high = position + some - 1;
            t.n += some;
            row += some;
        }
    if (t.n && tiles) tiles[num] = t;
    *padded_rows += stride_of(&t);
    return num + (t.n > 0);
}

/* Returns the bytes of a thread's arrays.  Points the desk at them, from `start` on, unless that is NULL. */
static uint64_t lay_out_desk(const weighing *w, desk *d, char *start) {
    const uint64_t dim = (uint64_t)w->layer->k_dim, queries = (uint64_t)w->most_queries;
    const uint64_t angles = w->rope ? kvc_rope_angles_size(w->rope) : 0;
    uint64_t size = 0;
    float **const arrays[] = {&d->q,   &d->rows,   &d->panel,  &d->scores, &d->max,
                              &d->sum, &d->factor, &d->totals, &d->angles};
    const uint64_t lengths[] = {queries * (uint64_t)w->q_stride,
                                KVC_TILE * dim,
                                (uint64_t)w->q_stride * KVC_WIDE_TILE,
                                queries * KVC_SCORES,
                                queries,
                                queries,
                                queries,
                                KVC_TILE,
                                angles};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const uint64_t at = kvc_add_array(&size, lengths[i] * sizeof(float));
        if (start) *arrays[i] = (void *)(start + at);
    }
    const uint64_t table = kvc_add_array(&size, (1 + KVC_NEAR) * angles * sizeof(double));
    const uint64_t scales = kvc_add_array(&size, KVC_TILE * KVC_SCALE_BYTES);
    if (start) d->table = (kvc_rope_table){.angles = (void *)(start + table), .coarse = 1};
    if (start) d->scales = (void *)(start + scales);
    return size;
}

/* Returns the bytes of all arrays of a call.  Points `w` at them, from `start` on, unless that is NULL. */
static uint64_t lay_out(weighing *w, int64_t padded_rows, char *start) {
    const uint64_t tiles = (uint64_t)w->num_tiles, queries = (uint64_t)w->most_queries;
    uint64_t size = 0;
    float **const arrays[] = {&w->weights, &w->maxima, &w->sums, &w->highest, &w->total};
    const uint64_t lengths[] = {(uint64_t)padded_rows * queries, tiles * queries, tiles * queries, queries, queries};
    const uint64_t list = kvc_add_array(&size, tiles * sizeof *w->tiles);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const uint64_t at = kvc_add_array(&size, lengths[i] * sizeof(float));
        if (start) *arrays[i] = (void *)(start + at);
    }
    const uint64_t desks = kvc_add_array(&size, (uint64_t)w->num_parts * sizeof *w->desks);
    if (start) w->tiles = (void *)(start + list), w->desks = (void *)(start + desks);
    for (int32_t i = 0; i < w->num_parts; i++) {
        desk none;
        const uint64_t at = kvc_add_array(&size, lay_out_desk(w, &none, /* only measure */ NULL));
        if (!start) continue;
        w->desks[i] = (desk){.delta = 0};
        lay_out_desk(w, &w->desks[i], start + at);
    }
    return size;
}

/* ---- the public function ----------------------------------------------------------------------------------------- */

/* Checks the arrays, and resolves their strides. */
static kvc_status resolve_arrays(const kvc_layer *layer, kvc_weights_args *a) {
    const kvc_array q = {.name = "q",
                         .data = a->q,
                         .type = a->q_type,
                         .length = layer->k_dim,
                         .axes = {KVC_AXIS(a, q_head_stride, a->num_heads),
                                  KVC_AXIS(a, q_token_stride, a->num_queries)}},
                    weights = {.name = "weights",
                               .data = a->weights,
                               .is_output = 1,
                               .element_bytes = sizeof *a->weights,
                               .length = a->num_rows,
                               .axes = {KVC_AXIS(a, weights_head_stride, layer->num_kv_heads)}};
    KVC_TRY(kvc_resolve_array(&q));
    return kvc_resolve_array(&weights);
}

/* Checks what does not depend on the sequence, except the arrays. */
static kvc_status check_args(const kvc_cache *cache, int32_t layer, const kvc_weights_args *a) {
    const kvc_layer *config = &cache->layers[layer];
    if (config->policy.kind == KVC_NONE) return kvc_fail(KVC_ERR_INVALID, "layer %d has no attention", layer);
    if (!config->v_dim)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d holds keys alone: nothing attends to them", layer);
    if (!a->q || !a->weights) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", a->q ? "weights" : "q");
    if (a->num_queries < 1)
        return kvc_fail(KVC_ERR_INVALID, "num_queries is %d: it must be at least 1", a->num_queries);
    if (a->num_heads < 1 || a->num_heads % config->num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID, "num_heads is %d: it must be a multiple of num_kv_heads, %d", a->num_heads,
                        config->num_kv_heads);
    if (a->reduction != KVC_REDUCE_SUM && a->reduction != KVC_REDUCE_MAX)
        return kvc_fail(KVC_ERR_INVALID, "reduction is %d: 0 is the sum, and 1 the maximum", a->reduction);
    if (!isfinite(a->scale) || !isfinite(a->softcap) || a->softcap < 0)
        return kvc_fail(KVC_ERR_INVALID, "scale is %g and softcap %g: both must be finite, softcap not negative",
                        (double)a->scale, (double)a->softcap);
    if (config->value_in_key && a->scale == 0)
        return kvc_fail(KVC_ERR_INVALID, "scale is 0: give it in layer %d, whose values lie in the keys", layer);
    if (a->rotates && (config->rope.kind == KVC_ROPE_UNKNOWN || config->rope.kind == KVC_ROPE_FUNCTION))
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "queries would be rotated, and the frequencies of layer %d are not known: give its rope when "
                        "the cache is made, or queries that are rotated",
                        layer);
    for (int32_t t = 0; a->positions && t < a->num_queries; t++)
        if (a->positions[t] < 0 || a->positions[t] == KVC_END)
            return kvc_fail(KVC_ERR_INVALID, "positions[%d] is %d: a position is from 0 to %d", t, a->positions[t],
                            KVC_END - 1);
    return KVC_OK;
}

/* Whether a query at a position would see a row of an interval. */
static int would_see(const weighing *w, int32_t position, kvc_interval rows) {
    return rows.begin <= kvc_last_row(position, w->stride) &&
           kvc_policy_sees(w->policy, position, rows.begin, rows.end);
}

/* Returns KVC_ERR_GONE if a query would see rows that have expired (lost), or that the group lacks (missing). */
static kvc_status check_not_gone(const kvc_cache *cache, const kvc_sequence *sequence, const weighing *w,
                                 int32_t group) {
    const kvc_run_list *list = &sequence->runs[group];
    const int32_t num = w->args.positions ? w->args.num_queries : 1;
    for (int32_t t = 0; t < num; t++) {
        const int32_t position = position_of(w, t);
        if (would_see(w, position, list->lost) || would_see(w, position, list->missing))
            return kvc_fail_gone(cache, sequence, position);
    }
    return KVC_OK;
}

/* Returns the most query rows of a block, a multiple of FEWEST_QUERIES. */
static int32_t most_queries(const weighing *w, int64_t padded_rows) {
    const int64_t all = (int64_t)w->args.num_queries * w->group, room = MOST_FLOATS / padded_rows;
    const int64_t wanted = all < MOST_QUERIES ? all + FEWEST_QUERIES - 1 : MOST_QUERIES;
    const int64_t most = (wanted < room ? wanted : room) / FEWEST_QUERIES * FEWEST_QUERIES;
    return most < FEWEST_QUERIES ? FEWEST_QUERIES : (int32_t)most;
}

/* Takes a snapshot of the sequence, which has all memory of the call, and lists the tiles there. */
static kvc_status open_weighing(kvc_cache *cache, int64_t seq_id, int32_t layer, weighing *w) {
    const int32_t group = cache->group_of[layer];
    const kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    const kvc_run_list *list = sequence ? &sequence->runs[group] : NULL;
    const int64_t num_rows = list ? list->num_rows : 0;
    int64_t padded_rows;
    if (num_rows != w->args.num_rows)
        return kvc_fail(KVC_ERR_INVALID, "num_rows is %lld: sequence %lld holds %lld in layer %d",
                        (long long)w->args.num_rows, (long long)seq_id, (long long)num_rows, layer);
    KVC_TRY(resolve_arrays(w->layer, &w->args));
    if (!num_rows) return KVC_OK;
    w->next = kvc_sequence_next(sequence);
    KVC_TRY(check_not_gone(cache, sequence, w, group));
    w->num_tiles = list_tiles(list, NULL, &padded_rows); /* NULL, twice: only measures */
    if (w->num_parts > w->num_tiles) w->num_parts = (int32_t)w->num_tiles;
    w->most_queries = most_queries(w, padded_rows);
    const uint64_t size = lay_out(w, padded_rows, /* only measure */ NULL);
    KVC_TRY(kvc_snapshot_take(cache, layer, kvc_runs_begin(list), list->num, size, &w->from));
    lay_out(w, padded_rows, w->from.scratch);
    list_tiles(list, w->tiles, &padded_rows);
    return KVC_OK;
}

kvc_status kvc_weights(kvc_cache *cache, int64_t seq_id, int32_t layer, const kvc_weights_args *given) {
    static const double WORTH_THREADS = 1 << 19; /* multiply-adds */
    weighing w = {.kernels = cache->kernels};
    KVC_TRY(kvc_check_layer(cache, layer));
    KVC_TRY(KVC_READ(kvc_weights_args, &w.args, given, "args"));
    KVC_TRY(check_args(cache, layer, &w.args));
    const int32_t dim = cache->layers[layer].k_dim, chunks = (dim + KVC_CHUNK - 1) / KVC_CHUNK;
    const double work = (double)w.args.num_rows * w.args.num_queries * w.args.num_heads * dim;
    w.layer = &cache->layers[layer];
    w.layout = &cache->layouts[cache->layout_of[layer]];
    w.policy = &cache->policies[cache->group_of[layer]];
    w.stride = cache->pools[cache->group_of[layer]].stride;
    w.rope = kvc_rope_of(cache, layer);
    w.mixing = kvc_mixing_of(w.layer, KVC_KEYS);
    w.scale = w.args.scale != 0 ? w.args.scale : 1 / sqrtf((float)dim);
    w.group = w.args.num_heads / w.layer->num_kv_heads;
    w.num_parts = kvc_threads_for(work, WORTH_THREADS, kvc_cache_threads(cache));
    w.q_stride = chunks * KVC_PACKED;
    kvc_cache_poll_timer(cache, work, &w.timer);
    kvc_lock(cache);
    kvc_cache_begin_reading(cache);
    kvc_status status = open_weighing(cache, seq_id, layer, &w);
    if (!w.from.num_runs) kvc_cache_end_reading(cache);
    kvc_unlock(cache, status);
    if (status != KVC_OK || !w.from.num_runs) return status;
    status = weigh_all(&w);
    kvc_snapshot_close(&w.from);
    return status;
}
