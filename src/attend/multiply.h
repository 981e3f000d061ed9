/* multiply.h: attends to a tile for many query rows, by products of floats or as stored. */
#ifndef KVC_MULTIPLY_H
#define KVC_MULTIPLY_H

#include "attend/task.h"

/* Attends to a tile for many query rows.  Keys and values are packed into panels once, and multiplied.  If scores
 * are to stay in the L1 cache, query rows go in blocks.  Prefetches the next tile. */
void kvc_multiply_tile(kvc_task *all, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming);

#endif
