/* Bad arguments: each is refused by its name and value, and nothing changes. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include <stdlib.h>

#include "support/pairs.h"

/* ---- bad arguments ----------------------------------------------------------------------------------------------- */

/* Each limit of kvc_config outside its range is refused by name and value. */
static void test_bad_limits(void) {
    static const struct {
        kvc_config config;
        kvc_status status;
        const char *name, *value;
    } bad[] = {
        {{.num_layers = 0}, KVC_ERR_INVALID, "num_layers", "is 0:"},
        {{.num_layers = -1}, KVC_ERR_INVALID, "num_layers", "is -1:"},
        {{.num_layers = INT32_MAX}, KVC_ERR_INVALID, "num_layers", "is 2147483647:"},
        {{.num_layers = (1 << 20) + 1}, KVC_ERR_INVALID, "num_layers", "is 1048577:"},
        {{.num_layers = 1, .block_size = -1}, KVC_ERR_INVALID, "block_size", "is -1:"},
        {{.num_layers = 1, .block_size = INT32_MAX}, KVC_ERR_INVALID, "block_size", "is 2147483647:"},
        {{.num_layers = 1, .max_seq_len = -5}, KVC_ERR_INVALID, "max_seq_len", "is -5:"},
        {{.num_layers = 1, .max_seq_len = INT32_MAX}, KVC_ERR_INVALID, "max_seq_len", "is 2147483647:"},
        {{.num_layers = 1, .max_seq_len = INT64_MAX}, KVC_ERR_INVALID, "max_seq_len", "is 9223372036854775807:"},
        {{.num_layers = 1, .max_sequences = -2}, KVC_ERR_INVALID, "max_sequences", "is -2:"},
        {{.num_layers = 1, .max_sequences = INT64_MAX}, KVC_ERR_INVALID, "max_sequences", "is 9223372036854775807:"},
        {{.num_layers = 1, .max_seq_len = INT64_MAX, .max_sequences = 2}, KVC_ERR_INVALID, "max_seq_len", "is 92233"},
        {{.num_layers = 1, .capacity = -3}, KVC_ERR_INVALID, "capacity", "is -3:"},
        {{.num_layers = 1, .max_bytes = -4}, KVC_ERR_INVALID, "max_bytes", "is -4:"},
        {{.num_layers = 1, .num_threads = -1}, KVC_ERR_INVALID, "num_threads", "is -1:"},
        {{.num_layers = 1, .num_threads = 1 << 20}, KVC_ERR_INVALID, "num_threads", "is 1048576:"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvc_config config = bad[i].config;
        kvc_cache *cache = NULL;
        config.struct_size = sizeof config;
        config.layers = &plain_layer;
        config.layer_size = sizeof plain_layer;
        CHECK_FAILS(kvc_cache_new(&config, &cache), bad[i].status, bad[i].name, bad[i].value);
        CHECK(!cache);
    }
}

/* Each field of kvc_layer outside its range is refused by name and value. */
static void test_bad_layers(void) {
#define GOOD .num_kv_heads = 1, .k_dim = 4, .v_dim = 4
    static const struct {
        kvc_layer layer;
        kvc_status status;
        const char *name, *value;
    } bad[] = {
        {{.k_dim = 4, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].num_kv_heads", "is 0:"},
        {{.num_kv_heads = -1, .k_dim = 4, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].num_kv_heads", "is -1:"},
        {{.num_kv_heads = INT32_MAX, .k_dim = 4, .v_dim = 4},
         KVC_ERR_INVALID,
         "layers[1].num_kv_heads",
         "is 2147483647:"},
        {{.num_kv_heads = (1 << 20) + 1, .k_dim = 4, .v_dim = 4},
         KVC_ERR_INVALID,
         "layers[1].num_kv_heads",
         "is 1048577:"},
        {{.num_kv_heads = 1, .v_dim = 4}, KVC_ERR_INVALID, "layers[1].k_dim", "is 0:"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = -4}, KVC_ERR_INVALID, "layers[1].v_dim", "is -4:"},
        {{GOOD, .k_type = 12}, KVC_ERR_INVALID, "layers[1].k_type", "is 12:"},
        {{GOOD, .v_type = -1}, KVC_ERR_INVALID, "layers[1].v_type", "is -1:"},
        {{GOOD, .k_type = KVC_Q8_0}, KVC_ERR_INVALID, "layers[1].k_dim", "is 4: for q8_0"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 40, .v_type = KVC_Q4_0},
         KVC_ERR_INVALID,
         "layers[1].v_dim",
         "is 40: for q4_0"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 5, .value_in_key = 1}, KVC_ERR_INVALID, "layers[1].v_dim", "is 5:"},
        {{.num_kv_heads = 1, .k_dim = 4, .value_in_key = 1}, KVC_ERR_INVALID, "layers[1].v_dim", "is 0:"},
        {{.num_kv_heads = 1, .k_dim = 4, .k_type = KVC_INT8}, KVC_ERR_INVALID, "layers[1].k_dim", "is 4: for int8"},
        {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 3, .v_type = 1, .value_in_key = 1},
         KVC_ERR_INVALID,
         "layers[1].v_type",
         "is f16:"},
        {{GOOD, .share = 2}, KVC_ERR_INVALID, "layers[1].share", "is 2:"},
        {{GOOD, .share = 9}, KVC_ERR_INVALID, "layers[1].share", "is 9:"},
        {{GOOD, .share = -1}, KVC_ERR_INVALID, "layers[1].share", "is -1:"},
        {{.num_kv_heads = 3, .k_dim = 4, .v_dim = 4, .share = 1},
         KVC_ERR_INVALID,
         "layers[1] shares",
         "the same heads"},
        {{GOOD, .k_transform = -1}, KVC_ERR_INVALID, "layers[1].k_transform", "is -1:"},
        {{GOOD, .v_transform = 2}, KVC_ERR_INVALID, "layers[1].v_transform", "is 2:"},
        {{GOOD, .v_transform = KVC_TRANSFORM_HADAMARD, .value_in_key = 1},
         KVC_ERR_INVALID,
         "layers[1].v_transform",
         "is 1:"},
        {{.num_kv_heads = 1,
          .k_dim = 64,
          .v_dim = 32,
          .k_type = KVC_Q8_0,
          .v_type = KVC_Q8_0,
          .value_in_key = 1,
          .k_transform = KVC_TRANSFORM_HADAMARD,
          .v_transform = KVC_TRANSFORM_HADAMARD},
         KVC_ERR_INVALID,
         "layers[1].v_dim",
         "multiple of 64"},
        {{.num_kv_heads = 1, .k_dim = 8, .v_dim = 4, .k_transform = KVC_TRANSFORM_HADAMARD, .share = 1},
         KVC_ERR_INVALID,
         "layers[1] shares",
         "transforms"},
        {{GOOD, .policy = {.kind = KVC_CHUNKED, .window = 4, .attention_chunk_size = 0}},
         KVC_ERR_INVALID,
         "attention_chunk_size",
         "is 0:"},
        {{GOOD, .policy = {.kind = KVC_CHUNKED, .window = 4, .resume_window = -1, .attention_chunk_size = 8}},
         KVC_ERR_INVALID,
         "resume_window",
         "is -1:"},
        {{GOOD, .policy = {.kind = KVC_CROSS, .window = 4, .max_len = 0}}, KVC_ERR_INVALID, "max_len", "is 0:"},
        {{GOOD, .policy = {.kind = 5, .window = 4}}, KVC_ERR_INVALID, "layers[1].policy.kind", "is 5:"},
        {{GOOD, .policy = {.kind = -1, .window = 4}}, KVC_ERR_INVALID, "layers[1].policy.kind", "is -1:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 0}}, KVC_ERR_INVALID, "layers[1]: window", "is 0:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .num_sink_tokens = -1}},
         KVC_ERR_INVALID,
         "layers[1]: num_sink_tokens",
         "is -1:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .resume_window = 3}},
         KVC_ERR_INVALID,
         "layers[1]: resume_window",
         "is 3:"},
        {{GOOD, .policy = {.kind = KVC_SLIDING, .window = 4, .resume_window = -9}},
         KVC_ERR_INVALID,
         "layers[1]: resume_window",
         "is -9:"},
        {{GOOD, .policy = {.kind = KVC_FULL, .stride = -2}}, KVC_ERR_INVALID, "layers[1]: stride", "is -2:"},
        {{GOOD, .sketch_bits = 3}, KVC_ERR_INVALID, "layers[1].sketch_bits", "is 3:"},
        {{GOOD, .sketch_bits = 2}, KVC_ERR_INVALID, "layers[1].k_dim", "is 4: for sketches"},
        {{.num_kv_heads = 1, .k_dim = 64, .sketch_bits = 2}, KVC_ERR_UNSUPPORTED, "layers[1].sketch_bits", "is 2:"},
    };
#undef GOOD
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const kvc_layer layers[] = {plain_layer, bad[i].layer};
        const kvc_config config = {
            .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 2};
        kvc_cache *cache = NULL;
        CHECK_FAILS(kvc_cache_new(&config, &cache), bad[i].status, bad[i].name, bad[i].value);
        CHECK(!cache);
    }
}

/* NULL pointers, sizes that overflow and an unknown KVCACHE_ISA are refused. */
static void test_bad_creation(void) {
    kvc_layer huge = {.num_kv_heads = 1 << 20, .k_dim = 1 << 20, .v_dim = 1 << 20};
    kvc_config config = {.struct_size = sizeof config,
                         .layers = &huge,
                         .layer_size = sizeof huge,
                         .num_layers = 1,
                         .block_size = INT32_MAX - 1};
    kvc_allocator allocator = {.struct_size = 8};
    kvc_cache *cache = NULL;
    CHECK_FAILS(kvc_cache_new(NULL, &cache), KVC_ERR_INVALID, "config", "NULL");
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "block_size", "2147483646");
    config.layers = NULL;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "layers", "NULL");
    config.layers = &plain_layer;
    CHECK_FAILS(kvc_cache_new(&config, NULL), KVC_ERR_INVALID, "cache", "NULL");
    config.allocator = &allocator;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "allocator", "as 8:");
    allocator.struct_size = sizeof allocator;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "allocator->alloc", "NULL");
    config.allocator = NULL;
    setenv("KVCACHE_ISA", "pdp11", 1);
    CHECK(!kvc_isa());
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_UNSUPPORTED, "KVCACHE_ISA", "pdp11");
    unsetenv("KVCACHE_ISA");
    CHECK(!cache && kvc_cache_free(NULL) == KVC_OK);
    CHECK_FAILS(kvc_set_num_threads(-1), KVC_ERR_INVALID, "num_threads", "is -1:");
    CHECK_FAILS(kvc_set_num_threads(4097), KVC_ERR_INVALID, "num_threads", "is 4097:");
}

/* Every status has the text of its list, and another number is called unknown. */
static void test_status_texts(void) {
#define CHECK_TEXT(name, value, text) CHECK(!strcmp(kvc_strerror(name), text) && !strcmp(kvc_strerror(value), text));
    KVC_STATUS_LIST(CHECK_TEXT)
#undef CHECK_TEXT
    CHECK(strcmp(kvc_strerror((kvc_status)99), "unknown status") == 0);
}

/* A message may be made of the one before it, and is cut to 511 bytes. */
static void test_last_error(void) {
    char text[600];
    kvc_set_last_error("block %d is not there", 7);
    kvc_set_last_error("store: %s", kvc_last_error());
    CHECKF(!strcmp(kvc_last_error(), "store: block 7 is not there"), "%s", kvc_last_error());
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    kvc_set_last_error("%s", text);
    CHECK(strlen(kvc_last_error()) == 511);
}

/* Every type has a name of its own; a number that is no type has none, and its rows no bytes.  Rows of a
 * negative length have no bytes either. */
static void test_type_names(void) {
    static const char *const first[] = {
        [KVC_F32] = "f32", [KVC_F16] = "f16", [KVC_BF16] = "bf16", [KVC_Q8_0] = "q8_0", [KVC_Q4_0] = "q4_0"};
    int32_t num = 0;
    for (; kvc_type_name(num); num++)
        for (int32_t i = 0; i < num; i++) CHECK(strcmp(kvc_type_name(i), kvc_type_name(num)));
    for (int32_t i = 0; i < (int32_t)(sizeof first / sizeof *first); i++)
        CHECK(i < num && !strcmp(kvc_type_name(i), first[i]));
    CHECK(num == KVC_INT4 + 1 && !strcmp(kvc_type_name(KVC_INT8), "int8"));
    CHECK(!strcmp(kvc_type_name(KVC_INT6), "int6") && !strcmp(kvc_type_name(KVC_INT4), "int4"));
    const int32_t none[] = {-1, num, num + 1, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK(!kvc_type_name(none[i]) && kvc_row_bytes(none[i], 32) == 0);
    for (int32_t type = 0; type < num; type++)
        CHECK(!kvc_row_bytes(type, -1) && !kvc_row_bytes(type, -32) && !kvc_row_bytes(type, INT32_MIN));
}

/* Edits with bad arguments are refused and change nothing. */
static void test_bad_edits(void) {
    pair *p = mixed_pair(4);
    pair_feed(p, 3, 0, 9);
    CHECK_FAILS(kvc_fork(p->cache, 3, 3), KVC_ERR_INVALID, "src and dst", "sequence 3");
    CHECK_FAILS(kvc_copy_prefix(p->cache, 3, 3, 1), KVC_ERR_INVALID, "src and dst", "sequence 3");
    CHECK_FAILS(kvc_copy_prefix(p->cache, 3, 4, -1), KVC_ERR_INVALID, "length", "is -1:");
    CHECK_FAILS(kvc_share(p->cache, 3, 3, 0, 1), KVC_ERR_INVALID, "src and dst", "sequence 3");
    CHECK_FAILS(kvc_share(p->cache, 3, 4, -1, 1), KVC_ERR_INVALID, "begin", "is -1:");
    CHECK_FAILS(kvc_share(p->cache, 3, 4, 2, 1), KVC_ERR_INVALID, "end", "is 1:");
    CHECK_FAILS(kvc_truncate(p->cache, 3, -2), KVC_ERR_INVALID, "length", "is -2:");
    CHECK_FAILS(kvc_remove(p->cache, 3, -3, 2, 0), KVC_ERR_INVALID, "begin", "is -3:");
    CHECK_FAILS(kvc_remove(p->cache, 3, 3, 2, 0), KVC_ERR_INVALID, "end", "is 2:");
    CHECK_FAILS(kvc_mark_inexact(p->cache, 3, -1), KVC_ERR_INVALID, "position", "is -1:");
    CHECK_FAILS(kvc_remove(p->cache, 3, 3, 5, 1), KVC_ERR_UNSUPPORTED, "layer 0", "rope");
    CHECK_FAILS(kvc_shift(p->cache, 3, 3, 5, 1), KVC_ERR_UNSUPPORTED, "layer 0", "rope");
    CHECK_FAILS(kvc_divide(p->cache, 3, 3, 5, 2), KVC_ERR_UNSUPPORTED, "layer 0", "rope");
    CHECK(kvc_remove(p->cache, 4, 3, 5, 1) == KVC_OK); /* an empty sequence has no keys to rotate */
    CHECK(kvc_shift(p->cache, 4, 3, 5, 1) == KVC_OK);
    CHECK(kvc_divide(p->cache, 4, 3, 5, 2) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* kvc_begin with bad arguments is refused and opens no batch. */
static void test_bad_begin(void) {
    pair *p = mixed_pair(4);
    const int32_t positions[] = {4, 5, -3, INT32_MAX};
    kvc_batch *batch = NULL;
    pair_feed(p, 0, 0, 4);
    CHECK_FAILS(kvc_begin(p->cache, 0, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens", "is 0:");
    CHECK_FAILS(kvc_begin(p->cache, KVC_MAX_BATCH + 1, NULL, NULL, NULL, &batch), KVC_ERR_INVALID,
                "num_tokens is 16777217", "16777216");
    CHECK_FAILS(kvc_begin(p->cache, -7, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens", "is -7:");
    CHECK_FAILS(kvc_begin(p->cache, 3, positions, NULL, NULL, &batch), KVC_ERR_INVALID, "positions[2]", "is -3:");
    CHECK_FAILS(kvc_begin(p->cache, 1, positions + 3, NULL, NULL, &batch), KVC_ERR_INVALID, "positions[0]",
                "is 2147483647:");
    CHECK_FAILS(kvc_begin(p->cache, 1, positions, NULL, NULL, NULL), KVC_ERR_INVALID, "batch", "NULL");
    CHECK(!batch);
    pair_check(p);
    CHECK(kvc_begin(p->cache, 2, positions, NULL, NULL, &batch) == KVC_OK); /* seq_ids NULL: sequence 0 */
    kvc_abort(batch);
    pair_check(p);
    pair_free(p);
}

/* kvc_put with bad arguments is refused and writes nothing, and commit names the rows that miss. */
static void test_bad_put(void) {
    pair *p = mixed_pair(4);
    const float rows[64] = {0};
    const kvc_put_args good = {.struct_size = sizeof good, .num_tokens = 1, .k = rows, .v = rows};
    CHECK(pair_begin(p, 4, (int32_t[]){0, 1, 2, 3}, (int64_t[]){0, 0, 0, 0}) == KVC_OK);
    CHECK_FAILS(kvc_commit(p->batch), KVC_ERR_INVALID, "token 0", "layer 0");
#define BAD(status, name, value, ...)                                  \
    do {                                                               \
        kvc_put_args args = good;                                      \
        __VA_ARGS__;                                                   \
        CHECK_FAILS(kvc_put(p->batch, 0, &args), status, name, value); \
    } while (0)
    CHECK_FAILS(kvc_put(p->batch, 0, NULL), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_put(p->batch, -1, &good), KVC_ERR_INDEX, "layer", "is -1:");
    CHECK_FAILS(kvc_put(p->batch, 4, &good), KVC_ERR_INDEX, "layer", "is 4:");
    BAD(KVC_ERR_INDEX, "first", "is -1:", args.first = -1);
    BAD(KVC_ERR_INDEX, "first", "is 4:", args.first = 4);
    BAD(KVC_ERR_INDEX, "num_tokens", "is -1:", args.num_tokens = -1);
    BAD(KVC_ERR_INDEX, "num_tokens", "is 4:", args.first = 1, args.num_tokens = 4);
    BAD(KVC_ERR_INDEX, "num_tokens", "is 2147483647:", args.first = 3, args.num_tokens = INT32_MAX);
    BAD(KVC_ERR_INVALID, "k", "NULL", args.k = NULL);
    BAD(KVC_ERR_INVALID, "v", "NULL", args.v = NULL);
    BAD(KVC_ERR_INVALID, "k_type", "is 3:", args.k_type = KVC_Q8_0);
    BAD(KVC_ERR_INVALID, "v_type", "is -1:", args.v_type = -1);
    BAD(KVC_ERR_INVALID, "k: k_token_stride", "is 6 bytes:", args.k_token_stride = 6);
    BAD(KVC_ERR_INVALID, "k: k_head_stride", "is -3 bytes:", args.k_head_stride = -3);
    BAD(KVC_ERR_INVALID, "v: v_token_stride", "is 1 bytes:", args.v_type = KVC_F16, args.v_token_stride = 1);
#undef BAD
    pair_check(p);
    pair_put(p, 0, 1, 1);
    kvc_put_args args = good;
    args.num_tokens = 0;
    CHECK_FAILS(kvc_put(p->batch, 0, &args), KVC_ERR_INVALID, "token 1", "layer 0 before");
    for (int l = 1; l < 4; l++) pair_put(p, l, 0, 4);
    pair_put(p, 0, 0, 1);
    CHECK_FAILS(kvc_commit(p->batch), KVC_ERR_INVALID, "token 2", "layer 0");
    pair_put(p, 0, 2, 2);
    CHECK(pair_commit(p) == KVC_OK); /* none of the refused calls wrote */
    pair_check(p);
    pair_free(p);
}

/* Reads with bad arguments are refused and write nothing. */
static void test_bad_reads(void) {
    pair *p = mixed_pair(4);
    float k[64];
    int32_t position = -5;
    int64_t num = -5, num_runs = -5;
    kvc_span span = {.num_rows = -5};
    kvc_block_info block = {.live = -5};
    kvc_run_info run = {.count = -5};
    kvc_hold *hold = NULL;
    const kvc_rows_out good = {.struct_size = sizeof good, .k = k};
    kvc_rows_out bad = good;
    pair_feed(p, 0, 0, 4);
    for (int32_t layer = -2; layer < 5; layer += layer == -2 ? 1 : 5) { /* -2, -1, 4 */
        char value[16];
        snprintf(value, sizeof value, "is %d:", layer);
        CHECK(layer == -1 || kvc_seq_len(p->cache, 0, layer) == -1);
        CHECK(kvc_positions(p->cache, 0, layer, &position, 1) == -1 && position == -5);
        CHECK_FAILS(kvc_gather(p->cache, 0, layer, 0, 1, &good), KVC_ERR_INDEX, "layer", value);
        CHECK_FAILS(kvc_spans(p->cache, 0, layer, &span, sizeof span, 1, &num, &hold), KVC_ERR_INDEX, "layer", value);
        CHECK_FAILS(kvc_blocks(p->cache, layer, &block, sizeof block, 1, &num, &run, sizeof run, 1, &num_runs),
                    KVC_ERR_INDEX, "layer", value);
    }
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, 4, 1, &num, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID, "blocks",
                "as 4:");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, &run, 8, 1, &num_runs), KVC_ERR_INVALID, "runs",
                "as 8:");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, NULL, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID,
                "num_blocks", "NULL");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, &run, sizeof run, 1, NULL), KVC_ERR_INVALID,
                "num_runs", "NULL");
    CHECK_FAILS(kvc_blocks(p->cache, 0, NULL, sizeof block, 3, &num, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID,
                "blocks is NULL", "for 3");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, NULL, sizeof run, 2, &num_runs), KVC_ERR_INVALID,
                "runs is NULL", "for 2");
    CHECK_FAILS(kvc_blocks(p->cache, 0, NULL, sizeof block, -1, &num, &run, sizeof run, 1, &num_runs), KVC_ERR_INVALID,
                "max_blocks is -1", "at least 0");
    CHECK_FAILS(kvc_blocks(p->cache, 0, &block, sizeof block, 1, &num, &run, sizeof run, -2, &num_runs),
                KVC_ERR_INVALID, "max_runs is -2", "at least 0");
    CHECK(num == -5 && num_runs == -5 && block.live == -5 && run.count == -5);
    CHECK_FAILS(kvc_spans(p->cache, 0, 0, &span, 8, 1, &num, &hold), KVC_ERR_INVALID, "spans", "as 8:");
    CHECK_FAILS(kvc_spans(p->cache, 0, 0, NULL, sizeof span, 1, &num, &hold), KVC_ERR_INVALID, "spans is NULL",
                "for 1");
    CHECK_FAILS(kvc_spans(p->cache, 0, 0, &span, sizeof span, -1, &num, &hold), KVC_ERR_INVALID, "max_spans is -1",
                "at least 0");
    CHECK(num == -5 && span.num_rows == -5 && !hold);
    CHECK(kvc_positions(p->cache, 0, 0, NULL, 9) == 4 && kvc_sequences(p->cache, NULL, 9) == 1);
    CHECK(kvc_sequences(p->cache, &num, 0) == 1 && num == -5);
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, NULL), KVC_ERR_INVALID, "out", "NULL");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, -1, 1, &good), KVC_ERR_INVALID, "first_row", "is -1");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 1, -2, &good), KVC_ERR_INVALID, "num_rows", "-2");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, INT64_MAX, 2, &good), KVC_ERR_INVALID, "first_row", "9223372036854775807");
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 3, 2, &good), KVC_ERR_INDEX, "up to 5", "holds 4");
    CHECK_FAILS(kvc_gather(p->cache, 8, 0, 0, 1, &good), KVC_ERR_INDEX, "sequence 8", "holds 0");
    bad.type = KVC_Q4_0;
    CHECK_FAILS(kvc_gather(p->cache, 0, 0, 0, 1, &bad), KVC_ERR_INVALID, "out_type", "is 4:");
    CHECK(kvc_gather(p->cache, 0, 0, 4, 0, &good) == KVC_OK && kvc_gather(p->cache, 8, 0, 0, 0, &good) == KVC_OK);
    CHECK(kvc_can_resume(p->cache, 0, -1) == 0);
    CHECK_FAILS(kvc_room(p->cache, 0, NULL), KVC_ERR_INVALID, "num_tokens", "NULL");
    pair_check(p);
    pair_free(p);
}

/* A call that makes a handle and fails writes NULL over the handle that stood there: it must not be ended again. */
static void test_failed_handles(void) {
    pair *p = pair_with((kvc_policy){0}, 4);
    char stands_for_a_handle;
    void *const old = &stands_for_a_handle;
    kvc_cache *cache = old, *clone = old, *loaded = old;
    kvc_batch *batch = old, *with = old, *open = NULL;
    kvc_plan *plan = old;
    kvc_prefix *prefix = old;
    kvc_store *store = old;
    kvc_hold *shown = old, *of_batch = old, *slots = old;
    kvc_span span;
    int64_t num;
    pair_feed(p, 0, 0, 4);
    CHECK_FAILS(kvc_cache_new(NULL, &cache), KVC_ERR_INVALID, "config", "NULL");
    CHECK_FAILS(kvc_load(NULL, &loaded), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_begin(p->cache, 0, NULL, NULL, NULL, &batch), KVC_ERR_INVALID, "num_tokens", "is 0");
    CHECK_FAILS(kvc_begin_with(p->cache, NULL, &with), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_prefix_new(p->cache, NULL, &prefix), KVC_ERR_INVALID, "config", "NULL");
    CHECK_FAILS(kvc_dir_store_new("", 0, &store), KVC_ERR_INVALID, "path", "empty");
    CHECK_FAILS(kvc_spans(p->cache, 0, 9, &span, sizeof span, 1, &num, &shown), KVC_ERR_INDEX, "layer", "is 9");
    CHECK(kvc_begin(p->cache, 1, NULL, NULL, NULL, &open) == KVC_OK);
    CHECK_FAILS(kvc_cache_clone(p->cache, &clone), KVC_ERR_BUSY, "batch", "open");
    CHECK_FAILS(kvc_plan_new(open, NULL, &plan), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_batch_spans(open, 0, 9, &span, sizeof span, 1, &num, &of_batch), KVC_ERR_INDEX, "layer", "is 9");
    CHECK_FAILS(kvc_slots(open, 9, 0, &span, sizeof span, &slots), KVC_ERR_INDEX, "layer", "is 9");
    CHECK(!cache && !clone && !loaded && !batch && !with && !plan && !prefix && !store);
    CHECK(!shown && !of_batch && !slots);
    kvc_abort(open);
    pair_free(p);
}

int main(void) {
    test_bad_limits();
    test_bad_layers();
    test_bad_creation();
    test_status_texts();
    test_last_error();
    test_type_names();
    test_bad_edits();
    test_bad_begin();
    test_bad_put();
    test_bad_reads();
    test_failed_handles();
    return test_result();
}
