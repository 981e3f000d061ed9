/* Layers of keys alone (v_dim 0), beside layers with values in one group.  Each has a twin, a layer with the same keys
 * and with values.  Both must have the same bytes of keys at the same positions.  tests/world compares what else is
 * done to sequences of such layers. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <math.h>

#include "support/saved.h"

enum { ATTENDED, KEYS, TWIN, READER, NUM_OWN = READER, KEY_DIM = 64, MOST_KEYS = 120, HEADS = 4 };

static const double slow_angles[] = {1, 0.37, 0.1, 0.031, 0.01, 0.0031, 0.001, 0.00031};

/* Describes four layers: grouped queries, keys alone, the same keys with values, and a reader of the keys alone. */
static void make_twins(kvc_layer *layers, int32_t type, int32_t transform, int interleaved, kvc_policy policy) {
    const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES,
                           .interleaved = interleaved,
                           .first_dim = interleaved ? 0 : KEY_DIM - 16,
                           .num_freqs = 8,
                           .inv_freq = slow_angles};
    layers[ATTENDED] =
        (kvc_layer){.num_kv_heads = HEADS, .k_dim = 32, .v_dim = 32, .policy = policy, .rope.kind = KVC_ROPE_NONE};
    layers[KEYS] = (kvc_layer){
        .num_kv_heads = 1, .k_dim = KEY_DIM, .k_type = type, .k_transform = transform, .policy = policy, .rope = rope};
    layers[TWIN] = layers[READER] = layers[KEYS];
    layers[TWIN].v_dim = 3;
    layers[READER].share = 1 + KEYS;
    layers[KEYS].v_type = 77, layers[KEYS].v_transform = 78; /* of no values: ignored */
}

static kvc_cache *new_twins(const kvc_layer *layers, kvc_config config) {
    config.block_size = config.block_size ? config.block_size : 4;
    config.num_threads = 2;
    return cache_of(layers, 4, config);
}

/* Returns an element of a key.  Element 5 is large, so that a wrong scale shows. */
static float key_at(int64_t id, int32_t position, int d) { return element_of(0, id, position, d) * (d == 5 ? 9 : 1); }

/* Puts rows of n tokens of a sequence in all layers; tells makes the contents of their keys. */
static void put_twins(kvc_batch *batch, const kvc_layer *layers, int64_t tells, int n) {
    static float k[MOST_KEYS][HEADS * KEY_DIM], v[MOST_KEYS][HEADS * KEY_DIM];
    const int32_t *positions = kvc_batch_positions(batch);
    for (int l = 0; l < NUM_OWN; l++) {
        const kvc_layer *layer = &layers[l];
        for (int t = 0; t < n; t++) {
            for (int d = 0; d < HEADS * KEY_DIM; d++) v[t][d] = element_of(1, tells, positions[t], d);
            for (int d = 0; d < HEADS * KEY_DIM; d++)
                k[t][d] = l == ATTENDED ? element_of(2, tells, positions[t], d) : key_at(tells, positions[t], d);
        }
        kvc_put_args args = float_rows(0, n, 0, layer->k_dim, layer->v_dim, k, layer->v_dim ? v : NULL);
        args.k_token_stride = sizeof *k;
        args.v_token_stride = sizeof *v;
        CHECKF(kvc_put(batch, l, &args) == KVC_OK, "%s", kvc_last_error());
    }
}

static int feed_twins(kvc_cache *made, const kvc_layer *layers, int64_t id, int n) {
    int64_t ids[MOST_KEYS];
    kvc_batch *batch;
    for (int i = 0; i < n; i++) ids[i] = id;
    if (kvc_begin(made, n, NULL, ids, NULL, &batch) != KVC_OK) return 0;
    put_twins(batch, layers, id, n);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    return 1;
}

/* The keys of a sequence in a layer, and their positions.  Keys are floats, or stored bytes without their deltas. */
typedef struct keys {
    int64_t num;
    int32_t positions[MOST_KEYS * 2];
    float floats[MOST_KEYS * 2][KEY_DIM];
    char bytes[MOST_KEYS * 2][KEY_DIM * 4];
} keys;

static void read_keys(kvc_cache *made, const kvc_layer *layers, int64_t id, int layer, keys *to) {
    const int64_t row = (int64_t)kvc_row_bytes(layers[layer].k_type, KEY_DIM);
    kvc_rows_out out = {.struct_size = sizeof out, .positions = to->positions, .num_stored = &to->num};
    memset(to, 0, sizeof *to);
    CHECK(kvc_gather(made, id, layer, 0, 0, &out) == KVC_OK && to->num <= MOST_KEYS * 2);
    out.k = to->floats;
    out.k_row_stride = sizeof *to->floats;
    CHECKF(kvc_gather(made, id, layer, 0, to->num, &out) == KVC_OK, "%s", kvc_last_error());
    out.k = to->bytes;
    out.k_row_stride = sizeof *to->bytes;
    out.raw = 1;
    CHECK(kvc_gather(made, id, layer, 0, to->num, &out) == KVC_OK);
    for (int64_t i = 0; i < to->num; i++) memset(to->bytes[i] + row, 0, sizeof *to->bytes - (size_t)row);
}

/* Checks that keys alone are where rows with values are, and the same bytes. */
static void check_twins(kvc_cache *made, const kvc_layer *layers) {
    static keys own, twin, reader;
    int64_t ids[64];
    int32_t positions[MOST_KEYS * 2];
    const int64_t num = kvc_sequences(made, ids, 64);
    CHECKF(kvc_validate(made) == KVC_OK, "%s", kvc_last_error());
    for (int64_t i = 0; i < num && i < 64; i++) {
        read_keys(made, layers, ids[i], KEYS, &own);
        read_keys(made, layers, ids[i], TWIN, &twin);
        read_keys(made, layers, ids[i], READER, &reader);
        CHECKF(!memcmp(&own, &twin, sizeof own), "type %d: sequence %lld has %lld keys, its twin %lld",
               layers[KEYS].k_type, (long long)ids[i], (long long)own.num, (long long)twin.num);
        CHECK(!memcmp(&own, &reader, sizeof own));
        CHECK(kvc_positions(made, ids[i], ATTENDED, positions, MOST_KEYS * 2) == own.num);
        CHECK(!memcmp(positions, own.positions, (size_t)own.num * sizeof *positions));
    }
}

/* Edits move, cut and compact keys alone as they do their twins, in every type and policy. */
static void test_twins(void) {
    static const kvc_policy policies[] = {{.kind = KVC_FULL},
                                          {.kind = KVC_SLIDING, .window = 20, .num_sink_tokens = 2},
                                          {.kind = KVC_CHUNKED, .attention_chunk_size = 20}};
    for (int i = 0; kvc_type_name(i / 3); i++) {
        kvc_layer layers[4];
        kvc_cache *clone;
        make_twins(layers, i / 3, i % 2, i / 2 % 2, policies[i % 3]);
        kvc_cache *made = new_twins(layers, (kvc_config){0});
        CHECK(feed_twins(made, layers, 0, 40) && feed_twins(made, layers, 0, 1));
        CHECK(kvc_fork(made, 0, 1) == KVC_OK && kvc_shift(made, 1, 30, KVC_END, 700) == KVC_OK);
        CHECK(kvc_remove(made, 0, 22, 25, 1) == KVC_OK && kvc_compact(made) == KVC_OK);
        check_twins(made, layers);
        CHECK(kvc_cache_clone(made, &clone) == KVC_OK && kvc_cache_free(made) == KVC_OK);
        check_twins(clone, layers);
        CHECK(kvc_cache_free(clone) == KVC_OK);
    }
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void refuse_attention(kvc_batch *batch, kvc_plan *of_attended, int layer) {
    static float q[4 * HEADS * KEY_DIM], out[4 * HEADS * KEY_DIM];
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .layer = layer, .num_heads = 4};
    const kvc_attend_args args = float_queries(4, KEY_DIM, KEY_DIM, q, out);
    const kvc_rows_out rows = {.struct_size = sizeof rows};
    const kvc_dense_args dense_args = {.struct_size = sizeof dense_args, .rows = &rows};
    kvc_plan *plan = NULL;
    int32_t num_sequences;
    int64_t num;
    char name[32];
    snprintf(name, sizeof name, "layer %d holds keys alone", layer);
    CHECK_FAILS(kvc_attend(batch, &plan_args, &args), KVC_ERR_UNSUPPORTED, name, "attend in the layer that has them");
    CHECKF(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK, "%s", kvc_last_error()); /* for choosing */
    CHECK_FAILS(kvc_plan_run(plan, layer, &args, 0), KVC_ERR_UNSUPPORTED, name, "needs values");
    kvc_plan_free(plan);
    CHECK_FAILS(kvc_plan_run(of_attended, layer, &args, 0), KVC_ERR_UNSUPPORTED, name, "needs values");
    CHECK_FAILS(kvc_dense(batch, layer, &dense_args), KVC_ERR_UNSUPPORTED, name, "gather these keys");
    CHECK_FAILS(kvc_dense_rows(batch, layer, &num), KVC_ERR_UNSUPPORTED, name, "their spans");
    CHECK_FAILS(kvc_dense_sequences(batch, layer, &num_sequences, &num), KVC_ERR_UNSUPPORTED, name, "needs values");
}

/* Values are refused, and nothing was put; so is attention. */
static void test_refused(void) {
    static float row[KEY_DIM], room[KEY_DIM];
    kvc_layer layers[4];
    kvc_batch *batch;
    kvc_plan *plan;
    kvc_span span;
    int64_t num;
    make_twins(layers, KVC_INT8, KVC_TRANSFORM_HADAMARD, 0, (kvc_policy){.kind = KVC_FULL});
    kvc_cache *made = new_twins(layers, (kvc_config){0});
    CHECK(feed_twins(made, layers, 0, 5));
    CHECK(kvc_begin(made, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    const kvc_put_args with = {.struct_size = sizeof with, .k = row, .v = row};
    CHECK_FAILS(kvc_put(batch, KEYS, &with), KVC_ERR_INVALID, "v is given", "keys alone (v_dim 0)");
    CHECK_FAILS(kvc_put(batch, READER, &with), KVC_ERR_INVALID, "layer 3 shares", "layer 1");
    CHECK_FAILS(kvc_commit(batch), KVC_ERR_INVALID, "token 0", "layer");
    CHECK(kvc_slots(batch, KEYS, 0, &span, sizeof span, NULL) == KVC_OK);
    CHECK(span.k && span.k_scales && !span.v && !span.v_scales && !span.v_row_stride && !span.v_head_stride);
    put_twins(batch, layers, 0, 1);
    CHECK(kvc_plan_new(batch, &(kvc_plan_args){.struct_size = sizeof(kvc_plan_args), .num_heads = 4}, &plan) == KVC_OK);
    refuse_attention(batch, plan, KEYS);
    refuse_attention(batch, plan, READER);
    CHECK(kvc_batch_spans(batch, 0, READER, &span, sizeof span, 1, &num, NULL) == KVC_OK && num == 2 && !span.v);
    kvc_rows_out out = {.struct_size = sizeof out, .k = room, .v = room, .batch = batch};
    CHECK_FAILS(kvc_gather(made, 0, KEYS, 0, 1, &out), KVC_ERR_INVALID, "out.v is given", "keys alone");
    out.v = NULL;
    CHECKF(kvc_gather(made, 0, KEYS, 5, 1, &out) == KVC_OK, "%s", kvc_last_error()); /* the batch's own */
    CHECK(fabsf(room[0] - key_at(0, 5, 0)) < 0.2f);
    CHECK(kvc_commit(batch) == KVC_OK);
    out = (kvc_rows_out){.struct_size = sizeof out, .k = room, .v = room, .raw = 1};
    CHECK_FAILS(kvc_extract(made, 0, READER, 0, 1, &out), KVC_ERR_INVALID, "out.v is given", "keys alone");
    const kvc_rows_in in = {.struct_size = sizeof in, .k = row, .v = row};
    CHECK_FAILS(kvc_inject(made, 0, KEYS, 0, 1, &in), KVC_ERR_INVALID, "v is given", "keys alone");
    check_twins(made, layers);
    CHECK(kvc_cache_free(made) == KVC_OK);
}

/* Layers that differ only in what values would be are the same, of keys alone; others are not. */
static void test_shared_layers(void) {
    kvc_layer layers[4];
    kvc_cache *made = NULL;
    kvc_config config = {.struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 4};
    make_twins(layers, KVC_F16, 0, 0, (kvc_policy){.kind = KVC_FULL});
    layers[READER].v_type = KVC_Q4_0;
    CHECKF(kvc_cache_new(&config, &made) == KVC_OK && kvc_cache_free(made) == KVC_OK, "%s", kvc_last_error());
    layers[READER].v_dim = 3;
    layers[READER].v_type = KVC_F32;
    CHECK_FAILS(kvc_cache_new(&config, &made), KVC_ERR_INVALID, "layers[3] shares", "dims");
    layers[READER].v_dim = 0;
    layers[READER].value_in_key = 1;
    CHECK_FAILS(kvc_cache_new(&config, &made), KVC_ERR_INVALID, "layers[3].v_dim is 0", "value_in_key 0");
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

/* A layer of keys alone takes the bytes of its keys, and nothing else. */
static void test_bytes(void) {
    static const struct {
        int32_t type, heads, bytes; /* bytes: of a token */
    } cases[] = {{KVC_INT8, 1, 130}, {KVC_F32, 2, 1024}, {KVC_Q8_0, 1, 136}, {KVC_INT4, 1, 66}, {KVC_BF16, 3, 768}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvc_layer layer = {.num_kv_heads = cases[i].heads, .k_dim = 128, .k_type = cases[i].type};
        kvc_cache *made = cache_of(&layer, 1, (kvc_config){.capacity = 640, .block_size = 64});
        CHECKF(kvc_capacity_bytes(made) == 640 * cases[i].bytes, "%lld bytes", (long long)kvc_capacity_bytes(made));
        CHECK(kvc_cache_free(made) == KVC_OK);
    }
}

/* ---- a layer beside keys alone ----------------------------------------------------------------------------------- */

/* Attends over 60 tokens in the first layer; returns the number of tasks. */
static int64_t attend_beside(const kvc_layer *layers, int num_layers, float *out) {
    static float q[MOST_KEYS * 2 * HEADS * 32];
    kvc_cache *made = cache_of(layers, num_layers, (kvc_config){.block_size = 16, .num_threads = 2});
    kvc_batch *batch;
    kvc_plan *plan;
    for (int i = 0; i < 60 * 2 * HEADS * 32; i++) q[i] = element_of(3, 0, i, 0);
    CHECK(kvc_begin(made, 60, NULL, NULL, NULL, &batch) == KVC_OK);
    for (int l = 0; l < num_layers; l++) {
        const kvc_layer *layer = &layers[l];
        put_floats(batch, l, 0, 60, layer->num_kv_heads, layer->k_dim, layer->v_dim, q, layer->v_dim ? q : NULL);
    }
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 2 * HEADS};
    const kvc_attend_args args = float_queries(2 * HEADS, 32, 32, q, out);
    CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    const int64_t num_tasks = kvc_plan_num_tasks(plan);
    for (int64_t i = 0; i < num_tasks; i++) CHECK(kvc_plan_run(plan, 0, &args, i) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK && kvc_cache_free(made) == KVC_OK);
    return num_tasks;
}

/* A layer of several heads is cut into the same tasks, with the same bits, as without keys alone in its group. */
static void test_attention_beside(void) {
    static float alone[60 * 2 * HEADS * 32], beside[60 * 2 * HEADS * 32];
    for (int32_t type = 0; kvc_type_name(type); type++) {
        const kvc_layer layers[] = {
            {.num_kv_heads = HEADS, .k_dim = 32, .v_dim = 32, .k_type = type, .v_type = type},
            {.num_kv_heads = 1, .k_dim = 128, .k_type = KVC_Q4_1}}; /* whose blocks have minima */
        memset(beside, 0, sizeof beside);
        CHECK(attend_beside(layers, 1, alone) == attend_beside(layers, 2, beside));
        CHECKF(!memcmp(alone, beside, sizeof alone), "type %d", type);
    }
}

/* Quantised layers have blocks of the same default size as without quantised keys alone beside them. */
static void test_block_size_beside(void) {
    const kvc_layer layers[] = {
        {.num_kv_heads = HEADS, .k_dim = 32, .v_dim = 32, .k_type = KVC_Q8_0, .v_type = KVC_Q8_0},
        {.num_kv_heads = 1, .k_dim = 128, .k_type = KVC_INT8}};
    int32_t sizes[2];
    for (int i = 0; i < 2; i++) {
        kvc_cache *made = cache_of(layers, 1 + i, (kvc_config){.max_seq_len = 16448, .max_sequences = 1});
        sizes[i] = kvc_block_size(made);
        CHECK(kvc_cache_free(made) == KVC_OK);
    }
    CHECKF(sizes[0] < 16448 && sizes[1] == sizes[0], "%d and %d", sizes[0], sizes[1]);
}

/* ---- saved states ------------------------------------------------------------------------------------------------ */

/* A file has no values of such a layer, and loads as it was saved. */
static void test_states(void) {
    kvc_layer layers[4];
    if (KVC_IS_BIG_ENDIAN) return;
    saved file;
    kvc_cache *loaded = NULL;
    make_twins(layers, KVC_INT8, 0, 0, (kvc_policy){.kind = KVC_FULL});
    kvc_cache *made = new_twins(layers, (kvc_config){0});
    CHECK(feed_twins(made, layers, 3, 9));
    CHECK(save_all(made, &file) == KVC_OK);
    CHECK(!strstr(file.bytes + 8, "layer.1.v") && strstr(file.bytes + 8, "layer.1.k.scale"));
    const kvc_load_args args = load_args_of(&file);
    CHECK(kvc_load(&args, &loaded) == KVC_OK);
    check_twins(loaded, layers);
    CHECK(kvc_restore(made, &args) == KVC_OK);
    check_twins(made, layers);
    CHECK(kvc_cache_free(made) == KVC_OK && kvc_cache_free(loaded) == KVC_OK);
    free(file.bytes);
}

int main(void) {
    test_twins();
    test_refused();
    test_shared_layers();
    test_bytes();
    test_attention_beside();
    test_block_size_beside();
    test_states();
    return test_result();
}
