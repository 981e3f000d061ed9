/* round.c: which tasks of a plan were run, and which are running: see round.h.
 *
 * A round is one run of each task, for one layer and its arrays, by calls of kvc_plan_run.  Once a task is run a second
 * time, the round is a rerun until the next round.  Then each task merges again the splits of its slices, if all are
 * done.  plan->remaining counts the splits of each slice that are still to be run.
 */
#include "attend/round.h"

#include <string.h>

#include "attend/plan.h"

void kvc_round_lock(kvc_round *round) {
    while (atomic_flag_test_and_set_explicit(&round->lock, memory_order_acquire)) kvc_pause();
}

void kvc_round_unlock(kvc_round *round) { atomic_flag_clear_explicit(&round->lock, memory_order_release); }

/* Begins a new round if the layer or the arrays differ from the last round's, whose tasks are then forgotten. */
static kvc_status join_round(kvc_plan *plan, int32_t layer, const kvc_attend_args *args) {
    kvc_round *round = &plan->round;
    if (round->layer == layer && round->q == args->q && round->out == args->out && round->lse == args->lse)
        return KVC_OK;
    if (round->num_running)
        return kvc_fail(KVC_ERR_BUSY, "tasks are being run for layer %d: a plan serves one layer at a time",
                        round->layer);
    /* After a whole round, each last task has reset `remaining`; otherwise kvc_plan_reset counts anew. */
    if (round->num_done == plan->jobs.num_tasks && !round->is_rerun) {
        memset(round->states, KVC_TASK_OPEN, (size_t)plan->jobs.num_tasks);
        round->num_done = 0;
    } else if (round->num_done) {
        kvc_plan_reset(plan);
    }
    round->is_rerun = 0;
    round->layer = layer;
    round->q = args->q;
    round->out = args->out;
    round->lse = args->lse;
    return KVC_OK;
}

/* Whether running this task makes the round a rerun. */
static int begins_rerun(const kvc_round *round, int64_t task) {
    return !round->is_rerun && round->states[task] == KVC_TASK_DONE;
}

kvc_status kvc_round_begin(kvc_call *c, int32_t layer, int64_t task) {
    kvc_plan *plan = c->plan;
    kvc_round *round = &plan->round;
    kvc_round_lock(round);
    kvc_status status = join_round(plan, layer, c->args);
    /* This loop ends, as running tasks wait for nothing. */
    while (status == KVC_OK && begins_rerun(round, task) && round->num_running) {
        kvc_round_unlock(round);
        kvc_pause();
        kvc_round_lock(round);
        status = join_round(plan, layer, c->args); /* another layer may have begun meanwhile */
    }
    if (status == KVC_OK && begins_rerun(round, task)) {
        kvc_plan_recount(plan); /* by states: tasks that ended a slice had reset `remaining` for the next round */
        round->is_rerun = 1;
    }
    if (status == KVC_OK && round->states[task] == KVC_TASK_RUNNING)
        status = kvc_fail(KVC_ERR_BUSY, "task %lld is being run by another thread", (long long)task);
    if (status == KVC_OK) {
        c->is_rerun = round->is_rerun;
        c->was_done = round->states[task] == KVC_TASK_DONE;
        round->states[task] = KVC_TASK_RUNNING;
        round->num_running++;
    }
    kvc_round_unlock(round);
    return status;
}

void kvc_round_end(const kvc_call *c, int64_t task, int is_done) {
    kvc_round *round = &c->plan->round;
    kvc_round_lock(round);
    round->states[task] = is_done || c->was_done ? KVC_TASK_DONE : KVC_TASK_OPEN;
    round->num_running--;
    round->num_done += is_done && !c->was_done;
    kvc_round_unlock(round);
}
