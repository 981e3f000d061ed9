/* draft.h: gives a sequence other runs in one layer group: at other positions, or in slots of its own.
 *
 * A draft is made first, with all the memory it needs; then rows are copied to the new slots, for which nothing need be
 * locked; then the draft takes the place of what there was, or is discarded.  So nothing is half done.
 */
#ifndef KVC_DRAFT_H
#define KVC_DRAFT_H

#include "store/cache.h"

/* What is to become of rows, by their position. */
typedef struct kvc_change {
    int32_t begin, end;    /* dropped */
    int32_t moved_end;     /* [end, moved_end) change: */
    int32_t move;          /* they move by so much, */
    int32_t divisor;       /* or, where it is not 0, to their quotient */
    int32_t adds_delta;    /* ... and their delta grows by as much, */
    int32_t applies_delta; /* or becomes 0: keys that are copied are rotated by it */
    /* Whether a row of those that change is to be copied to a slot of this sequence's own.  NULL: none is. */
    int (*copies)(const void *context, const kvc_run *run, int32_t slot);
    const void *context;
} kvc_change;

/* Consecutive rows that are copied. */
typedef struct kvc_copy {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
    int32_t position, delta; /* of the first row, before */
    int32_t touched;         /* slots of `to`, before */
} kvc_copy;

typedef struct kvc_draft {
    kvc_change change;
    const kvc_run_list *from; /* what there is */
    kvc_run_list runs;        /* as they are to be, but for lost_end */
    kvc_copy *copies;         /* each of KVC_COPY_ROWS rows at most */
    int64_t num_copied;       /* rows */
    int32_t num_copies, room;
    int32_t num_opened; /* blocks whose memory was taken for it */
} kvc_draft;

enum { KVC_COPY_ROWS = 64 }; /* what a thread takes at a time */

/* The threads that rewrite rows, and what they work in. */
typedef struct kvc_lanes {
    int32_t num;
    float *scratch; /* [num][floats], and at least `least`, for all together */
    uint64_t floats, least;
} kvc_lanes;

/* As many as the cache has threads, for lanes->floats and lanes->least; with the mutex held.  KVC_ERR_NOMEM. */
kvc_status kvc_lanes_new(kvc_cache *cache, kvc_lanes *lanes);
void kvc_lanes_free(kvc_cache *cache, kvc_lanes *lanes);

/* With the mutex held, as for all but kvc_draft_copy.  KVC_ERR_NOMEM. */
kvc_status kvc_draft_make(kvc_cache *cache, int32_t group, const kvc_run_list *list, const kvc_change *change,
                          kvc_draft *draft);

/* KVC_ERR_FULL, because of `what`, if more slots than `capacity` would be live once these drafts of a group, and all
 * that the group has, are accepted.  Until then, copies take slots beyond it. */
kvc_status kvc_drafts_check(const kvc_cache *cache, int32_t group, const kvc_draft *drafts, int32_t num,
                            const char *what);

/* Makes lanes, before they are there, large enough for kvc_draft_copy, and for a kvc_rotator for all layers. */
void kvc_draft_size_lanes(const kvc_cache *cache, int32_t group, const kvc_draft *draft, kvc_lanes *lanes);

/* KVC_ERR_CALLBACK if a layer's KVC_ROPE_FUNCTION fails; nothing else can.  That is called from this thread; all else
 * is done by the threads of the lanes, which need no scratch where the change settles nothing. */
kvc_status kvc_draft_copy(const kvc_cache *cache, int32_t group, const kvc_draft *draft, const kvc_lanes *lanes);

/* Turns the keys in a slot by delta, in all layers of the group that have frequencies. */
void kvc_rotate_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                     kvc_rotator *rotator);

/* Pins the blocks that rows are copied from and to, or lets go of them: between these they may be copied after the
 * draft was accepted. */
void kvc_draft_pin(const kvc_draft *draft);
void kvc_draft_unpin(kvc_cache *cache, int32_t group, const kvc_draft *draft);

/* Gives rows what the draft says, whose copies stay listed until it is freed; or nothing, which frees it. */
void kvc_draft_accept(kvc_cache *cache, int32_t group, kvc_run_list *list, kvc_draft *draft);
void kvc_draft_free(kvc_cache *cache, kvc_draft *draft);
/* Bytes of a draft of each group. */
static inline size_t kvc_drafts_size(const kvc_cache *cache) {
    return (size_t)cache->num_token_groups * sizeof(kvc_draft);
}

void kvc_draft_discard(kvc_cache *cache, int32_t group, kvc_draft *draft);

#endif
