/* step.h: steps of the softmax: rows and query rows as kernels take them; attends to a tile for few query rows.
 *
 * The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention): each query row has a running maximum and
 * sum, and what was accumulated is scaled whenever the maximum rises.  Rows that several sequences share are scored for
 * all their query rows at once, as in Hydragen.  But a query row has the same tiles as when its sequence is alone, so
 * that the order of sums does not change.
 */
#ifndef KVC_STEP_H
#define KVC_STEP_H

#include "attend/seen.h"

/* ---- the rows of a tile as kernels take them --------------------------------------------------------------------- */

/* A place in the rows of a tile. */
typedef struct kvc_walk_place {
    const kvc_stretch *at;
    int64_t offset; /* rows of that stretch behind it */
} kvc_walk_place;

/* The remaining keys, or values, of a tile. */
typedef struct kvc_walk {
    kvc_walk_place place;
    int64_t left;                  /* rows of the tile */
    size_t row_bytes, ahead_bytes; /* of a row; those to prefetch: none of values that are splits of keys */
    int32_t type, kernel_type, dim;
    int is_value;
} kvc_walk;

/* Rows as a kernel takes them. */
typedef struct kvc_kernel_rows {
    const void *first;
    int64_t stride, num;
} kvc_kernel_rows;

/* Return all keys of a tile, or values. */
kvc_walk kvc_walk_keys(const kvc_task *t, const kvc_tile *tile);
kvc_walk kvc_walk_values(const kvc_task *t, const kvc_tile *tile);

/* Prefetches this memory at once. */
void kvc_prefetch(kvc_ahead ahead);

/* Takes the next `rows` rows of a walk: where they lie, if a kernel takes them so, else copied to the workspace. */
kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows);

/* Multiplies a tile's scores by its keys' scales, or weights by its values', for kernels that leave the scales out. */
void kvc_times_scales(const kvc_task *t, const kvc_tile *tile, int is_value);

/* Takes up to `rows` rows of a walk to prefetch.  Returns the last of them that lie one after the other, for a kernel
 * to prefetch evenly, and prefetches the rows before these at once.  Call it after kvc_take_rows, whose copying would
 * wait for the prefetched lines. */
kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows);

/* ---- query rows -------------------------------------------------------------------------------------------------- */

/* Converts the rows of queries, or of the output, of one token and KV head. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim);

/* Copies the query rows of a task to its workspace, as rows of type `to`, with zeros up to a multiple of KVC_CHUNK. */
void kvc_load_query_rows(const kvc_task *t, int32_t to);

/* Returns the delta_index of a tile's keys; 0 where no rope rotates them. */
int32_t kvc_delta_index_of(const kvc_task *t, const kvc_tile *tile);

/* kvc_rotates_keys returns whether the keys of a tile are rotated, instead of query rows.  kvc_take_keys takes its next
 * n keys: rotated and without their matrix in this case, otherwise as kvc_take_rows does.  `at` or `keys` moves on. */
int kvc_rotates_keys(const kvc_task *t, const kvc_tile *tile);
kvc_kernel_rows kvc_take_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, kvc_walk *keys, int64_t n);

/* Whether a kernel takes the keys of a tile without their minima. */
int kvc_key_minima_apart(const kvc_task *t, const kvc_tile *tile);

/* Returns the query rows, rotated for the tile's delta, multiplied by its keys' matrix, and prepared for its kernel.
 * They stay as they are if the last tile had the same delta. */
const float *kvc_query_rows_for(kvc_task *t, const kvc_tile *tile);

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Attends to a tile for few query rows: each row is read once for all of them. */
void kvc_stream_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

/* Whether the call is to end early. */
int kvc_is_cancelled(kvc_call *c);

/* Prefetches the keys of the first tile of a cursor. */
void kvc_prefetch_keys(const kvc_task *t, kvc_cursor rows);

#endif
