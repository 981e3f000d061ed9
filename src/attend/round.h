/* round.h: rounds of kvc_plan_run (kvc_round): which tasks of a plan were run, and which are running. */
#ifndef KVC_ROUND_H
#define KVC_ROUND_H

#include "attend/task.h"

void kvc_round_lock(kvc_round *round);
void kvc_round_unlock(kvc_round *round);

/* Begins a task of the round; sets c->is_rerun and c->was_done.  Before a rerun, waits until no task is running. */
kvc_status kvc_round_begin(kvc_call *c, int32_t layer, int64_t task);

/* Ends a task of the round.  A task that was done before and is cancelled now stays done, with its earlier result. */
void kvc_round_end(const kvc_call *c, int64_t task, int is_done);

#endif
