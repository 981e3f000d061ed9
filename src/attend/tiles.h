/* tiles.h: walks the rows of a task in tiles of up to KVC_TILE rows, or KVC_WIDE_TILE.
 *
 * A tile lists its rows by stretches that lie evenly, so that blocks, holes, runs of one slot and shared rows take one
 * path.  Nearly always it is one stretch of rows one after the other.
 */
#ifndef KVC_TILES_H
#define KVC_TILES_H

#include "attend/work.h"

/* A place in the rows of a slice's split.  From where the walk begins, rows are counted in windows, and no tile
 * reaches past the end of one, so that tiles do not depend on how rows are cut into segments. */
typedef struct kvc_cursor {
    const kvc_layout *layout;
    const uint8_t *buffer_rows; /* rows of the row buffer that all segments lie in; NULL: each segment has its own */
    const kvc_segment *segment;
    int32_t offset;         /* index of the next row in the segment */
    int32_t head;           /* KV head */
    int64_t num_rows;       /* rows left */
    int32_t window_rows;    /* rows of a window */
    int32_t window;         /* rows left in the window */
    int32_t changes_to_mix; /* from this many changes of delta on, a window is mixed; 0: no key is off */
    int32_t is_mixed;       /* whether the window is one tile, of several deltas */
} kvc_cursor;

enum { KVC_MIXED = -2 }; /* a delta_index: the keys have several deltas, and are rotated instead of the query rows */

/* Rows whose keys lie evenly, and so do their values: one after the other, or single ones between holes. */
typedef struct kvc_stretch {
    const uint8_t *first[2]; /* key and value of the first row */
    ptrdiff_t step[2];       /* bytes from row to row */
    int64_t n;
} kvc_stretch;

/* Rows side by side in a split, which are attended for together. */
typedef struct kvc_tile {
    const kvc_layout *layout;
    const uint8_t *buffer_rows;
    const kvc_segment *segment;
    int32_t offset, head, n; /* index of the first row in the segment; KV head; number of rows */
    int32_t min_position, max_position;
    int32_t delta_index; /* the same for all its rows, or KVC_MIXED */
    int32_t is_batch;    /* whether the last row is the batch's own; then others may be */
    int32_t is_seen;     /* whether all tokens of the task certainly see all its rows; set by the task */
    int32_t is_located;  /* whether kvc_locate_rows has filled in position and token */
    kvc_stretch stretches[KVC_WIDE_TILE];
    int32_t position[KVC_WIDE_TILE];
    int32_t token[KVC_WIDE_TILE]; /* token of the batch; -1: a stored row */
} kvc_tile;

/* Takes the next tile off a cursor: up to the end of the window or, in one that is not mixed, to where the delta
 * changes. n is 0 if no rows are left. */
void kvc_next_tile(kvc_tile *t, kvc_cursor *c);

/* Returns the key of row `offset` of one of the tile's segments. */
const uint8_t *kvc_key_in(const kvc_tile *t, const kvc_segment *segment, int32_t offset);

/* Fills in the position and the token of each row of a tile, unless that is done.  order: batch->order. */
void kvc_locate_rows(kvc_tile *t, const int32_t *order);

#endif
