/* blocks.c: kvc_blocks: lists a group's blocks, and the runs in them.  Slots are held by runs of the table's sequences,
 * of sequences that are being loaded, of the open batch, and of unfinished puts to cross-attention layers. */
#include "lifetime/blocks.h"
#include "cache/check.h"
#include "rows/stride.h"
#include "pass/prepare.h"
#include "saved/transit.h"

static void visit_table(const kvc_table *table, int32_t g, kvc_runs_fn *visit, void *context) {
    for (const kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s))
        visit(context, kvc_runs_begin(&s->runs[g]), s->runs[g].num, s, /* in_batch */ 0);
}

void kvc_visit_runs(const kvc_cache *cache, int32_t g, kvc_runs_fn *visit, void *context, int loaded) {
    visit_table(&cache->sequences, g, visit, context);
    for (const kvc_state *state = cache->states; loaded && state; state = state->next)
        visit_table(&state->sequences, g, visit, context);
    const kvc_batch *batch = cache->batch;
    for (int32_t s = 0; batch && s < batch->num_sequences; s++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        visit(context, pending->runs, pending->num, batch->sequences[s].sequence, /* in_batch */ 1);
    }
    for (const kvc_cross_put *put = batch ? batch->cross_puts : NULL; put; put = put->next)
        if (put->group == g) visit(context, &put->run, 1, batch->sequences[put->member].sequence, /* in_batch */ 1);
}

/* ---- blocks and runs --------------------------------------------------------------------------------------------- */

/* A caller's array of at most `max` items; num: the number of items found, which may be larger. */
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
        if (block->holders[s].num > most) most = block->holders[s].num;
    const kvc_block_info info = {.num_slots = pool->block_size,
                                 .filled = block->fill,
                                 .live = block->live,
                                 .references = (int32_t)most,
                                 .is_held = block->pins != 0,
                                 .resident = block->pages.faulted,
                                 .is_free = block->listed.is_free,
                                 .bytes = pool->cost};
    add(to, &info, sizeof info);
}

static void add_runs(void *to, const kvc_run *runs, int32_t num, const kvc_sequence *sequence, int32_t in_batch) {
    for (int32_t i = 0; i < num; i++) {
        const kvc_run *run = &runs[i];
        const kvc_run_info info = {.seq_id = sequence->id,
                                   .block = run->block->listed.index,
                                   .slot = run->slot,
                                   .count = run->count,
                                   .position = kvc_position_of(run->position, run->block->pool->stride),
                                   .delta = run->delta,
                                   .in_batch = in_batch,
                                   .is_kept = sequence->is_hidden};
        add(to, &info, sizeof info);
    }
}

kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                      int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                      int64_t max_runs, int64_t *num_runs) {
    KVC_TRY(kvc_check_layer(cache, layer));
    KVC_TRY(kvc_check_output(blocks, block_info_size, max_blocks, kvc_block_info_least_size, sizeof *blocks, "blocks"));
    KVC_TRY(kvc_check_output(runs, run_info_size, max_runs, kvc_run_info_least_size, sizeof *runs, "runs"));
    if (!num_blocks) return kvc_fail(KVC_ERR_INVALID, "num_blocks is NULL");
    if (!num_runs) return kvc_fail(KVC_ERR_INVALID, "num_runs is NULL");
    list block_list = {(char *)blocks, block_info_size, max_blocks, 0},
         run_list = {(char *)runs, run_info_size, max_runs, 0};
    const int32_t g = cache->group_of[layer];
    const kvc_pool *pool = &cache->pools[g];
    kvc_lock(cache);
    for (const kvc_block *block = pool->first; block; block = block->listed.later) add_block(&block_list, pool, block);
    kvc_visit_runs(cache, g, add_runs, &run_list, /* loaded */ 0);
    *num_blocks = block_list.num;
    *num_runs = run_list.num;
    return kvc_unlock(cache, KVC_OK);
}
