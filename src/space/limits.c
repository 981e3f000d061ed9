/* limits.c: counts and limits a cache's memory: see limits.h. */
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
    for (int32_t g = 0; g < cache->num_groups; g++)
        while (kvc_cache_bytes(cache) > most_bytes &&
               kvc_pool_shrink(&cache->pools[g], cache->pools[g].demand.num_blocks, 1));
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        for (kvc_block *block = pool->first; pool->is_lazy && block && kvc_cache_bytes(cache) > most_bytes;
             block = block->listed.later)
            kvc_pool_purge(pool, block, kvc_cache_threads(cache));
    }
}

/* Plans that the followers of the victims' sequences end with them, or takes that back; returns what is freed of them.
 */
static int64_t plan_followers(const kvc_cache *cache, int is_planned) {
    int64_t bytes = 0;
    for (const kvc_sequence *loose = cache->evicting.is_tight ? cache->sequences.loose : NULL; loose;
         loose = loose->listed.next_loose)
        if (loose->follower) bytes += loose->follower->plan_end(loose->follower, is_planned);
    for (const kvc_sequence *sequence = cache->evicting.victims; sequence; sequence = sequence->evicting.next_victim)
        if (sequence->evicting.fate == KVC_GOES && sequence->follower)
            bytes += sequence->follower->plan_end(sequence->follower, is_planned);
    return bytes;
}

int64_t kvc_victim_bytes(const kvc_cache *cache) {
    int64_t bytes = plan_followers(cache, 1);
    plan_followers(cache, 0);
    for (const kvc_sequence *sequence = cache->evicting.victims; sequence; sequence = sequence->evicting.next_victim)
        if (sequence->evicting.fate == KVC_GOES) bytes += kvc_sequence_bytes(sequence);
    return bytes;
}

int64_t kvc_evictable_bytes(kvc_cache *cache) {
    if (!cache->evicting.is_tight) return cache->evicting.evictable_bytes;
    if (cache->evicting.tight_bytes < 0) {
        plan_followers(cache, 1); /* of sequences that stay and give up their states */
        cache->evicting.tight_bytes = cache->evicting.evictable_bytes + cache->evicting.occupied_bytes;
        plan_followers(cache, 0);
    }
    return cache->evicting.tight_bytes;
}

/* Returns the bytes of a group that are in use once victims are evicted, or all that may be. */
static int64_t used_bytes(kvc_cache *cache, int32_t g, kvc_scope scope) {
    kvc_preview preview = kvc_preview_open(cache, g, scope, 0);
    const int64_t used = kvc_preview_tally(&preview).bytes;
    kvc_preview_close(&preview);
    return used;
}

/* Returns the bytes of the bookkeeping of a group's blocks. */
static int64_t block_bookkeeping(const kvc_pool *pool) { return pool->num_blocks * kvc_pool_header_bytes(pool); }

/* Returns the bytes of all but blocks once victims are evicted, and the reserved sequence is freed; in KVC_FIXED at
 * most as many. */
static int64_t other_bytes(const kvc_cache *cache, kvc_scope scope) {
    if (scope == KVC_FIXED) return (int64_t)cache->size;
    int64_t bytes = cache->memory.bookkeeping - cache->memory.replaced;
    for (int32_t g = 0; g < cache->num_groups; g++) bytes -= block_bookkeeping(&cache->pools[g]);
    if (cache->sequences.reserved) bytes -= kvc_sequence_bytes(cache->sequences.reserved);
    return bytes - kvc_victim_bytes(cache);
}

kvc_status kvc_check_max_bytes(kvc_cache *cache, kvc_scope scope, const char *what) {
    if (!cache->limits.max_bytes || kvc_cache_bytes(cache) - cache->memory.replaced <= cache->limits.max_bytes)
        return KVC_OK;
    int64_t bytes = other_bytes(cache, scope);
    for (int32_t g = 0; g < cache->num_groups; g++) bytes += used_bytes(cache, g, scope);
    if (bytes <= cache->limits.max_bytes) return KVC_OK;
    cache->evicting.lacks_bytes = 1;
    return kvc_fail(KVC_ERR_FULL,
                    "%s would make it %lld bytes: max_bytes is %lld; clear a sequence, or give a larger max_bytes",
                    what, (long long)bytes, (long long)cache->limits.max_bytes);
}
