/* index.h: the full blocks of a tree, while they have rows, by a hash of their own tokens. */
#ifndef KVC_INDEX_H
#define KVC_INDEX_H

#include "base/memory.h"
#include "prefix/tokens.h"

struct kvc_node;

/* A hash table of lists. */
typedef struct kvc_index {
    struct kvc_node **lists; /* [num_lists], a power of two, or 0 */
    int64_t num_lists, num;
} kvc_index;

/* Returns a polynomial of tokens, in KVC_HASH_BASE, modulo 2^64; kvc_hash_on, that of the next tokens, behind the first
 * of these, where top is KVC_HASH_BASE to the power of their number - 1. */
#define KVC_HASH_BASE 0x9e3779b97f4a7c15u
uint64_t kvc_hash_tokens(const kvc_token_span *tokens);
uint64_t kvc_hash_on(uint64_t hash, const kvc_token_span *tokens, uint64_t top);

/* Returns the first node of the list that has all those with this hash, the last one added first, and others; NULL: it
 * is empty. */
struct kvc_node *kvc_index_find(const kvc_index *index, uint64_t hash);

/* Adds a node with its tokens, or leaves it out if memory is short; takes it out, if it is there. */
void kvc_index_add(kvc_index *index, struct kvc_node *node);
void kvc_index_remove(kvc_index *index, struct kvc_node *node);

void kvc_index_free(kvc_index *index, kvc_memory *memory);

#endif
