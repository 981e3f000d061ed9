/* plan.c: cuts a batch's attention into tasks.
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
 *
 * The rule for tasks.  Who works off what, and when, changes no bit, so it may look at everything:
 *   - units of a whole sequence whose parts begin with the same rows, as those of forks do, are one task, which reads
 *     these rows once and then goes on with the rest of each.  It has at most KVC_TASK_QUERIES query rows if it is
 *     streamed, KVC_TILE_QUERIES if it is tiled, and at most one of SHARES shares of what a thread has to do if it is
 *     done by as many as were announced;
 *   - the largest tasks come first, so that little is left to do when the last one is begun; KV head by KV head, as
 *     units of a prompt then find its rows in a cache, but where there are less than SHARES jobs for each thread.
 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { SHARES = 4 };

/* ---- units ------------------------------------------------------------------------------------------------------- */

/* Sizes of the plan's arrays, added up before they are there. */
typedef struct totals {
    int64_t units, pieces, parts, counters;
    int64_t whole, whole_q; /* units of a whole sequence, and their query rows */
    uint64_t partials;
    int32_t max_q, tiled;
    double work;
} totals;

static void find_reach(const kvc_plan *plan, kvc_unit *unit) {
    const kvc_batch *batch = plan->batch;
    const kvc_policy *policy = &batch->cache->policies[plan->group];
    int32_t first = INT32_MAX, last = 0, all = policy->kind == KVC_CROSS;
    for (int32_t i = 0; i < unit->num_tokens; i++) {
        const int32_t token = batch->order[unit->first + i], position = batch->positions[token];
        if (position < first) first = position;
        if (position > last) last = position;
        all |= kvc_plan_sees_all(plan, token);
    }
    unit->end = all ? INT32_MAX : last + 1;
    unit->batch_end = batch->parents ? INT32_MAX : unit->end;
    unit->low = kvc_policy_lowest(policy, first);
    unit->sinks = kvc_policy_sinks(policy);
    if (unit->sinks > unit->end) unit->sinks = unit->end;
    if (unit->sinks >= unit->low) unit->sinks = unit->low = 0;
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

/* Adds the part of a run at [begin, end) to the unit's pieces; only counts them where there is no array yet.  token: of
 * the run's first row, -1 for stored ones. */
static void add_piece(const kvc_plan *plan, const kvc_run *run, int32_t token, int32_t begin, int32_t end, int64_t *num,
                      kvc_unit *unit) {
    const kvc_run part = kvc_run_part(run, begin, end);
    if (!part.count) return;
    if (plan->pieces)
        plan->pieces[*num] = (kvc_piece){.rows = part.block->rows,
                                         .slot = part.slot,
                                         .count = part.count,
                                         .position = part.position,
                                         .turn = find_turn(plan, part.delta),
                                         .token = token < 0 ? -1 : token + part.position - run->position};
    ++*num;
    unit->num_rows += part.count;
}

/* token: of the first run's first row, -1 for stored ones. */
static void add_runs(const kvc_plan *plan, const kvc_run *runs, int32_t num_runs, int32_t token, int64_t *num,
                     kvc_unit *unit) {
    const int32_t end = token < 0 ? unit->end : unit->batch_end;
    for (int32_t i = 0; i < num_runs; i++) {
        if (unit->sinks) add_piece(plan, &runs[i], token, 0, unit->sinks, num, unit);
        add_piece(plan, &runs[i], token, unit->low, end, num, unit);
        if (token >= 0) token += runs[i].count;
    }
}

/* The batch's own rows that tokens of the unit descend from, and no others: they may not have been put. */
static void add_ancestors(const kvc_plan *plan, const kvc_pending *pending, int64_t *num, kvc_unit *unit) {
    const kvc_batch *batch = plan->batch;
    const int32_t *order = batch->order;
    int32_t token = batch->sequences[unit->sequence].first; /* of the run's first row */
    memset(plan->marks, 0, (size_t)batch->num_tokens);
    for (int32_t i = unit->first; i < unit->first + unit->num_tokens; i++)
        for (int32_t t = order[i]; t >= 0 && !plan->marks[t]; t = batch->parents[t]) plan->marks[t] = 1;
    for (int32_t r = 0; r < pending->num; token += pending->runs[r++].count)
        for (int32_t from = 0, to; from < pending->runs[r].count; from = to + 1) {
            kvc_run part = pending->runs[r];
            for (to = from; to < part.count && plan->marks[order[token + to]];) to++;
            part.slot += from;
            part.position += from;
            part.count = to - from;
            if (part.count) add_runs(plan, &part, 1, token + from, num, unit);
        }
}

/* Stored rows first, then the batch's own: the order of arrival.  In a cross-attention layer the latter replace the
 * former. */
static void find_pieces(const kvc_plan *plan, kvc_unit *unit, int64_t *num) {
    const kvc_batch *batch = plan->batch;
    const kvc_batch_sequence *member = &batch->sequences[unit->sequence];
    const kvc_rows *rows = &member->sequence->rows[plan->group];
    const kvc_pending *pending = kvc_pending_of(batch, plan->group, unit->sequence);
    const int is_cross = batch->cache->policies[plan->group].kind == KVC_CROSS;
    find_reach(plan, unit);
    unit->num_rows = 0;
    if (!(is_cross && pending->num)) add_runs(plan, kvc_rows_begin(rows), rows->num, -1, num, unit);
    unit->first_own_piece = *num;
    if (batch->parents && !is_cross)
        add_ancestors(plan, pending, num, unit);
    else
        add_runs(plan, pending->runs, pending->num, is_cross ? -1 : member->first, num, unit);
    unit->end_piece = *num;
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
    const int32_t num_q = kvc_num_q(plan, unit);
    unit->first_piece = t->pieces;
    unit->first_start = t->parts;
    unit->first_counter = t->counters;
    unit->partials = t->partials;
    find_pieces(plan, unit, &t->pieces);
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
    t->parts += unit->num_parts;
    t->counters += plan->num_kv_heads;
    t->whole += unit->is_whole;
    t->whole_q += unit->is_whole ? num_q : 0;
    if (unit->num_parts > 1) t->partials += (uint64_t)tasks * kvc_partial_size(num_q, plan->lane.acc_stride);
    if (num_q > t->max_q) t->max_q = num_q;
    t->tiled |= unit->tiled;
    t->work += (double)unit->num_rows * num_q * plan->num_kv_heads * (plan->k_dim + plan->v_dim);
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
static void cut_queries(kvc_plan *plan, int32_t sequence, int32_t first, int32_t end, totals *t) {
    const int32_t last = plan->batch->positions[plan->batch->order[end - 1]];
    const int32_t tokens = unit_tokens(plan, end - first, (int64_t)last + 1);
    const int32_t tiled = (int64_t)(end - first) * plan->heads_per_kv > KVC_STREAM_ROWS;
    const int32_t num_units = (int32_t)divide_up(end - first, tokens);
    for (int32_t at = first; at < end; at += tokens) {
        kvc_unit unit = {.sequence = sequence,
                         .first = at,
                         .num_tokens = end - at < tokens ? end - at : tokens,
                         .tiled = tiled,
                         .is_whole = num_units == 1};
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

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

/* Compares two parts row by row; to be found out besides: how many rows at their beginning are the same, in whole
 * tiles.  A tile ends with its part, and where the next key is off by something else. */
static int compare_parts(kvc_candidate a, kvc_candidate b, int64_t *shared) {
    int64_t row = 0, stretch = 0; /* rows compared; and where the last stretch of the same turn began */
    *shared = 0;
    if (a.tiled != b.tiled) return a.tiled - b.tiled;
    for (int32_t turn = -1; row < a.rows && row < b.rows;) {
        const kvc_piece *x = a.piece, *y = b.piece;
        const uint8_t *const rows[2] = {x->rows, y->rows};
        const int32_t at[2][3] = {{x->slot + a.offset, x->position + a.offset, x->turn},
                                  {y->slot + b.offset, y->position + b.offset, y->turn}};
        int order = memcmp(rows, rows + 1, sizeof *rows);
        if (!order) order = memcmp(at[0], at[1], sizeof at[0]);
        if (order) {
            *shared = stretch + (row - stretch) / KVC_TILE * KVC_TILE;
            return order;
        }
        if (x->turn != turn) stretch = row, turn = x->turn;
        int64_t count = x->count - a.offset < y->count - b.offset ? x->count - a.offset : y->count - b.offset;
        row += count;
        if ((a.offset += (int32_t)count) == x->count) a.piece++, a.offset = 0;
        if ((b.offset += (int32_t)count) == y->count) b.piece++, b.offset = 0;
    }
    if (row > a.rows) row = a.rows;
    if (row > b.rows) row = b.rows;
    *shared = a.rows == b.rows ? row : stretch + (row - stretch) / KVC_TILE * KVC_TILE;
    return (a.rows > b.rows) - (a.rows < b.rows);
}

static int by_rows(const void *a, const void *b) {
    const kvc_candidate *x = a, *y = b;
    int64_t shared;
    const int order = compare_parts(*x, *y, &shared);
    return order ? order : (x->unit > y->unit) - (x->unit < y->unit);
}

/* One part of these candidates' units, of which so many rows are read once for all. */
static void add_job(kvc_plan *plan, int32_t part, const kvc_candidate *c, int32_t num, int64_t shared) {
    const kvc_job *last = plan->num_jobs ? &plan->jobs[plan->num_jobs - 1] : NULL;
    kvc_job job = {.first_member = last ? last->first_member + last->num_members : 0,
                   .num_members = num,
                   .part = part,
                   .shared = shared,
                   .rows = shared};
    for (int32_t m = 0; m < num; m++) {
        const kvc_unit *unit = &plan->units[c[m].unit];
        const int64_t rows = kvc_part_rows(unit, part);
        job.rows += rows - shared;
        job.work += rows * kvc_num_q(plan, unit);
        plan->members[job.first_member + m] = c[m].unit;
    }
    plan->jobs[plan->num_jobs++] = job;
}

/* The parts of a unit from one on, each by itself. */
static void add_jobs(kvc_plan *plan, int32_t unit, int32_t part) {
    const kvc_candidate alone = {.unit = unit};
    for (; part < plan->units[unit].num_parts; part++)
        add_job(plan, part, &alone, 1, kvc_part_rows(&plan->units[unit], part));
}

/* How many candidates from this one on, of `num`, are best one job.  Another one joins if then less is read than if it
 * and the next begin a job of their own. */
static int32_t group_of(const kvc_plan *plan, const kvc_candidate *c, int32_t num, int64_t most_work, int64_t *shared) {
    const int64_t most_q = c->tiled ? KVC_TILE_QUERIES : KVC_TASK_QUERIES;
    int32_t n = 1;
    int64_t q = kvc_num_q(plan, &plan->units[c->unit]), work = q * c->rows;
    *shared = c->rows;
    for (; n < num && c[n].shared; n++) {
        const int64_t own_q = kvc_num_q(plan, &plan->units[c[n].unit]);
        q += own_q;
        work += own_q * c[n].rows;
        if (q > most_q || work > most_work) break;
        const int64_t with = *shared < c[n].shared ? *shared : c[n].shared, next = n + 1 < num ? c[n + 1].shared : 0;
        const int64_t with_next = with < next ? with : next;
        const int64_t joined = with * n > with_next * (n + 1) ? with * n : with_next * (n + 1);
        if (joined < *shared * (n - 1) + next) break; /* rows that are not read again */
        *shared = with;
    }
    return n;
}

/* Jobs for one part of the candidates, sorted so that those with most in common stand side by side.  Who shares all of
 * it with a neighbour is a candidate for the next part; returns how many. */
static int32_t add_shared_jobs(kvc_plan *plan, int32_t part, int32_t num, int64_t most_work) {
    kvc_candidate *c = plan->candidates;
    int32_t kept = 0;
    int64_t shared;
    for (int32_t i = 0; i < num; i++) {
        const kvc_unit *unit = &plan->units[c[i].unit];
        const kvc_start *start = &plan->starts[unit->first_start + part];
        c[i] = (kvc_candidate){.piece = plan->pieces + unit->first_piece + start->piece,
                               .offset = start->offset,
                               .unit = c[i].unit,
                               .tiled = unit->tiled,
                               .rows = kvc_part_rows(unit, part)};
    }
    qsort(c, (size_t)num, sizeof *c, by_rows);
    for (int32_t i = 1; i < num; i++) compare_parts(c[i - 1], c[i], &c[i].shared);
    for (int32_t i = 0, n; i < num; i += n) {
        n = group_of(plan, c + i, num - i, most_work, &shared);
        add_job(plan, part, c + i, n, shared);
    }
    for (int32_t i = 0; i < num; i++) {
        const kvc_unit *unit = &plan->units[c[i].unit];
        const int is_shared = c[i].shared == unit->part_rows || (i + 1 < num && c[i + 1].shared == unit->part_rows);
        if (is_shared && part + 1 < unit->num_parts)
            c[kept++].unit = c[i].unit;
        else
            add_jobs(plan, c[i].unit, part + 1);
    }
    return kept;
}

static int by_work(const void *a, const void *b) {
    const kvc_job *x = a, *y = b;
    return x->work != y->work ? (x->work < y->work) - (x->work > y->work)
                              : (x->first_member > y->first_member) - (x->first_member < y->first_member);
}

/* All that are to be done, the largest first. */
static void find_jobs(kvc_plan *plan, const totals *t) {
    int64_t work = 0, most_work = INT64_MAX;
    int32_t num = 0, sorted = 1;
    plan->num_jobs = 0;
    for (int32_t u = 0; u < plan->num_units; u++) {
        work += plan->units[u].num_rows * kvc_num_q(plan, &plan->units[u]);
        if (plan->units[u].is_whole && t->whole > 1)
            plan->candidates[num++].unit = u;
        else
            add_jobs(plan, u, 0);
    }
    if (plan->args.num_threads > 1) most_work = work * plan->num_kv_heads / (SHARES * (int64_t)plan->args.num_threads);
    for (int32_t part = 0; num; part++) num = add_shared_jobs(plan, part, num, most_work);
    for (int64_t i = 1; i < plan->num_jobs; i++) sorted &= plan->jobs[i - 1].work >= plan->jobs[i].work;
    if (!sorted) qsort(plan->jobs, (size_t)plan->num_jobs, sizeof *plan->jobs, by_work);
    plan->by_head = plan->args.num_threads == 1 || plan->num_jobs >= SHARES * (int64_t)plan->args.num_threads;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

uint64_t kvc_partial_size(int32_t num_q, int32_t acc_stride) {
    return kvc_align_up(2 * (uint64_t)num_q, KVC_LANES) + (uint64_t)num_q * (uint64_t)acc_stride;
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
}

/* The plan on the stack, moved to scratch that has room for all its arrays; NULL if there is none. */
static kvc_plan *settle(const kvc_plan *draft, const totals *t) {
    uint64_t size = sizeof(kvc_plan);
    const uint64_t units = kvc_add_array(&size, (uint64_t)t->units * sizeof(kvc_unit));
    const uint64_t pieces = kvc_add_array(&size, (uint64_t)t->pieces * sizeof(kvc_piece));
    const uint64_t starts = kvc_add_array(&size, (uint64_t)t->parts * sizeof(kvc_start));
    const uint64_t jobs = kvc_add_array(&size, (uint64_t)t->parts * sizeof(kvc_job)); /* at most */
    const uint64_t members = kvc_add_array(&size, (uint64_t)t->parts * sizeof(int32_t));
    const uint64_t candidates = kvc_add_array(&size, (uint64_t)t->whole * sizeof(kvc_candidate));
    const uint64_t counters = kvc_add_array(&size, (uint64_t)t->counters * sizeof(kvc_counter));
    const uint64_t flags = kvc_add_array(&size, (uint64_t)draft->num_lanes * sizeof(atomic_flag));
    const uint64_t deltas = kvc_add_array(&size, (uint64_t)draft->num_deltas * sizeof(int32_t));
    const uint64_t angles =
        kvc_add_array(&size, (uint64_t)draft->batch->cache->num_ropes * (uint64_t)draft->num_deltas *
                                 (uint64_t)draft->angles_stride * sizeof(float));
    const uint64_t non_causal = kvc_add_array(&size, draft->args.non_causal ? (uint64_t)draft->args.num_tokens : 0);
    const uint64_t partials = kvc_add_array(&size, t->partials * sizeof(float));
    const uint64_t lanes = kvc_add_array(&size, (uint64_t)draft->num_lanes * draft->lane.size * sizeof(float));
    char *start = kvc_scratch_take(draft->batch->cache, &size);
    if (!start) return NULL;
    kvc_plan *plan = memcpy(start, draft, sizeof *draft);
    plan->size = size;
    plan->units = (void *)(start + units);
    plan->pieces = (void *)(start + pieces);
    plan->starts = (void *)(start + starts);
    plan->jobs = (void *)(start + jobs);
    plan->members = (void *)(start + members);
    plan->candidates = (void *)(start + candidates);
    plan->counters = (void *)(start + counters);
    plan->lane_taken = (void *)(start + flags);
    plan->deltas = (void *)(start + deltas);
    plan->angles = (void *)(start + angles);
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

/* Calls visit for each run of the batch's sequences that is off, but for those like the one before. */
static void visit_deltas(kvc_plan *plan, void (*visit)(kvc_plan *plan, int32_t delta)) {
    int32_t last = 0;
    for (int32_t s = 0; s < plan->batch->num_sequences; s++) {
        const kvc_rows *rows = &plan->batch->sequences[s].sequence->rows[plan->group];
        for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++) {
            if (run->delta && run->delta != last) visit(plan, run->delta);
            last = run->delta;
        }
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
static void find_deltas(kvc_plan *plan) {
    const int32_t num = plan->num_deltas;
    plan->num_deltas = 0;
    visit_deltas(plan, add_delta);
    qsort(plan->deltas, (size_t)num, sizeof *plan->deltas, by_value);
    plan->num_deltas = 0;
    for (int32_t i = 0; i < num; i++)
        if (plan->num_deltas == 0 || plan->deltas[i] != plan->deltas[plan->num_deltas - 1])
            plan->deltas[plan->num_deltas++] = plan->deltas[i];
}

/* At most so many deltas, and so long angles. */
static void size_angles(kvc_plan *plan) {
    const kvc_cache *cache = plan->batch->cache;
    visit_deltas(plan, count_delta);
    for (int32_t r = 0; r < cache->num_ropes; r++)
        if ((int32_t)kvc_rope_angles_size(&cache->ropes[r]) > plan->angles_stride)
            plan->angles_stride = (int32_t)kvc_rope_angles_size(&cache->ropes[r]);
}

/* Queries are turned by -delta: what a key that is off by delta lacks, since q . R(d) k = R(-d) q . k. */
static void find_angles(kvc_plan *plan) {
    const kvc_cache *cache = plan->batch->cache;
    if (plan->num_deltas) find_deltas(plan);
    for (int32_t layer = 0, last = -1; plan->num_deltas && layer < cache->num_layers; layer++) {
        const int32_t r = cache->rope_of[layer];
        if (cache->group_of[layer] != plan->group || r < 0 || r == last) continue;
        for (int32_t d = 0; d < plan->num_deltas; d++)
            kvc_rope_angles(&cache->ropes[r], -plan->deltas[d],
                            plan->angles +
                                ((size_t)r * (size_t)plan->num_deltas + (size_t)d) * (size_t)plan->angles_stride);
        last = r;
    }
}

/* Scratch that is needed while a plan is made; 0 where there is no memory. */
static int take_marks(kvc_plan *draft, uint64_t *size) {
    if (!draft->batch->parents) return 1;
    *size = (uint64_t)draft->batch->num_tokens;
    kvc_lock(draft->batch->cache);
    draft->marks = kvc_scratch_take(draft->batch->cache, size);
    kvc_unlock(draft->batch->cache, KVC_OK);
    return draft->marks != NULL;
}

/* Blocks and sequences of the batch are its own, so only scratch needs the mutex. */
static kvc_plan *make_plan(kvc_plan *draft, int32_t num_threads) {
    kvc_batch *batch = draft->batch;
    size_angles(draft);
    const totals t = cut_batch(draft);
    draft->num_units = (int32_t)t.units;
    const int64_t most_tasks = t.parts * draft->num_kv_heads;
    draft->num_lanes = num_threads < most_tasks ? num_threads : (int32_t)most_tasks;
    draft->work = t.work;
    lay_out_lane(draft, &t);
    kvc_lock(batch->cache);
    kvc_plan *plan = settle(draft, &t);
    if (plan) {
        plan->next = batch->plans;
        batch->plans = plan;
        atomic_flag_clear(&plan->taken);
        atomic_flag_test_and_set(&plan->taken);
    }
    kvc_unlock(batch->cache, KVC_OK);
    if (!plan) return NULL;
    find_angles(plan);
    cut_batch(plan);
    find_jobs(plan, &t);
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
    uint64_t marks_size = 0;
    *out = take_marks(&draft, &marks_size) ? make_plan(&draft, args->num_threads) : NULL;
    if (draft.marks) {
        kvc_lock(batch->cache);
        kvc_scratch_give(batch->cache, draft.marks, marks_size);
        kvc_unlock(batch->cache, KVC_OK);
    }
    return *out ? KVC_OK : kvc_fail(KVC_ERR_NOMEM, "out of memory for the tasks of an attention");
}

void kvc_plans_free(kvc_batch *batch) {
    while (batch->plans) {
        kvc_plan *plan = batch->plans;
        batch->plans = plan->next;
        kvc_scratch_give(batch->cache, plan, plan->size);
    }
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

int64_t kvc_plan_num_tasks(const kvc_plan *plan) { return plan->num_jobs * plan->num_kv_heads; }
