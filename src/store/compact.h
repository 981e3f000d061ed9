/* compact.h: moves the rows of a group together.
 *
 * A compaction is planned first, with all the memory it needs, which changes nothing; carrying it out cannot fail.  One
 * that is planned in an eviction preview (evict.h) must be carried out after that eviction.
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
    kvc_block **order; /* [max_blocks] the blocks that take part, in the order they are filled */
    int32_t num_blocks, max_blocks;
    int32_t **targets; /* [block->index][slot] new place, counted over all blocks of the order; NULL: does not move */
    int32_t *slots;    /* [num_slots] what targets points into */
    kvc_move *moves;
    int64_t num_moves, max_moves, num_slots;
    int32_t live; /* slots that somebody holds, in all blocks of the order */
} kvc_compaction;

/* Plans to move together the rows of a group's blocks that are not pinned, as pool->compaction, which stays NULL where
 * nothing is to be gained.  KVC_ERR_NOMEM. */
kvc_status kvc_compaction_plan(kvc_cache *cache, int32_t group);

/* Carry out what is planned, or drop it; pool->compaction is NULL then. */
void kvc_compaction_run(kvc_cache *cache, int32_t group);
void kvc_compaction_drop(kvc_cache *cache, int32_t group);

/* The fill mark of block i of the order after the compaction. */
int32_t kvc_compaction_fill(const kvc_compaction *c, int32_t i);

/* Slots that a compaction would gain, without those that come back as windows move on. */
int64_t kvc_compaction_gain(const kvc_cache *cache, int32_t group);

#endif
