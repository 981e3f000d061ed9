/* jobs.h: joins units that share rows into jobs, and puts these in the order in which they are run. */
#ifndef KVC_JOBS_H
#define KVC_JOBS_H

#include "attend/cutting.h"

/* A unit in the order of rows, and what it has in common with the unit before it in that order. */
typedef struct kvc_neighbour {
    int32_t unit;
    int32_t same_runs;      /* leading runs that both have; -1: they are of different kinds, and share nothing */
    int64_t same_rows;      /* leading rows in reach that both have */
    int64_t same_tile_rows; /* same_rows, rounded down to whole tiles */
    int64_t shared_rows;    /* shared rows within the part that is being made into jobs */
} kvc_neighbour;

/* Units in the order of their rows: those with most in common stand side by side. */
typedef struct kvc_unit_order {
    kvc_neighbour *items, *spare; /* [plan->num_units] each; spare: memory for merging */
    int32_t num_whole;            /* items[0 .. num_whole): units of a whole sequence; only these are sorted */
} kvc_unit_order;

/* Sorts units, and finds which parts of each are also those of the unit before it. */
void kvc_order_units(kvc_new_unit *units, int32_t num_units, kvc_unit_order *order);

/* Fills in the plan's jobs, the largest first.  Call once the units have their pieces.  Overwrites order->items. */
void kvc_find_jobs(kvc_plan *plan, const kvc_new_unit *units, const kvc_unit_order *order);

#endif
