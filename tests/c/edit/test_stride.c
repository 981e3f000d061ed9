/* Layers with a row for every n-th token, beside others: what is refused.  tests/world compares the rest. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

static kvc_policy strided(int32_t stride) { return (kvc_policy){.kind = KVC_FULL, .stride = stride}; }

/* The pair has layers of two strides, one with keys alone, beside a full layer and a layer with a window. */
static pair *strided_pair(void) {
    static pair p;
    const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = (double[]){1, 2}},
                   none = {.kind = KVC_ROPE_NONE};
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 4, .v_dim = 3, .policy = strided(4), .rope = rope},
        {.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .policy = sliding_policy(9, 1, 30), .rope = none},
        {.num_kv_heads = 1, .k_dim = 5, .k_type = KVC_F16, .policy = strided(4), .rope = none},
        {.num_kv_heads = 1, .k_dim = 3, .v_dim = 1, .policy = strided(3), .rope = none},
        {.num_kv_heads = 2, .k_dim = 6, .v_dim = 5, .policy = strided(1), .rope = rope},
    };
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 5, layers);
    return &p;
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void test_refused(void) {
    kvc_cache *cache = NULL;
    kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 32, .v_dim = 32}, {.num_kv_heads = 1, .k_dim = 32, .v_dim = 32}};
    const kvc_config config = {
        .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 2};
    layers[1].policy = strided(-1);
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "layers[1]: stride is -1", "at least 1");
    layers[1].policy = (kvc_policy){.kind = KVC_SLIDING, .window = 4, .stride = 2};
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "layers[1]: stride is 2", "windows");
    layers[1].policy = strided(2);
    layers[1].sketch_bits = 2;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "sketch_bits is 2", "its stride is 2");
    layers[1].sketch_bits = 0;
    layers[0].policy = strided(3);
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "layers[1]", "no layer has a row for each token");
    layers[0].policy = strided(0);
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* With strides of 4 and 3, edits at multiples of 4 are refused for the stride of 3, and the other way round. */
static void test_cuts_for_either_stride(void) {
    pair *p = strided_pair();
    kvc_prefix *prefix = NULL;
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a"};
    pair_feed(p, 0, 0, 30);
    for (int32_t n = 3; n <= 4; n++) {
        CHECK_FAILS(kvc_remove(p->cache, 0, 0, n, 1), KVC_ERR_UNSUPPORTED, "a row of layer", "of each layer's stride");
        CHECK_FAILS(kvc_shift(p->cache, 0, 12, KVC_END, n), KVC_ERR_UNSUPPORTED, "move by", "of each layer's stride");
        CHECK_FAILS(kvc_share(p->cache, 0, 1, n, 20), KVC_ERR_UNSUPPORTED, "begin is", "of each layer's stride");
    }
    CHECK(kvc_remove(p->cache, 0, 0, 12, 1) == KVC_OK);
    pair_check(p);
    CHECK_FAILS(kvc_prefix_new(p->cache, &config, &prefix), KVC_ERR_UNSUPPORTED, "block_size is 4",
                "of each layer's stride");
    pair_free(p);
}

/* A batch that completes no block takes no rows, and needs no put; a put of none may have no arrays. */
static void test_puts_without_rows(void) {
    pair *p = strided_pair();
    const kvc_put_args none = {.struct_size = sizeof none};
    kvc_span span;
    CHECK(pair_begin(p, 2, (int32_t[]){0, 1}, (int64_t[]){0, 0}) == KVC_OK);
    CHECK(kvc_put(p->batch, 0, &none) == KVC_OK);
    CHECK_FAILS(kvc_put(p->batch, 0, &none), KVC_ERR_INVALID, "token 0", "before");
    CHECK_FAILS(kvc_slots(p->batch, 2, 1, &span, sizeof span, NULL), KVC_ERR_INVALID, "position 1",
                "no row in layer 2");
    pair_put(p, 1, 0, 2);
    pair_put(p, 4, 0, 2);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 0, -1) == 2 && kvc_seq_len(p->cache, 0, 0) == 0 && kvc_next_position(p->cache, 0) == 2);
    pair_feed(p, 0, 2, 13);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 3 && kvc_seq_len(p->cache, 0, 3) == 4);
    pair_free(p);
}

/* Rows that do not fit are counted as rows: more tokens than these may fit. */
static void test_limits_of_rows(void) {
    const kvc_layer layers[] = {
        {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1, .policy = {.kind = KVC_SLIDING, .window = 2}},
        {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1, .policy = strided(4)}};
    for (int is_capacity = 0; is_capacity < 2; is_capacity++) {
        kvc_config limits = {.max_seq_len = 6};
        if (is_capacity) limits = (kvc_config){.capacity = 6};
        static pair p;
        p = (pair){.config = limits};
        pair_new(&p, 2, layers);
        for (int32_t at = 0; at < 26; at += 2) CHECK(pair_feed(&p, 0, at, at + 2) == KVC_OK);
        CHECK_FAILS(kvc_reserve(p.cache, 0, 3), KVC_ERR_FULL, "1 more row for several tokens does not fit",
                    is_capacity ? "6 of capacity 6" : "holds 6 of max_seq_len 6");
        pair_free(&p);
    }
}

/* A restored layer has a row at position 7, and the layer with a stride lacks it: queries before it do not miss it. */
static void test_weights_before_a_missing_row(void) {
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = strided(4)}};
    const int32_t positions[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8_t replaced[] = {1, 0};
    const float q[4] = {0};
    static const int64_t ids[8];
    float weights[1];
    static pair p;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 2, layers);
    CHECK(pair_feed(&p, 0, 0, 6) == KVC_OK);
    CHECK(pair_begin_with(&p, 8, positions, ids, replaced) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK);
    for (int32_t at = 0; at < 9; at++) {
        const kvc_weights_args args = {.struct_size = sizeof args,
                                       .q = q,
                                       .positions = &at,
                                       .weights = weights,
                                       .num_rows = 1,
                                       .num_queries = 1,
                                       .num_heads = 1};
        const kvc_status status = kvc_weights(p.cache, 0, 1, &args);
        CHECKF(status == (at < 7 ? KVC_OK : KVC_ERR_GONE), "%d: %s", at, kvc_last_error());
    }
    pair_free(&p);
}

int main(void) {
    test_refused();
    test_cuts_for_either_stride();
    test_puts_without_rows();
    test_limits_of_rows();
    test_weights_before_a_missing_row();
    return test_result();
}
