/* chosen.h: the rows that a token chooses: kvc_chosen. */
#ifndef KVC_CHOSEN_H
#define KVC_CHOSEN_H

#include "attend/task.h"

/* Reads args->chosen, which is not NULL. */
kvc_status kvc_chosen_read(const kvc_attend_args *args, kvc_chosen *chosen);

/* Returns the most rows that a choice names, if each position has one row. */
int32_t kvc_most_chosen(const kvc_chosen *chosen);

/* Returns KVC_ERR_INVALID unless the choice suits the plan.  Resolves its strides. */
kvc_status kvc_chosen_check(const kvc_plan_args *plan, int32_t num_kv_heads, int32_t tokens_per_sequence,
                            kvc_chosen *chosen);

/* Lists rows [first, first + most) of the rows that the task's token chooses and sees, by position: as segments in the
 * task's workspace.  Returns their number. */
int64_t kvc_list_chosen(const kvc_task *t, int64_t first, int64_t most);

/* Lists the rows in these ranges, which ascend, of all rows that the task's token sees, in the same way; counts all. */
int64_t kvc_list_seen(const kvc_task *t, const kvc_row_range *ranges, int64_t num_ranges);
int64_t kvc_count_seen(const kvc_task *t);

#endif
