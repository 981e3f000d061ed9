/* snapshot.c: the runs of a sequence as they are at one moment, whose blocks are pinned while they are read.  A poll
 * calls the caller's function, which says whether to end early.  Meanwhile the call counts as no reader. */
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
        kvc_pool_pin(runs[i].block);
    }
    return KVC_OK;
}

int kvc_snapshot_poll(kvc_snapshot *s, kvc_poll_timer *timer) {
    if (!kvc_poll_timer_is_due(timer)) return kvc_poll_timer_was_stopped(timer);
    kvc_lock(s->cache);
    kvc_cache_begin_polling(s->cache, &s->polling);
    kvc_unlock(s->cache, KVC_OK);
    const int stop = kvc_poll_timer_poll(timer);
    kvc_lock(s->cache);
    kvc_cache_end_polling(s->cache, &s->polling);
    kvc_unlock(s->cache, KVC_OK);
    return stop;
}

/* Unpins the blocks, and frees the snapshot's memory. */
static void let_go(const kvc_snapshot *s) {
    kvc_cache *cache = s->cache;
    for (int32_t i = 0; i < s->num_runs; i++)
        kvc_pool_unpin(&cache->pools[cache->group_of[s->layer]], s->runs[i].block);
    kvc_memory_free(&cache->memory, s->runs, s->size, KVC_MEMORY_SCRATCH, -1);
}

void kvc_snapshots_forked(kvc_cache *cache) {
    for (kvc_polling *polling = cache->waiting.polling, *next; polling; polling = next) {
        next = polling->next;
        if (kvc_thread_is_self(polling->thread)) continue;
        kvc_cache_end_polling(cache, polling);
        let_go((const kvc_snapshot *)polling); /* the snapshot's first field */
        kvc_cache_end_reading(cache);
    }
}

void kvc_snapshot_close(const kvc_snapshot *s) {
    if (!s->num_runs) return;
    kvc_cache *cache = s->cache;
    kvc_lock(cache);
    let_go(s);
    kvc_cache_end_reading(cache);
    kvc_unlock(cache, KVC_OK);
}
