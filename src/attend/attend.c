/* attend.c: runs tasks of a plan: kvc_attend all of them, kvc_plan_run one of them.
 *
 * A slice is query tokens of one sequence, with the rows that they see.  These rows are cut into splits, whose results
 * are merged.  A part is query heads of one KV head.  A job is some splits of one slice, or one split of several slices
 * that begin with the same rows.  A task is a job for one part.  A view is a task with fewer of its query rows.
 *
 * acc, max and sum are the online softmax of each query row: weighted values added up, the largest score, and the sum
 * of exp(score - max).  plan->remaining counts the splits of each slice and part that are still to be run.
 * kvc_plan_run may run a task again: was_done says so of this task, is_rerun of any task of the round.
 */
#include <math.h>
#include <string.h>

#include "attend/bytes.h"
#include "attend/chosen.h"
#include "attend/multiply.h"
#include "attend/plan.h"
#include "attend/round.h"
#include "attend/run.h"
#include "attend/select.h"
#include "attend/step.h"
#include "cache/check.h"
#include "pass/put.h"
#include "rows/copy.h"

#define CANCELLED "the attention was cancelled"

/* ---- the rows of a task ------------------------------------------------------------------------------------------ */

/* Counts the rows of a job's split that a slice does not share with the job's other slices. */
static int64_t num_own_rows(const kvc_job *job, const kvc_query_slice *slice) {
    return kvc_split_rows(slice, job->split) - job->shared_rows;
}

/* Returns a cursor over the rows that a job's slices share, or all rows of its only slice.  slice: the first one. */
static kvc_cursor first_rows(const kvc_call *c, const kvc_job *job, const kvc_query_slice *slice, int32_t part) {
    return kvc_cursor_at(c, slice, job->split, part, 0, job->shared_rows ? job->shared_rows : num_own_rows(job, slice));
}

/* Returns a cursor over the own rows of slice m, or of the next slice that has own rows.  Behind the last slice,
 * returns a cursor over the first rows of the task that this thread will probably run next.  It is empty if there is
 * no such task, or if that one scores sketches. */
static kvc_cursor rows_from_slice(const kvc_task *t, int32_t m) {
    const kvc_plan *plan = t->call->plan;
    for (; m < t->job->num_slices; m++) {
        const kvc_query_slice *slice = kvc_slice_of(plan, t->job, m);
        const int64_t rows = num_own_rows(t->job, slice);
        if (rows) return kvc_cursor_at(t->call, slice, t->job->split, t->part, t->job->shared_rows, rows);
    }
    const int64_t next = t->index + plan->args.num_threads;
    int32_t part;
    if (next >= plan->jobs.num_tasks) return (kvc_cursor){.layout = t->call->layout};
    const kvc_job *job = kvc_job_of(plan, next, &part);
    const kvc_query_slice *slice = kvc_slice_of(plan, job, 0);
    if (slice->selects) return (kvc_cursor){.layout = t->call->layout};
    return first_rows(t->call, job, slice, part);
}

/* Returns a cursor over the rows of split p of the task's slice. */
static kvc_cursor rows_of_split(const kvc_task *t, int32_t p) {
    return kvc_cursor_at(t->call, t->slice, p, t->part, 0, kvc_split_rows(t->slice, p));
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Attends to the tile `current`.  On the way, takes the tile `next` off the cursor `upcoming`, and prefetches its keys.
 * It does so no earlier, because a tile's rows push listed stretches out of the L1 cache. */
typedef void attend_tile_fn(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

/* Attends to a tile for one token after the other, because a masked value is infinite or NaN: times its weight of 0, it
 * would give NaN.  The bits are as if the masked value were a number.  The first token prefetches the next tile. */
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

/* Attends to the rows of a cursor, tile by tile.  ahead: rows that this thread will read next, of which the first tile
 * is prefetched.  Returns 0 if the call was cancelled. */
static int attend_rows(kvc_task *t, kvc_cursor rows, kvc_cursor ahead) {
    static attend_tile_fn *const ways[] = {kvc_stream_tile, kvc_multiply_tile, kvc_multiply_bytes};
    attend_tile_fn *const attend = ways[t->slice->tiled]; /* KVC_STREAMED, KVC_TILED or KVC_IN_BYTES */
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

/* ---- splits ------------------------------------------------------------------------------------------------------ */

/* Whether a task alone has all splits of its slice, and keeps their results in its workspace. */
static int has_all_splits(const kvc_task *t) { return t->call->plan->jobs.joins_splits || t->slice->selects; }

/* Returns where acc, max and sum of split p of the task's slice and part are stored. */
static float *partial_of(const kvc_task *t, int32_t p) {
    const kvc_plan *plan = t->call->plan;
    const uint64_t size = kvc_partial_size(t->num_query_rows, plan->attending.acc_stride);
    if (has_all_splits(t)) {
        const int64_t before = kvc_slice_number(t) * plan->listing.most_splits; /* of other slices */
        return t->workspace + plan->listing.partials + (size_t)(before + p) * size;
    }
    return plan->partials + t->slice->partials + ((size_t)t->part * (size_t)t->slice->num_splits + (size_t)p) * size;
}

/* Copies the result of split p of the task to where it is stored. */
static void keep_partial(const kvc_task *t, int32_t p) {
    float *partial = partial_of(t, p);
    const size_t q = (size_t)t->num_query_rows;
    memcpy(partial, t->max, q * sizeof *partial);
    memcpy(partial + q, t->sum, q * sizeof *partial);
    memcpy(partial + kvc_align_up(2 * q, KVC_LANES), t->acc,
           q * (size_t)t->call->plan->attending.acc_stride * sizeof *partial);
}

/* Keeps the result of split p, although the task goes on with another split. */
static void keep_early(const kvc_task *t, int32_t p) {
    kvc_round *round = &t->call->plan->round;
    const int is_locked = t->call->is_rerun && !has_all_splits(t); /* another task may merge the splits meanwhile */
    if (is_locked) kvc_round_lock(round);
    keep_partial(t, p);
    if (is_locked) kvc_round_unlock(round);
}

/* Makes acc, max and sum those of no rows. */
static void begin_split(kvc_task *t) {
    memset(t->acc, 0, (size_t)t->num_query_rows * (size_t)t->call->plan->attending.acc_stride * sizeof(float));
    for (int32_t r = 0; r < t->num_query_rows; r++) t->max[r] = -INFINITY, t->sum[r] = 0;
}

/* Attends to the rows that all slices share, then to each slice's other rows.  Returns 0 if the call was cancelled. */
static int attend_shared(kvc_task *t, kvc_cursor shared) {
    const kvc_job *job = t->job;
    begin_split(t);
    int goes_on = attend_rows(t, shared, rows_from_slice(t, 0)); /* until the call is cancelled */
    for (int32_t m = 0, query_row = 0; goes_on && m < job->num_slices; m++) {
        kvc_task own = kvc_view_of_slice(t, m, query_row);
        const int64_t rows = num_own_rows(job, own.slice);
        query_row += own.num_query_rows;
        if (rows)
            goes_on = attend_rows(&own, kvc_cursor_at(t->call, own.slice, job->split, t->part, job->shared_rows, rows),
                                  rows_from_slice(t, m + 1));
    }
    return goes_on;
}

/* Attends to the rows of a job.  acc, max and sum become the results of its last split, for all slices.  Returns 0 if
 * the call was cancelled. */
static int attend_splits(kvc_task *t) {
    const kvc_job *job = t->job;
    kvc_cursor rows = first_rows(t->call, job, t->slice, t->part);
    if (t->index < t->call->plan->args.num_threads) /* for later tasks, the one before has */
        kvc_prefetch_keys(t, rows);
    if (job->num_slices > 1) return attend_shared(t, rows);
    for (int32_t p = job->split;; p++) {
        const int is_last = p + 1 == job->split + job->num_splits;
        const kvc_cursor next = is_last ? rows_from_slice(t, 1) : rows_of_split(t, p + 1);
        begin_split(t);
        if (!attend_rows(t, rows, next)) return 0;
        if (is_last) return 1;
        keep_early(t, p);
        rows = next;
    }
}

/* ---- merging the results of splits by log-sum-exp (Flash-Decoding) ----------------------------------------------- */

/* The results of a slice's splits for one KV head: in plan->partials or in the workspace. */
typedef struct results {
    int32_t num_splits;
    const float *max, *sum, *acc; /* those of split 0 */
    uint64_t stride;              /* from split to split, in floats */
    float ln_of_base;             /* of maxima: 1, or ln(2) */
    float one;                    /* what a value of 1 is in acc */
} results;

/* Returns the factor that turns a sum of exp(score - own_max) into a sum of exp(score - max). */
static float rescale_factor(float own_max, float max, float ln_of_base) {
    return own_max == -INFINITY ? 0 : own_max == max ? 1 : expf((own_max - max) * ln_of_base);
}

/* Adds up the first `num_splits` splits of query row r, in their order, each rescaled to the maximum of all.  Writes
 * the accumulated values to `out`, which is the workspace's acc, and returns the sum. */
static float add_splits(const kvc_task *t, const results *all, int32_t r, int32_t num_splits, float max, float *out) {
    const kvc_plan *plan = t->call->plan;
    const size_t stride = (size_t)plan->attending.acc_stride, row = (size_t)r * stride;
    float factor = rescale_factor(all->max[r], max, all->ln_of_base), sum = factor * all->sum[r];
    if (all->num_splits > 1) memcpy(out, all->acc + row, stride * sizeof *out);
    if (num_splits == 1 && factor == 1) return sum;
    int32_t p = 1, n;
    do { /* runs once even for a single split, as `out` must be multiplied by the factor */
        float weights[KVC_TILE];
        kvc_value_piece rows = {all->acc + (uint64_t)p * all->stride + row, {.bytes = 0}};
        for (n = 0; n < KVC_TILE && p < num_splits; n++, p++) {
            const uint64_t split = (uint64_t)p * all->stride;
            weights[n] = rescale_factor(all->max[split + (size_t)r], max, all->ln_of_base);
            sum += weights[n] * all->sum[split + (size_t)r];
        }
        t->call->kernels->accumulate[KVC_F32](out, (int)stride, &factor, weights, 1, &rows,
                                              (int64_t)(all->stride * sizeof(float)), n, plan->v_dim);
        factor = 1;
    } while (p < num_splits);
    return sum;
}

/* Byte offsets of a query row in the caller's out and lse, and in prior_out and prior_lse. */
typedef struct place {
    int64_t out, lse;
} place;

/* Merges the splits of query row r with a sink and with attention to other rows, divides by their sum, and transforms
 * the values back.  The output row takes acc's place in the workspace.  Writes lse where the caller asks for it. */
static void merge_row(const kvc_task *t, const results *all, int32_t r, place at) {
    const kvc_plan *plan = t->call->plan;
    const kvc_kernels *kernels = t->call->kernels;
    const kvc_attend_args *a = t->call->args;
    const int32_t stride = (int32_t)plan->attending.acc_stride;
    const float base = all->ln_of_base, one = 1;
    const float sink = a->sinks ? a->sinks[kvc_query_head_of(t, r)] / base : -INFINITY;
    float prior = -INFINITY; /* the maximum of attention to other rows, whose sum is 1 */
    if (a->prior_out) memcpy(&prior, (const char *)a->prior_lse + at.lse, sizeof prior);
    prior /= base;
    float *out = t->acc + (size_t)r * (size_t)stride, own = -INFINITY, max = prior > sink ? prior : sink;
    int32_t num_splits = 1; /* up to the last split with rows: a split without rows may change the sign of a zero */
    for (int32_t p = 0; p < all->num_splits; p++) {
        const float of_split = all->max[(size_t)p * all->stride + (size_t)r];
        if (of_split > own) own = of_split;
        if (of_split != -INFINITY) num_splits = p + 1;
    }
    if (own > max) max = own;
    const float factor = rescale_factor(own, max, base), of_prior = rescale_factor(prior, max, base);
    const float sum = factor * add_splits(t, all, r, num_splits, own, out) + rescale_factor(sink, max, base) + of_prior;
    const float weight = of_prior / sum;
    /* If the sum is 0, the query saw nothing, and `out` is 0. */
    kernels->scale(out, 0, 1, plan->v_dim, sum == 0 ? 1 : factor / (sum * all->one));
    if (t->call->v_mixing.order) kernels->hadamard(out, out, plan->v_dim, t->call->v_mixing);
    if (of_prior > 0) {
        kvc_value_piece row = {(const char *)a->prior_out + at.out, {.bytes = 0}};
        kernels->accumulate[t->call->out_type](out, stride, &one, &weight, 1, &row, 0, 1, plan->v_dim);
    }
    const float lse = sum == 0 ? -INFINITY : max * base + logf(sum);
    if (a->lse) memcpy((char *)a->lse + at.lse, &lse, sizeof lse);
}

/* Writes the output rows, and lse where the caller asks for it. */
static void write_out(const kvc_task *t, const results *all) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t heads = c->plan->parts.heads, first = t->part * heads, inner = a->tokens_per_sequence;
    const int64_t stride = c->plan->attending.acc_stride;
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        const int32_t token = t->tokens[r / heads] - c->plan->args.first;
        const int64_t out = kvc_token_offset(token, inner, a->out_token_stride, a->out_batch_stride);
        const int64_t lse =
            a->lse || a->prior_out ? kvc_token_offset(token, inner, a->lse_token_stride, a->lse_batch_stride) : 0;
        for (int32_t i = 0; i < heads; i++) {
            const place at = {out + (first + i) * a->out_head_stride, lse + (first + i) * a->lse_head_stride};
            merge_row(t, all, r + i, at);
        }
        kvc_convert_query_rows(c, KVC_F32, c->out_type, (char *)a->out + out + first * a->out_head_stride,
                               a->out_head_stride, t->acc + r * stride, stride * (int64_t)sizeof(float),
                               c->plan->v_dim);
    }
}

/* Ends a task's last split.  Of the tasks of a slice and part, the one that ends last merges the splits and writes the
 * output; in a rerun, each task that finds all splits there does.  A single split is not counted: atomic instructions
 * wait until all that was stored is in the cache.  A task that selects rows attended to all splits. */
static void end_split(const kvc_task *t, int32_t num_splits) {
    if (num_splits > 1 && !has_all_splits(t)) {
        keep_partial(t, t->job->split + t->job->num_splits - 1);
        if (!kvc_ends_slice(t)) return;
    }
    results all = {num_splits, t->max, t->sum, t->acc, 0, 1, 1};
    if (num_splits > 1) {
        const size_t q = (size_t)t->num_query_rows;
        all.max = partial_of(t, 0);
        all.sum = all.max + q;
        all.acc = all.max + kvc_align_up(2 * q, KVC_LANES);
        all.stride = kvc_partial_size(t->num_query_rows, t->call->plan->attending.acc_stride);
    }
    if (t->slice->tiled == KVC_TILED) {
        const kvc_tiler *values = kvc_value_tiler(t);
        all.one = (float)(1 << values->sum_shift);
        if (values->weigh) all.ln_of_base = 0.693147180559945309f;
    }
    write_out(t, &all);
}

/* Ends a task that attended to its rows: keeps each slice's results, and writes outputs of slices that are complete. */
static void end_splits(const kvc_task *t) {
    if (t->job->num_slices == 1) {
        end_split(t, t->slice->num_splits);
        return;
    }
    for (int32_t m = 0, first = 0; m < t->job->num_slices; m++) {
        const kvc_task own = kvc_view_of_slice(t, m, first);
        first += own.num_query_rows;
        end_split(&own, own.slice->num_splits);
    }
}

/* ---- rows that are chosen or selected ---------------------------------------------------------------------------- */

/* A slice whose rows are listed and attended to split by split, and how far that is. */
typedef struct reader {
    kvc_task t;
    kvc_row_lister list;
    int32_t split, end; /* the splits that are left */
    int32_t keeps;      /* whether there are several, whose results are kept */
    int64_t split_rows;
    kvc_cursor rows, next_split; /* rows that are left of this split; rows of the next one */
} reader;

/* Lists the rows of split p, and returns a cursor over them: an empty one behind the last split.  A slice has room for
 * two lists, because the rows of the split before are still read. */
static kvc_cursor list_split(reader *r, int32_t p) {
    if (p == r->end) return (kvc_cursor){.layout = r->t.call->layout};
    kvc_segment *const to = kvc_chosen_segments(&r->t) + (2 * kvc_slice_number(&r->t) + p % 2) * r->split_rows;
    return kvc_cursor_from(r->t.call, r->t.slice, r->t.part, to, 0, kvc_list_next(&r->list, to, r->split_rows));
}

/* Makes next_split the split that is read, and lists the rows of the split behind it. */
static void open_split(reader *r) {
    r->rows = r->next_split;
    r->next_split = list_split(r, r->split + 1);
    begin_split(&r->t);
}

/* Begins to read num_splits splits of listed rows, from split `first` on, each of split_rows. */
static reader begin_reading(const kvc_task *t, const kvc_row_lister *list, int32_t first, int32_t num_splits,
                            int64_t split_rows) {
    reader r = {.t = *t,
                .list = *list,
                .split = first,
                .end = first + num_splits,
                .keeps = num_splits > 1,
                .split_rows = split_rows};
    r.next_split = list_split(&r, first);
    kvc_prefetch_keys(t, r.next_split);
    open_split(&r);
    return r;
}

/* Ends a split whose rows are read: keeps its result if there are several splits, and opens the next one. */
static void close_split(reader *r) {
    if (r->keeps) keep_early(&r->t, r->split);
    if (++r->split < r->end) open_split(r);
}

/* Returns the position of a reader's next row, or 0 if there is none. */
static int32_t position_of(const reader *r) {
    return r->rows.num_rows ? r->rows.segment->position + r->rows.offset : 0;
}

/* Returns the reader whose next row comes first; NULL: all rows are read. */
static reader *first_of(reader *readers, int32_t num) {
    reader *first = NULL;
    for (reader *r = readers; r < readers + num; r++)
        if (r->split < r->end && (!first || position_of(r) < position_of(first))) first = r;
    return first;
}

/* Attends to the rows of readers.  Takes the tiles of several readers in the order of positions, so that rows that
 * several of them read come from memory once.  Returns 0 if the call was cancelled. */
static int attend_listed(reader *readers, int32_t num) {
    for (reader *r; (r = first_of(readers, num));) {
        const int64_t left = r->rows.num_rows, n = num > 1 ? kvc_smaller(left, r->rows.frame_rows) : left;
        kvc_cursor rows = r->rows;
        rows.num_rows = n;
        r->rows = kvc_cursor_from(r->t.call, r->t.slice, r->t.part, rows.segment, rows.offset + n, left - n);
        if (!attend_rows(&r->t, rows, left > n ? r->rows : r->next_split)) return 0;
        if (left == n) close_split(r);
    }
    return 1;
}

/* Attends to the rows that the task's token chooses. */
static int attend_chosen(kvc_task *t) {
    const int64_t split_rows = t->slice->split_rows;
    const kvc_row_lister list = kvc_list_chosen(t, t->job->split * split_rows);
    reader r = begin_reading(t, &list, t->job->split, t->job->num_splits, split_rows);
    return attend_listed(&r, 1);
}

/* Scores sketches if the task's slices select rows; otherwise attends to all rows.  Returns 0 if it was cancelled. */
static int begin_selecting(kvc_task *t) { return t->slice->selects ? kvc_score_sketches(t) : attend_splits(t); }

/* Ends a task that scored sketches.  Of the tasks of a slice and part, the last to end selects rows by all scores, and
 * attends to them.  If a job has several slices, each has one split, so that this task is its last. */
static void end_selecting(const kvc_task *t) {
    const kvc_call *c = t->call;
    reader readers[KVC_SELECTING_QUERIES];
    int32_t num_splits[KVC_SELECTING_QUERIES];
    if (!t->slice->selects) { /* the task attended to all rows */
        end_splits(t);
        return;
    }
    if (t->slice->num_splits > 1) {
        kvc_keep_found(t); /* the scores of this split */
        if (!kvc_ends_slice(t)) return;
    }
    for (int32_t m = 0; m < t->job->num_slices; m++) {
        int64_t num_rows;
        const kvc_task view = kvc_view_of_slice(t, m, m * c->plan->parts.heads);
        const kvc_row_lister list = kvc_list_selected(&view, &num_rows);
        num_splits[m] = num_rows ? (int32_t)KVC_DIVIDE_UP(num_rows, KVC_SPLIT_ROWS) : 1;
        readers[m] = begin_reading(&view, &list, 0, num_splits[m], KVC_SPLIT_ROWS);
    }
    if (attend_listed(readers, t->job->num_slices)) {
        for (int32_t m = 0; m < t->job->num_slices; m++) end_split(&readers[m].t, num_splits[m]);
        return;
    }
    /* The call was cancelled.  Only this task must be run again, to select: its split counts as missing again.  If it
     * was done before, kvc_ends_slice will not count it off, and so 0 must be left. */
    atomic_store(&c->plan->remaining[t->slice->first_counter + t->part], !c->was_done);
    atomic_store(&t->call->was_cancelled, 1);
}

static const kvc_work attention = {attend_splits, end_splits, CANCELLED},
                      attention_to_chosen = {attend_chosen, end_splits, CANCELLED},
                      attention_to_selected = {begin_selecting, end_selecting, CANCELLED};

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks arguments, and resolves the strides of queries and results. */
static kvc_status resolve_args(const kvc_layer *layer, const kvc_plan_args *plan, kvc_attend_args *a) {
    const int32_t inner = a->tokens_per_sequence, heads = plan->num_heads, tokens = inner ? inner : plan->num_tokens,
                  batches = inner ? plan->num_tokens / inner : 0;
    const kvc_array q = {.name = "q",
                         .data = a->q,
                         .type = a->q_type,
                         .length = layer->k_dim,
                         .axes = {KVC_AXIS(a, q_head_stride, heads), KVC_AXIS(a, q_token_stride, tokens),
                                  KVC_AXIS(a, q_batch_stride, batches)}},
                    out = {.name = "out",
                           .data = a->out,
                           .is_output = 1,
                           .type = a->out_is_f32 ? KVC_F32 : a->q_type,
                           .length = layer->v_dim,
                           .axes = {KVC_AXIS(a, out_head_stride, heads), KVC_AXIS(a, out_token_stride, tokens),
                                    KVC_AXIS(a, out_batch_stride, batches)}},
                    lse = {.name = "lse",
                           .data = a->lse ? a->lse : a->prior_lse,
                           .is_output = a->lse != NULL,
                           .element_bytes = sizeof *a->lse,
                           .length = 1,
                           .axes = {KVC_AXIS(a, lse_head_stride, heads), KVC_AXIS(a, lse_token_stride, tokens),
                                    KVC_AXIS(a, lse_batch_stride, batches)}};
    if (!a->q || !a->out) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", a->q ? "out" : "q");
    if (!a->prior_out != !a->prior_lse)
        return kvc_fail(KVC_ERR_INVALID, "%s is NULL: prior_out and prior_lse are given together",
                        a->prior_out ? "prior_lse" : "prior_out");
    if (inner) KVC_TRY(kvc_check_tokens_per_sequence(inner, plan->num_tokens));
    KVC_TRY(kvc_resolve_array(&q));
    KVC_TRY(kvc_resolve_array(&out));
    KVC_TRY(kvc_resolve_array(&lse));
    if (layer->value_in_key && a->scale == 0)
        return kvc_fail(
            KVC_ERR_INVALID,
            "scale is 0: where values lie in the keys, it is that of the heads before they were compressed, "
            "and must be given");
    if (!isfinite(a->scale)) return kvc_fail(KVC_ERR_INVALID, "scale is %g: it must be finite", (double)a->scale);
    if (!(a->softcap >= 0) || isinf(a->softcap))
        return kvc_fail(KVC_ERR_INVALID, "softcap is %g: it must be positive, or 0 for none", (double)a->softcap);
    return KVC_OK;
}

/* Fills in what the tasks of a call share. */
static void make_call(kvc_call *c, kvc_plan *plan, int32_t layer, const kvc_attend_args *args,
                      const kvc_chosen *chosen) {
    c->chosen = *chosen;
    const kvc_work *work = plan->args.max_chosen    ? &attention_to_chosen
                           : plan->args.select_rows ? &attention_to_selected
                                                    : &attention;
    kvc_call_init(c, plan, layer, args, work);
}

/* Notes which tokens attended to selected rows, because their rows do not follow from tokens alone.  task: the task
 * that was run, or -1 for all tasks of the plan. */
static void note_selected(const kvc_plan *plan, int64_t task) {
    kvc_batch *batch = plan->batch;
    int32_t part;
    const kvc_job *job = task < 0 ? NULL : kvc_job_of(plan, task, &part);
    const int64_t num = job ? job->num_slices : plan->num_slices;
    kvc_lock(batch->cache);
    for (int64_t i = 0; i < num; i++) {
        const kvc_query_slice *slice = job ? kvc_slice_of(plan, job, (int32_t)i) : &plan->slices[i];
        const int32_t token = batch->order[slice->first];
        int32_t *from = &batch->sequences[slice->sequence].selected_from;
        if (!slice->selects || !kvc_selecting_rows(plan, slice)) continue;
        batch->selected[token] = 1;
        *from = kvc_lower(*from, batch->positions[token]);
    }
    kvc_unlock(batch->cache, KVC_OK);
}

kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *given, int64_t task) {
    kvc_attend_args args;
    kvc_chosen chosen = {0};
    kvc_call c;
    KVC_TRY(KVC_READ(kvc_attend_args, &args, given, "args"));
    if (args.chosen) KVC_TRY(kvc_chosen_read(&args, &chosen));
    KVC_TRY(kvc_check_attention(plan->batch, layer, KVC_NEEDS_VALUES));
    KVC_TRY(kvc_check_plan_layer(plan, layer));
    KVC_TRY(resolve_args(&plan->batch->cache->layers[layer], &plan->args, &args));
    if (args.chosen || plan->args.max_chosen)
        KVC_TRY(kvc_chosen_check(&plan->args, plan->num_kv_heads, args.tokens_per_sequence, &chosen));
    if (args.put)
        return kvc_fail(KVC_ERR_INVALID, "args->put is not NULL: rows are stored by kvc_put before tasks are run");
    make_call(&c, plan, layer, &args, &chosen);
    const kvc_status status = kvc_run_task(&c, layer, task);
    if (status == KVC_OK && plan->args.select_rows) note_selected(plan, task);
    return status;
}

/* Puts rows, if `put` is not NULL, and runs all tasks, on several threads if that is worth it. */
static kvc_status attend(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_chosen *chosen,
                         const kvc_put_args *put) {
    kvc_call c;
    KVC_TRY(kvc_check_all_seen(plan, layer, put));
    if (put) KVC_TRY(kvc_put_rows(plan->batch, layer, put));
    make_call(&c, plan, layer, args, chosen);
    const kvc_status status = kvc_run_tasks(&c);
    if (status != KVC_OK && put) /* as if the rows had not been put */
        kvc_mark_written(plan->batch, layer, put->first, put->num_tokens, /* is_written */ 0);
    if (status == KVC_OK && plan->args.select_rows) note_selected(plan, -1);
    return status;
}

kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *given_plan, const kvc_attend_args *given) {
    kvc_attend_args args;
    kvc_chosen chosen = {0};
    kvc_plan_args plan_args;
    kvc_put_args put;
    kvc_plan *plan;
    KVC_TRY(KVC_READ(kvc_attend_args, &args, given, "args"));
    if (args.chosen) KVC_TRY(kvc_chosen_read(&args, &chosen));
    KVC_TRY(KVC_READ(kvc_plan_args, &plan_args, given_plan, "plan"));
    if (args.chosen && !plan_args.max_chosen) {
        plan_args.max_chosen = kvc_most_chosen(&chosen);
        if (!plan_args.chosen_width) plan_args.chosen_width = chosen.width;
    }
    if (args.put) KVC_TRY(KVC_READ(kvc_put_args, &put, args.put, "args"));
    const int32_t layer = plan_args.layer;
    KVC_TRY(kvc_resolve_plan(batch, &plan_args));
    if (!batch->cache->layers[layer].v_dim)
        return kvc_check_attention(batch, layer, KVC_NEEDS_VALUES); /* fails: keys alone */
    KVC_TRY(resolve_args(&batch->cache->layers[layer], &plan_args, &args));
    if (plan_args.max_chosen)
        KVC_TRY(
            kvc_chosen_check(&plan_args, batch->cache->layers[layer].num_kv_heads, args.tokens_per_sequence, &chosen));
    if (args.put) KVC_TRY(kvc_resolve_put(batch, layer, &put));
    int must_put = args.put != NULL;
    /* A plan for cross-attention is made of the rows that were put before. */
    if (must_put && !kvc_keeps_tokens(batch->cache, layer)) {
        KVC_TRY(kvc_put_rows(batch, layer, &put));
        must_put = 0;
    }
    KVC_TRY(kvc_plan_get(batch, &plan_args, &plan));
    const kvc_status status = attend(plan, layer, &args, &chosen, must_put ? &put : NULL);
    kvc_plan_leave(plan);
    return status;
}
