/* attend.c: runs tasks of a plan: kvc_attend all of them, kvc_plan_run one of them. */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "attend/chosen.h"
#include "attend/plan.h"
#include "attend/round.h"
#include "attend/step.h"
#include "cache/check.h"
#include "pass/put.h"
#include "rows/copy.h"

/* ---- the rows of a task ------------------------------------------------------------------------------------------ */

/* Returns a cursor over `count` rows of a slice for a part, from row `offset` of a segment on. */
static kvc_cursor cursor_from(const kvc_call *c, const kvc_query_slice *slice, int32_t part, const kvc_segment *segment,
                              int64_t offset, int64_t count) {
    const kvc_plan *plan = c->plan;
    while (count && offset >= segment->count) offset -= segment++->count;
    kvc_cursor at = {.layout = c->layout,
                     .segment = segment,
                     .offset = (int32_t)offset,
                     .head = part / plan->parts_per_kv,
                     .num_rows = count,
                     .window_rows = slice->tiled ? slice->tile_rows : c->streamed_rows};
    if (plan->num_deltas)
        at.changes_to_mix =
            slice->tiled ? KVC_TILED_DELTA_CHANGES : KVC_STREAM_DELTA_CHANGES * (c->streamed_rows / KVC_PANEL);
    if (slice->is_buffered && count)
        at.layout = &c->buffer->layout, at.buffer_rows = kvc_row_buffer_block(c->buffer)->rows;
    return at;
}

/* Returns a cursor over `count` rows of a split of a slice, from its row `row` on. */
static kvc_cursor cursor_at(const kvc_call *c, const kvc_query_slice *slice, int32_t split, int32_t part, int64_t row,
                            int64_t count) {
    const kvc_split_start *start = &c->plan->starts[slice->first_start + split];
    return cursor_from(c, slice, part, c->plan->segments + start->segment, start->offset + row, count);
}

/* Counts the rows of the split that a slice does not share with all others. */
static int64_t num_own_rows(const kvc_job *job, const kvc_query_slice *slice) {
    return kvc_split_rows(slice, job->split) - job->shared_rows;
}

/* Returns a cursor over the first rows of a job: the rows that its slices share, or all rows of its only slice.
 * slice: its first one. */
static kvc_cursor first_rows(const kvc_call *c, const kvc_job *job, const kvc_query_slice *slice, int32_t part) {
    return cursor_at(c, slice, job->split, part, 0, job->shared_rows ? job->shared_rows : num_own_rows(job, slice));
}

/* Returns a cursor over the own rows of slice m, or of the next slice that has own rows.  Behind the last slice,
 * returns a cursor over the first rows of the task that this thread will probably run next.  It is empty if there is
 * no such task, or if that one will fail for lack of a row buffer. */
static kvc_cursor rows_from_slice(const kvc_task *t, int32_t m) {
    const kvc_plan *plan = t->call->plan;
    for (; m < t->job->num_slices; m++) {
        const kvc_query_slice *slice = kvc_slice_of(plan, t->job, m);
        const int64_t rows = num_own_rows(t->job, slice);
        if (rows) return cursor_at(t->call, slice, t->job->split, t->part, t->job->shared_rows, rows);
    }
    const int64_t next = t->index + plan->args.num_threads;
    int32_t part;
    if (next >= plan->num_tasks) return (kvc_cursor){.layout = t->call->layout};
    const kvc_job *job = kvc_job_of(plan, next, &part);
    const kvc_query_slice *slice = kvc_slice_of(plan, job, 0);
    if (slice->is_buffered && !t->call->buffer) return (kvc_cursor){.layout = t->call->layout};
    return first_rows(t->call, job, slice, part);
}

/* Makes acc, max and sum those of no rows. */
static void begin_split(kvc_task *t) {
    memset(t->acc, 0, (size_t)t->num_query_rows * (size_t)t->call->plan->workspace.acc_stride * sizeof(float));
    for (int32_t r = 0; r < t->num_query_rows; r++) t->max[r] = -INFINITY, t->sum[r] = 0;
}

/* Attends to the rows that all slices share, then to the other rows of each slice.  acc, max and sum become the
 * results of the slices' splits.  Returns 0 if the call was cancelled. */
static int attend_split(kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    const kvc_job *job = t->job;
    const int is_alone = job->num_slices == 1; /* then all rows come first */
    const kvc_cursor first = first_rows(t->call, job, t->slice, t->part);
    if (t->index < plan->args.num_threads) kvc_prefetch_keys(t, first); /* for later tasks, the one before it has */
    begin_split(t);
    int goes_on = kvc_attend_rows(t, first, rows_from_slice(t, is_alone)); /* until the call is cancelled */
    for (int32_t m = 0, query_row = 0; goes_on && !is_alone && m < job->num_slices; m++) {
        kvc_task own = kvc_part_of(t, m, query_row);
        const int64_t rows = num_own_rows(job, own.slice);
        query_row += own.num_query_rows;
        if (rows)
            goes_on = kvc_attend_rows(&own, cursor_at(t->call, own.slice, job->split, t->part, job->shared_rows, rows),
                                      rows_from_slice(t, m + 1));
    }
    return goes_on;
}

/* ---- merging the results of splits by log-sum-exp (Flash-Decoding) ----------------------------------------------- */

/* The results of a slice's splits for one KV head: in plan->partials or, if there is a single split, in the workspace.
 */
typedef struct results {
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
    const size_t stride = (size_t)plan->workspace.acc_stride, row = (size_t)r * stride;
    float factor = rescale_factor(all->max[r], max, all->ln_of_base), sum = factor * all->sum[r];
    if (t->slice->num_splits > 1) memcpy(out, all->acc + row, stride * sizeof *out);
    if (num_splits == 1 && factor == 1) return sum;
    int32_t p = 1, n;
    do { /* runs once even for a single split, as `out` must be multiplied by the factor */
        float weights[KVC_TILE];
        const float *rows = all->acc + (uint64_t)p * all->stride + row;
        for (n = 0; n < KVC_TILE && p < num_splits; n++, p++) {
            const uint64_t split = (uint64_t)p * all->stride;
            weights[n] = rescale_factor(all->max[split + (size_t)r], max, all->ln_of_base);
            sum += weights[n] * all->sum[split + (size_t)r];
        }
        t->call->kernels->accumulate[KVC_F32](out, (int)stride, &factor, weights, 1, rows,
                                              (int64_t)(all->stride * sizeof *rows), n, plan->v_dim,
                                              (kvc_ahead){.bytes = 0});
        factor = 1;
    } while (p < num_splits);
    return sum;
}

/* Merges the splits of query row r, divides by their sum, and transforms the values back.  The output row takes acc's
 * place in the workspace.  lse: NULL, or where it is written. */
static void merge_row(const kvc_task *t, const results *all, int32_t r, float *lse) {
    const kvc_plan *plan = t->call->plan;
    const float *sinks = t->call->args->sinks;
    const float sink = sinks ? sinks[kvc_query_head_of(t, r)] / all->ln_of_base : -INFINITY;
    float *out = t->acc + (size_t)r * (size_t)plan->workspace.acc_stride, max = sink;
    int32_t num_splits = 1; /* up to the last one that saw anything: later ones would change the sign of a zero */
    for (int32_t p = 0; p < t->slice->num_splits; p++) {
        const float of_split = all->max[(size_t)p * all->stride + (size_t)r];
        if (of_split > max) max = of_split;
        if (of_split != -INFINITY) num_splits = p + 1;
    }
    const float sum = add_splits(t, all, r, num_splits, max, out) + rescale_factor(sink, max, all->ln_of_base);
    /* If the sum is 0, the query saw nothing, and `out` is 0. */
    t->call->kernels->scale(out, 0, 1, plan->v_dim, sum == 0 ? 1 : 1 / (sum * all->one));
    if (t->call->v_mixing.order) t->call->kernels->hadamard(out, out, plan->v_dim, t->call->v_mixing);
    if (lse) *lse = sum == 0 ? -INFINITY : max * all->ln_of_base + logf(sum);
}

/* Returns where the caller wants the lse of a token and query head. */
static float *lse_of(const kvc_attend_args *a, int32_t token, int32_t head) {
    char *to = (char *)a->lse +
               kvc_token_offset(token, a->tokens_per_sequence, a->lse_token_stride, a->lse_batch_stride) +
               head * a->lse_head_stride;
    return (float *)(void *)to;
}

/* Writes the output rows, and lse where the caller asks for it. */
static void write_out(const kvc_task *t, const results *all) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t heads = c->plan->heads_per_part, first = t->part * heads;
    const int64_t stride = c->plan->workspace.acc_stride;
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        const int32_t token = t->tokens[r / heads] - c->plan->args.first;
        for (int32_t i = 0; i < heads; i++) merge_row(t, all, r + i, a->lse ? lse_of(a, token, first + i) : NULL);
        char *out = (char *)a->out +
                    kvc_token_offset(token, a->tokens_per_sequence, a->out_token_stride, a->out_batch_stride) +
                    first * a->out_head_stride;
        kvc_convert_query_rows(c, KVC_F32, a->q_type, out, a->out_head_stride, t->acc + r * stride,
                               stride * (int64_t)sizeof(float), c->plan->v_dim);
    }
}

/* Returns where the result of split p of the task's slice and part is kept. */
static float *partial_of(const kvc_task *t, int32_t p) {
    const kvc_plan *plan = t->call->plan;
    const uint64_t size = kvc_partial_size(t->num_query_rows, plan->workspace.acc_stride);
    if (plan->joins_splits) return t->workspace + plan->workspace.partials + (size_t)p * size;
    return plan->partials + t->slice->partials + ((size_t)t->part * (size_t)t->slice->num_splits + (size_t)p) * size;
}

/* Copies the result of split p of the task to where it is kept. */
static void keep_partial(const kvc_task *t, int32_t p) {
    float *partial = partial_of(t, p);
    const size_t q = (size_t)t->num_query_rows;
    memcpy(partial, t->max, q * sizeof *partial);
    memcpy(partial + q, t->sum, q * sizeof *partial);
    memcpy(partial + kvc_align_up(2 * q, KVC_LANES), t->acc,
           q * (size_t)t->call->plan->workspace.acc_stride * sizeof *partial);
}

/* Keeps the result of a split of a slice; returns whether the slice has the results of all its splits. */
static int end_one_of(const kvc_task *t) {
    const kvc_call *c = t->call;
    const kvc_query_slice *slice = t->slice;
    atomic_int *remaining = &c->plan->remaining[slice->first_counter + t->part];
    keep_partial(t, t->job->split);
    const int new_splits = c->was_done ? 0 : 1;
    if (atomic_fetch_sub(remaining, new_splits) != new_splits) return 0;
    if (!c->is_rerun) atomic_store(remaining, slice->num_splits); /* for the next layer */
    return 1;
}

/* The last task to end of a slice and KV head merges the splits and writes the output; in a rerun, each task that finds
 * all splits there does.  A single split is not counted: atomic instructions wait until all that was stored is in the
 * cache. */
static void end_split(const kvc_task *t) {
    const int32_t num_splits = t->slice->num_splits;
    if (num_splits > 1 && !t->call->plan->joins_splits && !end_one_of(t)) return;
    results all = {t->max, t->sum, t->acc, 0, 1, 1};
    if (num_splits > 1) {
        const size_t q = (size_t)t->num_query_rows;
        all.max = partial_of(t, 0);
        all.sum = all.max + q;
        all.acc = all.max + kvc_align_up(2 * q, KVC_LANES);
        all.stride = kvc_partial_size(t->num_query_rows, t->call->plan->workspace.acc_stride);
    }
    if (t->slice->tiled) {
        const kvc_tiler *values = kvc_value_tiler(t);
        all.one = (float)(1 << values->sum_shift);
        if (values->weigh) all.ln_of_base = 0.693147180559945309f;
    }
    write_out(t, &all);
}

/* Attends to the rows that the task's token chooses, split by split.  Keeps the results of the splits if the task has
 * several.  Returns 0 if the call was cancelled. */
static int attend_chosen(kvc_task *t) {
    const kvc_call *c = t->call;
    const kvc_query_slice *slice = t->slice;
    const int32_t num_splits = t->job->num_splits;
    const int64_t num_rows = kvc_list_chosen(t, t->job->split * slice->split_rows, num_splits * slice->split_rows);
    const kvc_segment *const segments = kvc_chosen_segments(t);
    kvc_cursor rows = cursor_from(c, slice, t->part, segments, 0, kvc_smaller(num_rows, slice->split_rows));
    kvc_prefetch_keys(t, rows);
    int goes_on = 1; /* until the call is cancelled */
    for (int32_t p = 0; p < num_splits && goes_on; p++) {
        const int64_t end = (p + 1) * slice->split_rows, left = num_rows > end ? num_rows - end : 0;
        const kvc_cursor next = cursor_from(c, slice, t->part, segments, end,
                                            p + 1 < num_splits ? kvc_smaller(left, slice->split_rows) : 0);
        begin_split(t);
        goes_on = kvc_attend_rows(t, rows, next);
        if (goes_on && num_splits > 1) keep_partial(t, p);
        rows = next;
    }
    return goes_on;
}

/* Ends a task whose rows were attended to: keeps the results of its slices' splits, and writes the output of slices
 * whose last split it was. */
static void end_splits(const kvc_task *t) {
    if (t->job->num_slices == 1) {
        end_split(t);
        return;
    }
    for (int32_t m = 0, first = 0; m < t->job->num_slices; m++) {
        const kvc_task own = kvc_part_of(t, m, first);
        first += own.num_query_rows;
        end_split(&own);
    }
}

/* ---- running tasks ----------------------------------------------------------------------------------------------- */

/* Makes task i of the plan, which works in `workspace`. */
static kvc_task make_task(kvc_call *c, int64_t i, float *workspace) {
    const kvc_plan *plan = c->plan;
    const kvc_workspace_layout *at = &plan->workspace;
    int32_t part;
    const kvc_job *job = kvc_job_of(plan, i, &part);
    const kvc_query_slice *slice = kvc_slice_of(plan, job, 0);
    kvc_task t = {.call = c,
                  .job = job,
                  .slice = slice,
                  .k_as = c->k_as[slice->tiled],
                  .v_as = c->v_as[slice->tiled],
                  .k_lacks_minima = KVC_TYPES[c->layer->k_type].has_minimum && c->k_as[slice->tiled] == KVC_Q8_0,
                  .v_lacks_minima = KVC_TYPES[c->layer->v_type].has_minimum && c->v_as[slice->tiled] == KVC_Q8_0,
                  .index = i,
                  .part = part,
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
    t.num_query_rows = num_tokens * plan->heads_per_part;
    return t;
}

/* Takes a workspace that no task uses.  There is one for each thread of the plan; further threads wait. */
static int32_t take_workspace(kvc_plan *plan) {
    for (;;) {
        for (int32_t i = 0; i < plan->num_workspaces; i++)
            if (!atomic_flag_test_and_set_explicit(&plan->workspace_taken[i], memory_order_acquire)) return i;
        kvc_pause();
    }
}

/* Attends to the rows of task i and ends its splits, unless the call is cancelled; for kvc_parallel, with the kvc_call
 * as context. */
static void run_task(void *context, int64_t i) {
    kvc_call *c = context;
    kvc_plan *plan = c->plan;
    const int32_t l = take_workspace(plan);
    kvc_task t = make_task(c, i, plan->workspaces + (size_t)l * plan->workspace.size);
    const int cancelled = !(plan->args.max_chosen ? attend_chosen(&t) : attend_split(&t));
    if (!cancelled && c->is_rerun) kvc_round_lock(&plan->round);
    if (!cancelled) end_splits(&t);
    if (!cancelled && c->is_rerun) kvc_round_unlock(&plan->round);
    atomic_flag_clear_explicit(&plan->workspace_taken[l], memory_order_release);
    if (cancelled) atomic_store(&c->was_cancelled, 1);
}

static kvc_status fail_cancelled(void) { return kvc_fail(KVC_ERR_CANCELLED, "the attention was cancelled"); }

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks the strides when tokens_per_sequence is set. */
static kvc_status check_inner(const kvc_attend_args *args, int32_t num_tokens) {
    KVC_TRY(kvc_check_tokens_per_sequence(args->tokens_per_sequence, num_tokens));
    KVC_TRY(kvc_check_array(args->q_type, args->q_batch_stride, 0, "q"));
    KVC_TRY(kvc_check_array(args->q_type, args->out_batch_stride, 0, "out"));
    return kvc_check_array(KVC_F32, args->lse_batch_stride, 0, "lse");
}

static kvc_status check_args(const kvc_layer *layer, int32_t num_tokens, const kvc_attend_args *args) {
    if (!args->q || !args->out) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", args->q ? "out" : "q");
    KVC_TRY(kvc_check_array(args->q_type, args->q_token_stride, args->q_head_stride, "q"));
    KVC_TRY(kvc_check_array(args->q_type, args->out_token_stride, args->out_head_stride, "out"));
    KVC_TRY(kvc_check_array(KVC_F32, args->lse_token_stride, args->lse_head_stride, "lse"));
    if (args->tokens_per_sequence) KVC_TRY(check_inner(args, num_tokens));
    if (layer->value_in_key && args->scale == 0)
        return kvc_fail(
            KVC_ERR_INVALID,
            "scale is 0: where values lie in the keys, it is that of the heads before they were compressed, "
            "and must be given");
    if (!isfinite(args->scale)) return kvc_fail(KVC_ERR_INVALID, "scale is %g: it must be finite", (double)args->scale);
    if (!(args->softcap >= 0) || isinf(args->softcap))
        return kvc_fail(KVC_ERR_INVALID, "softcap is %g: it must be positive, or 0 for none", (double)args->softcap);
    return KVC_OK;
}

/* Checks that the plan, which may have been made for another layer, serves this one. */
static kvc_status check_plan_layer(const kvc_plan *plan, int32_t layer) {
    const kvc_cache *cache = plan->batch->cache;
    KVC_TRY(kvc_check_attention(plan->batch, layer, 1));
    const kvc_layer *config = &cache->layers[layer];
    if (cache->group_of[layer] != plan->group || config->num_kv_heads != plan->num_kv_heads ||
        config->k_dim != plan->k_dim || config->v_dim != plan->v_dim)
        return kvc_fail(KVC_ERR_INVALID,
                        "layer %d has not the policy and shapes of the plan's layer, %d: make one for it", layer,
                        plan->args.layer);
    if (!kvc_plan_is_current(plan))
        return kvc_fail(KVC_ERR_INVALID, "the rows of layer %d were put after the plan was made: make another", layer);
    return KVC_OK;
}

/* Checks that the batch's own rows that a slice sees were put, or are about to be, by `put`. */
static kvc_status check_seen(const kvc_plan *plan, const kvc_query_slice *slice, int32_t layer, const kvc_put_args *put,
                             const kvc_row_buffer *buffer) {
    const kvc_batch *batch = plan->batch;
    if (slice->lacks_rows)
        return kvc_fail(KVC_ERR_INVALID, "sequence %lld has no rows in cross-attention layer %d: put k and v first",
                        (long long)batch->sequences[slice->sequence].sequence->id, layer);
    const uint8_t *written = kvc_written_in(batch, kvc_source_of(batch->cache, layer));
    for (int64_t p = slice->first_own_segment; p < slice->end_segment; p++) {
        const kvc_segment *segment = &plan->segments[p];
        for (int32_t i = 0; segment->token >= 0 && i < segment->count; i++) {
            const int32_t t = batch->order[segment->token + i];
            int was_put = written[t];
            if (put && t >= put->first && t < put->first + put->num_tokens) continue;
            if (slice->is_buffered) {
                const kvc_status status = kvc_row_buffer_has(batch, buffer, layer, t, segment->slot + i, &was_put);
                if (status != KVC_OK) return status;
            }
            if (!was_put)
                return kvc_fail(KVC_ERR_INVALID,
                                "token %d of the batch is seen but was not put in layer %d: put k and v first", t,
                                layer);
        }
    }
    return KVC_OK;
}

/* Checks that the rows that the slices of a task see were put. */
static kvc_status check_task(const kvc_plan *plan, int32_t layer, int64_t task, const kvc_row_buffer *buffer) {
    int32_t part;
    const kvc_job *job = kvc_job_of(plan, task, &part);
    kvc_status status = KVC_OK;
    for (int32_t m = 0; status == KVC_OK && m < job->num_slices; m++)
        status = check_seen(plan, kvc_slice_of(plan, job, m), layer, NULL, buffer);
    return status;
}

/* Fills in what the tasks of a call share. */
static void make_call(kvc_call *c, kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_chosen *chosen,
                      const kvc_row_buffer *buffer) {
    const kvc_cache *cache = plan->batch->cache;
    c->plan = plan;
    c->is_rerun = c->was_done = 0;
    c->args = args;
    c->chosen = *chosen;
    c->kernels = cache->kernels;
    c->prefetch_level = cache->prefetch_level;
    c->layer = &cache->layers[layer];
    c->layout = &cache->layouts[cache->layout_of[layer]];
    /* Short rows go in longer tiles: they are read earlier, and less time goes into beginning tiles.  Both divide
     * KVC_TILE, as slices share whole tiles. */
    const int is_short = c->layout->k_row_bytes <= KVC_SHORT_ROW && c->layout->v_row_bytes <= KVC_SHORT_ROW;
    c->streamed_rows = is_short ? KVC_TILE : KVC_PANEL;
    c->buffer = buffer;
    c->policy = &cache->policies[plan->group];
    c->num_sinks = kvc_policy_sinks(c->policy);
    for (int tiled = 0; tiled < 2; tiled++) {
        c->k_as[tiled] = kvc_taken_as(c->kernels, c->layer->k_type, tiled);
        c->v_as[tiled] = kvc_taken_as(c->kernels, c->layer->v_type, tiled);
    }
    c->k_mixing = kvc_mixing_of(c->layer, 0);
    c->v_mixing = kvc_mixing_of(c->layer, 1);
    c->rope = kvc_rope_of(cache, layer);
    c->angles = plan->angles;
    if (c->rope) c->angles += (size_t)cache->rope_of[layer] * (size_t)plan->num_deltas * (size_t)plan->angles_stride;
    c->changes_scores = args->softcap > 0 || args->alibi;
    c->scale = args->scale != 0 ? args->scale : 1 / sqrtf((float)plan->k_dim);
    atomic_init(&c->was_cancelled, 0);
}

/* Checks the arguments of kvc_plan_run, and runs the task. */
static kvc_status run_planned(kvc_plan *plan, int32_t layer, const kvc_attend_args *given, int64_t task) {
    kvc_attend_args args;
    kvc_chosen chosen = {0};
    kvc_call c;
    kvc_status status = KVC_READ(kvc_attend_args, &args, given, "args");
    if (status == KVC_OK && args.chosen) status = kvc_chosen_read(&args, &chosen);
    if (status == KVC_OK) status = check_plan_layer(plan, layer);
    if (status == KVC_OK) status = check_args(&plan->batch->cache->layers[layer], plan->args.num_tokens, &args);
    if (status == KVC_OK && (args.chosen || plan->args.max_chosen))
        status = kvc_chosen_check(&plan->args, plan->num_kv_heads, &chosen);
    if (status == KVC_OK && args.put)
        status = kvc_fail(KVC_ERR_INVALID, "args->put is not NULL: rows are stored by kvc_put before tasks are run");
    if (status == KVC_OK && (task < 0 || task >= plan->num_tasks))
        status =
            kvc_fail(KVC_ERR_INDEX, "task is %lld: the plan has %lld", (long long)task, (long long)plan->num_tasks);
    kvc_row_buffer *buffer = status == KVC_OK ? kvc_row_buffer_find(plan->batch, layer) : NULL;
    if (status == KVC_OK) status = check_task(plan, layer, task, buffer);
    if (status == KVC_OK) {
        make_call(&c, plan, layer, &args, &chosen, buffer);
        kvc_poll_timer_init(&c.timer, NULL, NULL);
        status = kvc_round_begin(&c, layer, task);
        if (status == KVC_OK) {
            run_task(&c, task);
            if (atomic_load(&c.was_cancelled)) status = fail_cancelled();
            kvc_round_end(&c, task, status == KVC_OK);
        }
    }
    kvc_row_buffer_leave(plan->batch->cache, buffer);
    return status;
}

kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, int64_t task) {
    const kvc_status status = run_planned(plan, layer, args, task);
    if (status == KVC_OK) return status;
    kvc_round_lock(&plan->round);
    plan->round.has_failed |= plan->round.layer == layer;
    kvc_round_unlock(&plan->round);
    return status;
}

/* Puts rows, if `put` is not NULL, and runs all tasks, on several threads if that is worth it.  *buffer: the layer's
 * row buffer, or NULL if it has none; set if putting rows makes one. */
static kvc_status attend(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_chosen *chosen,
                         const kvc_put_args *put, kvc_row_buffer **buffer) {
    static const double WORTH_THREADS = 1 << 19; /* multiply-adds: about 20 microseconds */
    kvc_call c;
    kvc_batch *batch = plan->batch;
    for (int32_t u = 0; u < plan->num_slices; u++)
        if (!u || !plan->args.max_chosen || plan->slices[u].sequence != plan->slices[u - 1].sequence)
            KVC_TRY(check_seen(plan, &plan->slices[u], layer, put, *buffer));
    if (put && !*buffer && batch->num_buffered && kvc_any_buffered(batch, layer, put->first, put->num_tokens))
        KVC_TRY(kvc_row_buffer_enter(batch, layer, buffer));
    if (put) KVC_TRY(kvc_put_rows(batch, layer, put, *buffer));
    make_call(&c, plan, layer, args, chosen, *buffer);
    kvc_cache_poll_timer(batch->cache, plan->multiply_adds, &c.timer);
    kvc_parallel(kvc_threads_for(plan->multiply_adds, WORTH_THREADS, plan->args.num_threads), plan->num_tasks, run_task,
                 &c);
    kvc_status status = atomic_load(&c.was_cancelled) ? fail_cancelled() : KVC_OK;
    if (status == KVC_OK && put && *buffer) status = kvc_row_buffer_accept(batch->cache, *buffer, 0);
    if (status != KVC_OK && put) kvc_mark_written(batch, layer, put->first, put->num_tokens, *buffer, 0);
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
    if (args.chosen && !plan_args.max_chosen) plan_args.max_chosen = kvc_most_chosen(&chosen);
    if (args.put) KVC_TRY(KVC_READ(kvc_put_args, &put, args.put, "args"));
    const int32_t layer = plan_args.layer;
    KVC_TRY(kvc_plan_check(batch, &plan_args));
    KVC_TRY(check_args(&batch->cache->layers[layer], plan_args.num_tokens, &args));
    if (plan_args.max_chosen) KVC_TRY(kvc_chosen_check(&plan_args, batch->cache->layers[layer].num_kv_heads, &chosen));
    if (args.put) KVC_TRY(kvc_put_check(batch, layer, &put));
    int must_put = args.put != NULL;
    /* A plan for cross-attention is made of the rows that were put before. */
    if (must_put && !kvc_keeps_tokens(batch->cache, layer)) {
        KVC_TRY(kvc_put_rows(batch, layer, &put, NULL));
        must_put = 0;
    }
    KVC_TRY(kvc_plan_get(batch, &plan_args, &plan));
    kvc_row_buffer *buffer = batch->num_buffered ? kvc_row_buffer_find(batch, layer) : NULL;
    const kvc_status status = attend(plan, layer, &args, &chosen, must_put ? &put : NULL, &buffer);
    if (buffer) kvc_row_buffer_leave(batch->cache, buffer);
    kvc_plan_free(plan);
    return status;
}
