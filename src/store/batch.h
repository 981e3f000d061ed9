/* batch.h: the open batch: its tokens, whose they are, and where their rows lie. */
#ifndef KVC_BATCH_H
#define KVC_BATCH_H

#include "store/cache.h"

/* What one sequence has in the batch. */
typedef struct kvc_batch_sequence {
    kvc_sequence *sequence;
    int32_t first, num_tokens; /* its tokens: order[first .. first + num_tokens) */
    int32_t num_slots;         /* that its tokens need in a pool: one each, or none if it is buffered */
    int32_t is_unstored;       /* nothing of it stays once the batch is committed */
    int32_t is_buffered;       /* it is unstored and was empty before: its tokens' rows lie in row buffers */
    int32_t num_stretches;     /* of consecutive positions among its tokens */
    int32_t next;              /* position that would continue the last stretch */
} kvc_batch_sequence;

/* Where a token's rows lie; block NULL: in a slot of the row buffers. */
typedef struct kvc_place {
    kvc_block *block;
    int32_t slot;
} kvc_place;

/* The runs that a sequence's tokens of the batch got in one group. */
typedef struct kvc_pending {
    kvc_run *runs;
    int32_t num;
} kvc_pending;

/* A kvc_put to a cross-attention layer that is copying rows: its slots are taken and not yet pending.  It is allocated,
 * as the stack of its thread may be gone in the child of a fork(). */
typedef struct kvc_cross_put {
    struct kvc_cross_put *next;
    kvc_thread thread;     /* that called kvc_put */
    int32_t group, member; /* the sequence: index into batch->sequences */
    kvc_run run;
    int32_t touched;    /* slots of its block, before the put: kvc_pool_unopen */
    int32_t num_opened; /* blocks whose memory was taken for it */
} kvc_cross_put;

/* The beginning of a plan that attention made for a batch: all that the batch knows of it. */
typedef struct kvc_plan_link {
    struct kvc_plan_link *next;
    uint64_t size; /* of the plan's allocation */
    /* Drops what threads of the parent were doing with the plan, in the child of a fork(). */
    void (*after_fork)(struct kvc_plan_link *link);
} kvc_plan_link;

struct kvc_batch {
    kvc_cache *cache;
    uint64_t size;          /* of this allocation */
    int32_t is_fresh;       /* not scratch of earlier batches: it is freed if the batch does not begin */
    kvc_table table_before; /* of sequences, while the batch begins */
    kvc_sequence *spare;    /* of its sequences, the one that was cache->spare */
    int32_t num_tokens, num_sequences;
    int32_t *positions;            /* [num_tokens] */
    int32_t *parents;              /* [num_tokens] of each token, or -1; NULL: no trees, and then */
    int32_t *tree_number;          /* [num_tokens] number in depth-first order: descendants follow their ancestor */
    int32_t *subtree_size;         /* [num_tokens] the token and its descendants */
    int32_t *sequence_of;          /* [num_tokens] index into sequences */
    int32_t *order;                /* [num_tokens] tokens, those of a sequence side by side, else in order */
    kvc_batch_sequence *sequences; /* [num_sequences] */
    kvc_place *places;             /* [num_groups][num_tokens] */
    kvc_pending *pending;          /* [num_groups][num_sequences], then, for all groups of tokens, of buffered ones */
    kvc_run *runs;                 /* [num_groups + 1][num_tokens] what pending points into */
    uint8_t *kept;                 /* [num_tokens] the token is committed */
    uint8_t *written;              /* [num_layers][num_tokens] the token's rows of the layer are there */
    int32_t num_buffered;          /* tokens whose rows lie in row buffers: in a place without a block */
    kvc_plan_link *plans;          /* made for this batch, freed with it */
    kvc_cross_put *cross_puts;     /* in progress; guarded by the mutex */
    atomic_int *num_cross_puts;    /* [num_groups - num_token_groups] done; a plan of the group is out of date after the
                                      next */
};

/* The runs of sequence s of the batch in group g. */
static inline kvc_pending *kvc_pending_of(const kvc_batch *batch, int32_t g, int32_t s) {
    return &batch->pending[(size_t)g * (size_t)batch->num_sequences + (size_t)s];
}

/* The same, in a group of tokens, also where sequence s is buffered. */
static inline kvc_pending *kvc_own_pending(const kvc_batch *batch, int32_t g, int32_t s) {
    return kvc_pending_of(batch, batch->sequences[s].is_buffered ? batch->cache->num_groups : g, s);
}

/* Whether a token of a batch with parents is another, or one of its descendants. */
static inline int kvc_descends(const kvc_batch *batch, int32_t token, int32_t ancestor) {
    const int32_t distance = batch->tree_number[token] - batch->tree_number[ancestor];
    return distance >= 0 && distance < batch->subtree_size[ancestor];
}

/* Whether each token of the batch was put in a layer. */
static inline uint8_t *kvc_written_in(const kvc_batch *batch, int32_t layer) {
    return batch->written + (size_t)layer * (size_t)batch->num_tokens;
}

/* A batch of so many tokens, of as many sequences at most, in one piece of scratch; NULL if there is no memory.
 * parents: NULL, or those of the tokens, which are then numbered. */
kvc_batch *kvc_batch_new(kvc_cache *cache, int32_t num_tokens, const int32_t *parents);

/* Index of a sequence in the batch, which gives it one, and a place in the table, at its first token; -1 if there is no
 * memory. */
int32_t kvc_batch_add_sequence(kvc_batch *batch, int64_t seq_id);

#endif
