/* queries.h: the query rows of a task, prepared for the kernel that scores a tile, and keys that are rotated instead.
 */
#ifndef KVC_QUERIES_H
#define KVC_QUERIES_H

#include "attend/task.h"

/* Converts the rows of queries, or of the output, of one token and KV head. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim);

/* Copies the query rows of a task to its workspace, as rows of type `to`, with zeros up to the end of a chunk. */
void kvc_load_query_rows(const kvc_task *t, int32_t to);

/* Returns the delta_index of a tile's keys; 0 where no rope rotates them. */
int32_t kvc_delta_index_of(const kvc_task *t, const kvc_tile *tile);

/* Decodes the next n keys of a mixed tile to the workspace, transforms them back, and rotates them. */
const float *kvc_rotate_tile_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, int32_t n);

/* Whether a kernel takes the keys of a tile without their minima. */
int kvc_key_minima_apart(const kvc_task *t, const kvc_tile *tile);

/* Returns the kernels that score a tile for few query rows. */
const kvc_scorer *kvc_scorer_of(const kvc_task *t, const kvc_tile *tile);

/* Returns the query rows, rotated for the tile's delta, transformed as its keys are and prepared for its kernel.
 * Usually the last tile's serve. */
const float *kvc_query_rows_for(kvc_task *t, const kvc_tile *tile);

#endif
