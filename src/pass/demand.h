/* demand.h: which blocks a batch that is about to begin needs of a layer group. */
#ifndef KVC_DEMAND_H
#define KVC_DEMAND_H

#include "cache/batch.h"

/* Computes pool->demand of group g, and the last_block of each sequence of the batch, for after its expiry and, where
 * one is planned, its compaction.  compacts: plans a compaction first, unless nothing is to be gained; only that can
 * fail, with KVC_ERR_NOMEM. */
kvc_status kvc_find_demand(const kvc_batch *batch, int32_t g, int compacts);

/* Sets the demand of all groups to zero. */
void kvc_forget_demands(kvc_cache *cache);

/* Returns how many of `taken` slots behind a sequence's last row, in `block`, spare slots elsewhere, for tokens that
 * come in several batches: one of these may begin where the group lets go of all rows before it.  If others keep the
 * block from being free then, the tokens from there on go to another one. */
int32_t kvc_slots_spared(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
                         int32_t taken);

#endif
