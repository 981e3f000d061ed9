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

/* Sets *matched to what kvc_attach would match of retained sequences: items [num] by rising position, NULL: it was
 * evicted.  Those whose rows are being written become NULL. */
kvc_status kvc_match_items(kvc_cache *cache, kvc_sequence **items, int32_t num, int32_t length, int32_t *matched);

/* Makes dst, which holds nothing, of what matched, which is not 0.  KVC_ERR_NOMEM. */
kvc_status kvc_attach_items(kvc_cache *cache, kvc_sequence **items, int32_t num, int64_t dst, int32_t matched);

/* Makes a retained sequence the most recently used. */
void kvc_touch_retained(kvc_cache *cache, kvc_sequence *sequence);

#endif
