/* prepare.c: makes sure that a batch fits before anything is changed, and then makes room for it.  Room is made in
 * three ways: rows expire, kept sequences are evicted (the victims), and compactions move the rows of a group together.
 * All are planned first.  For a packed batch, all rows are moved together.  Then its tokens go anywhere, to any used
 * block with room, unless max_bytes leaves room for blocks of each sequence's own.  A batch only grows a sequence if
 * its tokens stand behind all rows.  A stretch is tokens of a sequence at consecutive positions. */
#include "pass/prepare.h"

#include "base/compiler.h"
#include "pass/placing.h"
#include "space/compact.h"
#include "space/expire.h"
#include "space/limits.h"
#include "cache/waiting.h"

void kvc_wait_for_writers(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    int waited; /* whether this call released the mutex, and so has to look at all again */
    do {
        waited = 0;
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
            cache->pools[g].stride == 1 && /* with a stride, tokens may have no rows */
            (cache->limits.has_own_capacity || kvc_policy_most_rows(&cache->policies[g]) > cache->limits.max_seq_len);
    if (any && cache->limits.has_own_capacity)
        return kvc_fail(KVC_ERR_FULL,
                        "%lld tokens do not fit: capacity is %lld, so that at most %lld fit at once; feed fewer at a "
                        "time, or give a larger capacity",
                        (long long)num_tokens, (long long)cache->limits.capacity, (long long)cache->limits.capacity);
    if (any)
        return kvc_fail(KVC_ERR_FULL,
                        "%lld tokens do not fit: max_seq_len is %lld and max_sequences %lld, so that at most %lld fit "
                        "at once; feed fewer at a time, or give a larger max_seq_len",
                        (long long)num_tokens, (long long)cache->limits.max_seq_len,
                        (long long)cache->limits.max_sequences, (long long)cache->limits.capacity);
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

/* Checks that group g's rows do not exceed the capacity; called only if the cache has one. */
static kvc_status check_slots(const kvc_need *need, int32_t g) {
    const kvc_batch *batch = need->context;
    if (!kvc_takes_rows(batch, g)) return KVC_OK;
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

/* ---- memory that the batch needs --------------------------------------------------------------------------------- */

enum { TOO_MANY_RUNS = INT32_MAX / 2 + 1 }; /* more than a list may have: kvc_runs_prepare fails */

/* The sequence's slots are a stretch for each stretch of consecutive positions, and one more for each further block
 * that it goes on in, and behind the sinks.  If its tokens go anywhere, the further blocks are the held ones and one
 * more.  If a commit keeps some of n slots of a stretch, they are at most (n + 1) / 2 runs.  The commit adds a row for
 * each token or, if the sequence only grows, no more than the policy keeps. */
int32_t kvc_most_runs(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t num) {
    const kvc_pending *pending = kvc_pending_of(batch, g, (int32_t)(member - batch->sequences));
    if (member->is_unstored || pending->to == KVC_TO_NOWHERE) return num;
    if (pending->to == KVC_TO_CROSS) return 1;
    const int64_t limit = kvc_policy_most_rows(&batch->cache->policies[g]),
                  n = limit < pending->num_tokens && grows(batch, member) ? limit : pending->num_tokens;
    const kvc_pool *pool = &batch->cache->pools[g];
    const int64_t held = batch->goes_anywhere ? batch->most_held + 1 : 0,
                  further = n / pool->block_size + 3 + (held < n ? held : n);
    int64_t most = num + (n + member->num_stretches + further) / 2;
    if (kvc_policy_expires(&batch->cache->policies[g]))
        most += kvc_most_cuts(batch->cache, member->sequence, g, member->num_stretches);
    return most < TOO_MANY_RUNS ? (int32_t)most : TOO_MANY_RUNS;
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
        if (cache->pools[g].compaction) {
            status = kvc_runs_prepare_edit(list, &cache->memory, more + 2); /* 2: for cuts where rows expire */
        } else if (kvc_policy_expires(&cache->policies[g])) {
            const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
            status = kvc_runs_prepare_expire(list, &cache->memory, gone.begin, gone.end, more);
        } else if (more) {
            status = kvc_runs_prepare(list, &cache->memory, more);
        }
    }
    return status;
}

static void forget_demands(kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_groups; g++) cache->pools[g].demand = (kvc_demand){0};
}

/* Drops planned compactions and spare lists of runs. */
static void forget_plans(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        if (cache->pools[g].compaction) kvc_compaction_drop(cache, g);
        for (kvc_sequence *sequence = cache->sequences.changed; sequence; sequence = sequence->listed.next_changed)
            kvc_runs_discard(&sequence->runs[g], &cache->memory);
    }
}

/* Plans to move the rows of a group together, unless nothing is to be gained. */
static kvc_status plan_compaction(kvc_cache *cache, int32_t g) {
    kvc_preview preview = kvc_preview_open(cache, g, KVC_NOW, /* expires */ 1);
    const kvc_tally tally = kvc_preview_tally(&preview);
    const kvc_status status = kvc_compaction_plan(cache, g, &tally);
    kvc_preview_close(&preview);
    return status;
}

/* Plans to move the rows of all groups together for a batch that does not fit otherwise.  Each sequence then goes on
 * apart from others if that fits, and the batch may take new blocks for it. */
static kvc_status plan_packing(kvc_batch *batch, int may_take) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g < cache->num_groups; g++) KVC_TRY(plan_compaction(cache, g));
    batch->goes_anywhere = 0;
    if (may_take && kvc_count_batch(batch, KVC_NOW) <= cache->limits.budget) return KVC_OK;
    batch->goes_anywhere = 1;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int32_t held = (int32_t)cache->pools[g].tallies[KVC_NOW].held.blocks;
        if (batch->most_held < held) batch->most_held = held;
    }
    kvc_count_batch(batch, KVC_NOW);
    return KVC_OK;
}

/* Plans to move the rows of a group together if more than a quarter of the slots handed out are waste: without
 * max_bytes, where a new block would be taken. */
static void plan_for_scattered(kvc_batch *batch, int32_t g) {
    kvc_cache *cache = batch->cache;
    kvc_pool *pool = &cache->pools[g];
    const int64_t num_new = pool->demand.num_new;
    const int is_scattered = (pool->counts.filled - pool->counts.live) * 4 > pool->counts.filled &&
                             kvc_compaction_gain(cache, g) * 4 > pool->counts.filled;
    if (!is_scattered && !KVC_BUGGIFY()) return;
    plan_compaction(cache, g); /* if there is no memory for it, the batch takes more memory */
    if (!pool->compaction) return;
    kvc_count_group(batch, g, KVC_NOW); /* sets the demand */
    if (pool->demand.num_new <= num_new) return;
    kvc_compaction_drop(cache, g); /* it would take more new blocks than without */
    kvc_count_group(batch, g, KVC_NOW);
}

/* Plans which rows are moved together, and gets memory for that, and for runs.  may_take: the batch may take new blocks
 * beyond its demand. */
static kvc_status plan(kvc_batch *batch, int may_take) {
    kvc_cache *cache = batch->cache;
    kvc_status status = batch->is_packed ? plan_packing(batch, may_take) : KVC_OK;
    for (int32_t g = 0; !cache->limits.max_bytes && g < cache->num_groups; g++)
        if (cache->pools[g].demand.num_new || KVC_BUGGIFY()) plan_for_scattered(batch, g);
    for (kvc_sequence *s = cache->sequences.changed; status == KVC_OK && s; s = s->listed.next_changed)
        status = prepare_lists(batch, s);
    return status;
}

static int64_t count_bytes(const kvc_need *need) { return kvc_count_batch(need->context, need->scope); }

kvc_need kvc_need_of(kvc_batch *batch) {
    return (kvc_need){.cache = batch->cache,
                      .check_slots = batch->cache->limits.capacity ? check_slots : NULL,
                      .count_bytes = count_bytes,
                      .visit_replaced = visit_replaced,
                      .context = batch,
                      .num_tokens = batch->num_tokens,
                      .expires = 1};
}

/* Makes a batch ask what it needs as its sequences lie, or once rows are moved together. */
static void set_packed(kvc_batch *batch, int is_packed) { batch->is_packed = batch->goes_anywhere = is_packed; }

/* Returns whether a batch that does not fit as rows lie fits once they are moved together, and that saves an eighth of
 * what max_bytes leaves.  Then no kept blocks need to be evicted.  Moving visits every sequence, so it has to be
 * seldom.
 */
static int is_worth_packing(kvc_batch *batch) {
    enum { PART = 8 };
    const int64_t budget = batch->cache->limits.budget, bytes = kvc_count_batch(batch, KVC_NOW);
    set_packed(batch, 1);
    const int64_t packed = kvc_count_batch(batch, KVC_NOW);
    return packed <= budget && bytes - packed >= budget / PART;
}

/* Room is made within max_bytes in this order.  Rows expire.  They are moved together if that is worth it.  Otherwise
 * as few kept blocks are evicted as do as rows lie, the least recently used first.  If these do not suffice, rows are
 * moved together, and as few are evicted as do then. */
static kvc_status choose_in_bytes(kvc_batch *batch) {
    const kvc_need need = kvc_need_of(batch);
    set_packed(batch, 0);
    kvc_status status = kvc_fits(&need);
    if (status != KVC_ERR_FULL) return status;
    for (int is_packed = is_worth_packing(batch); status == KVC_ERR_FULL && is_packed <= 1; is_packed++) {
        set_packed(batch, is_packed);
        status = kvc_choose_victims(&need);
    }
    return status;
}

kvc_status kvc_fit(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const int64_t holding = cache->limits.max_sequences ? kvc_count_holding(batch) : 0;
    kvc_set_min_query_positions(cache);
    if (holding > cache->limits.max_sequences)
        return kvc_fail(KVC_ERR_FULL, "the batch makes %lld sequences: max_sequences is %lld; clear one, or allow more",
                        (long long)holding, (long long)cache->limits.max_sequences);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) KVC_TRY(check_seq_len(batch, g));
    if (cache->limits.max_bytes) return choose_in_bytes(batch);
    const kvc_need need = kvc_need_of(batch);
    return kvc_choose_victims(&need);
}

int kvc_fits_in_bytes(kvc_batch *batch) {
    set_packed(batch, 1);
    return kvc_count_batch(batch, KVC_FIXED) <= batch->cache->limits.budget;
}

/* ---- prepare (may fail) and carry out (cannot) ------------------------------------------------------------------- */

/* Takes the memory of the blocks that the batch will open. */
static kvc_status reserve_blocks(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    int32_t g = 0;
    for (; status == KVC_OK && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const int64_t more = pool->demand.num_new;
        if (more > INT32_MAX - pool->num_blocks)
            status = kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)more);
        else if (more)
            status = kvc_pool_reserve(pool, pool->free.num + (int32_t)more, &pool->free.reserved);
    }
    if (status == KVC_OK) return KVC_OK;
    for (g -= 2; g >= 0; g--) /* group g - 1 failed, and has undone its own */
        kvc_pool_unreserve(&cache->pools[g], cache->pools[g].free.num, &cache->pools[g].free.reserved);
    return status;
}

kvc_status kvc_prepare(kvc_batch *batch) {
    KVC_TRY(kvc_fit(batch));
    KVC_TRY(plan(batch, /* may_take */ 1));
    kvc_status status = reserve_blocks(batch);
    if (status != KVC_ERR_NOMEM) return status;
    /* There is no memory for new blocks: lets kept sequences go until the free blocks suffice, and plans anew. */
    forget_plans(batch);
    set_packed(batch, batch->is_packed);
    KVC_TRY(kvc_choose_for_free_blocks(kvc_need_of(batch)));
    return plan(batch, /* may_take */ 0);
}

void kvc_discard_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_let_victims_stay(cache);
    forget_demands(cache);
    forget_plans(batch);
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
    while (cache->sequences.changed) { /* counts those that hold rows anew, and empties the list */
        kvc_sequence *sequence = cache->sequences.changed;
        kvc_cache_mark_changed(cache, sequence);
        kvc_cache_unmark_changed(sequence);
    }
    if (cache->limits.max_bytes) kvc_give_back_beyond(cache);
    forget_demands(cache);
}
