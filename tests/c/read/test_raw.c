/* Rows in the types in which a layer stores them: out by kvc_gather, kvc_extract and kvc_dense, in by kvc_put,
 * kvc_attend and kvc_inject, byte for byte. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "base/dtype.h"
#include "rows/copy.h"
#include "support/isas.h"
#include "support/pairs.h"

enum { HEADS = 3, K_DIM = 64, V_DIM = 32, ROWS = 23, BLOCK = 4, ODD = 1 };

static const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .first_dim = 2, .num_freqs = 5, .inv_freq = any_angles};

/* ---- arrays of rows -----------------------------------------------------------------------------------------------
 */

/* How rows lie in an array. */
typedef enum order { TOKEN_MAJOR, HEAD_MAJOR, GAPS, NUM_ORDERS } order;

/* Keys, or values, in memory of exactly their size, at an odd address. */
typedef struct array {
    char *memory, *rows;
    int64_t head_stride, row_stride, row_bytes;
    int heads, num;
} array;

static array array_new(int32_t type, int32_t dim, int heads, int num, order order) {
    array a = {.row_bytes = (int64_t)kvc_row_bytes(type, dim), .heads = heads, .num = num};
    const int64_t gap = order == GAPS ? 4 : 0;
    a.row_stride = order == TOKEN_MAJOR ? heads * a.row_bytes : a.row_bytes + gap;
    a.head_stride = order == TOKEN_MAJOR ? a.row_bytes : num * a.row_stride;
    a.memory = malloc((size_t)(ODD + heads * num * (a.row_bytes + gap)));
    memset(a.memory, 0x5a, (size_t)(ODD + heads * num * (a.row_bytes + gap)));
    a.rows = a.memory + ODD;
    return a;
}

static char *row_at(const array *a, int row, int head) { return a->rows + head * a->head_stride + row * a->row_stride; }

/* Keys and values of one layer. */
typedef struct rows {
    array k, v;
} rows;

static rows rows_new(const kvc_layer *layer, int num, order order) {
    return (rows){array_new(layer->k_type, layer->k_dim, layer->num_kv_heads, num, order),
                  array_new(layer->v_type, layer->v_dim, layer->num_kv_heads, num, order)};
}

static void rows_free(rows *r) {
    free(r->k.memory);
    free(r->v.memory);
}

static kvc_rows_out out_to(const rows *r) {
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .type = 99, /* ignored */
                          .k = r->k.rows,
                          .v = r->v.rows,
                          .k_head_stride = r->k.head_stride,
                          .k_row_stride = r->k.row_stride,
                          .v_head_stride = r->v.head_stride,
                          .v_row_stride = r->v.row_stride,
                          .raw = 1};
}

static kvc_put_args put_of(const kvc_layer *layer, const rows *r) {
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .num_tokens = r->k.num,
                          .k = r->k.rows,
                          .v = layer->value_in_key ? NULL : r->v.rows,
                          .k_token_stride = r->k.row_stride,
                          .k_head_stride = r->k.head_stride,
                          .v_token_stride = r->v.row_stride,
                          .v_head_stride = r->v.head_stride,
                          .k_type = layer->k_type,
                          .v_type = layer->v_type};
}

static kvc_rows_in in_of(const kvc_layer *layer, const rows *r) {
    return (kvc_rows_in){.struct_size = sizeof(kvc_rows_in),
                         .k = r->k.rows,
                         .v = layer->value_in_key ? NULL : r->v.rows,
                         .k_head_stride = r->k.head_stride,
                         .k_row_stride = r->k.row_stride,
                         .v_head_stride = r->v.head_stride,
                         .v_row_stride = r->v.row_stride,
                         .k_type = layer->k_type,
                         .v_type = layer->v_type};
}

/* Checks that rows [first, first + a->num) of b equal the rows of a, and that the gaps in a are untouched. */
static void check_equal(const array *a, const array *b, int first) {
    for (int h = 0; h < a->heads; h++) {
        for (int i = 0; i < a->num; i++) {
            CHECKF(!memcmp(row_at(a, i, h), row_at(b, first + i, h), (size_t)a->row_bytes), "head %d, row %d", h, i);
            for (int64_t gap = a->row_bytes; gap < a->row_stride && a->head_stride > a->row_stride; gap++)
                CHECK(row_at(a, i, h)[gap] == 0x5a);
        }
    }
}

static void check_rows(const rows *a, const rows *b, int first) {
    check_equal(&a->k, &b->k, first);
    check_equal(&a->v, &b->v, first);
}

/* ---- caches -------------------------------------------------------------------------------------------------------
 */

static kvc_layer layer_of(int32_t k_type, int32_t v_type) {
    return (kvc_layer){
        .num_kv_heads = HEADS, .k_dim = K_DIM, .v_dim = V_DIM, .k_type = k_type, .v_type = v_type, .rope = rope};
}

static kvc_cache *new_cache(const kvc_layer *layer) {
    return cache_of(layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 2});
}

static void free_cache(kvc_cache *cache) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
}

static kvc_batch *begin(kvc_cache *cache, int64_t id, int n) {
    int64_t ids[ROWS];
    kvc_batch *batch = NULL;
    for (int i = 0; i < n; i++) ids[i] = id;
    CHECKF(kvc_begin(cache, n, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

/* Puts random rows, as f32. */
static void put_random(kvc_batch *batch, const kvc_layer *layer, int n) {
    static float k[ROWS * HEADS * K_DIM], v[ROWS * HEADS * V_DIM];
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) k[i] = random_float();
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) v[i] = random_float();
    put_floats(batch, 0, 0, n, HEADS, K_DIM, V_DIM, k, layer->value_in_key ? NULL : v);
}

static void feed(kvc_cache *cache, const kvc_layer *layer, int64_t id, int n) {
    kvc_batch *batch = begin(cache, id, layer->policy.kind == KVC_CROSS ? 1 : n);
    put_random(batch, layer, n);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

/* Copies a row of a span, and behind it its scale, if it has one, which `scales` is NULL without. */
static void copy_row(char *to, int64_t row_bytes, const void *row, const char *scales, int i) {
    const int64_t rest = scales ? KVC_SCALE_BYTES : 0;
    memcpy(to, row, (size_t)(row_bytes - rest));
    if (scales) memcpy(to + row_bytes - rest, scales + i * rest, (size_t)rest);
}

/* Returns the bytes that a sequence has, by kvc_spans, whatever its deltas. */
static rows stored(kvc_cache *cache, const kvc_layer *layer, int64_t id) {
    kvc_span spans[2 * ROWS];
    int64_t num = 0;
    rows r = rows_new(layer, (int)kvc_seq_len(cache, id, 0), HEAD_MAJOR);
    CHECK(kvc_spans(cache, id, 0, spans, sizeof *spans, 2 * ROWS, &num, NULL) == KVC_OK && num <= 2 * ROWS);
    for (int s = 0, row = 0; s < num; s++) {
        for (int i = 0; i < spans[s].num_rows; i++, row++) {
            for (int h = 0; h < layer->num_kv_heads; h++) {
                const kvc_span *at = &spans[s];
                const char *k_scales = at->k_scales, *v_scales = at->v_scales;
                copy_row(row_at(&r.k, row, h), r.k.row_bytes,
                         (const char *)at->k + h * at->k_head_stride + i * at->k_row_stride,
                         k_scales ? k_scales + h * at->k_head_stride : NULL, i);
                copy_row(row_at(&r.v, row, h), r.v.row_bytes,
                         (const char *)at->v + h * at->v_head_stride + i * at->v_row_stride,
                         v_scales ? v_scales + h * at->v_head_stride : NULL, i);
            }
        }
    }
    return r;
}

static rows gathered(kvc_cache *cache, const kvc_layer *layer, int64_t id, int first, int n, order order) {
    rows r = rows_new(layer, n, order);
    const kvc_rows_out out = out_to(&r);
    CHECKF(kvc_gather(cache, id, 0, first, n, &out) == KVC_OK, "%s", kvc_last_error());
    return r;
}

static void check_stored(kvc_cache *cache, const kvc_layer *layer, int64_t id, const rows *right) {
    rows r = stored(cache, layer, id);
    check_rows(&r, right, 0);
    rows_free(&r);
}

/* ---- tests --------------------------------------------------------------------------------------------------------
 */

/* Stores rows of sequence `id`, which kvc_put takes as they are. */
static void put_rows(kvc_cache *cache, const kvc_layer *layer, int64_t id, const rows *r) {
    kvc_batch *batch = begin(cache, id, layer->policy.kind == KVC_CROSS ? 1 : r->k.num);
    kvc_put_args args = put_of(layer, r);
    args.seq_id = id;
    CHECKF(kvc_put(batch, 0, &args) == KVC_OK && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

/* Gathered rows are the stored rows; put into another cache, they are stored unchanged. */
static void check_round_trip(const kvc_layer *layer, order order) {
    kvc_cache *cache = new_cache(layer), *other = new_cache(layer);
    feed(cache, layer, 0, ROWS);
    rows all = stored(cache, layer, 0), some = gathered(cache, layer, 0, 2, ROWS - 5, order),
         copy = gathered(cache, layer, 0, 0, ROWS, order), keys = rows_new(layer, ROWS, order);
    check_rows(&some, &all, 2);
    check_rows(&copy, &all, 0);
    kvc_rows_out out = out_to(&keys); /* alone */
    out.v = NULL;
    CHECK(kvc_gather(cache, 0, 0, 0, ROWS, &out) == KVC_OK);
    check_equal(&keys.k, &all.k, 0);
    put_rows(other, layer, 7, &copy);
    check_stored(other, layer, 7, &all);
    if (layer->policy.kind != KVC_CROSS) {
        feed(other, layer, 8, ROWS); /* other rows, in a block with those */
        kvc_fork(other, 8, 9);
        rows before = stored(other, layer, 9);
        const kvc_rows_in in = in_of(layer, &copy);
        CHECKF(kvc_inject(other, 8, 0, 0, ROWS, &in) == KVC_OK, "%s", kvc_last_error());
        check_stored(other, layer, 8, &all);
        check_stored(other, layer, 9, &before);
        rows_free(&before);
    }
    rows_free(&all), rows_free(&some), rows_free(&copy), rows_free(&keys);
    free_cache(cache), free_cache(other);
}

/* Tries rows of every two types, rows whose values are the first part of the keys, and rows of an encoder. */
static void test_round_trips(void) {
    for (order order = 0; order < NUM_ORDERS; order++) {
        for (int32_t k_type = 0; k_type < KVC_STORED_TYPES; k_type++) {
            for (int32_t v_type = 0; v_type < KVC_STORED_TYPES; v_type++) {
                const kvc_layer layer = layer_of(k_type, v_type);
                check_round_trip(&layer, order);
            }
            if (KVC_TYPES[k_type].is_fitted) continue; /* mixed as a whole, so that half of such a key is no value */
            kvc_layer layer = layer_of(k_type, k_type);
            layer.value_in_key = 1;
            layer.rope.first_dim = V_DIM;
            check_round_trip(&layer, order);
        }
        kvc_layer layer = layer_of(KVC_Q4_0, KVC_Q8_0);
        layer.policy = (kvc_policy){.kind = KVC_CROSS, .max_len = ROWS};
        check_round_trip(&layer, order);
    }
}

/* Keys that moved are what the decoded ones are when they are encoded; those stored stay as they are. */
static void check_moved(int32_t k_type) {
    const kvc_layer layer = layer_of(k_type, KVC_Q8_0);
    static float floats[HEADS * ROWS * K_DIM];
    kvc_cache *cache = new_cache(&layer);
    feed(cache, &layer, 0, ROWS);
    CHECK(kvc_remove(cache, 0, 3, 8, 1) == KVC_OK && kvc_shift(cache, 0, 10, KVC_END, 100) == KVC_OK);
    const int n = ROWS - 5;
    rows before = stored(cache, &layer, 0), copy = gathered(cache, &layer, 0, 0, n, TOKEN_MAJOR),
         again = rows_new(&layer, n, HEAD_MAJOR);
    check_stored(cache, &layer, 0, &before);
    const kvc_rows_out decoded = {.struct_size = sizeof decoded,
                                  .k = floats,
                                  .k_row_stride = K_DIM * (int64_t)sizeof *floats,
                                  .k_head_stride = n * K_DIM * (int64_t)sizeof *floats};
    CHECK(kvc_gather(cache, 0, 0, 0, n, &decoded) == KVC_OK);
    for (int h = 0; h < HEADS; h++) /* the first three did not move */
        for (int i = 3; i < n; i++) {
            const kvc_rows to = kvc_given_rows(k_type, row_at(&again.k, i, h), 0, 0, K_DIM);
            kvc_encode_rows(&kvc_kernels_scalar, &to, floats + (h * n + i) * K_DIM, 0, 1, K_DIM);
        }
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < 3; i++) memcpy(row_at(&again.k, i, h), row_at(&before.k, i, h), (size_t)again.k.row_bytes);
    if (!KVC_TYPES[k_type].is_fitted) check_equal(&copy.k, &again.k, 0); /* else off by the rounding of two mixings */
    check_equal(&copy.v, &before.v, 0);
    CHECK(memcmp(row_at(&copy.k, 3, 0), row_at(&before.k, 3, 0), (size_t)copy.k.row_bytes));
    check_stored(cache, &layer, 0, &before);
    rows_free(&before), rows_free(&copy), rows_free(&again);
    free_cache(cache);
}

/* Encoded rows injected where rows were moved are rotated back, as decoded ones are. */
static void check_inject_moved(int32_t k_type) {
    const kvc_layer layer = layer_of(k_type, KVC_Q4_0);
    static float k[HEADS * ROWS * K_DIM], v[HEADS * ROWS * V_DIM];
    kvc_cache *cache = new_cache(&layer);
    feed(cache, &layer, 0, ROWS);
    rows some = gathered(cache, &layer, 0, 0, 9, GAPS);
    const kvc_rows_out decoded = {.struct_size = sizeof decoded,
                                  .k = k,
                                  .v = v,
                                  .k_row_stride = K_DIM * (int64_t)sizeof *k,
                                  .k_head_stride = ROWS * K_DIM * (int64_t)sizeof *k,
                                  .v_row_stride = V_DIM * (int64_t)sizeof *v,
                                  .v_head_stride = ROWS * V_DIM * (int64_t)sizeof *v};
    CHECK(kvc_gather(cache, 0, 0, 0, ROWS, &decoded) == KVC_OK);
    CHECK(kvc_shift(cache, 0, 0, KVC_END, 5) == KVC_OK && kvc_fork(cache, 0, 1) == KVC_OK);
    const kvc_rows_in raw = in_of(&layer, &some), floats = {.struct_size = sizeof floats,
                                                            .k = k,
                                                            .v = v,
                                                            .k_head_stride = decoded.k_head_stride,
                                                            .k_row_stride = decoded.k_row_stride,
                                                            .v_head_stride = decoded.v_head_stride,
                                                            .v_row_stride = decoded.v_row_stride};
    CHECK(kvc_inject(cache, 0, 0, 12, 21, &raw) == KVC_OK && kvc_inject(cache, 1, 0, 12, 21, &floats) == KVC_OK);
    rows a = stored(cache, &layer, 0), b = stored(cache, &layer, 1);
    check_rows(&a, &b, 0);
    rows_free(&a), rows_free(&b), rows_free(&some);
    free_cache(cache);
}

static void test_moved(void) {
    for (int32_t k_type = 0; k_type < KVC_STORED_TYPES; k_type++) {
        check_moved(k_type);
        check_inject_moved(k_type);
    }
}

/* kvc_extract finds rows by position, the latest of several, and leaves bytes of 0 where no row is. */
static void test_extract(void) {
    const kvc_layer layer = layer_of(KVC_Q8_0, KVC_F16);
    kvc_cache *cache = new_cache(&layer);
    feed(cache, &layer, 0, 8);
    CHECK(kvc_divide(cache, 0, 4, 8, 2) == KVC_OK && kvc_remove(cache, 0, 1, 2, 0) == KVC_OK); /* 0 2 3 2 2 3 3 */
    for (order order = 0; order < NUM_ORDERS; order++) {
        rows all = gathered(cache, &layer, 0, 0, 7, order), found = rows_new(&layer, 5, order),
             right = rows_new(&layer, 5, order);
        const kvc_rows_out out = out_to(&found);
        static const int source[] = {0, -1, 4, 6, -1};
        CHECK(kvc_extract(cache, 0, 0, 0, 5, &out) == KVC_OK);
        for (int i = 0; i < 5; i++) {
            for (int h = 0; h < HEADS; h++) {
                memset(row_at(&right.k, i, h), 0, (size_t)right.k.row_bytes);
                memset(row_at(&right.v, i, h), 0, (size_t)right.v.row_bytes);
                if (source[i] < 0) continue;
                memcpy(row_at(&right.k, i, h), row_at(&all.k, source[i], h), (size_t)right.k.row_bytes);
                memcpy(row_at(&right.v, i, h), row_at(&all.v, source[i], h), (size_t)right.v.row_bytes);
            }
        }
        check_rows(&found, &right, 0);
        rows_free(&all), rows_free(&found), rows_free(&right);
    }
    free_cache(cache);
}

/* Attends with random queries to the rows of `put`, of a sequence that is not stored, or is. */
static void attend(const kvc_layer *layer, const kvc_put_args *put, const float *q, float *out, uint8_t is_unstored) {
    uint8_t unstored[ROWS];
    memset(unstored, is_unstored, sizeof unstored);
    const kvc_begin_args begin_args = {.struct_size = sizeof begin_args, .num_tokens = ROWS, .unstored = unstored};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = HEADS};
    kvc_attend_args args = float_queries(HEADS, K_DIM, V_DIM, q, out);
    args.put = put;
    kvc_cache *cache = new_cache(layer);
    kvc_batch *batch = NULL;
    CHECK(kvc_begin_with(cache, &begin_args, &batch) == KVC_OK);
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    free_cache(cache);
}

/* kvc_attend takes encoded rows, too: the result has the bits of one over the rows as they were put before. */
static void test_attend(void) {
    static float q[ROWS * HEADS * K_DIM], out[2][ROWS * HEADS * V_DIM], k[ROWS * HEADS * K_DIM],
        v[ROWS * HEADS * V_DIM];
    for (int32_t type = 0; type < KVC_STORED_TYPES; type++) {
        const kvc_layer layer = layer_of(type, type);
        kvc_cache *cache = new_cache(&layer);
        feed(cache, &layer, 0, ROWS);
        rows copy = gathered(cache, &layer, 0, 0, ROWS, TOKEN_MAJOR);
        const kvc_rows_out decoded = {.struct_size = sizeof decoded,
                                      .k = k,
                                      .v = v,
                                      .k_row_stride = HEADS * K_DIM * (int64_t)sizeof *k,
                                      .k_head_stride = K_DIM * (int64_t)sizeof *k,
                                      .v_row_stride = HEADS * V_DIM * (int64_t)sizeof *v,
                                      .v_head_stride = V_DIM * (int64_t)sizeof *v};
        CHECK(kvc_gather(cache, 0, 0, 0, ROWS, &decoded) == KVC_OK);
        const kvc_put_args raw = put_of(&layer, &copy), floats = float_rows(0, ROWS, HEADS, K_DIM, V_DIM, k, v);
        for (int i = 0; i < ROWS * HEADS * K_DIM; i++) q[i] = random_float();
        attend(&layer, &floats, q, out[0], 0); /* decoded rows are encoded to the same bytes */
        for (uint8_t is_unstored = 0; is_unstored < 2; is_unstored++) {
            attend(&layer, &raw, q, out[1], is_unstored);
            CHECK(!memcmp(out[0], out[1], sizeof *out));
        }
        rows_free(&copy);
        free_cache(cache);
    }
}

/* Any bytes are data: scales of NaN and infinity, and codes that no row is encoded to. */
static void test_any_bytes(void) {
    static float q[ROWS * HEADS * K_DIM], out[ROWS * HEADS * V_DIM];
    for (int32_t type = 0; type < KVC_STORED_TYPES; type++) {
        const kvc_layer layer = layer_of(type, type);
        kvc_cache *cache = new_cache(&layer);
        rows given = rows_new(&layer, ROWS, TOKEN_MAJOR);
        for (int64_t i = 0; i < ROWS * HEADS * given.k.row_bytes; i++) given.k.rows[i] = (char)random_int(-128, 128);
        for (int64_t i = 0; i < ROWS * HEADS * given.v.row_bytes; i++) given.v.rows[i] = (char)random_int(-128, 128);
        memcpy(given.k.rows, &(uint16_t){0x7e01}, 2); /* NaN */
        memcpy(given.v.rows, &(uint16_t){0xfc00}, 2); /* -infinity */
        const kvc_put_args args = put_of(&layer, &given);
        kvc_batch *batch = begin(cache, 0, ROWS);
        CHECKF(kvc_put(batch, 0, &args) == KVC_OK && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
        check_stored(cache, &layer, 0, &given);
        rows copy = gathered(cache, &layer, 0, 0, ROWS, GAPS);
        check_rows(&copy, &given, 0);
        const kvc_rows_in in = in_of(&layer, &copy);
        CHECK(kvc_inject(cache, 0, 0, 0, ROWS, &in) == KVC_OK);
        check_stored(cache, &layer, 0, &given);
        attend(&layer, &args, q, out, 0);
        CHECK(kvc_shift(cache, 0, 0, KVC_END, 3) == KVC_OK); /* rotated, they are anything: but nothing breaks */
        rows moved = gathered(cache, &layer, 0, 0, ROWS, GAPS);
        check_equal(&moved.v, &given.v, 0);
        rows_free(&given), rows_free(&copy), rows_free(&moved);
        free_cache(cache);
    }
}

/* Codes of -128, which q8_0 has room for and nothing encodes to, are attended over as what they decode to. */
static void test_largest_codes(void) {
    const kvc_layer layer = layer_of(KVC_Q8_0, KVC_Q8_0);
    static float q[ROWS * HEADS * K_DIM], out[ROWS * HEADS * V_DIM];
    rows given = rows_new(&layer, ROWS, TOKEN_MAJOR);
    memset(given.k.rows, 0x80, (size_t)(ROWS * HEADS * given.k.row_bytes));
    memset(given.v.rows, 0x80, (size_t)(ROWS * HEADS * given.v.row_bytes));
    for (int i = 0; i < ROWS * HEADS; i++) {
        for (int64_t at = 0; at < given.k.row_bytes; at += KVC_Q8_0_BYTES)
            memcpy(given.k.rows + i * given.k.row_bytes + at, &(uint16_t){0x1c00}, 2); /* 2^-8 */
        for (int64_t at = 0; at < given.v.row_bytes; at += KVC_Q8_0_BYTES)
            memcpy(given.v.rows + i * given.v.row_bytes + at, &(uint16_t){0x3c00}, 2); /* 1 */
    }
    const kvc_put_args args = put_of(&layer, &given);
    for (int i = 0; i < ROWS * HEADS * K_DIM; i++) q[i] = random_float();
    attend(&layer, &args, q, out, 0);
    for (int i = 0; i < ROWS * HEADS * V_DIM; i++) CHECKF(out[i] > -128.01f && out[i] < -127.99f, "%g", out[i]);
    rows_free(&given);
}

/* kvc_dense hands out raw rows, too: with by_sequence each sequence's own, and bytes of 0 past them. */
static void test_dense(void) {
    const kvc_layer layer = layer_of(KVC_Q8_0, KVC_Q4_0);
    kvc_cache *cache = new_cache(&layer);
    feed(cache, &layer, 0, 7);
    feed(cache, &layer, 1, 3);
    rows first = stored(cache, &layer, 0), second = stored(cache, &layer, 1);
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, 2, NULL, (int64_t[]){0, 1}, NULL, &batch) == KVC_OK);
    rows all = rows_new(&layer, 10, TOKEN_MAJOR), each = rows_new(&layer, 14, HEAD_MAJOR);
    const kvc_rows_out out = out_to(&all);
    CHECKF(kvc_dense(batch, 0,
                     &(kvc_dense_args){.struct_size = sizeof(kvc_dense_args), .rows = &out, .num_rows = 10}) == KVC_OK,
           "%s", kvc_last_error());
    for (int i = 0; i < 10; i++)
        for (int h = 0; h < HEADS; h++)
            CHECK(!memcmp(row_at(&all.k, i, h), i < 7 ? row_at(&first.k, i, h) : row_at(&second.k, i - 7, h),
                          (size_t)all.k.row_bytes));
    kvc_rows_out split = out_to(&each); /* [sequence][head][row] */
    split.k_head_stride = 7 * each.k.row_bytes, split.v_head_stride = 7 * each.v.row_bytes;
    const kvc_dense_args args = {.struct_size = sizeof args,
                                 .rows = &split,
                                 .num_rows = 7,
                                 .by_sequence = 1,
                                 .k_batch_stride = HEADS * split.k_head_stride,
                                 .v_batch_stride = HEADS * split.v_head_stride};
    CHECKF(kvc_dense(batch, 0, &args) == KVC_OK, "%s", kvc_last_error());
    for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < 7; i++) {
            const char *v = each.v.rows + h * split.v_head_stride + i * each.v.row_bytes;
            CHECK(!memcmp(v, row_at(&first.v, i, h), (size_t)each.v.row_bytes));
            v += args.v_batch_stride;
            if (i < 3) CHECK(!memcmp(v, row_at(&second.v, i, h), (size_t)each.v.row_bytes));
            for (int64_t at = 0; i >= 3 && at < each.v.row_bytes; at++) CHECK(v[at] == 0);
        }
    }
    kvc_abort(batch);
    rows_free(&first), rows_free(&second), rows_free(&all), rows_free(&each);
    free_cache(cache);
}

/* A quantised type that is not the layer's own is refused, by kvc_put and kvc_inject, and nothing changes; so are
 * strides that are not whole elements, and unknown types, even if no rows are wanted.  Queries are never quantised. */
static void test_refused(void) {
    const kvc_layer layer = layer_of(KVC_Q8_0, KVC_F16);
    kvc_cache *cache = new_cache(&layer);
    feed(cache, &layer, 0, 4);
    rows before = stored(cache, &layer, 0), copy = gathered(cache, &layer, 0, 0, 4, TOKEN_MAJOR);
    kvc_batch *batch = begin(cache, 1, 4);
    kvc_put_args args = put_of(&layer, &copy);
    kvc_rows_in in = in_of(&layer, &copy);
    args.k_type = in.k_type = KVC_Q4_0;
    CHECK_FAILS(kvc_put(batch, 0, &args), KVC_ERR_INVALID, "k_type is 4:", "or 3, as the layer stores q8_0");
    CHECK_FAILS(kvc_inject(cache, 0, 0, 0, 4, &in), KVC_ERR_INVALID, "k_type is 4:", "or 3, as the layer stores q8_0");
    args.k_type = in.k_type = KVC_Q8_0;
    args.v_type = in.v_type = KVC_Q8_0;
    CHECK_FAILS(kvc_put(batch, 0, &args), KVC_ERR_INVALID, "v_type is 3:", "KVC_BF16");
    CHECK_FAILS(kvc_inject(cache, 0, 0, 0, 4, &in), KVC_ERR_INVALID, "v_type is 3:", "KVC_BF16");
    args.v_type = in.v_type = KVC_F16;
    args.v_token_stride = in.v_row_stride = 65;
    CHECK_FAILS(kvc_put(batch, 0, &args), KVC_ERR_INVALID, "v: v_token_stride", "is 65 bytes:");
    CHECK_FAILS(kvc_inject(cache, 0, 0, 0, 4, &in), KVC_ERR_INVALID, "v: v_row_stride", "is 65 bytes:");
    kvc_rows_out out = out_to(&copy);
    out.v_row_stride = 65;
    CHECK_FAILS(kvc_gather(cache, 0, 0, 0, 4, &out), KVC_ERR_INVALID, "out: v_row_stride", "is 65 bytes:");
    CHECK_FAILS(kvc_extract(cache, 0, 0, 0, 4, &out), KVC_ERR_INVALID, "out: v_row_stride", "is 65 bytes:");
    out.v_row_stride = 64, out.raw = 0;
    CHECK_FAILS(kvc_gather(cache, 0, 0, 0, 4, &out), KVC_ERR_INVALID, "out_type", "is 99:");
    out.k = out.v = NULL;
    CHECK_FAILS(kvc_gather(cache, 0, 0, 0, 4, &out), KVC_ERR_INVALID, "out_type", "is 99:");
    args = put_of(&layer, &copy);
    CHECKF(kvc_put(batch, 0, &args) == KVC_OK, "%s", kvc_last_error()); /* no token was put before */
    float x[HEADS * K_DIM] = {0};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = HEADS, .first = 3};
    const kvc_attend_args query = {.struct_size = sizeof query, .q = x, .out = x, .q_type = KVC_Q8_0};
    CHECK_FAILS(kvc_attend(batch, &plan, &query), KVC_ERR_INVALID, "q_type", "is 3:");
    kvc_abort(batch);
    check_stored(cache, &layer, 0, &before);
    rows_free(&before), rows_free(&copy);
    free_cache(cache);
}

static void test_all(void) {
    test_round_trips();
    test_moved();
    test_extract();
    test_attend();
    test_any_bytes();
    test_largest_codes();
    test_dense();
    test_refused();
}

int main(void) {
    for_some_isas(test_all);
    return test_result();
}
