/* runs.h: lists of runs: the rows a sequence holds in one layer group, in order of arrival.  Pure bookkeeping.
 *
 * A run is consecutive slots of one block at consecutive positions.  Whatever is irregular (gaps, repeated positions,
 * positions out of order) is several runs.  So an edit trims, splits or drops runs, and no run needs memory of its own.
 */
#ifndef KVC_RUNS_H
#define KVC_RUNS_H

#include "store/pool.h"

typedef struct kvc_run {
    kvc_block *block;
    int32_t slot;     /* first */
    int32_t count;    /* at least 1 */
    int32_t position; /* of the first row */
    int32_t delta;    /* position now, less the position the keys were rotated for */
} kvc_run;

typedef struct kvc_run_list {
    kvc_run *runs; /* runs[first .. first + num); those before `first` were evicted */
    int32_t first, num, capacity;
    int32_t lost_end;                   /* rows below this position were evicted */
    int32_t min_position, max_position; /* -1 where there are no rows */
    int32_t ascending;                  /* positions rise from row to row */
    int64_t num_rows;
    kvc_run *spare; /* a longer array, allocated but not yet in use: kvc_runs_install */
    int32_t spare_capacity;
} kvc_run_list;

/* The first run, and the end of the last one; both NULL while there is no array. */
static inline kvc_run *kvc_runs_begin(const kvc_run_list *list) { return list->runs ? list->runs + list->first : NULL; }
static inline kvc_run *kvc_runs_end(const kvc_run_list *list) {
    return list->runs ? list->runs + list->first + list->num : NULL;
}

/* The part of a run at positions [begin, end); its count is 0 if there is none. */
kvc_run kvc_run_part(const kvc_run *run, int32_t begin, int32_t end);

void kvc_runs_init(kvc_run_list *list);

/* Frees the list, and drops the slots of its runs. */
void kvc_runs_destroy(kvc_run_list *list, kvc_pool *pool);

/* Frees the list alone: its slots stay held. */
void kvc_runs_free_list(kvc_run_list *list, kvc_memory *memory);

/* Get memory for a change, which cannot fail afterwards: for `extra` more runs at the end; for an edit that splits
 * every run, and `extra` more; for evicting [begin, end), and `extra` more.  Where the array is too short, a longer one
 * becomes the spare one; nothing else changes.  KVC_ERR_NOMEM. */
kvc_status kvc_runs_prepare(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_edit(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_evict(kvc_run_list *list, kvc_memory *memory, int32_t begin, int32_t end, int32_t extra);

/* Puts the spare array, if there is one, in the place of the list's; or frees it. */
void kvc_runs_install(kvc_run_list *list, kvc_memory *memory);
void kvc_runs_discard(kvc_run_list *list, kvc_memory *memory);

/* Combines kvc_runs_prepare and kvc_runs_install. */
kvc_status kvc_runs_reserve(kvc_run_list *list, kvc_memory *memory, int32_t extra);

/* Bytes of the list's array. */
int64_t kvc_runs_bytes(const kvc_run_list *list);

/* Appends a run, whose slots become the list's, and counts its rows.  kvc_runs_push leaves counting to
 * kvc_runs_recount. */
void kvc_runs_append(kvc_run_list *list, const kvc_run *run);
void kvc_runs_push(kvc_run_list *list, const kvc_run *run);

/* Counts rows, and finds their smallest and largest position and whether they ascend, after runs were changed by hand.
 */
void kvc_runs_recount(kvc_run_list *list);

/* Calls visit, unless it is NULL, for the part of every run at positions [begin, end).  Returns the number of rows. */
typedef void kvc_part_fn(void *context, const kvc_run *part);
int64_t kvc_runs_visit(const kvc_run_list *list, int32_t begin, int32_t end, kvc_part_fn *visit, void *context);

/* A kvc_part_fn whose context is the pool: drops the slots. */
void kvc_drop_part(void *pool, const kvc_run *part);

/* Drops the rows at positions [begin, end), after kvc_runs_prepare_edit.  Returns how many there were. */
int64_t kvc_runs_remove(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end);

/* Drops the rows at positions [begin, end), which no query will see any more, and notes that in lost_end.  Takes time
 * for the rows that go, not for those that stay.  After kvc_runs_prepare_evict. */
int64_t kvc_runs_evict(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end);

/* Makes dst, an empty list with capacity for all runs of src, hold the rows of src below position `length` as well. */
void kvc_runs_share(kvc_run_list *dst, const kvc_run_list *src, int32_t length);

/* Index, in order of arrival, of the row that arrived last at a position; -1: none did. */
int64_t kvc_runs_find(const kvc_run_list *list, int32_t position);

#endif
