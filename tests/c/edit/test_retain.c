/* Retained sequences: what is evicted and when, and that nothing else takes them.  tests/world compares which of their
 * rows another sequence goes on from. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/feeding.h"
#include "support/keeping.h"
#include "support/pairs.h"

enum { PIECES = 6, PIECE = 4, TOKENS = PIECES * PIECE, FIRST_ID = 1000 };

static const int64_t ids[PIECES] = {FIRST_ID, FIRST_ID + 1, FIRST_ID + 2, FIRST_ID + 3, FIRST_ID + 4, FIRST_ID + 5};

static kvc_cache *new_cache(int num_layers, const kvc_policy *policies, kvc_config config) {
    kvc_layer layers[MAX_LAYERS];
    for (int l = 0; l < num_layers; l++) layers[l] = layer_with(policies[l]);
    return heap_cache(num_layers, layers, config);
}

/* Returns which pieces exist, as bits. */
static int pieces_left(kvc_cache *cache) {
    int64_t found[PIECES];
    int64_t num = list_retained(cache, found, PIECES);
    int left = 0;
    for (int64_t i = 0; i < num; i++) left |= 1 << (found[i] - FIRST_ID);
    return left;
}

/* Feeds TOKENS tokens to sequence 1, and retains all pieces of them: windows expire rows at the commit. */
static void feed_pieces(kvc_cache *cache, int num_layers) {
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch = NULL;
    CHECK(begin_at_end(cache, 1, TOKENS, &batch) == KVC_OK);
    for (int l = 0; l < num_layers; l++) CHECK(kvc_put(batch, l, &put) == KVC_OK);
    for (int i = 0; i < PIECES; i++) CHECK(retain(cache, 1, ids[i], i * PIECE, (i + 1) * PIECE) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* Makes a cache of all pieces, which nobody else holds, the first of them used last. */
static kvc_cache *all_pieces(int num_layers, const kvc_policy *policies, kvc_config config) {
    kvc_cache *cache = new_cache(num_layers, policies, config);
    feed_pieces(cache, num_layers);
    CHECK(touch_retained(cache, ids, PIECES) == KVC_OK && kvc_clear_sequence(cache, 1) == KVC_OK);
    return cache;
}

/* The least recently used go first, no more than are needed, and none where all would not do. */
static void test_capacity(void) {
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.capacity = TOKENS + 2});
    int64_t room;
    kvc_stats stats;
    CHECK(kvc_room(cache, 5, &room) == KVC_OK && room == TOKENS + 2 && kvc_utilization(cache) == 0);
    CHECK(feed(cache, 1, 5, 2) == KVC_OK && pieces_left(cache) == 63);
    CHECK(feed(cache, 1, 5, 1) == KVC_OK && pieces_left(cache) == 31);
    CHECK(feed(cache, 1, 5, 8) == KVC_OK && pieces_left(cache) == 7);
    CHECK_FAILS(feed(cache, 1, 6, TOKENS - 8), KVC_ERR_FULL, "16 more tokens", "15 fit");
    CHECK(pieces_left(cache) == 7 && kvc_validate(cache) == KVC_OK);
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECK(stats.retained == 3 && stats.evictable_slots == 12 && stats.rows_evicted == 12);
    CHECK(kvc_reserve(cache, 5, 7) == KVC_OK && pieces_left(cache) == 3);
    CHECK(pin_retained(cache, ids, 1, 1) == KVC_OK && kvc_room(cache, 5, &room) == KVC_OK && room == 11);
    CHECK(feed(cache, 1, 5, 11) == KVC_OK && pieces_left(cache) == 1);
    CHECK_FAILS(feed(cache, 1, 5, 1), KVC_ERR_FULL, "1 more token ", "26");
    CHECK(pin_retained(cache, ids, 1, -1) == KVC_OK && feed(cache, 1, 5, 1) == KVC_OK && !pieces_left(cache));
    free_valid(cache);
}

/* Evictable sequences are found although more sequences stand before them than are looked at first. */
static void test_many(void) {
    enum { MANY = 300, PINNED = 200, BEGIN = 40 };
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = new_cache(1, policies, (kvc_config){.capacity = MANY});
    int64_t many[MANY], found[MANY];
    for (int32_t at = 0; at < MANY; at += BEGIN)
        CHECK(feed(cache, 1, 1, at + BEGIN < MANY ? BEGIN : MANY - at) == KVC_OK);
    for (int32_t i = 0; i < MANY; i++) {
        many[i] = FIRST_ID + i;
        CHECK(retain(cache, 1, many[i], i, i + 1) == KVC_OK);
    }
    CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && pin_retained(cache, many, PINNED, 1) == KVC_OK);
    CHECK(feed(cache, 1, 5, 3) == KVC_OK && list_retained(cache, found, MANY) == MANY - 3);
    CHECK(found[PINNED - 1] == many[PINNED - 1] && found[PINNED] == many[PINNED + 3]);
    CHECK(pin_retained(cache, many + PINNED, MANY - PINNED - 2, 1) == KVC_OK);
    CHECK_FAILS(feed(cache, 1, 5, 3), KVC_ERR_FULL, "3 more tokens", "2 fit");
    CHECK(list_retained(cache, NULL, MANY) == MANY - 3 && feed(cache, 1, 5, 2) == KVC_OK);
    CHECK(list_retained(cache, NULL, 0) == MANY - 5 && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A reservation of the most tokens that fit beside a running sequence evicts nothing either. */
static void test_reserving_too_many(void) {
    const kvc_policy policies[] = {full_policy};
    for (int64_t n = INT32_MAX - 70; n < INT32_MAX; n++) {
        kvc_cache *cache = new_cache(1, policies, (kvc_config){.capacity = n});
        for (int id = 1; id <= 2; id++) CHECK(feed(cache, 1, id, PIECE) == KVC_OK);
        CHECK(retain(cache, 1, FIRST_ID, 0, PIECE) == KVC_OK && kvc_clear_sequence(cache, 1) == KVC_OK);
        CHECK_FAILS(kvc_reserve(cache, 5, n), KVC_ERR_FULL, "more tokens", "fit");
        CHECK(list_retained(cache, NULL, 0) == 1 && kvc_validate(cache) == KVC_OK);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* While a sequence holds the rows of full layers, the rows of a window that it has left behind are evicted alone. */
static void test_windows_go_first(void) {
    const kvc_policy policies[] = {full_policy, sliding_policy(5, 0, 0)};
    const kvc_layer layers[] = {plain_layer, layer_with(policies[1])};
    const int64_t max_bytes = bytes_of_blocks(2, layers, (kvc_config){0}, PIECES + 1);
    kvc_cache *cache = new_cache(2, policies, (kvc_config){.max_bytes = max_bytes});
    feed_pieces(cache, 2);
    for (int32_t at = TOKENS; at < 2 * TOKENS && kvc_seq_len(cache, ids[0], 1) == PIECE; at++)
        CHECK(feed(cache, 2, 1, 1) == KVC_OK);
    CHECK(pieces_left(cache) == 63 && kvc_seq_len(cache, ids[0], 1) == 0 && kvc_seq_len(cache, ids[0], 0) == PIECE);
    CHECK(kvc_validate(cache) == KVC_OK);
    int32_t matched;
    CHECK(attach_retained(cache, ids, PIECES, 2, 6, &matched) == KVC_OK && matched == 0);
    CHECK(attach_retained(cache, ids, PIECES, 2, TOKENS, &matched) == KVC_OK && matched == TOKENS);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Batches and edits refuse them, and no list has them. */
static void test_refused(void) {
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.max_sequences = 1}), *clone;
    CHECK(feed(cache, 1, 1, 2) == KVC_OK);
    CHECK_FAILS(feed(cache, 1, ids[0], 1), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK_FAILS(kvc_truncate(cache, ids[0], 0), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK_FAILS(kvc_remove(cache, ids[0], 0, 2, 0), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK_FAILS(kvc_fork(cache, 1, ids[0]), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK_FAILS(kvc_share(cache, 1, ids[0], 0, 1), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK(retain(cache, 1, 9, 5, 9) == KVC_OK && retain(cache, 77, 9, 0, 9) == KVC_OK); /* no rows there */
    CHECK(pieces_left(cache) == 63 && kvc_sequences(cache, NULL, 0) == 1 && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_clone(cache, &clone) == KVC_OK && !pieces_left(clone) && kvc_sequences(clone, NULL, 0) == 1);
    CHECK(kvc_validate(clone) == KVC_OK && kvc_cache_free(clone) == KVC_OK);
    CHECK(kvc_clear(cache) == KVC_OK && !pieces_left(cache) && kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_capacity();
    test_many();
    test_reserving_too_many();
    test_windows_go_first();
    test_refused();
    return test_result();
}
