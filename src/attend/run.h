/* run.h: runs all tasks of a plan, or one task, whatever the tasks do. */
#ifndef KVC_RUN_H
#define KVC_RUN_H

#include "attend/task.h"
#include "pass/put.h"

/* What the tasks of a call do. */
struct kvc_work {
    int (*begin)(kvc_task *t);      /* does what no other task needs; returns 0 if the call was cancelled */
    void (*end)(const kvc_task *t); /* then ends the task's splits */
    const char *cancelled;          /* the message of KVC_ERR_CANCELLED */
};

/* Checks that the plan, which may have been made for another layer, serves this one. */
kvc_status kvc_check_plan_layer(const kvc_plan *plan, int32_t layer);

/* Checks that the batch's own rows that the plan's slices see were put, or are about to be, by `put`. */
kvc_status kvc_check_all_seen(const kvc_plan *plan, int32_t layer, const kvc_put_args *put);

/* Fills in what the tasks of a call share. */
void kvc_call_init(kvc_call *c, kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_work *work);

/* Returns a cursor over `count` rows of a slice for a part, from row `offset` of a segment on. */
kvc_cursor kvc_cursor_from(const kvc_call *c, const kvc_query_slice *slice, int32_t part, const kvc_segment *segment,
                           int64_t offset, int64_t count);

/* Returns a cursor over `count` rows of a split of a slice, from its row `row` on. */
kvc_cursor kvc_cursor_at(const kvc_call *c, const kvc_query_slice *slice, int32_t split, int32_t part, int64_t row,
                         int64_t count);

/* Counts a split of a slice as done, for a slice that has several.  Returns whether all of them are. */
int kvc_ends_slice(const kvc_task *t);

/* Runs all tasks, on several threads if that is worth it. */
kvc_status kvc_run_tasks(kvc_call *c);

/* Checks that the rows that a task sees were put, and runs it. */
kvc_status kvc_run_task(kvc_call *c, int32_t layer, int64_t task);

#endif
