/* prepare.h: makes sure that a batch fits before anything is changed.
 *
 * There are three steps.  kvc_fit finds out whether the batch would fit once rows have expired, others are evicted,
 * groups compacted and free memory given back, without doing any of it.  kvc_prepare also takes all memory that may be
 * missing.  kvc_apply_prepared then does what was found to be needed, which cannot fail.
 */
#ifndef KVC_PREPARE_H
#define KVC_PREPARE_H

#include "cache/batch.h"
#include "space/evict.h"

/* Waits until no other call writes rows of the sequences seq_ids[num_tokens] in place (NULL: of sequence 0). */
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

/* Returns whether max_bytes leaves room for a batch once everything evictable is evicted, and rows are moved together:
 * a batch begins if it does, and the other limits allow it. */
int kvc_fits_in_bytes(kvc_batch *batch);

/* Returns the most runs that the list of a sequence in group g, which has `num` now, has once the batch is committed,
 * whichever of its tokens are committed. */
int32_t kvc_most_runs(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t num);

/* Does everything that can fail.  After a failure, call kvc_discard_batch. */
kvc_status kvc_prepare(kvc_batch *batch);

/* Undoes what was prepared, except blocks, lets victims stay, removes sequences that the batch added, and frees the
 * batch.
 */
void kvc_discard_batch(kvc_batch *batch);

/* Does what was prepared: afterwards there are free blocks for all slots of the batch, and no rows to expire. */
void kvc_apply_prepared(const kvc_batch *batch);

#endif
