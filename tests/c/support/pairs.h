/* pairs.h: a cache and its layers, for scenes that only check that the cache stays valid.  tests/world compares what
 * caches hold. */
#ifndef KVC_TEST_PAIRS_H
#define KVC_TEST_PAIRS_H

#include "support/memory.h"
#include "support/test.h"

enum { MAX_LAYERS = 6, MAX_BATCH = 512 };

typedef struct pair {
    kvc_cache *cache;
    kvc_config config;
    kvc_layer layers[MAX_LAYERS];
    const int32_t *parents;  /* of the tokens of batches, or NULL */
    kvc_batch *batch;        /* the open one */
    const uint8_t *replaced; /* the layers that it restores; NULL: it is an ordinary one */
} pair;

static const double any_angles[] = {1, -0.31, 0.017, 1.7, 100};
static const kvc_policy full_policy = {.kind = KVC_FULL};
static const kvc_layer plain_layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};

static inline kvc_policy chunked_policy(int32_t attention_chunk_size, int32_t resume_window) {
    return (kvc_policy){
        .kind = KVC_CHUNKED, .resume_window = resume_window, .attention_chunk_size = attention_chunk_size};
}

static inline kvc_policy sliding_policy(int32_t window, int32_t num_sink_tokens, int32_t resume_window) {
    return (kvc_policy){
        .kind = KVC_SLIDING, .window = window, .num_sink_tokens = num_sink_tokens, .resume_window = resume_window};
}

/* Returns plain_layer with this policy. */
static inline kvc_layer layer_with(kvc_policy policy) {
    kvc_layer layer = plain_layer;
    layer.policy = policy;
    return layer;
}

/* ---- caches ------------------------------------------------------------------------------------------------------ */

/* Makes a cache of these layers; set the other fields of p->config before. */
static inline void pair_new(pair *p, int num_layers, const kvc_layer *layers) {
    memmove(p->layers, layers, (size_t)num_layers * sizeof *layers);
    p->config.struct_size = sizeof p->config;
    p->config.layers = p->layers;
    p->config.layer_size = sizeof *p->layers;
    p->config.num_layers = num_layers;
    CHECKF(kvc_cache_new(&p->config, &p->cache) == KVC_OK, "%s", kvc_last_error());
}

static inline void pair_check(const pair *p) { CHECKF(kvc_validate(p->cache) == KVC_OK, "%s", kvc_last_error()); }

static inline void pair_free(pair *p) {
    pair_check(p);
    CHECKF(kvc_cache_free(p->cache) == KVC_OK, "%s", kvc_last_error());
}

/* Makes a pair of one layer with this policy. */
static inline pair *pair_with(kvc_policy policy, int block_size) {
    static pair p;
    const kvc_layer layer = layer_with(policy);
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

static inline kvc_stats stats_of(const pair *p) { return stats_in(p->cache); }

/* Counts the spans of a sequence's rows in a layer. */
static inline int64_t num_spans(const pair *p, int64_t id, int layer) {
    int64_t num = -1;
    CHECK(kvc_spans(p->cache, id, layer, NULL, sizeof(kvc_span), 0, &num, NULL) == KVC_OK);
    return num;
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

static inline kvc_status pair_begin_with(pair *p, int n, const int32_t *positions, const int64_t *ids,
                                         const uint8_t *replaced) {
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = n,
                                 .positions = positions,
                                 .seq_ids = ids,
                                 .parents = p->parents,
                                 .replaced = replaced};
    p->replaced = replaced;
    return kvc_begin_with(p->cache, &args, &p->batch);
}

static inline kvc_status pair_begin(pair *p, int n, const int32_t *positions, const int64_t *ids) {
    return pair_begin_with(p, n, positions, ids, NULL);
}

/* Puts zeros for tokens [first, first + n) of the open batch; n = 0: for all tokens from `first` on. */
static inline void pair_put(pair *p, int l, int first, int n) {
    kvc_put_args put = zero_rows(first, n);
    if (!p->layers[l].v_dim || p->layers[l].value_in_key) put.v = NULL;
    CHECKF(kvc_put(p->batch, l, &put) == KVC_OK, "%s", kvc_last_error());
}

static inline void pair_put_all(pair *p) {
    for (int l = 0; l < p->config.num_layers; l++) {
        const int32_t kind = p->layers[l].policy.kind;
        if (p->layers[l].share || kind == KVC_CROSS || kind == KVC_NONE || (p->replaced && !p->replaced[l])) continue;
        pair_put(p, l, 0, 0);
    }
}

/* Puts n rows of a sequence in a cross-attention layer. */
static inline kvc_status pair_put_cross(pair *p, int l, int64_t id, int n) {
    kvc_put_args put = zero_rows(0, n);
    put.seq_id = id;
    return kvc_put(p->batch, l, &put);
}

static inline kvc_status pair_commit(pair *p) { return kvc_commit(p->batch); }

/* Begins, puts and commits a batch; returns the status of begin. */
static inline kvc_status pair_pass(pair *p, int n, const int32_t *positions, const int64_t *ids) {
    const kvc_status status = pair_begin(p, n, positions, ids);
    if (status != KVC_OK) return status;
    pair_put_all(p);
    CHECKF(pair_commit(p) == KVC_OK, "%s", kvc_last_error());
    return status;
}

/* Runs a pass of positions [begin, end) of one sequence. */
static inline kvc_status pair_feed(pair *p, int64_t id, int32_t begin, int32_t end) {
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    for (int32_t i = 0; i < end - begin; i++) positions[i] = begin + i, ids[i] = id;
    return pair_pass(p, end - begin, positions, ids);
}

/* Replaces a layer's rows at positions [begin, end) by zeros; with skip_missing, only where there are rows. */
static inline kvc_status pair_inject(pair *p, int64_t id, int l, int32_t begin, int32_t end, int skip_missing) {
    const kvc_put_args zeros = zero_rows(0, 0);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = zeros.k,
                            .v = p->layers[l].v_dim && !p->layers[l].value_in_key ? zeros.v : NULL,
                            .k_row_stride = zeros.k_token_stride,
                            .v_row_stride = zeros.v_token_stride,
                            .skip_missing = skip_missing};
    return kvc_inject(p->cache, id, l, begin, end, &in);
}

#endif
