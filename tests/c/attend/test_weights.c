/* Compares kvc_weights with a softmax in double, on each instruction set.  The bits are the same for any number of
 * threads, and wherever rows lie.  Bad arguments are refused. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <math.h>

#include "support/isas.h"
#include "world/attention.h"

enum { HEADS = 2, MOST_DIM = 96, MOST_ROWS = 1200, MOST_QUERIES = 50, MOST_HEADS = 6, PASS = 100, LAYERS = 2 };

static const double inv_freq[] = {1, 0.3, 0.01, 1.7e-3};

/* A cache with a sequence in it, whose second layer shares the rows of the first. */
typedef struct world {
    kvc_cache *cache;
    kvc_layer layer;
    int64_t num_rows;
    int32_t positions[MOST_ROWS];
    double keys[HEADS][MOST_ROWS][MOST_DIM]; /* decoded, rotated for these positions */
} world;

static float q[MOST_QUERIES * MOST_HEADS * MOST_DIM];
static float found[HEADS * MOST_ROWS], again[HEADS * MOST_ROWS];
static double right[HEADS * MOST_ROWS];

static void feed(kvc_cache *cache, const kvc_layer *layer, int32_t begin, int32_t end) {
    static float k[PASS * HEADS * MOST_DIM], v[PASS * HEADS * MOST_DIM];
    for (int32_t at = begin, n; at < end; at += n) {
        int32_t positions[PASS];
        kvc_batch *batch = NULL;
        for (n = 0; n < PASS && at + n < end; n++) positions[n] = at + n;
        for (int32_t t = 0; t < n; t++)
            for (int32_t d = 0; d < HEADS * layer->k_dim; d++)
                k[t * HEADS * layer->k_dim + d] = 2 * element_of(0, 0, at + t, d);
        CHECKF(kvc_begin(cache, n, positions, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        put_floats(batch, 0, 0, n, HEADS, layer->k_dim, layer->v_dim, k, layer->value_in_key ? NULL : v);
        CHECK(kvc_commit(batch) == KVC_OK);
    }
}

/* Makes a sequence with holes, and with rows that were moved by several distances. */
static world *world_of(kvc_layer layer, int32_t block_size, int32_t num_threads) {
    static world w;
    kvc_layer layers[LAYERS] = {layer, layer};
    layers[1].share = 1;
    w = (world){.layer = layer};
    w.cache = cache_of(layers, LAYERS, (kvc_config){.block_size = block_size, .num_threads = num_threads});
    feed(w.cache, &layer, 0, 900);
    if (layer.policy.kind == KVC_FULL) {
        static int32_t kept[900];
        int32_t num = 0;
        for (int32_t p = 0; p < 900; p++)
            if (p < 400 ? p % 3 : p % 7) kept[num++] = p;
        CHECK(kvc_keep_positions(w.cache, 0, kept, num) == KVC_OK);
        CHECK(kvc_shift(w.cache, 0, 500, KVC_END, 11) == KVC_OK && kvc_shift(w.cache, 0, 640, KVC_END, -3) == KVC_OK);
    }
    const int32_t next = kvc_next_position(w.cache, 0);
    feed(w.cache, &layer, next, next + 57);
    w.num_rows = kvc_positions(w.cache, 0, 0, w.positions, MOST_ROWS);
    static float k[HEADS][MOST_ROWS][MOST_DIM];
    const kvc_rows_out out = {
        .struct_size = sizeof out, .k = k, .k_head_stride = sizeof k[0], .k_row_stride = sizeof k[0][0]};
    CHECKF(kvc_gather(w.cache, 0, 0, 0, w.num_rows, &out) == KVC_OK, "%s", kvc_last_error());
    doubles(**w.keys, **k, HEADS * MOST_ROWS * MOST_DIM);
    return &w;
}

static kvc_weights_args args_of(const world *w, int32_t num_queries, int32_t num_heads, float *weights) {
    const int64_t row = w->layer.k_dim * (int64_t)sizeof(float);
    return (kvc_weights_args){.struct_size = sizeof(kvc_weights_args),
                              .q = q,
                              .weights = weights,
                              .q_token_stride = num_heads * row,
                              .q_head_stride = row,
                              .weights_head_stride = w->num_rows * (int64_t)sizeof(float),
                              .num_rows = w->num_rows,
                              .num_queries = num_queries,
                              .num_heads = num_heads,
                              .scale = 0.3f};
}

/* Adds the weights that one query row gives to the rows of its KV head. */
static void add_weights(const world *w, const kvc_weights_args *a, const float *query, int32_t position, int32_t head,
                        double *to) {
    static seen_row seen[MOST_ROWS];
    double wide[MOST_DIM];
    const int32_t kv = head / (a->num_heads / HEADS);
    sight s = {.q = doubles(wide, query, w->layer.k_dim),
               .k_dim = w->layer.k_dim,
               .scale = (double)a->scale,
               .softcap = (double)a->softcap,
               .sink = a->sinks ? &a->sinks[head] : NULL,
               .rows = seen};
    for (int64_t j = 0; j < w->num_rows; j++)
        if (w->positions[j] <= position && shows_row(&w->layer.policy, position, w->positions[j]))
            seen[s.num++] = (seen_row){.id = (int32_t)j, .k = w->keys[kv][j]};
    attend_plainly(&s);
    for (int i = 0; i < s.num; i++) {
        double *at = &to[kv * w->num_rows + seen[i].id];
        *at = a->reduction == KVC_REDUCE_SUM ? *at + seen[i].weight : fmax(*at, seen[i].weight);
    }
}

/* Compares a call with the right weights.  queries: [num_queries][num_heads][k_dim] as keys see them. */
static void check(const world *w, const kvc_weights_args *a, const float *queries) {
    const kvc_type type = w->layer.k_type;
    /* Some sets multiply keys of 16 bits by queries in two parts of bf16, and quantised ones by rounded queries. */
    const double tolerance = type == KVC_F32 ? 4e-6 : type < KVC_Q8_0 ? 2e-5 : 2e-4;
    double largest = 0, worst = 0;
    memset(right, 0, sizeof right);
    for (int32_t t = 0; t < a->num_queries; t++)
        for (int32_t h = 0; h < a->num_heads; h++)
            add_weights(w, a, queries + (t * a->num_heads + h) * w->layer.k_dim,
                        a->positions ? a->positions[t] : kvc_next_position(w->cache, 0), h, right);
    CHECKF(kvc_weights(w->cache, 0, 1, a) == KVC_OK, "%s", kvc_last_error());
    for (int64_t i = 0; i < HEADS * w->num_rows; i++) {
        largest = fmax(largest, right[i]);
        worst = fmax(worst, fabs(right[i] - (double)a->weights[i]));
        CHECK(!isnan(a->weights[i]));
    }
    CHECKF(worst <= tolerance * largest, "%s, %s, %d queries of %d heads: %g of %g", kvc_isa(),
           kvc_type_name(w->layer.k_type), a->num_queries, a->num_heads, worst, largest);
}

/* Queries that stand where others do, some before rows; with sinks and a softcap, or without. */
static void test_calls(const world *w) {
    static const float sinks[MOST_HEADS] = {1, -2, 0.5f, 3, -INFINITY, 0};
    static const struct {
        int32_t num_queries, num_heads;
    } sizes[] = {{1, 2}, {7, 6}, {40, 4}, {MOST_QUERIES, 6}};
    int32_t positions[MOST_QUERIES];
    for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = 2 * element_of(2, 0, (int32_t)i, 0);
    for (int32_t t = 0; t < MOST_QUERIES; t++) {
        const int is_full = w->layer.policy.kind == KVC_FULL;
        positions[t] = w->positions[w->num_rows - 1] + t % 3 - (is_full ? t % 5 * 100 : 0);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t reduction = KVC_REDUCE_SUM; reduction <= KVC_REDUCE_MAX; reduction++) {
            kvc_weights_args a = args_of(w, sizes[i].num_queries, sizes[i].num_heads, found);
            a.reduction = reduction;
            if (i % 2) a.positions = positions;
            if (i == 2) a.softcap = 3;
            if (i != 2) a.sinks = sinks;
            check(w, &a, q);
        }
}

static kvc_layer layer_of(int32_t type, int32_t dim, kvc_policy policy) {
    return (kvc_layer){.num_kv_heads = HEADS,
                       .k_dim = dim,
                       .v_dim = 32,
                       .k_type = type,
                       .v_type = KVC_F32,
                       .policy = policy,
                       .rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 4, .inv_freq = inv_freq}};
}

static void test_types(void) {
    for (int32_t type = KVC_F32; type <= KVC_INT4; type++) {
        world *w =
            world_of(layer_of(type, MOST_DIM, (kvc_policy){.kind = KVC_FULL}), type % 2 ? 16 : 2048, 1 + type % 3);
        test_calls(w);
        CHECK(kvc_cache_free(w->cache) == KVC_OK);
    }
}

/* A weight that is no number reaches the rows that the query sees, wherever it stands among the queries. */
static void test_not_a_number(int32_t num_queries, int32_t reduction) {
    enum { SEEN = 100 };
    static int32_t positions[MOST_QUERIES];
    world *w = world_of(layer_of(KVC_F32, MOST_DIM, (kvc_policy){.kind = KVC_FULL}), 64, 2);
    kvc_weights_args a = args_of(w, num_queries, 2, found);
    a.positions = positions;
    a.reduction = reduction;
    for (int32_t at = 0; at < num_queries; at += num_queries - 1) {
        for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = element_of(2, 0, (int32_t)i, 0);
        for (int32_t t = 0; t < num_queries; t++) positions[t] = t == at ? SEEN : 2000;
        for (int32_t h = 0; h < HEADS; h++) q[(at * HEADS + h) * MOST_DIM] = NAN;
        CHECK(kvc_weights(w->cache, 0, 0, &a) == KVC_OK);
        for (int64_t i = 0; i < HEADS * w->num_rows; i++)
            CHECKF(!isnan(found[i]) == (w->positions[i % w->num_rows] > SEEN), "%d of %d queries: row %d: %g", at,
                   num_queries, (int)(i % w->num_rows), (double)found[i]);
    }
    const float sinks[] = {NAN, 0};
    a = args_of(w, num_queries, 2, found);
    a.sinks = sinks;
    a.reduction = reduction;
    for (int32_t t = 0; t < num_queries; t++) positions[t] = SEEN;
    a.positions = positions;
    memset(q, 0, sizeof q);
    CHECK(kvc_weights(w->cache, 0, 0, &a) == KVC_OK);
    for (int64_t i = 0; i < w->num_rows; i++)
        CHECKF(w->positions[i] > SEEN ? found[i] == 0 : isnan(found[i]), "row %d: %g", (int)i, (double)found[i]);
    CHECK(kvc_cache_free(w->cache) == KVC_OK);
}

static void test_isa(void) {
    for (int32_t n = 2; n <= MOST_QUERIES; n += MOST_QUERIES - 2) {
        test_not_a_number(n, KVC_REDUCE_SUM);
        test_not_a_number(n, KVC_REDUCE_MAX);
    }
    test_types();
}

/* The same bits with other blocks, threads and places of rows. */
static void test_same_bits(void) {
    static const int32_t sizes[] = {3, 64, 4096};
    for (int32_t type = KVC_F32; type <= KVC_INT4; type++)
        for (int i = 0; i < 6; i++) {
            world *w = world_of(layer_of(type, MOST_DIM, (kvc_policy){.kind = KVC_FULL}), sizes[i % 3], 1 + i);
            if (i > 2) CHECK(kvc_compact(w->cache) == KVC_OK);
            for (int32_t n = 10; n <= 50; n += 40) {
                const kvc_weights_args a = args_of(w, n, 6, i ? again : found);
                static float first[2][HEADS * MOST_ROWS];
                CHECK(kvc_weights(w->cache, 0, 0, &a) == KVC_OK);
                const size_t size = HEADS * (size_t)w->num_rows * sizeof(float);
                if (!i) memcpy(first[n > 10], found, size);
                CHECKF(!i || memcmp(first[n > 10], again, size) == 0, "%s, %d", kvc_type_name(type), i);
            }
            CHECK(kvc_cache_free(w->cache) == KVC_OK);
        }
}

static void test_refused(void) {
    world *w = world_of(layer_of(KVC_F32, 8, (kvc_policy){.kind = KVC_SLIDING, .window = 100}), 64, 1);
    const kvc_weights_args good = args_of(w, 2, 4, found);
    static const int32_t positions[] = {5000, -3}, early[] = {5000, 800};
#define REFUSES(status, name, value, ...)                                  \
    do {                                                                   \
        kvc_weights_args a = good;                                         \
        __VA_ARGS__;                                                       \
        CHECK_FAILS(kvc_weights(w->cache, 0, 0, &a), status, name, value); \
    } while (0)
    CHECK(kvc_weights(w->cache, 0, 0, &good) == KVC_OK);
    CHECK_FAILS(kvc_weights(w->cache, 0, 2, &good), KVC_ERR_INDEX, "layer", "2");
    CHECK_FAILS(kvc_weights(w->cache, 1, 0, &good), KVC_ERR_INVALID, "num_rows", "sequence 1 holds 0");
    REFUSES(KVC_ERR_INVALID, "num_rows", "holds", a.num_rows++);
    REFUSES(KVC_ERR_INVALID, "q is NULL", "", a.q = NULL);
    REFUSES(KVC_ERR_INVALID, "weights is NULL", "", a.weights = NULL);
    REFUSES(KVC_ERR_INVALID, "num_queries", "is 0", a.num_queries = 0);
    REFUSES(KVC_ERR_INVALID, "num_heads", "is 3", a.num_heads = 3);
    REFUSES(KVC_ERR_INVALID, "reduction", "is 2", a.reduction = 2);
    REFUSES(KVC_ERR_INVALID, "q", "type", a.q_type = KVC_Q8_0);
    REFUSES(KVC_ERR_INVALID, "softcap", "-1", a.softcap = -1);
    REFUSES(KVC_ERR_INVALID, "positions[1]", "is -3", a.positions = positions);
    REFUSES(KVC_ERR_GONE, "position 800", "sequence 0", a.positions = early);
    CHECK(kvc_cache_free(w->cache) == KVC_OK);
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = 8},
        {.num_kv_heads = 2, .k_dim = 8, .v_dim = 8},
        {.num_kv_heads = 2, .k_dim = 8, .v_dim = 8, .policy.kind = KVC_NONE},
        {.num_kv_heads = 2, .k_dim = 8, .v_dim = 8, .value_in_key = 1, .rope.kind = KVC_ROPE_NONE},
    };
    kvc_cache *cache = cache_of(layers, 4, (kvc_config){.block_size = 4});
    kvc_weights_args a = good;
    a.num_rows = 0;
    a.scale = 0;
    CHECK(kvc_weights(cache, 0, 1, &a) == KVC_OK);
    CHECK_FAILS(kvc_weights(cache, 0, 0, &a), KVC_ERR_UNSUPPORTED, "layer 0", "keys alone");
    CHECK_FAILS(kvc_weights(cache, 0, 2, &a), KVC_ERR_INVALID, "layer 2", "no attention");
    CHECK_FAILS(kvc_weights(cache, 0, 3, &a), KVC_ERR_INVALID, "scale is 0", "layer 3");
    a.rotates = 1;
    CHECK_FAILS(kvc_weights(cache, 0, 1, &a), KVC_ERR_UNSUPPORTED, "rotated", "layer 1");
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_refused();
    for_some_isas(test_isa);
    test_same_bits();
    return test_result();
}
