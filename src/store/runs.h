/* runs.h: what a sequence holds in one layer group: runs, in order of arrival.  Pure bookkeeping.
 *
 * A run is consecutive slots at consecutive positions; whatever is irregular (gaps, repeated positions, positions out
 * of order) is several runs.  So every edit is to trim, split or drop runs, and no run needs memory of its own.
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
    kvc_run *runs; /* runs[first .. first + num); the room before `first` is what eviction left */
    int32_t first, num, capacity;
    int32_t lost_end;                   /* below this position rows were evicted */
    int32_t min_position, max_position; /* -1 where there are no rows */
    int32_t ascending;                  /* positions rise from row to row */
    int64_t num_rows;
    kvc_run *spare; /* a longer list that is ready: kvc_runs_install */
    int32_t spare_capacity;
} kvc_run_list;

/* NULL, both, where there is no list yet. */
static inline kvc_run *kvc_runs_begin(const kvc_run_list *list) { return list->runs ? list->runs + list->first : NULL; }
static inline kvc_run *kvc_runs_end(const kvc_run_list *list) {
    return list->runs ? list->runs + list->first + list->num : NULL;
}

/* The part of a run at positions [begin, end); count 0 if there is none. */
kvc_run kvc_run_part(const kvc_run *run, int32_t begin, int32_t end);

void kvc_runs_init(kvc_run_list *list);

/* Frees the list alone: whatever its runs hold stays held. */
void kvc_runs_free_list(kvc_run_list *list, kvc_memory *memory);
void kvc_runs_destroy(kvc_run_list *list, kvc_pool *pool);

/* Room for `extra` more runs at the end, for an edit that splits every run, or for an eviction; the edits below then
 * cannot fail.  A list that has no such room is not touched before kvc_runs_install puts a longer one in its place;
 * kvc_runs_discard forgets that one. */
kvc_status kvc_runs_prepare(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_edit(kvc_run_list *list, kvc_memory *memory, int32_t extra);
kvc_status kvc_runs_prepare_evict(kvc_run_list *list, kvc_memory *memory, int32_t begin, int32_t end, int32_t extra);
void kvc_runs_install(kvc_run_list *list, kvc_memory *memory);
void kvc_runs_discard(kvc_run_list *list, kvc_memory *memory);

/* Bytes of the list. */
int64_t kvc_runs_bytes(const kvc_run_list *list);

/* kvc_runs_prepare and kvc_runs_install. */
kvc_status kvc_runs_reserve(kvc_run_list *list, kvc_memory *memory, int32_t extra);

/* Appends a run whose slots the caller hands over.  kvc_runs_push only lists it: kvc_runs_recount is to follow. */
void kvc_runs_push(kvc_run_list *list, const kvc_run *run);
void kvc_runs_append(kvc_run_list *list, const kvc_run *run);

/* Visits the part of every run that lies at positions [begin, end). */
typedef void kvc_part_fn(void *context, const kvc_run *part);
int64_t kvc_runs_visit(const kvc_run_list *list, int32_t begin, int32_t end, kvc_part_fn *visit, void *context);

/* A kvc_part_fn whose context is the pool: lets go of the slots. */
void kvc_drop_part(void *pool, const kvc_run *part);

/* Drops positions [begin, end).  Returns how many rows that were.  After kvc_runs_prepare_edit. */
int64_t kvc_runs_remove(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end);

/* Drops positions [begin, end) as rows that no query will see any more, remembering how far in lost_end.  Costs what
 * is dropped, not what stays.  After kvc_runs_prepare_evict. */
int64_t kvc_runs_evict(kvc_run_list *list, kvc_pool *pool, int32_t begin, int32_t end);

/* dst, which must be empty with room for as many runs, becomes src's rows below `length`, held once more. */
void kvc_runs_share(kvc_run_list *dst, const kvc_run_list *src, int32_t length);

/* Counts, extremes and order anew, after runs were changed by hand. */
void kvc_runs_recount(kvc_run_list *list);

/* Index of the last row that arrived of those at a position; -1: none. */
int64_t kvc_runs_find(const kvc_run_list *list, int32_t position);

#endif
