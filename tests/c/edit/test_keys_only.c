/* Layers of keys alone (v_dim 0), beside layers with values in one group.  Each has a twin, a layer with the same keys
 * and with values.  Both must have the same bytes of keys at the same positions, whatever is done to sequences. */
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

/* Returns an element of a key before its rotation.  Element 5 is large, so that a wrong scale shows. */
static float key_at(int64_t id, int32_t position, int d) { return element_of(0, id, position, d) * (d == 5 ? 9 : 1); }

static void rotate_by(const kvc_rope *rope, double position, double *k) {
    for (int i = 0; i < rope->num_freqs; i++) {
        double *a = k + rope->first_dim + (rope->interleaved ? 2 * i : i),
               *b = a + (rope->interleaved ? 1 : rope->num_freqs);
        const double x = *a, y = *b, c = cos(position * rope->inv_freq[i]), s = sin(position * rope->inv_freq[i]);
        *a = x * c - y * s;
        *b = y * c + x * s;
    }
}

/* Puts rows of n tokens of a sequence in all layers; tells makes the contents of their keys. */
static void put_twins(kvc_batch *batch, const kvc_layer *layers, int64_t tells, int n) {
    static float k[MOST_KEYS][HEADS * KEY_DIM], v[MOST_KEYS][HEADS * KEY_DIM];
    const int32_t *positions = kvc_batch_positions(batch);
    for (int l = 0; l < NUM_OWN; l++) {
        const kvc_layer *layer = &layers[l];
        for (int t = 0; t < n; t++) {
            double key[KEY_DIM];
            for (int d = 0; d < KEY_DIM; d++) key[d] = (double)key_at(tells, positions[t], d);
            if (l != ATTENDED) rotate_by(&layer->rope, positions[t], key);
            for (int d = 0; d < HEADS * KEY_DIM; d++) v[t][d] = element_of(1, tells, positions[t], d);
            for (int d = 0; d < HEADS * KEY_DIM; d++)
                k[t][d] = l == ATTENDED ? element_of(2, tells, positions[t], d) : (float)key[d % KEY_DIM];
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

/* ---- everything that is done to sequences ------------------------------------------------------------------------ */

static void replace_some(kvc_cache *made, const kvc_layer *layers, int64_t id, int32_t begin, int32_t end) {
    static float k[MOST_KEYS * 2][KEY_DIM], v[MOST_KEYS * 2][KEY_DIM];
    for (int i = 0; i < end - begin; i++)
        for (int d = 0; d < KEY_DIM; d++) k[i][d] = random_float(), v[i][d] = random_float();
    for (int l = KEYS; l <= TWIN; l++) {
        const kvc_rows_in in = {.struct_size = sizeof in,
                                .k = k,
                                .v = layers[l].v_dim ? v : NULL,
                                .k_row_stride = sizeof *k,
                                .v_row_stride = sizeof *v,
                                .skip_missing = 1};
        CHECKF(kvc_inject(made, id, l, begin, end, &in) == KVC_OK, "%s", kvc_last_error());
    }
}

/* Loads what was saved in place of the cache. */
static kvc_cache *save_and_load(kvc_cache *made) {
    saved file, again;
    kvc_cache *loaded = NULL;
    if (KVC_IS_BIG_ENDIAN) return made;
    CHECKF(save_all(made, &file) == KVC_OK, "%s", kvc_last_error());
    const kvc_load_args args = load_args_of(&file);
    CHECKF(kvc_load(&args, &loaded) == KVC_OK, "%s", kvc_last_error());
    CHECK(save_all(loaded, &again) == KVC_OK && is_same(&file, &again));
    CHECK(kvc_cache_free(made) == KVC_OK);
    free(file.bytes);
    free(again.bytes);
    return loaded;
}

static kvc_cache *clone_and_go_on(kvc_cache *made) {
    kvc_cache *clone = NULL;
    CHECKF(kvc_cache_clone(made, &clone) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_cache_free(made) == KVC_OK);
    return clone;
}

/* Some tokens of a batch are kept, or none. */
static void keep_some(kvc_cache *made, const kvc_layer *layers, int64_t id) {
    const int32_t parents[] = {-1, 0, 0, 2}, kept[] = {0, 2, 3};
    const int32_t at = kvc_next_position(made, id), positions[] = {at, at + 1, at + 1, at + 2};
    kvc_batch *batch;
    if (kvc_begin(made, 4, positions, (int64_t[]){id, id, id, id}, parents, &batch) != KVC_OK) return;
    put_twins(batch, layers, id, 4);
    if (random_int(0, 2))
        CHECKF(kvc_commit_kept(batch, kept, 3) == KVC_OK, "%s", kvc_last_error());
    else
        kvc_abort(batch);
}

static kvc_cache *take_step(kvc_cache *made, const kvc_layer *layers) {
    const int64_t id = random_int(0, 4), other = (id + random_int(1, 4)) % 4;
    const int32_t next = kvc_next_position(made, id), begin = random_int(0, next + 1), end = begin + random_int(0, 12);
    switch (random_int(0, 17)) {
    case 0: kvc_remove(made, id, begin, end, 1); break;
    case 1: kvc_remove(made, id, begin, end, 0); break;
    case 2: kvc_shift(made, id, begin, KVC_END, random_int(-9, 10)); break;
    case 3: kvc_divide(made, id, begin, KVC_END, random_int(1, 4)); break;
    case 4: kvc_truncate(made, id, begin); break;
    case 5: kvc_fork(made, id, other); break;
    case 6: kvc_copy_prefix(made, id, other, begin); break;
    case 7: kvc_share(made, id, other, kvc_next_position(made, other), KVC_END); break;
    case 8:
    case 9: CHECKF(kvc_compact(made) == KVC_OK, "%s", kvc_last_error()); break;
    case 10: return save_and_load(made);
    case 11: return clone_and_go_on(made);
    case 12: replace_some(made, layers, id, begin, end); break;
    case 13: keep_some(made, layers, id); break;
    case 14: kvc_mark_inexact(made, id, begin); break;
    default: feed_twins(made, layers, id, random_int(1, 14));
    }
    for (int64_t i = 0; i < 4; i++) {
        const int32_t at = kvc_next_position(made, i);
        if (kvc_seq_len(made, i, -1) > MOST_KEYS - 20 || (!kvc_can_resume(made, i, at) && !random_int(0, 3)))
            kvc_clear_sequence(made, i);
    }
    return made;
}

static void test_twins(void) {
    const int rounds = is_full() ? 12 : 1;
    for (int round = 0; round < rounds; round++)
        for (int32_t type = 0; kvc_type_name(type); type++) {
            kvc_layer layers[4];
            const int32_t window = random_int(4, 30);
            const kvc_policy policies[] = {{.kind = KVC_FULL},
                                           {.kind = KVC_SLIDING, .window = window, .num_sink_tokens = 2},
                                           {.kind = KVC_CHUNKED, .attention_chunk_size = window}};
            make_twins(layers, type, random_int(0, 2), random_int(0, 2), policies[random_int(0, 3)]);
            kvc_cache *made = new_twins(layers, (kvc_config){0});
            for (int step = 0; step < 60; step++) {
                made = take_step(made, layers);
                check_twins(made, layers);
            }
            CHECK(kvc_cache_free(made) == KVC_OK);
        }
}

/* ---- keys against keys that are rotated anew --------------------------------------------------------------------- */

/* How far an element of a key of magnitude 9 or less, stored in a type, may lie from what was put: a step of it. */
static double step_of(int32_t type) {
    switch (type) {
    case KVC_F32: return 1e-5;
    case KVC_F16: return 0x1p-8;
    case KVC_BF16: return 0x1p-5;
    case KVC_Q8_0:
    case KVC_INT8: return 0.2; /* 9 / 127, times some, as transforms spread the largest element */
    default: return 3;
    }
}

static void check_moved(kvc_cache *made, const kvc_layer *layers, int64_t tells, int64_t id, int32_t from, int32_t by,
                        int roundings) {
    static keys own;
    read_keys(made, layers, id, KEYS, &own);
    for (int64_t i = 0; i < own.num; i++) {
        double right[KEY_DIM];
        const int32_t at = own.positions[i];
        for (int d = 0; d < KEY_DIM; d++) right[d] = (double)key_at(tells, at < from + by ? at : at - by, d);
        rotate_by(&layers[KEYS].rope, at, right);
        for (int d = 0; d < KEY_DIM; d++)
            CHECKF(fabs((double)own.floats[i][d] - right[d]) <= roundings * step_of(layers[KEYS].k_type),
                   "type %d, position %d: k[%d] is %g, not %g", layers[KEYS].k_type, at, d, (double)own.floats[i][d],
                   right[d]);
    }
}

/* Moved keys equal keys that are put at the new positions. */
static void test_moved_keys(void) {
    static const int32_t types[] = {KVC_F32, KVC_F16, KVC_BF16, KVC_Q8_0, KVC_INT8, KVC_INT6};
    for (size_t i = 0; i < 4 * sizeof types / sizeof *types; i++) {
        kvc_layer layers[4];
        make_twins(layers, types[i / 4], i % 2, i / 2 % 2, (kvc_policy){.kind = KVC_FULL});
        kvc_cache *made = new_twins(layers, (kvc_config){0});
        CHECK(feed_twins(made, layers, 0, 40));
        check_moved(made, layers, 0, 0, 100, 0, 1);
        CHECK(kvc_fork(made, 0, 1) == KVC_OK && kvc_shift(made, 1, 9, KVC_END, 700) == KVC_OK);
        check_moved(made, layers, 0, 1, 9, 700, 1);
        CHECK(kvc_remove(made, 0, 0, 5, 1) == KVC_OK);
        check_moved(made, layers, 0, 1, 9, 700, 1);
        check_twins(made, layers);
        CHECK(kvc_cache_free(made) == KVC_OK);
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

/* Room and reserved memory count the keys and values of all layers of the group. */
static void test_room(void) {
    kvc_layer layers[4];
    make_twins(layers, KVC_INT8, 0, 0, (kvc_policy){.kind = KVC_FULL});
    for (int64_t max_bytes = 30000; max_bytes < 60000; max_bytes += 1777) {
        kvc_cache *made = new_twins(layers, (kvc_config){.max_bytes = max_bytes});
        int64_t room = 0;
        CHECK(kvc_room(made, 0, &room) == KVC_OK && room > 0 && room < MOST_KEYS);
        CHECK(!feed_twins(made, layers, 0, (int)room + 1) && kvc_seq_len(made, 0, -1) == 0);
        CHECK(kvc_reserve(made, 0, room) == KVC_OK && kvc_nbytes(made) <= max_bytes);
        CHECKF(feed_twins(made, layers, 0, (int)room), "%s", kvc_last_error());
        CHECK(kvc_nbytes(made) <= max_bytes);
        check_twins(made, layers);
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

/* ---- prefixes ---------------------------------------------------------------------------------------------------- */

/* Values of a store, by number of arrival. */
enum { MOST_VALUES = 8, MOST_VALUE = 1 << 14 };
typedef struct values {
    int num;
    int64_t sizes[MOST_VALUES];
    uint8_t names[MOST_VALUES][KVC_NAME_BYTES];
    char bytes[MOST_VALUES][MOST_VALUE];
} values;

static kvc_status read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    const values *all = user;
    *size = 0;
    for (int i = 0; i < all->num; i++) {
        if (memcmp(all->names[i], name, KVC_NAME_BYTES)) continue;
        *size = all->sizes[i];
        memcpy(value, all->bytes[i], (size_t)(*size < max_bytes ? *size : max_bytes));
    }
    return KVC_OK;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    values *all = user;
    CHECK(all->num < MOST_VALUES && size <= MOST_VALUE);
    memcpy(all->names[all->num], name, KVC_NAME_BYTES);
    memcpy(all->bytes[all->num], value, (size_t)size);
    all->sizes[all->num++] = size;
    return KVC_OK;
}

/* The keys of a prompt that was fed before come with its rows, from the cache and from a store's value. */
static void test_prefixes(void) {
    kvc_layer layers[4];
    kvc_cache *caches[2];
    kvc_prefix *prefixes[2];
    int64_t ids[24], seq_id, num;
    int32_t matched, fetched;
    static values all;
    const kvc_store in_memory = {sizeof in_memory, .user = &all, .read = read_value, .write = write_value},
                    *store = &in_memory;
    make_twins(layers, KVC_Q8_0, KVC_TRANSFORM_HADAMARD, 1, (kvc_policy){.kind = KVC_FULL});
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model", .collects_new = 1};
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = 24};
    for (int i = 0; i < 24; i++) ids[i] = i * 7;
    for (int i = 0; i < 2; i++) {
        caches[i] = new_twins(layers, (kvc_config){0});
        CHECK(kvc_prefix_new(caches[i], &config, &prefixes[i]) == KVC_OK);
    }
    CHECK(kvc_prefix_acquire(prefixes[0], &tokens, -1, &seq_id, &matched) == KVC_OK && !matched);
    CHECK(feed_twins(caches[0], layers, seq_id, 24));
    CHECK(kvc_prefix_release(prefixes[0], seq_id, &tokens) == KVC_OK);
    CHECKF(kvc_store_new_blocks(caches[0], store, &num) == KVC_OK && num == 6, "%s", kvc_last_error());
    CHECKF(kvc_prefix_fetch(prefixes[1], &tokens, -1, store, &fetched) == KVC_OK && fetched == 20, "%s",
           kvc_last_error());
    for (int i = 0; i < 2; i++) {
        const int64_t tells = seq_id;
        int64_t own;
        CHECK(kvc_prefix_acquire(prefixes[i], &tokens, -1, &own, &matched) == KVC_OK);
        CHECKF(matched == (i ? 20 : 23), "%d", matched);
        check_twins(caches[i], layers);
        check_moved(caches[i], layers, tells, own, 100, 0, 1);
        kvc_prefix_free(prefixes[i]);
        CHECK(kvc_cache_free(caches[i]) == KVC_OK);
    }
}

int main(int argc, char **argv) {
    if (has_seed(argc, argv)) {
        test_twins();
        return test_result();
    }
    test_twins();
    test_moved_keys();
    test_refused();
    test_shared_layers();
    test_bytes();
    test_room();
    test_attention_beside();
    test_block_size_beside();
    test_states();
    test_prefixes();
    return test_result();
}
