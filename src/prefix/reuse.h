/* reuse.h: goes on with tokens that were computed elsewhere. */
#ifndef KVC_REUSE_H
#define KVC_REUSE_H

#include "kvcache.h"

/* Adds rows of tokens that were computed elsewhere to a sequence that holds the first *matched tokens of a prompt, up
 * to `limit` of them; raises *matched.  KVC_ERR_CALLBACK where a kvc_shift_fn fails.  Call without the mutex. */
kvc_status kvc_reuse(struct kvc_prefix *prefix, const kvc_tokens *tokens, int64_t limit, int64_t seq_id,
                     int32_t *matched);

#endif
