/* kept.h: makes kept sequences for prefixes, finds where prompts can go on from them, and goes on there. */
#ifndef KVC_KEPT_H
#define KVC_KEPT_H

#include "cache/cache.h"

/* Makes a kept sequence of the rows of src at positions [begin, end), under a new id, as the most recently used one.
 * *made is NULL if src holds no rows there.  The sequence is hidden, if it has a follower.  Rows that the open batch
 * adds to src count, if src is stored.  No row is copied, and rows of cross-attention layers are left out.
 * KVC_ERR_NOMEM. */
kvc_status kvc_make_kept(kvc_cache *cache, const kvc_sequence *src, int64_t id, int32_t begin, int32_t end,
                         kvc_follower *follower, kvc_sequence **made);

/* Makes a kept sequence of new rows at positions [begin, end), which fit a block, under a new id.  It is pinned and
 * the running call's own.  layers[layer] is not 0 if the layer has rows, the same for all layers of a group.  Once
 * kvc_inject has written the rows, they count as exact.  Evicts as kvc_need.before says.  KVC_ERR_FULL, KVC_ERR_NOMEM.
 */
kvc_status kvc_make_kept_unwritten(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, const uint8_t *layers,
                                   int64_t before);

/* Rows of a kept sequence at positions below `end`; NULL: it was evicted.  Pieces come by rising `begin`, which
 * none of their rows stands before.  Only pieces that begin alike may hold rows at the same positions, and these rows
 * are of the same tokens. */
typedef struct kvc_piece {
    kvc_sequence *rows;
    int32_t begin, end;
} kvc_piece;

/* Positions of a layer group that have rows without a gap: those below `to`, and [begin, end). */
typedef struct kvc_covered {
    int32_t to, begin, end;
} kvc_covered;

/* Pieces that are asked for matches of ever smaller lengths. */
typedef struct kvc_piece_list {
    kvc_cache *cache;
    const kvc_piece *items; /* [num] */
    kvc_covered *covered;   /* [num_token_groups] */
    int32_t num;            /* pieces that begin below the last length */
    int32_t end;            /* behind the last token that any piece had */
} kvc_piece_list;

/* Begins to match pieces; `covered` is memory for what is found of them. */
kvc_piece_list kvc_pieces_begin(kvc_cache *cache, const kvc_piece *items, int32_t num, kvc_covered *covered);

/* Returns the largest number of tokens, at most `length`, behind which the pieces have what a query sees in every
 * layer.  It is at most the length of the longest piece, expired tokens included.  `length` is at most what the last
 * call returned.  All calls together take time for the number of pieces, not for its square. */
int32_t kvc_pieces_match(kvc_piece_list *p, int32_t length);

/* Makes a sequence, under a new id, of the rows that matched: `matched` tokens, at least 1.  KVC_ERR_NOMEM. */
kvc_status kvc_attach_pieces(kvc_cache *cache, const kvc_piece *items, int32_t num, int64_t id, int32_t matched);

#endif
