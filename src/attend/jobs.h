/* jobs.h: joins slices that share rows into jobs, and puts these in the order in which they are run. */
#ifndef KVC_JOBS_H
#define KVC_JOBS_H

#include "attend/cutting.h"

/* A slice in the order of rows, and its first rows that the slice before it shares. */
typedef struct kvc_neighbour {
    int32_t slice;
    int32_t same_runs;      /* leading runs that both have; -1: they are of different kinds, and share nothing */
    int64_t same_rows;      /* leading rows in reach that both have */
    int64_t same_tile_rows; /* same_rows, rounded down to whole tiles */
    int64_t shared_rows;    /* shared rows within the split that is being made into jobs */
} kvc_neighbour;

/* Slices in the order of their rows: those with most in common stand side by side. */
typedef struct kvc_slice_order {
    kvc_neighbour *items, *merged; /* [plan->num_slices] each; merged: memory for merging */
    int32_t num_sharing;           /* items[0 .. num_sharing): slices that may share; only these are sorted */
} kvc_slice_order;

/* Sorts slices, and finds which splits each shares with the slice before it. */
void kvc_order_slices(kvc_new_slice *slices, int32_t num_slices, kvc_slice_order *order);

/* Fills in the plan's jobs, the largest first.  Call once the slices have their segments.  Overwrites order->items. */
void kvc_find_jobs(kvc_plan *plan, const kvc_new_slice *slices, const kvc_slice_order *order);

#endif
