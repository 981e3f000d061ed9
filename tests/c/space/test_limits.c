/* Limits: max_seq_len, max_sequences, capacity and max_bytes, and the default block size. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <math.h>

#include "base/pages.h"
#include "support/feeding.h"
#include "support/pairs.h"

/* By default a block holds max_seq_len tokens if max_sequences is 1, no layer expires and there is no max_bytes,
 * otherwise 64. */
static void test_default_block_size(void) {
    pair *p = limited_pair(0, 0, 0, 0);
    static const struct {
        kvc_config config;
        int windowed, num_spans;
    } cases[] = {
        {{.max_seq_len = 100, .max_sequences = 1}, 0, 1},
        {{.max_seq_len = 100, .max_sequences = 1}, 1, 2},
        {{.max_seq_len = 100, .max_sequences = 2}, 0, 2},
        {{.max_seq_len = 100}, 0, 2},
        {{.max_sequences = 1}, 0, 2},
        {{.capacity = 100, .max_sequences = 1}, 0, 2},
        {{.max_seq_len = 100, .max_sequences = 1, .max_bytes = 1 << 20}, 0, 2},
    };
    pair_free(p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kvc_layer layer = layer_with(cases[i].windowed ? sliding_policy(200, 0, 0) : full_policy);
        *p = (pair){.config = cases[i].config};
        pair_new(p, 1, &layer);
        pair_feed(p, 0, 0, 100);
        CHECKF(num_spans(p, 0, 0) == cases[i].num_spans, "case %zu", i);
        CHECK(kvc_block_size(p->cache) == (cases[i].num_spans == 1 ? 100 : 64));
        pair_check(p);
        pair_free(p);
    }
}

/* The errors of batches that do not fit.  tests/world knows which batches fit. */
static void test_messages(void) {
    pair *p = limited_pair(10, 2, 0, 0);
    CHECK(kvc_capacity(p->cache) == 20 && kvc_capacity_bytes(p->cache) == 20 * 2 * 24); /* their product by default */
    CHECK_FAILS(pair_feed(p, 0, 0, 11), KVC_ERR_FULL, "max_seq_len 10", "11 more tokens");
    CHECK_FAILS(pair_feed(p, 0, 0, 21), KVC_ERR_FULL, "max_seq_len is 10 and max_sequences 2", "at most 20 fit");
    CHECK(pair_feed(p, 0, 0, 8) == KVC_OK && fabs(kvc_utilization(p->cache) - 0.4) < 1e-15);
    CHECK_FAILS(pair_feed(p, 0, 8, 11), KVC_ERR_FULL, "sequence 0 holds 8 of max_seq_len 10", "2 fit at once");
    CHECK_FAILS(pair_pass(p, 2, (int32_t[]){0, 0}, (int64_t[]){1, 2}), KVC_ERR_FULL, "3 sequences",
                "max_sequences is 2");
    pair_check(p);
    pair_free(p);
    p = limited_pair(0, 0, 20, 0);
    CHECK(pair_feed(p, 0, 0, 16) == KVC_OK && kvc_fork(p->cache, 0, 1) == KVC_OK && pair_feed(p, 1, 16, 20) == KVC_OK);
    CHECK_FAILS(pair_feed(p, 2, 0, 1), KVC_ERR_FULL, "1 more token ", "20 of capacity 20 are in use, 0 fit at once");
    CHECK_FAILS(pair_feed(p, 2, 0, 21), KVC_ERR_FULL, "capacity is 20", "at most 20 fit at once");
    pair_check(p);
    pair_free(p);
    p = limited_pair(5, 0, 0, 0);
    CHECK(kvc_capacity(p->cache) == -1 && kvc_capacity_bytes(p->cache) == -1);
    pair_feed(p, 0, 0, 2);
    CHECK(kvc_utilization(p->cache) == 0.5); /* without a capacity: the share of the slots in blocks */
    pair_free(p);
}

/* Sequences have so many tokens each.  Room under max_bytes is a sum over whole blocks, and tokens go to free slots in
 * blocks of others: all get one token each in so many steps, until fewer slots are left than there are sequences. */
static void test_steps(int sequences, int tokens, int32_t size, int steps) {
    enum { SLOTS = 2048 };
    const int64_t max_bytes = bytes_of_blocks(1, &plain_layer, (kvc_config){.block_size = size}, SLOTS / size);
    const kvc_put_args put = zero_rows(0, 0);
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.block_size = size, .max_bytes = max_bytes});
    int64_t ids[MAX_BATCH];
    kvc_batch *batch;
    int done = 0;
    for (int id = 0; id < sequences; id++) CHECK(feed(cache, 1, ids[id] = id, tokens) == KVC_OK);
    for (; kvc_begin(cache, sequences, NULL, ids, NULL, &batch) == KVC_OK; done++)
        CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECKF(done == steps, "%d of %d tokens, blocks of %d: %d steps", sequences, tokens, (int)size, done);
    free_valid(cache);
}

/* Under max_bytes the error says what would count, what may, and what holds it. */
static void test_message_of_bytes(void) {
    enum { SIZE = 8 };
    const int64_t max_bytes = bytes_of_blocks(1, &plain_layer, (kvc_config){.block_size = SIZE}, 3);
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.block_size = SIZE, .max_bytes = max_bytes});
    for (int64_t id = 0; id < 3; id++) CHECK(feed(cache, 1, id, SIZE - 1) == KVC_OK);
    kvc_hold *hold = NULL;
    kvc_span span;
    kvc_block_info info;
    int64_t num;
    char numbers[64];
    CHECK(kvc_spans(cache, 0, 0, &span, sizeof span, 1, &num, &hold) == KVC_OK && num == 1);
    CHECK(kvc_blocks(cache, 0, &info, sizeof info, 1, &num, NULL, sizeof(kvc_run_info), 0, &num) == KVC_OK);
    CHECK_FAILS(feed(cache, 1, 0, 4), KVC_ERR_FULL, "4 more tokens", "3 blocks are in use");
    snprintf(numbers, sizeof numbers, " %lld bytes", 4 * (long long)info.bytes);
    CHECK_FAILS(feed(cache, 1, 0, 4), KVC_ERR_FULL, numbers, "1 of these blocks are kept in place by views");
    snprintf(numbers, sizeof numbers, " leaves %lld ", 3 * (long long)info.bytes);
    CHECK_FAILS(feed(cache, 1, 0, 4), KVC_ERR_FULL, numbers, "max_bytes");
    kvc_hold_free(hold);
    free_valid(cache);
}

/* Room ends at the last position. */
static void test_last_positions(void) {
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){0});
    const int32_t last = INT32_MAX - 1, positions[] = {last - 5};
    const kvc_put_args put = zero_rows(0, 1);
    int64_t room;
    kvc_batch *batch;
    CHECK(kvc_begin(cache, 1, positions, NULL, NULL, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK && kvc_room(cache, 0, &room) == KVC_OK && room == 5);
    CHECK_FAILS(kvc_reserve(cache, 0, 6), KVC_ERR_INVALID, "6 tokens would pass the last position",
                "goes on at 2147483642");
    CHECK(kvc_reserve(cache, 0, 5) == KVC_OK && feed(cache, 1, 0, 5) == KVC_OK);
    CHECK(kvc_room(cache, 0, &room) == KVC_OK && room == 0);
    CHECK_FAILS(kvc_reserve(cache, 0, 1), KVC_ERR_INVALID, "would pass the last position", "goes on at 2147483647");
    free_valid(cache);
}

/* Each sequence's rows of an encoder lie in a block of their own, which capacity says nothing of. */
static void test_bytes_of_an_encoder(void) {
    const kvc_layer layers[] = {plain_layer,
                                {.num_kv_heads = 1, .k_dim = 2, .v_dim = 1, .policy = {KVC_CROSS, .max_len = 9}},
                                {.num_kv_heads = 1, .k_dim = 9, .v_dim = 9, .policy = {.kind = KVC_NONE}}};
    for (int64_t max_sequences = 0; max_sequences < 4; max_sequences += 3) {
        kvc_cache *cache = cache_of(layers, 3, (kvc_config){.capacity = 10, .max_sequences = max_sequences});
        CHECK(kvc_capacity_bytes(cache) == (max_sequences ? 10 * 24 + 3 * 9 * 12 : -1));
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* A given capacity counts all tokens of a batch, even if it equals the default; so do the capacities of a clone and of
 * a saved state. */
static void test_own_capacity(void) {
    kvc_layer layer = plain_layer;
    layer.policy = sliding_policy(4, 0, 0);
    for (int64_t capacity = 0; capacity < 3; capacity += 2) {
        kvc_cache *clone,
            *cache = cache_of(&layer, 1, (kvc_config){.capacity = capacity * 4, .max_seq_len = 8, .max_sequences = 1});
        CHECK(kvc_cache_clone(cache, &clone) == KVC_OK && kvc_capacity(cache) == 8 && kvc_capacity(clone) == 8);
        for (int i = 0; i < 2; i++) {
            kvc_batch *batch = NULL;
            CHECK(kvc_begin(i ? clone : cache, 9, NULL, NULL, NULL, &batch) == (capacity ? KVC_ERR_FULL : KVC_OK));
            kvc_abort(batch);
            CHECK(kvc_cache_free(i ? clone : cache) == KVC_OK);
        }
    }
}

/* kvc_nbytes counts the slots of a large block that were written so far.  Written slots are used first. */
static void test_bytes_of_large_blocks(void) {
    const int32_t dim = (int32_t)kvc_os_page_size() / 4, row = 2 * dim * 4; /* a key or value fills a page */
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = dim, .v_dim = dim};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){0});
    kvc_batch *batch;
    int32_t positions[65];
    for (int t = 0; t < 65; t++) positions[t] = t;
    CHECK(kvc_begin(cache, 64, positions, NULL, NULL, &batch) == KVC_OK);
    CHECK(kvc_commit_kept(batch, NULL, 0) == KVC_OK); /* keeps the block for reuse */
    int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_begin(cache, 65, positions, NULL, NULL, &batch) == KVC_OK);
    CHECKF(kvc_nbytes(cache) < bytes + 3 * row, "%lld bytes more", (long long)(kvc_nbytes(cache) - bytes));
    kvc_abort(batch);
    CHECK(kvc_compact(cache) == KVC_OK && kvc_nbytes(cache) < row * 4);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* A put of an encoder's rows that does not fit takes no memory. */
static void test_max_bytes_of_an_encoder(void) {
    const kvc_layer layers[] = {
        plain_layer, {.num_kv_heads = 1, .k_dim = 256, .v_dim = 256, .policy = {.kind = KVC_CROSS, .max_len = 64}}};
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.max_bytes = 3 * 64 * 512 * 4 - 1}); /* not three blocks */
    kvc_put_args put = zero_rows(0, 1);
    kvc_batch *batch;
    CHECK(kvc_begin(cache, 3, NULL, (int64_t[]){1, 2, 3}, NULL, &batch) == KVC_OK);
    for (put.seq_id = 1; put.seq_id < 3; put.seq_id++) CHECK(kvc_put(batch, 1, &put) == KVC_OK);
    const int64_t bytes = kvc_nbytes(cache);
    CHECK_FAILS(kvc_put(batch, 1, &put), KVC_ERR_FULL, "max_bytes", "bytes");
    CHECK(kvc_nbytes(cache) == bytes && kvc_validate(cache) == KVC_OK);
    kvc_abort(batch);
    free_valid(cache);
}

/* An edit that copies rows gives back free blocks of other groups if it needs their room. */
static void test_edits_give_back_blocks(void) {
    enum { BLOCK = 4, BLOCKS = 8 }; /* of each layer; the window's are free, except one */
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    const kvc_put_args zeros = zero_rows(0, 0);
    const kvc_rows_in in = {.struct_size = sizeof in, .k = zeros.k, .v = zeros.v};
    const int64_t max_bytes = bytes_of_blocks(2, layers, (kvc_config){0}, BLOCKS);
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.max_bytes = max_bytes});
    CHECK(feed(cache, 2, 1, BLOCKS * BLOCK) == KVC_OK && kvc_fork(cache, 1, 2) == KVC_OK);
    CHECK_FAILS(kvc_inject(cache, 2, 0, 0, BLOCKS * BLOCK, &in), KVC_ERR_FULL, "max_bytes", "shared");
    CHECK(stats_in(cache).blocks_returned == 0);
    CHECK(kvc_inject(cache, 2, 0, 0, BLOCK, &in) == KVC_OK && stats_in(cache).blocks_returned > 0);
    free_valid(cache);
}

int main(void) {
    test_default_block_size();
    test_messages();
    test_steps(45, 40, 64, 5);
    test_steps(40, 40, 64, 11);
    test_steps(60, 20, 64, 14);
    test_steps(16, 100, 64, 28);
    test_steps(16, 100, 512, 28);
    test_message_of_bytes();
    test_last_positions();
    test_bytes_of_an_encoder();
    test_own_capacity();
    test_bytes_of_large_blocks();
    test_max_bytes_of_an_encoder();
    test_edits_give_back_blocks();
    return test_result();
}
