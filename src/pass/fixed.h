/* fixed.h: what a batch needs of memory, without planning what it evicts and moves. */
#ifndef KVC_FIXED_H
#define KVC_FIXED_H

#include "cache/batch.h"

/* Adds to *bytes what all blocks take with the tokens of the batch, if free memory is given back.  In
 * KVC_FIXED, everything evictable counts as evicted.  Adds to *least the fewest bytes that compactions may leave of
 * these.  Returns whether there is anything to compact. */
int kvc_add_fixed_bytes(const kvc_batch *batch, kvc_scope scope, int64_t *bytes, int64_t *least);

#endif
