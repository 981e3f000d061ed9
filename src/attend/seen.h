/* seen.h: which rows of a tile a query token sees, and what becomes of the others: scores of -inf, and of values that
 * are no numbers, zeros. */
#ifndef KVC_SEEN_H
#define KVC_SEEN_H

#include "attend/task.h"

/* The positions that a query token sees unless a tree decides: those below `sinks`, and [low, last]. */
typedef struct kvc_visible {
    int32_t token, low, sinks, last;
} kvc_visible;

kvc_visible kvc_visible_to(const kvc_call *c, int32_t token);

/* Return whether a token certainly sees all rows of a tile, or none. */
int kvc_sees_whole_tile(const kvc_call *c, const kvc_tile *tile, const kvc_visible *v);
int kvc_sees_nothing_of(const kvc_call *c, const kvc_tile *tile, int32_t token);

/* Sets the scores of rows that a token does not see to -inf, of its query rows, which are `num`. */
void kvc_hide_unseen(const kvc_call *c, kvc_tile *tile, float *scores, int32_t stride, int32_t num,
                     const kvc_visible *v);

/* Returns what all tokens of a task see, trees aside. */
kvc_visible kvc_visible_to_all(const kvc_task *t);

/* Returns whether a value of a tile that some tokens of the task do not see has an element that is infinite or NaN:
 * times the weight of 0 that it has for them, it would be NaN.  common: kvc_visible_to_all. */
int kvc_spoils_others(const kvc_task *t, kvc_tile *tile, const kvc_visible *common);

/* Makes *own the tile as the one token of a view is to see it: with zeros for such values, if it does not see them. */
void kvc_clear_unseen(const kvc_task *view, const kvc_tile *tile, kvc_tile *own);

#endif
