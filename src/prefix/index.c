/* index.c: the full blocks of a tree by a hash of their own tokens: see index.h. */
#include "prefix/index.h"

#include <string.h>

#include "prefix/tree.h"

/* Returns what stands for a token. */
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

static kvc_node **list_of(const kvc_index *index, uint64_t hash) {
    return &index->lists[(hash ^ hash >> 32) & (uint64_t)(index->num_lists - 1)];
}

kvc_node *kvc_index_find(const kvc_index *index, uint64_t hash) { return *list_of(index, hash); }

void kvc_index_free(kvc_index *index, kvc_memory *memory) {
    const uint64_t size = (uint64_t)index->num_lists * sizeof *index->lists;
    kvc_memory_free(memory, index->lists, size, KVC_MEMORY_BOOKKEEPING, -1);
}

/* Puts a node at the beginning of a list. */
static void push(kvc_node **list, kvc_node *node) {
    node->next_same = *list;
    node->same_at = list;
    if (*list) (*list)->same_at = &node->next_same;
    *list = node;
}

/* Doubles the number of lists. */
static int grow(kvc_index *index, kvc_memory *memory) {
    kvc_index old = *index;
    const int64_t num = old.num_lists ? 2 * old.num_lists : 64;
    kvc_node **lists = kvc_memory_alloc(memory, (uint64_t)num * sizeof *lists, KVC_MEMORY_BOOKKEEPING, -1);
    if (!lists) return 0;
    memset(lists, 0, (size_t)num * sizeof *lists);
    *index = (kvc_index){lists, num, old.num};
    for (int64_t i = 0; i < old.num_lists; i++) {
        kvc_node *turned = NULL; /* the list from its end on, so that the order stays */
        for (kvc_node *node; (node = old.lists[i]);) {
            old.lists[i] = node->next_same;
            push(&turned, node);
        }
        for (kvc_node *node; (node = turned);) {
            turned = node->next_same;
            push(list_of(index, node->hash), node);
        }
    }
    kvc_index_free(&old, memory);
    return 1;
}

void kvc_index_add(kvc_index *index, kvc_node *node) {
    if (index->num == index->num_lists && !grow(index, &node->tree->cache->memory)) return;
    push(list_of(index, node->hash), node);
    index->num++;
}

void kvc_index_remove(kvc_index *index, kvc_node *node) {
    if (!node->same_at) return;
    *node->same_at = node->next_same;
    if (node->next_same) node->next_same->same_at = node->same_at;
    node->same_at = NULL;
    index->num--;
}
