/* pairs.h: the layers and pairs that several tests of the store use. */
#ifndef KVC_TEST_PAIRS_H
#define KVC_TEST_PAIRS_H

#include "support/oracle.h"

static const kvc_layer plain_layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};

/* Returns plain_layer with this policy. */
static inline kvc_layer layer_with(kvc_policy policy) {
    kvc_layer layer = plain_layer;
    layer.policy = policy;
    return layer;
}

/* Makes a pair of one layer with this policy. */
static inline pair *pair_with(kvc_policy policy, int block_size) {
    static pair p;
    kvc_layer layer = layer_with(policy);
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    return &p;
}

/* Makes a pair of four layers in three groups: no two of the same shape, with elements of every float type. */
static inline pair *mixed_pair(int block_size) {
    static pair p;
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 3, .v_dim = 5, .k_type = KVC_F32, .v_type = KVC_F16},
        {.num_kv_heads = 1, .k_dim = 8, .v_dim = 1, .k_type = KVC_BF16, .policy = sliding_policy(5, 2, 0)},
        {.num_kv_heads = 3, .k_dim = 1, .v_dim = 4, .k_type = KVC_F16, .v_type = KVC_BF16},
        {.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .v_type = KVC_F16, .policy = sliding_policy(3, 0, 9)},
    };
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 4, layers);
    return &p;
}

/* Makes a pair of a full and a sliding layer with these limits; 0: none. */
static inline pair *limited_pair(int64_t max_seq_len, int64_t max_sequences, int64_t capacity, int64_t max_bytes) {
    static pair p;
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    p = (pair){.config = {.block_size = 4,
                          .max_seq_len = max_seq_len,
                          .max_sequences = max_sequences,
                          .capacity = capacity,
                          .max_bytes = max_bytes,
                          .num_threads = 1}};
    pair_new(&p, 2, layers);
    return &p;
}

/* Counts the spans of a sequence's rows in a layer. */
static inline int64_t num_spans(const pair *p, int64_t id, int layer) {
    int64_t num = -1;
    CHECK(kvc_spans(p->cache, id, layer, NULL, sizeof(kvc_span), 0, &num, NULL) == KVC_OK);
    return num;
}

#endif
