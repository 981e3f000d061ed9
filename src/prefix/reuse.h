/* reuse.h: blocks by their own tokens, whatever comes before them: to go on with what was computed elsewhere.
 *
 * Functions are called with the mutex held, but for kvc_reuse. */
#ifndef KVC_REUSE_H
#define KVC_REUSE_H

#include "prefix/tree.h"

/* Adds rows of tokens that were computed elsewhere to a sequence that holds the first *matched tokens of a prompt, up
 * to `limit` of them; raises *matched.  Fails as the function that moves keys does, if any.  Call without the mutex. */
kvc_status kvc_reuse(struct kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, int64_t seq_id,
                     int32_t *matched);

#endif
