/* batch_rows.h: the rows that the tokens of a batch might see: stored rows, and the batch's rows that were put.
 */
#ifndef KVC_BATCH_ROWS_H
#define KVC_BATCH_ROWS_H

#include "space/row_buffer.h"

/* Called for the rows of a run.  tokens: [run->count] tokens of the batch whose rows these are; NULL: the rows are
 * stored ones, or of a cross-attention layer. */
typedef void kvc_batch_rows_fn(void *context, const kvc_run *run, const int32_t *tokens);

/* Visits the rows of sequence s of the batch in a layer, in order of arrival.  Rows that were put come last.  In a
 * cross-attention layer they replace the others.  buffer: the layer's row buffer, which the call has entered, or
 * NULL. Returns KVC_ERR_GONE, having visited a part, if rows are gone from the row buffer. */
kvc_status kvc_batch_visit(const kvc_batch *batch, int32_t layer, int32_t s, const kvc_row_buffer *buffer,
                           kvc_batch_rows_fn *visit, void *context);

/* Copies of the runs of these rows.  Runs that continue one another are joined. */
typedef struct kvc_batch_runs {
    kvc_run *runs;
    int32_t num;
    int64_t num_rows;
    uint64_t size; /* bytes of the allocation; 0 if there is no allocation */
} kvc_batch_runs;

/* Lists the runs of a sequence's rows; call with the mutex held.  Returns KVC_ERR_INVALID if the batch has no token
 * of the sequence, KVC_ERR_GONE as kvc_batch_visit, or KVC_ERR_NOMEM.  kvc_batch_runs_free frees the list. */
kvc_status kvc_batch_runs_new(const kvc_batch *batch, int32_t layer, int64_t seq_id, const kvc_row_buffer *buffer,
                              kvc_batch_runs *out);
void kvc_batch_runs_free(kvc_memory *memory, const kvc_batch_runs *list);

#endif
