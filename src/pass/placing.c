/* placing.c: in which blocks the tokens of a batch go.  A sequence usually goes on in the block of its last row, and
 * then in new blocks of its own.  If batch->goes_anywhere, tokens behind that block go to any used block with room
 * first.  While a compaction is planned, rows count as lying where it will move them.  A batch that restores
 * (batch->replaced) does not go on in last blocks, because its rows replace the old ones.  Only groups of destination
 * KVC_TO_REPLACE and above get slots when the batch begins. */
#include "pass/placing.h"

#include "space/compact.h"
#include "space/expire.h"
#include "space/limits.h"

/* ---- counting ---------------------------------------------------------------------------------------------------- */

/* Returns the block of a sequence's last row that does not expire, once a planned compaction has run; *fill: its fill
 * mark then.  NULL: all rows expire. */
static kvc_block *find_last(const kvc_batch *batch, const kvc_sequence *sequence, int32_t g, kvc_scope scope,
                            int32_t *fill) {
    const kvc_pool *pool = &batch->cache->pools[g];
    const kvc_run_list *list = &sequence->runs[g];
    const kvc_compaction *c = pool->compaction;
    const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], sequence->min_query_position);
    for (int32_t i = list->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_runs_begin(list) + i;
        /* Index in the run of its last row that stays, plus 1. */
        int32_t end = run->position + run->count > gone.end ? run->count : gone.begin - run->position;
        if (end <= 0) continue;
        if (end > run->count) end = run->count;
        const int32_t *targets = c ? run->block->plan.targets : NULL; /* the slots' new places; NULL: they stay */
        if (!targets) {
            *fill = kvc_pool_use(run->block, scope).fill;
            return run->block;
        }
        const int32_t to = targets[run->slot + end - 1] / pool->block_size;
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

static void count_own_slots(void *context, const kvc_run *part) {
    own_slots *own = context;
    for (int32_t i = 0; part->block == own->block && i < part->count; i++)
        own->num += part->block->holders[part->slot + i].num == 1;
}

int32_t kvc_slots_saved(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
                        int32_t taken) {
    const kvc_sequence *sequence = member->sequence;
    const kvc_policy *policy = &batch->cache->policies[g];
    /* A batch that begins at `start` may expire all rows before it. */
    const int32_t start = kvc_policy_next_start(policy, sequence->min_query_position),
                  before = start - kvc_sequence_next(sequence); /* tokens up to there */
    if (before >= taken) return taken;
    own_slots own = {block, 0};
    kvc_runs_visit(&sequence->runs[g], kvc_policy_expired(policy, sequence->min_query_position).end, KVC_END,
                   count_own_slots, &own);
    /* The block stays in use when these rows go, if others hold slots of it.  A planned compaction counts as others. */
    const int stays = block->pins || own.num < block->live || batch->cache->pools[g].compaction;
    return !stays ? taken : before > 0 ? before : 0;
}

/* Finds the last block of each sequence in a group, and returns how many blocks of their own the batch's tokens need
 * besides.  Several sequences may share their last block: the slots that each will take are noted in
 * block->plan.num_slots. */
static int64_t count_own(const kvc_batch *batch, int32_t g, kvc_scope scope) {
    const int32_t size = batch->cache->pools[g].block_size;
    int64_t num = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        kvc_pending *pending = kvc_pending_of(batch, g, s);
        int32_t fill = 0, taken = 0;
        pending->last_block = NULL;
        if (pending->to < KVC_TO_REPLACE) continue;
        if (!batch->replaced) /* a batch that restores does not fill up a block that old rows leave */
            pending->last_block = find_last(batch, member->sequence, g, scope, &fill);
        kvc_block *last = pending->last_block;
        if (last) {
            const int32_t room = size - fill - last->plan.num_slots;
            taken = pending->num_tokens < room ? pending->num_tokens : room;
            last->plan.num_slots += taken;
            if (batch->in_several) taken = kvc_slots_saved(batch, member, g, last, taken);
        }
        num += ((int64_t)pending->num_tokens - taken + size - 1) / size;
    }
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_block *last = kvc_pending_of(batch, g, s)->last_block;
        if (last) last->plan.num_slots = 0;
    }
    return num;
}

/* Returns how many rows the batch brings to a group. */
static int64_t count_rows(const kvc_batch *batch, int32_t g) {
    int64_t num = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        if (pending->to >= KVC_TO_REPLACE) num += pending->num_tokens;
    }
    return num;
}

int64_t kvc_count_group(const kvc_batch *batch, int32_t g, kvc_scope scope) {
    kvc_pool *pool = &batch->cache->pools[g];
    kvc_preview preview = kvc_preview_open(batch->cache, g, scope, /* expires */ 1);
    const kvc_tally tally = kvc_preview_tally(&preview);
    const int64_t before = batch->is_packed ? kvc_packed_blocks(pool, &tally, 0) : tally.used.blocks,
                  more = batch->goes_anywhere ? kvc_packed_blocks(pool, &tally, count_rows(batch, g)) - before
                                              : count_own(batch, g, scope),
                  num_free = pool->num_blocks - before;
    kvc_preview_close(&preview);
    pool->demand = (kvc_demand){more, more > num_free ? more - num_free : 0}; /* blocks to open; new ones of them */
    return before + more;
}

int64_t kvc_count_batch(const kvc_batch *batch, kvc_scope scope) {
    kvc_cache *cache = batch->cache;
    int64_t bytes = cache->limits.max_bytes ? kvc_counted_others(cache, scope) : 0; /* of states and prompts */
    for (int32_t g = 0; g < cache->num_groups; g++) bytes += kvc_count_group(batch, g, scope) * cache->pools[g].cost;
    return bytes;
}

/* ---- handing out slots ------------------------------------------------------------------------------------------- */

kvc_block *kvc_next_open(const kvc_pool *pool, kvc_block **next) {
    while (*next && ((*next)->listed.is_free || (*next)->fill == pool->block_size)) *next = (*next)->listed.later;
    return *next;
}

kvc_block *kvc_last_block(const kvc_batch *batch, int32_t g, int32_t s) {
    const kvc_run_list *list = &batch->sequences[s].sequence->runs[g];
    if (!batch->goes_anywhere) return kvc_pending_of(batch, g, s)->last_block; /* count_own found it */
    return list->num && !batch->replaced ? kvc_runs_end(list)[-1].block : NULL;
}

/* Adds a token's slot at the end of its sequence's runs. */
static void add_slot(kvc_pending *pending, kvc_block *block, int32_t slot, int32_t position) {
    kvc_run *last = pending->num ? &pending->runs[pending->num - 1] : NULL;
    if (last && last->block == block && last->slot + last->count == slot && last->position + last->count == position)
        last->count++;
    else
        pending->runs[pending->num++] = (kvc_run){block, slot, 1, position, 0};
}

/* Where tokens that go anywhere find room in a group. */
typedef struct places {
    kvc_block *next;   /* where the search goes on in the list of all blocks; NULL: none has room */
    kvc_block *opened; /* the last block that the batch has opened; NULL: none yet */
} places;

/* Returns the block for a sequence's next tokens: one with room if they go anywhere, otherwise a new one. */
static kvc_block *next_block(const kvc_batch *batch, int32_t g, int32_t s, places *p) {
    kvc_pool *pool = &batch->cache->pools[g];
    if (batch->goes_anywhere && kvc_next_open(pool, &p->next)) return p->next;
    if (batch->goes_anywhere && p->opened && p->opened->fill < pool->block_size) return p->opened;
    pool->free.last_taken += !batch->sequences[s].is_unstored; /* an unstored sequence gives its blocks back */
    return p->opened = kvc_pool_open(pool);
}

/* Gives the tokens of sequence s that get a row slots in its last block, then in others. */
static void take_slots(const kvc_batch *batch, int32_t g, int32_t s, places *p) {
    kvc_pool *pool = &batch->cache->pools[g];
    kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int32_t *token = kvc_order_in(batch, g) + batch->sequences[s].first;
    kvc_block *block = kvc_last_block(batch, g, s);
    for (int32_t done = 0; done < pending->num_tokens;) {
        if (!block || block->fill == pool->block_size) block = next_block(batch, g, s, p);
        const int32_t rest = pending->num_tokens - done, unfilled = pool->block_size - block->fill;
        const int32_t count = rest < unfilled ? rest : unfilled, slot = kvc_pool_take(pool, block, count);
        for (int32_t i = 0; i < count; i++) {
            const int32_t t = token[done + i];
            kvc_places_in(batch, g)[t] = (kvc_place){block, slot + i};
            add_slot(pending, block, slot + i, kvc_rows_below(batch->positions[t], pool->stride));
        }
        done += count;
    }
}

void kvc_place_batch(kvc_batch *batch) {
    for (int32_t g = 0; g < batch->cache->num_groups; g++) {
        kvc_pool *pool = &batch->cache->pools[g];
        places p = {.next = pool->first};
        pool->free.last_taken = 0;
        for (int32_t s = 0; s < batch->num_sequences; s++) {
            kvc_pending *pending = kvc_pending_of(batch, g, s);
            pending->runs = batch->runs + (size_t)g * (size_t)batch->num_tokens + (size_t)batch->sequences[s].first;
            if (pending->to >= KVC_TO_REPLACE) take_slots(batch, g, s, &p);
            if (pending->to == KVC_TO_REPLACE) pool->counts.replacing += pending->num_tokens;
        }
    }
}
