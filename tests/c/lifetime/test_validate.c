/* kvc_validate finds what is wrong: each thing that it checks is broken here, and mended again. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "cache/cache.h"
#include "cache/batch.h"
#include "support/feeding.h"
#include "support/keeping.h"
#include "support/pairs.h"

enum { CHANGED = 0, RESTED = 1, UNORDERED = 2, RETAINED = 100, FULL = 0, SLIDING = 1 };

/* Checks that the cache is found broken, with these words. */
#define CHECK_BROKEN(cache, words) CHECK_FAILS(kvc_validate(cache), KVC_ERR_CORRUPT, words, "")

/* Checks that with another value of a number or pointer, and then sets it back. */
#define BREAK(cache, number, value, words)                                     \
    do {                                                                       \
        char was_[sizeof(number)];                                             \
        memcpy(was_, &(number), sizeof was_);                                  \
        (number) = (value);                                                    \
        CHECK_BROKEN(cache, words);                                            \
        memcpy(&(number), was_, sizeof was_);                                  \
        CHECKF(kvc_validate(cache) == KVC_OK, "mended: %s", kvc_last_error()); \
    } while (0)

/* Makes four sequences.  The next batch will look at the first, and a batch has looked at the second.  The third's
 * positions do not ascend.  The fourth is retained.  Each group has a free block, and blocks whose slots are not all
 * filled. */
static kvc_cache *make_cache(void) {
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.block_size = 4});
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch = NULL;
    CHECK(feed(cache, 2, 3, 4) == KVC_OK);
    CHECK(feed(cache, 2, RESTED, 6) == KVC_OK);
    CHECK(kvc_begin(cache, 2, (int32_t[]){3, 1}, (int64_t[]){UNORDERED, UNORDERED}, NULL, &batch) == KVC_OK);
    for (int l = 0; l < 2; l++) CHECK(kvc_put(batch, l, &put) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
    CHECK(retain(cache, RESTED, RETAINED, 0, 6) == KVC_OK);
    CHECK(feed(cache, 2, CHANGED, 6) == KVC_OK);
    CHECK(kvc_clear_sequence(cache, 3) == KVC_OK);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

static void test_lists(void) {
    kvc_cache *cache = make_cache();
    kvc_run_list *list = &kvc_table_find(&cache->sequences, CHANGED)->runs[FULL];
    BREAK(cache, list->first, -1, "passes its room");
    BREAK(cache, list->capacity, list->first + list->num - 1, "passes its room");
    BREAK(cache, list->num_rows, list->num_rows + 1, "7 rows at 0 to 5 are noted, there are 6 at 0 to 5");
    BREAK(cache, list->min_position, 1, "6 rows at 1 to 5 are noted");
    BREAK(cache, list->max_position, 6, "6 rows at 0 to 6 are noted");
    BREAK(cache, kvc_table_find(&cache->sequences, UNORDERED)->runs[FULL].ascending, 1, "do not ascend");

    kvc_run *run = kvc_runs_begin(list);
    BREAK(cache, run->count, 0, "a run of slots 0 + 0");
    BREAK(cache, run->slot, -1, "a run of slots -1 +");
    BREAK(cache, run->slot, run->block->fill, "passes the fill mark");
    BREAK(cache, run->position, -1, "a run at position -1");
    BREAK(cache, run->position, INT32_MAX, "a run at position");
    BREAK(cache, run->block->pool, &cache->pools[SLIDING], "a block of another pool");
    BREAK(cache, run->block->listed.index, run->block->listed.index ? 0 : 1, "stands at");
    BREAK(cache, run->block->listed.earlier, run->block, "stands at");
    BREAK(cache, cache->pools[FULL].num_blocks, 1, "blocks are noted");
    free_valid(cache);
}

static void test_blocks(void) {
    kvc_cache *cache = make_cache();
    kvc_pool *pool = &cache->pools[FULL];
    kvc_block *block = kvc_runs_end(&kvc_table_find(&cache->sequences, CHANGED)->runs[FULL])[-1].block;
    CHECK(block->fill < pool->block_size && block->live == block->fill && pool->free.first);
    BREAK(cache, pool->free.first->fill, -1, "the fill mark is -1 of 4");
    BREAK(cache, pool->block_size, 3, "the fill mark is 4 of 3");
    BREAK(cache, block->pages.faulted, block->fill - 1, "faulted");
    BREAK(cache, block->pages.collapsed, block->pages.faulted + 1, "slots collapsed");
    BREAK(cache, block->pages.resident, block->pages.faulted + 1, "resident of");
    BREAK(cache, block->live, block->live + 1, "live slots are noted");
    BREAK(cache, block->listed.is_free, 1, "0 pins, and is_free is 1");
    BREAK(cache, pool->free.first->pins, 1, "0 live, 1 pins, and is_free is 1");
    BREAK(cache, block->evicting.evictable, block->evicting.evictable + 1, "evictable slots are noted");
    BREAK(cache, block->noted[KVC_NOW].live, block->live + 1, "are counted in scope 0");
    BREAK(cache, block->noted[KVC_FIXED].fill, block->fill + 1, "are counted in scope 1");
    BREAK(cache, block->plan.is_tried, 1, "still planned");
    BREAK(cache, block->plan.num_slots, 1, "still planned");
    BREAK(cache, pool->free.first->listed.index, pool->free.first->listed.index + 1, "stands at");

    const kvc_block before = *block;
    const kvc_holders holders = block->holders[block->fill];
    block->holders[block->fill++] = (kvc_holders){0};
    if (block->pages.faulted < block->fill) block->pages.faulted = block->fill;
    CHECK_BROKEN(cache, "nobody holds the last slot");
    block->pins = 1;
    CHECK_BROKEN(cache, "are counted in scope"); /* the slots that are filled, no longer the last one */
    *block = before;
    block->holders[block->fill] = holders;

    pool->compaction = (void *)pool;
    CHECK_BROKEN(cache, "still planned");
    pool->compaction = NULL;
    free_valid(cache);
}

static void test_pools(void) {
    kvc_cache *cache = make_cache();
    kvc_pool *pool = &cache->pools[SLIDING];
    BREAK(cache, pool->counts.live, pool->counts.live + 1, "live and");
    BREAK(cache, pool->counts.filled, pool->counts.filled - 1, "filled slots of");
    BREAK(cache, pool->counts.row_bytes, pool->counts.row_bytes + 1, "bytes are noted");
    BREAK(cache, pool->free.num, pool->free.num + 1, "free blocks are noted");
    BREAK(cache, pool->free.num_idle, pool->free.num + 1, "free blocks are idle");
    BREAK(cache, pool->evicting.evictable, pool->evicting.evictable + 1, "evictable slots are noted");
    BREAK(cache, pool->tallies[KVC_NOW].used.blocks, -1, "are tallied in scope 0");
    BREAK(cache, pool->tallies[KVC_FIXED].movable.live, -1, "are tallied in scope 1");
    kvc_block *free_blocks = pool->free.first;
    pool->free.first = NULL;
    CHECK_BROKEN(cache, "0 listed");
    pool->free.first = free_blocks;

    const kvc_run *run = kvc_runs_begin(&kvc_table_find(&cache->sequences, CHANGED)->runs[SLIDING]);
    uint32_t *holders = &run->block->holders[run->slot].num;
    BREAK(cache, *holders, *holders + 1, "the holders of a slot are not the runs there are");
    cache->waiting.num_rewrites = 1; /* then slots may be held by what is no run yet */
    ++*holders;
    CHECK(kvc_validate(cache) == KVC_OK);
    --*holders;
    cache->waiting.num_rewrites = 0;
    free_valid(cache);
}

static void test_sequences(void) {
    kvc_cache *cache = make_cache();
    kvc_sequence *changed = kvc_table_find(&cache->sequences, CHANGED);
    kvc_sequence *rested = kvc_table_find(&cache->sequences, RESTED);
    kvc_sequence *retained = kvc_table_find(&cache->sequences, RETAINED);
    BREAK(cache, retained->evicting.is_evictable, !retained->evicting.is_evictable, "noted to be evictable");
    BREAK(cache, cache->evicting.num_kept, cache->evicting.num_kept + 1, "the kept sequences are not");
    BREAK(cache, cache->evicting.num_pinned, cache->evicting.num_pinned + 1, "the kept sequences are not");
    BREAK(cache, cache->evicting.state_bytes, 1, "bytes of states are noted");
    BREAK(cache, cache->evicting.evictable.root, NULL, "evictable sequences are not");
    CHECK(changed->listed.changed_at && !rested->listed.changed_at && !retained->listed.changed_at);
    BREAK(cache, changed->holds, 0, "noted to hold rows");
    BREAK(cache, changed->evicting.is_fixed, 0, "noted to hold rows and to stay");
    BREAK(cache, retained->evicting.is_fixed, 1, "noted to hold rows and to stay");
    BREAK(cache, retained->holds, 1, "noted to hold rows");
    BREAK(cache, retained->in_batch, 1, "a kept one and in use");
    BREAK(cache, changed->in_batch, 1, "belongs to a batch that is not there");
    BREAK(cache, rested->id, retained->id, "out of order");
    BREAK(cache, cache->policies[SLIDING].window, 1, "rows are to expire, and no batch will look for them");
    BREAK(cache, cache->sequences.num_holding, cache->sequences.num_holding - 1, "sequences that hold rows are noted");
    BREAK(cache, changed->exact_to, -1, "is exact to position -1, and edited from 2147483647 on");
    BREAK(cache, changed->edited_from, -2, "is exact to position 2147483647, and edited from -2 on");
    BREAK(cache, kvc_runs_begin(&changed->runs[FULL])->delta, 1, "rows at position 0 have moved, and it is exact to");

    kvc_sequence **changed_at = changed->listed.changed_at;
    retained->listed.changed_at = changed_at;
    CHECK_BROKEN(cache, "a kept one and in use");
    retained->listed.changed_at = NULL;
    changed->listed.changed_at = &rested;
    CHECK_BROKEN(cache, "is not in its list");
    changed->listed.changed_at = changed_at;

    const kvc_run_list lists[] = {changed->runs[FULL], changed->runs[SLIDING]};
    for (int g = 0; g < 2; g++) changed->runs[g].num = changed->runs[g].lost.end = 0;
    changed->holds = 0;
    cache->sequences.num_holding--;
    CHECK_BROKEN(cache, "is blank and in the table");
    for (int g = 0; g < 2; g++) changed->runs[g] = lists[g];
    changed->holds = 1;
    cache->sequences.num_holding++;
    free_valid(cache);
}

static void test_batch(void) {
    kvc_cache *cache = make_cache();
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 3,
                                 .seq_ids = (int64_t[]){RESTED, RESTED, 7},
                                 .unstored = (uint8_t[]){0, 0, 1}};
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin_with(cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_put(batch, 0, &put) == KVC_OK, "%s", kvc_last_error());
    kvc_run_list *list = &kvc_table_find(&cache->sequences, RESTED)->runs[FULL];
    BREAK(cache, list->capacity, list->first + list->num, "has no room for the 5 that the batch may leave");
    kvc_abort(batch);
    free_valid(cache);
}

int main(void) {
    test_lists();
    test_blocks();
    test_pools();
    test_sequences();
    test_batch();
    return test_result();
}
