/* plan.c: cuts a batch's attention into tasks.
 *
 * The rule.  It looks at a sequence's own lengths only, never at threads, blocks or the rest of the batch, so that the
 * same sequence is always added up in the same order:
 *   - up to STREAM_ROWS query rows per KV head are one unit, streamed: every stored row is read once for all of them;
 *   - more are cut into units of about TILE_QUERIES query rows;
 *   - the rows a unit can see are cut into parts of at least PART_ROWS, and so many that a sequence has about
 *     TASKS_WANTED tasks: enough for 64 threads to come out even, few enough that merging costs nothing.
 */
#include <string.h>

#include "attention.h"

enum { STREAM_ROWS = 16, TILE_QUERIES = 64, PART_ROWS = 512, TASKS_WANTED = 256 };

/* ---- units ------------------------------------------------------------------------------------------------------- */

/* Sizes of the plan's arrays, added up before they are there. */
typedef struct totals {
    int64_t units, pieces, starts, counters, tasks;
    size_t partials;
    int32_t max_q, tiled;
    double work;
} totals;

static void find_reach(const kvc_batch *batch, const kvc_policy *policy, kvc_unit *unit) {
    int32_t first = INT32_MAX, last = 0;
    for (int32_t i = 0; i < unit->num_tokens; i++) {
        const int32_t position = batch->positions[batch->order[unit->first + i]];
        if (position < first) first = position;
        if (position > last) last = position;
    }
    unit->end = last + 1;
    unit->low = kvc_policy_lowest(policy, first);
    unit->sinks = kvc_policy_sinks(policy);
    if (unit->sinks > unit->end) unit->sinks = unit->end;
    if (unit->sinks >= unit->low) unit->sinks = unit->low = 0;
}

/* Adds the part of a run at [begin, end) to the unit's pieces; only counts them where there is no array yet. */
static void add_piece(const kvc_run *run, int32_t begin, int32_t end, kvc_piece *pieces, int64_t *num, kvc_unit *unit) {
    const kvc_run part = kvc_run_part(run, begin, end);
    if (!part.count) return;
    if (pieces) pieces[*num] = (kvc_piece){part.block->rows, part.slot, part.count, part.position};
    ++*num;
    unit->num_rows += part.count;
}

static void add_runs(const kvc_run *runs, int32_t num_runs, kvc_piece *pieces, int64_t *num, kvc_unit *unit) {
    for (int32_t i = 0; i < num_runs; i++) {
        if (unit->sinks) add_piece(&runs[i], 0, unit->sinks, pieces, num, unit);
        add_piece(&runs[i], unit->low, unit->end, pieces, num, unit);
    }
}

/* Stored rows first, then the batch's own: the order of arrival. */
static void find_pieces(const kvc_plan *plan, kvc_unit *unit, kvc_piece *pieces, int64_t *num) {
    const kvc_batch *batch = plan->batch;
    const kvc_rows *rows = &batch->sequences[unit->sequence].sequence->rows[plan->group];
    const kvc_pending *pending = kvc_pending_of(batch, plan->group, unit->sequence);
    find_reach(batch, &batch->cache->policies[plan->group], unit);
    unit->num_rows = 0;
    add_runs(kvc_rows_begin(rows), rows->num, pieces, num, unit);
    add_runs(pending->runs, pending->num, pieces, num, unit);
}

static void cut_rows(const kvc_plan *plan, int32_t num_units, kvc_unit *unit) {
    const int64_t most = (unit->num_rows + PART_ROWS - 1) / PART_ROWS;
    int64_t parts = TASKS_WANTED / ((int64_t)plan->num_kv_heads * num_units);
    if (parts > most) parts = most;
    if (parts < 1) parts = 1;
    const int64_t rows = (unit->num_rows + parts - 1) / parts;
    unit->part_rows = rows ? (rows + KVC_TILE - 1) / KVC_TILE * KVC_TILE : KVC_TILE;
    unit->num_parts = (int32_t)((unit->num_rows + unit->part_rows - 1) / unit->part_rows);
    if (!unit->num_parts) unit->num_parts = 1; /* nothing to see: somebody must write the zeros */
}

/* Notes where each part of a unit begins. */
static void find_starts(const kvc_unit *unit, const kvc_piece *pieces, kvc_start *starts) {
    int32_t piece = 0;
    int64_t before = 0; /* rows in the pieces before this one */
    for (int32_t p = 0; p < unit->num_parts; p++) {
        const int64_t row = p * unit->part_rows;
        while (row && before + pieces[piece].count <= row) before += pieces[piece++].count;
        starts[p] = (kvc_start){piece, (int32_t)(row - before)};
    }
}

/* One unit, added to the totals; written down as well once the plan has its arrays. */
static void add_unit(kvc_plan *plan, kvc_unit *unit, int32_t num_units, totals *t) {
    const int32_t num_q = unit->num_tokens * plan->heads_per_kv;
    unit->first_piece = t->pieces;
    unit->first_start = t->starts;
    unit->first_counter = t->counters;
    unit->first_task = t->tasks;
    unit->partials = t->partials;
    find_pieces(plan, unit, plan->pieces, &t->pieces);
    cut_rows(plan, num_units, unit);
    if (plan->units) {
        plan->units[t->units] = *unit;
        find_starts(unit, plan->pieces + unit->first_piece, plan->starts + unit->first_start);
        for (int32_t h = 0; h < plan->num_kv_heads; h++) {
            atomic_init(&plan->counters[unit->first_counter + h].remaining, unit->num_parts);
            atomic_init(&plan->counters[unit->first_counter + h].skipped, 0);
        }
    }
    const int64_t tasks = (int64_t)unit->num_parts * plan->num_kv_heads;
    t->units++;
    t->starts += unit->num_parts;
    t->counters += plan->num_kv_heads;
    t->tasks += tasks;
    if (unit->num_parts > 1) t->partials += (size_t)tasks * kvc_partial_size(num_q, plan->lane.acc_stride);
    if (num_q > t->max_q) t->max_q = num_q;
    t->tiled |= unit->tiled;
    t->work += (double)unit->num_rows * num_q * plan->num_kv_heads * (plan->k_dim + plan->v_dim);
}

/* The units of the query tokens order[first .. end) of one sequence. */
static void cut_queries(kvc_plan *plan, int32_t sequence, int32_t first, int32_t end, totals *t) {
    const int64_t num_q = (int64_t)(end - first) * plan->heads_per_kv;
    const int32_t tiled = num_q > STREAM_ROWS;
    int32_t tokens = tiled ? TILE_QUERIES / plan->heads_per_kv : end - first;
    if (tokens < 1) tokens = 1;
    const int32_t num_units = (end - first + tokens - 1) / tokens;
    for (int32_t at = first; at < end; at += tokens) {
        kvc_unit unit = {
            .sequence = sequence, .first = at, .num_tokens = end - at < tokens ? end - at : tokens, .tiled = tiled};
        add_unit(plan, &unit, num_units, t);
    }
}

static totals cut_batch(kvc_plan *plan) {
    const kvc_batch *batch = plan->batch;
    const int32_t begin = plan->args.first, end = begin + plan->args.num_tokens;
    totals t = {0};
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        /* Tokens of a sequence are listed in rising order, so those of the range are side by side. */
        const kvc_batch_sequence *member = &batch->sequences[s];
        int32_t first = member->first, last = member->first + member->num_tokens;
        while (first < last && batch->order[first] < begin) first++;
        while (first < last && batch->order[last - 1] >= end) last--;
        if (first < last) cut_queries(plan, s, first, last, &t);
    }
    return t;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

size_t kvc_partial_size(int32_t num_q, int32_t acc_stride) {
    return kvc_align_up(2 * (size_t)num_q, KVC_LANES) + (size_t)num_q * (size_t)acc_stride;
}

static size_t add_floats(size_t *size, size_t count) {
    const size_t at = *size;
    *size += kvc_align_up(count, KVC_LANES);
    return at;
}

static void lay_out_lane(kvc_plan *plan, const totals *t) {
    kvc_lane_layout *lane = &plan->lane;
    const size_t q = (size_t)t->max_q;
    lane->size = 0;
    lane->q = add_floats(&lane->size, q * (size_t)lane->q_stride);
    lane->scores = add_floats(&lane->size, q * KVC_TILE);
    lane->acc = add_floats(&lane->size, q * (size_t)lane->acc_stride);
    lane->max = add_floats(&lane->size, q);
    lane->sum = add_floats(&lane->size, q);
    lane->factor = add_floats(&lane->size, q);
    lane->keys = add_floats(&lane->size, t->tiled ? (size_t)plan->k_dim * KVC_TILE : 0);
    lane->values = add_floats(&lane->size, t->tiled ? (size_t)lane->acc_stride * KVC_TILE : 0);
}

/* The plan on the stack, moved to scratch that has room for all its arrays; NULL if there is none. */
static kvc_plan *settle(const kvc_plan *draft, const totals *t) {
    size_t size = sizeof(kvc_plan);
    const size_t units = kvc_add_array(&size, (size_t)t->units * sizeof(kvc_unit));
    const size_t pieces = kvc_add_array(&size, (size_t)t->pieces * sizeof(kvc_piece));
    const size_t starts = kvc_add_array(&size, (size_t)t->starts * sizeof(kvc_start));
    const size_t counters = kvc_add_array(&size, (size_t)t->counters * sizeof(kvc_counter));
    const size_t flags = kvc_add_array(&size, (size_t)draft->num_lanes * sizeof(atomic_flag));
    const size_t partials = kvc_add_array(&size, t->partials * sizeof(float));
    const size_t lanes = kvc_add_array(&size, (size_t)draft->num_lanes * draft->lane.size * sizeof(float));
    char *start = kvc_scratch_take(draft->batch->cache, &size);
    if (!start) return NULL;
    kvc_plan *plan = memcpy(start, draft, sizeof *draft);
    plan->size = size;
    plan->units = (void *)(start + units);
    plan->pieces = (void *)(start + pieces);
    plan->starts = (void *)(start + starts);
    plan->counters = (void *)(start + counters);
    plan->lane_taken = (void *)(start + flags);
    plan->partials = (void *)(start + partials);
    plan->lanes = (void *)(start + lanes);
    for (int32_t i = 0; i < plan->num_lanes; i++) atomic_flag_clear(&plan->lane_taken[i]);
    return plan;
}

/* Blocks and sequences of the batch are its own, so only scratch needs the mutex. */
static kvc_status new_plan(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **out) {
    const kvc_layer *layer = &batch->cache->layers[args->layer];
    kvc_plan draft = {.batch = batch,
                      .args = *args,
                      .group = batch->cache->group_of[args->layer],
                      .num_kv_heads = layer->num_kv_heads,
                      .k_dim = layer->k_dim,
                      .v_dim = layer->v_dim,
                      .heads_per_kv = args->num_heads / layer->num_kv_heads};
    draft.lane.q_stride = (int32_t)kvc_align_up((size_t)layer->k_dim, KVC_LANES);
    draft.lane.acc_stride = (int32_t)kvc_align_up((size_t)layer->v_dim, KVC_LANES);
    const totals t = cut_batch(&draft);
    draft.num_units = (int32_t)t.units;
    draft.num_tasks = t.tasks;
    draft.num_lanes = args->num_threads < t.tasks ? args->num_threads : (int32_t)t.tasks;
    draft.work = t.work;
    lay_out_lane(&draft, &t);
    kvc_lock(batch->cache);
    kvc_plan *plan = settle(&draft, &t);
    if (plan) {
        plan->next = batch->plans;
        batch->plans = plan;
        atomic_flag_clear(&plan->taken);
        atomic_flag_test_and_set(&plan->taken);
    }
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld attention tasks", (long long)t.tasks);
    cut_batch(plan);
    *out = plan;
    return KVC_OK;
}

void kvc_plans_free(kvc_batch *batch) {
    while (batch->plans) {
        kvc_plan *plan = batch->plans;
        batch->plans = plan->next;
        kvc_scratch_give(batch->cache, plan, plan->size);
    }
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Copies and checks the caller's arguments, and fills in those left to us. */
static kvc_status check_plan(const kvc_batch *batch, const kvc_plan_args *given, kvc_plan_args *args) {
    kvc_status status = kvc_read_struct(args, sizeof *args, given, given ? given->struct_size : 0, "plan");
    if (status == KVC_OK) status = kvc_check_layer(batch->cache, args->layer);
    if (status == KVC_OK) status = kvc_check_range(batch, args->first, &args->num_tokens);
    if (status != KVC_OK) return status;
    const int32_t num_kv_heads = batch->cache->layers[args->layer].num_kv_heads;
    if (args->num_heads < 1 || args->num_heads % num_kv_heads || args->num_heads / num_kv_heads > 1 << 16)
        return kvc_fail(KVC_ERR_INVALID, "num_heads is %d: it must be a multiple of layer %d's num_kv_heads, %d",
                        args->num_heads, args->layer, num_kv_heads);
    if (args->num_threads < 0)
        return kvc_fail(KVC_ERR_INVALID, "num_threads is %d: it must be at least 1, or 0 for the cache's",
                        args->num_threads);
    if (!args->num_threads) args->num_threads = kvc_cache_threads(batch->cache);
    return KVC_OK;
}

/* Whether a plan for these arguments would be the same. */
static int serves(const kvc_plan *plan, const kvc_plan_args *args) {
    const kvc_cache *cache = plan->batch->cache;
    const kvc_layer *layer = &cache->layers[args->layer];
    return plan->group == cache->group_of[args->layer] && plan->num_kv_heads == layer->num_kv_heads &&
           plan->k_dim == layer->k_dim && plan->v_dim == layer->v_dim && plan->args.first == args->first &&
           plan->args.num_tokens == args->num_tokens && plan->args.num_heads == args->num_heads &&
           plan->args.num_threads == args->num_threads;
}

kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *given, kvc_plan **out) {
    kvc_plan_args args;
    if (!out) return kvc_fail(KVC_ERR_INVALID, "plan is NULL: it is where the plan goes");
    const kvc_status status = check_plan(batch, given, &args);
    if (status != KVC_OK) return status;
    kvc_lock(batch->cache);
    kvc_plan *plan = batch->plans;
    while (plan && !(serves(plan, &args) && !atomic_flag_test_and_set(&plan->taken))) plan = plan->next;
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return new_plan(batch, &args, out);
    *out = plan;
    return KVC_OK;
}

void kvc_plan_free(kvc_plan *plan) {
    if (!plan) return;
    for (int32_t u = 0; u < plan->num_units; u++) /* not all tasks may have been run */
        for (int32_t h = 0; h < plan->num_kv_heads; h++) {
            kvc_counter *counter = &plan->counters[plan->units[u].first_counter + h];
            atomic_store_explicit(&counter->remaining, plan->units[u].num_parts, memory_order_relaxed);
            atomic_store_explicit(&counter->skipped, 0, memory_order_relaxed);
        }
    atomic_flag_clear(&plan->taken);
}

int64_t kvc_plan_num_tasks(const kvc_plan *plan) { return plan->num_tasks; }
