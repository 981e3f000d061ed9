/* Retained sequences: which of their rows another sequence goes on from, what is evicted and when, and that nothing
 * else takes them.  The rows of an attached sequence are compared with those of a sequence that was fed.  The place
 * where it can go on is compared with a search over all positions. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/feeding.h"
#include "support/keeping.h"
#include "support/pairs.h"
#include "world/attention.h"

enum { PIECES = 6, PIECE = 4, TOKENS = PIECES * PIECE, FIRST_ID = 1000 };

static const int64_t ids[PIECES] = {FIRST_ID, FIRST_ID + 1, FIRST_ID + 2, FIRST_ID + 3, FIRST_ID + 4, FIRST_ID + 5};

static kvc_cache *new_cache(int num_layers, const kvc_policy *policies, kvc_config config) {
    kvc_layer layers[MAX_LAYERS];
    for (int l = 0; l < num_layers; l++) layers[l] = layer_with(policies[l]);
    return heap_cache(num_layers, layers, config);
}

/* ---- attaching --------------------------------------------------------------------------------------------------- */

/* Returns the largest position, at most length, at which every layer holds all that a query there sees. */
static int32_t best_match(const kvc_policy *policies, int num_layers, const int (*held)[TOKENS], int32_t length) {
    for (; length > 0; length--) {
        int fits = 1;
        for (int l = 0; l < num_layers; l++)
            for (int32_t at = 0; at < length; at++) fits &= held[l][at] || !shows_row(&policies[l], length, at);
        if (fits) return length;
    }
    return 0;
}

static int holds(kvc_cache *cache, int layer, int32_t position) {
    int32_t positions[TOKENS], found = 0;
    const int64_t num = kvc_positions(cache, 2, layer, positions, TOKENS);
    for (int64_t i = 0; i < num; i++) found |= positions[i] == position;
    return found;
}

/* Checks what is matched up to a length, and that the sequence goes on there. */
static void check_attached(kvc_cache *cache, const kvc_policy *policies, int num_layers, const int (*held)[TOKENS],
                           int32_t length, int32_t end) {
    int32_t matched = -1, right = best_match(policies, num_layers, held, length < end ? length : end);
    CHECK(attach_retained(cache, ids, PIECES, 2, length, &matched) == KVC_OK);
    CHECKF(matched == right, "length %d: %d matched, not %d", length, matched, right);
    CHECK(kvc_can_resume(cache, 2, matched) && kvc_next_position(cache, 2) == matched);
    CHECK(kvc_validate(cache) == KVC_OK);
    for (int l = 0; matched && l < num_layers; l++)
        for (int32_t at = 0; at < matched; at++) CHECK(holds(cache, l, at) || !shows_row(&policies[l], matched, at));
    CHECK(kvc_clear_sequence(cache, 2) == KVC_OK);
}

/* Tries two layers in two groups, in both orders.  Each layer has any of the pieces.  A piece that neither layer has
 * does not exist, and no token is known behind the last piece. */
static void test_every_pair_of_subsets(kvc_policy one, kvc_policy other) {
    const kvc_policy policies[2][2] = {{one, other}, {other, one}};
    for (int subset = 0; subset < 1 << (2 * PIECES); subset += is_full() ? 1 : 7) {
        kvc_cache *cache = new_cache(2, policies[subset % 2], (kvc_config){0});
        int held[MAX_LAYERS][TOKENS];
        int32_t end = 0;
        for (int i = 0; i < PIECES; i++) {
            const uint8_t has[2] = {subset >> 2 * i & 1, subset >> (2 * i + 1) & 1};
            for (int t = 0; t < PIECE; t++)
                for (int l = 0; l < 2; l++) held[l][i * PIECE + t] = has[l];
            if (!has[0] && !has[1]) continue;
            CHECK(retain_new(cache, ids[i], i * PIECE, (i + 1) * PIECE, has) == KVC_OK);
            end = (i + 1) * PIECE;
        }
        for (int32_t length = 1 + subset % 3; length <= TOKENS; length += 3)
            check_attached(cache, policies[subset % 2], 2, held, length, end);
        check_attached(cache, policies[subset % 2], 2, held, 500, end);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* ---- evicting ---------------------------------------------------------------------------------------------------- */

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

/* Rows that a batch of replaced layers left out are missing in the retained sequence, and in sequences from it. */
static void test_not_restored(void) {
    const kvc_policy policies[] = {full_policy, sliding_policy(3, 0, 0)};
    const kvc_begin_args args = {
        .struct_size = sizeof args, .num_tokens = 3, .positions = (int32_t[]){0, 1, 2}, .replaced = (uint8_t[]){0, 1}};
    const kvc_put_args put = zero_rows(0, 0);
    kvc_cache *cache = new_cache(2, policies, (kvc_config){0});
    kvc_batch *batch = NULL;
    CHECK(kvc_begin_with(cache, &args, &batch) == KVC_OK && kvc_put(batch, 1, &put) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK && !kvc_can_resume(cache, 0, 3));
    CHECK(retain(cache, 0, ids[0], 0, 3) == KVC_OK && retain(cache, 0, ids[1], 1, 2) == KVC_OK);
    for (int i = 0; i < 2; i++) {
        CHECK(kvc_fork(cache, ids[i], i) == KVC_OK && !kvc_can_resume(cache, ids[i], 3 - i));
        CHECK_FAILS(feed(cache, 2, i, 1), KVC_ERR_GONE, "layer 0", i ? "from 1 to 1" : "from 0 to 2");
    }
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Keys and values of a piece, which are the same. */
static kvc_rows_in rows_in(float (*rows)[4]) {
    return (kvc_rows_in){.struct_size = sizeof(kvc_rows_in),
                         .k = rows,
                         .v = rows,
                         .k_head_stride = PIECE * sizeof *rows,
                         .k_row_stride = sizeof *rows,
                         .v_head_stride = PIECE * sizeof *rows,
                         .v_row_stride = sizeof *rows};
}

/* Edits that copy rows evict, too. */
static void test_edits(void) {
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.capacity = TOKENS});
    CHECK(feed(cache, 1, 5, 4) == KVC_OK && pieces_left(cache) == 31 && kvc_fork(cache, 5, 6) == KVC_OK);
    float rows[PIECE][4] = {{0}};
    const kvc_rows_in in = rows_in(rows);
    CHECK(kvc_inject(cache, 6, 0, 0, 4, &in) == KVC_OK && pieces_left(cache) == 15);
    CHECK(kvc_inject(cache, ids[0], 0, 0, 4, &in) == KVC_OK && pieces_left(cache) == 15);
    free_valid(cache);
}

/* ---- rows from elsewhere ----------------------------------------------------------------------------------------- */

/* New rows are pinned until they are written, in the groups that were asked for, and are attached as others are. */
static void test_new_rows(void) {
    const kvc_policy policies[] = {full_policy, sliding_policy(3, 0, 0)};
    kvc_cache *cache = new_cache(2, policies, (kvc_config){.capacity = 8});
    float rows[PIECE][4];
    int32_t matched;
    for (int i = 0; i < PIECE; i++)
        for (int d = 0; d < 4; d++) rows[i][d] = (float)i;
    const kvc_rows_in in = rows_in(rows);
    CHECK(retain_new(cache, ids[0], 0, 4, (uint8_t[]){1, 0}) == KVC_OK);
    CHECK(retain_new(cache, ids[1], 4, 8, NULL) == KVC_OK);
    CHECK_FAILS(retain_new(cache, ids[2], 8, 9, NULL), KVC_ERR_FULL, "1 more token ", "8 of capacity 8");
    CHECK(kvc_inject(cache, ids[0], 0, 0, 4, &in) == KVC_OK);
    for (int i = 0; i < PIECE; i++) rows[i][3] += 4;
    CHECK(kvc_inject(cache, ids[1], 0, 4, 8, &in) == KVC_OK && kvc_inject(cache, ids[1], 1, 4, 8, &in) == KVC_OK);
    CHECK_FAILS(kvc_inject(cache, ids[0], 1, 0, 4, &in), KVC_ERR_INDEX, "sequence 1000", "layer 1");
    CHECK(attach_retained(cache, ids, 2, 1, 8, &matched) == KVC_OK && matched == 8);
    CHECK(kvc_seq_len(cache, 1, 1) == 2 && kvc_clear_sequence(cache, 1) == KVC_OK);
    CHECK_FAILS(feed(cache, 2, 3, 1), KVC_ERR_FULL, "1 more token ", "8 of capacity 8");
    CHECK(pin_retained(cache, ids + 1, 1, -1) == KVC_OK && feed(cache, 2, 3, 1) == KVC_OK && pieces_left(cache) == 1);
    free_valid(cache);
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
    test_every_pair_of_subsets(chunked_policy(4, 0), full_policy);
    test_every_pair_of_subsets(chunked_policy(6, 2), sliding_policy(3, 1, 0));
    test_every_pair_of_subsets(chunked_policy(8, 0), chunked_policy(5, 0));
    test_every_pair_of_subsets(sliding_policy(1, 0, 0), chunked_policy(3, 0));
    test_capacity();
    test_many();
    test_reserving_too_many();
    test_windows_go_first();
    test_not_restored();
    test_edits();
    test_new_rows();
    test_refused();
    return test_result();
}
