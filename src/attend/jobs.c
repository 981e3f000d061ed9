/* jobs.c: which units share rows, and in what order tasks are run.
 *
 * The rule for tasks.  Who works off what, and when, changes no bit, so it may look at everything:
 *   - units of a whole sequence whose parts begin with the same rows, as those of forks do, are one task, which reads
 *     these rows once and then goes on with the rest of each.  It has at most KVC_TASK_QUERIES query rows if it is
 *     streamed, KVC_TILE_QUERIES if it is tiled, and at most one of SHARES shares of what a thread has to do if it is
 *     done by as many as were announced;
 *   - the largest tasks come first, so that little is left to do when the last one is begun; KV head by KV head, as
 *     units of a prompt then find its rows in a cache, but where there are less than SHARES jobs for each thread.
 */
#include "attend/jobs.h"

#include <stdlib.h>
#include <string.h>

enum { SHARES = 4 };

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
static int compare_kinds(const kvc_draft_unit *a, const kvc_draft_unit *b) {
    const int64_t x[] = {a->unit.tiled, a->unit.part_rows, a->stored.sinks, a->stored.low, a->stored.end},
                  y[] = {b->unit.tiled, b->unit.part_rows, b->stored.sinks, b->stored.low, b->stored.end};
    int order = 0;
    for (int i = 0; !order && i < 5; i++) order = compare(x[i], y[i]);
    return order;
}

/* Orders units by their stored rows.  *same: how many runs are known to be the same, -1 for not even the kind; it
 * becomes how many are. */
static int compare_units(const kvc_maker *m, int32_t a, int32_t b, int32_t *same) {
    enum { STEP = 64 }; /* runs */
    const kvc_draft_unit *x = &m->units[a], *y = &m->units[b];
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
static void merge(const kvc_maker *m, kvc_neighbour *to, const kvc_neighbour *a, int32_t num_a, const kvc_neighbour *b,
                  int32_t num_b) {
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
static int32_t rows_alike(const kvc_draft_unit *a, const kvc_draft_unit *b, int32_t run) {
    if (run >= a->num_runs || run >= b->num_runs || compare_starts(&a->runs[run], &b->runs[run]) != 0) return 0;
    return kvc_rows_in_reach(&a->stored, a->runs[run].count < b->runs[run].count ? &a->runs[run] : &b->runs[run]);
}

/* Finds out which rows a unit shares with the one before it, and with which part and run its own begin. */
static void find_common(const kvc_maker *m, kvc_neighbour *n) {
    kvc_draft_unit *u = &m->units[n->unit];
    const kvc_reach *r = &u->stored;
    if (n->same_runs < 0) return;
    int32_t run = n->same_runs;
    int64_t before = u->stored_rows; /* rows before `run` */
    for (int32_t i = run; i < u->num_runs; i++) before -= kvc_rows_in_reach(r, &u->runs[i]);
    n->rows = before + rows_alike(&m->units[n[-1].unit], u, run);
    const int64_t part = n->rows / u->unit.part_rows, begin = part * u->unit.part_rows;
    while (before > begin) before -= kvc_rows_in_reach(r, &u->runs[--run]);
    n->tiled = begin + (n->rows - begin) / KVC_TILE * KVC_TILE;
    u->first_part = (int32_t)part;
    u->first_run = run;
    u->rows_before = before;
}

/* Sorts lists of one unit, of two, of four ... */
static void sort_whole(kvc_maker *m) {
    const int64_t num = m->num_whole;
    for (int64_t width = 1; width < num; width *= 2) {
        for (int64_t first = 0; first < num; first += 2 * width) {
            const int64_t rest = num - first, num_a = rest < width ? rest : width;
            const int64_t num_b = rest - num_a < width ? rest - num_a : width;
            const kvc_neighbour *a = m->order + first;
            merge(m, m->spare + first, a, (int32_t)num_a, a + num_a, (int32_t)num_b);
        }
        memcpy(m->order, m->spare, (size_t)num * sizeof *m->order);
    }
}

/* Sorts the units of whole sequences by their rows, so that those with most in common stand side by side; the others
 * follow. */
void kvc_sort_units(kvc_maker *m) {
    int32_t whole = 0, others = 0;
    for (int32_t u = 0; u < m->plan->num_units; u++) m->num_whole += m->units[u].is_whole;
    for (int32_t u = 0; u < m->plan->num_units; u++)
        m->order[m->units[u].is_whole ? whole++ : m->num_whole + others++] =
            (kvc_neighbour){.unit = u, .same_runs = -1};
    sort_whole(m);
    for (int32_t i = 1; i < m->num_whole; i++) find_common(m, &m->order[i]);
}

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

/* One part of these units, of which so many rows are read once for all. */
static void add_job(kvc_plan *plan, int32_t part, const kvc_neighbour *n, int32_t num, int64_t shared) {
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
    const kvc_neighbour alone = {.unit = unit};
    for (; part < plan->units[unit].num_parts; part++)
        add_job(plan, part, &alone, 1, kvc_part_rows(&plan->units[unit], part));
}

/* Rows at the beginning of a part that are the same for a unit and the one before it: all, or whole tiles of them. */
static int64_t shared_in(const kvc_plan *plan, const kvc_neighbour *n, int32_t part) {
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
static int32_t group_of(const kvc_plan *plan, const kvc_neighbour *n, int32_t num, int32_t part, int64_t most_work,
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
static int32_t add_shared_jobs(kvc_maker *m, int32_t part, int32_t num, int64_t most_work) {
    kvc_plan *plan = m->plan;
    kvc_neighbour *n = m->order;
    int32_t kept = 0;
    int64_t shared;
    for (int32_t i = 0; i < num; i++) n[i].shared = i ? shared_in(plan, &n[i], part) : 0;
    for (int32_t i = 0, joined; i < num; i += joined) {
        joined = group_of(plan, n + i, num - i, part, most_work, &shared);
        add_job(plan, part, n + i, joined, shared);
    }
    for (int32_t i = 0; i < num; i++) {
        const kvc_neighbour unit = n[i];
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
void kvc_find_jobs(kvc_maker *m) {
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
