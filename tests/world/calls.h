/* calls.h: the functions that draw and run calls, for the table in calls.c. */
#ifndef WORLD_CALLS_H
#define WORLD_CALLS_H

#include "world.h"

/* Each chooses arguments; 0: there is nothing to call. */
int draw_begin(call *c);
int draw_put(call *c);
int draw_write(call *c);
int draw_put_cross(call *c);
int draw_commit(call *c);
int draw_abort(call *c);
int draw_batch_spans(call *c);
int draw_dense_rows(call *c);
int draw_attend(call *c);
int draw_choose(call *c);
int draw_weights(call *c);
int draw_dense(call *c);
int draw_plan(call *c);
int draw_tasks(call *c);
int draw_plan_free(call *c);
int draw_copy(call *c);
int draw_share(call *c);
int draw_remove(call *c);
int draw_truncate(call *c);
int draw_shift(call *c);
int draw_divide(call *c);
int draw_keep_positions(call *c);
int draw_inject(call *c);
int draw_mark_inexact(call *c);
int draw_sequence(call *c);
int draw_anything(call *c);
int draw_reserve(call *c);
int draw_room(call *c);
int draw_view(call *c);
int draw_hold_free(call *c);
int draw_extract(call *c);
int draw_save(call *c);
int draw_save_all(call *c);
int draw_restore(call *c);
int draw_load(call *c);
int draw_fork(call *c);
int draw_text(call *c);
int draw_acquire(call *c);
int draw_state(call *c);
int draw_release(call *c);
int draw_checkpoint(call *c);
int draw_pin(call *c);
int draw_unpin(call *c);
int draw_evict(call *c);
int draw_prefix_call(call *c);
int draw_end_forget(call *c);
int draw_fetch(call *c);
int draw_prefix_new(call *c);
int draw_prefix_free(call *c);
int draw_wait(call *c);

/* Each makes the call, and notes what it returned. */
void run_begin(call *c);
void run_put(call *c);
void run_write(call *c);
void run_put_cross(call *c);
void run_commit(call *c);
void run_abort(call *c);
void run_vain(call *c);
void run_batch_spans(call *c);
void run_dense_rows(call *c);
void run_attend(call *c);
void run_choose(call *c);
void run_weights(call *c);
void run_dense(call *c);
void run_plan_new(call *c);
void run_tasks(call *c);
void run_plan_free(call *c);
void run_copy(call *c);
void run_share(call *c);
void run_remove(call *c);
void run_truncate(call *c);
void run_shift(call *c);
void run_divide(call *c);
void run_keep_positions(call *c);
void run_inject(call *c);
void run_mark_inexact(call *c);
void run_clear_sequence(call *c);
void run_keep(call *c);
void run_clear(call *c);
void run_compact(call *c);
void run_validate(call *c);
void run_reserve(call *c);
void run_room(call *c);
void run_view(call *c);
void run_hold_free(call *c);
void run_extract(call *c);
void run_save(call *c);
void run_save_all(call *c);
void run_restore(call *c);
void run_load(call *c);
void run_clone(call *c);
void run_fork(call *c);
void run_lookup(call *c);
void run_acquire(call *c);
void run_state(call *c);
void run_release(call *c);
void run_checkpoint(call *c);
void run_pin(call *c);
void run_unpin(call *c);
void run_evict(call *c);
void run_prefix_clear(call *c);
void run_fetch(call *c);
void run_store_new(call *c);
void run_take_new(call *c);
void run_forget(call *c);
void run_end_forget(call *c);
void run_names(call *c);
void run_identity(call *c);
void run_prefix_new(call *c);
void run_prefix_free(call *c);
void run_wait(call *c);

kvc_status right_store_new(oracle *o, const call *c);
kvc_status right_prefix_free(oracle *o, const call *c);
kvc_status right_always(oracle *o, const call *c);
kvc_status right_wait(oracle *o, const call *c);

#endif
