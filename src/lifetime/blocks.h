/* blocks.h: visits the runs of a cache, whoever holds them. */
#ifndef KVC_BLOCKS_H
#define KVC_BLOCKS_H

#include "cache/batch.h"

/* Gets runs of a sequence: of its tokens in the open batch if in_batch is not 0, else of stored rows. */
typedef void kvc_runs_fn(void *context, const kvc_run *runs, int32_t num, const kvc_sequence *sequence,
                         int32_t in_batch);

/* Visits all runs of a layer group: stored runs, the open batch's, and runs that a kvc_put to a cross-attention
 * layer is filling.  With `loaded`, also visits runs of sequences that are being loaded. */
void kvc_visit_runs(const kvc_cache *cache, int32_t g, kvc_runs_fn *visit, void *context, int loaded);

#endif
