/* run.c: runs all tasks of a plan, or one: see run.h.
 *
 * A slice is query tokens of one sequence, with the rows that they see, which are cut into splits.  A part is heads of
 * one KV head.  A job is some splits of a slice, or one split of slices that share rows.  A task is a job for one part.
 * plan->remaining counts the splits of each slice and part that are still to be run.
 * kvc_plan_run may run a task again: was_done says so of this task, is_rerun of any task of the round.
 */
#include "attend/run.h"

#include <math.h>

#include "attend/plan.h"
#include "attend/round.h"
#include "base/parallel.h"
#include "cache/check.h"

/* ---- what a task works on ---------------------------------------------------------------------------------------- */

kvc_cursor kvc_cursor_from(const kvc_call *c, const kvc_query_slice *slice, int32_t part, const kvc_segment *segment,
                           int64_t offset, int64_t count) {
    const kvc_plan *plan = c->plan;
    while (count && offset >= segment->count) offset -= segment++->count; /* to the segment that has the row */
    kvc_cursor at = {.layout = c->layout,
                     .segment = segment,
                     .offset = (int32_t)offset,
                     .head = part / plan->parts.per_kv,
                     .num_rows = count,
                     .frame_rows = slice->tiled ? slice->tile_rows : c->streamed_rows};
    if (plan->deltas.num)
        at.changes_to_mix =
            slice->tiled ? KVC_TILED_DELTA_CHANGES : KVC_STREAM_DELTA_CHANGES * (c->streamed_rows / KVC_PANEL);
    return at;
}

kvc_cursor kvc_cursor_at(const kvc_call *c, const kvc_query_slice *slice, int32_t split, int32_t part, int64_t row,
                         int64_t count) {
    const kvc_split_start *start = &c->plan->starts[slice->first_start + split];
    return kvc_cursor_from(c, slice, part, c->plan->segments + start->segment, start->offset + row, count);
}

/* Makes task i of the plan, which works in `workspace`. */
static kvc_task make_task(kvc_call *c, int64_t i, float *workspace) {
    const kvc_plan *plan = c->plan;
    const kvc_attending *at = &plan->attending;
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
    t.num_query_rows = num_tokens * plan->parts.heads;
    return t;
}

/* Takes a workspace that no task uses.  There is one for each thread of the plan; further threads wait. */
static int32_t take_workspace(kvc_plan *plan) {
    for (;;) {
        for (int32_t i = 0; i < plan->workspaces.num; i++)
            if (!atomic_flag_test_and_set_explicit(&plan->workspaces.taken[i], memory_order_acquire)) return i;
        kvc_pause();
    }
}

/* ---- running tasks ----------------------------------------------------------------------------------------------- */

/* In a rerun, `remaining` stays 0 once all splits are done, so that each task after that merges them again. */
int kvc_ends_slice(const kvc_task *t) {
    const kvc_call *c = t->call;
    atomic_int *remaining = &c->plan->remaining[t->slice->first_counter + t->part];
    const int new_splits = c->was_done ? 0 : t->job->num_splits;
    if (atomic_fetch_sub(remaining, new_splits) != new_splits) return 0;
    if (!c->is_rerun) atomic_store(remaining, t->slice->num_splits); /* for the next layer */
    return 1;
}

/* Does the work of task i and ends it, unless the call is cancelled; for kvc_parallel.  context: the kvc_call.  In a
 * rerun, tasks end one by one, because they may write the same output. */
static void run_task(void *context, int64_t i) {
    kvc_call *c = context;
    kvc_plan *plan = c->plan;
    const int32_t l = take_workspace(plan);
    kvc_task t = make_task(c, i, plan->workspaces.memory + (size_t)l * plan->workspaces.size);
    const int cancelled = !c->work->begin(&t);
    if (!cancelled && c->is_rerun) kvc_round_lock(&plan->round);
    if (!cancelled) c->work->end(&t);
    if (!cancelled && c->is_rerun) kvc_round_unlock(&plan->round);
    atomic_flag_clear_explicit(&plan->workspaces.taken[l], memory_order_release);
    if (cancelled) atomic_store(&c->was_cancelled, 1);
}

/* Returns what became of the call once its tasks have ended. */
static kvc_status status_of(kvc_call *c) {
    return atomic_load(&c->was_cancelled) ? kvc_fail(KVC_ERR_CANCELLED, "%s", c->work->cancelled) : KVC_OK;
}

kvc_status kvc_run_tasks(kvc_call *c) {
    static const double WORTH_THREADS = 1 << 19; /* multiply-adds: about 20 microseconds */
    const kvc_plan *plan = c->plan;
    kvc_cache_poll_timer(plan->batch->cache, plan->multiply_adds, &c->timer);
    kvc_parallel(kvc_threads_for(plan->multiply_adds, WORTH_THREADS, plan->args.num_threads), plan->jobs.num_tasks,
                 run_task, c);
    return status_of(c);
}

/* ---- one task ---------------------------------------------------------------------------------------------------- */

kvc_status kvc_check_plan_layer(const kvc_plan *plan, int32_t layer) {
    const kvc_cache *cache = plan->batch->cache;
    KVC_TRY(kvc_check_attention(plan->batch, layer, KVC_MAY_LACK_VALUES));
    const kvc_layer *config = &cache->layers[layer];
    if (!kvc_plan_has_shape(plan, layer))
        return kvc_fail(KVC_ERR_INVALID,
                        "layer %d has not the policy and shapes of the plan's layer, %d: make one for it", layer,
                        plan->args.layer);
    if (plan->args.select_rows && !config->sketch_bits)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "layer %d has no sketches, by which the plan selects: make a plan without select_rows", layer);
    if (!kvc_plan_is_current(plan))
        return kvc_fail(KVC_ERR_INVALID, "the rows of layer %d were put after the plan was made: make another", layer);
    return KVC_OK;
}

/* Checks that the batch's own rows that a slice sees were put, or will be put by `put`, unless that is NULL. */
static kvc_status check_seen(const kvc_plan *plan, const kvc_query_slice *slice, int32_t layer,
                             const kvc_put_args *put) {
    const kvc_batch *batch = plan->batch;
    if (slice->lacks_rows)
        return kvc_fail(KVC_ERR_INVALID, "sequence %lld has no rows in cross-attention layer %d: put its rows first",
                        (long long)batch->sequences[slice->sequence].sequence->id, layer);
    const uint8_t *written = kvc_written_in(batch, kvc_source_of(batch->cache, layer));
    const kvc_split_start *start = &plan->starts[slice->first_start]; /* a window may begin inside of a segment */
    for (int64_t p = slice->first_own_segment; p < slice->end_segment; p++) {
        const kvc_segment *segment = &plan->segments[p];
        const int32_t num = p + 1 < slice->end_segment ? segment->count : slice->end_rows; /* that the slice sees */
        for (int32_t i = p == start->segment ? start->offset : 0; segment->token >= 0 && i < num; i++) {
            const int32_t t = plan->order[segment->token + i];
            if (put && t >= put->first && t < put->first + put->num_tokens) continue;
            if (!written[t])
                return kvc_fail(KVC_ERR_INVALID,
                                "token %d of the batch is seen but was not put in layer %d: put its rows first", t,
                                layer);
        }
    }
    return KVC_OK;
}

/* Checks that the rows that the slices of a task see were put. */
static kvc_status check_task(const kvc_plan *plan, int32_t layer, int64_t task) {
    int32_t part;
    const kvc_job *job = kvc_job_of(plan, task, &part);
    kvc_status status = KVC_OK;
    for (int32_t m = 0; status == KVC_OK && m < job->num_slices; m++)
        status = check_seen(plan, kvc_slice_of(plan, job, m), layer, /* put */ NULL);
    return status;
}

void kvc_call_init(kvc_call *c, kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_work *work) {
    const kvc_cache *cache = plan->batch->cache;
    c->plan = plan;
    c->is_rerun = c->was_done = 0;
    c->args = args;
    c->work = work;
    c->kernels = cache->kernels;
    c->prefetch_level = cache->prefetch_level;
    c->layer = &cache->layers[layer];
    c->layout = &cache->layouts[cache->layout_of[layer]];
    /* Short rows go in longer tiles: they are read earlier, and less time goes into beginning tiles.  All lengths
     * divide KVC_TILE, as slices share whole tiles. */
    const size_t k_bytes = c->layout->k_row_bytes, v_bytes = c->layout->v_row_bytes;
    const size_t longest = k_bytes > v_bytes ? k_bytes : v_bytes;
    c->streamed_rows = longest <= KVC_SHORT_ROW ? KVC_TILE : longest <= KVC_MIDDLE_ROW ? KVC_TILE / 2 : KVC_PANEL;
    c->policy = &cache->policies[plan->group];
    c->num_sinks = kvc_policy_sinks(c->policy);
    for (int way = 0; way < KVC_NUM_WAYS; way++) {
        c->k_as[way] = kvc_taken_as(c->kernels, c->layer->k_type, way);
        c->v_as[way] = kvc_taken_as(c->kernels, c->layer->v_type, way);
    }
    c->k_mixing = kvc_mixing_of(c->layer, KVC_KEYS);
    c->v_mixing = kvc_mixing_of(c->layer, KVC_VALUES);
    c->byte_mixing = c->k_mixing;
    if (plan->in_bytes && c->k_as[KVC_IN_BYTES] == KVC_F32 && !c->byte_mixing.order)
        c->byte_mixing.order = kvc_order_for(plan->k_dim, KVC_MOST_KEY_ORDER);
    c->rope = kvc_rope_of(cache, layer);
    c->angles = plan->deltas.angles;
    if (c->rope)
        c->angles +=
            (size_t)cache->ropes.of_layer[layer] * (size_t)plan->deltas.num * (size_t)plan->deltas.angles_stride;
    c->changes_scores = args->softcap > 0 || args->alibi;
    c->out_type = args->out_is_f32 ? KVC_F32 : args->q_type;
    c->scale = args->scale != 0 ? args->scale : 1 / sqrtf((float)plan->k_dim);
    atomic_init(&c->was_cancelled, 0);
}

kvc_status kvc_check_all_seen(const kvc_plan *plan, int32_t layer, const kvc_put_args *put) {
    for (int32_t u = 0; u < plan->num_slices; u++) /* slices by token have the same segments */
        if (!u || !plan->slices[u].by_token || plan->slices[u].sequence != plan->slices[u - 1].sequence)
            KVC_TRY(check_seen(plan, &plan->slices[u], layer, put));
    return KVC_OK;
}

kvc_status kvc_run_task(kvc_call *c, int32_t layer, int64_t task) {
    const kvc_plan *plan = c->plan;
    if (task < 0 || task >= plan->jobs.num_tasks)
        return kvc_fail(KVC_ERR_INDEX, "task is %lld: the plan has %lld", (long long)task,
                        (long long)plan->jobs.num_tasks);
    KVC_TRY(check_task(plan, layer, task));
    kvc_poll_timer_init(&c->timer, /* poll */ NULL, /* user */ NULL);
    KVC_TRY(kvc_round_begin(c, layer, task));
    run_task(c, task);
    const kvc_status status = status_of(c);
    kvc_round_end(c, task, status == KVC_OK);
    return status;
}
