/* last_block.h: where a sequence goes on, and the slots that a batch plans to take there. */
#ifndef KVC_LAST_BLOCK_H
#define KVC_LAST_BLOCK_H

#include "cache/batch.h"
#include "space/expire.h"

/* Returns the block that holds a sequence's last row in group g after expiry and compaction, and its fill mark then.
 * NULL if no row stays, or the batch restores. */
kvc_block *kvc_find_last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, kvc_scope scope,
                               int32_t *fill);

/* Takes the planned slots of a block, with others below `fill`, off its notes, and returns the bytes that it takes with
 * them. */
int64_t kvc_take_planned(const kvc_pool *pool, kvc_block *block, int32_t fill);

/* Takes off what is planned in a block beside what a tally counts of it, and adds that to *bytes. */
void kvc_add_planned(const kvc_preview *preview, kvc_block *block, int64_t *bytes);

#endif
