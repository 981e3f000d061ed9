/* select.h: rows that a token selects by the sketches of their keys (kvc_plan_args.select_rows). */
#ifndef KVC_SELECT_H
#define KVC_SELECT_H

#include "attend/chosen.h"

/* Scores the sketches of the rows in the task's split, for each of its slices.  Returns 0 if the call was cancelled. */
int kvc_score_sketches(kvc_task *t);

/* Keeps what was found of the split, for the task that selects.  The task has one slice. */
void kvc_keep_found(const kvc_task *t);

/* Returns a lister of the rows that a view's token selects, once its slice is scored, or of all.  Sets their number. */
kvc_row_lister kvc_list_selected(const kvc_task *t, int64_t *num_rows);

#endif
