/* batch_rows.h: the rows that the tokens of a batch might see: stored rows, and the batch's rows that were put.
 */
#ifndef KVC_BATCH_ROWS_H
#define KVC_BATCH_ROWS_H

#include "cache/batch.h"

/* Called for the rows of a run.  tokens: [run->count] tokens of the batch whose rows these are; NULL: the rows are
 * stored ones, or of a cross-attention layer. */
typedef void kvc_batch_rows_fn(void *context, const kvc_run *run, const int32_t *tokens);

/* Visits the rows of sequence s of the batch in a layer, in order of arrival.  Rows that were put come last.  In a
 * cross-attention layer they replace the others. */
void kvc_batch_visit(const kvc_batch *batch, int32_t layer, int32_t s, kvc_batch_rows_fn *visit, void *context);

/* Copies of the runs of these rows.  Runs that continue one another are joined. */
typedef struct kvc_batch_runs {
    kvc_run *runs;
    int32_t num;
    int64_t num_rows;
    uint64_t size; /* bytes of the allocation; 0 if there is no allocation */
} kvc_batch_runs;

/* Lists the runs of a sequence's rows; call with the mutex held.  Returns KVC_ERR_INVALID if the batch has no token
 * of the sequence, or KVC_ERR_NOMEM.  kvc_batch_runs_free frees the list. */
kvc_status kvc_batch_runs_new(const kvc_batch *batch, int32_t layer, int64_t seq_id, kvc_batch_runs *out);
void kvc_batch_runs_free(kvc_memory *memory, const kvc_batch_runs *list);

#endif
