/* A process forks while another thread is in the middle of a call: the child can do everything, and so can the parent.
 * A child that hangs is ended by alarm().  The simulation (tests/world) forks in the middle of rewrites and puts.
 * Not for Windows: there is no fork(). */
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "saved/format.h"
#include "kvcache.h"
#include "support/test.h"

#include <pthread.h>

const char *__tsan_default_options(void);

/* The child does not leak a thread that ended and that the parent has yet to join. */
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }

enum {
    DIM = 8,
    ROWS = 40,
    MANY = 20000, /* tokens */
    LIMIT = 60    /* seconds */
};

static atomic_int is_inside; /* the function of the caller that is waited for was entered */
static atomic_int go_on;
static atomic_int forking;
static int watch;              /* the functions below wait */
static int num_passing;        /* allocations that do not, before one does */
static int lacks_memory;       /* that allocation fails */
static atomic_llong num_bytes; /* that the allocator below has handed out and not got back */
static kvc_batch *open_batch;

static void wait_for(atomic_int *flag) {
    while (!atomic_load(flag)) sched_yield();
}

/* A thread stays in this allocator, with the mutex, until the process forks and a while longer.  If fork() did not
 * wait, the child would have a mutex that nobody unlocks. */
static void *slow_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user;
    if (watch && num_passing-- <= 0 && !atomic_exchange(&is_inside, 1)) {
        wait_for(&forking);
        for (int i = 0; i < 2000 && !atomic_load(&go_on); i++) sched_yield();
        if (lacks_memory) return NULL;
    }
    num_bytes += (long long)size;
    size = (size + alignment - 1) / alignment * alignment;
    void *start = aligned_alloc(alignment, size);
    if (start && hint->kind == KVC_MEMORY_SCRATCH)
        memset(start, 0xab, size); /* so that nobody takes it for what is yet to be written there */
    return start;
}

static void slow_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)hint;
    num_bytes -= (long long)size;
    free(start);
}

static void note_fork(void) { atomic_store(&forking, 1); }

static int32_t add_delta(float *keys, int64_t num, int32_t delta) {
    for (int64_t i = 0; i < num; i++) keys[i] += (float)delta;
    return 0;
}

static pid_t child_of_function;

static int32_t move_and_fork(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                             int32_t k_dim, int32_t delta) {
    (void)user, (void)layer;
    if (watch && !atomic_exchange(&is_inside, 1)) {
        child_of_function = fork();
        if (!child_of_function) {
            alarm(LIMIT);
            test_failures = 0;
        }
    }
    return add_delta(keys, num_kv_heads * num_rows * k_dim, delta);
}

static const kvc_allocator slow_allocator = {
    .struct_size = sizeof slow_allocator, .alloc = slow_alloc, .free = slow_free};
static const double angles[] = {1, 0.1};
static const kvc_rope frequencies = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = angles};

/* A call stays in it, too. */
static int32_t poll_slowly(void *user) {
    (void)user;
    if (watch && !atomic_exchange(&is_inside, 1)) wait_for(&go_on);
    return 0;
}

static kvc_cache *new_layers(const kvc_layer *layers, int32_t num_layers, const kvc_allocator *allocator) {
    return cache_of(layers, num_layers,
                    (kvc_config){.block_size = 4, .num_threads = 1, .allocator = allocator, .poll = poll_slowly});
}

static kvc_cache *new_cache(kvc_rope rope, const kvc_allocator *allocator) {
    const kvc_layer layer = {.num_kv_heads = 2, .k_dim = DIM, .v_dim = DIM, .rope = rope};
    return new_layers(&layer, 1, allocator);
}

/* Appends ROWS tokens; returns the status of kvc_begin. */
static kvc_status feed(kvc_cache *cache, int64_t id) {
    float rows[ROWS * 2 * DIM];
    int64_t ids[ROWS];
    kvc_batch *batch;
    for (int i = 0; i < ROWS; i++) ids[i] = id;
    for (int i = 0; i < ROWS * 2 * DIM; i++) rows[i] = (float)(i % 7);
    const kvc_status status = kvc_begin(cache, ROWS, NULL, ids, NULL, &batch);
    if (status != KVC_OK) return status;
    put_floats(batch, 0, 0, 0, 2, DIM, DIM, rows, rows);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    return KVC_OK;
}

static kvc_status gather(kvc_cache *cache, int64_t id) {
    static _Thread_local float k[2 * 2 * ROWS * DIM];
    int64_t stored = 0;
    kvc_rows_out out = {.struct_size = sizeof out,
                        .k = k,
                        .k_head_stride = 2 * ROWS * DIM * sizeof *k,
                        .k_row_stride = DIM * sizeof *k};
    out.num_stored = &stored;
    CHECK(kvc_gather(cache, id, 0, 0, 0, &out) == KVC_OK);
    return kvc_gather(cache, id, 0, 0, stored < 2 * ROWS ? stored : 2 * ROWS, &out);
}

/* Every kind of call, none of which may wait for ever, and the end of the cache. */
static void do_everything(kvc_cache *cache, const char *when) {
#define WORKS(call) CHECKF((call) == KVC_OK, "%s: %s", when, kvc_last_error())
    WORKS(kvc_validate(cache));
    WORKS(feed(cache, 5));
    WORKS(kvc_fork(cache, 5, 6));
    WORKS(kvc_remove(cache, 6, 3, 9, 1));
    WORKS(gather(cache, 6));
    WORKS(kvc_shift(cache, 0, 0, KVC_END, 2));
    WORKS(feed(cache, 0));
    WORKS(gather(cache, 0));
    WORKS(kvc_remove(cache, 0, 0, 11, 0));
    WORKS(kvc_compact(cache));
    CHECK(kvc_nbytes(cache) > 0);
    kvc_cache *other = new_cache(frequencies, NULL);
    WORKS(kvc_set_num_threads(0));
    WORKS(feed(other, 0));
    WORKS(kvc_cache_free(other));
    WORKS(kvc_validate(cache));
    WORKS(kvc_clear(cache));
    WORKS(kvc_cache_free(cache));
#undef WORKS
}

static void check_child(pid_t child, const char *when) {
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: the child ended with %d", when, status);
}

/* The child makes every kind of call and ends; the parent continues.  The child has no memory of calls that only the
 * parent goes on with, except scratch of work on an open batch. */
static void fork_and_check(kvc_cache *cache, const char *when) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(LIMIT);
        test_failures = 0;
        CHECKF(kvc_validate(cache) == KVC_OK, "%s: %s", when, kvc_last_error());
        kvc_abort(open_batch);
        do_everything(cache, when);
        CHECKF(open_batch || !num_bytes, "%s: %lld bytes were not freed", when, (long long)num_bytes);
        fflush(stdout);
        end_child(test_failures != 0);
    }
    atomic_store(&go_on, 1);
    check_child(child, when);
}

static void begin_watching(void) {
    atomic_store(&is_inside, 0);
    atomic_store(&go_on, 0);
    atomic_store(&forking, 0);
    watch = 1;
}

/* Forks while a thread is in a function of the caller's, and ends the cache. */
static void fork_beside(kvc_cache *cache, void *(*work)(void *cache), const char *when) {
    pthread_t thread;
    begin_watching();
    CHECK(pthread_create(&thread, NULL, work, cache) == 0);
    wait_for(&is_inside);
    fork_and_check(cache, when);
    pthread_join(thread, NULL);
    watch = 0;
    do_everything(cache, "in the parent");
}

static void *copy_in_thread(void *cache) {
    CHECK(kvc_fork(cache, 0, 3) == KVC_OK);
    return NULL;
}

static void test_mutex_in_allocator(void) {
    kvc_cache *cache = new_cache(frequencies, &slow_allocator);
    CHECK(feed(cache, 0) == KVC_OK);
    CHECK(pthread_atfork(note_fork, NULL, NULL) == 0); /* which comes before what the library does */
    fork_beside(cache, copy_in_thread, "in the allocator");
}

/* A function that moves keys forks: its call goes on in the parent and in the child. */
static void test_rewrite_that_forks(void) {
    const kvc_rope rope = {.kind = KVC_ROPE_FUNCTION, .shift = move_and_fork};
    kvc_cache *cache = new_cache(rope, NULL);
    CHECK(feed(cache, 0) == KVC_OK);
    begin_watching();
    CHECKF(kvc_shift(cache, 0, 5, KVC_END, 3) == KVC_OK, "%s", kvc_last_error());
    watch = 0;
    CHECK(last_position(cache, 0) == ROWS + 2);
    do_everything(cache, "of the function's own");
    if (!child_of_function) {
        fflush(stdout);
        end_child(test_failures != 0);
    }
    check_child(child_of_function, "of the function's own");
}

static int32_t move_slowly(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                           int32_t k_dim, int32_t delta) {
    (void)user, (void)layer;
    if (watch && !atomic_exchange(&is_inside, 1)) wait_for(&go_on);
    return add_delta(keys, num_kv_heads * num_rows * k_dim, delta);
}

static void *shift_in_thread(void *cache) {
    CHECKF(kvc_shift(cache, 0, 5, KVC_END, 3) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* The child has the sequence as it was before a thread that is not there began to rewrite it. */
static void test_rewrite_of_another(void) {
    const kvc_rope rope = {.kind = KVC_ROPE_FUNCTION, .shift = move_slowly};
    kvc_cache *cache = new_cache(rope, &slow_allocator);
    CHECK(feed(cache, 0) == KVC_OK);
    num_passing = INT_MAX;
    fork_beside(cache, shift_in_thread, "in another's rewrite");
}

/* ---- functions that write and read saved states ------------------------------------------------------------------ */

static char file[1 << 16];
static size_t file_size, file_at, slow_from; /* slow_from: the byte from which on a thread stays in the function */

static void stay(size_t at) {
    if (watch && at >= slow_from && !atomic_exchange(&is_inside, 1)) wait_for(&go_on);
}

static int32_t write_slowly(void *user, const void *data, size_t size) {
    (void)user;
    stay(file_size);
    CHECK(size <= sizeof file - file_size);
    memcpy(file + file_size, data, size);
    file_size += size;
    return 0;
}

static int32_t read_slowly(void *user, void *data, size_t size) {
    (void)user;
    stay(file_at);
    memcpy(data, file + file_at, size);
    file_at += size;
    return 0;
}

static kvc_status save(kvc_cache *cache) {
    const kvc_save_args args = {.struct_size = sizeof args, .write = write_slowly};
    file_size = 0;
    return kvc_save(cache, &args);
}

static void *save_in_thread(void *cache) {
    CHECKF(save(cache) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

static void *save_without_memory(void *cache) {
    CHECK(save(cache) == KVC_ERR_NOMEM);
    return NULL;
}

static void *restore_in_thread(void *cache) {
    const kvc_load_args args = {.struct_size = sizeof args, .read = read_slowly, .size = (int64_t)file_size};
    CHECKF(kvc_restore(cache, &args) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* The child holds nothing for a thread that is not there, and has not what that thread was restoring. */
static void test_state(void *(*work)(void *cache), size_t from, const char *when) {
    kvc_cache *cache = new_cache(frequencies, NULL);
    CHECK(feed(cache, 0) == KVC_OK && kvc_fork(cache, 0, 1) == KVC_OK);
    if (save(cache) != KVC_OK) { /* on a big-endian machine */
        do_everything(cache, when);
        return;
    }
    file_at = 0;
    slow_from = from;
    fork_beside(cache, work, when);
}

/* fork() gets the mutex as soon as a save lacks memory.  The child has none of the memory that the save took before. */
static void test_failed_save(void) {
    if (KVC_IS_BIG_ENDIAN) return;
    for (int num = 0; num < 6; num++) {
        kvc_cache *cache = new_cache(frequencies, &slow_allocator);
        CHECK(feed(cache, 0) == KVC_OK);
        num_passing = num;
        lacks_memory = 1;
        fork_beside(cache, save_without_memory, "behind a save");
        lacks_memory = 0;
    }
}

/* ---- work on a batch, which is not waited for -------------------------------------------------------------------- */

static void *plan_in_thread(void *batch) {
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 2};
    kvc_plan *plan;
    CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_plan_num_tasks(plan) == 2 * MANY);
    return NULL;
}

/* fork() gets the mutex as soon as the plan has its memory. */
static void test_plan(void) {
    static int64_t ids[MANY];
    kvc_cache *cache = new_cache(frequencies, &slow_allocator);
    pthread_t thread;
    for (int i = 0; i < MANY; i++) ids[i] = i;
    CHECK(feed(cache, 0) == KVC_OK);
    CHECK(kvc_begin(cache, MANY, NULL, ids, NULL, &open_batch) == KVC_OK);
    begin_watching();
    num_passing = 1; /* the memory of the plan */
    CHECK(pthread_create(&thread, NULL, plan_in_thread, open_batch) == 0);
    wait_for(&is_inside);
    fork_and_check(cache, "while a plan is made");
    pthread_join(thread, NULL);
    watch = 0;
    kvc_abort(open_batch);
    open_batch = NULL;
    do_everything(cache, "in the parent");
}

/* ---- whatever others are at -------------------------------------------------------------------------------------- */

static atomic_int stop;

static void *work(void *context) {
    kvc_cache *cache = context;
    while (!atomic_load(&stop)) {
        CHECKF(gather(cache, 0) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_fork(cache, 0, 7) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_remove(cache, 7, 3, 9, 1) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_compact(cache) == KVC_OK, "%s", kvc_last_error());
    }
    return NULL;
}

static void *make_and_free(void *context) {
    (void)context;
    while (!atomic_load(&stop)) {
        kvc_cache *cache = new_cache(frequencies, NULL);
        CHECK(feed(cache, 0) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    }
    return NULL;
}

static void test_work(void) {
    enum { FORKS = 20 };
    kvc_cache *cache = new_cache(frequencies, NULL);
    pthread_t threads[4];
    CHECK(feed(cache, 0) == KVC_OK);
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, i < 3 ? work : make_and_free, cache) == 0);
    for (int i = 0; i < FORKS; i++) fork_and_check(cache, "in work");
    atomic_store(&stop, 1);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    do_everything(cache, "in the parent");
}

int main(void) {
    alarm(4 * LIMIT);
    test_mutex_in_allocator();
    test_rewrite_that_forks();
    test_rewrite_of_another();
    test_state(save_in_thread, 3000, "in a save");
    test_failed_save();
    test_state(restore_in_thread, 0, "in a restore, at its header");
    test_state(restore_in_thread, 3000, "in a restore, at its rows");
    test_plan();
    test_work();
    return test_result();
}
