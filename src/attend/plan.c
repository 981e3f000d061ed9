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
 *
 * How.  Units are counted and listed (cut_batch); those of whole sequences are sorted by their stored runs, each pair
 * of neighbours knowing how much they have in common (sort_units), which costs no more than to go over what is the same
 * once; then memory is taken (settle), pieces are listed, of a part that neighbours have in common once (fill_units),
 * and neighbours become jobs, part by part (find_jobs).
 */
#include <stdlib.h>
#include <string.h>

#include "attend/attention.h"

enum { SHARES = 4 };

/* ---- units ------------------------------------------------------------------------------------------------------- */

/* Positions [0, sinks) and [low, end): some query of a unit sees them, none sees others. */
typedef struct reach {
    int32_t sinks, low, end;
} reach;

/* A unit, while its plan is made. */
typedef struct draft_unit {
    kvc_unit unit;
    reach stored, own;   /* of stored rows, and of the batch's own */
    const kvc_run *runs; /* [num_runs] stored ones */
    int32_t num_runs;
    int32_t is_whole;    /* all query tokens of its sequence */
    int64_t stored_rows; /* in reach */
    int64_t own_pieces;  /* of the batch's own rows */
    /* Parts below first_part are those of the unit before it in the order of rows.  The others begin in first_run,
     * before which it has rows_before rows in reach. */
    int32_t first_part, first_run;
    int64_t rows_before;
} draft_unit;

/* A unit's place in the order of rows, and what it has in common with the unit before it there. */
typedef struct neighbour {
    int32_t unit;
    int32_t same_runs; /* that they begin with; -1: they are not worked off alike */
    int64_t rows;      /* in reach, at the beginning */
    int64_t tiled;     /* of these, up to where the last whole tile ends */
    int64_t shared;    /* in the part that is made jobs of */
} neighbour;

/* What a plan is made with.  Units come first; then it is known how much memory the plan needs. */
typedef struct maker {
    kvc_plan *plan;
    draft_unit *units;            /* [plan->num_units]; NULL: they are only counted */
    neighbour *order, *spare;     /* [plan->num_units] */
    uint8_t *marks;               /* [batch->num_tokens], all 0, for a batch with parents */
    int32_t num_whole;            /* units of a whole sequence: the first of `order` */
    int64_t num_pieces, num_rows; /* added so far */
    void *scratch;                /* that these are in; NULL where there is one unit, without marks */
    uint64_t size;
    draft_unit one_unit;
    neighbour one_order;
} maker;

static void find_reach(const kvc_plan *plan, const kvc_run_list *list, draft_unit *u) {
    const kvc_batch *batch = plan->batch;
    const kvc_policy *policy = &batch->cache->policies[plan->group];
    int32_t first = INT32_MAX, last = 0, all = policy->kind == KVC_CROSS;
    for (int32_t i = 0; i < u->unit.num_tokens; i++) {
        const int32_t token = batch->order[u->unit.first + i], position = batch->positions[token];
        if (position < first) first = position;
        if (position > last) last = position;
        all |= kvc_plan_sees_all(plan, token);
    }
    reach r = {kvc_policy_sinks(policy), kvc_policy_lowest(policy, first), all ? INT32_MAX : last + 1};
    if (r.sinks > r.end) r.sinks = r.end;
    if (r.sinks >= r.low) r.sinks = r.low = 0;
    u->stored = u->own = r;
    if (batch->parents) u->own.end = INT32_MAX;
    /* Bounds that hide nothing are dropped, so that units that see the same rows have the same reach. */
    if (list->min_position >= r.low) u->stored.sinks = u->stored.low = 0;
    if (list->max_position < r.end) u->stored.end = INT32_MAX;
}

static int shows_all(const reach *r) { return r->low == 0 && r->end == INT32_MAX; }

/* Rows of a run in reach. */
static int32_t rows_in(const reach *r, const kvc_run *run) {
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
static void add_piece(maker *m, const kvc_run *run, int32_t token, int32_t begin, int32_t end) {
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

static void add_run(maker *m, const reach *r, const kvc_run *run, int32_t token) {
    if (r->sinks) add_piece(m, run, token, 0, r->sinks);
    add_piece(m, run, token, r->low, r->end);
}

/* The batch's own rows that tokens of the unit descend from, and no others: they may not have been put. */
static void add_ancestors(maker *m, const draft_unit *u, const kvc_pending *pending) {
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
static void add_own(maker *m, const draft_unit *u) {
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
static void find_rows(maker *m, draft_unit *u) {
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
        for (int32_t i = 0; i < u->num_runs; i++) u->stored_rows += rows_in(&u->stored, &u->runs[i]);
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
static void cut_queries(maker *m, int32_t sequence, int32_t first, int32_t end) {
    kvc_plan *plan = m->plan;
    const int32_t last = plan->batch->positions[plan->batch->order[end - 1]];
    const int32_t tokens = unit_tokens(plan, end - first, (int64_t)last + 1);
    const int32_t num_units = (int32_t)divide_up(end - first, tokens);
    for (int32_t at = first; m->units && at < end; at += tokens) {
        draft_unit *u = &m->units[plan->num_units + (at - first) / tokens];
        *u = (draft_unit){.unit = {.sequence = sequence,
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
static void cut_batch(maker *m) {
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

/* ---- the order of rows ------------------------------------------------------------------------------------------- */

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

/* Orders runs by where they begin. */
static int compare_starts(const kvc_run *a, const kvc_run *b) {
    const int64_t x[] = {(int64_t)(intptr_t)a->block, a->slot, a->position, a->delta},
                  y[] = {(int64_t)(intptr_t)b->block, b->slot, b->position, b->delta};
    int order = 0;
    for (int i = 0; !order && i < 4; i++) order = compare(x[i], y[i]);
    return order;
}

/* Orders units by what must be alike before they can share rows. */
static int compare_kinds(const draft_unit *a, const draft_unit *b) {
    const int64_t x[] = {a->unit.tiled, a->unit.part_rows, a->stored.sinks, a->stored.low, a->stored.end},
                  y[] = {b->unit.tiled, b->unit.part_rows, b->stored.sinks, b->stored.low, b->stored.end};
    int order = 0;
    for (int i = 0; !order && i < 5; i++) order = compare(x[i], y[i]);
    return order;
}

/* Orders units by their stored rows.  *same: how many runs are known to be the same, -1 for not even the kind; it
 * becomes how many are. */
static int compare_units(const maker *m, int32_t a, int32_t b, int32_t *same) {
    enum { STEP = 64 }; /* runs */
    const draft_unit *x = &m->units[a], *y = &m->units[b];
    const int32_t num = x->num_runs < y->num_runs ? x->num_runs : y->num_runs;
    if (*same < 0) {
        const int order = compare_kinds(x, y);
        if (order) return order;
        *same = 0;
    }
    int32_t i = *same;
    while (num - i >= STEP && memcmp(x->runs + i, y->runs + i, STEP * sizeof(kvc_run)) == 0) i += STEP;
    while (i < num && memcmp(x->runs + i, y->runs + i, sizeof(kvc_run)) == 0) i++;
    *same = i;
    int order = i < num ? compare_starts(x->runs + i, y->runs + i) : compare(x->num_runs, y->num_runs);
    if (!order && i < num) order = compare(x->runs[i].count, y->runs[i].count);
    return order ? order : compare(a, b);
}

/* Merges two sorted lists.  Of their first units that one comes next which has more runs in common with the one that
 * came last; only where both have as many are they compared, from there on (Ng and Kakehi 2008). */
static void merge(const maker *m, neighbour *to, const neighbour *a, int32_t num_a, const neighbour *b, int32_t num_b) {
    int32_t same_a = -1,
            same_b = -1; /* runs that the first of a, and of b, has in common with the one that came last */
    for (; num_a || num_b; to++) {
        const int is_tie = num_a && num_b && same_a == same_b;
        int32_t same = same_a;
        const int takes_a =
            is_tie ? compare_units(m, a->unit, b->unit, &same) < 0 : !num_b || (num_a && same_a > same_b);
        *to = takes_a ? *a++ : *b++;
        to->same_runs = takes_a ? same_a : same_b;
        if (is_tie) same_a = same_b = same;
        if (takes_a)
            same_a = --num_a ? a->same_runs : -1;
        else
            same_b = --num_b ? b->same_runs : -1;
    }
}

/* Rows that the run after the last common one of two units begins with in both. */
static int32_t rows_alike(const draft_unit *a, const draft_unit *b, int32_t run) {
    if (run >= a->num_runs || run >= b->num_runs || compare_starts(&a->runs[run], &b->runs[run]) != 0) return 0;
    return rows_in(&a->stored, a->runs[run].count < b->runs[run].count ? &a->runs[run] : &b->runs[run]);
}

/* Finds out which rows a unit shares with the one before it, and with which part and run its own begin. */
static void find_common(const maker *m, neighbour *n) {
    draft_unit *u = &m->units[n->unit];
    const reach *r = &u->stored;
    if (n->same_runs < 0) return;
    int32_t run = n->same_runs;
    int64_t before = u->stored_rows; /* rows before `run` */
    for (int32_t i = run; i < u->num_runs; i++) before -= rows_in(r, &u->runs[i]);
    n->rows = before + rows_alike(&m->units[n[-1].unit], u, run);
    const int64_t part = n->rows / u->unit.part_rows, begin = part * u->unit.part_rows;
    while (before > begin) before -= rows_in(r, &u->runs[--run]);
    n->tiled = begin + (n->rows - begin) / KVC_TILE * KVC_TILE;
    u->first_part = (int32_t)part;
    u->first_run = run;
    u->rows_before = before;
}

/* Sorts lists of one unit, of two, of four ... */
static void sort_whole(maker *m) {
    const int64_t num = m->num_whole;
    for (int64_t width = 1; width < num; width *= 2) {
        for (int64_t first = 0; first < num; first += 2 * width) {
            const int64_t rest = num - first, num_a = rest < width ? rest : width;
            const int64_t num_b = rest - num_a < width ? rest - num_a : width;
            const neighbour *a = m->order + first;
            merge(m, m->spare + first, a, (int32_t)num_a, a + num_a, (int32_t)num_b);
        }
        memcpy(m->order, m->spare, (size_t)num * sizeof *m->order);
    }
}

/* Sorts the units of whole sequences by their rows, so that those with most in common stand side by side; the others
 * follow. */
static void sort_units(maker *m) {
    int32_t whole = 0, others = 0;
    for (int32_t u = 0; u < m->plan->num_units; u++) m->num_whole += m->units[u].is_whole;
    for (int32_t u = 0; u < m->plan->num_units; u++)
        m->order[m->units[u].is_whole ? whole++ : m->num_whole + others++] = (neighbour){.unit = u, .same_runs = -1};
    sort_whole(m);
    for (int32_t i = 1; i < m->num_whole; i++) find_common(m, &m->order[i]);
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* Sizes of the plan's arrays. */
typedef struct totals {
    int64_t pieces, parts, counters;
    int64_t whole_q; /* query rows of units of a whole sequence */
    uint64_t partials;
    int32_t max_q, tiled;
    double work;
} totals;

/* Gives each unit its place in the plan's arrays. */
static totals lay_out_units(const maker *m) {
    const kvc_plan *plan = m->plan;
    totals t = {0};
    for (int32_t i = 0; i < plan->num_units; i++) {
        const draft_unit *u = &m->units[i];
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

/* Lists the pieces of a unit from its first own part on, and where each part begins. */
static void fill_unit(maker *m, const neighbour *n) {
    kvc_plan *plan = m->plan;
    const draft_unit *u = &m->units[n->unit];
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

static void fill_units(maker *m) {
    const kvc_plan *plan = m->plan;
    m->num_pieces = 0;
    for (int32_t i = 0; i < plan->num_units; i++) {
        kvc_unit *unit = &plan->units[i];
        *unit = m->units[i].unit;
    }
    for (int32_t i = 0; i < plan->num_units; i++) fill_unit(m, &m->order[i]);
}

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

/* One part of these units, of which so many rows are read once for all. */
static void add_job(kvc_plan *plan, int32_t part, const neighbour *n, int32_t num, int64_t shared) {
    const kvc_job *last = plan->num_jobs ? &plan->jobs[plan->num_jobs - 1] : NULL;
    kvc_job job = {.first_member = last ? last->first_member + last->num_members : 0,
                   .num_members = num,
                   .part = part,
                   .shared = shared,
                   .rows = shared};
    for (int32_t m = 0; m < num; m++) {
        const kvc_unit *unit = &plan->units[n[m].unit];
        const int64_t rows = kvc_part_rows(unit, part);
        job.rows += rows - shared;
        job.work += rows * kvc_num_q(plan, unit);
        plan->members[job.first_member + m] = n[m].unit;
    }
    plan->jobs[plan->num_jobs++] = job;
}

/* The parts of a unit from one on, each by itself. */
static void add_jobs(kvc_plan *plan, int32_t unit, int32_t part) {
    const neighbour alone = {.unit = unit};
    for (; part < plan->units[unit].num_parts; part++)
        add_job(plan, part, &alone, 1, kvc_part_rows(&plan->units[unit], part));
}

/* Rows at the beginning of a part that are the same for a unit and the one before it: all, or whole tiles of them. */
static int64_t shared_in(const kvc_plan *plan, const neighbour *n, int32_t part) {
    const kvc_unit *unit = &plan->units[n->unit];
    const int64_t begin = part * unit->part_rows;
    if (n->rows <= begin) return 0;
    if (n->rows >= begin + unit->part_rows) return unit->part_rows;
    const int is_all = n->rows == unit->num_rows && n->rows == plan->units[n[-1].unit].num_rows;
    return (is_all ? n->rows : n->tiled) - begin;
}

/* How many rows are not read again when so many units that share so many become one job. */
static int64_t saved(int64_t shared, int32_t num) { return shared * (num - 1); }

/* How many of `num` units, from this one on, are best one job.  As long as another one fits, it joins unless more is
 * saved where it begins the next job, together with the unit after it. */
static int32_t group_of(const kvc_plan *plan, const neighbour *n, int32_t num, int32_t part, int64_t most_work,
                        int64_t *shared) {
    const kvc_unit *unit = &plan->units[n->unit];
    const int64_t most_q = unit->tiled ? KVC_TILE_QUERIES : KVC_TASK_QUERIES;
    int64_t q = kvc_num_q(plan, unit), work = q * kvc_part_rows(unit, part);
    int32_t joined = 1;
    *shared = kvc_part_rows(unit, part);
    for (; joined < num && n[joined].shared; joined++) {
        unit = &plan->units[n[joined].unit];
        q += kvc_num_q(plan, unit);
        work += kvc_num_q(plan, unit) * kvc_part_rows(unit, part);
        if (q > most_q || work > most_work) break;
        const int64_t with =
                          *shared < n[joined].shared ? *shared : n[joined].shared, /* by this unit and those before */
            next = joined + 1 < num ? n[joined + 1].shared : 0, with_next = with < next ? with : next;
        const int64_t together = saved(with, joined + 1), and_next = saved(with_next, joined + 2);
        if ((together > and_next ? together : and_next) < saved(*shared, joined) + saved(next, 2)) break;
        *shared = with;
    }
    return joined;
}

/* Jobs for one part of so many units.  Returns how many of these share rows of the next part with a neighbour, too:
 * they stay in the list, the other parts of the others are jobs of their own. */
static int32_t add_shared_jobs(maker *m, int32_t part, int32_t num, int64_t most_work) {
    kvc_plan *plan = m->plan;
    neighbour *n = m->order;
    int32_t kept = 0;
    int64_t shared;
    for (int32_t i = 0; i < num; i++) n[i].shared = i ? shared_in(plan, &n[i], part) : 0;
    for (int32_t i = 0, joined; i < num; i += joined) {
        joined = group_of(plan, n + i, num - i, part, most_work, &shared);
        add_job(plan, part, n + i, joined, shared);
    }
    for (int32_t i = 0; i < num; i++) {
        const neighbour unit = n[i];
        if (shared_in(plan, &n[i], part + 1) || (i + 1 < num && shared_in(plan, &n[i + 1], part + 1)))
            n[kept++] = unit;
        else
            add_jobs(plan, unit.unit, part + 1);
    }
    return kept;
}

static int by_work(const void *a, const void *b) {
    const kvc_job *x = a, *y = b;
    return x->work != y->work ? compare(y->work, x->work) : compare(x->first_member, y->first_member);
}

/* All that are to be done, the largest first. */
static void find_jobs(maker *m) {
    kvc_plan *plan = m->plan;
    int64_t work = 0, most_work = INT64_MAX;
    int32_t num = m->num_whole > 1 ? m->num_whole : 0, sorted = 1;
    plan->num_jobs = 0;
    for (int32_t u = 0; u < plan->num_units; u++) {
        work += plan->units[u].num_rows * kvc_num_q(plan, &plan->units[u]);
        if (!num || !m->units[u].is_whole) add_jobs(plan, u, 0);
    }
    if (plan->args.num_threads > 1) most_work = work * plan->num_kv_heads / (SHARES * (int64_t)plan->args.num_threads);
    for (int32_t part = 0; num; part++) num = add_shared_jobs(m, part, num, most_work);
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
static void visit_deltas(const maker *m, void (*visit)(kvc_plan *plan, int32_t delta)) {
    int32_t last = 0;
    for (int32_t i = 0; i < m->plan->num_units; i++) {
        const draft_unit *u = &m->units[i];
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
static void find_deltas(const maker *m) {
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
static void size_angles(const maker *m) {
    kvc_plan *plan = m->plan;
    const kvc_cache *cache = plan->batch->cache;
    visit_deltas(m, count_delta);
    for (int32_t r = 0; r < cache->num_ropes; r++)
        if ((int32_t)kvc_rope_angles_size(&cache->ropes[r]) > plan->angles_stride)
            plan->angles_stride = (int32_t)kvc_rope_angles_size(&cache->ropes[r]);
}

/* Queries are turned by -delta: what a key that is off by delta lacks, since q . R(d) k = R(-d) q . k. */
static void find_angles(const maker *m) {
    kvc_plan *plan = m->plan;
    const kvc_cache *cache = plan->batch->cache;
    if (plan->num_deltas) find_deltas(m);
    for (int32_t layer = 0, last = -1; plan->num_deltas && layer < cache->num_layers; layer++) {
        const int32_t r = cache->rope_of[layer];
        if (cache->group_of[layer] != plan->group || r < 0 || r == last) continue;
        kvc_rope_table table = {.turns = plan->turns, .coarse = 1};
        for (int32_t d = 0; d < plan->num_deltas; d++)
            kvc_rope_angles_from(&table, &cache->ropes[r], -plan->deltas[d],
                                 plan->angles +
                                     ((size_t)r * (size_t)plan->num_deltas + (size_t)d) * (size_t)plan->angles_stride);
        last = r;
    }
}

/* ---- making a plan ----------------------------------------------------------------------------------------------- */

/* Memory for the units that were counted, and for marks; 0 if there is none. */
static int take_scratch(maker *m) {
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

static void give_scratch(maker *m) {
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
static kvc_plan *make_plan(maker *m) {
    kvc_plan *draft = m->plan;
    kvc_batch *batch = draft->batch;
    cut_batch(m);
    sort_units(m);
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
    fill_units(m);
    find_jobs(m);
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
    maker m = {.plan = &draft};
    cut_batch(&m); /* counts the units */
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
