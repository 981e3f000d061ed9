/* Several threads in one cache: each test puts two kinds of calls side by side.  tests/world mixes all calls.  Plain
 * threads, so that the thread sanitizer sees all there is in a build without OpenMP. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#include "cache/waiting.h"
#include "support/guarded.h"
#include "support/pairs.h"

enum { K_DIM = 16, V_DIM = 8, NUM_LAYERS = 2, BASE = 90, MOST = 256 };

static const kvc_layer layers[NUM_LAYERS] = {
    {.num_kv_heads = 2,
     .k_dim = K_DIM,
     .v_dim = V_DIM,
     .rope = {KVC_ROPE_FREQUENCIES, .first_dim = 4, .num_freqs = 5, .inv_freq = any_angles}},
    {.num_kv_heads = 2,
     .k_dim = K_DIM,
     .v_dim = V_DIM,
     .policy = {KVC_SLIDING, .window = 20, .num_sink_tokens = 3, .resume_window = 25},
     .rope = {KVC_ROPE_FREQUENCIES, .interleaved = 1, .num_freqs = 4, .inv_freq = any_angles}},
};

static kvc_cache *new_cache_of(int block_size, const kvc_layer *of) {
    return cache_of(of, NUM_LAYERS, (kvc_config){.block_size = block_size, .num_threads = 1});
}

static kvc_cache *new_cache(int block_size) { return new_cache_of(block_size, layers); }

/* ---- rows that follow from their position ------------------------------------------------------------------------ */

static float element(int32_t position, int layer, int is_value, int head, int d) {
    return (float)((position * 31 + layer * 17 + is_value * 13 + head * 7 + d) % 97);
}

/* Tokens [first, first + n) of a batch, the first of them at this position. */
static void put_rows(kvc_batch *batch, int layer, int first, int n, int32_t position) {
    float *k = malloc((size_t)n * 2 * K_DIM * sizeof *k), *v = malloc((size_t)n * 2 * V_DIM * sizeof *v);
    for (int i = 0; i < n * 2; i++) {
        for (int d = 0; d < K_DIM; d++) k[i * K_DIM + d] = element(position + i / 2, layer, 0, i % 2, d);
        for (int d = 0; d < V_DIM; d++) v[i * V_DIM + d] = element(position + i / 2, layer, 1, i % 2, d);
    }
    put_floats(batch, layer, first, n, 2, K_DIM, V_DIM, k, v);
    free(k);
    free(v);
}

static void check_key(const float *k, int layer, int head, int32_t position) {
    for (int d = 0; d < K_DIM; d++)
        CHECKF(k[d] == element(position, layer, 0, head, d), "layer %d, head %d, position %d", layer, head, position);
}

/* Opens a batch of n tokens of one sequence, from a position on. */
static kvc_batch *begin(kvc_cache *cache, int64_t id, int n, int32_t position) {
    kvc_batch *batch = NULL;
    int32_t positions[MOST];
    int64_t ids[MOST];
    for (int t = 0; t < n; t++) {
        positions[t] = position + t;
        ids[t] = id;
    }
    CHECKF(kvc_begin(cache, n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

static void feed(kvc_cache *cache, int64_t id, int n) {
    kvc_batch *batch = begin(cache, id, n, 0);
    for (int l = 0; l < NUM_LAYERS; l++) put_rows(batch, l, 0, n, 0);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

/* ---- putting from several threads -------------------------------------------------------------------------------- */

typedef struct share {
    kvc_batch *batch;
    int first, n;
} share;

static void *put_share(void *context) {
    share *s = context;
    for (int l = 0; l < NUM_LAYERS; l++)
        for (int t = 0; t < s->n; t += 5)
            put_rows(s->batch, (l + s->first) % NUM_LAYERS, s->first + t, s->n - t < 5 ? s->n - t : 5, s->first + t);
    return NULL;
}

static void test_putting_together(void) {
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    share shares[THREADS];
    static float k[2][MOST][K_DIM];
    kvc_cache *cache = new_cache(16);
    kvc_batch *batch = begin(cache, 0, MOST, 0);
    for (int i = 0; i < THREADS; i++) {
        shares[i] = (share){batch, i * MOST / THREADS, MOST / THREADS};
        CHECK(pthread_create(&threads[i], NULL, put_share, &shares[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < NUM_LAYERS; l++) {
        const kvc_rows_out out = {
            .struct_size = sizeof out, .k = k, .k_head_stride = sizeof *k, .k_row_stride = sizeof **k};
        static int32_t positions[MOST];
        const int64_t num = kvc_positions(cache, 0, l, positions, MOST); /* the window keeps the last of them */
        CHECKF(kvc_gather(cache, 0, l, 0, num, &out) == KVC_OK, "%s", kvc_last_error());
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < num; i++) check_key(k[h][i], l, h, positions[i]);
    }
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- cross-attention layers -------------------------------------------------------------------------------------- */

enum { CROSS_ROWS = 6, CROSS_STEPS = 300 };

/* Layer 0 holds tokens, 1 and 2 are cross-attention layers; sequences 0 and 1 have a token each in the batch. */
static kvc_cache *new_cross_cache(kvc_batch **batch) {
    const kvc_policy cross = {KVC_CROSS, .max_len = CROSS_ROWS};
    const kvc_layer of[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                            {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = cross},
                            {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = cross}};
    kvc_cache *cache = cache_of(of, 3, (kvc_config){.num_threads = 1});
    CHECK(kvc_begin(cache, 2, (int32_t[]){0, 0}, (int64_t[]){0, 1}, NULL, batch) == KVC_OK);
    return cache;
}

static kvc_status put_cross(kvc_batch *batch, int layer, int64_t seq_id, const float *rows, int n) {
    const kvc_put_args args = {.struct_size = sizeof args,
                               .num_tokens = n,
                               .k = rows,
                               .v = rows,
                               .k_token_stride = 4 * sizeof *rows,
                               .v_token_stride = 4 * sizeof *rows,
                               .seq_id = seq_id};
    return kvc_put(batch, layer, &args);
}

/* Rows that cannot be read until somebody has looked at the cache. */
static struct {
    kvc_cache *cache;
    void *page;
    kvc_status status;
    int64_t num_runs;
    kvc_run_info runs[3];
} unread;

/* Runs in the middle of a kvc_put, at the first row that it reads, when it holds no lock. */
static void look(int signal) {
    int64_t num_blocks;
    (void)signal;
    unread.status = kvc_validate(unread.cache);
    kvc_blocks(unread.cache, 1, NULL, sizeof(kvc_block_info), 0, &num_blocks, unread.runs, sizeof *unread.runs, 3,
               &unread.num_runs);
    mprotect(unread.page, page_size(), PROT_READ | PROT_WRITE);
}

/* Slots that a put writes are accounted for while it does. */
static void test_looking_at_a_cross_put(void) {
    kvc_batch *batch;
    kvc_cache *cache = new_cross_cache(&batch);
    const struct sigaction action = {.sa_handler = look};
    struct sigaction before[2];
    float *rows = mmap(NULL, page_size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(rows != MAP_FAILED && sigaction(SIGSEGV, &action, &before[0]) == 0);
    CHECK(sigaction(SIGBUS, &action, &before[1]) == 0);
    for (int n = 1; n <= 2; n++) { /* the second takes the place of the first */
        unread.cache = cache;
        unread.page = rows;
        unread.status = KVC_ERR_NOMEM;
        CHECK(mprotect(rows, page_size(), PROT_NONE) == 0);
        CHECKF(put_cross(batch, 1, 1, rows, 4 + n) == KVC_OK, "%s", kvc_last_error());
        CHECKF(unread.status == KVC_OK, "%s", kvc_last_error());
        const kvc_run_info *run = &unread.runs[n - 1];
        CHECKF(unread.num_runs == n, "%d runs", (int)unread.num_runs);
        CHECK(run->seq_id == 1 && run->count == 4 + n && run->position == 0 && run->in_batch);
        CHECK(n == 1 || (unread.runs[0].seq_id == 1 && unread.runs[0].count == 5 && unread.runs[0].in_batch));
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    }
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
    munmap(rows, page_size());
    kvc_abort(batch);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* The work of a thread on the cross-attention layers of a batch while the others do as much. */
typedef struct cross_worker {
    kvc_cache *cache;
    kvc_batch *batch;
    int layer;
    int64_t seq_id;
    atomic_int *running;
} cross_worker;

/* Rows of one number, put and attended over, in one call or in two. */
static void *work_across(void *context) {
    const cross_worker *w = context;
    float rows[CROSS_ROWS][4], out[4];
    for (int step = 0; step < CROSS_STEPS; step++) {
        const float value = (float)(step * 4 + w->layer * 2 + (int)w->seq_id);
        for (int i = 0; i < CROSS_ROWS * 4; i++) rows[i / 4][i % 4] = value;
        kvc_plan_args plan = {
            .struct_size = sizeof plan, .layer = w->layer, .first = (int)w->seq_id, .num_tokens = 1, .num_heads = 1};
        kvc_attend_args args = {.struct_size = sizeof args, .q = rows, .out = out};
        CHECKF(put_cross(w->batch, w->layer, w->seq_id, rows[0], 1 + step % CROSS_ROWS) == KVC_OK, "%s",
               kvc_last_error());
        CHECKF(kvc_attend(w->batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        for (int d = 0; d < 4; d++) CHECKF(out[d] == value, "%g, not %g", (double)out[d], (double)value);
    }
    atomic_fetch_sub(w->running, 1);
    return NULL;
}

/* One thread for each cross-attention layer, and a thread that only looks. */
static void test_cross_layers_side_by_side(void) {
    kvc_batch *batch;
    kvc_cache *cache = new_cross_cache(&batch);
    pthread_t threads[2];
    atomic_int running = 2;
    cross_worker workers[2];
    for (int i = 0; i < 2; i++) {
        workers[i] = (cross_worker){cache, batch, 1 + i, i, &running};
        CHECK(pthread_create(&threads[i], NULL, work_across, &workers[i]) == 0);
    }
    while (atomic_load(&running)) {
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
        sched_yield();
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    kvc_abort(batch);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- rows that are written where they lie ------------------------------------------------------------------------ */

/* Checks the keys of a sequence of BASE rows. */
static void check_keys(kvc_cache *cache, int64_t id, int layer) {
    float k[2][BASE][K_DIM];
    const kvc_rows_out out = {
        .struct_size = sizeof out, .k = k, .k_head_stride = sizeof *k, .k_row_stride = sizeof **k};
    CHECKF(kvc_gather(cache, id, layer, 0, BASE, &out) == KVC_OK, "%s", kvc_last_error());
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < BASE; i++) check_key(k[h][i], layer, h, i);
}

/* Describes rows of two heads for kvc_inject. */
static kvc_rows_in rows_in(const float *k, const float *v) {
    return (kvc_rows_in){.struct_size = sizeof(kvc_rows_in),
                         .k = k,
                         .v = v,
                         .k_head_stride = K_DIM * sizeof *k,
                         .k_row_stride = 2 * K_DIM * sizeof *k,
                         .v_head_stride = V_DIM * sizeof *v,
                         .v_row_stride = 2 * V_DIM * sizeof *v};
}

/* Replaces rows of a sequence of BASE tokens by equal rows. */
static kvc_status inject_again(kvc_cache *cache, int64_t id, int layer, int32_t begin, int32_t end, float *k,
                               float *v) {
    int64_t num = 0;
    for (int i = 0; i < end - begin; i++)
        for (int h = 0; h < 2; h++) {
            for (int d = 0; d < K_DIM; d++) k[(i * 2 + h) * K_DIM + d] = element(begin + i, layer, 0, h, d);
            for (int d = 0; d < V_DIM; d++) v[(i * 2 + h) * V_DIM + d] = element(begin + i, layer, 1, h, d);
        }
    kvc_rows_in in = rows_in(k, v);
    in.num_replaced = &num;
    const kvc_status status = kvc_inject(cache, id, layer, begin, end, &in);
    CHECK(num == (status == KVC_OK ? end - begin : 0));
    return status;
}

/* The work of another thread in the middle of a kvc_inject. */
static struct {
    float *page;
    atomic_int is_reading, is_done;
    kvc_status statuses[6];
} injected;

/* Runs at the first row that kvc_inject reads, when it holds no lock. */
static void wait_for_edits(int signal) {
    (void)signal;
    atomic_store(&injected.is_reading, 1);
    while (!atomic_load(&injected.is_done)) sched_yield();
    mprotect(injected.page, page_size(), PROT_READ | PROT_WRITE);
}

static void *edit_others(void *cache) {
    kvc_batch *batch = NULL;
    const kvc_rows_out out = {.struct_size = sizeof out};
    while (!atomic_load(&injected.is_reading)) sched_yield();
    injected.statuses[0] = kvc_validate(cache);
    injected.statuses[1] = kvc_fork(cache, 1, 2);
    injected.statuses[2] = kvc_remove(cache, 1, 3, 20, 1);
    injected.statuses[3] = kvc_begin(cache, 1, (int32_t[]){BASE}, (int64_t[]){2}, NULL, &batch);
    kvc_abort(batch);
    injected.statuses[4] = kvc_seq_len(cache, 0, 0) == BASE ? KVC_OK : KVC_ERR_INVALID;
    injected.statuses[5] = kvc_gather(cache, 1, 0, 0, BASE - 17, &out);
    atomic_store(&injected.is_done, 1);
    return NULL;
}

/* Other sequences are read, edited and gone on with while rows of one are replaced, shared ones and its own. */
static void test_injecting_beside_others(void) {
    const struct sigaction action = {.sa_handler = wait_for_edits};
    struct sigaction before[2];
    static float v[BASE * 2 * V_DIM];
    float *k = mmap(NULL, page_size() * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(k != MAP_FAILED && sigaction(SIGSEGV, &action, &before[0]) == 0);
    CHECK(sigaction(SIGBUS, &action, &before[1]) == 0);
    for (int shared = 0; shared < 2; shared++) {
        kvc_cache *cache = new_cache(8);
        feed(cache, 0, BASE);
        feed(cache, 1, BASE);
        if (shared) CHECK(kvc_fork(cache, 0, 3) == KVC_OK);
        CHECKF(inject_again(cache, 0, 0, 0, 60, k, v) == KVC_OK, "%s", kvc_last_error()); /* fills k */
        pthread_t editor;
        injected.page = k;
        atomic_store(&injected.is_reading, 0);
        atomic_store(&injected.is_done, 0);
        CHECK(pthread_create(&editor, NULL, edit_others, cache) == 0);
        CHECK(mprotect(k, page_size(), PROT_NONE) == 0);
        const kvc_rows_in in = rows_in(k, v);
        CHECKF(kvc_inject(cache, shared ? 3 : 0, 0, 0, 60, &in) == KVC_OK, "%s", kvc_last_error());
        pthread_join(editor, NULL);
        for (int i = 0; i < 6; i++) CHECKF(injected.statuses[i] == KVC_OK, "%d: %d", i, (int)injected.statuses[i]);
        check_keys(cache, 0, 0);
        CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    }
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
    munmap(k, page_size() * 8);
}

/* ---- giving blocks back, and compacting, beside a copy that stands still ----------------------------------------- */

/* Rows that one thread copies out while another waits.  Their messages order nothing else, so that the thread sanitizer
 * sees memory that is not under the mutex. */
static struct {
    float *page;
    atomic_int is_writing, is_done;
} copied;

/* Runs at the first element that kvc_extract writes, when it holds no lock. */
static void wait_for_giving_back(int signal) {
    (void)signal;
    atomic_store_explicit(&copied.is_writing, 1, memory_order_relaxed);
    while (!atomic_load_explicit(&copied.is_done, memory_order_relaxed)) sched_yield();
    mprotect(copied.page, page_size(), PROT_READ | PROT_WRITE);
}

static void *copy_window(void *cache) {
    const kvc_rows_out out = {.struct_size = sizeof out,
                              .k = copied.page,
                              .k_head_stride = K_DIM * sizeof(float),
                              .k_row_stride = 2 * K_DIM * sizeof(float)};
    CHECKF(kvc_extract(cache, 1, 1, BASE - 20, BASE, &out) == KVC_OK, "%s", kvc_last_error());
    atomic_store_explicit(&copied.is_writing, 1, memory_order_relaxed); /* if it failed, nobody waits for it */
    return NULL;
}

/* Takes n more tokens of sequence 2. */
static void go_on(kvc_cache *cache, int n) {
    const int32_t next = kvc_next_position(cache, 2);
    kvc_batch *batch = begin(cache, 2, n, next);
    for (int l = 0; batch && l < NUM_LAYERS; l++) put_rows(batch, l, 0, n, next);
    CHECKF(batch && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

static pthread_t waiting; /* of a call that waits for the copy */

/* Acts while rows of sequence 1 are copied; `act` returns whether it began a call that waits. */
static void act_beside_a_copy(int (*act)(kvc_cache *cache)) {
    const struct sigaction action = {.sa_handler = wait_for_giving_back};
    struct sigaction before[2];
    kvc_cache *cache = new_cache(8);
    feed(cache, 2, BASE); /* its window lies before the window of sequence 1 */
    feed(cache, 1, BASE);
    copied.page = mmap(NULL, page_size() * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(copied.page != MAP_FAILED && sigaction(SIGSEGV, &action, &before[0]) == 0);
    CHECK(sigaction(SIGBUS, &action, &before[1]) == 0);
    CHECK(mprotect(copied.page, page_size(), PROT_NONE) == 0);
    pthread_t thread;
    atomic_store(&copied.is_writing, 0);
    atomic_store(&copied.is_done, 0);
    CHECK(pthread_create(&thread, NULL, copy_window, cache) == 0);
    while (!atomic_load_explicit(&copied.is_writing, memory_order_relaxed)) sched_yield();
    const int waits = act(cache);
    atomic_store_explicit(&copied.is_done, 1, memory_order_relaxed);
    pthread_join(thread, NULL);
    if (waits) pthread_join(waiting, NULL);
    for (int i = 0; i < 20; i++) check_key(copied.page + (size_t)i * 2 * K_DIM, 1, 0, BASE - 20 + i);
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
    munmap(copied.page, page_size() * 8);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* The last block takes the place of a block that is given back while its rows are copied. */
static int give_back(kvc_cache *cache) {
    const int64_t returned = stats_in(cache).blocks_returned;
    go_on(cache, 16);
    CHECK(stats_in(cache).blocks_returned > returned);
    return 0;
}

static void *wait_for_copy(void *cache) {
    CHECKF(kvc_compact(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(atomic_load_explicit(&copied.is_done, memory_order_relaxed));
    return NULL;
}

static int begin_to_compact(kvc_cache *cache) {
    CHECK(pthread_create(&waiting, NULL, wait_for_copy, cache) == 0);
    usleep(20000); /* in which it would return if it did not wait */
    return 1;
}

static void test_beside_a_copy(void) {
    act_beside_a_copy(give_back);
    act_beside_a_copy(begin_to_compact);
}

/* ---- a cache for each thread ------------------------------------------------------------------------------------- */

/* Blocks so large that they are pages of the operating system; the error is this thread's own. */
static void *own_cache(void *context) {
    int number = *(int *)context;
    char text[32];
    kvc_cache *cache = new_cache(4096);
    CHECK(strcmp(kvc_last_error(), "") == 0);
    feed(cache, 0, BASE);
    snprintf(text, sizeof text, "length is -%d:", number + 1);
    CHECK(kvc_truncate(cache, 0, -number - 1) == KVC_ERR_INVALID);
    sched_yield();
    CHECKF(strstr(kvc_last_error(), text) != NULL, "%s", kvc_last_error());
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    return NULL;
}

static void test_own_caches(void) {
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, own_cache, &numbers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

/* ---- cloning beside what is written in place --------------------------------------------------------------------- */

typedef struct copying {
    kvc_cache *from, *to;
} copying;

static void *clone_it(void *context) {
    copying *c = context;
    CHECKF(kvc_cache_clone(c->from, &c->to) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* A clone has the rows that are there when the writing ends, however early it began. */
static void test_cloning_beside_writing(void) {
    float k[2][2][K_DIM];
    pthread_t thread;
    copying c = {.from = new_cache(8)};
    feed(c.from, 1, BASE);
    kvc_sequence *sequence = kvc_table_find(&c.from->sequences, 1);
    const kvc_run *run = kvc_runs_begin(sequence->runs);
    kvc_mutex_lock(&c.from->mutex);
    kvc_cache_begin_in_place(c.from, sequence);
    kvc_mutex_unlock(&c.from->mutex);
    CHECK(pthread_create(&thread, NULL, clone_it, &c) == 0);
    usleep(20000); /* in which it would be done if it did not wait */
    memset(kvc_key_at(c.from->layouts, run->block, run->slot, 0), 1, K_DIM * sizeof(float));
    kvc_mutex_lock(&c.from->mutex);
    kvc_cache_end_in_place(c.from, sequence);
    kvc_mutex_unlock(&c.from->mutex);
    CHECK(pthread_join(thread, NULL) == 0 && c.to);
    for (int i = 0; i < 2; i++) {
        const kvc_rows_out out = {.struct_size = sizeof out,
                                  .k = k[i],
                                  .k_head_stride = K_DIM * sizeof(float),
                                  .k_row_stride = 2 * K_DIM * sizeof(float)};
        kvc_cache *cache = i ? c.to : c.from;
        CHECKF(kvc_extract(cache, 1, 0, 0, 1, &out) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    }
    CHECK(!memcmp(k[0], k[1], sizeof *k));
}

int main(void) {
    test_own_caches();
    test_putting_together();
    test_looking_at_a_cross_put();
    test_cross_layers_side_by_side();
    test_injecting_beside_others();
    test_beside_a_copy();
    test_cloning_beside_writing();
    return test_result();
}
