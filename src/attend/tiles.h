/* tiles.h: walks the rows of a task in tiles of up to KVC_TILE rows.
 *
 * A tile is pointers to rows, so that blocks, holes, runs of one slot and shared rows take one path.
 */
#ifndef KVC_TILES_H
#define KVC_TILES_H

#include "attend/work.h"

/* A place in the rows of a unit's part.  The rows from where the walk began on are counted in windows of KVC_TILE, and
 * no tile reaches past one, so that tiles do not depend on how rows are cut into pieces. */
typedef struct kvc_cursor {
    const kvc_layout *layout;
    const uint8_t *buffer_rows; /* that all pieces lie in; NULL: each piece has its own */
    const kvc_piece *piece;
    int32_t offset;         /* of the next row, in the piece */
    int32_t head;           /* KV head */
    int64_t num_rows;       /* that are left, */
    int32_t window;         /* and of these in the window */
    int32_t changes_to_mix; /* changes of delta that make a window mixed; 0: no key is off */
    int32_t is_mixed;       /* the window is one tile, of several deltas */
} kvc_cursor;

enum { KVC_MIXED = -2 }; /* as a delta_index: keys of several deltas, which are rotated instead of the query rows */

/* The n rows from a place on, which are attended for together. */
typedef struct kvc_tile {
    const kvc_layout *layout;
    const uint8_t *buffer_rows;
    const kvc_piece *piece;
    int32_t offset, head, n;
    int32_t min_position, max_position;
    int32_t delta_index;     /* of all its rows, or KVC_MIXED */
    int32_t is_batch;        /* the last row is the batch's own, so others may be */
    int32_t is_located;      /* positions and tokens are filled in: kvc_locate_rows */
    const void *k[KVC_TILE]; /* keys; past n, the last one again */
    int32_t position[KVC_TILE];
    int32_t token[KVC_TILE]; /* of the batch; -1: a stored row */
} kvc_tile;

/* Takes the next tile off a cursor: up to the end of the window, or to where the delta changes in one that is not
 * mixed.  n is 0 where no rows are left. */
void kvc_next_tile(kvc_tile *t, kvc_cursor *c);

/* Points v at the values of a tile; past n, at the last one again. */
void kvc_point_at_values(const void *v[KVC_TILE], const kvc_tile *t);

/* Fills in the positions of a tile's rows, and which tokens of the batch they are, unless that is done.  order:
 * batch->order. */
void kvc_locate_rows(kvc_tile *t, const int32_t *order);

#endif
