/* Every stored key has its own sketch: of all types and transforms, of many dimensions, and wherever rows come from. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "support/isas.h"
#include "support/sketches.h"
#include "support/test.h"

enum { ROWS = 1500, MOST_DIM = 160 };

static float k[ROWS * MOST_DIM], v[ROWS * MOST_DIM];

static void check(kvc_cache *cache, int64_t id) {
    const int position = wrong_sketch_in(cache, kvc_table_find(&cache->sequences, id), 0);
    CHECKF(position < 0, "%s, type %d, transform %d, %d elements: the sketch at %d is not that of its key", kvc_isa(),
           cache->layers[0].k_type, cache->layers[0].k_transform, cache->layers[0].k_dim, position);
}

static void test_type(int type, int transform, int dim) {
    const kvc_layer layer = {.num_kv_heads = 1,
                             .k_dim = dim,
                             .v_dim = dim,
                             .k_type = type,
                             .k_transform = transform,
                             .rope = {.kind = KVC_ROPE_NONE},
                             .sketch_bits = 2};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 100, .num_threads = 2});
    kvc_batch *batch;
    for (int i = 0; i < ROWS * dim; i++) k[i] = element_of(0, dim, i / dim, i % dim) * (i % dim == 5 ? 9 : 1);
    memset(k + 7 * dim, 0, (size_t)dim * sizeof *k);
    k[9 * dim] = 1e18f; /* an f16 cannot hold its scale */
    CHECK(kvc_begin(cache, ROWS, NULL, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, 0, ROWS, 1, dim, dim, k, v);
    CHECK(kvc_commit(batch) == KVC_OK);
    check(cache, 0);
    const kvc_rows_in in = {.struct_size = sizeof in, .k = k, .v = v};
    CHECKF(kvc_inject(cache, 0, 0, 40, 41, &in) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_remove(cache, 0, 50, 450, 0) == KVC_OK && kvc_fork(cache, 0, 1) == KVC_OK);
    CHECK(kvc_compact(cache) == KVC_OK);
    check(cache, 0);
    check(cache, 1);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Elements whose size is just that from which on codes are the outer ones: 18, by the sum of squares. */
static void test_limits(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 64, .v_dim = 64, .sketch_bits = 2};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 16});
    kvc_batch *batch;
    double x[64];
    for (int d = 0; d < 64; d++) x[d] = 17;
    x[3] = 18, x[20] = -18, x[33] = 12, x[40] = 38, x[62] = -48;
    mix(x, 64); /* its own inverse */
    for (int d = 0; d < 64; d++) k[d] = (float)x[d];
    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, 0, 1, 1, 64, 64, k, v);
    CHECK(kvc_commit(batch) == KVC_OK);
    check(cache, 0);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static void test_types(void) {
    static const int dims[] = {32, 64, 96, 128, 160};
    for (int type = 0; type < KVC_STORED_TYPES; type++)
        for (int transform = 0; transform < 2; transform++)
            for (int i = 0; i < (is_full() ? 5 : 2); i++) test_type(type, transform, dims[(type + 2 * i) % 5]);
}

int main(void) {
    test_limits();
    for_some_isas(test_types);
    return test_result();
}
