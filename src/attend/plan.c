/* plan.c: makes plans, and keeps them for calls that come.
 *
 * How.  Units are counted and listed (cut_batch); those of whole sequences are sorted by their stored runs, each pair
 * of neighbours knowing how much they have in common (sort_units), which costs no more than to go over what is the same
 * once; then memory is taken (settle), pieces are listed, of a part that neighbours have in common once (fill_units),
 * and neighbours become jobs, part by part (find_jobs).
 */
#include "attend/plan.h"

#include <stdlib.h>
#include <string.h>

#include "attend/jobs.h"
#include "store/check.h"
#include "store/scratch.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Sizes of the plan's arrays. */
typedef struct totals {
    int64_t pieces, parts, counters;
    int64_t whole_q; /* query rows of units of a whole sequence */
    uint64_t partials;
    int32_t max_q, tiled;
    double work;
} totals;

/* Gives each unit its place in the plan's arrays. */
static totals lay_out_units(const kvc_maker *m) {
    const kvc_plan *plan = m->plan;
    totals t = {0};
    for (int32_t i = 0; i < plan->num_units; i++) {
        const kvc_draft_unit *u = &m->units[i];
        kvc_unit *unit = &m->units[i].unit;
        const int32_t num_q = kvc_num_q(plan, unit);
        const int64_t tasks = (int64_t)unit->num_parts * plan->num_kv_heads;
        unit->first_start = t.parts;
        unit->first_counter = t.counters;
        unit->partials = t.partials;
        t.pieces += (int64_t)(u->num_runs - u->first_run) * (u->stored.sinks ? 2 : 1) + u->own_pieces; /* at most */
        t.parts += unit->num_parts;
        t.counters += plan->num_kv_heads;
        t.whole_q += u->is_whole ? num_q : 0;
        if (unit->num_parts > 1) t.partials += (uint64_t)tasks * kvc_partial_size(num_q, plan->lane.acc_stride);
        if (num_q > t.max_q) t.max_q = num_q;
        t.tiled |= unit->tiled;
        t.work += (double)unit->num_rows * num_q * plan->num_kv_heads * (plan->k_dim + plan->v_dim);
    }
    return t;
}

static uint64_t add_floats(uint64_t *size, uint64_t count) {
    const uint64_t at = *size;
    *size += kvc_align_up(count, KVC_LANES);
    return at;
}

static void lay_out_lane(kvc_plan *plan, const totals *t) {
    kvc_lane_layout *lane = &plan->lane;
    const int64_t most = t->tiled ? KVC_TILE_QUERIES : KVC_TASK_QUERIES,
                  together = t->whole_q < most ? t->whole_q : most;
    const uint64_t q = (uint64_t)(together > t->max_q ? together : t->max_q);
    lane->size = 0;
    lane->q = add_floats(&lane->size, q * (uint64_t)lane->q_stride);
    lane->scores = add_floats(&lane->size, q * KVC_TILE);
    lane->acc = add_floats(&lane->size, q * (uint64_t)lane->acc_stride);
    lane->max = add_floats(&lane->size, q);
    lane->sum = add_floats(&lane->size, q);
    lane->factor = add_floats(&lane->size, q);
    lane->tokens = add_floats(&lane->size, q); /* of the same size */
    lane->keys = add_floats(&lane->size, t->tiled ? (uint64_t)lane->q_stride * KVC_TILE : 0);
    lane->values = add_floats(&lane->size, t->tiled ? (uint64_t)lane->acc_stride * KVC_TILE : 0);
    lane->turned = add_floats(&lane->size, plan->num_deltas ? (uint64_t)lane->q_stride * KVC_TILE : 0);
}

/* The plan on the stack, moved to scratch that has room for all its arrays; NULL if there is none. */
static kvc_plan *settle(const kvc_plan *draft, const totals *t) {
    uint64_t size = sizeof(kvc_plan);
    const uint64_t units = kvc_add_array(&size, (uint64_t)draft->num_units * sizeof(kvc_unit));
    const uint64_t pieces = kvc_add_array(&size, (uint64_t)t->pieces * sizeof(kvc_piece));
    const uint64_t starts = kvc_add_array(&size, (uint64_t)t->parts * sizeof(kvc_start));
    const uint64_t jobs = kvc_add_array(&size, (uint64_t)t->parts * sizeof(kvc_job)); /* at most */
    const uint64_t members = kvc_add_array(&size, (uint64_t)t->parts * sizeof(int32_t));
    const uint64_t counters = kvc_add_array(&size, (uint64_t)t->counters * sizeof(atomic_int));
    const uint64_t states = kvc_add_array(&size, (uint64_t)t->parts * (uint64_t)draft->num_kv_heads);
    const uint64_t flags = kvc_add_array(&size, (uint64_t)draft->num_lanes * sizeof(atomic_flag));
    const uint64_t deltas = kvc_add_array(&size, (uint64_t)draft->num_deltas * sizeof(int32_t));
    const uint64_t angles =
        kvc_add_array(&size, (uint64_t)draft->batch->cache->num_ropes * (uint64_t)draft->num_deltas *
                                 (uint64_t)draft->angles_stride * sizeof(float));
    const uint64_t turns =
        kvc_add_array(&size, draft->num_deltas ? (1 + KVC_NEAR) * (uint64_t)draft->angles_stride * sizeof(double) : 0);
    const uint64_t non_causal = kvc_add_array(&size, draft->args.non_causal ? (uint64_t)draft->args.num_tokens : 0);
    const uint64_t partials = kvc_add_array(&size, t->partials * sizeof(float));
    const uint64_t lanes = kvc_add_array(&size, (uint64_t)draft->num_lanes * draft->lane.size * sizeof(float));
    char *start = kvc_scratch_take(draft->batch->cache, &size);
    if (!start) return NULL;
    kvc_plan *plan = memcpy(start, draft, sizeof *draft);
    plan->link.size = size;
    plan->units = (void *)(start + units);
    plan->pieces = (void *)(start + pieces);
    plan->starts = (void *)(start + starts);
    plan->jobs = (void *)(start + jobs);
    plan->members = (void *)(start + members);
    plan->remaining = (void *)(start + counters);
    plan->round.states = (void *)(start + states);
    plan->lane_taken = (void *)(start + flags);
    plan->deltas = (void *)(start + deltas);
    plan->angles = (void *)(start + angles);
    plan->turns = (void *)(start + turns);
    plan->non_causal = (void *)(start + non_causal);
    if (draft->args.non_causal) {
        memcpy(plan->non_causal, draft->args.non_causal, (size_t)draft->args.num_tokens);
        plan->args.non_causal = plan->non_causal;
    }
    plan->partials = (void *)(start + partials);
    plan->lanes = (void *)(start + lanes);
    for (int32_t i = 0; i < plan->num_lanes; i++) atomic_flag_clear(&plan->lane_taken[i]);
    return plan;
}

/* ---- keys that are off ------------------------------------------------------------------------------------------- */

/* Calls visit for each stored run of the units that is off, but for those like the one before. */
static void visit_deltas(const kvc_maker *m, void (*visit)(kvc_plan *plan, int32_t delta)) {
    int32_t last = 0;
    for (int32_t i = 0; i < m->plan->num_units; i++) {
        const kvc_draft_unit *u = &m->units[i];
        if (i && u[-1].unit.sequence == u->unit.sequence) continue; /* the same runs */
        for (int32_t r = u->first_run; r < u->num_runs; last = u->runs[r++].delta)
            if (u->runs[r].delta && u->runs[r].delta != last) visit(m->plan, u->runs[r].delta);
    }
}

static void count_delta(kvc_plan *plan, int32_t delta) {
    (void)delta;
    plan->num_deltas++;
}

static void add_delta(kvc_plan *plan, int32_t delta) { plan->deltas[plan->num_deltas++] = delta; }

static int by_value(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Sorted, and each once. */
static void find_deltas(const kvc_maker *m) {
    kvc_plan *plan = m->plan;
    const int32_t num = plan->num_deltas;
    plan->num_deltas = 0;
    visit_deltas(m, add_delta);
    qsort(plan->deltas, (size_t)num, sizeof *plan->deltas, by_value);
    plan->num_deltas = 0;
    for (int32_t i = 0; i < num; i++)
        if (plan->num_deltas == 0 || plan->deltas[i] != plan->deltas[plan->num_deltas - 1])
            plan->deltas[plan->num_deltas++] = plan->deltas[i];
}

/* At most so many deltas, and so long angles. */
static void size_angles(const kvc_maker *m) {
    kvc_plan *plan = m->plan;
    const kvc_cache *cache = plan->batch->cache;
    visit_deltas(m, count_delta);
    for (int32_t r = 0; r < cache->num_ropes; r++)
        if ((int32_t)kvc_rope_angles_size(&cache->ropes[r]) > plan->angles_stride)
            plan->angles_stride = (int32_t)kvc_rope_angles_size(&cache->ropes[r]);
}

/* Queries are turned by -delta: what a key that is off by delta lacks, since q . R(d) k = R(-d) q . k. */
static void find_angles(const kvc_maker *m) {
    kvc_plan *plan = m->plan;
    const kvc_cache *cache = plan->batch->cache;
    if (plan->num_deltas) find_deltas(m);
    for (int32_t layer = 0, last = -1; plan->num_deltas && layer < cache->num_layers; layer++) {
        const int32_t r = cache->rope_of[layer];
        if (cache->group_of[layer] != plan->group || r < 0 || r == last) continue;
        kvc_rope_table table = {.angles = plan->turns, .coarse = 1};
        for (int32_t d = 0; d < plan->num_deltas; d++)
            kvc_rope_angles_from(&table, &cache->ropes[r], -plan->deltas[d],
                                 plan->angles +
                                     ((size_t)r * (size_t)plan->num_deltas + (size_t)d) * (size_t)plan->angles_stride);
        last = r;
    }
}

/* ---- making a plan ----------------------------------------------------------------------------------------------- */

/* Memory for the units that were counted, and for marks; 0 if there is none. */
static int take_scratch(kvc_maker *m) {
    const uint64_t num = (uint64_t)m->plan->num_units;
    kvc_batch *batch = m->plan->batch;
    m->units = &m->one_unit;
    m->order = &m->one_order;
    if (num == 1 && !batch->parents) return 1;
    const uint64_t units = kvc_add_array(&m->size, num * sizeof *m->units);
    const uint64_t order = kvc_add_array(&m->size, num * sizeof *m->order);
    const uint64_t spare = kvc_add_array(&m->size, num * sizeof *m->spare);
    const uint64_t marks = kvc_add_array(&m->size, batch->parents ? (uint64_t)batch->num_tokens : 0);
    kvc_lock(batch->cache);
    char *start = m->scratch = kvc_scratch_take(batch->cache, &m->size);
    kvc_unlock(batch->cache, KVC_OK);
    if (!start) return 0;
    m->units = (void *)(start + units);
    m->order = (void *)(start + order);
    m->spare = (void *)(start + spare);
    m->marks = (void *)(start + marks);
    if (batch->parents) memset(m->marks, 0, (size_t)batch->num_tokens);
    return 1;
}

static void give_scratch(kvc_maker *m) {
    kvc_cache *cache = m->plan->batch->cache;
    if (!m->scratch) return;
    kvc_lock(cache);
    kvc_scratch_give(cache, m->scratch, m->size);
    kvc_unlock(cache, KVC_OK);
}

/* Threads that are not there any more may have been making the plan, or running a task of it. */
static void after_fork(kvc_plan_link *link) {
    kvc_plan *plan = (kvc_plan *)link;
    if (!plan->is_made) return;
    atomic_flag_clear(&plan->round.lock);
    for (int32_t i = 0; i < plan->num_lanes; i++) atomic_flag_clear(&plan->lane_taken[i]);
    kvc_plan_reset(plan);
}

/* Blocks and sequences of the batch are its own, so only scratch needs the mutex. */
static kvc_plan *make_plan(kvc_maker *m) {
    kvc_plan *draft = m->plan;
    kvc_batch *batch = draft->batch;
    kvc_cut_batch(m);
    kvc_sort_units(m);
    size_angles(m);
    const totals t = lay_out_units(m);
    const int64_t most_tasks = t.parts * draft->num_kv_heads;
    draft->num_lanes = draft->args.num_threads < most_tasks ? draft->args.num_threads : (int32_t)most_tasks;
    draft->work = t.work;
    lay_out_lane(draft, &t);
    kvc_lock(batch->cache);
    kvc_plan *plan = settle(draft, &t);
    if (plan) {
        plan->link.next = batch->plans;
        plan->link.after_fork = after_fork;
        batch->plans = &plan->link;
        atomic_flag_clear(&plan->taken);
        atomic_flag_test_and_set(&plan->taken);
    }
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return NULL;
    m->plan = plan;
    find_angles(m);
    kvc_fill_units(m);
    kvc_find_jobs(m);
    atomic_flag_clear(&plan->round.lock);
    kvc_plan_reset(plan);
    kvc_lock(batch->cache);
    plan->is_made = 1;
    kvc_unlock(batch->cache, KVC_OK);
    return plan;
}

static kvc_status new_plan(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **out) {
    const kvc_layer *layer = &batch->cache->layers[args->layer];
    const int32_t group = batch->cache->group_of[args->layer];
    kvc_plan draft = {.batch = batch,
                      .args = *args,
                      .group = group,
                      .num_kv_heads = layer->num_kv_heads,
                      .k_dim = layer->k_dim,
                      .v_dim = layer->v_dim,
                      .num_cross_puts = kvc_num_cross_puts(batch, group),
                      .heads_per_kv = args->num_heads / layer->num_kv_heads};
    draft.lane.q_stride = (int32_t)kvc_align_up((size_t)layer->k_dim, KVC_CHUNK);
    draft.lane.acc_stride = (int32_t)kvc_align_up((size_t)layer->v_dim, KVC_LANES);
    kvc_maker m = {.plan = &draft};
    kvc_cut_batch(&m); /* counts the units */
    *out = take_scratch(&m) ? make_plan(&m) : NULL;
    give_scratch(&m);
    return *out ? KVC_OK : kvc_fail(KVC_ERR_NOMEM, "out of memory for the tasks of an attention");
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

kvc_status kvc_plan_check(const kvc_batch *batch, const kvc_plan_args *given, kvc_plan_args *args) {
    kvc_status status = KVC_READ(kvc_plan_args, args, given, "plan");
    if (status == KVC_OK) status = kvc_check_attention(batch->cache, args->layer);
    if (status == KVC_OK) status = kvc_check_range(batch, args->first, &args->num_tokens);
    if (status != KVC_OK) return status;
    const int32_t num_kv_heads = batch->cache->layers[args->layer].num_kv_heads;
    if (args->num_heads < 1 || args->num_heads % num_kv_heads || args->num_heads / num_kv_heads > 1 << 16)
        return kvc_fail(KVC_ERR_INVALID, "num_heads is %d: it must be a multiple of layer %d's num_kv_heads, %d",
                        args->num_heads, args->layer, num_kv_heads);
    if (args->num_threads < 0 || args->num_threads > KVC_MOST_THREADS)
        return kvc_fail(KVC_ERR_INVALID, "num_threads is %d: it must be between 1 and %d, or 0 for the cache's",
                        args->num_threads, KVC_MOST_THREADS);
    if (!args->num_threads) args->num_threads = kvc_cache_threads(batch->cache);
    return KVC_OK;
}

/* Whether a plan for these arguments would be the same. */
static int serves(const kvc_plan *plan, const kvc_plan_args *args) {
    const uint8_t *given = args->non_causal, *own = plan->args.non_causal;
    if (!given != !own || plan->args.num_tokens != args->num_tokens) return 0;
    if (own && memcmp(own, given, (size_t)args->num_tokens) != 0) return 0;
    const kvc_cache *cache = plan->batch->cache;
    const kvc_layer *layer = &cache->layers[args->layer];
    return plan->group == cache->group_of[args->layer] && plan->num_kv_heads == layer->num_kv_heads &&
           plan->k_dim == layer->k_dim && plan->v_dim == layer->v_dim && plan->args.first == args->first &&
           plan->args.num_heads == args->num_heads && plan->args.num_threads == args->num_threads &&
           kvc_plan_is_current(plan);
}

kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *given, kvc_plan **out) {
    kvc_plan_args args;
    if (!out) return kvc_fail(KVC_ERR_INVALID, "plan is NULL: it is where the plan goes");
    const kvc_status status = kvc_plan_check(batch, given, &args);
    if (status != KVC_OK) return status;
    kvc_lock(batch->cache);
    kvc_plan *plan = (kvc_plan *)batch->plans;
    while (plan && !(serves(plan, &args) && !atomic_flag_test_and_set(&plan->taken)))
        plan = (kvc_plan *)plan->link.next;
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return new_plan(batch, &args, out);
    *out = plan;
    return KVC_OK;
}

void kvc_plan_recount(kvc_plan *plan) {
    for (int32_t u = 0; u < plan->num_units; u++)
        for (int32_t h = 0; h < plan->num_kv_heads; h++)
            atomic_store_explicit(&plan->remaining[plan->units[u].first_counter + h], plan->units[u].num_parts,
                                  memory_order_relaxed);
    for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) {
        const kvc_job *job = kvc_job_of(plan, i);
        if (plan->round.states[i] != KVC_TASK_DONE) continue;
        for (int64_t m = job->first_member; m < job->first_member + job->num_members; m++)
            atomic_fetch_sub(&plan->remaining[plan->units[plan->members[m]].first_counter + kvc_head_of(plan, i)], 1);
    }
}

void kvc_plan_reset(kvc_plan *plan) {
    kvc_round *round = &plan->round;
    memset(round->states, KVC_TASK_OPEN, (size_t)kvc_plan_num_tasks(plan));
    round->num_running = round->num_done = 0;
    round->again = round->failed = 0;
    kvc_plan_recount(plan);
}

void kvc_plan_free(kvc_plan *plan) {
    if (!plan) return;
    kvc_plan_reset(plan); /* not all tasks may have been run */
    atomic_flag_clear(&plan->taken);
}

int64_t kvc_plan_num_tasks(const kvc_plan *plan) { return plan->num_jobs * plan->num_kv_heads; }
