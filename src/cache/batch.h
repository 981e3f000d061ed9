/* batch.h: the open batch: its tokens, their sequences, and where their rows lie. */
#ifndef KVC_BATCH_H
#define KVC_BATCH_H

#include "cache/cache.h"
#include "rows/stride.h"

/* A sequence of the batch. */
typedef struct kvc_batch_sequence {
    kvc_sequence *sequence;
    int32_t first, num_tokens; /* its tokens: order[first .. first + num_tokens) */
    int32_t is_unstored;       /* the sequence holds nothing once the batch is committed */
    int32_t num_stretches;     /* number of stretches of consecutive positions among its tokens */
    int32_t next;              /* position that would continue the last stretch */
    int32_t goes_back;         /* not each token stands behind the one before, the first behind the sequence's last */
    int32_t last;              /* its last token; -1: none yet */
    int32_t exact_to; /* tokens from this position on will not follow from those before them, if all are committed */
    int32_t selected_from; /* lowest position of its tokens that selected rows; INT32_MAX: none did */
} kvc_batch_sequence;

/* The place of a token's rows.  slot -1: the token has no rows there, as its position completes no stride. */
typedef struct kvc_place {
    kvc_block *block;
    int32_t slot;
} kvc_place;

/* The places where a batch puts a sequence's rows in one group, and their fate at the commit.  The last two take
 * slots of the pool when the batch begins. */
typedef enum kvc_destination {
    KVC_TO_NOWHERE, /* the group gets no rows: it has no attention, or the batch restores others */
    KVC_TO_CROSS,   /* slots that kvc_put takes: a committed token has them replace all that the sequence held */
    KVC_TO_REPLACE, /* the commit replaces all that the sequence held */
    KVC_TO_END      /* the commit appends to what the sequence held */
} kvc_destination;

/* The rows that a sequence is given in one group: where they go, and the runs of their slots. */
typedef struct kvc_pending {
    kvc_run *runs;
    int32_t num;
    int32_t num_tokens;      /* number of the sequence's tokens that get a row: kvc_order_in */
    int32_t capacity_before; /* capacity of the sequence's own list before the batch */
    kvc_block *last_block;   /* of the sequence's own rows: its tokens go there while it is not full; NULL: to others */
    int8_t to;               /* kvc_destination */
} kvc_pending;

/* A kvc_put to a cross-attention layer while it copies rows: its slots are taken, but not yet pending.  It is
 * allocated, not on the stack of its thread, which may be gone in the child of a fork(). */
typedef struct kvc_cross_put {
    struct kvc_cross_put *next;
    kvc_thread thread;     /* the thread that called kvc_put */
    int32_t group, member; /* member: index of the sequence in batch->sequences */
    kvc_run run;
    int32_t reserved;
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
    kvc_sequence *reserved; /* the sequence that was cache->sequences.reserved; NULL: none */
    int32_t is_packed;      /* rows are moved together before it begins */
    int32_t goes_anywhere;  /* its tokens go to any used block with room: pass/placing.h */
    int32_t most_held;      /* if they do: held blocks of the group with the most, as the batch began */
    int32_t in_several;     /* its tokens come in several batches: it is asked what these need (kvc_reserve) */
    int32_t num_tokens, num_sequences;
    int32_t *positions;    /* [num_tokens] */
    int32_t *parents;      /* [num_tokens] each token's parent, or -1; NULL: no trees, and the next two are unused */
    int32_t *tree_number;  /* [num_tokens] number of the token in depth-first order: descendants follow an ancestor */
    int32_t *subtree_size; /* [num_tokens] number of descendants, and 1 for the token itself */
    int32_t *sequence_of;  /* [num_tokens] index into sequences */
    int32_t *order;        /* [num_tokens] tokens sorted by sequence, those of a sequence in the order given */
    int32_t *strided;      /* [groups with a stride][num_tokens] as `order`, of tokens with a row: kvc_order_in */
    kvc_batch_sequence *sequences; /* [num_sequences] */
    kvc_place *places;             /* [num_groups][num_tokens] */
    kvc_pending *pending;          /* [num_sequences][num_groups] */
    kvc_run *runs;                 /* [num_groups][num_tokens] the runs that pending points into */
    uint8_t *committed;            /* [num_tokens] whether the token is committed: all are until a commit says so */
    uint8_t *selected;             /* [num_tokens] whether the token attended to selected rows */
    uint8_t *replaced;    /* [num_groups] whether the batch restores the group; NULL: none, it is an ordinary batch */
    uint8_t *group_flags; /* [num_groups] memory for `replaced` */
    uint8_t *written;     /* [num_layers][num_tokens] whether the token's rows were put in the layer */
    kvc_plan_link *plans; /* list of the plans made for this batch, freed with it */
    kvc_cross_put *cross_puts; /* list of the puts in progress; guarded by the mutex */
    /* [num_groups - num_token_groups] number of finished puts to each cross-attention group: each further put
     * makes the plans of that group out of date. */
    atomic_int *num_cross_puts;
};

/* Returns what sequence s of the batch is given in group g. */
static inline kvc_pending *kvc_pending_of(const kvc_batch *batch, int32_t g, int32_t s) {
    return &batch->pending[(size_t)s * (size_t)batch->cache->num_groups + (size_t)g];
}

/* Returns the tokens that get a row in group g, sorted by sequence.  Sequence s has pending->num_tokens of them, from
 * batch->sequences[s].first on. */
static inline const int32_t *kvc_order_in(const kvc_batch *batch, int32_t g) {
    const kvc_pool *pool = &batch->cache->pools[g];
    return pool->stride == 1 ? batch->order : batch->strided + (size_t)pool->strided_index * (size_t)batch->num_tokens;
}

/* Returns the places of all tokens in group g. */
static inline kvc_place *kvc_places_in(const kvc_batch *batch, int32_t g) {
    return batch->places + (size_t)g * (size_t)batch->num_tokens;
}

/* Returns whether sequences of the batch get rows in group g, which is the same for all of them. */
static inline int kvc_takes_rows(const kvc_batch *batch, int32_t g) { return batch->pending[g].to != KVC_TO_NOWHERE; }

/* Returns whether a token is `ancestor` or descends from it, in a batch with parents. */
static inline int kvc_descends(const kvc_batch *batch, int32_t token, int32_t ancestor) {
    const int32_t distance = batch->tree_number[token] - batch->tree_number[ancestor];
    return distance >= 0 && distance < batch->subtree_size[ancestor];
}

/* Returns the position from which on a sequence's rows, including the open batch's, do not follow from its tokens. */
static inline int32_t kvc_exact_to_with_batch(const kvc_cache *cache, const kvc_sequence *sequence) {
    if (!sequence->in_batch) return sequence->exact_to;
    const kvc_batch_sequence *member = &cache->batch->sequences[sequence->in_batch - 1];
    return kvc_lower(sequence->exact_to, kvc_lower(member->exact_to, member->selected_from));
}

/* Returns the flags of a layer: [num_tokens] whether the token's rows were put in it. */
static inline uint8_t *kvc_written_in(const kvc_batch *batch, int32_t layer) {
    return batch->written + (size_t)layer * (size_t)batch->num_tokens;
}

/* Makes a batch of num_tokens tokens, as yet without sequences, in one allocation of scratch; NULL if out of memory.
 * parents: the parent of each token, or NULL; numbers the trees. */
kvc_batch *kvc_batch_new(kvc_cache *cache, int32_t num_tokens, const int32_t *parents);

/* Lists the tokens that get a row in each group, once the order of all tokens is final. */
void kvc_batch_list_rows(kvc_batch *batch);

/* Returns the index of a sequence in the batch; -1 if it has no token there.  Call with the mutex held. */
int32_t kvc_batch_find(const kvc_batch *batch, int64_t seq_id);

/* Returns the index of a sequence in the batch; -1 if out of memory.  Adds the sequence to the batch, with the
 * destinations of its rows, and to the table, where it is not there yet.  is_unstored: for a sequence that is added. */
int32_t kvc_batch_add_sequence(kvc_batch *batch, int64_t seq_id, int32_t is_unstored);

#endif
