/* compact.h: moves the rows of a group together.
 *
 * A plan is made first, with all the memory it needs, which changes nothing; to carry it out cannot fail.  It may be
 * made while evicted rows are dropped for a trial, and is then to be carried out once they are gone.
 */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "store/cache.h"

/* Live slots that move together. */
typedef struct kvc_move {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
} kvc_move;

typedef struct kvc_compaction {
    kvc_cache *cache;
    kvc_pool *pool;
    int32_t group;
    kvc_block **order; /* the blocks that take part */
    int32_t num_blocks, max_blocks;
    int32_t **targets; /* [block->index] per slot: its new place, counted over all blocks of the order, or NULL */
    int32_t *slots;    /* what targets points into */
    kvc_move *moves;
    int64_t num_moves, max_moves, num_slots;
    int32_t live; /* slots, in all */
} kvc_compaction;

/* Plans to move the rows of a group together, where no pin is, as pool->compaction, which stays NULL where nothing is
 * to be gained.  KVC_ERR_NOMEM. */
kvc_status kvc_compaction_plan(kvc_cache *cache, int32_t group);

/* Carries it out, or drops it; pool->compaction is NULL then. */
void kvc_compaction_run(kvc_cache *cache, int32_t group);
void kvc_compaction_drop(kvc_cache *cache, int32_t group);

/* The fill mark of block i of the order once it is done. */
int32_t kvc_compaction_fill(const kvc_compaction *c, int32_t i);

/* Slots it would gain that do not come back by themselves. */
int64_t kvc_compaction_gain(const kvc_cache *cache, int32_t group);

#endif
