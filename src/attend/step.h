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

/* Attends to the rows of a cursor, tile by tile.  ahead: rows that this thread will read next, of which the first tile
 * is prefetched.  Returns 0 if the call was cancelled. */
int kvc_attend_rows(kvc_task *t, kvc_cursor rows, kvc_cursor ahead);

/* Whether the call is to end early. */
int kvc_is_cancelled(kvc_call *c);

/* Prefetches the keys of the first tile of a cursor. */
void kvc_prefetch_keys(const kvc_task *t, kvc_cursor rows);

#endif
