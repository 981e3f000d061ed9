/* Calls that drop kept blocks a few at a time, and another thread that gets the mutex between two such parts.
 *
 * Not for Windows: it forks, and the core's clock is replaced by the linker. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cache/cache.h"
#include "support/feeding.h"
#include "support/pairs.h"

const char *__tsan_default_options(void);

/* The child does not leak a thread that ended and that the parent has yet to join. */
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }

enum { BLOCK = 4, DIM = 8, BLOCKS = 60, TOKENS = BLOCK * BLOCKS, LIMIT = 60 /* seconds */ };

static kvc_cache *cache;
static kvc_prefix *prefix;
static int64_t ids[TOKENS];
static kvc_new_block new_blocks[BLOCKS];
static int64_t num_new;
static int32_t reuse_min; /* kvc_prefix_config.reuse_min_tokens */

static atomic_int seconds_ahead; /* of the system's clock */

int __wrap_clock_gettime(clockid_t which, struct timespec *to);
int __wrap_clock_gettime(clockid_t which, struct timespec *to) {
    const int failed = clock_gettime(which, to);
    to->tv_sec += atomic_load(&seconds_ahead);
    return failed;
}

/* ---- a gap ------------------------------------------------------------------------------------------------------- */

static void (*beside)(void); /* is called by the other thread in the gap */
/* How many of the allocations that this thread frees next begin a gap each: a call frees them with the mutex. */
static _Thread_local int num_gaps;
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
    if (!num_gaps) return;
    num_gaps--;
    atomic_store(&may_begin, 1);
    while (!atomic_load(&cache->waiting.num_locking)) sched_yield();
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
    num_gaps = 1;
    call();
    CHECK(!num_gaps);
    pthread_join(thread, NULL);
    atomic_store(&may_begin, 0);
}

/* ---- a world ----------------------------------------------------------------------------------------------------- */

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
static void begin(int64_t capacity, int64_t ttl_ms) {
    static const kvc_allocator allocator = {.struct_size = sizeof allocator, .alloc = take, .free = give};
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope.kind = KVC_ROPE_NONE};
    const kvc_prefix_config config = {.struct_size = sizeof config,
                                      .fingerprint = "a model",
                                      .collects_new = 1,
                                      .ttl_ms = ttl_ms,
                                      .reuse_min_tokens = reuse_min};
    const kvc_tokens tokens = prompt(TOKENS);
    int32_t matched;
    int64_t id;
    for (int i = 0; i < TOKENS; i++) ids[i] = 100 + i;
    cache = cache_of(
        &layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 1, .capacity = capacity, .allocator = &allocator});
    CHECK(kvc_prefix_new(cache, &config, &prefix) == KVC_OK);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
    CHECK(feed(cache, 1, id, TOKENS) == KVC_OK && kvc_prefix_release(prefix, id, &tokens) == KVC_OK &&
          known() == TOKENS);
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
        begin(0, 0);
        CHECK(kvc_take_new_blocks(cache, new_blocks, sizeof *new_blocks, BLOCKS, &num_new) == KVC_OK);
        CHECK(num_new == BLOCKS);
        call_beside(is_freed ? free_prefix : clear_prefix, store_given_up);
        end();
    }
}

/* ---- forgetting -------------------------------------------------------------------------------------------------- */

static uint8_t names[BLOCKS + 1][KVC_NAME_BYTES];
static int64_t most_names, num_names, num_dropped;

/* Forgets the first block, and with it all that follow. */
static void forget(void) {
    const kvc_tokens tokens = prompt(BLOCK);
    CHECK(kvc_prefix_forget(prefix, &tokens, *names, most_names, &num_names, &num_dropped) == KVC_OK);
}

static int is_named(const uint8_t *name) {
    int64_t i = 0;
    while (i < num_names && memcmp(names[i], name, KVC_NAME_BYTES)) i++;
    return i < num_names;
}

/* Checks that all blocks are named. */
static void check_names(int way) {
    const kvc_tokens tokens = prompt(TOKENS);
    uint8_t all[BLOCKS][KVC_NAME_BYTES];
    int64_t num;
    CHECKF(num_names == BLOCKS && num_dropped == TOKENS, "way %d: %d names, %d tokens", way, (int)num_names,
           (int)num_dropped);
    CHECK(kvc_prefix_names(prefix, &tokens, *all, BLOCKS, &num) == KVC_OK && num == BLOCKS);
    for (int i = 0; i < BLOCKS; i++) CHECKF(is_named(all[i]), "way %d: block %d has no name", way, i);
}

static void evict(void) {
    int64_t num;
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK);
}

static void clear(void) { CHECK(kvc_clear(cache) == KVC_OK); }

static void feed_another(void) {
    const int64_t id = kvc_new_sequence(cache);
    CHECKF(feed(cache, 1, id, TOKENS) == KVC_OK, "%s", kvc_last_error());
}

static void forget_another(void) {
    const int64_t another = 5;
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = &another, .num_tokens = 1};
    int64_t num, dropped;
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &dropped) == KVC_OK && dropped == 0);
}

/* A prompt that is half forgotten is not found. */
static void serve_like_it(void) {
    const kvc_tokens tokens = prompt(2 * BLOCK);
    int32_t matched = -1;
    int64_t id;
    CHECKF(known() == 0, "%d tokens are known", known());
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
    CHECK(feed(cache, 1, id, 2 * BLOCK) == KVC_OK && kvc_prefix_release(prefix, id, &tokens) == KVC_OK);
}

/* The names of blocks that others drop while a call forgets their prompt are not lost. */
static void test_names(void) {
    static void (*const others[])(void) = {evict, clear, feed_another, clear_prefix, forget_another, serve_like_it};
    for (int i = 0; i < (int)(sizeof others / sizeof *others); i++) {
        begin(TOKENS + BLOCK, 0);
        most_names = BLOCKS + 1;
        call_beside(forget, others[i]);
        check_names(i);
        CHECK(others[i] == serve_like_it || known() == 0); /* which may keep blocks once the call has ended */
        end();
    }
}

/* Serves two prompts: the first has the forgotten tokens, and the second has no token of the first forgotten block. */
static void serve_moved(void) {
    for (int first = 0; first <= BLOCK; first += BLOCK) {
        const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids + first, .num_tokens = 2 * BLOCK};
        int32_t matched = -1;
        int64_t id;
        CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK);
        CHECKF(matched == 0, "%d tokens from %d on matched", matched, first);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    }
}

/* Tokens that are being forgotten are not moved behind a match. */
static void test_moved(void) {
    reuse_min = 1;
    begin(0, 0);
    most_names = BLOCKS + 1;
    call_beside(forget, serve_moved);
    check_names(-1);
    end();
    reuse_min = 0;
}

/* A block that expired has a name until a call drops it. */
static void test_expired(void) {
    const kvc_tokens tokens = prompt(TOKENS);
    int32_t matched;
    int64_t id;
    begin(0, 1000 * LIMIT);
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == TOKENS - 1);
    atomic_store(&seconds_ahead, 2 * LIMIT);
    most_names = BLOCKS + 1;
    forget();
    check_names(-1);
    end();
}

/* Blocks of other prompts that are evicted meanwhile take no memory once the call has ended. */
static void test_other_prompts(void) {
    int64_t bytes[2];
    for (int is_beside = 0; is_beside < 2; is_beside++) {
        begin(0, 0);
        const kvc_tokens tokens = prompt(TOKENS);
        int32_t matched;
        int64_t id, num, dropped, other[TOKENS];
        for (int i = 0; i < TOKENS; i++) other[i] = ids[i] + TOKENS;
        const kvc_tokens others = {.struct_size = sizeof others, .ids = other, .num_tokens = TOKENS};
        CHECK(kvc_prefix_acquire(prefix, &others, -1, &id, &matched) == KVC_OK && matched == 0);
        CHECK(feed(cache, 1, id, TOKENS) == KVC_OK && kvc_prefix_release(prefix, id, &others) == KVC_OK);
        most_names = BLOCKS + 1;
        if (is_beside) {
            call_beside(forget, evict);
        } else {
            forget();
            evict();
        }
        check_names(is_beside);
        CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &dropped) == KVC_OK && dropped == 0);
        bytes[is_beside] = kvc_nbytes(cache);
        end();
    }
    CHECKF(bytes[0] == bytes[1], "%lld and %lld bytes", (long long)bytes[0], (long long)bytes[1]);
}

/* ---- a slow store ------------------------------------------------------------------------------------------------ */

static atomic_int num_writes, num_values, is_over;

static kvc_status write_late(void *user, const uint8_t *name, const void *value, int64_t size) {
    (void)user, (void)name, (void)value, (void)size;
    atomic_fetch_add(&num_writes, 1);
    while (!atomic_load(&is_over)) sched_yield();
    atomic_fetch_add(&num_values, 1);
    return KVC_OK;
}

static kvc_status remove_late(void *user, const uint8_t *name) {
    (void)user, (void)name;
    atomic_fetch_sub(&num_values, 1);
    return KVC_OK;
}

static const kvc_store late_store = {sizeof late_store, NULL, read_none, write_late, remove_late};

/* Writes the first new block, which the call drops later; nothing where a busy machine let the call end first. */
static void store_next(void) {
    int64_t num;
    CHECK(kvc_take_new_blocks(cache, new_blocks, sizeof *new_blocks, 1, &num) == KVC_OK);
    if (num) CHECK(kvc_store_block(cache, new_blocks[0].id, &late_store, &num) == KVC_OK);
}

static void forget_and_end(void) {
    forget();
    CHECK(num_names == 20 && num_dropped == 20 * BLOCK);
    atomic_store(&is_over, 1); /* the caller has removed the values under these names */
}

/* A block is dropped and named while its value is written.  The value does not stay in the store, though the call ends
 * before it has dropped the last block of the prompt. */
static void test_stored(void) {
    atomic_store(&num_writes, 0);
    for (int round = 0; round < 100 && !atomic_load(&num_writes); round++) {
        begin(0, 0);
        atomic_store(&is_over, 0);
        CHECK(kvc_take_new_blocks(cache, new_blocks, sizeof *new_blocks, 40, &num_new) == KVC_OK && num_new == 40);
        most_names = 20;
        call_beside(forget_and_end, store_next);
        CHECKF(atomic_load(&num_values) == 0, "%d values", atomic_load(&num_values));
        end();
    }
    CHECK(atomic_load(&num_writes) == 1);
}

static kvc_status writes_as, removes_as;

static pthread_t clearer;

static void *clear_in_parts(void *unused) {
    (void)unused;
    num_gaps = 2;
    clear_prefix();
    CHECK(!num_gaps);
    return NULL;
}

/* While a value is written, kvc_prefix_clear gives up its block, and then stands still.  The block is forgotten before
 * it is dropped, and it is still there when the value has been written. */
static kvc_status write_beside(void *user, const uint8_t *name, const void *value, int64_t size) {
    (void)user, (void)name, (void)value, (void)size;
    CHECK(pthread_create(&clearer, NULL, clear_in_parts, NULL) == 0);
    while (!atomic_load(&may_begin)) sched_yield();
    forget();
    atomic_fetch_add(&num_values, 1);
    return writes_as;
}

static kvc_status remove_as(void *user, const uint8_t *name) {
    remove_late(user, name);
    return removes_as;
}

static void test_stored_while_cleared(void) {
    static const kvc_status right[][3] = {{KVC_OK, KVC_OK, KVC_OK},
                                          {KVC_ERR_STORE, KVC_OK, KVC_ERR_STORE},
                                          {KVC_OK, KVC_ERR_STORE, KVC_ERR_STORE},
                                          {KVC_ERR_CANCELLED, KVC_ERR_STORE, KVC_ERR_CANCELLED}};
    const kvc_store store = {sizeof store, NULL, read_none, write_beside, remove_as};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        int64_t size = -1;
        begin(0, 0);
        writes_as = right[i][0], removes_as = right[i][1];
        atomic_store(&num_values, 0);
        most_names = BLOCKS + 1;
        CHECK(kvc_take_new_blocks(cache, new_blocks, sizeof *new_blocks, BLOCKS, &num_new) == KVC_OK);
        const kvc_status status = kvc_store_block(cache, new_blocks[0].id, &store, &size);
        pthread_join(clearer, NULL);
        atomic_store(&may_begin, 0);
        CHECKF(status == right[i][2], "%d: status %d", (int)i, status);
        CHECKF(size == 0 && atomic_load(&num_values) == 0, "%d: size %d, %d values", (int)i, (int)size,
               atomic_load(&num_values));
        end();
    }
}

/* ---- forks ------------------------------------------------------------------------------------------------------- */

enum { SEQUENCES = 40 };

/* A child has all of it or nothing. */
static void fork_and_check(void) {
    const pid_t child = fork();
    int status = -1;
    if (!child) {
        kvc_prefix_stats stats = {.held = TOKENS, .sequences = SEQUENCES};
        alarm(LIMIT);
        test_failures = 0;
        if (cache->prefixes.first) kvc_prefix_get_stats(prefix, &stats, sizeof stats);
        CHECKF(stats.held == 0 || stats.held == TOKENS, "%lld tokens are held", (long long)stats.held);
        CHECKF(stats.sequences == 0 || stats.sequences == SEQUENCES, "%lld sequences", (long long)stats.sequences);
        if (cache->prefixes.first) CHECK(known() == (stats.held ? TOKENS : 0));
        end();
        fflush(stdout);
        end_child(test_failures != 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

static void keep_none(void) { CHECK(kvc_keep(cache, -1) == KVC_OK); }

static void test_forks(void) {
    static void (*const calls[])(void) = {forget, clear, keep_none, clear_prefix, free_prefix};
    for (int i = 0; i < (int)(sizeof calls / sizeof *calls); i++) {
        begin(0, 0);
        most_names = BLOCKS + 1;
        for (int s = 0; s < SEQUENCES && calls[i] == free_prefix; s++) {
            const kvc_tokens tokens = prompt(TOKENS);
            int32_t matched;
            int64_t id;
            CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK);
        }
        call_beside(calls[i], fork_and_check);
        end();
    }
}

/* A batch that begins between two parts of an acquire expires no rows that the acquire is to move: at their old
 * positions no query would see them. */
static void test_rows_to_move(void) {
    const kvc_layer layer = {.num_kv_heads = 1,
                             .k_dim = DIM,
                             .v_dim = DIM,
                             .policy = chunked_policy(2 * BLOCK, 0),
                             .rope.kind = KVC_ROPE_NONE};
    kvc_batch *batch;
    cache = cache_of(&layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 1});
    CHECK(feed(cache, 1, 1, BLOCK) == KVC_OK && kvc_shift(cache, 1, 0, KVC_END, 2 * BLOCK - 1) == KVC_OK);
    CHECK(kvc_seq_len(cache, 1, 0) == BLOCK); /* in two chunks */
    kvc_cache_set_in_call(cache, 1, 1);
    CHECK(begin_at_end(cache, 2, 1, &batch) == KVC_OK);
    kvc_abort(batch);
    CHECKF(kvc_seq_len(cache, 1, 0) == BLOCK, "%d of %d rows are left", (int)kvc_seq_len(cache, 1, 0), BLOCK);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    kvc_cache_set_in_call(cache, 1, 0);
    CHECK(begin_at_end(cache, 2, 1, &batch) == KVC_OK);
    kvc_abort(batch);
    CHECK(kvc_seq_len(cache, 1, 0) == BLOCK - 1); /* it may expire once the call has ended */
    end();
}

int main(void) {
    alarm(4 * LIMIT);
    test_store_block();
    test_names();
    test_moved();
    test_expired();
    test_other_prompts();
    test_stored();
    test_stored_while_cleared();
    test_forks();
    test_rows_to_move();
    return test_result();
}
