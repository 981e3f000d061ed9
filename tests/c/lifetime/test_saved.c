/* Saved states: what can be damaged in a file, arguments, functions that fail, and edits meanwhile.  tests/world
 * saves and loads everything that can be in a cache. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/keeping.h"
#include "support/pairs.h"
#include "support/saved.h"

static const double right_angle[] = {1.57079632679489661923};

/* ---- the checksum ------------------------------------------------------------------------------------------------ */

/* Bytes that come in three parts, and are copied or not, to any address. */
static void check_parts(const uint8_t *data, size_t size, uint64_t right) {
    _Alignas(64) uint8_t copy[64 + 101 + 1];
    kvc_hasher hasher;
    for (size_t a = 0; a <= size; a++)
        for (size_t b = a; b <= size; b += 1 + size / 16) {
            const size_t at = (a + b) % 3 ? (a + b) % 3 * 16 : a % 64;
            memset(copy, 0xee, sizeof copy);
            kvc_hash_begin(&hasher, UINT64_C(0x9e3779b185ebca8d));
            kvc_hash_add(&hasher, data, a, copy + at);
            kvc_hash_add(&hasher, data + a, b - a, b % 2 ? copy + at + a : NULL);
            kvc_hash_add(&hasher, data + b, size - b, copy + at + b);
            CHECKF(kvc_hash_end(&hasher) == right, "parts at %zu and %zu of %zu bytes", a, b, size);
            CHECK(!memcmp(copy + at, data, a) && !memcmp(copy + at + b, data + b, size - b));
            CHECK(b % 2 == 0 || !memcmp(copy + at + a, data + a, b - a));
            CHECK(copy[at + size] == 0xee && (!at || copy[at - 1] == 0xee));
        }
}

/* Values of the xxhash library. */
static void test_hash(void) {
    static const struct {
        size_t size;
        uint64_t seed_0, seed_1;
    } right[] = {
        {0, UINT64_C(0xef46db3751d8e999), UINT64_C(0xb303d920ec349df)},
        {1, UINT64_C(0x1f25c8d0bc1f4bb6), UINT64_C(0x4e38da78585833ff)},
        {3, UINT64_C(0x31d2363f52e564c9), UINT64_C(0xdb3c6b59a9bf9c25)},
        {4, UINT64_C(0x9bb64b7d66ee9fda), UINT64_C(0xdce74de74556ff94)},
        {7, UINT64_C(0x9a7b149959ce60d8), UINT64_C(0xba5b6f2cc49d11a0)},
        {8, UINT64_C(0xdab99d95c6f90092), UINT64_C(0xf66e0ca3301b75a3)},
        {31, UINT64_C(0xa2aa5f33cc4a6119), UINT64_C(0x66f647a52a03a377)},
        {32, UINT64_C(0x23c3c17ef790fd97), UINT64_C(0x1b323691afef034)},
        {33, UINT64_C(0x50a7cfc7ba588784), UINT64_C(0x527f3caeff0c9292)},
        {63, UINT64_C(0x5e3e54b431c7493c), UINT64_C(0xca00b70007169fc7)},
        {64, UINT64_C(0xeb64b3ef6eeb01f), UINT64_C(0x34d5a64ae8dc6e9f)},
        {101, UINT64_C(0xbad4d3bf033bda4c), UINT64_C(0x3d09c9e61bb4c3c5)},
    };
    uint8_t data[101];
    for (int i = 0; i < 101; i++) data[i] = (uint8_t)(i * 7 + 3);
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        CHECKF(kvc_hash(data, right[i].size, 0) == right[i].seed_0, "%zu bytes", right[i].size);
        CHECKF(kvc_hash(data, right[i].size, UINT64_C(0x9e3779b185ebca8d)) == right[i].seed_1, "%zu bytes",
               right[i].size);
        check_parts(data, right[i].size, right[i].seed_1);
    }
}

/* ---- a small cache with all there is ----------------------------------------------------------------------------- */

static const kvc_layer varied_layers[] = {
    {.num_kv_heads = 2,
     .k_dim = 3,
     .v_dim = 5,
     .k_type = KVC_F32,
     .v_type = KVC_F16,
     .rope = {.kind = KVC_ROPE_FREQUENCIES, .first_dim = 1, .num_freqs = 1, .inv_freq = right_angle}},
    {.num_kv_heads = 1,
     .k_dim = 8,
     .v_dim = 1,
     .k_type = KVC_BF16,
     .policy = {.kind = KVC_SLIDING, .window = 5, .num_sink_tokens = 2},
     .rope = {.kind = KVC_ROPE_NONE}},
    {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2, .value_in_key = 1, .rope = {.kind = KVC_ROPE_NONE}},
    {.num_kv_heads = 1,
     .k_dim = 3,
     .v_dim = 2,
     .policy = {.kind = KVC_CROSS, .max_len = 6},
     .rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = right_angle}},
    {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1, .policy = {.kind = KVC_NONE}},
    {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2, .value_in_key = 1, .share = 3, .rope = {.kind = KVC_ROPE_NONE}},
};

/* Makes a cache of few rows, with shared ones, deltas, expired ones, and holes. */
static pair *varied_pair(void) {
    static pair p;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 6, varied_layers);
    pair_feed(&p, 0, 0, 9);
    kvc_copy_prefix(p.cache, 0, 4, 6);
    kvc_fork(p.cache, 0, -3);
    kvc_shift(p.cache, 4, 2, KVC_END, 3);
    kvc_remove(p.cache, 0, 3, 5, 0);
    CHECK(pair_begin(&p, 3, (int32_t[]){9, 10, 9}, (int64_t[]){0, 0, 4}) == KVC_OK);
    CHECK(pair_put_cross(&p, 3, 0, 4) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit(&p) == KVC_OK);
    kvc_fork(p.cache, 0, 7);
    pair_check(&p);
    return &p;
}

/* ---- damage ------------------------------------------------------------------------------------------------------ */

/* Loads a damaged file: it is refused, unless only the MAC differs; then what is loaded saves to the same bytes. */
static void check_damaged(const saved *file, const saved *original, const char *what, size_t at) {
    saved again = {0}, read = *file;
    kvc_cache *cache = NULL;
    kvc_load_args args = load_args_of(file);
    if (at % 2) {
        args = read_args_of(&read);
        read.fail_after = -1;
    }
    const kvc_status status = kvc_load(&args, &cache);
    CHECKF(status == KVC_OK || status == KVC_ERR_FORMAT, "%s %zu: %s", what, at, kvc_last_error());
    CHECKF(!cache == (status != KVC_OK) && (!cache || at >= original->size - KVC_MAC_BYTES), "%s %zu", what, at);
    if (!cache) return;
    CHECK(kvc_validate(cache) == KVC_OK && save_all(cache, &again) == KVC_OK);
    CHECKF(again.size == original->size && !memcmp(again.bytes, original->bytes, original->size - KVC_MAC_BYTES),
           "%s %zu: loaded, but not the same", what, at);
    free(again.bytes);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Returns a copy of so many bytes, in memory of just this size, for sanitizers. */
static saved bytes_of(const saved *file, size_t size) {
    saved copy = {.bytes = malloc(size ? size : 1), .size = size, .fail_after = -1};
    memcpy(copy.bytes, file->bytes, size);
    return copy;
}

/* Sets the pointers to the tables of a file, and returns how many bytes are before them. */
static uint64_t place_tables(const saved *file, kvc_format *format) {
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)(uint8_t)file->bytes[i] << 8 * i;
    length += 8;
    kvc_format_place(format, file->bytes + length);
    return length;
}

static void test_damage(void) {
    saved file;
    kvc_format format;
    pair *p = varied_pair();
    CHECK(save_all(p->cache, &file) == KVC_OK);
    const size_t counts_end = place_tables(&file, &format) + sizeof *format.state;
    check_saved(p->cache, NULL);
    for (size_t at = 0; at < file.size; at++) {
        saved copy = bytes_of(&file, at);
        kvc_cache *cache = NULL;
        const kvc_load_args args = load_args_of(&copy);
        CHECKF(kvc_load(&args, &cache) == KVC_ERR_FORMAT && !cache, "%zu bytes", at);
        CHECKF(strstr(kvc_last_error(), "truncated") || strstr(kvc_last_error(), "altered"), "%s", kvc_last_error());
        CHECKF(at < counts_end || strstr(kvc_last_error(), "not fit"), "it takes memory first: %s", kvc_last_error());
        free(copy.bytes);
    }
    for (size_t at = 0; at < file.size; at++)
        for (int bit = 0; bit < 8; bit += is_full() ? 1 : 7) {
            saved copy = bytes_of(&file, file.size);
            copy.bytes[at] ^= (char)(1 << bit);
            check_damaged(&copy, &file, "flipped byte", at);
            free(copy.bytes);
        }
    saved longer = bytes_of(&file, file.size);
    longer.bytes = realloc(longer.bytes, longer.size + 1);
    longer.bytes[longer.size++] = 0;
    const kvc_load_args args = load_args_of(&longer);
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "1 bytes more", "altered");
    free(longer.bytes);
    free(file.bytes);
    pair_free(p);
}

/* Computes the checksum of the tables anew; also the header, if a header of its length is possible. */
static void sign(saved *file) {
    kvc_format format;
    char header[1 << 14];
    const uint64_t length = place_tables(file, &format);
    CHECK(kvc_format_read_strings(&format, file->bytes + 8, length - 8) == KVC_OK);
    if (can_be_listed(&format) && kvc_format_header(&format, header, sizeof header) == length)
        memcpy(file->bytes, header, length);
    sign_tables(&format, file->bytes, length);
}

/* Tables that say anything, with a checksum that is right. */
static void test_hostile(void) {
    static const int64_t values[] = {0,
                                     1,
                                     2,
                                     3,
                                     5,
                                     7,
                                     -1,
                                     -2,
                                     1 << 20,
                                     INT32_MAX,
                                     INT32_MIN,
                                     INT64_MAX,
                                     INT64_MIN,
                                     (int64_t)1 << 32,
                                     (int64_t)1 << 61};
    saved file;
    pair *p = varied_pair();
    CHECK(save_all(p->cache, &file) == KVC_OK);
    kvc_format format;
    const size_t start = (size_t)place_tables(&file, &format);
    const size_t fields = (size_t)((char *)format.checksum - file.bytes - start) / 8;
    int num_loaded = 0;
    for (int i = 0; i < (is_full() ? 50000 : 5000); i++) {
        saved copy = bytes_of(&file, file.size);
        for (int n = random_int(1, 3); n > 0; n--) {
            const int64_t value = values[random_int(0, sizeof values / sizeof *values)];
            /* counts are in the first table: their like is tested by flipping bits */
            memcpy(copy.bytes + start + 8 * (size_t)random_int(random_int(0, 4) ? 16 : 0, (int)fields), &value, 8);
        }
        if ((uint64_t)((kvc_saved_state *)(copy.bytes + start))->num_sequences < 9 &&
            !memcmp(copy.bytes + start, file.bytes + start, 48))
            sign(&copy);
        kvc_cache *cache = NULL;
        const kvc_load_args args = load_args_of(&copy);
        const kvc_status status = kvc_load(&args, &cache);
        CHECKF(status == KVC_OK || status == KVC_ERR_FORMAT || status == KVC_ERR_FULL || status == KVC_ERR_NOMEM ||
                   status == KVC_ERR_INVALID,
               "%s", kvc_last_error());
        if (cache) {
            num_loaded++;
            CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
            CHECK(kvc_compact(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
        }
        free(copy.bytes);
    }
    CHECKF(num_loaded > 100, "%d of the files were loaded", num_loaded);
    free(file.bytes);
    pair_free(p);
}

/* A field has an impossible value; or it is the first such field. */
static void test_impossible_tables(void) {
    saved file;
    kvc_format f;
    pair *p = varied_pair();
    CHECK(save_all(p->cache, &file) == KVC_OK);
    place_tables(&file, &f);
    kvc_saved_holding *first = f.holdings, *second = f.holdings + f.state->num_groups;
    kvc_saved_run *run = f.runs;
    const int64_t full = f.layers[0].group, cross = f.layers[3].group, none = f.layers[4].group;
    CHECK(second[cross].num_runs == 1 && first[full].num_runs > 0);
    CHECK(f.layers[3].rope == KVC_ROPE_UNKNOWN); /* the cross-attention layer's keys never move */
    const struct {
        int64_t *at, value;
        const char *name;
    } wrong[] = {
        {&f.state->block_size, 0, "blocks of 0 slots"},
        {&f.state->block_size, (int64_t)1 << 32 | 4, "blocks of 4294967300 slots"},
        {&f.state->block_size, INT32_MAX, "block_size is 2147483647"},
        {&f.sequences[1].id, f.sequences[0].id, "sequence 1 of the table"},
        {&f.sequences[0].num_tokens, -1, "sequence 0 of the table"},
        {&first[full].num_runs, -1, "holds in group"},
        {&first[full].lost_begin, -1, "holds in group"},
        {&first[full].lost_begin, first[full].lost_end + 1, "holds in group"},
        {&first[full].lost_end, (int64_t)INT32_MAX + 1, "holds in group"},
        {&first[full].missing_begin, -1, "holds in group"},
        {&first[full].missing_end, (int64_t)INT32_MAX + 1, "holds in group"},
        {&second[cross].num_runs, 2, "holds in group"},
        {&second[cross].lost_end, 1, "holds in group"},
        {&second[cross].missing_end, 1, "holds in group"},
        {&second[none].num_runs, 1, "holds in group"},
        {&second[none].lost_end, 1, "holds in group"},
        {&second[none].missing_end, 1, "holds in group"},
        {&f.layers[3].max_len, 3, "run "}, /* it has 4 rows */
        {&run->row, -1, "run 0 "},
        {&run->row, f.group_rows[full] - run->count + 1, "run 0 "},
        {&run->count, 0, "run 0 "},
        {&run->position, -1, "run 0 "},
        {&run->position, INT32_MAX - run->count + 1, "run 0 "},
        {&run->delta, run->position + 1, "run 0 "},
        {&run->delta, run->position - INT32_MAX - 1, "run 0 "},
        {&run->delta, -1, "run 0 "}, /* of an exact sequence */
        {&f.exact_to[0], -1, "sequence 0 of the table"},
        {&f.exact_to[1], (int64_t)INT32_MAX + 1, "sequence 1 of the table"},
    };
    const kvc_load_args args = load_args_of(&file);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int64_t right = *wrong[i].at;
        *wrong[i].at = wrong[i].value;
        sign(&file);
        CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "altered", wrong[i].name);
        *wrong[i].at = right;
    }
    f.state->block_size = 1;
    sign(&file);
    CHECKF(kvc_load(&args, NULL) == KVC_OK, "%s", kvc_last_error());
    free(file.bytes);
    pair_free(p);
}

/* The file has a header of safetensors.  Each tensor has as many bytes as its type and shape say, and tables have the
 * shapes of docs/format.md. */
static void test_header(void) {
    static const struct {
        const char *name;
        size_t bytes;
    } dtypes[] = {{"U8", 1}, {"I8", 1}, {"F16", 2}, {"BF16", 2}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8}};
    static const char *const tables[] = {
        "\"state\":{\"dtype\":\"I64\",\"shape\":[1,16],",    "\"layers\":{\"dtype\":\"I64\",\"shape\":[1,24],",
        "\"group_rows\":{\"dtype\":\"I64\",\"shape\":[1],",  "\"inv_freq\":{\"dtype\":\"F64\",\"shape\":[0],",
        "\"sequences\":{\"dtype\":\"I64\",\"shape\":[1,2],", "\"holdings\":{\"dtype\":\"I64\",\"shape\":[1,1,5],",
        "\"runs\":{\"dtype\":\"I64\",\"shape\":[1,4],",      "\"tokens\":{\"dtype\":\"I64\",\"shape\":[0],",
        "\"exact_to\":{\"dtype\":\"I64\",\"shape\":[1],",    "\"checksum\":{\"dtype\":\"U64\",\"shape\":[1],"};
    for (int32_t type = 0; kvc_type_name(type); type++) {
        static pair p;
        const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 64, .v_dim = 32, .k_type = type, .v_type = type};
        saved file;
        p = (pair){.config = {.num_threads = 1}};
        pair_new(&p, 1, &layer);
        pair_feed(&p, 0, 0, 5);
        CHECK(save_all(p.cache, &file) == KVC_OK);
        size_t end = 0;
        int num = 0;
        for (const char *at = file.bytes; (at = strstr(at + 8, "\"dtype\":\"")); num++) {
            char name[8];
            size_t shape[3] = {1, 1, 1}, first = 0, size = 0;
            const char *offsets = strstr(at, "\"data_offsets\":[");
            CHECK(sscanf(at, "\"dtype\":\"%7[A-Z0-9]\",\"shape\":[%zu,%zu,%zu", name, shape, shape + 1, shape + 2) >=
                  2);
            CHECK(offsets && sscanf(offsets, "\"data_offsets\":[%zu,%zu", &first, &size) == 2 && first == end);
            for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
                if (!strcmp(name, dtypes[i].name)) end += dtypes[i].bytes * shape[0] * shape[1] * shape[2];
            CHECKF(end == size, "type %d: tensor %d ends at %zu: %.120s", type, num, size, at);
        }
        CHECK(num >= 8);
        for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
            CHECKF(strstr(file.bytes + 8, tables[i]), "%s: %.2000s", tables[i], file.bytes + 8);
        free(file.bytes);
        pair_free(&p);
    }
}

static void test_other_files(void) {
    char text[300] = "no saved state at all, but some text that is long enough for a header and then some ........";
    kvc_load_args args = {.struct_size = sizeof args, .data = text, .size = sizeof text};
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "no saved state", "begin");
    for (args.size = 1; args.size < 12; args.size++) /* nor is a beginning of it a truncated state */
        CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "no saved state", "begin");
    args.size = sizeof text;
    memset(text, 0, 8);
    text[0] = 56;
    memcpy(text + 8, "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}   ", 56);
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "no saved state", "begin");
    memcpy(text + 8, "{\"__metadata__\":{\"format\":\"kvcache\",\"version\":\"3\",\"new\"", 56);
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "newer format", "version 3");
}

/* A loaded cache has the limits of the saved cache. */
static void test_saved_limits(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1};
    const kvc_config config = {
        .block_size = 8, .max_seq_len = 100, .max_sequences = 3, .capacity = 200, .max_bytes = 1 << 20};
    saved file, again;
    kvc_cache *cache = cache_of(&layer, 1, config), *loaded = NULL;
    kvc_format f;
    CHECK(save_all(cache, &file) == KVC_OK);
    place_tables(&file, &f);
    CHECK(f.state->block_size == 8 && f.state->max_seq_len == 100 && f.state->max_sequences == 3);
    CHECK(f.state->capacity == 200 && f.state->max_bytes == 1 << 20);
    const kvc_load_args args = load_args_of(&file);
    CHECKF(kvc_load(&args, &loaded) == KVC_OK, "%s", kvc_last_error());
    CHECK(save_all(loaded, &again) == KVC_OK && is_same(&again, &file));
    CHECK(kvc_cache_free(cache) == KVC_OK && kvc_cache_free(loaded) == KVC_OK);
    free(file.bytes);
    free(again.bytes);
}

/* A file may be tables for the most part, and still they fit in it. */
static void test_many_tokens(void) {
    static int64_t tokens[10000];
    const int64_t id = 1, num_tokens = sizeof tokens / sizeof *tokens;
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1};
    saved file = {.fail_after = -1};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){0});
    const kvc_save_args args = {.struct_size = sizeof args,
                                .write = saved_write,
                                .user = &file,
                                .seq_ids = &id,
                                .num_sequences = 1,
                                .tokens = tokens,
                                .num_tokens = &num_tokens};
    CHECKF(kvc_save(cache, &args) == KVC_OK, "%s", kvc_last_error());
    const kvc_load_args load = load_args_of(&file);
    CHECKF(kvc_load(&load, NULL) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_cache_free(cache) == KVC_OK);
    free(file.bytes);
}

/* ---- functions of the caller ------------------------------------------------------------------------------------- */

static void test_failing_functions(void) {
    saved file, part;
    kvc_cache *cache = NULL;
    pair *p = varied_pair();
    CHECK(save_all(p->cache, &file) == KVC_OK && file.last == KVC_MAC_BYTES);
    kvc_save_args save_args = {.struct_size = sizeof save_args, .write = saved_write, .user = &part};
    int num = 0;
    for (kvc_status status = KVC_ERR_CALLBACK; status != KVC_OK && num < 100; num++) {
        part = (saved){.fail_after = num};
        status = kvc_save(p->cache, &save_args);
        CHECK(status == KVC_OK || (status == KVC_ERR_CALLBACK && strstr(kvc_last_error(), "write")));
        pair_check(p);
        free(part.bytes);
    }
    CHECKF(num > 10 && num < 100, "%d calls", num);
    num = 0;
    for (kvc_status status = KVC_ERR_CALLBACK; status != KVC_OK && num < 100; num++) {
        kvc_load_args args = read_args_of(&file);
        file.fail_after = num;
        status = kvc_load(&args, &cache);
        CHECK(status == KVC_OK || (status == KVC_ERR_CALLBACK && strstr(kvc_last_error(), "read") && !cache));
        args = read_args_of(&file);
        file.fail_after = num;
        CHECK(kvc_restore(p->cache, &args) == status);
        CHECK(status == KVC_OK || kvc_validate(p->cache) == KVC_OK);
    }
    CHECKF(num > 10 && num < 100 && file.last == KVC_MAC_BYTES, "%d calls", num);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    pair_free(p);
    free(file.bytes);
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static int64_t token_ids[8], token_sums[8];
static int num_token_calls;

static int32_t take_tokens(void *user, int64_t seq_id, const int64_t *tokens, int64_t num_tokens) {
    token_ids[num_token_calls] = seq_id;
    token_sums[num_token_calls] = num_tokens;
    for (int64_t i = 0; i < num_tokens; i++) token_sums[num_token_calls] += 10 * tokens[i];
    num_token_calls++;
    return user != NULL;
}

static void test_tokens_and_fingerprint(void) {
    const int64_t ids[] = {-3, 4, 99}, tokens[] = {5, -6, 7, INT64_MAX / 100}, num_tokens[] = {3, 0, 1};
    saved file = {.fail_after = -1};
    pair *p = varied_pair();
    kvc_save_args args = {.struct_size = sizeof args,
                          .write = saved_write,
                          .user = &file,
                          .seq_ids = ids,
                          .num_sequences = 3,
                          .tokens = tokens,
                          .num_tokens = num_tokens,
                          .fingerprint = "a model's name, {up: to} 255"};
    kvc_cache *cache = NULL;
    CHECK(kvc_save(p->cache, &args) == KVC_OK);
    kvc_load_args load = load_args_of(&file);
    load.tokens = take_tokens;
    load.fingerprint = "a model's name, {up: to} 255";
    CHECK(kvc_load(&load, &cache) == KVC_OK);
    CHECK(num_token_calls == 3 && !memcmp(token_ids, ids, sizeof ids));
    CHECK(token_sums[0] == 63 && token_sums[1] == 0 && token_sums[2] == INT64_MAX / 100 * 10 + 1);
    CHECK(kvc_seq_len(cache, 99, -1) == 0 && kvc_seq_len(cache, 0, -1) == 0);
    CHECK(kvc_seq_len(cache, 4, 0) == kvc_seq_len(p->cache, 4, 0));
    load.user = &load; /* take_tokens fails */
    CHECK_FAILS(kvc_restore(cache, &load), KVC_ERR_CALLBACK, "tokens", "-3");
    load.tokens = NULL;
    load.fingerprint = "another";
    CHECK_FAILS(kvc_load(&load, NULL), KVC_ERR_FORMAT, "another model", "a model's name");
    args.fingerprint = "with \"quotes\"";
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "fingerprint", "quotes");
    CHECK(kvc_cache_free(cache) == KVC_OK);
    free(file.bytes);
    pair_free(p);
}

static void test_save_arguments(void) {
    pair *p = varied_pair();
    saved file = {.fail_after = -1};
    const int64_t ids[] = {4, 4}, num_tokens[] = {-1, 0};
    kvc_save_args args = {.struct_size = sizeof args, .user = &file};
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "write", "NULL");
    args.write = saved_write;
    args.num_sequences = 2;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "num_sequences", "2");
    args.seq_ids = ids;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "seq_ids[1]", "4");
    args.num_sequences = 1;
    args.tokens = ids;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "num_tokens", "NULL");
    args.num_tokens = num_tokens;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "num_tokens[0]", "-1");
    args.num_sequences = -1;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "num_sequences", "is -1");
    args.num_sequences = INT64_C(1) << 31;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "num_sequences", "is 2147483648");
    args.num_sequences = 1;
    args.tokens = NULL;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "tokens is NULL", "neither");
    args.tokens = ids;
    args.seq_ids = NULL;
    args.num_sequences = 0;
    CHECK_FAILS(kvc_save(p->cache, &args), KVC_ERR_INVALID, "seq_ids", "tokens");
    CHECK(!file.size);
    pair_free(p);
}

static void test_load_arguments(void) {
    pair *p = varied_pair();
    saved file;
    kvc_cache *cache = NULL;
    CHECK(save_all(p->cache, &file) == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    const int64_t ids[] = {-3, 5}, to_ids[] = {8, 8}, both[] = {-3, 0};
    args.read = saved_read;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "data and read", "both not NULL");
    args.read = NULL;
    args.data = NULL;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "data and read", "are both NULL");
    args.data = file.bytes;
    args.size = -1;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "size", "-1");
    args = load_args_of(&file);
    args.to_ids = ids;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "to_ids", "seq_ids is NULL");
    args.seq_ids = ids;
    args.num_sequences = 2;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "seq_ids[1]", "5");
    args.seq_ids = both;
    args.to_ids = to_ids;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "to_ids", "8");
    args.config = &p->config;
    CHECK_FAILS(kvc_restore(p->cache, &args), KVC_ERR_INVALID, "config", "own");
    pair_check(p);
    args.to_ids = (int64_t[]){20, 8}; /* in any order */
    CHECK(kvc_load(&args, &cache) == KVC_OK);
    CHECK(kvc_seq_len(cache, 20, 0) == kvc_seq_len(p->cache, -3, 0) && kvc_seq_len(cache, 8, 0) == 9);
    CHECK(stats_in(cache).live_slots < stats_of(p).live_slots);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    free(file.bytes);
    pair_free(p);
}

/* ---- other layers ------------------------------------------------------------------------------------------------ */

/* Checks that a file is not replaced into a cache with this instead of layer l. */
static void check_other(const saved *file, int l, kvc_layer layer, const char *field, const char *values) {
    kvc_layer layers[6];
    kvc_cache *cache = NULL;
    char name[32];
    memcpy(layers, varied_layers, sizeof layers);
    layers[l] = layer;
    const kvc_config config = {
        .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 6};
    kvc_load_args args = load_args_of(file);
    snprintf(name, sizeof name, "layers[%d].%s", l, field);
    CHECKF(kvc_cache_new(&config, &cache) == KVC_OK, "%s", kvc_last_error());
    CHECK_FAILS(kvc_restore(cache, &args), KVC_ERR_FORMAT, name, values);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    args.config = &config;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FORMAT, name, values);
}

static void test_other_layers(void) {
    pair *p = varied_pair();
    saved file;
    kvc_cache *cache = NULL;
    CHECK(save_all(p->cache, &file) == KVC_OK);
    kvc_layer layer = varied_layers[0];
    layer.k_dim = 4;
    check_other(&file, 0, layer, "k_dim", "3 in the file, and 4");
    layer = varied_layers[0];
    layer.v_type = KVC_F32;
    check_other(&file, 0, layer, "v_type", "1 in the file, and 0");
    layer = varied_layers[1];
    layer.policy.window = 6;
    check_other(&file, 1, layer, "policy", "differs");
    layer = varied_layers[3];
    layer.num_kv_heads = 2;
    check_other(&file, 3, layer, "num_kv_heads", "1 in the file, and 2");
    layer = varied_layers[0];
    layer.rope.inv_freq = (double[]){1};
    check_other(&file, 0, layer, "rope", "differs");
    layer.rope.kind = KVC_ROPE_NONE;
    check_other(&file, 0, layer, "rope.kind", "2 in the file, and 1");
    kvc_load_args args = load_args_of(&file);
    kvc_config config = {
        .struct_size = sizeof config, .layers = varied_layers, .layer_size = sizeof *varied_layers, .num_layers = 4};
    args.config = &config;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FORMAT, "6 layers", "4");
    free(file.bytes);
    pair_free(p);
}

static int32_t keep_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                         int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    return 0;
}

static void test_function(void) {
    static pair p;
    const kvc_layer layer = {
        .num_kv_heads = 1, .k_dim = 4, .v_dim = 2, .rope = {.kind = KVC_ROPE_FUNCTION, .shift = keep_keys}};
    saved file;
    kvc_cache *cache = NULL;
    p = (pair){.config = {.block_size = 4, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    pair_feed(&p, 0, 0, 9);
    CHECK(save_all(p.cache, &file) == KVC_OK);
    const kvc_load_args args = load_args_of(&file);
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_INVALID, "config.layers", "layer 0");
    CHECK(kvc_load(&args, NULL) == KVC_OK);
    check_saved(p.cache, &p.config); /* hands it in */
    free(file.bytes);
    pair_free(&p);
}

static void test_limits(void) {
    pair *p = varied_pair();
    saved file;
    kvc_cache *cache = NULL;
    CHECK(save_all(p->cache, &file) == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    kvc_config config = {.struct_size = sizeof config, .capacity = 8, .num_threads = 3, .block_size = 3};
    args.config = &config;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FULL, "capacity", "8");
    config.capacity = 0;
    config.max_bytes = 1 << 20;
    CHECK(kvc_load(&args, &cache) == KVC_OK);
    CHECK(kvc_block_size(cache) == 3 && kvc_capacity(cache) == -1);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    cache = NULL;
    config.max_bytes = 12000;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FULL, "max_bytes 12000", "loading");
    long long counted = 0, left = 0;
    CHECK(sscanf(kvc_last_error(), "%*[^0-9]%lld%*[^:]: max_bytes %*d leaves %lld", &counted, &left) == 2);
    config.max_bytes += counted - left - 1;
    CHECK_FAILS(kvc_load(&args, &cache), KVC_ERR_FULL, "max_bytes", "loading");
    config.max_bytes++; /* as much as the error says */
    CHECKF(kvc_load(&args, &cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_cache_free(cache) == KVC_OK);
    free(file.bytes);
    pair_free(p);
}

/* Retained sequences are not saved unless they are named, not replaced, and evicted for what is loaded. */
static void test_retained(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};
    static pair p;
    saved file, retained;
    const int64_t from = 0, to = 1;
    kvc_cache *cache = NULL;
    p = (pair){.config = {.block_size = 4, .capacity = 24, .num_threads = 1}};
    pair_new(&p, 1, &layer);
    pair_feed(&p, 0, 0, 12);
    CHECK(retain(p.cache, 0, 50, 4, 8) == KVC_OK);
    CHECK(save_all(p.cache, &file) == KVC_OK && save_one(p.cache, 50, &retained) == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    CHECK(kvc_load(&args, &cache) == KVC_OK && kvc_seq_len(cache, 50, 0) == 0 && kvc_cache_free(cache) == KVC_OK);
    args = load_args_of(&retained);
    CHECK(kvc_load(&args, &cache) == KVC_OK && kvc_seq_len(cache, 50, 0) == 4 && kvc_cache_free(cache) == KVC_OK);
    CHECK_FAILS(kvc_restore(p.cache, &args), KVC_ERR_INVALID, "sequence 50", "running call");
    CHECK(kvc_clear_sequence(p.cache, 0) == KVC_OK); /* 4 slots are left, which the retained sequence has */
    args = load_args_of(&file);
    CHECK(kvc_restore(p.cache, &args) == KVC_OK && kvc_seq_len(p.cache, 50, 0) == 4);
    args.seq_ids = &from;
    args.to_ids = &to;
    args.num_sequences = 1;
    CHECKF(kvc_restore(p.cache, &args) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_seq_len(p.cache, 50, 0) == 0 && kvc_seq_len(p.cache, 1, 0) == 12 && kvc_validate(p.cache) == KVC_OK);
    free(file.bytes), free(retained.bytes);
    pair_free(&p);
}

/* ---- large tensors ----------------------------------------------------------------------------------------------- */

enum { LARGE_ROWS = 6000, LARGE_HEADS = 4, LARGE_DIM = 96 };

static void test_large(int with_threads) {
    static float rows[LARGE_ROWS][LARGE_HEADS][LARGE_DIM];
    const kvc_layer layer = {.num_kv_heads = LARGE_HEADS, .k_dim = LARGE_DIM, .v_dim = LARGE_DIM, .v_type = KVC_Q8_0};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .block_size = 100,
                               .num_threads = with_threads ? 3 : 1};
    const int64_t second = 2;
    kvc_cache *cache = NULL, *loaded = NULL;
    saved file, again, some, same;
    for (int t = 0; t < LARGE_ROWS; t++)
        for (int d = 0; d < LARGE_HEADS * LARGE_DIM; d++) rows[t][d / LARGE_DIM][d % LARGE_DIM] = random_float();
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK);
    for (int64_t id = 1; id <= 3; id++) {
        int64_t ids[LARGE_ROWS / 3];
        kvc_batch *batch = NULL;
        for (int t = 0; t < LARGE_ROWS / 3; t++) ids[t] = id;
        const void *at = rows[LARGE_ROWS / 3 * (id - 1)];
        CHECK(kvc_begin(cache, LARGE_ROWS / 3, NULL, ids, NULL, &batch) == KVC_OK);
        put_floats(batch, 0, 0, 0, LARGE_HEADS, LARGE_DIM, LARGE_DIM, at, at);
        CHECK(kvc_commit(batch) == KVC_OK);
    }
    CHECK(save_all(cache, &file) == KVC_OK && file.size > (11 << 20));
    kvc_load_args args = load_args_of(&file);
    CHECK(kvc_load(&args, NULL) == KVC_OK);
    args.seq_ids = &second; /* rows in the middle of tensors */
    args.num_sequences = 1;
    CHECK(kvc_restore(cache, &args) == KVC_OK);
    CHECK(save_all(cache, &again) == KVC_OK && is_same(&again, &file));
    CHECK(kvc_load(&args, &loaded) == KVC_OK);
    CHECK(save_one(cache, 2, &some) == KVC_OK && save_all(loaded, &same) == KVC_OK);
    CHECK(is_same(&some, &same));
    file.bytes[file.size / 3] ^= 16;
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_FORMAT, "altered", "layer.0.k");
    file.bytes[file.size / 3] ^= 16;
    file.bytes[file.size - 5000] ^= 1;
    CHECK_FAILS(kvc_restore(cache, &args), KVC_ERR_FORMAT, "altered", "layer.0.v");
    CHECK(kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK && kvc_cache_free(loaded) == KVC_OK);
    free(file.bytes), free(again.bytes), free(some.bytes), free(same.bytes);
}

/* ---- meanwhile --------------------------------------------------------------------------------------------------- */

/* A file whose functions edit the cache between its parts. */
typedef struct busy_file {
    saved file; /* first, so that it is what saved_write and saved_read get */
    pair *p;
    int64_t target; /* the sequence being replaced */
} busy_file;

static void check_held(const busy_file *b) {
    CHECK_FAILS(kvc_compact(b->p->cache), KVC_ERR_HELD, "held", "");
    CHECK_FAILS(kvc_cache_free(b->p->cache), KVC_ERR_HELD, "held", "");
}

static void edit_meanwhile(busy_file *b) {
    int64_t id = random_int(20, 24);
    CHECKF(kvc_validate(b->p->cache) == KVC_OK, "%s", kvc_last_error());
    const int32_t next = kvc_next_position(b->p->cache, id);
    pair_feed(b->p, id, next, next + 2);
    kvc_remove(b->p->cache, 0, random_int(0, 9), random_int(9, 12), 0);
    pair_inject(b->p, -3, 0, 0, 4, 1);
    kvc_clear_sequence(b->p->cache, 4);
}

static int32_t write_busily(void *user, const void *data, size_t size) {
    check_held(user);
    edit_meanwhile(user);
    return saved_write(user, data, size);
}

static int32_t read_busily(void *user, void *data, size_t size) {
    busy_file *b = user;
    check_held(b);
    if (b->file.at > b->file.size / 2) /* rows are being read */
        edit_meanwhile(user);
    return saved_read(user, data, size);
}

static void test_meanwhile(void) {
    busy_file b = {.file = {.fail_after = -1}};
    saved before;
    kvc_cache *cache = NULL;
    kvc_batch *batch = NULL;
    b.p = varied_pair();
    CHECK(save_all(b.p->cache, &before) == KVC_OK);
    const kvc_save_args args = {.struct_size = sizeof args, .write = write_busily, .user = &b};
    CHECK(kvc_save(b.p->cache, &args) == KVC_OK);
    CHECK(is_same(&b.file, &before));
    pair_check(b.p);
    CHECK(kvc_compact(b.p->cache) == KVC_OK);
    free(b.file.bytes);
    b.file = before;
    kvc_load_args load = read_args_of(&b.file);
    load.user = &b;
    load.read = read_busily;
    const int64_t from = 7, to = 31;
    load.seq_ids = &from;
    load.to_ids = &to;
    load.num_sequences = 1;
    CHECKF(kvc_restore(b.p->cache, &load) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_validate(b.p->cache) == KVC_OK && kvc_compact(b.p->cache) == KVC_OK);
    CHECK(kvc_seq_len(b.p->cache, 31, 0) == kvc_seq_len(b.p->cache, 7, 0));
    load = load_args_of(&before);
    CHECK(kvc_begin(b.p->cache, 1, NULL, (int64_t[]){7}, NULL, &batch) == KVC_OK);
    CHECK_FAILS(kvc_restore(b.p->cache, &load), KVC_ERR_BUSY, "sequence 7", "open batch");
    kvc_abort(batch);
    CHECK(kvc_load(&load, &cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    free(before.bytes);
    pair_free(b.p);
}

static int32_t read_and_fork(void *user, void *data, size_t size) {
    busy_file *b = user;
    if (stats_of(b->p).live_slots == 24) /* rows are being read */
        kvc_fork(b->p->cache, 0, 1);
    return saved_read(user, data, size);
}

/* Rows that are to be replaced stay where another sequence shares them meanwhile, and count for capacity then. */
static void test_shared_meanwhile(void) {
    static pair p;
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};
    for (int capacity = 20; capacity <= 24; capacity += 4) {
        busy_file b = {.p = &p};
        p = (pair){.config = {.block_size = 4, .capacity = capacity, .num_threads = 1}};
        pair_new(&p, 1, &layer);
        pair_feed(&p, 0, 0, 12);
        CHECK(save_all(p.cache, &b.file) == KVC_OK);
        kvc_load_args load = read_args_of(&b.file);
        load.user = &b;
        load.read = read_and_fork;
        if (capacity < 24)
            CHECK_FAILS(kvc_restore(p.cache, &load), KVC_ERR_FULL, "24 tokens", "capacity is 20");
        else
            CHECKF(kvc_restore(p.cache, &load) == KVC_OK, "%s", kvc_last_error());
        const double share = capacity < 24 ? 0.6 : 1; /* i386 has more bits of a constant */
        CHECK(kvc_utilization(p.cache) == share && kvc_validate(p.cache) == KVC_OK);
        if (capacity < 24) pair_check(&p);
        free(b.file.bytes);
        pair_free(&p);
    }
}

/* ---- another order of bytes -------------------------------------------------------------------------------------- */

static void test_big_endian(void) {
    static pair p;
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 2};
    saved file;
    kvc_load_args args = {.struct_size = sizeof args, .data = "", .size = 0};
    p = (pair){.config = {.num_threads = 1}};
    pair_new(&p, 1, &layer);
    CHECK_FAILS(save_all(p.cache, &file), KVC_ERR_UNSUPPORTED, "big-endian", "little-endian");
    CHECK_FAILS(kvc_load(&args, NULL), KVC_ERR_UNSUPPORTED, "big-endian", "little-endian");
    CHECK_FAILS(kvc_restore(p.cache, &args), KVC_ERR_UNSUPPORTED, "big-endian", "little-endian");
    pair_free(&p);
}

int main(void) {
    if (KVC_IS_BIG_ENDIAN) {
        test_big_endian();
        return test_result();
    }
    test_hash();
    test_damage();
    test_hostile();
    test_impossible_tables();
    test_header();
    test_other_files();
    test_saved_limits();
    test_many_tokens();
    test_failing_functions();
    test_tokens_and_fingerprint();
    test_save_arguments();
    test_load_arguments();
    test_other_layers();
    test_function();
    test_limits();
    test_retained();
    test_large(0);
    test_large(1);
    test_meanwhile();
    test_shared_meanwhile();
    return test_result();
}
