/* blocks.c: shows where the rows of a layer group lie: its blocks, and which slots of them each sequence holds. */
#include "store/cache.h"

/* A caller's array, and how many items there are for it, which may be more than it has room for. */
typedef struct list {
    char *items;
    size_t item_size;
    int64_t max, num;
} list;

static void add(list *to, const void *item, size_t size) {
    if (to->num < to->max) kvc_write_struct(to->items + (size_t)to->num * to->item_size, to->item_size, item, size);
    to->num++;
}

static void add_block(list *to, const kvc_pool *pool, const kvc_block *block) {
    uint32_t most = 0;
    for (int32_t s = 0; s < block->fill; s++)
        if (block->holders[s] > most) most = block->holders[s];
    const kvc_block_info info = {.num_slots = pool->block_size,
                                 .filled = block->fill,
                                 .live = block->live,
                                 .references = (int32_t)most,
                                 .is_held = block->pins != 0,
                                 .resident = block->touched,
                                 .is_free = block->is_free};
    add(to, &info, sizeof info);
}

static void add_runs(list *to, const kvc_run *runs, int32_t num, int64_t seq_id, int32_t in_batch) {
    for (int32_t i = 0; i < num; i++) {
        const kvc_run *run = &runs[i];
        const kvc_run_info info = {.seq_id = seq_id,
                                   .block = run->block->index,
                                   .slot = run->slot,
                                   .count = run->count,
                                   .position = run->position,
                                   .delta = run->delta,
                                   .in_batch = in_batch};
        add(to, &info, sizeof info);
    }
}

static void add_all_runs(list *to, const kvc_cache *cache, int32_t g) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_sequence *sequence = cache->sequences.items[i];
        add_runs(to, kvc_runs_begin(&sequence->runs[g]), sequence->runs[g].num, sequence->id, 0);
    }
    const kvc_batch *batch = cache->batch;
    for (int32_t s = 0; batch && s < batch->num_sequences; s++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        add_runs(to, pending->runs, pending->num, batch->sequences[s].sequence->id, 1);
    }
    for (const kvc_cross_put *put = batch ? batch->cross_puts : NULL; put; put = put->next)
        if (put->group == g) add_runs(to, &put->run, 1, batch->sequences[put->member].sequence->id, 1);
}

kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                      int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                      int64_t max_runs, int64_t *num_runs) {
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_size(block_info_size, kvc_block_info_least_size, sizeof *blocks, "blocks");
    if (status == KVC_OK) status = kvc_check_size(run_info_size, kvc_run_info_least_size, sizeof *runs, "runs");
    if (status == KVC_OK && !num_blocks) status = kvc_fail(KVC_ERR_INVALID, "num_blocks is NULL");
    if (status == KVC_OK && !num_runs) status = kvc_fail(KVC_ERR_INVALID, "num_runs is NULL");
    if (status != KVC_OK) return status;
    list block_list = {(char *)blocks, block_info_size, max_blocks, 0},
         run_list = {(char *)runs, run_info_size, max_runs, 0};
    const int32_t g = cache->group_of[layer];
    const kvc_pool *pool = &cache->pools[g];
    kvc_lock(cache);
    for (int32_t i = 0; i < pool->num_blocks; i++) add_block(&block_list, pool, pool->blocks[i]);
    add_all_runs(&run_list, cache, g);
    *num_blocks = block_list.num;
    *num_runs = run_list.num;
    return kvc_unlock(cache, KVC_OK);
}
