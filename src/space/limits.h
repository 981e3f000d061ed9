/* limits.h: how much memory a cache has, what counts for max_bytes, and what is given back.
 *
 * max_bytes counts whole blocks.  A used block counts kvc_pool.cost from its first row on, and while a view keeps it.
 * Free blocks do not count.  States count by their bytes, and so do prompts of acquired sequences, pins and prefixes.
 * Lists come on top: kvc_pool.cost has a share for them.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#include "cache/cache.h"

/* Returns the bytes of the cache's rows and bookkeeping: kvc_nbytes, with the mutex held. */
int64_t kvc_cache_bytes(const kvc_cache *cache);

/* Gives memory back until kvc_cache_bytes is at most most_bytes, or nothing is left to give back: the reserved
 * sequence, free blocks, and pages past fill marks. */
void kvc_give_back(kvc_cache *cache, int64_t most_bytes);

/* Gives back free blocks, except the next pool->demand.num_blocks to be used, until all blocks are within max_bytes. */
void kvc_give_back_beyond(kvc_cache *cache);

/* Returns how many blocks of a group are in use once rows are moved together, and num_rows more are there.  tally: what
 * is in use before.  Rows in held blocks stay; the free slots of these blocks are filled first. */
static inline int64_t kvc_packed_blocks(const kvc_pool *pool, const kvc_tally *tally, int64_t num_rows) {
    const int64_t size = pool->block_size, open = tally->held.blocks * size - tally->held.filled,
                  live = tally->used.live - tally->held.live + (num_rows > open ? num_rows - open : 0);
    return tally->held.blocks + (live + size - 1) / size;
}

/* Returns what states and prompts count once victims are evicted or, in KVC_FIXED, all that may be. */
int64_t kvc_counted_others(const kvc_cache *cache, kvc_scope scope);

/* Returns what counts for max_bytes as it lies, once victims are evicted or, in KVC_FIXED, all that may be. */
int64_t kvc_counted_bytes(kvc_cache *cache, kvc_scope scope);

/* Frees the reserved sequence. */
void kvc_reserved_free(kvc_cache *cache);

#endif
