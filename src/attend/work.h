/* work.h: a plan: one attention, cut into tasks.
 *
 * Rows are keys and values; query rows are one query head of one token each.  A slice is the query rows of one sequence
 * that are attended for together, and the segments of runs whose rows they may see.  It is computed for each part
 * apart.  A part is the query heads of one KV head, or some of them.  The rows of a slice may be cut into splits, whose
 * results are merged by log-sum-exp.  A job is one split of one slice, or of several slices that begin with the same
 * rows, which are then read once for all of them.  A task is a job for one part.
 *
 * In a plan with select_rows, each query token of a long sequence is a slice.  Its tasks score sketches, and the last
 * one attends to the rows that are selected (select.c).  Splits of the slice are of rows that are scored.  Slices of
 * one split that begin with the same rows become a job, too.
 *
 * A plan for a layer of keys alone is for choosing rows (choose.c): its tasks rank rows, and have all query heads, as
 * there is one part.
 *
 * In a plan for choosing, or for chosen rows, each query token is a slice.  Which rows it sees is known once a task has
 * the choice.  So the slices of a sequence have the same segments: all rows that any of its queries may see, by
 * position.  Each task of an attention lists the chosen rows among them (chosen.c).
 *
 * The files of attend/ stack in this order; each calls only those above it in this list:
 *
 *   work.h     the plan: its slices, segments, splits, jobs and tasks
 *   cutting.c  cuts queries into slices, and the rows that each sees into segments and splits
 *   jobs.c     which slices share rows, and in which order tasks are run
 *   deltas.c   the deltas of a plan, and their angles
 *   plan.c     makes plans: memory, and the public functions
 *   task.c     a task, and its rows a tile at a time
 *   minima.c   what the minima of blocks add to scores and sums
 *   seen.c     which rows of a tile a query sees, and what becomes of the scores of others
 *   step.c     the rows of a tile as kernels take them, query rows prepared for them; attends to a tile for few
 *   multiply.c attends to a tile for many query rows
 *   bytes.c    does so in bytes
 *   chosen.c   lists the chosen rows of a task
 *   select.c   scores the sketches of a task, and lists the rows that are selected
 *   round.c    which tasks of a plan were run
 *   run.c      runs tasks
 *   attend.c   attends tile by tile, merges the splits of a slice, and writes the result: kvc_attend and kvc_plan_run
 *   topk.c     finds the best of many entries
 *   rank.c     ranks rows for choosing
 *   choose.c   chooses: kvc_choose and kvc_plan_choose
 *
 * dense.c, rows and masks for an attention of the caller's own, and weights.c, which weighs stored rows without a
 * batch, use none of them.
 */
#ifndef KVC_WORK_H
#define KVC_WORK_H

#include "pass/masked.h"

/* The sizes that the rules at the top of cutting.c and jobs.c name.  Query rows are counted for one KV head. */
enum {
    KVC_STREAM_QUERIES = 32,    /* most query rows of a slice that is streamed */
    KVC_SELECTING_QUERIES = 32, /* most query rows of a task that selects, unless one token has more */
    KVC_TASK_QUERIES = 128,   /* most query rows of a sequence that is never cut into slices, and of a streamed task */
    KVC_TILE_QUERIES = 256,   /* most query rows of a tiled task, unless one token has more */
    KVC_SPLIT_ROWS = 512,     /* fewest rows of a split, except a slice's last one */
    KVC_TASKS_PER_THREAD = 4, /* tasks that give each thread as much to do, about */
    KVC_BYTE_TILE_QUERIES = 512,         /* the same of a task in bytes, whose tiles take longer to pack */
    KVC_TILED_TASKS = 144,               /* most tasks that a tiled sequence is cut into, about */
    KVC_JOINED_SPLITS = 16,              /* most splits that a streamed task takes, one after the other, ... */
    KVC_JOINED_TASKS = 32,               /* ... if that leaves each thread as many tasks */
    KVC_CHUNK_ROWS = KVC_SIZE(4096, 16), /* rows whose sketches are scored together, where rows are selected */
    KVC_SHORT_ROW = 72,   /* most bytes of a key, and of a value, of which KVC_TILE are streamed as a tile ... */
    KVC_MIDDLE_ROW = 192, /* ... and half as many */
    /* If the delta changes at least this often in a tile, keys are rotated instead of query rows. */
    KVC_STREAM_DELTA_CHANGES = 4, /* in KVC_PANEL rows, in slices that are streamed */
    KVC_TILED_DELTA_CHANGES = 1   /* in slices that are tiled */
};

/* How the rows of a slice are attended to. */
enum {
    KVC_STREAMED, /* for few query rows: each row is read once for all of them */
    KVC_TILED,    /* for many: tiles of rows are decoded and multiplied */
    KVC_IN_BYTES, /* tiles are multiplied in bytes */
    KVC_NUM_WAYS
};

/* Rows of one run that queries of a slice may see. */
typedef struct kvc_segment {
    const uint8_t *rows;           /* the block's rows */
    int32_t slot, count, position; /* slot of the first row, number of rows, position of the first row */
    int32_t delta_index;           /* n: the keys are off by plan->deltas.values[n - 1]; 0: they are not off */
    int32_t token;                 /* index into plan->order of the first row's token; -1: stored rows */
} kvc_segment;

/* The beginning of a split: row `offset` of a segment.  The segments of a split follow each other.  The slice's next
 * split may be elsewhere, because splits that slices share are listed once.  So are all rows of slices of a prompt. */
typedef struct kvc_split_start {
    int64_t segment;
    int32_t offset;
} kvc_split_start;

typedef struct kvc_query_slice {
    int32_t sequence;          /* index into batch->sequences */
    int32_t first, num_tokens; /* query tokens: batch->order[first .. first + num_tokens) */
    int32_t tiled;             /* how its rows are attended to: KVC_STREAMED and so on */
    int32_t tile_rows;         /* rows of a tile; of streamed ones, of whole tiles in all layers, or of a chunk */
    int32_t by_token;          /* it is one token, and has all rows that tokens of its sequence may see, by position */
    int32_t selects;           /* its token selects rows by their sketches (select.h), or reads all in the same way */
    int32_t lacks_rows;        /* its sequence has none in a cross-attention layer, masked or not */
    int32_t num_splits;
    /* Rows in reach, or the most rows that may be chosen; rows of each split, of which the last may have fewer. */
    int64_t num_rows, split_rows;
    int64_t num_seen;                       /* rows that the token of a slice that selects sees */
    int64_t first_start;                    /* plan->starts[first_start + p]: where split p begins */
    int64_t first_counter;                  /* plan->remaining[first_counter + i]: counter of part i */
    int64_t first_own_segment, end_segment; /* segments of the batch's own rows; of chosen ones, others between them */
    int32_t end_rows;                       /* rows that it sees of the last of these: a later slice may see more */
    uint64_t partials;                      /* where its results begin in plan->partials, in floats */
} kvc_query_slice;

typedef struct kvc_job {
    int64_t first_slice; /* slices: plan->jobs.slices[first_slice .. first_slice + num_slices) */
    int32_t num_slices;
    int32_t split;       /* which split of each slice; the first one if the job has several */
    int32_t num_splits;  /* several side by side only if the job has one slice */
    int64_t shared_rows; /* leading rows of the split that all slices have in common; each goes on with its own */
    int64_t rows;        /* rows to read, the shared ones counted once */
    int64_t work;        /* rows times query rows, summed over the slices */
} kvc_job;

/* States of a task, in a round of kvc_plan_run. */
enum { KVC_TASK_OPEN, KVC_TASK_RUNNING, KVC_TASK_DONE };

/* A round of kvc_plan_run: each task is run once, for one layer and its arrays.  Once a task is run a second time, the
 * round becomes a rerun.  Then each task merges again its slices whose splits are all done.  So the last task to end
 * leaves the right result, whatever the order. */
typedef struct kvc_round {
    atomic_flag lock;
    int32_t layer;
    int32_t is_rerun; /* until a round for another layer or other arrays; splits stay and are merged under the lock */
    const void *q, *out, *lse; /* the caller's arrays: others begin another round */
    int64_t num_running, num_done;
    uint8_t *states; /* [num_tasks] */
} kvc_round;

/* ---- the workspace of a task ------------------------------------------------------------------------------------- */

/* A task works in one allocation of floats, its workspace.  The structs below say where its arrays begin: offsets in
 * floats, multiples of KVC_LANES.  An array of another type takes as many floats as have its bytes.  An example, for 4
 * query rows and heads of 128 elements:
 *
 *     q       [4][128]            0
 *     scores  [4][KVC_SCORES]   512     KVC_SCORES is 272
 *     acc     [4][128]         1600
 *     max     [4]              2112
 *     sum     [4]              2128     and so on
 */

/* For attention.  A plan for choosing has q, tokens, rows and scores, too. */
typedef struct kvc_attending {
    uint64_t q;                        /* [query rows][q_stride] prepared for the kernel that scores keys */
    uint64_t scores, acc;              /* [query rows][KVC_SCORES], [query rows][acc_stride] */
    uint64_t max, sum, factor, tokens; /* [query rows] of the softmax; tokens of the batch, int32_t */
    uint64_t keys, values;             /* the panels that a tile is packed into */
    uint64_t rows;                     /* [KVC_TILE] copies of rows that lie apart, or that kernels take converted */
    uint64_t zeros;                    /* a row of values: seen.h */
    uint64_t minima, q_blocks, sum_blocks; /* scratch for types with a minimum: minima.h */
    int32_t q_stride, acc_stride, block_stride;
} kvc_attending;

/* For attention to chosen or selected rows: chosen.h. */
typedef struct kvc_listing {
    uint64_t entries;      /* of a choice, sorted */
    uint64_t segments;     /* the rows that they name, or that were selected */
    uint64_t partials;     /* results of all splits of the slices, ... */
    int64_t most_splits;   /* up to so many splits of each */
    int64_t most_segments; /* of a split whose rows are scored */
} kvc_listing;

/* For choosing: rank.c, choose.c. */
typedef struct kvc_choosing {
    uint64_t packed, weights, masks, starts; /* queries: kvc_rank_query */
    uint64_t totals;                         /* [choices][KVC_SCORES] scores of a tile */
    uint64_t ranks;                          /* [choices][rows of a split] keys of rows */
    uint64_t entries, ids;                   /* the rows or blocks to choose from */
} kvc_choosing;

/* For selecting: select.c. */
typedef struct kvc_selecting {
    uint64_t codes, scales, offsets; /* queries: kvc_sketch_query */
    uint64_t sums;                   /* of weights, by lane */
    uint64_t found;                  /* what is found of a split's chunks */
    uint64_t keys, pieces;           /* keys of pieces, and pieces that are selected */
    uint64_t ranges;                 /* kvc_row_range of these, for each slice, ... */
    int64_t most_ranges;             /* up to so many of each */
} kvc_selecting;

/* The workspaces of all tasks that run at once. */
typedef struct kvc_workspaces {
    int32_t num;
    uint64_t size;      /* of each, in floats */
    float *memory;      /* [num][size] */
    atomic_flag *taken; /* [num] */
} kvc_workspaces;

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

/* How query heads become parts: a KV head has `per_kv` parts of `heads` query heads. */
typedef struct kvc_parts {
    int32_t heads;  /* all of a KV head, unless rows are chosen */
    int32_t per_kv; /* parts of a KV head */
    int32_t num;    /* of all KV heads */
} kvc_parts;

/* The deltas by which keys are off, and the angles that rotate query rows back. */
typedef struct kvc_deltas {
    int32_t num;
    int32_t angles_stride; /* in floats */
    int32_t *values;       /* [num] ascending, all different, none 0 */
    float *angles;         /* [cache->ropes.num][num][angles_stride] */
    double *rope_table;    /* scratch of a kvc_rope_table, while the plan is made */
} kvc_deltas;

/* The jobs of a plan.  A job is a task for each part. */
typedef struct kvc_jobs {
    kvc_job *items;  /* [num] */
    int32_t *slices; /* slices of the jobs, as indices into plan->slices */
    int64_t num, num_tasks;
    int32_t by_part;       /* order of tasks: 1: all jobs of one part, then of the next; 0: all parts of one job */
    int32_t joins_splits;  /* each job runs all splits of a slice; then their results are in workspaces */
    int32_t joined_splits; /* up to how many splits of a slice that is streamed, or chooses rows, become a job */
} kvc_jobs;

struct kvc_plan {
    kvc_plan_link link; /* the first member: what batch->plans lists */
    kvc_batch *batch;
    kvc_plan_args args;    /* its arrays are copies of the caller's */
    atomic_flag taken;     /* a call has the plan; cleared by kvc_plan_leave, so that it may serve another call */
    int32_t is_made;       /* the fields below are filled in; set with the mutex held, which fork() waits for */
    int32_t group, stride; /* its stride: positions of rows are rows/stride.h's numbers */
    const int32_t *order;  /* kvc_order_in: tokens of the group's rows */
    int32_t num_kv_heads, k_dim, v_dim; /* shape of the layers that the plan serves */
    int32_t chooses, by_token;          /* it is for choosing rows; each query token is a slice */
    int32_t in_bytes;                   /* sequences are multiplied in bytes where that pays */
    int32_t rounds_rows;                /* then a layer has rows that are rounded first */
    int32_t num_cross_puts;             /* kvc_num_cross_puts of the group when the plan was made */
    double multiply_adds;
    kvc_parts parts;
    kvc_deltas deltas;
    int32_t num_slices;
    int64_t num_segments;
    kvc_query_slice *slices;
    kvc_segment *segments;
    kvc_split_start *starts;
    atomic_int *remaining; /* splits that are yet to be run, for each slice and KV head */
    float *partials;       /* results of splits, for slices that have several */
    kvc_jobs jobs;
    kvc_round round;
    kvc_workspaces workspaces;
    kvc_attending attending;
    kvc_listing listing;
    kvc_choosing choosing;
    kvc_selecting selecting;
};

/* Whether `next` follows a segment in memory, by position and in the batch, with one delta: they could be one. */
static inline int kvc_extends(const kvc_segment *segment, const kvc_segment *next) {
    const int32_t n = segment->count;
    return next->rows == segment->rows && next->delta_index == segment->delta_index &&
           next->slot == segment->slot + n && next->position == segment->position + n &&
           next->token == (segment->token < 0 ? -1 : segment->token + n);
}

static inline int64_t kvc_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kvc_larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* n divided by a positive number, rounded up. */
#define KVC_DIVIDE_UP(n, by) (((int64_t)(n) + (by) - 1) / (by))

/* Returns the type to convert rows to before a kernel reads them.  way: KVC_STREAMED, KVC_TILED or KVC_IN_BYTES.
 *   - In bytes, rows with one scale each become int8, and others f32, which is then rounded to int8.
 *   - Otherwise rows keep their type if a kernel takes it.
 *   - Other rows that are streamed become int8 if they have one scale each, otherwise q8_0.
 *   - Other rows that are tiled become q8_0, or f32 if q8_0 has no kernel or decoded rows have one of their own.
 */
static inline int32_t kvc_taken_as(const kvc_kernels *kernels, int32_t type, int way) {
    const int is_tiled = way == KVC_TILED;
    if (way == KVC_IN_BYTES) return KVC_TYPES[type].has_row_scale ? KVC_INT8 : KVC_F32;
    if (is_tiled ? kernels->tiler[type].score != NULL : kernels->accumulate[type] != NULL) return type;
    if (is_tiled) return kernels->tiler[KVC_Q8_0].score && !kernels->decoded.score ? KVC_Q8_0 : KVC_F32;
    return KVC_TYPES[type].has_row_scale ? KVC_INT8 : KVC_Q8_0;
}

/* Returns the rows of a tile for many query rows.  Panels of a larger one would not stay in the L2 cache. */
static inline int32_t kvc_tile_rows(const kvc_plan *plan) {
    enum { MOST_DIM = 512 }; /* of a key and a value */
    const int is_wide = plan->batch->cache->kernels->tiler[KVC_F32].weigh && plan->k_dim + plan->v_dim <= MOST_DIM;
    return is_wide ? KVC_WIDE_TILE : KVC_PANEL;
}

/* Whether a token of the plan's range sees later positions too. */
static inline int kvc_plan_sees_all(const kvc_plan *plan, int32_t token) {
    return plan->args.non_causal && plan->args.non_causal[token - plan->args.first];
}

/* Whether the plan serves a layer, by its group and shape. */
static inline int kvc_plan_has_shape(const kvc_plan *plan, int32_t layer) {
    const kvc_cache *cache = plan->batch->cache;
    const kvc_layer *config = &cache->layers[layer];
    return cache->group_of[layer] == plan->group && config->num_kv_heads == plan->num_kv_heads &&
           config->k_dim == plan->k_dim && config->v_dim == plan->v_dim;
}

/* Returns how often rows of a cross-attention group were put since the batch began; 0 for other groups. */
static inline int32_t kvc_num_cross_puts(const kvc_batch *batch, int32_t group) {
    const int32_t first = batch->cache->num_token_groups;
    return group < first ? 0 : atomic_load(&batch->num_cross_puts[group - first]);
}

/* False once a later kvc_put replaced the cross-attention rows the plan was made for. */
static inline int kvc_plan_is_current(const kvc_plan *plan) {
    return plan->num_cross_puts == kvc_num_cross_puts(plan->batch, plan->group);
}

/* Returns the job of task i, and its part in *part. */
static inline const kvc_job *kvc_job_of(const kvc_plan *plan, int64_t i, int32_t *part) {
    *part = (int32_t)(plan->jobs.by_part ? i / plan->jobs.num : i % plan->parts.num);
    return &plan->jobs.items[plan->jobs.by_part ? i % plan->jobs.num : i / plan->parts.num];
}

static inline const kvc_query_slice *kvc_slice_of(const kvc_plan *plan, const kvc_job *job, int32_t slice) {
    return &plan->slices[plan->jobs.slices[job->first_slice + slice]];
}

/* Counts the query rows of a slice for one part. */
static inline int32_t kvc_num_query_rows(const kvc_plan *plan, const kvc_query_slice *slice) {
    return slice->num_tokens * plan->parts.heads;
}

/* Counts the rows of split p. */
static inline int64_t kvc_split_rows(const kvc_query_slice *slice, int32_t p) {
    const int64_t rest = slice->num_rows - p * slice->split_rows;
    return rest < slice->split_rows ? rest : slice->split_rows;
}

/* Returns the floats of a split's result: max and sum of each query row, then acc_stride accumulated values of each. */
static inline uint64_t kvc_partial_size(int32_t num_query_rows, int32_t acc_stride) {
    return kvc_align_up(2 * (uint64_t)num_query_rows, KVC_LANES) + (uint64_t)num_query_rows * (uint64_t)acc_stride;
}

/* Rows [begin, end) among all rows that a token sees, counted by position. */
typedef struct kvc_row_range {
    int64_t begin, end;
} kvc_row_range;

enum {
    KVC_FIRST_READ = KVC_SIZE(16, 4), /* rows of a token's first pieces that it always reads, ... */
    KVC_LAST_READ = KVC_SIZE(64, 6),  /* ... and of its last ones */
    KVC_PIECE_ROWS = 4,               /* rows that are selected together */
    KVC_CHUNK_PIECES = KVC_CHUNK_ROWS / KVC_PIECE_ROWS,
    KVC_PIECES_STRIDE = KVC_CHUNK_PIECES < KVC_LANES ? KVC_LANES : KVC_CHUNK_PIECES, /* a tile has KVC_LANES pieces */
    KVC_MOST_SELECTING = 8 /* query tokens of a sequence that selects */
};

/* Returns the most rows that a token sees and reads all. */
static inline int64_t kvc_most_unselected(const kvc_plan_args *args) {
    return KVC_FIRST_READ + KVC_LAST_READ + 2 * (int64_t)args->select_rows;
}

/* Returns the rows that the token of a slice selects from: all that it sees, or 0 if it reads all of them. */
static inline int64_t kvc_selecting_rows(const kvc_plan *plan, const kvc_query_slice *slice) {
    return slice->num_seen > kvc_most_unselected(&plan->args) ? slice->num_seen : 0;
}

/* Returns how many pieces a token selects, besides its first and last ones. */
static inline int64_t kvc_selected_pieces(const kvc_plan_args *args) {
    return KVC_DIVIDE_UP(args->select_rows, KVC_PIECE_ROWS);
}

/* Returns the bytes of a query that is compared with sketches: kvc_sketch_query. */
static inline size_t kvc_sketch_query_bytes(int32_t k_dim) {
    return (size_t)kvc_align_up((uint64_t)k_dim, 4 * KVC_SKETCH_STEP);
}

/* Return the floats of what is found of a chunk of rows for so many query rows, and of so many rows (select.c). */
static inline uint64_t kvc_chunk_size(int32_t num_query_rows) {
    return kvc_align_up(2 * (uint64_t)num_query_rows, KVC_LANES) + (uint64_t)num_query_rows * KVC_PIECES_STRIDE;
}
static inline uint64_t kvc_found_size(int32_t num_query_rows, int64_t num_rows) {
    return (uint64_t)KVC_DIVIDE_UP(num_rows, KVC_CHUNK_ROWS) * kvc_chunk_size(num_query_rows);
}

/* How the query heads of one KV head become lanes.  A choice has heads of one KV head, or all of several. */
typedef struct kvc_rank_lanes {
    int32_t choices;      /* that have heads of a KV head, ... */
    int32_t heads;        /* and how many each has */
    int32_t choice_lanes; /* lanes of a choice, as in kvc_rank_query */
    int32_t num;          /* lanes of all */
} kvc_rank_lanes;

/* Returns the lanes of a plan for choosing.  A choice has a power of two of lanes, or a multiple of KVC_LANES. */
static inline kvc_rank_lanes kvc_rank_lanes_of(const kvc_plan *plan) {
    const int32_t num_choices = plan->args.num_choices, num_kv_heads = plan->num_kv_heads;
    kvc_rank_lanes lanes = {.choices = num_choices > num_kv_heads ? num_choices / num_kv_heads : 1};
    lanes.heads = plan->args.num_heads / num_kv_heads / lanes.choices;
    lanes.choice_lanes = (int32_t)kvc_align_up((uint64_t)lanes.heads, KVC_LANES);
    if (lanes.heads < KVC_LANES)
        for (lanes.choice_lanes = 1; lanes.choice_lanes < lanes.heads;) lanes.choice_lanes *= 2;
    lanes.num = (int32_t)kvc_align_up((uint64_t)lanes.choices * (uint64_t)lanes.choice_lanes, KVC_LANES);
    return lanes;
}

#endif
