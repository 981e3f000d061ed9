/* bytes.h: attends to a tile for many query rows in bytes: queries, keys, weights and values have 8 bits.
 *
 * Each query row, key and value has a unit, what its code of 1 stands for.  Units of keys multiply scores.  Units of
 * values go into the weights before they are rounded: a weight is exp(score + log(unit) - the tile's largest), so that
 * its 8 bits measure what the row adds to the result.  So maxima are of scores that have these logarithms; a sum of the
 * softmax takes exp over unit.
 *
 * Queries and keys are mixed by a Hadamard matrix, which makes their elements about as large as each other.  Rows of
 * int8, int6 and int4 are multiplied as they are stored.
 */
#ifndef KVC_BYTES_H
#define KVC_BYTES_H

#include "attend/task.h"

/* Does what kvc_multiply_tile does. */
void kvc_multiply_bytes(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

#endif
