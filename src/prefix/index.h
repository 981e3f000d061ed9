/* index.h: the full blocks of a tree, while they have rows, sorted by a hash of their own tokens. */
#ifndef KVC_INDEX_H
#define KVC_INDEX_H

#include "base/sorted.h"
#include "prefix/tokens.h"

struct kvc_node;

/* Returns a polynomial of tokens, in KVC_HASH_BASE, modulo 2^64; kvc_hash_on, that of the next tokens, behind the first
 * of these, where top is KVC_HASH_BASE to the power of their number - 1. */
#define KVC_HASH_BASE 0x9e3779b97f4a7c15u
uint64_t kvc_hash_tokens(const kvc_token_span *tokens);
uint64_t kvc_hash_on(uint64_t hash, const kvc_token_span *tokens, uint64_t top);

/* Returns the most recently used node with this hash, or NULL. */
struct kvc_node *kvc_index_find(const kvc_sorted *index, uint64_t hash);

/* Returns the next node with the same hash, from the most recently used on; NULL if there are no more. */
struct kvc_node *kvc_index_next(const struct kvc_node *node);

/* Adds a node, or takes it out. */
void kvc_index_add(kvc_sorted *index, struct kvc_node *node);
void kvc_index_remove(kvc_sorted *index, struct kvc_node *node);

#endif
