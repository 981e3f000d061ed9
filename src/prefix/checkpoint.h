/* checkpoint.h: the recurrent states of a model, kept with the blocks of tokens behind which they were.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_CHECKPOINT_H
#define KVC_CHECKPOINT_H

#include "prefix/tree.h"

/* The state after the tokens before a position. */
typedef struct kvc_checkpoint {
    struct kvc_checkpoint *next, *older, *newer; /* place in its node's list, by falling position; in the tree's list */
    kvc_node *node;                              /* where it has one */
    int32_t position;
    int32_t num_users; /* the node, sequences that go on from it, and calls: it is freed with the last one */
    int64_t num_bytes; /* of the state, which follows */
} kvc_checkpoint;

static inline int64_t kvc_checkpoint_bytes(const kvc_checkpoint *checkpoint) {
    return (int64_t)sizeof *checkpoint + checkpoint->num_bytes;
}
static inline uint8_t *kvc_checkpoint_state(kvc_checkpoint *checkpoint) { return (uint8_t *)(checkpoint + 1); }

/* Sets *checkpoint to one with a single user, the caller.  Releases the mutex while the state is copied. KVC_ERR_NOMEM;
 * KVC_ERR_FULL if max_bytes leaves no room. */
kvc_status kvc_checkpoint_new(kvc_cache *cache, int32_t position, const void *state, int64_t num_bytes,
                              kvc_checkpoint **checkpoint);

/* Adds a user, or takes one away (add -1), which may free it; ignores NULL. */
void kvc_checkpoint_use(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add);

/* Copies the state.  Releases the mutex meanwhile. */
void kvc_checkpoint_read(kvc_cache *cache, kvc_checkpoint *checkpoint, void *state);

/* Gives a node with rows a checkpoint within it, unless it has one there; drops the least recently used ones of the
 * tree that exceed its limit. */
void kvc_node_attach(kvc_node *node, kvc_checkpoint *checkpoint);

/* Gives the checkpoints of a node to another with the same tokens up to there; or drops them. */
void kvc_node_hand_on(kvc_node *node, kvc_node *to);
void kvc_node_detach_all(kvc_node *node);

/* Returns the last checkpoint, at most at position `limit`, of a child of `parent` that has rows and the same tokens up
 * to there, and sets *node to that; NULL if there is none. */
kvc_checkpoint *kvc_node_checkpoint(const kvc_node *parent, const kvc_token_span *tokens, int32_t limit,
                                    kvc_node **node);

/* Marks a checkpoint that a node has as used. */
void kvc_checkpoint_touch(kvc_tree *tree, kvc_checkpoint *checkpoint);

#endif
