/* Batches that restore some layers: the window of an earlier moment in a sequence that has gone on since, and what is
 * refused.  tests/world compares the rest. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

enum { WINDOW = 8, MAX_POSITION = 80 };

/* Begins a batch that restores the second layer of sequence 0 at positions [begin, end), backwards, and commits it. */
static void restore(pair *p, int32_t begin, int32_t end) {
    int32_t positions[MAX_POSITION];
    const int64_t ids[MAX_POSITION] = {0};
    static const uint8_t replaced[] = {0, 1};
    for (int32_t i = 0; i < end - begin; i++) positions[i] = end - 1 - i;
    CHECK(pair_begin_with(p, end - begin, positions, ids, replaced) == KVC_OK);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK);
    pair_check(p);
}

/* Makes a pair of a full layer, and one with a window. */
static pair *window_pair(int32_t num_sinks) {
    static pair p;
    p = (pair){.config.block_size = 4};
    pair_new(&p, 2, (const kvc_layer[]){layer_with(full_policy), layer_with(sliding_policy(WINDOW, num_sinks, 0))});
    return &p;
}

/* The window of an earlier moment can be gone on from once the sequence is cut to it; rows that were left out, though
 * other layers have them, are named. */
static void test_earlier_window(void) {
    static const struct {
        int32_t num_sinks, begin, end, next;
        const char *lacks;
    } cases[] = {{0, 22, 30, 60, "layer 1 lacks, from 30 to 59"},
                 {2, 52, 60, 60, "layer 1 lacks, from 0 to 1"},
                 {0, 56, 60, 60, "layer 1 lacks, from 53 to 55"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pair *p = window_pair(cases[i].num_sinks);
        pair_feed(p, 0, 0, 30);
        pair_feed(p, 0, 30, 60);
        CHECK(kvc_truncate(p->cache, 0, 30) == KVC_ERR_GONE);
        restore(p, cases[i].begin, cases[i].end);
        CHECK_FAILS(pair_feed(p, 0, 60, 61), KVC_ERR_GONE, cases[i].lacks, "position 60");
        if (i > 0) {
            CHECK(kvc_truncate(p->cache, 0, 59) == KVC_ERR_GONE);
        } else {
            CHECK_FAILS(kvc_truncate(p->cache, 0, 31), KVC_ERR_GONE, "position 31", "layer 1 lacks");
            CHECK(kvc_truncate(p->cache, 0, 30) == KVC_OK && pair_feed(p, 0, 30, 40) == KVC_OK);
        }
        pair_check(p);
        pair_free(p);
    }
}

static void test_refused(void) {
    const kvc_layer cross = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_CROSS, .max_len = 3}},
                    none = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_NONE}},
                    window = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_SLIDING, .window = 3}};
    kvc_layer shared = window;
    shared.share = 2;
    static pair p;
    kvc_batch *batch = NULL;
    p = (pair){.config.block_size = 4};
    pair_new(&p, 6, (const kvc_layer[]){none, window, shared, window, cross, layer_with(full_policy)});
    kvc_begin_args args = {.struct_size = sizeof args,
                           .num_tokens = 3,
                           .positions = (int32_t[]){2, 0, 2},
                           .seq_ids = (int64_t[]){5, 5, 6},
                           .replaced = (uint8_t[]){0, 1, 0, 0, 0, 0}};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "not layer 3", "names layer 1");
    args.replaced = (uint8_t[]){1, 0, 1, 0, 0, 0};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "replaced names no layer", "rows of its own");
    args.replaced = (uint8_t[]){1, 1, 0, 1, 1, 0};
    args.parents = (int32_t[]){-1, -1, -1};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "parents", "NULL");
    args.parents = NULL;
    args.unstored = (uint8_t[]){0, 0, 0};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "unstored", "NULL");
    args.unstored = NULL;
    const int32_t *positions = args.positions;
    args.positions = NULL;
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "positions", "NULL");
    args.positions = positions;
    CHECKF(kvc_begin_with(p.cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    const float row[16] = {0};
    const kvc_put_args put = zero_rows(0, 0);
    kvc_span span;
    CHECK_FAILS(kvc_put(batch, 5, &put), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK_FAILS(kvc_slots(batch, 5, 0, &span, sizeof span, NULL), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK_FAILS(kvc_written(batch, 5, 0, 1), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK(kvc_put(batch, 1, &put) == KVC_OK);
    CHECK_FAILS(kvc_commit(batch), KVC_ERR_INVALID, "token 0", "layer 3");
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 1, .num_heads = 1};
    const kvc_attend_args attend = {.struct_size = sizeof attend, .q = row, .out = (float[16]){0}};
    const kvc_dense_args dense = {.struct_size = sizeof dense};
    kvc_plan *made = NULL;
    int64_t num;
    int32_t some;
    CHECK_FAILS(kvc_plan_new(batch, &plan, &made), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_attend(batch, &plan, &attend), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense_rows(batch, 1, &num), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense_sequences(batch, 1, &some, &num), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense(batch, 1, &dense), KVC_ERR_INVALID, "restores", "attend");
    CHECK(kvc_put(batch, 3, &put) == KVC_OK);
    kvc_put_args encoded = put;
    encoded.num_tokens = 2;
    encoded.seq_id = 6;
    CHECK(kvc_put(batch, 4, &encoded) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_seq_len(p.cache, 6, 4) == 2 && kvc_seq_len(p.cache, 5, 3) == 2 && kvc_seq_len(p.cache, 5, 5) == 0);
    pair_free(&p);
}

int main(void) {
    test_earlier_window();
    test_refused();
    return test_result();
}
