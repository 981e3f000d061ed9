/* plan.h: checks the arguments of plans, and resets what was run of them. */
#ifndef KVC_PLAN_H
#define KVC_PLAN_H

#include "attend/work.h"

/* Forgets which tasks were run. */
void kvc_plan_reset(kvc_plan *plan);

/* Counts anew, from the tasks that are done, the parts of each unit that are yet to be run. */
void kvc_plan_recount(kvc_plan *plan);

/* Copies and checks the caller's arguments, and fills in the defaults. */
kvc_status kvc_plan_check(const kvc_batch *batch, const kvc_plan_args *given, kvc_plan_args *args);

#endif
