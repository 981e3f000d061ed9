/* Blocks between caches and stores.  A cache fetches what another wrote, and nothing else.  A store that fails, lies or
 * hands out too much costs blocks and nothing else.  tests/world lets memory run short. */
#define _XOPEN_SOURCE 700 /* posix_memalign, mkdtemp, P_tmpdir */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "prefix/prefix.h"
#include "support/feeding.h"

enum { LAYERS = 2, DIM = 32, BLOCK = 4, NUM_TOKENS = 22, NUM_BLOCKS = 5, MOST_VALUES = 40, MOST_VALUE = 4096 };
enum { STATE = 100 }; /* bytes of a recurrent state */
#include "support/shelf.h"

/* ---- a store that breaks ----------------------------------------------------------------------------------------- */

static int num_reads, num_writes;
static int fail_at = -1; /* the call of this number fails; -1: none does */
static int64_t longer;   /* what it says of values is so many bytes more */

static int fails(void) {
    if (num_reads + num_writes - 1 != fail_at) return 0;
    kvc_set_last_error("the shelf broke at call %d", fail_at);
    return 1;
}

static kvc_status read_or_fail(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    num_reads++;
    if (fails()) return KVC_ERR_STORE;
    const kvc_status status = read_value(user, name, to, max_bytes, size);
    if (*size) *size += longer;
    return status;
}

static kvc_status write_or_fail(void *user, const uint8_t *name, const void *from, int64_t size) {
    num_writes++;
    return fails() ? KVC_ERR_STORE : write_value(user, name, from, size);
}

static const kvc_store shelf = {.struct_size = sizeof shelf, .read = read_or_fail, .write = write_or_fail};

static void clear_shelf(void) {
    memset(values, 0, sizeof values);
    num_values = num_reads = num_writes = 0;
    fail_at = -1;
    longer = 0;
}

/* ---- a cache and its prefix -------------------------------------------------------------------------------------- */

static int64_t ids[NUM_TOKENS];
static const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = NUM_TOKENS};
static const kvc_prefix_config plain = {.struct_size = sizeof plain, .fingerprint = "a model", .collects_new = 1};
static const kvc_prefix_config recurrent = {
    .struct_size = sizeof recurrent, .fingerprint = "a model", .collects_new = 1, .state_bytes = STATE};

/* window: of the last layer; 0: it sees everything, as the others do. */
static kvc_cache *new_cache_with(const kvc_prefix_config *config, int32_t window, kvc_prefix **prefix) {
    kvc_layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (kvc_layer){.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_Q8_0, .v_type = KVC_F16};
    if (window) layers[LAYERS - 1].policy = (kvc_policy){KVC_SLIDING, .window = window};
    kvc_cache *cache = heap_cache(LAYERS, layers, (kvc_config){.block_size = BLOCK, .capacity = 64});
    CHECKF(kvc_prefix_new(cache, config, prefix) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

static kvc_cache *new_cache(const kvc_prefix_config *config, kvc_prefix **prefix) {
    return new_cache_with(config, 0, prefix);
}

/* The rows of a token of a layer. */
static void fill_rows(float *rows, int64_t id, int layer) {
    for (int i = 0; i < DIM; i++) rows[i] = (float)(id * 7 + layer * 3 + i);
}

/* Computes the tokens that a sequence lacks, up to `end`. */
static void compute(kvc_cache *cache, int64_t seq_id, int32_t end) {
    static float rows[NUM_TOKENS][DIM];
    const int32_t begin = kvc_next_position(cache, seq_id);
    kvc_batch *batch;
    CHECKF(begin_at_end(cache, seq_id, end - begin, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < LAYERS; l++) {
        for (int i = begin; i < end; i++) fill_rows(rows[i], ids[i], l);
        const kvc_put_args put = float_rows(0, 0, 1, DIM, DIM, rows[begin], rows[begin]);
        CHECK(kvc_put(batch, l, &put) == KVC_OK);
    }
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* Serves the prompt; returns how many of its tokens were there. */
static int32_t serve(kvc_cache *cache, kvc_prefix *prefix) {
    int64_t seq_id;
    int32_t matched = -1;
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK);
    compute(cache, seq_id, NUM_TOKENS);
    CHECK(kvc_prefix_release(prefix, seq_id, &tokens) == KVC_OK);
    return matched;
}

/* Checks that the known tokens have the rows that they had when they were computed. */
static void check_rows(kvc_cache *cache, kvc_prefix *prefix) {
    static float k[NUM_TOKENS][DIM], v[NUM_TOKENS][DIM], expected[DIM];
    int64_t seq_id;
    int32_t matched;
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK);
    for (int l = 0; l < LAYERS && matched; l++) {
        const kvc_rows_out out = {.struct_size = sizeof out,
                                  .k = k,
                                  .v = v,
                                  .k_row_stride = sizeof *k,
                                  .k_head_stride = sizeof k,
                                  .v_row_stride = sizeof *v,
                                  .v_head_stride = sizeof v};
        CHECKF(kvc_extract(cache, seq_id, l, 0, matched, &out) == KVC_OK, "%s", kvc_last_error());
        for (int i = 0; i < matched; i++) {
            fill_rows(expected, ids[i], l);
            CHECK(!memcmp(v[i], expected, sizeof expected));
            for (int j = 0; j < DIM; j++) CHECK(k[i][j] - expected[j] < 1 && expected[j] - k[i][j] < 1);
        }
    }
    kvc_clear_sequence(cache, seq_id);
}

/* Computes the prompt in a new cache, and writes its blocks to the store. */
static void write_all(const kvc_prefix_config *config) {
    kvc_prefix *prefix;
    int64_t num_written;
    kvc_cache *cache = new_cache(config, &prefix);
    CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == 0);
    serve(cache, prefix);
    CHECKF(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == NUM_BLOCKS, "%s: %d",
           kvc_last_error(), (int)num_written);
    CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == 0);
    free_valid(cache);
}

/* Fetches the prompt into a new cache; returns the tokens, and sets *status. */
static int32_t fetch(const kvc_prefix_config *config, int64_t max_matched, kvc_status *status) {
    kvc_prefix *prefix;
    int64_t num_written;
    int32_t fetched = -1, matched;
    kvc_cache *cache = new_cache(config, &prefix);
    *status = kvc_prefix_fetch(prefix, &tokens, max_matched, &shelf, &fetched);
    CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK && matched == fetched);
    check_rows(cache, prefix);
    CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == 0); /* they are there */
    free_valid(cache);
    return fetched;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void test_there_and_back(void) {
    kvc_status status;
    clear_shelf();
    write_all(&plain);
    CHECK(num_values == NUM_BLOCKS && values[0].size == 128 + LAYERS + LAYERS * BLOCK * (34 + 2 * DIM));
    CHECK(fetch(&plain, -1, &status) == 20 && status == KVC_OK);
    CHECK(fetch(&plain, 15, &status) == 12 && status == KVC_OK); /* whole blocks */
    CHECK(fetch(&plain, 0, &status) == 0 && status == KVC_OK);
    num_reads = 0;
    memset(values[2].name, 0, KVC_NAME_BYTES); /* behind a missing block nothing is asked for */
    CHECK(fetch(&plain, -1, &status) == 8 && status == KVC_OK && num_reads == 3);
}

/* Another model, tenant, secret or shape finds nothing, or what it finds is refused. */
static void test_others(void) {
    static const kvc_prefix_config others[] = {
        {.struct_size = sizeof plain, .fingerprint = "b model"},
        {.struct_size = sizeof plain, .fingerprint = "a model", .salt = "tenant", .salt_size = 6},
        {.struct_size = sizeof plain, .fingerprint = "a model", .identity = "a model", .identity_size = 7},
        {.struct_size = sizeof plain, .fingerprint = "a model", .secret = "secret", .secret_size = 6}};
    kvc_status status;
    clear_shelf();
    write_all(&plain);
    for (int i = 0; i < 4; i++) {
        CHECK(fetch(&others[i], -1, &status) == 0);
        CHECK(status == (i == 3 ? KVC_ERR_FORMAT : KVC_OK));
    }
    kvc_prefix_config secret = others[3];
    secret.collects_new = 1;
    write_all(&secret); /* in the place of the others */
    CHECK(num_values == NUM_BLOCKS && fetch(&secret, -1, &status) == 20 && status == KVC_OK);
    CHECK(fetch(&plain, -1, &status) == 0 && status == KVC_ERR_FORMAT);
    secret.secret_size--;
    CHECK(fetch(&secret, -1, &status) == 0 && status == KVC_ERR_FORMAT);
}

/* Every call of a store fails in turn: what was read or written before stays, and the next call goes on. */
static void test_failing_store(void) {
    kvc_prefix *prefix;
    int64_t num_written;
    kvc_status status;
    for (int n = 0; n < NUM_BLOCKS; n++) {
        clear_shelf();
        kvc_cache *cache = new_cache(&plain, &prefix);
        serve(cache, prefix);
        fail_at = n;
        CHECK_FAILS(kvc_store_new_blocks(cache, &shelf, &num_written), KVC_ERR_STORE, "the shelf broke", "");
        CHECK(num_written == n && num_values == n);
        CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == NUM_BLOCKS - n - 1);
        free_valid(cache);
        clear_shelf();
        write_all(&plain);
        fail_at = NUM_BLOCKS + n;
        CHECK(fetch(&plain, -1, &status) == n * BLOCK && status == KVC_ERR_STORE);
    }
}

/* Values that are too long, cut, altered or of another block are refused; what was read before stays. */
static void test_lies(void) {
    kvc_status status;
    clear_shelf();
    write_all(&plain);
    longer = 1;
    CHECK(fetch(&plain, -1, &status) == 0 && status == KVC_ERR_FORMAT);
    CHECK(strstr(kvc_last_error(), "no block more than"));
    longer = -1;
    CHECK(fetch(&plain, -1, &status) == 0 && status == KVC_ERR_FORMAT);
    longer = -values[0].size - 1; /* less than nothing */
    CHECK(fetch(&plain, -1, &status) == 0 && status == KVC_ERR_FORMAT);
    longer = 0;
    values[3].bytes[500] ^= 1;
    CHECK(fetch(&plain, -1, &status) == 12 && status == KVC_ERR_FORMAT);
    memcpy(values[2].bytes, values[1].bytes, MOST_VALUE);
    CHECK(fetch(&plain, -1, &status) == 8 && status == KVC_ERR_FORMAT);
    CHECK(strstr(kvc_last_error(), "another name"));
}

/* Computes the prompt in a new cache, with a state behind its first `end` tokens, and writes its blocks to a store. */
static void write_with_state(const kvc_store *to, int32_t end) {
    const kvc_tokens first = {.struct_size = sizeof first, .ids = ids, .num_tokens = end};
    const uint8_t state[STATE] = {1};
    kvc_prefix *prefix;
    int64_t seq_id, num_written;
    int32_t matched;
    kvc_cache *cache = new_cache(&recurrent, &prefix);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK);
    compute(cache, seq_id, end);
    CHECK(kvc_prefix_checkpoint(prefix, seq_id, &first, state, STATE) == KVC_OK);
    compute(cache, seq_id, NUM_TOKENS);
    CHECK(kvc_prefix_release(prefix, seq_id, &tokens) == KVC_OK);
    CHECKF(kvc_store_new_blocks(cache, to, &num_written) == KVC_OK, "%s", kvc_last_error());
    free_valid(cache);
}

/* Reads no more than a byte beyond max_bytes, as a store on a server may. */
static kvc_status read_cut(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    const kvc_status status = read_value(user, name, to, max_bytes, size);
    if (*size > max_bytes) *size = max_bytes + 1;
    return status;
}

/* A value with a state stays where its block is computed again without one; not where it is damaged. */
static void test_states(void) {
    const kvc_store cut = {.struct_size = sizeof cut, .read = read_cut, .write = write_value};
    const value *with_state = &values[2];
    for (int i = 0; i < 4; i++) {
        const kvc_store *used = i % 2 ? &cut : &shelf;
        clear_shelf();
        write_with_state(used, 12);
        CHECK(num_values == NUM_BLOCKS);
        const int64_t size = with_state->size;
        CHECK(size == values[1].size + 4 + STATE);
        if (i >= 2) values[2].bytes[500] ^= 1;
        write_with_state(used, 20);
        CHECK(with_state->size == (i < 2 ? size : size - 4 - STATE) && values[4].size == size);
    }
}

/* Blocks that were listed are written one by one, to whatever store: the same values. */
static void test_one_by_one(void) {
    static value expected[MOST_VALUES];
    const uint8_t state[STATE] = {3};
    const kvc_tokens first = {.struct_size = sizeof first, .ids = ids, .num_tokens = 12};
    kvc_new_block blocks[NUM_BLOCKS + 1];
    kvc_prefix *prefix;
    int64_t seq_id, num, size;
    int32_t matched;
    clear_shelf();
    write_with_state(&shelf, 12);
    memcpy(expected, values, sizeof expected);
    clear_shelf();
    kvc_cache *cache = new_cache(&recurrent, &prefix);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK);
    compute(cache, seq_id, 12);
    CHECK(kvc_prefix_checkpoint(prefix, seq_id, &first, state, STATE) == KVC_OK);
    compute(cache, seq_id, NUM_TOKENS);
    CHECK(kvc_prefix_release(prefix, seq_id, &tokens) == KVC_OK);
    CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, NUM_BLOCKS + 1, &num) == KVC_OK && num == NUM_BLOCKS);
    for (int i = 0; i < num; i++) {
        CHECKF(kvc_store_block(cache, blocks[i].id, &shelf, &size) == KVC_OK, "%s", kvc_last_error());
        const value *v = &values[i], *other = &expected[i];
        CHECK(!memcmp(v->name, blocks[i].name, KVC_NAME_BYTES) && !memcmp(v->name, other->name, KVC_NAME_BYTES));
        CHECK(v->size == other->size && size == v->size - 128);
        if (i != 2) CHECK(!memcmp(v->bytes, other->bytes, (size_t)v->size));
    }
    const int writes = num_writes;
    CHECK(kvc_store_block(cache, blocks[2].id, &shelf, &size) == KVC_OK && size > STATE && num_writes == writes);
    CHECK(kvc_store_block(cache, 12345, &shelf, &size) == KVC_OK && size == 0 && num_writes == writes);
    fail_at = num_reads + num_writes;
    CHECK_FAILS(kvc_store_block(cache, blocks[1].id, &shelf, &size), KVC_ERR_STORE, "the shelf broke", "");
    CHECK_FAILS(kvc_store_block(cache, blocks[1].id, &shelf, NULL), KVC_ERR_INVALID, "size", "NULL");
    CHECK_FAILS(kvc_store_block(cache, blocks[1].id, NULL, &size), KVC_ERR_INVALID, "store", "NULL");
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    CHECK(kvc_store_block(cache, blocks[1].id, &shelf, &size) == KVC_OK && size == 0);
    free_valid(cache);
}

/* A dropped state is fetched again, though the rows are there; a state that is there is not fetched. */
static void test_dropped_states(void) {
    for (int32_t end = 11; end <= 12; end++) {
        const int64_t others[] = {1000, 1001, 1002};
        const kvc_tokens other = {.struct_size = sizeof other, .ids = others, .num_tokens = 3};
        const uint8_t state[STATE] = {2};
        kvc_prefix_config config = recurrent;
        kvc_prefix *prefix;
        int64_t seq_id;
        int32_t fetched, matched;
        config.max_checkpoint_bytes = STATE;
        clear_shelf();
        write_with_state(&shelf, end);
        kvc_cache *cache = new_cache(&config, &prefix);
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, &fetched) == KVC_OK && fetched == 20);
        CHECK(kvc_prefix_fetch(prefix, &tokens, end, &shelf, &fetched) == KVC_OK && fetched == 0);
        CHECK(kvc_prefix_acquire(prefix, &other, -1, &seq_id, &matched) == KVC_OK && !matched);
        compute(cache, seq_id, 3);
        CHECK(kvc_prefix_checkpoint(prefix, seq_id, &other, state, STATE) == KVC_OK);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK && matched == 0);
        if (end == 12) memset(values[1].name, 0, KVC_NAME_BYTES); /* its rows are there, and no state is */
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, &fetched) == KVC_OK && fetched == BLOCK);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK && matched == end);
        free_valid(cache);
    }
}

/* A fetch ends at a block with a state for which pinned states leave no room, and adds nothing of it. */
static void test_pinned_states(void) {
    for (int32_t end = 11; end <= 12; end++) {
        const int64_t others[] = {1000, 1001, 1002};
        const kvc_tokens other = {.struct_size = sizeof other, .ids = others, .num_tokens = 3};
        const uint8_t state[STATE] = {2};
        kvc_prefix_config config = recurrent;
        kvc_prefix *prefix;
        int64_t seq_id;
        int32_t fetched, matched, with_rows;
        config.max_checkpoint_bytes = STATE;
        clear_shelf();
        write_with_state(&shelf, end);
        kvc_cache *cache = new_cache(&config, &prefix);
        CHECK(kvc_prefix_acquire(prefix, &other, -1, &seq_id, &matched) == KVC_OK && !matched);
        compute(cache, seq_id, 3);
        CHECK(kvc_prefix_checkpoint(prefix, seq_id, &other, state, STATE) == KVC_OK);
        CHECK(kvc_prefix_pin(prefix, &other, &matched) == KVC_OK && matched == 3);
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, &fetched) == KVC_OK && fetched == 2 * BLOCK);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, &with_rows) == KVC_OK && !matched && with_rows == fetched);
        CHECK(kvc_prefix_unpin(prefix, &other) == KVC_OK);
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, &fetched) == KVC_OK && fetched == 3 * BLOCK);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK && matched == end);
        free_valid(cache);
    }
}

static kvc_cache *growing;

/* Writes a value; the first time, another prefix of the cache keeps a block with a state meanwhile. */
static kvc_status write_and_grow(void *user, const uint8_t *name, const void *from, int64_t size) {
    const uint8_t state[STATE] = {4};
    const kvc_tokens first = {.struct_size = sizeof first, .ids = ids, .num_tokens = BLOCK};
    kvc_prefix *prefix;
    int64_t seq_id;
    int32_t matched;
    CHECK(write_value(user, name, from, size) == KVC_OK);
    if (!growing) return KVC_OK;
    CHECK(kvc_prefix_new(growing, &recurrent, &prefix) == KVC_OK);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK && !matched);
    compute(growing, seq_id, BLOCK);
    CHECK(kvc_prefix_checkpoint(prefix, seq_id, &first, state, STATE) == KVC_OK);
    CHECK(kvc_clear_sequence(growing, seq_id) == KVC_OK);
    growing = NULL;
    return KVC_OK;
}

/* A prefix with states that is made while blocks are written has its states written, too. */
static void test_states_meanwhile(void) {
    const kvc_store grows = {.struct_size = sizeof grows, .read = read_value, .write = write_and_grow};
    kvc_prefix *prefix;
    int64_t num_written;
    clear_shelf();
    kvc_cache *cache = growing = new_cache(&plain, &prefix);
    serve(cache, prefix);
    CHECK(kvc_store_new_blocks(cache, &grows, &num_written) == KVC_OK && num_written == NUM_BLOCKS + 1);
    CHECK(values[NUM_BLOCKS].size == values[0].size + 4 + STATE);
    free_valid(cache);
}

/* A store's part of a block and the written part are joined: rows of each layer, and the later state. */
static void test_joined(void) {
    enum { ROWS = BLOCK * (34 + 2 * DIM) };
    static uint8_t parts[2][4096], joined[4096];
    kvc_prefix *prefix;
    kvc_cache *cache = new_cache(&recurrent, &prefix);
    for (int has = 0; has < 64; has++) { /* a bit for each layer, and for the state, of each part */
        int64_t sizes[2], size;
        for (int p = 0; p < 2; p++) {
            sizes[p] = LAYERS;
            for (int l = 0; l < LAYERS; l++) {
                parts[p][l] = has >> (3 * p + l) & 1;
                memset(parts[p] + sizes[p], 10 + l, ROWS);
                sizes[p] += parts[p][l] ? ROWS : 0;
            }
            if (!(has >> (3 * p + 2) & 1)) continue;
            memcpy(parts[p] + sizes[p], (uint8_t[]){(uint8_t)(3 + p), 0, 0, 0, (uint8_t)(90 + p)}, 5);
            sizes[p] += 5;
        }
        CHECK(kvc_join_payloads(cache, parts[0], sizes[0], parts[1], sizes[1], joined, 4096, &size) == KVC_OK);
        int64_t at = LAYERS;
        for (int l = 0; l < LAYERS; l++) {
            CHECK(joined[l] == (parts[0][l] | parts[1][l]));
            if (joined[l]) CHECK(joined[at] == 10 + l && joined[at + ROWS - 1] == 10 + l);
            at += joined[l] ? ROWS : 0;
        }
        const int position = has & 32 ? 4 : has & 4 ? 3 : 0;
        if (position) CHECK(joined[at] == position && joined[at + 4] == 87 + position);
        CHECK(size == at + (position ? 5 : 0));
        CHECK_FAILS(kvc_join_payloads(cache, parts[0], sizes[0], parts[1], sizes[1], joined, size - 1, &size),
                    KVC_ERR_INVALID, "max_bytes", "together");
        if (has == 63)
            CHECK_FAILS(kvc_join_payloads(cache, parts[0], LAYERS + ROWS, parts[1], sizes[1], joined, 4096, &size),
                        KVC_ERR_FORMAT, "payload", "bytes");
    }
    for (int l = 0; l < LAYERS; l++) {
        parts[0][l] = 7;
        CHECK_FAILS(kvc_join_payloads(cache, parts[0], 4096, parts[1], 4096, joined, 4096, &(int64_t){0}),
                    KVC_ERR_FORMAT, "payload", "7");
        parts[0][l] = 0;
    }
    free_valid(cache);
}

/* A block of which a window has lost rows leaves the rows that the store has of it. */
static void test_lost_rows(void) {
    static value whole[MOST_VALUES];
    kvc_prefix *prefix;
    int64_t seq_id, num_written;
    int32_t matched;
    clear_shelf();
    kvc_cache *cache = new_cache_with(&plain, 3, &prefix);
    serve(cache, prefix); /* in one batch, which keeps the rows of whole blocks */
    CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK && num_written == NUM_BLOCKS);
    free_valid(cache);
    memcpy(whole, values, sizeof whole);
    cache = new_cache_with(&plain, 3, &prefix);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched) == KVC_OK && !matched);
    for (int32_t end = 1; end <= NUM_TOKENS; end++) compute(cache, seq_id, end);
    CHECK(kvc_prefix_release(prefix, seq_id, &tokens) == KVC_OK);
    CHECK(kvc_store_new_blocks(cache, &shelf, &num_written) == KVC_OK);
    CHECK(!memcmp(whole, values, sizeof whole));
    free_valid(cache);
}

static int remove_file(void *opened, const char *name) {
    kvc_file_remove(*(kvc_folder *)opened, name);
    return 1;
}

/* A prompt of more blocks than are named at once; and a cache that has no room for all. */
static void test_long_prompt(void) {
    enum { NUM = 150 * BLOCK, CAPACITY = 100 * BLOCK };
    static int64_t many[NUM];
    const kvc_tokens all = {.struct_size = sizeof all, .ids = many, .num_tokens = NUM};
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 8, .v_dim = 8};
    kvc_store *folder = NULL;
    char path[] = P_tmpdir "/kvcache-test-XXXXXX";
    int64_t id, num_written;
    int32_t fetched, matched;
    kvc_prefix *prefix;
    CHECK(mkdtemp(path) != NULL);
    CHECK(kvc_dir_store_new(path, 0, &folder) == KVC_OK);
    for (int i = 0; i < NUM; i++) many[i] = i;
    for (int step = 0; step < 3; step++) {
        kvc_cache *cache =
            heap_cache(1, &layer, (kvc_config){.block_size = BLOCK, .capacity = step < 2 ? 0 : CAPACITY});
        CHECK(kvc_prefix_new(cache, &plain, &prefix) == KVC_OK);
        if (!step) {
            CHECK(kvc_prefix_acquire(prefix, &all, -1, &id, &matched) == KVC_OK);
            CHECK(feed(cache, 1, id, NUM / 2) == KVC_OK && feed(cache, 1, id, NUM / 2) == KVC_OK);
            CHECK(kvc_store_new_blocks(cache, folder, &num_written) == KVC_OK && num_written == 150);
            CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        } else {
            CHECKF(kvc_prefix_fetch(prefix, &all, -1, folder, &fetched) == KVC_OK, "%s", kvc_last_error());
            CHECK(kvc_prefix_lookup(prefix, &all, &matched, NULL) == KVC_OK && matched == fetched);
            CHECKF(fetched == (step < 2 ? NUM - BLOCK : CAPACITY), "%d", fetched);
        }
        free_valid(cache);
    }
    kvc_dir_store_free(folder);
    kvc_folder opened;
    CHECK(kvc_folder_open(&opened, path) && kvc_folder_list(opened, remove_file, &opened));
    kvc_folder_close(opened);
    CHECK(!rmdir(path));
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

static atomic_int is_reading, may_go_on;

static kvc_status slow_read(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    atomic_store(&is_reading, 1);
    while (!atomic_load(&may_go_on)) sched_yield();
    return read_value(user, name, to, max_bytes, size);
}

static pid_t forked;

static kvc_status forking_read(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    if (forked < 0) forked = fork();
    return read_value(user, name, to, max_bytes, size);
}

static void *fetch_slowly(void *prefix) {
    const kvc_store slow = {.struct_size = sizeof slow, .read = slow_read, .write = write_value};
    int32_t fetched;
    CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &slow, &fetched) == KVC_OK && fetched == 20);
    return NULL;
}

static void check_child(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
}

/* A child that is forked while a store works fetches all itself, and gives back every byte. */
static void test_fork(void) {
    const kvc_store forking = {.struct_size = sizeof forking, .read = forking_read, .write = write_value};
    kvc_prefix *prefix;
    pthread_t thread;
    int32_t fetched;
    clear_shelf();
    write_all(&plain);
    fflush(stdout);
    kvc_cache *cache = new_cache(&plain, &prefix);
    CHECK(!pthread_create(&thread, NULL, fetch_slowly, prefix));
    while (!atomic_load(&is_reading)) sched_yield();
    const pid_t child = fork();
    if (!child) {
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, &fetched) == KVC_OK && fetched == 20);
        free_valid(cache);
        _exit(test_result());
    }
    check_child(child);
    atomic_store(&may_go_on, 1);
    CHECK(!pthread_join(thread, NULL));
    free_valid(cache);
    cache = new_cache(&plain, &prefix); /* a child that a function of the store forks goes on with it, too */
    forked = -1;
    CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &forking, &fetched) == KVC_OK && fetched == 20);
    check_rows(cache, prefix);
    free_valid(cache);
    if (!forked) _exit(test_result());
    check_child(forked);
}

static void test_arguments(void) {
    kvc_prefix *prefix, *other;
    int32_t fetched;
    int64_t num;
    const kvc_tokens none = {.struct_size = sizeof none};
    const kvc_store blind = {sizeof blind, NULL, NULL, write_value, NULL},
                    mute = {sizeof mute, NULL, read_value, NULL, NULL};
    kvc_cache *cache = new_cache(&plain, &prefix);
    CHECK_FAILS(kvc_prefix_fetch(prefix, &tokens, -1, &shelf, NULL), KVC_ERR_INVALID, "fetched", "NULL");
    CHECK_FAILS(kvc_prefix_fetch(prefix, &tokens, -2, &shelf, &fetched), KVC_ERR_INVALID, "max_matched", "-2");
    CHECK_FAILS(kvc_prefix_fetch(prefix, &tokens, -1, NULL, &fetched), KVC_ERR_INVALID, "store", "NULL");
    CHECK_FAILS(kvc_prefix_fetch(prefix, &tokens, -1, &blind, &fetched), KVC_ERR_INVALID, "read", "NULL");
    CHECK_FAILS(kvc_prefix_fetch(prefix, &none, -1, &shelf, &fetched), KVC_ERR_INVALID, "num_tokens", "0");
    CHECK_FAILS(kvc_store_new_blocks(cache, &mute, &num), KVC_ERR_INVALID, "write", "NULL");
    CHECK_FAILS(kvc_store_new_blocks(cache, &shelf, NULL), KVC_ERR_INVALID, "num_written", "NULL");
    kvc_prefix_config config = plain;
    config.secret_size = 3;
    CHECK_FAILS(kvc_prefix_new(cache, &config, &other), KVC_ERR_INVALID, "secret_size", "3");
    config.secret_size = -1;
    CHECK_FAILS(kvc_prefix_new(cache, &config, &other), KVC_ERR_INVALID, "secret_size", "-1");
    config.secret_size = 0;
    config.identity_size = 5;
    CHECK_FAILS(kvc_prefix_new(cache, &config, &other), KVC_ERR_INVALID, "identity_size", "5");
    free_valid(cache);
}

int main(void) {
    for (int i = 0; i < NUM_TOKENS; i++) ids[i] = i * 3 % 19;
    test_there_and_back();
    test_others();
    test_failing_store();
    test_lies();
    test_states();
    test_one_by_one();
    test_dropped_states();
    test_pinned_states();
    test_states_meanwhile();
    test_joined();
    test_lost_rows();
    test_long_prompt();
    if (HAS_FORK) test_fork();
    test_arguments();
    return test_result();
}
