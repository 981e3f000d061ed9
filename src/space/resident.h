/* resident.h: takes OS pages, collapses them into huge ones, or gives them back, in steps between which other calls go
 * on.
 *
 * All functions are called with the mutex held, and release it meanwhile.  So call them last.
 */
#ifndef KVC_RESIDENT_H
#define KVC_RESIDENT_H

#include "cache/cache.h"

/* Collapses a few pages into huge ones, after a batch of num_tokens tokens. */
void kvc_collapse_pages(kvc_cache *cache, int32_t num_tokens);

/* Takes the memory of all slots that count as faulted, and collapses their pages. */
void kvc_take_pages(kvc_cache *cache);

/* Takes the memory of a block's slots below its fill mark, whose rows are about to be written.  Uses huge pages
 * where the slots fill them, because a fault for each small page would take longer than copying.  The block must be
 * pinned. */
void kvc_take_filled(kvc_cache *cache, int32_t g, kvc_block *block);

/* Gives back blocks that expiries and unstored sequences have left: kvc_pool_surplus. */
void kvc_return_surplus(kvc_cache *cache);

/* Gives back all free memory: kvc_give_back to 0 bytes, in steps. */
void kvc_return_pages(kvc_cache *cache);

#endif
