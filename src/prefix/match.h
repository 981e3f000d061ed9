/* match.h: what a prefix knows of a prompt.  All functions are called with the mutex held. */
#ifndef KVC_MATCH_H
#define KVC_MATCH_H

#include "prefix/prefix.h"

/* What is known of a prompt: its nodes, and how far its tokens are theirs. */
typedef struct kvc_match {
    kvc_node **nodes;
    kvc_sequence **items; /* rows of the nodes */
    int32_t num, end;
    int32_t with_rows; /* tokens that match, also behind the last checkpoint */
    int32_t is_cut;    /* more nodes follow, behind one without rows */
    uint64_t size;     /* bytes of the allocation */
} kvc_match;

/* Finds how many of the first tokens are there, at most `limit`, with what windows and recurrent layers need to go on;
 * *state is that of the latter, NULL: none.  The match is to be freed.  KVC_ERR_NOMEM. */
kvc_status kvc_prefix_match(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, kvc_match *p,
                            int32_t *matched, kvc_checkpoint **state);
void kvc_match_free(kvc_cache *cache, const kvc_match *p);

/* Sets *last to the last node of the first num_tokens tokens that has rows, behind others that have them; or that is
 * known where windows see nothing of those without.  To the root if there is none.  KVC_ERR_NOMEM. */
kvc_status kvc_prefix_find(const kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens, kvc_node **last);

#endif
