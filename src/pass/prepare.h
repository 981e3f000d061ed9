/* prepare.h: makes sure that a batch fits before anything is changed.
 *
 * There are three steps.  kvc_fit finds out whether the batch would fit once rows have expired, others are evicted,
 * groups compacted and free memory given back, without doing any of it.  kvc_prepare also takes all memory that may be
 * missing.  kvc_apply_prepared then does what was found to be needed, which cannot fail.
 *
 * An example of pool->demand, for blocks of 8 slots.  A batch has 14 tokens of a sequence, whose last block has a
 * fill mark of 5.  One block is free.
 *
 *     tokens 0 to 2      last block, slots 5 to 7      more_bytes, as far as the slots have no memory yet
 *     tokens 3 to 10     the free block                the same; num_blocks is 1
 *     tokens 11 to 13    a new block                   new_blocks is 1, num_blocks 2; new_bytes of 3 slots and a header
 *
 * If the sequence's rows expire first, the last block and the list of free blocks are what they will be then.
 */
#ifndef KVC_PREPARE_H
#define KVC_PREPARE_H

#include "cache/batch.h"
#include "space/evict.h"

/* Waits until no other call writes rows of the sequences seq_ids[num_tokens] in place (NULL: of sequence 0).  Under
 * max_bytes, waits for writers of any sequence and for calls that work on pages: they may use memory that could be
 * given back. */
void kvc_wait_for_writers(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids);

/* Checks num_tokens against the limits, before memory is taken for a batch. */
kvc_status kvc_check_num_tokens(const kvc_cache *cache, int64_t num_tokens);

/* Returns how many tokens max_seq_len lets a sequence add to group g in a batch; below 0 if it holds more already.
 * INT64_MAX: any number, because the commit leaves at most max_seq_len rows of them. */
int64_t kvc_room_in_sequence(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g);

/* Returns the most tokens of a sequence that count for the capacity of group g: INT64_MAX, all of them.  If the
 * capacity is max_seq_len * max_sequences, only tokens that the commit may leave count. */
int64_t kvc_most_counted(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g);

/* Counts the sequences that hold rows, or will hold rows after the batch. */
int64_t kvc_count_holding(const kvc_batch *batch);

/* The capacity and bytes that a batch needs. */
kvc_need kvc_need_of(kvc_batch *batch);

/* Chooses victims so that the batch fits, or returns KVC_ERR_FULL; can fail with KVC_ERR_NOMEM. */
kvc_status kvc_fit(kvc_batch *batch);

/* Returns KVC_ERR_FULL, without a message, unless the batch fits into max_bytes once everything evictable is evicted.
 * *bytes becomes the bytes that it would make the cache then.  Takes no time for what is evicted.  The cache is tight
 * (kvc_tighten).  If this does not fit, nor the cache as it is, a batch is refused. */
kvc_status kvc_fits_beside_fixed(kvc_batch *batch, int64_t *bytes);

/* Does so with compactions of all groups, and leaves them planned.  is_planned: the last call has planned them, and
 * only the batch's number of tokens has changed since. */
kvc_status kvc_fit_compacted(kvc_batch *batch, int is_planned, int64_t *bytes);

/* The numbers that kvc_fixed_bytes need not count again for another number of tokens. */
typedef struct kvc_fixed {
    kvc_scope scope;         /* KVC_NOW: nothing is evicted */
    int64_t evictable_bytes; /* of bookkeeping */
    int64_t lists_saved;     /* the most bytes that compactions save in lists of runs */
} kvc_fixed;

/* Begins asking a batch what it needs once everything evictable is evicted, or, in KVC_NOW, beside it.  The cache may
 * be tight, as kvc_tighten makes it.  kvc_fixed_bytes sets *bytes to what the cache has then without compactions, and
 * *least to the fewest bytes that these may leave.  kvc_fixed_begin can fail with KVC_ERR_NOMEM. */
kvc_status kvc_fixed_begin(const kvc_batch *batch, kvc_scope scope, kvc_fixed *fixed);
void kvc_fixed_bytes(const kvc_batch *batch, const kvc_fixed *fixed, int64_t *bytes, int64_t *least);

/* Returns kvc_nbytes after a batch that fits has begun, if no free memory is given back before. */
int64_t kvc_bytes_after(const kvc_batch *batch);

/* Returns the most runs that the list of a sequence in group g, which has `num` now, has once the batch is committed,
 * whichever of its tokens are committed. */
int32_t kvc_most_runs(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t num);

/* Sets the demand of all groups to zero. */
void kvc_forget_demands(kvc_cache *cache);

/* Tokens may arrive in several batches, and one of these may expire everything before it and continue in a new
 * block.  Returns how many of the `taken` slots behind a sequence's last row, in `block`, are used even then.  If
 * others keep the block from being free then, the tokens from there on go to another one. */
int32_t kvc_slots_saved(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
                        int32_t taken);

/* Does everything that can fail.  After a failure, call kvc_discard_batch. */
kvc_status kvc_prepare(kvc_batch *batch);

/* Undoes what was prepared, except blocks, lets victims stay, removes sequences that the batch added, and frees the
 * batch.
 */
void kvc_discard_batch(kvc_batch *batch);

/* Does what was prepared: afterwards there are free blocks for all slots of the batch, and no rows to expire. */
void kvc_apply_prepared(const kvc_batch *batch);

#endif
