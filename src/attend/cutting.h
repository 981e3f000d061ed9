/* cutting.h: cuts the queries of a batch into slices, and the rows that each sees into segments and splits. */
#ifndef KVC_CUTTING_H
#define KVC_CUTTING_H

#include "attend/work.h"

/* The positions that queries of a slice see: [0, sinks) and [low, end). */
typedef struct kvc_reach {
    int32_t sinks, low, end;
} kvc_reach;

/* What a plan hides of the batch's sequences, and leaves of their stored runs; both NULL where it hides nothing. */
typedef struct kvc_shown {
    kvc_masked_ranges *masked; /* [batch->num_sequences] */
    kvc_run_list *stored;      /* [batch->num_sequences] */
} kvc_shown;

/* A slice, with notes that are needed only while its plan is made. */
typedef struct kvc_new_slice {
    kvc_query_slice slice;
    kvc_reach stored, own; /* reach in the stored rows, and in the batch's own */
    const kvc_run *runs;   /* [num_runs] that are stored, without masked rows */
    int32_t num_runs;
    const kvc_pending *pending;      /* the batch's own rows of its sequence */
    const kvc_masked_ranges *masked; /* of its sequence; NULL: the plan hides nothing */
    int32_t may_share;               /* it has all query tokens of its sequence, or its token selects in one split */
    int32_t stored_rises;            /* positions rise from stored row to stored row */
    int32_t rises, last_position;    /* positions rise from row to row, over all; position of the last one so far */
    int64_t stored_rows, own_rows;   /* number of stored rows in reach, and of the batch's own */
    int64_t own_segments;            /* number of segments of the batch's own rows, ... */
    int32_t own_rises;               /* ... whose positions rise */
    int32_t own_from;                /* the lowest position of the batch's own rows */
    int32_t new_from;                /* end of the reach of the sequence's slice before; 0: it is the first */
    int64_t new_segments;            /* number of segments of the batch's own rows that begin there or later */
    int64_t tangled_rows;            /* the last rows, which do not lie by position: none, the batch's own, or all */
    /* Filled in by jobs.c.  Splits below first_split belong to the slice before it in the order of rows.  The others
     * begin in run first_run; the runs before that have rows_before rows in reach. */
    int32_t first_split, first_run;
    int64_t rows_before;
} kvc_new_slice;

/* What products in bytes cost, in the units of pays_in_bytes in cutting.c.  Tests of short sequences make it 0. */
typedef struct kvc_byte_costs {
    int32_t rounded, stored; /* of a row that is rounded to bytes, and of one that is stored as bytes */
    int32_t query;           /* of a query row */
} kvc_byte_costs;

extern kvc_byte_costs kvc_costs_in_bytes;

static inline int kvc_reach_is_all(const kvc_reach *reach) { return reach->low == 0 && reach->end == INT32_MAX; }

/* Counts the rows of a run that are in reach. */
static inline int32_t kvc_rows_in_reach(const kvc_reach *reach, const kvc_run *run) {
    if (kvc_reach_is_all(reach)) return run->count;
    return kvc_run_part(run, 0, reach->sinks).count + kvc_run_part(run, reach->low, reach->end).count;
}

/* Returns an upper bound of how many runs are left of those stored when masked rows are cut out. */
int64_t kvc_most_shown_runs(const kvc_plan *plan);

/* Fills in shown->stored, from shown->masked.  runs: memory for kvc_most_shown_runs(plan). */
void kvc_cut_masked(const kvc_plan *plan, const kvc_shown *shown, kvc_run *runs);

/* Resolves select_rows, which is not 0: checks it; makes it 0, so that all rows are read, if no sequence selects. */
kvc_status kvc_resolve_selecting(const kvc_batch *batch, kvc_plan_args *args);

/* Returns an upper bound of how many slices the plan's queries are cut into. */
int32_t kvc_count_slices(const kvc_plan *plan);

/* Decides whether sequences of a KVC_PRECISION_INT8 plan may be in bytes: plan->in_bytes and plan->rounds_rows. */
void kvc_allow_bytes(kvc_plan *plan);

/* Lists the slices, with what each sees; there is room for kvc_count_slices(plan).  Returns their number.  marks:
 * [batch->num_tokens], all 0, for a batch with parents; they are 0 again afterwards. */
int32_t kvc_list_slices(const kvc_plan *plan, const kvc_shown *shown, kvc_new_slice *slices, uint8_t *marks);

/* Whether the rows of a slice are the last ones of `before`, the slice before it in the list, and perhaps more of the
 * batch's own rows behind these.  Its segments then lie among the other's, so that a prompt's take memory once. */
int kvc_goes_on(const kvc_plan *plan, const kvc_new_slice *before, const kvc_new_slice *u);

/* Returns an upper bound of how many segments a slice adds to the plan.  goes_on: kvc_goes_on for the slice before. */
int64_t kvc_most_segments(const kvc_new_slice *u, int goes_on);

/* Adds the segments of `slice`, which is the plan's copy of from->slice, to the plan, and fills in where its splits
 * begin.  Splits below from->first_split belong to `before`, the slice before it in the order of rows, and are listed
 * already.  goes_on: kvc_goes_on for that slice. */
void kvc_list_segments(kvc_plan *plan, const kvc_new_slice *from, kvc_query_slice *slice, const kvc_query_slice *before,
                       int goes_on, uint8_t *marks);

#endif
