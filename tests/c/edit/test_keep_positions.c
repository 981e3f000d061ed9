/* A sequence keeps a list of its positions.  Attention has the bits of a cache that was given these rows alone.
 * tests/world compares more. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

enum { NUM = 700, NEW = 5, HEADS = 2, GROUP = 3, DIM = 64, PASS = 50 };

/* Positions of a sequence of NUM tokens. */
typedef struct listing {
    int32_t num, positions[NUM];
} listing;

/* Lists every nth position from `first` on, of chance's (n 0: half of all), always with the last one. */
static listing list_of(int32_t first, int32_t n) {
    listing list = {0};
    for (int32_t p = first; p < NUM; p += n ? n : 1)
        if (n || random_int(0, 2)) list.positions[list.num++] = p;
    if (list.positions[list.num - 1] < NUM - 1) list.positions[list.num++] = NUM - 1;
    return list;
}

/* Fills in a row of a token. */
static void fill(float *row, int32_t num, int32_t position, int32_t kind) {
    for (int32_t d = 0; d < num; d++) row[d] = element_of(kind, 0, position, d);
}

/* Puts tokens at these positions into every layer; returns their batch. */
static kvc_batch *feed(kvc_cache *cache, int32_t num_layers, int32_t n, const int32_t *positions) {
    static float k[PASS * HEADS * DIM], v[PASS * HEADS * DIM];
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, n, positions, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int32_t t = 0; t < n; t++) {
        fill(k + t * HEADS * DIM, HEADS * DIM, positions[t], 0);
        fill(v + t * HEADS * DIM, HEADS * DIM, positions[t], 1);
    }
    for (int32_t l = 0; l < num_layers; l++) put_floats(batch, l, 0, n, HEADS, DIM, DIM, k, v);
    return batch;
}

static void feed_all(kvc_cache *cache, int32_t num_layers, const listing *list) {
    for (int32_t i = 0; i < list->num; i += PASS) {
        const int32_t n = list->num - i < PASS ? list->num - i : PASS;
        CHECK(kvc_commit(feed(cache, num_layers, n, list->positions + i)) == KVC_OK);
    }
}

/* Feeds NEW tokens behind all others, attends, and aborts. */
static void attend(kvc_cache *cache, int32_t num_layers, int32_t num_new, float *out) {
    static float q[NEW * HEADS * GROUP * DIM];
    const int32_t size = NEW * HEADS * GROUP * DIM, next = kvc_next_position(cache, 0);
    int32_t positions[NEW];
    for (int32_t t = 0; t < num_new; t++) positions[t] = next + t;
    kvc_batch *batch = feed(cache, num_layers, num_new, positions);
    fill(q, size, 0, 2);
    for (int32_t l = 0; l < num_layers; l++) {
        kvc_attend_args args = float_queries(HEADS * GROUP, DIM, DIM, q, out + l * size);
        const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = l, .num_heads = HEADS * GROUP};
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    }
    kvc_abort(batch);
}

/* The rows of both caches give the same bits. */
static void check_same_bits(kvc_cache *kept, kvc_cache *alone, int32_t num_layers) {
    static float a[MAX_LAYERS * NEW * HEADS * GROUP * DIM], b[MAX_LAYERS * NEW * HEADS * GROUP * DIM];
    for (int32_t num_new = 1; num_new <= NEW; num_new += NEW - 1) {
        memset(a, 0, sizeof a);
        memset(b, 0, sizeof b);
        attend(kept, num_layers, num_new, a);
        attend(alone, num_layers, num_new, b);
        CHECK(memcmp(a, b, sizeof a) == 0);
    }
    for (int32_t l = 0; l < num_layers; l++) {
        static int32_t x[NUM], y[NUM];
        const int64_t n = kvc_positions(kept, 0, l, x, NUM);
        CHECK(n == kvc_positions(alone, 0, l, y, NUM) && memcmp(x, y, (size_t)n * sizeof *x) == 0);
    }
}

/* Keeps a list in a cache, and gives another one these rows alone. */
static void test_bits(int32_t type, int32_t block_size, const listing *list) {
    enum { LAYERS = 4 };
    static const kvc_policy policies[LAYERS] = {
        {.kind = KVC_FULL},
        {.kind = KVC_SLIDING, .window = 90, .num_sink_tokens = 3},
        {.kind = KVC_CHUNKED, .attention_chunk_size = 150},
        {.kind = KVC_FULL},
    };
    const kvc_rope rope = {
        .kind = KVC_ROPE_FREQUENCIES, .num_freqs = 5, .inv_freq = (double[]){1, -0.31, 0.017, 1.7, 100}};
    listing all = {0};
    kvc_layer layers[LAYERS];
    for (int32_t l = 0; l < LAYERS; l++)
        layers[l] = (kvc_layer){.num_kv_heads = HEADS,
                                .k_dim = DIM,
                                .v_dim = DIM,
                                .k_type = type,
                                .v_type = type,
                                .policy = policies[l],
                                .rope = rope};
    for (all.num = 0; all.num < NUM; all.num++) all.positions[all.num] = all.num;
    const kvc_config config = {.block_size = block_size, .num_threads = 2};
    kvc_cache *kept = cache_of(layers, LAYERS, config), *alone = cache_of(layers, LAYERS, config);
    feed_all(kept, LAYERS, &all);
    CHECK(kvc_fork(kept, 0, 7) == KVC_OK);
    feed_all(alone, LAYERS, list);
    CHECKF(kvc_keep_positions(kept, 0, list->positions, list->num) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_validate(kept) == KVC_OK, "%s", kvc_last_error());
    check_same_bits(kept, alone, LAYERS);
    CHECK(kvc_seq_len(kept, 7, 0) == NUM && kvc_exact_to(kept, 7) == INT32_MAX);
    CHECK(kvc_clear_sequence(kept, 7) == KVC_OK && kvc_compact(kept) == KVC_OK);
    check_same_bits(kept, alone, LAYERS);
    CHECK(kvc_shift(kept, 0, 5, KVC_END, 300) == KVC_OK && kvc_shift(alone, 0, 5, KVC_END, 300) == KVC_OK);
    check_same_bits(kept, alone, LAYERS);
    CHECK(kvc_cache_free(kept) == KVC_OK && kvc_cache_free(alone) == KVC_OK);
}

/* After compaction, memory is the share that was kept. */
static void test_memory(void) {
    enum { TOKENS = 8192, BLOCK = 64 };
    const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 128, .v_dim = 128, .k_type = KVC_F16, .v_type = KVC_F16};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = BLOCK});
    static int32_t kept[TOKENS];
    int32_t num = 0;
    for (int32_t p = 0; p < TOKENS; p += PASS) {
        int32_t positions[PASS], n = 0;
        while (n < PASS && p + n < TOKENS) positions[n] = p + n, n++;
        static float rows[PASS * 2 * 128];
        kvc_batch *batch = NULL;
        CHECK(kvc_begin(cache, n, positions, NULL, NULL, &batch) == KVC_OK);
        put_floats(batch, 0, 0, n, 2, 128, 128, rows, rows);
        CHECK(kvc_commit(batch) == KVC_OK);
    }
    CHECK(kvc_compact(cache) == KVC_OK);
    const int64_t before = kvc_nbytes(cache);
    for (int32_t p = 0; p < TOKENS; p += 4) kept[num++] = p;
    CHECK(kvc_keep_positions(cache, 0, kept, num) == KVC_OK && kvc_compact(cache) == KVC_OK);
    const double share = (double)kvc_nbytes(cache) / (double)before;
    CHECKF(share < 0.25 * 1.05, "%f of the memory is left", share);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Returns the bytes of a compacted cache of TOKENS small rows, of which every `nth` stays. */
static int64_t bytes_of(int32_t nth) {
    enum { TOKENS = 8192 };
    static int32_t positions[TOKENS];
    static float rows[TOKENS];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 64});
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, TOKENS, NULL, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, 0, TOKENS, 1, 1, 1, rows, rows);
    CHECK(kvc_commit(batch) == KVC_OK);
    int32_t num = 0;
    for (int32_t p = 0; p < TOKENS; p += nth) positions[num++] = p;
    CHECK(kvc_keep_positions(cache, 0, positions, num) == KVC_OK && kvc_compact(cache) == KVC_OK);
    const int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* A gap takes 24 bytes once the sequence was compacted. */
static void test_gaps(void) {
    const int64_t all = bytes_of(1), half = bytes_of(2);
    CHECKF(half < all / 2 + 4096 * 24 * 11 / 10, "%lld of %lld bytes", (long long)half, (long long)all);
}

/* An empty list ends a sequence.  Some layers and lists are refused.  Positions without a row count for nothing. */
static void test_edges(void) {
    static pair p;
    const kvc_policy cross = {.kind = KVC_CROSS, .max_len = 4};
    const kvc_layer layers[] = {
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = sliding_policy(5, 0, 0)},
        {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = cross},
    };
    p = (pair){.config.block_size = 4};
    pair_new(&p, 3, layers);
    CHECK(kvc_keep_positions(p.cache, 1, (int32_t[]){3}, 1) == KVC_OK);
    CHECK(pair_begin(&p, 1, (int32_t[]){0}, (int64_t[]){1}) == KVC_OK);
    CHECK(pair_put_cross(&p, 2, 1, 3) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK && pair_feed(&p, 1, 1, 20) == KVC_OK);
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, NULL, 2), KVC_ERR_INVALID, "positions is NULL", "is 2");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, NULL, -1), KVC_ERR_INVALID, "num_positions", "is -1:");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){-4}, 1), KVC_ERR_INVALID, "positions[0]", "is -4:");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, KVC_END}, 2), KVC_ERR_INVALID, "positions[1]", "is 2147");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 7, 7}, 3), KVC_ERR_INVALID, "positions[2]",
                "is 7, behind 7");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){7, 3}, 2), KVC_ERR_INVALID, "positions[1]",
                "is 3, behind 7");
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 8}, 2), KVC_ERR_GONE, "sequence 1", "position 9");
    pair_check(&p);
    CHECK_FAILS(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 8, 50, 90}, 4), KVC_ERR_GONE, "sequence 1", "position 9");
    CHECK(kvc_fork(p.cache, 1, 3) == KVC_OK && kvc_keep_positions(p.cache, 3, (int32_t[]){50, 90}, 2) == KVC_OK);
    CHECK(kvc_next_position(p.cache, 3) == 0 && kvc_seq_len(p.cache, 3, 2) == 0);
    pair_check(&p);
    CHECK(kvc_keep_positions(p.cache, 1, (int32_t[]){3, 17, 19, 20, 90}, 5) == KVC_OK); /* the window has lost row 3 */
    CHECK(kvc_seq_len(p.cache, 1, 0) == 3 && kvc_seq_len(p.cache, 1, 1) == 2 && kvc_seq_len(p.cache, 1, 2) == 3);
    pair_check(&p);
    CHECK(pair_feed(&p, 1, 20, 23) == KVC_OK && kvc_exact_to(p.cache, 1) == 0);
    CHECK(kvc_fork(p.cache, 1, 2) == KVC_OK && kvc_keep_positions(p.cache, 1, NULL, 0) == KVC_OK);
    CHECK(kvc_next_position(p.cache, 1) == 0 && kvc_seq_len(p.cache, 1, 2) == 0 && kvc_seq_len(p.cache, 2, 2) == 3);
    pair_check(&p);
    CHECK(pair_begin(&p, 1, (int32_t[]){23}, (int64_t[]){2}) == KVC_OK);
    CHECK_FAILS(kvc_keep_positions(p.cache, 2, (int32_t[]){3}, 1), KVC_ERR_BUSY, "sequence 2", "open batch");
    kvc_abort(p.batch);
    pair_free(&p);
}

int main(void) {
    static const int32_t types[] = {KVC_F32, KVC_F16, KVC_Q8_0, KVC_INT8, KVC_INT4};
    test_edges();
    test_memory();
    test_gaps();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const listing lists[] = {list_of(0, 2), list_of(3, 0), list_of(1, 7)};
        for (size_t j = 0; j < sizeof lists / sizeof *lists; j++) test_bits(types[i], j % 2 ? 16 : 64, &lists[j]);
    }
    return test_result();
}
