/* Every call with its first, second, third ... allocation failing, until none does, in random states: it changes
 * nothing and can be repeated.  At the end no byte is left, and all were given back as they were taken. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/random_steps.h"

enum { MOST_READ = MAX_ROWS + MAX_BATCH, MOST_HEADS = 4 };

static memory heap;

/* All that can be seen of a cache, but for its rows, which pair_check compares. */
typedef struct seen {
    kvc_stats stats;
    double utilization;
    int64_t bytes, num_retained, retained[NUM_RETAINED];
    int num_allocations; /* without scratch */
} seen;

static seen look(const pair *p) {
    seen s;
    memset(&s, 0, sizeof s);
    kvc_get_stats(p->cache, &s.stats, sizeof s.stats);
    s.utilization = kvc_utilization(p->cache);
    s.bytes = kvc_nbytes(p->cache);
    s.num_retained = kvc_retained(p->cache, s.retained, NUM_RETAINED);
    for (int i = 0; i < heap.num; i++) s.num_allocations += heap.live[i].hint.kind != KVC_MEMORY_SCRATCH;
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
static kvc_status retain_new(pair *p) {
    const int64_t id = FIRST_RETAINED + NUM_RETAINED;
    const int32_t begin = random_int(0, 20);
    kvc_status status = kvc_retain_new(p->cache, id, begin, begin + random_int(1, 10), NULL);
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
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .layer = l, .num_heads = num_heads, .num_threads = random_int(1, 4)};
    kvc_attend_args args = float_queries(num_heads, p->layers[l].k_dim, p->layers[l].v_dim, q, out);
    args.scale = 1; /* which layers with values in their keys need */
    if (random_int(0, 2)) return kvc_attend(p->batch, &plan_args, &args);
    kvc_plan *plan = NULL;
    kvc_status status = kvc_plan_new(p->batch, &plan_args, &plan);
    CHECK(!plan == (status != KVC_OK));
    kvc_plan_free(plan);
    return status;
}

static int num_failures; /* calls that lacked memory */

/* Makes a call with these random arguments, with one allocation failing after the other until none does.  A call that
 * fails, for whatever reason, has changed nothing. */
static void check_call(pair *p, kvc_status (*call)(pair *p)) {
    const uint64_t arguments = random_state;
    for (int fail_after = 0, goes_on = 1; goes_on; fail_after++) {
        const seen before = look(p);
        random_state = arguments;
        memory_fail_after(&heap, fail_after);
        const kvc_status status = call(p);
        const int failed = heap.failed;
        if (status == KVC_ERR_NOMEM) CHECKF(failed && strstr(kvc_last_error(), "memory"), "%s", kvc_last_error());
        memory_fail_after(&heap, -1);
        if (status != KVC_OK) {
            const seen after = look(p);
            CHECKF(!memcmp(&after, &before, sizeof after), "after %d: %s", fail_after, kvc_strerror(status));
            pair_check(p);
        }
        num_failures += status == KVC_ERR_NOMEM;
        goes_on = failed && status != KVC_OK && fail_after < 100;
    }
}

/* ---- what takes no memory, so that it cannot fail ---------------------------------------------------------------- */

/* Commits the open batch, or some of its tokens, or aborts it if its rows were not put; and drops sequences. */
static void check_end(pair *p, int is_put) {
    int32_t kept[MAX_BATCH], num_kept = 0;
    int64_t num_blocks, num_runs;
    for (int32_t t = 0; t < p->num_tokens; t++)
        if (random_int(0, 3)) kept[num_kept++] = t;
    memory_fail_after(&heap, 0);
    if (is_put)
        pair_commit_kept(p, random_int(0, 2) ? kept : NULL, num_kept);
    else
        pair_abort(p); /* may try to make a list shorter */
    if (!is_put) memory_fail_after(&heap, 0);
    CHECK(kvc_blocks(p->cache, 0, NULL, sizeof(kvc_block_info), 0, &num_blocks, NULL, sizeof(kvc_run_info), 0,
                     &num_runs) == KVC_OK);
    if (!random_int(0, 9)) pair_clear_sequence(p, random_id());
    if (!random_int(0, 40)) pair_keep(p, random_id());
    if (!random_int(0, 40)) pair_clear(p);
    CHECKF(heap.failed == 0, "memory was asked for %d times", heap.failed);
    memory_fail_after(&heap, -1);
    pair_check(p);
}

/* Sequences that are not stored: new ones, and one that held rows, which a commit drops. */
static void test_unstored_commit_needs_no_memory(void) {
    static pair p;
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {KVC_CROSS, .max_len = 6}}};
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = 4,
                                 .seq_ids = (int64_t[]){0, 9, 1, 9},
                                 .unstored = (uint8_t[]){1, 1, 0, 1}};
    const float row[4] = {0};
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = 4};
    pair_new(&p, 2, layers);
    pair_feed(&p, 0, 0, 21);
    pair_feed(&p, 1, 0, 6);
    CHECK(kvc_begin_with(p.cache, &args, &p.batch) == KVC_OK);
    for (int l = 0; l < 2; l++) {
        const kvc_put_args put = {.struct_size = sizeof put, .num_tokens = l ? 6 : 4, .k = row, .v = row, .seq_id = 9};
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

static void test_cache_new(void) {
    kvc_config config = {.struct_size = sizeof config,
                         .layers = &(kvc_layer){.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                         .layer_size = sizeof(kvc_layer),
                         .num_layers = 1,
                         .allocator = &heap.allocator};
    kvc_cache *cache = NULL;
    int fail_after = 0;
    memory_init(&heap);
    for (; memory_fail_after(&heap, fail_after), kvc_cache_new(&config, &cache) != KVC_OK; fail_after++) {
        CHECK(!cache && heap.failed == 1 && heap.num == 0 && strstr(kvc_last_error(), "out of memory"));
        CHECK(fail_after < 10);
    }
    CHECK(fail_after > 0 && heap.failed == 0);
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0);
}

static void test_random(int block_size, int num_steps) {
    static kvc_status (*const without[])(pair *) = {random_edit,  random_edit, random_edit, random_begin,
                                                    random_begin, retain_new,  hold,        copy_out};
    static kvc_status (*const within[])(pair *) = {random_edit, retain_new, put_cross, hold, copy_out, dense, attend};
    static pair p;
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = block_size};
    random_pair(&p);
    for (int i = 0; i < num_steps; i++) {
        check_call(&p, without[random_int(0, 8)]);
        if (p.batch) {
            const int is_put = random_int(0, 2);
            if (is_put) pair_put_all(&p);
            for (int calls = random_int(0, 5); calls > 0; calls--) check_call(&p, within[random_int(0, 7)]);
            check_end(&p, is_put);
        }
        keep_small(&p);
    }
    pair_check(&p);
    pair_free(&p);
    CHECKF(heap.num == 0, "%d allocations are left", heap.num);
}

int main(void) {
    static const int block_sizes[] = {1, 3, 16, 64};
    test_cache_new();
    test_unstored_commit_needs_no_memory();
    for (int i = 0; i < 96; i++) test_random(block_sizes[i % 4], 200);
    CHECKF(num_failures > 10000, "%d calls lacked memory", num_failures);
    return test_result();
}
