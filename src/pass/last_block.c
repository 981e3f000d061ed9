/* last_block.c: where a sequence goes on: see last_block.h. */
#include "pass/last_block.h"

#include "space/compact.h"

/* Returns the index in a run of its last row that stays, plus 1; at most 0 if none does. */
static int32_t kept_end_of(const kvc_run *run, kvc_interval gone) {
    const int32_t end = run->position + run->count > gone.end ? run->count : gone.begin - run->position;
    return end < run->count ? end : run->count;
}

/* Returns the block of the last row that stays, its fill mark, and whether the sequence's next token would lie and
 * stand right behind that row. */
static kvc_block *find(const kvc_batch *batch, const kvc_sequence *sequence, int32_t g, kvc_scope scope, int32_t *fill,
                       int8_t *continues) {
    const kvc_run_list *list = &sequence->runs[g];
    const kvc_compaction *c = batch->cache->pools[g].compaction;
    const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], sequence->min_query_position);
    for (int32_t i = list->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_runs_begin(list) + i;
        const int32_t kept_end = kept_end_of(run, gone);
        if (kept_end <= 0) continue;
        const int32_t *targets = c ? c->targets[run->block->index] : NULL;
        const int32_t slot = run->slot + kept_end - 1, target = targets ? targets[slot] : slot,
                      to = targets ? target / c->pool->block_size : 0;
        *fill = targets ? kvc_compaction_fill(c, to) : kvc_pool_use(run->block, scope).fill;
        *continues = target + 1 == *fill + to * batch->cache->pools[g].block_size && !run->delta &&
                     run->position + kept_end == sequence->min_query_position;
        return targets ? c->order[to] : run->block;
    }
    return NULL;
}

/* Returns another block with rows of a sequence that has room behind them, and its fill mark; NULL if there is none. */
static kvc_block *find_room(const kvc_batch *batch, const kvc_sequence *sequence, int32_t g, kvc_scope scope,
                            int32_t *fill) {
    const kvc_run_list *list = &sequence->runs[g];
    const kvc_compaction *c = batch->cache->pools[g].compaction;
    const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], sequence->min_query_position);
    const int32_t size = batch->cache->pools[g].block_size;
    for (const kvc_run *run = kvc_runs_end(list); run > kvc_runs_begin(list);) {
        kvc_block *block = (--run)->block;
        const int32_t kept_end = kept_end_of(run, gone), slot = run->slot + kept_end - 1;
        if (kept_end <= 0) continue;
        *fill = kvc_pool_use(block, scope).fill;
        if (c && c->targets[block->index]) {
            const int32_t to = c->targets[block->index][slot] / size;
            block = c->order[to];
            *fill = kvc_compaction_fill(c, to);
        }
        if (*fill + block->planned < size) return block;
    }
    return NULL;
}

void kvc_find_last_block(const kvc_batch *batch, int32_t g, int32_t s, kvc_scope scope, int32_t *fill) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    const int32_t size = batch->cache->pools[g].block_size,
                  is_tight = (scope == KVC_KEPT || batch->cache->is_tight) && !batch->in_several;
    kvc_pending *pending = kvc_pending_of(batch, g, s);
    pending->last_block = NULL;
    pending->in_last = pending->continues = 0;
    if (batch->replaced) return; /* rows that take the place of others do not go where these leave holes */
    kvc_block *block = find(batch, member->sequence, g, scope, fill, &pending->continues);
    if (is_tight && (!block || *fill + block->planned == size)) {
        int32_t other_fill;
        kvc_block *other = find_room(batch, member->sequence, g, scope, &other_fill);
        if (other) {
            block = other;
            *fill = other_fill;
        }
        pending->continues = 0;
    }
    pending->last_block = block;
    if (!block) return;
    const int32_t room = size - *fill - block->planned;
    pending->in_last = member->num_tokens < room ? member->num_tokens : room;
    if (!pending->in_last || block->planned || member->num_stretches > 1 || member->goes_back) pending->continues = 0;
    block->planned += pending->in_last;
}

int64_t kvc_take_planned(const kvc_pool *pool, kvc_block *block, int32_t fill) {
    const kvc_use use = {.fill = fill + block->planned, .is_used = fill || block->planned || block->pins};
    block->planned = 0;
    return kvc_pool_used_bytes(pool, use);
}

void kvc_add_planned(const kvc_preview *preview, kvc_block *block, int64_t *bytes) {
    if (!block->planned) return;
    const kvc_use use = kvc_pool_use(block, preview->scope);
    *bytes += kvc_take_planned(preview->pool, block, use.fill) - kvc_pool_used_bytes(preview->pool, use);
}
