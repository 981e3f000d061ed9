/* reserve.c: kvc_reserve and kvc_room: take memory for tokens to come, and say how many tokens fit.
 *
 * Both ask by a probe: a batch that is prepared but never opened.  A stretch is tokens of a sequence at consecutive
 * positions: the more stretches, the more runs its lists need.  A slot is faulted once its memory counts as resident.
 *
 * An example.  A cache has a capacity of 100 rows and a max_seq_len of 64.  60 rows are live, 20 of them evictable, and
 * the sequence has 30 tokens.  The capacity leaves room for 100 - 40 = 60 tokens, and max_seq_len for 64 - 30 = 34.  So
 * the room is 34, unless there is max_bytes: then the largest number up to 34 is searched that max_bytes allows. */
#include "cache/check.h"
#include "cache/waiting.h"
#include "space/expire.h"
#include "space/limits.h"
#include "pass/placing.h"
#include "pass/prepare.h"
#include "space/resident.h"

/* Stretches added to what is reserved: tokens that come in several batches need a little more room in lists. */
enum { MORE_STRETCHES = 4, MOST_STRETCHES = 1 << 28 };

/* Sets the number of tokens of a probe, all of one sequence, at consecutive positions. */
static void set_probe(kvc_batch *batch, int32_t num_tokens) {
    const kvc_cache *cache = batch->cache;
    const int64_t next = kvc_sequence_next(batch->sequences->sequence);
    batch->num_tokens = batch->sequences->num_tokens = num_tokens;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int64_t stride = cache->pools[g].stride;
        kvc_pending_of(batch, g, 0)->num_tokens = (int32_t)((next + num_tokens) / stride - next / stride);
    }
}

/* Returns the most tokens behind position `next` that have at most num_rows rows. */
static int64_t most_tokens(int64_t num_rows, int64_t next, int64_t stride) {
    if (stride == 1 || num_rows > INT32_MAX) return num_rows;
    return (next / stride + num_rows) * stride + stride - 1 - next;
}

/* Returns KVC_ERR_INVALID or KVC_ERR_GONE where a batch of the sequence's next token would be refused so. */
static kvc_status check_next(const kvc_cache *cache, int64_t seq_id) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    KVC_TRY(kvc_check_not_kept(sequence));
    const int32_t next = sequence ? kvc_sequence_next(sequence) : 0;
    return sequence && kvc_cache_misses(cache, sequence, next) ? kvc_fail_gone(cache, sequence, next) : KVC_OK;
}

/* Makes a probe, to ask what num_tokens more tokens of a sequence would need.  Its arrays have only array_len elements,
 * as nothing is written to them. */
static kvc_status new_probe(kvc_cache *cache, int64_t seq_id, int32_t array_len, int32_t num_tokens, kvc_batch **out) {
    kvc_batch *batch = kvc_batch_new(cache, array_len, /* no tree */ NULL);
    if (!batch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a batch of %d tokens", array_len);
    if (kvc_batch_add_sequence(batch, seq_id, /* it is stored */ 0) < 0) {
        kvc_discard_batch(batch);
        return kvc_fail_sequence(seq_id);
    }
    set_probe(batch, num_tokens);
    batch->sequences->num_stretches = 1;
    batch->sequences->sequence->min_query_position =
        kvc_min_query_position(batch->sequences->sequence); /* where the first token stands */
    *out = batch;
    return KVC_OK;
}

/* Makes a probe ask what its tokens need in several batches: more stretches, too.  A window's list needs room for twice
 * its runs then: as it slides through its array, runs are moved to the front once as many have expired. */
static void set_several(kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t num = 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const int64_t most = kvc_policy_most_rows(&cache->policies[g]), size = cache->pools[g].block_size;
        const int64_t stored = most < batch->num_tokens ? most : batch->num_tokens;
        const int64_t runs = batch->sequences->sequence->runs[g].num + 2 * (stored / size + 3);
        if (kvc_policy_expires(&cache->policies[g]) && 2 * runs > num) num = 2 * runs; /* a stretch is half a run */
    }
    num += 1 + MORE_STRETCHES;
    batch->sequences->num_stretches = num < MOST_STRETCHES ? (int32_t)num : MOST_STRETCHES;
    batch->in_several = 1;
}

/* Checks that num_tokens fit, with a probe of one element, before arrays for up to KVC_MAX_BATCH are allocated. */
static kvc_status check_fits(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    kvc_batch *batch = NULL;
    KVC_TRY(kvc_check_num_tokens(cache, num_tokens));
    KVC_TRY(new_probe(cache, seq_id, 1, (int32_t)num_tokens, &batch));
    set_several(batch);
    const int32_t next = kvc_sequence_next(batch->sequences->sequence);
    kvc_status status;
    if (num_tokens <= INT32_MAX - next)
        status = kvc_fit(batch);
    else
        status = kvc_fail(KVC_ERR_INVALID, "%lld tokens would pass the last position, %d: sequence %lld goes on at %d",
                          (long long)num_tokens, INT32_MAX - 1, (long long)seq_id, next);
    kvc_discard_batch(batch);
    return status;
}

/* Returns the next used block with room, except `last`.  NULL: none has room, or the tokens stay with their sequence.
 */
static kvc_block *next_open(const kvc_batch *batch, int32_t g, const kvc_block *last, kvc_block **open) {
    while (batch->goes_anywhere && kvc_next_open(&batch->cache->pools[g], open)) {
        kvc_block *block = *open;
        *open = block->listed.later;
        if (block != last) return block;
    }
    return NULL;
}

/* Marks the slots that the probe's tokens would get in group g as faulted.  They lie in the sequence's last block, then
 * in others with room if the tokens go anywhere, and then in free blocks. */
static void fault_slots(const kvc_batch *batch, int32_t g) {
    kvc_pool *pool = &batch->cache->pools[g];
    const kvc_pending *pending = kvc_pending_of(batch, g, 0);
    int32_t rest = pending->num_tokens;
    kvc_block *open = pool->first, *block = kvc_last_block(batch, g, 0);
    const kvc_block *last = block;
    for (kvc_block *next = pool->free.first; rest > 0;) {
        const int32_t fill = block ? block->fill : pool->block_size;
        const int32_t taken = rest < pool->block_size - fill ? rest : pool->block_size - fill;
        if (taken) kvc_pool_fault(pool, block, fill + taken);
        /* Tokens that come in several batches may leave the last block before it is full: kvc_slots_saved. */
        const int may_move = taken && block == last && batch->in_several && !batch->goes_anywhere;
        rest -= may_move ? kvc_slots_saved(batch, batch->sequences, g, block, taken) : taken;
        block = next_open(batch, g, last, &open);
        if (block) continue;
        block = next;
        if (next) next = next->listed.next_free;
    }
}

static kvc_status reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    kvc_batch *batch = NULL;
    kvc_status status = kvc_check_no_batch(cache, "reserve memory");
    if (status == KVC_OK) status = check_next(cache, seq_id);
    if (status == KVC_OK) status = check_fits(cache, seq_id, num_tokens);
    if (status == KVC_OK)
        status = new_probe(cache, seq_id, num_tokens < KVC_MAX_BATCH ? (int32_t)num_tokens : KVC_MAX_BATCH,
                           (int32_t)num_tokens, &batch);
    if (status != KVC_OK) return status;
    set_several(batch);
    status = kvc_prepare(batch);
    if (status != KVC_OK) {
        kvc_discard_batch(batch);
        return status;
    }
    kvc_apply_prepared(batch);
    kvc_sequence *sequence = batch->sequences->sequence;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        cache->pools[g].free.reserved = 0; /* new blocks stay, as nothing undoes this call */
        fault_slots(batch, g);
        cache->pools[g].free.num_idle = 0; /* no free block goes back as surplus: the tokens will take them */
    }
    sequence->in_batch = 0;
    if (kvc_sequence_is_blank(sequence) && !sequence->follower) kvc_cache_set_aside(cache, sequence);
    kvc_scratch_give(cache, batch, batch->size);
    return KVC_OK;
}

kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    if (num_tokens < 1)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %lld: it must be at least 1", (long long)num_tokens);
    kvc_lock(cache);
    kvc_status status;
    do {
        kvc_wait_for_writers(cache, 1, &seq_id);
        status = reserve(cache, seq_id, num_tokens);
    } while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status == KVC_OK) kvc_take_pages(cache);
    return kvc_unlock(cache, status);
}

/* Counts the tokens that the limits other than max_bytes leave room for. */
static int64_t count_room(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const kvc_batch_sequence *member = batch->sequences;
    const kvc_need need = kvc_need_of(batch);
    const int32_t next = kvc_sequence_next(member->sequence);
    int64_t room = INT32_MAX - next;
    if (room > KVC_MAX_BATCH) room = KVC_MAX_BATCH;
    if (cache->limits.max_sequences && kvc_count_holding(batch) > cache->limits.max_sequences) return 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        if (cache->limits.capacity) {
            const int64_t rows = cache->limits.capacity - kvc_live_after(&need, g, KVC_FIXED),
                          in_group = most_tokens(rows, next, pool->stride);
            if (in_group < room && rows < kvc_most_counted(batch, member, g)) room = in_group;
        }
        const int64_t in_sequence = most_tokens(kvc_room_in_sequence(batch, member, g), next, pool->stride);
        if (in_sequence < room) room = in_sequence;
    }
    return room > 0 ? room : 0; /* sharing may have made the sequence longer than max_seq_len */
}

/* Returns the largest number of tokens that max_bytes leaves room for, at most `most`: what counts grows with them. */
static int64_t find_room_in_bytes(kvc_batch *batch, int64_t most) {
    int64_t room = 0;
    for (int64_t tried = most; room < most; tried = most - (most - room) / 2) {
        set_probe(batch, (int32_t)tried);
        if (kvc_fits_in_bytes(batch))
            room = tried;
        else
            most = tried - 1;
    }
    return room;
}

/* Finds a number of tokens that fit, where one more does not. */
static kvc_status find_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens) {
    kvc_batch *batch = NULL;
    kvc_status status = kvc_check_no_batch(cache, "count the room");
    if (status == KVC_OK) status = check_next(cache, seq_id);
    if (status == KVC_ERR_GONE) {
        *num_tokens = 0;
        return KVC_OK;
    }
    if (status == KVC_OK) status = new_probe(cache, seq_id, 1, 1, &batch);
    if (status != KVC_OK) return status;
    kvc_set_min_query_positions(cache);
    *num_tokens = find_room_in_bytes(batch, count_room(batch));
    kvc_discard_batch(batch);
    return KVC_OK;
}

kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens) {
    if (!num_tokens) return kvc_fail(KVC_ERR_INVALID, "num_tokens is NULL");
    kvc_lock(cache);
    do kvc_wait_for_writers(cache, 1, &seq_id);
    while ((cache->limits.capacity || cache->limits.max_bytes) && kvc_cache_wait_copies(cache)); /* readers pin rows */
    return kvc_unlock(cache, find_room(cache, seq_id, num_tokens));
}
