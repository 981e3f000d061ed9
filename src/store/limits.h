/* limits.h: how much memory a cache has, and what it gives back to stay within max_bytes.  All functions are called
 * with the mutex held. */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#include "store/cache.h"

/* What kvc_nbytes returns. */
int64_t kvc_cache_bytes(const kvc_cache *cache);

/* Gives memory back until kvc_cache_bytes is at most most_bytes, or nothing more can be given: the spare sequence, free
 * blocks, but for the next pool->demand.num_blocks to be used, and the pages past fill marks. */
void kvc_give_back(kvc_cache *cache, int64_t most_bytes);

/* Gives back what is needed to stay within max_bytes.  KVC_ERR_FULL if all would not be enough: then nothing is given
 * back, and `what` begins the message. */
kvc_status kvc_check_max_bytes(kvc_cache *cache, const char *what);

/* Frees the spare sequence. */
void kvc_spare_free(kvc_cache *cache);

#endif
