/* Every operation with its first, second, third ... allocation failing, until none does: it changes nothing and can be
 * repeated.  At the end of each no byte is left, and all were given back as they were taken. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/random_steps.h"

/* ---- one cache, in whose memory allocations fail ----------------------------------------------------------------- */

/* What is there before the operation, and the operation, which may be repeated once it has failed. */
typedef struct scenario {
    const char *name;
    void (*prepare)(pair *p);
    kvc_status (*run)(pair *p);
} scenario;

static memory heap;

static kvc_status reserve(pair *p) { return pair_reserve(p, 0, 30); }

static void close_pair(pair *p) {
    if (p->batch) pair_abort(p);
    pair_check(p);
    pair_free(p);
    CHECKF(heap.num == 0, "%d allocations are left", heap.num);
}

/* Runs the scenario with the allocation after `fail_after` others failing; returns whether one failed. */
static int run_once(const scenario *s, int fail_after) {
    static pair p;
    memory_init(&heap);
    p = (pair){.memory = &heap};
    s->prepare(&p);
    pair_check(&p);
    kvc_stats before = stats_of(&p);
    int64_t bytes = kvc_nbytes(p.cache);
    int allocations = heap.num;
    memory_fail_after(&heap, fail_after);
    kvc_status status = s->run(&p);
    int failed = heap.failed;
    kvc_stats after = stats_of(&p);
    pair_check(&p);
    if (status != KVC_OK)
        CHECKF(!memcmp(&after, &before, sizeof after), "after %d", fail_after); /* no block is left over */
    if (status != KVC_OK) CHECKF(kvc_nbytes(p.cache) == bytes, "after %d", fail_after);
    if (status != KVC_OK && (!strncmp(s->name, "begin", 5) || s->run == reserve || s->run == pair_compact))
        CHECKF(heap.num == allocations, "after %d", fail_after); /* and no scratch */
    CHECKF(status == KVC_OK || strstr(kvc_last_error(), "memory"), "%s", kvc_last_error());
    memory_fail_after(&heap, -1);
    if (status != KVC_OK) {
        CHECK(s->run(&p) == KVC_OK);
        pair_check(&p);
    }
    close_pair(&p);
    return failed;
}

static void run_scenario(const scenario *s) {
    int fail_after = 0, failures = test_failures;
    while (run_once(s, fail_after) && fail_after < 100) fail_after++;
    CHECK(fail_after > 0 && fail_after < 100);
    if (test_failures > failures) printf("in the scenario: %s\n", s->name);
}

/* ---- what is there before ---------------------------------------------------------------------------------------- */

/* A rope that rotates two elements of a key by right angles. */
static kvc_rope right_rope(int first_dim) {
    return (kvc_rope){.kind = KVC_ROPE_FREQUENCIES, .first_dim = first_dim, .num_freqs = 1, .inv_freq = right_angles};
}

static void prepare_empty(pair *p) {
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 3, .v_dim = 5, .k_type = KVC_F32, .v_type = KVC_F16, .rope = right_rope(1)},
        {.num_kv_heads = 1,
         .k_dim = 8,
         .v_dim = 1,
         .k_type = KVC_BF16,
         .policy = sliding_policy(5, 2, 0),
         .rope = {.kind = KVC_ROPE_FUNCTION, .shift = move_keys}},
        {.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .policy = sliding_policy(3, 0, 9), .rope = right_rope(0)},
        {.num_kv_heads = 1, .k_dim = 3, .v_dim = 2, .policy = {.kind = KVC_CROSS, .max_len = 6}},
    };
    p->config.block_size = p->config.block_size ? p->config.block_size : 4;
    p->config.num_threads = 1;
    pair_new(p, 4, layers);
}

static void prepare_one(pair *p) {
    prepare_empty(p);
    pair_feed(p, 0, 0, 21);
}

/* Fills the first table of sequences; two of them share rows. */
static void prepare_four(pair *p) {
    prepare_one(p);
    pair_feed(p, 1, 0, 6);
    pair_feed(p, 2, 0, 1);
    pair_fork(p, 0, 3);
}

/* The rows before the last ones of sequence 1 have not been expired. */
static void prepare_fed(pair *p) {
    prepare_four(p);
    pair_feed(p, 1, 6, 9);
}

static void prepare_irregular(pair *p) {
    prepare_empty(p);
    pair_pass(p, 12, (int32_t[]){0, 1, 2, 9, 10, 11, 3, 4, 12, 13, 5, 6},
              (int64_t[]){0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
    pair_fork(p, 0, 1);
}

/* No scratch is kept from earlier batches. */
static void prepare_compacted(pair *p) {
    prepare_four(p);
    pair_compact(p);
}

/* Fills a list of runs, so that an edit that splits one must lengthen it. */
static void prepare_runs(pair *p) {
    prepare_empty(p);
    for (int32_t at = 0; at < 24; at += 2) pair_feed(p, 0, at, at + 1);
}

static void prepare_holes(pair *p) {
    prepare_one(p);
    pair_copy_prefix(p, 0, 1, 15);
    for (int32_t at = 1; at < 21; at += 2) {
        pair_remove(p, 0, at, at + 1, 0);
        pair_remove(p, 1, at, at + 1, 0);
    }
}

/* Two sequences that share the odd positions, of which one lacks the even ones. */
static void prepare_between(pair *p) {
    prepare_one(p);
    pair_fork(p, 0, 1);
    for (int32_t at = 0; at < 21; at += 2) pair_remove(p, 0, at, at + 1, 0);
}

/* Two sequences that share rows in no order of positions. */
static void prepare_out_of_order(pair *p) {
    prepare_one(p);
    for (int64_t id = 1; id < 3; id++)
        for (int32_t at = 15; at >= 5; at -= 5) pair_share(p, 0, id, at, at + 4);
    pair_keep(p, 1);
    pair_share(p, 1, 0, 6, KVC_END);
}

/* Prepare so few bytes that five tokens more fit only once the holes are closed. */
static void prepare_few_bytes(pair *p) {
    prepare_empty(p);
    pair_feed(p, 0, 0, 40);
    int64_t bytes = kvc_nbytes(p->cache);
    pair_free(p);
    p->num_sequences = 0;
    p->config.max_bytes = bytes + 200; /* 200 for lists of runs */
    prepare_empty(p);
    pair_feed(p, 0, 0, 40);
    for (int32_t at = 1; at < 36; at += 6) pair_remove(p, 0, at, at + 1, 0);
}

static void prepare_batch(pair *p) {
    int32_t positions[24];
    int64_t ids[24];
    prepare_four(p);
    for (int t = 0; t < 24; t++) {
        ids[t] = t % 2;
        positions[t] = t / 2 + (ids[t] ? 6 : 21);
    }
    pair_begin(p, 24, positions, ids);
    pair_put_all(p);
}

/* Three sequences that see the same slots at different deltas. */
static void prepare_disputed(pair *p) {
    prepare_one(p);
    pair_fork(p, 0, 1);
    pair_fork(p, 0, 2);
    pair_shift(p, 1, 3, 15, 30);
    pair_shift(p, 2, 5, KVC_END, -2);
    pair_shift(p, 2, 0, 2, 50);
}

static void prepare_long_batch(pair *p) {
    int32_t positions[60];
    int64_t ids[60] = {0};
    for (int t = 0; t < 60; t++) positions[t] = t;
    p->config.block_size = 16;
    prepare_empty(p);
    CHECK(pair_begin(p, 60, positions, ids) == KVC_OK);
    pair_put_all(p);
}

static void prepare_open(pair *p) {
    prepare_one(p);
    CHECK(pair_begin(p, 3, (int32_t[]){21, 22, 23}, (int64_t[]){0, 0, 0}) == KVC_OK);
}

/* Rows for a cross-attention layer in an open batch, whose tokens were put. */
static void prepare_cross(pair *p) {
    prepare_four(p);
    CHECK(pair_begin(p, 3, (int32_t[]){21, 6, 22}, (int64_t[]){0, 1, 0}) == KVC_OK);
    CHECK(pair_put_cross(p, 3, 0, 4) == KVC_OK);
    pair_put_all(p);
}

/* Rows in a cross-attention layer. */
static void prepare_encoded(pair *p) {
    prepare_cross(p);
    CHECK(pair_commit(p) == KVC_OK);
}

/* Keys that are off by several deltas, and a batch to attend with. */
static void prepare_deltas(pair *p) {
    int32_t positions[24];
    int64_t ids[24] = {0};
    prepare_disputed(p);
    for (int t = 0; t < 24; t++) {
        positions[t] = t % 12 + 60;
        ids[t] = 2 - t % 2;
    }
    CHECK(pair_begin(p, 24, positions, ids) == KVC_OK);
    pair_put_all(p);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static kvc_status begin_new(pair *p) {
    return pair_begin(p, 7, (int32_t[]){0, 0, 0, 1, 5, 0, 0}, (int64_t[]){9, -1, 4, 4, 4, 5, 6});
}

static kvc_status begin_old(pair *p) { return pair_begin(p, 4, (int32_t[]){21, 6, 22, 23}, (int64_t[]){0, 1, 0, 0}); }

static kvc_status begin_old_and_new(pair *p) {
    return pair_begin(p, 5, (int32_t[]){21, 6, 22, 0, 0}, (int64_t[]){0, 1, 0, 7, 8});
}

static kvc_status prefill(pair *p) {
    int32_t positions[50];
    int64_t ids[50] = {0};
    for (int t = 0; t < 50; t++) positions[t] = next_of(p, find_sequence(p, 0)) + t;
    return pair_begin(p, 50, positions, ids);
}

static kvc_status begin_irregular(pair *p) {
    return pair_begin(p, 6, (int32_t[]){14, 20, 16, 15, 15, 14}, (int64_t[]){0, 0, 0, 0, 1, 1});
}

static kvc_status begin_few(pair *p) {
    return pair_begin(p, 5, (int32_t[]){40, 41, 42, 43, 44}, (int64_t[]){0, 0, 0, 0, 0});
}

static kvc_status fork_new(pair *p) { return pair_fork(p, 0, 8); }

static kvc_status fork_over(pair *p) { return pair_fork(p, 1, 0); }

static kvc_status copy_prefix(pair *p) { return pair_copy_prefix(p, 1, 8, 8); }

static kvc_status copy_nothing(pair *p) { return pair_copy_prefix(p, 1, 0, 0); }

static kvc_status share_new(pair *p) { return pair_share(p, 1, 8, 2, 5); }

static kvc_status share_all(pair *p) { return pair_share(p, 0, 8, 0, KVC_END); }

/* Every other row of sequence 1 is left out, as sequence 0 has it; its list must be lengthened. */
static kvc_status share_between(pair *p) { return pair_share(p, 1, 0, 0, KVC_END); }

static kvc_status share_nothing(pair *p) { return pair_share(p, 1, 8, 500, 600); }

static kvc_status remove_middle(pair *p) { return pair_remove(p, 0, 3, 18, 0); }

static kvc_status remove_and_shift(pair *p) { return pair_remove(p, 0, 3, 8, 1); }

static kvc_status shift_some(pair *p) { return pair_shift(p, 0, 5, 19, 7); }

static kvc_status divide_all(pair *p) { return pair_divide(p, 0, 2, KVC_END, 2); }

static kvc_status inject_shared(pair *p) { return pair_inject(p, 1, 0, 0, 18); }

static kvc_status inject_deltas(pair *p) { return pair_inject(p, 2, 2, 0, 60); }

static kvc_status inject_all(pair *p) { return pair_inject_rows(p, 0, 0, 0, 9, 0); }

static kvc_status hold_slots(pair *p) {
    kvc_span span;
    kvc_hold *hold = NULL;
    kvc_status status = agree(p, "slots", kvc_slots(p->batch, 0, 1, &span, sizeof span, &hold), KVC_OK);
    CHECK(!hold == (status != KVC_OK));
    kvc_hold_free(hold);
    return status;
}

static kvc_status put_cross_again(pair *p) { return pair_put_cross(p, 3, 0, 6); }

static kvc_status put_cross_first(pair *p) { return pair_put_cross(p, 3, 1, 2); }

static kvc_status extract(pair *p) {
    float k[30 * 6];
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .k_head_stride = 30 * 12, .k_row_stride = 12};
    return agree(p, "extract", kvc_extract(p->cache, 1, 0, 0, 30, &out), KVC_OK);
}

static kvc_status dense(pair *p) {
    static float k[2 * 200 * 3], mask[24 * 200];
    int64_t num = 0;
    CHECK(kvc_dense_rows(p->batch, 0, &num) == KVC_OK && num <= 200);
    const kvc_rows_out rows = {.struct_size = sizeof rows, .k = k, .k_head_stride = num * 12, .k_row_stride = 12};
    const kvc_dense_args args = {.struct_size = sizeof args,
                                 .rows = &rows,
                                 .mask = mask,
                                 .mask_token_stride = num * (int64_t)sizeof *mask,
                                 .num_rows = num};
    return agree(p, "dense", kvc_dense(p->batch, 0, &args), KVC_OK);
}

static kvc_status truncate_one(pair *p) { return pair_truncate(p, 0, 21); }

static kvc_status hold_spans(pair *p) {
    static view v;
    kvc_status status = view_new(&v, p, 0, 0);
    view_free(&v, p);
    return status;
}

static kvc_status gather(pair *p) {
    float k[5 * 6];
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .k_head_stride = 5 * 12, .k_row_stride = 12};
    return agree(p, "gather", kvc_gather(p->cache, 0, 0, 3, 5, &out), KVC_OK);
}

/* All that the batch shows of a sequence, held; and copied, keys rotated. */
static kvc_status hold_batch_spans(pair *p) {
    kvc_span spans[200];
    kvc_hold *hold = NULL;
    int64_t num;
    kvc_status status =
        agree(p, "batch_spans", kvc_batch_spans(p->batch, 1, 0, spans, sizeof *spans, 200, &num, &hold), KVC_OK);
    CHECK(!hold == (status != KVC_OK));
    kvc_hold_free(hold);
    return status;
}

static kvc_status gather_batch(pair *p) {
    static float k[200 * 6];
    int64_t num = 0;
    kvc_rows_out out = {.struct_size = sizeof out, .num_stored = &num, .batch = p->batch};
    kvc_status status = agree(p, "gather", kvc_gather(p->cache, 1, 0, 0, 0, &out), KVC_OK);
    if (status != KVC_OK) return status;
    CHECK(num > 12 && num <= 200);
    out.k = k, out.k_head_stride = num * 12, out.k_row_stride = 12;
    return agree(p, "gather", kvc_gather(p->cache, 1, 0, 0, num, &out), KVC_OK);
}

static kvc_status plan(pair *p) {
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 4, .num_threads = 3};
    kvc_plan *made = NULL;
    kvc_status status = agree(p, "plan_new", kvc_plan_new(p->batch, &args, &made), KVC_OK);
    CHECK(!made == (status != KVC_OK));
    kvc_plan_free(made);
    return status;
}

static kvc_status attend(pair *p) {
    static const float q[24 * 4 * 3];
    static float out[24 * 4 * 5];
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 4};
    const kvc_attend_args args = {.struct_size = sizeof args,
                                  .q = q,
                                  .out = out,
                                  .q_token_stride = 48,
                                  .q_head_stride = 12,
                                  .out_token_stride = 80,
                                  .out_head_stride = 20};
    return agree(p, "attend", kvc_attend(p->batch, &plan_args, &args), KVC_OK);
}

static kvc_status restore_new(pair *p) { return pair_restore(p, 1, 77); }

static kvc_status restore_over(pair *p) { return pair_restore(p, 1, 0); }

/* ---- what takes no memory, so that it cannot fail ---------------------------------------------------------------- */

static void test_needs_no_memory(void) {
    static pair p;
    int64_t num_blocks, num_runs;
    memory_init(&heap);
    p = (pair){.memory = &heap};
    prepare_four(&p);
    CHECK(begin_old_and_new(&p) == KVC_OK);
    memory_fail_after(&heap, 0);
    CHECK(kvc_blocks(p.cache, 0, NULL, sizeof(kvc_block_info), 0, &num_blocks, NULL, sizeof(kvc_run_info), 0,
                     &num_runs) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK);
    pair_check(&p);
    memory_fail_after(&heap, -1);
    CHECK(pair_begin(&p, 1, (int32_t[]){23}, (int64_t[]){0}) == KVC_OK);
    memory_fail_after(&heap, 0);
    pair_abort(&p);
    pair_check(&p);
    CHECK(pair_clear_sequence(&p, 3) == KVC_OK);
    pair_check(&p);
    CHECK(pair_keep(&p, 0) == KVC_OK);
    pair_check(&p);
    CHECK(pair_clear(&p) == KVC_OK);
    pair_check(&p);
    CHECK(heap.failed == 0);
    memory_fail_after(&heap, -1);
    close_pair(&p);
}

/* Commits what the batch of `prepare` has, all of it or, with kept, some, while every allocation fails. */
static void commit_without_memory(void (*prepare)(pair *p), const int32_t *kept, int32_t num_kept) {
    static pair p;
    memory_init(&heap);
    p = (pair){.memory = &heap};
    prepare(&p);
    memory_fail_after(&heap, 0);
    pair_check(&p);
    CHECK(pair_commit_kept(&p, kept, num_kept) == KVC_OK);
    CHECKF(heap.failed == 0, "a commit asked for memory %d times", heap.failed);
    pair_check(&p);
    memory_fail_after(&heap, -1);
    close_pair(&p);
}

/* A batch of several sequences, some new, with repeated positions, as trees have (and now and then with parents). */
static void prepare_repeated(pair *p) {
    prepare_four(p);
    CHECK(pair_begin(p, 10, (int32_t[]){21, 22, 6, 22, 23, 7, 0, 1, 1, 0}, (int64_t[]){0, 0, 1, 0, 0, 1, 9, 9, 9, 8}) ==
          KVC_OK);
    CHECK(pair_put_cross(p, 3, 9, 3) == KVC_OK);
    CHECK(pair_put_cross(p, 3, 1, 6) == KVC_OK);
    pair_put_all(p);
}

/* A batch whose first slots lie behind those of a fork, in blocks that others fill, at positions that jump. */
static void prepare_scattered(pair *p) {
    int32_t positions[40];
    int64_t ids[40];
    prepare_irregular(p);
    for (int t = 0; t < 40; t++) {
        ids[t] = t % 3 == 2;
        positions[t] = 14 + t + 5 * (t % 7 == 0);
    }
    CHECK(pair_begin(p, 40, positions, ids) == KVC_OK);
    pair_put_all(p);
}

/* A batch that restores the layers of one group, in three sequences. */
static kvc_status begin_restoring(pair *p) {
    static const uint8_t replaced[] = {0, 0, 1, 1};
    int32_t positions[30];
    int64_t ids[30];
    for (int t = 0; t < 30; t++) {
        ids[t] = (int64_t[]){0, 3, 9}[t % 3];
        positions[t] = 60 - 2 * t + t % 5;
    }
    return pair_begin_with(p, 30, positions, ids, replaced);
}

static void prepare_restoring(pair *p) {
    prepare_four(p);
    CHECK(begin_restoring(p) == KVC_OK);
    CHECK(pair_put_cross(p, 3, 9, 2) == KVC_OK);
    pair_put_all(p);
}

/* Whether all tokens are kept, every other one, or any, a commit takes no memory. */
static void test_commit_needs_no_memory(void) {
    static void (*const prepares[])(pair *p) = {prepare_cross,    prepare_batch,     prepare_long_batch,
                                                prepare_repeated, prepare_scattered, prepare_restoring};
    static const int sizes[] = {3, 24, 60, 10, 40, 30};
    int32_t kept[60], n;
    for (int i = 0; i < 6; i++) {
        commit_without_memory(prepares[i], NULL, 0);
        for (int step = 1; step < 4; step++) {
            for (n = 0; n * step < sizes[i]; n++) kept[n] = n * step;
            commit_without_memory(prepares[i], kept, n);
        }
        for (int round = 0; round < 20; round++) {
            n = 0;
            for (int32_t t = 0; t < sizes[i]; t++)
                if (random_int(0, 2)) kept[n++] = t;
            commit_without_memory(prepares[i], kept, n);
        }
    }
}

/* Sequences that are not stored: new ones, and one that held rows, which a commit drops. */
static void test_unstored_commit_needs_no_memory(void) {
    static pair p;
    memory_init(&heap);
    p = (pair){.memory = &heap};
    prepare_four(&p);
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 4,
                                 .seq_ids = (int64_t[]){0, 9, 1, 9},
                                 .unstored = (uint8_t[]){1, 1, 0, 1}};
    const float row[6 * 8] = {0};
    CHECK(kvc_begin_with(p.cache, &args, &p.batch) == KVC_OK);
    for (int l = 0; l < 4; l++) {
        const kvc_put_args put = {
            .struct_size = sizeof put, .num_tokens = l == 3 ? 6 : 4, .k = row, .v = row, .seq_id = 9};
        CHECKF(kvc_put(p.batch, l, &put) == KVC_OK, "%s", kvc_last_error());
    }
    memory_fail_after(&heap, 0);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_commit(p.batch) == KVC_OK && heap.failed == 0);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_seq_len(p.cache, 0, 0) == 0 && kvc_seq_len(p.cache, 9, 3) == 0 && kvc_seq_len(p.cache, 1, 0) == 7);
    memory_fail_after(&heap, -1);
    pair_free(&p);
    CHECK(heap.num == 0);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static void test_cache_new(void) {
    kvc_config config = {.struct_size = sizeof config,
                         .layers = &(kvc_layer){.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                         .layer_size = sizeof(kvc_layer),
                         .num_layers = 1,
                         .allocator = &heap.allocator};
    kvc_cache *cache = NULL;
    int fail_after = 0;
    memory_init(&heap);
    for (; memory_fail_after(&heap, fail_after), kvc_cache_new(&config, &cache) != KVC_OK; fail_after++) {
        CHECK(!cache && heap.failed == 1 && heap.num == 0 && strstr(kvc_last_error(), "out of memory"));
        CHECK(fail_after < 10);
    }
    CHECK(fail_after > 0 && heap.failed == 0);
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0);
}

static void test_random(int block_size, int num_steps) {
    static pair p;
    static view v;
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = block_size};
    random_pair(&p);
    for (int i = 0; i < num_steps; i++) {
        memory_fail_after(&heap, random_int(0, 3) ? random_int(0, 12) : -1);
        random_step(&p, &v);
        memory_fail_after(&heap, -1);
        pair_check(&p);
    }
    view_free(&v, &p);
    close_pair(&p);
}

int main(void) {
    static const scenario scenarios[] = {
        {"begin, first sequences", .prepare = prepare_empty, .run = begin_new},
        {"begin, more sequences", .prepare = prepare_four, .run = begin_new},
        {"begin, old sequences", .prepare = prepare_compacted, .run = begin_old},
        {"begin, old and new sequences", .prepare = prepare_four, .run = begin_old_and_new},
        {"begin, first prefill", .prepare = prepare_empty, .run = prefill},
        {"begin, prefill", .prepare = prepare_four, .run = prefill},
        {"begin, irregular positions", .prepare = prepare_irregular, .run = begin_irregular},
        {"begin, compacting", .prepare = prepare_holes, .run = prefill},
        {"begin, compacting for max_bytes", .prepare = prepare_few_bytes, .run = begin_few},
        {"begin, restoring", .prepare = prepare_four, .run = begin_restoring},
        {"begin, restoring many runs", .prepare = prepare_holes, .run = begin_restoring},
        {"fork", .prepare = prepare_four, .run = fork_new},
        {"fork over a sequence", .prepare = prepare_four, .run = fork_over},
        {"fork with holes", .prepare = prepare_holes, .run = fork_new},
        {"copy_prefix", .prepare = prepare_fed, .run = copy_prefix},
        {"copy_prefix of nothing", .prepare = prepare_four, .run = copy_nothing},
        {"share", .prepare = prepare_four, .run = share_new},
        {"share all", .prepare = prepare_holes, .run = share_all},
        {"share with cross-attention", .prepare = prepare_encoded, .run = share_all},
        {"share between others", .prepare = prepare_between, .run = share_between},
        {"share out of order", .prepare = prepare_out_of_order, .run = share_between},
        {"share nothing", .prepare = prepare_four, .run = share_nothing},
        {"remove", .prepare = prepare_runs, .run = remove_middle},
        {"truncate", .prepare = prepare_runs, .run = truncate_one},
        {"compact", .prepare = prepare_holes, .run = pair_compact},
        {"compact many runs", .prepare = prepare_runs, .run = pair_compact},
        {"compact short sequences", .prepare = prepare_four, .run = pair_compact},
        {"spans", .prepare = prepare_holes, .run = hold_spans},
        {"gather", .prepare = prepare_holes, .run = gather},
        {"spans of a batch", .prepare = prepare_deltas, .run = hold_batch_spans},
        {"gather of a batch", .prepare = prepare_deltas, .run = gather_batch},
        {"plan_new", .prepare = prepare_batch, .run = plan},
        {"attend", .prepare = prepare_batch, .run = attend},
        {"compact with deltas", .prepare = prepare_disputed, .run = pair_compact},
        {"inject", .prepare = prepare_disputed, .run = inject_shared},
        {"inject, with no position missing", .prepare = prepare_one, .run = inject_all},
        {"inject keys that are off", .prepare = prepare_disputed, .run = inject_deltas},
        {"reserve", .prepare = prepare_four, .run = reserve},
        {"put, cross-attention", .prepare = prepare_cross, .run = put_cross_again},
        {"put, cross-attention of another sequence", .prepare = prepare_cross, .run = put_cross_first},
        {"extract keys that are off", .prepare = prepare_disputed, .run = extract},
        {"dense", .prepare = prepare_deltas, .run = dense},
        {"slots that are held", .prepare = prepare_open, .run = hold_slots},
        {"plan_new with deltas", .prepare = prepare_deltas, .run = plan},
        {"attend with deltas", .prepare = prepare_deltas, .run = attend},
        {"remove and shift", .prepare = prepare_holes, .run = remove_and_shift},
        {"remove and shift what is shared", .prepare = prepare_disputed, .run = remove_and_shift},
        {"shift", .prepare = prepare_holes, .run = shift_some},
        {"shift what is shared", .prepare = prepare_four, .run = shift_some},
        {"divide", .prepare = prepare_runs, .run = divide_all},
        {"divide what is shared", .prepare = prepare_disputed, .run = divide_all},
        {"settle", .prepare = prepare_disputed, .run = pair_settle},
        {"save", .prepare = prepare_disputed, .run = pair_save},
        {"save with cross-attention", .prepare = prepare_encoded, .run = pair_save},
        {"restore", .prepare = prepare_disputed, .run = restore_new},
        {"restore over a sequence", .prepare = prepare_encoded, .run = restore_over},
        {"clone", .prepare = prepare_disputed, .run = pair_clone},
        {"clone with cross-attention", .prepare = prepare_encoded, .run = pair_clone},
    };
    static const int block_sizes[] = {1, 3, 16, 64};
    test_cache_new();
    test_needs_no_memory();
    test_commit_needs_no_memory();
    test_unstored_commit_needs_no_memory();
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) run_scenario(&scenarios[i]);
    for (int i = 0; i < 48; i++) test_random(block_sizes[i % 4], 250);
    return test_result();
}
