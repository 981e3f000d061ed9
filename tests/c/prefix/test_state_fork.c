/* A process forks while another thread keeps a recurrent state: the child lacks that thread, and frees what it copied.
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

enum { LARGE = 1 << 22, FORKS = 20, LIMIT = 60 /* seconds */ };

static atomic_int stop;
static int64_t id, held; /* bytes without states */
static uint8_t state[LARGE];

static void *keep_states(void *ids) {
    const kvc_tokens tokens = tokens_of(ids, BLOCK);
    while (!atomic_load(&stop)) CHECK(kvc_prefix_checkpoint(prefix, id, &tokens, state, LARGE) == KVC_OK);
    return NULL;
}

static void check_child(void) {
    alarm(LIMIT);
    test_failures = 0;
    const int64_t left = kvc_nbytes(cache) - held - stats_now().checkpoint_bytes;
    CHECKF(left < LARGE / 2, "%lld bytes are nobody's", (long long)left);
    CHECK(kvc_clear(cache) == KVC_OK && kvc_compact(cache) == KVC_OK && kvc_nbytes(cache) < held + LARGE / 2);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    end_child(test_result());
}

int main(void) {
    int64_t *ids = numbers(0);
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model", .state_bytes = LARGE};
    pthread_t thread;
    alarm(4 * LIMIT);
    num_layers = 1;
    cache = cache_of(&layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 1});
    CHECK(kvc_prefix_new(cache, &config, &prefix) == KVC_OK);
    id = acquire(ids, BLOCK + 1, NULL);
    feed_to(id, BLOCK, BLOCK);
    held = kvc_nbytes(cache);
    CHECK(pthread_create(&thread, NULL, keep_states, ids) == 0);
    for (int i = 0; i < FORKS && !test_failures; i++) {
        int status = -1;
        const struct timespec nap = {.tv_nsec = random_int(0, 3000000)};
        nanosleep(&nap, NULL);
        const pid_t child = fork();
        if (!child) check_child();
        CHECKF(waitpid(child, &status, 0) == child && status == 0, "child %d: status %d", i, status);
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    return test_result();
}
