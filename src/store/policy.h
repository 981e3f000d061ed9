/* policy.h: what a query at a position may see, and what can never be seen again. */
#ifndef KVC_POLICY_H
#define KVC_POLICY_H

#include "kvcache.h"

/* KVC_OK, or the sentence that says which field is wrong. */
kvc_status kvc_policy_check(const kvc_policy *policy, int32_t layer);

/* Two layers with equal policies that keep tokens share a group. */
int kvc_policy_equal(const kvc_policy *a, const kvc_policy *b);

/* Whether the layer's rows are those of tokens, at their positions.  Not so in KVC_CROSS and KVC_NONE. */
int kvc_policy_keeps_tokens(const kvc_policy *policy);

/* Whether rows may come that no query can see any more. */
int kvc_policy_evicts(const kvc_policy *policy);

/* The first position that a query at `position` sees, sinks aside. */
int32_t kvc_policy_lowest(const kvc_policy *policy, int32_t position);

/* The first position that is kept, sinks aside, when no query below `low` will come. */
int32_t kvc_policy_retained(const kvc_policy *policy, int32_t low);

/* Positions below this are sinks. */
int32_t kvc_policy_sinks(const kvc_policy *policy);

#endif
