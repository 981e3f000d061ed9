/* snapshot.c: see snapshot.h. */
#include "read/snapshot.h"

#include "cache/waiting.h"
#include "read/span.h"

kvc_status kvc_snapshot_take(kvc_cache *cache, int32_t layer, const kvc_run *runs, int32_t num_runs,
                             uint64_t scratch_bytes, kvc_snapshot *s) {
    *s = (kvc_snapshot){.cache = cache, .layer = layer};
    kvc_add_array(&s->size, (uint64_t)num_runs * sizeof *s->runs);
    const uint64_t scratch = kvc_add_array(&s->size, scratch_bytes);
    s->runs = kvc_memory_alloc(&cache->memory, s->size, KVC_MEMORY_SCRATCH, -1);
    if (!s->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to read %d runs of layer %d", num_runs, layer);
    if (scratch_bytes) s->scratch = (char *)s->runs + scratch;
    s->num_runs = num_runs;
    for (int32_t i = 0; i < num_runs; i++) {
        s->runs[i] = runs[i];
        kvc_pin_block(runs[i].block);
    }
    return KVC_OK;
}

void kvc_snapshot_close(const kvc_snapshot *s) {
    if (!s->num_runs) return;
    kvc_cache *cache = s->cache;
    kvc_lock(cache);
    for (int32_t i = 0; i < s->num_runs; i++)
        kvc_unpin_block(cache, &cache->pools[cache->group_of[s->layer]], s->runs[i].block);
    kvc_memory_free(&cache->memory, s->runs, s->size, KVC_MEMORY_SCRATCH, -1);
    kvc_cache_end_reading(cache);
    kvc_unlock(cache, KVC_OK);
}
