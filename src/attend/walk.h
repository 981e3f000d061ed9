/* walk.h: the rows of a tile as kernels take them: evenly, and of a type that they read.
 *
 * Rows that lie so are read in place.  Others are copied to the workspace, or given a few at a time.
 */
#ifndef KVC_WALK_H
#define KVC_WALK_H

#include "attend/task.h"

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

#endif
