/* Sharing ranges of positions: which rows a sequence comes to hold, and where it can go on, compared after each step
 * with the oracle of plain row lists (support/oracle.h). */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* Feeds a sequence token by token, so that each begins a batch that expires what no later one sees. */
static void feed_singly(pair *p, int64_t id, int32_t begin, int32_t end)
{
    for (int32_t at = begin; at < end; at++)
        CHECK(pair_feed(p, id, at, at + 1) == KVC_OK);
}

static int can_go_on(const pair *p, int64_t id)
{
    return kvc_can_resume(p->cache, id, kvc_next_position(p->cache, id));
}

/* ---- which rows -------------------------------------------------------------------------------------------------- */

/* Any range can be shared, with an empty sequence or behind what one holds; a second time changes nothing. */
static void test_ranges(int block_size)
{
    for (int32_t begin = 0; begin <= 11; begin++) {
        for (int32_t end = begin; end <= 12; end++) {
            pair *p = mixed_pair(block_size);
            int32_t high = end == 12 ? KVC_END : end;
            pair_feed(p, 0, 0, 11);
            pair_feed(p, 1, 20, 25);
            int64_t live = stats_of(p).live_slots;
            for (int64_t dst = 1; dst < 3; dst++) {
                CHECK(pair_share(p, 0, dst, begin, high) == KVC_OK);
                pair_check(p);
                int64_t num = kvc_seq_len(p->cache, dst, 0);
                CHECK(pair_share(p, 0, dst, begin, high) == KVC_OK && kvc_seq_len(p->cache, dst, 0) == num);
                pair_check(p);
            }
            CHECK(stats_of(p).live_slots == live && stats_of(p).rows_copied == 0);
            pair_feed(p, 1, 25, 27);
            pair_feed(p, 0, 11, 13);
            pair_check(p);
            pair_clear_sequence(p, 0);
            pair_check(p);
            pair_compact(p);
            pair_check(p);
            pair_free(p);
        }
    }
}

/* Checks that sequences 1 and 2 hold the same rows in the same slots in a layer. */
static void check_same_runs(const pair *p, int l)
{
    static kvc_run_info runs[256];
    int64_t num, num_blocks, ones = 0;
    CHECK(kvc_blocks(p->cache, l, NULL, sizeof(kvc_block_info), 0, &num_blocks, runs, sizeof *runs, 256, &num) ==
          KVC_OK);
    const kvc_run_info *one = runs;
    while (one < runs + num && one->seq_id < 1)
        one++;
    while (one + ones < runs + num && one[ones].seq_id == 1)
        ones++;
    CHECK(ones && one + 2 * ones == runs + num);
    for (int64_t i = 0; i < ones; i++) {
        kvc_run_info two = one[ones + i];
        CHECK(two.seq_id == 2);
        two.seq_id = 1;
        CHECK(!memcmp(&one[i], &two, sizeof two));
    }
}

/* [0, KVC_END) into an empty sequence does what a fork does: the same runs, deltas and lost positions. */
static void test_like_a_fork(int block_size)
{
    kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 1, 0)),
                          layer_with((kvc_policy){.kind = KVC_CROSS, .max_len = 3})};
    static pair p;
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    layers[0].rope = layers[1].rope =
        (kvc_rope){.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = right_angles};
    pair_new(&p, 3, layers);
    feed_singly(&p, 0, 0, 9);
    CHECK(pair_begin(&p, 3, (int32_t[]){9, 9, 30}, (int64_t[]){0, 0, 0}) == KVC_OK);
    CHECK(pair_put_cross(&p, 2, 0, 3) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK);
    for (int step = 0; step < 3; step++) {
        CHECK(pair_share(&p, 0, 1, 0, KVC_END) == KVC_OK && pair_fork(&p, 0, 2) == KVC_OK);
        pair_check(&p);
        for (int l = 0; l < 3; l++)
            check_same_runs(&p, l);
        for (int32_t at = 0; at < 40; at++)
            CHECK(kvc_can_resume(p.cache, 1, at) == kvc_can_resume(p.cache, 2, at));
        pair_clear_sequence(&p, 1);
        CHECK((step ? pair_divide(&p, 0, 3, KVC_END, 2) : pair_shift(&p, 0, 3, KVC_END, 5)) == KVC_OK);
    }
    pair_free(&p);
}

/* Nothing to share: an empty range, a sequence that holds nothing, or nothing there; no sequence comes to be. */
static void test_nothing(void)
{
    pair *p = mixed_pair(4);
    pair_feed(p, 0, 5, 9);
    CHECK(pair_share(p, 0, 1, 6, 6) == KVC_OK && pair_share(p, 0, 1, 0, 5) == KVC_OK);
    CHECK(pair_share(p, 0, 1, 9, KVC_END) == KVC_OK && pair_share(p, 8, 0, 0, KVC_END) == KVC_OK);
    CHECK(pair_share(p, 8, 1, 0, 5) == KVC_OK);
    CHECK_FAILS(pair_share(p, 8, 1, 0, KVC_END), KVC_ERR_INVALID, "src is sequence 8", "holds nothing"); /* as a fork */
    CHECK(p->num_sequences == 1 && kvc_next_position(p->cache, 1) == 0);
    pair_check(p);
    pair_free(p);
}

/* Rows may come with positions below or between those that are held, and come last all the same. */
static void test_order_of_arrival(int block_size)
{
    pair *p = pair_with(full_policy, block_size);
    static const int32_t right[] = {7, 8, 20, 21, 0, 1, 2, 9, 10, 22, 23, 4, 5, 24};
    int32_t positions[14];
    pair_feed(p, 0, 0, 30);
    pair_feed(p, 1, 7, 9);
    static const int32_t ranges[][2] = {{20, 22}, {0, 3}, {9, 11}, {22, 24}, {4, 6}};
    for (int i = 0; i < 5; i++) {
        CHECK(pair_share(p, 0, 1, ranges[i][0], ranges[i][1]) == KVC_OK);
        pair_check(p);
    }
    CHECK(pair_feed(p, 1, 24, 25) == KVC_OK);
    pair_check(p);
    CHECK(kvc_positions(p->cache, 1, 0, positions, 14) == 14 && !memcmp(positions, right, sizeof right));
    CHECK(pair_remove(p, 1, 1, 21, 0) == KVC_OK && pair_truncate(p, 1, 24) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Tokens that belong to several sequences: fed to one, and shared with the others.  The lists stay as short, and the
 * last run goes on in the same block. */
static void test_tokens_of_several_sequences(int block_size)
{
    pair *p = mixed_pair(block_size);
    for (int32_t at = 0, n = 1; at < 100; at += n, n = n % 7 + 1) {
        CHECK(pair_feed(p, 0, at, at + n) == KVC_OK);
        for (int64_t id = 1; id < 3; id++)
            CHECK(pair_share(p, 0, id, at, at + n) == KVC_OK && can_go_on(p, id));
        pair_check(p);
        for (int l = 0; l < 4; l++)
            CHECK(num_spans(p, 1, l) == num_spans(p, 2, l));
    }
    CHECK(pair_pass(p, 3, (int32_t[]){next_of(p, find_sequence(p, 0)), next_of(p, find_sequence(p, 1)),
                                      next_of(p, find_sequence(p, 2))},
                    (int64_t[]){0, 1, 2}) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Positions that repeat: a row is the same only in the same slot. */
static void test_repeated_positions(int block_size)
{
    pair *p = pair_with(full_policy, block_size);
    pair_pass(p, 6, (int32_t[]){3, 3, 4, 3, 5, 4}, (int64_t[]){0, 0, 0, 0, 0, 0});
    CHECK(pair_share(p, 0, 1, 3, 4) == KVC_OK);
    pair_check(p);
    CHECK(pair_share(p, 0, 1, 0, KVC_END) == KVC_OK && kvc_seq_len(p->cache, 1, 0) == 6);
    pair_check(p);
    pair_pass(p, 1, (int32_t[]){5}, (int64_t[]){0});
    CHECK(pair_share(p, 0, 1, 5, 6) == KVC_OK && kvc_seq_len(p->cache, 1, 0) == 7);
    pair_check(p);
    pair_pass(p, 1, (int32_t[]){3}, (int64_t[]){1});
    CHECK_FAILS(pair_share(p, 0, 1, 0, KVC_END), KVC_ERR_INVALID, "position 3", "sequence 1");
    CHECK(pair_share(p, 0, 1, 4, KVC_END) == KVC_OK);
    CHECK(pair_share(p, 1, 0, 3, 4) == KVC_OK && kvc_seq_len(p->cache, 0, 0) == 8); /* its rows there are all among these */
    pair_check(p);
    pair_free(p);
}

/* Another row at a position is refused, and named, whichever layer it is in; nothing has changed then. */
static void test_another_row(int block_size)
{
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
    if (pair_truncate(p, -3, 6) == KVC_OK)
        CHECK(pair_share(p, 7, -3, 0, KVC_END) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A slot that a sequence holds at another position is another row: it can hold one twice. */
static void test_one_slot_twice(int block_size)
{
    kvc_layer layer = plain_layer;
    layer.rope = (kvc_rope){.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = right_angles};
    static pair p;
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    pair_feed(&p, 0, 0, 6);
    pair_fork(&p, 0, 1);
    pair_shift(&p, 1, 0, KVC_END, 10);
    CHECK(pair_share(&p, 0, 1, 2, 5) == KVC_OK);
    pair_check(&p);
    CHECK(stats_of(&p).live_slots == 6 && kvc_seq_len(p.cache, 1, 0) == 9);
    CHECK(pair_shift(&p, 1, 2, 5, 10) == KVC_OK); /* now twice at the same position */
    pair_check(&p);
    CHECK(pair_share(&p, 1, 2, 0, KVC_END) == KVC_OK && kvc_seq_len(p.cache, 2, 0) == 9);
    CHECK(pair_share(&p, 1, 2, 0, KVC_END) == KVC_OK && kvc_seq_len(p.cache, 2, 0) == 9);
    pair_clear_sequence(&p, 2);
    CHECK(pair_inject(&p, 1, 0, 11, 14) == KVC_OK);
    pair_check(&p);
    CHECK(pair_settle(&p) == KVC_OK && pair_compact(&p) == KVC_OK);
    pair_check(&p);
    pair_free(&p);
}

/* Cross-attention rows go along with any range, where dst has none. */
static void test_cross_attention(void)
{
    const kvc_layer layers[] = {plain_layer, layer_with((kvc_policy){.kind = KVC_CROSS, .max_len = 9})};
    static pair p;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 2, layers);
    for (int64_t id = 0; id < 2; id++) {
        CHECK(pair_begin(&p, 2, (int32_t[]){id ? 7 : 0, id ? 8 : 1}, (int64_t[]){id, id}) == KVC_OK);
        CHECK(pair_put_cross(&p, 1, id, 5 + (int)id) == KVC_OK);
        pair_put_all(&p);
        CHECK(pair_commit(&p) == KVC_OK);
    }
    CHECK(pair_share(&p, 0, 1, 0, KVC_END) == KVC_OK && kvc_seq_len(p.cache, 1, 1) == 6);
    pair_check(&p);
    CHECK(pair_share(&p, 0, 2, 1, 2) == KVC_OK && kvc_seq_len(p.cache, 2, 1) == 5);
    CHECK(pair_share(&p, 1, 2, 7, 9) == KVC_OK && kvc_seq_len(p.cache, 2, 1) == 5);
    CHECK(pair_share(&p, 0, 3, 1, 1) == KVC_OK && kvc_seq_len(p.cache, 3, 1) == 0);
    pair_check(&p);
    pair_free(&p);
}

/* ---- what has expired -------------------------------------------------------------------------------------------- */

/* Rows that have expired of src are missing in dst: it is refused where it would see them, and nowhere else. */
static void test_expired(int block_size)
{
    pair *p = mixed_pair(block_size); /* windows of 5 with 2 sinks, and of 3, the latter keeping 9 */
    feed_singly(p, 0, 0, 40);
    CHECK(pair_share(p, 0, 1, 0, 30) == KVC_OK && !can_go_on(p, 1) && kvc_next_position(p->cache, 1) == 30);
    CHECK_FAILS(pair_feed(p, 1, 30, 31), KVC_ERR_GONE, "position 30", "sequence 1");
    pair_check(p);
    CHECK(pair_share(p, 0, 1, 30, KVC_END) == KVC_OK && can_go_on(p, 1)); /* its window is there now */
    pair_check(p);
    CHECK(pair_feed(p, 1, 40, 42) == KVC_OK);
    CHECK(pair_share(p, 0, 2, 36, KVC_END) == KVC_OK && can_go_on(p, 2) && pair_feed(p, 2, 40, 41) == KVC_OK);
    CHECK(pair_share(p, 0, 3, 0, 2) == KVC_OK && !can_go_on(p, 3)); /* sinks of one window, expired of the other */
    pair_check(p);
    pair_free(p);
}

/* A sequence that shared the beginning while it was there holds it: what src lost since is not missing. */
static void test_held_since(int block_size, kvc_policy policy)
{
    pair *p = pair_with(policy, block_size);
    feed_singly(p, 0, 0, 20);
    CHECK(pair_fork(p, 0, 1) == KVC_OK);
    feed_singly(p, 0, 20, 60);
    CHECK(pair_share(p, 0, 1, 18, 20) == KVC_OK && can_go_on(p, 1) && kvc_next_position(p->cache, 1) == 20);
    CHECK(pair_share(p, 0, 1, 0, 20) == KVC_OK && can_go_on(p, 1));
    pair_check(p);
    CHECK(pair_feed(p, 1, 20, 22) == KVC_OK);
    pair_truncate(p, 1, 20);
    CHECK(pair_share(p, 0, 1, 0, 40) == KVC_OK && !can_go_on(p, 1));
    pair_check(p);
    CHECK(pair_share(p, 0, 1, 40, 60) == KVC_OK && can_go_on(p, 1) && pair_feed(p, 1, 60, 61) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Rows of src that dst holds at their positions, its own, are not missing, at either end of what has expired. */
static void test_own_rows_in_place_of_expired(void)
{
    pair *p = pair_with(sliding_policy(4, 0, 12), 4);
    feed_singly(p, 0, 0, 40);
    pair_feed(p, 1, 0, 10); /* nothing has expired yet */
    CHECK(pair_share(p, 0, 1, 0, 10) == KVC_OK && can_go_on(p, 1) && kvc_can_resume(p->cache, 1, 3));
    pair_check(p);
    CHECK(pair_share(p, 0, 1, 4, 15) == KVC_OK && !can_go_on(p, 1) && kvc_next_position(p->cache, 1) == 15);
    pair_check(p);
    CHECK(pair_truncate(p, 1, 10) == KVC_OK && can_go_on(p, 1) && pair_feed(p, 1, 10, 12) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Where all rows have expired, those positions are shared: dst does not begin anew in silence. */
static void test_all_expired(void)
{
    pair *p = pair_with(chunked_policy(4, 0), 4);
    pair_feed(p, 0, 0, 8);
    CHECK(pair_reserve(p, 0, 4) == KVC_OK && kvc_seq_len(p->cache, 0, 0) == 0);
    CHECK(pair_share(p, 0, 1, 0, 6) == KVC_OK && kvc_next_position(p->cache, 1) == 6 && !can_go_on(p, 1));
    CHECK(pair_share(p, 0, 2, 0, KVC_END) == KVC_OK && kvc_next_position(p->cache, 2) == 8 && can_go_on(p, 2));
    pair_check(p);
    CHECK_FAILS(pair_feed(p, 1, 6, 7), KVC_ERR_GONE, "position 6", "sequence 1");
    CHECK(pair_feed(p, 2, 8, 9) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- what refuses it --------------------------------------------------------------------------------------------- */

static void test_busy(void)
{
    pair *p = mixed_pair(4);
    pair_feed(p, 0, 0, 4);
    CHECK(pair_begin(p, 1, (int32_t[]){4}, (int64_t[]){0}) == KVC_OK);
    CHECK_FAILS(pair_share(p, 0, 1, 0, 2), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(pair_share(p, 1, 0, 0, 0), KVC_ERR_BUSY, "sequence 0", "open batch");
    pair_abort(p);
    CHECK(pair_share(p, 0, 1, 0, 2) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A sequence may become longer than max_seq_len by sharing, as it takes no slot; the next batch is refused. */
static void test_too_long(void)
{
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

static void test_position_range(void)
{
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

int main(void)
{
    static const int block_sizes[] = {1, 3, 16};
    for (int i = 0; i < 3; i++) {
        test_ranges(block_sizes[i]);
        test_like_a_fork(block_sizes[i]);
        test_order_of_arrival(block_sizes[i]);
        test_tokens_of_several_sequences(block_sizes[i]);
        test_repeated_positions(block_sizes[i]);
        test_another_row(block_sizes[i]);
        test_one_slot_twice(block_sizes[i]);
        test_expired(block_sizes[i]);
        test_held_since(block_sizes[i], sliding_policy(5, 0, 0));
        test_held_since(block_sizes[i], sliding_policy(3, 2, 9));
    }
    test_nothing();
    test_cross_attention();
    test_own_rows_in_place_of_expired();
    test_all_expired();
    test_busy();
    test_too_long();
    test_position_range();
    return test_result();
}
