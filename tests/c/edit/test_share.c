/* Sharing ranges of positions: which rows a sequence holds then, and where it can go on.  After each step the cache is
 * compared with the oracle of plain row lists (support/oracle.h). */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* Feeds a sequence token by token, so that each begins a batch that expires what no later one sees. */
static void feed_singly(pair *p, int64_t id, int32_t begin, int32_t end) {
    for (int32_t at = begin; at < end; at++) CHECK(pair_feed(p, id, at, at + 1) == KVC_OK);
}

static int can_go_on(const pair *p, int64_t id) {
    return kvc_can_resume(p->cache, id, kvc_next_position(p->cache, id));
}

/* ---- which rows -------------------------------------------------------------------------------------------------- */

/* Tokens that belong to several sequences: fed to one, and shared with the others.  The lists stay as short, and the
 * last run goes on in the same block. */
static void test_tokens_of_several_sequences(int block_size) {
    pair *p = mixed_pair(block_size);
    for (int32_t at = 0, n = 1; at < 100; at += n, n = n % 7 + 1) {
        CHECK(pair_feed(p, 0, at, at + n) == KVC_OK);
        for (int64_t id = 1; id < 3; id++) CHECK(pair_share(p, 0, id, at, at + n) == KVC_OK && can_go_on(p, id));
        pair_check(p);
        for (int l = 0; l < 4; l++) CHECK(num_spans(p, 1, l) == num_spans(p, 2, l));
    }
    CHECK(pair_pass(p, 3,
                    (int32_t[]){next_of(p, find_sequence(p, 0)), next_of(p, find_sequence(p, 1)),
                                next_of(p, find_sequence(p, 2))},
                    (int64_t[]){0, 1, 2}) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Another row at a position is refused, and named, whichever layer it is in; nothing has changed then. */
static void test_another_row(int block_size) {
    pair *p = mixed_pair(block_size);
    pair_feed(p, 7, 0, 10);
    pair_copy_prefix(p, 7, -3, 6);
    pair_feed(p, -3, 6, 9);
    CHECK_FAILS(pair_share(p, 7, -3, 0, KVC_END), KVC_ERR_INVALID, "position 6, ", "sequence -3, ");
    CHECK_FAILS(pair_share(p, 7, -3, 8, 12), KVC_ERR_INVALID, "position 8, ", "sequence 7:");
    pair_feed(p, 9, 0, 1);
    CHECK_FAILS(pair_share(p, 7, 9, 0, 1), KVC_ERR_INVALID, "position 0, ", "sequence 9, ");
    pair_check(p);
    CHECK(pair_share(p, 7, -3, 0, 6) == KVC_OK && pair_share(p, 7, -3, 9, KVC_END) == KVC_OK);
    pair_check(p);
    if (pair_truncate(p, -3, 6) == KVC_OK) CHECK(pair_share(p, 7, -3, 0, KVC_END) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A runner's own radix tree: each node is a sequence, and requests begin as copies of nodes.  Clearing a leaf makes room
 * for the tokens that it alone held. */
static void test_tree_of_sequences(int block_size) {
    enum { STEM = 100, LEAF, OTHER };
    static pair p;
    int64_t room = -1;
    p = (pair){.config = {.block_size = block_size, .capacity = 30, .num_threads = 1}};
    pair_new(&p, 1, &plain_layer);
    pair_feed(&p, 0, 0, 12);
    CHECK(pair_copy_prefix(&p, 0, LEAF, 12) == KVC_OK && pair_copy_prefix(&p, 0, STEM, 8) == KVC_OK);
    CHECK(pair_clear_sequence(&p, 0) == KVC_OK);
    CHECK(pair_copy_prefix(&p, LEAF, 1, 8) == KVC_OK && can_go_on(&p, 1) && pair_feed(&p, 1, 8, 20) == KVC_OK);
    CHECK(pair_copy_prefix(&p, 1, OTHER, 20) == KVC_OK);
    pair_check(&p);
    CHECK(kvc_room(p.cache, 2, &room) == KVC_OK && room == 30 - 12 - 12);
    CHECK(pair_clear_sequence(&p, LEAF) == KVC_OK && kvc_room(p.cache, 2, &room) == KVC_OK && room == 30 - 8 - 12);
    CHECK(pair_copy_prefix(&p, STEM, 2, 8) == KVC_OK && pair_feed(&p, 2, 8, 18) == KVC_OK);
    pair_check(&p);
    pair_free(&p);
}

/* ---- what refuses it --------------------------------------------------------------------------------------------- */

/* A sequence may become longer than max_seq_len by sharing, as it takes no slot; the next batch is refused. */
static void test_too_long(void) {
    pair *p = limited_pair(10, 3, 0, 0);
    int64_t room = -1;
    pair_feed(p, 0, 0, 8);
    pair_feed(p, 1, 8, 16);
    CHECK(pair_share(p, 1, 0, 0, KVC_END) == KVC_OK && kvc_seq_len(p->cache, 0, 0) == 16);
    pair_check(p);
    CHECK(pair_room(p, 0) == KVC_OK && kvc_room(p->cache, 0, &room) == KVC_OK && room == 0);
    CHECK_FAILS(pair_feed(p, 0, 16, 17), KVC_ERR_FULL, "max_seq_len 10", " 0 fit");
    pair_check(p);
    pair_free(p);
}

/* ---- positions' ends --------------------------------------------------------------------------------------------- */

static void test_position_range(void) {
    pair *p = mixed_pair(4);
    int32_t first = 5, last = 5;
    CHECK(kvc_position_range(p->cache, 0, 1, &first, &last) == KVC_OK && first == -1 && last == -1);
    feed_singly(p, 0, 0, 30);
    CHECK(kvc_position_range(p->cache, 0, 0, &first, &last) == KVC_OK && first == 0 && last == 29);
    CHECK(kvc_position_range(p->cache, 0, 3, &first, &last) == KVC_OK && first == 21 && last == 29);
    CHECK(kvc_position_range(p->cache, 0, -1, &first, &last) == KVC_OK && first == 0 && last == 29);
    CHECK_FAILS(kvc_position_range(p->cache, 0, 4, &first, &last), KVC_ERR_INDEX, "layer", "is 4:");
    CHECK_FAILS(kvc_position_range(p->cache, 0, -2, &first, &last), KVC_ERR_INDEX, "layer", "is -2:");
    CHECK_FAILS(kvc_position_range(p->cache, 0, 0, NULL, &last), KVC_ERR_INVALID, "first", "NULL");
    CHECK_FAILS(kvc_position_range(p->cache, 0, 0, &first, NULL), KVC_ERR_INVALID, "last", "NULL");
    pair_free(p);
}

int main(void) {
    static const int block_sizes[] = {1, 3, 16};
    for (int i = 0; i < 3; i++) {
        test_tokens_of_several_sequences(block_sizes[i]);
        test_another_row(block_sizes[i]);
        test_tree_of_sequences(block_sizes[i]);
    }
    test_too_long();
    test_position_range();
    return test_result();
}
