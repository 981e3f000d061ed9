/* stats.c: the public functions that say how much memory a cache has and how well it is used. */
#include "space/limits.h"

int64_t kvc_nbytes(kvc_cache *cache) {
    kvc_lock(cache);
    const int64_t bytes = kvc_cache_bytes(cache);
    kvc_unlock(cache, KVC_OK);
    return bytes;
}

int32_t kvc_block_size(kvc_cache *cache) { return cache->pools[0].block_size; }

int64_t kvc_capacity(kvc_cache *cache) { return cache->limits.capacity ? cache->limits.capacity : -1; }

int64_t kvc_capacity_bytes(kvc_cache *cache) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const int64_t slot = kvc_pool_slot_bytes(pool);
        if (!slot) continue;
        /* A sequence has one block in the group of a cross-attention layer. */
        const int64_t most = (INT64_MAX - bytes) / slot, slots = g < cache->num_token_groups
                                                                     ? cache->limits.capacity
                                                                     : cache->limits.max_sequences * pool->block_size;
        if (!slots) return -1; /* no limit */
        if (slots > most) return INT64_MAX;
        bytes += slots * slot;
    }
    return bytes;
}

double kvc_utilization(kvc_cache *cache) {
    double most = 0;
    kvc_lock(cache);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const double slots = cache->limits.capacity ? (double)cache->limits.capacity
                                                    : (double)(pool->num_blocks - pool->free.num) * pool->block_size;
        /* Rows that are to replace others, and rows that may be evicted, do not count. */
        const int64_t live = pool->counts.live - pool->counts.replacing - pool->evicting.evictable;
        const double share = slots > 0 ? (double)live / slots : 0;
        if (share > most) most = share;
    }
    kvc_unlock(cache, KVC_OK);
    return most;
}

void kvc_get_stats(kvc_cache *cache, kvc_stats *out, size_t size) {
    kvc_lock(cache);
    kvc_stats stats = cache->stats;
    stats.retained = cache->evicting.num_kept;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        stats.blocks_opened += pool->counts.opened;
        stats.blocks_reused += pool->counts.reused;
        stats.blocks_returned += pool->counts.returned;
        stats.live_slots += pool->counts.live;
        stats.wasted_slots += pool->counts.filled - pool->counts.live;
        stats.blocks_in_use += pool->num_blocks - pool->free.num;
        stats.blocks_free += pool->free.num;
        stats.evictable_slots += pool->evicting.evictable;
    }
    kvc_unlock(cache, KVC_OK);
    kvc_write_struct(out, size, &stats, sizeof stats);
}
