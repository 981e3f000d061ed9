/* forget.c: kvc_prefix_forget: drops whatever holds rows of a prompt's tokens, and of what follows the whole prompt. */
#include <string.h>

#include "cache/origin.h"
#include "cache/waiting.h"
#include "prefix/pin.h"

enum { AT_ONCE = 16 }; /* blocks that are dropped before others get the mutex */

/* The next blocks to drop. */
typedef struct doomed {
    const kvc_tokens *tokens;
    kvc_node *nodes[AT_ONCE];
    int32_t num;
    int32_t needs_none; /* behind the prompt's tokens, others may match without their rows */
} doomed;

static void add(doomed *d, kvc_node *node) {
    if (node->rows && d->num < AT_ONCE) d->nodes[d->num++] = node;
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* Returns the last node below a node, in an order by distance from the root; the node itself if it has no children. */
static kvc_node *last_below(kvc_node *node) {
    while (node->children.num) node = kvc_node_end(node, 1);
    return node;
}

/* Adds nodes below one, the last ones first. */
static void add_below(doomed *d, kvc_node *top) {
    for (kvc_node *node = last_below(top); node != top && d->num < AT_ONCE;) {
        kvc_node *before = kvc_node_beside(node, 0);
        add(d, node);
        node = before ? last_below(before) : node->parent;
    }
}

/* Adds a child that has some of the next tokens of the prompt; if it has all that are left, or what follows needs none
 * of them, also what follows. */
static void add_child(doomed *d, kvc_node *child, int32_t common) {
    if (d->needs_none || child->begin + common == d->tokens->num_tokens) add_below(d, child);
    add(d, child);
}

/* Adds children that begin with some of these tokens. */
static void add_alike(doomed *d, const kvc_node *parent, const kvc_token_span *tokens) {
    const kvc_among place = kvc_node_among(parent, tokens);
    for (int side = 0; side < 2; side++) {
        kvc_node *child = side ? place.behind : place.before;
        for (; child && d->num < AT_ONCE; child = kvc_node_beside(child, side)) {
            const int32_t common = kvc_tokens_common(&child->tokens, tokens);
            if (!common) break;
            add_child(d, child, common);
        }
    }
}

/* Returns whether all layers have windows or chunks, so that they leave any token behind. */
static int all_expire(const kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (!kvc_policy_expires(&cache->policies[g])) return 0;
    return 1;
}

/* Finds nodes that hold rows of the prompt's tokens, or stand behind all of them: those at its end first. */
static void find(const kvc_prefix *prefix, doomed *d) {
    const int32_t block = prefix->cache->pools[0].block_size;
    kvc_node *node = &prefix->tree->root;
    while (!d->needs_none) {
        const kvc_token_span part = kvc_tokens_part(d->tokens, node->end, (int64_t)node->end + block);
        kvc_node *child = part.num == block ? kvc_node_child(node, &part) : NULL;
        if (!child) break;
        node = child;
    }
    for (d->num = 0; node && d->num < AT_ONCE; node = node->parent) {
        const kvc_token_span part = kvc_tokens_part(d->tokens, node->end, (int64_t)node->end + block);
        if (part.num) add_alike(d, node, &part);
    }
}

/* ---- dropping ---------------------------------------------------------------------------------------------------- */

/* Names of full blocks that were dropped. */
typedef struct names {
    uint8_t *to; /* [most][KVC_NAME_BYTES] NULL: nobody asks */
    int64_t num, most;
} names;

/* Drops these nodes, until there is no room for more names. */
static void drop(const kvc_prefix *prefix, const doomed *d, names *n, int64_t *num_dropped) {
    for (int32_t i = 0; i < d->num; i++) kvc_node_use(d->nodes[i], 1); /* one may be freed with another */
    for (int32_t i = 0; i < d->num; i++) {
        kvc_node *node = d->nodes[i];
        const int32_t num = node->end - node->begin, is_full = num == prefix->cache->pools[0].block_size;
        if (!is_full || !n->to || n->num < n->most) {
            if (is_full && n->to) memcpy(n->to + n->num++ * KVC_NAME_BYTES, node->name, KVC_NAME_BYTES);
            *num_dropped += num;
            kvc_node_drop(node);
        }
        kvc_node_use(node, -1);
    }
}

/* Once nothing is left: keeps no blocks of sequences that hold rows of the prompt, nor such as are on their way.  An
 * acquired sequence whose rows windows have all left behind counts: rows may be kept aside, or a state made of them. */
static void end_sources(kvc_prefix *prefix, const kvc_tokens *tokens) {
    kvc_cache *cache = prefix->cache;
    const kvc_token_span first = kvc_tokens_part(tokens, 0, 1);
    kvc_origin_forget(cache, prefix->bit);
    prefix->forgot = cache->num_forgets;
    for (kvc_session *session = NULL; (session = kvc_session_beginning(cache, &first, session));) {
        kvc_sequence *sequence = session->sequence;
        if (!sequence->in_batch && kvc_sequence_is_blank(sequence)) continue;
        kvc_origin_mark(cache, sequence, prefix->bit);
        if (session->prefix == prefix) kvc_session_forget(session);
    }
    kvc_pin_remove_all(prefix);
}

kvc_status kvc_prefix_forget(kvc_prefix *prefix, const kvc_tokens *from, uint8_t *to, int64_t max_names,
                             int64_t *num_names, int64_t *num_dropped) {
    kvc_tokens tokens;
    doomed d = {.tokens = &tokens, .needs_none = all_expire(prefix->cache)};
    names n = {.to = to, .most = max_names};
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (max_names < 0 || (to && !max_names) || (!to && max_names))
        return kvc_fail(KVC_ERR_INVALID, "max_names is %lld and names is %s: give room for at least one, or neither",
                        (long long)max_names, to ? "given" : "NULL");
    if (!num_names) return kvc_fail(KVC_ERR_INVALID, "num_names is NULL");
    if (!num_dropped) return kvc_fail(KVC_ERR_INVALID, "num_dropped is NULL");
    *num_dropped = 0;
    kvc_prefix_lock(prefix);
    if (tokens.num_tokens) prefix->cache->num_forgets++; /* what is being written of these blocks is taken away again */
    for (find(prefix, &d); tokens.num_tokens && d.num && (!to || n.num < n.most); find(prefix, &d)) {
        drop(prefix, &d, &n, num_dropped);
        kvc_cache_give_way(prefix->cache);
    }
    if (tokens.num_tokens && !d.num) end_sources(prefix, &tokens);
    *num_names = n.num;
    return kvc_unlock(prefix->cache, KVC_OK);
}

int64_t kvc_prefix_forgot(kvc_prefix *prefix) {
    kvc_lock(prefix->cache);
    const int64_t forgot = prefix->forgot;
    kvc_unlock(prefix->cache, KVC_OK);
    return forgot;
}
