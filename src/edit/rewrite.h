/* rewrite.h: gives a sequence new runs in one layer group: at other positions, or in slots of its own.
 *
 * A rewrite is made first, with all the memory it needs.  Then rows are copied to the new slots, without the mutex.  At
 * the end the rewrite replaces the sequence's runs, or is discarded.  So nothing is half done.
 *
 * All functions are called with the mutex held, except kvc_rewrite_copy.
 */
#ifndef KVC_REWRITE_H
#define KVC_REWRITE_H

#include "space/evict.h"

/* A change of rows: those at positions [begin, end) are dropped unless they are listed, those at [end, moved_end)
 * change, others stay.  In a group with a stride, positions and `move` are rows; see rows/stride.h. */
typedef struct kvc_change {
    int32_t begin, end, moved_end;
    const kvc_listed *listed; /* positions of [begin, end) whose rows stay as they are; NULL: none */
    int32_t move;             /* is added to positions */
    int32_t divisor;          /* if not 0, positions are divided by it instead */
    int32_t adds_delta;       /* if not 0, deltas change by as much as positions do */
    int32_t applies_delta;    /* if not 0, deltas become 0, and keys of copied rows are rotated instead */
    /* Returns whether the changing row of `run` in `slot` is copied to a slot of the sequence's own.  NULL: none is. */
    int (*copies)(const void *context, const kvc_run *run, int32_t slot);
    const void *context;
} kvc_change;

/* Consecutive rows that are copied. */
typedef struct kvc_copy {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
    int32_t position, delta; /* position and delta of the first row, before the change */
} kvc_copy;

typedef struct kvc_rewrite {
    kvc_change change;
    kvc_run_list *from; /* the list to be replaced */
    kvc_run_list runs;  /* the new list, except lost */
    kvc_copy *copies;   /* [max_copies] each of at most KVC_COPY_ROWS rows */
    int32_t num_copies, max_copies;
    int64_t num_copied; /* number of rows in copies */
    int32_t reserved;   /* blocks for copies */
} kvc_rewrite;

enum { KVC_COPY_ROWS = 64 }; /* most rows of a kvc_copy: few, so that threads share the work evenly */

/* The threads that copy and rotate rows, and scratch for them. */
typedef struct kvc_copiers {
    int32_t num;
    float *scratch;  /* [num][floats], and at least `least` floats */
    uint64_t floats; /* floats for one thread, which rotates a row at a time */
    uint64_t least;  /* floats for a KVC_ROPE_FUNCTION of the caller, which gets many keys at a time */
} kvc_copiers;

/* Makes a copier for each of the cache's threads, with scratch for copiers->floats and copiers->least.  Can fail with
 * KVC_ERR_NOMEM. */
kvc_status kvc_copiers_new(kvc_cache *cache, kvc_copiers *copiers);
void kvc_copiers_free(kvc_cache *cache, kvc_copiers *copiers);

/* Makes a rewrite of `change` for a list of runs.  Can fail with KVC_ERR_NOMEM. */
kvc_status kvc_rewrite_make(kvc_cache *cache, int32_t group, kvc_run_list *list, const kvc_change *change,
                            kvc_rewrite *rewrite);

/* The rewrites of a sequence in all groups of tokens. */
typedef struct kvc_rewrites {
    kvc_copiers copiers;
    kvc_listed *listed;     /* [num_token_groups] what kvc_change.listed of each points to */
    kvc_rewrite of_group[]; /* [num_token_groups] */
} kvc_rewrites;

static inline size_t kvc_rewrites_size(const kvc_cache *cache) {
    return sizeof(kvc_rewrites) + (size_t)cache->num_token_groups * (sizeof(kvc_rewrite) + sizeof(kvc_listed));
}

/* Visits the slots that a rewrite lets go once it is accepted. */
void kvc_rewrite_visit_replaced(const kvc_rewrite *rewrite, kvc_part_fn *visit, void *context);

/* Returns KVC_ERR_FULL if accepting an edit's rewrites would exceed the capacity of a group, in which the edit keeps
 * `staying` of the rows that need->visit_replaced visits.  While rewrites are open, copies may exceed it. */
kvc_status kvc_rewrites_check(const kvc_need *need, int32_t group, int64_t staying);

/* Raises copiers->floats and copiers->least to what kvc_rewrite_copy needs for this rewrite.  Call before
 * kvc_copiers_new. */
void kvc_rewrite_size_copiers(const kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite, kvc_copiers *copiers);

/* Copies rows to their new slots, without the mutex, on the threads of the copiers, which need scratch only if the
 * change applies deltas.  Returns KVC_ERR_CALLBACK if a layer's KVC_ROPE_FUNCTION, which this thread calls, fails;
 * nothing else can. */
kvc_status kvc_rewrite_copy(const kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite,
                            const kvc_copiers *copiers);

/* Rotates the keys in a slot by delta, in all layers of the group that have frequencies. */
void kvc_rotate_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                     kvc_rotator *rotator);

/* Pins the blocks that rows are copied from and to, or unpins them.  While they are pinned, rows may be copied after
 * the rewrite was accepted. */
void kvc_rewrite_pin(const kvc_rewrite *rewrite);
void kvc_rewrite_unpin(kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite);

/* Replaces the list that the rewrite was made for by the rewrite's; the copies stay listed until kvc_rewrite_free. */
void kvc_rewrite_accept(kvc_cache *cache, int32_t group, kvc_rewrite *rewrite);
void kvc_rewrite_free(kvc_cache *cache, kvc_rewrite *rewrite);

/* Gives back the slots and blocks that the rewrite took, and frees it. */
void kvc_rewrite_discard(kvc_cache *cache, int32_t group, kvc_rewrite *rewrite);

#endif
