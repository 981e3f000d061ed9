/* match.c: finds which of a prompt's tokens are known: see match.h.
 *
 * Tokens are known if kept blocks hold all rows of them that the next token would see.  A node is a block.  It is live
 * while it has rows and has not expired, and complete if it has the rows of all its tokens: windows may have dropped
 * some.  A piece is the rows of a live node, up to the last token that the node has in common with the prompt. */
#include "prefix/match.h"

#include <string.h>

static uint64_t size_of(const kvc_match *m) { return (uint64_t)m->room * sizeof *m->pieces; }

/* Adds the rows of a node, of which the tokens before `end` are the prompt's. */
static kvc_status add_piece(kvc_match *m, const kvc_node *node, int32_t end) {
    kvc_memory *memory = &node->tree->cache->memory;
    if (node->rows->call.in_place) return KVC_OK; /* a call is writing them */
    if (m->num == m->room) {
        kvc_match more = *m;
        more.room = 2 * m->room;
        more.pieces = kvc_memory_alloc(memory, size_of(&more), KVC_MEMORY_SCRATCH, -1);
        if (!more.pieces) return kvc_fail(KVC_ERR_NOMEM, "out of memory to find %d blocks", more.room);
        memcpy(more.pieces, m->pieces, (size_t)size_of(m));
        kvc_memory_free(memory, m->pieces, size_of(m), KVC_MEMORY_SCRATCH, -1);
        *m = more;
    }
    m->pieces[m->num++] = (kvc_piece){node->rows, node->begin, end};
    return KVC_OK;
}

/* Adds the rows of children that begin with some of these tokens, those with the most first.  Ends with a complete
 * child: no other adds anything. */
static kvc_status add_alike(kvc_match *m, const kvc_node *parent, const kvc_token_span *tokens) {
    kvc_alike alike = kvc_alike_begin(parent, tokens);
    int32_t common;
    for (kvc_node *node; (node = kvc_alike_next(&alike, &common));) {
        KVC_TRY(add_piece(m, node, parent->end + common));
        if (kvc_node_is_complete(node)) break;
    }
    return KVC_OK;
}

/* Adds the rows of all blocks of the prompt's tokens below `limit`. */
static kvc_status add_blocks(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *m) {
    const int32_t block = prefix->cache->pools[0].block_size;
    m->last = &prefix->tree->root;
    while (m->last->end < limit) {
        const kvc_token_span part = kvc_tokens_part(tokens, m->last->end, (int64_t)m->last->end + block);
        kvc_node *child = part.num == block ? kvc_node_child(m->last, &part) : NULL;
        if (child && kvc_node_is_live(child) && kvc_node_is_complete(child))
            KVC_TRY(add_piece(m, child, child->end));
        else if (part.num)
            KVC_TRY(add_alike(m, m->last, &part));
        if (!child) break;
        m->last = child;
    }
    return KVC_OK;
}

kvc_node *kvc_match_path(const kvc_match *m, int32_t position) {
    kvc_node *node = m->last;
    while (node->end > position) node = node->parent;
    return node;
}

/* Finds the last state behind which the prompt can resume: the rows of the tokens before it must match, too.  Goes back
 * from m->with_rows, block by block; `limit` is where the state may be at most. */
static void find_state(const kvc_prefix *prefix, const kvc_tokens *tokens, kvc_piece_list *pieces, kvc_match *m) {
    m->known = 0;
    const int32_t block = prefix->cache->pools[0].block_size;
    const kvc_node *parent = m->last;
    for (int32_t limit = prefix->tree->checkpoints.num ? m->with_rows : 0; limit;) {
        const int32_t begin = (limit - 1) / block * block; /* of the block that has the last token */
        while (parent->end > begin) parent = parent->parent;
        const kvc_token_span part = kvc_tokens_part(tokens, begin, limit);
        kvc_node *node = parent->end == begin ? kvc_node_with_state(parent, &part) : NULL;
        limit = node ? kvc_pieces_match(pieces, node->end) : begin;
        if (!node || limit < node->end) continue; /* no state, or rows are missing before it */
        m->with_state = node;
        m->known = limit;
        return;
    }
}

/* Finds the known tokens among the first `limit` of blocks that were added. */
static kvc_status find_known(const kvc_prefix *prefix, const kvc_tokens *tokens, int32_t limit, kvc_match *m) {
    kvc_cache *cache = prefix->cache;
    const uint64_t size = ((uint64_t)cache->num_token_groups + 1) * sizeof(kvc_covered);
    kvc_covered *covered = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!covered) return kvc_fail(KVC_ERR_NOMEM, "out of memory to match %d blocks", m->num);
    kvc_piece_list pieces = kvc_pieces_begin(cache, m->pieces, m->num, covered);
    m->known = m->with_rows = kvc_pieces_match(&pieces, limit);
    if (prefix->state_bytes) find_state(prefix, tokens, &pieces, m);
    kvc_memory_free(&cache->memory, covered, size, KVC_MEMORY_SCRATCH, -1);
    return KVC_OK;
}

kvc_status kvc_match_find(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *m) {
    kvc_cache *cache = prefix->cache;
    const int64_t most = limit / cache->pools[0].block_size + 4; /* pieces, at first: a block each, and a few others */
    *m = (kvc_match){.room = most < INT32_MAX ? (int32_t)most : INT32_MAX};
    m->pieces = kvc_memory_alloc(&cache->memory, size_of(m), KVC_MEMORY_SCRATCH, -1);
    if (!m->pieces) return kvc_fail(KVC_ERR_NOMEM, "out of memory to find %lld tokens", (long long)limit);
    if (kvc_tree_is_forgetting(prefix->tree, kvc_tokens_part(tokens, 0, 1))) limit = 0;
    kvc_status status = add_blocks(prefix, tokens, limit, m);
    if (status == KVC_OK) status = find_known(prefix, tokens, (int32_t)limit, m);
    if (status != KVC_OK) kvc_match_free(cache, m);
    return status;
}

void kvc_match_free(kvc_cache *cache, const kvc_match *m) {
    kvc_memory_free(&cache->memory, m->pieces, size_of(m), KVC_MEMORY_SCRATCH, -1);
}

/* Marks the nodes of pieces that begin in [begin, end) as used: the first ones last, so that they stay longest. */
static void touch_pieces(const kvc_match *m, int32_t begin, int32_t end) {
    for (int32_t i = m->num - 1; i >= 0; i--)
        if (m->pieces[i].begin >= begin && m->pieces[i].begin < end) kvc_node_relist(kvc_match_node(m, i));
}

void kvc_match_touch(const kvc_match *m) {
    const int32_t begin = m->with_state ? m->with_state->begin : 0;
    kvc_node_use(m->last, 1); /* so that no change below it goes up to the root */
    touch_pieces(m, begin, m->known);
    if (m->with_state) kvc_node_relist(m->with_state); /* others may have the rows of its tokens, and states behind */
    touch_pieces(m, 0, begin);
    kvc_node_use(m->last, -1);
}
