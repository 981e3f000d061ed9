/* checkpoint.c: the recurrent states of a model: see checkpoint.h. */
#include "prefix/checkpoint.h"

#include <string.h>

#include "cache/waiting.h"
#include "space/evict.h"

enum { NEIGHBOURS = 32 }; /* children to look at, to either side of where the tokens would stand */

kvc_status kvc_checkpoint_new(kvc_cache *cache, int32_t position, const void *state, int64_t num_bytes,
                              kvc_checkpoint **out) {
    const uint64_t size = sizeof **out + (uint64_t)num_bytes;
    while (cache->max_bytes && kvc_cache_wait_pages(cache)) continue;
    kvc_checkpoint *checkpoint = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!checkpoint)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for a checkpoint of %lld bytes", (long long)num_bytes);
    *checkpoint = (kvc_checkpoint){.position = position, .num_users = 1, .num_bytes = num_bytes};
    const kvc_status status = kvc_fit_max_bytes(cache, "keeping a checkpoint");
    if (status != KVC_OK) {
        kvc_checkpoint_use(cache, checkpoint, -1);
        return status;
    }
    kvc_cache_begin_reading(cache);
    kvc_unlock(cache, KVC_OK);
    memcpy(kvc_checkpoint_state(checkpoint), state, (size_t)num_bytes);
    kvc_lock(cache);
    kvc_cache_end_reading(cache);
    *out = checkpoint;
    return KVC_OK;
}

void kvc_checkpoint_use(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add) {
    if (!checkpoint) return;
    checkpoint->num_users += add;
    if (!checkpoint->num_users)
        kvc_memory_free(&cache->memory, checkpoint, (uint64_t)kvc_checkpoint_bytes(checkpoint), KVC_MEMORY_BOOKKEEPING,
                        -1);
}

void kvc_checkpoint_read(kvc_cache *cache, kvc_checkpoint *checkpoint, void *state) {
    kvc_checkpoint_use(cache, checkpoint, 1);
    kvc_cache_begin_reading(cache);
    kvc_unlock(cache, KVC_OK);
    memcpy(state, kvc_checkpoint_state(checkpoint), (size_t)checkpoint->num_bytes);
    kvc_lock(cache);
    kvc_cache_end_reading(cache);
    kvc_checkpoint_use(cache, checkpoint, -1);
}

/* ---- of nodes ---------------------------------------------------------------------------------------------------- */

static void list(kvc_tree *tree, kvc_checkpoint *checkpoint) {
    checkpoint->newer = NULL;
    checkpoint->older = tree->newest_checkpoint;
    *(tree->newest_checkpoint ? &tree->newest_checkpoint->newer : &tree->oldest_checkpoint) = checkpoint;
    tree->newest_checkpoint = checkpoint;
    tree->checkpoint_bytes += checkpoint->num_bytes;
    tree->num_checkpoints++;
}

static void unlist(kvc_tree *tree, kvc_checkpoint *checkpoint) {
    *(checkpoint->older ? &checkpoint->older->newer : &tree->oldest_checkpoint) = checkpoint->newer;
    *(checkpoint->newer ? &checkpoint->newer->older : &tree->newest_checkpoint) = checkpoint->older;
    tree->checkpoint_bytes -= checkpoint->num_bytes;
    tree->num_checkpoints--;
}

void kvc_checkpoint_touch(kvc_tree *tree, kvc_checkpoint *checkpoint) {
    unlist(tree, checkpoint);
    list(tree, checkpoint);
}

/* Returns where the node's list goes on with those at a position, or before it. */
static kvc_checkpoint **find(kvc_node *node, int32_t position) {
    kvc_checkpoint **at = &node->checkpoints;
    while (*at && (*at)->position > position) at = &(*at)->next;
    return at;
}

/* Drops the checkpoint that stands at a place of the node's list. */
static void detach(kvc_node *node, kvc_checkpoint **at) {
    kvc_checkpoint *checkpoint = *at;
    *at = checkpoint->next;
    unlist(node->tree, checkpoint);
    kvc_checkpoint_use(node->tree->cache, checkpoint, -1);
}

void kvc_node_detach_all(kvc_node *node) {
    while (node->checkpoints) detach(node, &node->checkpoints);
}

void kvc_node_attach(kvc_node *node, kvc_checkpoint *checkpoint) {
    kvc_tree *tree = node->tree;
    kvc_checkpoint **at = find(node, checkpoint->position);
    if (*at && (*at)->position == checkpoint->position) {
        kvc_checkpoint_touch(tree, *at);
        return;
    }
    checkpoint->node = node;
    checkpoint->next = *at;
    *at = checkpoint;
    kvc_checkpoint_use(tree->cache, checkpoint, 1);
    list(tree, checkpoint);
    while (tree->most_checkpoint_bytes && tree->checkpoint_bytes > tree->most_checkpoint_bytes) {
        kvc_checkpoint *oldest = tree->oldest_checkpoint;
        detach(oldest->node, find(oldest->node, oldest->position));
    }
}

void kvc_node_hand_on(kvc_node *node, kvc_node *to) {
    kvc_checkpoint *checkpoint;
    while ((checkpoint = node->checkpoints)) {
        kvc_checkpoint_use(node->tree->cache, checkpoint, 1);
        detach(node, &node->checkpoints);
        kvc_node_attach(to, checkpoint);
        kvc_checkpoint_use(node->tree->cache, checkpoint, -1);
    }
}

/* Returns the last checkpoint of a node with rows, at most at position `limit`; NULL if there is none. */
static kvc_checkpoint *last_of(kvc_node *node, int32_t limit) {
    return kvc_node_is_live(node) ? *find(node, limit) : NULL;
}

kvc_checkpoint *kvc_node_checkpoint(const kvc_node *parent, const kvc_token_span *tokens, int32_t limit,
                                    kvc_node **node) {
    kvc_checkpoint *best = NULL;
    const int32_t at = kvc_node_lower_bound(parent, tokens);
    for (int32_t step = 1; step >= -1; step -= 2) {
        int32_t i = step > 0 ? at : at - 1;
        for (int num = 0; num < NEIGHBOURS && i >= 0 && i < parent->num_children; num++, i += step) {
            kvc_node *child = parent->children[i];
            const int32_t end = parent->end + kvc_tokens_common(&child->tokens, tokens);
            if (end <= (best ? best->position : parent->end)) break; /* those behind have no more in common */
            kvc_checkpoint *found = last_of(child, end < limit ? end : limit);
            if (!found || (best && found->position <= best->position)) continue;
            best = found;
            *node = child;
        }
    }
    return best;
}
