/* task.h: a task, and its rows in tiles of up to KVC_TILE rows, or KVC_WIDE_TILE.
 *
 * A tile lists its rows by stretches that lie evenly, so that blocks, holes, runs of one slot and shared rows take one
 * path.  Nearly always it is one stretch of rows one after the other.
 */
#ifndef KVC_TASK_H
#define KVC_TASK_H

#include <string.h>

#include "attend/work.h"

typedef struct kvc_work kvc_work; /* run.h */

/* Arguments that all tasks of one kvc_attend, or of one kvc_plan_run, share. */
typedef struct kvc_call {
    kvc_plan *plan;
    const kvc_attend_args *args;
    const kvc_work *work;
    kvc_chosen chosen; /* the caller's, where the plan is for chosen rows */
    const kvc_kernels *kernels;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_policy *policy;
    int32_t num_sinks;                              /* of that policy */
    int32_t k_as[KVC_NUM_WAYS], v_as[KVC_NUM_WAYS]; /* kvc_taken_as of its types */
    kvc_mixing k_mixing, v_mixing, byte_mixing;     /* of stored keys and values; of keys in bytes */
    const kvc_rope *rope;   /* rotates keys with a delta; NULL: the layer's keys are not rotated */
    const float *angles;    /* [plan->deltas.num][plan->deltas.angles_stride] of that rope */
    int32_t streamed_rows;  /* of a tile, of slices that are streamed */
    int prefetch_level;     /* for kvc_ahead */
    int is_rerun, was_done; /* for kvc_plan_run: the round is a rerun; the task was done before in this round */
    int changes_scores;     /* there is a softcap, or ALiBi */
    float scale;
    int32_t out_type;         /* of out and prior_out */
    kvc_poll_timer timer;     /* asked whether to end early, as tasks begin and between the tiles of long ones */
    atomic_int was_cancelled; /* a task ended early */
} kvc_call;

/* A task, or a view of some of its query rows.  Its query rows are its job's, one slice after the other. */
typedef struct kvc_task {
    kvc_call *call;
    const kvc_job *job;
    const kvc_query_slice *slice; /* the slice; the first one if there are several */
    int64_t index;
    int32_t part;                           /* part of the query heads */
    int32_t k_as, v_as;                     /* types as which kernels get keys and values */
    int32_t k_lacks_minima, v_lacks_minima; /* whether kernels get them without the minima of their blocks */
    int32_t num_query_rows; /* query row r is token r / heads_per_part, and query head r % heads_per_part of the part */
    int32_t first_query_row; /* of the task: a view begins with it */
    float *workspace;
    float *scores, *acc, *max, *sum, *factor; /* in the workspace, by query row; strides are in plan->attending */
    /* Query rows, prepared for the kernel that scores keys of delta_index; KVC_UNPREPARED: not loaded yet. */
    float *q;
    int32_t delta_index;
    float *q_blocks; /* sums of blocks of these query rows, where keys have minima */
    int32_t *tokens; /* tokens of the batch that the query rows belong to */
} kvc_task;

enum { KVC_UNPREPARED = -1 }; /* a delta_index */

static inline int32_t kvc_query_head_of(const kvc_task *t, int32_t r) {
    const int32_t heads = t->call->plan->parts.heads;
    return t->part * heads + r % heads;
}

static inline int32_t kvc_kv_head_of(const kvc_task *t) { return t->part / t->call->plan->parts.per_kv; }

/* Returns the number of a view's slice in the task, if slices have one token. */
static inline int32_t kvc_slice_number(const kvc_task *t) { return t->first_query_row / t->call->plan->parts.heads; }

/* Returns where a task lists the rows that its token chooses (chosen.h). */
static inline kvc_segment *kvc_chosen_segments(const kvc_task *t) {
    return (kvc_segment *)(void *)(t->workspace + t->call->plan->listing.segments);
}

/* Return a view of num_query_rows query rows of a task, from row `first` on; and a view of the query rows of slice
 * m, which begin at row `first`.  A view has all query rows of its tokens, so `first` and the number of rows
 * are multiples of parts.heads. */
kvc_task kvc_view_of(const kvc_task *t, int32_t first, int32_t num_query_rows);
kvc_task kvc_view_of_slice(const kvc_task *t, int32_t m, int32_t first);

/* ---- its rows ---------------------------------------------------------------------------------------------------- */

/* A place in the rows of a slice's split.  Rows are counted in frames from the beginning of the walk, and no tile
 * reaches past the end of a frame.  So tiles do not depend on how rows are cut into segments. */
typedef struct kvc_cursor {
    const kvc_layout *layout;
    const kvc_segment *segment;
    int32_t offset;         /* index of the next row in the segment */
    int32_t head;           /* KV head */
    int64_t num_rows;       /* rows left */
    int32_t frame_rows;     /* rows of a frame */
    int32_t frame;          /* rows left in the frame */
    int32_t changes_to_mix; /* from this many changes of delta on, a frame is mixed; 0: no key is off */
    int32_t is_mixed;       /* whether the frame is one tile, of several deltas */
} kvc_cursor;

/* A place in rows that lie in segments. */
typedef struct kvc_row_place {
    const kvc_segment *segment;
    int32_t offset;
} kvc_row_place;

/* Returns how many of the next `most` rows lie in one segment. */
static inline int32_t kvc_rows_here(const kvc_row_place *p, int32_t most) {
    return (int32_t)kvc_smaller(p->segment->count - p->offset, most);
}

/* Goes on by the rows of a segment that kvc_rows_here found. */
static inline void kvc_go_on(kvc_row_place *p, int32_t rows) {
    p->offset += rows;
    if (p->offset == p->segment->count) p->segment++, p->offset = 0;
}

enum { KVC_MIXED = -2 }; /* a delta_index: the keys have several deltas, and are rotated instead of the query rows */

/* Rows whose keys lie evenly, and so do their values: one after the other, or single ones between holes. */
typedef struct kvc_stretch {
    const uint8_t *first[2]; /* key and value of the first row */
    ptrdiff_t step[2];       /* bytes from row to row */
    int64_t n;
    const uint8_t *scales[2]; /* of these two, where rows have one; those of the others are scale_step bytes apart */
    ptrdiff_t scale_step;
} kvc_stretch;

/* Rows side by side in a split, which are attended for together. */
typedef struct kvc_tile {
    const kvc_layout *layout;
    const kvc_segment *segment;
    int32_t offset, head, n; /* index of the first row in the segment; KV head; number of rows */
    int32_t min_position, max_position;
    int32_t delta_index; /* the same for all its rows, or KVC_MIXED */
    int32_t is_batch;    /* whether the last row is the batch's own; then others may be */
    int32_t is_seen;     /* whether all tokens of the task certainly see all its rows; set by the task */
    int32_t is_located;  /* whether kvc_locate_rows has filled in position and token */
    kvc_stretch stretches[KVC_WIDE_TILE];
    int32_t position[KVC_WIDE_TILE];
    int32_t token[KVC_WIDE_TILE]; /* token of the batch; -1: a stored row */
} kvc_tile;

/* Takes the next tile off a cursor: up to the end of the frame or, in a frame that is not mixed, to the next
 * change of the delta. n is 0 if no rows are left. */
void kvc_next_tile(kvc_tile *t, kvc_cursor *c);

/* Returns the keys of a segment of the tile from row `offset` on. */
kvc_rows kvc_keys_in(const kvc_tile *t, const kvc_layer *layer, const kvc_segment *segment, int32_t offset);

/* Returns a tile's scales of keys, or values, f16, with zeros up to a multiple of KVC_PANEL; copied, if apart. */
const void *kvc_scales_of(const kvc_tile *t, int is_value, uint8_t copies[KVC_TILE][KVC_SCALE_BYTES]);

/* Fills in the position and the token of each row of a tile, unless that is done.  order: plan->order. */
void kvc_locate_rows(kvc_tile *t, const int32_t *order);

/* How the keys of a tile are multiplied by many query rows. */
typedef struct kvc_key_product {
    kvc_prepare_fn *prepare; /* NULL: query rows are multiplied as the caller has them */
    kvc_pack_keys_fn *pack;
    kvc_matmul_fn *score;
    float scale; /* what the scores are to be multiplied by then */
} kvc_key_product;

/* Returns how the keys of tiles with a delta_index are multiplied.  Query rows of 16 bits are multiplied as they are
 * where nothing changes them, as this takes fewer products.  Their scores are scaled afterwards. */
kvc_key_product kvc_product_of(const kvc_task *t, int32_t delta_index);

/* Returns the kernels that multiply values by the many query rows of a tiled slice.  With them, values in acc and in
 * partial results are 2^sum_shift times too large.  If they weigh, maxima are of scores times log2(e). */
const kvc_tiler *kvc_value_tiler(const kvc_task *t);

#endif
