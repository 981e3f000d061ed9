/* demand.h: which blocks a batch that is about to begin needs of a layer group. */
#ifndef KVC_DEMAND_H
#define KVC_DEMAND_H

#include "store/batch.h"

/* Finds pool->demand of group g, as the group will be once it has evicted and, where that is planned, was compacted.
 * compacts: plans to compact it first, unless nothing is to be gained.  KVC_ERR_NOMEM, for a compaction only. */
kvc_status kvc_find_demand(const kvc_batch *batch, int32_t g, int compacts);

/* Sets the demand of all groups to nothing. */
void kvc_forget_demands(kvc_cache *cache);

/* The block that the next token of a sequence of the batch goes to in group g while there is room, and its fill mark,
 * once the group has evicted and was compacted: that of the last row that stays.  NULL: a new one. */
kvc_block *kvc_last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t *fill);

#endif
