/* A long call polls whether to continue, on the calling thread and without the mutex; when it is cancelled, nothing was
 * put. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/threads.h"
#include "cache/cache.h"
#include "support/saved.h"
#include "support/test.h"

#ifdef __SANITIZE_ADDRESS__
enum { SLOWER = 4 }; /* calls take at least so many times as long */
#else
enum { SLOWER = 1 };
#endif
enum { STORED = 4096, QUERIES = 64 / SLOWER, HEADS = 32, KV_HEADS = 2, DIM = 64 };

typedef struct poller {
    kvc_cache *cache;
    pthread_t caller;
    int asked, stop_at; /* 0: never */
} poller;

static int32_t poll(void *user) {
    poller *p = user;
    CHECK(pthread_equal(pthread_self(), p->caller));
    CHECK(kvc_nbytes(p->cache) > 0); /* which takes the mutex */
    return ++p->asked == p->stop_at;
}

static kvc_cache *new_cache(poller *p, const kvc_policy *policy, int32_t type, int num_threads) {
    const kvc_layer layer = {
        .num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = type, .v_type = type, .policy = *policy};
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 1, .v_dim = 1}, layer};
    const kvc_config config = {.num_threads = num_threads, .poll = poll, .poll_user = p};
    *p = (poller){.cache = cache_of(layers, 2, config), .caller = pthread_self()};
    return p->cache;
}

static float rows[STORED * KV_HEADS * DIM], q[QUERIES * HEADS * DIM], out[QUERIES * HEADS * DIM];

static kvc_put_args put_of(int32_t num_tokens) { return float_rows(0, num_tokens, KV_HEADS, DIM, DIM, rows, rows); }

static kvc_attend_args attend_of(const kvc_put_args *put) {
    kvc_attend_args args = float_queries(HEADS, DIM, DIM, q, out);
    args.put = put;
    return args;
}

/* Attends again and again until it was asked `times` more: how often that is in one call depends on the machine. */
static void attend_until_asked(kvc_batch *batch, const kvc_plan_args *plan, poller *p, int times) {
    const kvc_attend_args args = attend_of(NULL);
    for (const int before = p->asked; p->asked < before + times;) CHECK(kvc_attend(batch, plan, &args) == KVC_OK);
}

static void test_attend(int num_threads) {
    poller p;
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_FULL}, KVC_F32, num_threads);
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 1, .num_tokens = QUERIES, .num_heads = HEADS};
    const kvc_put_args stored = put_of(STORED), own = put_of(QUERIES);
    const kvc_attend_args with_put = attend_of(&own), without = attend_of(NULL);
    kvc_batch *batch;
    kvc_status status = KVC_OK;

    CHECK(kvc_begin(cache, STORED, NULL, NULL, NULL, &batch) == KVC_OK);
    CHECK(kvc_put(batch, 0, &stored) == KVC_OK && kvc_put(batch, 1, &stored) == KVC_OK);
    CHECK(kvc_commit(batch) == KVC_OK);
    while (status == KVC_OK) { /* until a call takes long enough to be asked */
        CHECK(kvc_begin(cache, QUERIES, NULL, NULL, NULL, &batch) == KVC_OK);
        p.stop_at = p.asked + 1;
        status = kvc_attend(batch, &plan, &with_put);
        if (status == KVC_OK) kvc_abort(batch);
    }
    CHECK(status == KVC_ERR_CANCELLED);
    CHECK(strstr(kvc_last_error(), "cancelled"));
    CHECK(p.asked == p.stop_at);
    CHECK(kvc_validate(cache) == KVC_OK);
    p.stop_at = 0;
    CHECK_FAILS(kvc_attend(batch, &plan, &without), KVC_ERR_INVALID, "token 0", "was not put");
    CHECK(kvc_put(batch, 1, &own) == KVC_OK);
    attend_until_asked(batch, &plan, &p, 1);
    CHECK(kvc_put(batch, 0, &own) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECK(kvc_seq_len(cache, 0, 1) == STORED + QUERIES);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A loaded cache polls as the configuration says with which it was loaded. */
static void test_loaded(void) {
    poller p, loading = {.caller = pthread_self()};
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_FULL}, KVC_F32, 1);
    const kvc_config config = {.struct_size = sizeof config, .num_threads = 1, .poll = poll, .poll_user = &loading};
    const kvc_plan_args plan = {.struct_size = sizeof plan,
                                .layer = 1,
                                .first = STORED - QUERIES, /* which see many rows: the call is long enough to poll */
                                .num_tokens = QUERIES,
                                .num_heads = HEADS};
    const kvc_put_args own = put_of(STORED);
    kvc_batch *batch;
    saved file;

    CHECK(save_all(cache, &file) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    args.config = &config;
    CHECK(kvc_load(&args, &loading.cache) == KVC_OK);
    free(file.bytes);
    CHECK(kvc_begin(loading.cache, STORED, NULL, NULL, NULL, &batch) == KVC_OK && kvc_put(batch, 1, &own) == KVC_OK);
    attend_until_asked(batch, &plan, &loading, 1);
    kvc_abort(batch);
    CHECK(p.asked == 0 && kvc_cache_free(loading.cache) == KVC_OK);
}

/* A flag that another thread sets during the call cancels it as well. */
static volatile int32_t cancel;

static int32_t set_cancel(void *user) {
    (void)user;
    cancel = 1;
    return 0;
}

static void test_cancel_ends_tasks(void) {
    poller p;
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_FULL}, KVC_F32, 1);
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 1, .num_tokens = QUERIES, .num_heads = HEADS};
    const kvc_put_args own = put_of(QUERIES);
    kvc_attend_args args = attend_of(&own);
    kvc_batch *batch;

    CHECK(kvc_begin(cache, QUERIES, NULL, NULL, NULL, &batch) == KVC_OK);
    set_cancel(NULL);
    args.cancel = &cancel;
    CHECK(kvc_attend(batch, &plan, &args) == KVC_ERR_CANCELLED);
    CHECK(kvc_put(batch, 1, &own) == KVC_OK);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static float weights[KV_HEADS * STORED];

static const kvc_weights_args WEIGHTS = {.struct_size = sizeof WEIGHTS,
                                         .q = q,
                                         .weights = weights,
                                         .num_rows = STORED,
                                         .num_queries = QUERIES,
                                         .num_heads = HEADS};

/* Puts rows in both layers. */
static void store(kvc_cache *cache) {
    const kvc_put_args own = put_of(STORED);
    kvc_batch *batch;
    CHECK(kvc_begin(cache, STORED, NULL, NULL, NULL, &batch) == KVC_OK);
    CHECK(kvc_put(batch, 0, &own) == KVC_OK && kvc_put(batch, 1, &own) == KVC_OK && kvc_commit(batch) == KVC_OK);
}

/* Weights are cancelled by the poll, or by a flag.  Asked again, the call gives them. */
static void test_weights(int num_threads) {
    poller p;
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_FULL}, KVC_F32, num_threads);
    kvc_weights_args args = WEIGHTS;
    kvc_status status = KVC_OK;

    store(cache);
    for (p.stop_at = p.asked + 1; status == KVC_OK;) status = kvc_weights(cache, 0, 1, &args);
    CHECK(status == KVC_ERR_CANCELLED && strstr(kvc_last_error(), "cancelled") && p.asked == p.stop_at);
    p.stop_at = 0;
    CHECK(kvc_weights(cache, 0, 1, &args) == KVC_OK && fabsf(weights[0]) > 0);
    set_cancel(NULL);
    args.cancel = &cancel;
    CHECK(kvc_weights(cache, 0, 1, &args) == KVC_ERR_CANCELLED);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_compact(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Compacts in another thread, for which a poll waits: Python's poll waits for the thread that has the GIL. */
static void *compact_it(void *cache) {
    CHECK(kvc_compact(cache) == KVC_OK);
    return NULL;
}

static void *fork_it(void *cache) {
    const pid_t child = fork();
    if (child == 0)
        _exit(kvc_validate(cache) != KVC_OK || kvc_compact(cache) != KVC_OK || kvc_clear(cache) != KVC_OK ||
              kvc_nbytes(cache) <= 0 || kvc_cache_free(cache) != KVC_OK);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return NULL;
}

/* A poll during whose first call another thread forks, and then waits for the call. */
typedef struct meeting {
    kvc_cache *cache;
    pthread_t compacting;
    int was_asked;
} meeting;

static int32_t meet(void *user) {
    meeting *m = user;
    pthread_t forking;
    float key[KV_HEADS * DIM];
    const kvc_rows_out out = {.struct_size = sizeof out, .k = key};
    int is_waiting = 0;
    if (m->was_asked++) return 0;
    CHECK(pthread_create(&forking, NULL, fork_it, m->cache) == 0 && pthread_join(forking, NULL) == 0);
    CHECK(pthread_create(&m->compacting, NULL, compact_it, m->cache) == 0);
    while (!is_waiting) {
        kvc_lock(m->cache);
        is_waiting = m->cache->waiting.num_waiting != 0;
        kvc_unlock(m->cache, KVC_OK);
    }
    CHECK(kvc_gather(m->cache, 0, 1, 1, 1, &out) == KVC_OK && memcmp(key, rows + KV_HEADS * DIM, sizeof key) == 0);
    CHECK_FAILS(kvc_compact(m->cache), KVC_ERR_HELD, "compact", "in the poll");
    CHECK_FAILS(kvc_cache_free(m->cache), KVC_ERR_HELD, "free", "in the poll");
    return 0;
}

/* While the poll of weights runs, others fork, and what it calls does not wait for the call itself. */
static void test_poll_of_weights(int num_threads) {
    const kvc_layer layer = {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM};
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 1, .v_dim = 1}, layer};
    meeting m = {0};
    m.cache = cache_of(layers, 2, (kvc_config){.num_threads = num_threads, .poll = meet, .poll_user = &m});
    store(m.cache);
    while (!m.was_asked) CHECK(kvc_weights(m.cache, 0, 1, &WEIGHTS) == KVC_OK);
    CHECK(pthread_join(m.compacting, NULL) == 0);
    CHECK(kvc_validate(m.cache) == KVC_OK && kvc_cache_free(m.cache) == KVC_OK);
}

/* Tokens whose put was cancelled can be put again. */
static void test_put(int num_threads) {
    enum { TOKENS = (1 << 17) / SLOWER };
    poller p;
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_FULL}, KVC_Q4_0, num_threads);
    const kvc_put_args all = zero_rows(0, TOKENS);
    kvc_batch *batch = NULL;
    kvc_status status = KVC_OK;

    for (p.stop_at = 1; status == KVC_OK;) { /* however fast the machine is */
        kvc_abort(batch);
        CHECK(kvc_begin(cache, TOKENS, NULL, NULL, NULL, &batch) == KVC_OK);
        status = kvc_put(batch, 1, &all);
    }
    CHECK(status == KVC_ERR_CANCELLED && p.asked == 1);
    p.stop_at = 0;
    CHECK(kvc_put(batch, 1, &all) == KVC_OK);
    CHECK_FAILS(kvc_put(batch, 1, &all), KVC_ERR_INVALID, "token 0", "was put");
    kvc_abort(batch);
    CHECK(kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A cancelled cross-attention put leaves the sequence the rows it had. */
static void test_cross_put(void) {
    enum { MAX_LEN = (1 << 18) / SLOWER };
    poller p;
    kvc_cache *cache = new_cache(&p, &(kvc_policy){.kind = KVC_CROSS, .max_len = MAX_LEN}, KVC_Q4_0, 1);
    const kvc_put_args few = put_of(3);
    const kvc_put_args all = zero_rows(0, MAX_LEN);
    kvc_batch *batch;
    int64_t num_rows = 0;

    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    CHECK(kvc_put(batch, 1, &few) == KVC_OK);
    const int64_t bytes = kvc_nbytes(cache);
    for (p.stop_at = 1; !p.asked;) { /* however fast the machine is */
        const kvc_status status = kvc_put(batch, 1, &all);
        CHECK(status == (p.asked ? KVC_ERR_CANCELLED : KVC_OK));
        CHECK(status == KVC_OK || kvc_nbytes(cache) == bytes);
        if (status != KVC_OK) break;
        kvc_abort(batch); /* the next one finds things as the first one did */
        CHECK(kvc_compact(cache) == KVC_OK && kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
        CHECK(kvc_put(batch, 1, &few) == KVC_OK);
    }
    CHECK(kvc_dense_rows(batch, 1, &num_rows) == KVC_OK && num_rows == 3);
    CHECK(kvc_validate(cache) == KVC_OK);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* The next poll comes later than the last one. */
static void test_timer(void) {
    poller p = {.cache = cache_of(&(kvc_layer){.num_kv_heads = 1, .k_dim = 1, .v_dim = 1}, 1, (kvc_config){0}),
                .caller = pthread_self()};
    kvc_poll_timer timer;
    kvc_poll_timer_init(&timer, poll, &p);
    const int64_t before = timer.next = kvc_now();
    CHECK(!kvc_poll_timer_ask(&timer) && p.asked == 1 && timer.next > before);
    CHECK(kvc_cache_free(p.cache) == KVC_OK);
}

int main(void) {
    setenv("KVCACHE_ISA", "scalar", 1); /* so that every machine takes long enough to be asked */
    test_timer();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) rows[i] = (float)(i % 7) - 3;
    for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = (float)(i % 5) - 2;
    test_attend(1);
    test_attend(2);
    test_loaded();
    test_cancel_ends_tasks();
    test_weights(1);
    test_weights(2);
    if (HAS_FORK) {
        test_poll_of_weights(1);
        test_poll_of_weights(2);
    }
    test_put(1);
    test_put(2);
    test_cross_put();
    return test_result();
}
