/* share.h: shares rows of a sequence without an id. */
#ifndef KVC_SHARE_H
#define KVC_SHARE_H

#include "cache/cache.h"

/* Adds the rows of src at positions [begin, end) to dst, which is idle, as kvc_share does, with its errors.  Call with
 * the mutex held. */
kvc_status kvc_share_rows(kvc_cache *cache, kvc_sequence *src, int64_t dst_id, int32_t begin, int32_t end);

#endif
