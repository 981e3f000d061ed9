/* runs.c: lists of runs: the rows that a sequence holds in one layer group, in order of arrival.  A run is consecutive
 * slots of one block at consecutive positions.  A part is a run of some of its rows.  A list has its runs in runs[first
 * .. first + num): those before `first` have expired.  In an ascending list, positions rise from row to row, and runs
 * are found by bisection.  Before a change, the list gets a longer array as its spare one, so that the change cannot
 * fail.  Expired rows are lost: their positions lie in list->lost. */
#include "rows/runs.h"

#include <stdlib.h>
#include <string.h>

#include "base/compiler.h"
#include "base/status.h"
#include "rows/stride.h"

static int32_t run_end(const kvc_run *run) { return run->position + run->count; }

kvc_run kvc_run_part(const kvc_run *run, int32_t begin, int32_t end) {
    const int32_t from = run->position > begin ? run->position : begin;
    const int32_t to = run_end(run) < end ? run_end(run) : end;
    kvc_run part = *run;
    if (to <= from) {
        part.count = 0;
        return part;
    }
    part.slot += from - run->position;
    part.position = from;
    part.count = to - from;
    return part;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void kvc_runs_init(kvc_run_list *list) {
    *list = (kvc_run_list){.min_position = -1, .max_position = -1, .ascending = 1};
}

void kvc_runs_discard(kvc_run_list *list, kvc_memory *memory) {
    if (!list->spare) return;
    kvc_memory_free(memory, list->spare, (uint64_t)list->spare_capacity * sizeof(kvc_run), KVC_MEMORY_BOOKKEEPING, -1);
    list->spare = NULL;
    list->spare_capacity = 0;
}

void kvc_runs_free_list(kvc_run_list *list, kvc_memory *memory) {
    kvc_runs_discard(list, memory);
    kvc_memory_free(memory, list->runs, (uint64_t)list->capacity * sizeof(kvc_run), KVC_MEMORY_BOOKKEEPING, -1);
}

void kvc_runs_destroy(kvc_run_list *list, kvc_pool *pool) {
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) kvc_drop_part(pool, run);
    kvc_runs_free_list(list, pool->memory);
    kvc_runs_init(list);
}

/* Gets a spare array for num runs. */
static kvc_status get_spare(kvc_run_list *list, kvc_memory *memory, int64_t num) {
    if (num <= list->spare_capacity) return KVC_OK;
    if (num > INT32_MAX / 2) return kvc_fail(KVC_ERR_NOMEM, "a sequence of more than %lld runs", (long long)num);
    kvc_run *runs = kvc_memory_alloc(memory, (uint64_t)num * sizeof(kvc_run), KVC_MEMORY_BOOKKEEPING, -1);
    if (!runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a list of %lld runs", (long long)num);
    kvc_runs_discard(list, memory);
    list->spare = runs;
    list->spare_capacity = (int32_t)num;
    return KVC_OK;
}

void kvc_runs_install(kvc_run_list *list, kvc_memory *memory) {
    kvc_run *runs = list->spare;
    const int32_t capacity = list->spare_capacity;
    if (!runs) return;
    if (list->num) memcpy(runs, kvc_runs_begin(list), (size_t)list->num * sizeof *runs);
    list->spare = NULL;
    list->spare_capacity = 0;
    kvc_runs_free_list(list, memory);
    list->runs = runs;
    list->first = 0;
    list->capacity = capacity;
}

/* Moves the runs to the front of the array, over runs that have expired. */
static void move_to_front(kvc_run_list *list) {
    if (list->num) memmove(list->runs, kvc_runs_begin(list), (size_t)list->num * sizeof *list->runs);
    list->first = 0;
}

kvc_status kvc_runs_prepare(kvc_run_list *list, kvc_memory *memory, int32_t extra) {
    const int64_t needed = (int64_t)list->num + extra;
    if (list->spare ? needed > list->spare_capacity : needed > list->capacity)
        return get_spare(list, memory, KVC_BUGGIFY() ? needed : list->num + needed + KVC_SPARE_RUNS); /* doubles it */
    if (!list->spare && list->first + needed > list->capacity) move_to_front(list);
    return KVC_OK;
}

/* Returns how many runs hold positions on both sides of [begin, end): dropping its rows cuts these runs in two. */
static int32_t num_cut(const kvc_run_list *list, int32_t begin, int32_t end) {
    int32_t num = 0;
    for (const kvc_run *run = kvc_runs_begin(list); begin < end && run < kvc_runs_end(list); run++)
        num += run->position < begin && run_end(run) > end;
    return num;
}

kvc_status kvc_runs_reserve(kvc_run_list *list, kvc_memory *memory, int32_t extra) {
    const kvc_status status = kvc_runs_prepare(list, memory, extra);
    kvc_runs_install(list, memory);
    return status;
}

kvc_status kvc_runs_prepare_edit(kvc_run_list *list, kvc_memory *memory, int32_t extra) {
    const int64_t needed = 2 * (int64_t)list->num + extra;
    return !list->spare && needed <= list->capacity ? KVC_OK : get_spare(list, memory, needed);
}

void kvc_runs_trim(kvc_run_list *list, kvc_memory *memory, int32_t capacity) {
    const uint64_t bytes = (uint64_t)capacity * sizeof(kvc_run);
    if (capacity >= list->capacity || capacity < list->num) return;
    kvc_run *runs = bytes ? kvc_memory_alloc(memory, bytes, KVC_MEMORY_BOOKKEEPING, -1) : NULL;
    if (bytes && !runs) return;
    if (list->num) memcpy(runs, kvc_runs_begin(list), (size_t)list->num * sizeof *runs);
    kvc_runs_free_list(list, memory);
    list->runs = runs;
    list->first = 0;
    list->capacity = capacity;
}

/* ---- edits ------------------------------------------------------------------------------------------------------- */

void kvc_runs_push(kvc_run_list *list, const kvc_run *run) {
    kvc_run *last = list->num ? kvc_runs_end(list) - 1 : NULL;
    if (last && last->block == run->block && last->slot + last->count == run->slot && run_end(last) == run->position &&
        last->delta == run->delta) {
        last->count += run->count;
        return;
    }
    if (list->first + list->num == list->capacity) move_to_front(list);
    list->runs[list->first + list->num++] = *run;
}

/* Counts the rows and positions of a run that was added at the end. */
static void count_run(kvc_run_list *list, const kvc_run *run) {
    if (run->position <= list->max_position) list->ascending = 0;
    if (list->num_rows == 0 || run->position < list->min_position) list->min_position = run->position;
    if (run_end(run) - 1 > list->max_position) list->max_position = run_end(run) - 1;
    list->num_rows += run->count;
}

void kvc_runs_append(kvc_run_list *list, const kvc_run *run) {
    kvc_runs_push(list, run);
    count_run(list, run);
}

void kvc_runs_recount(kvc_run_list *list) {
    list->num_rows = 0;
    list->min_position = list->max_position = -1;
    list->ascending = 1;
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) count_run(list, run);
}

/* Returns whether the list may hold rows at positions [begin, end). */
static int may_hold(const kvc_run_list *list, int32_t begin, int32_t end) {
    return begin < end && list->num && list->min_position < end && list->max_position >= begin;
}

/* Returns the first run that may hold positions from `begin` on, of a list that has runs: by bisection if positions
 * ascend. */
static const kvc_run *first_run(const kvc_run_list *list, int32_t begin) {
    int32_t from = 0, to = list->ascending ? list->num : 0;
    while (from < to) {
        const int32_t middle = from + (to - from) / 2;
        if (run_end(kvc_runs_begin(list) + middle) <= begin)
            from = middle + 1;
        else
            to = middle;
    }
    return kvc_runs_begin(list) + from;
}

int64_t kvc_runs_visit(const kvc_run_list *list, int32_t begin, int32_t end, kvc_part_fn *visit, void *context) {
    int64_t count = 0;
    if (!may_hold(list, begin, end)) return 0;
    for (const kvc_run *run = first_run(list, begin); run < kvc_runs_end(list); run++) {
        if (list->ascending && run->position >= end) break;
        const kvc_run part = kvc_run_part(run, begin, end);
        if (!part.count) continue;
        count += part.count;
        if (visit) visit(context, &part);
    }
    return count;
}

void kvc_hold_part(void *list, const kvc_run *part) {
    kvc_pool_hold(part->block, part->slot, part->count);
    kvc_runs_append(list, part);
}

void kvc_drop_part(void *pool, const kvc_run *part) { kvc_pool_drop(pool, part->block, part->slot, part->count); }

/* ---- listed positions -------------------------------------------------------------------------------------------- */

/* Returns the index of the first listed position that is not below `position`.  It is usually `likely`. */
static int64_t first_listed(const kvc_listed *listed, int64_t likely, int32_t position) {
    const int32_t *at = listed->positions;
    if ((!likely || at[likely - 1] < position) && (likely == listed->num || at[likely] >= position)) return likely;
    int64_t from = 0, to = listed->num;
    while (from < to) {
        const int64_t middle = from + (to - from) / 2;
        if (at[middle] < position)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* Returns the next row of a run, from row `row` on, that stands at a listed position; `end` if none does.  *i: index of
 * the first listed position that is not below it. */
static int32_t next_listed(const kvc_listed *listed, int64_t *i, int32_t row, int32_t end) {
    const int32_t *at = listed->positions, stride = listed->stride;
    for (; *i < listed->num && (row = kvc_rows_below(at[*i], stride)) < end; ++*i)
        if (kvc_position_of(row, stride) == at[*i]) return row;
    return end;
}

kvc_run kvc_listed_next(const kvc_listed *listed, int64_t *next, kvc_run *rest) {
    const int32_t end = run_end(rest);
    int64_t i = first_listed(listed, *next, kvc_position_of(rest->position, listed->stride));
    const int32_t begin = next_listed(listed, &i, rest->position, end);
    int32_t to = begin;
    while (to < end && next_listed(listed, &i, to, end) == to) to++, i++;
    const kvc_run part = kvc_run_part(rest, begin, to);
    *rest = kvc_run_part(rest, to, end);
    *next = i;
    return part;
}

/* A visit of the parts whose positions are not listed. */
typedef struct unlisted {
    const kvc_listed *listed;
    int64_t next;
    kvc_part_fn *visit;
    void *context;
} unlisted;

static void visit_unlisted(void *context, const kvc_run *run) {
    unlisted *u = context;
    kvc_run rest = *run;
    while (rest.count) {
        const kvc_run before = rest, listed = kvc_listed_next(u->listed, &u->next, &rest);
        const kvc_run part = listed.count ? kvc_run_part(&before, 0, listed.position) : before;
        if (part.count) u->visit(u->context, &part);
    }
}

void kvc_runs_visit_unlisted(const kvc_run_list *list, int32_t begin, int32_t end, const kvc_listed *listed,
                             kvc_part_fn *visit, void *context) {
    unlisted u = {.listed = listed, .visit = visit, .context = context};
    kvc_runs_visit(list, begin, end, listed ? visit_unlisted : visit, listed ? (void *)&u : context);
}

/* ---- expiring ---------------------------------------------------------------------------------------------------- */

/* Drops the rows at positions [begin, end), after kvc_runs_prepare_edit.  Returns their number. */
static int64_t remove_rows(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end) {
    /* Move the runs to the far end of the array, then write the parts that stay from its beginning.  Writing never
     * overtakes reading, as the array has room for one more run for each that is cut in two. */
    const int32_t num = list->num, from = list->capacity - num;
    int64_t removed = 0;
    if (num) memmove(list->runs + from, kvc_runs_begin(list), (size_t)num * sizeof *list->runs);
    list->first = list->num = 0;
    for (int32_t i = 0; i < num; i++) {
        const kvc_run run = list->runs[from + i];
        const kvc_run below = kvc_run_part(&run, 0, begin), gone = kvc_run_part(&run, begin, end),
                      above = kvc_run_part(&run, end, INT32_MAX);
        if (gone.count) kvc_pool_drop(pool, gone.block, gone.slot, gone.count);
        removed += gone.count;
        if (below.count) kvc_runs_push(list, &below);
        if (above.count) kvc_runs_push(list, &above);
    }
    kvc_runs_recount(list);
    return removed;
}

/* Returns the number of runs below `begin`, if rows from there on can be dropped by trimming the runs behind these, as
 * in a window behind its sinks.  Returns -1 if a run has rows on both sides of `begin`, or positions do not ascend. */
static int32_t runs_before(const kvc_run_list *list, int32_t begin) {
    if (!list->ascending) return -1;
    int32_t n = 0;
    while (n < list->num && run_end(kvc_runs_begin(list) + n) <= begin) n++;
    return n < list->num && kvc_runs_begin(list)[n].position < begin ? -1 : n;
}

kvc_status kvc_runs_prepare_expire(kvc_run_list *list, kvc_memory *memory, int32_t begin, int32_t end, int32_t extra) {
    if (kvc_runs_visit(list, begin, end, /* only count */ NULL, NULL) == 0 ||
        runs_before(list, begin) >= 0) /* no run is cut in two */
        return kvc_runs_prepare(list, memory, extra);
    const int64_t needed = (int64_t)list->num + num_cut(list, begin, end) + extra;
    return !list->spare && needed <= list->capacity ? KVC_OK : kvc_runs_prepare_edit(list, memory, extra);
}

/* Adds an expired part to the list's lost positions. */
static void note_lost(void *lost, const kvc_run *part) {
    kvc_interval_add(lost, (kvc_interval){part->position, run_end(part)});
}

/* Drops the rows below position `end` from the runs behind the first `before` ones. */
static int64_t trim_front(kvc_run_list *list, kvc_pool *pool, int32_t before, int32_t end) {
    int64_t removed = 0;
    int32_t runs_gone = 0;
    kvc_run *run = kvc_runs_begin(list) + before;
    for (; run < kvc_runs_end(list) && run->position < end; run++) {
        const kvc_run gone = kvc_run_part(run, 0, end);
        kvc_pool_drop(pool, gone.block, gone.slot, gone.count);
        removed += gone.count;
        if (gone.count < run->count) {
            *run = kvc_run_part(run, end, INT32_MAX);
            break;
        }
        runs_gone++;
    }
    if (before) memmove(kvc_runs_begin(list) + runs_gone, kvc_runs_begin(list), (size_t)before * sizeof *run);
    list->num -= runs_gone;
    list->first = list->num ? list->first + runs_gone : 0;
    list->num_rows -= removed;
    list->min_position = list->num ? kvc_runs_begin(list)->position : -1;
    list->max_position = list->num ? run_end(kvc_runs_end(list) - 1) - 1 : -1;
    return removed;
}

int32_t kvc_runs_append_outside(kvc_run_list *list, kvc_pool *pool, const kvc_run *run, int32_t begin, int32_t end) {
    const kvc_run below = kvc_run_part(run, 0, begin), gone = kvc_run_part(run, begin, end),
                  above = kvc_run_part(run, end, INT32_MAX);
    if (below.count) kvc_runs_append(list, &below);
    if (gone.count) note_lost(&list->lost, &gone);
    if (gone.count) kvc_drop_part(pool, &gone);
    if (above.count) kvc_runs_append(list, &above);
    return gone.count;
}

int64_t kvc_runs_expire(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end) {
    if (kvc_runs_visit(list, begin, end, note_lost, &list->lost) == 0) return 0;
    const int32_t before = runs_before(list, begin);
    return before >= 0 ? trim_front(list, pool, before, end) : remove_rows(list, pool, begin, end);
}

const kvc_run *kvc_runs_at(const kvc_run_list *list, int32_t position) {
    if (!may_hold(list, position, position + 1)) return NULL;
    for (const kvc_run *run = first_run(list, position); run < kvc_runs_end(list); run++) {
        if (run->position <= position && run_end(run) > position) return run;
        if (list->ascending) break;
    }
    return NULL;
}

/* ---- sharing ----------------------------------------------------------------------------------------------------- */

static int by_position(const void *a, const void *b) {
    const kvc_run *x = a, *y = b;
    return (x->position > y->position) - (x->position < y->position);
}

kvc_status kvc_runs_sort(const kvc_run_list *list, kvc_memory *memory, kvc_sorted_runs *sorted) {
    *sorted = (kvc_sorted_runs){.list = *list};
    if (list->ascending || !list->num) return KVC_OK;
    const size_t size = (size_t)list->num * sizeof *list->runs;
    kvc_run *runs = kvc_memory_alloc(memory, size + (size_t)list->num * sizeof *sorted->ends, KVC_MEMORY_SCRATCH, -1);
    if (!runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to sort %d runs", list->num);
    sorted->list.runs = runs;
    sorted->list.first = 0;
    sorted->ends = (int32_t *)(void *)(runs + list->num);
    memcpy(runs, kvc_runs_begin(list), size);
    qsort(runs, (size_t)list->num, sizeof *runs, by_position);
    for (int32_t i = 0; i < list->num; i++) {
        const int32_t end = run_end(&runs[i]), before = i ? sorted->ends[i - 1] : end;
        sorted->ends[i] = before > end ? before : end;
    }
    return KVC_OK;
}

void kvc_runs_free_sorted(kvc_memory *memory, kvc_sorted_runs *sorted) {
    if (!sorted->ends) return;
    const uint64_t num = (uint64_t)sorted->list.num;
    kvc_memory_free(memory, sorted->list.runs, num * (sizeof(kvc_run) + sizeof(int32_t)), KVC_MEMORY_SCRATCH, -1);
}

/* Returns whether rows of two runs lie in the same slots where they have the same positions. */
static int lies_as(const kvc_run *a, const kvc_run *b) {
    return a->block == b->block && a->slot - a->position == b->slot - b->position;
}

/* Returns the first run that ends behind position `begin`: the caller knows that one does. */
static const kvc_run *first_sorted(const kvc_sorted_runs *sorted, int32_t begin) {
    int32_t from = 0, to = sorted->list.num;
    if (!sorted->ends) return first_run(&sorted->list, begin);
    while (from < to) {
        const int32_t middle = from + (to - from) / 2;
        if (sorted->ends[middle] <= begin)
            from = middle + 1;
        else
            to = middle;
    }
    return sorted->list.runs + from;
}

/* Returns the run with a row at a position, or NULL. */
static const kvc_run *sorted_at(const kvc_sorted_runs *sorted, int32_t position) {
    if (!may_hold(&sorted->list, position, position + 1)) return NULL;
    const kvc_run *run = first_sorted(sorted, position);
    return run->position <= position ? run : NULL;
}

/* Returns the part at positions [begin, end) of the run that holds the lowest of them; its count is 0 if none does.
 * as: if not NULL, leaves out runs that do not lie as this one. */
static kvc_run lowest_part(const kvc_sorted_runs *sorted, int32_t begin, int32_t end, const kvc_run *as) {
    kvc_run lowest = {.count = 0};
    if (!may_hold(&sorted->list, begin, end)) return lowest;
    for (const kvc_run *run = first_sorted(sorted, begin); run < kvc_runs_end(&sorted->list); run++) {
        if (run->position >= (lowest.count ? lowest.position : end)) break;
        const kvc_run part = kvc_run_part(run, begin, end);
        if (!part.count || (as && !lies_as(run, as))) continue;
        lowest = part;
        if (part.position == begin) break;
    }
    return lowest;
}

/* How a list differs from another list at the positions of the other's rows. */
typedef enum holding {
    NOTHING, /* no row */
    SAME,    /* the same row: it lies in the same slot */
    ANOTHER  /* one row or several, none of them the same */
} holding;

/* Takes at least one row off the front of *rest, rows of another list, and returns them.  *how: what the list holds at
 * the positions of all these rows. */
static kvc_run take_alike(const kvc_sorted_runs *sorted, kvc_run *rest, holding *how) {
    const int32_t begin = rest->position, end = run_end(rest);
    const kvc_run found = lowest_part(sorted, begin, end, /* as */ NULL);
    int32_t to = found.count ? found.position : end;
    *how = NOTHING;
    if (to == begin) {
        kvc_run same = {.count = 0};
        if (lies_as(&found, rest))
            same = found;
        else if (sorted->ends) /* positions may repeat: the same row may stand further behind */
            same = lowest_part(sorted, begin, run_end(&found), rest);
        *how = same.count && same.position == begin ? SAME : ANOTHER;
        to = run_end(*how == SAME ? &same : &found);
        if (*how == ANOTHER && same.count && same.position < to) to = same.position;
    }
    const kvc_run alike = kvc_run_part(rest, begin, to);
    *rest = kvc_run_part(rest, to, end);
    return alike;
}

/* Compares rows with the rows of a list. */
typedef struct comparison {
    const kvc_sorted_runs *sorted; /* the list */
    kvc_part_fn *visit;            /* called for parts that the list does not hold; may be NULL */
    void *context;
    int32_t num_missing; /* number of these parts */
    int32_t other_at;    /* the first position at which the list holds another row, or -1 */
} comparison;

static void add_missing(comparison *c, const kvc_run *part) {
    if (c->visit) c->visit(c->context, part);
    c->num_missing++;
}

static void compare_part(void *context, const kvc_run *part) {
    comparison *c = context;
    if (!may_hold(&c->sorted->list, part->position, run_end(part))) {
        add_missing(c, part);
        return;
    }
    for (kvc_run rest = *part; rest.count;) {
        holding how;
        const kvc_run alike = take_alike(c->sorted, &rest, &how);
        if (how == ANOTHER && c->other_at < 0) c->other_at = alike.position;
        if (how != SAME) add_missing(c, &alike);
    }
}

int32_t kvc_runs_find_other(const kvc_run_list *list, const kvc_sorted_runs *than, int32_t begin, int32_t end) {
    comparison c = {.sorted = than, .other_at = -1};
    kvc_runs_visit(list, begin, end, compare_part, &c);
    return c.other_at;
}

int32_t kvc_runs_visit_missing(const kvc_sorted_runs *sorted, const kvc_run_list *from, int32_t begin, int32_t end,
                               kvc_part_fn *visit, void *context) {
    comparison c = {.sorted = sorted, .visit = visit, .context = context};
    kvc_runs_visit(from, begin, end, compare_part, &c);
    return c.num_missing;
}

kvc_interval kvc_runs_lost_in(const kvc_sorted_runs *sorted, kvc_interval lost, int32_t begin, int32_t end) {
    const kvc_run *run;
    if (lost.begin < begin) lost.begin = begin;
    if (lost.end > end) lost.end = end;
    while (lost.begin < lost.end && (run = sorted_at(sorted, lost.begin))) lost.begin = run_end(run);
    while (lost.begin < lost.end && (run = sorted_at(sorted, lost.end - 1))) lost.end = run->position;
    return lost.begin < lost.end ? lost : (kvc_interval){0};
}

void kvc_runs_join(kvc_run_list *list, kvc_run_list *more) {
    for (const kvc_run *run = kvc_runs_begin(more); run < kvc_runs_end(more); run++) kvc_runs_append(list, run);
    kvc_interval_add(&list->lost, more->lost);
    kvc_interval_add(&list->missing, more->missing);
    more->num = 0;
}
