/* rank.h: ranks the rows of a task's token: gives each the key of its score (topk.h).
 *
 * Queries are packed once for all rows of a task that have the same delta, a lane for each head (kvc_rank_query).
 */
#ifndef KVC_RANK_H
#define KVC_RANK_H

#include "attend/seen.h"

/* What the tasks of one kvc_choose, or of one kvc_plan_choose, share. */
typedef struct kvc_ranking {
    kvc_call call; /* the first member: tasks find the others through it */
    const kvc_choose_args *args;
    kvc_rank_lanes lanes;
} kvc_ranking;

static inline const kvc_ranking *kvc_ranking_of(const kvc_task *t) { return (const kvc_ranking *)t->call; }

/* Writes the keys of a cursor's rows for choice c to keys + c * stride: KVC_NO_KEY for rows that the task's token does
 * not see.  Returns 0 if the call was cancelled. */
int kvc_rank_rows(kvc_task *t, kvc_cursor rows, uint32_t *keys, int64_t stride);

#endif
