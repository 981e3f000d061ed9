/* reuse.c: goes on with tokens that were computed elsewhere: see reuse.h.
 *
 * A chunk is tokens of the prompt that stand in a row in kept blocks (nodes), behind other tokens.  Its rows are
 * shared, moved to the prompt's positions, and marked as inexact.  The index finds full blocks by a hash of their
 * tokens.  The chunk may begin with the last tokens of the block before the one that was found: `skipped` tokens. */
#include "prefix/reuse.h"

#include "edit/share.h"
#include "prefix/prefix.h"
#include "space/evict.h"

enum { MOST_CANDIDATES = 32 }; /* nodes with the same hash that are looked at */

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* It stands at positions from `begin` on, in the nodes on the path to `last`. */
typedef struct chunk {
    kvc_node *last;
    int32_t begin, num_tokens;
} chunk;

/* Returns whether the block before a node ends with the `num` tokens that stand at a position of the prompt. */
static int ends_before(const kvc_node *node, const kvc_tokens *tokens, int64_t position, int32_t num) {
    const kvc_node *before = node->parent;
    if (!num) return 1;
    if (!kvc_node_is_live(before) || before->tokens.num < num) return 0;
    const int32_t from = before->tokens.num - num;
    const uint8_t *digests = before->tokens.digests;
    const kvc_token_span own = {before->tokens.ids + from, digests ? digests + from * KVC_NAME_BYTES : NULL, num},
                         wanted = kvc_tokens_part(tokens, position, position + num);
    return kvc_tokens_common(&own, &wanted) == num;
}

/* Returns the child with all its rows that shares the most first tokens with these; NULL if no child shares any.
 */
static kvc_node *find_next(const kvc_node *parent, const kvc_token_span *tokens, int32_t *common) {
    kvc_alike alike = kvc_alike_begin(parent, tokens);
    for (kvc_node *node; (node = kvc_alike_next(&alike, common));)
        if (kvc_node_is_complete(node)) return node;
    return NULL;
}

/* Returns the chunk at a position of the prompt whose first `skipped` tokens end the block before a node, and which
 * goes on with the node, and below it as far as tokens are the prompt's. */
static chunk extend(kvc_node *node, const kvc_tokens *tokens, int64_t position, int32_t skipped) {
    chunk found = {node, node->begin - skipped, skipped + node->tokens.num};
    int32_t common = node->tokens.num;
    while (common == found.last->tokens.num && position + found.num_tokens < tokens->num_tokens) {
        const int64_t begin = position + found.num_tokens;
        const kvc_token_span part = kvc_tokens_part(tokens, begin, begin + node->tokens.num);
        kvc_node *next = find_next(found.last, &part, &common);
        if (!next) break;
        found.last = next;
        found.num_tokens += common;
    }
    return found;
}

/* Returns the longest chunk of the prompt at a position.  Its num_tokens may be 0. */
static chunk find_chunk(const kvc_sorted *index, const kvc_tokens *tokens, int64_t position, int32_t block) {
    chunk best = {0};
    uint64_t hash = 0, top = 1;
    if (!index->num || position + block > tokens->num_tokens) return best;
    for (int32_t i = 1; i < block; i++) top *= KVC_HASH_BASE;
    const kvc_token_span first = kvc_tokens_part(tokens, position, position + block);
    hash = kvc_hash_tokens(&first);
    for (int32_t skipped = 0; skipped < block; skipped++) {
        const int64_t begin = position + skipped;
        if (begin + block > tokens->num_tokens) break;
        const kvc_token_span part = kvc_tokens_part(tokens, begin, begin + block);
        int left = MOST_CANDIDATES;
        for (kvc_node *node = kvc_index_find(index, hash); node && left; node = kvc_index_next(node), left--) {
            if (!kvc_node_is_live(node) || kvc_tokens_compare(&node->tokens, &part)) continue;
            if (!ends_before(node, tokens, position, skipped)) continue;
            const chunk found = extend(node, tokens, position, skipped);
            if (found.num_tokens > best.num_tokens) best = found;
        }
        const kvc_token_span longer = kvc_tokens_part(tokens, begin, begin + block + 1); /* for the next hash */
        if (longer.num > block) hash = kvc_hash_on(hash, &longer, top);
    }
    return best;
}

/* ---- moving ------------------------------------------------------------------------------------------------------ */

/* Shares the rows of a chunk's nodes, which are listed from the last on, with a sequence; returns whether it could. */
static int share_nodes(kvc_cache *cache, const chunk *c, kvc_node **nodes, int32_t num, int64_t id) {
    const int32_t end = c->begin + c->num_tokens;
    for (int32_t from = c->begin, to; from < end; from = to) {
        const kvc_node *node = nodes[--num];
        to = node->end < end ? node->end : end;
        if (!node->rows || kvc_share_rows(cache, node->rows, id, from, to) != KVC_OK) return 0;
    }
    return 1;
}

/* Makes a sequence of the rows of a chunk; returns whether it has all of them. */
static int gather_chunk(kvc_cache *cache, const chunk *c, int64_t id) {
    int32_t num = 0;
    for (const kvc_node *node = c->last; node->end > c->begin; node = node->parent) num++;
    const uint64_t size = (uint64_t)num * sizeof(kvc_node *);
    kvc_node **nodes = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!nodes) return 0;
    kvc_node *node = c->last;
    for (int32_t i = 0; i < num; node = node->parent) nodes[i++] = node;
    const int is_shared = share_nodes(cache, c, nodes, num, id);
    kvc_memory_free(&cache->memory, nodes, size, KVC_MEMORY_SCRATCH, -1);
    if (!is_shared) return 0;
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (!sequence || sequence->runs[g].num_rows != c->num_tokens) return 0;
    return 1;
}

/* Returns whether a prompt is acquired without the chunk after this failure, in place of failing. */
static int is_harmless(kvc_status status) {
    return status == KVC_ERR_FULL || status == KVC_ERR_NOMEM || status == KVC_ERR_UNSUPPORTED;
}

/* Adds a chunk to a sequence at a position, and sets *is_moved to whether it could.  Releases the mutex meanwhile. */
static kvc_status move_chunk(kvc_cache *cache, const chunk *c, int64_t seq_id, int32_t position, int *is_moved) {
    const int64_t id = kvc_cache_new_id(cache);
    const int32_t delta = position - c->begin, end = position + c->num_tokens;
    kvc_status status = gather_chunk(cache, c, id) ? KVC_OK : KVC_ERR_FULL;
    kvc_cache_set_in_call(cache, id, 1);
    kvc_unlock(cache, KVC_OK);
    if (status == KVC_OK) status = kvc_shift(cache, id, 0, KVC_END, delta);
    if (status == KVC_OK) status = kvc_share(cache, id, seq_id, position, end);
    if (status == KVC_OK) status = kvc_mark_inexact(cache, seq_id, position);
    kvc_clear_sequence(cache, id);
    kvc_lock(cache);
    *is_moved = status == KVC_OK;
    return is_harmless(status) ? KVC_OK : status;
}

kvc_status kvc_reuse(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, int64_t seq_id, int32_t *matched) {
    kvc_cache *cache = prefix->cache;
    kvc_status status = KVC_OK;
    int is_moved = 1;
    kvc_lock(cache);
    /* While a call forgets a prompt, some of its blocks are still in the index. */
    while (is_moved && !prefix->tree->forgetting.num && limit - *matched >= prefix->reuse_min) {
        chunk c = find_chunk(&prefix->tree->index, tokens, *matched, cache->pools[0].block_size);
        if (c.num_tokens > limit - *matched) c.num_tokens = (int32_t)(limit - *matched);
        if (c.num_tokens < prefix->reuse_min) break;
        status = move_chunk(cache, &c, seq_id, *matched, &is_moved);
        if (!is_moved) break;
        *matched += c.num_tokens;
    }
    return kvc_unlock(cache, status);
}
