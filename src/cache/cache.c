/* cache.c: the upkeep of a cache's sequences, and scratch memory.  A kept sequence has rows for later prompts, and may
 * be evicted unless it is protected (within a prefix's quota) or pinned.  A hidden one has an id that no call can name.
 * A blank sequence holds no rows, and none has expired.  A follower keeps note of a sequence, and is told when it ends.
 * Changed sequences are those in which the next batch looks for rows to expire.  Callers hold the mutex. */
#include "cache/cache.h"

#include "cache/useful.h"

void kvc_lock_late(kvc_cache *cache) {
    atomic_fetch_add(&cache->waiting.num_locking, 1);
    kvc_mutex_lock(&cache->mutex);
    atomic_fetch_sub(&cache->waiting.num_locking, 1);
}

void kvc_cache_mark_changed(kvc_cache *cache, kvc_sequence *sequence) {
    if (sequence->evicting.is_kept) return;
    const int32_t has_rows = kvc_sequence_holds(sequence), holds = has_rows && !sequence->call.is_own;
    /* It is not kept, so if it has rows it is among those that cannot be evicted (table->fixed). */
    if (sequence->evicting.is_fixed != has_rows) kvc_table_list(&cache->sequences, sequence, has_rows);
    cache->sequences.num_holding += holds - sequence->holds;
    sequence->holds = holds;
    if (sequence->listed.changed_at) return;
    sequence->listed.next_changed = cache->sequences.changed;
    sequence->listed.changed_at = &cache->sequences.changed;
    if (cache->sequences.changed) cache->sequences.changed->listed.changed_at = &sequence->listed.next_changed;
    cache->sequences.changed = sequence;
}

void kvc_cache_unmark_changed(kvc_sequence *sequence) {
    if (!sequence->listed.changed_at) return;
    *sequence->listed.changed_at = sequence->listed.next_changed;
    if (sequence->listed.next_changed) sequence->listed.next_changed->listed.changed_at = sequence->listed.changed_at;
    sequence->listed.changed_at = NULL;
    sequence->listed.next_changed = NULL;
}

void kvc_cache_set_in_call(kvc_cache *cache, int64_t id, int32_t in_call) {
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    if (!sequence) return;
    sequence->call.is_own = in_call;
    sequence->call.thread = kvc_thread_self();
    kvc_cache_mark_changed(cache, sequence);
}

/* ---- kept sequences ------------------------------------------------------------------------------------------ */

/* Puts an evictable sequence into the sets that are sorted by last use. */
static void sort(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_sequence_sort(&cache->evicting.evictable, sequence, KVC_BY_USE);
    kvc_useful_add(cache, sequence);
}

/* Makes a sequence evictable or not: in the counts of its rows' blocks, and in the sets of sequences. */
static void set_evictable(kvc_cache *cache, kvc_sequence *sequence, int32_t is_evictable) {
    if (sequence->evicting.is_evictable == is_evictable) return;
    sequence->evicting.is_evictable = is_evictable;
    if (!is_evictable) {
        kvc_useful_note_state(cache, sequence, /* bytes */ 0);
        kvc_useful_remove(cache, sequence);
    }
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_run_list *list = &sequence->runs[g];
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
            kvc_pool_mark_evictable(run->block, run->slot, run->count, is_evictable ? 1 : -1);
    }
    if (is_evictable) {
        kvc_table_list(&cache->sequences, sequence, /* is_fixed */ 0);
        sort(cache, sequence);
    } else {
        kvc_sorted_remove(&cache->evicting.evictable, &sequence->links[KVC_BY_USE]);
        kvc_table_list(&cache->sequences, sequence, kvc_sequence_holds(sequence));
    }
    if (is_evictable && sequence->follower && sequence->follower->noted) sequence->follower->noted(sequence->follower);
}

void kvc_cache_note_evictable(kvc_cache *cache, kvc_sequence *sequence) {
    const int32_t may_go = sequence->evicting.is_kept && !sequence->evicting.is_protected,
                  is_pinned = may_go && sequence->evicting.num_pins;
    cache->evicting.num_pinned += is_pinned - sequence->evicting.is_counted_pinned;
    sequence->evicting.is_counted_pinned = is_pinned;
    set_evictable(cache, sequence, may_go && !is_pinned && !sequence->call.in_place);
}

void kvc_cache_pin(kvc_cache *cache, kvc_sequence *sequence, int64_t add) {
    sequence->evicting.num_pins += add;
    kvc_cache_note_evictable(cache, sequence);
}

void kvc_cache_use(kvc_cache *cache, kvc_sequence *sequence, int64_t used) {
    if (sequence->evicting.is_evictable) {
        kvc_sorted_remove(&cache->evicting.evictable, &sequence->links[KVC_BY_USE]);
        kvc_useful_remove(cache, sequence);
    }
    sequence->evicting.used = used;
    if (sequence->evicting.is_evictable) sort(cache, sequence);
}

void kvc_cache_keep(kvc_cache *cache, kvc_sequence *sequence) {
    cache->evicting.num_kept += !sequence->evicting.is_kept;
    cache->evicting.num_protected -= sequence->evicting.is_protected;
    sequence->evicting.is_kept = 1;
    sequence->evicting.is_protected = 0;
    kvc_cache_note_evictable(cache, sequence);
}

void kvc_cache_stop_keeping(kvc_cache *cache, kvc_sequence *sequence) {
    cache->evicting.num_protected -= sequence->evicting.is_protected;
    cache->evicting.num_kept--;
    sequence->evicting.is_kept = sequence->evicting.is_protected = 0;
    kvc_cache_note_evictable(cache, sequence);
}

void kvc_cache_protect(kvc_cache *cache, kvc_sequence *sequence) {
    if (sequence->evicting.is_protected) return;
    cache->evicting.num_protected++;
    sequence->evicting.is_protected = 1;
    kvc_cache_note_evictable(cache, sequence);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

void kvc_cache_enter(kvc_cache *cache, kvc_sequence *sequence) {
    if (!sequence->is_hidden && sequence->date > cache->prefixes.clock) sequence->date = cache->prefixes.clock;
    kvc_table_insert(&cache->sequences, sequence);
    kvc_table_list(&cache->sequences, sequence, kvc_sequence_holds(sequence));
}

void kvc_cache_insert(kvc_cache *cache, kvc_sequence *sequence, kvc_sequence *old) {
    if (old) {
        kvc_cache_drop(cache, old);
        sequence->edited_from = 0; /* under this id, all rows have changed */
    }
    kvc_cache_enter(cache, sequence);
    kvc_cache_after_edit(cache, sequence);
}

int64_t kvc_cache_new_id(kvc_cache *cache) {
    while (kvc_table_find(&cache->sequences, cache->sequences.next_id)) cache->sequences.next_id++;
    return cache->sequences.next_id++;
}

void kvc_cache_set_aside(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_unmark_changed(sequence);
    kvc_table_remove(&cache->sequences, sequence);
    sequence->exact_to = sequence->edited_from = INT32_MAX;
    sequence->date = INT64_MAX;
    cache->sequences.reserved = sequence;
}

void kvc_cache_drop(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_follower *follower = sequence->follower;
    sequence->follower = NULL; /* the follower is told once, at the end */
    kvc_cache_unmark_changed(sequence);
    cache->sequences.num_holding -= sequence->holds;
    if (sequence->evicting.is_kept) kvc_cache_stop_keeping(cache, sequence);
    kvc_table_remove(&cache->sequences, sequence);
    kvc_sequence_free(sequence, &cache->memory, cache->pools);
    if (follower) follower->ended(cache, follower);
}

void kvc_cache_drop_all(kvc_cache *cache) {
    for (kvc_sequence *sequence; (sequence = kvc_table_last(&cache->sequences));) kvc_cache_drop(cache, sequence);
}

void kvc_cache_drop_blank(kvc_cache *cache, kvc_sequence *sequence) {
    if (kvc_sequence_is_blank(sequence) && !sequence->follower) kvc_cache_drop(cache, sequence);
}

void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_mark_changed(cache, sequence);
    kvc_cache_drop_blank(cache, sequence);
}

int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position) {
    for (int32_t g = 0; g < cache->num_token_groups; g++) { /* expired rows are lost; those of other groups, missing */
        const kvc_interval lost = sequence->runs[g].lost, missing = sequence->runs[g].missing;
        if (kvc_policy_sees(&cache->policies[g], position, lost.begin, lost.end)) return 1;
        if (missing.end && kvc_policy_sees(&cache->policies[g], position, missing.begin, missing.end)) return 1;
    }
    return 0;
}

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

void *kvc_scratch_take(kvc_cache *cache, uint64_t *size, int32_t *is_new) {
    int best = -1; /* index of the smallest scratch that is large enough */
    for (int i = 0; i < KVC_NUM_SCRATCH; i++)
        if (cache->scratch[i].size >= *size && (best < 0 || cache->scratch[i].size < cache->scratch[best].size))
            best = i;
    if (is_new) *is_new = best < 0;
    if (best < 0) { /* allocates a quarter more: the next batch may need a little more */
        *size = kvc_align_up(*size + *size / 4, 4096);
        return kvc_memory_alloc(&cache->memory, *size, KVC_MEMORY_SCRATCH, -1);
    }
    void *memory = cache->scratch[best].memory;
    *size = cache->scratch[best].size;
    cache->scratch[best].memory = NULL;
    cache->scratch[best].size = 0;
    return memory;
}

void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size) {
    int smallest = 0;
    for (int i = 1; i < KVC_NUM_SCRATCH; i++)
        if (cache->scratch[i].size < cache->scratch[smallest].size) smallest = i;
    if (cache->scratch[smallest].size < size && !KVC_BUGGIFY()) { /* keep the larger of the two */
        void *other = cache->scratch[smallest].memory;
        const uint64_t other_size = cache->scratch[smallest].size;
        cache->scratch[smallest].memory = memory;
        cache->scratch[smallest].size = size;
        memory = other;
        size = other_size;
    }
    if (memory) kvc_memory_free(&cache->memory, memory, size, KVC_MEMORY_SCRATCH, -1); /* the place was not empty */
}

void kvc_scratch_free(kvc_cache *cache) {
    for (int i = 0; i < KVC_NUM_SCRATCH; i++) {
        kvc_memory_free(&cache->memory, cache->scratch[i].memory, cache->scratch[i].size, KVC_MEMORY_SCRATCH, -1);
        cache->scratch[i].memory = NULL;
        cache->scratch[i].size = 0;
    }
}
