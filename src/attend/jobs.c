/* jobs.c: which slices share rows, and in which order tasks are run.
 *
 * A slice is query tokens of one sequence with the rows that they see, which are cut into splits.  A neighbour is a
 * slice in a list that is sorted by runs of rows, and what it has in common with the slice before it.  A job is some
 * splits of a slice, or one split of several neighbours.  A part is heads of one KV head.  A task is a job for a part.
 *
 * The rule for tasks.  Which task computes what, and when, changes no bit, so the rule may look at everything:
 *   - Slices of whole sequences whose splits begin with the same rows, as those of forks do, become one job, which
 *     reads these rows once and then goes on with the rest of each.  A job has at most KVC_TASK_QUERIES query rows if
 *     it is streamed, and KVC_TILE_QUERIES if it is tiled.  It has at most 1 / KVC_TASKS_PER_THREAD of the work of a
 *     thread of the plan.
 *   - Slices that select rows, each in one split, become such jobs, too.  A job scores the sketches of these rows once.
 *     It has at most KVC_SELECTING_QUERIES query rows, and up to twice as much work as other jobs.
 *   - A streamed slice that shares no rows becomes jobs of up to KVC_JOINED_SPLITS splits, if each thread has
 *     KVC_JOINED_TASKS tasks then.  A task of one split would spend a tenth of its time on beginning and ending.
 *   - A slice that chooses rows becomes jobs of any number of splits, if each thread then has KVC_TASKS_PER_THREAD
 *     tasks.
 *   - The largest jobs come first, so that little is left to do when the last one begins.  Tasks go part by part,
 *     as slices of a prompt then find its rows in a cache, unless there are fewer than KVC_TASKS_PER_THREAD jobs per
 *     thread.
 */
#include "attend/jobs.h"

#include <stdlib.h>
#include <string.h>

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

/* ---- the order of rows ------------------------------------------------------------------------------------------- */

/* Orders runs by where they begin.  Any order of blocks will do, so blocks are ordered by address. */
static int compare_starts(const kvc_run *a, const kvc_run *b) {
    int order = compare((intptr_t)a->block, (intptr_t)b->block);
    if (!order) order = compare(a->slot, b->slot);
    if (!order) order = compare(a->position, b->position);
    return order ? order : compare(a->delta, b->delta);
}

static int is_same_run(const kvc_run *a, const kvc_run *b) { return a->count == b->count && compare_starts(a, b) == 0; }

/* Orders slices by their kind: the way they are attended to, split_rows, and what they see.  Slices of one kind may
 * share rows. */
static int compare_kinds(const kvc_new_slice *a, const kvc_new_slice *b) {
    int order = compare(a->slice.tiled, b->slice.tiled);
    if (!order) order = compare(a->slice.split_rows, b->slice.split_rows);
    if (!order) order = compare(a->stored.sinks, b->stored.sinks);
    if (!order) order = compare(a->stored.low, b->stored.low);
    return order ? order : compare(a->stored.end, b->stored.end);
}

/* Orders two slices of one kind by the first run in which they differ, which is number same_runs. */
static int compare_runs(const kvc_new_slice *a, const kvc_new_slice *b, int32_t same_runs) {
    if (same_runs == a->num_runs || same_runs == b->num_runs) return compare(a->num_runs, b->num_runs);
    const kvc_run *x = a->runs + same_runs, *y = b->runs + same_runs;
    const int order = compare_starts(x, y);
    return order ? order : compare(x->count, y->count);
}

/* Orders slices by kind, then by stored rows, then by index.  same_runs: leading runs of both; -1: of other kinds. */
static int compare_slices(const kvc_new_slice *slices, int32_t a, int32_t b, int32_t same_runs) {
    const int order =
        same_runs < 0 ? compare_kinds(&slices[a], &slices[b]) : compare_runs(&slices[a], &slices[b], same_runs);
    return order ? order : compare(a, b);
}

/* Returns how many leading runs two slices have in common, at least `known`; -1 if they are of different kinds. */
static int32_t count_same_runs(const kvc_new_slice *a, const kvc_new_slice *b, int32_t known) {
    enum { STEP = 64 }; /* runs compared at once, as bytes: makes comparing long lists several times as fast */
    _Static_assert(sizeof(kvc_run) == sizeof(kvc_block *) + 4 * sizeof(int32_t), "runs have no padding");
    if (known < 0 && compare_kinds(a, b) != 0) return -1;
    const int32_t num = a->num_runs < b->num_runs ? a->num_runs : b->num_runs;
    int32_t same = known < 0 ? 0 : known;
    while (num - same >= STEP && memcmp(a->runs + same, b->runs + same, STEP * sizeof(kvc_run)) == 0) same += STEP;
    while (same < num && is_same_run(a->runs + same, b->runs + same)) same++;
    return same;
}

/* Merges two sorted lists.  Picks from the list whose first slice has more runs in common with the slice picked last.
 * Only at a tie, compares the first slices, from the first run on that is not known to be equal (Ng and Kakehi 2008).
 * So sorting costs no more than one walk over the runs that slices have in common. */
static void merge(const kvc_new_slice *slices, kvc_neighbour *to, const kvc_neighbour *a, int32_t num_a,
                  const kvc_neighbour *b, int32_t num_b) {
    /* leading runs that the first slice of a, and of b, has in common with the slice picked last */
    int32_t same_a = -1, same_b = -1;
    for (; num_a || num_b; to++) {
        const int is_tie = num_a && num_b && same_a == same_b;
        const int32_t same = is_tie ? count_same_runs(&slices[a->slice], &slices[b->slice], same_a) : 0;
        const int takes_a =
            is_tie ? compare_slices(slices, a->slice, b->slice, same) < 0 : !num_b || (num_a && same_a > same_b);
        *to = takes_a ? *a++ : *b++;
        to->same_runs = takes_a ? same_a : same_b;
        if (is_tie) same_a = same_b = same;
        if (takes_a)
            same_a = --num_a ? a->same_runs : -1;
        else
            same_b = --num_b ? b->same_runs : -1;
    }
}

/* Counts the leading rows in reach that two slices both have of run `run`, the first in which they differ. */
static int32_t same_rows_of_run(const kvc_new_slice *a, const kvc_new_slice *b, int32_t run) {
    if (run >= a->num_runs || run >= b->num_runs || compare_starts(&a->runs[run], &b->runs[run]) != 0) return 0;
    return kvc_rows_in_reach(&a->stored, a->runs[run].count < b->runs[run].count ? &a->runs[run] : &b->runs[run]);
}

/* Finds the leading rows and splits that a slice shares with the one before it, and where its own splits begin. */
static void find_common_rows(kvc_new_slice *slices, kvc_neighbour *n) {
    kvc_new_slice *u = &slices[n->slice];
    const kvc_reach *reach = &u->stored;
    if (n->same_runs < 0) return;
    int32_t run = n->same_runs;
    int64_t rows_before = u->stored_rows; /* rows in reach before run `run` */
    for (int32_t i = run; i < u->num_runs; i++) rows_before -= kvc_rows_in_reach(reach, &u->runs[i]);
    n->same_rows = rows_before + same_rows_of_run(&slices[n[-1].slice], u, run);
    const int64_t split = n->same_rows / u->slice.split_rows, begin = split * u->slice.split_rows;
    while (rows_before > begin) rows_before -= kvc_rows_in_reach(reach, &u->runs[--run]);
    n->same_tile_rows = begin + (n->same_rows - begin) / u->slice.tile_rows * u->slice.tile_rows;
    u->first_split = (int32_t)split;
    u->first_run = run;
    u->rows_before = rows_before;
}

void kvc_order_slices(kvc_new_slice *slices, int32_t num_slices, kvc_slice_order *order) {
    int32_t sharing = 0, others = 0;
    for (int32_t u = 0; u < num_slices; u++) order->num_sharing += slices[u].may_share;
    for (int32_t u = 0; u < num_slices; u++)
        order->items[slices[u].may_share ? sharing++ : order->num_sharing + others++] =
            (kvc_neighbour){.slice = u, .same_runs = -1};
    const int64_t num = order->num_sharing;
    for (int64_t width = 1; width < num; width *= 2) { /* merge lists of one slice, then of two, of four ... */
        for (int64_t first = 0; first < num; first += 2 * width) {
            const int64_t rest = num - first, num_a = rest < width ? rest : width;
            const int64_t num_b = rest - num_a < width ? rest - num_a : width;
            const kvc_neighbour *a = order->items + first;
            merge(slices, order->merged + first, a, (int32_t)num_a, a + num_a, (int32_t)num_b);
        }
        memcpy(order->items, order->merged, (size_t)num * sizeof *order->items);
    }
    for (int32_t i = 1; i < num; i++) find_common_rows(slices, &order->items[i]);
}

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

/* Adds a job: one split of slices n[0 .. num), which share `shared` rows; or num_splits splits of one slice. */
static void add_job(kvc_plan *plan, int32_t split, int32_t num_splits, const kvc_neighbour *n, int32_t num,
                    int64_t shared) {
    const kvc_job *last = plan->jobs.num ? &plan->jobs.items[plan->jobs.num - 1] : NULL;
    kvc_job job = {.first_slice = last ? last->first_slice + last->num_slices : 0,
                   .num_slices = num,
                   .split = split,
                   .num_splits = num_splits,
                   .shared_rows = shared,
                   .rows = shared};
    for (int32_t m = 0; m < num; m++) {
        const kvc_query_slice *slice = &plan->slices[n[m].slice];
        const int64_t rows = kvc_smaller(num_splits * slice->split_rows, slice->num_rows - split * slice->split_rows);
        job.rows += rows - shared;
        job.work += rows * kvc_num_query_rows(plan, slice);
        plan->jobs.slices[job.first_slice + m] = n[m].slice;
    }
    plan->jobs.items[plan->jobs.num++] = job;
}

/* Adds jobs of a slice alone, for its splits from `split` on.  If splits are joined, a job takes several of them. */
static void add_jobs_alone(kvc_plan *plan, int32_t number, int32_t split) {
    const kvc_neighbour alone = {.slice = number};
    const kvc_query_slice *slice = &plan->slices[number];
    const int is_joined = plan->args.max_chosen || !(slice->tiled || slice->by_token);
    const int32_t most = is_joined ? plan->jobs.joined_splits : 1;
    for (int32_t num; split < slice->num_splits; split += num) {
        const int32_t rest = slice->num_splits - split;
        num = rest < most ? rest : most;
        add_job(plan, split, num, &alone, 1, kvc_split_rows(slice, split));
    }
}

/* Counts the leading rows of a split that are read once for a slice and the one before it.  These are whole tiles,
 * because a tile begins where it would begin for each slice alone.  An example: 800 leading rows are the same, splits
 * have 512 rows, and tiles 64.
 *
 *     split 0    rows [0, 512)       512: all are the same
 *     split 1    rows [512, 1024)    256: 4 tiles, and the tile that row 800 is in differs
 *                                    288: if both slices end with row 800, so that this tile is the same, too
 *     split 2    rows [1024, 1536)   0
 */
static int64_t shared_in_split(const kvc_plan *plan, const kvc_neighbour *n, int32_t split) {
    const kvc_query_slice *slice = &plan->slices[n->slice];
    const int64_t begin = split * slice->split_rows, end = begin + slice->split_rows;
    if (n->same_rows <= begin) return 0; /* also for the first slice, whose same_rows are 0 */
    if (n->same_rows >= end) return slice->split_rows;
    const kvc_query_slice *before = &plan->slices[n[-1].slice];
    const int both_end = n->same_rows == slice->num_rows && n->same_rows == before->num_rows;
    return (both_end ? n->same_rows : n->same_tile_rows) - begin;
}

/* Neighbours that become one job: items[0 .. num_slices). */
typedef struct job_group {
    int32_t num_slices;
    int64_t shared_rows; /* leading rows of the split that they have in common */
    int64_t query_rows, work;
} job_group;

/* Adds a slice to a group, which then has `shared` rows in common. */
static void join(job_group *g, const kvc_plan *plan, const kvc_query_slice *slice, int32_t split, int64_t shared) {
    g->num_slices++;
    g->shared_rows = shared;
    g->query_rows += kvc_num_query_rows(plan, slice);
    g->work += kvc_num_query_rows(plan, slice) * kvc_split_rows(slice, split);
}

/* Whether a slice can join a group within the limits on query rows and work. */
static int has_room(const job_group *g, const kvc_plan *plan, const kvc_query_slice *slice, int32_t split,
                    int64_t most_work) {
    const int32_t query_rows = kvc_num_query_rows(plan, slice);
    const int64_t work = g->work + query_rows * kvc_split_rows(slice, split);
    const int32_t most = slice->selects ? KVC_SELECTING_QUERIES : slice->tiled ? KVC_TILE_QUERIES : KVC_TASK_QUERIES;
    return g->query_rows + query_rows <= most && work / (slice->selects ? 2 : 1) <= most_work;
}

/* Returns how many rows fewer are read if slices become one job.  A job of M slices, of which slice m has R(m) rows in
 * the split and all have the first S of them in common, reads
 *
 *     S + sum of (R(m) - S) over m  =  sum of R(m) over m - S * (M - 1)
 *
 * rows, so joining them saves S * (M - 1).  S is the least that any two neighbours among them share. */
static int64_t rows_saved(int64_t shared, int64_t num_slices) { return shared * (num_slices - 1); }

/* Whether the slice after a group had better begin the next group, with the slice after it, than join this one, be it
 * alone or with that slice.  shared: rows that it has in common with the group's last slice; next_shared: with the
 * slice after it.  For a group of M slices that share S rows, of which S1 are left once one has joined and S2 once both
 * have, and with T for next_shared: S1 * M and S2 * (M + 1) are less than S * (M - 1) + T. */
static int is_better_apart(const job_group *g, int64_t shared, int64_t next_shared) {
    const int64_t joined = kvc_smaller(g->shared_rows, shared), both_joined = kvc_smaller(joined, next_shared);
    const int64_t apart = rows_saved(g->shared_rows, g->num_slices) + rows_saved(next_shared, 2);
    return rows_saved(joined, g->num_slices + 1) < apart && rows_saved(both_joined, g->num_slices + 2) < apart;
}

/* Groups items[0] with those slices after it that become one job with it.  The list is cut greedily, looking one
 * slice ahead, to save many rows over the whole list.  The next slice joins if it shares rows, has room and is not
 * better apart. */
static job_group group_neighbours(const kvc_plan *plan, const kvc_neighbour *items, int32_t num, int32_t split,
                                  int64_t most_work) {
    const kvc_query_slice *slice = &plan->slices[items->slice];
    job_group g = {0};
    join(&g, plan, slice, split, kvc_split_rows(slice, split));
    for (int32_t i = 1; i < num && items[i].shared_rows; i++) {
        slice = &plan->slices[items[i].slice];
        if (!has_room(&g, plan, slice, split, most_work)) break;
        if (is_better_apart(&g, items[i].shared_rows, i + 1 < num ? items[i + 1].shared_rows : 0)) break;
        join(&g, plan, slice, split, kvc_smaller(g.shared_rows, items[i].shared_rows));
    }
    return g;
}

/* Adds the jobs of one split of items[0 .. num).  Keeps in `items` the slices that share rows of the next split with a
 * neighbour, and returns their number; adds jobs for all further splits of the others. */
static int32_t add_jobs_of_split(kvc_plan *plan, kvc_neighbour *items, int32_t num, int32_t split, int64_t most_work) {
    int32_t num_left = 0;
    for (int32_t i = 1; i < num; i++) items[i].shared_rows = shared_in_split(plan, &items[i], split);
    for (int32_t i = 0; i < num;) {
        const job_group g = group_neighbours(plan, items + i, num - i, split, most_work);
        add_job(plan, split, 1, items + i, g.num_slices, g.shared_rows);
        i += g.num_slices;
    }
    for (int32_t i = 0; i < num; i++) {
        const kvc_neighbour item = items[i];
        if (shared_in_split(plan, &items[i], split + 1) ||
            (i + 1 < num && shared_in_split(plan, &items[i + 1], split + 1)))
            items[num_left++] = item;
        else
            add_jobs_alone(plan, item.slice, split + 1);
    }
    return num_left;
}

static int by_work(const void *a, const void *b) {
    const kvc_job *x = a, *y = b;
    return x->work != y->work ? compare(y->work, x->work) : compare(x->first_slice, y->first_slice);
}

void kvc_find_jobs(kvc_plan *plan, const kvc_new_slice *slices, const kvc_slice_order *order) {
    const int64_t threads = plan->args.num_threads, enough_jobs = KVC_TASKS_PER_THREAD * threads;
    int64_t work = 0, most_work = INT64_MAX, num_splits = 0;
    int32_t num = order->num_sharing > 1 ? order->num_sharing : 0; /* that may share rows of the next split */
    plan->jobs.num = 0;
    for (int32_t u = 0; u < plan->num_slices; u++) num_splits += plan->slices[u].num_splits;
    const int64_t joined = num_splits * plan->parts.num / (threads * KVC_JOINED_TASKS);
    if (!plan->args.max_chosen)
        plan->jobs.joined_splits = threads == 1 || KVC_BUGGIFY() ? KVC_JOINED_SPLITS
                                   : joined                      ? (int32_t)kvc_smaller(joined, KVC_JOINED_SPLITS)
                                                                 : 1;
    for (int32_t u = 0; u < plan->num_slices; u++) {
        work += plan->slices[u].num_rows * kvc_num_query_rows(plan, &plan->slices[u]);
        if (!num || !slices[u].may_share) add_jobs_alone(plan, u, 0);
    }
    if (threads > 1) most_work = work * plan->parts.num / enough_jobs;
    for (int32_t split = 0; num; split++) num = add_jobs_of_split(plan, order->items, num, split, most_work);
    int64_t i = 1;
    while (i < plan->jobs.num && plan->jobs.items[i - 1].work >= plan->jobs.items[i].work) i++;
    if (i < plan->jobs.num) qsort(plan->jobs.items, (size_t)plan->jobs.num, sizeof *plan->jobs.items, by_work);
    plan->jobs.num_tasks = plan->jobs.num * plan->parts.num;
    plan->jobs.by_part = threads == 1 || plan->jobs.num >= enough_jobs;
}
