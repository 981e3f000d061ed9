/* fetch.c: where a call stands in a prompt whose blocks (nodes of a tree) it adds in order: see fetch.h.
 *
 * A node is live while it has rows and has not expired.  Each block of the call has a place among all uses of kept
 * blocks, a number that falls from block to block, so that the last blocks are evicted first.  f->last is the id of the
 * rows of the last block, by which the call finds it again after it has released the mutex. */
#include "prefix/fetch.h"

#include <string.h>

#include "cache/waiting.h"
#include "prefix/match.h"

enum { PASSED_AT_ONCE = KVC_SIZE(256, 2) }; /* blocks that are marked as used before others get the mutex */

static int32_t twice(int32_t position) { return position <= INT32_MAX / 2 ? 2 * position : INT32_MAX; }

/* Sets aside places for all tokens of the prompt, above all uses so far. */
static void begin_use(kvc_fetch *f) {
    kvc_cache *cache = f->prefix->cache;
    f->before = cache->evicting.num_uses + 1;
    f->time = kvc_now();
    cache->evicting.num_uses += f->tokens->num_tokens;
}

kvc_status kvc_fetch_begin(kvc_fetch *f, kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens,
                           int32_t *known, uint8_t *name) {
    kvc_match m;
    *f = (kvc_fetch){.prefix = prefix, .tokens = tokens, .horizon = prefix->horizon, .last = -1};
    begin_use(f);
    KVC_TRY(kvc_match_find(prefix, tokens, num_tokens, &m));
    kvc_match_touch(&m);
    f->again = twice(m.known);
    *known = m.known;
    memcpy(name, kvc_match_path(&m, m.known)->named.name, KVC_NAME_BYTES);
    kvc_match_free(prefix->cache, &m);
    return KVC_OK;
}

/* Returns whether a node and all nodes above it are live. */
static int is_whole(const kvc_node *node) {
    while (node->parent && kvc_node_is_live(node)) node = node->parent;
    return !node->parent;
}

/* Looks for the node as kvc_fetch_find does, from the root on. */
static kvc_status find_anew(kvc_fetch *f, int32_t end, kvc_node **last) {
    kvc_prefix *prefix = f->prefix;
    kvc_match m;
    f->last = -1;
    KVC_TRY(kvc_match_find(prefix, f->tokens, (int64_t)end + prefix->cache->pools[0].block_size, &m));
    kvc_node *node = kvc_match_path(&m, end);
    f->is_whole = is_whole(node);
    if (node->end == end && (m.with_rows >= end || f->is_whole)) *last = node;
    if (*last && node->rows) f->last = node->rows->id;
    kvc_match_free(prefix->cache, &m);
    return KVC_OK;
}

/* Returns whether a node has those rows of its tokens that a token behind them sees in a group. */
static int shows_in(const kvc_node *node, int32_t g) {
    const kvc_policy *policy = &node->tree->cache->policies[g];
    const kvc_run_list *list = &node->rows->runs[g];
    const int32_t sinks = kvc_policy_sinks(policy), lowest = kvc_policy_lowest(policy, node->end);
    const int32_t hidden = sinks > node->begin ? sinks : node->begin; /* tokens from here up to `lowest` are not seen */
    if (hidden >= lowest) return list->num_rows == kvc_node_rows(node, g);
    return kvc_runs_visit(list, node->begin, hidden, /* only count */ NULL, NULL) == hidden - node->begin &&
           kvc_runs_visit(list, lowest, node->end, /* only count */ NULL, NULL) == node->end - lowest;
}

/* Returns whether it has them in all groups. */
static int shows_seen(const kvc_node *node) {
    for (int32_t g = 0; g < node->tree->cache->num_token_groups; g++)
        if (!shows_in(node, g)) return 0;
    return 1;
}

kvc_status kvc_fetch_find(kvc_fetch *f, int32_t end, kvc_node **last) {
    const kvc_prefix *prefix = f->prefix;
    *last = NULL;
    if (prefix->horizon != f->horizon) return KVC_OK;
    if (kvc_tree_is_forgetting(prefix->tree, kvc_tokens_part(f->tokens, 0, 1))) return KVC_OK;
    kvc_node *node = kvc_node_of(prefix->cache, f->last);
    /* A token behind the block sees no rows before it that the block's first token does not see. */
    if (!node || !kvc_node_is_live(node) || !(f->is_whole || shows_seen(node))) return find_anew(f, end, last);
    *last = node;
    return KVC_OK;
}

int64_t kvc_fetch_place(const kvc_fetch *f, int32_t end, int64_t used) {
    const int64_t own = f->before + f->tokens->num_tokens - end;
    return used < own ? own : used;
}

void kvc_fetch_use(const kvc_fetch *f, kvc_node *node) {
    const int64_t used = kvc_fetch_place(f, node->end, node->rows->evicting.used);
    if (node->rows->evicting.used != used) kvc_node_relist_at(node, used);
}

/* Uses the last state within these tokens behind `parent`.  A shorter block than theirs may have it. */
static void use_state(const kvc_fetch *f, const kvc_node *parent, const kvc_token_span *tokens) {
    kvc_node *node = f->prefix->tree->checkpoints.num ? kvc_node_with_state(parent, tokens) : NULL;
    if (node) kvc_fetch_use(f, node);
}

void kvc_fetch_touch(kvc_fetch *f) {
    kvc_cache *cache = f->prefix->cache;
    const int32_t block = cache->pools[0].block_size;
    kvc_node *node = kvc_node_of(cache, f->last);
    const int32_t end = node ? node->end : 0;
    begin_use(f);
    kvc_tree_date(f->prefix->tree);
    node = &f->prefix->tree->root;
    for (int num = 1; node->end < end; num++) {
        const kvc_token_span part = kvc_tokens_part(f->tokens, node->end, node->end + block);
        use_state(f, node, &part);
        node = kvc_node_child(node, &part);
        if (!node || !kvc_node_is_live(node)) f->last = -1;
        if (!node) return;
        if (!kvc_node_is_live(node)) continue;
        kvc_fetch_use(f, node);
        if (num % PASSED_AT_ONCE) continue;
        const int64_t id = node->rows->id;
        kvc_cache_give_way(cache);
        node = kvc_node_of(cache, id);
        if (!node) {
            f->last = -1;
            return;
        }
    }
}

void kvc_fetch_pass(kvc_fetch *f, kvc_node *node) {
    const kvc_tree *tree = node->tree;
    f->last = node->rows->id;
    kvc_fetch_use(f, node);
    /* Marking all of them whenever their number has doubled takes a constant time for each. */
    if (node->end < f->again && !(tree->ttl && kvc_now() - f->time > tree->ttl / 2)) return;
    f->again = twice(node->end);
    kvc_fetch_touch(f);
}
