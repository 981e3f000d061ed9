/* match.h: which of a prompt's tokens are known.  Everybody who asks that asks here.
 *
 * The first n tokens of a prompt are known if live kept blocks of these tokens hold, for each layer group, every row
 * that a token at position n would see.  If the prefix has recurrent states, the state behind these tokens must be
 * kept, too.  n is at most where the last live block of the prompt ends.  A block is live while it has rows, and has
 * not expired.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_MATCH_H
#define KVC_MATCH_H

#include "edit/kept.h"
#include "prefix/prefix.h"

/* The known tokens of a prompt. */
typedef struct kvc_match {
    kvc_piece *pieces; /* [num] rows of live nodes whose first tokens are the prompt's: those of a block side by side */
    int32_t num, room;
    kvc_node *last; /* the last node of the tree that has a full block of the prompt's tokens, with rows or without */
    kvc_node *with_state; /* the node whose state is known; NULL: none is, or the prefix has no states */
    int32_t known;        /* tokens */
    int32_t with_rows;    /* tokens that would be known if the prefix had no states */
} kvc_match;

/* Finds how many of the first `limit` tokens are known.  The match is to be freed.  KVC_ERR_NOMEM. */
kvc_status kvc_match_find(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *m);
void kvc_match_free(kvc_cache *cache, const kvc_match *m);

/* Returns the node of a piece. */
static inline kvc_node *kvc_match_node(const kvc_match *m, int32_t piece) {
    return (kvc_node *)(void *)m->pieces[piece].rows->follower;
}

/* Returns the last node of the path that ends at a position or before. */
kvc_node *kvc_match_path(const kvc_match *m, int32_t position);

/* Marks the nodes that hold known tokens, or their state, as used, those nearer to the root as more recently.  The
 * node with the state counts as used later than those beside it. */
void kvc_match_touch(const kvc_match *m);

#endif
