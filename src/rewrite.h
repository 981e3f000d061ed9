/* rewrite.h: gives a sequence other runs in one layer group: at other positions, or in slots of its own.
 *
 * A draft is made first, with all the memory it needs; then rows are copied to the new slots, for which nothing need be
 * locked; then the draft takes the place of what there was, or is discarded.  So nothing is half done.
 */
#ifndef KVC_REWRITE_H
#define KVC_REWRITE_H

#include "cache.h"

/* What is to become of rows, by their position. */
typedef struct kvc_change {
    int32_t begin, end; /* dropped */
    int32_t moved_end;  /* [end, moved_end) change: */
    int32_t move;       /* they move by so much, */
    int32_t divisor;    /* or, where it is not 0, to their quotient */
    int32_t turns;      /* the delta of what moves grows by as much */
    int32_t settles;    /* the delta of what changes becomes 0: of keys that are copied, they are turned on the way */
    /* Whether a row of those that change is to be copied to a slot of this sequence's own.  NULL: none is. */
    int (*copies)(const void *context, const kvc_run *run, int32_t slot);
    const void *context;
} kvc_change;

/* Consecutive rows that are copied. */
typedef struct kvc_copy {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
    int32_t position, delta; /* of the first row, before */
} kvc_copy;

typedef struct kvc_draft {
    kvc_change change;
    const kvc_rows *from; /* what there is */
    kvc_rows rows;        /* as they are to be, but for lost_end */
    kvc_copy *copies;
    int32_t num_copies, room;
    int32_t num_opened; /* blocks whose memory was taken for it */
    int64_t num_reused; /* those whose memory was there */
} kvc_draft;

/* With the mutex held, as for all but kvc_draft_copy.  KVC_ERR_NOMEM. */
kvc_status kvc_draft_make(kvc_cache *cache, int32_t group, const kvc_rows *rows, const kvc_change *change,
                          kvc_draft *draft);

/* KVC_ERR_FULL, because of `what`, if more slots than `capacity` would be live once these drafts of a group, and all
 * that the group has, are accepted.  Until then, copies take slots beyond it. */
kvc_status kvc_drafts_check(const kvc_cache *cache, int32_t group, const kvc_draft *drafts, int32_t num,
                            const char *what);

/* Floats that kvc_draft_copy, or a kvc_turner for all layers, needs. */
uint64_t kvc_draft_scratch(const kvc_cache *cache, int32_t group);

/* KVC_ERR_CALLBACK if a layer's KVC_ROPE_FUNCTION fails; nothing else can. */
kvc_status kvc_draft_copy(const kvc_cache *cache, int32_t group, const kvc_draft *draft, float *scratch);

/* Turns the keys in a slot by delta, in all layers of the group that have frequencies. */
void kvc_turn_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                   kvc_turner *turner);

void kvc_draft_accept(kvc_cache *cache, int32_t group, kvc_rows *rows, kvc_draft *draft);
void kvc_draft_discard(kvc_cache *cache, int32_t group, kvc_draft *draft);

#endif
