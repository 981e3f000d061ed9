/* last_block.c: where a sequence goes on: see last_block.h. */
#include "pass/last_block.h"

#include "space/compact.h"

kvc_block *kvc_find_last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, kvc_scope scope,
                               int32_t *fill) {
    const kvc_run_list *list = &member->sequence->runs[g];
    const kvc_compaction *c = batch->cache->pools[g].compaction;
    const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], member->sequence->min_query_position);
    if (batch->replaced) return NULL; /* rows that take the place of others do not go where these leave holes */
    for (int32_t i = list->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_runs_begin(list) + i;
        /* Index in the run of its last row that stays, plus 1. */
        int32_t kept_end = run->position + run->count > gone.end ? run->count : gone.begin - run->position;
        if (kept_end <= 0) continue;
        if (kept_end > run->count) kept_end = run->count;
        const int32_t *targets = c ? c->targets[run->block->index] : NULL;
        if (!targets) {
            *fill = kvc_pool_use(run->block, scope).fill;
            return run->block;
        }
        const int32_t to = targets[run->slot + kept_end - 1] / c->pool->block_size;
        *fill = kvc_compaction_fill(c, to);
        return c->order[to];
    }
    return NULL;
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
