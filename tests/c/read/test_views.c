/* Reading a cache: spans that no batch has, positions of copies, few blocks.  tests/world compares what is read. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* ---- holds ------------------------------------------------------------------------------------------------------- */

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
    test_spans_that_no_batch_has();
    test_next_positions();
    test_few_blocks();
    return test_result();
}
