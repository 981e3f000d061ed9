/* Calls that need more memory than can exist are refused and change nothing, also where size_t has 32 bits: the bytes
 * needed here are 0, or few, modulo 2^32. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "kvcache.h"
#include "support/aligned.h"
#include "support/test.h"

enum { MOST = 256 << 20, MANY = 1 << 20 }; /* bytes of one allocation; elements of a row, tokens, slots */

static void *most_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user, (void)hint;
    if (alignment < sizeof(void *)) alignment = sizeof(void *);
    return size <= MOST ? aligned_new(alignment, size) : NULL;
}

static void most_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    aligned_free(start);
}

static kvc_status new_cache(const kvc_layer *layers, int32_t num_layers, int32_t block_size, kvc_cache **cache) {
    const kvc_allocator allocator = {.struct_size = sizeof allocator, .alloc = most_alloc, .free = most_free};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = num_layers,
                               .block_size = block_size,
                               .allocator = &allocator};
    return kvc_cache_new(&config, cache);
}

static kvc_layer layer_of(int32_t num_kv_heads, int32_t k_dim) {
    return (kvc_layer){.num_kv_heads = num_kv_heads, .k_dim = k_dim, .v_dim = 1, .k_type = KVC_F16, .v_type = KVC_F16};
}

static kvc_status begin(kvc_cache *cache, int32_t num_tokens, kvc_batch **batch) {
    int32_t *positions = malloc((size_t)num_tokens * sizeof *positions);
    for (int32_t i = 0; i < num_tokens; i++) positions[i] = i;
    const kvc_status status = kvc_begin(cache, num_tokens, positions, NULL, NULL, batch);
    free(positions);
    return status;
}

/* Checks that the cache is valid and empty, and frees it. */
static void check_empty(kvc_cache *cache) {
    kvc_stats stats;
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECK(stats.blocks_opened == 0 && kvc_seq_len(cache, 0, -1) == 0 && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* 2^30 blocks, whose list takes 4 bytes for each, or 8. */
static void test_reserve(void) {
    const kvc_layer layer = layer_of(1, 1);
    kvc_cache *cache;
    CHECK(new_cache(&layer, 1, 1, &cache) == KVC_OK);
    CHECK_FAILS(kvc_reserve(cache, 0, 1 << 30), KVC_ERR_NOMEM, "out of memory", "");
    CHECK_FAILS(kvc_reserve(cache, 0, INT32_MAX - 1), KVC_ERR_NOMEM, "out of memory", "");
    check_empty(cache);
}

/* A batch notes one byte for each of 2^20 tokens and 2^12 layers; only one layer holds anything. */
static void test_batch(void) {
    enum { LAYERS = 1 << 12 };
    kvc_layer *layers = malloc(LAYERS * sizeof *layers);
    kvc_cache *cache;
    kvc_batch *batch;
    for (int i = 0; i < LAYERS; i++) layers[i] = layer_of(1, 1), layers[i].policy.kind = i ? KVC_NONE : KVC_FULL;
    CHECK(new_cache(layers, LAYERS, 64, &cache) == KVC_OK);
    CHECK_FAILS(begin(cache, MANY, &batch), KVC_ERR_NOMEM, "batch", "1048576");
    check_empty(cache);
    free(layers);
}

/* 16 threads, each with 5/4 GiB to work in, and a little. */
static void test_plan(void) {
    enum { TOKENS = 32 };
    const kvc_layer layer = layer_of(1, MANY);
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 64, .num_threads = 16};
    uint16_t *rows = calloc(MANY + TOKENS, sizeof *rows);
    const kvc_put_args put = {.struct_size = sizeof put,
                              .k = rows,
                              .v = rows,
                              .k_token_stride = sizeof *rows, /* rows overlap */
                              .v_token_stride = sizeof *rows,
                              .k_type = KVC_F16,
                              .v_type = KVC_F16};
    kvc_cache *cache;
    kvc_batch *batch;
    kvc_plan *plan;
    CHECK(new_cache(&layer, 1, TOKENS, &cache) == KVC_OK);
    CHECK(begin(cache, TOKENS, &batch) == KVC_OK);
    CHECK(kvc_put(batch, 0, &put) == KVC_OK);
    CHECK_FAILS(kvc_plan_new(batch, &args, &plan), KVC_ERR_NOMEM, "attention", "memory");
    CHECK(kvc_commit(batch) == KVC_OK && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_seq_len(cache, 0, 0) == TOKENS);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    free(rows);
}

int main(void) {
    test_reserve();
    test_batch();
    test_plan();
    return test_result();
}
