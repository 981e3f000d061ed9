/* policy.h: what a query at a position may see, and what can never be seen again. */
#ifndef KVC_POLICY_H
#define KVC_POLICY_H

#include "rows/runs.h"

/* Returns KVC_ERR_INVALID, with a message that names the field, if the policy of a layer is not valid. */
kvc_status kvc_policy_check(const kvc_policy *policy, int32_t layer);

/* The kind of a policy, and the fields that the kind uses.  Policies that mean the same have the same numbers. */
typedef struct kvc_policy_fields {
    int64_t fields[4];
} kvc_policy_fields;

kvc_policy_fields kvc_policy_read(const kvc_policy *policy);

/* Returns whether two policies keep the same rows: layers of such policies share a group, if they keep tokens. */
int kvc_policy_equal(const kvc_policy *a, const kvc_policy *b);

/* Returns whether a layer has rows of tokens, at their positions: false for KVC_CROSS and KVC_NONE. */
int kvc_policy_keeps_tokens(const kvc_policy *policy);

/* Returns the most rows that stay of a sequence with one row at each position; INT64_MAX: all. */
int64_t kvc_policy_most_rows(const kvc_policy *policy);

/* Returns whether the policy ever expires rows. */
int kvc_policy_expires(const kvc_policy *policy);

/* Returns the first position that a query at `position` sees, sinks aside. */
int32_t kvc_policy_lowest(const kvc_policy *policy, int32_t position);

/* Returns the positions that expire when no query will come below position `min_query_position`. */
kvc_interval kvc_policy_expired(const kvc_policy *policy, int32_t min_query_position);

/* Returns the first position above `min_query_position` whose query, as the first of a batch, expires all rows before
 * it; INT32_MAX if there is none. */
int32_t kvc_policy_next_start(const kvc_policy *policy, int32_t min_query_position);

/* Returns for how many positions the group has one row. */
static inline int32_t kvc_policy_stride(const kvc_policy *policy) {
    return policy->kind == KVC_FULL && policy->stride > 1 ? policy->stride : 1;
}

/* Returns the number of sinks: positions below it are never expired. */
int32_t kvc_policy_sinks(const kvc_policy *policy);

/* Returns whether a query at `position`, or a later one, sees any of the positions [begin, end). */
int kvc_policy_sees(const kvc_policy *policy, int32_t position, int32_t begin, int32_t end);

#endif
