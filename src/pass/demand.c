/* demand.c: computes the blocks and bytes that a batch needs: see demand.h. */
#include "pass/demand.h"

#include "space/compact.h"
#include "space/expire.h"

/* Returns the block that holds a sequence's last row in group g after expiry and compaction, and its fill mark then.
 * NULL if no row stays, or the batch restores. */
static kvc_block *find_last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t *fill) {
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
            *fill = kvc_pool_fill_after(run->block);
            return run->block;
        }
        const int32_t to = targets[run->slot + kept_end - 1] / c->pool->block_size;
        *fill = kvc_compaction_fill(c, to);
        return c->order[to];
    }
    return NULL;
}

/* The slots of a block that one sequence alone holds, each once. */
typedef struct own_slots {
    const kvc_block *block;
    int32_t num;
} own_slots;

static void count_own(void *context, const kvc_run *part) {
    own_slots *own = context;
    for (int32_t i = 0; part->block == own->block && i < part->count; i++)
        own->num += part->block->holders[part->slot + i] == 1;
}

int32_t kvc_slots_spared(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
                         int32_t taken) {
    const kvc_sequence *sequence = member->sequence;
    const kvc_policy *policy = &batch->cache->policies[g];
    const int32_t start = kvc_policy_next_start(policy, sequence->min_query_position),
                  before = start - kvc_sequence_next(sequence);
    if (before >= taken) return taken;
    own_slots own = {block, 0};
    kvc_runs_visit(&sequence->runs[g], kvc_policy_expired(policy, sequence->min_query_position).end, KVC_END, count_own,
                   &own);
    const int stays = block->pins || own.num < block->live || batch->cache->pools[g].compaction;
    return !stays ? taken : before > 0 ? before : 0;
}

/* Adds the memory of slots [from, to) of a block that were never faulted; slots below `from` are counted elsewhere. */
static void add_faulted(kvc_pool *pool, const kvc_block *block, int32_t from, int32_t to) {
    if (from < block->faulted) from = block->faulted;
    if (from < to) pool->demand.more_bytes += kvc_pool_block_bytes(pool, to) - kvc_pool_block_bytes(pool, from);
}

/* Adds new blocks for num_slots slots. */
static void add_new_blocks(kvc_pool *pool, int32_t num_slots) {
    const int32_t size = pool->block_size;
    const int64_t full = num_slots / size, all = full + (num_slots % size != 0);
    pool->demand.new_blocks += all;
    pool->demand.new_bytes += full * kvc_pool_block_bytes(pool, size) + all * kvc_pool_header_bytes(pool);
    if (num_slots % size) pool->demand.new_bytes += kvc_pool_block_bytes(pool, num_slots % size);
}

/* Adds the blocks that sequence s of the batch will fill in group g: its last block, then free ones from *next on, then
 * new ones.  *next becomes the first free block that is left.  Several sequences may share their last block, so the
 * slots that one will take are noted in block->planned. */
static void add_sequence(const kvc_batch *batch, int32_t g, int32_t s, kvc_block **next) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    kvc_pending *pending = kvc_pending_of(batch, g, s);
    kvc_pool *pool = &batch->cache->pools[g];
    int32_t rest = member->num_tokens, fill = 0;
    if (pending->to < KVC_TO_REPLACE) return;
    pending->last_block = find_last_block(batch, member, g, &fill);
    for (kvc_block *block = pending->last_block; rest > 0 && (block || *next); block = NULL) {
        const int is_last = block != NULL;
        if (!is_last) {
            block = *next;
            *next = block->next;
            fill = 0;
            pool->demand.num_blocks++;
        }
        fill += block->planned;
        const int32_t taken = rest < pool->block_size - fill ? rest : pool->block_size - fill;
        add_faulted(pool, block, fill, fill + taken);
        block->planned += taken;
        rest -= is_last && batch->in_several ? kvc_slots_spared(batch, member, g, block, taken) : taken;
    }
    add_new_blocks(pool, rest);
}

/* Returns the bytes of existing blocks with the batch's slots, if all free memory is given back. */
static int64_t least_bytes(const kvc_pool *pool) {
    const kvc_compaction *c = pool->compaction;
    const int64_t header = kvc_pool_header_bytes(pool);
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_blocks; i++) {
        const kvc_block *block = pool->blocks[i];
        const int32_t fill = c && c->targets[i] ? 0 : kvc_pool_fill_after(block) + block->planned;
        if (fill || block->pins) bytes += kvc_pool_block_bytes(pool, fill) + header;
    }
    for (int32_t i = 0; c && i < c->num_blocks; i++) {
        const int32_t fill = kvc_compaction_fill(c, i) + c->order[i]->planned;
        if (fill) bytes += kvc_pool_block_bytes(pool, fill) + header;
    }
    return bytes;
}

/* Adds the memory that the blocks of a planned compaction will touch, and lists the blocks that it empties as free. */
static void add_compaction(kvc_pool *pool, kvc_preview *preview) {
    const kvc_compaction *c = pool->compaction;
    for (int32_t i = 0; c && i < c->num_blocks; i++) {
        const int32_t fill = kvc_compaction_fill(c, i);
        add_faulted(pool, c->order[i], 0, fill);
        if (!fill) kvc_preview_add_free(preview, c->order[i]);
    }
}

/* Sets block->planned back to 0.  next: the first free block of the preview that no sequence will use. */
static void forget_planned(const kvc_batch *batch, int32_t g, const kvc_preview *preview, const kvc_block *next) {
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_block *last = kvc_pending_of(batch, g, s)->last_block;
        if (last) last->planned = 0;
    }
    for (kvc_block *block = preview->free; block != next; block = block->next) block->planned = 0;
}

kvc_status kvc_find_demand(const kvc_batch *batch, int32_t g, int compacts) {
    kvc_cache *cache = batch->cache;
    kvc_pool *pool = &cache->pools[g];
    kvc_preview preview = kvc_preview_open(cache, g, 1);
    const kvc_status status = compacts ? kvc_compaction_plan(cache, g) : KVC_OK;
    if (status == KVC_OK) {
        pool->demand = (kvc_demand){0};
        add_compaction(pool, &preview);
        kvc_block *next = preview.free;
        for (int32_t s = 0; s < batch->num_sequences; s++) add_sequence(batch, g, s, &next);
        pool->demand.num_blocks += (int32_t)pool->demand.new_blocks;
        if (cache->max_bytes) pool->demand.least_bytes = least_bytes(pool);
        forget_planned(batch, g, &preview, next);
    }
    kvc_preview_close(&preview);
    return status;
}

void kvc_forget_demands(kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_groups; g++) cache->pools[g].demand = (kvc_demand){0};
}
