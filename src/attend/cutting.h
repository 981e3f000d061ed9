/* cutting.h: cuts the queries of a batch into units, and the rows that each sees into pieces and parts. */
#ifndef KVC_CUTTING_H
#define KVC_CUTTING_H

#include "attend/work.h"

/* Positions [0, sinks) and [low, end): some query of a unit sees them, none sees others. */
typedef struct kvc_reach {
    int32_t sinks, low, end;
} kvc_reach;

/* A unit while its plan is made. */
typedef struct kvc_new_unit {
    kvc_unit unit;
    kvc_reach stored, own; /* of stored rows, and of the batch's own */
    const kvc_run *runs;   /* [num_runs] stored ones */
    int32_t num_runs;
    int32_t is_whole;    /* it has all query tokens of its sequence */
    int64_t stored_rows; /* in reach */
    int64_t own_pieces;  /* pieces of the batch's own rows */
    /* What jobs.c finds: parts below first_part are those of the unit before it in the order of rows.  The others begin
     * in run first_run, before which the unit has rows_before rows in reach. */
    int32_t first_part, first_run;
    int64_t rows_before;
} kvc_new_unit;

static inline int kvc_reach_is_all(const kvc_reach *reach) { return reach->low == 0 && reach->end == INT32_MAX; }

/* Rows of a run in reach. */
static inline int32_t kvc_rows_in_reach(const kvc_reach *reach, const kvc_run *run) {
    if (kvc_reach_is_all(reach)) return run->count;
    return kvc_run_part(run, 0, reach->sinks).count + kvc_run_part(run, reach->low, reach->end).count;
}

int32_t kvc_count_units(const kvc_plan *plan);

/* Fills in `units`, as many as kvc_count_units says, with what each sees.  marks: [batch->num_tokens], all 0, for a
 * batch with parents; they are 0 again afterwards. */
void kvc_list_units(const kvc_plan *plan, kvc_new_unit *units, uint8_t *marks);

/* Lists the pieces of one of the plan's units, and where each of its parts begins.  Parts below from->first_part are
 * those of `before`, whose pieces are listed already. */
void kvc_list_pieces(kvc_plan *plan, const kvc_new_unit *from, kvc_unit *unit, const kvc_unit *before, uint8_t *marks);

#endif
