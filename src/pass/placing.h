/* placing.h: in which blocks the tokens of a batch go, and what that counts for max_bytes.
 *
 * A sequence goes on behind its last row, as far as the block has room, and then in blocks of its own.  If a batch does
 * not fit so, rows are moved together first.  Then its tokens go to any used block with room.  The rest goes to new
 * blocks, in which the batch's sequences stand one after the other.
 *
 * An example.  Blocks have 8 slots, and max_bytes leaves room for 4.  Three are in use:
 *
 *     block 0    4 rows of sequence a, 4 of b
 *     block 1    7 rows of c
 *     block 2    5 rows of d; a view holds the block
 *
 * Each sequence gets 2 tokens.  As rows lie, d takes slots of block 2, and c takes a slot of block 1.  The sequences a,
 * b and c take a new block each, so that 6 are in use.  Anywhere, the tokens take slot 7 of block 1, slots 5 to 7 of
 * block 2, and one new block, so that 4 are in use. */
#ifndef KVC_PLACING_H
#define KVC_PLACING_H

#include "cache/batch.h"

/* Sets pool->demand of all groups: once rows that no later query sees have expired, and victims are evicted or, in
 * KVC_FIXED, all that may be.  Returns the bytes that count for max_bytes then: those of blocks
 * (kvc_count_group), with the batch, and those of states and prompts.  Without max_bytes any number fits, and states
 * and prompts are left out.  Sets kvc_pending.last_block, unless tokens go anywhere. */
int64_t kvc_count_batch(const kvc_batch *batch, kvc_scope scope);

/* Sets the demand of group g, and returns how many blocks are in use with the batch. */
int64_t kvc_count_group(const kvc_batch *batch, int32_t g, kvc_scope scope);

/* Tokens may arrive in several batches.  A batch may expire all rows before it, and go on in a new block.  Returns
 * how many of the `taken` slots behind a sequence's last row, in `block`, are used even then.  If others keep the block
 * in use then, the tokens from there on go to another one; otherwise the block becomes free, and is opened again. */
int32_t kvc_slots_saved(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
                        int32_t taken);

/* Returns the block in which a sequence goes on, if there is space: that of its last row.  Returns NULL if it has no
 * row that stays, or the batch restores.  Call it once rows have expired and were moved. */
kvc_block *kvc_last_block(const kvc_batch *batch, int32_t g, int32_t s);

/* Searches the list of all blocks from *next on for a used block with room.  Sets *next to the block, and returns it.
 * NULL: no block has room. */
kvc_block *kvc_next_open(const kvc_pool *pool, kvc_block **next);

/* Hands out slots to all tokens that get rows; there are free blocks for them. */
void kvc_place_batch(kvc_batch *batch);

#endif
