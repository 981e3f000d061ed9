/* prepare.h: makes sure that a batch fits before anything is changed.
 *
 * Three steps.  kvc_fit finds out what the batch would meet once the cache has evicted, moved scattered rows together
 * and given back what is free, without doing any of it.  kvc_prepare also takes all memory that may be wanting.
 * kvc_carry_out then does what was found to be needed, which cannot fail.
 */
#ifndef KVC_PREPARE_H
#define KVC_PREPARE_H

#include "store/batch.h"

/* Waits until no other call writes rows of one of these sequences in place; seq_ids NULL: of sequence 0.  Under
 * max_bytes, waits for writers of any sequence and for calls that work on pages: they may hold what could be given
 * back. */
void kvc_wait_for_writers(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids);

/* KVC_ERR_BUSY if a batch is open or keys are being rewritten. */
kvc_status kvc_check_none_open(const kvc_cache *cache);

/* Checks the number of tokens against the limits, before memory is taken for so many. */
kvc_status kvc_check_num_tokens(const kvc_cache *cache, int64_t num_tokens);

/* Sequences that will hold rows: those that do, and those of the batch. */
int64_t kvc_count_holding(const kvc_batch *batch);

/* KVC_ERR_FULL unless the batch fits, or KVC_ERR_NOMEM.  kvc_fit_bytes looks at max_bytes alone: *bytes is what would
 * be too much; its KVC_ERR_FULL comes without a sentence. */
kvc_status kvc_fit(const kvc_batch *batch);
kvc_status kvc_fit_bytes(const kvc_batch *batch, int64_t *bytes);

/* kvc_nbytes once a batch that fits has begun, if nothing that is free is given back before. */
int64_t kvc_bytes_after(const kvc_batch *batch);

/* Does all that can fail; if it does, kvc_discard_batch is to follow. */
kvc_status kvc_prepare(kvc_batch *batch);

/* Drops what was prepared, but for blocks, and lets the sequences of the batch go: nothing has changed. */
void kvc_discard_batch(kvc_batch *batch);

/* Does what was prepared: then there are free blocks for all that the batch needs, and nobody has anything to evict. */
void kvc_carry_out(const kvc_batch *batch);

#endif
