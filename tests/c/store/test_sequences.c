/* Sequences, batches, limits, compaction, views and bad arguments: whatever is not attention, against the oracle of plain
 * row lists (support/oracle.h), compared with the cache after every step. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdlib.h>

#include "support/random_steps.h"

static const kvc_layer plain_layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};

static kvc_layer layer_with(kvc_policy policy)
{
    kvc_layer layer = plain_layer;
    layer.policy = policy;
    return layer;
}

/* A pair of one layer with this policy. */
static pair *pair_with(kvc_policy policy, int block_size)
{
    static pair p;
    kvc_layer layer = layer_with(policy);
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    return &p;
}

/* A pair of four layers in three groups: no two of the same shape, types of every kind. */
static pair *mixed_pair(int block_size)
{
    static pair p;
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 3, .v_dim = 5, .k_type = KVC_F32, .v_type = KVC_F16},
        {.num_kv_heads = 1, .k_dim = 8, .v_dim = 1, .k_type = KVC_BF16, .policy = sliding_policy(5, 2, 0)},
        {.num_kv_heads = 3, .k_dim = 1, .v_dim = 4, .k_type = KVC_F16, .v_type = KVC_BF16},
        {.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .v_type = KVC_F16, .policy = sliding_policy(3, 0, 9)},
    };
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 4, layers);
    return &p;
}

static int64_t num_spans(const pair *p, int64_t id, int layer)
{
    int64_t num = -1;
    CHECK(kvc_spans(p->cache, id, layer, NULL, sizeof(kvc_span), 0, &num, NULL) == KVC_OK);
    return num;
}

/* ---- a forward pass --------------------------------------------------------------------------------------------- */

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

/* Whoever appends does so at the fill mark of its last block, shared or not; only full blocks make it open another. */
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

/* Every stride that put may be given: here one that repeats a row, and heads that overlap. */
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
    CHECK(after.live_slots < before.live_slots); /* what begin evicted stays evicted */
    pair_feed(p, 0, 12, 14);
    pair_check(p);
    pair_free(p);
}

/* Positions with gaps, repeated and falling: each row stands where it was put, the latest of several is found. */
static void test_irregular_positions(int block_size)
{
    pair *p = pair_with(full_policy, block_size);
    pair_pass(p, 8, (int32_t[]){5, 5, 4, 9, 10, 11, 10, 0}, (int64_t[]){3, 3, 3, 3, 3, 3, 3, 3});
    pair_check(p);
    CHECK(kvc_find_row(p->cache, 3, 0, 5) == 1 && kvc_find_row(p->cache, 3, 0, 10) == 6);
    pair_pass(p, 3, (int32_t[]){5, 200, 199}, (int64_t[]){3, 3, 3});
    pair_copy_prefix(p, 3, 4, 10);
    pair_check(p);
    pair_remove(p, 3, 4, 11, 0);
    pair_check(p);
    pair_compact(p);
    pair_check(p);
    pair_free(p);
}

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

/* ---- editing ---------------------------------------------------------------------------------------------------- */

/* A prefix of any length, after which both append and each can lose rows without the other noticing. */
static void test_copy_prefix(int block_size)
{
    pair *p = mixed_pair(block_size);
    for (int32_t length = 0; length <= 22; length += length < 18 ? 1 : 4) {
        pair_feed(p, 0, 0, 19);
        CHECK(pair_copy_prefix(p, 0, 1, length) == KVC_OK);
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

static void test_fork(int block_size)
{
    pair *p = mixed_pair(block_size);
    pair_fork(p, 0, 1); /* of nothing */
    pair_check(p);
    pair_feed(p, 0, 0, 9);
    pair_feed(p, 1, 0, 3);
    pair_fork(p, 0, 1); /* over something */
    pair_fork(p, 1, 2);
    pair_check(p);
    for (int64_t id = 0; id < 3; id++)
        pair_feed(p, id, 9, 12 + (int32_t)id);
    pair_check(p);
    CHECK(stats_of(p).rows_moved == 0);
    pair_fork(p, 8, 2); /* of nothing over something */
    pair_check(p);
    pair_fork(p, 1, 0);
    pair_clear_sequence(p, 1);
    pair_check(p);
    pair_free(p);
}

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

/* ---- windows ---------------------------------------------------------------------------------------------------- */

static void test_window(int block_size, kvc_policy policy)
{
    pair *p = pair_with(policy, block_size);
    int32_t kept = policy.resume_window ? policy.resume_window : policy.window;
    for (int32_t at = 0; at < 60; at++) {
        pair_feed(p, 0, at, at + 1);
        pair_check(p);
    }
    int32_t low = 59 - kept + 1; /* the last batch began at 59 */
    CHECK(p->sequences[0].layers[0].num == policy.num_sink_tokens + 60 - low);
    CHECK(stats_of(p).rows_moved == 0 || policy.num_sink_tokens); /* these leave holes */
    CHECK(stats_of(p).rows_evicted == low - policy.num_sink_tokens);

    int32_t back = low + policy.window - 1; /* whose window begins with the first row that is kept */
    CHECK(kvc_can_resume(p->cache, 0, back) == 1 && kvc_can_resume(p->cache, 0, back - 1) == 0);
    CHECK_FAILS(pair_feed(p, 0, back - 1, back), KVC_ERR_GONE, "position", "sequence 0");
    pair_check(p);
    CHECK(pair_feed(p, 0, back, back + 1) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A batch of another sequence evicts as well, up to where the idle one goes on. */
static void test_idle_sequences(void)
{
    pair *p = pair_with(sliding_policy(4, 1, 0), 3);
    pair_feed(p, 0, 0, 20); /* nothing can be evicted before it is there */
    CHECK(kvc_seq_len(p->cache, 0, 0) == 20);
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

/* What removing, forking and clearing do to what was lost. */
static void test_lost_rows(void)
{
    pair *p = pair_with(sliding_policy(4, 2, 0), 3);
    pair_feed(p, 0, 0, 20);
    pair_feed(p, 0, 20, 21); /* below 17 is gone, but for 0 and 1 */
    CHECK(pair_copy_prefix(p, 0, 1, 10) == KVC_OK);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 1, 0) == 2 && kvc_can_resume(p->cache, 1, 2) == 0);
    CHECK_FAILS(pair_feed(p, 1, 2, 3), KVC_ERR_GONE, "position 2", "sequence 1");
    CHECK(pair_copy_prefix(p, 0, 1, 2) == KVC_OK);
    CHECK(kvc_can_resume(p->cache, 1, 2) == 0); /* its window would begin below */
    pair_truncate(p, 0, 2); /* what was lost is removed as well */
    pair_check(p);
    CHECK(kvc_can_resume(p->cache, 0, 2) == 0);
    pair_truncate(p, 0, 0);
    CHECK(kvc_can_resume(p->cache, 0, 0) == 1);
    CHECK(pair_feed(p, 0, 0, 3) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A sequence with a window of one can lose all its rows, and remembers that. */
static void test_all_evicted(void)
{
    pair *p = pair_with(sliding_policy(1, 0, 0), 4);
    pair_feed(p, 0, 0, 6);
    pair_feed(p, 1, 0, 1);
    pair_check(p);
    CHECK(kvc_seq_len(p->cache, 0, 0) == 0 && kvc_can_resume(p->cache, 0, 0) == 0);
    CHECK_FAILS(pair_feed(p, 0, 5, 6), KVC_ERR_GONE, "position 5", "sequence 0");
    CHECK(pair_feed(p, 0, 6, 9) == KVC_OK);
    pair_check(p);
    pair_clear_sequence(p, 0);
    CHECK(pair_feed(p, 0, 0, 1) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* When the last rows to arrive are evicted and earlier ones stay, the batch goes on in the block of the earlier ones. */
static void test_evicting_the_last_run(void)
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
    CHECK(kvc_last_position(p->cache, 0) == 2);
    pair_free(p);
}

/* ---- compaction ------------------------------------------------------------------------------------------------- */

/* Three sequences that share blocks, with holes in all. */
static pair *scattered_pair(int block_size)
{
    pair *p = mixed_pair(block_size);
    pair_feed(p, 0, 0, 50);
    pair_feed(p, 5, 0, 33);
    pair_copy_prefix(p, 0, 1, 31);
    pair_feed(p, 0, 50, 60);
    for (int32_t at = 0; at < 60; at += 4) {
        pair_remove(p, 0, at, at + 3, 0);
        pair_remove(p, 5, at + 1, at + 2, 0);
        if (at > 20)
            pair_remove(p, 1, at, at + 2, 0);
    }
    pair_check(p);
    return p;
}

static void test_compact(int block_size)
{
    pair *p = scattered_pair(block_size);
    kvc_stats before = stats_of(p);
    int64_t bytes = kvc_nbytes(p->cache);
    CHECK(pair_compact(p) == KVC_OK);
    pair_check(p);
    kvc_stats after = stats_of(p);
    CHECK(after.live_slots == before.live_slots && after.wasted_slots == 0 && after.blocks_free == 0);
    CHECK(block_size == 1 || (after.rows_moved > before.rows_moved && after.compactions > before.compactions));
    CHECK(after.blocks_in_use <= (after.live_slots + 3 * (block_size - 1)) / block_size);
    CHECK(after.blocks_returned - before.blocks_returned ==
          before.blocks_in_use + before.blocks_free - after.blocks_in_use);
    CHECK(kvc_nbytes(p->cache) < bytes);
    CHECK(pair_compact(p) == KVC_OK);
    CHECK(stats_of(p).rows_moved == after.rows_moved); /* there is nothing left to do */
    for (int64_t id = 0; id < 6; id++)
        pair_feed(p, id, next_of(p, find_sequence(p, id)), next_of(p, find_sequence(p, id)) + 7);
    pair_check(p);
    pair_clear(p);
    CHECK(pair_compact(p) == KVC_OK);
    CHECK(stats_of(p).blocks_in_use == 0 && stats_of(p).blocks_free == 0);
    pair_check(p);
    pair_free(p);
}

/* Blocks that have no holes, but room, become one. */
static void test_compact_short_sequences(void)
{
    pair *p = mixed_pair(16);
    for (int64_t id = 0; id < 5; id++)
        pair_feed(p, id, 0, 3 + (int32_t)id);
    CHECK(pair_compact(p) == KVC_OK);
    pair_check(p);
    CHECK(stats_of(p).blocks_in_use == 3 * 2);
    for (int64_t id = 0; id < 5; id++)
        pair_feed(p, id, 3 + (int32_t)id, 30);
    pair_check(p);
    pair_free(p);
}

/* A batch that needs a block compacts first, where more than a quarter is waste. */
static void test_automatic_compaction(int32_t stride, int64_t compactions)
{
    pair *p = pair_with(full_policy, 4);
    pair_feed(p, 0, 0, 128);
    for (int32_t at = 1; at < 128; at += stride)
        pair_remove(p, 0, at, at + 1, 0);
    CHECK(stats_of(p).wasted_slots > 0 && stats_of(p).compactions == 0);
    pair_feed(p, 1, 0, 3);
    pair_check(p);
    CHECKF(stats_of(p).compactions == compactions, "one in %d removed", stride);
    pair_free(p);
}

/* ---- limits ----------------------------------------------------------------------------------------------------- */

static pair *limited_pair(int64_t max_seq_len, int64_t max_sequences, int64_t capacity, int64_t max_bytes)
{
    static pair p;
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    p = (pair){.config = {.block_size = 4,
                          .max_seq_len = max_seq_len,
                          .max_sequences = max_sequences,
                          .capacity = capacity,
                          .max_bytes = max_bytes,
                          .num_threads = 1}};
    pair_new(&p, 2, layers);
    return &p;
}

/* One contiguous block where that is all there can be, else blocks of 64. */
static void test_default_block_size(void)
{
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

static void test_max_seq_len(void)
{
    pair *p = limited_pair(10, 0, 0, 0);
    CHECK_FAILS(pair_feed(p, 0, 0, 11), KVC_ERR_FULL, "max_seq_len 10", "11 more tokens");
    pair_check(p);
    pair_feed(p, 0, 0, 8);
    CHECK_FAILS(pair_feed(p, 0, 8, 11), KVC_ERR_FULL, "sequence 0 holds 8", "max_seq_len 10");
    pair_check(p);
    CHECK(pair_feed(p, 0, 8, 10) == KVC_OK);
    pair_check(p);
    pair_free(p);

    p = pair_with(sliding_policy(4, 0, 0), 4);
    p->config.max_seq_len = 10;
    pair_free(p);
    pair_new(p, 1, p->layers);
    for (int32_t at = 0; at < 50; at += 7)
        CHECK(pair_feed(p, 0, at, at + 7) == KVC_OK); /* 3 stay */
    pair_check(p);
    CHECK_FAILS(pair_feed(p, 0, 56, 64), KVC_ERR_FULL, "max_seq_len 10", "8 more tokens");
    pair_check(p);
    pair_free(p);
}

static void test_max_sequences(void)
{
    pair *p = limited_pair(0, 2, 0, 0);
    pair_feed(p, 0, 0, 3);
    CHECK_FAILS(pair_pass(p, 2, (int32_t[]){0, 0}, (int64_t[]){1, 2}), KVC_ERR_FULL, "3 sequences",
                "max_sequences is 2");
    pair_check(p);
    CHECK(pair_pass(p, 3, (int32_t[]){3, 0, 4}, (int64_t[]){0, 1, 0}) == KVC_OK);
    CHECK_FAILS(pair_feed(p, 2, 0, 1), KVC_ERR_FULL, "3 sequences", "max_sequences is 2");
    pair_clear_sequence(p, 0);
    CHECK(pair_feed(p, 2, 0, 1) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* Shared slots count once, evicted ones not at all, and that they are scattered does not matter. */
static void test_capacity(void)
{
    pair *p = limited_pair(0, 0, 20, 0);
    CHECK(kvc_capacity(p->cache) == 20 && kvc_capacity_bytes(p->cache) == 20 * 2 * 24);
    pair_feed(p, 0, 0, 16);
    pair_fork(p, 0, 1);
    CHECK(fabs(kvc_utilization(p->cache) - 0.8) < 1e-15);
    CHECK(pair_pass(p, 4, (int32_t[]){16, 16, 17, 17}, (int64_t[]){0, 1, 0, 1}) == KVC_OK);
    pair_check(p);
    CHECK_FAILS(pair_feed(p, 2, 0, 1), KVC_ERR_FULL, "1 more tokens", "20 of capacity 20");
    pair_check(p);
    for (int32_t at = 0; at < 12; at += 3) {
        pair_remove(p, 0, at, at + 1, 0);
        pair_remove(p, 1, at, at + 1, 0);
    }
    CHECK(pair_feed(p, 2, 0, 4) == KVC_OK);
    pair_check(p);
    CHECK_FAILS(pair_feed(p, 2, 4, 5), KVC_ERR_FULL, "1 more tokens", "20 of capacity 20");
    pair_clear_sequence(p, 1);
    CHECK(pair_feed(p, 2, 4, 6) == KVC_OK);
    pair_check(p);
    pair_free(p);

    p = limited_pair(5, 4, 0, 0); /* the default is their product */
    CHECK(kvc_capacity(p->cache) == 20 && kvc_capacity_bytes(p->cache) == 20 * 2 * 24);
    pair_free(p);
    p = limited_pair(5, 0, 0, 0);
    CHECK(kvc_capacity(p->cache) == -1 && kvc_capacity_bytes(p->cache) == -1);
    pair_feed(p, 0, 0, 2);
    CHECK(kvc_utilization(p->cache) == 0.5); /* of the slots in blocks */
    pair_free(p);
}

/* A long batch of many sequences that fails near its end leaves nothing behind. */
static void test_full_in_the_middle(void)
{
    pair *p = limited_pair(40, 8, 160, 0);
    int32_t positions[170];
    int64_t ids[170];
    pair_feed(p, 0, 0, 12);
    for (int t = 0; t < 170; t++) {
        ids[t] = 2 * (t % 5); /* 34 of each */
        positions[t] = t / 5 + (ids[t] ? 0 : 12);
    }
    CHECK_FAILS(pair_pass(p, 170, positions, ids), KVC_ERR_FULL, "170 tokens", "capacity is 160");
    pair_check(p);
    CHECK_FAILS(pair_pass(p, 145, positions, ids), KVC_ERR_FULL, "sequence 0 holds 12", "max_seq_len 40");
    pair_check(p);
    CHECK(p->num_sequences == 1 && stats_of(p).batches == 1);
    CHECK(pair_pass(p, 140, positions, ids) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* What a batch of n tokens at the end of sequence 0 takes, by the figures of a cache without a limit. */
static void test_max_bytes(void)
{
    static pair both[2];
    const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 32, .v_dim = 32};
    pair *p = &both[0];
    *p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(p, 1, &layer);
    pair_feed(p, 0, 0, 64);
    int64_t free_bytes = kvc_nbytes(p->cache);
    pair_free(p);

    p = &both[1];
    *p = (pair){.config = {.block_size = 4, .num_threads = 1, .max_bytes = free_bytes}};
    pair_new(p, 1, &layer);
    CHECK(pair_feed(p, 0, 0, 64) == KVC_OK);
    CHECK(kvc_nbytes(p->cache) == free_bytes);
    CHECK_FAILS(pair_feed(p, 1, 0, 1), KVC_ERR_FULL, "1 more tokens", "max_bytes is");
    CHECK(!strstr(kvc_last_error(), "views"));
    pair_check(p);
    for (int32_t at = 1; at < 40; at += 8) /* less than a quarter */
        pair_remove(p, 0, at, at + 1, 0);
    CHECK(stats_of(p).compactions == 0);
    kvc_hold *hold;
    kvc_span spans[64];
    int64_t num;
    CHECK(kvc_spans(p->cache, 0, 0, spans, sizeof *spans, 64, &num, &hold) == KVC_OK);
    CHECK_FAILS(pair_feed(p, 0, 64, 69), KVC_ERR_FULL, "5 more tokens", "views");
    pair_check(p);
    kvc_hold_free(hold);
    CHECK(pair_feed(p, 0, 64, 65) == KVC_OK);
    CHECK(stats_of(p).compactions > 0 && kvc_nbytes(p->cache) <= free_bytes);
    pair_check(p);
    pair_free(p);
}

/* A batch that is refused moves no row and gives nothing back, not even what was reserved. */
static void test_refused_batch_changes_nothing(void)
{
    static memory heap;
    static pair p;
    static kvc_span before[4], after[4];
    int32_t positions[200];
    int64_t ids[200], num;
    memory_init(&heap);
    p = (pair){.memory = &heap, .config = {.block_size = 16, .num_threads = 1, .max_bytes = 12000}};
    pair_new(&p, 2, (const kvc_layer[]){plain_layer, layer_with(sliding_policy(4, 1, 0))});
    for (int64_t id = 0; id < 6; id++) {
        pair_feed(&p, id, 0, 4);
        pair_remove(&p, id, 0, 3, 0);
    }
    CHECK(pair_reserve(&p, 0, 60) == KVC_OK && stats_of(&p).blocks_free > 3);
    const kvc_stats stats = stats_of(&p);
    CHECK(kvc_spans(p.cache, 0, 0, before, sizeof *before, 4, &num, NULL) == KVC_OK && num == 1);
    int64_t bytes = kvc_nbytes(p.cache);
    int allocations = heap.num;
    for (int t = 0; t < 200; t++) {
        positions[t] = 4 + t / 7;
        ids[t] = 6 - t % 7; /* those that are there, and a new one */
    }
    CHECK_FAILS(pair_begin(&p, 200, positions, ids), KVC_ERR_FULL, "200 more tokens", "max_bytes");
    const kvc_stats stats_after = stats_of(&p);
    CHECK(!memcmp(&stats, &stats_after, sizeof stats));
    CHECK(kvc_nbytes(p.cache) == bytes && heap.num == allocations);
    CHECK(kvc_spans(p.cache, 0, 0, after, sizeof *after, 4, &num, NULL) == KVC_OK && num == 1);
    CHECK(after->k == before->k && memcmp(after->k, before->k, 4) == 0);
    pair_check(&p);
    pair_free(&p);
    CHECK(heap.num == 0);
}

/* Whatever is allowed, no batch passes it: in steps too small to miss what is counted wrong. */
static void test_max_bytes_is_hard(int block_size)
{
    static pair p;
    int full = 0;
    for (int64_t most = 1500; most < 5000; most += 52) {
        p = (pair){.config = {.block_size = block_size, .max_bytes = most, .num_threads = 1}};
        pair_new(&p, 1, &plain_layer);
        for (int i = 0; i < 30; i++) {
            int64_t id = random_int(0, 6);
            int32_t next = kvc_next_position(p.cache, id);
            if (pair_feed(&p, id, next, next + 3) == KVC_OK) {
                CHECKF(kvc_nbytes(p.cache) <= most, "%lld of %lld", (long long)kvc_nbytes(p.cache), (long long)most);
            } else {
                full++;
                pair_truncate(&p, id, next / 2);
            }
        }
        pair_check(&p);
        pair_free(&p);
    }
    CHECK(full);
}

/* Large blocks are resident as far as they were written: those that were come first. */
static void test_max_bytes_of_large_blocks(void)
{
    enum { DIM = 1024, ROW = 2 * DIM * 4 };
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .max_bytes = 68 * ROW};
    kvc_cache *cache;
    kvc_batch *batch;
    int32_t positions[65];
    for (int t = 0; t < 65; t++)
        positions[t] = t;
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK);
    CHECK(kvc_begin(cache, 64, positions, NULL, NULL, &batch) == KVC_OK);
    kvc_abort(batch);
    int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_begin(cache, 65, positions, NULL, NULL, &batch) == KVC_OK);
    CHECKF(kvc_nbytes(cache) < bytes + 3 * ROW, "%lld bytes more", (long long)(kvc_nbytes(cache) - bytes));
    kvc_abort(batch);
    CHECK(kvc_compact(cache) == KVC_OK && kvc_nbytes(cache) < ROW * 4);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- views ------------------------------------------------------------------------------------------------------ */

/* Rows stay as they are while they are held, whatever becomes of their sequence: their blocks are not used again. */
static void test_hold(int block_size)
{
    static view sliding, full, again;
    pair *p = mixed_pair(block_size);
    pair_feed(p, 0, 0, 30);
    CHECK(view_new(&full, p, 0, 0) == KVC_OK && view_new(&sliding, p, 0, 1) == KVC_OK);
    pair_feed(p, 0, 30, 40); /* evicts */
    pair_remove(p, 0, 3, 7, 0);
    pair_fork(p, 0, 1);
    CHECK(view_new(&again, p, 1, 0) == KVC_OK);
    CHECK_FAILS(pair_compact(p), KVC_ERR_HELD, "compact", "held (3)");
    CHECK_FAILS(kvc_cache_free(p->cache), KVC_ERR_HELD, "free the cache", "held (3)");
    pair_check(p);
    pair_clear(p);
    pair_check(p);
    for (int64_t id = 2; id < 8; id++)
        pair_feed(p, id, 0, 40);
    pair_check(p);
    view_check(&full, p);
    view_check(&sliding, p);
    view_check(&again, p);
    int64_t in_use = stats_of(p).blocks_in_use;
    view_free(&again, p);
    view_free(&full, p);
    CHECK_FAILS(pair_compact(p), KVC_ERR_HELD, "compact", "held (1)");
    view_free(&sliding, p);
    pair_check(p);
    CHECK(stats_of(p).blocks_in_use < in_use && stats_of(p).blocks_free > 0);
    CHECK(pair_compact(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* A hold is only given where all spans were, and there are any. */
static void test_hold_of_some(void)
{
    pair *p = mixed_pair(4);
    kvc_span spans[3];
    kvc_hold *hold = (kvc_hold *)(void *)spans;
    int64_t num;
    kvc_hold_free(NULL);
    pair_feed(p, 0, 0, 10);
    CHECK(kvc_spans(p->cache, 0, 0, spans, sizeof *spans, 2, &num, &hold) == KVC_OK && num == 3 && !hold);
    CHECK(kvc_spans(p->cache, 1, 0, spans, sizeof *spans, 3, &num, &hold) == KVC_OK && num == 0 && !hold);
    CHECK(pair_compact(p) == KVC_OK);
    CHECK(kvc_spans(p->cache, 0, 0, spans, sizeof *spans, 3, &num, &hold) == KVC_OK && num == 3 && hold);
    CHECK(kvc_compact(p->cache) == KVC_ERR_HELD);
    kvc_hold_free(hold);
    pair_check(p);
    pair_free(p);
}

/* A batch writes behind rows that are held, in the same block, and may be taken back. */
static void test_hold_of_a_block_that_grows(void)
{
    static view v;
    pair *p = mixed_pair(16);
    pair_feed(p, 0, 0, 6);
    CHECK(view_new(&v, p, 0, 2) == KVC_OK);
    CHECK(pair_begin(p, 2, (int32_t[]){6, 7}, (int64_t[]){0, 0}) == KVC_OK);
    pair_put_all(p);
    pair_check(p);
    view_check(&v, p);
    pair_abort(p);
    pair_check(p);
    pair_feed(p, 0, 6, 9);
    view_check(&v, p);
    pair_clear_sequence(p, 0);
    pair_feed(p, 0, 0, 3);
    pair_check(p);
    view_free(&v, p);
    pair_check(p);
    pair_free(p);
}

static void test_automatic_compaction_spares_held_blocks(void)
{
    static view v;
    pair *p = pair_with(full_policy, 4);
    pair_feed(p, 0, 0, 16);
    pair_feed(p, 1, 0, 96);
    for (int32_t at = 1; at < 96; at += 2) {
        pair_remove(p, 0, at, at + 1, 0);
        pair_remove(p, 1, at, at + 1, 0);
    }
    CHECK(view_new(&v, p, 0, 0) == KVC_OK);
    pair_feed(p, 2, 0, 40);
    pair_check(p);
    CHECK(stats_of(p).compactions == 1 && stats_of(p).rows_moved > 0);
    view_free(&v, p);
    pair_check(p);
    pair_free(p);
}

/* Rows from the middle of runs, converted, spread out or only one of K and V. */
static void test_gather_parts(void)
{
    pair *p = mixed_pair(4);
    uint16_t k[3 * 10 * 2];
    pair_feed(p, 0, 0, 10);
    for (int64_t first = 0; first < 10; first++) {
        for (int64_t n = 1; first + n <= 10; n++) {
            const kvc_rows_out out = {
                .struct_size = sizeof out, .type = KVC_BF16, .k = k, .k_head_stride = 40, .k_row_stride = 4};
            memset(k, 1, sizeof k);
            CHECK(kvc_gather(p->cache, 0, 2, first, n, &out) == KVC_OK);
            for (int h = 0; h < 3; h++)
                for (int i = 0; i < 10; i++) {
                    const uint16_t *got = &k[h * 20 + i * 2];
                    if (i < n)
                        check_element(&p->sequences[0].layers[2].rows[first + i], 2, 0, h, 0,
                                      read_element(got, KVC_BF16));
                    CHECK(got[1] == 0x0101 && (i < n || got[0] == 0x0101));
                }
        }
    }
    pair_free(p);
}

/* ---- what may not be done while a batch is open ----------------------------------------------------------------- */

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

    CHECK(pair_fork(p, 2, 5) == KVC_OK); /* others may be edited */
    CHECK(pair_remove(p, 3, 1, 3, 0) == KVC_OK);
    CHECK(pair_truncate(p, 5, 6) == KVC_OK);
    CHECK(pair_clear_sequence(p, 2) == KVC_OK);
    pair_check(p);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

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

/* ---- what is of one moment --------------------------------------------------------------------------------------- */

/* Copies say which rows they are of and how many there are, and a batch where its tokens stand. */
static void test_positions_of_copies(void)
{
    pair *p = pair_with(full_policy, 4);
    float k[8 * 4];
    int32_t at[8] = {0};
    int64_t stored = -5;
    kvc_rows_out out = {
        .struct_size = sizeof out, .k = k, .k_row_stride = 4 * sizeof *k, .positions = at, .num_stored = &stored};
    CHECK(pair_pass(p, 5, (int32_t[]){2, 3, 4, 7, 3}, (int64_t[]){0, 0, 0, 0, 0}) == KVC_OK);
    CHECK(kvc_gather(p->cache, 0, 0, 1, 4, &out) == KVC_OK && stored == 5);
    CHECK(at[0] == 3 && at[1] == 4 && at[2] == 7 && at[3] == 3 && at[4] == 0);
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 6, &out), KVC_ERR_INDEX, "up to 6", "holds 5");
    CHECK(stored == 5 && at[0] == 3);
    CHECK(kvc_extract(p->cache, 0, 0, 1, 8, &out) == KVC_OK && stored == 5);
    const int32_t found[] = {-1, 2, 3, 4, -1, -1, 7, 0};
    CHECK(!memcmp(at, found, sizeof at));
    CHECK(kvc_extract(p->cache, 9, 0, 3, 4, &out) == KVC_OK && at[0] == -1 && at[1] == 2 && stored == 0);
    pair_free(p);
}

static void test_next_positions(void)
{
    pair *p = pair_with(full_policy, 4);
    kvc_batch *batch = NULL;
    int64_t stored = -5;
    int32_t at[8];
    float k[8 * 4];
    const kvc_rows_out out = {
        .struct_size = sizeof out, .k = k, .k_row_stride = 4 * sizeof *k, .positions = at, .num_stored = &stored};
    kvc_dense_args dense = {.struct_size = sizeof dense, .rows = &out};
    CHECK(pair_pass(p, 3, (int32_t[]){4, 0, 9}, (int64_t[]){0, 0, 5}) == KVC_OK);
    CHECK(kvc_begin(p->cache, 5, NULL, (int64_t[]){5, 0, 0, 7, 5}, NULL, &batch) == KVC_OK);
    CHECK(!memcmp(kvc_batch_positions(batch), (int32_t[]){10, 5, 6, 0, 11}, 5 * sizeof(int32_t)));
    CHECK_FAILS(kvc_dense(batch, 0, &dense), KVC_ERR_INVALID, "num_rows", "there are 3");
    dense.num_rows = stored;
    CHECK(stored == 3 && kvc_dense(batch, 0, &dense) == KVC_OK);
    CHECK(at[0] == 0 && at[1] == 4 && at[2] == 9);
    kvc_abort(batch);
    CHECK(kvc_begin(p->cache, 2, NULL, NULL, NULL, &batch) == KVC_OK && kvc_batch_positions(batch)[1] == 6);
    kvc_abort(batch);
    CHECK(pair_pass(p, 1, (int32_t[]){INT32_MAX - 2}, (int64_t[]){5}) == KVC_OK);
    CHECK_FAILS(kvc_begin(p->cache, 2, NULL, (int64_t[]){5, 5}, NULL, &batch), KVC_ERR_INVALID, "num_tokens is 2",
                "2147483646");
    pair_check(p);
    pair_free(p);
}

/* ---- structs that are smaller or larger than the library's ------------------------------------------------------ */

typedef struct future_layer {
    kvc_layer layer;
    int64_t new_field; /* as long as the struct is aligned: padding may hold anything */
} future_layer;

static void test_layer_sizes(void)
{
    future_layer layers[2] = {{.layer = plain_layer}, {.layer = plain_layer}};
    kvc_config config = {.struct_size = sizeof config,
                         .layers = &layers[0].layer,
                         .layer_size = sizeof *layers,
                         .num_layers = 2};
    kvc_cache *cache = NULL;
    layers[1].layer.num_kv_heads = 3;
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    cache = NULL;
    layers[1].new_field = 1;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "layers", "does not know");
    config.layer_size = sizeof(kvc_layer) - 4;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "layers", "must be sizeof");
    CHECK(!cache);
}

static void test_config_sizes(void)
{
    struct {
        kvc_config config;
        int64_t new_field;
    } future = {.config = {.struct_size = sizeof future,
                           .layers = &plain_layer,
                           .layer_size = sizeof plain_layer,
                           .num_layers = 1}};
    kvc_cache *cache = NULL;
    CHECK(kvc_cache_new(&future.config, &cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    cache = NULL;
    future.new_field = -1;
    CHECK_FAILS(kvc_cache_new(&future.config, &cache), KVC_ERR_UNSUPPORTED, "config", "does not know");
    future.config.struct_size = 8;
    CHECK_FAILS(kvc_cache_new(&future.config, &cache), KVC_ERR_INVALID, "config", "given as 8");
    future.config.struct_size = 0;
    CHECK_FAILS(kvc_cache_new(&future.config, &cache), KVC_ERR_INVALID, "config", "given as 0");
    CHECK(!cache);
}

static void test_argument_sizes(void)
{
    pair *p = pair_with(full_policy, 4);
    const float rows[4] = {1, 2, 3, 4};
    float k[4] = {0};
    struct {
        kvc_put_args args;
        int64_t new_field;
    } put = {{.struct_size = sizeof put, .k = rows, .v = rows}, 1};
    struct {
        kvc_rows_out out;
        int64_t new_field;
    } out = {{.struct_size = sizeof out, .k = k}, 1};
    CHECK(pair_begin(p, 1, (int32_t[]){0}, (int64_t[]){0}) == KVC_OK);
    CHECK_FAILS(kvc_put(p->batch, 0, &put.args), KVC_ERR_UNSUPPORTED, "args", "does not know");
    put.args.struct_size = sizeof put.args - 8;
    CHECK_FAILS(kvc_put(p->batch, 0, &put.args), KVC_ERR_INVALID, "args", "must be sizeof");
    put.args.struct_size = sizeof put;
    put.new_field = 0;
    CHECK(kvc_put(p->batch, 0, &put.args) == KVC_OK && kvc_commit(p->batch) == KVC_OK);

    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, &out.out), KVC_ERR_UNSUPPORTED, "out", "does not know");
    out.out.struct_size = 1;
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, &out.out), KVC_ERR_INVALID, "out", "given as 1");
    CHECK(k[0] == 0);
    out.out.struct_size = sizeof out;
    out.new_field = 0;
    CHECK(kvc_gather(p->cache, 0, 0, 0, 1, &out.out) == KVC_OK && k[3] == 4);

    struct {
        kvc_span span;
        int64_t new_field;
    } spans[2] = {{.new_field = 5}, {.new_field = 6}};
    int64_t num;
    CHECK(kvc_spans(p->cache, 0, 0, &spans[0].span, sizeof *spans, 2, &num, NULL) == KVC_OK);
    CHECK(num == 1 && spans[0].span.num_rows == 1 && spans[0].new_field == 0 && spans[1].span.num_rows == 0);
    int64_t batches[2] = {-1, -1};
    kvc_get_stats(p->cache, (kvc_stats *)(void *)batches, sizeof *batches);
    CHECK(batches[0] == 1 && batches[1] == -1);
    kvc_clear(p->cache);
    pair_free(p);
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

static void check_run(const kvc_run_info *run, int64_t seq_id, int32_t block, int32_t slot, int32_t count,
                      int32_t position, int32_t in_batch)
{
    CHECKF(run->seq_id == seq_id && run->block == block && run->slot == slot && run->count == count &&
               run->position == position && run->delta == 0 && run->in_batch == in_batch,
           "sequence %lld: block %d, slots %d + %d, position %d, in_batch %d", (long long)run->seq_id, run->block,
           run->slot, run->count, run->position, run->in_batch);
}

static void check_info(const kvc_block_info *block, int32_t filled, int32_t live, int32_t references, int32_t is_held,
                       int32_t resident)
{
    CHECKF(block->num_slots == 4 && block->filled == filled && block->live == live &&
               block->references == references && block->is_held == is_held && block->resident == resident &&
               block->is_free == (!live && !is_held),
           "%d filled, %d live, %d references, is_held %d, %d resident, is_free %d", block->filled, block->live,
           block->references, block->is_held, block->resident, block->is_free);
}

/* What is shared, held by a batch and by a view, lost, cleared and compacted; everything else does pair_check. */
static void test_blocks(void)
{
    pair *p = pair_with(full_policy, 4);
    kvc_block_info blocks[3] = {{0}};
    kvc_run_info runs[8];
    int64_t num_blocks, num_runs;
    view v;
#define LOOK()                                                                                                         \
    CHECK(kvc_blocks(p->cache, 0, blocks, sizeof *blocks, 3, &num_blocks, runs, sizeof *runs, 8, &num_runs) == KVC_OK)
    LOOK();
    CHECK(num_blocks == 0 && num_runs == 0);
    pair_feed(p, 7, 0, 6);
    pair_fork(p, 7, -2);
    pair_begin(p, 3, (int32_t[]){6, 7, 8}, (int64_t[]){7, 7, 7});
    LOOK();
    CHECK(num_blocks == 3 && num_runs == 6);
    check_info(&blocks[0], 4, 4, 2, 0, 4);
    check_info(&blocks[1], 4, 4, 2, 0, 4);
    check_info(&blocks[2], 1, 1, 1, 0, 1);
    check_run(&runs[0], -2, 0, 0, 4, 0, 0);
    check_run(&runs[1], -2, 1, 0, 2, 4, 0);
    check_run(&runs[2], 7, 0, 0, 4, 0, 0);
    check_run(&runs[4], 7, 1, 2, 2, 6, 1);
    check_run(&runs[5], 7, 2, 0, 1, 8, 1);
    pair_abort(p);
    pair_remove(p, 7, 1, 3, 0);
    pair_truncate(p, -2, 1);
    LOOK();
    CHECK(num_blocks == 3 && num_runs == 4);
    check_info(&blocks[0], 4, 2, 2, 0, 4);
    check_info(&blocks[1], 2, 2, 1, 0, 4);
    check_info(&blocks[2], 0, 0, 0, 0, 1);
    CHECK(view_new(&v, p, 7, 0) == KVC_OK);
    pair_clear(p);
    LOOK();
    CHECK(num_blocks == 3 && num_runs == 0);
    check_info(&blocks[0], 4, 0, 0, 1, 4);
    view_free(&v, p);
    pair_compact(p);
    LOOK();
    CHECK(num_blocks == 0 && num_runs == 0);
#undef LOOK
    pair_free(p);
}

/* There are more than there is room for: no byte is written past it. */
static void test_few_blocks(void)
{
    pair *p = pair_with(full_policy, 4);
    kvc_block_info blocks[2] = {{0}};
    kvc_run_info runs[2] = {{0}};
    int64_t num_blocks, num_runs;
    pair_feed(p, 0, 0, 10);
    CHECK(kvc_blocks(p->cache, 0, NULL, sizeof *blocks, 0, &num_blocks, NULL, sizeof *runs, 0, &num_runs) == KVC_OK);
    CHECK(num_blocks == 3 && num_runs == 3);
    CHECK(kvc_blocks(p->cache, 0, blocks, sizeof *blocks, 1, &num_blocks, runs, 2 * sizeof *runs, 1, &num_runs) ==
          KVC_OK);
    CHECK(num_blocks == 3 && num_runs == 3 && blocks[0].filled == 4 && runs[0].count == 4);
    CHECK(blocks[1].num_slots == 0 && runs[1].count == 0);
    pair_free(p);
}

/* ---- bad arguments ---------------------------------------------------------------------------------------------- */

static void test_bad_limits(void)
{
    static const struct {
        kvc_config config;
        kvc_status status;
        const char *name, *value;
    } bad[] = {
        {{.num_layers = 0}, KVC_ERR_INVALID, "num_layers", "is 0:"},
        {{.num_layers = -1}, KVC_ERR_INVALID, "num_layers", "is -1:"},
        {{.num_layers = INT32_MAX}, KVC_ERR_INVALID, "num_layers", "is 2147483647:"},
        {{.num_layers = 1, .block_size = -1}, KVC_ERR_INVALID, "block_size", "is -1:"},
        {{.num_layers = 1, .block_size = INT32_MAX}, KVC_ERR_INVALID, "block_size", "is 2147483647:"},
        {{.num_layers = 1, .max_seq_len = -5}, KVC_ERR_INVALID, "max_seq_len", "is -5:"},
        {{.num_layers = 1, .max_seq_len = INT32_MAX}, KVC_ERR_INVALID, "max_seq_len", "is 2147483647:"},
        {{.num_layers = 1, .max_seq_len = INT64_MAX}, KVC_ERR_INVALID, "max_seq_len", "is 9223372036854775807:"},
        {{.num_layers = 1, .max_sequences = -2}, KVC_ERR_INVALID, "max_sequences", "is -2:"},
        {{.num_layers = 1, .max_sequences = INT64_MAX}, KVC_ERR_INVALID, "max_sequences", "is 9223372036854775807:"},
        {{.num_layers = 1, .capacity = -3}, KVC_ERR_INVALID, "capacity", "is -3:"},
        {{.num_layers = 1, .max_bytes = -4}, KVC_ERR_INVALID, "max_bytes", "is -4:"},
        {{.num_layers = 1, .num_threads = -1}, KVC_ERR_INVALID, "num_threads", "is -1:"},
        {{.num_layers = 1, .num_threads = 1 << 20}, KVC_ERR_INVALID, "num_threads", "is 1048576:"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvc_config config = bad[i].config;
        kvc_cache *cache = NULL;
        config.struct_size = sizeof config;
        config.layers = &plain_layer;
        config.layer_size = sizeof plain_layer;
        CHECK_FAILS(kvc_cache_new(&config, &cache), bad[i].status, bad[i].name, bad[i].value);
        CHECK(!cache);
    }
}

static void test_bad_layers(void)
{
#define GOOD .num_kv_heads = 1, .k_dim = 4, .v_dim = 4
    static const struct {
        kvc_layer layer;
        kvc_status status;
        const char *name, *value;
    } bad[] = {
        {{.k_dim = 4, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].num_kv_heads", "is 0:"},
        {{.num_kv_heads = -1, .k_dim = 4, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].num_kv_heads", "is -1:"},
        {{.num_kv_heads = INT32_MAX, .k_dim = 4, .v_dim = 4},
         KVC_ERR_INVALID, "layers[1].num_kv_heads", "is 2147483647:"},
        {{.num_kv_heads = 1, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].k_dim", "is 0:"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = -4}, KVC_ERR_INVALID, "layers[1].v_dim", "is -4:"},
        {{GOOD, .k_type = 5}, KVC_ERR_INVALID, "layers[1].k_type", "is 5:"},
        {{GOOD, .v_type = -1}, KVC_ERR_INVALID, "layers[1].v_type", "is -1:"},
        {{GOOD, .k_type = KVC_Q8_0}, KVC_ERR_INVALID, "layers[1].k_dim", "is 4: for q8_0"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 40, .v_type = KVC_Q4_0},
         KVC_ERR_INVALID, "layers[1].v_dim", "is 40: for q4_0"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 5, .value_in_key = 1}, KVC_ERR_INVALID, "layers[1].v_dim", "is 5:"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 3, .v_type = 1, .value_in_key = 1},
         KVC_ERR_INVALID, "layers[1].v_type", "is f16:"},
        {{GOOD, .share = 2}, KVC_ERR_INVALID, "layers[1].share", "is 2:"},
        {{GOOD, .share = 9}, KVC_ERR_INVALID, "layers[1].share", "is 9:"},
        {{GOOD, .share = -1}, KVC_ERR_INVALID, "layers[1].share", "is -1:"},
        {{.num_kv_heads = 3, .k_dim = 4, .v_dim = 4, .share = 1},
         KVC_ERR_INVALID, "layers[1] shares", "the same heads"},
        {{GOOD, .k_transform = 1}, KVC_ERR_UNSUPPORTED, "layers[1].k_transform", "is 1:"},
        {{GOOD, .v_transform = 2}, KVC_ERR_UNSUPPORTED, "layers[1].v_transform", "is 2:"},
        {{GOOD, .policy = {.kind = KVC_CHUNKED, .window = 4, .attention_chunk_size = 0}},
         KVC_ERR_INVALID, "attention_chunk_size", "is 0:"},
        {{GOOD, .policy = {.kind = KVC_CHUNKED, .window = 4, .resume_window = -1, .attention_chunk_size = 8}},
         KVC_ERR_INVALID, "resume_window", "is -1:"},
        {{GOOD, .policy = {.kind = KVC_CROSS, .window = 4, .max_len = 0}},
         KVC_ERR_INVALID, "max_len", "is 0:"},
        {{GOOD, .policy = {.kind = 5, .window = 4}},
         KVC_ERR_INVALID, "layers[1].policy.kind", "is 5:"},
        {{GOOD, .policy = {.kind = -1, .window = 4}},
         KVC_ERR_INVALID, "layers[1].policy.kind", "is -1:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 0}},
         KVC_ERR_INVALID, "layers[1]: window", "is 0:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .num_sink_tokens = -1}},
         KVC_ERR_INVALID, "layers[1]: num_sink_tokens", "is -1:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .resume_window = 3}},
         KVC_ERR_INVALID, "layers[1]: resume_window", "is 3:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .resume_window = -9}},
         KVC_ERR_INVALID, "layers[1]: resume_window", "is -9:"},
    };
#undef GOOD
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const kvc_layer layers[] = {plain_layer, bad[i].layer};
        const kvc_config config = {.struct_size = sizeof config,
                                   .layers = layers,
                                   .layer_size = sizeof *layers,
                                   .num_layers = 2};
        kvc_cache *cache = NULL;
        CHECK_FAILS(kvc_cache_new(&config, &cache), bad[i].status, bad[i].name, bad[i].value);
        CHECK(!cache);
    }
}

/* What the structs point to, sizes that overflow, and the environment. */
static void test_bad_creation(void)
{
    kvc_layer huge = {.num_kv_heads = 1 << 20, .k_dim = 1 << 20, .v_dim = 1 << 20};
    kvc_config config = {.struct_size = sizeof config,
                         .layers = &huge,
                         .layer_size = sizeof huge,
                         .num_layers = 1,
                         .block_size = INT32_MAX - 1};
    kvc_allocator allocator = {.struct_size = 8};
    kvc_cache *cache = NULL;
    CHECK_FAILS(kvc_cache_new(NULL, &cache), KVC_ERR_INVALID, "config", "NULL");
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "block_size", "2147483646");
    config.layers = NULL;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "layers", "NULL");
    config.layers = &plain_layer;
    CHECK_FAILS(kvc_cache_new(&config, NULL), KVC_ERR_INVALID, "cache", "NULL");
    config.allocator = &allocator;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "allocator", "as 8:");
    allocator.struct_size = sizeof allocator;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "allocator->alloc", "NULL");
    config.allocator = NULL;
    setenv("KVCACHE_ISA", "pdp11", 1);
    CHECK(!kvc_isa());
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "KVCACHE_ISA", "pdp11");
    unsetenv("KVCACHE_ISA");
    CHECK(!cache && kvc_cache_free(NULL) == KVC_OK);
    CHECK_FAILS(kvc_set_num_threads(-1), KVC_ERR_INVALID, "num_threads", "is -1:");
    CHECK_FAILS(kvc_set_num_threads(4097), KVC_ERR_INVALID, "num_threads", "is 4097:");
    CHECK(strcmp(kvc_strerror((kvc_status)99), "unknown status") == 0);
    CHECK(strcmp(kvc_strerror(KVC_ERR_FULL), "the tokens do not fit") == 0);
}

static void test_bad_edits(void)
{
    pair *p = mixed_pair(4);
    pair_feed(p, 3, 0, 9);
    CHECK_FAILS(kvc_fork(p->cache, 3, 3), KVC_ERR_INVALID, "src and dst", "sequence 3");
    CHECK_FAILS(kvc_copy_prefix(p->cache, 3, 3, 1), KVC_ERR_INVALID, "src and dst", "sequence 3");
    CHECK_FAILS(kvc_copy_prefix(p->cache, 3, 4, -1), KVC_ERR_INVALID, "length", "is -1:");
    CHECK_FAILS(kvc_truncate(p->cache, 3, -2), KVC_ERR_INVALID, "length", "is -2:");
    CHECK_FAILS(kvc_remove(p->cache, 3, -3, 2, 0), KVC_ERR_INVALID, "begin", "is -3:");
    CHECK_FAILS(kvc_remove(p->cache, 3, 3, 2, 0), KVC_ERR_INVALID, "end", "is 2:");
    CHECK_FAILS(kvc_remove(p->cache, 3, 3, 5, 1), KVC_ERR_UNSUPPORTED, "layer 0", "rope");
    pair_check(p);
    pair_free(p);
}

static void test_bad_begin(void)
{
    pair *p = mixed_pair(4);
    const int32_t positions[] = {4, 5, -3, INT32_MAX};
    kvc_batch *batch = NULL;
    pair_feed(p, 0, 0, 4);
    CHECK_FAILS(kvc_begin(p->cache, 0, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens", "is 0:");
    CHECK_FAILS(kvc_begin(p->cache, KVC_MAX_BATCH + 1, NULL, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens is 16777217",
                "16777216");
    CHECK_FAILS(kvc_begin(p->cache, -7, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens", "is -7:");
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "positions[2]", "is -3:");
    CHECK_FAILS(kvc_begin(p->cache, 1, positions + 3, NULL, NULL, &batch), KVC_ERR_INVALID, "positions[0]",
                "is 2147483647:");
    CHECK_FAILS(kvc_begin(p->cache, 1, positions, NULL, NULL, NULL), KVC_ERR_INVALID, "batch", "NULL");
    CHECK(!batch);
    pair_check(p);
    CHECK(kvc_begin(p->cache, 2, positions, NULL, NULL, &batch) == KVC_OK); /* of sequence 0 */
    kvc_abort(batch);
    pair_check(p);
    pair_free(p);
}

static void test_bad_put(void)
{
    pair *p = mixed_pair(4);
    const float rows[64] = {0};
    const kvc_put_args good = {.struct_size = sizeof good, .num_tokens = 1, .k = rows, .v = rows};
    CHECK(pair_begin(p, 4, (int32_t[]){0, 1, 2, 3}, (int64_t[]){0, 0, 0, 0}) == KVC_OK);
    CHECK_FAILS(kvc_commit(p->batch), KVC_ERR_INVALID, "token 0", "layer 0");
#define BAD(status, name, value, ...)                                                                                  \
    do {                                                                                                               \
        kvc_put_args args = good;                                                                                      \
        __VA_ARGS__;                                                                                                   \
        CHECK_FAILS(kvc_put(p->batch, 0, &args), status, name, value);                                                 \
    } while (0)
    CHECK_FAILS(kvc_put(p->batch, 0, NULL), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_put(p->batch, -1, &good), KVC_ERR_INDEX, "layer", "is -1:");
    CHECK_FAILS(kvc_put(p->batch, 4, &good), KVC_ERR_INDEX, "layer", "is 4:");
    BAD(KVC_ERR_INDEX, "first", "is -1:", args.first = -1);
    BAD(KVC_ERR_INDEX, "first", "is 4:", args.first = 4);
    BAD(KVC_ERR_INDEX, "num_tokens", "is -1:", args.num_tokens = -1);
    BAD(KVC_ERR_INDEX, "num_tokens", "is 4:", args.first = 1, args.num_tokens = 4);
    BAD(KVC_ERR_INDEX, "num_tokens", "is 2147483647:", args.first = 3, args.num_tokens = INT32_MAX);
    BAD(KVC_ERR_INVALID, "k", "NULL", args.k = NULL);
    BAD(KVC_ERR_INVALID, "v", "NULL", args.v = NULL);
    BAD(KVC_ERR_INVALID, "k_type", "is 3:", args.k_type = KVC_Q8_0);
    BAD(KVC_ERR_INVALID, "v_type", "is -1:", args.v_type = -1);
    BAD(KVC_ERR_INVALID, "k: strides", "6 and 0", args.k_token_stride = 6);
    BAD(KVC_ERR_INVALID, "k: strides", "0 and -3", args.k_head_stride = -3);
    BAD(KVC_ERR_INVALID, "v: strides", "1 and 0", args.v_type = KVC_F16, args.v_token_stride = 1);
#undef BAD
    pair_check(p);
    pair_put(p, 0, 1, 1);
    kvc_put_args args = good;
    args.num_tokens = 0;
    CHECK_FAILS(kvc_put(p->batch, 0, &args), KVC_ERR_INVALID, "token 1", "layer 0 before");
    for (int l = 1; l < 4; l++)
        pair_put(p, l, 0, 4);
    pair_put(p, 0, 0, 1);
    CHECK_FAILS(kvc_commit(p->batch), KVC_ERR_INVALID, "token 2", "layer 0");
    pair_put(p, 0, 2, 2);
    CHECK(pair_commit(p) == KVC_OK); /* none of the refused calls wrote */
    pair_check(p);
    pair_free(p);
}

static void test_bad_reads(void)
{
    pair *p = mixed_pair(4);
    float k[64];
    int32_t position = -5;
    int64_t num = -5, num_runs = -5;
    kvc_span span = {.num_rows = -5};
    kvc_block_info block = {.live = -5};
    kvc_run_info run = {.count = -5};
    kvc_hold *hold = NULL;
    const kvc_rows_out good = {.struct_size = sizeof good, .k = k};
    kvc_rows_out bad = good;
    pair_feed(p, 0, 0, 4);
    for (int32_t layer = -2; layer < 5; layer += layer == -2 ? 1 : 5) { /* -2, -1, 4 */
        char value[16];
        snprintf(value, sizeof value, "is %d:", layer);
        CHECK(layer == -1 || kvc_seq_len(p->cache, 0, layer) == -1);
        CHECK(kvc_positions(p->cache, 0, layer, &position, 1) == -1 && position == -5);
        CHECK(kvc_find_row(p->cache, 0, layer, 0) == -1);
        CHECK_FAILS(kvc_gather(p->cache, 0, layer, 0, 1, &good), KVC_ERR_INDEX, "layer", value);
        CHECK_FAILS(kvc_spans(p->cache, 0, layer, &span, sizeof span, 1, &num, &hold), KVC_ERR_INDEX, "layer", value);
        CHECK_FAILS(kvc_blocks(p->cache, layer, &block, sizeof block, 1, &num, &run, sizeof run, 1, &num_runs),
                    KVC_ERR_INDEX, "layer", value);
    }
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, 4, 1, &num, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID,
                "blocks", "as 4:");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, &run, 8, 1, &num_runs), KVC_ERR_INVALID,
                "runs", "as 8:");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, NULL, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID,
                "num_blocks", "NULL");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, &run, sizeof run, 1, NULL), KVC_ERR_INVALID,
                "num_runs", "NULL");
    CHECK(num == -5 && num_runs == -5 && block.live == -5 && run.count == -5);
    CHECK_FAILS(kvc_spans(p->cache, 0, 0, &span, 8, 1, &num, &hold), KVC_ERR_INVALID, "spans", "as 8:");
    CHECK(num == -5 && span.num_rows == -5 && !hold);
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, NULL), KVC_ERR_INVALID, "out", "NULL");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, -1, 1, &good), KVC_ERR_INVALID, "first_row", "is -1");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 1, -2, &good), KVC_ERR_INVALID, "num_rows", "-2");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, INT64_MAX, 2, &good), KVC_ERR_INVALID, "first_row", "9223372036854775807");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 3, 2, &good), KVC_ERR_INDEX, "up to 5", "holds 4");
    CHECK_FAILS(kvc_gather(p->cache, 8, 0, 0, 1, &good), KVC_ERR_INDEX, "sequence 8", "holds 0");
    bad.type = KVC_Q4_0;
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, &bad), KVC_ERR_INVALID, "out_type", "is 4:");
    CHECK(kvc_gather(p->cache, 0, 0, 4, 0, &good) == KVC_OK && kvc_gather(p->cache, 8, 0, 0, 0, &good) == KVC_OK);
    CHECK(kvc_can_resume(p->cache, 0, -1) == 0 && kvc_find_row(p->cache, 0, 0, -1) == -1);
    pair_check(p);
    pair_free(p);
}

/* ---- everything ------------------------------------------------------------------------------------------------- */

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
    test_compact(block_size);
    test_max_bytes_is_hard(block_size);
    test_hold(block_size);
    for (int i = 0; i < 12; i++)
        random_test(block_size, 0, 700);
}

static void test_forward_pass(void)
{
    test_extend_in_place();
    test_put_strides();
    test_put_ranges();
    test_abort();
    test_largest_position();
    test_truncate_keep_clear();
    test_idle_sequences();
    test_lost_rows();
    test_all_evicted();
    test_evicting_the_last_run();
    test_busy();
    test_busy_keep();
}

static void test_memory(void)
{
    test_default_block_size();
    test_compact_short_sequences();
    test_automatic_compaction(2, 1);
    test_automatic_compaction(4, 0);
    test_automatic_compaction(8, 0);
    test_max_seq_len();
    test_max_sequences();
    test_capacity();
    test_full_in_the_middle();
    test_max_bytes();
    test_refused_batch_changes_nothing();
    test_max_bytes_of_large_blocks();
    test_hold_of_some();
    test_hold_of_a_block_that_grows();
    test_automatic_compaction_spares_held_blocks();
    test_gather_parts();
    test_blocks();
    test_few_blocks();
    test_positions_of_copies();
    test_next_positions();
}

static void test_bad_arguments(void)
{
    test_layer_sizes();
    test_config_sizes();
    test_argument_sizes();
    test_bad_limits();
    test_bad_layers();
    test_bad_creation();
    test_bad_edits();
    test_bad_begin();
    test_bad_put();
    test_bad_reads();
}

int main(void)
{
    static const int block_sizes[] = {1, 3, 16, 64};
    test_forward_pass();
    test_memory();
    test_bad_arguments();
    for (int i = 0; i < 4; i++)
        test_block_size(block_sizes[i]);
    return test_result();
}
