/* tree.h: the blocks that a prefix keeps, as a tree.  A node is a block of tokens behind its parent's tokens.
 *
 * A node's rows are a hidden kept sequence, which may be evicted at any time.  A node without rows stays while
 * others build on it, or somebody uses it: once its tokens are computed again, prompts find those behind it, too.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_TREE_H
#define KVC_TREE_H

#include "prefix/node.h"

/* Makes an empty tree, the name of whose root is given; NULL if out of memory.  Frees a tree that is empty again. */
kvc_tree *kvc_tree_new(kvc_cache *cache, const uint8_t *salt, const uint8_t *name);
void kvc_tree_free(kvc_tree *tree);

/* Adds a tree that a prefix has given up to the list of trees to drop, whose nodes are not handed out for stores. */
void kvc_tree_retire(kvc_tree *tree);

/* Returns whether a node has all its rows: windows may have lost theirs. */
int kvc_node_is_complete(const kvc_node *node);

/* Takes a node out of kvc_tree.lost, which may free it. */
void kvc_node_let_go(kvc_node *node);

/* Returns whether a call forgets a prompt with the same first token just now.  Nothing of these tokens is found
 * meanwhile, and nothing is kept. */
static inline int kvc_tree_is_forgetting(const kvc_tree *tree, kvc_token_span first) {
    return tree->forgetting.num && first.num && kvc_tokens_common(&tree->forgetting, &first);
}

/* Returns whether a node is in kvc_tree.lost. */
static inline int kvc_node_is_lost(const kvc_node *node) { return !node->rows && node->at; }

/* Where tokens stand among the children of a node, which have an order (kvc_tokens_compare). */
typedef struct kvc_among {
    kvc_node *before, *behind; /* the last child that stands before them, and the first that does not; NULL: none */
    int32_t is_same;           /* `behind` has these tokens */
    kvc_links *above; /* a child with them would be put at above->below[side], or at the root if that is NULL */
    int side;
} kvc_among;

/* Returns where tokens stand among the children of a node. */
kvc_among kvc_node_among(const kvc_node *parent, const kvc_token_span *tokens);

/* Return the next child in falling order (KVC_LOW) or rising order (KVC_HIGH), and the first child (KVC_LOW) or the
 * last one (KVC_HIGH) of a node; NULL at the end. */
kvc_node *kvc_node_beside(const kvc_node *node, int side);
kvc_node *kvc_node_end(const kvc_node *parent, int side);

/* Returns the child with these tokens, or NULL. */
kvc_node *kvc_node_child(const kvc_node *parent, const kvc_token_span *tokens);

/* The live children that have tokens in common with others at their beginning. */
typedef struct kvc_alike {
    kvc_token_span tokens;
    kvc_node *before, *behind;            /* the next children on either side */
    int32_t common_before, common_behind; /* tokens in common with these; -1: not counted yet */
    int32_t num_left, num_expired;        /* so many are looked at still, and so many of those that are not live */
} kvc_alike;

/* Begins with the children that share the most tokens: of sorted children, those next to the tokens.  kvc_alike_next
 * returns the next child, and sets *common to how many it shares.  NULL: no more do, or enough were looked at. */
kvc_alike kvc_alike_begin(const kvc_node *parent, const kvc_token_span *tokens);
kvc_node *kvc_alike_next(kvc_alike *alike, int32_t *common);

/* Returns the longest child with a checkpoint that these tokens begin with, or NULL. */
kvc_node *kvc_node_with_state(const kvc_node *parent, const kvc_token_span *tokens);

/* Sets *made to a node outside the tree, with the rows of src at positions [begin, end), at most a block, and adds
 * it to a list.  Sets it to NULL if src holds no rows there.  KVC_ERR_NOMEM. */
kvc_status kvc_node_new(kvc_tree *tree, const kvc_sequence *src, int32_t begin, int32_t end, kvc_node **list,
                        kvc_node **made);

/* Returns the node whose rows have an id, which no other rows ever have.  NULL: they were dropped, or the prefix has
 * given up its tree. */
kvc_node *kvc_node_of(const kvc_cache *cache, int64_t id);

/* Returns a live child with all its rows that has or begins with these tokens, or NULL. */
kvc_node *kvc_node_find(const kvc_node *parent, const kvc_token_span *tokens);

/* Puts a node from outside the tree below `parent`, now that its tokens are known, in the place `used` among all uses.
 * Returns the node that has them: this node, or the node already there, which gets the rows that it lacked.  NULL if
 * out of memory; it is dropped then. */
kvc_node *kvc_tree_add(kvc_node *parent, kvc_node *node, const kvc_token_span *tokens, int64_t used);

/* Returns the node below `parent` with these tokens.  If it does not exist, makes one without rows.  NULL if out of
 * memory. */
kvc_node *kvc_tree_add_empty(kvc_node *parent, const kvc_token_span *tokens);

/* Lists a full block that is new, or has a new state, for stores. */
void kvc_node_collect(kvc_node *node);

/* Takes a node out of the list that it is in, if any. */
void kvc_node_take_out(kvc_node *node);

/* Drops the rows of a node that has some; that may free the node. */
void kvc_node_drop(kvc_node *node);

/* Add a user of a node, or a pin, which is a user as well, or take it away (add -1); that may free the node. */
void kvc_node_use(kvc_node *node, int32_t add);
void kvc_node_pin(kvc_node *node, int32_t add);

#endif
