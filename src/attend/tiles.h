/* tiles.h: walks the rows of a task, KVC_TILE at a time. */
#ifndef KVC_TILES_H
#define KVC_TILES_H

#include "attend/work.h"

/* Walks some rows of a unit, from the beginning of a window on: those are KVC_TILE rows each, and no tile passes one.
 */
typedef struct kvc_cursor {
    const kvc_layout *at;
    const uint8_t *rows; /* of all pieces; NULL: each has its own */
    const kvc_piece *piece;
    int32_t offset, head; /* KV head */
    int64_t rest;         /* rows */
    int32_t most_turns;   /* with as many changes of turn, or more, a window is one tile; 0: there are none */
    int32_t window;       /* rows that are left of the window */
    int32_t is_mixed;     /* it is one tile, of several turns */
} kvc_cursor;

enum { KVC_MIXED = -2 }; /* turns: keys are turned, not queries */

/* Rows that are worked on together: the first n from a place on. */
typedef struct kvc_tile {
    const kvc_layout *at;
    const uint8_t *rows;
    const kvc_piece *piece;
    int32_t offset, head, n;
    int32_t min_position, max_position;
    int32_t turn;     /* of all its rows, or MIXED */
    int32_t is_batch; /* its last row, so perhaps others, is the batch's own */
    int32_t is_known; /* what follows is filled in: only masks and ALiBi ask */
    int32_t position[KVC_TILE];
    int32_t token[KVC_TILE]; /* of the batch; -1: a stored row */
} kvc_tile;

static inline int32_t kvc_smaller(int64_t a, int32_t b) { return a < b ? (int32_t)a : b; }

/* The next rows, of which there may be none, up to a change of turn, if those are not too many.  k: their keys; past n,
 * as often as needed, the last. */
void kvc_next_tile(kvc_tile *t, const void *k[KVC_TILE], kvc_cursor *c);

/* Its values, k being its keys. */
void kvc_point_at_values(const void *v[KVC_TILE], const kvc_tile *t, const void *const k[KVC_TILE]);

/* Fills in where its rows stand, and which tokens of the batch they are. */
void kvc_locate_rows(kvc_tile *t, const int32_t *order);

#endif
