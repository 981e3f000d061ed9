/* forget.c: kvc_prefix_forget: drops whatever holds rows of a prompt's tokens, and of what follows the whole prompt.
 *
 * A node is a kept block in the prefix's tree.  While tree->forgetting is set, a node that loses its rows to another
 * call is listed in tree->lost, so that its name can still be reported.
 *
 * A walk goes over the nodes to drop, children before their parent, so that a node is dropped once nothing is below it.
 * A node is found (is to be dropped) if it has tokens of the prompt, or stands below its last token. */
#include <string.h>

#include "cache/waiting.h"
#include "prefix/pin.h"

enum {
    DROPPED_AT_ONCE = KVC_SIZE(16, 1), /* blocks that are dropped before others get the mutex */
    PASSED_AT_ONCE = KVC_SIZE(256, 1)  /* blocks that are looked at meanwhile */
};

/* Names of full blocks that were dropped. */
typedef struct names {
    uint8_t *to; /* [most][KVC_NAME_BYTES] NULL: nobody asks */
    int64_t num, most;
} names;

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* Where a walk stands.  The path to its place stays, whatever others drop meanwhile. */
typedef struct walk {
    const kvc_tokens *tokens; /* of the prompt */
    kvc_node *node;           /* its place, which it uses, so that nobody frees it */
    kvc_node *top;            /* `node` or one above it, below which all nodes are found; NULL: only some are */
    int32_t is_done;          /* 0: nodes below `node` come next.  1: all of these are done, and `node` comes next */
    int32_t needs_none;       /* all layers have windows, so prompts match what follows tokens without their rows:
                                 all nodes below a found one are found */
} walk;

/* Returns how many tokens of the prompt a node has, if its parent has only tokens of the prompt. */
static int32_t common_with(const walk *w, const kvc_node *node) {
    const kvc_token_span part = kvc_tokens_part(w->tokens, node->begin, node->end);
    return part.num > 0 ? kvc_tokens_common(&node->tokens, &part) : 0;
}

/* Returns a child if it is found, otherwise NULL: the children that have the next token of the prompt are. */
static kvc_node *if_found(const walk *w, kvc_node *child) { return child && common_with(w, child) ? child : NULL; }

/* Return the first child of the walk's node that is found, and its next sibling that is; NULL: none is. */
static kvc_node *first_below(const walk *w) {
    if (w->top) return kvc_node_end(w->node, KVC_LOW);
    if (common_with(w, w->node) < w->node->end - w->node->begin) return NULL;
    const kvc_token_span next = kvc_tokens_part(w->tokens, w->node->end, (int64_t)w->node->end + 1);
    return if_found(w, kvc_node_among(w->node, &next).behind);
}

static kvc_node *next_beside(const walk *w) {
    kvc_node *next = kvc_node_beside(w->node, KVC_HIGH);
    return w->top && w->top != w->node ? next : if_found(w, next);
}

/* Goes to another node, which may free the one before. */
static void go_to(walk *w, kvc_node *node) {
    kvc_node *before = w->node;
    kvc_node_use(node, 1);
    w->node = node;
    kvc_node_use(before, -1);
}

/* Goes on: from a node that is done to the next one beside it, or to its parent, which then is done; otherwise to the
 * first node below it, or, if there is none, the node is done. */
static void go_on(walk *w) {
    kvc_node *next = w->is_done ? next_beside(w) : first_below(w);
    if (w->top == w->node && w->is_done) w->top = NULL; /* the walk leaves it */
    if (next) {
        go_to(w, next);
        /* All nodes below one in which the prompt ends are found. */
        if (!w->top && (w->needs_none || next->begin + common_with(w, next) == w->tokens->num_tokens)) w->top = next;
    } else if (w->is_done) {
        go_to(w, w->node->parent);
    }
    w->is_done = !next;
}

/* Returns whether all layers have windows or chunks, so that they leave any token behind. */
static int all_expire(const kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (!kvc_policy_expires(&cache->policies[g])) return 0;
    return 1;
}

/* ---- dropping ---------------------------------------------------------------------------------------------------- */

/* Drops the rows of a node that has any or is lost, and lists its name if it is full.  Returns 0 if n has no room. */
static int drop(kvc_node *node, names *n, int64_t *num_dropped) {
    const int32_t num = node->end - node->begin, is_full = num == node->tree->cache->pools[0].block_size;
    if (!node->rows && !kvc_node_is_lost(node)) return 1;
    if (is_full && n->to && n->num == n->most) return 0;
    *num_dropped += num;
    if (node->rows) kvc_node_drop(node);
    if (!is_full) return 1;
    if (n->to) memcpy(n->to + n->num++ * KVC_NAME_BYTES, node->named.name, KVC_NAME_BYTES);
    kvc_node_let_go(node);
    return 1;
}

/* Drops some nodes; returns whether there are more, and room for their names. */
static int drop_some(walk *w, names *n, int64_t *num_dropped) {
    for (int passed = 0, dropped = 0; passed < PASSED_AT_ONCE && dropped < DROPPED_AT_ONCE; passed++) {
        const int64_t before = *num_dropped;
        if (w->is_done && (!w->node->parent || !drop(w->node, n, num_dropped))) return 0;
        dropped += *num_dropped > before;
        go_on(w);
    }
    return 1;
}

/* Raises the clock and the horizon, so that the prefix keeps nothing more of sequences that are there now. */
static void raise_horizon(kvc_prefix *prefix) { prefix->horizon = ++prefix->cache->prefixes.clock; }

/* Ends what the prompt's rows may come from; from then on, nothing can come to them.  Then drops them.  In each part,
 * the clock rises: what is being written of the blocks that go is taken away again.  The horizon rises once more at the
 * end, so that values that were read meanwhile are not added. */
static void forget(kvc_prefix *prefix, walk *w, names *n, int64_t *num_dropped) {
    kvc_cache *cache = prefix->cache;
    kvc_tree *tree = prefix->tree;
    const kvc_token_span first = kvc_tokens_part(w->tokens, 0, 1);
    raise_horizon(prefix);
    kvc_sessions_drop_pending(prefix);
    tree->forgetting = first;
    w->node = &tree->root;
    kvc_node_use(w->node, 1);
    while (drop_some(w, n, num_dropped)) {
        kvc_cache_give_way(cache);
        cache->prefixes.clock++;
    }
    kvc_node_use(w->node, -1);
    for (int i = 1; tree->lost; i++) {
        kvc_node_let_go(tree->lost);
        if (i % PASSED_AT_ONCE == 0) kvc_cache_give_way(cache);
    }
    tree->forgetting = (kvc_token_span){0};
    raise_horizon(prefix);
}

kvc_status kvc_prefix_forget(kvc_prefix *prefix, const kvc_tokens *from, uint8_t *to, int64_t max_names,
                             int64_t *num_names, int64_t *num_dropped) {
    kvc_tokens tokens;
    walk w = {.tokens = &tokens, .needs_none = all_expire(prefix->cache)};
    names n = {.to = to, .most = max_names};
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (max_names < 0 || (to && !max_names) || (!to && max_names))
        return kvc_fail(KVC_ERR_INVALID, "max_names is %lld and names is %s: give room for at least one, or neither",
                        (long long)max_names, to ? "given" : "NULL");
    if (!num_names) return kvc_fail(KVC_ERR_INVALID, "num_names is NULL");
    if (!num_dropped) return kvc_fail(KVC_ERR_INVALID, "num_dropped is NULL");
    *num_dropped = 0;
    kvc_lock(prefix->cache); /* and drops no expired blocks, whose names would be lost */
    prefix->num_leaving += to != NULL;
    if (tokens.num_tokens) {
        kvc_cache_begin_gradual(prefix->cache);
        kvc_prefix_wait(prefix);
        forget(prefix, &w, &n, num_dropped);
        kvc_cache_end_gradual(prefix->cache);
    }
    *num_names = n.num;
    return kvc_unlock(prefix->cache, KVC_OK);
}

kvc_status kvc_prefix_end_forget(kvc_prefix *prefix) {
    kvc_status status = KVC_OK;
    kvc_lock(prefix->cache);
    if (prefix->num_leaving)
        prefix->num_leaving--;
    else
        status = kvc_fail(KVC_ERR_INVALID, "no call that forgot a prompt and gave names is left to end: end each once");
    return kvc_unlock(prefix->cache, status);
}
