/* begin.c: kvc_begin and kvc_begin_with: give the tokens of a batch their sequences, positions and slots.  A member is
 * a sequence of the batch.  A stretch is tokens of a member at consecutive positions.  Tokens from position exact_to on
 * do not follow from those before them alone.  A batch that restores (args->replaced) replaces rows. */
#include <string.h>

#include "cache/check.h"
#include "space/limits.h"
#include "pass/placing.h"
#include "pass/prepare.h"
#include "pass/replace.h"
#include "cache/waiting.h"

/* ---- tokens and positions ---------------------------------------------------------------------------------------- */

/* Sets each token's sequence and position; if args->positions is NULL, the position after its sequence's last, which
 * must not miss rows. */
static kvc_status add_tokens(kvc_batch *batch, const kvc_begin_args *args) {
    const int32_t *positions = args->positions;
    const int64_t *seq_ids = args->seq_ids;
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        const int64_t id = seq_ids ? seq_ids[t] : 0;
        const int32_t is_unstored = args->unstored && args->unstored[t];
        const int repeats = t && id == (seq_ids ? seq_ids[t - 1] : 0);
        const int32_t s = repeats ? batch->sequence_of[t - 1] : kvc_batch_add_sequence(batch, id, is_unstored);
        if (s < 0) return kvc_fail_sequence(id);
        kvc_batch_sequence *member = &batch->sequences[s];
        KVC_TRY(kvc_check_not_kept(member->sequence));
        if (member->is_unstored != is_unstored)
            return kvc_fail(KVC_ERR_INVALID, "unstored[%d] is %d: for the tokens of sequence %lld before it, it is %d",
                            t, is_unstored, (long long)id, member->is_unstored);
        const int32_t next = member->num_tokens ? member->next : kvc_sequence_next(member->sequence);
        const int32_t position = positions ? positions[t] : next;
        if (position == INT32_MAX)
            return kvc_fail(KVC_ERR_INVALID,
                            "a batch of %d would pass the last position, %d: sequence %lld goes on at %d",
                            batch->num_tokens, INT32_MAX - 1, (long long)id, kvc_sequence_next(member->sequence));
        if (!positions && kvc_cache_misses(batch->cache, member->sequence, position))
            return kvc_fail_gone(batch->cache, member->sequence, position);
        batch->positions[t] = position;
        batch->sequence_of[t] = s;
        member->num_stretches += !member->num_tokens++ || position != member->next; /* its first token begins one */
        member->next = position + 1;
        member->goes_back |= position < next;
        if (position != next || args->replaced || (args->parents && args->parents[t] != member->last))
            member->exact_to = kvc_lower(member->exact_to, position);
        member->last = t;
        if (position < member->sequence->min_query_position) member->sequence->min_query_position = position;
    }
    return KVC_OK;
}

/* Lists the tokens of each sequence side by side, in the order in which they were given. */
static void sort_tokens(kvc_batch *batch) {
    int32_t next = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        batch->sequences[s].first = next;
        next += batch->sequences[s].num_tokens;
        batch->sequences[s].num_tokens = 0;
    }
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        kvc_batch_sequence *member = &batch->sequences[batch->sequence_of[t]];
        batch->order[member->first + member->num_tokens++] = t;
    }
}

/* Returns KVC_ERR_GONE if a token would see rows that have expired. */
static kvc_status check_not_expired(const kvc_cache *cache, int32_t num_tokens, const int32_t *positions,
                                    const int64_t *seq_ids) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[0] : 0);
    for (int32_t t = 0; t < num_tokens; t++) {
        if (seq_ids && t && seq_ids[t] != seq_ids[t - 1]) sequence = kvc_table_find(&cache->sequences, seq_ids[t]);
        if (sequence && kvc_cache_misses(cache, sequence, positions[t]))
            return kvc_fail_gone(cache, sequence, positions[t]);
    }
    return KVC_OK;
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks positions and parents. */
static kvc_status check_tokens(const kvc_begin_args *args) {
    const int32_t *positions = args->positions, *parents = args->parents;
    const int64_t *seq_ids = args->seq_ids;
    for (int32_t t = 0; t < args->num_tokens; t++) {
        if (positions && (positions[t] < 0 || positions[t] == INT32_MAX))
            return kvc_fail(KVC_ERR_INVALID, "positions[%d] is %d: it must be between 0 and %d", t, positions[t],
                            INT32_MAX - 1);
        if (!parents || parents[t] == -1) continue;
        if (parents[t] < -1 || parents[t] >= t)
            return kvc_fail(KVC_ERR_INVALID, "parents[%d] is %d: it must be an earlier token of the batch, or -1", t,
                            parents[t]);
        if (seq_ids && seq_ids[parents[t]] != seq_ids[t])
            return kvc_fail(KVC_ERR_INVALID, "parents[%d] is %d, a token of sequence %lld: it must be one of %lld", t,
                            parents[t], (long long)seq_ids[parents[t]], (long long)seq_ids[t]);
    }
    return KVC_OK;
}

static kvc_status begin(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **out) {
    if (!args->replaced) { /* for a batch that restores, rows of some groups alone count: kvc_prepare checks */
        if (args->positions) KVC_TRY(check_not_expired(cache, args->num_tokens, args->positions, args->seq_ids));
        KVC_TRY(kvc_check_num_tokens(cache, args->num_tokens));
    }
    kvc_batch *batch = kvc_batch_new(cache, args->num_tokens, args->parents);
    if (!batch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a batch of %d tokens", args->num_tokens);
    if (args->replaced) kvc_replace_mark(batch, args->replaced);
    kvc_status status = add_tokens(batch, args);
    if (status == KVC_OK) {
        sort_tokens(batch);
        if (args->replaced) kvc_replace_sort(batch);
        kvc_batch_list_rows(batch);
        status = kvc_prepare(batch);
    }
    if (status != KVC_OK) {
        kvc_discard_batch(batch);
        return status;
    }
    kvc_apply_prepared(batch);
    kvc_place_batch(batch);
    *out = cache->batch = batch;
    return KVC_OK;
}

/* Waits until earlier batches have ended; begins a batch, unless there is no room. */
static kvc_status begin_next(kvc_cache *cache, const kvc_begin_args *args, kvc_waiter *waiter, kvc_batch **out) {
    do {
        KVC_TRY(kvc_waiter_wait(cache, waiter));
        kvc_wait_for_writers(cache, args->num_tokens, args->seq_ids); /* keys may be rewritten when this returns */
    } while (!kvc_may_begin(cache, waiter));
    return begin(cache, args, out);
}

/* Begins a batch once earlier batches have ended, or fails after args->timeout_ms. */
static kvc_status begin_in_turn(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **out) {
    kvc_waiter waiter;
    kvc_status status = kvc_waiter_join(cache, &waiter, args->timeout_ms);
    if (status != KVC_OK) return status;
    do status = begin_next(cache, args, &waiter, out);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache)); /* what readers had pinned may now go */
    kvc_waiter_leave(cache, &waiter);
    return status;
}

kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *given, kvc_batch **out) {
    kvc_begin_args args;
    if (!out) return kvc_fail(KVC_ERR_INVALID, "batch is NULL");
    *out = NULL;
    KVC_TRY(KVC_READ(kvc_begin_args, &args, given, "args"));
    if (args.num_tokens < 1 || args.num_tokens > KVC_MAX_BATCH)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %d: a batch has from 1 to %d", args.num_tokens, KVC_MAX_BATCH);
    if (args.timeout_ms < -1)
        return kvc_fail(KVC_ERR_INVALID, "timeout_ms is %lld: it must be at least 0, or -1 for no limit",
                        (long long)args.timeout_ms);
    if (args.positions || args.parents) KVC_TRY(check_tokens(&args));
    if (args.replaced) KVC_TRY(kvc_replace_check(cache, &args));
    kvc_lock(cache);
    if (args.timeout_ms) return kvc_unlock(cache, begin_in_turn(cache, &args, out));
    kvc_status status;
    do {
        kvc_wait_for_writers(cache, args.num_tokens, args.seq_ids);
        status = kvc_may_begin(cache, /* waiter */ NULL) ? begin(cache, &args, out)
                                                         : kvc_fail_busy(cache, /* waiter */ NULL);
    } while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    return kvc_unlock(cache, status);
}

kvc_status kvc_begin(kvc_cache *cache, int32_t num_tokens, const int32_t *positions, const int64_t *seq_ids,
                     const int32_t *parents, kvc_batch **batch) {
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = num_tokens,
                                 .positions = positions,
                                 .seq_ids = seq_ids,
                                 .parents = parents};
    return kvc_begin_with(cache, &args, batch);
}

const int32_t *kvc_batch_positions(const kvc_batch *batch) { return batch->positions; }
