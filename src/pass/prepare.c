/* prepare.c: makes sure that a batch fits: see prepare.h. */
#include "pass/prepare.h"

#include "base/compiler.h"
#include "pass/fixed.h"
#include "pass/last_block.h"
#include "space/compact.h"
#include "space/expire.h"
#include "space/limits.h"
#include "cache/waiting.h"

void kvc_wait_for_writers(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    int waited; /* which released the mutex: all is looked at again */
    do {
        if (cache->limits.max_bytes) kvc_cache_find_all(cache);
        waited = cache->limits.max_bytes && kvc_cache_wait_pages(cache);
        for (int32_t t = 0; !waited && cache->waiting.num_in_place && t < num_tokens; t++) {
            const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[t] : 0);
            if (!sequence || !sequence->call.in_place) continue;
            kvc_cache_find(cache, sequence->id);
            waited = 1;
        }
    } while (waited);
}

/* ---- limits other than max_bytes --------------------------------------------------------------------------------- */

kvc_status kvc_check_num_tokens(const kvc_cache *cache, int64_t num_tokens) {
    int any = 0; /* whether each token counts for the capacity, in any group */
    for (int32_t g = 0; cache->limits.capacity && num_tokens > cache->limits.capacity && g < cache->num_token_groups;
         g++)
        any |=
            cache->pools[g].stride == 1 && /* else tokens may have no rows */
            (cache->limits.has_own_capacity || kvc_policy_most_rows(&cache->policies[g]) > cache->limits.max_seq_len);
    if (any)
        return kvc_fail(KVC_ERR_FULL, "%lld tokens do not fit: capacity is %lld, so that at most %lld fit at once",
                        (long long)num_tokens, (long long)cache->limits.capacity, (long long)cache->limits.capacity);
    if (num_tokens < INT32_MAX) return KVC_OK;
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld tokens", (long long)num_tokens);
}

int64_t kvc_count_holding(const kvc_batch *batch) {
    int64_t num = batch->cache->sequences.num_holding;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        num += !member->sequence->holds;
    }
    return num;
}

/* Returns whether each row of a sequence stands behind the one before. */
static int rises(const kvc_run_list *list) {
    const kvc_run *run = kvc_runs_begin(list);
    for (int32_t i = 1; i < list->num; i++)
        if (run[i].position < run[i - 1].position + run[i - 1].count) return 0;
    return 1;
}

/* Returns whether the batch only adds tokens at the end of a sequence.  A commit then leaves only the rows of these
 * tokens that the policy keeps. */
static int grows(const kvc_batch *batch, const kvc_batch_sequence *member) {
    const kvc_sequence *sequence = member->sequence;
    return !batch->replaced && !member->goes_back && kvc_min_query_position(sequence) == kvc_sequence_next(sequence);
}

int64_t kvc_room_in_sequence(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (!cache->limits.max_seq_len) return INT64_MAX;
    const int stays_within = kvc_policy_most_rows(&cache->policies[g]) <= cache->limits.max_seq_len;
    if (stays_within && grows(batch, member) && rises(&member->sequence->runs[g])) return INT64_MAX;
    return cache->limits.max_seq_len - (batch->replaced ? 0 : kvc_count_staying(cache, member->sequence, g));
}

int64_t kvc_most_counted(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (cache->limits.has_own_capacity || kvc_room_in_sequence(batch, member, g) < INT64_MAX) return INT64_MAX;
    return cache->limits.max_seq_len - kvc_count_staying(cache, member->sequence, g);
}

/* Returns what messages call `num` rows that a group gets of a batch, with their verb. */
static const char *rows_do(const kvc_cache *cache, int32_t g, int64_t num) {
    if (cache->pools[g].stride == 1) return num == 1 ? "token does" : "tokens do";
    return num == 1 ? "row for several tokens does" : "rows for several tokens each do";
}

/* Returns KVC_ERR_FULL if a sequence would hold more rows of group g than max_seq_len once the batch is committed. */
static kvc_status check_seq_len(const kvc_batch *batch, int32_t g) {
    const kvc_cache *cache = batch->cache;
    for (int32_t s = 0; cache->limits.max_seq_len && s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        const int64_t room = kvc_room_in_sequence(batch, member, g);
        const int32_t num_tokens = kvc_pending_of(batch, g, s)->num_tokens;
        if (num_tokens <= room) continue;
        if (batch->replaced)
            return kvc_fail(KVC_ERR_FULL, "%d %s not fit in sequence %lld: max_seq_len is %lld", num_tokens,
                            rows_do(cache, g, num_tokens), (long long)member->sequence->id,
                            (long long)cache->limits.max_seq_len);
        return kvc_fail(KVC_ERR_FULL,
                        "%d more %s not fit: sequence %lld holds %lld of max_seq_len %lld, %lld fit at once; "
                        "%s, or give a larger max_seq_len",
                        num_tokens, rows_do(cache, g, num_tokens), (long long)member->sequence->id,
                        (long long)(cache->limits.max_seq_len - room), (long long)cache->limits.max_seq_len,
                        (long long)(room > 0 ? room : 0),
                        kvc_policy_expires(&cache->policies[g]) ? "feed so many at a time" : "remove some");
    }
    return KVC_OK;
}

/* Visits the rows of group g that the batch replaces, except rows that have expired before. */
static void visit_replaced(const kvc_need *need, int32_t g, kvc_part_fn *visit, void *context) {
    const kvc_batch *batch = need->context;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        if (kvc_pending_of(batch, g, s)->to != KVC_TO_REPLACE) continue;
        const kvc_sequence *sequence = batch->sequences[s].sequence;
        const kvc_interval gone = kvc_policy_expired(&batch->cache->policies[g], sequence->min_query_position);
        kvc_runs_visit(&sequence->runs[g], 0, gone.begin, visit, context);
        kvc_runs_visit(&sequence->runs[g], gone.begin < gone.end ? gone.end : gone.begin, KVC_END, visit, context);
    }
}

/* Returns KVC_ERR_FULL if more slots of group g than the capacity, which is set, would be live. */
static kvc_status check_capacity(const kvc_need *need, int32_t g) {
    const kvc_batch *batch = need->context;
    const int64_t capacity = need->cache->limits.capacity;
    int64_t live, num_slots = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        if (pending->to < KVC_TO_REPLACE) continue;
        const int64_t most = kvc_most_counted(batch, &batch->sequences[s], g);
        num_slots += pending->num_tokens < most ? pending->num_tokens : most;
    }
    if (!kvc_exceeds_capacity(need, g, num_slots, &live)) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL,
                    "%lld more %s not fit: %lld of capacity %lld are in use, %lld fit at once; remove some, "
                    "clear a sequence, or give a larger capacity",
                    (long long)num_slots, rows_do(need->cache, g, num_slots), (long long)live, (long long)capacity,
                    (long long)(capacity - live));
}

/* ---- blocks and bytes that the batch needs of a group ------------------------------------------------------------ */

/* The slots of a block that one sequence alone holds, each once. */
typedef struct own_slots {
    const kvc_block *block;
    int32_t num;
} own_slots;

static void count_own(void *context, const kvc_run *part) {
    own_slots *own = context;
    for (int32_t i = 0; part->block == own->block && i < part->count; i++)
        own->num += part->block->holders[part->slot + i].num == 1;
}

int32_t kvc_slots_saved(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, const kvc_block *block,
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
    if (from < block->pages.faulted) from = block->pages.faulted;
    if (from < to) pool->demand.more_bytes += kvc_pool_block_bytes(pool, to) - kvc_pool_block_bytes(pool, from);
}

/* Adds new blocks for num_slots slots, at least one. */
static void add_new_blocks(kvc_pool *pool, int32_t num_slots) {
    const int32_t size = pool->block_size;
    const int64_t full = num_slots / size, all = full + (num_slots % size != 0);
    pool->demand.new_blocks += all;
    pool->demand.new_bytes += full * kvc_pool_block_bytes(pool, size) + all * kvc_pool_header_bytes(pool);
    if (num_slots % size) pool->demand.new_bytes += kvc_pool_block_bytes(pool, num_slots % size);
}

/* Adds the blocks that sequence s of the batch will fill in group g: its last block, then free ones from *next on, then
 * new ones.  *next becomes the first free block that is left.  Several sequences may share their last block, so the
 * slots that one will take are noted in block->plan.num_slots. */
static void add_sequence(const kvc_batch *batch, int32_t g, int32_t s, kvc_block **next) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    kvc_pool *pool = &batch->cache->pools[g];
    int32_t rest = pending->num_tokens, fill = 0;
    if (pending->to < KVC_TO_REPLACE) return;
    kvc_find_last_block(batch, g, s, batch->scope, &fill);
    kvc_block *last = pending->last_block;
    if (last) {
        const int32_t taken = pending->in_last, end = fill + last->plan.num_slots;
        add_faulted(pool, last, end - taken, end);
        rest -= batch->in_several ? kvc_slots_saved(batch, member, g, last, taken) : taken;
    }
    for (kvc_block *block; rest > 0 && (block = *next); rest -= block->plan.num_slots) {
        *next = block->listed.next_free;
        pool->demand.num_blocks++;
        block->plan.num_slots = rest < pool->block_size ? rest : pool->block_size;
        add_faulted(pool, block, 0, block->plan.num_slots);
    }
    if (rest > 0) add_new_blocks(pool, rest);
}

/* Takes off all that is planned; returns the bytes of existing blocks with it, if all free memory is given back.  next:
 * the first free block that is not planned. */
static int64_t least_bytes(const kvc_batch *batch, const kvc_preview *preview, const kvc_block *next) {
    const kvc_pool *pool = preview->pool;
    const kvc_compaction *c = pool->compaction;
    int64_t bytes = kvc_preview_tally(preview).bytes;
    for (int32_t i = 0; c && i < c->num_blocks; i++) {
        bytes -= kvc_pool_used_bytes(pool, kvc_pool_use(c->order[i], preview->scope));
        bytes += kvc_take_planned(pool, c->order[i], kvc_compaction_fill(c, i));
    }
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_block *last = kvc_pending_of(batch, pool->group, s)->last_block;
        if (last) kvc_add_planned(preview, last, &bytes);
    }
    for (kvc_block *block = preview->free; block != next; block = block->listed.next_free)
        kvc_add_planned(preview, block, &bytes);
    return bytes;
}

/* Adds the memory that the blocks of a planned compaction will touch, and lists the blocks that it empties as free. */
static void add_compaction(kvc_pool *pool, kvc_preview *preview) {
    const kvc_compaction *c = pool->compaction;
    for (int32_t i = 0; i < c->num_blocks; i++) {
        const int32_t fill = kvc_compaction_fill(c, i);
        add_faulted(pool, c->order[i], 0, fill);
        if (!fill) kvc_preview_add_free(preview, c->order[i]);
    }
}

/* Computes pool->demand of group g, and the last_block of each sequence of the batch, for after its expiry and, where
 * one is planned, its compaction.  compacts: plans a compaction first, unless nothing is to be gained; only that can
 * fail, with KVC_ERR_NOMEM. */
static kvc_status find_demand(const kvc_batch *batch, int32_t g, int compacts) {
    kvc_cache *cache = batch->cache;
    kvc_pool *pool = &cache->pools[g];
    kvc_preview preview = kvc_preview_open(cache, g, batch->scope, 1);
    const kvc_tally tally = kvc_preview_tally(&preview);
    const kvc_status status = compacts ? kvc_compaction_plan(cache, g, batch->scope, &tally) : KVC_OK;
    if (status == KVC_OK) {
        pool->demand = (kvc_demand){0};
        if (pool->compaction) add_compaction(pool, &preview);
        kvc_block *next = preview.free; /* the first free block that no sequence will use */
        for (int32_t s = 0; s < batch->num_sequences; s++) add_sequence(batch, g, s, &next);
        pool->demand.num_blocks += (int32_t)pool->demand.new_blocks;
        if (cache->limits.max_bytes) pool->demand.least_bytes = least_bytes(batch, &preview, next);
        for (int32_t s = 0; s < batch->num_sequences; s++) {
            kvc_block *last = kvc_pending_of(batch, g, s)->last_block;
            if (last) last->plan.num_slots = 0;
        }
        for (kvc_block *block = preview.free; block != next; block = block->listed.next_free) block->plan.num_slots = 0;
    }
    kvc_preview_close(&preview);
    return status;
}

void kvc_forget_demands(kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_groups; g++) cache->pools[g].demand = (kvc_demand){0};
}

/* ---- memory that the batch needs --------------------------------------------------------------------------------- */

enum { TOO_MANY_RUNS = INT32_MAX / 2 + 1 }; /* more than a list may have: kvc_runs_prepare fails */

/* The sequence's slots are a stretch for each stretch of consecutive positions, and one more for each further block
 * that it goes on in, and behind the sinks.  The staying slots of a stretch of n slots are at most (n + 1) / 2 runs.
 * The commit adds a row for each token, or no more than the policy keeps, where the sequence only grows. */
int32_t kvc_most_runs(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t num) {
    const kvc_pending *pending = kvc_pending_of(batch, g, (int32_t)(member - batch->sequences));
    if (member->is_unstored || pending->to == KVC_TO_NOWHERE) return num;
    if (pending->to == KVC_TO_CROSS) return 1;
    const int64_t limit = kvc_policy_most_rows(&batch->cache->policies[g]),
                  n = limit < pending->num_tokens && grows(batch, member) ? limit : pending->num_tokens;
    int64_t most = num + (n + member->num_stretches + n / batch->cache->pools[g].block_size + 3) / 2;
    if (kvc_policy_expires(&batch->cache->policies[g]))
        most += kvc_most_cuts(batch->cache, member->sequence, g, member->num_stretches);
    return most < TOO_MANY_RUNS ? (int32_t)most : TOO_MANY_RUNS;
}

/* Returns for just how many runs a list must have room: while some expire, are moved, and others are added.  member:
 * NULL if the sequence is not in the batch. */
static int32_t exact_runs(const kvc_batch *batch, const kvc_batch_sequence *member, const kvc_sequence *sequence,
                          int32_t g) {
    const kvc_cache *cache = batch->cache;
    const kvc_run_list *list = &sequence->runs[g];
    const kvc_compaction *c = cache->pools[g].compaction;
    const int expires = kvc_policy_expires(&cache->policies[g]);
    const kvc_interval none = {0, 0},
                       gone = expires ? kvc_policy_expired(&cache->policies[g], sequence->min_query_position) : none;
    int32_t after = list->num + kvc_runs_num_cut(list, gone.begin, gone.end), num = after;
    const int32_t moving = c ? kvc_compaction_room(c, list, gone, &after) : 0,
                  ending = member ? kvc_most_runs(batch, member, g, after) : after;
    if (moving > num) num = moving;
    return ending > num ? ending : num;
}

/* Gets memory in the lists of a sequence for the runs that it may get, and that expiries may split. */
static kvc_status prepare_lists(const kvc_batch *batch, kvc_sequence *sequence) {
    kvc_cache *cache = batch->cache;
    const kvc_batch_sequence *member = sequence->in_batch ? &batch->sequences[sequence->in_batch - 1] : NULL;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        kvc_run_list *list = &sequence->runs[g];
        const int32_t most = member ? kvc_most_runs(batch, member, g, list->num) : 0,
                      more = most > list->num ? most - list->num : 0;
        if (cache->evicting.is_tight) {
            status = kvc_runs_prepare_exact(list, &cache->memory, exact_runs(batch, member, sequence, g));
        } else if (cache->pools[g].compaction) {
            status = kvc_runs_prepare_edit(list, &cache->memory, more + 2);
        } else if (kvc_policy_expires(&cache->policies[g])) {
            const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
            status = kvc_runs_prepare_expire(list, &cache->memory, gone.begin, gone.end, more);
        } else if (more) {
            status = kvc_runs_prepare(list, &cache->memory, more);
        }
    }
    return status;
}

/* Returns the bytes after the batch has begun, without the rows of existing blocks. */
static int64_t other_bytes_after(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    int64_t bytes = cache->memory.bookkeeping - cache->memory.replaced;
    bytes -= batch->scope == KVC_FIXED ? kvc_evictable_bytes(cache) : kvc_victim_bytes(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const kvc_demand *d = &pool->demand;
        bytes += d->new_bytes;
    }
    return bytes;
}

int64_t kvc_bytes_after(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = other_bytes_after(batch);
    for (int32_t g = 0; g < cache->num_groups; g++)
        bytes += cache->pools[g].counts.row_bytes + cache->pools[g].demand.more_bytes;
    return bytes;
}

/* Returns kvc_nbytes after the batch has begun, if all free memory is given back before. */
static int64_t least_bytes_after(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = other_bytes_after(batch);
    if (cache->sequences.reserved) bytes -= kvc_sequence_bytes(cache->sequences.reserved);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        bytes += pool->demand.least_bytes - pool->num_blocks * kvc_pool_header_bytes(pool);
    }
    return bytes;
}

/* Forgets demands and planned compactions, and drops spare lists of runs. */
static void forget_needs(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_forget_demands(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        if (cache->pools[g].compaction) kvc_compaction_drop(cache, g);
        for (kvc_sequence *sequence = cache->sequences.changed; sequence; sequence = sequence->listed.next_changed)
            kvc_runs_discard(&sequence->runs[g], &cache->memory);
    }
}

/* Which groups are compacted before a batch. */
enum {
    COMPACT_SCATTERED, /* groups in which more than a quarter of the slots handed out are waste, if a block is opened */
    COMPACT_NONE,      /* none */
    COMPACT_ALL,       /* all groups with scattered rows */
    COMPACT_AGAIN      /* the same, which are planned already: only the batch's number of tokens has changed */
};

/* Computes the demand of all groups, with the compactions of a choice from above, and gets memory for runs. */
static kvc_status find_needs(const kvc_batch *batch, int compacts) {
    const kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    if (compacts != COMPACT_AGAIN) forget_needs(batch);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        status = find_demand(batch, g, compacts >= COMPACT_ALL);
        if (compacts != COMPACT_SCATTERED) continue;
        const int is_scattered = (pool->counts.filled - pool->counts.live) * 4 > pool->counts.filled &&
                                 pool->demand.new_blocks && kvc_compaction_gain(cache, g) * 4 > pool->counts.filled;
        /* If there is no memory for a compaction, the batch takes more memory. */
        if (is_scattered || KVC_BUGGIFY()) find_demand(batch, g, 1);
    }
    for (kvc_sequence *s = cache->sequences.changed; status == KVC_OK && s; s = s->listed.next_changed)
        if (compacts != COMPACT_AGAIN || s->in_batch) status = prepare_lists(batch, s);
    return status;
}

/* Returns the most bytes that compactions may save in lists of runs.  They join runs: one is left for each block that
 * the rows fill.  A list has room for the runs before, too, so that only lists to which the batch adds runs may be
 * shorter.  The batch's tokens may go on in other places: they are two runs fewer at most. */
static int64_t most_lists_saved(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t num = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        for (int32_t s = 0; s < batch->num_sequences; s++) {
            const kvc_sequence *sequence = batch->sequences[s].sequence;
            const int64_t rows = kvc_count_staying(cache, sequence, g), size = cache->pools[g].block_size,
                          joined = sequence->runs[g].num - (rows + size - 1) / size;
            num += 2 + (joined > 0 ? joined : 0);
        }
    }
    return num * (int64_t)sizeof(kvc_run);
}

/* Whether compactions may bring `bytes` down to max_bytes, and are worth their time.  They look at every sequence, so
 * that while others can be evicted, they have to save a part of all bytes: then they come seldom. */
static int may_compact(const kvc_batch *batch, int64_t bytes) {
    enum { PART = 8 };
    const kvc_cache *cache = batch->cache;
    int64_t all = 0, least = 0;
    if (batch->scope == KVC_FIXED) return 1;
    kvc_add_fixed_bytes(batch, KVC_NOW, &all, &least);
    const int64_t saved = all - least + most_lists_saved(batch);
    if (bytes - saved > cache->limits.max_bytes) return 0;
    return cache->evicting.is_tight || !cache->evicting.evictable.num || saved >= all / PART;
}

/* Returns KVC_ERR_FULL, without a message, unless the batch fits into max_bytes with one of these choices, which are
 * tried in turn.  *bytes becomes the bytes that it would make the cache with the last one. */
static kvc_status fit_bytes(const kvc_batch *batch, int first, int last, int64_t *bytes) {
    const kvc_cache *cache = batch->cache;
    for (int compacts = first; compacts <= last; compacts++) {
        if (compacts > first && compacts == COMPACT_ALL && !may_compact(batch, *bytes)) break;
        const kvc_status status = find_needs(batch, compacts);
        if (status != KVC_OK || !cache->limits.max_bytes) return status;
        *bytes = kvc_bytes_after(batch);
        if (*bytes > cache->limits.max_bytes) *bytes = least_bytes_after(batch);
        if (*bytes <= cache->limits.max_bytes) return KVC_OK;
    }
    return KVC_ERR_FULL;
}

kvc_status kvc_fixed_begin(const kvc_batch *batch, kvc_scope scope, kvc_fixed *fixed) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    forget_needs(batch); /* a planned compaction counts what may be evicted */
    *fixed = (kvc_fixed){scope, scope == KVC_FIXED ? kvc_evictable_bytes(cache) : 0, most_lists_saved(batch)};
    for (kvc_sequence *s = cache->sequences.changed; status == KVC_OK && s; s = s->listed.next_changed)
        if (!s->in_batch) status = prepare_lists(batch, s);
    return status;
}

void kvc_fixed_bytes(const kvc_batch *batch, const kvc_fixed *fixed, int64_t *bytes, int64_t *least) {
    kvc_cache *cache = batch->cache;
    *bytes = -fixed->evictable_bytes;
    const int is_scattered = kvc_add_fixed_bytes(batch, fixed->scope, bytes, least);
    int64_t num_runs = 0; /* that lists of the batch's sequences have room for, less what they have now */
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_sequence *sequence = batch->sequences[s].sequence;
        for (int32_t g = 0; g < cache->num_groups; g++) {
            kvc_runs_discard(&sequence->runs[g], &cache->memory);
            num_runs += exact_runs(batch, &batch->sequences[s], sequence, g) - sequence->runs[g].capacity;
        }
    }
    int64_t others = cache->memory.bookkeeping - cache->memory.replaced + num_runs * (int64_t)sizeof(kvc_run);
    if (cache->sequences.reserved) others -= kvc_sequence_bytes(cache->sequences.reserved);
    for (int32_t g = 0; g < cache->num_groups; g++)
        others -= cache->pools[g].num_blocks * kvc_pool_header_bytes(&cache->pools[g]);
    *bytes += others;
    *least = is_scattered ? *least + others - fixed->lists_saved : *bytes;
}

kvc_status kvc_fit_compacted(kvc_batch *batch, int is_planned, int64_t *bytes) {
    batch->scope = KVC_FIXED;
    const int compacts = is_planned ? COMPACT_AGAIN : COMPACT_ALL;
    const kvc_status status = fit_bytes(batch, compacts, compacts, bytes);
    batch->scope = KVC_NOW;
    return status;
}

kvc_status kvc_fits_beside_fixed(kvc_batch *batch, int64_t *bytes) {
    batch->scope = KVC_FIXED;
    const kvc_status status = fit_bytes(batch, COMPACT_SCATTERED, COMPACT_ALL, bytes);
    batch->scope = KVC_NOW;
    forget_needs(batch);
    return status;
}

/* Returns KVC_ERR_FULL if the batch does not fit even once everything evictable is evicted.  *bytes becomes the fewest
 * bytes that the cache would have then.  Only where compactions or exact lists decide, finds out what they save. */
static kvc_status check_fixed(kvc_batch *batch, int64_t *bytes) {
    kvc_cache *cache = batch->cache;
    kvc_fixed fixed;
    int64_t all = (int64_t)cache->size;
    if (!cache->limits.max_bytes) return KVC_OK;
    KVC_TRY(kvc_fixed_begin(batch, KVC_FIXED, &fixed));
    kvc_add_fixed_bytes(batch, KVC_FIXED, &all, bytes);
    if (*bytes > cache->limits.max_bytes) return KVC_ERR_FULL;
    kvc_fixed_bytes(batch, &fixed, &all, bytes);
    if (all <= cache->limits.max_bytes) return KVC_OK;
    forget_needs(batch);
    KVC_TRY(kvc_tighten(cache));
    const kvc_status status = kvc_fits_beside_fixed(batch, bytes);
    kvc_let_victims_stay(cache);
    return status;
}

/* Checks capacity and max_bytes. */
static kvc_status fits(const kvc_need *need) {
    kvc_batch *batch = need->context;
    kvc_cache *cache = batch->cache;
    int64_t bytes = 0;
    for (int32_t g = 0; cache->limits.capacity && g < cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) KVC_TRY(check_capacity(need, g));
    const kvc_status status = need->scope == KVC_FIXED ? check_fixed(batch, &bytes)
                                                       : fit_bytes(batch, COMPACT_SCATTERED, COMPACT_ALL, &bytes);
    if (status != KVC_ERR_FULL) return status;
    cache->evicting.lacks_bytes = 1;
    return kvc_fail(
        KVC_ERR_FULL,
        "%d more token%s would make it %lld bytes: max_bytes is %lld, and nothing that is scattered or free "
        "is left to be given back%s; clear a sequence, or give a larger max_bytes",
        batch->num_tokens, batch->num_tokens == 1 ? "" : "s", (long long)bytes, (long long)cache->limits.max_bytes,
        cache->waiting.num_holds ? ", except what views of the rows keep in place" : "");
}

kvc_need kvc_need_of(kvc_batch *batch) {
    return (kvc_need){
        .cache = batch->cache, .fits = fits, .visit_replaced = visit_replaced, .context = batch, .expires = 1};
}

kvc_status kvc_fit(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const kvc_need need = kvc_need_of(batch);
    const int64_t holding = cache->limits.max_sequences ? kvc_count_holding(batch) : 0;
    kvc_set_min_query_positions(cache);
    if (holding > cache->limits.max_sequences)
        return kvc_fail(KVC_ERR_FULL, "the batch makes %lld sequences: max_sequences is %lld; clear one, or allow more",
                        (long long)holding, (long long)cache->limits.max_sequences);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) KVC_TRY(check_seq_len(batch, g));
    return kvc_choose_victims(&need);
}

/* ---- prepare (may fail) and carry out (cannot) ------------------------------------------------------------------- */

kvc_status kvc_prepare(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    KVC_TRY(kvc_fit(batch));
    kvc_status status = KVC_OK;
    int32_t g = 0;
    for (; status == KVC_OK && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const int64_t more = pool->demand.new_blocks;
        if (more > INT32_MAX - pool->num_blocks)
            status = kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)more);
        else if (more)
            status = kvc_pool_reserve(pool, pool->free.num + (int32_t)more, &pool->free.reserved);
    }
    if (status != KVC_OK)
        for (g -= 2; g >= 0; g--)
            kvc_pool_unreserve(&cache->pools[g], cache->pools[g].free.num, &cache->pools[g].free.reserved);
    return status == KVC_ERR_NOMEM ? kvc_choose_for_free_blocks(kvc_need_of(batch)) : status;
}

void kvc_discard_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_let_victims_stay(cache);
    forget_needs(batch);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_sequence *sequence = batch->sequences[s].sequence;
        sequence->in_batch = 0;
        if (sequence == batch->reserved)
            kvc_cache_set_aside(cache, sequence);
        else
            kvc_cache_drop_blank(cache, sequence);
    }
    if (batch->is_fresh)
        kvc_memory_free(&cache->memory, batch, batch->size, KVC_MEMORY_SCRATCH, -1);
    else
        kvc_scratch_give(cache, batch, batch->size);
}

void kvc_apply_prepared(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_expire(cache, g);
    kvc_evict(cache);
    for (int32_t g = 0; g < cache->num_groups; g++)
        if (cache->pools[g].compaction) kvc_compaction_run(cache, g);
    while (cache->sequences.changed) {
        kvc_sequence *sequence = cache->sequences.changed;
        kvc_cache_mark_changed(cache, sequence);
        kvc_cache_unmark_changed(sequence);
    }
}
