/* cache.c: the upkeep of a cache's sequences: see cache.h. */
#include "cache/cache.h"

/* Updates the number of sequences that hold rows, by whether this one does. */
static void count_holding(kvc_cache *cache, kvc_sequence *sequence, int32_t holds) {
    cache->num_holding += holds - sequence->holds;
    sequence->holds = holds;
}

void kvc_cache_mark_changed(kvc_cache *cache, kvc_sequence *sequence) {
    if (sequence->is_retained) return;
    count_holding(cache, sequence, kvc_sequence_holds(sequence));
    if (sequence->changed_at) return;
    sequence->next_changed = cache->changed;
    sequence->changed_at = &cache->changed;
    if (cache->changed) cache->changed->changed_at = &sequence->next_changed;
    cache->changed = sequence;
}

void kvc_cache_unmark_changed(kvc_sequence *sequence) {
    if (!sequence->changed_at) return;
    *sequence->changed_at = sequence->next_changed;
    if (sequence->next_changed) sequence->next_changed->changed_at = sequence->changed_at;
    sequence->changed_at = NULL;
    sequence->next_changed = NULL;
}

void kvc_cache_retain(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->is_retained = 1;
    sequence->older = cache->newest;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = sequence;
    cache->newest = sequence;
    cache->num_retained++;
}

void kvc_cache_unretain(kvc_cache *cache, kvc_sequence *sequence) {
    *(sequence->older ? &sequence->older->newer : &cache->oldest) = sequence->newer;
    *(sequence->newer ? &sequence->newer->older : &cache->newest) = sequence->older;
    sequence->older = sequence->newer = NULL;
    sequence->is_retained = 0;
    cache->num_retained--;
}

kvc_status kvc_cache_insert(kvc_cache *cache, kvc_sequence *sequence, kvc_sequence *old) {
    const kvc_table before = cache->sequences;
    const kvc_status status = old ? KVC_OK : kvc_table_reserve(&cache->sequences, 1, &before, &cache->memory);
    if (status != KVC_OK) {
        kvc_sequence_free(sequence, &cache->memory, cache->pools);
        return status;
    }
    kvc_table_keep(&cache->sequences, &before, &cache->memory);
    if (old) kvc_cache_forget(cache, old);
    kvc_table_insert(&cache->sequences, sequence);
    kvc_cache_after_edit(cache, sequence);
    return KVC_OK;
}

void kvc_cache_spare(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_unmark_changed(sequence);
    kvc_table_remove(&cache->sequences, sequence);
    cache->spare = sequence;
}

void kvc_cache_forget(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_unmark_changed(sequence);
    count_holding(cache, sequence, 0);
    if (sequence->is_retained) kvc_cache_unretain(cache, sequence);
    kvc_table_remove(&cache->sequences, sequence);
    kvc_sequence_free(sequence, &cache->memory, cache->pools);
}

void kvc_cache_forget_all(kvc_cache *cache, const kvc_sequence *kept) {
    for (int32_t i = cache->sequences.num - 1; i >= 0; i--)
        if (cache->sequences.items[i] != kept) kvc_cache_forget(cache, cache->sequences.items[i]);
}

void kvc_cache_forget_blank(kvc_cache *cache, kvc_sequence *sequence) {
    if (kvc_sequence_is_blank(sequence)) kvc_cache_forget(cache, sequence);
}

void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_mark_changed(cache, sequence);
    kvc_cache_forget_blank(cache, sequence);
}

int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position) {
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_interval lost = sequence->runs[g].lost, missing = sequence->runs[g].missing;
        if (kvc_policy_sees(&cache->policies[g], position, lost.begin, lost.end)) return 1;
        if (missing.end && kvc_policy_sees(&cache->policies[g], position, missing.begin, missing.end)) return 1;
    }
    return 0;
}
