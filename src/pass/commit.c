/* commit.c: kvc_commit, kvc_commit_kept and kvc_abort: end a batch.
 *
 * A sequence's pending runs are the slots that it was given in a group for the batch.  Their destination (pending->to)
 * says what a commit does with them: appends them (KVC_TO_END), or replaces all that the sequence held there by them
 * (KVC_TO_REPLACE, and KVC_TO_CROSS in cross-attention layers).  An unstored sequence holds nothing after the commit.
 * Rows below position exact_to follow from the sequence's tokens alone.  Free blocks that windows or unstored sequences
 * leave count as idle (num_idle): kvc_return_surplus gives back those that are not needed. */
#include <string.h>

#include "space/expire.h"
#include "prefix/session.h"
#include "pass/put.h"
#include "space/resident.h"
#include "pass/replace.h"
#include "cache/waiting.h"

/* Frees the batch, takes its sequences out of it, and frees the blank ones.  The reserved sequence, whose lists may
 * have been reserved, becomes the reserved one again. */
static void close_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_sequence *sequence = batch->sequences[s].sequence;
        sequence->in_batch = 0;
        kvc_cache_mark_changed(cache, sequence);
        if (!kvc_sequence_is_blank(sequence) || sequence->follower) continue;
        if (sequence == batch->reserved)
            kvc_cache_set_aside(cache, sequence);
        else
            kvc_cache_drop(cache, sequence);
    }
    for (int32_t g = 0; g < cache->num_groups; g++) {
        cache->pools[g].epoch++; /* no slot that was handed out lacks its rows any more */
        for (int32_t s = 0; s < batch->num_sequences; s++)
            if (kvc_pending_of(batch, g, s)->to == KVC_TO_REPLACE)
                cache->pools[g].counts.replacing -= kvc_pending_of(batch, g, s)->num_tokens;
    }
    cache->batch = NULL;
    kvc_wake_waiter(cache);
    for (kvc_plan_link *plan; (plan = batch->plans);) {
        batch->plans = plan->next;
        kvc_scratch_give(cache, plan, plan->size);
    }
    kvc_scratch_give(cache, batch, batch->size);
}

/* Returns KVC_ERR_INVALID if a token to keep was not put in every layer in which it gets a row. */
static kvc_status check_complete(const kvc_batch *batch) {
    for (int32_t layer = 0; layer < batch->cache->num_layers; layer++) {
        if (!kvc_keeps_tokens(batch->cache, layer) || !kvc_takes_rows(batch, batch->cache->group_of[layer])) continue;
        const uint8_t *written = kvc_written_in(batch, layer);
        const kvc_place *place = kvc_places_in(batch, batch->cache->group_of[layer]);
        for (int32_t t = 0; t < batch->num_tokens; t++)
            if (batch->committed[t] && !written[t] && place[t].slot >= 0)
                return kvc_fail(KVC_ERR_INVALID,
                                "token %d of the batch was not put in layer %d: put every token in every layer, or "
                                "abort",
                                t, layer);
    }
    return KVC_OK;
}

/* Appends the slots of committed tokens to the rows of sequence s in group g, and drops the slots of the other tokens.
 */
static void end_slots(const kvc_batch *batch, int32_t g, int32_t s, const kvc_pending *pending) {
    kvc_cache *cache = batch->cache;
    kvc_pool *pool = &cache->pools[g];
    const int32_t *token = kvc_order_in(batch, g) + batch->sequences[s].first;
    for (int32_t i = 0; i < pending->num; token += pending->runs[i++].count)
        /* Cuts the run into parts whose tokens are all committed, or all not. */
        for (int32_t from = 0, to; from < pending->runs[i].count; from = to) {
            const int32_t before = pool->free.num, is_kept = batch->committed[token[from]];
            kvc_run part = pending->runs[i];
            for (to = from + 1; to < part.count && batch->committed[token[to]] == is_kept;) to++;
            part.slot += from;
            part.position += from;
            part.count = to - from;
            if (is_kept) {
                kvc_append_staying(cache, batch->sequences[s].sequence, g, &part);
                continue;
            }
            kvc_drop_part(pool, &part);
            if (kvc_policy_expires(&cache->policies[g])) pool->free.num_idle += pool->free.num - before;
        }
}

/* Drops all rows of sequence s in group g, and forgets which have expired. */
static void drop_rows(const kvc_batch *batch, int32_t g, int32_t s) {
    kvc_run_list *list = &batch->sequences[s].sequence->runs[g];
    kvc_runs_visit(list, 0, KVC_END, kvc_drop_part, &batch->cache->pools[g]);
    list->first = list->num = 0;
    list->lost = (kvc_interval){0, 0};
    kvc_runs_recount(list);
}

/* Replaces the rows of a sequence in the group of a cross-attention layer by the rows put in this batch, if a token
 * of the sequence is committed.  Otherwise drops the new rows. */
static void end_cross(const kvc_batch *batch, int32_t g, int32_t s, const kvc_pending *pending, int keeps) {
    kvc_run_list *list = &batch->sequences[s].sequence->runs[g];
    if (!pending->num) return;
    if (!keeps) {
        kvc_drop_cross(batch, g, s);
        return;
    }
    drop_rows(batch, g, s);
    kvc_runs_push(list, pending->runs);
    kvc_runs_recount(list);
}

/* Returns the first position from which the committed tokens of a sequence do not follow from the tokens before them. A
 * token follows if it stands behind all rows, saw exactly the committed tokens before it, and selected no rows. */
static int32_t find_exact_to(const kvc_batch *batch, const kvc_batch_sequence *member) {
    const int32_t *token = batch->order + member->first;
    int32_t next = kvc_sequence_next(member->sequence), last = -1, dropped = INT32_MAX, exact_to = INT32_MAX;
    for (int32_t i = 0; i < member->num_tokens; i++)
        if (!batch->committed[token[i]]) dropped = kvc_lower(dropped, batch->positions[token[i]]);
    for (int32_t i = 0; i < member->num_tokens; i++) {
        const int32_t t = token[i], position = batch->positions[t];
        if (!batch->committed[t]) continue;
        const int sees_all = batch->parents ? batch->parents[t] == last : position < dropped;
        if (batch->replaced || position != next || !sees_all || batch->selected[t])
            exact_to = kvc_lower(exact_to, position);
        next = position + 1;
        last = t;
    }
    return exact_to;
}

/* Drops all rows of an unstored sequence, those from before the batch as well, and forgets which have expired.  Blocks
 * that this frees go back to the system. */
static void end_unstored(const kvc_batch *batch, int32_t s) {
    kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = batch->sequences[s].sequence;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        kvc_pending *pending = kvc_pending_of(batch, g, s);
        const int32_t before = pool->free.num;
        while (pending->num) kvc_drop_part(pool, &pending->runs[--pending->num]);
        kvc_runs_destroy(&sequence->runs[g], pool);
        pool->free.num_idle += pool->free.num - before;
    }
    sequence->exact_to = batch->sequences[s].exact_to = batch->sequences[s].selected_from = INT32_MAX;
}

/* Adds the committed tokens to sequence s, which is stored: kvc_begin took the memory for that. */
static void end_sequence(const kvc_batch *batch, int32_t s) {
    kvc_cache *cache = batch->cache;
    const kvc_batch_sequence *member = &batch->sequences[s];
    const int32_t *token = batch->order + member->first;
    int32_t last = -1; /* largest position that is committed */
    for (int32_t i = 0; i < member->num_tokens; i++)
        if (batch->committed[token[i]] && batch->positions[token[i]] > last) last = batch->positions[token[i]];
    const int keeps = last >= 0;
    const int32_t exact_to = member->exact_to < member->selected_from ? member->exact_to : member->selected_from;
    if (keeps && exact_to < member->sequence->exact_to) member->sequence->exact_to = exact_to;
    if (batch->replaced && keeps) kvc_sequence_note_edit(member->sequence, 0, INT32_MAX);
    /* Rows that windows leave behind go before the tokens are added, and tokens that they leave behind are not added.
     * A batch that restores adds everything: kvc_replace_note looks at all rows. */
    if (batch->replaced)
        member->sequence->min_query_position = 0;
    else
        kvc_expire_behind(cache, member->sequence, last);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        if (pending->to == KVC_TO_REPLACE && keeps) {
            kvc_replace_remember(&member->sequence->runs[g]);
            drop_rows(batch, g, s);
        }
        if (pending->to >= KVC_TO_REPLACE) end_slots(batch, g, s, pending);
        if (pending->to == KVC_TO_CROSS) end_cross(batch, g, s, pending, keeps);
    }
    if (batch->replaced && keeps) kvc_replace_note(batch, s);
    if (batch->replaced) kvc_expire_behind(cache, member->sequence, -1);
    /* The sequence has these itself now, and the pending rows. */
    batch->sequences[s].exact_to = batch->sequences[s].selected_from = INT32_MAX;
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_pending_of(batch, g, s)->num = 0;
}

/* Sets member->exact_to of sequences of which some tokens are not committed; it then includes selected_from. */
static void find_exact(kvc_batch *batch) {
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_batch_sequence *member = &batch->sequences[s];
        int32_t num_committed = 0;
        for (int32_t i = 0; i < member->num_tokens; i++)
            num_committed += batch->committed[batch->order[member->first + i]];
        if (num_committed == member->num_tokens) continue;
        member->exact_to = find_exact_to(batch, member);
        member->selected_from = INT32_MAX;
    }
}

/* Ends the batch, keeping the tokens marked in batch->committed, but none of an unstored sequence. */
static kvc_status finish(kvc_batch *batch) {
    int32_t num_committed = 0, commits_all = 1; /* commits_all: of what the caller marked */
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        commits_all &= batch->committed[t];
        num_committed += batch->committed[t] &= !batch->sequences[batch->sequence_of[t]].is_unstored;
    }
    KVC_TRY(check_complete(batch));
    kvc_cache *cache = batch->cache;
    const int32_t num_tokens = batch->num_tokens;
    kvc_lock(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) cache->pools[g].free.reserved = 0; /* new blocks stay */
    if (!commits_all) find_exact(batch);
    if (cache->prefixes.first) kvc_sessions_fill(batch); /* before windows move on */
    for (int32_t s = 0; s < batch->num_sequences; s++)
        if (batch->sequences[s].is_unstored)
            end_unstored(batch, s);
        else
            end_sequence(batch, s);
    cache->stats.batches++;
    cache->stats.tokens += num_committed;
    close_batch(batch);
    kvc_return_surplus(cache);
    kvc_collapse_pages(cache, num_tokens);
    return kvc_unlock(cache, KVC_OK);
}

/* Marks all tokens as committed, because a later commit may be of all. */
static void mark_all(kvc_batch *batch) { memset(batch->committed, 1, (size_t)batch->num_tokens); }

kvc_status kvc_commit(kvc_batch *batch) {
    const kvc_status status = finish(batch);
    if (status != KVC_OK) mark_all(batch);
    return status;
}

/* Marks these tokens, and no others, as committed. */
static kvc_status mark_committed(kvc_batch *batch, const int32_t *kept, int32_t num_kept) {
    if (num_kept < 0 || (num_kept && !kept))
        return kvc_fail(KVC_ERR_INVALID, "num_kept is %d%s", num_kept, num_kept < 0 ? "" : " and kept is NULL");
    memset(batch->committed, 0, (size_t)batch->num_tokens);
    for (int32_t i = 0; i < num_kept; i++) {
        if (kept[i] < 0 || kept[i] >= batch->num_tokens)
            return kvc_fail(KVC_ERR_INDEX, "kept[%d] is %d: the batch has %d tokens", i, kept[i], batch->num_tokens);
        if (batch->committed[kept[i]])
            return kvc_fail(KVC_ERR_INVALID, "kept[%d] is %d, as one before it is", i, kept[i]);
        batch->committed[kept[i]] = 1;
    }
    return KVC_OK;
}

kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept) {
    kvc_status status = mark_committed(batch, kept, num_kept);
    if (status == KVC_OK) status = finish(batch);
    if (status != KVC_OK) mark_all(batch);
    return status;
}

/* Gives back what the tokens were given in group g, the last slots first: so the free list gets its order back, and the
 * new blocks at its end go.  If a view keeps a block in use, a new block stays in its place. */
static void drop_slots(const kvc_batch *batch, int32_t g) {
    kvc_pool *pool = &batch->cache->pools[g];
    int32_t num_blocks = 0;
    for (int32_t s = batch->num_sequences - 1; s >= 0; s--) {
        const kvc_pending *pending = kvc_pending_of(batch, g, s);
        for (int32_t i = pending->to < KVC_TO_REPLACE ? -1 : pending->num - 1; i >= 0; i--) {
            const kvc_run *run = &pending->runs[i];
            const int32_t is_free = kvc_pool_untake(pool, run->block, run->slot, run->count);
            num_blocks += is_free; /* again */
            if (!run->slot && !is_free) pool->free.reserved--;
        }
    }
    kvc_pool_unreserve(pool, num_blocks, &pool->free.reserved);
}

/* Gives back what was put in the cross-attention layers of group g. */
static void drop_all_cross(const kvc_batch *batch, int32_t g) {
    kvc_pool *pool = &batch->cache->pools[g];
    for (int32_t s = 0; s < batch->num_sequences; s++)
        if (kvc_pending_of(batch, g, s)->num) kvc_drop_cross(batch, g, s);
    kvc_pool_unreserve(pool, pool->free.reserved, &pool->free.reserved);
}

/* Gives back the memory that the batch's sequences were given in lists. */
static void trim_lists(const kvc_batch *batch) {
    for (int32_t s = 0; s < batch->num_sequences; s++)
        for (int32_t g = 0; g < batch->cache->num_groups; g++)
            kvc_runs_trim(&batch->sequences[s].sequence->runs[g], &batch->cache->memory,
                          kvc_pending_of(batch, g, s)->capacity_before);
}

void kvc_abort(kvc_batch *batch) {
    if (!batch) return;
    kvc_cache *cache = batch->cache;
    kvc_lock(cache);
    for (int32_t g = 0; g < cache->num_token_groups; g++) drop_slots(batch, g);
    for (int32_t g = cache->num_token_groups; g < cache->num_groups; g++) drop_all_cross(batch, g);
    trim_lists(batch);
    cache->stats.aborted++;
    close_batch(batch);
    kvc_unlock(cache, KVC_OK);
}
