/* validate.c: kvc_validate: checks the invariants of a cache.  Each function counts something anew, and returns
 * KVC_ERR_CORRUPT unless that is what was noted. */
#include <string.h>

#include "cache/batch.h"
#include "cache/check.h"
#include "cache/useful.h"
#include "pass/prepare.h"
#include "space/limits.h"
#include "lifetime/blocks.h"
#include "saved/transit.h"

#define REQUIRE(condition, ...)                                          \
    do {                                                                 \
        if (!(condition)) return kvc_fail(KVC_ERR_CORRUPT, __VA_ARGS__); \
    } while (0)

static kvc_status check_runs(const kvc_run_list *list, const kvc_pool *pool, long long id) {
    kvc_run_list counted = *list;
    REQUIRE(list->first >= 0 && list->num >= 0 && list->first + list->num <= list->capacity,
            "group %d, sequence %lld: the list of runs passes its room", pool->group, id);
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
        REQUIRE(run->count > 0 && run->slot >= 0 && run->slot + run->count <= run->block->fill,
                "group %d, sequence %lld: a run of slots %d + %d passes the fill mark %d", pool->group, id, run->slot,
                run->count, run->block->fill);
        REQUIRE(run->position >= 0 && run->position <= INT32_MAX / pool->stride - run->count &&
                    run->delta % pool->stride == 0,
                "group %d, sequence %lld: a run at position %d", pool->group, id, run->position);
        REQUIRE(run->block->pool == pool, "group %d, sequence %lld: a run in a block of another pool", pool->group, id);
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

static kvc_status check_block(const kvc_pool *pool, const kvc_block *block) {
    int32_t live = 0, evictable = 0;
    for (int32_t s = 0; s < block->fill; s++) {
        live += block->holders[s].num != 0;
        evictable += block->holders[s].num && block->holders[s].num == block->holders[s].evictable;
    }
    REQUIRE(block->fill >= 0 && block->fill <= pool->block_size && block->fill <= block->pages.faulted,
            "group %d, block %d: the fill mark is %d of %d, %d faulted", pool->group, block->listed.index, block->fill,
            pool->block_size, block->pages.faulted);
    REQUIRE(block->pages.collapsed <= block->pages.faulted && block->pages.resident <= block->pages.faulted,
            "group %d, block %d: %d slots collapsed and %d resident of %d faulted", pool->group, block->listed.index,
            block->pages.collapsed, block->pages.resident, block->pages.faulted);
    REQUIRE(live == block->live, "group %d, block %d: %d live slots are noted, there are %d", pool->group,
            block->listed.index, block->live, live);
    REQUIRE(block->listed.is_free == (!live && !block->pins), "group %d, block %d: %d live, %d pins, and is_free is %d",
            pool->group, block->listed.index, live, block->pins, block->listed.is_free);
    REQUIRE(block->pins || !block->fill || block->holders[block->fill - 1].num,
            "group %d, block %d: nobody holds the last slot", pool->group, block->listed.index);
    REQUIRE(evictable == block->evicting.evictable, "group %d, block %d: %d evictable slots are noted, there are %d",
            pool->group, block->listed.index, block->evicting.evictable, evictable);
    for (int scope = 0; scope < KVC_NUM_SCOPES; scope++) {
        const kvc_use use = kvc_pool_use(block, (kvc_scope)scope), *noted = &block->noted[scope];
        REQUIRE(use.fill == noted->fill && use.live == noted->live && use.is_used == noted->is_used &&
                    use.is_pinned == noted->is_pinned,
                "group %d, block %d: %d slots up to %d are counted in scope %d, there are %d up to %d", pool->group,
                block->listed.index, noted->live, noted->fill, scope, use.live, use.fill);
    }
    REQUIRE(!block->plan.num_slots && !block->plan.is_tried && !pool->compaction,
            "group %d, block %d: slots are still planned", pool->group, block->listed.index);
    return KVC_OK;
}

static kvc_status check_tallies(const kvc_pool *pool) {
    for (int scope = 0; scope < KVC_NUM_SCOPES; scope++) {
        const kvc_tally *tally = &pool->tallies[scope];
        kvc_tally sum = {0};
        for (const kvc_block *block = pool->first; block; block = block->listed.later)
            kvc_tally_add(pool, &sum, block->noted[scope], 1);
        REQUIRE(!memcmp(&sum, tally, sizeof sum),
                "group %d: %lld blocks with %lld live slots are tallied in scope %d, there are %lld with %lld",
                pool->group, (long long)tally->used.blocks, (long long)tally->used.live, scope,
                (long long)sum.used.blocks, (long long)sum.used.live);
    }
    return KVC_OK;
}

static kvc_status check_pool(const kvc_pool *pool) {
    int64_t live = 0, filled = 0, bytes = 0, evictable = 0;
    int32_t num = 0, num_free = 0, listed = 0;
    for (const kvc_block *block = pool->first, *before = NULL; block; before = block, block = block->listed.later) {
        REQUIRE(block->listed.index == num++ && block->listed.earlier == before, "group %d: block %d stands at %d",
                pool->group, block->listed.index, num - 1);
        const kvc_status status = check_block(pool, block);
        if (status != KVC_OK) return status;
        live += block->live;
        evictable += block->evicting.evictable;
        filled += block->fill;
        num_free += block->listed.is_free;
        bytes += kvc_pool_block_bytes(pool, block->pages.faulted);
    }
    for (const kvc_block *block = pool->free.first; block && listed <= num_free; block = block->listed.next_free)
        listed++;
    REQUIRE(num == pool->num_blocks, "group %d: %d blocks are noted, %d listed", pool->group, pool->num_blocks, num);
    REQUIRE(live == pool->counts.live && filled == pool->counts.filled && bytes == pool->counts.row_bytes,
            "group %d: %lld live and %lld filled slots of %lld bytes are noted, there are %lld, %lld and %lld",
            pool->group, (long long)pool->counts.live, (long long)pool->counts.filled,
            (long long)pool->counts.row_bytes, (long long)live, (long long)filled, (long long)bytes);
    REQUIRE(evictable == pool->evicting.evictable, "group %d: %lld evictable slots are noted, there are %lld",
            pool->group, (long long)pool->evicting.evictable, (long long)evictable);
    REQUIRE(num_free == pool->free.num && listed == num_free,
            "group %d: %d free blocks are noted, %d listed, there are %d", pool->group, pool->free.num, listed,
            num_free);
    REQUIRE(pool->free.num_idle >= 0 && pool->free.num_idle <= num_free, "group %d: %d of %d free blocks are idle",
            pool->group, pool->free.num_idle, num_free);
    return check_tallies(pool);
}

/* Returns KVC_ERR_CORRUPT unless the lists have room for all runs that tokens of the open batch may become. */
static kvc_status check_room(const kvc_batch *batch, int32_t g) {
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        const kvc_run_list *list = &member->sequence->runs[g];
        const int32_t num = kvc_most_runs(batch, member, g, list->num);
        REQUIRE(member->is_unstored || !kvc_takes_rows(batch, g) || num <= list->capacity,
                "group %d, sequence %lld: the list of runs has no room for the %d that the batch may leave", g,
                (long long)member->sequence->id, num);
    }
    return KVC_OK;
}

/* Subtracts *by from the holders of every slot of the runs: 1 takes the runs' holds away, -1 gives them back. */
static void remove_holds(void *by, const kvc_run *runs, int32_t num, const kvc_sequence *sequence, int32_t in_batch) {
    const uint32_t evictable = sequence->evicting.is_evictable && !in_batch ? *(const uint32_t *)by : 0;
    for (int32_t i = 0; i < num; i++)
        for (int32_t s = 0; s < runs[i].count; s++) {
            runs[i].block->holders[runs[i].slot + s].num -= *(const uint32_t *)by;
            runs[i].block->holders[runs[i].slot + s].evictable -= evictable;
        }
}

/* Returns KVC_ERR_CORRUPT unless a slot counts as many holders as runs hold it, and as many evictable holders as runs
 * of evictable sequences do.  Takes all runs' holds away, looks whether none is left, and gives them back. */
static kvc_status check_holders(const kvc_cache *cache, int32_t g) {
    const kvc_pool *pool = &cache->pools[g];
    int32_t bad = -1;
    kvc_visit_runs(cache, g, remove_holds, &(uint32_t){1}, /* loaded */ 1);
    for (const kvc_block *block = pool->first; block; block = block->listed.later)
        for (int32_t s = 0; s < block->fill; s++)
            if (block->holders[s].num || block->holders[s].evictable) bad = block->listed.index;
    kvc_visit_runs(cache, g, remove_holds, &(uint32_t){(uint32_t)-1}, /* loaded */ 1);
    REQUIRE(bad < 0, "group %d, block %d: the holders of a slot are not the runs there are", g, bad);
    return KVC_OK;
}

/* Returns KVC_ERR_CORRUPT if a sequence that the next batch will skip holds rows that are to expire. */
static kvc_status check_expired(const kvc_cache *cache, const kvc_sequence *sequence) {
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_policy *policy = &cache->policies[g];
        const int32_t last = kvc_sequence_last(sequence), low = kvc_min_query_position(sequence) - 1;
        const int32_t behind = low < last ? low : last; /* no query of it will come below this */
        const kvc_interval gone = kvc_policy_expired(policy, behind > 0 ? behind : 0);
        REQUIRE(!kvc_policy_expires(policy) ||
                    !kvc_runs_visit(&sequence->runs[g], gone.begin, gone.end, /* only count */ NULL, NULL),
                "group %d, sequence %lld: rows are to expire, and no batch will look for them", g,
                (long long)sequence->id);
    }
    return KVC_OK;
}

/* Returns KVC_ERR_CORRUPT if a sequence that frees slots counts as useless, or one counts that is not evictable. */
static kvc_status check_useful(const kvc_cache *cache, const kvc_sequence *sequence) {
    const long long id = sequence->id;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_run_list *list = &sequence->runs[g];
        const kvc_standing *standing = &sequence->evicting.standings[g];
        REQUIRE((standing->sequence == sequence) == (sequence->evicting.is_evictable && list->num),
                "group %d, sequence %lld: it is noted to be evictable, or not to", g, id);
        if (!standing->sequence) continue;
        const kvc_sequence *found = kvc_useful_after(&cache->pools[g].evicting.useful, sequence->evicting.used - 1);
        REQUIRE(standing->at ? *standing->at == standing : found == sequence,
                "group %d, sequence %lld: it is not in its list", g, id);
        for (const kvc_run *run = kvc_runs_begin(list); standing->at && run < kvc_runs_end(list); run++)
            REQUIRE(!kvc_pool_frees(run->block, run->slot, run->count) &&
                        (run->block->evicting.num_watchers || (list->num == 1 && run->block->evicting.useless)),
                    "group %d, sequence %lld: it frees slots, and counts as useless", g, id);
    }
    const kvc_sequence *found = kvc_useful_after(&cache->evicting.with_states, sequence->evicting.used - 1);
    REQUIRE(!sequence->evicting.state_bytes || (sequence->evicting.is_evictable && found == sequence),
            "sequence %lld: it frees a state, and is not in the set of these", id);
    return KVC_OK;
}

/* Checks the counts and lists that save a batch from looking at all sequences. */
static kvc_status check_notes(const kvc_cache *cache) {
    int64_t num_holding = 0, num_kept = 0, num_evictable = 0, num_pinned = 0, num_protected = 0, state_bytes = 0;
    const kvc_table *table = &cache->sequences;
    for (const kvc_sequence *sequence = kvc_table_first(table); sequence; sequence = kvc_table_next(table, sequence)) {
        const long long id = sequence->id;
        num_holding += sequence->holds;
        REQUIRE(sequence->in_batch || sequence->holds == (kvc_sequence_holds(sequence) && !sequence->evicting.is_kept &&
                                                          !sequence->call.is_own),
                "sequence %lld is noted to hold rows, or not to", id);
        REQUIRE(!sequence->evicting.is_kept || !(sequence->in_batch || sequence->listed.changed_at),
                "sequence %lld is a kept one and in use", id);
        num_kept += sequence->evicting.is_kept;
        state_bytes += sequence->evicting.state_bytes;
        num_evictable += sequence->evicting.is_evictable;
        num_pinned += sequence->evicting.is_counted_pinned;
        num_protected += sequence->evicting.is_protected;
        REQUIRE(sequence->evicting.is_evictable == (sequence->evicting.is_kept && !sequence->evicting.is_protected &&
                                                    !sequence->evicting.num_pins && !sequence->call.in_place),
                "sequence %lld is noted to be evictable, or not to", id);
        REQUIRE(!sequence->listed.changed_at || *sequence->listed.changed_at == sequence,
                "sequence %lld is not in its list", id);
        kvc_status status = check_useful(cache, sequence);
        const int is_skipped = !sequence->listed.changed_at && !sequence->in_batch && !sequence->evicting.is_kept;
        if (status == KVC_OK && is_skipped && !sequence->call.is_own) /* its call lists it again in the end */
            status = check_expired(cache, sequence);
        if (status != KVC_OK) return status;
    }
    REQUIRE(num_holding == cache->sequences.num_holding, "%lld sequences that hold rows are noted, there are %lld",
            (long long)cache->sequences.num_holding, (long long)num_holding);
    REQUIRE(num_kept == cache->evicting.num_kept && num_protected == cache->evicting.num_protected &&
                num_pinned == cache->evicting.num_pinned,
            "the kept sequences are not those of the table");
    for (const kvc_sequence *s = kvc_sequence_end(&cache->evicting.evictable, KVC_BY_USE, KVC_LOW), *next; s;
         s = next, num_evictable--) {
        next = kvc_sequence_beside(s, KVC_BY_USE, KVC_HIGH);
        REQUIRE(s->evicting.is_evictable && (!next || next->evicting.used > s->evicting.used),
                "evictable sequences are out of order");
    }
    REQUIRE(!num_evictable, "the evictable sequences are not those of the table");
    REQUIRE(state_bytes == cache->evicting.state_bytes, "%lld bytes of states are noted to be evictable, and %lld are",
            (long long)cache->evicting.state_bytes, (long long)state_bytes);
    return KVC_OK;
}

/* Returns KVC_ERR_CORRUPT if rows that have moved pass for exact. */
static kvc_status check_exact(const kvc_sequence *sequence) {
    const long long id = sequence->id;
    REQUIRE(sequence->exact_to >= 0 && sequence->edited_from >= 0,
            "sequence %lld is exact to position %d, and edited from %d on", id, sequence->exact_to,
            sequence->edited_from);
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        for (const kvc_run *run = kvc_runs_begin(&sequence->runs[g]); run < kvc_runs_end(&sequence->runs[g]); run++) {
            const int32_t position = kvc_position_of(run->position, sequence->pools[g].stride);
            REQUIRE(!run->delta || position >= sequence->exact_to,
                    "group %d, sequence %lld: rows at position %d have moved, and it is exact to %d", g, id, position,
                    sequence->exact_to);
        }
    return KVC_OK;
}

static kvc_status check_table(const kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    const kvc_sequence *before = NULL;
    int32_t nums[2] = {0, 0};
    for (const kvc_sequence *sequence = kvc_table_first(table); sequence; sequence = kvc_table_next(table, sequence)) {
        const long long id = sequence->id;
        REQUIRE(!before || before->is_hidden < sequence->is_hidden ||
                    (before->is_hidden == sequence->is_hidden && before->id < id),
                "the table of sequences is out of order");
        before = sequence;
        nums[sequence->is_hidden]++;
        REQUIRE(sequence->in_batch || sequence->follower || !kvc_sequence_is_blank(sequence),
                "sequence %lld is blank and in the table", id);
        REQUIRE(sequence->in_batch ||
                    sequence->evicting.is_fixed == (kvc_sequence_holds(sequence) && !sequence->evicting.is_evictable),
                "sequence %lld is noted to hold rows and to stay, or not to", id);
        REQUIRE(!sequence->is_hidden || (sequence->evicting.is_kept && sequence->follower),
                "nobody follows hidden rows");
        REQUIRE(cache->batch || !sequence->in_batch, "sequence %lld belongs to a batch that is not there", id);
    }
    REQUIRE(nums[0] == table->named.num && nums[1] == table->hidden.num,
            "the table of sequences has others than it counts");
    return KVC_OK;
}

static kvc_status check_group(const kvc_cache *cache, int32_t g) {
    const kvc_table *table = &cache->sequences;
    kvc_status status = KVC_OK;
    for (const kvc_sequence *s = kvc_table_first(table); status == KVC_OK && s; s = kvc_table_next(table, s))
        status = check_runs(&s->runs[g], &cache->pools[g], s->id);
    if (status == KVC_OK) status = check_pool(&cache->pools[g]);
    if (status == KVC_OK && cache->batch) status = check_room(cache->batch, g);
    if (status != KVC_OK || cache->waiting.num_rewrites)
        return status; /* rewrites hold slots of which there are no runs yet */
    return check_holders(cache, g);
}

kvc_status kvc_validate(kvc_cache *cache) {
    kvc_lock(cache);
    kvc_status status = check_notes(cache);
    if (status == KVC_OK) status = check_table(cache);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) status = check_group(cache, g);
    const kvc_table *table = &cache->sequences;
    for (const kvc_sequence *s = kvc_table_first(table); status == KVC_OK && s; s = kvc_table_next(table, s))
        status = check_exact(s); /* last, as it relies on sound lists */
    return kvc_unlock(cache, status);
}
