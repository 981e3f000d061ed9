/* tree.c: the blocks that a prefix keeps, as a tree: see tree.h.
 *
 * A node is a block of tokens that follow its parent's tokens.  Its rows are a hidden kept sequence: no caller can name
 * it, and it may be evicted at any time.  The node hears of it as the sequence's follower: noted() and ended().
 *
 *   full      a node has block_size tokens; the last block of a prompt may have fewer
 *   live      a node has rows, and has not expired by the prefix's time to live
 *   whole     a node has the rows of all its tokens in a layer group: windows may have dropped some
 *   lost      a full node lost its rows while kvc_prefix_forget runs, which still wants its name: kvc_tree.lost
 *   outside   a node outside the tree has rows, but no parent yet, as its tokens were not known
 *   used      a number of cache->evicting.num_uses: the higher, the later a node was used */
#include "prefix/tree.h"

#include <stddef.h>
#include <string.h>

#include "edit/kept.h"

/* ---- children ---------------------------------------------------------------------------------------------------- */

/* Returns the node whose place among its parent's children is given; NULL for NULL. */
static kvc_node *at(kvc_links *beside) { return beside ? (void *)((char *)beside - offsetof(kvc_node, beside)) : NULL; }

kvc_node *kvc_node_beside(const kvc_node *node, int side) { return at(kvc_sorted_beside(&node->beside, side)); }

kvc_node *kvc_node_end(const kvc_node *parent, int side) { return at(kvc_sorted_end(&parent->children, side)); }

kvc_among kvc_node_among(const kvc_node *parent, const kvc_token_span *tokens) {
    kvc_among place = {0};
    for (kvc_links *next = parent->children.root; next; next = place.above->below[place.side]) {
        const int order = kvc_tokens_compare(&at(next)->tokens, tokens);
        place.above = next;
        place.side = order < 0;
        place.is_same |= !order; /* `behind` stays this child: all others below it on this side stand before it */
        *(order < 0 ? &place.before : &place.behind) = at(next);
    }
    return place;
}

kvc_node *kvc_node_child(const kvc_node *parent, const kvc_token_span *tokens) {
    const kvc_among place = kvc_node_among(parent, tokens);
    return place.is_same ? place.behind : NULL;
}

enum {
    MOST_ALIKE = 32,   /* children that are looked at */
    MOST_EXPIRED = 256 /* children that are passed over, as they are not live */
};

kvc_alike kvc_alike_begin(const kvc_node *parent, const kvc_token_span *tokens) {
    const kvc_among place = kvc_node_among(parent, tokens);
    return (kvc_alike){*tokens, place.before, place.behind, -1, -1, MOST_ALIKE, MOST_EXPIRED};
}

/* Returns how many tokens a child has in common with others; 0 if it is NULL. */
static int32_t common_with(const kvc_alike *alike, const kvc_node *child) {
    return child ? kvc_tokens_common(&child->tokens, &alike->tokens) : 0;
}

kvc_node *kvc_alike_next(kvc_alike *alike, int32_t *common) {
    while (alike->num_left && alike->num_expired) {
        kvc_node *node;
        if (alike->common_before < 0) alike->common_before = common_with(alike, alike->before);
        if (alike->common_behind < 0) alike->common_behind = common_with(alike, alike->behind);
        if (alike->common_behind >= alike->common_before) {
            *common = alike->common_behind;
            if (!*common) break;
            node = alike->behind;
            alike->behind = kvc_node_beside(node, KVC_HIGH);
            alike->common_behind = -1;
        } else {
            *common = alike->common_before;
            node = alike->before;
            alike->before = kvc_node_beside(node, KVC_LOW);
            alike->common_before = -1;
        }
        if (!kvc_node_is_live(node)) {
            alike->num_expired--;
            continue;
        }
        alike->num_left--;
        return node;
    }
    return NULL;
}

kvc_node *kvc_node_with_state(const kvc_node *parent, const kvc_token_span *tokens) {
    kvc_token_span part = *tokens;
    while (part.num) {
        const kvc_among place = kvc_node_among(parent, &part);
        if (place.is_same && place.behind->checkpoint && kvc_node_is_live(place.behind)) return place.behind;
        /* A shorter child that the tokens begin with stands before them, and `before` begins with it, too. */
        part.num = place.before ? kvc_tokens_common(&place.before->tokens, &part) : 0;
    }
    return NULL;
}

/* ---- nodes ------------------------------------------------------------------------------------------------------- */

static uint64_t tokens_bytes(const kvc_token_span *tokens) {
    return (uint64_t)tokens->num * (sizeof(int64_t) + (tokens->digests ? KVC_NAME_BYTES : 0));
}

/* Copies tokens to memory of the node's own. */
static kvc_status set_tokens(kvc_node *node, const kvc_token_span *tokens) {
    const uint64_t size = tokens_bytes(tokens);
    int64_t *ids = kvc_memory_alloc(&node->tree->cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!ids) return kvc_fail(KVC_ERR_NOMEM, "out of memory for %d tokens", tokens->num);
    memcpy(ids, tokens->ids, (size_t)tokens->num * sizeof *ids);
    node->tokens = (kvc_token_span){ids, NULL, tokens->num};
    if (tokens->digests) {
        uint8_t *digests = (uint8_t *)(ids + tokens->num);
        memcpy(digests, tokens->digests, (size_t)tokens->num * KVC_NAME_BYTES);
        node->tokens.digests = digests;
    }
    return KVC_OK;
}

/* Frees a node that has no children and no rows. */
static void free_node(kvc_node *node) {
    kvc_memory *memory = &node->tree->cache->memory;
    kvc_memory_free(memory, (void *)(uintptr_t)node->tokens.ids, tokens_bytes(&node->tokens), KVC_MEMORY_BOOKKEEPING,
                    -1);
    kvc_memory_free(memory, node, sizeof *node, KVC_MEMORY_BOOKKEEPING, -1);
}

/* Frees a node of the tree that nobody needs, and each node above it that nobody needs then. */
static void prune(kvc_node *node) {
    while (node->parent && !node->rows && !node->children.num && !node->users.num) {
        kvc_node *parent = node->parent;
        kvc_sorted_remove(&parent->children, &node->beside);
        free_node(node);
        node = parent;
    }
}

void kvc_node_take_out(kvc_node *node) {
    kvc_cache *cache = node->tree->cache;
    if (!node->at) return;
    *node->at = node->next;
    if (node->next) node->next->at = node->at;
    if (cache->prefixes.new_blocks_end == &node->next) cache->prefixes.new_blocks_end = node->at;
    node->next = NULL;
    node->at = NULL;
}

/* Notes what happens to a full block. */
static void note(const kvc_node *node, kvc_prefix_event_kind kind) {
    if (node->tree->events && kvc_node_is_full(node))
        kvc_events_note(node->tree->events, kind, node->begin, node->named.name);
}

/* Returns in how many groups a node has the rows of all its tokens. */
static int32_t num_whole(const kvc_node *node) {
    int32_t num = 0;
    for (int32_t g = 0; node->rows && g < node->tree->cache->num_token_groups; g++)
        num += node->rows->runs[g].num_rows == kvc_node_rows(node, g);
    return num;
}

int kvc_node_is_complete(const kvc_node *node) { return num_whole(node) == node->tree->cache->num_token_groups; }

void kvc_node_collect(kvc_node *node) {
    kvc_cache *cache = node->tree->cache;
    if (node->at || !node->tree->is_collected || !kvc_node_is_full(node) || !num_whole(node)) return;
    if (!cache->prefixes.new_blocks) cache->prefixes.new_blocks_end = &cache->prefixes.new_blocks;
    node->at = cache->prefixes.new_blocks_end;
    *node->at = node;
    cache->prefixes.new_blocks_end = &node->next;
}

/* Called when the rows of a node have become evictable: whoever evicts them also frees its state. */
static void noted(kvc_follower *follower) {
    const kvc_node *node = (const kvc_node *)(const void *)follower;
    if (node->checkpoint) kvc_checkpoint_note(node->tree->cache, node->checkpoint);
}

/* Adds a node to a list that begins at `list`. */
static void put_first(kvc_node *node, kvc_node **list) {
    node->next = *list;
    node->at = list;
    if (*list) (*list)->at = &node->next;
    *list = node;
}

/* Lists a node that has no rows any more as lost, and keeps it in the tree for its name. */
static void lose(kvc_node *node) {
    put_first(node, &node->tree->lost);
    kvc_node_use(node, 1);
}

void kvc_node_let_go(kvc_node *node) {
    kvc_node_take_out(node);
    kvc_node_use(node, -1);
}

/* Called when the rows of a node have been dropped. */
static void ended(kvc_cache *cache, kvc_follower *follower) {
    kvc_node *node = (kvc_node *)(void *)follower;
    (void)cache;
    node->rows = NULL;
    kvc_checkpoints_drop(&node->tree->checkpoints, node);
    kvc_node_take_out(node);
    if (node->parent) {
        note(node, KVC_BLOCK_DROPPED);
        kvc_node_leave(node);
        if (node->tree->forgetting.num && kvc_node_is_full(node)) lose(node);
        prune(node);
        return;
    }
    free_node(node); /* it was outside the tree */
}

void kvc_node_drop(kvc_node *node) { kvc_cache_drop(node->tree->cache, node->rows); }

void kvc_node_use(kvc_node *node, int32_t add) {
    node->users.num += add;
    prune(node);
}

void kvc_node_pin(kvc_node *node, int32_t add) {
    kvc_node_pin_rows(node, add);
    kvc_node_use(node, add);
}

kvc_node *kvc_node_find(const kvc_node *parent, const kvc_token_span *tokens) {
    kvc_alike alike = kvc_alike_begin(parent, tokens);
    int32_t common;
    for (kvc_node *node; (node = kvc_alike_next(&alike, &common)) && common == tokens->num;)
        if (kvc_node_is_complete(node)) return node;
    return NULL;
}

static kvc_node *alloc_node(kvc_tree *tree, int32_t begin, int32_t end) {
    kvc_node *node = kvc_memory_alloc(&tree->cache->memory, sizeof *node, KVC_MEMORY_BOOKKEEPING, -1);
    if (node)
        *node = (kvc_node){.follower = {.ended = ended, .noted = noted}, .tree = tree, .begin = begin, .end = end};
    else
        kvc_set_last_error("out of memory for a block of %d tokens", end - begin);
    return node;
}

kvc_status kvc_node_new(kvc_tree *tree, const kvc_sequence *src, int32_t begin, int32_t end, kvc_node **list,
                        kvc_node **made) {
    kvc_node *node = alloc_node(tree, begin, end);
    *made = NULL;
    if (!node) return KVC_ERR_NOMEM;
    const kvc_status status = kvc_make_kept(tree->cache, src, tree->cache->sequences.next_hidden_id++, begin, end,
                                            &node->follower, &node->rows);
    if (!node->rows) {
        free_node(node);
        return status;
    }
    put_first(node, list);
    *made = node;
    return KVC_OK;
}

/* Moves the rows of a node outside the tree to the node `to`, in place of its rows, and frees the first node. */
static void move_rows(kvc_node *node, kvc_node *to, int64_t used) {
    kvc_sequence *rows = node->rows;
    rows->follower = NULL;
    node->rows = NULL;
    to->users.num++; /* so that dropping its old rows does not free it */
    if (to->rows) kvc_node_drop(to);
    if (kvc_node_is_lost(to)) kvc_node_let_go(to);
    rows->follower = &to->follower;
    kvc_cache_pin(to->tree->cache, rows, to->users.num_pins);
    to->rows = rows;
    kvc_node_enter(to, used);
    kvc_node_use(to, -1);
    free_node(node);
}

/* Returns how many rows a node has in a group more than another one at the same positions. */
static int64_t more_in(const kvc_node *a, const kvc_node *b, int32_t g) {
    const int32_t stride = a->tree->cache->pools[g].stride;
    return a->rows->runs[g].num_rows - kvc_runs_visit(&b->rows->runs[g], kvc_rows_below(a->begin, stride),
                                                      kvc_rows_below(a->end, stride), /* only count */ NULL, NULL);
}

/* Returns whether a has rows in a group of which b has fewer at the same positions. */
static int has_more(const kvc_node *a, const kvc_node *b) {
    for (int32_t g = 0; g < a->tree->cache->num_token_groups; g++)
        if (more_in(a, b, g) > 0) return 1;
    return 0;
}

/* Gives `to` the rows of `from` in each group in which `to` has fewer, and drops `from`, a node outside the tree with
 * the same tokens.  If both lack rows, those of one are among those of the other.  Returns whether `to` gets any. */
static int merge(kvc_node *to, kvc_node *from, int64_t used) {
    kvc_cache *cache = to->tree->cache;
    int gets = 0;
    kvc_cache_pin(cache, to->rows, 1); /* rows of a pinned sequence may change */
    kvc_cache_pin(cache, from->rows, 1);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        if (more_in(from, to, g) <= 0) continue;
        const kvc_run_list list = to->rows->runs[g];
        to->rows->runs[g] = from->rows->runs[g];
        from->rows->runs[g] = list;
        gets = 1;
    }
    kvc_cache_pin(cache, to->rows, -1);
    kvc_node_drop(from);
    kvc_node_relist_at(to, used);
    return gets;
}

/* Drops shorter siblings that a node begins with, up to the first that has a user.  Those with a state stay, and those
 * with rows that the node lacks. */
static void drop_beginnings(kvc_node *node) {
    for (kvc_node *other, *before = kvc_node_beside(node, KVC_LOW); (other = before);) {
        before = kvc_node_beside(other, KVC_LOW);
        if (kvc_tokens_common(&other->tokens, &node->tokens) < other->tokens.num || other->users.num) break;
        if (other->rows && !other->checkpoint && !has_more(other, node)) kvc_node_drop(other);
    }
}

/* Puts a node among the children of another; KVC_ERR_NOMEM. */
static kvc_status insert(kvc_node *parent, kvc_node *node, const kvc_token_span *tokens) {
    KVC_TRY(set_tokens(node, tokens));
    const kvc_among place = kvc_node_among(parent, tokens);
    kvc_sorted_insert(&parent->children, &node->beside, place.above, place.side);
    node->parent = parent;
    kvc_name_block(node->tree->salt, parent->named.name, tokens, node->named.name);
    if (node->tree->is_indexed) node->named.hash = kvc_hash_tokens(tokens);
    return KVC_OK;
}

kvc_node *kvc_tree_add(kvc_node *parent, kvc_node *node, const kvc_token_span *tokens, int64_t used) {
    kvc_node_take_out(node);
    kvc_tree_date(parent->tree);
    kvc_node *same = kvc_node_child(parent, tokens);
    if (same && kvc_node_is_live(same)) {
        if (merge(same, node, used)) kvc_node_collect(same);
        return same;
    }
    if (same) { /* without rows, or expired */
        move_rows(node, same, used);
        note(same, KVC_BLOCK_KEPT);
        kvc_node_collect(same);
        return same;
    }
    if (insert(parent, node, tokens) != KVC_OK) {
        kvc_node_drop(node);
        return NULL;
    }
    kvc_node_enter(node, used);
    note(node, KVC_BLOCK_KEPT);
    kvc_node_collect(node);
    drop_beginnings(node);
    return node;
}

kvc_node *kvc_tree_add_empty(kvc_node *parent, const kvc_token_span *tokens) {
    kvc_node *node = kvc_node_child(parent, tokens);
    if (node) return node;
    node = alloc_node(parent->tree, parent->end, parent->end + tokens->num);
    if (!node || insert(parent, node, tokens) == KVC_OK) return node;
    free_node(node);
    return NULL;
}

kvc_node *kvc_node_of(const kvc_cache *cache, int64_t id) {
    const kvc_sequence *hidden = kvc_table_find_hidden(&cache->sequences, id);
    kvc_node *node = hidden ? (kvc_node *)(void *)hidden->follower : NULL;
    return node && node->tree->prefix ? node : NULL; /* NULL: the prefix has given up the tree */
}

/* ---- the tree ---------------------------------------------------------------------------------------------------- */

kvc_tree *kvc_tree_new(kvc_cache *cache, const uint8_t *salt, const uint8_t *name) {
    kvc_tree *tree = kvc_memory_alloc(&cache->memory, sizeof *tree, KVC_MEMORY_BOOKKEEPING, -1);
    if (!tree) {
        kvc_set_last_error("out of memory for the blocks of a prefix");
        return NULL;
    }
    *tree = (kvc_tree){.cache = cache, .salt = salt, .root = {.tree = tree}, .checkpoints = {.cache = cache}};
    memcpy(tree->root.named.name, name, KVC_NAME_BYTES);
    return tree;
}

void kvc_tree_retire(kvc_tree *tree) {
    kvc_cache *cache = tree->cache;
    tree->prefix = NULL;
    tree->events = NULL;
    tree->quota = 0;
    tree->next = cache->prefixes.dying;
    cache->prefixes.dying = tree;
}

void kvc_tree_free(kvc_tree *tree) {
    kvc_memory_free(&tree->cache->memory, tree, sizeof *tree, KVC_MEMORY_BOOKKEEPING, -1);
}
