/* compact.h: moves the rows of a group together.
 *
 * A compaction is planned first, with all the memory it needs, which changes nothing; carrying it out cannot fail.  One
 * that is planned in a preview (expire.h) must be carried out after what that shows.
 */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "cache/cache.h"

/* Consecutive live slots that move to consecutive slots. */
typedef struct kvc_move {
    kvc_block *from, *to;
    int32_t from_slot, to_slot, count;
} kvc_move;

typedef struct kvc_compaction {
    kvc_cache *cache;
    kvc_pool *pool;
    int32_t group;
    kvc_block **order; /* [max_blocks] the blocks that take part, in the order in which they are filled */
    int32_t num_blocks, max_blocks;
    int32_t *slots; /* [num_slots] new places, counted over the blocks of `order`: block->plan.targets points into it */
    kvc_move *moves;
    int64_t num_moves, max_moves, num_slots;
    int32_t live; /* slots that sequences hold, in all blocks of `order` */
} kvc_compaction;

/* Plans to move together the rows of a group's blocks that are not pinned.  tally: what is in use of the blocks.
 * pool->compaction becomes the plan, or stays NULL where nothing is to be gained.  Can fail with KVC_ERR_NOMEM. */
kvc_status kvc_compaction_plan(kvc_cache *cache, int32_t group, const kvc_tally *tally);

/* Carries out the planned compaction, or drops it; pool->compaction becomes NULL. */
void kvc_compaction_run(kvc_cache *cache, int32_t group);
void kvc_compaction_drop(kvc_cache *cache, int32_t group);

/* Returns the fill mark of block order[i] after the compaction. */
int32_t kvc_compaction_fill(const kvc_compaction *c, int32_t i);

/* Estimates the slots that a compaction would gain, except slots that become free as windows move on.  The estimate may
 * be negative: then there is nothing to gain. */
int64_t kvc_compaction_gain(const kvc_cache *cache, int32_t group);

#endif
