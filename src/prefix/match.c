/* match.c: finds what a prefix knows of a prompt: see match.h. */
#include "prefix/match.h"

#include "edit/retain.h"

static kvc_status new_match(const kvc_prefix *prefix, const kvc_tokens *tokens, kvc_match *p) {
    const int64_t most = tokens->num_tokens / prefix->cache->pools[0].block_size + 1;
    *p = (kvc_match){.size = (uint64_t)most * 2 * sizeof(void *)};
    p->nodes = kvc_memory_alloc(&prefix->cache->memory, p->size, KVC_MEMORY_SCRATCH, -1);
    if (!p->nodes) return kvc_fail(KVC_ERR_NOMEM, "out of memory to find %lld tokens", (long long)tokens->num_tokens);
    p->items = (kvc_sequence **)(void *)(p->nodes + most);
    return KVC_OK;
}

void kvc_match_free(kvc_cache *cache, const kvc_match *p) {
    kvc_memory_free(&cache->memory, p->nodes, p->size, KVC_MEMORY_SCRATCH, -1);
}

/* Finds the nodes of a prompt, the last one perhaps of other tokens at its end; not behind one without rows, unless
 * `gaps` may be between them. */
static void find_nodes(const kvc_prefix *prefix, const kvc_tokens *tokens, int gaps, kvc_match *p) {
    const int32_t block = prefix->cache->pools[0].block_size;
    kvc_node *last = &prefix->tree->root, *node;
    kvc_token_span part = kvc_tokens_part(tokens, 0, block);
    int32_t common;
    p->num = p->is_cut = 0;
    while (part.num == block && (node = kvc_node_child(last, &part))) {
        p->is_cut = !kvc_node_is_live(node) && !gaps;
        if (p->is_cut) break;
        p->nodes[p->num++] = last = node;
        part = kvc_tokens_part(tokens, last->end, (int64_t)last->end + block);
    }
    while (p->num && !kvc_node_is_live(p->nodes[p->num - 1])) p->num--; /* it would hide those that begin alike */
    last = p->num ? p->nodes[p->num - 1] : &prefix->tree->root;
    p->end = last->end;
    part = kvc_tokens_part(tokens, last->end, (int64_t)last->end + block);
    node = part.num ? kvc_node_similar(last, &part, &common) : NULL;
    if (node) {
        p->nodes[p->num++] = node;
        p->end += common;
    }
    for (int32_t i = 0; i < p->num; i++) p->items[i] = kvc_node_is_live(p->nodes[i]) ? p->nodes[i]->rows : NULL;
}

/* Finds how many of the first tokens these nodes hold. */
static kvc_status match_nodes(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, int gaps, kvc_match *p,
                              int32_t *matched) {
    find_nodes(prefix, tokens, gaps, p);
    return kvc_match_items(prefix->cache, p->items, p->num, p->end < limit ? p->end : (int32_t)limit, matched);
}

/* Lengthens a match by a block of fewer tokens that has what windows see, in place of the one that has lost it. */
static kvc_status match_shorter(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *p,
                                int32_t *matched) {
    const int32_t i = *matched / prefix->cache->pools[0].block_size;
    int32_t common, with_shorter;
    if (i >= p->num || *matched >= limit) return KVC_OK;
    const kvc_node *parent = i ? p->nodes[i - 1] : &prefix->tree->root;
    const kvc_token_span part = kvc_tokens_part(tokens, parent->end, p->nodes[i]->end);
    kvc_node *node = kvc_node_similar(parent, &part, &common);
    if (!node || node == p->nodes[i]) return KVC_OK;
    kvc_sequence *rows = p->items[i];
    const int32_t end = parent->end + common;
    p->items[i] = node->rows;
    KVC_TRY(kvc_match_items(prefix->cache, p->items, i + 1, end < limit ? end : (int32_t)limit, &with_shorter));
    p->items[i] = rows;
    if (with_shorter <= *matched) return KVC_OK;
    p->nodes[i] = node;
    p->items[i] = node->rows;
    p->num = i + 1;
    *matched = with_shorter;
    return KVC_OK;
}

/* Finds how many of the first tokens are there, at most `limit`.  Where windows see nothing of a gap, what is behind it
 * counts. */
static kvc_status find_match(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *p,
                             int32_t *matched) {
    int32_t with_gaps = 0;
    KVC_TRY(new_match(prefix, tokens, p));
    kvc_status status = match_nodes(prefix, tokens, limit, 0, p, matched);
    if (status == KVC_OK && p->is_cut) {
        status = match_nodes(prefix, tokens, limit, 1, p, &with_gaps);
        if (with_gaps > *matched)
            *matched = with_gaps;
        else if (status == KVC_OK)
            status = match_nodes(prefix, tokens, limit, 0, p, matched);
    }
    if (status == KVC_OK) status = match_shorter(prefix, tokens, limit, p, matched);
    if (status != KVC_OK) kvc_match_free(prefix->cache, p);
    return status;
}

/* Shortens a match to the last checkpoint within it, where the model has a recurrent state; NULL: nothing matches. */
static kvc_status match_checkpoint(const kvc_prefix *prefix, const kvc_tokens *tokens, kvc_match *p, int32_t *matched,
                                   kvc_checkpoint **found) {
    const int32_t block = prefix->cache->pools[0].block_size;
    int32_t limit = prefix->tree->checkpoints.num ? *matched : 0;
    *found = NULL;
    if (!prefix->state_bytes) return KVC_OK;
    while (limit) {
        const int32_t i = (limit - 1) / block; /* of the block that has the last token */
        const kvc_node *parent = i ? p->nodes[i - 1] : &prefix->tree->root;
        const kvc_token_span part = kvc_tokens_part(tokens, parent->end, limit);
        kvc_node *node = kvc_node_with_state(parent, &part);
        limit = node ? node->end - 1 : parent->end;
        if (!node) continue;
        p->nodes[i] = node;
        p->items[i] = node->rows;
        p->num = i + 1;
        KVC_TRY(kvc_match_items(prefix->cache, p->items, p->num, node->end, matched));
        *found = node->checkpoint;
        if (*matched == node->end) return KVC_OK;
    }
    *found = NULL;
    *matched = p->num = 0;
    return KVC_OK;
}

kvc_status kvc_prefix_match(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *p,
                            int32_t *matched, kvc_checkpoint **state) {
    KVC_TRY(find_match(prefix, tokens, limit, p, matched));
    p->with_rows = *matched;
    const kvc_status status = match_checkpoint(prefix, tokens, p, matched, state);
    if (status != KVC_OK) kvc_match_free(prefix->cache, p);
    return status;
}

kvc_status kvc_prefix_find(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens, kvc_node **last) {
    const int32_t block = prefix->cache->pools[0].block_size;
    kvc_node *node = NULL;
    kvc_match p;
    int32_t matched;
    *last = &prefix->tree->root;
    for (; (*last)->end < num_tokens; *last = node) {
        const int64_t end = (int64_t)(*last)->end + block;
        const kvc_token_span part = kvc_tokens_part(tokens, (*last)->end, end < num_tokens ? end : num_tokens);
        node = kvc_node_child(*last, &part);
        if (!node || !kvc_node_is_live(node)) break;
    }
    if (!node || kvc_node_is_live(node)) return KVC_OK;
    KVC_TRY(find_match(prefix, tokens, num_tokens, &p, &matched));
    for (int32_t i = 0; i < p.num && p.nodes[i]->end <= matched; i++) {
        const int32_t end = p.nodes[i]->end;
        if (end > (*last)->end && (end % block == 0 || end == num_tokens)) *last = p.nodes[i];
    }
    kvc_match_free(prefix->cache, &p);
    return KVC_OK;
}
