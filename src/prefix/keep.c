/* keep.c: keeps the blocks of a sequence in a prefix's tree, and the recurrent state behind them (a checkpoint).
 *
 * Only exact tokens are kept: tokens whose rows follow from the tokens alone.  prefix->horizon changes when the prefix
 * forgets a prompt. */
#include "cache/check.h"
#include "cache/waiting.h"
#include "prefix/prefix.h"

/* Sets *found to a sequence whose blocks may be kept, or to NULL if it is empty.  Shortens the tokens to the exact
 * ones that the sequence holds; to none if the prefix may not keep its blocks. */
static kvc_status find_to_keep(kvc_prefix *prefix, int64_t seq_id, kvc_tokens *tokens, kvc_sequence **found) {
    kvc_sequence *sequence = *found = kvc_cache_find(prefix->cache, seq_id);
    KVC_TRY(kvc_check_idle(sequence));
    KVC_TRY(kvc_check_not_kept(sequence));
    if (!sequence) return KVC_OK;
    const int32_t num_exact = kvc_sequence_num_exact(sequence);
    if (tokens->num_tokens > num_exact) tokens->num_tokens = num_exact;
    if (!kvc_prefix_may_keep(prefix, sequence, kvc_tokens_part(tokens, 0, 1))) tokens->num_tokens = 0;
    return KVC_OK;
}

static kvc_status release(kvc_prefix *prefix, int64_t seq_id, kvc_tokens *tokens) {
    kvc_cache *cache = prefix->cache;
    const int64_t num_tokens = tokens->num_tokens;
    kvc_sequence *sequence;
    KVC_TRY(find_to_keep(prefix, seq_id, tokens, &sequence));
    if (!sequence) return KVC_OK;
    const int32_t num_exact = kvc_sequence_num_exact(sequence);
    if (num_tokens && num_tokens < num_exact)
        return kvc_fail(
            KVC_ERR_INVALID,
            "%lld tokens are given, and sequence %lld holds %d: give all of them, or none; if the whole prompt "
            "was fed behind its match, forget the prompt",
            (long long)num_tokens, (long long)seq_id, num_exact);
    kvc_node *last = kvc_session_keep(prefix, sequence, tokens, /* is_exact */ 0, NULL);
    kvc_node_use(last, 1);
    kvc_cache_drop(cache, sequence);
    kvc_node_touch(last);
    kvc_node_use(last, -1);
    return KVC_OK;
}

kvc_status kvc_prefix_release(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *from) {
    kvc_tokens tokens;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    kvc_prefix_lock(prefix);
    return kvc_unlock(prefix->cache, release(prefix, seq_id, &tokens));
}

enum { MOST_LISTED = 64 };

/* Lists full blocks for stores whose last state is now that of a node: the node itself, or siblings that begin with its
 * tokens.  Of many siblings, some are listed. */
static void collect_with_state(kvc_node *node) {
    const kvc_node *parent = node->parent;
    kvc_node_collect(node);
    kvc_node *child = kvc_node_beside(node, KVC_HIGH);
    for (int i = 0; child && i < MOST_LISTED; i++, child = kvc_node_beside(child, KVC_HIGH)) {
        if (kvc_tokens_common(&child->tokens, &node->tokens) < node->tokens.num) break;
        if (kvc_node_is_live(child) && kvc_node_with_state(parent, &child->tokens) == node) kvc_node_collect(child);
    }
}

/* Returns whether a sequence holds rows of a token.  Groups with a stride do not tell. */
static int has_rows_at(const kvc_sequence *sequence, int32_t position) {
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->pools[g].stride == 1 &&
            kvc_runs_visit(&sequence->runs[g], position, position + 1, /* only count */ NULL, NULL))
            return 1;
    return 0;
}

/* Keeps the blocks of a sequence that goes on, and a checkpoint at their end; NULL: none. */
static kvc_status keep(kvc_prefix *prefix, kvc_sequence *sequence, const kvc_tokens *tokens,
                       kvc_checkpoint *checkpoint) {
    kvc_checkpoints *all = &prefix->tree->checkpoints;
    int is_short;
    kvc_node *last = kvc_session_keep(prefix, sequence, tokens, checkpoint != NULL, &is_short);
    kvc_node_touch(last);
    if (is_short)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for a block of the %lld tokens", (long long)tokens->num_tokens);
    if (!checkpoint) return KVC_OK;
    if (last->end != tokens->num_tokens && !has_rows_at(sequence, (int32_t)tokens->num_tokens - 1))
        return KVC_OK; /* windows have lost them */
    if (last->end != tokens->num_tokens)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for the block that %lld tokens end in",
                        (long long)tokens->num_tokens);
    const int is_put = kvc_checkpoints_put(all, last, checkpoint);
    if (!last->checkpoint)
        return kvc_fail(KVC_ERR_FULL, "max_checkpoint_bytes is %lld: pinned states leave no room for one of %lld",
                        (long long)all->most_bytes, (long long)checkpoint->num_bytes);
    if (is_put) collect_with_state(last);
    return KVC_OK;
}

/* Finds the sequence, copies the state, and keeps it, if the tokens are there and exact.  By the end of the copy,
 * another sequence may have this id, with the same tokens computed anew because the prefix has forgotten them.  The
 * state would belong to the old sequence. */
static kvc_status keep_state(kvc_prefix *prefix, int64_t seq_id, kvc_tokens tokens, const void *state,
                             int64_t num_bytes) {
    const int64_t num_tokens = tokens.num_tokens, horizon = prefix->horizon;
    kvc_state_use use = {0};
    kvc_sequence *sequence;
    KVC_TRY(find_to_keep(prefix, seq_id, &tokens, &sequence));
    if (sequence && num_bytes && tokens.num_tokens == num_tokens)
        KVC_TRY(kvc_checkpoint_new(prefix->cache, state, num_bytes, &use));
    kvc_status status = find_to_keep(prefix, seq_id, &tokens, &sequence); /* again: the mutex was released */
    const int is_kept = tokens.num_tokens == num_tokens && prefix->horizon == horizon;
    if (status == KVC_OK && sequence) status = keep(prefix, sequence, &tokens, is_kept ? use.checkpoint : NULL);
    kvc_state_use_end(prefix->cache, &use);
    return status;
}

kvc_status kvc_prefix_checkpoint(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *from, const void *state,
                                 int64_t num_bytes) {
    kvc_tokens tokens;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (num_bytes < 0 || num_bytes > prefix->state_bytes)
        return kvc_fail(KVC_ERR_INVALID, "num_bytes is %lld: the prefix was made for states of at most %lld bytes",
                        (long long)num_bytes, (long long)prefix->state_bytes);
    if (num_bytes && !state) return kvc_fail(KVC_ERR_INVALID, "state is NULL");
    if (num_bytes && !tokens.num_tokens)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is 0: no token has made the state");
    kvc_prefix_lock(prefix);
    return kvc_unlock(prefix->cache, keep_state(prefix, seq_id, tokens, state, num_bytes));
}

kvc_status kvc_prefix_state(kvc_prefix *prefix, int64_t seq_id, void *state, int64_t max_bytes, int64_t *num_bytes) {
    kvc_cache *cache = prefix->cache;
    if (!num_bytes) return kvc_fail(KVC_ERR_INVALID, "num_bytes is NULL");
    if (max_bytes < 0)
        return kvc_fail(KVC_ERR_INVALID, "max_bytes is %lld: it must be at least 0", (long long)max_bytes);
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const kvc_session *session = sequence ? kvc_session_of(prefix, sequence) : NULL;
    /* INT32_MAX: no edit has changed the sequence */
    kvc_checkpoint *found = session && sequence->edited_from == INT32_MAX ? session->state : NULL;
    *num_bytes = found ? found->num_bytes : 0;
    if (!state || !found) return kvc_unlock(cache, KVC_OK);
    if (max_bytes < *num_bytes)
        return kvc_unlock(cache, kvc_fail(KVC_ERR_INVALID, "max_bytes is %lld: the state has %lld",
                                          (long long)max_bytes, (long long)*num_bytes));
    kvc_checkpoint_read(cache, found, state);
    return kvc_unlock(cache, KVC_OK);
}
