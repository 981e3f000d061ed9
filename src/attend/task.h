/* task.h: attends to the rows of one task. */
#ifndef KVC_TASK_H
#define KVC_TASK_H

#include <string.h>

#include "attend/tiles.h"
#include "space/row_buffer.h"

/* What all tasks of one kvc_attend, or one kvc_plan_run, share. */
typedef struct kvc_call {
    kvc_plan *plan;
    const kvc_attend_args *args;
    const kvc_kernels *kernels;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_row_buffer *buffer; /* the layer's row buffer, where buffered slices have their rows */
    const kvc_policy *policy;
    int32_t num_sinks;      /* of that policy */
    int64_t num_tasks;      /* of the plan */
    const kvc_rope *rope;   /* rotates keys with a delta; NULL: the layer's keys are not rotated */
    const float *angles;    /* [plan->num_deltas][plan->angles_stride] of that rope */
    int prefetch_level;     /* for kvc_ahead */
    int is_rerun, was_done; /* for kvc_plan_run: the round is a rerun; the task was done before in this round */
    float scale;
    kvc_poll_timer timer; /* asked whether to end early, as tasks begin and between the tiles of long ones */
    atomic_int status;    /* KVC_OK, or that of a task that failed */
} kvc_call;

/* A task, whose query rows are those of its job's slices, one slice after the other; or a view of some of these. */
typedef struct kvc_task {
    kvc_call *call;
    const kvc_job *job;
    const kvc_query_slice *slice; /* the slice; the first one if there are several */
    int64_t index;
    int32_t head, split;    /* KV head; split of each slice */
    int32_t k_as, v_as;     /* types as which kernels get keys and values: kvc_taken_as */
    int32_t num_query_rows; /* query row r is token r / heads_per_kv, and query head r % heads_per_kv of the KV head */
    float *workspace;
    float *scores, *acc, *max, *sum, *factor; /* in the workspace, by query row; strides are in plan->workspace */
    /* Query rows, prepared for the kernel that scores keys of delta_index; KVC_UNPREPARED: not loaded yet. */
    float *q;
    int32_t delta_index;
    float *q_blocks; /* sums of blocks of these query rows, where keys have minima */
    int32_t *tokens; /* tokens of the batch that the query rows belong to */
} kvc_task;

enum { KVC_UNPREPARED = -1 }; /* a delta_index */

static inline int32_t kvc_token_of(const kvc_task *t, int32_t r) { return t->tokens[r / t->call->plan->heads_per_kv]; }

static inline int32_t kvc_query_head_of(const kvc_task *t, int32_t r) {
    const int32_t heads = t->call->plan->heads_per_kv;
    return t->head * heads + r % heads;
}

/* Whether kernels get keys, or values, without the minima of their blocks. */
static inline int kvc_lacks_minima(int32_t type, int32_t as) { return KVC_TYPES[type].has_minimum && as == KVC_Q8_0; }

/* Converts the rows of queries, or of the output, of one token and KV head. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim);

/* Makes task i of the plan, which works in `workspace`. */
kvc_task kvc_make_task(kvc_call *c, int64_t i, float *workspace);

/* Returns a view of the query rows of slice m, the first of which is row `first`. */
kvc_task kvc_part_of(const kvc_task *t, int32_t m, int32_t first);

/* The values in acc, and those of partial results, are 2^shift times what they should be. */
int kvc_sum_shift(const kvc_task *t);

/* Whether maxima, also those of partial results, are of scores times log2(e). */
int kvc_counts_powers_of_2(const kvc_task *t);

/* Whether the call is to end early. */
int kvc_is_cancelled(kvc_call *c);

/* Attends to the rows that all slices share, then to those that each has left: acc, max and sum become the results of
 * the slices' splits.  Returns 0 if the call was cancelled. */
int kvc_attend_split(kvc_task *t);

#endif
