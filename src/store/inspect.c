/* inspect.c: checks every invariant of the bookkeeping against what it can be derived from. */
#include <string.h>

#include "store/sheet.h"

#define REQUIRE(condition, ...)                                          \
    do {                                                                 \
        if (!(condition)) return kvc_fail(KVC_ERR_CORRUPT, __VA_ARGS__); \
    } while (0)

static kvc_status check_rows(const kvc_run_list *list, const kvc_pool *pool, long long id) {
    kvc_run_list counted = *list;
    REQUIRE(list->first >= 0 && list->num >= 0 && list->first + list->num <= list->capacity,
            "group %d, sequence %lld: the list of runs passes its room", pool->group, id);
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
        REQUIRE(run->count > 0 && run->slot >= 0 && run->slot + run->count <= run->block->fill,
                "group %d, sequence %lld: a run of slots %d + %d passes the fill mark %d", pool->group, id, run->slot,
                run->count, run->block->fill);
        REQUIRE(run->position >= 0 && run->position <= INT32_MAX - run->count,
                "group %d, sequence %lld: a run at position %d", pool->group, id, run->position);
        REQUIRE(run->block->index < pool->num_blocks && pool->blocks[run->block->index] == run->block,
                "group %d, sequence %lld: a run in a block of another pool", pool->group, id);
    }
    kvc_runs_recount(&counted);
    REQUIRE(counted.num_rows == list->num_rows && counted.min_position == list->min_position &&
                counted.max_position == list->max_position,
            "group %d, sequence %lld: %lld rows at %d to %d are noted, there are %lld at %d to %d", pool->group, id,
            (long long)list->num_rows, list->min_position, list->max_position, (long long)counted.num_rows,
            counted.min_position, counted.max_position);
    REQUIRE(counted.ascending || !list->ascending, "group %d, sequence %lld: positions do not ascend", pool->group, id);
    return KVC_OK;
}

/* Takes the holders of runs away, so that none should be left. */
static void take_away(const kvc_run *runs, int32_t num, uint32_t by) {
    for (int32_t i = 0; i < num; i++)
        for (int32_t s = 0; s < runs[i].count; s++) runs[i].block->holders[runs[i].slot + s] -= by;
}

/* Takes every holder there should be away (by 1), or gives it back (by -1). */
static void take_away_all(const kvc_cache *cache, int32_t g, uint32_t by) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_run_list *list = &cache->sequences.items[i]->runs[g];
        take_away(kvc_runs_begin(list), list->num, by);
    }
    const kvc_batch *batch = cache->batch;
    for (int32_t s = 0; batch && s < batch->num_sequences; s++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        take_away(pending->runs, pending->num, by);
    }
    for (const kvc_cross_put *put = batch ? batch->cross_puts : NULL; put; put = put->next)
        if (put->group == g) take_away(&put->run, 1, by);
}

static kvc_status check_block(const kvc_pool *pool, const kvc_block *block) {
    int32_t live = 0;
    for (int32_t s = 0; s < block->fill; s++) live += block->holders[s] != 0;
    REQUIRE(block->fill >= 0 && block->fill <= pool->block_size && block->fill <= block->touched,
            "group %d, block %d: the fill mark is %d of %d, %d touched", pool->group, block->index, block->fill,
            pool->block_size, block->touched);
    REQUIRE(block->joined <= block->touched && block->resident <= block->touched,
            "group %d, block %d: %d slots joined and %d resident of %d touched", pool->group, block->index,
            block->joined, block->resident, block->touched);
    REQUIRE(live == block->live, "group %d, block %d: %d live slots are noted, there are %d", pool->group, block->index,
            block->live, live);
    REQUIRE(block->is_free == (!live && !block->pins), "group %d, block %d: %d live, %d pins, and is_free is %d",
            pool->group, block->index, live, block->pins, block->is_free);
    REQUIRE(block->pins || !block->fill || block->holders[block->fill - 1],
            "group %d, block %d: nobody holds the last slot", pool->group, block->index);
    REQUIRE(!block->planned && !pool->compaction, "group %d, block %d: slots are still planned", pool->group,
            block->index);
    return KVC_OK;
}

static kvc_status check_pool(const kvc_pool *pool) {
    int64_t live = 0, filled = 0, bytes = 0;
    int32_t num_free = 0, listed = 0;
    for (int32_t i = 0; i < pool->num_blocks; i++) {
        const kvc_block *block = pool->blocks[i];
        REQUIRE(block->index == i, "group %d: block %d stands at %d", pool->group, block->index, i);
        const kvc_status status = check_block(pool, block);
        if (status != KVC_OK) return status;
        live += block->live;
        filled += block->fill;
        num_free += block->is_free;
        bytes += kvc_pool_block_bytes(pool, block->touched);
    }
    for (const kvc_block *block = pool->free; block && listed <= num_free; block = block->next) listed++;
    REQUIRE(live == pool->live && filled == pool->filled && bytes == pool->row_bytes,
            "group %d: %lld live and %lld filled slots of %lld bytes are noted, there are %lld, %lld and %lld",
            pool->group, (long long)pool->live, (long long)pool->filled, (long long)pool->row_bytes, (long long)live,
            (long long)filled, (long long)bytes);
    REQUIRE(num_free == pool->num_free && listed == num_free,
            "group %d: %d free blocks are noted, %d listed, there are %d", pool->group, pool->num_free, listed,
            num_free);
    return KVC_OK;
}

static kvc_status check_holders(const kvc_cache *cache, int32_t g) {
    const kvc_pool *pool = &cache->pools[g];
    int32_t bad = -1;
    take_away_all(cache, g, 1);
    for (int32_t i = 0; i < pool->num_blocks; i++)
        for (int32_t s = 0; s < pool->blocks[i]->fill; s++)
            if (pool->blocks[i]->holders[s]) bad = i;
    take_away_all(cache, g, (uint32_t)-1);
    REQUIRE(bad < 0, "group %d, block %d: the holders of a slot are not the runs there are", g, bad);
    return KVC_OK;
}

static kvc_status check_sheets(const kvc_cache *cache) {
    int64_t bytes = 0;
    for (const kvc_sheet *sheet = cache->sheets; sheet; sheet = sheet->next) {
        REQUIRE(cache->batch ? !sheet->left || sheet->users : sheet->left && sheet->users,
                "a sheet of %d slots with %d users is there after its batch", sheet->num_slots, sheet->users);
        bytes += (int64_t)sheet->row_bytes;
    }
    REQUIRE(bytes == cache->sheet_bytes, "%lld bytes of sheets are noted, there are %lld",
            (long long)cache->sheet_bytes, (long long)bytes);
    return KVC_OK;
}

/* What is noted of sequences, so that a batch need not look at all of them. */
static kvc_status check_notes(const kvc_cache *cache) {
    int64_t num_holding = 0;
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_sequence *sequence = cache->sequences.items[i];
        const long long id = sequence->id;
        num_holding += sequence->holds;
        REQUIRE(sequence->in_batch || sequence->holds == kvc_sequence_holds(sequence),
                "sequence %lld is noted to hold rows, or not to", id);
        REQUIRE(!sequence->changed_at || *sequence->changed_at == sequence, "sequence %lld is not in its list", id);
        for (int32_t g = 0; !sequence->changed_at && !sequence->in_batch && g < cache->num_token_groups; g++) {
            const kvc_policy *policy = &cache->policies[g];
            const int32_t end = kvc_policy_retained(policy, kvc_sequence_last(sequence) + 1);
            REQUIRE(!kvc_policy_evicts(policy) ||
                        !kvc_runs_visit(&sequence->runs[g], kvc_policy_sinks(policy), end, NULL, NULL),
                    "group %d, sequence %lld: rows may be evicted, and no batch will look for them", g, id);
        }
    }
    REQUIRE(num_holding == cache->num_holding, "%lld sequences that hold rows are noted, there are %lld",
            (long long)cache->num_holding, (long long)num_holding);
    REQUIRE(cache->memory.replaced == 0, "lists that nobody uses are left");
    return KVC_OK;
}

static kvc_status validate(const kvc_cache *cache) {
    kvc_status status = check_notes(cache);
    if (status == KVC_OK) status = check_sheets(cache);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        for (int32_t i = 0; status == KVC_OK && i < cache->sequences.num; i++) {
            const kvc_sequence *sequence = cache->sequences.items[i];
            REQUIRE(i == 0 || cache->sequences.items[i - 1]->id < sequence->id,
                    "the table of sequences is out of order");
            REQUIRE(sequence->in_batch || !kvc_sequence_is_blank(sequence), "sequence %lld is blank and in the table",
                    (long long)sequence->id);
            REQUIRE(cache->batch || !sequence->in_batch, "sequence %lld belongs to a batch that is not there",
                    (long long)sequence->id);
            status = check_rows(&sequence->runs[g], &cache->pools[g], (long long)sequence->id);
        }
        if (status == KVC_OK) status = check_pool(&cache->pools[g]);
        if (status == KVC_OK && !cache->num_rewrites) /* which hold slots that are no runs yet */
            status = check_holders(cache, g);
    }
    return status;
}

kvc_status kvc_validate(kvc_cache *cache) {
    kvc_lock(cache);
    const kvc_status status = validate(cache);
    return kvc_unlock(cache, status);
}
