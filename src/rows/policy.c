/* policy.c: what each kind of policy sees and keeps.  A query of a full policy (KVC_FULL) sees all positions up to its
 * own.  Of a sliding policy it sees the last `window` and the sinks, which are the first positions; of a chunked one,
 * those of its chunk.  Rows that no later query sees expire.  A resume_window keeps more rows, so that a sequence can
 * go back: so many of the latest positions in a sliding policy, so many before the chunk in a chunked one.  KVC_CROSS
 * has rows of an encoder, KVC_NONE has none. */
#include "rows/policy.h"

#include <string.h>

#include "base/status.h"

static kvc_status check_field(int32_t value, int32_t least, const char *name, int32_t layer) {
    if (value >= least) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "layers[%d]: %s is %d: it must be at least %d", layer, name, value, least);
}

static kvc_status check_sliding(const kvc_policy *policy, int32_t layer) {
    kvc_status status = check_field(policy->window, 1, "window", layer);
    if (status == KVC_OK) status = check_field(policy->num_sink_tokens, 0, "num_sink_tokens", layer);
    if (status != KVC_OK || policy->resume_window == 0 || policy->resume_window >= policy->window) return status;
    return kvc_fail(KVC_ERR_INVALID, "layers[%d]: resume_window is %d: it must be at least window, %d", layer,
                    policy->resume_window, policy->window);
}

static kvc_status check_chunked(const kvc_policy *policy, int32_t layer) {
    KVC_TRY(check_field(policy->attention_chunk_size, 1, "attention_chunk_size", layer));
    return check_field(policy->resume_window, 0, "resume_window", layer);
}

/* A stride above 1 means a row for several positions, which only fits where every query sees all earlier rows. */
static kvc_status check_stride(const kvc_policy *policy, int32_t layer) {
    if (policy->stride < 0)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d]: stride is %d: it must be at least 1, or 0 for 1", layer,
                        policy->stride);
    if (policy->stride <= 1 || policy->kind == KVC_FULL || policy->kind == KVC_NONE) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED,
                    "layers[%d]: stride is %d: only layers that see everything have rows for several "
                    "positions; give windows, chunks and cross-attention a stride of 1",
                    layer, policy->stride);
}

kvc_status kvc_policy_check(const kvc_policy *policy, int32_t layer) {
    KVC_TRY(check_stride(policy, layer));
    switch (policy->kind) {
    case KVC_FULL:
    case KVC_NONE: return KVC_OK;
    case KVC_SLIDING: return check_sliding(policy, layer);
    case KVC_CHUNKED: return check_chunked(policy, layer);
    case KVC_CROSS: return check_field(policy->max_len, 1, "max_len", layer);
    default: return kvc_fail(KVC_ERR_INVALID, "layers[%d].policy.kind is %d: no kvc_policy_kind", layer, policy->kind);
    }
}

/* Returns the number of latest positions that a sliding window keeps. */
static int32_t window_rows(const kvc_policy *policy) {
    return policy->resume_window ? policy->resume_window : policy->window;
}

kvc_policy_fields kvc_policy_read(const kvc_policy *policy) {
    kvc_policy_fields read = {{policy->kind}}; /* fields that the kind does not use stay 0 */
    int64_t *of = read.fields;
    switch ((kvc_policy_kind)policy->kind) { /* without a default, so that the compiler misses a new kind */
    case KVC_SLIDING: of[1] = policy->window, of[2] = policy->num_sink_tokens, of[3] = window_rows(policy); break;
    case KVC_CHUNKED: of[1] = policy->attention_chunk_size, of[3] = policy->resume_window; break;
    case KVC_CROSS: of[1] = policy->max_len; break;
    case KVC_FULL: of[1] = kvc_policy_stride(policy) > 1 ? policy->stride : 0; break;
    case KVC_NONE: break;
    }
    return read;
}

int kvc_policy_equal(const kvc_policy *a, const kvc_policy *b) {
    const kvc_policy_fields of_a = kvc_policy_read(a), of_b = kvc_policy_read(b);
    return !memcmp(&of_a, &of_b, sizeof of_a);
}

int kvc_policy_keeps_tokens(const kvc_policy *policy) { return policy->kind != KVC_CROSS && policy->kind != KVC_NONE; }

int kvc_policy_expires(const kvc_policy *policy) { return policy->kind == KVC_SLIDING || policy->kind == KVC_CHUNKED; }

int64_t kvc_policy_most_rows(const kvc_policy *policy) {
    switch (policy->kind) {
    case KVC_SLIDING: return (int64_t)window_rows(policy) + policy->num_sink_tokens;
    case KVC_CHUNKED: return (int64_t)policy->attention_chunk_size + policy->resume_window;
    default: return INT64_MAX;
    }
}

/* Returns the first of the `count` positions that end with `last`, at least 0. */
static int32_t first_of(int32_t count, int32_t last) { return last >= count ? last - count + 1 : 0; }

int32_t kvc_policy_lowest(const kvc_policy *policy, int32_t position) {
    switch (policy->kind) {
    case KVC_SLIDING: return first_of(policy->window, position);
    case KVC_CHUNKED: return position - position % policy->attention_chunk_size;
    default: return 0;
    }
}

kvc_interval kvc_policy_expired(const kvc_policy *policy, int32_t min_query_position) {
    switch (policy->kind) {
    case KVC_SLIDING: return (kvc_interval){policy->num_sink_tokens, first_of(window_rows(policy), min_query_position)};
    case KVC_CHUNKED: {
        const int32_t lowest = kvc_policy_lowest(policy, min_query_position);
        return (kvc_interval){0, lowest > policy->resume_window ? lowest - policy->resume_window : 0};
    }
    default: return (kvc_interval){0, 0};
    }
}

int32_t kvc_policy_next_start(const kvc_policy *policy, int32_t min_query_position) {
    if (policy->kind == KVC_SLIDING && window_rows(policy) == 1 && !policy->num_sink_tokens)
        return min_query_position + 1;
    if (policy->kind != KVC_CHUNKED || policy->resume_window) return INT32_MAX;
    const int64_t next = (int64_t)kvc_policy_lowest(policy, min_query_position) + policy->attention_chunk_size;
    return next < INT32_MAX ? (int32_t)next : INT32_MAX;
}

int32_t kvc_policy_sinks(const kvc_policy *policy) { return policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0; }

int kvc_policy_sees(const kvc_policy *policy, int32_t position, int32_t begin, int32_t end) {
    return begin < end && (kvc_policy_lowest(policy, position) < end || begin < kvc_policy_sinks(policy));
}
