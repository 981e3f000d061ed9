/* Calls that are refused or cancelled change nothing: rows, reservations and counters stay, and max_bytes is kept to.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

enum { DIM = 1024, BLOCK = 64, ROWS = 256 };

static float rows[ROWS * DIM];

static kvc_cache *new_cache(const kvc_layer *layers, int num_layers, int64_t max_seq_len, int64_t max_bytes) {
    return cache_of(
        layers, num_layers,
        (kvc_config){.block_size = BLOCK, .max_seq_len = max_seq_len, .max_bytes = max_bytes, .num_threads = 1});
}

static kvc_put_args put_of(int32_t num_tokens) {
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .num_tokens = num_tokens,
                          .k = rows,
                          .v = rows,
                          .k_token_stride = DIM * 4,
                          .v_token_stride = DIM * 4};
}

/* Appends tokens to sequence 0, and puts their rows in layers [0, num_layers). */
static void feed(kvc_cache *cache, int32_t num_tokens, int num_layers) {
    const kvc_put_args args = put_of(num_tokens);
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, num_tokens, NULL, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < num_layers; l++) CHECK(kvc_put(batch, l, &args) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
}

typedef struct state {
    int64_t bytes;
    kvc_stats stats;
} state;

static state state_of(kvc_cache *cache) {
    state s = {.bytes = kvc_nbytes(cache)};
    kvc_get_stats(cache, &s.stats, sizeof s.stats);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return s;
}

static void check_state(kvc_cache *cache, const state *before) {
    const state after = state_of(cache);
    CHECKF(after.bytes == before->bytes, "%lld bytes, before %lld", (long long)after.bytes, (long long)before->bytes);
    CHECK(!memcmp(&after.stats, &before->stats, sizeof after.stats));
}

static int32_t fail_to_move(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                            int32_t k_dim, int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    return 1;
}

/* A failed shift frees the block it opened, and leaves reserved blocks as they were. */
static void test_shift_keeps_a_reservation(void) {
    const kvc_layer layer = {
        .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_FUNCTION, .shift = fail_to_move}};
    for (int reserved = 0; reserved < 3 * BLOCK; reserved += 17) {
        kvc_cache *cache = new_cache(&layer, 1, 0, 0);
        feed(cache, 3 * BLOCK - 9, 1);
        CHECK(!reserved || kvc_reserve(cache, 0, reserved) == KVC_OK);
        /* Lengthens the list of blocks, so that the shifts below take no more memory for it. */
        CHECK_FAILS(kvc_shift(cache, 0, 0, KVC_END, 3), KVC_ERR_CALLBACK, "function", "failed");
        const state before = state_of(cache);
        for (int32_t end = 1; end < 3 * BLOCK; end += 61) {
            CHECK_FAILS(kvc_shift(cache, 0, 0, end, 3), KVC_ERR_CALLBACK, "function", "failed");
            check_state(cache, &before);
        }
        CHECK_FAILS(kvc_shift(cache, 0, 0, KVC_END, 3), KVC_ERR_CALLBACK, "function", "failed");
        check_state(cache, &before);
        const int64_t opened = before.stats.blocks_opened;
        if (reserved) feed(cache, reserved, 1);
        CHECK(state_of(cache).stats.blocks_opened == opened);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* Restores sequence 2 in the sliding layer alone, and forgets it: its blocks stay free. */
static void clear_another(kvc_cache *cache) {
    static int32_t positions[2 * BLOCK];
    static int64_t ids[2 * BLOCK];
    const uint8_t replaced[] = {0, 1};
    for (int32_t i = 0; i < 2 * BLOCK; i++) positions[i] = i, ids[i] = 2;
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 2 * BLOCK,
                                 .positions = positions,
                                 .seq_ids = ids,
                                 .replaced = replaced};
    const kvc_put_args put = put_of(2 * BLOCK);
    kvc_batch *batch = NULL;
    CHECK(kvc_begin_with(cache, &args, &batch) == KVC_OK && kvc_put(batch, 1, &put) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK && kvc_clear_sequence(cache, 2) == KVC_OK);
}

/* Makes a cache of two sequences that share all rows; most blocks of the sliding layer's group are free. */
static kvc_cache *new_shared(int64_t max_bytes) {
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM},
                                {.num_kv_heads = 1,
                                 .k_dim = DIM,
                                 .v_dim = DIM,
                                 .policy = {.kind = KVC_SLIDING, .window = 8, .resume_window = ROWS}}};
    kvc_cache *cache = new_cache(layers, 2, 0, max_bytes);
    feed(cache, ROWS, 2);
    feed(cache, 1, 2);
    CHECK(kvc_fork(cache, 0, 1) == KVC_OK);
    clear_another(cache);
    return cache;
}

/* A refused inject does not give back free blocks of other groups. */
static void test_inject_gives_nothing_back(void) {
    const kvc_rows_in in = {
        .struct_size = sizeof in, .k = rows, .v = rows, .k_row_stride = DIM * 4, .v_row_stride = DIM * 4};
    kvc_cache *cache = new_shared(0);
    const int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    cache = new_shared(bytes + 4096);
    const state before = state_of(cache);
    CHECK(before.stats.blocks_free >= 2);
    CHECK_FAILS(kvc_inject(cache, 0, 0, 0, ROWS, &in), KVC_ERR_FULL, "max_bytes", "shared");
    const state after = state_of(cache);
    CHECK(!memcmp(&after.stats, &before.stats, sizeof after.stats));
    CHECK(after.bytes <= bytes + 4096);
    CHECK(kvc_inject(cache, 0, 0, 0, BLOCK, &in) == KVC_OK); /* fits once those free blocks are given back */
    CHECK(state_of(cache).stats.blocks_returned > 0 && kvc_nbytes(cache) <= bytes + 4096);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A cross-attention put that does not fit takes no memory, although one of its blocks is free. */
static void test_cross_put_that_does_not_fit(void) {
    const kvc_layer layers[] = {
        {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM},
        {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = {.kind = KVC_CROSS, .max_len = ROWS}}};
    const int64_t max_bytes = (int64_t)(BLOCK + ROWS / 2) * 2 * DIM * 4;
    const kvc_put_args one = put_of(1), some = put_of(ROWS / 4), all = put_of(ROWS);
    kvc_cache *cache = new_cache(layers, 2, 0, max_bytes);
    kvc_batch *batch;
    feed(cache, 1, 1);
    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    CHECK_FAILS(kvc_put(batch, 1, &all), KVC_ERR_FULL, "max_bytes", "bytes");
    CHECK(kvc_put(batch, 1, &one) == KVC_OK && kvc_put(batch, 1, &one) == KVC_OK); /* two blocks, one of them free */
    const state before = state_of(cache);
    CHECK_FAILS(kvc_put(batch, 1, &all), KVC_ERR_FULL, "max_bytes", "bytes");
    check_state(cache, &before);
    CHECK(kvc_put(batch, 1, &some) == KVC_OK && kvc_nbytes(cache) <= max_bytes);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* kvc_reserve checks limits before it takes memory for its tokens. */
static void test_reserve_of_too_many(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    kvc_cache *cache = new_cache(&layer, 1, 0, 1 << 24);
    CHECK_FAILS(kvc_reserve(cache, 0, 2000000000), KVC_ERR_FULL, "max_bytes", "bytes");
    CHECK(kvc_cache_free(cache) == KVC_OK);
    cache = new_cache(&layer, 1, 1000, 0);
    CHECK_FAILS(kvc_reserve(cache, 0, 2000000000), KVC_ERR_FULL, "max_seq_len", "1000");
    CHECK(kvc_reserve(cache, 0, 1000) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* max_bytes covers all memory of a batch of unstored tokens. */
static void test_unstored_keeps_to_max_bytes(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1};
    static uint8_t unstored[BLOCK];
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = BLOCK, .unstored = unstored};
    int begun = 0;
    memset(unstored, 1, sizeof unstored);
    for (int64_t max_bytes = 64; max_bytes < 4096; max_bytes += 16) {
        kvc_cache *cache = new_cache(&layer, 1, 0, max_bytes);
        kvc_batch *batch = NULL;
        const kvc_status status = kvc_begin_with(cache, &args, &batch);
        CHECK(status == (begun ? KVC_OK : status));
        begun |= status == KVC_OK;
        CHECKF(!batch || kvc_nbytes(cache) <= max_bytes, "%lld bytes, max_bytes is %lld", (long long)kvc_nbytes(cache),
               (long long)max_bytes);
        kvc_abort(batch);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
    CHECK(begun);
}

/* ---- random steps ------------------------------------------------------------------------------------------------ */

/* Forks, truncates or cuts a random sequence, or appends tokens with gaps between their positions. */
static void random_step(kvc_cache *cache) {
    const int64_t id = random_int(0, 4);
    int64_t ids[BLOCK];
    int32_t positions[BLOCK], next = kvc_next_position(cache, id), num = random_int(1, BLOCK);
    kvc_batch *batch;
    switch (random_int(0, 6)) {
    case 0: kvc_fork(cache, id, (id + 1) % 4); return;
    case 1: kvc_truncate(cache, id, random_int(0, next + 1)); return;
    case 2: kvc_remove(cache, id, next / 3, next / 2, 0); return;
    default: break;
    }
    for (int t = 0; t < num; t++) {
        ids[t] = id;
        positions[t] = next + t + t / 3;
    }
    const kvc_put_args args = {.struct_size = sizeof args, .k = rows, .v = rows};
    if (kvc_begin(cache, num, positions, ids, NULL, &batch) != KVC_OK) return;
    for (int l = 0; l < 3; l++) CHECK(kvc_put(batch, l, &args) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* Reserves all tokens that kvc_room counts, and checks that their batch takes no memory beyond that. */
static void check_reserved(kvc_cache *cache, int64_t id, int64_t max_bytes) {
    static int64_t ids[1 << 12];
    int64_t room = 0;
    kvc_batch *batch;
    CHECK(kvc_room(cache, id, &room) == KVC_OK);
    if (room < 1 || room > 1 << 12 || !kvc_can_resume(cache, id, kvc_next_position(cache, id))) return;
    CHECKF(kvc_reserve(cache, id, room) == KVC_OK, "%s", kvc_last_error());
    const int64_t bytes = kvc_nbytes(cache);
    CHECK(bytes <= max_bytes);
    for (int64_t t = 0; t < room; t++) ids[t] = id;
    CHECKF(kvc_begin(cache, (int32_t)room, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_nbytes(cache) == bytes, "%lld more", (long long)(kvc_nbytes(cache) - bytes));
    kvc_abort(batch);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
}

/* Whatever is stored, a reservation suffices for its batch. */
static void test_what_is_reserved_is_all_there(int seed) {
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = DIM / 8, .v_dim = DIM / 8},
                                {.num_kv_heads = 1,
                                 .k_dim = DIM / 8,
                                 .v_dim = DIM / 8,
                                 .policy = {.kind = KVC_SLIDING, .window = 1 + seed % 40}},
                                {.num_kv_heads = 1,
                                 .k_dim = DIM / 8,
                                 .v_dim = DIM / 8,
                                 .policy = {.kind = KVC_CHUNKED, .attention_chunk_size = 1 + seed % 7}}};
    const int64_t max_bytes = 1000000 + seed * 977;
    kvc_cache *cache = new_cache(layers, 3, 0, max_bytes);
    for (int i = 0; i < 60; i++) {
        random_step(cache);
        if (random_int(0, 6) == 0) check_reserved(cache, random_int(0, 4), max_bytes);
    }
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_shift_keeps_a_reservation();
    test_inject_gives_nothing_back();
    test_cross_put_that_does_not_fit();
    test_reserve_of_too_many();
    test_unstored_keeps_to_max_bytes();
    for (int seed = 0; seed < 100; seed++) test_what_is_reserved_is_all_there(seed);
    return test_result();
}
