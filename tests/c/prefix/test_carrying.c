/* Calls that carry blocks to and from stores, beside others: they take no room from anybody, and write what is newest.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "support/feeding.h"

enum { BLOCK = 64, DIM = 2048, NUM_LAYERS = 4, NUM_BLOCKS = 4, PROMPT = NUM_BLOCKS * BLOCK, TRIES = 100 };
enum { MOST_VALUES = 2 * NUM_BLOCKS, MOST_VALUE = NUM_LAYERS * (BLOCK * 2 * DIM * (int)sizeof(float)) + 256 };
#include "support/shelf.h"

/* ---- the cache --------------------------------------------------------------------------------------------------- */

static kvc_cache *cache;
static kvc_prefix *prefix;
static int64_t ids[PROMPT + 1];
static atomic_int stop;

static kvc_tokens first(int64_t num) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

static void begin_with(const kvc_layer *layers, int num_layers, kvc_config config, int64_t state_bytes) {
    const kvc_prefix_config prefix_config = {
        .struct_size = sizeof prefix_config, .fingerprint = "a model", .collects_new = 1, .state_bytes = state_bytes};
    for (int i = 0; i <= PROMPT; i++) ids[i] = i;
    config.block_size = BLOCK;
    config.num_threads = 1;
    cache = cache_of(layers, num_layers, config);
    CHECKF(kvc_prefix_new(cache, &prefix_config, &prefix) == KVC_OK, "%s", kvc_last_error());
    atomic_store(&stop, 0);
}

static void begin(kvc_config config, int64_t state_bytes) {
    kvc_layer layers[NUM_LAYERS];
    for (int l = 0; l < NUM_LAYERS; l++) layers[l] = (kvc_layer){.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    begin_with(layers, NUM_LAYERS, config, state_bytes);
}

static void end(void) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
    num_values = 0;
}

/* Begins a sequence of a prompt's tokens, and feeds the tokens that do not match. */
static int64_t serve(int32_t num) {
    const kvc_tokens tokens = first(num + 1);
    int32_t matched;
    int64_t id;
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK);
    CHECKF(feed(cache, NUM_LAYERS, id, num - matched) == KVC_OK, "%s", kvc_last_error());
    return id;
}

static void keep(int32_t num) {
    const kvc_tokens tokens = first(num);
    CHECK(kvc_prefix_release(prefix, serve(num), &tokens) == KVC_OK);
}

/* ---- room beside stores ------------------------------------------------------------------------------------------ */

static void *write_blocks(void *id) {
    int64_t num;
    while (!atomic_load(&stop)) {
        CHECK(kvc_store_block(cache, *(int64_t *)id, &store, &num) == KVC_OK);
        CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK);
    }
    return NULL;
}

static void *fetch_blocks(void *unused) {
    const kvc_tokens tokens = first(PROMPT + 1);
    int64_t num;
    int32_t fetched;
    (void)unused;
    while (!atomic_load(&stop)) {
        CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK);
        CHECKF(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK, "%s", kvc_last_error());
    }
    return NULL;
}

/* Kept blocks take no room from others while another thread copies them. */
static void test_room(void *(*work)(void *), int limits_bytes) {
    kvc_config config = {.capacity = PROMPT};
    int64_t num, most = PROMPT;
    kvc_new_block block;
    kvc_batch *batch;
    pthread_t thread;
    for (int round = 0; round < 1 + limits_bytes; round++) {
        begin(config, 0);
        if (round < limits_bytes) { /* a little more than the prompt needs */
            keep(PROMPT);
            config = (kvc_config){.max_bytes = kvc_nbytes(cache) / 16 * 17};
            end();
        }
    }
    keep(PROMPT);
    CHECK(kvc_take_new_blocks(cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    CHECKF(kvc_store_block(cache, block.id, &store, &num) == KVC_OK && num, "%s", kvc_last_error());
    CHECKF(kvc_store_new_blocks(cache, &store, &num) == KVC_OK, "%s", kvc_last_error());
    const int64_t other = kvc_new_sequence(cache);
    CHECK(kvc_room(cache, other, &most) == KVC_OK && most > PROMPT / 2);
    if (most > PROMPT) most = PROMPT;
    CHECK(pthread_create(&thread, NULL, work, &block.id) == 0);
    for (int i = 0; i < TRIES; i++) {
        sched_yield();
        CHECK(kvc_room(cache, other, &num) == KVC_OK);
        CHECKF(num >= most, "try %d: room for %d of %d", i, (int)num, (int)most);
    }
    for (int i = 0; i < TRIES; i++) {
        sched_yield();
        const kvc_status status = begin_at_end(cache, other, (int32_t)most, &batch);
        CHECKF(status == KVC_OK, "try %d: %s", i, kvc_last_error());
        if (status == KVC_OK) kvc_abort(batch);
        if (work == write_blocks) keep(PROMPT);
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    end();
}

/* ---- what a fetch reads ------------------------------------------------------------------------------------------ */

/* A fetch goes on behind a block that the store lacks, if the block is kept, though nothing before it was known. */
static void test_gap(void) {
    const kvc_tokens tokens = first(PROMPT + 1);
    int64_t other[BLOCK + 1], num, dropped;
    uint8_t names[NUM_BLOCKS][KVC_NAME_BYTES];
    int32_t fetched, known;
    begin((kvc_config){0}, 0);
    keep(PROMPT);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == NUM_BLOCKS);
    memcpy(other, ids, sizeof other);
    other[BLOCK] = other[BLOCK - 1] = PROMPT;
    const kvc_tokens forgotten = {.struct_size = sizeof forgotten, .ids = other, .num_tokens = BLOCK + 1};
    CHECK(kvc_prefix_forget(prefix, &forgotten, NULL, 0, &num, &dropped) == KVC_OK && dropped == BLOCK);
    CHECK(kvc_prefix_evict(prefix, 1, &num) == KVC_OK && num == BLOCK);
    CHECK(kvc_prefix_names(prefix, &tokens, names[0], NUM_BLOCKS, &num) == KVC_OK && num == NUM_BLOCKS);
    memset(find_value(names[1])->name, 0,
           KVC_NAME_BYTES); /* the store has the first block, and lacks one that is kept */
    CHECKF(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_prefix_lookup(prefix, &tokens, &known, NULL) == KVC_OK);
    CHECKF(fetched == 2 * BLOCK && known == PROMPT, "%d were fetched, and %d are known", fetched, known);
    end();
}

/* Returns how many of a prompt's tokens are known. */
static int32_t count_known(const kvc_tokens *tokens) {
    int32_t known;
    CHECK(kvc_prefix_lookup(prefix, tokens, &known, NULL) == KVC_OK);
    return known;
}

/* The state of a stored block stands before all of its rows: the window's are lost, and the first row of the layer with
 * a stride is behind the state.  The block comes back without the state.  A kept block of these first tokens takes the
 * state. */
static void test_state_before_rows(int is_kept) {
    enum { STRIDE = 4, AT = STRIDE - 1 };
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 8, .v_dim = 8, .policy = {KVC_SLIDING, .window = STRIDE}},
                                {.num_kv_heads = 1, .k_dim = 8, .v_dim = 8, .policy = {.stride = STRIDE}}};
    const kvc_tokens tokens = first(PROMPT + 1), few = first(AT), most = first(PROMPT);
    int64_t id, num;
    int32_t matched, fetched;
    begin_with(layers, 2, (kvc_config){0}, 8);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
    CHECK(feed(cache, 2, id, AT) == KVC_OK && kvc_prefix_checkpoint(prefix, id, &few, "few", 3) == KVC_OK);
    for (int i = AT; i < BLOCK; i++) CHECK(feed(cache, 2, id, 1) == KVC_OK);
    for (int i = 1; i < NUM_BLOCKS; i++) CHECK(feed(cache, 2, id, BLOCK) == KVC_OK);
    CHECK(kvc_prefix_checkpoint(prefix, id, &most, "most", 4) == KVC_OK);
    CHECK(kvc_prefix_release(prefix, id, &tokens) == KVC_OK && count_known(&tokens) == PROMPT);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == NUM_BLOCKS);
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    if (is_kept) {
        CHECK(kvc_prefix_acquire(prefix, &few, -1, &id, &matched) == KVC_OK && matched == 0);
        CHECK(feed(cache, 2, id, AT) == KVC_OK && kvc_prefix_release(prefix, id, &few) == KVC_OK);
        CHECK(count_known(&few) == 0);
    }
    for (int again = 0; again < 2; again++) {
        CHECKF(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK, "%s", kvc_last_error());
        CHECKF(fetched == (again ? 0 : PROMPT), "%d tokens were fetched", fetched);
        CHECKF(count_known(&tokens) == PROMPT, "%d are known", count_known(&tokens));
        CHECKF(count_known(&few) == (is_kept ? AT : 0), "%d are known", count_known(&few));
    }
    end();
}

/* ---- two calls that write the same block ------------------------------------------------------------------------- */

static atomic_int is_writing, goes_on;

static kvc_status write_slowly(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    atomic_store(&is_writing, 1);
    while (!atomic_load(&goes_on)) sched_yield();
    return write_value(user, name, bytes, size);
}

static void *write_new_blocks(void *num) {
    const kvc_store slow = {.struct_size = sizeof slow, .read = read_value, .write = write_slowly};
    CHECK(kvc_store_new_blocks(cache, &slow, num) == KVC_OK);
    return NULL;
}

/* A block that gets a state while a call writes it, and that a second call writes then, is stored with its state. */
static void test_two_writers(int by_id) {
    const kvc_store slow = {.struct_size = sizeof slow, .read = read_value, .write = write_slowly};
    const kvc_tokens tokens = first(BLOCK), all = first(BLOCK + 1);
    kvc_new_block block;
    pthread_t thread;
    int64_t num, written;
    int32_t fetched, known;
    atomic_store(&is_writing, 0);
    atomic_store(&goes_on, 0);
    begin((kvc_config){0}, 1);
    const int64_t id = serve(BLOCK);
    CHECK(pthread_create(&thread, NULL, write_new_blocks, &written) == 0);
    while (!atomic_load(&is_writing)) sched_yield();
    CHECKF(kvc_prefix_checkpoint(prefix, id, &tokens, "s", 1) == KVC_OK, "%s", kvc_last_error());
    if (by_id) CHECK(kvc_take_new_blocks(cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    if (by_id)
        CHECK(kvc_store_block(cache, block.id, &slow, &num) == KVC_OK && num > 0);
    else
        CHECK(kvc_store_new_blocks(cache, &slow, &num) == KVC_OK && num == 0);
    atomic_store(&goes_on, 1);
    pthread_join(thread, NULL);
    CHECKF(written == 2, "%d were written", (int)written);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK && kvc_prefix_clear(prefix) == KVC_OK);
    CHECK(kvc_prefix_fetch(prefix, &all, -1, &store, &fetched) == KVC_OK && fetched == BLOCK);
    CHECK(kvc_prefix_lookup(prefix, &all, &known, NULL) == KVC_OK);
    CHECKF(known == BLOCK, "%d are known", known);
    end();
}

/* ---- forgetting beside a store ----------------------------------------------------------------------------------- */

static kvc_status remove_value(void *user, const uint8_t *name) {
    (void)user;
    pthread_mutex_lock(&shelf_mutex);
    if (find_value(name)) memset(find_value(name)->name, 0, KVC_NAME_BYTES);
    pthread_mutex_unlock(&shelf_mutex);
    return KVC_OK;
}

static atomic_int is_written;

/* The value is there before the call returns. */
static kvc_status write_and_wait(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    const kvc_status status = write_value(user, name, bytes, size);
    atomic_store(&is_written, 1);
    while (!atomic_load(&goes_on)) sched_yield();
    return status;
}

static const kvc_store slow_store = {
    .struct_size = sizeof slow_store, .read = read_value, .write = write_and_wait, .remove = remove_value};

static void *write_to_slow_store(void *num) {
    CHECKF(kvc_store_new_blocks(cache, &slow_store, num) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

static int32_t fetch(const kvc_tokens *tokens, const kvc_store *from) {
    int32_t fetched;
    CHECKF(kvc_prefix_fetch(prefix, tokens, -1, from, &fetched) == KVC_OK, "%s", kvc_last_error());
    return fetched;
}

/* Nobody reads a value of forgotten rows that a call still has to remove, also by another store in the same place.  If
 * the block is computed again meanwhile, the call writes it in place of the old one. */
static void test_forgotten_while_written(int computes_again) {
    const kvc_tokens tokens = first(BLOCK + 1);
    pthread_t thread;
    int64_t num, dropped, written;
    atomic_store(&is_written, 0);
    atomic_store(&goes_on, 0);
    begin((kvc_config){0}, 0);
    keep(BLOCK);
    CHECK(pthread_create(&thread, NULL, write_to_slow_store, &written) == 0);
    while (!atomic_load(&is_written)) sched_yield();
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &dropped) == KVC_OK && dropped == BLOCK);
    CHECKF(fetch(&tokens, &slow_store) == 0 && fetch(&tokens, &store) == 0, "forgotten rows are fetched");
    if (computes_again) {
        keep(BLOCK);
        CHECK(kvc_store_new_blocks(cache, &slow_store, &num) == KVC_OK && num == 0);
    }
    atomic_store(&goes_on, 1);
    pthread_join(thread, NULL);
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    CHECKF(written == computes_again && fetch(&tokens, &store) == computes_again * BLOCK, "%d were written",
           (int)written);
    end();
}

/* Until all forgets with names are ended, nothing is fetched. */
static void test_end_forget(void) {
    const kvc_tokens private = first(BLOCK + 1), all = first(PROMPT + 1);
    uint8_t names[2 * NUM_BLOCKS][KVC_NAME_BYTES];
    int64_t num, dropped;
    begin((kvc_config){0}, 0);
    CHECK_FAILS(kvc_prefix_end_forget(prefix), KVC_ERR_INVALID, "gave names", "left to end");
    keep(PROMPT);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == NUM_BLOCKS);
    for (int i = 0; i < 2; i++) {
        CHECK(kvc_prefix_forget(prefix, &private, names[0], 2 * NUM_BLOCKS, &num, &dropped) == KVC_OK);
        CHECK(dropped == (i ? 0 : PROMPT) && num == (i ? 0 : NUM_BLOCKS));
        CHECK(kvc_prefix_clear(prefix) == KVC_OK && fetch(&all, &store) == 0);
    }
    CHECK(kvc_prefix_names(prefix, &private, names[0], 1, &num) == KVC_OK && num == 1);
    CHECK(remove_value(NULL, names[0]) == KVC_OK);
    CHECK(kvc_prefix_end_forget(prefix) == KVC_OK && fetch(&all, &store) == 0);
    keep(BLOCK);
    CHECK(fetch(&all, &store) == 0);
    CHECK(kvc_prefix_end_forget(prefix) == KVC_OK && fetch(&all, &store) == PROMPT - BLOCK);
    CHECK_FAILS(kvc_prefix_end_forget(prefix), KVC_ERR_INVALID, "gave names", "left to end");
    end();
}

static kvc_status end_and_write(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    CHECK(remove_value(user, name) == KVC_OK && kvc_prefix_end_forget(prefix) == KVC_OK);
    return write_value(user, name, bytes, size);
}

/* While the values of forgotten blocks are being removed, a block that is computed again gets no state from them. */
static void test_joins_nothing_forgotten(void) {
    enum { FEW = 8 };
    const kvc_store ending = {.struct_size = sizeof ending, .read = read_value, .write = end_and_write};
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = FEW, .v_dim = FEW};
    const kvc_tokens tokens = first(BLOCK), all = first(BLOCK + 1);
    static float ones[BLOCK * FEW];
    const kvc_put_args put = {.struct_size = sizeof put, .k = ones, .v = ones};
    uint8_t name[KVC_NAME_BYTES];
    int64_t num, dropped;
    int32_t known, with_rows;
    kvc_batch *batch;
    for (int i = 0; i < BLOCK * FEW; i++) ones[i] = 1;
    begin_with(&layer, 1, (kvc_config){0}, 6);
    for (int again = 0; again < 2; again++) {
        const int64_t id = kvc_new_sequence(cache);
        if (again) {
            CHECK(begin_at_end(cache, id, BLOCK, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
            CHECK(kvc_commit(batch) == KVC_OK);
        } else {
            CHECK(feed(cache, 1, id, BLOCK) == KVC_OK);
            CHECKF(kvc_prefix_checkpoint(prefix, id, &tokens, "secret", 6) == KVC_OK, "%s", kvc_last_error());
        }
        CHECK(kvc_prefix_release(prefix, id, &tokens) == KVC_OK);
        CHECK(kvc_store_new_blocks(cache, again ? &ending : &store, &num) == KVC_OK && num == 1);
        if (!again) CHECK(kvc_prefix_forget(prefix, &all, name, 1, &num, &dropped) == KVC_OK && dropped == BLOCK);
    }
    CHECK(kvc_prefix_clear(prefix) == KVC_OK && fetch(&all, &store) == BLOCK);
    CHECK(kvc_prefix_lookup(prefix, &all, &known, &with_rows) == KVC_OK && with_rows == BLOCK);
    CHECKF(known == 0, "a state that was forgotten is known again");
    end();
}

static int fails_to_remove;

static kvc_status forget_and_write(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    const kvc_tokens tokens = first(BLOCK);
    int64_t num, dropped;
    CHECK(write_value(user, name, bytes, size) == KVC_OK);
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &dropped) == KVC_OK && dropped == BLOCK);
    keep(BLOCK);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == 0); /* it leaves the block to this call */
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    return KVC_OK;
}

static kvc_status fail_to_remove(void *user, const uint8_t *name) {
    (void)user, (void)name;
    fails_to_remove = 1;
    return KVC_ERR_STORE;
}

/* A value that could not be removed is told, also if the block was to be written again and is gone. */
static void test_value_that_stays(void) {
    const kvc_store failing = {
        .struct_size = sizeof failing, .read = read_value, .write = forget_and_write, .remove = fail_to_remove};
    int64_t num;
    begin((kvc_config){0}, 0);
    keep(BLOCK);
    CHECK(kvc_store_new_blocks(cache, &failing, &num) == KVC_ERR_STORE && num == 0 && fails_to_remove);
    end();
}

int main(void) {
    for (int again = 0; again < 2; again++) test_forgotten_while_written(again);
    test_end_forget();
    test_joins_nothing_forgotten();
    test_value_that_stays();
    for (int by_id = 0; by_id < 2; by_id++) test_two_writers(by_id);
    test_gap();
    for (int is_kept = 0; is_kept < 2; is_kept++) test_state_before_rows(is_kept);
    for (int limits_bytes = 0; limits_bytes < 2; limits_bytes++) {
        test_room(write_blocks, limits_bytes);
        test_room(fetch_blocks, limits_bytes);
    }
    return test_result();
}
