/* Sequences: the blocks that batches and windows take, where a sequence can be cut, and what an open batch refuses.
 * tests/world compares the rest. */
#include "support/pairs.h"

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* Appending fills the sequence's last block, even a shared one; a new block is opened only when that is full. */
static void test_extend_in_place(void) {
    pair *p = pair_with(full_policy, 16);
    pair_feed(p, 0, 0, 5);
    pair_feed(p, 0, 5, 7);
    CHECK(num_spans(p, 0, 0) == 1);
    kvc_fork(p->cache, 0, 1);
    pair_feed(p, 0, 7, 9);
    CHECK(num_spans(p, 0, 0) == 1 && num_spans(p, 1, 0) == 1);
    pair_feed(p, 1, 7, 9);
    pair_feed(p, 0, 9, 10);
    pair_check(p);
    CHECK(num_spans(p, 1, 0) == 2);
    CHECK(stats_of(p).blocks_in_use == 1 && stats_of(p).rows_moved == 0);
    kvc_truncate(p->cache, 0, 9); /* the last slot falls back to the block */
    pair_feed(p, 1, 9, 13);
    pair_check(p);
    CHECK(stats_of(p).blocks_in_use == 1 && stats_of(p).wasted_slots == 0);
    pair_free(p);
}

/* No more ids are written than there is room for. */
static void test_room_for_ids(void) {
    pair *p = pair_with(full_policy, 4);
    for (int64_t id = 0; id < 3; id++) pair_feed(p, id, 0, 1);
    for (int64_t room = 0; room <= 3; room++) {
        int64_t ids[4] = {-1, -1, -1, -1};
        CHECK(kvc_sequences(p->cache, ids, room) == 3);
        for (int64_t i = 0; i < 4; i++) CHECK(ids[i] == (i < room ? i : -1));
    }
    pair_free(p);
}

static int by_id(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Sequences of any ids come and go in any order, are listed by rising id, and take as many bytes beside many others as
 * beside few. */
static void test_many(void) {
    enum { MANY = 1000 };
    static int64_t ids[MANY + 2], listed[MANY + 2];
    pair *p = pair_with(full_policy, 4);
    kvc_cache *cache = p->cache;
    int64_t num = 0, each = 0;
    ids[num++] = INT64_MIN;
    ids[num++] = INT64_MAX;
    CHECK(pair_feed(p, 5, 0, 1) == KVC_OK);
    for (; num < MANY; num++) ids[num] = num % 3 ? num * 7919 % 100003 + 6 : -num;
    for (int64_t i = 0; i < num; i++) {
        const int64_t before = kvc_nbytes(cache);
        CHECK(kvc_fork(cache, 5, ids[i]) == KVC_OK);
        if (!i) each = kvc_nbytes(cache) - before;
        CHECKF(kvc_nbytes(cache) - before == each, "sequence %d takes %d bytes, not %d", (int)i,
               (int)(kvc_nbytes(cache) - before), (int)each);
    }
    for (int64_t i = 0; i < num; i += 2) CHECK(kvc_clear_sequence(cache, ids[i]) == KVC_OK);
    for (int64_t i = 0; i < num; i++) CHECK(kvc_seq_len(cache, ids[i], 0) == i % 2);
    for (int64_t i = 0; i < num; i += 2) ids[i] = -1000000 - i;
    for (int64_t i = num - 2; i >= 0; i -= 2) CHECK(kvc_fork(cache, 5, ids[i]) == KVC_OK);
    ids[num++] = 5;
    qsort(ids, (size_t)num, sizeof *ids, by_id);
    CHECK(kvc_sequences(cache, listed, MANY + 2) == num && !memcmp(ids, listed, (size_t)num * sizeof *ids));
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    for (int64_t i = 0; i < num; i++) CHECK(ids[i] == 5 || kvc_clear_sequence(cache, ids[i]) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

/* Checks that dropping the rows of sequence 0 from a length on, and sharing those before it, are refused with these
 * words, and change nothing. */
static void check_cut_refused(pair *p, int32_t length, const char *position, const char *safe, const char *before) {
    CHECK_FAILS(kvc_truncate(p->cache, 0, length), KVC_ERR_GONE, position, safe);
    CHECK_FAILS(kvc_remove(p->cache, 0, length, KVC_END, 1), KVC_ERR_GONE, "sequence 0", before);
    CHECK_FAILS(kvc_remove(p->cache, 0, length, kvc_next_position(p->cache, 0), 0), KVC_ERR_GONE, position, safe);
    CHECK_FAILS(kvc_copy_prefix(p->cache, 0, 1, length), KVC_ERR_GONE, position, "resume_window");
    pair_check(p);
}

/* A prompt in a window goes on, batch after batch, in the blocks that it has left; single tokens need two at most. */
static void test_spare_blocks(void) {
    pair *p = pair_with(sliding_policy(8, 0, 0), 4);
    int32_t at = 0;
    for (int i = 0; i < 3; i++, at += 24) pair_feed(p, 0, at, at + 24);
    const kvc_stats before = stats_of(p);
    for (int i = 0; i < 4; i++, at += 24) pair_feed(p, 0, at, at + 24);
    kvc_stats after = stats_of(p);
    CHECKF(after.blocks_opened == before.blocks_opened && after.blocks_returned == before.blocks_returned,
           "opens %d blocks, and returns %d", (int)(after.blocks_opened - before.blocks_opened),
           (int)(after.blocks_returned - before.blocks_returned));
    CHECK(after.blocks_free <= 6);
    for (int i = 0; i < 6; i++, at++) pair_feed(p, 0, at, at + 1);
    after = stats_of(p);
    CHECKF(after.blocks_free <= 2, "%d free blocks", (int)after.blocks_free);
    pair_check(p);
    pair_free(p);
}

/* Checks the slots of a sequence after each commit: its window takes two more blocks, or three with sinks.  After a
 * large batch, the slots that the next large batch needs may stay. */
static void check_window(kvc_policy policy, int32_t kept) {
    enum { SLOTS = 4 };
    static const int32_t nums[] = {80, 1, 11, SLOTS, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    pair *p = pair_with(policy, SLOTS);
    const int32_t spare = (policy.num_sink_tokens ? 3 : 2) * SLOTS;
    int32_t at = 0;
    for (size_t i = 0; i < sizeof nums / sizeof *nums; at += nums[i++]) {
        CHECK(pair_feed(p, 0, at, at + nums[i]) == KVC_OK);
        const kvc_stats stats = stats_of(p);
        const int64_t slots = (stats.blocks_in_use + stats.blocks_free) * SLOTS;
        CHECK(kvc_seq_len(p->cache, 0, 0) <= kept);
        CHECKF(slots <= kept + spare + (nums[i] >= SLOTS ? nums[i] + SLOTS : 0), "%d slots after a batch of %d",
               (int)slots, nums[i]);
    }
    pair_check(p);
    pair_free(p);
}

static void test_windows_cost_windows(void) {
    check_window(sliding_policy(16, 0, 0), 16);
    check_window(sliding_policy(16, 1, 0), 17);
    check_window(sliding_policy(16, 7, 0), 23);
    check_window(sliding_policy(6, 0, 20), 20);
    check_window((kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = 16}, 16);
    check_window((kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = 13, .resume_window = 5}, 18);
}

/* Rows that a batch expires as it begins are given back: of many sequences, whose rows were stitched together. */
static void test_expired_at_the_beginning(void) {
    kvc_layer layer = layer_with(sliding_policy(16, 0, 0));
    static pair p;
    layer.rope.kind = KVC_ROPE_NONE;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    for (int32_t id = 0; id < 12; id++) pair_feed(&p, id, 0, 16);
    for (int32_t id = 1; id < 12; id++) {
        CHECK(kvc_shift(p.cache, id, 0, KVC_END, 16 * id) == KVC_OK && kvc_share(p.cache, id, 0, 0, KVC_END) == KVC_OK);
        CHECK(kvc_clear_sequence(p.cache, id) == KVC_OK);
    }
    CHECK(kvc_seq_len(p.cache, 0, 0) == 192 && stats_of(&p).blocks_in_use >= 48);
    pair_feed(&p, 0, 192, 193);
    CHECK(kvc_seq_len(p.cache, 0, 0) == 16);
    CHECKF(stats_of(&p).blocks_in_use + stats_of(&p).blocks_free <= 6, "%d blocks", (int)stats_of(&p).blocks_in_use);
    pair_check(&p);
    pair_free(&p);
}

/* A cut that leaves a sequence where a token would see expired rows is refused: one from behind the sinks up to the
 * window.  A cut within the sinks is not, and neither is a cut to nothing.  Rows that have expired stay gone. */
static void test_cut_behind_sinks(void) {
    pair *p = pair_with(sliding_policy(4, 2, 0), 3);
    for (int32_t at = 0; at < 20; at++) pair_feed(p, 0, at, at + 1);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 2 + 4 && kvc_next_position(p->cache, 0) == 20);
    CHECK(stats_of(p).rows_expired == 14);
    for (int32_t length = 3; length < 19; length++) {
        char position[32];
        snprintf(position, sizeof position, "position %d:", length);
        check_cut_refused(p, length, position, "from position 19 on", "up to 2");
    }
    for (int32_t length = 20; length >= 19; length--) {
        CHECK(kvc_truncate(p->cache, 0, length) == KVC_OK && kvc_next_position(p->cache, 0) == length);
        pair_check(p);
    }
    CHECK(kvc_copy_prefix(p->cache, 0, 1, 2) == KVC_OK && kvc_can_resume(p->cache, 1, 2) == 1);
    CHECK(pair_feed(p, 1, 2, 8) == KVC_OK);
    pair_check(p);
    CHECK(kvc_truncate(p->cache, 0, 1) == KVC_OK && kvc_next_position(p->cache, 0) == 1 &&
          pair_feed(p, 0, 1, 3) == KVC_OK);
    CHECK(kvc_truncate(p->cache, 1, 0) == KVC_OK && kvc_can_resume(p->cache, 1, 0) == 1 &&
          pair_feed(p, 1, 0, 3) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- what is refused while a batch is open ----------------------------------------------------------------------- */

/* While a batch is open, only sequences outside it may be edited. */
static void test_busy(void) {
    pair *p = mixed_pair(4);
    kvc_batch *other = NULL;
    const int32_t position = 0;
    for (int64_t id = 0; id < 4; id++) pair_feed(p, id, 0, id == 2 ? 9 : 7);
    CHECK(pair_begin(p, 3, (int32_t[]){7, 7, 0}, (int64_t[]){0, 1, 9}) == KVC_OK);
    CHECK_FAILS(kvc_begin(p->cache, 1, &position, NULL, NULL, &other), KVC_ERR_BUSY, "batch is open", "commit");
    CHECK(!other);
    CHECK_FAILS(kvc_compact(p->cache), KVC_ERR_BUSY, "compact", "commit or abort");
    CHECK_FAILS(kvc_cache_free(p->cache), KVC_ERR_BUSY, "free the cache", "commit or abort");
    CHECK_FAILS(kvc_clear(p->cache), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(kvc_keep(p->cache, 2), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(kvc_clear_sequence(p->cache, 1), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(kvc_clear_sequence(p->cache, 9), KVC_ERR_BUSY, "sequence 9", "open batch");
    CHECK_FAILS(kvc_fork(p->cache, 0, 5), KVC_ERR_BUSY, "sequence 0", "open batch");
    CHECK_FAILS(kvc_fork(p->cache, 2, 1), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(kvc_copy_prefix(p->cache, 2, 9, 3), KVC_ERR_BUSY, "sequence 9", "open batch");
    CHECK_FAILS(kvc_remove(p->cache, 1, 2, 3, 0), KVC_ERR_BUSY, "sequence 1", "open batch");
    CHECK_FAILS(kvc_truncate(p->cache, 0, 3), KVC_ERR_BUSY, "sequence 0", "open batch");
    pair_check(p);

    CHECK(kvc_fork(p->cache, 2, 5) == KVC_OK); /* outside the batch */
    CHECK(kvc_remove(p->cache, 3, 1, 3, 0) == KVC_OK);
    CHECK_FAILS(kvc_truncate(p->cache, 5, 5), KVC_ERR_GONE, "sequence 5", "position 5");
    CHECK(kvc_truncate(p->cache, 3, 6) == KVC_OK && kvc_truncate(p->cache, 5, 8) == KVC_OK);
    CHECK(kvc_clear_sequence(p->cache, 2) == KVC_OK);
    pair_check(p);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

int main(void) {
    test_extend_in_place();
    test_room_for_ids();
    test_many();
    test_spare_blocks();
    test_windows_cost_windows();
    test_expired_at_the_beginning();
    test_cut_behind_sinks();
    test_busy();
    return test_result();
}
