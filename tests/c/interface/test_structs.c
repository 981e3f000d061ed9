/* Structs of an older and of a newer header.  Each function takes them from the smallest size on, and reads and writes
 * no byte beyond the size that it was told.  It takes missing fields as 0, and refuses fields that it does not know. */
#define _POSIX_C_SOURCE 200809L /* aligned.h */
#include <stdlib.h>

#include "base/structs.h"
#include "saved/format.h"
#include "support/aligned.h"
#include "support/test.h"

enum { NEWER = 16 }; /* bytes that a newer header has more */

static const kvc_layer plain_layer = {.num_kv_heads = 1, .k_dim = 2, .v_dim = 2};
static const kvc_layer two_layers[2] = {{.num_kv_heads = 1, .k_dim = 2, .v_dim = 2},
                                        {.num_kv_heads = 1, .k_dim = 1, .v_dim = 2}};
static const float rows[2] = {3, 4};
static float k[2], v[2];
static int32_t entry; /* a position that is chosen */

static void *plain_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user;
    CHECK(hint->struct_size == sizeof *hint);
    return aligned_new(alignment, size);
}

static void plain_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    aligned_free(start);
}

static kvc_cache *new_cache(void) { return cache_of(&plain_layer, 1, (kvc_config){.block_size = 1}); }

static kvc_batch *begin(kvc_cache *cache, int32_t position) {
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, 1, &position, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

static void put_one(kvc_batch *batch) {
    const kvc_put_args args = {.struct_size = sizeof args, .k = rows, .v = rows};
    CHECKF(kvc_put(batch, 0, &args) == KVC_OK, "%s", kvc_last_error());
}

static void store_one(kvc_cache *cache, int32_t position) {
    kvc_batch *batch = begin(cache, position);
    put_one(batch);
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* A cache with one token stored. */
static kvc_cache *filled_cache(void) {
    kvc_cache *cache = new_cache();
    store_one(cache, 0);
    return cache;
}

/* ---- what is handed in ------------------------------------------------------------------------------------------- */

typedef kvc_status call_fn(const void *given, size_t size);

/* Makes a cache of two_layers. */
static kvc_status make_layers(const void *given, size_t size) {
    const kvc_config config = {.struct_size = sizeof config, .layers = given, .layer_size = size, .num_layers = 2};
    kvc_cache *cache = NULL;
    const kvc_status status = kvc_cache_new(&config, &cache);
    kvc_batch *batch = cache ? begin(cache, 0) : NULL;
    for (int32_t layer = 0; batch && layer < 2; layer++) {
        kvc_span span;
        CHECKF(kvc_slots(batch, layer, 0, &span, sizeof span, NULL) == KVC_OK, "%s", kvc_last_error());
        CHECK(span.k_row_stride == (int64_t)sizeof(float) * two_layers[layer].k_dim);
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status make_cache(const void *given, size_t size) {
    kvc_cache *cache = NULL;
    (void)size;
    const kvc_status status = kvc_cache_new(given, &cache);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status make_with_allocator(const void *given, size_t size) {
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &plain_layer,
                               .layer_size = sizeof plain_layer,
                               .num_layers = 1,
                               .allocator = given};
    return make_cache(&config, size);
}

static kvc_status gather(const void *given, size_t size) {
    kvc_cache *cache = filled_cache();
    (void)size;
    const kvc_status status = kvc_gather(cache, 0, 0, 0, 1, given), again = kvc_extract(cache, 0, 0, 0, 1, given);
    CHECK(status == again && (status != KVC_OK || (k[0] == 3 && v[1] == 4)));
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status inject(const void *given, size_t size) {
    kvc_cache *cache = filled_cache();
    (void)size;
    const kvc_status status = kvc_inject(cache, 0, 0, 0, 1, given);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status begin_with(const void *given, size_t size) {
    kvc_cache *cache = new_cache();
    kvc_batch *batch = NULL;
    (void)size;
    const kvc_status status = kvc_begin_with(cache, given, &batch);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status put(const void *given, size_t size) {
    kvc_cache *cache = new_cache();
    kvc_batch *batch = begin(cache, 0);
    (void)size;
    const kvc_status status = kvc_put(batch, 0, given);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status attend_with(const kvc_plan_args *plan_args, const kvc_attend_args *args) {
    kvc_cache *cache = new_cache();
    kvc_batch *batch = begin(cache, 0);
    put_one(batch);
    const kvc_status status = kvc_attend(batch, plan_args, args);
    CHECK(status != KVC_OK || (v[0] == 3 && v[1] == 4));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status attend(const void *given, size_t size) {
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 1};
    (void)size;
    return attend_with(&plan_args, given);
}

static kvc_status plan(const void *given, size_t size) {
    const kvc_attend_args args = {.struct_size = sizeof args, .q = rows, .out = v};
    (void)size;
    return attend_with(given, &args);
}

/* Attends to the one row there is, by choice. */
static kvc_status attend_to(const void *given, size_t size) {
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 1, .max_chosen = 1};
    const kvc_attend_args args = {.struct_size = sizeof args, .q = rows, .out = v, .chosen = given};
    (void)size;
    return attend_with(&plan_args, &args);
}

/* Chooses the one row there is in a layer of keys alone, whose score is (3 * 3 + 4 * 4) / sqrt(2). */
static kvc_status choose(const void *given, size_t size) {
    static const kvc_layer keys = {.num_kv_heads = 1, .k_dim = 2};
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 1};
    const kvc_put_args put_args = {.struct_size = sizeof put_args, .k = rows};
    kvc_cache *cache = cache_of(&keys, 1, (kvc_config){.block_size = 1});
    kvc_batch *batch = begin(cache, 0);
    (void)size;
    entry = -7;
    CHECK(kvc_put(batch, 0, &put_args) == KVC_OK);
    const kvc_status status = kvc_choose(batch, &plan_args, given);
    CHECK(status != KVC_OK || (entry == 0 && v[0] > 17.6f && v[0] < 17.7f));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

/* Hides the one row there is, by the second of two ranges: from attention, and by masks. */
static kvc_status hide(const void *given, size_t size) {
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .v = v};
    const kvc_attend_args args = {.struct_size = sizeof args, .q = rows, .out = v};
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .num_heads = 1, .masked = given, .masked_size = size, .num_masked = 2};
    uint8_t seen = 7;
    const kvc_dense_args dense_args = {.struct_size = sizeof dense_args,
                                       .rows = &out,
                                       .seen = &seen,
                                       .num_rows = 1,
                                       .masked = given,
                                       .masked_size = size,
                                       .num_masked = 2};
    kvc_cache *cache = new_cache();
    kvc_batch *batch = begin(cache, 0);
    put_one(batch);
    const kvc_status status = kvc_attend(batch, &plan_args, &args);
    CHECK(status != KVC_OK || (v[0] == 0 && v[1] == 0));
    CHECK(kvc_dense(batch, 0, &dense_args) == status && (status != KVC_OK || seen == 0));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status dense(const void *given, size_t size) {
    kvc_cache *cache = filled_cache();
    kvc_batch *batch = begin(cache, 1);
    (void)size;
    const kvc_status status = kvc_dense(batch, 0, given);
    CHECK(status != KVC_OK || (k[0] == 3 && v[1] == 4));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static char file[1 << 14];
static size_t file_size;

static int32_t write_file(void *user, const void *data, size_t size) {
    (void)user;
    CHECK(size <= sizeof file - file_size);
    memcpy(file + file_size, data, size);
    file_size += size;
    return 0;
}

static kvc_status save(const void *given, size_t size) {
    kvc_cache *cache = filled_cache();
    (void)size;
    file_size = 0;
    const kvc_status status = kvc_save(cache, given);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

static kvc_status load(const void *given, size_t size) {
    kvc_cache *cache = NULL;
    (void)size;
    const kvc_status status = kvc_load(given, &cache);
    CHECK(status != KVC_OK || kvc_seq_len(cache, 0, 0) == 1);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return status;
}

/* A copy of a struct of an older or newer header, in memory of exactly `size` bytes.  Structs that do not begin with
 * their size are given in arrays, so there are two of them. */
static void *resized(const void *from, size_t from_size, size_t size, int begins_with_size) {
    const size_t num = begins_with_size ? 1 : 2;
    char *to = calloc(num, size);
    for (size_t i = 0; i < num; i++)
        memcpy(to + i * size, (const char *)from + i * from_size, from_size < size ? from_size : size);
    if (begins_with_size) memcpy(to, &size, sizeof size);
    return to;
}

static void check_sizes(call_fn *call, const void *right, size_t right_size, size_t least, const char *name,
                        int begins_with_size) {
    for (size_t size = least; size <= right_size + NEWER; size++) {
        void *given = resized(right, right_size, size, begins_with_size);
        memset(k, 0, sizeof k);
        memset(v, 0, sizeof v);
        CHECKF(call(given, size) == KVC_OK, "%s of %zu bytes: %s", name, size, kvc_last_error());
        free(given);
    }
    char *newer = resized(right, right_size, right_size + NEWER, begins_with_size);
    newer[right_size + NEWER - 1] = 1;
    CHECK_FAILS(call(newer, right_size + NEWER), KVC_ERR_UNSUPPORTED, name, "does not know");
    free(newer);
    void *small = resized(right, right_size, least - 1, begins_with_size);
    char said[32];
    snprintf(said, sizeof said, "given as %zu", least - 1);
    CHECK_FAILS(call(small, least - 1), KVC_ERR_INVALID, name, said);
    free(small);
}

static void test_given(void) {
    const kvc_allocator allocator = {.struct_size = sizeof allocator, .alloc = plain_alloc, .free = plain_free};
    const kvc_config config = {
        .struct_size = sizeof config, .layers = &plain_layer, .layer_size = sizeof plain_layer, .num_layers = 1};
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .v = v};
    const kvc_rows_in in = {.struct_size = sizeof in, .k = rows, .v = rows};
    const kvc_begin_args begin_args = {.struct_size = sizeof begin_args, .num_tokens = 1, .positions = (int32_t[]){0}};
    const kvc_put_args put_args = {.struct_size = sizeof put_args, .k = rows, .v = rows};
    const kvc_attend_args attend_args = {.struct_size = sizeof attend_args, .q = rows, .out = v};
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 1};
    const kvc_dense_args dense_args = {.struct_size = sizeof dense_args, .rows = &out, .num_rows = 1};
    const int32_t first = 0;
    const kvc_chosen chosen = {.struct_size = sizeof chosen, .positions = &first, .num_choices = 1, .width = 1};
    const kvc_choose_args choose_args = {
        .struct_size = sizeof choose_args, .q = rows, .chosen = &entry, .scores = v, .width = 1};
    const kvc_masked masked[2] = {{.begin = 5, .end = 6}, {.begin = 0, .end = 1}};
    check_sizes(make_layers, two_layers, sizeof *two_layers, kvc_layer_least_size, "layers", 0);
    check_sizes(make_with_allocator, &allocator, sizeof allocator, kvc_allocator_least_size, "allocator", 1);
    check_sizes(make_cache, &config, sizeof config, kvc_config_least_size, "config", 1);
    check_sizes(gather, &out, sizeof out, kvc_rows_out_least_size, "out", 1);
    check_sizes(inject, &in, sizeof in, kvc_rows_in_least_size, "in", 1);
    check_sizes(begin_with, &begin_args, sizeof begin_args, kvc_begin_args_least_size, "args", 1);
    check_sizes(put, &put_args, sizeof put_args, kvc_put_args_least_size, "args", 1);
    check_sizes(attend, &attend_args, sizeof attend_args, kvc_attend_args_least_size, "args", 1);
    check_sizes(plan, &plan_args, sizeof plan_args, kvc_plan_args_least_size, "plan", 1);
    check_sizes(attend_to, &chosen, sizeof chosen, kvc_chosen_least_size, "chosen", 1);
    check_sizes(choose, &choose_args, sizeof choose_args, kvc_choose_args_least_size, "args", 1);
    check_sizes(hide, masked, sizeof *masked, kvc_masked_least_size, "masked", 0);
    check_sizes(dense, &dense_args, sizeof dense_args, kvc_dense_args_least_size, "args", 1);
}

static void test_given_for_files(void) {
    const kvc_save_args save_args = {.struct_size = sizeof save_args, .write = write_file};
    if (KVC_IS_BIG_ENDIAN) return; /* saves nothing */
    check_sizes(save, &save_args, sizeof save_args, kvc_save_args_least_size, "args", 1);
    CHECK(save(&save_args, sizeof save_args) == KVC_OK);
    const kvc_load_args load_args = {.struct_size = sizeof load_args, .data = file, .size = (int64_t)file_size};
    check_sizes(load, &load_args, sizeof load_args, kvc_load_args_least_size, "args", 1);
}

/* Fields that a struct of an older header lacks are 0, whatever was there before. */
static void test_missing_fields(void) {
    const kvc_plan_args older = {.struct_size = offsetof(kvc_plan_args, num_heads), .layer = 7, .num_heads = 5};
    kvc_plan_args args;
    memset(&args, 0xff, sizeof args);
    CHECK(kvc_read_sized(&args, sizeof args, older.struct_size, &older, "plan") == KVC_OK);
    CHECK(args.struct_size == sizeof args && args.layer == 7 && args.num_heads == 0 && !args.non_causal &&
          !args.num_masked);
    CHECK_FAILS(kvc_read_sized(&args, sizeof args, older.struct_size + 1, &older, "plan"), KVC_ERR_INVALID, "plan",
                "given as ");
}

/* Structs within another have room of their own for fields to come. */
static void test_reserved(void) {
    kvc_layer layers[2] = {two_layers[0], two_layers[1]}, *layer = &layers[1];
    for (size_t i = 0; i < sizeof layer->policy.reserved / sizeof *layer->policy.reserved; i++) {
        layer->policy.reserved[i] = 1;
        CHECK_FAILS(make_layers(layers, sizeof *layers), KVC_ERR_UNSUPPORTED, "layers[1].policy.reserved", "is not 0");
        layer->policy.reserved[i] = 0;
    }
    for (size_t i = 0; i < sizeof layer->rope.reserved / sizeof *layer->rope.reserved; i++) {
        layer->rope.reserved[i] = -1;
        CHECK_FAILS(make_layers(layers, sizeof *layers), KVC_ERR_UNSUPPORTED, "layers[1].rope.reserved", "is not 0");
        layer->rope.reserved[i] = 0;
    }
    CHECK(make_layers(layers, sizeof *layers) == KVC_OK);
}

/* ---- what is filled in ------------------------------------------------------------------------------------------- */

/* Whether each struct of an array is the first `size` bytes of the right one, with zeros past its end.  Its fields end
 * at fields_end.  Padding behind them may be anything. */
static int are_parts(const void *got, size_t size, const void *right, size_t fields_end, size_t right_size, int num) {
    const char *at = got, *right_at = right;
    for (; num > 0; num--, at += size, right_at += right_size) {
        for (size_t i = right_size; i < size; i++)
            if (at[i]) return 0;
        if (memcmp(at, right_at, size < fields_end ? size : fields_end)) return 0;
    }
    return 1;
}

static void check_spans(kvc_cache *cache, size_t size) {
    kvc_span right[2];
    int64_t num = 0;
    void *got = malloc(2 * size);
    memset(got, 0xff, 2 * size);
    CHECK(kvc_spans(cache, 0, 0, right, sizeof *right, 2, &num, NULL) == KVC_OK && num == 2);
    CHECKF(kvc_spans(cache, 0, 0, got, size, 2, &num, NULL) == KVC_OK, "%s", kvc_last_error());
    CHECK(are_parts(got, size, right, kvc_span_least_size, sizeof *right, 2));
    kvc_batch *batch = begin(cache, 2);
    memset(got, 0xff, 2 * size);
    CHECK(kvc_slots(batch, 0, 0, right, sizeof *right, NULL) == KVC_OK);
    CHECKF(kvc_slots(batch, 0, 0, got, size, NULL) == KVC_OK, "%s", kvc_last_error());
    CHECK(are_parts(got, size, right, kvc_span_least_size, sizeof *right, 1));
    kvc_abort(batch);
    free(got);
}

static void check_blocks(kvc_cache *cache, size_t block_size, size_t run_size) {
    kvc_block_info block[2];
    kvc_run_info run[2];
    int64_t num_blocks, num_runs;
    void *blocks = malloc(2 * block_size), *runs = malloc(2 * run_size);
    CHECK(kvc_blocks(cache, 0, block, sizeof *block, 2, &num_blocks, run, sizeof *run, 2, &num_runs) == KVC_OK);
    CHECK(num_blocks == 2 && num_runs == 2);
    CHECKF(kvc_blocks(cache, 0, blocks, block_size, 2, &num_blocks, runs, run_size, 2, &num_runs) == KVC_OK, "%s",
           kvc_last_error());
    CHECK(are_parts(blocks, block_size, block, kvc_block_info_least_size, sizeof *block, 2));
    CHECK(are_parts(runs, run_size, run, kvc_run_info_least_size, sizeof *run, 2));
    free(blocks);
    free(runs);
}

static void test_filled_in(void) {
    kvc_cache *cache = filled_cache();
    store_one(cache, 1); /* in another block */
    for (size_t size = kvc_span_least_size; size <= sizeof(kvc_span) + NEWER; size += 4) check_spans(cache, size);
    for (size_t more = 0; more <= NEWER; more += 4)
        check_blocks(cache, kvc_block_info_least_size + more, kvc_run_info_least_size + more);
    kvc_stats right;
    kvc_get_stats(cache, &right, sizeof right);
    for (size_t size = 0; size <= sizeof right + NEWER; size += 8) {
        void *got = malloc(size + 1);
        memset(got, 0xff, size + 1);
        kvc_get_stats(cache, got, size);
        CHECK(are_parts(got, size, &right, sizeof right, sizeof right, 1) && ((char *)got)[size] == (char)0xff);
        free(got);
    }
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_given();
    test_given_for_files();
    test_missing_fields();
    test_reserved();
    test_filled_in();
    return test_result();
}
