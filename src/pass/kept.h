/* kept.h: what a batch needs of memory once all that may be evicted is, without looking at that. */
#ifndef KVC_KEPT_H
#define KVC_KEPT_H

#include "cache/batch.h"

/* Adds to *bytes those of all blocks then, with the tokens of the batch, and of rows of buffered tokens, if all free
 * memory is given back; *least: the fewest that compactions may leave of these.  Returns whether there is anything to
 * compact. */
int kvc_add_kept_bytes(const kvc_batch *batch, int64_t *bytes, int64_t *least);

#endif
