/* Calls that wait to begin a batch: in order of arrival, for a time, cancelled, refused, and in a process that forks.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/waiting.h"
#include "support/test.h"

const char *__tsan_default_options(void);

/* The child does not leak a thread that ended and that the parent has yet to join. */
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }

enum { HEADS = 2, DIM = 8, PROMPT = 5, STEPS = 40, MOST = 8, LIMIT = 120 /* seconds */ };

static const double angles[] = {1, 0.1};

static kvc_cache *new_cache(kvc_rope rope, int64_t max_seq_len, kvc_poll_fn *poll, void *user) {
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = rope},
                                {.num_kv_heads = 1,
                                 .k_dim = DIM,
                                 .v_dim = DIM,
                                 .rope = rope,
                                 .policy = {.kind = KVC_SLIDING, .window = 7, .num_sink_tokens = 2}}};
    return cache_of(
        layers, 2,
        (kvc_config){.block_size = 4, .max_seq_len = max_seq_len, .num_threads = 1, .poll = poll, .poll_user = user});
}

static const kvc_rope frequencies = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = angles};

static kvc_cache *plain_cache(void) { return new_cache(frequencies, 0, NULL, NULL); }

/* Begins a batch of n tokens, at most PROMPT, that continue a sequence. */
static kvc_status begin(kvc_cache *cache, int64_t id, int32_t n, int64_t timeout_ms, kvc_batch **batch) {
    const int64_t ids[] = {id, id, id, id, id};
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = n, .seq_ids = ids, .timeout_ms = timeout_ms};
    return kvc_begin_with(cache, &args, batch);
}

/* Attends in every layer with the batch's n tokens, whose rows follow from their sequence and position, and commits. */
static void attend_and_commit(kvc_batch *batch, int64_t id, int32_t n, float *out) {
    float k[PROMPT][DIM], q[PROMPT][HEADS][DIM];
    for (int32_t layer = 0; layer < 2; layer++) {
        for (int32_t t = 0; t < n; t++)
            for (int32_t d = 0; d < DIM; d++) {
                k[t][d] = (float)((kvc_batch_positions(batch)[t] * 7 + (int32_t)id * 5 + layer * 3 + d) % 11) / 4;
                q[t][0][d] = k[t][d];
                q[t][1][d] = 1 - k[t][d];
            }
        const kvc_put_args put = float_rows(0, 0, 1, DIM, DIM, k, k);
        const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = layer, .num_heads = HEADS};
        kvc_attend_args args = float_queries(HEADS, DIM, DIM, q, out + layer * PROMPT * HEADS * DIM);
        args.put = &put;
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    }
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

static int count_waiters(kvc_cache *cache) {
    int num = 0;
    kvc_lock(cache);
    for (const kvc_waiter *waiter = cache->waiting.waiters; waiter; waiter = waiter->next) num++;
    kvc_unlock(cache, KVC_OK);
    return num;
}

static void await_waiters(kvc_cache *cache, int num) {
    while (count_waiters(cache) != num) sched_yield();
}

/* ---- request threads --------------------------------------------------------------------------------------------- */

typedef struct request {
    kvc_cache *cache;
    int64_t id;
    float out[STEPS][2][PROMPT][HEADS][DIM];
} request;

/* Generates in a sequence: a prompt, then a token a step. */
static void *generate(void *context) {
    request *r = context;
    for (int step = 0; step < STEPS; step++) {
        kvc_batch *batch = NULL;
        const int32_t n = step ? 1 : PROMPT;
        CHECKF(begin(r->cache, r->id, n, -1, &batch) == KVC_OK, "%s", kvc_last_error());
        attend_and_commit(batch, r->id, n, r->out[step][0][0][0]);
    }
    return NULL;
}

/* Threads that share a cache and have no lock of their own get what each gets alone. */
static void test_requests(void) {
    static request alone[MOST], together[MOST];
    pthread_t threads[MOST];
    kvc_cache *caches[] = {plain_cache(), plain_cache()};
    for (int i = 0; i < MOST; i++) {
        alone[i].cache = caches[0], together[i].cache = caches[1];
        alone[i].id = together[i].id = i;
        generate(&alone[i]);
    }
    for (int i = 0; i < MOST; i++) CHECK(pthread_create(&threads[i], NULL, generate, &together[i]) == 0);
    for (int i = 0; i < MOST; i++) {
        pthread_join(threads[i], NULL);
        CHECKF(memcmp(alone[i].out, together[i].out, sizeof alone[i].out) == 0, "request %d", i);
    }
    for (int i = 0; i < 2; i++) CHECK(kvc_validate(caches[i]) == KVC_OK && kvc_cache_free(caches[i]) == KVC_OK);
}

/* ---- order, time, failure ---------------------------------------------------------------------------------------- */

typedef struct caller {
    kvc_cache *cache;
    int64_t id, timeout_ms;
    int32_t num_tokens;
    kvc_status status;
    int32_t at; /* position of its first token */
    char message[200];
} caller;

static void *call(void *context) {
    caller *c = context;
    kvc_batch *batch = NULL;
    c->status = begin(c->cache, c->id, c->num_tokens, c->timeout_ms, &batch);
    if (c->status != KVC_OK) snprintf(c->message, sizeof c->message, "%s", kvc_last_error());
    float out[2 * PROMPT * HEADS * DIM];
    if (batch) {
        c->at = kvc_batch_positions(batch)[0];
        attend_and_commit(batch, c->id, c->num_tokens, out);
    }
    return NULL;
}

static pthread_t start(caller *c) {
    pthread_t thread;
    const int before = count_waiters(c->cache);
    CHECK(pthread_create(&thread, NULL, call, c) == 0);
    await_waiters(c->cache, before + 1);
    return thread;
}

/* Batches begin in the order of the calls, and each finds what the batches before it left.  A call that fails gives way
 * to the next, and a call that does not wait does not go first. */
static void test_order(void) {
    kvc_cache *cache = new_cache(frequencies, 9, NULL, NULL);
    caller callers[MOST];
    pthread_t threads[MOST];
    kvc_batch *open = NULL, *none = NULL;
    CHECK(begin(cache, 99, 1, 0, &open) == KVC_OK);
    for (int i = 0; i < MOST; i++) { /* 5, 5: too many, 1, 1, 1, 1: the last that fits, ... */
        callers[i] =
            (caller){.cache = cache, .timeout_ms = i % 2 ? -1 : 1000 * LIMIT, .num_tokens = i < 2 ? PROMPT : 1};
        threads[i] = start(&callers[i]);
    }
    CHECK_FAILS(begin(cache, 0, 1, 0, &none), KVC_ERR_BUSY, "a batch is open", "give a timeout");
    CHECK_FAILS(kvc_cache_free(cache), KVC_ERR_BUSY, "free the cache", "a batch is open");
    kvc_abort(open);
    for (int i = 0; i < MOST; i++) {
        pthread_join(threads[i], NULL);
        const int fits = i != 1 && i < 6;
        CHECKF(callers[i].status == (fits ? KVC_OK : KVC_ERR_FULL), "%d: %s", i, callers[i].message);
        CHECKF(!fits || callers[i].at == (i ? PROMPT + i - 2 : 0), "%d: at %d", i, callers[i].at);
    }
    CHECK(kvc_next_position(cache, 0) == 9 && kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* A call gives up once its time has passed, and has changed nothing; those behind it keep their places. */
static void test_time(void) {
    kvc_cache *cache = plain_cache();
    kvc_batch *open = NULL, *none = NULL;
    CHECK_FAILS(begin(cache, 0, 1, -2, &none), KVC_ERR_INVALID, "timeout_ms", "is -2:");
    CHECK(begin(cache, 0, 1, 1, &open) == KVC_OK);
    caller brief = {.cache = cache, .id = 1, .timeout_ms = 30, .num_tokens = 1};
    caller patient = {.cache = cache, .id = 2, .timeout_ms = INT64_MAX, .num_tokens = 1};
    const int64_t bytes = kvc_nbytes(cache);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, call, &brief) == 0);
    pthread_join(thread, NULL);
    CHECKF(brief.status == KVC_ERR_BUSY && strstr(brief.message, "30 ms"), "%s", brief.message);
    CHECK_FAILS(begin(cache, 0, 1, 1, &none), KVC_ERR_BUSY, "a batch is open", "1 ms");
    CHECK(kvc_nbytes(cache) == bytes && !none);
    thread = start(&patient);
    kvc_abort(open);
    pthread_join(thread, NULL);
    CHECK(patient.status == KVC_OK && kvc_next_position(cache, 2) == 1 && kvc_cache_free(cache) == KVC_OK);
}

/* ---- keys that another call rewrites ----------------------------------------------------------------------------- */

static atomic_int is_inside, go_on;

static int32_t move_slowly(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                           int32_t k_dim, int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    atomic_store(&is_inside, 1);
    while (!atomic_load(&go_on)) sched_yield();
    return 0;
}

static void *shift(void *context) {
    kvc_cache *cache = context;
    CHECKF(kvc_shift(cache, 0, 0, KVC_END, 3) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

static void test_rewrite(void) {
    const kvc_rope rope = {.kind = KVC_ROPE_FUNCTION, .shift = move_slowly};
    kvc_cache *cache = new_cache(rope, 0, NULL, NULL);
    caller feeds = {.cache = cache, .timeout_ms = 0, .num_tokens = PROMPT}, waits = feeds;
    kvc_batch *none = NULL;
    pthread_t shifting;
    call(&feeds);
    CHECK(pthread_create(&shifting, NULL, shift, cache) == 0);
    while (!atomic_load(&is_inside)) sched_yield();
    CHECK_FAILS(begin(cache, 1, 1, 0, &none), KVC_ERR_BUSY, "rewrites the keys", "give a timeout");
    CHECK_FAILS(begin(cache, 1, 1, 1, &none), KVC_ERR_BUSY, "rewrites the keys", "1 ms");
    waits.timeout_ms = -1;
    const pthread_t waiting = start(&waits);
    atomic_store(&go_on, 1);
    pthread_join(shifting, NULL);
    pthread_join(waiting, NULL);
    CHECKF(waits.status == KVC_OK && waits.at == PROMPT + 3, "%s, %d", waits.message, waits.at);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- poll -------------------------------------------------------------------------------------------------------- */

typedef struct poller {
    kvc_cache *cache;
    kvc_batch *open;
    kvc_status status;
    atomic_int asked, go_on;
    int stop;
    pid_t child;
    pthread_t self; /* the test's thread */
    caller *behind;
    pthread_t thread; /* of the call behind */
} poller;

/* Ends the open batch, and begins and ends two, while the call that polls waits, and others behind it. */
static int32_t poll_and_begin(void *user) {
    poller *p = user;
    kvc_batch *own = NULL;
    if (!pthread_equal(p->self, pthread_self())) return 0;
    if (!p->open) return p->stop;
    p->thread = start(p->behind);
    kvc_abort(p->open);
    p->open = NULL;
    p->status = begin(p->cache, 5, 1, -1, &own);
    kvc_abort(own);
    p->status |= begin(p->cache, 5, 1, 0, &own);
    kvc_abort(own);
    return p->stop;
}

static void test_poll(int stop) {
    caller behind = {.id = 2, .timeout_ms = -1, .num_tokens = 1};
    poller p = {.stop = stop, .self = pthread_self(), .behind = &behind};
    kvc_batch *batch = NULL;
    behind.cache = p.cache = new_cache(frequencies, 0, poll_and_begin, &p);
    CHECK(begin(p.cache, 0, 1, 0, &p.open) == KVC_OK);
    const kvc_status status = begin(p.cache, 1, 1, -1, &batch);
    CHECKF(p.status == KVC_OK && status == (stop ? KVC_ERR_CANCELLED : KVC_OK), "%s", kvc_last_error());
    CHECK(stop ? !batch && strstr(kvc_last_error(), "waited") : batch != NULL);
    kvc_abort(batch);
    pthread_join(p.thread, NULL);
    CHECKF(behind.status == KVC_OK, "%s", behind.message);
    CHECK(kvc_next_position(p.cache, 1) == 0 && kvc_validate(p.cache) == KVC_OK && kvc_cache_free(p.cache) == KVC_OK);
}

static int32_t poll_slowly(void *user) {
    poller *p = user;
    if (pthread_equal(p->self, pthread_self())) return 0;
    atomic_fetch_add(&p->asked, 1);
    while (!atomic_load(&p->go_on)) sched_yield();
    return 0;
}

/* A call keeps its place while its poll runs: those behind it wait, each no longer than its own time. */
static void test_place(void) {
    poller p = {.self = pthread_self()};
    p.cache = new_cache(frequencies, 0, poll_slowly, &p);
    caller first = {.cache = p.cache, .id = 1, .timeout_ms = -1, .num_tokens = 1}, second = first, third = first;
    kvc_batch *none = NULL;
    third.timeout_ms = 30;
    CHECK(begin(p.cache, 0, 1, 0, &p.open) == KVC_OK);
    const pthread_t threads[] = {start(&first), start(&second)};
    while (atomic_load(&p.asked) < 2) sched_yield(); /* the poll of both runs */
    kvc_abort(p.open);
    CHECK_FAILS(begin(p.cache, 0, 1, 0, &none), KVC_ERR_BUSY, "other calls wait", "give a timeout");
    call(&third);
    CHECKF(third.status == KVC_ERR_BUSY && strstr(third.message, "30 ms"), "%s", third.message);
    CHECK(count_waiters(p.cache) == 2);
    atomic_store(&p.go_on, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECKF(first.status == KVC_OK && second.status == KVC_OK, "%s%s", first.message, second.message);
    CHECKF(first.at == 0 && second.at == 1, "at %d and %d", first.at, second.at);
    CHECK(kvc_validate(p.cache) == KVC_OK && kvc_cache_free(p.cache) == KVC_OK);
}

/* A cache is not freed under a call that waits, though no batch is open. */
static void test_freeing(void) {
    poller p = {0};
    p.cache = new_cache(frequencies, 0, poll_slowly, &p);
    caller waits = {.cache = p.cache, .id = 1, .timeout_ms = -1, .num_tokens = 1};
    CHECK(begin(p.cache, 0, 1, 0, &p.open) == KVC_OK);
    const pthread_t thread = start(&waits);
    while (!atomic_load(&p.asked)) sched_yield();
    kvc_abort(p.open);
    CHECK_FAILS(kvc_cache_free(p.cache), KVC_ERR_BUSY, "free the cache", "wait to begin a batch");
    atomic_store(&p.go_on, 1);
    pthread_join(thread, NULL);
    CHECKF(waits.status == KVC_OK, "%s", waits.message);
    CHECK(kvc_cache_free(p.cache) == KVC_OK);
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

static void test_fork(void) {
    kvc_cache *cache = plain_cache();
    kvc_batch *open = NULL, *next = NULL;
    caller waits = {.cache = cache, .id = 1, .timeout_ms = -1, .num_tokens = 1};
    CHECK(begin(cache, 0, 1, 0, &open) == KVC_OK);
    const pthread_t thread = start(&waits);
    const pid_t child = fork();
    if (!child) {
        alarm(LIMIT);
        test_failures = 0;
        CHECK(count_waiters(cache) == 0);
        CHECK_FAILS(begin(cache, 0, 1, 0, &next), KVC_ERR_BUSY, "a batch is open", "timeout");
        kvc_abort(open);
        CHECKF(begin(cache, 0, 1, -1, &next) == KVC_OK, "%s", kvc_last_error());
        kvc_abort(next);
        CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
        end_child(test_result());
    }
    kvc_abort(open);
    pthread_join(thread, NULL);
    CHECKF(waits.status == KVC_OK, "%s", waits.message);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Forks, and ends the open batch in parent and child. */
static int32_t poll_and_fork(void *user) {
    poller *p = user;
    if (!pthread_equal(p->self, pthread_self()) || !p->open) return 0;
    p->child = fork();
    if (!p->child) alarm(LIMIT);
    if (!p->child) test_failures = 0;
    kvc_abort(p->open);
    p->open = NULL;
    return p->stop;
}

/* The poll of a call that waits returns in a child, which lacks the calls of other threads. */
static void test_poll_forks(int stop) {
    poller p = {.stop = stop, .self = pthread_self()};
    p.cache = new_cache(frequencies, 0, poll_and_fork, &p);
    caller other = {.cache = p.cache, .id = 2, .timeout_ms = -1, .num_tokens = 1};
    kvc_batch *batch = NULL;
    CHECK(begin(p.cache, 0, 1, 0, &p.open) == KVC_OK);
    const pthread_t thread = start(&other);
    const kvc_status status = begin(p.cache, 1, 1, -1, &batch);
    CHECKF(status == (stop ? KVC_ERR_CANCELLED : KVC_OK), "%s", kvc_last_error());
    kvc_abort(batch);
    if (p.child) pthread_join(thread, NULL);
    CHECK(count_waiters(p.cache) == 0 && kvc_validate(p.cache) == KVC_OK && kvc_cache_free(p.cache) == KVC_OK);
    if (!p.child) end_child(test_result());
    int ended = 0;
    CHECKF(other.status == KVC_OK, "%s", other.message);
    CHECK(waitpid(p.child, &ended, 0) == p.child && WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
}

int main(void) {
    alarm(LIMIT);
    test_order();
    test_time();
    test_rewrite();
    test_poll(0);
    test_poll(1);
    test_place();
    test_freeing();
    if (HAS_FORK) test_fork();
    for (int stop = 0; HAS_FORK && stop < 2; stop++) test_poll_forks(stop);
    test_requests();
    return test_result();
}
