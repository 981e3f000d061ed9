/* How large blocks are under max_bytes: limits that hold no block, and files with such limits. */
#include "support/saved.h"

static const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 32, .v_dim = 32};
static const kvc_layer cross = {.num_kv_heads = 1, .k_dim = 32, .v_dim = 8, .policy = {KVC_CROSS, .max_len = 20}};

/* Returns the least max_bytes: what the empty cache takes, and one block of each layer group.  The first layer is
 * one group, and a cross-attention layer behind it is another. */
static int64_t least_of(const kvc_layer *layers, int32_t num_layers, kvc_config config) {
    const float row[64] = {0};
    config.max_bytes = 0;
    kvc_cache *cache = cache_of(layers, num_layers, config);
    int64_t bytes = kvc_nbytes(cache), num;
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    for (int32_t i = 0; i < num_layers; i++) {
        const kvc_put_args put = float_rows(0, 1, layers[i].num_kv_heads, layers[i].k_dim, layers[i].v_dim, row, row);
        kvc_block_info block;
        CHECK(kvc_put(batch, i, &put) == KVC_OK);
        CHECK(kvc_blocks(cache, i, &block, sizeof block, 1, &num, NULL, sizeof(kvc_run_info), 0, &num) == KVC_OK);
        if (i < 2) bytes += block.bytes;
    }
    CHECK(kvc_commit(batch) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* A cache begins if max_bytes holds one block of each group.  One byte less is refused. */
static void test_refused(void) {
    const kvc_layer layers[] = {layer, cross};
    static const int32_t sizes[] = {0, 1, 100, 100000};
    for (int i = 0; i < 4; i++) {
        kvc_config config = {.struct_size = sizeof config,
                             .layers = layers,
                             .layer_size = sizeof *layers,
                             .num_layers = 2,
                             .block_size = sizes[i]};
        const int64_t least = least_of(layers, 2, config);
        kvc_cache *cache = NULL;
        kvc_batch *batch = NULL;
        char text[32];
        snprintf(text, sizeof text, "at least %lld", (long long)least);
        config.max_bytes = least - 1;
        CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "max_bytes is ", text);
        CHECK(!strstr(kvc_last_error(), "smaller block_size") == (sizes[i] == 1));
        config.max_bytes = 1; /* less than the empty cache */
        CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "max_bytes is 1:", text);
        config.max_bytes = least;
        CHECKF(kvc_cache_new(&config, &cache) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        const kvc_put_args put = zero_rows(0, 1);
        CHECKF(kvc_put(batch, 1, &put) == KVC_OK, "%s", kvc_last_error());
        kvc_abort(batch);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* Blocks whose sum is beyond any number. */
static void test_refused_huge(void) {
    kvc_layer layers[8];
    kvc_cache *cache = NULL;
    for (int i = 0; i < 8; i++) {
        layers[i] = (kvc_layer){.num_kv_heads = 1 << 9, .k_dim = 1 << 20, .v_dim = 1 << 20};
        layers[i].policy = (kvc_policy){KVC_SLIDING, .window = i + 1};
    }
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = 8,
                               .block_size = 1 << 28,
                               .max_bytes = INT64_MAX};
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "max_bytes is 9223372036854775807:", "block_size");
}

/* A clone has the same limit, also if layers between others have ropes that the cache does not need. */
static void test_clone(void) {
    static const double angles[16] = {1, 0.5, 0.25};
    const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 16, .inv_freq = angles};
    kvc_layer layers[] = {layer, cross, layer};
    for (int i = 0; i < 3; i++) layers[i].rope = rope;
    kvc_config config = {.block_size = 16};
    config.max_bytes = least_of(layers, 3, config);
    kvc_cache *clone = NULL, *cache = cache_of(layers, 3, config);
    CHECKF(kvc_cache_clone(cache, &clone) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_nbytes(clone) == kvc_nbytes(cache) && kvc_block_size(clone) == kvc_block_size(cache));
    CHECK(kvc_cache_free(clone) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Saves ten tokens in blocks of this size, and writes a max_bytes into the file. */
static void save_ten(int32_t block_size, int64_t max_bytes, saved *file) {
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = block_size});
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, 10, NULL, NULL, NULL, &batch) == KVC_OK);
    const kvc_put_args put = zero_rows(0, 10);
    CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECK(save_all(cache, file) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)(uint8_t)file->bytes[i] << 8 * i;
    kvc_format format;
    kvc_format_place(&format, file->bytes + length + 8);
    format.state->max_bytes = max_bytes;
    sign_tables(&format, file->bytes, length + 8);
}

/* Files of older versions may have limits that hold no block of theirs: the rows then lie in smaller blocks. */
static void test_load(void) {
    enum { FULL = -1, INVALID };
    const struct {
        int32_t saved, fits, own, loaded; /* block sizes: the file's, of which one fits, the config's, the cache's */
    } cases[] = {{100, 100, 0, 100}, {4096, 80, 0, 64}, {4096, 20, 0, 16},        {24, 20, 0, 16},    {4096, 80, 8, 8},
                 {4096, 5, 0, FULL}, {16, 1, 0, FULL},  {4096, 80, 200, INVALID}, {64, 0, 0, INVALID}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kvc_config config = {.struct_size = sizeof config, .block_size = cases[i].own},
                         fits = {.block_size = cases[i].fits};
        saved file;
        kvc_cache *cache = NULL;
        save_ten(cases[i].saved, cases[i].fits ? least_of(&layer, 1, fits) : 1, &file);
        kvc_load_args args = load_args_of(&file);
        args.config = &config;
        if (cases[i].loaded == INVALID) {
            CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "max_bytes is", "at least");
        } else if (cases[i].loaded == FULL) { /* a block fits, ten tokens do not */
            CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FULL, "max_bytes", "loading");
        } else {
            CHECKF(kvc_load(&args, &cache) == KVC_OK, "case %zu: %s", i, kvc_last_error());
            CHECKF(kvc_block_size(cache) == cases[i].loaded, "case %zu: %d slots", i, kvc_block_size(cache));
            CHECK(kvc_seq_len(cache, 0, 0) == 10 && kvc_validate(cache) == KVC_OK);
            check_saved(cache, NULL);
            CHECK(kvc_cache_free(cache) == KVC_OK);
        }
        free(file.bytes);
    }
}

int main(void) {
    test_refused();
    test_refused_huge();
    test_clone();
    test_load();
    return test_result();
}
