/* limits.c: counts a cache's memory.  max_bytes counts whole blocks at pool->cost each, states and prompts, for which
 * it leaves limits.budget.  In the scope KVC_FIXED, what may be evicted does not count; victims never do. */
#include "space/limits.h"

#include "space/expire.h"

int64_t kvc_cache_bytes(const kvc_cache *cache) {
    int64_t bytes = cache->memory.bookkeeping;
    for (int32_t g = 0; g < cache->num_groups; g++) bytes += cache->pools[g].counts.row_bytes;
    return bytes;
}

void kvc_reserved_free(kvc_cache *cache) {
    if (cache->sequences.reserved) kvc_sequence_free(cache->sequences.reserved, &cache->memory, cache->pools);
    cache->sequences.reserved = NULL;
}

void kvc_give_back(kvc_cache *cache, int64_t most_bytes) {
    if (kvc_cache_bytes(cache) > most_bytes) kvc_reserved_free(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) /* frees free blocks, one by one */
        while (kvc_cache_bytes(cache) > most_bytes && kvc_pool_shrink(&cache->pools[g], 0, 1));
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        for (kvc_block *block = pool->first; pool->is_lazy && block && kvc_cache_bytes(cache) > most_bytes;
             block = block->listed.later)
            kvc_pool_purge(pool, block, kvc_cache_threads(cache));
    }
}

int64_t kvc_counted_others(const kvc_cache *cache, kvc_scope scope) {
    int64_t bytes = cache->prefixes.prompt_bytes + cache->prefixes.state_bytes;
    if (scope == KVC_FIXED) return bytes - cache->evicting.state_bytes;
    for (const kvc_sequence *victim = cache->evicting.victims; victim; victim = victim->evicting.next_victim)
        if (victim->evicting.fate == KVC_GOES) bytes -= victim->evicting.state_bytes;
    return bytes;
}

int64_t kvc_counted_bytes(kvc_cache *cache, kvc_scope scope) {
    int64_t bytes = kvc_counted_others(cache, scope);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_preview preview = kvc_preview_open(cache, g, scope, /* expires */ 0);
        bytes += kvc_preview_tally(&preview).used.blocks * cache->pools[g].cost;
        kvc_preview_close(&preview);
    }
    return bytes;
}

void kvc_give_back_beyond(kvc_cache *cache) {
    int64_t bytes = kvc_counted_others(cache, KVC_NOW);
    for (int32_t g = 0; g < cache->num_groups; g++) bytes += cache->pools[g].num_blocks * cache->pools[g].cost;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        while (bytes > cache->limits.budget && kvc_pool_shrink(pool, (int32_t)pool->demand.num_blocks, 1))
            bytes -= pool->cost;
    }
}
