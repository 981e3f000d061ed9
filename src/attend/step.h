/* step.h: one step of the softmax: attends to one tile.
 *
 * The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention): each query row has a running maximum and
 * sum, and what was accumulated is scaled whenever the maximum rises.  Rows that several sequences share are scored for
 * the query rows of all of them at once, as in Hydragen, but the tiles of a query row are those it has when its
 * sequence is alone, so that the order of sums does not change.
 */
#ifndef KVC_STEP_H
#define KVC_STEP_H

#include "attend/seen.h"

/* Attends to the tile `current`.  On the way, takes the tile `next` off the cursor `upcoming`, and prefetches its keys.
 * common: kvc_visible_to_all. */
void kvc_attend_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming, const kvc_visible *common);

/* Prefetches the keys of a tile. */
void kvc_prefetch_keys(const kvc_task *t, const kvc_tile *tile);

/* Converts the rows of queries, or of the output, of one token and KV head. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim);

/* Returns the kernels that multiply values by many query rows; NULL: they are streamed.  With them, the values in acc,
 * and those of partial results, are 2^sum_shift times what they should be, and where they weigh, maxima are of scores
 * times log2(e). */
const kvc_tiler *kvc_value_tiler(const kvc_task *t);

#endif
