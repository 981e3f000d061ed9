/* node.h: the blocks that a prefix keeps, and when they were used: which are live, within the quota, or evicted next.
 *
 * An example.  A prefix with blocks of 4 tokens has kept a prompt of 10 tokens, then one of 9 that begins like it:
 *
 *     root --- a [0, 4) -+- b [4, 8) --- c [8, 10)      in the order of use: c, b, e, d, a
 *                        +- d [4, 8) --- e [8, 9)
 *
 * The second prompt used a, d and e.  A block is used after the blocks behind it, so that a prompt loses its end first.
 * A quota of 6 tokens protects a, the last one used, and d, in which the quota ends.  If rows are evicted, it is first
 * the rows of c, then of b, then of e.  A node without rows is freed once it has neither children nor users.  If b
 * lost its rows alone, it would stay for c, and a prompt would find c again once b is computed anew.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_NODE_H
#define KVC_NODE_H

#include "cache/cache.h"
#include "prefix/checkpoint.h"
#include "prefix/events.h"
#include "prefix/index.h"
#include "prefix/tokens.h"
#include "rows/stride.h"

/* The place of a node with rows in the order of use: the order of kvc_sequence.evicting.used of its rows. */
typedef struct kvc_node_order {
    kvc_links with_rows; /* place in tree->with_rows */
    kvc_links unpinned;  /* place in tree->unpinned, while it has no pin */
    int64_t time;        /* when it was used last, where the tree has a time to live */
} kvc_node_order;

/* Who uses a node.  While there are any, it stays, with or without rows. */
typedef struct kvc_node_users {
    int32_t num;            /* pins, and sequences that go on from it */
    int32_t num_pins;       /* of the rows, and those that take their place */
    int32_t num_state_pins; /* of the state, and of one that takes its place */
} kvc_node_users;

/* The name of a full block: index.h. */
typedef struct kvc_node_name {
    kvc_links same; /* place in the tree's index, if it is there */
    uint64_t hash;  /* of its tokens, if it may be there */
    uint8_t name[KVC_NAME_BYTES];
} kvc_node_name;

typedef struct kvc_node {
    kvc_follower follower; /* of `rows`; first, so that its address is that of the node */
    kvc_links beside;      /* place among the children of the parent; with the tokens, as a search reads both */
    kvc_token_span tokens;
    struct kvc_tree *tree;
    kvc_sequence *rows;          /* NULL: they were evicted */
    struct kvc_node *parent;     /* NULL: the root, or a block whose tokens are not known yet */
    kvc_sorted children;         /* by kvc_tokens_compare */
    int32_t begin, end;          /* positions of its tokens */
    int32_t is_protected;        /* it is within the quota */
    struct kvc_node *next, **at; /* place in a list: of blocks whose tokens are not known yet, new or lost ones */
    kvc_checkpoint *checkpoint;  /* the recurrent state at its end, while it has rows; NULL: none */
    kvc_node_users users;
    kvc_node_order order;
    kvc_node_name named;
} kvc_node;

typedef struct kvc_tree {
    kvc_cache *cache;
    const uint8_t *salt;       /* [KVC_NAME_BYTES] key of all names */
    kvc_node root;             /* has no tokens and no rows */
    kvc_sorted with_rows;      /* nodes with rows, by kvc_sequence.evicting.used of these */
    int64_t num_tokens;        /* of these nodes */
    kvc_sorted unpinned;       /* those without a pin, in the same order */
    kvc_sorted pins;           /* of prompts (kvc_pinned), by their names: pin.c */
    kvc_node *first_protected; /* it and newer ones are not evicted, as they are within the quota; NULL: none is */
    int64_t protected_tokens, quota; /* tokens; the node in which the quota ends is protected, too */
    struct kvc_prefix *prefix;       /* NULL: it is no prefix's any more */
    kvc_events *events;              /* what happens to full blocks; NULL: it is no prefix's any more */
    int32_t is_collected;            /* new full blocks are listed in cache->prefixes.new_blocks */
    int32_t is_indexed;              /* full blocks with rows are in the index */
    kvc_sorted index;                /* by hash: index.h */
    kvc_checkpoints checkpoints;     /* of all nodes */
    kvc_token_span forgetting;       /* first token of the prompt that a call forgets just now; num 0: no call does */
    kvc_node *lost;                  /* list of full nodes that have lost their rows since, for whatever reason; each
                                        has a use */
    int64_t expires_before;          /* nodes last used before it are not found, and dropped soon */
    int64_t ttl;                     /* nanoseconds after which a node that nobody used is dropped; 0: never */
    struct kvc_tree *next;           /* in the list cache->prefixes.dying */
} kvc_tree;

/* Returns how many tokens a node has, and whether these are a block's. */
static inline int32_t kvc_node_size(const kvc_node *node) { return node->end - node->begin; }

/* Returns how many rows these tokens have in a group.  A node with rows begins where a row does. */
static inline int32_t kvc_node_rows(const kvc_node *node, int32_t g) {
    const int32_t stride = node->tree->cache->pools[g].stride;
    return kvc_rows_below(node->end, stride) - kvc_rows_below(node->begin, stride);
}
static inline int kvc_node_is_full(const kvc_node *node) {
    return kvc_node_size(node) == node->tree->cache->pools[0].block_size;
}

/* Returns whether a node has rows, and may be found by them. */
static inline int kvc_node_is_live(const kvc_node *node) {
    return node->rows && (node->order.time >= node->tree->expires_before || node->users.num_pins);
}

/* Finds out which nodes are live from now on. */
void kvc_tree_date(kvc_tree *tree);

/* Add a node that has got rows to the sets and the index, in a place among all uses, and take out a node that has lost
 * its rows. */
void kvc_node_enter(kvc_node *node, int64_t used);
void kvc_node_leave(kvc_node *node);

/* Adds to kvc_node.users.num_pins, and pins its rows as often. */
void kvc_node_pin_rows(kvc_node *node, int32_t add);

/* Marks a node with rows as used now, and its state: as the last of all uses, or in its place among them. */
void kvc_node_relist(kvc_node *node);
void kvc_node_relist_at(kvc_node *node, int64_t used);

/* Marks the live nodes from one up to the root as used, those nearer to the root as more recently. */
void kvc_node_touch(kvc_node *node);

/* Returns the least recently used node that is not pinned, or NULL. */
kvc_node *kvc_tree_oldest(kvc_tree *tree);

/* Lets `num` nodes that were within the quota be evicted; returns whether there are more. */
int kvc_tree_unprotect(kvc_tree *tree, int32_t num);

#endif
