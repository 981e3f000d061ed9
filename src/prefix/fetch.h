/* fetch.h: where a call stands in a prompt whose blocks it adds in order.
 *
 * Between two blocks the call holds nothing, so others may drop whatever they have to.  It remembers the last block by
 * the id of its rows, which no other rows ever have.  So the call finds the block again, or learns that it is gone, at
 * once, however many blocks stand before it.
 *
 * Each of the call's blocks has a place of its own among all uses.  The call sets these places aside when it begins,
 * and when it marks all of its blocks again.  So the last blocks are evicted first, also while the call runs.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_FETCH_H
#define KVC_FETCH_H

#include "prefix/prefix.h"

typedef struct kvc_fetch {
    kvc_prefix *prefix;
    const kvc_tokens *tokens; /* of the prompt */
    int64_t horizon;          /* kvc_prefix.horizon when it began: once that has changed, nothing is added */
    int64_t last;             /* id of the rows of the last block; -1: find the block */
    int32_t is_whole;         /* all blocks up to the last one were live when the call looked at them */
    int32_t again;            /* position: once a block ends there or behind it, all blocks are marked as used again */
    int64_t time;             /* when they were marked last */
    int64_t before; /* their kvc_sequence.evicting.used is this or higher, and falls from block to block.  Only rows
                       with a lower one are evicted for the call */
} kvc_fetch;

/* Begins behind the known tokens among a prompt's first num_tokens tokens, and marks their blocks as used.  Sets *known
 * to the number of known tokens, and `name` to the name of the last full block of them.  KVC_ERR_NOMEM. */
kvc_status kvc_fetch_begin(kvc_fetch *f, kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens,
                           int32_t *known, uint8_t *name);

/* Sets *last to the node that ends at a position, if a full block may be added behind it: all blocks up to it are kept,
 * or it is known.  NULL: none may.  KVC_ERR_NOMEM. */
kvc_status kvc_fetch_find(kvc_fetch *f, int32_t end, kvc_node **last);

/* Goes on to a live child of the node that kvc_fetch_find has found, and marks it as used.  May release the mutex. */
void kvc_fetch_pass(kvc_fetch *f, kvc_node *node);

/* Returns the place among all uses of the node that ends at a position, or `used` if that comes later. */
int64_t kvc_fetch_place(const kvc_fetch *f, int32_t end, int64_t used);

/* Marks a node of the prompt as used by the call, unless it was used later. */
void kvc_fetch_use(const kvc_fetch *f, kvc_node *node);

/* Marks all blocks up to the last one as used again.  May release the mutex. */
void kvc_fetch_touch(kvc_fetch *f);

#endif
