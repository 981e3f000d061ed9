/* prefix.c: the public functions of prefixes.
 *
 * A prefix keeps blocks as the nodes of a tree.  A tree that it has given up waits in cache->prefixes.dying, and loses
 * a few nodes at a time.  In between, other calls get the mutex (kvc_cache_give_way).  A session is what the prefix
 * notes of an acquired sequence.  A call that finds no room tries again once others have copied the rows that they have
 * pinned (kvc_cache_wait_copies). */
#include "prefix/pin.h"

#include <string.h>

#include "base/blake2b.h"
#include "cache/check.h"
#include "cache/waiting.h"
#include "edit/kept.h"
#include "prefix/reuse.h"
#include "space/evict.h"

static const int64_t MOST_STATE_BYTES = INT64_C(1) << 40;
enum {
    AT_ONCE = KVC_SIZE(16, 2),        /* blocks that are dropped before others get the mutex */
    PASSED_AT_ONCE = KVC_SIZE(512, 4) /* blocks that change their place in a list meanwhile */
};

/* ---- making and freeing ------------------------------------------------------------------------------------------ */

/* Refuses a pointer without a size, a size without a pointer, and a negative size.  name: of the pointer's field. */
static kvc_status check_bytes(const void *bytes, int64_t size, const char *name) {
    if (size >= 0 && !size == !bytes) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s_size is %lld and %s is %s: give both, or neither", name, (long long)size, name,
                    bytes ? "given" : "NULL");
}

/* Returns KVC_ERR_UNSUPPORTED if blocks of tokens would cut a row of a layer with a stride. */
static kvc_status check_strides(const kvc_cache *cache, const kvc_prefix_config *config) {
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const int32_t stride = cache->pools[cache->group_of[i]].stride, size = cache->pools[0].block_size;
        if (size % stride)
            return kvc_fail(
                KVC_ERR_UNSUPPORTED,
                "block_size is %d, and a row of layer %d stands for %d tokens: for prefixes, give the cache "
                "a block_size that is a multiple of each layer's stride",
                size, i, stride);
        if (stride > 1 && config->reuse_min_tokens)
            return kvc_fail(KVC_ERR_UNSUPPORTED,
                            "reuse_min_tokens is %d: tokens would move by any number of positions, and a row of layer "
                            "%d stands for %d",
                            config->reuse_min_tokens, i, stride);
    }
    return KVC_OK;
}

static kvc_status check_config(const kvc_cache *cache, const kvc_prefix_config *config) {
    KVC_TRY(check_bytes(config->salt, config->salt_size, "salt"));
    KVC_TRY(check_bytes(config->identity, config->identity_size, "identity"));
    KVC_TRY(check_bytes(config->secret, config->secret_size, "secret"));
    if (config->quota < 0)
        return kvc_fail(KVC_ERR_INVALID, "quota is %lld tokens: it must be at least 0", (long long)config->quota);
    if (config->max_events < 0)
        return kvc_fail(KVC_ERR_INVALID, "max_events is %d: it must be at least 0", config->max_events);
    if (config->reuse_min_tokens < 0)
        return kvc_fail(KVC_ERR_INVALID, "reuse_min_tokens is %d: it must be at least 0", config->reuse_min_tokens);
    for (int32_t i = 0; config->reuse_min_tokens && i < cache->num_layers; i++)
        if (kvc_keeps_tokens(cache, i) && cache->layers[i].rope.kind == KVC_ROPE_UNKNOWN)
            return kvc_fail(
                KVC_ERR_UNSUPPORTED,
                "reuse_min_tokens is %d: tokens would move, and the keys of layer %d may have to be rotated: "
                "give its rope when the cache is made",
                config->reuse_min_tokens, i);
    if (config->state_bytes < 0 || config->state_bytes > MOST_STATE_BYTES)
        return kvc_fail(KVC_ERR_INVALID, "state_bytes is %lld: it must be at least 0, and at most %lld",
                        (long long)config->state_bytes, (long long)MOST_STATE_BYTES);
    if (config->max_checkpoint_bytes && !config->state_bytes)
        return kvc_fail(KVC_ERR_INVALID,
                        "max_checkpoint_bytes is %lld, and state_bytes 0: give the size of the states that it limits",
                        (long long)config->max_checkpoint_bytes);
    if (config->max_checkpoint_bytes && config->max_checkpoint_bytes < config->state_bytes)
        return kvc_fail(KVC_ERR_INVALID,
                        "max_checkpoint_bytes is %lld: it must be at least state_bytes, %lld, or 0 for no limit",
                        (long long)config->max_checkpoint_bytes, (long long)config->state_bytes);
    if (config->state_bytes && config->reuse_min_tokens)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "reuse_min_tokens is %d, and state_bytes %lld: a recurrent state does not move with tokens",
                        config->reuse_min_tokens, (long long)config->state_bytes);
    if (config->ttl_ms < 0 || config->ttl_ms > INT64_MAX / 1000000)
        return kvc_fail(KVC_ERR_INVALID, "ttl_ms is %lld: it must be at least 0, and at most %lld",
                        (long long)config->ttl_ms, (long long)(INT64_MAX / 1000000));
    if (cache->limits.max_sequences == 1)
        return kvc_fail(KVC_ERR_INVALID,
                        "max_sequences is 1, so that a second request could not run beside the first: make the cache "
                        "for more");
    KVC_TRY(check_strides(cache, config));
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].policy.kind == KVC_CROSS)
            return kvc_fail(KVC_ERR_UNSUPPORTED,
                            "layer %d is a cross-attention layer: its rows do not follow from tokens", i);
    return KVC_OK;
}

static kvc_tree *new_tree(kvc_prefix *prefix) {
    kvc_tree *tree = kvc_tree_new(prefix->cache, prefix->salt, prefix->root);
    if (!tree) return NULL;
    tree->quota = prefix->quota;
    tree->ttl = prefix->ttl;
    tree->is_indexed = prefix->reuse_min > 0;
    tree->checkpoints.most_bytes = prefix->most_checkpoint_bytes;
    tree->events = &prefix->events;
    tree->is_collected = prefix->collects;
    tree->prefix = prefix;
    return tree;
}

/* Returns the bytes of a prefix's events, which count for max_bytes. */
static int64_t event_bytes(const kvc_prefix *prefix) { return prefix->events.room * (int64_t)sizeof(kvc_prefix_event); }

/* Frees a prefix that is in no list. */
static void free_struct(kvc_prefix *prefix) {
    kvc_cache *cache = prefix->cache;
    cache->prefixes.prompt_bytes -= event_bytes(prefix);
    kvc_memory_free(&cache->memory, prefix, prefix->num_bytes, KVC_MEMORY_BOOKKEEPING, -1);
}

/* Makes a prefix and its tree, if there is room for them.  The caller lists it. */
static kvc_status make(kvc_cache *cache, const kvc_prefix_config *config, kvc_prefix **out) {
    const uint64_t size = sizeof(kvc_prefix) + (uint64_t)config->max_events * sizeof(kvc_prefix_event);
    kvc_prefix *prefix = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!prefix) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a prefix");
    *prefix = (kvc_prefix){.cache = cache, .num_bytes = size, .number = ++cache->prefixes.num_made};
    prefix->events = (kvc_events){.ring = (kvc_prefix_event *)(void *)(prefix + 1), .room = config->max_events};
    cache->prefixes.prompt_bytes += event_bytes(prefix);
    kvc_name_salt(config->salt, (size_t)config->salt_size, prefix->salt);
    kvc_name_root(prefix->salt, config->identity, (size_t)config->identity_size, config->state_bytes, prefix->root);
    kvc_value_owner_init(&prefix->owner, config->identity, config->identity_size, config->secret, config->secret_size);
    prefix->quota = config->quota;
    prefix->reuse_min = config->reuse_min_tokens;
    prefix->collects = config->collects_new;
    prefix->user = config->user;
    prefix->ttl = config->ttl_ms * 1000000;
    prefix->state_bytes = config->state_bytes;
    prefix->most_checkpoint_bytes = config->max_checkpoint_bytes;
    prefix->tree = new_tree(prefix);
    const kvc_need need = {.cache = cache, .what = "making a prefix"};
    const kvc_status status = prefix->tree ? kvc_make_room(&need) : KVC_ERR_NOMEM;
    if (status == KVC_OK) {
        *out = prefix;
        return KVC_OK;
    }
    if (prefix->tree) kvc_tree_free(prefix->tree);
    free_struct(prefix);
    return status;
}

kvc_status kvc_prefix_new(kvc_cache *cache, const kvc_prefix_config *from, kvc_prefix **out) {
    kvc_prefix_config config;
    uint8_t identity[KVC_NAME_BYTES];
    if (!out) return kvc_fail(KVC_ERR_INVALID, "prefix is NULL: it is where the new one goes");
    *out = NULL;
    KVC_TRY(KVC_READ(kvc_prefix_config, &config, from, "config"));
    KVC_TRY(check_config(cache, &config));
    if (!config.identity) {
        const int64_t length = config.fingerprint ? (int64_t)strlen(config.fingerprint) : 0;
        KVC_TRY(kvc_prefix_identity(cache, config.fingerprint, length, identity));
        config.identity = identity;
        config.identity_size = sizeof identity;
    }
    kvc_prefix *prefix = NULL;
    kvc_status status;
    kvc_lock(cache);
    do status = make(cache, &config, &prefix);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status != KVC_OK) return kvc_unlock(cache, status);
    prefix->next = cache->prefixes.first;
    prefix->at = &cache->prefixes.first;
    if (cache->prefixes.first) cache->prefixes.first->at = &prefix->next;
    cache->prefixes.first = prefix;
    *out = prefix;
    return kvc_unlock(cache, KVC_OK);
}

/* Puts the empty tree `other` in the place of a prefix's tree, which it returns.  Only pins use nodes of that then. */
static kvc_tree *take_tree(kvc_prefix *prefix, kvc_tree *other) {
    kvc_tree *tree = prefix->tree;
    for (kvc_session *session = prefix->sessions; session; session = session->next) {
        const int32_t known_to = session->kept_to ? 0 : session->known_to; /* has it kept none, it can still keep all */
        kvc_session_roll_back(session, /* position */ 0);
        session->known_to = known_to;
        kvc_node_use(&tree->root, -1);
        session->last = &other->root;
        kvc_node_use(session->last, 1);
    }
    prefix->tree = other;
    return tree;
}

kvc_node *kvc_prefix_next_new(kvc_cache *cache) {
    for (int num = 1; cache->prefixes.new_blocks && !cache->prefixes.new_blocks->tree->prefix; num++) {
        kvc_node_take_out(cache->prefixes.new_blocks);
        if (num % PASSED_AT_ONCE == 0) kvc_cache_give_way(cache);
    }
    return cache->prefixes.new_blocks;
}

/* Ends some pins of a tree that no prefix has; if it has no pins, drops some of its nodes.  Returns whether there
 * are more; frees the tree if not. */
static int drop_some(kvc_cache *cache, kvc_tree *tree) {
    if (kvc_pins_end_some(tree, PASSED_AT_ONCE)) return 1;
    kvc_node *node;
    for (int i = 0; i < AT_ONCE && (node = kvc_tree_oldest(tree)); i++) kvc_node_drop(node);
    if (tree->with_rows.num) return 1;
    kvc_tree **at = &cache->prefixes.dying;
    while (*at != tree) at = &(*at)->next;
    *at = tree->next;
    kvc_tree_free(tree);
    return 0;
}

/* Drops a tree that no prefix has, a few nodes at a time. */
static void drop_tree(kvc_cache *cache, kvc_tree *tree) {
    while (kvc_tree_unprotect(tree, PASSED_AT_ONCE)) kvc_cache_give_way(cache);
    while (drop_some(cache, tree)) kvc_cache_give_way(cache);
}

void kvc_prefixes_forked(kvc_cache *cache) {
    while (cache->prefixes.dying) drop_some(cache, cache->prefixes.dying);
}

void kvc_prefix_free(kvc_prefix *prefix) {
    if (!prefix) return;
    kvc_cache *cache = prefix->cache;
    kvc_tree *tree = prefix->tree;
    kvc_lock(cache);
    kvc_cache_begin_gradual(cache);
    for (int num = 1; prefix->sessions; num++) {
        kvc_sequence *sequence = prefix->sessions->sequence;
        kvc_follower *follower = sequence->follower;
        kvc_session_roll_back(prefix->sessions, /* position */ 0); /* its blocks go, too: none of them counts as used */
        sequence->follower = NULL;
        follower->ended(cache, follower);
        if (!sequence->in_batch) kvc_cache_drop_blank(cache, sequence);
        if (num % AT_ONCE == 0) kvc_cache_give_way(cache);
    }
    *prefix->at = prefix->next;
    if (prefix->next) prefix->next->at = prefix->at;
    free_struct(prefix);
    kvc_tree_retire(tree);
    kvc_cache_end_gradual(cache);
    drop_tree(cache, tree);
    kvc_unlock(cache, KVC_OK);
}

/* Drops some of the blocks that have expired; returns whether there may be more. */
static int drop_expired(kvc_tree *tree) {
    kvc_tree_date(tree);
    if (!tree->ttl) return 0;
    for (int i = 0; i < AT_ONCE; i++) {
        kvc_node *node = kvc_tree_oldest(tree);
        if (!node || node->order.time >= tree->expires_before) return 0;
        kvc_node_drop(node);
    }
    return 1;
}

void kvc_prefix_lock(kvc_prefix *prefix) {
    kvc_lock(prefix->cache);
    drop_expired(prefix->tree);
}

void kvc_prefix_lock_late(kvc_prefix *prefix) {
    kvc_lock(prefix->cache);
    while (drop_expired(prefix->tree)) kvc_cache_give_way(prefix->cache);
}

void kvc_prefix_wait(const kvc_prefix *prefix) {
    while (prefix->tree->forgetting.num) kvc_signal_wait(&prefix->cache->waiting.idle, &prefix->cache->mutex);
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

kvc_status kvc_read_tokens(const kvc_tokens *from, kvc_tokens *tokens) {
    KVC_TRY(KVC_READ(kvc_tokens, tokens, from, "tokens"));
    if (tokens->num_tokens < 0 || tokens->num_tokens > INT32_MAX || (tokens->num_tokens && !tokens->ids))
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %lld%s", (long long)tokens->num_tokens,
                        tokens->num_tokens < 0           ? ": it must be at least 0"
                        : tokens->num_tokens > INT32_MAX ? ": it must be a position, at most 2147483647"
                                                         : " and ids is NULL");
    return KVC_OK;
}

kvc_status kvc_match_limit(const kvc_tokens *tokens, int64_t max_matched, int64_t *limit) {
    if (!tokens->num_tokens) return kvc_fail(KVC_ERR_INVALID, "num_tokens is 0: a prompt has at least one token");
    if (max_matched < -1)
        return kvc_fail(KVC_ERR_INVALID, "max_matched is %lld: it must be at least 0, or -1 for no limit",
                        (long long)max_matched);
    *limit = tokens->num_tokens - 1;
    if (max_matched >= 0 && max_matched < *limit) *limit = max_matched;
    return KVC_OK;
}

kvc_status kvc_prefix_lookup(kvc_prefix *prefix, const kvc_tokens *from, int32_t *matched, int32_t *with_rows) {
    kvc_tokens tokens;
    kvc_match m;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (!matched) return kvc_fail(KVC_ERR_INVALID, "matched is NULL");
    kvc_prefix_lock(prefix);
    const kvc_status status = kvc_match_find(prefix, &tokens, tokens.num_tokens, &m);
    if (status != KVC_OK) return kvc_unlock(prefix->cache, status);
    *matched = m.known;
    if (with_rows) *with_rows = m.with_rows;
    kvc_match_free(prefix->cache, &m);
    return kvc_unlock(prefix->cache, KVC_OK);
}

/* ---- acquiring --------------------------------------------------------------------------------------------------- */

/* Adds a sequence that holds the known tokens of a prompt. */
static kvc_status add_sequence(kvc_cache *cache, kvc_session *session, const kvc_match *m, int64_t id,
                               kvc_sequence **sequence) {
    if (m->known) {
        KVC_TRY(kvc_attach_pieces(cache, m->pieces, m->num, id, m->known));
        *sequence = kvc_table_find(&cache->sequences, id);
        return KVC_OK;
    }
    *sequence = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    if (!*sequence) return kvc_fail_sequence(id);
    (*sequence)->follower = &session->follower; /* it stays in the table, as it has a follower */
    kvc_cache_insert(cache, *sequence, /* old */ NULL);
    return KVC_OK;
}

/* Makes the sequence of a session, and begins it, if there is room for both.  Otherwise frees the session. */
static kvc_status begin(kvc_prefix *prefix, kvc_session *session, const kvc_match *m, int64_t id) {
    kvc_cache *cache = prefix->cache;
    const kvc_need need = {.cache = cache, .what = "acquiring a prompt"};
    kvc_sequence *sequence;
    kvc_status status = add_sequence(cache, session, m, id, &sequence);
    if (status != KVC_OK) {
        kvc_session_free(session);
        return status;
    }
    kvc_session_begin(session, sequence, kvc_match_path(m, m->known), m->with_state ? m->with_state->checkpoint : NULL);
    status = kvc_check_room(&need);
    if (status == KVC_OK) {
        /* The matched blocks are then evicted last.  The quota may now protect them and their states, so that there is
         * too little room after all. */
        kvc_match_touch(m);
        status = kvc_make_room(&need);
    }
    if (status == KVC_OK) return KVC_OK;
    kvc_session_roll_back(session, /* position */ 0); /* so that its end does not mark the matched blocks as used */
    kvc_cache_drop(cache, sequence);
    return status;
}

/* Begins a sequence with the known tokens of a prompt, up to `limit` tokens. */
static kvc_status acquire(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, int64_t *seq_id,
                          int32_t *matched) {
    kvc_cache *cache = prefix->cache;
    kvc_match m;
    KVC_TRY(kvc_match_find(prefix, tokens, limit, &m));
    kvc_session *session = kvc_session_new(prefix, tokens, m.known);
    *seq_id = kvc_cache_new_id(cache);
    *matched = m.known;
    const kvc_status status = session ? begin(prefix, session, &m, *seq_id) : KVC_ERR_NOMEM;
    kvc_match_free(cache, &m);
    if (status != KVC_OK) return status;
    kvc_cache_set_in_call(cache, *seq_id, 1);
    return KVC_OK;
}

static void count_request(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t exact, int32_t matched) {
    prefix->stats.requests++;
    prefix->stats.hits += matched > 0;
    prefix->stats.tokens += tokens->num_tokens;
    prefix->stats.matched += matched;
    prefix->stats.reused += matched - exact;
}

kvc_status kvc_prefix_acquire(kvc_prefix *prefix, const kvc_tokens *from, int64_t max_matched, int64_t *seq_id,
                              int32_t *matched) {
    kvc_tokens tokens;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (!seq_id) return kvc_fail(KVC_ERR_INVALID, "seq_id is NULL");
    if (!matched) return kvc_fail(KVC_ERR_INVALID, "matched is NULL");
    int64_t limit, id = 0;
    int32_t exact = 0, all;
    KVC_TRY(kvc_match_limit(&tokens, max_matched, &limit));
    kvc_status status;
    kvc_prefix_lock(prefix);
    do status = acquire(prefix, &tokens, limit, &id, &exact);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(prefix->cache));
    KVC_TRY(kvc_unlock(prefix->cache, status));
    all = exact;
    if (prefix->reuse_min) status = kvc_reuse(prefix, &tokens, limit, id, &all);
    if (status != KVC_OK) {
        kvc_clear_sequence(prefix->cache, id);
        return status;
    }
    kvc_lock(prefix->cache);
    kvc_cache_set_in_call(prefix->cache, id, 0);
    count_request(prefix, &tokens, exact, all);
    *seq_id = id;
    *matched = all;
    return kvc_unlock(prefix->cache, KVC_OK);
}

/* ---- pins -------------------------------------------------------------------------------------------------------- */

static void name_prompt(const kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *name) {
    const kvc_token_span all = kvc_tokens_part(tokens, 0, tokens->num_tokens);
    kvc_name_block(prefix->salt, prefix->root, &all, name);
}

/* Pins the known tokens of a prompt with a name. */
static kvc_status pin(kvc_prefix *prefix, const kvc_tokens *tokens, const uint8_t *name, int32_t *kept) {
    kvc_match m;
    KVC_TRY(kvc_match_find(prefix, tokens, tokens->num_tokens, &m));
    const kvc_status status = m.known ? kvc_pin_known(prefix, &m, name) : KVC_OK;
    if (status == KVC_OK) *kept = m.known;
    kvc_match_free(prefix->cache, &m);
    return status;
}

kvc_status kvc_prefix_pin(kvc_prefix *prefix, const kvc_tokens *from, int32_t *kept) {
    kvc_tokens tokens;
    uint8_t name[KVC_NAME_BYTES];
    kvc_status status;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (!kept) return kvc_fail(KVC_ERR_INVALID, "kept is NULL");
    name_prompt(prefix, &tokens, name);
    kvc_prefix_lock(prefix);
    do status = pin(prefix, &tokens, name, kept);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(prefix->cache));
    return kvc_unlock(prefix->cache, status);
}

kvc_status kvc_prefix_unpin(kvc_prefix *prefix, const kvc_tokens *from) {
    kvc_tokens tokens;
    uint8_t name[KVC_NAME_BYTES];
    KVC_TRY(kvc_read_tokens(from, &tokens));
    name_prompt(prefix, &tokens, name);
    kvc_lock(prefix->cache);
    kvc_pin_take_back(prefix, name);
    return kvc_unlock(prefix->cache, KVC_OK);
}

/* ---- dropping ---------------------------------------------------------------------------------------------------- */

/* Drops some of the least recently used blocks that are not pinned, until *left tokens are dropped, or *most blocks.
 * Returns whether there may be more. */
static int evict_some(kvc_tree *tree, int64_t *left, int64_t *most) {
    for (int i = 0; i < AT_ONCE; i++) {
        kvc_node *node = *left > 0 && --*most >= 0 ? kvc_tree_oldest(tree) : NULL;
        if (!node) return 0;
        *left -= node->end - node->begin;
        kvc_node_drop(node);
    }
    return 1;
}

kvc_status kvc_prefix_evict(kvc_prefix *prefix, int64_t num_tokens, int64_t *num_evicted) {
    kvc_cache *cache = prefix->cache;
    int64_t left = num_tokens;
    if (num_tokens < 0)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %lld: it must be at least 0", (long long)num_tokens);
    if (!num_evicted) return kvc_fail(KVC_ERR_INVALID, "num_evicted is NULL");
    kvc_lock(cache);
    int64_t most = prefix->tree->with_rows.num;
    while (evict_some(prefix->tree, &left, &most)) kvc_cache_give_way(cache);
    *num_evicted = num_tokens - left;
    return kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_prefix_clear(kvc_prefix *prefix) {
    kvc_cache *cache = prefix->cache;
    kvc_lock(cache);
    kvc_prefix_wait(prefix);
    kvc_tree *other = new_tree(prefix);
    if (!other) return kvc_unlock(cache, KVC_ERR_NOMEM);
    kvc_tree *tree = take_tree(prefix, other);
    prefix->events.num = prefix->events.num_lost = 0;
    kvc_events_note(&prefix->events, KVC_BLOCKS_CLEARED, 0, /* name */ NULL);
    kvc_tree_retire(tree);
    drop_tree(cache, tree);
    return kvc_unlock(cache, KVC_OK);
}

void kvc_prefix_get_stats(kvc_prefix *prefix, kvc_prefix_stats *stats, size_t stats_size) {
    kvc_lock(prefix->cache);
    prefix->stats.blocks = prefix->tree->with_rows.num;
    prefix->stats.held = prefix->tree->num_tokens;
    prefix->stats.checkpoints = prefix->tree->checkpoints.num;
    prefix->stats.checkpoint_bytes = prefix->tree->checkpoints.num_bytes;
    kvc_write_struct(stats, stats_size, &prefix->stats, sizeof prefix->stats);
    kvc_unlock(prefix->cache, KVC_OK);
}
