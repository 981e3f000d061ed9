/* rows.h: gives kernels the rows of a tile, and what to prefetch.
 *
 * Kernels take rows that lie evenly.  Others are copied to the workspace, or given a few at a time.
 */
#ifndef KVC_ROWS_H
#define KVC_ROWS_H

#include "attend/task.h"

/* A place in the rows of a tile. */
typedef struct kvc_row_place {
    const kvc_stretch *at;
    int64_t offset; /* rows of that stretch behind it */
} kvc_row_place;

/* What is left of the keys of a tile, or of its values. */
typedef struct kvc_walk {
    kvc_row_place place;
    int64_t left;                  /* rows of the tile */
    size_t row_bytes, ahead_bytes; /* of a row; those to prefetch: none of values that are parts of keys */
    int32_t type, kernel_type, dim;
    int is_value;
} kvc_walk;

/* Returns all of them. */
kvc_walk kvc_walk_keys(const kvc_task *t, const kvc_tile *tile);
kvc_walk kvc_walk_values(const kvc_task *t, const kvc_tile *tile);

/* Whether the rows that are left lie in several stretches, which are better prefetched a few rows at a time. */
int kvc_is_in_stretches(const kvc_walk *w);

/* Rows as a kernel takes them. */
typedef struct kvc_kernel_rows {
    const void *first;
    int64_t stride, num;
} kvc_kernel_rows;

/* Takes `rows` rows: where they lie if evenly and of a type that kernels take, else copied to the workspace. */
kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows);

/* Takes as many rows as a kernel is best given next: floats of a long stretch, else a few; all, where they are
 * unpacked. Quantised rows are scored in groups, and sums of theirs depend on all rows of the tile. */
kvc_kernel_rows kvc_take_some(const kvc_task *t, kvc_walk *w);

/* Takes up to `rows` rows to prefetch, and returns the last of them that lie one after the other, for a kernel to
 * prefetch evenly; prefetches those before.  Call it behind kvc_take_rows: copying would wait for what it prefetches.
 */
kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows);

/* Takes as many rows as fill `lines` lines; none, unless all that are left lie one after the other. */
kvc_ahead kvc_take_few_ahead(const kvc_call *c, kvc_walk *w, int64_t lines);

/* Prefetches it all at once. */
void kvc_prefetch(kvc_ahead ahead);

#endif
