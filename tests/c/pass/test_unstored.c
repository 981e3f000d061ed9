/* Batches whose sequences are not all stored.  Attention gives the bits that it gives for stored sequences, limits
 * count all tokens until the batch ends, and then nothing stays. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/crew.h"
#include "support/keeping.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, NUM_LAYERS = 5, TOKENS = 48, CROSS = 4 };

/* Two groups; layer 3 reads the rows of layer 1, and layer 4 looks at an encoder's. */
static const kvc_layer layers[NUM_LAYERS] = {
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16},
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .policy = {.kind = KVC_SLIDING, .window = 9}},
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM},
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .share = 2, .policy = {.kind = KVC_SLIDING, .window = 9}},
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .policy = {.kind = KVC_CROSS, .max_len = 8}},
};

static float q[TOKENS][HEADS][DIM], k[NUM_LAYERS][TOKENS][KV_HEADS][DIM], v[NUM_LAYERS][TOKENS][KV_HEADS][DIM];

static void fill_rows(void) {
    for (size_t i = 0; i < sizeof q / sizeof(float); i++) ((float *)q)[i] = random_float();
    for (size_t i = 0; i < sizeof k / sizeof(float); i++) {
        ((float *)k)[i] = random_float();
        ((float *)v)[i] = random_float();
    }
}

static kvc_cache *new_cache(const kvc_config *with) {
    return cache_of(layers, NUM_LAYERS, with ? *with : (kvc_config){0});
}

static void free_cache(kvc_cache *cache) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
}

/* The tokens of a batch: of three sequences, mixed; sequence 7 was stored before. */
typedef struct pass {
    int n;
    int32_t positions[TOKENS], parents[TOKENS];
    int64_t ids[TOKENS];
    uint8_t unstored[TOKENS];
} pass;

static pass make_pass(int is_tree) {
    pass p = {.n = TOKENS};
    int32_t next[3] = {0, 5, 3}, last[3] = {-1, -1, -1};
    for (int t = 0; t < TOKENS; t++) {
        int s = random_int(0, 3);
        int branches = is_tree && last[s] >= 0 && random_int(0, 3) == 0;
        p.ids[t] = s == 1 ? 7 : s;
        p.parents[t] = branches ? p.parents[last[s]] : last[s];
        p.positions[t] = branches ? p.positions[last[s]] : next[s]++;
        p.unstored[t] = s != 1;
        last[s] = t;
    }
    return p;
}

static kvc_status begin_pass(kvc_cache *cache, const pass *p, int is_tree, int stores_all, kvc_batch **batch) {
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = p->n,
                                 .positions = p->positions,
                                 .seq_ids = p->ids,
                                 .parents = is_tree ? p->parents : NULL,
                                 .unstored = stores_all ? NULL : p->unstored};
    return kvc_begin_with(cache, &args, batch);
}

static kvc_put_args put_of(int layer, int first, int n) {
    return float_rows(first, n, KV_HEADS, DIM, DIM, k[layer][first], v[layer][first]);
}

static kvc_status put(kvc_batch *batch, int layer, int first, int n) {
    const kvc_put_args args = put_of(layer, first, n);
    return kvc_put(batch, layer, &args);
}

/* The output of every layer. */
typedef struct result {
    float out[NUM_LAYERS][TOKENS][HEADS][DIM], lse[NUM_LAYERS][TOKENS][HEADS];
} result;

static kvc_attend_args args_for(int layer, int first, result *r) {
    kvc_attend_args args = float_queries(HEADS, DIM, DIM, q[first], r->out[layer][first]);
    args.lse = r->lse[layer][first];
    args.lse_token_stride = HEADS * sizeof(float);
    args.lse_head_stride = sizeof(float);
    return args;
}

static kvc_status attend(kvc_batch *batch, int layer, int first, int n, int puts, result *r) {
    const kvc_put_args rows = put_of(layer, first, n);
    const kvc_plan_args plan = {
        .struct_size = sizeof plan, .layer = layer, .first = first, .num_tokens = n, .num_heads = HEADS};
    kvc_attend_args args = args_for(layer, first, r);
    args.put = puts ? &rows : NULL;
    return kvc_attend(batch, &plan, &args);
}

static int64_t nbytes(kvc_cache *cache) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return kvc_nbytes(cache);
}

/* ---- same bits --------------------------------------------------------------------------------------------------- */

/* Appends five tokens to sequence 7. */
static void store_seven(kvc_cache *cache) {
    const int32_t positions[] = {0, 1, 2, 3, 4};
    const int64_t ids[] = {7, 7, 7, 7, 7};
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, 5, positions, ids, NULL, &batch) == KVC_OK);
    for (int l = 0; l < 3; l++) CHECK(put(batch, l, 0, 5) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* How a layer's rows are put. */
enum { BY_ATTEND, BY_PUT, BY_HALVES, IN_PLACE, BY_PLAN, WAYS };

static void write_in_place(kvc_batch *batch, int layer, int n) {
    kvc_span span;
    for (int t = 0; t < n; t += span.num_rows) {
        CHECKF(kvc_slots(batch, layer, t, &span, sizeof span, NULL) == KVC_OK, "%s", kvc_last_error());
        for (int i = 0; i < span.num_rows; i++)
            for (int h = 0; h < KV_HEADS; h++)
                for (int d = 0; d < DIM; d++) {
                    ((float *)((char *)span.k + h * span.k_head_stride + i * span.k_row_stride))[d] =
                        k[layer][t + i][h][d];
                    ((float *)((char *)span.v + h * span.v_head_stride + i * span.v_row_stride))[d] =
                        v[layer][t + i][h][d];
                }
    }
    CHECK(kvc_written(batch, layer, 0, n) == KVC_OK);
}

static void run_plan(kvc_batch *batch, int layer, result *r) {
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .layer = layer, .num_heads = HEADS, .num_threads = 3};
    const kvc_attend_args args = args_for(layer, 0, r);
    kvc_plan *plan = NULL;
    CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    crew_run(plan, layer, &args, NULL, 3);
    kvc_plan_free(plan);
}

static void run_layer(kvc_batch *batch, int layer, int n, int way, result *r) {
    const int puts = layer < 3;
    if (way == BY_HALVES) {
        CHECKF(attend(batch, layer, 0, n / 2, puts, r) == KVC_OK, "%s", kvc_last_error());
        CHECKF(attend(batch, layer, n / 2, n - n / 2, puts, r) == KVC_OK, "%s", kvc_last_error());
        return;
    }
    if (way == IN_PLACE && layer && puts) /* f32 */
        write_in_place(batch, layer, n);
    else if (way != BY_ATTEND && puts)
        CHECKF(put(batch, layer, 0, n) == KVC_OK, "%s", kvc_last_error());
    if (way == BY_PLAN)
        run_plan(batch, layer, r);
    else
        CHECKF(attend(batch, layer, 0, n, way == BY_ATTEND && puts, r) == KVC_OK, "%s", kvc_last_error());
}

static void run_pass(const pass *p, int is_tree, int stores_all, int way, int num_threads, result *r) {
    kvc_cache *cache = new_cache(&(kvc_config){.block_size = 16, .num_threads = num_threads});
    kvc_batch *batch = NULL;
    store_seven(cache);
    const int64_t before = nbytes(cache);
    CHECKF(begin_pass(cache, p, is_tree, stores_all, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int64_t id = 0; id < 3; id++) {
        kvc_put_args args = put_of(CROSS, (int)id * 4, 3 + (int)id);
        args.first = 0;
        args.seq_id = id == 1 ? 7 : id;
        CHECKF(kvc_put(batch, CROSS, &args) == KVC_OK, "%s", kvc_last_error());
    }
    memset(r, 0, sizeof *r);
    for (int l = 0; l < NUM_LAYERS; l++) run_layer(batch, l, p->n, way, r);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    int64_t ids[4];
    CHECK(kvc_sequences(cache, ids, 4) == (stores_all ? 3 : 1) && ids[stores_all ? 2 : 0] == 7);
    CHECK(kvc_seq_len(cache, 0, CROSS) == (stores_all ? 3 : 0) && kvc_seq_len(cache, 7, CROSS) == 4);
    CHECK(kvc_clear(cache) == KVC_OK && kvc_compact(cache) == KVC_OK);
    CHECK(nbytes(cache) <= before);
    free_cache(cache);
}

static void test_same_bits(void) {
    static result stored, passed;
    for (int round = 0; round < 12; round++) {
        const int is_tree = round % 2;
        const pass p = make_pass(is_tree);
        for (int way = 0; way < WAYS; way++) {
            if (way == BY_HALVES && is_tree)
                continue; /* parents of the second half lie in the first: nothing else would be tested */
            run_pass(&p, is_tree, 1, way, 1, &stored);
            run_pass(&p, is_tree, 0, way, 1 + round % 3, &passed);
            CHECKF(!memcmp(&stored, &passed, sizeof stored), "round %d, way %d", round, way);
        }
    }
}

/* ---- what stays -------------------------------------------------------------------------------------------------- */

/* If a task cannot run because its sequence has no rows yet, the tasks before it run. */
static void test_a_task_without_rows_follows(void) {
    static result r;
    const uint8_t unstored[2] = {0, 1};
    const int64_t ids[2] = {0, 1};
    const kvc_begin_args begin = {.struct_size = sizeof begin, .num_tokens = 2, .seq_ids = ids, .unstored = unstored};
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = HEADS, .num_threads = 1};
    kvc_cache *cache = new_cache(NULL);
    kvc_batch *batch = NULL;
    kvc_plan *plan = NULL;
    CHECK(kvc_begin_with(cache, &begin, &batch) == KVC_OK && put(batch, 0, 0, 1) == KVC_OK);
    CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    const kvc_attend_args args = args_for(0, 0, &r);
    CHECK(kvc_plan_num_tasks(plan) == 2 * KV_HEADS); /* the two sequences take turns */
    for (int i = 0; i < 2 * KV_HEADS; i++) CHECK(kvc_plan_run(plan, 0, &args, i) == (i % 2 ? KVC_ERR_INVALID : KVC_OK));
    kvc_abort(batch);
    free_cache(cache);
}

/* Begins a batch of three more tokens of sequence 7, which holds five. */
static kvc_batch *begin_three(kvc_cache *cache, int is_unstored) {
    const uint8_t unstored[] = {1, 1, 1};
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 3,
                                 .positions = (const int32_t[]){5, 6, 7},
                                 .seq_ids = (const int64_t[]){7, 7, 7},
                                 .unstored = is_unstored ? unstored : NULL};
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin_with(cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

/* An unstored batch sees the rows its sequence held before; committing drops them. */
static void test_what_was_stored_is_dropped(void) {
    static result stored, dropped;
    for (int is_dropped = 0; is_dropped < 2; is_dropped++) {
        kvc_cache *cache = new_cache(&(kvc_config){.block_size = 4});
        store_seven(cache);
        if (is_dropped) { /* an abort leaves it as it was */
            kvc_abort(begin_three(cache, 1));
            CHECK(kvc_next_position(cache, 7) == 5);
        }
        kvc_batch *batch = begin_three(cache, is_dropped);
        for (int l = 0; l < 4; l++) {
            CHECKF(attend(batch, l, 0, 3, l < 3, is_dropped ? &dropped : &stored) == KVC_OK, "%s", kvc_last_error());
            nbytes(cache);
        }
        CHECK(kvc_commit(batch) == KVC_OK);
        CHECK(kvc_next_position(cache, 7) == (is_dropped ? 0 : 8) && kvc_can_resume(cache, 7, 0));
        CHECK(stats_in(cache).tokens == (is_dropped ? 5 : 8));
        CHECK(is_dropped ? stats_in(cache).live_slots == 0 : stats_in(cache).live_slots > 0);
        free_cache(cache);
    }
    CHECK(!memcmp(&stored, &dropped, sizeof stored));
}

/* Retaining a sequence that is not stored keeps its rows from before the batch, without the batch's tokens. */
static void test_retaining_what_was_stored(void) {
    for (int keeps = 0; keeps < 3; keeps++) { /* the batch is aborted, committed, or a batch that stores */
        kvc_cache *cache = new_cache(&(kvc_config){.block_size = 4});
        store_seven(cache);
        kvc_batch *batch = begin_three(cache, keeps < 2);
        static result out;
        CHECK(retain(cache, 7, 100, 0, 8) == KVC_OK && retain(cache, 7, 101, 5, 8) == KVC_OK);
        CHECK(last_position(cache, 100) == (keeps < 2 ? 4 : 7));
        CHECK(list_retained(cache, NULL, 0) == (keeps < 2 ? 1 : 2));
        for (int l = 0; l < 4; l++) CHECKF(attend(batch, l, 0, 3, l < 3, &out) == KVC_OK, "%s", kvc_last_error());
        if (keeps)
            CHECK(kvc_commit(batch) == KVC_OK);
        else
            kvc_abort(batch);
        CHECK(last_position(cache, 100) == (keeps < 2 ? 4 : 7) && kvc_validate(cache) == KVC_OK);
        free_cache(cache);
    }
}

/* ---- limits and errors ------------------------------------------------------------------------------------------- */

/* Until the batch ends, all its tokens count. */
static void test_limits(void) {
    static result r;
    kvc_cache *cache = new_cache(&(kvc_config){.max_seq_len = 20, .max_sequences = 2, .capacity = 30, .block_size = 8});
    pass p = {.n = 30};
    kvc_batch *batch = NULL;
    for (int t = 0; t < 30; t++) p.ids[t] = t / 10, p.positions[t] = t % 10, p.unstored[t] = t >= 10;
    CHECK_FAILS(begin_pass(cache, &p, 0, 0, &batch), KVC_ERR_FULL, "3 sequences", "max_sequences is 2");
    for (int t = 0; t < 30; t++) p.ids[t] = t >= 15, p.positions[t] = t % 15, p.unstored[t] = t >= 15;
    CHECKF(begin_pass(cache, &p, 0, 0, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 2; l >= 0; l--) CHECK(attend(batch, l, 0, 30, 1, &r) == KVC_OK); /* layers come in any order */
    CHECK(kvc_commit(batch) == KVC_OK && kvc_next_position(cache, 0) == 15 && kvc_next_position(cache, 1) == 0);
    CHECK(stats_in(cache).batches == 1 && stats_in(cache).tokens == 15); /* the others are not stored */
    p.n = 16;
    for (int t = 0; t < 16; t++) p.ids[t] = 1, p.positions[t] = t, p.unstored[t] = 1;
    CHECK_FAILS(begin_pass(cache, &p, 0, 0, &batch), KVC_ERR_FULL, "15 of capacity 30", "16 more tokens");
    p.unstored[7] = 0;
    CHECK_FAILS(begin_pass(cache, &p, 0, 0, &batch), KVC_ERR_INVALID, "unstored[7]", "sequence 1");
    free_cache(cache);
}

/* Blocks go back, whatever is stored beside them and however often an encoder's rows are put. */
static void test_blocks_go_back(void) {
    static result r;
    pass p = {.n = 32};
    kvc_cache *cache = new_cache(&(kvc_config){.block_size = 8});
    kvc_batch *batch = NULL;
    for (int t = 0; t < 32; t++) p.ids[t] = t / 16, p.positions[t] = t % 16, p.unstored[t] = t >= 16;
    CHECKF(begin_pass(cache, &p, 0, 0, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < 3; l++) CHECK(attend(batch, l, 0, 32, 1, &r) == KVC_OK);
    for (int times = 0; times < 2; times++) {
        kvc_put_args args = put_of(CROSS, 0, 5);
        args.seq_id = 1;
        CHECKF(kvc_put(batch, CROSS, &args) == KVC_OK, "%s", kvc_last_error());
    }
    CHECK(kvc_commit(batch) == KVC_OK && kvc_validate(cache) == KVC_OK);
    kvc_block_info blocks[8];
    for (int l = 0, most[] = {2, 4, 2, 4, 0}; l < NUM_LAYERS; l++) { /* a window may keep two spare ones */
        int64_t num, num_runs;
        CHECK(kvc_blocks(cache, l, blocks, sizeof *blocks, 8, &num, NULL, sizeof(kvc_run_info), 0, &num_runs) ==
              KVC_OK);
        CHECKF(num <= most[l], "layer %d has %d blocks", l, (int)num);
    }
    free_cache(cache);
}

int main(void) {
    fill_rows();
    test_same_bits();
    test_a_task_without_rows_follows();
    test_what_was_stored_is_dropped();
    test_retaining_what_was_stored();
    test_limits();
    test_blocks_go_back();
    return test_result();
}
