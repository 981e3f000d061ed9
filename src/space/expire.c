/* expire.c: expires rows, and previews it.  kvc_policy_expired says which rows no query at sequence->min_query_position
 * or later sees.  A preview takes the rows that a group will lose, by expiry or with victims, out of its blocks' counts
 * for a while.  Blocks whose counts differ so are tried ones.  Free blocks that this leaves are idle. */
#include "space/expire.h"

int64_t kvc_count_staying(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g) {
    const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
    return sequence->runs[g].num_rows -
           kvc_runs_visit(&sequence->runs[g], gone.begin, gone.end, /* only count */ NULL, NULL);
}

/* ---- previews ---------------------------------------------------------------------------------------------------- */

void kvc_preview_visit_lost(const kvc_preview *preview, kvc_part_fn *visit, void *context) {
    const kvc_cache *cache = preview->cache;
    const int32_t g = preview->pool->group;
    const int expires = preview->expires && kvc_policy_expires(&cache->policies[g]);
    for (const kvc_sequence *sequence = expires ? cache->sequences.changed : NULL; sequence;
         sequence = sequence->listed.next_changed) {
        const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
        kvc_runs_visit(&sequence->runs[g], gone.begin, gone.end, visit, context);
    }
    for (const kvc_sequence *sequence = cache->evicting.victims; sequence; sequence = sequence->evicting.next_victim)
        if (kvc_is_evicted_in(cache, sequence, g)) kvc_runs_visit(&sequence->runs[g], 0, KVC_END, visit, context);
}

void kvc_preview_drop_part(void *preview, const kvc_run *part) {
    kvc_preview *p = preview;
    kvc_block *block = part->block;
    if (!block->plan.is_tried) {
        block->plan.is_tried = 1;
        block->plan.next_tried = p->tried;
        p->tried = block;
    }
    kvc_pool_try_drop(block, p->scope, part->slot, part->count, &p->slots);
}

void kvc_preview_undo_part(void *preview, const kvc_run *part) {
    const kvc_preview *p = preview;
    kvc_pool_undo_try_drop(part->block, p->scope, part->slot, part->count);
}

kvc_preview kvc_preview_open(kvc_cache *cache, int32_t g, kvc_scope scope, int expires) {
    kvc_pool *pool = &cache->pools[g];
    kvc_preview preview = {.pool = pool, .cache = cache, .scope = scope, .expires = expires};
    kvc_preview_visit_lost(&preview, kvc_preview_drop_part, &preview);
    if (scope == KVC_FIXED) preview.slots += pool->evicting.evictable; /* all evictable sequences count as gone */
    return preview;
}

kvc_tally kvc_preview_tally(const kvc_preview *preview) {
    kvc_tally tally = preview->pool->tallies[preview->scope];
    for (const kvc_block *block = preview->tried; block; block = block->plan.next_tried) {
        kvc_tally_add(preview->pool, &tally, block->noted[preview->scope], -1);
        kvc_tally_add(preview->pool, &tally, kvc_pool_use(block, preview->scope), 1);
    }
    return tally;
}

void kvc_preview_close(kvc_preview *preview) {
    kvc_preview_visit_lost(preview, kvc_preview_undo_part, preview);
    for (kvc_block *block; (block = preview->tried);) {
        preview->tried = block->plan.next_tried;
        block->plan.next_tried = NULL;
        block->plan.is_tried = 0;
    }
}

/* ---- expiring ---------------------------------------------------------------------------------------------------- */

/* Expires from group g of a sequence, given sequence->min_query_position. */
static void expire(kvc_cache *cache, kvc_sequence *sequence, int32_t g) {
    kvc_pool *pool = &cache->pools[g];
    const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
    const int32_t before = pool->free.num;
    cache->stats.rows_expired += kvc_runs_expire(&sequence->runs[g], pool, gone.begin, gone.end);
    pool->free.num_idle += pool->free.num - before;
}

void kvc_expire(kvc_cache *cache, int32_t g) {
    for (kvc_sequence *sequence = cache->sequences.changed; sequence; sequence = sequence->listed.next_changed) {
        kvc_runs_install(&sequence->runs[g], &cache->memory);
        if (kvc_policy_expires(&cache->policies[g])) expire(cache, sequence, g);
    }
}

void kvc_set_min_query_behind(kvc_sequence *sequence, int32_t last) {
    int32_t low = kvc_min_query_position(sequence);
    if (low == kvc_sequence_next(sequence) && low <= last) low = last + 1;
    sequence->min_query_position = low ? low - 1 : 0; /* so that the last token can be taken back */
}

void kvc_set_min_query_positions(kvc_cache *cache) {
    for (kvc_sequence *sequence = cache->sequences.changed; sequence; sequence = sequence->listed.next_changed)
        if (sequence->call.is_own) /* its call may move the rows */
            sequence->min_query_position = 0;
        else if (!sequence->in_batch)
            kvc_set_min_query_behind(sequence, -1);
}

void kvc_append_staying(kvc_cache *cache, kvc_sequence *sequence, int32_t g, const kvc_run *run) {
    kvc_pool *pool = &cache->pools[g];
    const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
    const int32_t before = pool->free.num;
    if (gone.begin < gone.end)
        cache->stats.rows_expired += kvc_runs_append_outside(&sequence->runs[g], pool, run, gone.begin, gone.end);
    else
        kvc_runs_append(&sequence->runs[g], run);
    pool->free.num_idle += pool->free.num - before;
}

void kvc_expire_behind(kvc_cache *cache, kvc_sequence *sequence, int32_t last) {
    kvc_set_min_query_behind(sequence, last);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_policy_expires(&cache->policies[g])) expire(cache, sequence, g);
}

int32_t kvc_most_cuts(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g, int32_t num_stretches) {
    const int32_t sinks = kvc_policy_sinks(&cache->policies[g]);
    if (!sinks) return 0; /* rows are cut off the fronts of runs */
    /* A run that is cut in two has a row at the last sink's position. */
    const int64_t rows = kvc_runs_visit(&sequence->runs[g], sinks - 1, sinks, /* only count */ NULL, NULL);
    return (int32_t)rows + (sequence->min_query_position < sinks ? num_stretches : 0);
}
