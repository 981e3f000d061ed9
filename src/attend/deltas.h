/* deltas.h: the deltas by which the keys of a plan are off, and the angles that rotate query rows back.
 *
 * Query rows are rotated by -delta instead of keys by delta, which gives the same scores: q . R(delta) k =
 * R(-delta) q . k.  A query is one row, and the keys that it meets are many.
 */
#ifndef KVC_DELTAS_H
#define KVC_DELTAS_H

#include "attend/work.h"

/* Finds how many floats the angles of one delta take. */
void kvc_find_angles_stride(kvc_plan *plan);

/* Makes a list of `num` deltas, in plan->deltas.values, ascend and have each once: [5, -2, 5] becomes [-2, 5]. */
void kvc_sort_deltas(kvc_plan *plan, int32_t num);

/* Computes the angles of all deltas, for each rope of the plan's group. */
void kvc_compute_angles(kvc_plan *plan);

#endif
