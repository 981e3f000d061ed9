/* plan.h: makes plans, and counts anew what is to be run of them. */
#ifndef KVC_PLAN_H
#define KVC_PLAN_H

#include "attend/work.h"

/* Forgets which tasks were run. */
void kvc_plan_reset(kvc_plan *plan);

/* Counts anew the parts of units that are yet to be run, from the tasks that are done. */
void kvc_plan_recount(kvc_plan *plan);

/* Copies and checks the caller's arguments, and fills in those left to us. */
kvc_status kvc_plan_check(const kvc_batch *batch, const kvc_plan_args *given, kvc_plan_args *args);

#endif
