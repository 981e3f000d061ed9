/* prepare.c: makes sure that a batch fits: see prepare.h. */
#include "pass/prepare.h"

#include "base/compiler.h"
#include "space/compact.h"
#include "pass/demand.h"
#include "space/expire.h"
#include "space/limits.h"
#include "cache/scratch.h"
#include "space/row_buffer.h"
#include "cache/waiting.h"

/* Waits for one of the calls that kvc_wait_for_writers waits for; returns whether there was one. */
static int wait_once(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    if (cache->max_bytes) kvc_cache_find_all(cache);
    if (cache->max_bytes && kvc_cache_wait_pages(cache)) return 1;
    for (int32_t t = 0; cache->num_in_place && t < num_tokens; t++) {
        const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[t] : 0);
        if (sequence && sequence->in_place) return kvc_cache_find(cache, sequence->id), 1;
    }
    return 0;
}

void kvc_wait_for_writers(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    while (wait_once(cache, num_tokens, seq_ids)) continue;
}

/* ---- limits other than max_bytes --------------------------------------------------------------------------------- */

/* Returns whether a layer of group g may hold no more rows of a sequence than max_seq_len, by its policy alone. */
static int stays_within(const kvc_cache *cache, int32_t g) {
    return kvc_policy_most_rows(&cache->policies[g]) <= cache->max_seq_len;
}

kvc_status kvc_check_num_tokens(const kvc_cache *cache, int64_t num_tokens) {
    int any = 0; /* groups in which each token counts */
    for (int32_t g = 0; g < cache->num_token_groups; g++) any |= kvc_has_own_capacity(cache) || !stays_within(cache, g);
    if (any && cache->capacity && num_tokens > cache->capacity)
        return kvc_fail(KVC_ERR_FULL, "%lld tokens do not fit: capacity is %lld, so that at most %lld fit at once",
                        (long long)num_tokens, (long long)cache->capacity, (long long)cache->capacity);
    if (num_tokens < INT32_MAX) return KVC_OK;
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld tokens", (long long)num_tokens);
}

int64_t kvc_count_holding(const kvc_batch *batch) {
    int64_t num = batch->cache->num_holding;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        num += !member->sequence->holds && !member->is_buffered;
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

/* Returns whether the batch only adds tokens behind those of a sequence: a commit then leaves no more rows of these
 * tokens than the policy keeps. */
static int grows(const kvc_batch *batch, const kvc_batch_sequence *member) {
    const kvc_sequence *sequence = member->sequence;
    return !batch->replaced && !member->goes_back && kvc_min_query_position(sequence) == kvc_sequence_next(sequence);
}

int64_t kvc_room_in_sequence(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (!cache->max_seq_len || (stays_within(cache, g) && grows(batch, member) && rises(&member->sequence->runs[g])))
        return INT64_MAX;
    return cache->max_seq_len - (batch->replaced ? 0 : kvc_count_kept(cache, member->sequence, g));
}

int64_t kvc_most_counted(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (kvc_has_own_capacity(cache) || kvc_room_in_sequence(batch, member, g) < INT64_MAX) return INT64_MAX;
    return cache->max_seq_len - kvc_count_kept(cache, member->sequence, g);
}

/* Returns KVC_ERR_FULL if a sequence would hold more rows of group g than max_seq_len once the batch is committed. */
static kvc_status check_seq_len(const kvc_batch *batch, int32_t g) {
    const kvc_cache *cache = batch->cache;
    for (int32_t s = 0; cache->max_seq_len && s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        const int64_t room = kvc_room_in_sequence(batch, member, g);
        if (member->num_tokens <= room) continue;
        if (batch->replaced)
            return kvc_fail(KVC_ERR_FULL, "%d tokens of sequence %lld do not fit: max_seq_len is %lld",
                            member->num_tokens, (long long)member->sequence->id, (long long)cache->max_seq_len);
        return kvc_fail(KVC_ERR_FULL,
                        "%d more tokens do not fit: sequence %lld holds %lld of max_seq_len %lld, %lld fit at once; "
                        "%s, or give a larger max_seq_len",
                        member->num_tokens, (long long)member->sequence->id, (long long)(cache->max_seq_len - room),
                        (long long)cache->max_seq_len, (long long)(room > 0 ? room : 0),
                        kvc_policy_expires(&cache->policies[g]) ? "feed so many at a time" : "remove some");
    }
    return KVC_OK;
}

/* Visits the rows that the batch takes the place of in group g, but for those that have expired before. */
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

/* Returns KVC_ERR_FULL if more slots of group g than the capacity would be live. */
static kvc_status check_capacity(const kvc_need *need, int32_t g) {
    const kvc_batch *batch = need->context;
    const int64_t capacity = need->cache->capacity;
    int64_t live, num_slots = 0;
    for (int32_t s = 0; capacity && s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        if (kvc_pending_of(batch, g, s)->to < KVC_TO_REPLACE) continue;
        const int64_t most = kvc_most_counted(batch, member, g);
        num_slots += member->num_tokens < most ? member->num_tokens : most;
    }
    if (!kvc_exceeds_capacity(need, g, num_slots, &live)) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL,
                    "%lld more tokens do not fit: %lld of capacity %lld are in use, %lld fit at once; remove some, "
                    "clear a sequence, or give a larger capacity",
                    (long long)num_slots, (long long)live, (long long)capacity, (long long)(capacity - live));
}

/* ---- memory that the batch needs --------------------------------------------------------------------------------- */

/* Plans to compact group g first if the batch would open a block there while more than a quarter of the slots handed
 * out are waste.  If there is no memory for a compaction, does without: then the batch takes more memory. */
static void compact_if_scattered(const kvc_batch *batch, int32_t g) {
    const kvc_pool *pool = &batch->cache->pools[g];
    const int is_scattered = (pool->filled - pool->live) * 4 > pool->filled && pool->demand.new_blocks &&
                             kvc_compaction_gain(batch->cache, g) * 4 > pool->filled;
    if (is_scattered || KVC_BUGGIFY()) kvc_find_demand(batch, g, 1);
}

enum { TOO_MANY_RUNS = INT32_MAX / 2 + 1 }; /* more than a list may have: kvc_runs_prepare fails */

/* The sequence's slots are a stretch for each stretch of consecutive positions, and one more for each further block
 * that it goes on in, and behind the sinks; of a stretch of n slots, the kept ones are at most (n + 1) / 2 runs. */
int32_t kvc_most_runs(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_destination to = kvc_pending_of(batch, g, (int32_t)(member - batch->sequences))->to;
    if (member->is_unstored || to == KVC_TO_NOWHERE) return 0;
    if (to == KVC_TO_CROSS) return 1;
    /* The commit adds a row for each token; or no more than the policy keeps, where the sequence only grows. */
    const int64_t kept = kvc_policy_most_rows(&batch->cache->policies[g]);
    const int64_t n = kept < member->num_tokens && grows(batch, member) ? kept : member->num_tokens;
    const int64_t runs = (n + member->num_stretches + n / batch->cache->pools[g].block_size + 3) / 2;
    return runs < TOO_MANY_RUNS ? (int32_t)runs : TOO_MANY_RUNS;
}

/* Gets memory in lists for the runs that each sequence may get, and that expiries may split. */
static kvc_status prepare_runs(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; g < cache->num_groups; g++)
        for (kvc_sequence *sequence = cache->changed; status == KVC_OK && sequence; sequence = sequence->next_changed) {
            kvc_run_list *list = &sequence->runs[g];
            const kvc_batch_sequence *member = sequence->in_batch ? &batch->sequences[sequence->in_batch - 1] : NULL;
            int32_t more = member ? kvc_most_runs(batch, member, g) : 0;
            if (more) more += kvc_most_cuts(cache, sequence, g, member->num_stretches);
            const kvc_interval gone = kvc_policy_expired(&cache->policies[g], sequence->min_query_position);
            if (cache->pools[g].compaction)
                status = kvc_runs_prepare_edit(list, &cache->memory, more + 2);
            else if (more || kvc_policy_expires(&cache->policies[g]))
                status = kvc_runs_prepare_expire(list, &cache->memory, gone.begin, gone.end, more);
        }
    return status;
}

/* Returns the bytes after the batch has begun, without the rows of existing blocks. */
static int64_t other_bytes_after(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = cache->memory.bookkeeping - cache->memory.replaced + cache->row_buffer_bytes;
    bytes -= kvc_victim_bytes(cache);
    if (batch->num_buffered)
        bytes += (int64_t)(kvc_row_buffer_bytes(cache, batch->num_buffered) +
                           kvc_row_buffer_header_bytes(batch->num_buffered));
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const kvc_demand *d = &pool->demand;
        bytes += d->new_bytes;
        if (d->new_blocks <= INT32_MAX - pool->num_blocks) bytes += kvc_pool_list_bytes(pool, (int32_t)d->new_blocks);
    }
    return bytes;
}

int64_t kvc_bytes_after(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = other_bytes_after(batch);
    for (int32_t g = 0; g < cache->num_groups; g++)
        bytes += cache->pools[g].row_bytes + cache->pools[g].demand.more_bytes;
    return bytes;
}

/* Returns kvc_nbytes after the batch has begun, if all free memory is given back before. */
static int64_t least_bytes_after(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = other_bytes_after(batch);
    if (cache->spare) bytes -= kvc_sequence_bytes(cache->spare);
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
        kvc_compaction_drop(cache, g);
        for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed)
            kvc_runs_discard(&sequence->runs[g], &cache->memory);
    }
}

/* Which groups are compacted before a batch. */
enum {
    COMPACT_SCATTERED, /* groups where compact_if_scattered finds it worth its time */
    COMPACT_NONE,      /* none */
    COMPACT_ALL        /* all groups with scattered rows */
};

/* Computes the demand of all groups, with the compactions of a choice from above, and gets memory for runs. */
static kvc_status find_needs(const kvc_batch *batch, int compacts) {
    const kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    forget_needs(batch);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        status = kvc_find_demand(batch, g, compacts == COMPACT_ALL);
        if (compacts == COMPACT_SCATTERED) compact_if_scattered(batch, g);
    }
    return status == KVC_OK ? prepare_runs(batch) : status;
}

kvc_status kvc_fit_bytes(const kvc_batch *batch, int64_t *bytes) {
    const kvc_cache *cache = batch->cache;
    for (int compacts = COMPACT_SCATTERED; compacts <= COMPACT_ALL; compacts++) {
        const kvc_status status = find_needs(batch, compacts);
        if (status != KVC_OK || !cache->max_bytes) return status;
        *bytes = kvc_bytes_after(batch);
        if (*bytes > cache->max_bytes) *bytes = least_bytes_after(batch);
        if (*bytes <= cache->max_bytes) return KVC_OK;
    }
    return KVC_ERR_FULL;
}

static kvc_status check_bytes(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = 0;
    const kvc_status status = kvc_fit_bytes(batch, &bytes);
    if (status != KVC_ERR_FULL) return status;
    batch->cache->lacks_bytes = 1;
    return kvc_fail(KVC_ERR_FULL,
                    "%d more tokens would make it %lld bytes: max_bytes is %lld, and nothing that is scattered or free "
                    "is left to be given back%s",
                    batch->num_tokens, (long long)bytes, (long long)cache->max_bytes,
                    cache->num_holds ? ", but for what views of the rows keep from being moved" : "");
}

/* Checks capacity and max_bytes. */
static kvc_status fits(const kvc_need *need) {
    const kvc_batch *batch = need->context;
    for (int32_t g = 0; g < batch->cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) KVC_TRY(check_capacity(need, g));
    return check_bytes(batch);
}

kvc_need kvc_need_of(kvc_batch *batch) {
    return (kvc_need){
        .cache = batch->cache, .fits = fits, .visit_replaced = visit_replaced, .context = batch, .expires = 1};
}

kvc_status kvc_fit(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const kvc_need need = kvc_need_of(batch);
    const int64_t holding = cache->max_sequences ? kvc_count_holding(batch) : 0;
    kvc_set_min_query_positions(cache);
    if (holding > cache->max_sequences)
        return kvc_fail(KVC_ERR_FULL, "the batch makes %lld sequences: max_sequences is %lld; clear one, or allow more",
                        (long long)holding, (long long)cache->max_sequences);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) KVC_TRY(check_seq_len(batch, g));
    return kvc_choose_victims(&need);
}

/* ---- prepare (may fail) and carry out (cannot) ------------------------------------------------------------------- */

static kvc_status prepare_blocks(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    int32_t g = 0;
    for (; status == KVC_OK && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const int64_t more = pool->demand.new_blocks;
        status = more > INT32_MAX - pool->num_blocks
                     ? kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)more)
                     : kvc_pool_reserve(pool, more ? pool->num_free + (int32_t)more : 0, &pool->reserved);
    }
    if (status != KVC_OK)
        for (g -= 2; g >= 0; g--)
            kvc_pool_unreserve(&cache->pools[g], cache->pools[g].num_free, &cache->pools[g].reserved);
    return status;
}

kvc_status kvc_prepare(kvc_batch *batch) {
    KVC_TRY(kvc_fit(batch));
    if (batch->num_buffered) KVC_TRY(kvc_row_buffer_add(batch));
    return prepare_blocks(batch);
}

void kvc_discard_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_spare_victims(cache);
    forget_needs(batch);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_sequence *sequence = batch->sequences[s].sequence;
        sequence->in_batch = 0;
        if (sequence == batch->spare)
            kvc_cache_spare(cache, sequence);
        else
            kvc_cache_forget_blank(cache, sequence);
    }
    kvc_row_buffers_free(cache);
    kvc_table_undo(&cache->sequences, &batch->table_before, &cache->memory);
    if (batch->is_fresh)
        kvc_memory_free(&cache->memory, batch, batch->size, KVC_MEMORY_SCRATCH, -1);
    else
        kvc_scratch_give(cache, batch, batch->size);
}

void kvc_apply_prepared(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_table_keep(&cache->sequences, &batch->table_before, &cache->memory);
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_expire(cache, g);
    kvc_evict(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_compaction_run(cache, g);
    while (cache->changed) {
        kvc_sequence *sequence = cache->changed;
        kvc_cache_mark_changed(cache, sequence);
        kvc_cache_unmark_changed(sequence);
    }
}
