/* node.c: in which order the blocks of a prefix were used, and which of them its quota protects: see node.h.
 *
 * A node is a block.  All nodes with rows are in the set kvc_tree.with_rows, and those without a pin also in the set
 * kvc_tree.unpinned.  Both are sorted by last use.  The most recently used nodes are protected from eviction until they
 * have `quota` tokens.  kvc_tree.first_protected is the least recently used one of them. */
#include "prefix/node.h"

#include <stddef.h>

/* Return the node whose place in kvc_tree.with_rows, or in kvc_tree.unpinned, is given; NULL for NULL. */
static kvc_node *at_rows(kvc_links *links) {
    return links ? (void *)((char *)links - offsetof(kvc_node, order.with_rows)) : NULL;
}

static kvc_node *at_unpinned(kvc_links *links) {
    return links ? (void *)((char *)links - offsetof(kvc_node, order.unpinned)) : NULL;
}

/* Whether a node with rows was used later than another one. */
static int is_behind(const kvc_links *member, const kvc_links *other) {
    const kvc_node *a = (const void *)((const char *)member - offsetof(kvc_node, order.with_rows)),
                   *b = (const void *)((const char *)other - offsetof(kvc_node, order.with_rows));
    return a->rows->evicting.used > b->rows->evicting.used;
}

/* Whether a node without a pin was used later than another one. */
static int is_used_later(const kvc_links *member, const kvc_links *other) {
    const kvc_node *a = (const void *)((const char *)member - offsetof(kvc_node, order.unpinned)),
                   *b = (const void *)((const char *)other - offsetof(kvc_node, order.unpinned));
    return a->rows->evicting.used > b->rows->evicting.used;
}

/* Returns the next node by use, or NULL. */
static kvc_node *used_next(const kvc_node *node) {
    return at_rows(kvc_sorted_beside(&node->order.with_rows, KVC_HIGH));
}

/* Protects a node with rows from eviction. */
static void protect(kvc_tree *tree, kvc_node *node) {
    const kvc_node *first = tree->first_protected;
    kvc_cache_protect(tree->cache, node->rows);
    node->is_protected = 1;
    tree->protected_tokens += kvc_node_size(node);
    if (!first || node->rows->evicting.used < first->rows->evicting.used) tree->first_protected = node;
}

/* Lets the least recently used protected node be evicted. */
static void unprotect_first(kvc_tree *tree) {
    kvc_node *node = tree->first_protected;
    kvc_cache_keep(tree->cache, node->rows);
    node->is_protected = 0;
    tree->protected_tokens -= kvc_node_size(node);
    tree->first_protected = used_next(node);
}

/* Returns whether a node that has just come is within the quota. */
static int is_within_quota(const kvc_tree *tree, const kvc_node *node) {
    if (tree->protected_tokens < tree->quota) return 1; /* all others are protected already */
    return tree->first_protected && node->rows->evicting.used > tree->first_protected->rows->evicting.used;
}

/* Adds a node to the set of nodes without a pin, unless it has one; and takes it out. */
static void sort_unpinned(kvc_node *node) {
    if (!node->users.num_pins) kvc_sorted_add(&node->tree->unpinned, &node->order.unpinned, is_used_later);
}

static void unsort_unpinned(kvc_node *node) {
    if (!node->users.num_pins) kvc_sorted_remove(&node->tree->unpinned, &node->order.unpinned);
}

void kvc_node_enter(kvc_node *node, int64_t used) {
    kvc_tree *tree = node->tree;
    kvc_cache_use(tree->cache, node->rows, used);
    node->order.time = tree->ttl ? kvc_now() : 0;
    kvc_sorted_add(&tree->with_rows, &node->order.with_rows, is_behind);
    tree->num_tokens += kvc_node_size(node);
    sort_unpinned(node);
    if (tree->is_indexed && kvc_node_is_full(node)) kvc_index_add(&tree->index, node);
    if (!is_within_quota(tree, node)) {
        kvc_cache_keep(tree->cache, node->rows);
        return;
    }
    protect(tree, node);
    /* The node in which the quota ends stays protected: */
    while (tree->protected_tokens - kvc_node_size(tree->first_protected) >= tree->quota) unprotect_first(tree);
}

/* Takes a node out of all sets.  No other node is protected in its place. */
static void leave(kvc_node *node) {
    kvc_tree *tree = node->tree;
    if (tree->is_indexed && kvc_node_is_full(node)) kvc_index_remove(&tree->index, node);
    if (tree->first_protected == node) tree->first_protected = used_next(node);
    if (node->is_protected) tree->protected_tokens -= kvc_node_size(node);
    node->is_protected = 0;
    kvc_sorted_remove(&tree->with_rows, &node->order.with_rows);
    unsort_unpinned(node);
    tree->num_tokens -= kvc_node_size(node);
}

/* Protects the most recently used nodes up to the one in which the quota ends, after others are gone. */
static void fill_quota(kvc_tree *tree) {
    kvc_node *next;
    while (tree->protected_tokens < tree->quota &&
           (next = at_rows(tree->first_protected ? kvc_sorted_beside(&tree->first_protected->order.with_rows, KVC_LOW)
                                                 : kvc_sorted_end(&tree->with_rows, KVC_HIGH))))
        protect(tree, next);
}

void kvc_node_leave(kvc_node *node) {
    leave(node);
    fill_quota(node->tree);
}

void kvc_node_relist_at(kvc_node *node, int64_t used) {
    kvc_tree *tree = node->tree;
    const int is_earlier = used < node->rows->evicting.used;
    leave(node);
    if (is_earlier) fill_quota(tree); /* a node that was used since takes its place in the quota */
    kvc_node_enter(node, used);
    if (node->checkpoint) kvc_checkpoints_touch(&tree->checkpoints, node->checkpoint);
}

void kvc_node_relist(kvc_node *node) { kvc_node_relist_at(node, ++node->tree->cache->evicting.num_uses); }

void kvc_tree_date(kvc_tree *tree) {
    if (tree->ttl) tree->expires_before = kvc_now() - tree->ttl;
}

void kvc_node_touch(kvc_node *node) {
    kvc_tree_date(node->tree);
    for (; node->parent; node = node->parent)
        if (kvc_node_is_live(node)) kvc_node_relist(node);
}

void kvc_node_pin_rows(kvc_node *node, int32_t add) {
    if (node->rows) unsort_unpinned(node);
    node->users.num_pins += add;
    if (!node->rows) return;
    sort_unpinned(node);
    kvc_cache_pin(node->tree->cache, node->rows, add);
}

kvc_node *kvc_tree_oldest(kvc_tree *tree) { return at_unpinned(kvc_sorted_end(&tree->unpinned, KVC_LOW)); }

int kvc_tree_unprotect(kvc_tree *tree, int32_t num) {
    for (; tree->first_protected && num > 0; num--) unprotect_first(tree);
    return tree->first_protected != NULL;
}
