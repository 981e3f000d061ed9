/* last_block.c: where a sequence goes on: see last_block.h. */
#include "pass/last_block.h"

#include "space/compact.h"

/* Returns the block of the last row that stays, or if needs_room, of the last one in a block with room behind what is
 * planned there; and its fill mark.  NULL if there is none. */
static kvc_block *find(const kvc_batch *batch, const kvc_sequence *sequence, int32_t g, kvc_scope scope, int needs_room,
                       int32_t *fill) {
    const kvc_pool *pool = &batch->cache->pools[g];
    const kvc_run_list *list = &sequence->runs[g];
    const kvc_compaction *c = pool->compaction;
    const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], sequence->min_query_position);
    for (int32_t i = list->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_runs_begin(list) + i;
        kvc_block *block = run->block;
        /* Index in the run of its last row that stays, plus 1. */
        int32_t end = run->position + run->count > gone.end ? run->count : gone.begin - run->position;
        if (end <= 0) continue;
        if (end > run->count) end = run->count;
        const int32_t *targets = c ? block->plan.targets : NULL;
        if (targets) {
            const int32_t to = targets[run->slot + end - 1] / pool->block_size;
            block = c->order[to];
            *fill = kvc_compaction_fill(c, to);
        } else {
            *fill = kvc_pool_use(block, scope).fill;
        }
        if (!needs_room || *fill + block->plan.num_slots < pool->block_size) return block;
    }
    return NULL;
}

void kvc_find_last_block(const kvc_batch *batch, int32_t g, int32_t s, kvc_scope scope, int32_t *fill) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    const int is_tight = (scope == KVC_FIXED || batch->cache->evicting.is_tight) && !batch->in_several;
    kvc_pending *pending = kvc_pending_of(batch, g, s);
    pending->last_block = NULL;
    pending->in_last = 0;
    if (batch->replaced) return; /* rows that take the place of others do not go where these leave holes */
    kvc_block *block = is_tight ? find(batch, member->sequence, g, scope, 1, fill) : NULL;
    if (!block) block = find(batch, member->sequence, g, scope, 0, fill);
    pending->last_block = block;
    if (!block) return;
    const int32_t room = batch->cache->pools[g].block_size - *fill - block->plan.num_slots;
    pending->in_last = pending->num_tokens < room ? pending->num_tokens : room;
    block->plan.num_slots += pending->in_last;
}

int64_t kvc_take_planned(const kvc_pool *pool, kvc_block *block, int32_t fill) {
    const kvc_use use = {.fill = fill + block->plan.num_slots, .is_used = fill || block->plan.num_slots || block->pins};
    block->plan.num_slots = 0;
    return kvc_pool_used_bytes(pool, use);
}

void kvc_add_planned(const kvc_preview *preview, kvc_block *block, int64_t *bytes) {
    if (!block->plan.num_slots) return;
    const kvc_use use = kvc_pool_use(block, preview->scope);
    *bytes += kvc_take_planned(preview->pool, block, use.fill) - kvc_pool_used_bytes(preview->pool, use);
}
