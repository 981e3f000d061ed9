/* limits.h: how much memory a cache has, and what it gives back to stay within max_bytes.  All functions are called
 * with the mutex held. */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#include "cache/cache.h"

/* Returns the bytes of the cache's rows and bookkeeping: kvc_nbytes, with the mutex held. */
int64_t kvc_cache_bytes(const kvc_cache *cache);

/* Gives memory back until kvc_cache_bytes is at most most_bytes, or nothing is left to give back.  It gives back the
 * reserved sequence, free blocks except the next pool->demand.num_blocks to be used, and pages past fill marks. */
void kvc_give_back(kvc_cache *cache, int64_t most_bytes);

/* Returns the bytes of the victims' bookkeeping that is freed as they are evicted. */
int64_t kvc_victim_bytes(const kvc_cache *cache);

/* Returns what kvc_victim_bytes does if all that may be evicted are victims, in a time that does not depend on their
 * number.  There are no victims yet. */
int64_t kvc_evictable_bytes(kvc_cache *cache);

/* Returns KVC_ERR_FULL, noting it in cache->evicting.lacks_bytes, unless the cache stays within max_bytes once victims
 * are evicted and kvc_give_back(cache, max_bytes) has been called.  In KVC_FIXED, unless it might once all that may be
 * evicted is.  `what` begins the message. */
kvc_status kvc_check_max_bytes(kvc_cache *cache, kvc_scope scope, const char *what);

/* Frees the reserved sequence. */
void kvc_reserved_free(kvc_cache *cache);

#endif
