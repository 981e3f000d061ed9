/* task.h: runs one task. */
#ifndef KVC_TASK_H
#define KVC_TASK_H

#include "attend/tiles.h"
#include "store/sheet.h"

/* What all tasks of one call share. */
typedef struct kvc_call {
    kvc_plan *plan;
    const kvc_attend_args *args;
    const kvc_kernels *kernels;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_sheet *sheet; /* where loose units have their rows */
    const kvc_policy *policy;
    const kvc_rope *rope; /* what keys that are off are off by; NULL: nothing */
    const float *angles;  /* [plan->num_deltas][plan->angles_stride] for that */
    int level;            /* kvc_ahead */
    int again, was_done;  /* of a task of kvc_plan_run: it runs in such a round; it was done in it before */
    float scale;
    kvc_watch watch;   /* asked by kvc_attend's tasks, and those of it that are long */
    atomic_int status; /* of the first task that did not succeed */
} kvc_call;

/* The query rows of a job's members, one member after the other; or a view of those of one member. */
typedef struct kvc_task {
    kvc_call *call;
    const kvc_job *job;
    const kvc_unit *unit; /* the member, or the first one */
    int64_t index;
    int32_t head, part; /* KV head */
    int32_t num_q;      /* query rows: row r is token r / heads_per_kv, head r % heads_per_kv of the group */
    float *lane;        /* scratch */
    float *scores, *acc, *max, *sum, *factor;
    float *q;        /* the query rows as score wants them, for keys that are off by ... */
    int32_t turn;    /* ... this of the plan's deltas; 0: for those that are not; MIXED; -1: not made yet */
    int32_t *tokens; /* of the batch */
} kvc_task;

static inline int32_t kvc_token_of(const kvc_task *t, int32_t r) { return t->tokens[r / t->call->plan->heads_per_kv]; }

static inline int32_t kvc_query_head_of(const kvc_task *t, int32_t r) {
    const int32_t group = t->call->plan->heads_per_kv;
    return t->head * group + r % group;
}

/* Task i of the plan's, in a lane. */
kvc_task kvc_make_task(kvc_call *c, int64_t i, float *lane);

/* Member m's share of a task; its rows begin at `first`. */
kvc_task kvc_member_of(const kvc_task *t, int32_t m, int32_t first);

/* Reads `cancel` atomically, as another thread may be setting it. */
int kvc_is_cancelled(kvc_call *c);

/* The rows that all members share, then what each has left.  Whether it got to the end. */
int kvc_attend_part(kvc_task *t);

#endif
