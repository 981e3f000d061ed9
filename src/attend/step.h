/* step.h: steps of the softmax: attends to rows a tile at a time.
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

/* Counts the rows from a place on to the end of the stretch. */
static inline int64_t kvc_rows_behind(const kvc_walk_place *p) { return p->at->n - p->offset; }

/* Return all keys of a tile, or values. */
kvc_walk kvc_walk_keys(const kvc_task *t, const kvc_tile *tile);
kvc_walk kvc_walk_values(const kvc_task *t, const kvc_tile *tile);

/* Prefetches all of it at once. */
void kvc_prefetch(kvc_ahead ahead);

/* Takes `rows` rows: where they lie if evenly and of a type that kernels take, else copied to the workspace. */
kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows);

/* Takes as many keys, or values of floats, as a kernel is best given next: floats of a long stretch, else a few; all,
 * where they are unpacked.  Quantised rows are scored in groups. */
kvc_kernel_rows kvc_take_some(const kvc_task *t, kvc_walk *w);

/* Takes all quantised values of a tile, as a kvc_accumulate_fn does; returns the bytes from row to row.  Pieces that
 * lie apart or in several stretches are copied, so that sums do not depend on where they lie. */
int64_t kvc_take_values(const kvc_task *t, kvc_walk *w, kvc_value_piece *piece);

/* Prefetches the scales of a tile, which lie apart from its rows, except of single rows. */
void kvc_prefetch_scales(const kvc_call *c, const kvc_tile *tile);

/* Multiplies a tile's scores by the scales of its keys, or weights by the scales of its values, for kernels that
 * leave the scales out. */
void kvc_times_scales(const kvc_task *t, const kvc_tile *tile, int is_value);

/* Whether the next rows, up to `most`, lie in several stretches, which are better prefetched a few rows at a time. */
int kvc_is_in_stretches(const kvc_walk *w, int64_t most);

/* Takes up to `rows` rows to prefetch, and returns the last of them that lie one after the other, for a kernel to
 * prefetch evenly; prefetches those before.  Call it behind kvc_take_rows: copying would wait for what it
 * prefetches. */
kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows);

/* Takes as many rows as fill `lines` lines; none, unless all that are left lie one after the other. */
kvc_ahead kvc_take_few_ahead(const kvc_call *c, kvc_walk *w, int64_t lines);

/* ---- query rows -------------------------------------------------------------------------------------------------- */

/* Converts the rows of queries, or of the output, of one token and KV head. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim);

/* Copies the query rows of a task to its workspace, as rows of type `to`, with zeros up to the end of a chunk. */
void kvc_load_query_rows(const kvc_task *t, int32_t to);

/* Returns the delta_index of a tile's keys; 0 where no rope rotates them. */
int32_t kvc_delta_index_of(const kvc_task *t, const kvc_tile *tile);

/* Whether the keys of a tile are rotated, instead of query rows.  Takes its next n keys, rotated then and transformed
 * back; `at` and `keys` go on. */
int kvc_rotates_keys(const kvc_task *t, const kvc_tile *tile);
kvc_kernel_rows kvc_take_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, kvc_walk *keys, int64_t n);

/* Whether a kernel takes the keys of a tile without their minima. */
int kvc_key_minima_apart(const kvc_task *t, const kvc_tile *tile);

/* Returns the kernels that score a tile for few query rows. */
const kvc_scorer *kvc_scorer_of(const kvc_task *t, const kvc_tile *tile);

/* Returns the query rows, rotated for the tile's delta, transformed as its keys are and prepared for its kernel.
 * Usually the last tile's serve. */
const float *kvc_query_rows_for(kvc_task *t, const kvc_tile *tile);

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Attends to a tile for few query rows: each row is read once for all of them. */
void kvc_stream_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

/* Whether the call is to end early. */
int kvc_is_cancelled(kvc_call *c);

/* Prefetches the keys of the first tile of a cursor. */
void kvc_prefetch_keys(const kvc_task *t, kvc_cursor rows);

#endif
