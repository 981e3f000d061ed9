/* In random states, each call is made with its nth request to the system failing: alone, with the next one, and with
 * all later ones.  n grows until no request fails.  A call that fails changes nothing and can be repeated.  No byte is
 * left at the end, and all bytes were given back as they were taken.
 *
 * Requests are for memory, pages, advice on pages, mutexes, signals, threads and handlers of fork().  The core's
 * calls come to the __wrap_ functions here: see compiling.py.
 * Not for Windows: calls of the system go through a table there, and cannot be diverted. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/parallel.h"
#include "support/random_steps.h"

enum { MOST_READ = MAX_ROWS + MAX_BATCH, MOST_HEADS = 4 };

static memory heap; /* its numbers are of all requests */

/* ---- requests of the core ---------------------------------------------------------------------------------------- */

static int64_t num_taken, mapped; /* blocks of the C library, and bytes of pages, that the core has */

static void *taken(void *p, size_t size) {
    num_taken += p != NULL;
    return p ? memset(p, 0xff, size) : NULL; /* nothing may count on zeros */
}

void *__wrap_malloc(size_t size) { return memory_refuses(&heap) ? NULL : taken(malloc(size), size); }

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return memory_refuses(&heap) ? NULL : taken(aligned_alloc(alignment, size), size);
}

void __wrap_free(void *p) {
    num_taken -= p != NULL;
    free(p);
}

static int64_t whole_pages(size_t size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    return ((int64_t)size + page - 1) / page * page;
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    if (memory_refuses(&heap)) return MAP_FAILED;
    mapped += whole_pages(size);
    return mmap(at, size, protection, flags, file, offset);
}

int __wrap_munmap(void *at, size_t size) {
    mapped -= whole_pages(size);
    return munmap(at, size);
}

int __wrap_madvise(void *at, size_t size, int advice) {
    if (!memory_refuses(&heap)) return madvise(at, size, advice);
    errno = EINVAL;
    return -1;
}

int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    return memory_refuses(&heap) ? ENOMEM : pthread_mutex_init(mutex, attributes);
}

int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes) {
    return memory_refuses(&heap) ? ENOMEM : pthread_cond_init(cond, attributes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return memory_refuses(&heap) ? EAGAIN : pthread_create(thread, attributes, run, argument);
}

int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    return memory_refuses(&heap) ? ENOMEM : pthread_atfork(prepare, parent, child);
}

/* ---- what a call must not change --------------------------------------------------------------------------------- */

/* Everything that can be seen of a cache, except its rows, which pair_check compares. */
typedef struct seen {
    kvc_stats stats;
    double utilization;
    int64_t bytes, num_retained, retained[NUM_RETAINED];
    int num_allocations; /* without scratch */
    int64_t mapped;
} seen;

static seen look(const pair *p) {
    seen s;
    memset(&s, 0, sizeof s);
    kvc_get_stats(p->cache, &s.stats, sizeof s.stats);
    s.utilization = kvc_utilization(p->cache);
    s.bytes = kvc_nbytes(p->cache);
    s.num_retained = list_retained(p->cache, s.retained, NUM_RETAINED);
    for (int i = 0; i < heap.num; i++) s.num_allocations += heap.live[i].hint.kind != KVC_MEMORY_SCRATCH;
    s.mapped = mapped;
    return s;
}

/* ---- calls, each with random arguments --------------------------------------------------------------------------- */

static kvc_status put_cross(pair *p) {
    int l = 0;
    while (l < p->config.num_layers && (!is_cross(p, l) || (p->replaced && !p->replaced[l]))) l++;
    if (l == p->config.num_layers) return KVC_OK;
    kvc_status status = pair_put_cross(p, l, p->ids[random_int(0, p->num_tokens)], random_int(1, 9));
    pair_see_evicted(p);
    return status;
}

/* Rows from elsewhere, which are dropped again. */
static kvc_status keep_new(pair *p) {
    const int64_t id = FIRST_RETAINED + NUM_RETAINED;
    const int32_t begin = random_int(0, 20);
    kvc_status status = retain_new(p->cache, id, begin, begin + random_int(1, 10), NULL);
    if (status == KVC_OK) CHECK(kvc_clear_sequence(p->cache, id) == KVC_OK);
    pair_see_evicted(p);
    return status;
}

/* Holds rows that a sequence has, or that the batch shows of it, or slots of the batch. */
static kvc_status hold(pair *p) {
    static kvc_span spans[MOST_READ];
    const int l = random_int(0, p->config.num_layers);
    kvc_hold *held = NULL;
    int64_t num;
    kvc_status status;
    if (!p->batch)
        status = kvc_spans(p->cache, random_id(), l, spans, sizeof *spans, MOST_READ, &num, &held);
    else if (random_int(0, 2))
        status = kvc_batch_spans(p->batch, p->ids[0], l, spans, sizeof *spans, MOST_READ, &num, &held);
    else
        status = kvc_slots(p->batch, l, random_int(0, p->num_tokens), spans, sizeof *spans, &held);
    CHECK(status == KVC_OK || !held);
    kvc_hold_free(held);
    return status;
}

static kvc_status copy_out(pair *p) {
    static float k[MOST_READ * MAX_ROW], v[MOST_READ * MAX_ROW];
    const int l = random_int(0, p->config.num_layers);
    const int64_t id = p->batch ? p->ids[random_int(0, p->num_tokens)] : random_id();
    int64_t num = 0;
    kvc_rows_out out = {.struct_size = sizeof out, .num_stored = &num, .batch = p->batch};
    kvc_status status = kvc_gather(p->cache, id, l, 0, 0, &out);
    if (status != KVC_OK || num > MAX_ROWS) return status;
    out = room_for(p, l, MAX_ROWS, k, v);
    out.batch = p->batch;
    if (!p->batch && random_int(0, 2)) return kvc_extract(p->cache, id, l, 0, MAX_ROWS, &out);
    return kvc_gather(p->cache, id, l, 0, num, &out);
}

/* Asks for the weights of a few queries. */
static kvc_status weigh(pair *p) {
    static float q[5 * MOST_HEADS * MAX_ROW], weights[MOST_HEADS * MAX_ROWS];
    const int l = random_int(0, p->config.num_layers), num_heads = p->layers[l].num_kv_heads;
    const int64_t id = random_id(), size = sizeof(float);
    if (!p->layers[l].v_dim || p->layers[l].policy.kind == KVC_NONE) return KVC_OK;
    const kvc_weights_args args = {.struct_size = sizeof args,
                                   .q = q,
                                   .weights = weights,
                                   .q_token_stride = num_heads * p->layers[l].k_dim * size,
                                   .q_head_stride = p->layers[l].k_dim * size,
                                   .weights_head_stride = MAX_ROWS * size,
                                   .num_rows = kvc_seq_len(p->cache, id, l),
                                   .num_queries = 5,
                                   .num_heads = num_heads,
                                   .scale = 1};
    return kvc_weights(p->cache, id, l, &args);
}

static kvc_status dense(pair *p) {
    static float k[3 * MOST_READ * MAX_ROW], v[3 * MOST_READ * MAX_ROW], mask[MAX_BATCH * 3 * MOST_READ];
    const int l = random_int(0, p->config.num_layers);
    int64_t num = 0;
    kvc_status status = kvc_dense_rows(p->batch, l, &num);
    if (status != KVC_OK || num > 3 * MOST_READ) return status;
    const kvc_rows_out rows = room_for(p, l, (int32_t)num, k, v);
    const kvc_dense_args args = {.struct_size = sizeof args,
                                 .rows = &rows,
                                 .mask = mask,
                                 .mask_token_stride = num * (int64_t)sizeof *mask,
                                 .num_rows = num};
    return kvc_dense(p->batch, l, &args);
}

/* Attends in a layer, or makes a plan for it. */
static kvc_status attend(pair *p) {
    static float q[MAX_BATCH * MOST_HEADS * MAX_ROW], out[MAX_BATCH * MOST_HEADS * MAX_ROW];
    const int l = random_int(0, p->config.num_layers), num_heads = 2 * p->layers[l].num_kv_heads;
    enum { WIDTH = 7 };
    static const int32_t entries[WIDTH] = {7, 0, 7, -1, INT32_MAX, 3, 40};
    static int32_t positions[MAX_BATCH + MOST_HEADS + WIDTH]; /* choices overlap */
    for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) positions[i] = entries[i % WIDTH];
    const kvc_chosen chosen = {.struct_size = sizeof chosen,
                               .positions = positions,
                               .token_stride = sizeof *positions,
                               .choice_stride = sizeof *positions,
                               .num_choices = random_int(0, 2) ? p->layers[l].num_kv_heads : 1,
                               .width = random_int(1, 8),
                               .block = random_int(0, 4),
                               .tail = random_int(0, 2)};
    const int has_choice = random_int(0, 2);
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args,
                                     .layer = l,
                                     .num_heads = num_heads,
                                     .num_threads = random_int(1, 4),
                                     .max_chosen = has_choice ? 40 : 0};
    kvc_attend_args args = float_queries(num_heads, p->layers[l].k_dim, p->layers[l].v_dim, q, out);
    args.scale = 1; /* which layers with values in their keys need */
    if (has_choice) args.chosen = &chosen;
    if (random_int(0, 2)) return kvc_attend(p->batch, &plan_args, &args);
    kvc_plan *plan = NULL;
    kvc_status status = kvc_plan_new(p->batch, &plan_args, &plan);
    CHECK(!plan == (status != KVC_OK));
    kvc_plan_free(plan);
    return status;
}

/* Begins a batch while one is open, and waits for that. */
static kvc_status begin_late(pair *p) {
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = 1, .timeout_ms = 1};
    kvc_batch *batch = NULL;
    return agree(p, "begin", kvc_begin_with(p->cache, &args, &batch), KVC_ERR_BUSY);
}

/* Whether the message of a call says what it lacked. */
static int names_lack(void) {
    return heap.failed && (strstr(kvc_last_error(), "out of memory") || strstr(kvc_last_error(), "no mutex"));
}

/* How many requests fail, one behind the other. */
enum { NUM_WAYS = 3 };
static const int in_a_row[NUM_WAYS] = {INT32_MAX, 2, 1};
static int num_failures[NUM_WAYS]; /* calls that failed so */

/* Makes a call with these random arguments and requests [first, first + most) failing.  A call that fails, for whatever
 * reason, has changed nothing.  Returns whether it lacked something, and so can be repeated. */
static int fails(pair *p, kvc_status (*call)(pair *p), uint64_t arguments, int first, int way) {
    const seen before = look(p);
    random_state = arguments;
    memory_fail(&heap, first, in_a_row[way]);
    const kvc_status status = call(p);
    heap.is_failing = 0;
    if (status == KVC_ERR_NOMEM) CHECKF(names_lack(), "%s", kvc_last_error());
    if (status != KVC_OK) {
        const seen after = look(p);
        CHECKF(!memcmp(&after, &before, sizeof after), "requests from %d on, %d: %s", first, in_a_row[way],
               kvc_strerror(status));
        pair_check(p);
    }
    num_failures[way] += status == KVC_ERR_NOMEM;
    return heap.failed && status != KVC_OK;
}

/* Makes a call with each of its requests failing in turn.  If the call does without a request, its other requests fail
 * in later calls, which begin anywhere. */
static void check_call(pair *p, kvc_status (*call)(pair *p)) {
    const int begin = random_int(0, 2) ? 0 : random_int(0, 8);
    const uint64_t arguments = random_state;
    for (int i = 0; i < 100 * NUM_WAYS; i++)
        if (!fails(p, call, arguments, begin + i / NUM_WAYS, i % NUM_WAYS)) return;
}

/* ---- rows that are selected -------------------------------------------------------------------------------------- */

/* Lets the batch's token select rows of layer 0, or all tasks of a plan. */
static kvc_status select_rows(pair *p) {
    static float q[MOST_HEADS * SCALED_DIM], out[MOST_HEADS * SCALED_DIM];
    const kvc_layer *layer = &p->layers[0];
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args,
                                     .num_heads = MOST_HEADS,
                                     .num_threads = random_int(1, 4),
                                     .select_rows = random_int(1, 8)};
    const kvc_attend_args args = float_queries(MOST_HEADS, layer->k_dim, layer->v_dim, q, out);
    if (random_int(0, 2)) return kvc_attend(p->batch, &plan_args, &args);
    kvc_plan *plan = NULL;
    kvc_status status = kvc_plan_new(p->batch, &plan_args, &plan);
    for (int64_t i = 0; status == KVC_OK && i < kvc_plan_num_tasks(plan); i++) status = kvc_plan_run(plan, 0, &args, i);
    kvc_plan_free(plan);
    return status;
}

static kvc_status put_again(pair *p) { return p->written[0][0] ? KVC_OK : pair_put(p, 0, 0, 1); }

static kvc_status move_again(pair *p) { return random_move(p, 0, random_int(0, 100), 110); }

static kvc_status fork_again(pair *p) { return pair_fork(p, 0, 1); }

/* A call that fails leaves a sequence as exact as it was, and each key its own sketch. */
static void test_selecting(int block_size) {
    static pair p;
    const kvc_layer layers[] = {
        {.num_kv_heads = 2, .k_dim = SCALED_DIM, .v_dim = 4, .k_type = KVC_Q8_0, .sketch_bits = 2},
        {.num_kv_heads = 1, .k_dim = SCALED_DIM, .v_dim = SCALED_DIM, .k_type = KVC_F16, .sketch_bits = 2}};
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = block_size, .config.num_threads = 2};
    pair_new(&p, 2, layers);
    pair_feed(&p, 0, 0, 120);
    for (int i = 0; i < 20; i++) {
        const int64_t id = 0;
        const int32_t next = next_of(&p, find_sequence(&p, 0));
        CHECK(pair_begin(&p, 1, &next, &id) == KVC_OK);
        check_call(&p, put_again);
        const int32_t exact = kvc_exact_to(p.cache, 0);
        check_call(&p, select_rows);
        const int32_t selected = kvc_exact_to(p.cache, 0);
        CHECKF(selected == (exact < next ? exact : next), "exact to %d, before %d", selected, exact);
        pair_abort(&p);
        CHECK(kvc_exact_to(p.cache, 0) == exact);
        check_call(&p, i % 4 ? move_again : fork_again);
        if (rows_of(&p, find_sequence(&p, 0)) < 90)
            pair_feed(&p, 0, next_of(&p, find_sequence(&p, 0)), next_of(&p, find_sequence(&p, 0)) + 20);
        pair_check(&p);
    }
    pair_free(&p);
    CHECK(heap.num == 0 && num_taken == 0 && mapped == 0);
}

/* ---- what needs nothing, so that it cannot fail ------------------------------------------------------------------ */

/* Commits the open batch, or some of its tokens, or aborts it if its rows were not put; and drops sequences.  No memory
 * is asked for; advice on pages may be declined. */
static void check_end(pair *p, int is_put) {
    int32_t kept[MAX_BATCH], num_kept = 0;
    int64_t num_blocks, num_runs;
    for (int32_t t = 0; t < p->num_tokens; t++)
        if (random_int(0, 3)) kept[num_kept++] = t;
    const int first = random_int(0, 4), most = in_a_row[random_int(0, NUM_WAYS)];
    memory_fail(&heap, first, most);
    if (is_put)
        pair_commit_kept(p, random_int(0, 2) ? kept : NULL, num_kept);
    else
        pair_abort(p); /* may try to make a list shorter */
    if (!is_put) memory_fail(&heap, first, most);
    CHECK(kvc_blocks(p->cache, 0, NULL, sizeof(kvc_block_info), 0, &num_blocks, NULL, sizeof(kvc_run_info), 0,
                     &num_runs) == KVC_OK);
    if (!random_int(0, 9)) pair_clear_sequence(p, random_id());
    if (!random_int(0, 40)) pair_keep(p, random_id());
    if (!random_int(0, 40)) pair_clear(p);
    CHECKF(heap.asked == 0 || !p->config.allocator, "memory was asked for %d times", heap.asked);
    memory_fail_after(&heap, -1);
    pair_check(p);
}

/* Sequences that are not stored: new sequences, and a sequence whose rows a commit drops. */
static void test_unstored_commit_needs_no_memory(void) {
    static pair p;
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {KVC_CROSS, .max_len = 6}}};
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 4,
                                 .seq_ids = (int64_t[]){0, 9, 1, 9},
                                 .unstored = (uint8_t[]){1, 1, 0, 1}};
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = 4};
    pair_new(&p, 2, layers);
    pair_feed(&p, 0, 0, 21);
    pair_feed(&p, 1, 0, 6);
    CHECK(kvc_begin_with(p.cache, &args, &p.batch) == KVC_OK);
    for (int l = 0; l < 2; l++) {
        kvc_put_args put = zero_rows(0, l ? 6 : 4);
        put.seq_id = 9;
        CHECKF(kvc_put(p.batch, l, &put) == KVC_OK, "%s", kvc_last_error());
    }
    memory_fail_after(&heap, 0);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_commit(p.batch) == KVC_OK && heap.failed == 0);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_seq_len(p.cache, 0, 0) == 0 && kvc_seq_len(p.cache, 9, 1) == 0 && kvc_seq_len(p.cache, 1, 0) == 7);
    memory_fail_after(&heap, -1);
    pair_free(&p);
    CHECK(heap.num == 0);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

/* A cache is made, with the program's allocator or the default one, in the first of which fork() learns of caches. */
static void test_cache_new(int has_allocator) {
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &(kvc_layer){.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                               .layer_size = sizeof(kvc_layer),
                               .num_layers = 1,
                               .allocator = has_allocator ? &heap.allocator : NULL};
    kvc_cache *cache = NULL;
    int i = 0;
    memory_init(&heap);
    for (; memory_fail(&heap, i / NUM_WAYS, in_a_row[i % NUM_WAYS]), kvc_cache_new(&config, &cache) != KVC_OK; i++) {
        CHECK(!cache && heap.num == 0 && num_taken == 0 && names_lack());
        CHECK(i < 20 * NUM_WAYS);
    }
    CHECKF(i >= 3 * NUM_WAYS && heap.failed == 0, "%d", i);
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0 && num_taken == 0);
}

static void count_task(void *context, int64_t i) {
    (void)i;
    atomic_fetch_add((atomic_int *)context, 1);
}

/* If the system refuses a thread, the other threads do its tasks; the next call asks again. */
static void test_threads(int num_threads) {
    memory_init(&heap);
    int num_refused = 0;
    for (int i = 0, met = 1; met; i++) {
        atomic_int num_done = 0;
        memory_fail(&heap, i / NUM_WAYS, in_a_row[i % NUM_WAYS]);
        kvc_parallel(num_threads, num_threads, count_task, &num_done);
        heap.is_failing = 0;
        CHECKF(num_done == num_threads, "%d tasks of %d", num_done, num_threads);
        num_refused += met = heap.failed > 0;
    }
    CHECKF(num_refused >= 3 * NUM_WAYS, "%d", num_refused); /* a mutex, a signal, a thread */
}

/* Small blocks come from the program's allocator; large ones from the default one, from slabs or mappings. */
static void test_random(int block_size, int num_steps) {
    static kvc_status (*const without[])(pair *) = {random_edit, random_edit, random_edit, random_begin, random_begin,
                                                    keep_new,    hold,        copy_out,    weigh};
    static kvc_status (*const within[])(pair *) = {random_edit, keep_new, put_cross,  hold, copy_out,
                                                   dense,       attend,   begin_late, weigh};
    static pair p;
    memory_init(&heap);
    if (block_size > MAX_ROWS) heap.allocator.alloc = NULL;
    p = (pair){.memory = &heap, .config.block_size = block_size};
    random_pair(&p);
    for (int i = 0; i < num_steps; i++) {
        check_call(&p, without[random_int(0, 9)]);
        if (p.batch) {
            const int is_put = random_int(0, 2);
            if (is_put) pair_put_all(&p);
            for (int calls = random_int(0, 5); calls > 0; calls--) check_call(&p, within[random_int(0, 9)]);
            check_end(&p, is_put);
        }
        keep_small(&p);
    }
    pair_check(&p);
    pair_free(&p);
    CHECKF(heap.num == 0 && num_taken == 0 && mapped == 0, "%d allocations, %d blocks, %lld bytes of pages are left",
           heap.num, (int)num_taken, (long long)mapped);
}

int main(int argc, char **argv) {
    static const int block_sizes[] = {1, 3, 16, 64, 12000, 100000};
    setenv("KVCACHE_THREADS", "own", 1);
    if (has_seed(argc, argv)) {
        test_random(block_sizes[random_int(0, 6)], 200);
        return test_result();
    }
    for (int num_threads = 2; num_threads < 5; num_threads++) test_threads(num_threads);
    for (int i = 0; i < 2; i++) test_cache_new(i);
    test_unstored_commit_needs_no_memory();
    for (int i = 0; i < 6; i++) test_selecting(block_sizes[i]);
    const int num_worlds = is_full() ? 96 : 36;
    for (int i = 0; i < num_worlds; i++) test_random(block_sizes[i % 6], 200);
    for (int way = 0; way < NUM_WAYS; way++)
        CHECKF(num_failures[way] > 200 * num_worlds, "%d in a row: %d calls failed", in_a_row[way], num_failures[way]);
    return test_result();
}
