/* seen.h: which rows of a tile a query token sees.  The scores of the others become -inf, and values that are
 * infinite or NaN become zeros.  Also applies everything else that changes scores. */
#ifndef KVC_SEEN_H
#define KVC_SEEN_H

#include "attend/task.h"

/* The positions that a query token sees unless a tree decides: below `sinks`, and [low, last].  With a stride: rows. */
typedef struct kvc_visible {
    int32_t token, low, sinks, last;
} kvc_visible;

/* Returns what a token of the batch sees. */
kvc_visible kvc_visible_to(const kvc_call *c, int32_t token);

/* Return whether a token certainly sees all rows of a tile, or none. */
int kvc_sees_whole_tile(const kvc_call *c, const kvc_tile *tile, const kvc_visible *v);
int kvc_sees_nothing_of(const kvc_call *c, const kvc_tile *tile, int32_t token);

/* Returns a view of query rows, from the first to the last that sees a row of a tile: few at the end of a prompt. */
kvc_task kvc_view_that_sees(const kvc_task *t, const kvc_tile *tile);

/* Whether a token sees row j of a tile whose rows are located. */
int kvc_sees_row(const kvc_call *c, const kvc_tile *tile, const kvc_visible *v, int32_t j);

/* Applies softcap and ALiBi to n scores of one query row; positions: of the rows, where there is ALiBi. */
void kvc_bend_scores(const kvc_call *c, float *scores, const int32_t *positions, int32_t n, int32_t token,
                     int32_t head);

/* Call unless the tile is_seen and nothing changes_scores.  Applies softcap, ALiBi and what each query sees to the
 * scores of query rows [first, end) over a tile, which are `stride` floats apart. */
void kvc_change_scores(const kvc_task *t, kvc_tile *tile, int32_t first, int32_t end, float *scores, int32_t stride);

/* Returns what all tokens of a task see, trees aside. */
kvc_visible kvc_visible_to_all(const kvc_task *t);

/* Returns whether the tile has a masked value that is not finite, and NaN times 0.  common: kvc_visible_to_all. */
int kvc_spoils_others(const kvc_task *t, kvc_tile *tile, const kvc_visible *common);

/* Makes *own the tile as the one token of a task is to see it: with zeros for such values, if it does not see them. */
void kvc_clear_unseen(const kvc_task *t, const kvc_tile *tile, kvc_tile *own);

#endif
