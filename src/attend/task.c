/* task.c: attends to the rows of one task.
 *
 * The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention): each query row has a running maximum and
 * sum, and what was accumulated is scaled whenever the maximum rises.  Rows that several sequences share are scored for
 * the query rows of all of them at once, as in Hydragen, but the tiles of a query row are those it has when its
 * sequence is alone, so that the order of sums does not change.
 */
#include "attend/task.h"

#include <math.h>
#include <string.h>

#include "attend/minima.h"
#include "attend/rows.h"
#include "attend/seen.h"
#include "rows/hadamard_order.h"

/* ---- a task and its views ---------------------------------------------------------------------------------------- */

kvc_task kvc_make_task(kvc_call *c, int64_t i, float *workspace) {
    const kvc_plan *plan = c->plan;
    const kvc_workspace_layout *at = &plan->workspace;
    const kvc_job *job = kvc_job_of(plan, i);
    const kvc_query_slice *slice = kvc_slice_of(plan, job, 0);
    kvc_task t = {.call = c,
                  .job = job,
                  .slice = slice,
                  .k_as = kvc_taken_as(c->kernels, c->layer->k_type, slice->tiled),
                  .v_as = kvc_taken_as(c->kernels, c->layer->v_type, slice->tiled),
                  .index = i,
                  .head = kvc_head_of(plan, i),
                  .split = job->split,
                  .workspace = workspace,
                  .q = workspace + at->q,
                  .q_blocks = workspace + at->q_blocks,
                  .scores = workspace + at->scores,
                  .acc = workspace + at->acc,
                  .max = workspace + at->max,
                  .sum = workspace + at->sum,
                  .factor = workspace + at->factor,
                  .delta_index = KVC_UNPREPARED,
                  .tokens = (void *)(workspace + at->tokens)};
    int32_t num_tokens = 0;
    for (int32_t m = 0; m < job->num_slices; m++) {
        if (m) slice = kvc_slice_of(plan, job, m);
        memcpy(t.tokens + num_tokens, plan->batch->order + slice->first, (size_t)slice->num_tokens * sizeof *t.tokens);
        num_tokens += slice->num_tokens;
    }
    t.num_query_rows = num_tokens * plan->heads_per_kv;
    return t;
}

/* Returns a view of num_query_rows query rows of a task, from row `first` on. */
static kvc_task view_of(const kvc_task *t, int32_t first, int32_t num_query_rows) {
    const kvc_plan *plan = t->call->plan;
    kvc_task view = *t;
    view.num_query_rows = num_query_rows;
    view.tokens += first / plan->heads_per_kv;
    view.q += (size_t)first * (size_t)plan->workspace.q_stride;
    view.q_blocks += (size_t)first * (size_t)plan->workspace.block_stride;
    view.scores += (size_t)first * KVC_TILE;
    view.acc += (size_t)first * (size_t)plan->workspace.acc_stride;
    view.max += first;
    view.sum += first;
    view.factor += first;
    return view;
}

kvc_task kvc_part_of(const kvc_task *t, int32_t m, int32_t first) {
    const kvc_plan *plan = t->call->plan;
    const kvc_query_slice *slice = kvc_slice_of(plan, t->job, m);
    kvc_task view = view_of(t, first, kvc_num_query_rows(plan, slice));
    view.slice = slice;
    return view;
}

/* ---- query rows and keys ----------------------------------------------------------------------------------------- */

/* Copies what stays as it is here: `convert` begins copying too slowly for rows in the L1 cache. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim) {
    const int32_t num = c->plan->heads_per_kv;
    if (from != to) {
        c->kernels->convert(from, to, dst, dst_stride, src, src_stride, num, dim);
        return;
    }
    const size_t bytes = kvc_row_bytes(to, dim);
    for (int32_t i = 0; i < num; i++) memcpy((char *)dst + i * dst_stride, (const char *)src + i * src_stride, bytes);
}

/* Copies the query rows to the workspace, as rows of type `to`, with zeros up to the end of a chunk. */
static void load_query_rows(const kvc_task *t, int32_t to) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t dim = c->plan->k_dim, heads = c->plan->heads_per_kv;
    const int64_t stride = c->plan->workspace.q_stride * (int64_t)sizeof(float);
    const int32_t padding = (KVC_CHUNK - dim % KVC_CHUNK) % KVC_CHUNK; /* elements */
    const size_t bytes = padding ? kvc_row_bytes(to, dim) : 0;
    const size_t padding_bytes = padding ? kvc_row_bytes(to, padding) : 0;
    char *row = (char *)t->q;
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        const char *q =
            (const char *)a->q + kvc_token_offset(kvc_token_of(t, r) - c->plan->args.first, a->tokens_per_sequence,
                                                  a->q_token_stride, a->q_batch_stride);
        kvc_convert_query_rows(c, a->q_type, to, row, stride, q + t->head * heads * a->q_head_stride, a->q_head_stride,
                               dim);
        for (int32_t i = 0; i < heads; i++, row += stride)
            if (padding) memset(row + bytes, 0, padding_bytes);
    }
}

/* Returns the delta_index of a tile's keys; 0 where no rope rotates them. */
static int32_t delta_index_of(const kvc_task *t, const kvc_tile *tile) { return t->call->rope ? tile->delta_index : 0; }

/* Returns the angles that rotate a query row for keys that are off by the delta with this index. */
static const float *angles_of(const kvc_call *c, int32_t delta_index) {
    return c->angles + (size_t)(delta_index - 1) * (size_t)c->plan->angles_stride;
}

static void rotate_query_rows(const kvc_task *t, int32_t delta_index) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const float *angles = angles_of(c, delta_index);
    for (int32_t r = 0; r < t->num_query_rows; r++)
        kvc_rope_rotate(c->rope, angles, t->q + (size_t)r * (size_t)plan->workspace.q_stride);
}

/* A place in the segments of a tile. */
typedef struct segment_place {
    const kvc_segment *segment;
    int32_t offset;
} segment_place;

/* Decodes the next n keys of a mixed tile to the workspace, transforms them back, and rotates them. */
static const float *rotate_keys(const kvc_task *t, const kvc_tile *tile, segment_place *at, int32_t n) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim, order = kvc_key_order(c->layer);
    const int64_t stride = c->plan->workspace.q_stride * (int64_t)sizeof(float);
    float *const first = t->workspace + c->plan->workspace.rows, *to = first;
    for (int32_t i = 0, count; i < n; i += count) {
        const kvc_segment *segment = at->segment;
        count = (int32_t)kvc_smaller(segment->count - at->offset, n - i);
        c->kernels->convert(c->layer->k_type, KVC_F32, to, stride, kvc_key_in(tile, segment, at->offset),
                            (int64_t)tile->layout->k_row_bytes, count, dim);
        for (int32_t j = 0; j < count; j++, to += c->plan->workspace.q_stride) {
            if (order) c->kernels->hadamard(to, to, dim, order);
            if (segment->delta_index) kvc_rope_rotate_back(c->rope, angles_of(c, segment->delta_index), to);
        }
        at->offset += count;
        if (at->offset == segment->count) at->segment++, at->offset = 0;
    }
    return first;
}

/* ---- kernels and prepared query rows ----------------------------------------------------------------------------- */

/* Whether a kernel takes the keys of a tile without their minima. */
static int key_minima_apart(const kvc_task *t, const kvc_tile *tile) {
    return delta_index_of(t, tile) != KVC_MIXED && kvc_lacks_minima(t->call->layer->k_type, t->k_as);
}

/* Returns the kernels that score a tile for few query rows. */
static const kvc_scorer *scorer_of(const kvc_task *t, const kvc_tile *tile) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t delta_index = delta_index_of(t, tile), type = delta_index == KVC_MIXED ? KVC_F32 : t->k_as;
    const int is_bf16 = type == KVC_BF16 && t->call->args->q_type == KVC_BF16 && !delta_index;
    return is_bf16 && kernels->score_bf16.score ? &kernels->score_bf16 : &kernels->score[type];
}

/* Returns the kernels that multiply rows of a stored type by many query rows. */
static const kvc_tiler *tiler_of(const kvc_task *t, int32_t type) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t kernel_type = kvc_taken_as(kernels, type, 1);
    return kernel_type != type && kernels->decoded.score ? &kernels->decoded : &kernels->tiler[kernel_type];
}

int kvc_sum_shift(const kvc_task *t) { return t->slice->tiled ? tiler_of(t, t->call->layer->v_type)->sum_shift : 0; }

int kvc_counts_powers_of_2(const kvc_task *t) {
    return t->slice->tiled && tiler_of(t, t->call->layer->v_type)->weigh != NULL;
}

/* How the keys of a tile are multiplied by many query rows. */
typedef struct key_product {
    kvc_prepare_fn *prepare; /* NULL: query rows are multiplied as the caller has them */
    kvc_pack_keys_fn *pack;
    kvc_matmul_fn *score;
    float scale; /* what the scores are to be multiplied by then */
} key_product;

/* Query rows of 16 bits are multiplied as they are where nothing changes them, as this takes fewer products.  Their
 * scores are scaled afterwards. */
static key_product product_of(const kvc_task *t, const kvc_tile *tile) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t delta_index = delta_index_of(t, tile), type = delta_index == KVC_MIXED ? KVC_F32 : c->layer->k_type;
    const kvc_tiler *tiler = tiler_of(t, type), *f16 = &c->kernels->tiler_f16;
    const int is_changed = delta_index > 0 || (kvc_key_order(c->layer) && delta_index != KVC_MIXED);
    if (!is_changed && c->scale > 0 && !(a->softcap > 0) && !a->alibi) {
        if (a->q_type == KVC_F16 && type == KVC_F16 && f16->score)
            return (key_product){NULL, f16->pack_keys, f16->score, c->scale};
        if (a->q_type == KVC_BF16 && tiler->score_bf16)
            return (key_product){NULL, tiler->pack_keys, tiler->score_bf16, c->scale};
    }
    return (key_product){tiler->prepare, tiler->pack_keys, tiler->score, 1};
}

/* Transforms the query rows as stored keys are, which leaves scores as they are. */
static void transform_query_rows(const kvc_task *t, int32_t order) {
    const kvc_call *c = t->call;
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *q = t->q + (size_t)r * (size_t)c->plan->workspace.q_stride;
        c->kernels->hadamard(q, q, c->plan->k_dim, order);
    }
}

/* Returns the query rows, rotated for the tile's delta, transformed as its keys are and prepared for its kernel.
 * Usually the last tile's serve. */
static const float *query_rows_for(kvc_task *t, const kvc_tile *tile) {
    const kvc_plan *plan = t->call->plan;
    const int32_t delta_index = delta_index_of(t, tile);
    if (delta_index == t->delta_index) return t->q;
    const int32_t order = kvc_key_order(t->call->layer);
    const kvc_scorer *scorer = scorer_of(t, tile);
    kvc_prepare_fn *prepare = t->slice->tiled ? product_of(t, tile).prepare : scorer->prepare;
    const int is_bf16 = !t->slice->tiled && scorer == &t->call->kernels->score_bf16;
    t->delta_index = delta_index;
    load_query_rows(t, prepare && !is_bf16 ? KVC_F32 : t->call->args->q_type);
    if (!prepare) return t->q;
    if (delta_index > 0) rotate_query_rows(t, delta_index);
    if (order && delta_index != KVC_MIXED) transform_query_rows(t, order);
    if (key_minima_apart(t, tile)) kvc_add_up_blocks(t);
    prepare(t->q, plan->workspace.q_stride, t->num_query_rows, plan->k_dim, t->call->scale);
    return t->q;
}

/* ---- what changes scores ----------------------------------------------------------------------------------------- */

/* Applies softcap and ALiBi to the scores of one query row over a tile. */
static void apply_softcap_and_alibi(const kvc_call *c, kvc_tile *tile, float *scores, int32_t token, int32_t head) {
    const kvc_batch *batch = c->plan->batch;
    if (c->args->softcap > 0)
        for (int32_t j = 0; j < tile->n; j++) scores[j] = c->args->softcap * tanhf(scores[j] / c->args->softcap);
    if (!c->args->alibi) return;
    kvc_locate_rows(tile, batch->order);
    for (int32_t j = 0; j < tile->n; j++)
        scores[j] -= c->args->alibi[head] * fabsf((float)(tile->position[j] - batch->positions[token]));
}

/* Some query rows of a task and their scores over a tile, which are `stride` floats apart. */
typedef struct query_block {
    int32_t first, end;
    float *scores;
    int32_t stride;
} query_block;

/* Applies softcap, ALiBi and what each query sees to the scores of a tile. */
static void change_scores(const kvc_task *t, kvc_tile *tile, const query_block *b) {
    const kvc_call *c = t->call;
    const int32_t heads = c->plan->heads_per_kv;
    const int is_changed = c->args->softcap > 0 || c->args->alibi;
    if (tile->is_seen && !is_changed) return;
    for (int32_t r = b->first, end; r < b->end; r = end) {
        const kvc_visible v = kvc_visible_to(c, kvc_token_of(t, r));
        float *const scores = b->scores + (size_t)(r - b->first) * (size_t)b->stride;
        end = (int32_t)kvc_smaller(r - r % heads + heads, b->end);
        for (int32_t i = r; is_changed && i < end; i++)
            apply_softcap_and_alibi(c, tile, scores + (i - r) * b->stride, v.token, kvc_query_head_of(t, i));
        if (!kvc_sees_whole_tile(c, tile, &v)) kvc_hide_unseen(c, tile, scores, b->stride, end - r, &v);
    }
}

/* Turns the scores of a tile into weights, and updates max, sum and factor of each query row.  Prefetches `next`. */
static void compute_weights(const kvc_task *t, kvc_tile *tile, kvc_ahead next) {
    const query_block all = {0, t->num_query_rows, t->scores, KVC_TILE};
    change_scores(t, tile, &all);
    t->call->kernels->softmax(t->scores, t->num_query_rows, tile->n, t->max, t->sum, t->factor, next);
}

/* ---- one tile ---------------------------------------------------------------------------------------------------- */

/* Attends to the tile `current`.  On the way, takes the tile `next` off the cursor `upcoming`, and prefetches its keys:
 * not earlier, as stretches are best listed just before they are read, because a tile's rows fill the L1 cache. */
typedef void attend_tile_fn(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

/* Scores a tile, and prefetches its values. */
static void score_tile(kvc_task *t, const kvc_tile *tile) {
    const kvc_call *c = t->call;
    const int32_t stride = c->plan->workspace.q_stride, dim = c->plan->k_dim;
    kvc_score_fn *const score = scorer_of(t, tile)->score;
    const float *q = query_rows_for(t, tile);
    kvc_walk keys = kvc_walk_keys(t, tile), values = kvc_walk_values(t, tile);
    if (delta_index_of(t, tile) == KVC_MIXED) {
        segment_place at = {tile->segment, tile->offset};
        score(t->scores, q, stride, t->num_query_rows, rotate_keys(t, tile, &at, tile->n), stride * (int64_t)sizeof *q,
              tile->n, dim, kvc_take_ahead(c, &values, tile->n));
        return;
    }
    float *scores = t->scores;
    while (keys.left) {
        const kvc_kernel_rows k = kvc_take_some(t, &keys);
        score(scores, q, stride, t->num_query_rows, k.first, k.stride, (int)k.num, dim,
              kvc_take_ahead(c, &values, k.num));
        scores += k.num;
    }
    if (key_minima_apart(t, tile)) kvc_score_minima(t, tile->n);
}

/* Adds rows of values, weighted, to acc, and prefetches up to `rows_ahead` rows of the next tile's keys.  Where these
 * do not lie one after the other, a kernel of quantised values, which takes all rows at once, takes a part of the
 * columns at a time, so that what no kernel prefetches evenly is at least prefetched in parts. */
static void accumulate_rows(const kvc_task *t, const float *weights, kvc_kernel_rows values, kvc_walk *keys,
                            int64_t rows_ahead) {
    enum { PARTS = 4 };
    const kvc_call *c = t->call;
    const int32_t type = t->v_as, dim = c->plan->v_dim;
    const int is_cut = type >= KVC_FLOAT_TYPES && kvc_is_in_stretches(keys);
    const int32_t splits = is_cut ? PARTS : 1;
    const int32_t columns =
        is_cut ? (dim / PARTS + KVC_QUANT_ELEMENTS - 1) / KVC_QUANT_ELEMENTS * KVC_QUANT_ELEMENTS : dim;
    for (int32_t d = 0; d < dim; d += columns) {
        const int is_last = d + columns >= dim;
        const kvc_ahead ahead = kvc_take_ahead(c, keys, is_last ? rows_ahead : (rows_ahead + splits - 1) / splits);
        c->kernels->accumulate[type](t->acc + d, c->plan->workspace.acc_stride, t->factor, weights, t->num_query_rows,
                                     (const uint8_t *)values.first + (d ? kvc_row_bytes(type, d) : 0), values.stride,
                                     (int)values.num, is_last ? dim - d : columns, ahead);
    }
}

/* Adds a tile's values, weighted, to acc, and prefetches what is left of the next one's keys. */
static void accumulate_tile(const kvc_task *t, const kvc_tile *tile, kvc_walk *keys) {
    const kvc_call *c = t->call;
    kvc_walk values = kvc_walk_values(t, tile);
    const float *weights = t->scores;
    while (values.left) {
        const kvc_kernel_rows v = kvc_take_some(t, &values);
        accumulate_rows(t, weights, v, keys, values.left ? v.num : KVC_TILE);
        weights += v.num;
        for (int32_t r = 0; values.left && r < t->num_query_rows; r++) t->factor[r] = 1; /* acc is multiplied once */
    }
    if (kvc_lacks_minima(c->layer->v_type, t->v_as)) kvc_accumulate_minima(t, tile->n);
}

enum { LINES_PER_ROW = KVC_TILE / KVC_LANES }; /* prefetched while the softmax of a query row is computed */

/* Attends to a tile for few query rows: each row is read once for all of them. */
static void stream_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    score_tile(t, current);
    kvc_next_tile(next, upcoming);
    kvc_walk keys = kvc_walk_keys(t, next);
    compute_weights(t, current, kvc_take_few_ahead(t->call, &keys, t->num_query_rows * LINES_PER_ROW));
    accumulate_tile(t, current, &keys);
}

/* Returns a view of the query rows from the first to the last that sees anything of a tile: few, where the tile is at
 * the end of a prompt or of a window. */
static kvc_task view_that_sees(const kvc_task *t, const kvc_tile *tile) {
    const int32_t heads = t->call->plan->heads_per_kv;
    int32_t first = 0, end = t->num_query_rows / heads;
    while (first < end && kvc_sees_nothing_of(t->call, tile, t->tokens[first])) first++;
    while (first < end && kvc_sees_nothing_of(t->call, tile, t->tokens[end - 1])) end--;
    return view_of(t, first * heads, (end - first) * heads);
}

/* Packs the keys of a tile into the workspace's panel. */
static void pack_keys(const kvc_task *t, const kvc_tile *tile, kvc_pack_keys_fn *pack) {
    const kvc_plan *plan = t->call->plan;
    const int is_mixed = delta_index_of(t, tile) == KVC_MIXED;
    segment_place at = {tile->segment, tile->offset};
    kvc_walk keys = kvc_walk_keys(t, tile);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_TILE);
        const kvc_kernel_rows rows = is_mixed ? (kvc_kernel_rows){rotate_keys(t, tile, &at, n),
                                                                  plan->workspace.q_stride * (int64_t)sizeof(float), n}
                                              : kvc_take_rows(t, &keys, n);
        pack(t->workspace + plan->workspace.keys, rows.first, rows.stride, i, n, plan->k_dim);
    }
}

/* Packs the values of a tile into the workspace's panel. */
static void pack_values(const kvc_task *t, const kvc_tile *tile, kvc_pack_values_fn *pack) {
    const kvc_plan *plan = t->call->plan;
    kvc_walk values = kvc_walk_values(t, tile);
    for (int32_t i = 0, n; i < tile->n; i += n) {
        n = (int32_t)kvc_smaller(tile->n - i, KVC_TILE);
        const kvc_kernel_rows rows = kvc_take_rows(t, &values, n);
        pack(t->workspace + plan->workspace.values, plan->workspace.acc_stride, rows.first, rows.stride, i, n,
             plan->v_dim);
    }
}

/* Turns a block's scores, times scale, into weights, and multiplies acc where a maximum rose. */
static void weigh_block(const kvc_task *t, kvc_tile *tile, const query_block *b, float scale, kvc_weigh_fn *weigh) {
    const kvc_kernels *kernels = t->call->kernels;
    const kvc_plan *plan = t->call->plan;
    const int32_t first = b->first, num = b->end - first;
    change_scores(t, tile, b);
    if (weigh)
        weigh(b->scores, num, tile->n, scale, t->max + first, t->sum + first, t->factor + first);
    else
        kernels->softmax(b->scores, num, tile->n, t->max + first, t->sum + first, t->factor + first,
                         (kvc_ahead){.bytes = 0});
    for (int32_t r = first; r < b->end; r++)
        if (t->factor[r] != 1)
            kernels->scale(t->acc + (size_t)r * (size_t)plan->workspace.acc_stride, 0, 1, plan->v_dim, t->factor[r]);
}

/* Attends to a tile for many query rows: keys and values are packed into panels once, and multiplied, by a block of
 * query rows after the other where their scores are to stay in the L1 cache.  Prefetches the next tile. */
static void multiply_tile(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    const kvc_call *c = all->call;
    const kvc_plan *plan = c->plan;
    const kvc_workspace_layout *workspace = &plan->workspace;
    query_rows_for(all, current);
    const kvc_task view = view_that_sees(all, current), *t = &view;
    const kvc_tiler *values = tiler_of(t, c->layer->v_type);
    const key_product keys = product_of(t, current);
    const int32_t num = t->num_query_rows, at_once = values->weigh ? KVC_BLOCK_QUERIES : num;
    const int32_t k_room = values->weigh ? plan->k_dim : KVC_TILE,
                  v_room = values->weigh ? KVC_WIDE_TILE : workspace->acc_stride;
    pack_keys(t, current, keys.pack);
    kvc_next_tile(next, upcoming);
    kvc_walk next_keys = kvc_walk_keys(t, next), next_values = kvc_walk_values(t, next);
    const int32_t blocks = num ? (num + at_once - 1) / at_once : 1, ahead = (next->n + blocks - 1) / blocks;
    query_block b = {0, 0, values->weigh ? t->workspace + workspace->scores : t->scores,
                     values->weigh ? KVC_WEIGHTS_STRIDE : KVC_TILE};
    kvc_former former;
    if (c->kernels->begin) c->kernels->begin(&former);
    for (; b.first < num; b.first = b.end) {
        b.end = (int32_t)kvc_smaller(num, b.first + at_once);
        keys.score(b.scores, b.stride, t->q + (size_t)b.first * (size_t)workspace->q_stride, workspace->q_stride,
                   t->workspace + workspace->keys, k_room, b.end - b.first, current->n, plan->k_dim, 0,
                   kvc_take_ahead(c, &next_keys, ahead));
        if (key_minima_apart(t, current)) kvc_score_minima(t, current->n); /* without weigh: this block is all rows */
        weigh_block(t, current, &b, keys.scale, values->weigh);
        if (!b.first) pack_values(t, current, values->pack_values);
        values->accumulate(t->acc + (size_t)b.first * (size_t)workspace->acc_stride, workspace->acc_stride, b.scores,
                           b.stride, t->workspace + workspace->values, v_room, b.end - b.first, plan->v_dim, current->n,
                           1, kvc_take_ahead(c, &next_values, ahead));
    }
    if (kvc_lacks_minima(c->layer->v_type, t->v_as)) kvc_accumulate_minima(t, current->n);
    if (c->kernels->end) c->kernels->end(&former);
}

/* Attends to a tile by one token after the other, as a value that some of them do not see is no number: it would reach
 * them, for all that its weight is 0.  The bits are those of a tile with numbers there. */
static void attend_apart(kvc_task *t, attend_tile_fn *attend_tile, kvc_tile *current, kvc_tile *next,
                         kvc_cursor *upcoming) {
    const int32_t heads = t->call->plan->heads_per_kv;
    kvc_cursor nothing = {.layout = t->call->layout};
    kvc_tile own, none;
    query_rows_for(t, current);
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        kvc_task view = view_of(t, r, heads);
        kvc_clear_unseen(&view, current, &own);
        attend_tile(&view, &own, r ? &none : next, r ? &nothing : upcoming);
    }
}

/* ---- the rows of a task ------------------------------------------------------------------------------------------ */

/* Returns a cursor over `count` rows of a split of a slice, from its row `row` on. */
static kvc_cursor cursor_at(const kvc_call *c, const kvc_query_slice *slice, int32_t split, int32_t head, int64_t row,
                            int64_t count) {
    const kvc_plan *plan = c->plan;
    const kvc_split_start *start = &plan->starts[slice->first_start + split];
    const kvc_segment *segment = plan->segments + start->segment;
    int64_t offset = start->offset + row;
    while (count && offset >= segment->count) offset -= segment++->count;
    kvc_cursor at = {.layout = c->layout,
                     .segment = segment,
                     .offset = (int32_t)offset,
                     .head = head,
                     .num_rows = count,
                     .window_rows = slice->tile_rows};
    if (plan->num_deltas) at.changes_to_mix = slice->tiled ? KVC_TILED_DELTA_CHANGES : KVC_STREAM_DELTA_CHANGES;
    if (slice->is_buffered && count)
        at.layout = &c->buffer->layout, at.buffer_rows = kvc_row_buffer_block(c->buffer)->rows;
    return at;
}

/* Counts the rows of the split that a slice does not share with all others. */
static int64_t num_own_rows(const kvc_job *job, const kvc_query_slice *slice) {
    return kvc_split_rows(slice, job->split) - job->shared_rows;
}

/* Returns a cursor over the rows of task i that come first: those that its slices share, or those of the only slice.
 * It is empty if there is no task i. */
static kvc_cursor first_rows(const kvc_call *c, int64_t i) {
    const kvc_plan *plan = c->plan;
    if (i >= c->num_tasks) return (kvc_cursor){.layout = c->layout};
    const kvc_job *job = kvc_job_of(plan, i);
    const kvc_query_slice *slice = kvc_slice_of(plan, job, 0);
    const int64_t rows = job->shared_rows ? job->shared_rows : num_own_rows(job, slice);
    return cursor_at(c, slice, job->split, kvc_head_of(plan, i), 0, rows);
}

/* Returns a cursor over the own rows of slice m, or of the next one that has any; behind the last slice, over the
 * first rows of the task that this thread will probably run next. */
static kvc_cursor rows_from_slice(const kvc_task *t, int32_t m) {
    const kvc_plan *plan = t->call->plan;
    for (; m < t->job->num_slices; m++) {
        const kvc_query_slice *slice = kvc_slice_of(plan, t->job, m);
        const int64_t rows = num_own_rows(t->job, slice);
        if (rows) return cursor_at(t->call, slice, t->split, t->head, t->job->shared_rows, rows);
    }
    return first_rows(t->call, t->index + plan->args.num_threads);
}

int kvc_is_cancelled(kvc_call *c) {
    const volatile int32_t *cancel = c->args->cancel;
    if (cancel && atomic_load_explicit((const volatile _Atomic int32_t *)cancel, memory_order_relaxed)) return 1;
    return kvc_poll_timer_ask(&c->timer);
}

/* Attends to the rows of a cursor, tile by tile.  ahead: rows that this thread will read next, of which the first tile
 * is prefetched.  Returns 0 if the call was cancelled. */
static int attend_rows(kvc_task *t, kvc_cursor rows, kvc_cursor ahead) {
    attend_tile_fn *const attend_tile = t->slice->tiled ? multiply_tile : stream_tile;
    const kvc_visible common = kvc_visible_to_all(t);
    kvc_tile tiles[2];
    kvc_next_tile(&tiles[0], &rows);
    for (int i = 0, is_last = !tiles[0].n; !is_last; i = !i) {
        kvc_tile *current = &tiles[i], *next = &tiles[!i];
        if (t->slice->tiled && kvc_is_cancelled(t->call)) return 0; /* streamed tasks are short */
        is_last = !rows.num_rows;
        kvc_cursor *const upcoming = is_last ? &ahead : &rows;
        current->is_seen = kvc_sees_whole_tile(t->call, current, &common);
        if (!current->is_seen && kvc_spoils_others(t, current, &common))
            attend_apart(t, attend_tile, current, next, upcoming);
        else
            attend_tile(t, current, next, upcoming);
    }
    return 1;
}

/* Prefetches the first keys of a thread's first task.  For each later task, the one before it has done so. */
static void prefetch_keys(const kvc_task *t) {
    const kvc_call *c = t->call;
    if (t->index >= c->plan->args.num_threads) return;
    kvc_cursor first = first_rows(c, t->index);
    kvc_tile tile;
    kvc_next_tile(&tile, &first);
    kvc_walk keys = kvc_walk_keys(t, &tile);
    kvc_prefetch(kvc_take_ahead(c, &keys, tile.n));
}

int kvc_attend_split(kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    const kvc_job *job = t->job;
    kvc_task own;    /* a view; copying the task of a single slice took 100 cycles */
    int goes_on = 1; /* until the call is cancelled */
    prefetch_keys(t);
    memset(t->acc, 0, (size_t)t->num_query_rows * (size_t)plan->workspace.acc_stride * sizeof(float));
    for (int32_t r = 0; r < t->num_query_rows; r++) t->max[r] = -INFINITY, t->sum[r] = 0;
    if (job->shared_rows) goes_on = attend_rows(t, first_rows(t->call, t->index), rows_from_slice(t, 0));
    for (int32_t m = 0, first = 0; goes_on && m < job->num_slices; m++) {
        if (job->num_slices > 1) own = kvc_part_of(t, m, first);
        kvc_task *const part = job->num_slices > 1 ? &own : t;
        const int64_t rows = num_own_rows(job, part->slice);
        first += part->num_query_rows;
        if (rows)
            goes_on = attend_rows(part, cursor_at(t->call, part->slice, t->split, t->head, job->shared_rows, rows),
                                  rows_from_slice(t, m + 1));
    }
    return goes_on;
}
