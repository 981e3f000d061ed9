/* last_block.h: where a sequence goes on, and the slots that a batch plans to take there. */
#ifndef KVC_LAST_BLOCK_H
#define KVC_LAST_BLOCK_H

#include "cache/batch.h"
#include "space/expire.h"

/* Sets pending->last_block of sequence s in group g to the block of its last row after expiry and compaction, and *fill
 * to the block's fill mark then.  The block is NULL if no row stays, or the batch restores.  A cache that is tight goes
 * on in another block that has room, if that one is full.  pending->in_last becomes how many of the sequence's tokens
 * fit there behind what is planned, and these are planned. */
void kvc_find_last_block(const kvc_batch *batch, int32_t g, int32_t s, kvc_scope scope, int32_t *fill);

/* Takes the planned slots of a block, with others below `fill`, off its notes, and returns the bytes that it takes with
 * them. */
int64_t kvc_take_planned(const kvc_pool *pool, kvc_block *block, int32_t fill);

/* Takes off what is planned in a block beside what a tally counts of it, and adds that to *bytes. */
void kvc_add_planned(const kvc_preview *preview, kvc_block *block, int64_t *bytes);

#endif
