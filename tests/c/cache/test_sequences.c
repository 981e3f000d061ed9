/* Sequences: batches, edits, windows, and random steps, compared after each with the oracle of plain row lists
 * (support/oracle.h). */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/random_steps.h"
#include "support/pairs.h"

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

static void test_append(int block_size)
{
    pair *p = mixed_pair(block_size);
    pair_check(p);
    for (int32_t at = 0, n = 1; at < 150; at += n, n = n % 13 + 1) {
        pair_feed(p, 7, at, at + n);
        pair_check(p);
    }
    CHECK(num_spans(p, 7, 0) == (kvc_seq_len(p->cache, 7, 0) + block_size - 1) / block_size);
    pair_free(p);
}

/* Appending fills the sequence's last block, even a shared one; a new block is opened only when that is full. */
static void test_extend_in_place(void)
{
    pair *p = pair_with(full_policy, 16);
    pair_feed(p, 0, 0, 5);
    pair_feed(p, 0, 5, 7);
    CHECK(num_spans(p, 0, 0) == 1);
    pair_fork(p, 0, 1);
    pair_feed(p, 0, 7, 9);
    CHECK(num_spans(p, 0, 0) == 1 && num_spans(p, 1, 0) == 1);
    pair_feed(p, 1, 7, 9);
    pair_feed(p, 0, 9, 10);
    pair_check(p);
    CHECK(num_spans(p, 1, 0) == 2);
    CHECK(stats_of(p).blocks_in_use == 1 && stats_of(p).rows_moved == 0);
    pair_truncate(p, 0, 9); /* the last slot falls back to the block */
    pair_feed(p, 1, 9, 13);
    pair_check(p);
    CHECK(stats_of(p).blocks_in_use == 1 && stats_of(p).wasted_slots == 0);
    pair_free(p);
}

/* kvc_put takes any strides: here a row is repeated, and heads overlap. */
static void test_put_strides(void)
{
    pair *p = pair_with(full_policy, 3);
    static const float rows[] = {1, 2, 3, 4, 5, 6, 7};
    const int32_t positions[] = {0, 1, 2, 3, 4};
    const kvc_put_args args = {.struct_size = sizeof args,
                               .k = rows,
                               .v = rows + 4,
                               .k_token_stride = 0,
                               .v_token_stride = -(int64_t)sizeof *rows};
    float k[20] = {0}, v[10] = {0};
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .v = v, .k_row_stride = 16, .v_row_stride = 8};
    kvc_batch *batch;
    CHECK(kvc_begin(p->cache, 5, positions, NULL, NULL, &batch) == KVC_OK);
    CHECK(kvc_put(batch, 0, &args) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECK(kvc_gather(p->cache, 0, 0, 0, 5, &out) == KVC_OK);
    for (int t = 0; t < 5; t++)
        CHECK(k[t * 4] == 1 && k[t * 4 + 3] == 4 && v[t * 2] == rows[4 - t] && v[t * 2 + 1] == rows[5 - t]);
    kvc_clear(p->cache);
    pair_free(p);
}

/* The rows of a batch may be put in any order, in ranges of any length. */
static void test_put_ranges(void)
{
    pair *p = mixed_pair(4);
    int32_t positions[200];
    int64_t ids[200];
    for (int t = 0; t < 200; t++) {
        positions[t] = t / 3;
        ids[t] = t % 3;
    }
    CHECK(pair_begin(p, 200, positions, ids) == KVC_OK);
    for (int l = 3; l >= 0; l--)
        for (int n = 1, at = 200; at > 0; at -= n, n = at < 2 * n ? at : 2 * n)
            pair_put(p, l, at - n, n);
    pair_check(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Aborting leaves the sequences as they were, whether no, some or all rows were put. */
static void test_abort(void)
{
    pair *p = mixed_pair(4);
    kvc_abort(NULL);
    pair_feed(p, 0, 0, 12);
    pair_fork(p, 0, 1);
    kvc_stats before = stats_of(p);
    for (int i = 0; i < 3; i++) { /* nothing put, some, all */
        CHECK(pair_begin(p, 5, (int32_t[]){12, 12, 13, 13, 0}, (int64_t[]){0, 1, 0, 1, 2}) == KVC_OK);
        pair_check(p);
        for (int l = 0; l < 2 * i; l++)
            pair_put(p, l, 0, 5);
        pair_abort(p);
        pair_check(p);
    }
    kvc_stats after = stats_of(p);
    CHECK(after.aborted == 3 && after.batches == before.batches && after.tokens == before.tokens);
    CHECK(after.live_slots < before.live_slots); /* what begin expired stays expired */
    pair_feed(p, 0, 12, 14);
    pair_check(p);
    pair_free(p);
}

/* With gaps, repeated and falling positions, rows keep the order they were put in. */
static void test_irregular_positions(int block_size)
{
    pair *p = pair_with(full_policy, block_size);
    pair_pass(p, 8, (int32_t[]){5, 5, 4, 9, 10, 11, 10, 0}, (int64_t[]){3, 3, 3, 3, 3, 3, 3, 3});
    pair_check(p);
    pair_pass(p, 3, (int32_t[]){5, 200, 199}, (int64_t[]){3, 3, 3});
    pair_copy_prefix(p, 3, 4, 10);
    pair_check(p);
    pair_remove(p, 3, 4, 11, 0);
    pair_check(p);
    pair_compact(p);
    pair_check(p);
    pair_free(p);
}

/* INT32_MAX - 1 is a position like any other. */
static void test_largest_position(void)
{
    const int32_t last = INT32_MAX - 1;
    for (int windowed = 0; windowed < 2; windowed++) {
        pair *p = pair_with(windowed ? sliding_policy(INT32_MAX, 0, 0) : full_policy, 4);
        CHECK(pair_pass(p, 2, (int32_t[]){last, last - 1}, (int64_t[]){0, 0}) == KVC_OK);
        CHECK(pair_pass(p, 1, &last, (int64_t[]){0}) == KVC_OK);
        pair_check(p);
        CHECK(kvc_next_position(p->cache, 0) == INT32_MAX && kvc_can_resume(p->cache, 0, INT32_MAX) == 1);
        pair_fork(p, 0, 1);
        pair_remove(p, 0, last, KVC_END, 0);
        pair_check(p);
        CHECK(pair_pass(p, 2, (int32_t[]){last, last}, (int64_t[]){0, 1}) == KVC_OK);
        pair_truncate(p, 1, last - 1);
        pair_check(p);
        pair_free(p);
    }
}

/* ---- editing ----------------------------------------------------------------------------------------------------- */

/* After a prefix of any length is copied, both sequences can append, and lose rows without the other's changing. */
static void test_copy_prefix(int block_size)
{
    pair *p = mixed_pair(block_size);
    for (int32_t length = 0; length <= 22; length += length < 18 ? 1 : 4) {
        pair_feed(p, 0, 0, 19);
        pair_copy_prefix(p, 0, 1, length); /* which agrees on where rows of windows are gone */
        pair_check(p);
        CHECK(stats_of(p).rows_moved == 0);
        if (kvc_can_resume(p->cache, 1, kvc_next_position(p->cache, 1)))
            pair_feed(p, 1, next_of(p, find_sequence(p, 1)), next_of(p, find_sequence(p, 1)) + 5);
        pair_feed(p, 0, 19, 22);
        pair_check(p);
        pair_remove(p, 0, 2, 8, 0);
        pair_check(p);
        pair_clear_sequence(p, length % 2);
        pair_check(p);
        pair_clear(p);
        pair_check(p);
    }
    pair_free(p);
}

/* Forking shares all rows, replaces what dst held, and empties dst if src holds nothing. */
static void test_fork(int block_size)
{
    pair *p = mixed_pair(block_size);
    pair_fork(p, 0, 1); /* an empty one */
    pair_check(p);
    pair_feed(p, 0, 0, 9);
    pair_feed(p, 1, 0, 3);
    pair_fork(p, 0, 1); /* over rows */
    pair_fork(p, 1, 2);
    pair_check(p);
    for (int64_t id = 0; id < 3; id++)
        pair_feed(p, id, 9, 12 + (int32_t)id);
    pair_check(p);
    CHECK(stats_of(p).rows_moved == 0);
    pair_fork(p, 8, 2); /* an empty one over rows */
    pair_check(p);
    pair_fork(p, 1, 0);
    pair_clear_sequence(p, 1);
    pair_check(p);
    pair_free(p);
}

/* Any range can be removed from a full layer, and sequences that share its rows keep theirs. */
static void test_remove(int block_size)
{
    for (int32_t begin = 0; begin <= 10; begin++) {
        for (int32_t end = begin; end <= 11; end++) {
            pair *p = pair_with(full_policy, block_size);
            pair_feed(p, 0, 0, 10);
            pair_fork(p, 0, 1);
            pair_remove(p, 0, begin, end, 0);
            pair_check(p);
            pair_remove(p, 1, begin, end == 11 ? KVC_END : end, 1); /* refused where later tokens would move */
            pair_check(p);
            pair_feed(p, 0, 10, 14);
            pair_check(p);
            pair_free(p);
        }
    }
}

/* Truncating, keeping and clearing ignore sequences that do not exist, and free blocks for reuse. */
static void test_truncate_keep_clear(void)
{
    pair *p = mixed_pair(4);
    for (int64_t id = -2; id < 3; id++)
        pair_feed(p, id, 0, 9);
    pair_truncate(p, 1, 20);
    pair_truncate(p, 1, 8);
    pair_truncate(p, 2, 0);
    pair_truncate(p, 99, 3);
    pair_clear_sequence(p, 99);
    pair_check(p);
    pair_feed(p, 1, 8, 10);
    pair_check(p);
    pair_keep(p, 1);
    pair_check(p);
    CHECK(p->num_sequences == 1);
    int64_t blocks = stats_of(p).blocks_in_use + stats_of(p).blocks_free;
    pair_keep(p, 99);
    pair_check(p);
    CHECK(p->num_sequences == 0 && stats_of(p).blocks_free == blocks);
    pair_feed(p, 0, 0, 9);
    CHECK(stats_of(p).blocks_reused > 0);
    pair_clear(p);
    pair_check(p);
    CHECK(kvc_sequences(p->cache, NULL, 0) == 0);
    pair_free(p);
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

/* A window keeps the rows that the next batch can still see, and sinks; a batch whose window lost rows is refused. */
static void test_window(int block_size, kvc_policy policy)
{
    pair *p = pair_with(policy, block_size);
    int32_t kept = policy.resume_window ? policy.resume_window : policy.window;
    for (int32_t at = 0; at < 60; at++) {
        pair_feed(p, 0, at, at + 1);
        pair_check(p);
    }
    int32_t low = 59 - kept + 1; /* the last token stands at 59 */
    CHECK(p->sequences[0].layers[0].num == policy.num_sink_tokens + 60 - low);
    CHECK(stats_of(p).rows_moved == 0 || policy.num_sink_tokens); /* which leave holes */
    CHECK(stats_of(p).rows_expired == low - policy.num_sink_tokens);

    int32_t back = low + policy.window - 1; /* its window begins with the first row that is kept */
    CHECK(kvc_can_resume(p->cache, 0, back) == 1 && kvc_can_resume(p->cache, 0, back - 1) == 0);
    CHECK_FAILS(pair_feed(p, 0, back - 1, back), KVC_ERR_GONE, "position", "sequence 0");
    pair_check(p);
    CHECK(pair_feed(p, 0, back, back + 1) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A batch of another sequence expires an idle one's rows as well, but for those its next token sees. */
static void test_idle_sequences(void)
{
    pair *p = pair_with(sliding_policy(4, 1, 0), 3);
    pair_feed(p, 0, 0, 20); /* the last token stays, with what it sees */
    CHECK(kvc_seq_len(p->cache, 0, 0) == 1 + 4);
    pair_fork(p, 0, 1);
    pair_feed(p, 2, 0, 1);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 1 + 3 && kvc_seq_len(p->cache, 1, 0) == 1 + 3);
    CHECK(kvc_can_resume(p->cache, 1, 20) == 1 && kvc_can_resume(p->cache, 1, 19) == 0);
    CHECK_FAILS(pair_feed(p, 1, 19, 20), KVC_ERR_GONE, "position 19", "sequence 1");
    pair_feed(p, 1, 20, 25);
    pair_check(p);
    pair_free(p);
}

/* Checks that dropping the rows of sequence 0 from a length on, and sharing those before it, are refused with these
 * words, and change nothing. */
static void check_cut_refused(pair *p, int32_t length, const char *position, const char *safe, const char *before)
{
    CHECK_FAILS(pair_truncate(p, 0, length), KVC_ERR_GONE, position, safe);
    CHECK_FAILS(pair_remove(p, 0, length, KVC_END, 1), KVC_ERR_GONE, "sequence 0", before);
    CHECK_FAILS(pair_remove(p, 0, length, next_of(p, find_sequence(p, 0)), 0), KVC_ERR_GONE, position, safe);
    CHECK_FAILS(pair_copy_prefix(p, 0, 1, length), KVC_ERR_GONE, position, "resume_window");
    pair_check(p);
}

/* A cut that leaves a sequence where a token would see expired rows is refused: one from behind the sinks up to the
 * window.  One within the sinks is not, nor one to nothing; what has expired is gone with what is dropped. */
static void test_cut_behind_sinks(void)
{
    pair *p = pair_with(sliding_policy(4, 2, 0), 3);
    for (int32_t at = 0; at < 20; at++)
        pair_feed(p, 0, at, at + 1);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 2 + 4 && kvc_next_position(p->cache, 0) == 20);
    for (int32_t length = 3; length < 19; length++) {
        char position[32];
        snprintf(position, sizeof position, "position %d:", length);
        check_cut_refused(p, length, position, "from position 19 on", "up to 2");
    }
    for (int32_t length = 20; length >= 19; length--) {
        CHECK(pair_truncate(p, 0, length) == KVC_OK && kvc_next_position(p->cache, 0) == length);
        pair_check(p);
    }
    CHECK(pair_copy_prefix(p, 0, 1, 2) == KVC_OK && kvc_can_resume(p->cache, 1, 2) == 1);
    CHECK(pair_feed(p, 1, 2, 8) == KVC_OK);
    pair_check(p);
    CHECK(pair_truncate(p, 0, 1) == KVC_OK && kvc_next_position(p->cache, 0) == 1 && pair_feed(p, 0, 1, 3) == KVC_OK);
    CHECK(pair_truncate(p, 1, 0) == KVC_OK && kvc_can_resume(p->cache, 1, 0) == 1 && pair_feed(p, 1, 0, 3) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Other layers that hold all rows make no difference: where one lost what a token would see, the cut is refused. */
static void test_cut_of_several_groups(void)
{
    pair *p = mixed_pair(4); /* windows of 5 with 2 sinks, and of 3, the latter keeping 9 */
    for (int32_t at = 0; at < 20; at++)
        pair_feed(p, 0, at, at + 1);
    check_cut_refused(p, 18, "position 18:", "from position 19 on", "up to 0");
    check_cut_refused(p, 2, "position 2:", "from position 19 on", "up to 0");
    CHECK(pair_remove(p, 0, 19, KVC_END, 0) == KVC_OK && kvc_next_position(p->cache, 0) == 19);
    CHECK(pair_feed(p, 0, 19, 22) == KVC_OK);
    pair_check(p);
    CHECK(pair_remove(p, 0, 0, KVC_END, 1) == KVC_OK && pair_feed(p, 0, 0, 3) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Where a chunk begins, a token sees nothing before it: a cut there leaves no row, and the sequence goes on there. */
static void test_cut_at_a_chunk(void)
{
    pair *p = pair_with((kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = 8}, 3);
    for (int32_t at = 0; at < 20; at++)
        pair_feed(p, 0, at, at + 1);
    check_cut_refused(p, 15, "position 15:", "from position 16 on", "up to 0");
    CHECK(pair_truncate(p, 0, 16) == KVC_OK);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 0 && last_position(p->cache, 0) == -1);
    CHECK(kvc_next_position(p->cache, 0) == 16 && kvc_can_resume(p->cache, 0, 16) == 1);
    pair_check(p);
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(p->cache, 2, NULL, NULL, NULL, &batch) == KVC_OK && kvc_batch_positions(batch)[0] == 16);
    kvc_abort(batch);
    CHECK(pair_feed(p, 0, 16, 19) == KVC_OK && kvc_seq_len(p->cache, 0, 0) == 3);
    pair_check(p);
    pair_free(p);
}

/* Rows that the caller removed are no loss: a cut behind them leaves the sequence as it asks. */
static void test_cut_behind_a_gap(void)
{
    pair *p = pair_with(sliding_policy(4, 0, 0), 3);
    pair_feed(p, 0, 0, 12);
    pair_feed(p, 0, 12, 16); /* expires below 9 */
    CHECK(pair_remove(p, 0, 13, 15, 0) == KVC_OK && pair_truncate(p, 0, 15) == KVC_OK);
    CHECK(kvc_next_position(p->cache, 0) == 13 && pair_feed(p, 0, 15, 16) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A sequence that lost all its rows to a window of one still refuses positions that would see them. */
static void test_all_expired(void)
{
    pair *p = pair_with(sliding_policy(1, 0, 0), 4);
    pair_feed(p, 0, 0, 6);
    pair_feed(p, 1, 0, 1);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 0 && kvc_can_resume(p->cache, 0, 0) == 0);
    CHECK(kvc_next_position(p->cache, 0) == 6 && last_position(p->cache, 0) == -1);
    CHECK_FAILS(pair_feed(p, 0, 5, 6), KVC_ERR_GONE, "position 5", "sequence 0");
    CHECK(pair_feed(p, 0, 6, 9) == KVC_OK);
    pair_check(p);
    pair_clear_sequence(p, 0);
    CHECK(pair_feed(p, 0, 0, 1) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* If the rows put last have expired and earlier ones stay, the batch continues in the block of the earlier ones. */
static void test_expiring_the_last_run(void)
{
    pair *p = pair_with(sliding_policy(4, 0, 0), 3);
    pair_pass(p, 4, (int32_t[]){10, 11, 12, 3}, (int64_t[]){0, 0, 0, 0});
    CHECK(pair_feed(p, 0, 13, 18) == KVC_OK);
    pair_check(p);
    pair_free(p);

    p = pair_with(sliding_policy(1, 3, 0), 3); /* sinks, in a full block */
    pair_feed(p, 0, 0, 4);
    CHECK(pair_feed(p, 0, 4, 9) == KVC_OK);
    pair_check(p);
    pair_feed(p, 1, 0, 1);
    pair_check(p);
    CHECK(last_position(p->cache, 0) == 2);
    pair_free(p);
}

/* ---- what is refused while a batch is open ----------------------------------------------------------------------- */

/* While a batch is open, only sequences outside it may be edited. */
static void test_busy(void)
{
    pair *p = mixed_pair(4);
    kvc_batch *other = NULL;
    const int32_t position = 0;
    for (int64_t id = 0; id < 4; id++)
        pair_feed(p, id, 0, 7);
    CHECK(pair_begin(p, 3, (int32_t[]){7, 7, 0}, (int64_t[]){0, 1, 9}) == KVC_OK);
    CHECK_FAILS(kvc_begin(p->cache, 1, &position, NULL, NULL, &other), KVC_ERR_BUSY, "batch is open", "commit");
    CHECK(!other);
    CHECK_FAILS(pair_compact(p), KVC_ERR_BUSY, "compact", "commit or abort");
    CHECK_FAILS(kvc_cache_free(p->cache), KVC_ERR_BUSY, "free the cache", "commit or abort");
    CHECK_FAILS(pair_clear(p), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(pair_keep(p, 2), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(pair_clear_sequence(p, 1), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(pair_clear_sequence(p, 9), KVC_ERR_BUSY, "sequence 9", "open batch");
    CHECK_FAILS(pair_fork(p, 0, 5), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(pair_fork(p, 2, 1), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(pair_copy_prefix(p, 2, 9, 3), KVC_ERR_BUSY, "sequence 9", "open batch");
    CHECK_FAILS(pair_remove(p, 1, 2, 3, 0), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(pair_truncate(p, 0, 3), KVC_ERR_BUSY, "sequence 0", "open batch");
    pair_check(p);

    CHECK(pair_fork(p, 2, 5) == KVC_OK); /* outside the batch */
    CHECK(pair_remove(p, 3, 1, 3, 0) == KVC_OK);
    CHECK_FAILS(pair_truncate(p, 5, 5), KVC_ERR_GONE, "sequence 5", "position 5");
    CHECK(pair_truncate(p, 3, 6) == KVC_OK && pair_truncate(p, 5, 7) == KVC_OK);
    CHECK(pair_clear_sequence(p, 2) == KVC_OK);
    pair_check(p);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* kvc_keep of the open batch's sequence clears all others. */
static void test_busy_keep(void)
{
    pair *p = mixed_pair(4);
    for (int64_t id = 0; id < 3; id++)
        pair_feed(p, id, 0, 7);
    CHECK(pair_begin(p, 2, (int32_t[]){7, 8}, (int64_t[]){1, 1}) == KVC_OK);
    CHECK(pair_keep(p, 1) == KVC_OK); /* all others go, the batch's own stays */
    pair_check(p);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static void test_block_size(int block_size)
{
    test_append(block_size);
    test_irregular_positions(block_size);
    test_copy_prefix(block_size);
    test_fork(block_size);
    test_remove(block_size);
    test_window(block_size, sliding_policy(5, 0, 0));
    test_window(block_size, sliding_policy(7, 3, 0));
    test_window(block_size, sliding_policy(3, 2, 11));
    for (int i = 0; i < 12; i++)
        random_test(block_size, 0, 700);
}

int main(void)
{
    static const int block_sizes[] = {1, 3, 16, 64};
    test_extend_in_place();
    test_put_strides();
    test_put_ranges();
    test_abort();
    test_largest_position();
    test_truncate_keep_clear();
    test_idle_sequences();
    test_cut_behind_sinks();
    test_cut_of_several_groups();
    test_cut_at_a_chunk();
    test_cut_behind_a_gap();
    test_all_expired();
    test_expiring_the_last_run();
    test_busy();
    test_busy_keep();
    for (int i = 0; i < 4; i++)
        test_block_size(block_sizes[i]);
    return test_result();
}
