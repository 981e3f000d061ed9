/* Other threads, forks and clones in the middle of a prefix's calls: none sees what such a call has for itself, nor is
 * left with it.  A child that hangs is ended by alarm(). */
#define _DEFAULT_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/feeding.h"
#include "support/payloads.h"

#include <pthread.h>

const char *__tsan_default_options(void);

/* The child does not leak a thread that ended and that the parent has yet to join. */
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }

enum { BLOCK = 4, NUM_LAYERS = 8, DIM = 64, PROMPT = 64, MANY = 2560, LIMIT = 60 /* seconds */ };

static kvc_cache *cache;
static kvc_prefix *prefix;
static int64_t ids[MANY];
static uint8_t *payload, *read_payload; /* of a block */
static int64_t payload_size;
static atomic_int stop;

static void begin(const kvc_layer *layer, kvc_prefix_config config) {
    kvc_layer layers[NUM_LAYERS];
    for (int l = 0; l < NUM_LAYERS; l++) layers[l] = *layer;
    for (int i = 0; i < MANY; i++) ids[i] = i;
    cache = cache_of(layers, NUM_LAYERS, (kvc_config){.block_size = BLOCK, .num_threads = 1});
    config.struct_size = sizeof config;
    config.fingerprint = "a model";
    CHECKF(kvc_prefix_new(cache, &config, &prefix) == KVC_OK, "%s", kvc_last_error());
    payload_size = payload_bytes(cache);
    payload = calloc(2, (size_t)payload_size);
    read_payload = payload + payload_size;
    memset(payload, 1, NUM_LAYERS);
    atomic_store(&stop, 0);
}

static void end(void) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
    free(payload);
}

/* Adds a block of the first tokens. */
static void add_block(int32_t number) {
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = (int64_t)MANY};
    int32_t is_known;
    CHECKF(add_payload(prefix, &tokens, number, payload, payload_size, &is_known) == KVC_OK, "%s", kvc_last_error());
}

static void evict_all(void) {
    int64_t num;
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK);
}

static void feed_all(int64_t id, int32_t num) {
    CHECKF(feed(cache, NUM_LAYERS, id, num) == KVC_OK, "%s", kvc_last_error());
}

/* Serves a prompt. */
static void serve(const int64_t *prompt) {
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = prompt, .num_tokens = PROMPT};
    int32_t matched;
    int64_t id;
    CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
    feed_all(id, PROMPT);
    CHECK(kvc_prefix_release(prefix, id, &tokens) == KVC_OK);
}

/* ---- what threads do --------------------------------------------------------------------------------------------- */

static void *add_blocks(void *unused) {
    (void)unused;
    while (!atomic_load(&stop)) {
        add_block(0);
        evict_all();
    }
    return NULL;
}

static void *read_blocks(void *unused) {
    kvc_new_block block;
    int64_t num, size;
    (void)unused;
    CHECK(kvc_take_new_blocks(cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    while (!atomic_load(&stop)) CHECK(kvc_read_block(cache, block.id, read_payload, payload_size, &size) == KVC_OK);
    return NULL;
}

static void *fill_and_clear(void *unused) {
    (void)unused;
    while (!atomic_load(&stop)) {
        for (int32_t i = 0; i < 200; i++) add_block(i);
        CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    }
    return NULL;
}

static void *fill_and_free(void *unused) {
    (void)unused;
    for (int64_t i = 1; i < 40; i++) serve(ids + i * PROMPT);
    kvc_prefix_free(prefix);
    return NULL;
}

/* Reads new blocks, which others may drop meanwhile. */
static void *read_new_blocks(void *unused) {
    kvc_new_block blocks[PROMPT / BLOCK];
    int64_t num, size;
    (void)unused;
    while (!atomic_load(&stop)) {
        serve(ids + PROMPT);
        CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, PROMPT / BLOCK, &num) == KVC_OK);
        for (int64_t i = 0; i < num; i++) {
            const kvc_status status = kvc_read_block(cache, blocks[i].id, read_payload, payload_size, &size);
            CHECKF(status == KVC_OK && (!size || size == payload_size), "%d: %s", (int)status, kvc_last_error());
        }
        CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    }
    return NULL;
}

enum { LARGE = 1 << 20 }; /* bytes of a recurrent state */
static uint8_t state[LARGE];

static void *keep_states(void *unused) {
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = BLOCK};
    (void)unused;
    while (!atomic_load(&stop)) {
        const int64_t id = kvc_new_sequence(cache);
        feed_all(id, BLOCK);
        CHECKF(kvc_prefix_checkpoint(prefix, id, &tokens, state, LARGE) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        evict_all();
    }
    return NULL;
}

/* ---- forks and clones -------------------------------------------------------------------------------------------- */

/* A child has nothing of the calls of a thread that is not there, once it has dropped all blocks. */
static void check_child(void) {
    alarm(LIMIT);
    test_failures = 0;
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    evict_all();
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    CHECK(kvc_sequences(cache, NULL, 0) == 0);
    CHECKF(stats_in(cache).retained == 0, "%lld retained", (long long)stats_in(cache).retained);
    end();
    fflush(stdout);
    end_child(test_failures != 0);
}

static void wait_for_child(pid_t child) {
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

static void fork_and_check(void) {
    const pid_t child = fork();
    if (child == 0) check_child();
    wait_for_child(child);
}

/* A child has no state that a call of such a thread was about to keep. */
static void fork_and_check_states(void) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(LIMIT);
        test_failures = 0;
        kvc_clear(cache); /* or it is in an open batch */
        CHECK(kvc_prefix_clear(prefix) == KVC_OK);
        CHECKF(kvc_nbytes(cache) < LARGE, "%lld bytes are left", (long long)kvc_nbytes(cache));
        end_child(test_failures != 0);
    }
    wait_for_child(child);
}

/* A clone has no sequence that nobody has named. */
static void clone_and_check(void) {
    kvc_cache *clone = NULL;
    CHECKF(kvc_cache_clone(cache, &clone) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_sequences(clone, NULL, 0) == 0 && kvc_validate(clone) == KVC_OK);
    CHECK(kvc_cache_free(clone) == KVC_OK);
}

static void list_and_check(void) { CHECK(kvc_sequences(cache, NULL, 0) == 0); }

static void clear_and_check(void) { CHECK(kvc_clear(cache) == KVC_OK); }

static void clear_if_idle(void) {
    const kvc_status status = kvc_clear(cache);
    CHECK(status == KVC_OK || status == KVC_ERR_BUSY);
}

static void take_and_check(void) {
    kvc_new_block blocks[3];
    int64_t num;
    CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, 3, &num) == KVC_OK && num <= 3);
}

/* Checks something some times, at any moment of what a thread does. */
static void check_beside(void *(*work)(void *), void (*check)(void), int times) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    pthread_t thread;
    begin(&layer, (kvc_prefix_config){.collects_new = 1, .quota = 400, .state_bytes = work == keep_states ? LARGE : 0});
    serve(ids);
    CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
    for (int i = 0; i < times; i++) {
        usleep((useconds_t)(i * 37 % 1000));
        check();
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    end();
}

/* ---- tokens that are moved --------------------------------------------------------------------------------------- */

static atomic_int is_inside, go_on;
static int forks; /* the function below forks, and does not wait */
static pid_t child_of_function;

static int32_t shift(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                     int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    if (atomic_exchange(&is_inside, 1)) return 0;
    if (forks) {
        child_of_function = fork();
        if (!child_of_function) {
            alarm(LIMIT);
            test_failures = 0;
        }
    }
    while (!forks && !atomic_load(&go_on)) sched_yield();
    return 0;
}

static void *acquire_moved(void *unused) {
    int64_t prompt[5 * BLOCK]; /* the first block is known, and those behind it are moved */
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = prompt, .num_tokens = 5 * BLOCK};
    int32_t matched;
    int64_t id;
    (void)unused;
    for (int i = 0; i < 5 * BLOCK; i++) prompt[i] = ids[i < BLOCK ? i : i + BLOCK];
    CHECKF(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK, "%s", kvc_last_error());
    CHECKF(matched == 5 * BLOCK - 1, "%d", matched);
    CHECK(kvc_sequences(cache, NULL, 0) == 1 && kvc_seq_len(cache, id, 0) == matched);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    return NULL;
}

/* A call that moves tokens is where it runs a function of the caller's: its sequences are there for nobody else, and a
 * fork by that function goes on. */
static void test_moving(void) {
    const kvc_layer layer = {
        .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_FUNCTION, .shift = shift}};
    pthread_t thread;
    for (forks = 0; forks < 1 + HAS_FORK; forks++) {
        begin(&layer, (kvc_prefix_config){.reuse_min_tokens = BLOCK});
        for (int32_t i = 0; i < 8; i++) add_block(i);
        atomic_store(&is_inside, 0);
        atomic_store(&go_on, 0);
        if (forks) {
            acquire_moved(NULL);
        } else {
            CHECK(pthread_create(&thread, NULL, acquire_moved, NULL) == 0);
            while (!atomic_load(&is_inside)) sched_yield();
            list_and_check();
            CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
            if (HAS_FORK) fork_and_check();
            atomic_store(&go_on, 1);
            pthread_join(thread, NULL);
        }
        end();
        if (forks && !child_of_function) {
            fflush(stdout);
            end_child(test_failures != 0);
        }
        if (forks) wait_for_child(child_of_function);
    }
}

/* ---- a prompt that is forgotten while a state of it is copied ---------------------------------------------------- */

enum { HUGE_STATE = 1 << 25, MOST_ROUNDS = 100 }; /* bytes, which take milliseconds to copy */
static int64_t fed_anew;
static atomic_int is_anew;

/* Forgets the prompt once its state is being copied, and feeds the sequence anew. */
static void *forget_and_feed(void *unused) {
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = BLOCK};
    int64_t num_names, num_dropped;
    (void)unused;
    while (kvc_nbytes(cache) < HUGE_STATE && !atomic_load(&stop)) sched_yield();
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num_names, &num_dropped) == KVC_OK);
    CHECK(kvc_clear_sequence(cache, fed_anew) == KVC_OK);
    feed_all(fed_anew, BLOCK);
    atomic_store(&is_anew, 1);
    return NULL;
}

/* A state that was handed in before its tokens were forgotten is not kept with the rows that were computed since. */
static void test_forgotten_state(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = BLOCK};
    uint8_t *huge = calloc(1, HUGE_STATE);
    int met = 0;
    for (int round = 0; round < MOST_ROUNDS && !met; round++) {
        pthread_t thread;
        int32_t known;
        begin(&layer, (kvc_prefix_config){.state_bytes = HUGE_STATE});
        fed_anew = kvc_new_sequence(cache);
        feed_all(fed_anew, BLOCK);
        atomic_store(&is_anew, 0);
        CHECK(pthread_create(&thread, NULL, forget_and_feed, NULL) == 0);
        CHECKF(kvc_prefix_checkpoint(prefix, fed_anew, &tokens, huge, HUGE_STATE) == KVC_OK, "%s", kvc_last_error());
        met = atomic_load(&is_anew);
        atomic_store(&stop, 1);
        pthread_join(thread, NULL);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &known, NULL) == KVC_OK);
        CHECKF(!met || known == 0, "%d tokens are known", known);
        end();
    }
    CHECK(met);
    free(huge);
}

/* ---- a state that is dropped while it is copied ------------------------------------------------------------------ */

static int64_t going_on; /* from the state */
static atomic_int is_copied, is_dropped;

static void *drop_state(void *unused) {
    (void)unused;
    while (!atomic_load(&is_copied)) sched_yield();
    usleep(1000);
    CHECK(kvc_clear_sequence(cache, going_on) == KVC_OK && kvc_prefix_clear(prefix) == KVC_OK);
    atomic_store(&is_dropped, 1);
    return NULL;
}

/* A state whose sequence and prompt go while kvc_prefix_state copies it stays until then. */
static void test_dropped_state(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = BLOCK + 1};
    const kvc_tokens block = {.struct_size = sizeof block, .ids = ids, .num_tokens = BLOCK};
    uint8_t *huge = malloc(HUGE_STATE);
    int met = 0;
    for (int round = 0; round < MOST_ROUNDS && !met; round++) {
        pthread_t thread;
        int32_t matched;
        int64_t size;
        begin(&layer, (kvc_prefix_config){.state_bytes = HUGE_STATE});
        const int64_t id = kvc_new_sequence(cache);
        feed_all(id, BLOCK);
        memset(huge, 7, HUGE_STATE);
        CHECK(kvc_prefix_checkpoint(prefix, id, &block, huge, HUGE_STATE) == KVC_OK);
        CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &going_on, &matched) == KVC_OK && matched == BLOCK);
        memset(huge, 0, HUGE_STATE);
        atomic_store(&is_copied, 0);
        atomic_store(&is_dropped, 0);
        CHECK(pthread_create(&thread, NULL, drop_state, NULL) == 0);
        atomic_store(&is_copied, 1);
        CHECK(kvc_prefix_state(prefix, going_on, huge, HUGE_STATE, &size) == KVC_OK);
        met = atomic_load(&is_dropped) && size;
        pthread_join(thread, NULL);
        CHECK(!size || (size == HUGE_STATE && huge[0] == 7 && !memcmp(huge, huge + 1, HUGE_STATE - 1)));
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        end();
    }
    CHECK(met);
    free(huge);
}

int main(void) {
    const int few = is_full() ? 50 : 10, many = 30 * few, children = HAS_FORK ? few : 0;
    alarm(4 * LIMIT);
    test_moving();
    test_forgotten_state();
    test_dropped_state();
    check_beside(read_blocks, fork_and_check, children);
    check_beside(add_blocks, fork_and_check, children);
    check_beside(fill_and_clear, fork_and_check, children);
    check_beside(keep_states, fork_and_check_states, 4 * children);
    check_beside(read_blocks, clone_and_check, many);
    check_beside(add_blocks, clone_and_check, many);
    check_beside(read_blocks, list_and_check, many);
    check_beside(add_blocks, clear_and_check, many);
    check_beside(read_new_blocks, clear_if_idle, many);
    check_beside(fill_and_free, take_and_check, many);
    return test_result();
}
