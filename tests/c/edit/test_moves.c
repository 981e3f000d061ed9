/* Tokens that move, rows that are replaced, kept tokens of a batch: what is refused, and in
 * which words.  tests/world compares what such calls do. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <math.h>
#include <stdlib.h>

#include "support/pairs.h"

static const double angles[] = {1, -0.31, 0.017}, other_angles[] = {0.5, 2, 1};

static kvc_rope rope_of(int interleaved, int first_dim, int num_freqs) {
    return (kvc_rope){.kind = KVC_ROPE_FREQUENCIES,
                      .interleaved = interleaved,
                      .first_dim = first_dim,
                      .num_freqs = num_freqs,
                      .inv_freq = angles};
}

static int32_t move_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                         int32_t delta) {
    (void)user, (void)layer;
    for (int64_t i = 0; i < num_kv_heads * num_rows * k_dim; i++) keys[i] += (float)delta;
    return 0;
}

static const kvc_rope no_rope = {.kind = KVC_ROPE_NONE}, by_function = {.kind = KVC_ROPE_FUNCTION, .shift = move_keys};

/* A pair of one layer with this rope. */
static pair *roped_pair(kvc_rope rope, kvc_policy policy, int block_size) {
    static pair p;
    const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 6, .v_dim = 2, .policy = policy, .rope = rope};
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    return &p;
}

/* A pair of three groups: two with deltas, whose layers differ in rope and type in one group; a function moves the
 * keys of the third. */
static pair *grouped_pair(int block_size) {
    static pair p;
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 6, .v_dim = 5, .v_type = KVC_F16, .rope = rope_of(0, 1, 2)},
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 1, .k_type = KVC_BF16, .rope = rope_of(1, 0, 2)},
        {.num_kv_heads = 3, .k_dim = 1, .v_dim = 4, .k_type = KVC_F16, .rope = no_rope},
        {.num_kv_heads = 1,
         .k_dim = 8,
         .v_dim = 3,
         .k_type = KVC_F16,
         .v_type = KVC_F16,
         .value_in_key = 1,
         .policy = sliding_policy(30, 2, 0),
         .rope = rope_of(0, 3, 2)},
        {.num_kv_heads = 2, .k_dim = 2, .v_dim = 2, .policy = chunked_policy(16, 20), .rope = by_function},
    };
    p = (pair){.config = {.block_size = block_size, .num_threads = 1}};
    pair_new(&p, 5, layers);
    return &p;
}

/* ---- shifts and divisions ---------------------------------------------------------------------------------------- */

static void test_largest_position(void) {
    pair *p = roped_pair(rope_of(0, 0, 1), full_policy, 4);
    pair_feed(p, 0, 0, 6);
    CHECK_FAILS(kvc_shift(p->cache, 0, 0, KVC_END, INT32_MAX - 5), KVC_ERR_INVALID, "delta is 2147483642",
                "position 5");
    CHECK_FAILS(kvc_shift(p->cache, 0, 2, 4, INT32_MAX), KVC_ERR_INVALID, "delta is 2147483647", "position 3");
    kvc_fork(p->cache, 0, 1);
    CHECK(kvc_shift(p->cache, 1, 0, 1, 6) == KVC_OK); /* the first row has the last position */
    CHECK_FAILS(kvc_shift(p->cache, 1, 0, KVC_END, INT32_MAX - 6), KVC_ERR_INVALID, "delta is 2147483641",
                "position 6");
    pair_check(p);
    CHECK(kvc_shift(p->cache, 0, 6, KVC_END, INT32_MAX) == KVC_OK); /* there is nothing */
    CHECK(kvc_shift(p->cache, 0, 3, KVC_END, INT32_MAX - 6) == KVC_OK);
    pair_check(p);
    CHECK(kvc_next_position(p->cache, 0) == INT32_MAX);
    CHECK(kvc_divide(p->cache, 0, 0, KVC_END, INT32_MAX) == KVC_OK);
    pair_check(p);
    CHECK(last_position(p->cache, 0) == 0);
    pair_free(p);
}

/* ---- replacing rows, and reading them ---------------------------------------------------------------------------- */

/* Positions without a row are named, and nothing is replaced. */
static void test_inject_missing(void) {
    pair *p = grouped_pair(4);
    const int64_t ids[9] = {0};
    pair_pass(p, 9, (int32_t[]){0, 1, 2, 5, 6, 7, 9, 9, 11}, ids);
    kvc_fork(p->cache, 0, 1);
#define MISSING(id, begin, end, count, names) \
    CHECK_FAILS(pair_inject(p, id, 0, begin, end, 0), KVC_ERR_INDEX, count " positions in layer 0", ": " names ";")
    MISSING(0, 0, 12, "4 of 12", "3 to 4, 8, 10");
    MISSING(0, 2, 4, "1 of 2", "3");
    MISSING(0, 3, 5, "2 of 2", "3 to 4");
    MISSING(0, 12, 20, "8 of 8", "12 to 19");
    MISSING(0, 0, 30, "22 of 30", "3 to 4, 8, 10, 12 to 29");
    MISSING(9, 0, 3, "3 of 3", "0 to 2");   /* an empty sequence */
    kvc_shift(p->cache, 0, 2, KVC_END, 20); /* now 0, 1, 22, 25, ... */
    kvc_shift(p->cache, 0, 0, 1, 4);
    kvc_shift(p->cache, 0, 29, 30, 2);
    MISSING(0, 0, 34, "27 of 34", "0, 2 to 3, 5 to 21, 23 to 24, ...");
#undef MISSING
    pair_check(p);
    CHECK(pair_inject(p, 0, 0, 25, 28, 0) == KVC_OK && pair_inject(p, 1, 0, 9, 10, 0) == KVC_OK);
    CHECK(pair_inject(p, 1, 0, 3, 3, 0) == KVC_OK && pair_inject(p, 9, 0, 3, 3, 0) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- a copy of the cache ----------------------------------------------------------------------------------------- */

static void test_bad_clone(void) {
    pair *p = grouped_pair(4);
    kvc_cache *clone = NULL;
    CHECK_FAILS(kvc_cache_clone(p->cache, NULL), KVC_ERR_INVALID, "clone", "NULL");
    setenv("KVCACHE_ISA", "abacus", 1);
    CHECK_FAILS(kvc_cache_clone(p->cache, &clone), KVC_ERR_UNSUPPORTED, "KVCACHE_ISA", "abacus");
    unsetenv("KVCACHE_ISA");
    CHECK(!clone);
    pair_free(p);
}

/* ---- tokens that are kept ---------------------------------------------------------------------------------------- */

/* Blocks of a window that a commit frees go back to the system once a batch takes fewer; so do blocks of tokens that
 * the commit does not keep. */
static void test_commit_kept_of_a_window(void) {
    enum { MOST = 400, WINDOW = 8, SIZE = 4 };
    const kvc_put_args put = zero_rows(0, 0);
    int32_t kept[MOST];
    for (int32_t i = 0; i < MOST; i++) kept[i] = i;
    for (int32_t num = 0; num < MOST; num += 57) {
        pair *p = roped_pair(no_rope, sliding_policy(WINDOW, 0, 0), SIZE);
        pair_feed(p, 0, 0, 20);
        kvc_batch *batch;
        CHECK(kvc_begin(p->cache, MOST, NULL, NULL, NULL, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
        CHECK(kvc_commit_kept(batch, kept, num) == KVC_OK);
        CHECK(kvc_begin(p->cache, 1, NULL, NULL, NULL, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
        CHECK(kvc_commit(batch) == KVC_OK);
        const kvc_stats stats = stats_of(p);
        const int64_t slots = (stats.blocks_in_use + stats.blocks_free) * SIZE;
        CHECKF(slots <= WINDOW + 2 * SIZE, "%lld slots with %d kept", (long long)slots, num);
        CHECK(kvc_cache_free(p->cache) == KVC_OK);
    }
}

static void test_bad_commit_kept(void) {
    pair *p = grouped_pair(4);
    CHECK(pair_begin(p, 3, (int32_t[]){0, 1, 2}, (int64_t[]){0, 0, 0}) == KVC_OK);
    CHECK_FAILS(kvc_commit_kept(p->batch, NULL, 1), KVC_ERR_INVALID, "num_kept", "kept is NULL");
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){0}, -1), KVC_ERR_INVALID, "num_kept", "is -1");
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){1, 3}, 2), KVC_ERR_INDEX, "kept[1]", "is 3:");
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){-1}, 1), KVC_ERR_INDEX, "kept[0]", "is -1:");
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){2, 0, 2}, 3), KVC_ERR_INVALID, "kept[2]", "is 2");
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){0, 1, 2, 0}, 4), KVC_ERR_INVALID, "kept[3]", "is 0");
    for (int l = 0; l < 5; l++) pair_put(p, l, 0, 2);
    CHECK_FAILS(kvc_commit_kept(p->batch, (int32_t[]){1, 2}, 2), KVC_ERR_INVALID, "token 2", "layer 0");
    pair_check(p);
    CHECK(kvc_commit_kept(p->batch, (int32_t[]){1}, 1) == KVC_OK);
    pair_check(p);
    CHECK(pair_begin(p, 1, (int32_t[]){2}, (int64_t[]){0}) == KVC_OK);
    CHECK(kvc_commit_kept(p->batch, NULL, 0) == KVC_OK); /* none */
    pair_check(p);
    pair_free(p);
}

/* ---- reserving --------------------------------------------------------------------------------------------------- */

static void test_reserve_refused(void) {
    static pair p;
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 2},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2, .policy = sliding_policy(9, 0, 0)}};
    p = (pair){.config = {.block_size = 4, .num_threads = 1, .capacity = 50, .max_bytes = 15000}};
    pair_new(&p, 2, layers);
    pair_feed(&p, 0, 0, 20);
    int64_t bytes = kvc_nbytes(p.cache);
    CHECK_FAILS(kvc_reserve(p.cache, 0, 0), KVC_ERR_INVALID, "num_tokens", "is 0:");
    CHECK_FAILS(kvc_reserve(p.cache, 0, -4), KVC_ERR_INVALID, "num_tokens", "is -4:");
    CHECK_FAILS(kvc_reserve(p.cache, 0, 31), KVC_ERR_FULL, "31 more tokens", "20 of capacity 50");
    CHECK_FAILS(kvc_reserve(p.cache, 0, INT64_MAX), KVC_ERR_FULL, "tokens", "capacity is 50"); /* takes no memory */
    CHECK_FAILS(kvc_reserve(p.cache, 0, 30), KVC_ERR_FULL, "30 more tokens", "max_bytes 15000");
    pair_check(&p);
    CHECK(kvc_nbytes(p.cache) == bytes);
    CHECK(kvc_reserve(p.cache, 0, 1) == KVC_OK);
    pair_check(&p);
    pair_free(&p);

    p = (pair){.config = {.block_size = 4, .max_seq_len = 1000, .max_bytes = 1 << 24}};
    pair_new(&p, 1, layers);
    CHECK_FAILS(kvc_reserve(p.cache, 0, 2000000000), KVC_ERR_FULL, "max_seq_len", "1000");
    CHECK(kvc_reserve(p.cache, 0, 250) == KVC_OK && kvc_reserve(p.cache, 0, 1000) == KVC_OK);
    pair_free(&p);

    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 1, layers);
    CHECK(kvc_reserve(p.cache, 0, INT64_MAX) == KVC_ERR_NOMEM);
    pair_check(&p);
    pair_free(&p);
}

/* ---- capacity ---------------------------------------------------------------------------------------------------- */

/* Edits that copy shared rows look at capacity as batches do: what is live once they are done. */
static void test_capacity(void) {
    static pair p;
    for (int i = 0; i < 2; i++) {
        const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2, .rope = i ? by_function : rope_of(0, 0, 1)};
        p = (pair){.config = {.block_size = 4, .num_threads = 1, .capacity = 40}};
        pair_new(&p, 1, &layer);
        pair_feed(&p, 0, 0, 36);
        kvc_fork(p.cache, 0, 1);
        kvc_stats before = stats_of(&p);
        CHECK_FAILS(pair_inject(&p, 1, 0, 0, 5, 1), KVC_ERR_FULL, "copying", "41 slots: capacity is 40");
        CHECK_FAILS(kvc_divide(p.cache, 1, 0, 10, 2), KVC_ERR_FULL, "rewriting", "46 slots: capacity is 40");
        if (i) {
            CHECK_FAILS(kvc_shift(p.cache, 1, 0, KVC_END, 3), KVC_ERR_FULL, "rewriting", "72 slots: capacity is 40");
            CHECK_FAILS(kvc_remove(p.cache, 1, 0, 30, 1), KVC_ERR_FULL, "rewriting", "42 slots: capacity is 40");
        } else {
            CHECK(kvc_shift(p.cache, 1, 20, KVC_END, 3) == KVC_OK);
        }
        kvc_stats after = stats_of(&p);
        CHECK(!memcmp(&before, &after, sizeof before));
        pair_check(&p);
        CHECK(pair_inject(&p, 1, 0, 0, 4, 1) == KVC_OK && kvc_utilization(p.cache) == 1);
        kvc_clear_sequence(p.cache, 1);
        CHECK(kvc_divide(p.cache, 0, 0, 10, 2) == KVC_OK && pair_feed(&p, 0, 36, 40) == KVC_OK); /* their own slots */
        CHECK(kvc_divide(p.cache, 0, 0, 10, 2) == KVC_OK && kvc_utilization(p.cache) == 1);
        if (i) CHECK(kvc_shift(p.cache, 0, 0, KVC_END, 3) == KVC_OK && kvc_remove(p.cache, 0, 0, 20, 1) == KVC_OK);
        pair_check(&p);
        pair_free(&p);
    }
}

/* ---- bad arguments ----------------------------------------------------------------------------------------------- */

static void test_bad_moves(void) {
    pair *p = grouped_pair(4);
    pair_feed(p, 3, 0, 9);
    CHECK_FAILS(kvc_shift(p->cache, 3, -1, 4, 1), KVC_ERR_INVALID, "begin", "is -1:");
    CHECK_FAILS(kvc_shift(p->cache, 3, 5, 4, 1), KVC_ERR_INVALID, "end", "is 4:");
    CHECK_FAILS(kvc_shift(p->cache, 3, 5, -4, 1), KVC_ERR_INVALID, "end", "is -4:");
    CHECK_FAILS(kvc_divide(p->cache, 3, -7, 4, 1), KVC_ERR_INVALID, "begin", "is -7:");
    CHECK_FAILS(kvc_divide(p->cache, 3, 7, 4, 1), KVC_ERR_INVALID, "end", "is 4:");
    CHECK_FAILS(kvc_divide(p->cache, 3, 0, 4, 0), KVC_ERR_INVALID, "divisor", "is 0:");
    CHECK_FAILS(kvc_divide(p->cache, 3, 0, 4, -2), KVC_ERR_INVALID, "divisor", "is -2:");
    CHECK_FAILS(kvc_remove(p->cache, 3, -3, 2, 1), KVC_ERR_INVALID, "begin", "is -3:");
    CHECK_FAILS(kvc_remove(p->cache, 3, 3, 2, 1), KVC_ERR_INVALID, "end", "is 2:");
    pair_check(p);
    pair_free(p);
}

/* Layers: 0 with tokens, 1 shares them, 2 has none, 3 is cross-attention, 4 keeps values in the keys. */
static pair *odd_pair(void) {
    static pair p;
    const kvc_layer plain = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .rope = rope_of(0, 0, 1)};
    kvc_layer layers[] = {plain, plain, plain, plain, plain};
    layers[1].share = 1;
    layers[2].policy = (kvc_policy){.kind = KVC_NONE};
    layers[3].policy = (kvc_policy){.kind = KVC_CROSS, .max_len = 3};
    layers[4].value_in_key = 1;
    layers[4].v_dim = 2;
    layers[4].rope.first_dim = 2;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 5, layers);
    return &p;
}

static void test_bad_inject(void) {
    pair *p = odd_pair();
    const float rows[16] = {0};
    const kvc_rows_in good = {.struct_size = sizeof good, .k = rows, .v = rows};
    pair_feed(p, 0, 0, 5);
#define BAD(status, layer, name, value, ...)                                         \
    do {                                                                             \
        kvc_rows_in in = good;                                                       \
        __VA_ARGS__;                                                                 \
        CHECK_FAILS(kvc_inject(p->cache, 0, layer, 0, 2, &in), status, name, value); \
    } while (0)
    BAD(KVC_ERR_INDEX, -1, "layer", "is -1:", (void)in);
    BAD(KVC_ERR_INDEX, 5, "layer", "is 5:", (void)in);
    BAD(KVC_ERR_INVALID, 1, "layer 1", "layer 0", (void)in);
    BAD(KVC_ERR_INVALID, 2, "layer 2", "no attention", (void)in);
    BAD(KVC_ERR_UNSUPPORTED, 3, "layer 3", "cross-attention", (void)in);
    BAD(KVC_ERR_INVALID, 0, "in", "given as 7", in.struct_size = 7);
    BAD(KVC_ERR_INVALID, 0, "k", "NULL", in.k = NULL);
    BAD(KVC_ERR_INVALID, 0, "v", "NULL", in.v = NULL);
    BAD(KVC_ERR_INVALID, 4, "v is given", "keys", (void)in);
    BAD(KVC_ERR_INVALID, 0, "k_type", "is 3:", in.k_type = KVC_Q8_0);
    BAD(KVC_ERR_INVALID, 0, "v_type", "is -1:", in.v_type = -1);
    BAD(KVC_ERR_INVALID, 0, "k: k_row_stride", "is 5 bytes:", in.k_row_stride = 5);
    BAD(KVC_ERR_INVALID, 0, "k: k_head_stride", "is 6 bytes:", in.k_head_stride = 6);
    BAD(KVC_ERR_INVALID, 0, "v: v_row_stride", "is 1 bytes:", in.v_row_stride = 1, in.v_type = KVC_F16);
#undef BAD
    CHECK_FAILS(kvc_inject(p->cache, 0, 0, 0, 2, NULL), KVC_ERR_INVALID, "in", "NULL");
    CHECK_FAILS(kvc_inject(p->cache, 0, 0, -1, 2, &good), KVC_ERR_INVALID, "begin", "is -1:");
    CHECK_FAILS(kvc_inject(p->cache, 0, 0, 3, 2, &good), KVC_ERR_INVALID, "end", "is 2:");
    pair_check(p);
    pair_free(p);
}

static void test_bad_extract(void) {
    pair *p = odd_pair();
    float k[16] = {5};
    const kvc_rows_out good = {.struct_size = sizeof good, .k = k};
    pair_feed(p, 0, 0, 5);
    kvc_rows_out out = good;
    CHECK_FAILS(kvc_extract(p->cache, 0, 5, 0, 1, &good), KVC_ERR_INDEX, "layer", "is 5:");
    CHECK_FAILS(kvc_extract(p->cache, 0, -1, 0, 1, &good), KVC_ERR_INDEX, "layer", "is -1:");
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, -1, 1, &good), KVC_ERR_INVALID, "begin", "is -1:");
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, 2, 1, &good), KVC_ERR_INVALID, "end", "is 1:");
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, 0, 1, NULL), KVC_ERR_INVALID, "out", "NULL");
    out.struct_size = 3;
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, 0, 1, &out), KVC_ERR_INVALID, "out", "given as 3");
    out = good;
    out.type = KVC_Q8_0;
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, 0, 1, &out), KVC_ERR_INVALID, "out_type", "is 3:");
    out = good;
    out.k_row_stride = 2;
    CHECK_FAILS(kvc_extract(p->cache, 0, 0, 0, 1, &out), KVC_ERR_INVALID, "out: k_row_stride", "is 2 bytes:");
    CHECK(k[0] == 5);
    CHECK(kvc_extract(p->cache, 0, 2, 0, 1, &good) == KVC_OK && k[0] == 0); /* layer 2 has no rows */
    pair_free(p);
}

/* Rows are refused in layers that have none of their own, and in groups that do not come out even. */
static void test_bad_puts(void) {
    pair *p = odd_pair();
    const float rows[64] = {0};
    const kvc_put_args good = {.struct_size = sizeof good, .k = rows, .v = rows};
    CHECK(pair_begin(p, 4, (int32_t[]){0, 1, 2, 0}, (int64_t[]){0, 0, 0, 1}) == KVC_OK);
#define BAD(status, layer, name, value, ...)                               \
    do {                                                                   \
        kvc_put_args args = good;                                          \
        __VA_ARGS__;                                                       \
        CHECK_FAILS(kvc_put(p->batch, layer, &args), status, name, value); \
    } while (0)
    BAD(KVC_ERR_INVALID, 1, "layer 1", "layer 0", (void)args);
    BAD(KVC_ERR_INVALID, 2, "layer 2", "no attention", (void)args);
    BAD(KVC_ERR_INVALID, 4, "v is given", "keys", (void)args);
    BAD(KVC_ERR_INVALID, 0, "tokens_per_sequence", "is 3:", args.tokens_per_sequence = 3);
    BAD(KVC_ERR_INVALID, 0, "tokens_per_sequence", "is 8:", args.tokens_per_sequence = 8);
    BAD(KVC_ERR_INVALID, 0, "tokens_per_sequence", "is -2:", args.tokens_per_sequence = -2);
    BAD(KVC_ERR_INVALID, 0, "k: k_batch_stride", "is 3 bytes:", args.tokens_per_sequence = 2, args.k_batch_stride = 3);
    BAD(KVC_ERR_INVALID, 0, "v: v_batch_stride", "is 2 bytes:", args.tokens_per_sequence = 2, args.v_batch_stride = 2);
    BAD(KVC_ERR_INVALID, 3, "num_tokens", "0", (void)args);
    BAD(KVC_ERR_INVALID, 3, "num_tokens", "-1", args.num_tokens = -1);
    BAD(KVC_ERR_INVALID, 3, "first is 1", "2", args.first = 1, args.num_tokens = 2);
    BAD(KVC_ERR_INVALID, 3, "seq_id", "is 2:", args.seq_id = 2, args.num_tokens = 2);
    BAD(KVC_ERR_FULL, 3, "4 rows", "max_len is 3", args.num_tokens = 4);
    BAD(KVC_ERR_INVALID, 3, "tokens_per_sequence", "is 2:", args.num_tokens = 3, args.tokens_per_sequence = 2);
    BAD(KVC_ERR_INVALID, 3, "v", "NULL", args.num_tokens = 3, args.v = NULL);
#undef BAD
    pair_check(p);
    pair_put_all(p);
    CHECK(pair_commit(p) == KVC_OK); /* cross-attention layers may stay without */
    pair_check(p);
    pair_free(p);
}

static void test_bad_slots(void) {
    pair *p = odd_pair();
    kvc_span span = {.num_rows = -7};
    CHECK(pair_begin(p, 3, (int32_t[]){0, 1, 2}, (int64_t[]){0, 0, 0}) == KVC_OK);
    CHECK_FAILS(kvc_slots(p->batch, -1, 0, &span, sizeof span, NULL), KVC_ERR_INDEX, "layer", "is -1:");
    CHECK_FAILS(kvc_slots(p->batch, 5, 0, &span, sizeof span, NULL), KVC_ERR_INDEX, "layer", "is 5:");
    CHECK_FAILS(kvc_slots(p->batch, 1, 0, &span, sizeof span, NULL), KVC_ERR_INVALID, "layer 1", "layer 0");
    CHECK_FAILS(kvc_slots(p->batch, 2, 0, &span, sizeof span, NULL), KVC_ERR_INVALID, "layer 2", "no attention");
    CHECK_FAILS(kvc_slots(p->batch, 3, 0, &span, sizeof span, NULL), KVC_ERR_UNSUPPORTED, "layer 3", "cross-attention");
    CHECK_FAILS(kvc_slots(p->batch, 0, -1, &span, sizeof span, NULL), KVC_ERR_INDEX, "first", "is -1:");
    CHECK_FAILS(kvc_slots(p->batch, 0, 3, &span, sizeof span, NULL), KVC_ERR_INDEX, "first", "is 3:");
    CHECK_FAILS(kvc_slots(p->batch, 0, 0, &span, 8, NULL), KVC_ERR_INVALID, "span", "as 8:");
    CHECK_FAILS(kvc_slots(p->batch, 0, 0, NULL, sizeof span, NULL), KVC_ERR_INVALID, "span", "NULL");
    CHECK_FAILS(kvc_written(p->batch, 1, 0, 1), KVC_ERR_INVALID, "layer 1", "layer 0");
    CHECK_FAILS(kvc_written(p->batch, 3, 0, 1), KVC_ERR_UNSUPPORTED, "layer 3", "cross-attention");
    CHECK_FAILS(kvc_written(p->batch, 0, 1, 3), KVC_ERR_INDEX, "num_tokens", "is 3:");
    CHECK_FAILS(kvc_written(p->batch, 0, 4, 1), KVC_ERR_INDEX, "first", "is 4:");
    CHECK(span.num_rows == -7);
    pair_put(p, 0, 1, 1);
    CHECK_FAILS(kvc_slots(p->batch, 0, 1, &span, sizeof span, NULL), KVC_ERR_INVALID, "token 1", "layer 0 before");
    CHECK_FAILS(kvc_written(p->batch, 0, 0, 3), KVC_ERR_INVALID, "token 1", "layer 0 before");
    CHECK(kvc_slots(p->batch, 0, 0, &span, sizeof span, NULL) == KVC_OK && span.num_rows == 1); /* up to that */
    CHECK_FAILS(kvc_commit(p->batch), KVC_ERR_INVALID, "token 0", "layer 0");
    kvc_abort(p->batch);
    pair_check(p);
    pair_free(p);
}

/* Slots that are held can be written to after the batch has ended, and are nobody else's. */
static void test_held_slots(void) {
    pair *p = roped_pair(no_rope, full_policy, 4);
    kvc_hold *holds[2] = {NULL, NULL};
    kvc_span spans[2];
    pair_feed(p, 0, 0, 3);
    CHECK(pair_begin(p, 3, (int32_t[]){3, 4, 5}, (int64_t[]){0, 0, 0}) == KVC_OK);
    for (int i = 0; i < 2; i++)
        CHECK(kvc_slots(p->batch, 0, i, &spans[i], sizeof *spans, &holds[i]) == KVC_OK && holds[i]);
    CHECK(spans[0].num_rows == 1 && spans[1].num_rows == 2);
    kvc_abort(p->batch);
    pair_check(p);
    CHECK_FAILS(kvc_compact(p->cache), KVC_ERR_HELD, "compact", "views of the rows are held (2)");
    pair_feed(p, 0, 3, 9);
    pair_feed(p, 1, 0, 9);
    kvc_hold_free(holds[0]);
    kvc_hold_free(holds[1]);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

static void test_bad_parents(void) {
    pair *p = odd_pair();
    kvc_batch *batch = NULL;
    const int32_t positions[] = {0, 1, 2};
    const int64_t ids[] = {0, 1, 0};
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, NULL, (int32_t[]){0, 0, 1}, &batch), KVC_ERR_INVALID, "parents[0]",
                "is 0:");
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, NULL, (int32_t[]){-1, 2, 1}, &batch), KVC_ERR_INVALID, "parents[1]",
                "is 2:");
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, NULL, (int32_t[]){-1, -2, 1}, &batch), KVC_ERR_INVALID, "parents[1]",
                "is -2:");
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, ids, (int32_t[]){-1, -1, 1}, &batch), KVC_ERR_INVALID, "parents[2]",
                "sequence 1");
    CHECK(!batch);
    pair_check(p);
    pair_free(p);
}

/* A rope that does not fit its layer is refused. */
static void test_bad_ropes(void) {
    static const double freqs[] = {1, 0.5, 0.25}, infinite[] = {1, HUGE_VAL, 1}, none[] = {NAN, 1, 1};
    static const struct {
        kvc_rope rope;
        int value_in_key;
        const char *name, *value;
    } bad[] = {
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 0, .inv_freq = freqs}, 0, "rope", "0 frequencies"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = -1, .inv_freq = freqs}, 0, "rope", "-1 frequencies"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2}, 0, "rope", "NULL"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 3, .inv_freq = freqs}, 0, "rope", "3 frequencies"},
        {{.kind = KVC_ROPE_FREQUENCIES, .first_dim = 2, .num_freqs = 2, .inv_freq = freqs},
         0,
         "first_dim 2",
         "2 frequencies"},
        {{.kind = KVC_ROPE_FREQUENCIES, .first_dim = -1, .num_freqs = 1, .inv_freq = freqs},
         0,
         "first_dim -1",
         "keys have 5"},
        {{.kind = KVC_ROPE_FREQUENCIES, .first_dim = INT32_MAX, .num_freqs = 1, .inv_freq = freqs},
         0,
         "first_dim 2147483647",
         "keys have 5"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = INT32_MAX, .inv_freq = freqs},
         0,
         "2147483647 frequencies",
         "keys have 5"},
        {{.kind = KVC_ROPE_FREQUENCIES, .first_dim = 2, .num_freqs = 1, .inv_freq = freqs},
         1,
         "first_dim",
         "at least v_dim, 3"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = infinite}, 0, "inv_freq[1]", "is inf:"},
        {{.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = none}, 0, "inv_freq[0]", "nan"},
        {{.kind = KVC_ROPE_FUNCTION}, 0, "rope.shift", "NULL"},
        {{.kind = 4}, 0, "rope.kind", "is 4:"},
        {{.kind = -1}, 0, "rope.kind", "is -1:"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const kvc_layer layers[] = {
            {.num_kv_heads = 1, .k_dim = 5, .v_dim = 3},
            {.num_kv_heads = 1, .k_dim = 5, .v_dim = 3, .value_in_key = bad[i].value_in_key, .rope = bad[i].rope}};
        const kvc_config config = {
            .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 2};
        kvc_cache *cache = NULL;
        CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, bad[i].name, bad[i].value);
        CHECK(!cache && strstr(kvc_last_error(), "layers[1]"));
    }
}

/* Layers that share must be alike in everything, and the one they share with has rows of its own. */
static void test_bad_shares(void) {
    const kvc_layer plain = {.num_kv_heads = 2, .k_dim = 4, .v_dim = 2, .rope = rope_of(0, 0, 1)};
    for (int i = 0; i < 11; i++) {
        kvc_layer layers[] = {plain, plain, plain};
        layers[1].share = 1;
        kvc_layer *l = &layers[1];
        switch (i) {
        case 0: l->num_kv_heads = 1; break;
        case 1: l->k_dim = 5; break;
        case 2: l->v_dim = 1; break;
        case 3: l->k_type = KVC_F16; break;
        case 4: l->v_type = KVC_BF16; break;
        case 5: l->policy = sliding_policy(4, 0, 0); break;
        case 6: l->rope.kind = KVC_ROPE_NONE; break;
        case 7: l->rope.interleaved = 1; break;
        case 8: l->rope.inv_freq = other_angles; break;
        case 9: l->value_in_key = 1, l->rope.first_dim = 2; break;
        default: layers[2].share = 2; /* layer 1 shares, too */
        }
        const kvc_config config = {
            .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 3};
        kvc_cache *cache = NULL;
        CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, i < 10 ? "layers[1]" : "layers[2]", "shares");
        CHECKF(!cache, "case %d", i);
    }
}

static void test_moves(void) {
    test_largest_position();
}

static void test_rows(void) {
    test_inject_missing();
    test_held_slots();
    test_capacity();
    test_reserve_refused();
}

static void test_bad_arguments(void) {
    test_commit_kept_of_a_window();
    test_bad_commit_kept();
    test_bad_moves();
    test_bad_inject();
    test_bad_clone();
    test_bad_extract();
    test_bad_puts();
    test_bad_slots();
    test_bad_parents();
    test_bad_ropes();
    test_bad_shares();
}

int main(void) {
    test_moves();
    test_rows();
    test_bad_arguments();
    return test_result();
}
