/* A sequence keeps a list of its positions: what is refused, and what a gap takes.  tests/world compares the rows. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* Returns the bytes of a compacted cache of TOKENS small rows, of which every `nth` stays. */
static int64_t bytes_of(int32_t nth) {
    enum { TOKENS = 8192 };
    static int32_t positions[TOKENS];
    static float rows[TOKENS];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 64});
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, TOKENS, NULL, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, 0, TOKENS, 1, 1, 1, rows, rows);
    CHECK(kvc_commit(batch) == KVC_OK);
    int32_t num = 0;
    for (int32_t p = 0; p < TOKENS; p += nth) positions[num++] = p;
    CHECK(kvc_keep_positions(cache, 0, positions, num) == KVC_OK && kvc_compact(cache) == KVC_OK);
    const int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* A gap takes 24 bytes once the sequence was compacted. */
static void test_gaps(void) {
    const int64_t all = bytes_of(1), half = bytes_of(2);
    CHECKF(half < all / 2 + 4096 * 24 * 11 / 10, "%lld of %lld bytes", (long long)half, (long long)all);
}

/* An empty list ends a sequence.  Some layers and lists are refused.  Positions without a row count for nothing. */
static void test_edges(void) {
    static pair p;
    const kvc_policy cross = {.kind = KVC_CROSS, .max_len = 4};
    const kvc_layer layers[] = {
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = sliding_policy(5, 0, 0)},
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = cross},
    };
    p = (pair){.config.block_size = 4};
    pair_new(&p, 3, layers);
    CHECK(kvc_keep_positions(p.cache, 1, (int32_t[]){3}, 1) == KVC_OK);
    CHECK(pair_begin(&p, 1, (int32_t[]){0}, (int64_t[]){1}) == KVC_OK);
    CHECK(pair_put_cross(&p, 2, 1, 3) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK && pair_feed(&p, 1, 1, 20) == KVC_OK);
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, NULL, 2), KVC_ERR_INVALID, "positions is NULL", "is 2");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, NULL, -1), KVC_ERR_INVALID, "num_positions", "is -1:");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){-4}, 1), KVC_ERR_INVALID, "positions[0]", "is -4:");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, KVC_END}, 2), KVC_ERR_INVALID, "positions[1]", "is 2147");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 7, 7}, 3), KVC_ERR_INVALID, "positions[2]",
                "is 7, behind 7");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){7, 3}, 2), KVC_ERR_INVALID, "positions[1]",
                "is 3, behind 7");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 8}, 2), KVC_ERR_GONE, "sequence 1", "position 9");
    pair_check(&p);
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 8, 50, 90}, 4), KVC_ERR_GONE, "sequence 1", "position 9");
    CHECK(kvc_fork(p.cache, 1, 3) == KVC_OK && kvc_keep_positions(p.cache, 3, (int32_t[]){50, 90}, 2) == KVC_OK);
    CHECK(kvc_next_position(p.cache, 3) == 0 && kvc_seq_len(p.cache, 3, 2) == 0);
    pair_check(&p);
    CHECK(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 17, 19, 20, 90}, 5) == KVC_OK); /* the window has lost row 3 */
    CHECK(kvc_seq_len(p.cache, 1, 0) == 3 && kvc_seq_len(p.cache, 1, 1) == 2 && kvc_seq_len(p.cache, 1, 2) == 3);
    pair_check(&p);
    CHECK(pair_feed(&p, 1, 20, 23) == KVC_OK && kvc_exact_to(p.cache, 1) == 0);
    CHECK(kvc_fork(p.cache, 1, 2) == KVC_OK && kvc_keep_positions(p.cache, 1, NULL, 0) == KVC_OK);
    CHECK(kvc_next_position(p.cache, 1) == 0 && kvc_seq_len(p.cache, 1, 2) == 0 && kvc_seq_len(p.cache, 2, 2) == 3);
    pair_check(&p);
    CHECK(pair_begin(&p, 1, (int32_t[]){23}, (int64_t[]){2}) == KVC_OK);
    CHECK_FAILS(kvc_keep_positions(p.cache, 2, (int32_t[]){3}, 1), KVC_ERR_BUSY, "sequence 2", "open batch");
    kvc_abort(p.batch);
    pair_free(&p);
}

int main(void) {
    test_edges();
    test_gaps();
    return test_result();
}
