/* runs.h: lists of runs: the rows a sequence holds in one layer group, in order of arrival.  Pure bookkeeping.
 *
 * A run is consecutive slots of one block at consecutive positions.  Anything irregular (gaps, repeated positions,
 * positions out of order) is several runs.  So an edit trims, splits or drops runs, and no run needs memory of its own.
 */
#ifndef KVC_RUNS_H
#define KVC_RUNS_H

#include "rows/pool.h"

typedef struct kvc_run {
    kvc_block *block;
    int32_t slot;     /* the first slot */
    int32_t count;    /* number of slots, at least 1 */
    int32_t position; /* position of the first row; in a group with a stride its number: rows/stride.h */
    int32_t delta;    /* position now, less the position the keys were rotated for: never a number of rows */
} kvc_run;

/* Positions [begin, end); none where end <= begin. */
typedef struct kvc_interval {
    int32_t begin, end;
} kvc_interval;

/* Widens an interval (end 0: it is empty) to include another, if that has any positions. */
static inline void kvc_interval_add(kvc_interval *all, kvc_interval more) {
    if (more.begin >= more.end) return;
    if (!all->end || more.begin < all->begin) all->begin = more.begin;
    if (more.end > all->end) all->end = more.end;
}

typedef struct kvc_run_list {
    kvc_run *runs; /* runs[first .. first + num): runs before `first` have expired */
    int32_t first, num, capacity;
    /* In a group with a stride, these are numbers of rows, as kvc_run.position is.  end is 0 if there are none. */
    kvc_interval lost;    /* all rows that have expired stood here */
    kvc_interval missing; /* rows that other groups have, and it lacks since groups were replaced: pass/replace.h */
    int32_t min_position, max_position; /* -1 if there are no rows */
    int32_t ascending;                  /* positions rise from row to row */
    int64_t num_rows;
    kvc_run *spare; /* a longer array, allocated but not yet in use: kvc_runs_install */
    int32_t spare_capacity;
} kvc_run_list;

/* Return the first run, and the end of the last one; both NULL while there is no array. */
static inline kvc_run *kvc_runs_begin(const kvc_run_list *list) { return list->runs ? list->runs + list->first : NULL; }
static inline kvc_run *kvc_runs_end(const kvc_run_list *list) {
    return list->runs ? list->runs + list->first + list->num : NULL;
}

/* Returns the part of a run at positions [begin, end).  Its count may be 0. */
kvc_run kvc_run_part(const kvc_run *run, int32_t begin, int32_t end);

/* Makes a list empty. */
void kvc_runs_init(kvc_run_list *list);

/* Frees the list, and drops the slots of its runs. */
void kvc_runs_destroy(kvc_run_list *list, kvc_pool *pool);

/* Frees the list's arrays, but not its slots, which stay held. */
void kvc_runs_free_list(kvc_run_list *list, kvc_memory *memory);

/* Runs that kvc_runs_prepare makes an array longer beyond twice those there are, and those asked for. */
enum { KVC_SPARE_RUNS = 4 };

/* Get memory for a change, so that it cannot fail.  The changes are: `extra` more runs at the end; an edit that
 * splits every run, and `extra` more; expiring [begin, end), and `extra` more.  If the array is too short, allocate
 * a longer one as the spare; nothing else changes.  Can fail with KVC_ERR_NOMEM. */
kvc_status kvc_runs_prepare(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_edit(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_expire(kvc_run_list *list, kvc_memory *memory, int32_t begin, int32_t end, int32_t extra);

/* Replaces the list's array by the spare one, if there is one; or frees the spare one. */
void kvc_runs_install(kvc_run_list *list, kvc_memory *memory);
void kvc_runs_discard(kvc_run_list *list, kvc_memory *memory);

/* Combines kvc_runs_prepare and kvc_runs_install. */
kvc_status kvc_runs_reserve(kvc_run_list *list, kvc_memory *memory, int32_t extra);

/* Shortens the list's array to a capacity that suffices for its runs, if it is longer and there is memory for that. */
void kvc_runs_trim(kvc_run_list *list, kvc_memory *memory, int32_t capacity);

/* Appends a run, whose slots become the list's, and counts its rows.  kvc_runs_push leaves counting to
 * kvc_runs_recount. */
void kvc_runs_append(kvc_run_list *list, const kvc_run *run);
void kvc_runs_push(kvc_run_list *list, const kvc_run *run);

/* Appends the rows of a run, except rows at positions [begin, end), which no query will see.  Drops the slots of
 * these, and notes them in list->lost.  Returns their number. */
int32_t kvc_runs_append_outside(kvc_run_list *list, kvc_pool *pool, const kvc_run *run, int32_t begin, int32_t end);

/* Counts rows anew, and finds their smallest and largest position and whether they ascend. */
void kvc_runs_recount(kvc_run_list *list);

/* Calls visit, unless it is NULL, for the part of every run at positions [begin, end).  Returns the number of rows. */
typedef void kvc_part_fn(void *context, const kvc_run *part);
int64_t kvc_runs_visit(const kvc_run_list *list, int32_t begin, int32_t end, kvc_part_fn *visit, void *context);

/* Appends a part to a list that has capacity for it and becomes a holder of its slots.  This is a kvc_part_fn whose
 * context is the list. */
void kvc_hold_part(void *list, const kvc_run *part);

/* Drops the slots of a part; a kvc_part_fn whose context is the pool. */
void kvc_drop_part(void *pool, const kvc_run *part);

/* A list of positions: ascending, without repeats.  Runs that are looked up there have this stride (rows/stride.h). */
typedef struct kvc_listed {
    const int32_t *positions;
    int64_t num;
    int32_t stride;
} kvc_listed;

/* Returns the first rows of a run at consecutive listed positions, and takes them and the rows before them off the run.
 * Their count is 0 if no row stands at a listed position.  *next is where the search in the list begins, 0 at first.
 * The call sets it for the next rows: if positions rise from run to run, no run takes a search. */
kvc_run kvc_listed_next(const kvc_listed *listed, int64_t *next, kvc_run *rest);

/* Calls visit for the parts at positions [begin, end) that are not listed.  listed NULL: no position is. */
void kvc_runs_visit_unlisted(const kvc_run_list *list, int32_t begin, int32_t end, const kvc_listed *listed,
                             kvc_part_fn *visit, void *context);

/* Drops the rows at positions [begin, end), which no later query will see, after kvc_runs_prepare_expire.  Notes
 * them in list->lost.  Returns their number.  Takes time for rows that are dropped, not for rows that stay. */
int64_t kvc_runs_expire(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end);

/* Returns a run with a row at a position, or NULL. */
const kvc_run *kvc_runs_at(const kvc_run_list *list, int32_t position);

/* ---- sharing: rows of two lists are the same if they lie in the same slot and have the same position ------------- */

/* The runs of a list by rising position, in which rows at a position are found by bisection. */
typedef struct kvc_sorted_runs {
    kvc_run_list list;
    int32_t *ends; /* [list.num] the largest end of the runs up to each; NULL: positions rise from row to row */
} kvc_sorted_runs;

/* Sorts the runs of a list; makes no copy if they rise already.  Can fail with KVC_ERR_NOMEM. */
kvc_status kvc_runs_sort(const kvc_run_list *list, kvc_memory *memory, kvc_sorted_runs *sorted);
void kvc_runs_free_sorted(kvc_memory *memory, kvc_sorted_runs *sorted);

/* Returns a position of [begin, end) at which `list` holds another row than a list that also holds rows there; -1 if
 * they hold the same rows. */
int32_t kvc_runs_find_other(const kvc_run_list *list, const kvc_sorted_runs *than, int32_t begin, int32_t end);

/* Calls visit, unless it is NULL, for the parts at positions [begin, end) that `from` holds and `sorted` does not.
 * Returns the number of parts. */
int32_t kvc_runs_visit_missing(const kvc_sorted_runs *sorted, const kvc_run_list *from, int32_t begin, int32_t end,
                               kvc_part_fn *visit, void *context);

/* Returns which of another list's lost positions become lost here when a list takes that list's rows at [begin, end).
 * These are the positions in the range, trimmed at either end to where the list has rows of its own. */
kvc_interval kvc_runs_lost_in(const kvc_sorted_runs *sorted, kvc_interval lost, int32_t begin, int32_t end);

/* Moves the runs, lost and missing positions of `more` to the end of a list that has capacity for them. */
void kvc_runs_join(kvc_run_list *list, kvc_run_list *more);

#endif
