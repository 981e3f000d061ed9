/* minima.h: the share of attention that the minima of blocks have, where kernels get rows without them.
 *
 * An element is d * q + m, with a scale d and a minimum m for each block.  Kernels score and sum the products of scales
 * and codes.  m, times the sum of the query's elements in the block, is added to a score.  m, times the row's weight,
 * is added to all columns of the block.  The minima of a tile lie in the workspace: [block][KVC_TILE].
 */
#ifndef KVC_MINIMA_H
#define KVC_MINIMA_H

#include "attend/task.h"

/* Adds up the elements of each block of the query rows, which are not prepared yet, times the scale of scores. */
void kvc_add_up_blocks(const kvc_task *t);

/* Adds the minima of a tile's n keys to its scores. */
void kvc_score_minima(const kvc_task *t, int32_t n);

/* Adds the minima of a tile's n values, weighted, to acc. */
void kvc_accumulate_minima(const kvc_task *t, int32_t n);

#endif
