/* resident.h: OS pages that are taken, or made huge, or given back, in steps between which other calls go on.
 *
 * All are called with the mutex held, which is let go meanwhile: what the call is for is done before.
 */
#ifndef KVC_RESIDENT_H
#define KVC_RESIDENT_H

#include "store/cache.h"

/* Joins pages into huge ones, after a batch of so many tokens. */
void kvc_join_pages(kvc_cache *cache, int32_t num_tokens);

/* Takes the memory of all slots that are counted as touched, and joins their pages. */
void kvc_take_pages(kvc_cache *cache);

/* kvc_give_back, of all. */
void kvc_return_pages(kvc_cache *cache);

#endif
