/* reclaim.c: drops rows of retained sequences: see reclaim.h. */
#include "store/reclaim.h"

#include "store/limits.h"

/* Counts the slots of a group that would be free without this sequence. */
static int64_t count_freed(const kvc_sequence *sequence, int32_t group) {
    int64_t slots = 0;
    kvc_runs_visit(&sequence->runs[group], 0, KVC_END, kvc_try_drop_part, &slots);
    kvc_runs_visit(&sequence->runs[group], 0, KVC_END, kvc_undo_drop_part, NULL);
    return slots;
}

/* Drops a sequence's rows in one group, and notes them as lost. */
static void drop_in_group(kvc_cache *cache, kvc_sequence *sequence, int32_t group) {
    kvc_run_list *list = &sequence->runs[group];
    if (!list->num) return;
    const kvc_interval lost = {list->min_position, list->max_position + 1};
    kvc_runs_visit(list, 0, KVC_END, kvc_drop_part, &cache->pools[group]);
    list->first = list->num = 0;
    list->lost = lost;
    kvc_runs_recount(list);
}

/* Drops what only this sequence holds, if that frees slots of `group`; returns their number. */
static int64_t reclaim_one(kvc_cache *cache, kvc_sequence *sequence, int32_t group) {
    int64_t freed = 0, all = 0;
    int breaks = 0; /* rows are freed without which nobody can go on behind them */
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const int64_t slots = count_freed(sequence, g);
        breaks |= slots && !kvc_policy_evicts(&cache->policies[g]);
        all += slots;
        if (g == group || group == KVC_ANY_GROUP) freed += slots;
    }
    if (!freed) return 0;
    cache->stats.rows_reclaimed += all;
    for (int32_t g = 0; !breaks && g < cache->num_token_groups; g++)
        if (kvc_policy_evicts(&cache->policies[g])) drop_in_group(cache, sequence, g);
    if (breaks || !kvc_sequence_holds(sequence)) kvc_cache_forget(cache, sequence);
    return freed;
}

int kvc_reclaim(kvc_cache *cache, int32_t group, int64_t num_slots) {
    int64_t freed = 0;
    for (kvc_sequence *sequence = cache->oldest, *next; sequence && freed < num_slots; sequence = next) {
        next = sequence->newer;
        if (kvc_is_reclaimable(sequence)) freed += reclaim_one(cache, sequence, group);
    }
    if (freed || group != KVC_ANY_GROUP) return freed > 0;
    for (kvc_sequence *sequence = cache->oldest, *next; sequence && freed < num_slots; sequence = next) {
        next = sequence->newer;
        if (!kvc_is_reclaimable(sequence)) continue;
        kvc_cache_forget(cache, sequence); /* its bookkeeping takes memory, too */
        freed++;
    }
    return freed > 0;
}

/* Takes a part out of the counts of its pool, and lists its block as free where no other slot of it is held. */
static void forgo_part(void *context, const kvc_run *part) {
    kvc_pool *pool = context;
    int64_t slots = 0;
    if (kvc_pool_try_drop(part->block, part->slot, part->count, &slots)) {
        part->block->next = pool->free;
        pool->free = part->block;
    }
    pool->live -= slots;
}

static void unforgo_part(void *context, const kvc_run *part) {
    kvc_pool *pool = context;
    const int32_t before = part->block->live;
    kvc_pool_restore(part->block, part->slot, part->count);
    pool->live += part->block->live - before;
}

/* Visits the rows of the first num retained sequences that may be reclaimed; returns the bytes of their bookkeeping. */
static int64_t visit_oldest(kvc_cache *cache, int64_t num, kvc_part_fn *visit) {
    int64_t bytes = 0;
    for (const kvc_sequence *sequence = cache->oldest; sequence && num; sequence = sequence->newer, num--) {
        if (!kvc_is_reclaimable(sequence)) continue;
        for (int32_t g = 0; g < cache->num_token_groups; g++)
            kvc_runs_visit(&sequence->runs[g], 0, KVC_END, visit, &cache->pools[g]);
        bytes += kvc_sequence_bytes(sequence);
    }
    return bytes;
}

void kvc_forgo(kvc_cache *cache, int64_t num) { cache->memory.bookkeeping -= visit_oldest(cache, num, forgo_part); }

void kvc_unforgo(kvc_cache *cache, int64_t num) {
    cache->memory.bookkeeping += visit_oldest(cache, num, unforgo_part);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        for (kvc_block *block; (block = cache->pools[g].free) && !block->is_free; block->next = NULL)
            cache->pools[g].free = block->next;
}

kvc_status kvc_fit_max_bytes(kvc_cache *cache, const char *what) {
    kvc_status status = kvc_check_max_bytes(cache, what);
    for (int64_t slots = 1; status == KVC_ERR_FULL && kvc_reclaim(cache, KVC_ANY_GROUP, slots); slots *= 2)
        status = kvc_check_max_bytes(cache, what);
    return status;
}

int64_t kvc_count_reclaimable(const kvc_cache *cache, int32_t group) {
    int64_t slots = 0;
    for (const kvc_sequence *sequence = cache->oldest; sequence; sequence = sequence->newer)
        if (kvc_is_reclaimable(sequence)) kvc_runs_visit(&sequence->runs[group], 0, KVC_END, kvc_try_drop_part, &slots);
    for (const kvc_sequence *sequence = cache->oldest; sequence; sequence = sequence->newer)
        if (kvc_is_reclaimable(sequence)) kvc_runs_visit(&sequence->runs[group], 0, KVC_END, kvc_undo_drop_part, NULL);
    return slots;
}
