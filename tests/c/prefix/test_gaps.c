/* Calls that drop kept blocks a few at a time, and another thread that gets the mutex between two such parts. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.h"
#include "support/test.h"

enum { BLOCK = 4, DIM = 8, BLOCKS = 60, TOKENS = BLOCK * BLOCKS, LIMIT = 60 /* seconds */ };

static kvc_cache *cache;
static kvc_prefix *prefix;
static int64_t ids[TOKENS];
static kvc_new_block new_blocks[BLOCKS];
static int64_t num_new;

/* ---- a gap ------------------------------------------------------------------------------------------------------- */

static void (*beside)(void); /* is called by the other thread in the gap */
static atomic_int is_armed;  /* the next allocation that is freed, which a call does with the mutex, begins the gap */
static atomic_int may_begin;

static void *take(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    void *memory = NULL;
    (void)user, (void)hint;
    return posix_memalign(&memory, alignment < sizeof memory ? sizeof memory : alignment, size) ? NULL : memory;
}

/* Lets the other thread come to the mutex, so that the call gives way to it. */
static void give(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    free(memory);
    if (!atomic_exchange(&is_armed, 0)) return;
    atomic_store(&may_begin, 1);
    while (!atomic_load(&cache->num_locking)) sched_yield();
}

static void *wait_and_call(void *unused) {
    (void)unused;
    while (!atomic_load(&may_begin)) sched_yield();
    beside();
    return NULL;
}

/* Makes a call, and another one in its first gap. */
static void call_beside(void (*call)(void), void (*other)(void)) {
    pthread_t thread;
    beside = other;
    CHECK(pthread_create(&thread, NULL, wait_and_call, NULL) == 0);
    atomic_store(&is_armed, 1);
    call();
    CHECK(!atomic_load(&is_armed));
    pthread_join(thread, NULL);
    atomic_store(&may_begin, 0);
}

/* ---- a world ----------------------------------------------------------------------------------------------------- */

static kvc_status feed(int64_t id, int32_t num) {
    static const float row[DIM];
    const kvc_put_args put = {.struct_size = sizeof put, .k = row, .v = row}; /* strides 0: the same for all */
    int64_t seq_ids[TOKENS];
    kvc_batch *batch;
    for (int32_t i = 0; i < num; i++) seq_ids[i] = id;
    const kvc_status status = kvc_begin(cache, num, NULL, seq_ids, NULL, &batch);
    if (status != KVC_OK) return status;
    CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
    return KVC_OK;
}

static kvc_tokens prompt(int32_t num) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

static int known(void) {
    const kvc_tokens tokens = prompt(TOKENS);
    int32_t matched = -1;
    CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK);
    return matched;
}

/* Keeps BLOCKS blocks of one prompt, which are listed for stores. */
static void begin(int64_t capacity) {
    static const kvc_allocator allocator = {.struct_size = sizeof allocator, .alloc = take, .free = give};
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model", .collects_new = 1};
    const kvc_tokens tokens = prompt(TOKENS);
    int32_t matched;
    int64_t id;
    for (int i = 0; i < TOKENS; i++) ids[i] = 100 + i;
    cache = cache_of(&layer, 1,
                     (kvc_config){.block_size = BLOCK, .num_threads = 1, .capacity = capacity, .allocator = &allocator});
    CHECK(kvc_prefix_new(cache, &config, &prefix) == KVC_OK);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
    CHECK(feed(id, TOKENS) == KVC_OK && kvc_prefix_release(prefix, id, &tokens) == KVC_OK && known() == TOKENS);
}

static void end(void) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
}

static void clear_prefix(void) { CHECK(kvc_prefix_clear(prefix) == KVC_OK); }
static void free_prefix(void) { kvc_prefix_free(prefix); }

/* ---- a store ----------------------------------------------------------------------------------------------------- */

static kvc_status read_none(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    (void)user, (void)name, (void)value, (void)max_bytes;
    *size = 0;
    return KVC_OK;
}

static kvc_status write_none(void *user, const uint8_t *name, const void *value, int64_t size) {
    (void)user, (void)name, (void)value, (void)size;
    CHECK(0);
    return KVC_OK;
}

/* The blocks of a tree that a prefix has given up are there until it is their turn; nobody may store them. */
static void store_given_up(void) {
    const kvc_store store = {sizeof store, NULL, read_none, write_none, NULL};
    for (int64_t i = 0; i < num_new; i++) {
        int64_t size = -1;
        CHECK(kvc_store_block(cache, new_blocks[i].id, &store, &size) == KVC_OK && size == 0);
    }
}

static void test_store_block(void) {
    for (int is_freed = 0; is_freed < 2; is_freed++) {
        begin(0);
        CHECK(kvc_take_new_blocks(cache, new_blocks, sizeof *new_blocks, BLOCKS, &num_new) == KVC_OK);
        CHECK(num_new == BLOCKS);
        call_beside(is_freed ? free_prefix : clear_prefix, store_given_up);
        end();
    }
}

int main(void) {
    alarm(4 * LIMIT);
    test_store_block();
    return test_result();
}
