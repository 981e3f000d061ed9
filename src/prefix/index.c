/* index.c: the full blocks (nodes) of a tree, sorted by a hash of their own tokens: see index.h.  Of nodes with the
 * same hash, the most recently used comes first. */
#include "prefix/index.h"

#include <stddef.h>
#include <string.h>

#include "prefix/tree.h"

/* Returns the number that the hash has for a token: its id, or the beginning of its digest. */
static uint64_t value_of(const kvc_token_span *tokens, int32_t i) {
    const uint8_t *digest = kvc_tokens_digest(tokens, i);
    uint64_t value;
    if (!digest) return (uint64_t)tokens->ids[i];
    memcpy(&value, digest, sizeof value);
    return value;
}

uint64_t kvc_hash_tokens(const kvc_token_span *tokens) {
    uint64_t hash = 0;
    for (int32_t i = 0; i < tokens->num; i++) hash = hash * KVC_HASH_BASE + value_of(tokens, i);
    return hash;
}

uint64_t kvc_hash_on(uint64_t hash, const kvc_token_span *tokens, uint64_t top) {
    return (hash - value_of(tokens, 0) * top) * KVC_HASH_BASE + value_of(tokens, tokens->num - 1);
}

/* Return the node whose place in an index is given; at() returns NULL for NULL. */
static kvc_node *at(kvc_links *links) {
    return links ? (void *)((char *)links - offsetof(kvc_node, named.same)) : NULL;
}

static const kvc_node *seen_at(const kvc_links *links) {
    return (const void *)((const char *)links - offsetof(kvc_node, named.same));
}

/* Returns whether a node stands before one with this hash and this last use. */
static int stands_before(const kvc_node *node, uint64_t hash, int64_t used) {
    return node->named.hash < hash || (node->named.hash == hash && node->rows->evicting.used > used);
}

kvc_node *kvc_index_find(const kvc_sorted *index, uint64_t hash) {
    kvc_node *first = NULL; /* with this hash or a higher one */
    for (kvc_links *next = index->root; next;) {
        const int is_before = stands_before(at(next), hash, INT64_MAX); /* before all nodes with it */
        if (!is_before) first = at(next);
        next = next->below[is_before];
    }
    return first && first->named.hash == hash ? first : NULL;
}

kvc_node *kvc_index_next(const kvc_node *node) {
    kvc_node *next = at(kvc_sorted_beside(&node->named.same, KVC_HIGH));
    return next && next->named.hash == node->named.hash ? next : NULL;
}

static int is_behind(const kvc_links *member, const kvc_links *other) {
    const kvc_node *node = seen_at(member);
    return stands_before(seen_at(other), node->named.hash, node->rows->evicting.used);
}

void kvc_index_add(kvc_sorted *index, kvc_node *node) { kvc_sorted_add(index, &node->named.same, is_behind); }

void kvc_index_remove(kvc_sorted *index, kvc_node *node) { kvc_sorted_remove(index, &node->named.same); }
