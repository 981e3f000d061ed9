/* retain.h: retained sequences without an id, for prefixes. */
#ifndef KVC_RETAIN_H
#define KVC_RETAIN_H

#include "cache/cache.h"

/* Sets *made to a hidden retained sequence of the rows of src at positions [begin, end), as kvc_retain does for src
 * that the open batch may have; NULL if src holds no rows there.  KVC_ERR_NOMEM. */
kvc_status kvc_retain_hidden(kvc_cache *cache, const kvc_sequence *src, int32_t begin, int32_t end,
                             kvc_follower *follower, kvc_sequence **made);

/* Does what kvc_retain_new does, for positions that fit a block, with the mutex held. */
kvc_status kvc_retain_unwritten(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, const uint8_t *layers);

/* Makes a retained sequence `id`, pinned, of rows of a hidden one. */
kvc_status kvc_retain_pinned(kvc_cache *cache, const kvc_sequence *src, int64_t id, int32_t begin, int32_t end);

/* Rows of a retained sequence at positions below `end`; NULL: it was evicted.  Pieces come by rising `begin`, which
 * none of their rows stands before.  Only pieces that begin alike may hold rows at the same positions, and these rows
 * are of the same tokens. */
typedef struct kvc_piece {
    kvc_sequence *rows;
    int32_t begin, end;
} kvc_piece;

/* Returns the largest number of tokens, at most `length`, behind which the pieces have what a query sees in every
 * layer.  It is at most the length of the longest piece, expired tokens included. */
int32_t kvc_match_pieces(kvc_cache *cache, const kvc_piece *pieces, int32_t num, int32_t length);

/* Makes dst, which holds nothing, of what matched, which is not 0.  KVC_ERR_NOMEM. */
kvc_status kvc_attach_pieces(kvc_cache *cache, const kvc_piece *pieces, int32_t num, int64_t dst, int32_t matched);

/* Makes a retained sequence the most recently used. */
void kvc_touch_retained(kvc_cache *cache, kvc_sequence *sequence);

#endif
