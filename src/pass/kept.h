/* kept.h: what a batch needs of memory once all that may be evicted is, without looking at that. */
#ifndef KVC_KEPT_H
#define KVC_KEPT_H

#include "cache/batch.h"

/* Adds to *bytes what all blocks and row buffers take with the tokens of the batch, if everything evictable is evicted
 * and free memory is given back.  Adds to *least the fewest bytes that compactions may leave of these.  Returns whether
 * there is anything to compact. */
int kvc_add_kept_bytes(const kvc_batch *batch, int64_t *bytes, int64_t *least);

#endif
