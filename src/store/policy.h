/* policy.h: what a query at a position may see, and what can never be seen again. */
#ifndef KVC_POLICY_H
#define KVC_POLICY_H

#include "kvcache.h"

/* KVC_ERR_INVALID, with a sentence that says which field is wrong. */
kvc_status kvc_policy_check(const kvc_policy *policy, int32_t layer);

/* Whether two policies keep the same rows: layers of such policies share a group, if they keep tokens. */
int kvc_policy_equal(const kvc_policy *a, const kvc_policy *b);

/* Whether the layer's rows are those of tokens, at their positions: not in KVC_CROSS and KVC_NONE. */
int kvc_policy_keeps_tokens(const kvc_policy *policy);

/* Whether the policy ever lets go of rows. */
int kvc_policy_evicts(const kvc_policy *policy);

/* The first position that a query at `position` sees, sinks aside. */
int32_t kvc_policy_lowest(const kvc_policy *policy, int32_t position);

/* The first position that is kept, sinks aside, when no query below `low` will come. */
int32_t kvc_policy_retained(const kvc_policy *policy, int32_t low);

/* Positions below this are sinks, which are never evicted. */
int32_t kvc_policy_sinks(const kvc_policy *policy);

#endif
