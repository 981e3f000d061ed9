/* units.c: what a query sees, cut by length.
 *
 * The rule for units and parts.  It looks at a sequence's own lengths only, never at threads, blocks or the rest of the
 * batch, so that the same sequence is always added up in the same order:
 *   - up to KVC_STREAM_ROWS query rows per KV head are one unit, streamed: every stored row is read once for all of
 *     them.  The rows it can see are cut every KVC_PART_ROWS, however many they are: sequences that begin alike are cut
 *     alike;
 *   - more are tiled.  Up to KVC_TASK_QUERIES are one unit; more are cut into units of about KVC_TILE_QUERIES, or of
 *     half or a quarter as many where otherwise there were less than half of KVC_TILED_TASKS tasks.  The rows one can
 *     see are cut every KVC_PART_ROWS, or every 3/2, 2, 3, 4, 6 ... times as many, so that the sequence has at most
 *     KVC_TILED_TASKS tasks: enough for 64 threads to come out even, few enough that merging costs nothing, as the
 *     results of such parts are large.
 */
#include "attend/units.h"

#include <string.h>

static void find_reach(const kvc_plan *plan, const kvc_run_list *list, kvc_draft_unit *u) {
    const kvc_batch *batch = plan->batch;
    const kvc_policy *policy = &batch->cache->policies[plan->group];
    int32_t first = INT32_MAX, last = 0, all = policy->kind == KVC_CROSS;
    for (int32_t i = 0; i < u->unit.num_tokens; i++) {
        const int32_t token = batch->order[u->unit.first + i], position = batch->positions[token];
        if (position < first) first = position;
        if (position > last) last = position;
        all |= kvc_plan_sees_all(plan, token);
    }
    kvc_reach r = {kvc_policy_sinks(policy), kvc_policy_lowest(policy, first), all ? INT32_MAX : last + 1};
    if (r.sinks > r.end) r.sinks = r.end;
    if (r.sinks >= r.low) r.sinks = r.low = 0;
    u->stored = u->own = r;
    if (batch->parents) u->own.end = INT32_MAX;
    /* Bounds that hide nothing are dropped, so that units that see the same rows have the same reach. */
    if (list->min_position >= r.low) u->stored.sinks = u->stored.low = 0;
    if (list->max_position < r.end) u->stored.end = INT32_MAX;
}

static int shows_all(const kvc_reach *r) { return r->low == 0 && r->end == INT32_MAX; }

/* Rows of a run in reach. */
int32_t kvc_rows_in_reach(const kvc_reach *r, const kvc_run *run) {
    if (shows_all(r)) return run->count;
    return kvc_run_part(run, 0, r->sinks).count + kvc_run_part(run, r->low, r->end).count;
}

/* Which of the plan's deltas it is, counted from 1; 0 for none. */
static int32_t find_turn(const kvc_plan *plan, int32_t delta) {
    if (delta == 0) return 0;
    int32_t begin = 0, end = plan->num_deltas;
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        if (plan->deltas[middle] < delta)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin + 1;
}

/* Adds the part of a run at [begin, end) to the pieces; only counts it where there is no array yet.  token: of the
 * run's first row, -1 for stored ones. */
static void add_piece(kvc_maker *m, const kvc_run *run, int32_t token, int32_t begin, int32_t end) {
    const kvc_run part = kvc_run_part(run, begin, end);
    if (!part.count) return;
    if (m->plan->pieces)
        m->plan->pieces[m->num_pieces] = (kvc_piece){.rows = part.block ? part.block->rows : NULL,
                                                     .slot = part.slot,
                                                     .count = part.count,
                                                     .position = part.position,
                                                     .turn = find_turn(m->plan, part.delta),
                                                     .token = token < 0 ? -1 : token + part.position - run->position};
    m->num_pieces++;
    m->num_rows += part.count;
}

static void add_run(kvc_maker *m, const kvc_reach *r, const kvc_run *run, int32_t token) {
    if (r->sinks) add_piece(m, run, token, 0, r->sinks);
    add_piece(m, run, token, r->low, r->end);
}

/* The batch's own rows that tokens of the unit descend from, and no others: they may not have been put. */
static void add_ancestors(kvc_maker *m, const kvc_draft_unit *u, const kvc_pending *pending) {
    const kvc_batch *batch = m->plan->batch;
    const kvc_batch_sequence *member = &batch->sequences[u->unit.sequence];
    const int32_t *order = batch->order;
    int32_t token = member->first; /* of the run's first row */
    for (int32_t i = u->unit.first; i < u->unit.first + u->unit.num_tokens; i++)
        for (int32_t t = order[i]; t >= 0 && !m->marks[t]; t = batch->parents[t]) m->marks[t] = 1;
    for (int32_t r = 0; r < pending->num; token += pending->runs[r++].count)
        for (int32_t from = 0, to; from < pending->runs[r].count; from = to + 1) {
            kvc_run part = pending->runs[r];
            for (to = from; to < part.count && m->marks[order[token + to]];) to++;
            part.slot += from;
            part.position += from;
            part.count = to - from;
            if (part.count) add_run(m, &u->own, &part, token + from);
        }
    for (int32_t i = 0; i < member->num_tokens; i++) m->marks[order[member->first + i]] = 0;
}

/* The batch's own rows, which come after the stored ones.  In a cross-attention layer they replace them. */
static void add_own(kvc_maker *m, const kvc_draft_unit *u) {
    const kvc_batch *batch = m->plan->batch;
    const int32_t g = m->plan->group, is_cross = g >= batch->cache->num_token_groups;
    const kvc_pending *pending =
        is_cross ? kvc_pending_of(batch, g, u->unit.sequence) : kvc_own_pending(batch, g, u->unit.sequence);
    if (batch->parents && !is_cross) {
        add_ancestors(m, u, pending);
        return;
    }
    int32_t token = batch->sequences[u->unit.sequence].first;
    for (int32_t i = 0; i < pending->num; token += pending->runs[i++].count)
        add_run(m, &u->own, &pending->runs[i], is_cross ? -1 : token);
}

/* Which rows a unit goes over, and how many that are. */
static void find_rows(kvc_maker *m, kvc_draft_unit *u) {
    const kvc_batch *batch = m->plan->batch;
    const int32_t g = m->plan->group;
    const kvc_run_list *list = &batch->sequences[u->unit.sequence].sequence->runs[g];
    find_reach(m->plan, list, u);
    m->num_pieces = m->num_rows = 0;
    add_own(m, u);
    u->own_pieces = m->num_pieces;
    u->unit.num_rows = m->num_rows;
    u->unit.is_loose = g < batch->cache->num_token_groups && batch->sequences[u->unit.sequence].is_loose;
    if (g >= batch->cache->num_token_groups && m->num_rows) return;
    u->runs = kvc_runs_begin(list);
    u->num_runs = list->num;
    if (shows_all(&u->stored))
        u->stored_rows = list->num_rows;
    else
        for (int32_t i = 0; i < u->num_runs; i++) u->stored_rows += kvc_rows_in_reach(&u->stored, &u->runs[i]);
    u->unit.num_rows += u->stored_rows;
}

static int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

/* num_units: of its sequence. */
static void cut_rows(const kvc_plan *plan, int32_t num_units, kvc_unit *unit) {
    const int64_t most = KVC_TILED_TASKS / ((int64_t)plan->num_kv_heads * num_units);
    unit->part_rows = KVC_PART_ROWS;
    while (unit->tiled && unit->part_rows < unit->num_rows && divide_up(unit->num_rows, unit->part_rows) > most)
        unit->part_rows += unit->part_rows / (unit->part_rows % 3 ? 2 : 3); /* 1, 3/2, 2, 3, 4, 6, 8 ... */
    unit->num_parts = (int32_t)divide_up(unit->num_rows, unit->part_rows);
    if (!unit->num_parts) unit->num_parts = 1; /* nothing to see: somebody must write the zeros */
}

/* Query tokens of a unit, of a sequence that has num_tokens of them and not more rows than num_rows. */
static int32_t unit_tokens(const kvc_plan *plan, int32_t num_tokens, int64_t num_rows) {
    const int64_t num_q = (int64_t)num_tokens * plan->heads_per_kv;
    if (num_q <= KVC_TASK_QUERIES) return num_tokens;
    const int64_t tasks = divide_up(num_rows, KVC_PART_ROWS) * plan->num_kv_heads; /* of each unit, at most */
    int32_t q = KVC_TILE_QUERIES;
    while (q > KVC_TILE_QUERIES / 4 && divide_up(num_q, q) * tasks < KVC_TILED_TASKS / 2) q /= 2;
    return q > plan->heads_per_kv ? q / plan->heads_per_kv : 1;
}

/* The units of the query tokens order[first .. end) of one sequence. */
static void cut_queries(kvc_maker *m, int32_t sequence, int32_t first, int32_t end) {
    kvc_plan *plan = m->plan;
    const int32_t last = plan->batch->positions[plan->batch->order[end - 1]];
    const int32_t tokens = unit_tokens(plan, end - first, (int64_t)last + 1);
    const int32_t num_units = (int32_t)divide_up(end - first, tokens);
    for (int32_t at = first; m->units && at < end; at += tokens) {
        kvc_draft_unit *u = &m->units[plan->num_units + (at - first) / tokens];
        *u = (kvc_draft_unit){.unit = {.sequence = sequence,
                                       .first = at,
                                       .num_tokens = end - at < tokens ? end - at : tokens,
                                       .tiled = (int64_t)(end - first) * plan->heads_per_kv > KVC_STREAM_ROWS},
                              .is_whole = num_units == 1};
        find_rows(m, u);
        cut_rows(plan, num_units, &u->unit);
    }
    plan->num_units += num_units;
}

/* Counts the units of the plan, and lists them where there is an array. */
void kvc_cut_batch(kvc_maker *m) {
    const kvc_batch *batch = m->plan->batch;
    const int32_t begin = m->plan->args.first, end = begin + m->plan->args.num_tokens;
    m->plan->num_units = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        /* Tokens of a sequence are listed in rising order, so those of the range are side by side. */
        const kvc_batch_sequence *member = &batch->sequences[s];
        int32_t first = member->first, last = member->first + member->num_tokens;
        while (first < last && batch->order[first] < begin) first++;
        while (first < last && batch->order[last - 1] >= end) last--;
        if (first < last) cut_queries(m, s, first, last);
    }
}

/* Lists the pieces of a unit from its first own part on, and where each part begins. */
static void fill_unit(kvc_maker *m, const kvc_neighbour *n) {
    kvc_plan *plan = m->plan;
    const kvc_draft_unit *u = &m->units[n->unit];
    kvc_unit *unit = &plan->units[n->unit];
    kvc_start *starts = plan->starts + unit->first_start;
    int64_t piece = m->num_pieces, before = u->rows_before; /* rows in the pieces before this one */
    if (u->first_part)
        memcpy(starts, plan->starts + plan->units[n[-1].unit].first_start, (size_t)u->first_part * sizeof *starts);
    for (int32_t i = u->first_run; i < u->num_runs; i++) add_run(m, &u->stored, &u->runs[i], -1);
    unit->first_own_piece = m->num_pieces;
    add_own(m, u);
    unit->end_piece = m->num_pieces;
    for (int32_t p = u->first_part; p < unit->num_parts; p++) {
        const int64_t row = p * unit->part_rows;
        while (row && before + plan->pieces[piece].count <= row) before += plan->pieces[piece++].count;
        starts[p] = (kvc_start){piece, (int32_t)(row - before)};
    }
}

void kvc_fill_units(kvc_maker *m) {
    const kvc_plan *plan = m->plan;
    m->num_pieces = 0;
    for (int32_t i = 0; i < plan->num_units; i++) {
        kvc_unit *unit = &plan->units[i];
        *unit = m->units[i].unit;
    }
    for (int32_t i = 0; i < plan->num_units; i++) fill_unit(m, &m->order[i]);
}
