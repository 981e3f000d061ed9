/* A process forks while another thread forgets prompts, a few blocks at a time: in the child the call has ended.  A
 * prompt is known once it is computed again, and can be forgotten again.  A child that hangs is ended by alarm().
 * Not for Windows: there is no fork(). */
#define _POSIX_C_SOURCE 200809L
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pthread.h>
#include <stdatomic.h>

#include "support/serving.h"

const char *__tsan_default_options(void);

/* The child does not leak threads that the parent has yet to join. */
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }

enum { FIRST = BLOCK, LENGTH = 33, PROMPTS = 150, FORKS = 40, LIMIT = 60 /* seconds */ };

static atomic_int stop;
static kvc_batch *open_batch;

static void feed_openly(int64_t id, int32_t num) {
    static const float rows[LENGTH][DIM];
    const kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows};
    CHECKF(begin_at_end(cache, id, num, &open_batch) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_put(open_batch, 0, &put) == KVC_OK && kvc_commit(open_batch) == KVC_OK);
}

/* Serves a prompt that begins as all do; returns how many of its tokens were known. */
static int serve_openly(int which) {
    int64_t ids[LENGTH];
    int matched;
    for (int i = 0; i < LENGTH; i++) ids[i] = i < FIRST ? i : which * LENGTH + i;
    const int64_t id = acquire(ids, LENGTH, &matched);
    feed_openly(id, LENGTH - matched);
    release(id, ids, LENGTH);
    return matched;
}

static void forget_all(void) {
    const int64_t ids[FIRST] = {0, 1, 2, 3};
    const kvc_tokens tokens = tokens_of(ids, FIRST);
    int64_t num_names, num_dropped;
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num_names, &num_dropped) == KVC_OK);
}

static void *serve_and_forget(void *context) {
    while (!atomic_load(&stop)) {
        for (int i = 0; i < PROMPTS && !atomic_load(&stop); i++) serve_openly(i);
        forget_all();
    }
    return context;
}

/* Asks again and again, so that a call that forgets gives way. */
static void *ask(void *context) {
    while (!atomic_load(&stop)) kvc_nbytes(cache);
    return context;
}

static void check_child(void) {
    alarm(LIMIT);
    test_failures = 0;
    if (try_batch(cache, 1 << 20, 1) == KVC_ERR_BUSY) kvc_abort(open_batch);
    serve_openly(PROMPTS);
    CHECK(serve_openly(PROMPTS) == LENGTH - 1);
    forget_all();
    CHECK(serve_openly(PROMPTS) == 0 && kvc_validate(cache) == KVC_OK);
    end_child(test_result());
}

int main(void) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model"};
    pthread_t threads[2];
    alarm(4 * LIMIT);
    cache = cache_of(&layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 1});
    CHECK(kvc_prefix_new(cache, &config, &prefix) == KVC_OK);
    CHECK(pthread_create(&threads[0], NULL, serve_and_forget, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, ask, NULL) == 0);
    for (int i = 0; i < FORKS && !test_failures; i++) {
        int status = -1;
        const struct timespec nap = {.tv_nsec = 1000000 * (1 + random_int(0, 8))};
        nanosleep(&nap, NULL);
        const pid_t child = fork();
        if (!child) check_child();
        CHECKF(waitpid(child, &status, 0) == child && status == 0, "child %d: status %d", i, status);
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    return test_result();
}
