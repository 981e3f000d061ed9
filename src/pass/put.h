/* put.h: stores the rows of a batch's tokens. */
#ifndef KVC_PUT_H
#define KVC_PUT_H

#include "cache/batch.h"

/* Do the two halves of kvc_put to a layer that the cache has.  The first resolves the arguments: checks
 * them, and fills in num_tokens.  The second stores the rows; it can fail only in cross-attention layers, or if the
 * call is cancelled. */
kvc_status kvc_resolve_put(const kvc_batch *batch, int32_t layer, kvc_put_args *args);
kvc_status kvc_put_rows(kvc_batch *batch, int32_t layer, const kvc_put_args *args);

/* Marks the rows of tokens in a layer as put, or as not put. */
void kvc_mark_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens, int is_written);

/* Takes a put to a cross-attention layer out of the batch's list and frees it.  If `all` rows were stored, they
 * replace the rows that an earlier put of this batch gave the sequence.  Otherwise drops their slots. */
void kvc_cross_put_end(kvc_batch *batch, kvc_cross_put *put, int all);

/* Drops the rows that a sequence of the batch was given in the group of a cross-attention layer.  If the sequence is
 * unstored, the commit gives their memory back. */
void kvc_drop_cross(const kvc_batch *batch, int32_t g, int32_t s);

#endif
