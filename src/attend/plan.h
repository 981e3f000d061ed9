/* plan.h: resolves the arguments of a plan, gets one, and resets which of its tasks were run. */
#ifndef KVC_PLAN_H
#define KVC_PLAN_H

#include "attend/work.h"

/* Forgets which tasks were run. */
void kvc_plan_reset(kvc_plan *plan);

/* Recounts plan->remaining from the states of the tasks. */
void kvc_plan_recount(kvc_plan *plan);

/* Resolves arguments: checks them, and fills in the defaults. */
kvc_status kvc_resolve_plan(const kvc_batch *batch, kvc_plan_args *args);

/* Sets *out to a plan for checked arguments: a plan that a call left to the batch, or a new plan. */
kvc_status kvc_plan_get(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **out);

/* Leaves a plan to the batch, for the next layer: a later kvc_plan_get may return it. */
void kvc_plan_leave(kvc_plan *plan);

#endif
