/* draft.h: gives a sequence other runs in one layer group: at other positions, or in slots of its own.
 *
 * A draft is made first, with all the memory it needs; then rows are copied to the new slots, for which nothing need be
 * locked; then the draft takes the place of what there was, or is discarded.  So nothing is half done.
 *
 * All functions are called with the mutex held, but for kvc_draft_copy.
 */
#ifndef KVC_DRAFT_H
#define KVC_DRAFT_H

#include "store/cache.h"

/* What is to become of rows, by their position.  Those in [begin, end) are dropped, those in [end, moved_end) change.
 */
typedef struct kvc_change {
    int32_t begin, end, moved_end;
    int32_t move;          /* positions grow by this; */
    int32_t divisor;       /* if not 0, they are divided by this instead */
    int32_t adds_delta;    /* deltas grow by as much as positions */
    int32_t applies_delta; /* deltas become 0; the keys of copied rows are rotated by what would be left */
    /* Whether a changing row of a run, in this slot, is copied to a slot of the sequence's own.  NULL: none is. */
    int (*copies)(const void *context, const kvc_run *run, int32_t slot);
    const void *context;
} kvc_change;

/* Consecutive rows that are copied. */
typedef struct kvc_copy {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
    int32_t position, delta; /* of the first row, before the change */
    int32_t touched;         /* slots of `to` that were touched before */
} kvc_copy;

typedef struct kvc_draft {
    kvc_change change;
    const kvc_run_list *from; /* what there is */
    kvc_run_list runs;        /* what is to be, but for lost_end */
    kvc_copy *copies;         /* [max_copies] of KVC_COPY_ROWS rows at most */
    int32_t num_copies, max_copies;
    int64_t num_copied; /* rows */
    int32_t num_opened; /* blocks whose memory was taken for copies */
} kvc_draft;

enum { KVC_COPY_ROWS = 64 }; /* so that threads share the work evenly */

/* The threads that copy and rotate rows, and scratch for them. */
typedef struct kvc_lanes {
    int32_t num;
    float *scratch;  /* [num][floats], or at least [least] for all together */
    uint64_t floats; /* for each: one rotates a row at a time */
    uint64_t least;  /* for the function of a caller, which gets many keys at a time */
} kvc_lanes;

/* Makes a lane for each of the cache's threads, with scratch for lanes->floats and lanes->least.  KVC_ERR_NOMEM. */
kvc_status kvc_lanes_new(kvc_cache *cache, kvc_lanes *lanes);
void kvc_lanes_free(kvc_cache *cache, kvc_lanes *lanes);

/* Makes a draft of `change` for a list of runs.  KVC_ERR_NOMEM. */
kvc_status kvc_draft_make(kvc_cache *cache, int32_t group, const kvc_run_list *list, const kvc_change *change,
                          kvc_draft *draft);

/* Bytes of a draft of each group. */
static inline size_t kvc_drafts_size(const kvc_cache *cache) {
    return (size_t)cache->num_token_groups * sizeof(kvc_draft);
}

/* KVC_ERR_FULL if more slots than the cache's capacity would be live once these drafts, `num` of the group's, are
 * accepted; `what` begins the message.  Until then copies take slots beyond the capacity. */
kvc_status kvc_drafts_check(const kvc_cache *cache, int32_t group, const kvc_draft *drafts, int32_t num,
                            const char *what);

/* Raises lanes->floats and lanes->least to what kvc_draft_copy needs for this draft.  Call before kvc_lanes_new. */
void kvc_draft_size_lanes(const kvc_cache *cache, int32_t group, const kvc_draft *draft, kvc_lanes *lanes);

/* Copies rows to their new slots, without the mutex, on the threads of the lanes; these need scratch only if the change
 * applies deltas.  KVC_ERR_CALLBACK if a layer's KVC_ROPE_FUNCTION, which is called from this thread, fails; nothing
 * else can. */
kvc_status kvc_draft_copy(const kvc_cache *cache, int32_t group, const kvc_draft *draft, const kvc_lanes *lanes);

/* Rotates the keys in a slot by delta, in all layers of the group that have frequencies. */
void kvc_rotate_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                     kvc_rotator *rotator);

/* Pins the blocks that rows are copied from and to, or unpins them.  While they are pinned, rows may be copied after
 * the draft was accepted. */
void kvc_draft_pin(const kvc_draft *draft);
void kvc_draft_unpin(kvc_cache *cache, int32_t group, const kvc_draft *draft);

/* Replaces the list the draft was made for by the draft's, whose copies stay listed until kvc_draft_free. */
void kvc_draft_accept(kvc_cache *cache, int32_t group, kvc_run_list *list, kvc_draft *draft);
void kvc_draft_free(kvc_cache *cache, kvc_draft *draft);

/* Gives back what the draft took, and frees it. */
void kvc_draft_discard(kvc_cache *cache, int32_t group, kvc_draft *draft);

#endif
