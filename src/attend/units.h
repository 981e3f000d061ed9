/* units.h: cuts a batch's queries, and the rows that they see, into units and parts. */
#ifndef KVC_UNITS_H
#define KVC_UNITS_H

#include "attend/work.h"

/* Positions [0, sinks) and [low, end): some query of a unit sees them, none sees others. */
typedef struct kvc_reach {
    int32_t sinks, low, end;
} kvc_reach;

/* A unit, while its plan is made. */
typedef struct kvc_draft_unit {
    kvc_unit unit;
    kvc_reach stored, own; /* of stored rows, and of the batch's own */
    const kvc_run *runs;   /* [num_runs] stored ones */
    int32_t num_runs;
    int32_t is_whole;    /* all query tokens of its sequence */
    int64_t stored_rows; /* in reach */
    int64_t own_pieces;  /* of the batch's own rows */
    /* Parts below first_part are those of the unit before it in the order of rows.  The others begin in first_run,
     * before which it has rows_before rows in reach. */
    int32_t first_part, first_run;
    int64_t rows_before;
} kvc_draft_unit;

/* A unit's place in the order of rows, and what it has in common with the unit before it there. */
typedef struct kvc_neighbour {
    int32_t unit;
    int32_t same_runs; /* that they begin with; -1: they are not worked off alike */
    int64_t rows;      /* in reach, at the beginning */
    int64_t tiled;     /* of these, up to where the last whole tile ends */
    int64_t shared;    /* in the part that is made jobs of */
} kvc_neighbour;

/* What a plan is made with.  Units come first; then it is known how much memory the plan needs. */
typedef struct kvc_maker {
    kvc_plan *plan;
    kvc_draft_unit *units;        /* [plan->num_units]; NULL: they are only counted */
    kvc_neighbour *order, *spare; /* [plan->num_units] */
    uint8_t *marks;               /* [batch->num_tokens], all 0, for a batch with parents */
    int32_t num_whole;            /* units of a whole sequence: the first of `order` */
    int64_t num_pieces, num_rows; /* added so far */
    void *scratch;                /* that these are in; NULL where there is one unit, without marks */
    uint64_t size;
    kvc_draft_unit one_unit;
    kvc_neighbour one_order;
} kvc_maker;

/* Rows of a run in reach. */
int32_t kvc_rows_in_reach(const kvc_reach *r, const kvc_run *run);

/* Counts the units of the plan, and lists them where there is an array. */
void kvc_cut_batch(kvc_maker *m);

/* Lists the pieces of all units, and where each part begins. */
void kvc_fill_units(kvc_maker *m);

#endif
