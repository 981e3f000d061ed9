/* fixed.c: what a batch needs beside what is fixed: see fixed.h. */
#include "pass/fixed.h"

#include "pass/last_block.h"

/* Returns whether a compaction may move rows of a sequence. */
static int may_move(const kvc_pool *pool, kvc_scope scope, const kvc_run_list *list) {
    for (const kvc_run *run = kvc_runs_end(list); run > kvc_runs_begin(list);)
        if (kvc_pool_is_movable(pool, kvc_pool_use((--run)->block, scope))) return 1;
    return 0;
}

/* Adds the slots and blocks that the tokens of a sequence take behind its rows, and in new blocks.  Returns how many of
 * the tokens a compaction may place: none if the sequence has no rows in blocks that move. */
static int32_t add_tokens(const kvc_batch *batch, kvc_scope scope, int32_t g, int32_t s, int64_t *bytes,
                          int64_t *placed_bytes) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const kvc_pool *pool = &batch->cache->pools[g];
    const int32_t size = pool->block_size;
    int32_t fill = 0;
    if (pending->to < KVC_TO_REPLACE) return 0;
    kvc_find_last_block(batch, g, s, scope, &fill);
    const int32_t rest = pending->num_tokens - pending->in_last;
    int64_t more = rest / size * kvc_pool_used_bytes(pool, (kvc_use){.fill = size, .is_used = 1});
    if (rest % size) more += kvc_pool_used_bytes(pool, (kvc_use){.fill = rest % size, .is_used = 1});
    *bytes += more;
    if (batch->replaced || !may_move(pool, scope, &member->sequence->runs[g])) return 0;
    *placed_bytes += more;
    return pending->num_tokens;
}

/* Returns the fewest bytes that so many slots take. */
static int64_t packed_bytes(const kvc_pool *pool, int64_t num_slots) {
    const int64_t blocks = (num_slots + pool->block_size - 1) / pool->block_size;
    if (!pool->is_lazy) return blocks * kvc_pool_used_bytes(pool, (kvc_use){.is_used = 1});
    return blocks * kvc_pool_header_bytes(pool) + num_slots * kvc_pool_slot_bytes(pool);
}

/* Returns the bytes that the blocks of group g take with the tokens of the batch, if free memory is given back.  Adds
 * to *saved the most that compactions would save of these bytes, and notes whether there would be a compaction. */
static int64_t fixed_bytes(const kvc_batch *batch, kvc_scope scope, int32_t g, int64_t *saved, int *is_scattered) {
    const kvc_pool *pool = &batch->cache->pools[g];
    kvc_preview preview = kvc_preview_open(batch->cache, g, scope, 1);
    const kvc_tally tally = kvc_preview_tally(&preview);
    int64_t bytes = 0, planned = 0, placed = 0, num_slots = tally.movable_live;
    for (int32_t s = 0; s < batch->num_sequences; s++) num_slots += add_tokens(batch, scope, g, s, &bytes, &placed);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_block *last = kvc_pending_of(batch, g, s)->last_block;
        if (last) kvc_add_planned(&preview, last, &planned);
    }
    kvc_preview_close(&preview);
    *is_scattered |= tally.num_movable > 1 || tally.movable_live < tally.movable_slots;
    *saved += tally.movable_bytes + placed + planned - packed_bytes(pool, num_slots);
    return tally.bytes + bytes + planned;
}

int kvc_add_fixed_bytes(const kvc_batch *batch, kvc_scope scope, int64_t *bytes, int64_t *least) {
    const kvc_cache *cache = batch->cache;
    int64_t saved = 0;
    int is_scattered = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) *bytes += fixed_bytes(batch, scope, g, &saved, &is_scattered);
    *least = *bytes - saved;
    return is_scattered;
}
