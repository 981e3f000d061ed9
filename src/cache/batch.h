/* batch.h: the open batch: its tokens, their sequences, and where their rows lie. */
#ifndef KVC_BATCH_H
#define KVC_BATCH_H

#include "cache/cache.h"

/* A sequence of the batch. */
typedef struct kvc_batch_sequence {
    kvc_sequence *sequence;
    int32_t first, num_tokens; /* its tokens: order[first .. first + num_tokens) */
    int32_t num_slots;         /* slots its tokens need in each pool: one each, or none if it is buffered */
    int32_t is_unstored;       /* the sequence holds nothing once the batch is committed */
    int32_t is_buffered;       /* it is unstored and was empty before: its rows lie in row buffers */
    int32_t num_stretches;     /* number of stretches of consecutive positions among its tokens */
    int32_t next;              /* position that would continue the last stretch */
    int32_t goes_back;         /* not each token stands behind the one before, the first behind the sequence's last */
} kvc_batch_sequence;

/* Where a token's rows lie; if block is NULL, slot is one of the row buffers. */
typedef struct kvc_place {
    kvc_block *block;
    int32_t slot;
} kvc_place;

/* The runs of the slots that a sequence's tokens were given in one group. */
typedef struct kvc_pending {
    kvc_run *runs;
    int32_t num;
} kvc_pending;

/* A kvc_put to a cross-attention layer while it copies rows: its slots are taken, but not yet pending.  It is
 * allocated, not on the stack of its thread, which may be gone in the child of a fork(). */
typedef struct kvc_cross_put {
    struct kvc_cross_put *next;
    kvc_thread thread;     /* the thread that called kvc_put */
    int32_t group, member; /* member: index of the sequence in batch->sequences */
    kvc_run run;
    int32_t touched; /* touched slots of its block before the put, for kvc_pool_unopen */
    kvc_reserved reserved;
} kvc_cross_put;

/* The first member of a kvc_plan that was made for a batch: all that the batch knows of the plan. */
typedef struct kvc_plan_link {
    struct kvc_plan_link *next;
    uint64_t size; /* bytes of the plan's allocation */
    /* Called in the child of a fork(): ends the work of the parent's other threads on the plan. */
    void (*after_fork)(struct kvc_plan_link *link);
} kvc_plan_link;

struct kvc_batch {
    kvc_cache *cache;
    uint64_t size;          /* bytes of this allocation */
    int32_t is_fresh;       /* allocated for this batch, not reused scratch: freed if the batch does not begin */
    kvc_table table_before; /* cache->sequences before the batch, for kvc_table_restore if it does not begin */
    kvc_sequence *spare;    /* the sequence that was cache->spare; NULL: none */
    int32_t in_several; /* its tokens come in several batches: it is asked what these need (kvc_reserve) */
    int32_t num_tokens, num_sequences;
    int32_t *positions;    /* [num_tokens] */
    int32_t *parents;      /* [num_tokens] each token's parent, or -1; NULL: no trees, and the next two are unused */
    int32_t *tree_number;  /* [num_tokens] number of the token in depth-first order: descendants follow an ancestor */
    int32_t *subtree_size; /* [num_tokens] number of descendants, and 1 for the token itself */
    int32_t *sequence_of;  /* [num_tokens] index into sequences */
    int32_t *order;        /* [num_tokens] tokens sorted by sequence, those of a sequence in the order given */
    kvc_batch_sequence *sequences; /* [num_sequences] */
    kvc_place *places;             /* [num_groups][num_tokens] */
    kvc_pending *pending; /* [num_groups][num_sequences]; then [num_sequences] for buffered ones, in any group */
    kvc_run *runs;        /* [num_groups + 1][num_tokens] the runs that pending points into */
    uint8_t *kept;        /* [num_tokens] whether the token is committed */
    uint8_t *restored;    /* [num_groups] whether the batch restores the group; NULL: none, it is an ordinary batch */
    uint8_t *group_flags; /* [num_groups] memory for `restored` */
    uint8_t *written;     /* [num_layers][num_tokens] whether the token's rows were put in the layer */
    int32_t num_buffered; /* number of tokens of buffered sequences */
    kvc_plan_link *plans; /* list of the plans made for this batch, freed with it */
    kvc_cross_put *cross_puts; /* list of the puts in progress; guarded by the mutex */
    /* [num_groups - num_token_groups] number of finished puts to each cross-attention group: each further put
     * makes the plans of that group out of date. */
    atomic_int *num_cross_puts;
};

/* Returns the runs that sequence s of the batch was given in group g. */
static inline kvc_pending *kvc_pending_of(const kvc_batch *batch, int32_t g, int32_t s) {
    return &batch->pending[(size_t)g * (size_t)batch->num_sequences + (size_t)s];
}

/* Does the same for a group of tokens, whether sequence s is buffered or not. */
static inline kvc_pending *kvc_own_pending(const kvc_batch *batch, int32_t g, int32_t s) {
    return kvc_pending_of(batch, batch->sequences[s].is_buffered ? batch->cache->num_groups : g, s);
}

/* Returns whether the tokens get rows in group g: if the batch restores, only in the groups it does that in. */
static inline int kvc_takes_rows(const kvc_batch *batch, int32_t g) { return !batch->restored || batch->restored[g]; }

/* Returns whether a token is `ancestor` or one of its descendants, in a batch with parents. */
static inline int kvc_descends(const kvc_batch *batch, int32_t token, int32_t ancestor) {
    const int32_t distance = batch->tree_number[token] - batch->tree_number[ancestor];
    return distance >= 0 && distance < batch->subtree_size[ancestor];
}

/* Returns the flags of a layer: [num_tokens] whether the token's rows were put in it. */
static inline uint8_t *kvc_written_in(const kvc_batch *batch, int32_t layer) {
    return batch->written + (size_t)layer * (size_t)batch->num_tokens;
}

/* Makes a batch of num_tokens tokens, as yet without sequences, in one allocation of scratch; NULL if out of memory.
 * parents: the parent of each token, or NULL; numbers the trees. */
kvc_batch *kvc_batch_new(kvc_cache *cache, int32_t num_tokens, const int32_t *parents);

/* Returns the index of a sequence in the batch; -1 if it has no token there.  Call with the mutex held. */
int32_t kvc_batch_find(const kvc_batch *batch, int64_t seq_id);

/* Returns the index of a sequence in the batch; -1 if out of memory.  Adds the sequence to the batch, and to the table,
 * where it is not there yet. */
int32_t kvc_batch_add_sequence(kvc_batch *batch, int64_t seq_id);

#endif
