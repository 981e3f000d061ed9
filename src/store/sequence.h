/* sequence.h: what a sequence holds in every layer group, and the table of all sequences.  Pure bookkeeping. */
#ifndef KVC_SEQUENCE_H
#define KVC_SEQUENCE_H

#include "base/threads.h"
#include "store/runs.h"

typedef struct kvc_sequence {
    int64_t id;
    int32_t in_batch;         /* the open batch owns it */
    int32_t low;              /* while a batch begins: no query will come below this position */
    int32_t in_rewrite;       /* its rows are being copied to new slots, without the mutex, */
    kvc_thread rewriter;      /* by this thread, */
    struct kvc_draft *drafts; /* [num_token_groups] to become what these say */
    int32_t in_place;         /* its rows are being written where they lie, without the mutex: kvc_cache_find waits */
    int32_t holds;            /* it is counted among those that hold rows */
    int32_t num_groups;
    int32_t num_token_groups; /* the first ones hold rows of tokens, the others those put in cross-attention layers */
    struct kvc_sequence *next_changed, **changed_at; /* place in the cache's list of changed ones; NULL: not in it */
    kvc_run_list runs[];                             /* [num_groups] */
} kvc_sequence;

/* Returns an empty sequence; NULL if there is no memory. */
kvc_sequence *kvc_sequence_new(kvc_memory *memory, int64_t id, int32_t num_groups, int32_t num_token_groups);

/* Frees the sequence and drops what it holds. */
void kvc_sequence_free(kvc_sequence *sequence, kvc_memory *memory, kvc_pool *pools);

/* Bytes of the sequence and its lists. */
int64_t kvc_sequence_bytes(const kvc_sequence *sequence);

/* Whether it holds rows, of tokens or in a cross-attention layer. */
int kvc_sequence_holds(const kvc_sequence *sequence);

/* Whether it holds no token's rows. */
int kvc_sequence_is_empty(const kvc_sequence *sequence);

/* Whether it holds nothing and nothing of it was evicted: such a sequence leaves the table. */
int kvc_sequence_is_blank(const kvc_sequence *sequence);

/* Smallest and largest position of a token in any group; -1 if there is none. */
int32_t kvc_sequence_first(const kvc_sequence *sequence);
int32_t kvc_sequence_last(const kvc_sequence *sequence);

/* ---- the table of sequences -------------------------------------------------------------------------------------- */

typedef struct kvc_table {
    kvc_sequence **items; /* ascending by id */
    int32_t num, capacity;
} kvc_table;

kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id);

/* Gets memory for one more sequence; inserting it cannot fail afterwards.  `before` is a copy of the table from before
 * the first of several calls.  Its array stays until kvc_table_keep frees it, or until kvc_table_restore, once all that
 * was inserted was removed again, makes it the table's. */
kvc_status kvc_table_reserve(kvc_table *table, const kvc_table *before, kvc_memory *memory);
void kvc_table_keep(const kvc_table *table, const kvc_table *before, kvc_memory *memory);
void kvc_table_restore(kvc_table *table, const kvc_table *before, kvc_memory *memory);

/* Inserts a sequence, or removes one without freeing it. */
void kvc_table_insert(kvc_table *table, kvc_sequence *sequence);
void kvc_table_remove(kvc_table *table, const kvc_sequence *sequence);

/* Frees the array of an empty table. */
void kvc_table_destroy(kvc_table *table, kvc_memory *memory);

#endif
