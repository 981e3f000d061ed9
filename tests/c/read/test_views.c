/* Reading a cache: spans of a batch, positions of copies, blocks and runs.  tests/world compares what is read. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* ---- holds ------------------------------------------------------------------------------------------------------- */

/* The open batch's rows continue the stored rows in place, and stay there once it is committed; a hold keeps them after
 * an abort, too. */
static void test_spans_of_a_batch(void) {
    pair *p = mixed_pair(16);
    kvc_span spans[4], after[4];
    kvc_hold *hold = NULL;
    int64_t num;
    pair_feed(p, 0, 0, 6);
    for (int is_kept = 0; is_kept < 2; is_kept++) {
        CHECK(pair_begin(p, 3, (int32_t[]){6, 7, 8}, (int64_t[]){0, 0, 0}) == KVC_OK);
        pair_check(p);
        pair_put(p, 0, 0, 1);
        pair_put(p, 0, 2, 1);
        pair_check(p);
        CHECK(kvc_batch_spans(p->batch, 0, 0, spans, sizeof *spans, 1, &num, &hold) == KVC_OK && num == 2 && !hold);
        CHECK(spans[0].num_rows == 7 && spans[0].position == 0);
        CHECK(kvc_batch_spans(p->batch, 0, 0, spans, sizeof *spans, 4, &num, &hold) == KVC_OK && num == 2 && hold);
        CHECK(spans[1].num_rows == 1 && spans[1].position == 8);
        CHECK((const char *)spans[1].k == (const char *)spans[0].k + 8 * spans[0].k_row_stride);
        float k = *(const float *)spans[1].k;
        if (!is_kept)
            kvc_abort(p->batch);
        else {
            pair_put(p, 0, 1, 1);
            for (int l = 1; l < 4; l++) pair_put(p, l, 0, 3);
            pair_check(p);
            pair_commit(p);
            CHECK(kvc_spans(p->cache, 0, 0, after, sizeof *after, 4, &num, NULL) == KVC_OK && num == 1);
            CHECK(after[0].k == spans[0].k && after[0].num_rows == 9);
        }
        for (int64_t id = 1; id < 4; id++) pair_feed(p, id, 0, 20);
        CHECK(*(const float *)spans[1].k == k);
        CHECK(kvc_compact(p->cache) == KVC_ERR_HELD);
        kvc_hold_free(hold);
        kvc_clear(p->cache);
        pair_feed(p, 0, 0, 6);
    }
    pair_check(p);
    pair_free(p);
}

static void test_spans_that_no_batch_has(void) {
    pair *p = mixed_pair(16), other;
    kvc_span span;
    int64_t num;
    const kvc_layer layer = plain_layer;
    other = (pair){.config = {.num_threads = 1}};
    pair_new(&other, 1, &layer);
    pair_feed(p, 0, 0, 6);
    CHECK(pair_begin(p, 1, (int32_t[]){0}, (int64_t[]){1}) == KVC_OK);
    kvc_rows_out out = {.struct_size = sizeof out, .batch = p->batch};
    CHECK_FAILS(kvc_batch_spans(p->batch, 0, 0, &span, sizeof span, 1, &num, NULL), KVC_ERR_INVALID, "seq_id is 0",
                "no token of that sequence");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, &out), KVC_ERR_INVALID, "seq_id is 0", "no token of that sequence");
    CHECK_FAILS(kvc_gather(p->cache, 1, 0, 0, 1, &out), KVC_ERR_INDEX, "up to 1", "holds 0");
    CHECK_FAILS(kvc_gather(other.cache, 1, 0, 0, 1, &out), KVC_ERR_INVALID, "out->batch", "another cache");
    CHECK_FAILS(kvc_batch_spans(p->batch, 1, 4, &span, sizeof span, 1, &num, NULL), KVC_ERR_INDEX, "layer", "4");
    CHECK_FAILS(kvc_batch_spans(p->batch, 1, 0, &span, 8, 1, &num, NULL), KVC_ERR_INVALID, "spans", "as 8:");
    CHECK_FAILS(kvc_batch_spans(p->batch, 1, 0, &span, sizeof span, 1, NULL, NULL), KVC_ERR_INVALID, "num_spans",
                "NULL");
    kvc_abort(p->batch);
    pair_check(p);
    pair_free(&other);
    pair_free(p);
}

/* ---- copies of rows ---------------------------------------------------------------------------------------------- */

/* A batch without positions continues each sequence, and kvc_dense gives the stored rows' positions. */
static void test_next_positions(void) {
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
    CHECK_FAILS(kvc_begin(p->cache, 2, NULL, (int64_t[]){5, 5}, NULL, &batch), KVC_ERR_INVALID,
                "a batch of 2 would pass the last position", "2147483646");
    pair_check(p);
    pair_free(p);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* kvc_blocks counts all blocks and runs, and writes no more than the arrays hold. */
static void test_few_blocks(void) {
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

int main(void) {
    test_spans_of_a_batch();
    test_spans_that_no_batch_has();
    test_next_positions();
    test_few_blocks();
    return test_result();
}
