/* serving.h: a cache with a prefix that serves prompts of numbers; rows are no matter. */
#ifndef KVC_TEST_SERVING_H
#define KVC_TEST_SERVING_H

#include "support/feeding.h"
#include "support/keeping.h"
#include "support/pairs.h"

enum { DIM = 32, BLOCK = 4, MOST = 64, STATE = 16 };

static kvc_cache *cache;
static kvc_prefix *prefix;
static int num_layers;

static inline void open_world(const kvc_policy *policies, int num, kvc_config config, kvc_prefix_config own) {
    kvc_layer layers[4];
    for (int l = 0; l < num; l++)
        layers[l] = (kvc_layer){
            .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = policies[l], .rope = {.kind = KVC_ROPE_NONE}};
    own.struct_size = sizeof own;
    own.fingerprint = "a model";
    num_layers = num;
    cache = heap_cache(num, layers, config);
    CHECKF(kvc_prefix_new(cache, &own, &prefix) == KVC_OK, "%s", kvc_last_error());
}

static inline void close_world(void) { free_valid(cache); }

/* Tokens that count up from `first`; ids[at] may be changed. */
static inline int64_t *numbers(int64_t first) {
    static int64_t ids[256][MOST];
    static int next;
    int64_t *to = ids[next++ % 256];
    for (int i = 0; i < MOST; i++) to[i] = first + i;
    return to;
}

static inline kvc_tokens tokens_of(const int64_t *ids, int num) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

static inline int known(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int32_t matched = -1;
    CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK);
    return matched;
}

/* Acquires a prompt; returns -1 if max_bytes leaves no room for it. */
static inline int64_t try_acquire(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int64_t id = -1;
    int32_t matched = -1;
    const kvc_status status = kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched);
    CHECKF(status == KVC_OK || status == KVC_ERR_FULL, "%s", kvc_last_error());
    CHECK((status == KVC_OK) == (id >= 0) && (id >= 0) == (matched >= 0));
    return id;
}

static inline int64_t acquire(const int64_t *ids, int num, int *matched) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int64_t id = -1;
    int32_t found = -1;
    CHECKF(kvc_prefix_acquire(prefix, &tokens, -1, &id, &found) == KVC_OK, "%s", kvc_last_error());
    if (matched) *matched = found;
    return id;
}

/* Feeds a sequence up to `end` tokens, `step` at a time. */
static inline void feed_to(int64_t id, int end, int step) {
    for (int at; (at = kvc_next_position(cache, id)) < end;)
        CHECKF(feed(cache, num_layers, id, end - at < step ? end - at : step) == KVC_OK, "%s", kvc_last_error());
}

static inline void release(int64_t id, const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    CHECKF(kvc_prefix_release(prefix, id, &tokens) == KVC_OK, "%s", kvc_last_error());
}

/* Serves a prompt, fed `step` tokens at a time; returns how many of them were known. */
static inline int serve(const int64_t *ids, int num, int step) {
    int matched;
    const int64_t id = acquire(ids, num, &matched);
    feed_to(id, num, step);
    release(id, ids, num);
    return matched;
}

static inline kvc_prefix_stats stats_now(void) {
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(prefix, &stats, sizeof stats);
    return stats;
}

static const kvc_policy full = {.kind = KVC_FULL};

/* Keeps a state, whose first byte is `value`, behind the first tokens of a sequence. */
static inline void checkpoint(int64_t id, const int64_t *ids, int num, int value) {
    const uint8_t state[STATE] = {(uint8_t)value};
    const kvc_tokens tokens = tokens_of(ids, num);
    CHECKF(kvc_prefix_checkpoint(prefix, id, &tokens, state, STATE) == KVC_OK, "%s", kvc_last_error());
}

#endif
