/* plan.c: makes plans: memory, and the public functions.
 *
 * A slice is query tokens of one sequence with the rows that they see, and a split is a part of these.  A segment is
 * rows of one run.  A part is query heads of one KV head.  A job is some splits of a slice, or one split of slices that
 * share rows.  A task is a job for one part.  It works in a workspace, in which lay_out_* place arrays.
 *
 * A plan is one allocation, whose size is known only once its slices are.  So new_plan and make_plan go this way:
 *   1. Count the slices, and take scratch for them; cut what is masked out of the stored runs.
 *   2. List them, with what each sees (cutting.c).
 *   3. Sort the slices that may share rows by their stored runs, and find the rows that neighbours share (jobs.c).
 *   4. Size the plan's arrays, and allocate them.
 *   5. List the deltas, and compute their angles (deltas.c).
 *   6. List the segments.  Segments of splits that neighbours share are listed once (cutting.c).
 *   7. Join neighbours into jobs, split by split (jobs.c).
 *
 * An example: two forks of a sequence have its 1,000 rows in common, decode a token each, and have 8 KV heads.
 *   - There are two slices of 1,001 rows each, with 2 splits: [0, 512) and [512, 1001).  They are sorted by their rows,
 *     of which 1,000 are the same.
 *   - Segments: the first slice lists the run of 1,000 rows, and its own row.  Split 0 of the second slice begins where
 *     the first one's does, so the second slice lists only the end of that run from row 512 on, and its own row.
 *   - Jobs: one of split 0 of both slices, which reads 512 rows, not 1,024; and one of split 1, in which they share the
 *     whole tiles before row 1,000.  That is 2 * 8 tasks.
 */
#include "attend/plan.h"

#include <string.h>

#include "base/compiler.h"
#include "attend/deltas.h"
#include "attend/jobs.h"
#include "cache/check.h"

/* Lists that a plan is made from, in scratch that is given back once the plan is made. */
typedef struct maker {
    kvc_plan *plan;        /* a struct on the stack, until allocate_plan copies it to its allocation */
    kvc_new_slice *slices; /* [plan->num_slices] */
    kvc_slice_order order;
    kvc_shown shown;
    uint8_t *marks; /* marks for kvc_list_slices */
    void *scratch;  /* allocation that holds slices, order, shown and marks; NULL if a single slice needs none */
    uint64_t size;  /* bytes of scratch */
    /* The slices and order.items of a plan without scratch. */
    kvc_new_slice one_slice;
    kvc_neighbour one_item;
} maker;

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Takes memory for the slices that were counted, for marks and, where ranges are masked, for what is shown, which it
 * fills in.  Returns 0 if memory is exhausted. */
static int take_scratch(maker *m) {
    const kvc_plan_args *args = &m->plan->args;
    kvc_batch *batch = m->plan->batch;
    const uint64_t num = (uint64_t)m->plan->num_slices, num_masked = (uint64_t)args->num_masked;
    const uint64_t sequences = num_masked ? (uint64_t)batch->num_sequences : 0;
    const uint64_t shown = num_masked ? (uint64_t)kvc_most_shown_runs(m->plan) : 0;
    const uint64_t slices = kvc_add_array(&m->size, num * sizeof *m->slices);
    const uint64_t items = kvc_add_array(&m->size, num * sizeof *m->order.items);
    const uint64_t merged = kvc_add_array(&m->size, num * sizeof *m->order.merged);
    const uint64_t marks = kvc_add_array(&m->size, batch->parents ? (uint64_t)batch->num_tokens : 0);
    const uint64_t ranges = kvc_add_array(&m->size, num_masked * sizeof(kvc_masked_range));
    const uint64_t masked = kvc_add_array(&m->size, sequences * sizeof *m->shown.masked);
    const uint64_t stored = kvc_add_array(&m->size, sequences * sizeof *m->shown.stored);
    const uint64_t runs = kvc_add_array(&m->size, shown * sizeof(kvc_run));
    kvc_lock(batch->cache);
    char *start = m->scratch = kvc_scratch_take(batch->cache, &m->size, /* is_new */ NULL);
    kvc_unlock(batch->cache, KVC_OK);
    if (!start) return 0;
    m->slices = (void *)(start + slices);
    m->order.items = (void *)(start + items);
    m->order.merged = (void *)(start + merged);
    m->marks = (void *)(start + marks);
    if (batch->parents) memset(m->marks, 0, (size_t)batch->num_tokens);
    if (num_masked) {
        m->shown = (kvc_shown){(void *)(start + masked), (void *)(start + stored)};
        kvc_masked_sort(batch, m->plan->group, args->masked, args->masked_size, args->num_masked,
                        (void *)(start + ranges), m->shown.masked);
        kvc_cut_masked(m->plan, &m->shown, (void *)(start + runs));
    }
    return 1;
}

/* Sums over the slices of a plan. */
typedef struct totals {
    int64_t segments;                   /* upper bound of the number of segments */
    int64_t splits, counters;           /* lengths of plan->starts and plan->remaining */
    int64_t sharing_query_rows;         /* query rows of the slices that may share rows */
    uint64_t partials;                  /* floats in plan->partials */
    int32_t most_query_rows;            /* most query rows of one slice */
    int32_t most_splits;                /* most splits of one slice */
    int64_t most_rows, most_split_rows; /* most rows of one slice, and of one split */
    int32_t any_tiled, any_selects;
    double multiply_adds;
} totals;

/* Gives each slice its place in the plan's arrays, and adds up their sizes. */
static totals lay_out_slices(const maker *m) {
    const kvc_plan *plan = m->plan;
    totals t = {0};
    for (int32_t i = 0; i < plan->num_slices; i++) {
        kvc_new_slice *u = &m->slices[i];
        kvc_query_slice *slice = &u->slice;
        const int32_t query_rows = kvc_num_query_rows(plan, slice);
        const uint64_t tasks = (uint64_t)slice->num_splits * (uint64_t)plan->parts.num;
        const int goes_on = i && kvc_goes_on(plan, u - 1, u);
        slice->first_start = t.splits;
        slice->first_counter = t.counters;
        slice->partials = t.partials;
        t.segments += kvc_most_segments(u, goes_on);
        t.splits += slice->num_splits;
        t.counters += plan->parts.num;
        t.sharing_query_rows += u->may_share ? query_rows : 0;
        if (slice->num_splits > 1 && !plan->jobs.joins_splits)
            t.partials += plan->chooses    ? (uint64_t)slice->num_rows * (uint64_t)plan->args.num_choices
                          : slice->selects ? (uint64_t)plan->parts.num * kvc_found_size(query_rows, slice->num_rows)
                                           : tasks * kvc_partial_size(query_rows, plan->attending.acc_stride);
        if (slice->num_rows > t.most_rows) t.most_rows = slice->num_rows;
        const int64_t of_split = slice->num_splits > 1 ? slice->split_rows : slice->num_rows;
        if (of_split > t.most_split_rows) t.most_split_rows = of_split;
        if (slice->num_splits > t.most_splits) t.most_splits = slice->num_splits;
        if (query_rows > t.most_query_rows) t.most_query_rows = query_rows;
        t.any_tiled |= slice->tiled;
        t.any_selects |= slice->selects;
        t.multiply_adds += (double)slice->num_rows * query_rows * plan->parts.num * (plan->k_dim + plan->v_dim);
    }
    return t;
}

/* Appends an array of floats to the workspace; returns its offset. */
static uint64_t add_floats(kvc_plan *plan, uint64_t count) {
    const uint64_t at = plan->workspaces.size;
    plan->workspaces.size += (count + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    return at;
}

/* Whether a layer of the plan's group has a type with minima that kernels take without these, as q8_0 (minima.h). */
static int has_minima_apart(const kvc_plan *plan, int any_tiled) {
    const kvc_cache *cache = plan->batch->cache;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        if (cache->group_of[i] != plan->group || !cache->layers[i].v_dim) continue;
        const int32_t types[] = {cache->layers[i].k_type, cache->layers[i].v_type};
        for (int j = 0; j < 2; j++)
            for (int way = KVC_STREAMED; way <= (any_tiled ? KVC_TILED : KVC_STREAMED); way++)
                if (KVC_TYPES[types[j]].has_minimum && kvc_taken_as(cache->kernels, types[j], way) == KVC_Q8_0)
                    return 1;
    }
    return 0;
}

/* Adds what a task needs to find chosen rows, and the results of its splits if it has all of a slice's. */
static void lay_out_chosen(kvc_plan *plan, const totals *t) {
    kvc_listing *at = &plan->listing;
    at->most_splits = plan->jobs.joins_splits ? t->most_splits : 1;
    at->entries = add_floats(plan, 2 * (uint64_t)plan->args.chosen_width); /* sort_entries takes as much again */
    at->segments = add_floats(plan, 2 * KVC_SPLIT_ROWS * sizeof(kvc_segment) / sizeof(float)); /* of two splits */
    const uint64_t of_split = kvc_partial_size(plan->parts.heads, plan->attending.acc_stride);
    if (at->most_splits > 1) at->partials = add_floats(plan, (uint64_t)at->most_splits * of_split);
}

/* Lays out a workspace of a plan for choosing.  Queries lie in lanes: all heads of all KV heads at once. */
static void lay_out_choosing(kvc_plan *plan, const totals *t) {
    kvc_choosing *at = &plan->choosing;
    const kvc_rank_lanes of_head = kvc_rank_lanes_of(plan);
    const uint64_t choices = (uint64_t)plan->args.num_choices, dim = (uint64_t)plan->k_dim;
    const uint64_t lanes = (uint64_t)of_head.num * (uint64_t)plan->num_kv_heads;
    plan->attending.q = add_floats(plan, dim);
    plan->attending.tokens = add_floats(plan, 1);
    at->packed = add_floats(plan, lanes * dim);
    at->weights = add_floats(plan, lanes);
    at->masks = add_floats(plan, lanes);
    at->starts = add_floats(plan, lanes);
    plan->attending.rows = add_floats(plan, dim * KVC_TILE);
    plan->attending.scores = add_floats(plan, (uint64_t)(of_head.num / of_head.choice_lanes) * KVC_SCORES);
    at->totals = add_floats(plan, choices * KVC_SCORES);
    at->ranks = add_floats(plan, choices * (uint64_t)t->most_split_rows);
    at->entries = add_floats(plan, (uint64_t)t->most_rows);
    at->ids = add_floats(plan, (uint64_t)t->most_rows);
}

/* Adds what a task needs to select rows, and to attend to them.  First the task lists the rows of a split.  These are
 * at most as many segments as the plan has, and one more for each gap: behind sinks, and at own rows that a token does
 * not see.  Then the task lists the rows that it attends to, split by split. */
static void lay_out_selecting(kvc_plan *plan, const totals *t) {
    kvc_selecting *at = &plan->selecting;
    const int32_t heads = plan->parts.heads;
    const int32_t num_q = (int32_t)kvc_larger(heads, kvc_smaller(t->sharing_query_rows, KVC_SELECTING_QUERIES));
    const uint64_t q = (uint64_t)num_q, slices = (uint64_t)(num_q / heads);
    at->most_ranges = kvc_selected_pieces(&plan->args) + 2; /* pieces, and the first and last rows */
    const int64_t always = (KVC_FIRST_READ + KVC_LAST_READ) / KVC_PIECE_ROWS, read = at->most_ranges + always;
    plan->listing.most_segments = kvc_smaller(t->most_split_rows, t->segments + plan->batch->num_tokens + 1);
    /* Two splits of each slice, or all rows of two slices, to be compared. */
    const uint64_t listed = 2 * (uint64_t)kvc_larger((int64_t)slices * KVC_SPLIT_ROWS, plan->listing.most_segments);
    plan->listing.most_splits =
        KVC_DIVIDE_UP(kvc_larger(read * KVC_PIECE_ROWS, kvc_most_unselected(&plan->args)), KVC_SPLIT_ROWS);
    at->codes = add_floats(plan, (q + KVC_LANES) * kvc_sketch_query_bytes(plan->k_dim) / sizeof(float));
    at->scales = add_floats(plan, q);
    at->offsets = add_floats(plan, q);
    at->sums = add_floats(plan, q * KVC_LANES);
    at->found = add_floats(plan, kvc_found_size(num_q, t->most_split_rows));
    at->keys = add_floats(plan, (uint64_t)KVC_DIVIDE_UP(t->most_rows, KVC_PIECE_ROWS));
    at->pieces = add_floats(plan, (uint64_t)read);
    at->ranges = add_floats(plan, slices * (uint64_t)at->most_ranges * sizeof(kvc_row_range) / sizeof(float));
    plan->listing.segments = add_floats(plan, listed * sizeof(kvc_segment) / sizeof(float));
    plan->listing.partials = add_floats(plan, slices * (uint64_t)plan->listing.most_splits *
                                                  kvc_partial_size(heads, plan->attending.acc_stride));
}

/* Lays out a workspace that is large enough for every task of an attention. */
static void lay_out_attending(kvc_plan *plan, const totals *t) {
    kvc_attending *at = &plan->attending;
    /* A job has one slice, or several, which jobs.c joins up to these numbers of query rows. */
    const int64_t most_joined = kvc_smaller(t->sharing_query_rows, t->any_tiled ? KVC_TILE_QUERIES : KVC_TASK_QUERIES);
    const uint64_t q = (uint64_t)(most_joined > t->most_query_rows ? most_joined : t->most_query_rows);
    /* Kernels take whole chunks of query rows and keys.  Tiled ones pack them first, and a packed chunk is longer. */
    const uint64_t chunks = kvc_align_up((uint64_t)plan->k_dim, KVC_CHUNK) / KVC_CHUNK;
    at->q_stride = (int32_t)(chunks * (t->any_tiled ? KVC_PACKED : KVC_CHUNK));
    at->q = add_floats(plan, q * (uint64_t)at->q_stride);
    /* Tiles that weigh keep the scores of a block of query rows alone, of more rows: whichever takes more. */
    const uint64_t scores = q * KVC_SCORES, block = t->any_tiled ? KVC_BLOCK_QUERIES * KVC_WEIGHTS_STRIDE : 0;
    at->scores = add_floats(plan, scores > block ? scores : block);
    at->acc = add_floats(plan, q * (uint64_t)at->acc_stride);
    at->max = add_floats(plan, q);
    at->sum = add_floats(plan, q);
    at->factor = add_floats(plan, q);
    at->tokens = add_floats(plan, q); /* an int32_t is as large as a float */
    /* The panels of a tile.  Values are packed along the rows, so their chunks are of the widest tile's rows. */
    const uint64_t tile_rows = t->any_tiled ? (uint64_t)kvc_tile_rows(plan) : 0;
    const uint64_t packed_rows = t->any_tiled ? KVC_WIDE_TILE / KVC_CHUNK * KVC_PACKED : 0;
    at->keys = add_floats(plan, (uint64_t)at->q_stride * tile_rows);
    at->values = add_floats(plan, (uint64_t)at->acc_stride * packed_rows);
    const int32_t widest =
        at->q_stride > at->acc_stride ? at->q_stride : at->acc_stride; /* of a key or value, in f32 */
    at->rows = add_floats(plan, (uint64_t)widest * KVC_TILE);
    at->zeros = add_floats(plan, (uint64_t)widest);
    if (plan->args.max_chosen) lay_out_chosen(plan, t);
    if (t->any_selects) lay_out_selecting(plan, t);
    if (!has_minima_apart(plan, t->any_tiled)) return;
    at->block_stride = (int32_t)kvc_align_up((uint64_t)widest / KVC_QUANT_ELEMENTS, KVC_LANES); /* a minimum a block */
    at->minima = add_floats(plan, (uint64_t)at->block_stride * KVC_TILE);
    at->q_blocks = add_floats(plan, q * (uint64_t)at->block_stride);
    at->sum_blocks = add_floats(plan, q * KVC_SCORES);
}

/* The arrays of a plan, in the order in which they lie behind its struct. */
enum plan_array {
    PLAN_SLICES,
    PLAN_SEGMENTS,
    PLAN_STARTS,
    PLAN_JOBS,
    PLAN_JOB_SLICES,
    PLAN_COUNTERS,
    PLAN_STATES,
    PLAN_FLAGS,
    PLAN_DELTAS,
    PLAN_ANGLES,
    PLAN_ROPE_TABLE,
    PLAN_NON_CAUSAL,
    PLAN_MASKED,
    PLAN_PARTIALS,
    PLAN_WORKSPACES,
    NUM_PLAN_ARRAYS
};

/* Finds the offsets of a plan's arrays from the beginning of its struct; returns the size of the whole, in bytes. */
static uint64_t lay_out_arrays(const kvc_plan *plan, const totals *t, uint64_t *at) {
    const uint64_t splits = (uint64_t)t->splits, deltas = (uint64_t)plan->deltas.num;
    const uint64_t angles = deltas * (uint64_t)plan->deltas.angles_stride, workspaces = (uint64_t)plan->workspaces.num;
    uint64_t size = sizeof(kvc_plan);
    at[PLAN_SLICES] = (uint64_t)plan->num_slices * sizeof(kvc_query_slice);
    at[PLAN_SEGMENTS] = (uint64_t)t->segments * sizeof(kvc_segment);
    at[PLAN_STARTS] = splits * sizeof(kvc_split_start);
    at[PLAN_JOBS] = splits * sizeof(kvc_job); /* upper bound: no split is shared */
    at[PLAN_JOB_SLICES] = splits * sizeof(int32_t);
    at[PLAN_COUNTERS] = (uint64_t)t->counters * sizeof(atomic_int);
    at[PLAN_STATES] = splits * (uint64_t)plan->parts.num;
    at[PLAN_FLAGS] = workspaces * sizeof(atomic_flag);
    at[PLAN_DELTAS] = deltas * sizeof(int32_t);
    at[PLAN_ANGLES] = (uint64_t)plan->batch->cache->ropes.num * angles * sizeof(float);
    at[PLAN_ROPE_TABLE] = deltas ? (1 + KVC_NEAR) * (uint64_t)plan->deltas.angles_stride * sizeof(double) : 0;
    at[PLAN_NON_CAUSAL] = plan->args.non_causal ? (uint64_t)plan->args.num_tokens : 0;
    at[PLAN_MASKED] = (uint64_t)plan->args.num_masked * sizeof(kvc_masked);
    at[PLAN_PARTIALS] = t->partials * sizeof(float);
    at[PLAN_WORKSPACES] = workspaces * plan->workspaces.size * sizeof(float);
    kvc_add_arrays(&size, at, NUM_PLAN_ARRAYS);
    return size;
}

/* Moves a plan from the stack to its allocation, points it at the arrays there, and copies the caller's arrays. */
static kvc_plan *place_plan(const kvc_plan *sketch, const uint64_t *at, char *start) {
    kvc_plan *plan = memcpy(start, sketch, sizeof *sketch);
    plan->slices = (void *)(start + at[PLAN_SLICES]);
    plan->segments = (void *)(start + at[PLAN_SEGMENTS]);
    plan->starts = (void *)(start + at[PLAN_STARTS]);
    plan->jobs.items = (void *)(start + at[PLAN_JOBS]);
    plan->jobs.slices = (void *)(start + at[PLAN_JOB_SLICES]);
    plan->remaining = (void *)(start + at[PLAN_COUNTERS]);
    plan->round.states = (void *)(start + at[PLAN_STATES]);
    plan->workspaces.taken = (void *)(start + at[PLAN_FLAGS]);
    plan->deltas.values = (void *)(start + at[PLAN_DELTAS]);
    plan->deltas.angles = (void *)(start + at[PLAN_ANGLES]);
    plan->deltas.rope_table = (void *)(start + at[PLAN_ROPE_TABLE]);
    plan->partials = (void *)(start + at[PLAN_PARTIALS]);
    plan->workspaces.memory = (void *)(start + at[PLAN_WORKSPACES]);
    kvc_plan_args *args = &plan->args;
    kvc_masked *masked = (void *)(start + at[PLAN_MASKED]);
    for (int32_t i = 0; i < args->num_masked; i++) masked[i] = kvc_masked_at(args->masked, args->masked_size, i);
    args->masked = masked;
    args->masked_size = sizeof *masked;
    if (args->non_causal)
        args->non_causal = memcpy(start + at[PLAN_NON_CAUSAL], args->non_causal, (size_t)args->num_tokens);
    return plan;
}

/* ---- deltas ------------------------------------------------------------------------------------------------------ */

/* Counts the stored runs whose keys are off by a delta, other than that of the run before.  Lists these deltas, unless
 * `deltas` is NULL.  So a delta may be listed several times. */
static int32_t find_deltas(const maker *m, int32_t *deltas) {
    int32_t num = 0, last = 0;
    for (int32_t i = 0; i < m->plan->num_slices; i++) {
        const kvc_new_slice *u = &m->slices[i];
        if (i && u[-1].slice.sequence == u->slice.sequence) continue; /* it has the same runs */
        for (int32_t r = u->first_run; r < u->num_runs; last = u->runs[r++].delta) {
            if (!u->runs[r].delta || u->runs[r].delta == last) continue;
            if (deltas) deltas[num] = u->runs[r].delta;
            num++;
        }
    }
    return num;
}

/* ---- making a plan ----------------------------------------------------------------------------------------------- */

/* Drops, in the child of a fork(), what threads of the parent were doing: making the plan, or running its tasks. */
static void after_fork(kvc_plan_link *link) {
    kvc_plan *plan = (kvc_plan *)link;
    if (!plan->is_made) return;
    atomic_flag_clear(&plan->round.lock);
    for (int32_t i = 0; i < plan->workspaces.num; i++) atomic_flag_clear(&plan->workspaces.taken[i]);
    kvc_plan_reset(plan);
}

/* Moves the plan to an allocation with room for its arrays, and adds it to batch->plans; NULL on failure. */
static kvc_plan *allocate_plan(const kvc_plan *sketch, const totals *t) {
    kvc_batch *batch = sketch->batch;
    uint64_t at[NUM_PLAN_ARRAYS], size = lay_out_arrays(sketch, t, at);
    kvc_lock(batch->cache);
    char *start = kvc_scratch_take(batch->cache, &size, /* is_new */ NULL);
    kvc_plan *plan = start ? place_plan(sketch, at, start) : NULL;
    if (plan) {
        plan->link = (kvc_plan_link){.next = batch->plans, .size = size, .after_fork = after_fork};
        batch->plans = &plan->link;
        atomic_flag_clear(&plan->taken); /* gives the flag a value; then this call takes the plan */
        atomic_flag_test_and_set(&plan->taken);
        for (int32_t i = 0; i < plan->workspaces.num; i++) atomic_flag_clear(&plan->workspaces.taken[i]);
    }
    kvc_unlock(batch->cache, KVC_OK);
    return plan;
}

/* Decides how slices that choose rows become tasks, which changes no bit.  With enough slices, a task does all splits
 * of a slice.  Otherwise query heads are cut into parts, until there are enough tasks.  With more splits than enough, a
 * task does several: each task walks through its token's whole list of chosen rows. */
static void cut_chosen(maker *m) {
    kvc_plan *plan = m->plan;
    const int64_t threads = plan->args.num_threads, enough = KVC_TASKS_PER_THREAD * threads;
    int64_t tasks = 0;
    for (int32_t i = 0; i < plan->num_slices; i++) tasks += m->slices[i].slice.num_splits * plan->num_kv_heads;
    plan->jobs.joins_splits = threads == 1 || (int64_t)plan->num_slices * plan->num_kv_heads >= enough;
    plan->jobs.joined_splits = plan->jobs.joins_splits ? INT32_MAX : (int32_t)kvc_larger(tasks / enough, 1);
    while (tasks * plan->parts.per_kv < enough && plan->parts.heads % 2 == 0 &&
           plan->parts.heads > KVC_STREAM_QUERIES) {
        plan->parts.heads /= 2;
        plan->parts.per_kv *= 2;
    }
    plan->parts.num = plan->num_kv_heads * plan->parts.per_kv;
}

/* Makes the plan of the slices that were counted.  Nobody else changes blocks and sequences of an open batch, so they
 * are read without the mutex. */
static kvc_plan *make_plan(maker *m) {
    kvc_plan *sketch = m->plan;
    kvc_cache *cache = sketch->batch->cache;
    sketch->num_slices = kvc_list_slices(sketch, &m->shown, m->slices, m->marks);
    if (sketch->args.max_chosen) cut_chosen(m);
    kvc_order_slices(m->slices, sketch->num_slices, &m->order);
    sketch->deltas.num = find_deltas(m, NULL); /* an upper bound, to size the list by */
    if (sketch->deltas.num) kvc_find_angles_stride(sketch);
    const totals t = lay_out_slices(m);
    sketch->workspaces.num = (int32_t)kvc_smaller(sketch->args.num_threads, t.splits * sketch->parts.num);
    sketch->multiply_adds = t.multiply_adds;
    if (sketch->chooses)
        lay_out_choosing(sketch, &t);
    else
        lay_out_attending(sketch, &t);
    kvc_plan *plan = m->plan = allocate_plan(sketch, &t);
    if (!plan) return NULL;
    if (plan->deltas.num) {
        kvc_sort_deltas(plan, find_deltas(m, plan->deltas.values));
        kvc_compute_angles(plan);
    }
    for (int32_t i = 0, last = -1; i < plan->num_slices; i++) { /* in the order of rows */
        const int32_t u = m->order.items[i].slice;
        const int goes_on = u && last == u - 1 && kvc_goes_on(plan, &m->slices[last], &m->slices[u]);
        plan->slices[u] = m->slices[u].slice;
        kvc_list_segments(plan, &m->slices[u], &plan->slices[u], i ? &plan->slices[last] : NULL, goes_on, m->marks);
        last = u;
    }
    kvc_find_jobs(plan, m->slices, &m->order);
    atomic_flag_clear(&plan->round.lock);
    kvc_plan_reset(plan);
    kvc_lock(cache);
    plan->is_made = 1;
    kvc_unlock(cache, KVC_OK);
    return plan;
}

/* Makes a plan from arguments that were checked. */
static kvc_status new_plan(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **out) {
    const kvc_layer *layer = &batch->cache->layers[args->layer];
    const int32_t group = batch->cache->group_of[args->layer];
    kvc_plan sketch = {.batch = batch,
                       .args = *args,
                       .group = group,
                       .stride = batch->cache->pools[group].stride,
                       .order = kvc_order_in(batch, group),
                       .num_kv_heads = layer->num_kv_heads,
                       .k_dim = layer->k_dim,
                       .v_dim = layer->v_dim,
                       .num_cross_puts = kvc_num_cross_puts(batch, group),
                       .parts.heads = args->num_heads / layer->num_kv_heads,
                       .parts.per_kv = 1,
                       .parts.num = layer->num_kv_heads,
                       .chooses = !layer->v_dim,
                       .by_token = !layer->v_dim || args->max_chosen};
    if (sketch.chooses) {
        sketch.parts.heads = args->num_heads;
        sketch.parts.num = 1;
    }
    if (args->precision == KVC_PRECISION_INT8 && !sketch.by_token) kvc_allow_bytes(&sketch);
    sketch.attending.acc_stride = (int32_t)kvc_align_up((size_t)layer->v_dim, KVC_LANES);
    sketch.num_slices = kvc_count_slices(&sketch);
    maker m = {.plan = &sketch};
    m.slices = &m.one_slice;
    m.order.items = &m.one_item;
    const int needs_scratch = sketch.num_slices != 1 || batch->parents || args->num_masked;
    *out = !needs_scratch || take_scratch(&m) ? make_plan(&m) : NULL;
    if (m.scratch) {
        kvc_lock(batch->cache);
        kvc_scratch_give(batch->cache, m.scratch, m.size);
        kvc_unlock(batch->cache, KVC_OK);
    }
    return *out ? KVC_OK : kvc_fail(KVC_ERR_NOMEM, "out of memory for the tasks of an attention");
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks num_choices, max_chosen and chosen_width, and fills in their defaults. */
static kvc_status resolve_choices(const kvc_cache *cache, kvc_plan_args *args) {
    const kvc_layer *layer = &cache->layers[args->layer];
    const int32_t heads = args->num_heads, kv_heads = layer->num_kv_heads, num = args->num_choices;
    if (args->max_chosen < 0)
        return kvc_fail(KVC_ERR_INVALID, "max_chosen is %d: it must be positive, or 0 if no rows are chosen",
                        args->max_chosen);
    if (args->chosen_width < 0 || args->chosen_width > args->max_chosen)
        return kvc_fail(KVC_ERR_INVALID, "chosen_width is %d: it must be between 1 and max_chosen, %d, or 0 for that",
                        args->chosen_width, args->max_chosen);
    if (!args->chosen_width) args->chosen_width = args->max_chosen;
    if (layer->v_dim && num)
        return kvc_fail(KVC_ERR_INVALID, "num_choices is %d: layer %d holds values, and rows are chosen by keys alone",
                        num, args->layer);
    if (layer->v_dim) return KVC_OK;
    if (args->max_chosen)
        return kvc_fail(KVC_ERR_INVALID, "max_chosen is %d: layer %d holds keys alone, which are not attended to",
                        args->max_chosen, args->layer);
    if (num < 0 || (num && (heads % num || (num % kv_heads && kv_heads % num))))
        return kvc_fail(KVC_ERR_INVALID,
                        "num_choices is %d: it must divide num_heads, %d, and be a multiple or a divisor of layer %d's "
                        "num_kv_heads, %d",
                        num, heads, args->layer, kv_heads);
    if (!num) args->num_choices = 1;
    return KVC_OK;
}

kvc_status kvc_resolve_plan(const kvc_batch *batch, kvc_plan_args *args) {
    KVC_TRY(kvc_check_attention(batch, args->layer, KVC_MAY_LACK_VALUES));
    KVC_TRY(kvc_resolve_range(batch, args->first, &args->num_tokens));
    const int32_t num_kv_heads = batch->cache->layers[args->layer].num_kv_heads;
    if (args->num_heads < 1 || args->num_heads % num_kv_heads || args->num_heads / num_kv_heads > 1 << 16)
        return kvc_fail(KVC_ERR_INVALID,
                        "num_heads is %d: it must be a multiple of layer %d's num_kv_heads, %d, by at most %d",
                        args->num_heads, args->layer, num_kv_heads, 1 << 16);
    if (args->num_threads < 0 || args->num_threads > KVC_MOST_THREADS)
        return kvc_fail(KVC_ERR_INVALID, "num_threads is %d: it must be between 1 and %d, or 0 for the cache's",
                        args->num_threads, KVC_MOST_THREADS);
    if (!args->num_threads) args->num_threads = kvc_cache_threads(batch->cache);
    if (args->precision != KVC_PRECISION_STORED && args->precision != KVC_PRECISION_INT8)
        return kvc_fail(KVC_ERR_INVALID,
                        "precision is %d: it must be KVC_PRECISION_STORED, 0, or KVC_PRECISION_INT8, 1",
                        args->precision);
    if (args->precision && !batch->cache->layers[args->layer].v_dim)
        return kvc_fail(KVC_ERR_INVALID, "precision is %d: layer %d holds keys alone, which are not attended to",
                        args->precision, args->layer);
    KVC_TRY(resolve_choices(batch->cache, args));
    if (args->select_rows) KVC_TRY(kvc_resolve_selecting(batch, args));
    return args->num_masked ? kvc_masked_check(batch, args->masked, args->masked_size, args->num_masked) : KVC_OK;
}

/* Whether a plan hides these ranges, given in the same order. */
static int hides(const kvc_plan *plan, const kvc_plan_args *args) {
    const kvc_plan_args *made = &plan->args;
    if (made->num_masked != args->num_masked) return 0;
    for (int32_t i = 0; i < args->num_masked; i++) {
        const kvc_masked own = kvc_masked_at(made->masked, made->masked_size, i),
                         given = kvc_masked_at(args->masked, args->masked_size, i);
        if (own.seq_id != given.seq_id || own.begin != given.begin || own.end != given.end) return 0;
    }
    return 1;
}

/* Whether a new plan for these arguments would be the same as this one. */
static int plan_serves(const kvc_plan *plan, const kvc_plan_args *args) {
    const uint8_t *given = args->non_causal, *own = plan->args.non_causal;
    if (!given != !own || plan->args.num_tokens != args->num_tokens || !hides(plan, args)) return 0;
    if (own && memcmp(own, given, (size_t)args->num_tokens) != 0) return 0;
    return kvc_plan_has_shape(plan, args->layer) && plan->args.first == args->first &&
           plan->args.num_heads == args->num_heads && plan->args.num_threads == args->num_threads &&
           plan->args.max_chosen == args->max_chosen && plan->args.chosen_width == args->chosen_width &&
           plan->args.select_rows == args->select_rows && plan->args.num_choices == args->num_choices &&
           plan->args.precision == args->precision && kvc_plan_is_current(plan);
}

kvc_status kvc_plan_get(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **out) {
    kvc_lock(batch->cache);
    kvc_plan *plan = (kvc_plan *)batch->plans;
    while (plan && !(plan_serves(plan, args) && !KVC_BUGGIFY() && !atomic_flag_test_and_set(&plan->taken)))
        plan = (kvc_plan *)plan->link.next;
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return new_plan(batch, args, out);
    *out = plan;
    return KVC_OK;
}

kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *given, kvc_plan **out) {
    kvc_plan_args args;
    if (!out) return kvc_fail(KVC_ERR_INVALID, "plan is NULL: it is where the plan goes");
    *out = NULL;
    KVC_TRY(KVC_READ(kvc_plan_args, &args, given, "args"));
    KVC_TRY(kvc_resolve_plan(batch, &args));
    return kvc_plan_get(batch, &args, out);
}

void kvc_plan_recount(kvc_plan *plan) {
    for (int32_t u = 0; u < plan->num_slices; u++)
        for (int32_t i = 0; i < plan->parts.num; i++)
            atomic_store_explicit(&plan->remaining[plan->slices[u].first_counter + i], plan->slices[u].num_splits,
                                  memory_order_relaxed);
    for (int64_t i = 0; i < plan->jobs.num_tasks; i++) {
        if (plan->round.states[i] != KVC_TASK_DONE) continue;
        int32_t part;
        const kvc_job *job = kvc_job_of(plan, i, &part);
        for (int64_t m = job->first_slice; m < job->first_slice + job->num_slices; m++)
            atomic_fetch_sub(&plan->remaining[plan->slices[plan->jobs.slices[m]].first_counter + part],
                             job->num_splits);
    }
}

void kvc_plan_reset(kvc_plan *plan) {
    kvc_round *round = &plan->round;
    memset(round->states, KVC_TASK_OPEN, (size_t)plan->jobs.num_tasks);
    round->num_running = round->num_done = 0;
    round->is_rerun = 0;
    kvc_plan_recount(plan);
}

void kvc_plan_leave(kvc_plan *plan) {
    kvc_plan_reset(plan); /* perhaps only some tasks were run */
    atomic_flag_clear(&plan->taken);
}

void kvc_plan_free(kvc_plan *plan) {
    if (!plan) return;
    kvc_batch *batch = plan->batch;
    kvc_lock(batch->cache);
    kvc_plan_link **at = &batch->plans;
    while (*at != &plan->link) at = &(*at)->next;
    *at = plan->link.next;
    kvc_scratch_give(batch->cache, plan, plan->link.size);
    kvc_unlock(batch->cache, KVC_OK);
}

int64_t kvc_plan_num_tasks(const kvc_plan *plan) { return plan->jobs.num_tasks; }
