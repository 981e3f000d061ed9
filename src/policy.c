#include "policy.h"

#include "status.h"

kvc_status kvc_policy_check(const kvc_policy *policy, int32_t layer) {
    switch (policy->kind) {
    case KVC_FULL: return KVC_OK;
    case KVC_CHUNKED:
    case KVC_CROSS:
    case KVC_NONE:
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "layers[%d].policy.kind is %d: only KVC_FULL and KVC_SLIDING are supported", layer,
                        policy->kind);
    case KVC_SLIDING: break;
    default: return kvc_fail(KVC_ERR_INVALID, "layers[%d].policy.kind is %d: no kvc_policy_kind", layer, policy->kind);
    }
    if (policy->window < 1)
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d]: window is %d: a query sees at least itself, so it must be at least 1", layer,
                        policy->window);
    if (policy->num_sink_tokens < 0)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d]: num_sink_tokens is %d: it must not be negative", layer,
                        policy->num_sink_tokens);
    if (policy->resume_window != 0 && policy->resume_window < policy->window)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d]: resume_window is %d: it must be at least window, %d", layer,
                        policy->resume_window, policy->window);
    return KVC_OK;
}

static int32_t kept(const kvc_policy *policy) { return policy->resume_window ? policy->resume_window : policy->window; }

int kvc_policy_equal(const kvc_policy *a, const kvc_policy *b) {
    if (a->kind != b->kind) return 0;
    return a->kind != KVC_SLIDING ||
           (a->window == b->window && a->num_sink_tokens == b->num_sink_tokens && kept(a) == kept(b));
}

/* The first of the `count` positions that end with `last`. */
static int32_t first_of(int32_t count, int32_t last) { return last >= count ? last - count + 1 : 0; }

int32_t kvc_policy_lowest(const kvc_policy *policy, int32_t position) {
    return policy->kind == KVC_SLIDING ? first_of(policy->window, position) : 0;
}

int32_t kvc_policy_retained(const kvc_policy *policy, int32_t low) {
    return policy->kind == KVC_SLIDING ? first_of(kept(policy), low) : 0;
}

int32_t kvc_policy_sinks(const kvc_policy *policy) { return policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0; }
