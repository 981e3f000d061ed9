/* Names of blocks: equal where rows are, whatever stands in fields that are ignored, and different where they are not.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/serving.h"

static const double freqs[] = {1, 0.5}, others[] = {1, 0.25}, zero[] = {0.0}, minus_zero[] = {-0.0};

/* Sets the identity of a model of two layers; this is the second. */
static void identify(kvc_layer layer, int32_t block_size, const char *fingerprint, uint8_t *identity) {
    const kvc_layer first = {.num_kv_heads = 1, .k_dim = 64, .v_dim = 64}, layers[] = {first, layer};
    kvc_cache *made = NULL;
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = 2,
                               .block_size = block_size};
    CHECKF(kvc_cache_new(&config, &made) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_prefix_identity(made, fingerprint, (int64_t)strlen(fingerprint), identity) == KVC_OK);
    CHECK(kvc_cache_free(made) == KVC_OK);
}

static int is_same(kvc_layer a, kvc_layer b) {
    uint8_t x[KVC_NAME_BYTES], y[KVC_NAME_BYTES];
    identify(a, 4, "a model", x);
    identify(b, 4, "a model", y);
    return !memcmp(x, y, sizeof x);
}

#define LAYER(...) ((kvc_layer){.num_kv_heads = 1, .k_dim = 64, .v_dim = 64, __VA_ARGS__})
#define KEYS_ALONE(...) ((kvc_layer){.num_kv_heads = 1, .k_dim = 64, __VA_ARGS__})

/* Fields that a kind, a type or another field makes nothing of. */
static void test_ignored(void) {
    const struct {
        kvc_layer a, b;
    } cases[] = {
        {LAYER(), LAYER(.policy = {.window = 7, .num_sink_tokens = 3, .resume_window = 9, .max_len = 5})},
        {LAYER(), LAYER(.policy = {.attention_chunk_size = 8})},
        {LAYER(), LAYER(.policy = {.stride = 1})},
        {LAYER(.policy = {.kind = KVC_SLIDING, .window = 7}),
         LAYER(.policy = {.kind = KVC_SLIDING, .window = 7, .attention_chunk_size = 8, .resume_window = 7})},
        {LAYER(.policy = {.kind = KVC_CHUNKED, .attention_chunk_size = 8}),
         LAYER(.policy = {.kind = KVC_CHUNKED, .attention_chunk_size = 8, .window = 3, .num_sink_tokens = 1})},
        {LAYER(.rope = {.kind = KVC_ROPE_NONE}),
         LAYER(.rope = {.kind = KVC_ROPE_NONE, .interleaved = 1, .first_dim = 4, .num_freqs = 2, .inv_freq = freqs})},
        {LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .interleaved = 1, .num_freqs = 2, .inv_freq = freqs}),
         LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .interleaved = 2, .num_freqs = 2, .inv_freq = freqs})},
        {LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = zero}),
         LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = minus_zero})},
        {LAYER(.value_in_key = 1), LAYER(.value_in_key = 2)},
        {LAYER(.k_type = KVC_F16), LAYER(.k_type = KVC_F16, .k_transform = KVC_TRANSFORM_HADAMARD)},
        {LAYER(.v_type = KVC_INT4), LAYER(.v_type = KVC_INT4, .v_transform = KVC_TRANSFORM_HADAMARD)},
        {KEYS_ALONE(.v_type = KVC_F32), KEYS_ALONE(.v_type = KVC_INT4, .v_transform = KVC_TRANSFORM_HADAMARD)},
        {LAYER(.policy = {.kind = KVC_NONE}),
         {.num_kv_heads = 3, .k_dim = 8, .v_dim = 9, .k_type = KVC_F16, .policy = {.kind = KVC_NONE}}},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) CHECKF(is_same(cases[i].a, cases[i].b), "case %d", i);
}

/* Whatever rows depend on. */
static void test_different(void) {
    const kvc_layer kinds[] = {
        LAYER(),
        {.num_kv_heads = 2, .k_dim = 64, .v_dim = 64},
        {.num_kv_heads = 1, .k_dim = 32, .v_dim = 64},
        {.num_kv_heads = 1, .k_dim = 64, .v_dim = 32},
        LAYER(.k_type = KVC_F16),
        LAYER(.v_type = KVC_F16),
        LAYER(.k_type = KVC_Q8_0),
        LAYER(.k_type = KVC_Q8_0, .k_transform = KVC_TRANSFORM_HADAMARD),
        LAYER(.v_type = KVC_Q8_0),
        LAYER(.v_type = KVC_Q8_0, .v_transform = KVC_TRANSFORM_HADAMARD),
        LAYER(.value_in_key = 1),
        KEYS_ALONE(.v_type = KVC_F32),
        KEYS_ALONE(.k_type = KVC_F16),
        LAYER(.share = 1),
        LAYER(.policy = {.kind = KVC_NONE}),
        LAYER(.policy = {.kind = KVC_SLIDING, .window = 7}),
        LAYER(.policy = {.kind = KVC_SLIDING, .window = 8}),
        LAYER(.policy = {.kind = KVC_SLIDING, .window = 7, .num_sink_tokens = 1}),
        LAYER(.policy = {.stride = 2}),
        LAYER(.policy = {.stride = 4}),
        LAYER(.policy = {.kind = KVC_CHUNKED, .attention_chunk_size = 7}),
        LAYER(.policy = {.kind = KVC_CHUNKED, .attention_chunk_size = 8}),
        LAYER(.rope = {.kind = KVC_ROPE_NONE}),
        LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = freqs}),
        LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = others}),
        LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = freqs}),
        LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = freqs, .first_dim = 2}),
        LAYER(.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = freqs, .interleaved = 1}),
    };
    enum { NUM = sizeof kinds / sizeof *kinds };
    static uint8_t identities[NUM + 2][KVC_NAME_BYTES];
    for (int i = 0; i < NUM; i++) identify(kinds[i], 4, "a model", identities[i]);
    identify(kinds[0], 8, "a model", identities[NUM]);
    identify(kinds[0], 4, "b model", identities[NUM + 1]);
    for (int i = 0; i < NUM + 2; i++)
        for (int j = 0; j < i; j++) CHECKF(memcmp(identities[i], identities[j], KVC_NAME_BYTES), "%d and %d", i, j);
}

static void name(const kvc_tokens *tokens, uint8_t *to) {
    int64_t num = 0;
    CHECK(kvc_prefix_names(prefix, tokens, to, 1, &num) == KVC_OK && num == 1);
}

/* No id names the same token as a digest, whatever either is.  An id beside a digest is ignored. */
static void test_tokens(void) {
    static const char *digits = "7ff1e37a5ad5b8a2c0eeb0a1d2d3a9f0"; /* any 32 bytes */
    int64_t ids[2][BLOCK] = {{1, 2, 3, 4}, {1, 9, 3, 4}};
    uint8_t digests[BLOCK][KVC_NAME_BYTES] = {{0}}, none[BLOCK][KVC_NAME_BYTES] = {{0}}, names[4][KVC_NAME_BYTES];
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    kvc_tokens tokens[] = {tokens_of(ids[0], BLOCK), tokens_of(ids[1], BLOCK), tokens_of(ids[0], BLOCK),
                           tokens_of(ids[0], BLOCK)};
    memcpy(digests[1], digits, KVC_NAME_BYTES);
    tokens[1].digests = tokens[2].digests = *digests;
    tokens[3].digests = *none;
    for (int i = 0; i < 4; i++) name(&tokens[i], names[i]);
    CHECK(!memcmp(names[1], names[2], KVC_NAME_BYTES) && !memcmp(names[0], names[3], KVC_NAME_BYTES));
    CHECK(memcmp(names[0], names[1], KVC_NAME_BYTES));
    /* Names once had the digest of an id's digits in place of the id: here beside another digest. */
    static const uint8_t of_three[KVC_NAME_BYTES] = {0x1f, 0x2e, 0x3d};
    memcpy(digests[2], of_three, sizeof of_three);
    name(&tokens[1], names[3]);
    CHECK(memcmp(names[3], names[1], KVC_NAME_BYTES));
    close_world();
}

/* Blocks of one token, with states as long as the token's id, are not known to a prefix without states. */
static void test_states(void) {
    uint8_t names[3][KVC_NAME_BYTES];
    const int64_t ids[] = {STATE, 5};
    for (int i = 0; i < 3; i++) {
        kvc_prefix *own = NULL;
        const kvc_layer layer = LAYER();
        const kvc_tokens tokens = tokens_of(ids, 2), one = tokens_of(ids + 1, 1);
        kvc_cache *made = heap_cache(1, &layer, (kvc_config){.block_size = 1});
        const kvc_prefix_config config = {sizeof config, .fingerprint = "a model",
                                          .state_bytes = i < 2 ? i * STATE : 9};
        uint8_t both[2][KVC_NAME_BYTES];
        int64_t num;
        CHECK(kvc_prefix_new(made, &config, &own) == KVC_OK);
        CHECK(kvc_prefix_names(own, i ? &one : &tokens, *both, 2, &num) == KVC_OK);
        memcpy(names[i], both[num - 1], KVC_NAME_BYTES);
        free_valid(made);
    }
    CHECK(memcmp(names[0], names[1], KVC_NAME_BYTES) && memcmp(names[1], names[2], KVC_NAME_BYTES));
}

static void test_arguments(void) {
    uint8_t identity[KVC_NAME_BYTES];
    kvc_prefix *other;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    CHECK_FAILS(kvc_prefix_identity(cache, NULL, 0, identity), KVC_ERR_INVALID, "fingerprint", "NULL");
    CHECK_FAILS(kvc_prefix_identity(cache, "a", 0, identity), KVC_ERR_INVALID, "fingerprint", "empty");
    CHECK_FAILS(kvc_prefix_identity(cache, "a", 1, NULL), KVC_ERR_INVALID, "identity", "NULL");
    const kvc_prefix_config bad[] = {{sizeof *bad, "a model", .secret = "secret"},
                                     {sizeof *bad, "a model", .salt = "salt"},
                                     {sizeof *bad, "a model", .identity = "identity"},
                                     {sizeof *bad, "a model", .secret_size = 3}};
    const char *fields[] = {"secret_size is 0", "salt_size is 0", "identity_size is 0", "secret_size is 3"};
    for (int i = 0; i < 4; i++)
        CHECK_FAILS(kvc_prefix_new(cache, &bad[i], &other), KVC_ERR_INVALID, fields[i], "give both");
    close_world();
}

int main(void) {
    test_ignored();
    test_different();
    test_tokens();
    test_states();
    test_arguments();
    return test_result();
}
