/* work.h: a plan: the work of an attention, cut into tasks.
 *
 * Who attends to what becomes a list of units: the query rows of one sequence that are worked off together, and the
 * pieces of runs they may see.  A unit is done for each KV head apart, and its rows may be cut into parts whose results
 * are merged by log-sum-exp.  A job is one part of one unit, or of several whose rows are the same for a while, which
 * are then read once for all of them; a task is one KV head of a job.
 *
 * The files of attend/ stack in this order, each calling only those before it:
 *   work.h         the plan: units, parts, pieces, jobs
 *   units.c        what a query sees, cut by length
 *   jobs.c         which units share rows, and in what order tasks are run
 *   plan.c         makes plans: their arrays and public functions
 *   tiles.c        walks the rows of a task, 64 at a time
 *   task.c         runs a task
 *   merge.c        merges the parts of a unit
 *   attend.c       runs tasks for the public functions
 * dense.c stands apart.
 */
#ifndef KVC_WORK_H
#define KVC_WORK_H

#include "store/batch.h"

/* The sizes that the rules in units.c and jobs.c speak of. */
enum {
    KVC_STREAM_ROWS = 32,   /* most query rows of a unit that is streamed */
    KVC_TASK_QUERIES = 128, /* most that are not cut into several units, and most of a streamed task */
    KVC_TILE_QUERIES = 256, /* most of a tiled task where a token has not more */
    KVC_STREAM_TURNS = 4, /* so many changes of delta in a window, or more: keys are turned, not the query rows, ... */
    KVC_TILED_TURNS = 1,  /* ... of a unit that is streamed, or tiled */
    KVC_PART_ROWS = 512,  /* least rows of a part, but for the last one */
    KVC_TILED_TASKS = 256 /* about so many a tiled sequence is cut into */
};

/* Rows of one run that some query of the unit may see. */
typedef struct kvc_piece {
    const uint8_t *rows; /* of the block; NULL: of the layer's sheet */
    int32_t slot, count, position;
    int32_t turn;  /* 0: its keys are where they should be; n: they are off by plan->deltas[n - 1] */
    int32_t token; /* of the batch, the first one: index into batch->order; -1: stored rows */
} kvc_piece;

/* Where a part begins.  Its pieces follow each other; those of the next part may be elsewhere, as parts that several
 * units have are listed once. */
typedef struct kvc_start {
    int64_t piece;
    int32_t offset;
} kvc_start;

typedef struct kvc_unit {
    int32_t sequence;          /* of the batch */
    int32_t first, num_tokens; /* query tokens: batch->order[first .. first + num_tokens) */
    int32_t tiled;             /* many query rows: tiles are decoded and multiplied; few: streamed */
    int32_t is_loose;          /* its rows lie in sheets */
    int32_t num_parts;
    int64_t num_rows, part_rows; /* in reach; of a part, the last may have less */
    int64_t first_start, first_counter;
    int64_t first_own_piece, end_piece; /* of the batch's own rows */
    uint64_t partials;                  /* offset in plan->partials, in floats */
} kvc_unit;

typedef struct kvc_job {
    int64_t first_member; /* units: plan->members[first_member .. first_member + num_members) */
    int32_t num_members;
    int32_t part;   /* of each of them */
    int64_t shared; /* rows at its beginning that are the same for all; each goes on with its own */
    int64_t rows;   /* that are read: those shared once */
    int64_t work;   /* rows times query rows */
} kvc_job;

/* States of a task, in a round of kvc_plan_run. */
enum { KVC_TASK_OPEN, KVC_TASK_RUNNING, KVC_TASK_DONE };

/* What kvc_plan_run knows of the tasks, which are run for a layer and its arrays, each once.  After one failed, or was
 * run a second time, tasks are run again: each then merges what there is of its units anew, so that the last one leaves
 * what is right, in any order. */
typedef struct kvc_round {
    atomic_flag lock;
    int32_t layer;
    int32_t again; /* tasks are run again, until it is another layer's turn; parts are kept and merged under the lock */
    int32_t failed;
    const void *q, *out, *lse;
    int64_t num_running, num_done;
    uint8_t *states; /* [num_tasks] */
} kvc_round;

/* What one running task works in, in floats from the beginning of its lane. */
typedef struct kvc_lane_layout {
    uint64_t q, scores, acc, max, sum, factor, tokens, keys, values, turned, size;
    int32_t q_stride, acc_stride;
} kvc_lane_layout;

struct kvc_plan {
    kvc_plan_link link; /* the first member: what batch->plans lists */
    kvc_batch *batch;
    kvc_plan_args args;
    atomic_flag taken; /* by whoever made it, until freed: then it may serve another call */
    int32_t is_made;   /* what follows is there; set with the mutex held, as fork() holds it */
    int32_t group;
    int32_t num_kv_heads, k_dim, v_dim; /* of the layers it serves */
    int32_t heads_per_kv;
    int32_t num_units, num_lanes;
    int64_t num_jobs;                  /* each is as many tasks as there are KV heads: */
    int32_t by_head;                   /* those of a KV head follow each other; else those of a job */
    double work;                       /* multiply-adds */
    int32_t num_cross_puts;            /* in the group, when the plan was made */
    int32_t num_deltas, angles_stride; /* in floats */
    int32_t *deltas;                   /* by which keys are off, ascending, all different and none 0 */
    float *angles;                     /* [cache->num_ropes][num_deltas][angles_stride] that turn queries by as much */
    double *turns;                     /* of a kvc_rope_table, while the plan is made */
    uint8_t *non_causal;               /* what args points at */
    kvc_unit *units;
    kvc_piece *pieces;
    kvc_start *starts;
    kvc_job *jobs;
    int32_t *members;      /* of the jobs: units */
    atomic_int *remaining; /* for each unit and KV head: parts that are yet to be run */
    kvc_round round;
    kvc_lane_layout lane;
    float *partials;
    float *lanes;
    atomic_flag *lane_taken;
};

/* Whether a token of the plan's range sees later positions too. */
static inline int kvc_plan_sees_all(const kvc_plan *plan, int32_t token) {
    return plan->args.non_causal && plan->args.non_causal[token - plan->args.first];
}

/* How often rows were put in the group since the batch began, where it is a cross-attention layer; else 0. */
static inline int32_t kvc_num_cross_puts(const kvc_batch *batch, int32_t group) {
    const int32_t first = batch->cache->num_token_groups;
    return group < first ? 0 : atomic_load(&batch->num_cross_puts[group - first]);
}

/* False once a later kvc_put replaced the cross-attention rows the plan was made for. */
static inline int kvc_plan_is_current(const kvc_plan *plan) {
    return plan->num_cross_puts == kvc_num_cross_puts(plan->batch, plan->group);
}

/* What task i is. */
static inline const kvc_job *kvc_job_of(const kvc_plan *plan, int64_t i) {
    return &plan->jobs[plan->by_head ? i % plan->num_jobs : i / plan->num_kv_heads];
}
static inline int32_t kvc_head_of(const kvc_plan *plan, int64_t i) {
    return (int32_t)(plan->by_head ? i / plan->num_jobs : i % plan->num_kv_heads);
}

/* Member m of a job. */
static inline const kvc_unit *kvc_unit_of(const kvc_plan *plan, const kvc_job *job, int32_t member) {
    return &plan->units[plan->members[job->first_member + member]];
}

/* Query rows of a unit, for each KV head. */
static inline int32_t kvc_num_q(const kvc_plan *plan, const kvc_unit *unit) {
    return unit->num_tokens * plan->heads_per_kv;
}

/* Rows of part p. */
static inline int64_t kvc_part_rows(const kvc_unit *unit, int32_t p) {
    const int64_t rest = unit->num_rows - p * unit->part_rows;
    return rest < unit->part_rows ? rest : unit->part_rows;
}

/* Floats of one part's result: max [q], sum [q], accumulated values [q][acc_stride]. */
static inline uint64_t kvc_partial_size(int32_t num_q, int32_t acc_stride) {
    return kvc_align_up(2 * (uint64_t)num_q, KVC_LANES) + (uint64_t)num_q * (uint64_t)acc_stride;
}

#endif
