/* evict.c: evicts rows, and previews it: see evict.h. */
#include "store/evict.h"

void kvc_set_lows(kvc_cache *cache) {
    for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed)
        if (!sequence->in_batch) sequence->low = kvc_sequence_low(sequence);
}

kvc_interval kvc_evictable(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g) {
    const kvc_policy *policy = &cache->policies[g];
    return (kvc_interval){kvc_policy_sinks(policy), kvc_policy_retained(policy, sequence->low)};
}

int64_t kvc_count_kept(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g) {
    const kvc_interval gone = kvc_evictable(cache, sequence, g);
    return sequence->runs[g].num_rows - kvc_runs_visit(&sequence->runs[g], gone.begin, gone.end, NULL, NULL);
}

/* ---- previews ---------------------------------------------------------------------------------------------------- */

/* Calls visit for every part of a run that group g can evict. */
static void visit_evictable(const kvc_cache *cache, int32_t g, kvc_part_fn *visit, void *context) {
    if (!kvc_policy_evicts(&cache->policies[g])) return;
    for (const kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed) {
        const kvc_interval gone = kvc_evictable(cache, sequence, g);
        kvc_runs_visit(&sequence->runs[g], gone.begin, gone.end, visit, context);
    }
}

/* Takes the slots of a part out of the counts of their block. */
static void uncount_part(void *preview, const kvc_run *part) {
    kvc_preview *p = preview;
    if (kvc_pool_try_drop(part->block, part->slot, part->count, &p->slots)) kvc_preview_add_free(p, part->block);
}

kvc_preview kvc_preview_open(kvc_cache *cache, int32_t g) {
    kvc_preview preview = {.pool = &cache->pools[g], .cache = cache, .free = cache->pools[g].free};
    visit_evictable(cache, g, uncount_part, &preview);
    return preview;
}

void kvc_preview_add_free(kvc_preview *preview, kvc_block *block) {
    block->next = preview->free;
    preview->free = block;
}

void kvc_preview_close(kvc_preview *preview) {
    visit_evictable(preview->cache, preview->pool->group, kvc_undo_drop_part, NULL);
    while (preview->free != preview->pool->free) {
        kvc_block *block = preview->free;
        preview->free = block->next;
        block->next = NULL;
    }
}

int64_t kvc_count_evictable_slots(kvc_cache *cache, int32_t g) {
    kvc_preview preview = kvc_preview_open(cache, g);
    kvc_preview_close(&preview);
    return preview.slots;
}

/* ---- evicting ---------------------------------------------------------------------------------------------------- */

void kvc_evict(kvc_cache *cache, int32_t g) {
    for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed) {
        kvc_runs_install(&sequence->runs[g], &cache->memory);
        if (!kvc_policy_evicts(&cache->policies[g])) continue;
        const kvc_interval gone = kvc_evictable(cache, sequence, g);
        cache->stats.rows_evicted += kvc_runs_evict(&sequence->runs[g], &cache->pools[g], gone.begin, gone.end);
    }
}
