/* Cutting a batch into tasks: shared rows are read once, threads finish together, and plans of long prompts stay small.
 * tests/world compares what sequences get alone and in any company. */
#define _DEFAULT_SOURCE /* usleep */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "attend/round.h"
#include "support/test.h"

enum { MAX_BRANCHES = 40, HEADS = 2, K_DIM = 64, V_DIM = 32, REMOVED = 7, PART = KVC_SPLIT_ROWS, MOST_PUT = 4 * PART };

/* ---- what is read ------------------------------------------------------------------------------------------------ */

/* Puts counts[i] tokens at the end of each sequence i; all rows differ. */
static kvc_batch *put_any(kvc_cache *cache, int num_ids, const int32_t *counts) {
    static int64_t ids[MOST_PUT];
    static float rows[MOST_PUT][HEADS][K_DIM];
    kvc_batch *batch = NULL;
    int n = 0;
    for (int s = 0; s < num_ids; s++)
        for (int i = 0; i < counts[s]; i++) ids[n++] = s;
    for (int i = 0; i < n * HEADS * K_DIM; i++) rows[i / K_DIM / HEADS][i / K_DIM % HEADS][i % K_DIM] = random_float();
    CHECKF(kvc_begin(cache, n, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    put_floats(batch, 0, 0, n, HEADS, K_DIM, V_DIM, rows, rows);
    return batch;
}

/* A sequence: another sequence's rows below position `fork`, then rows of its own up to `length`.  If `removed` is not
 * 0, REMOVED positions are removed from there on.  The batch adds num_new tokens. */
typedef struct branch {
    int parent; /* -1: none */
    int32_t fork, length, removed, num_new;
} branch;

typedef struct grove {
    kvc_layer layer; /* policy and rope; the rest is filled in */
    int group;
    int num; /* the sequences' ids are 0, 1, 2, ... */
    branch branches[MAX_BRANCHES];
} grove;

static kvc_cache *grow(const grove *g) {
    kvc_layer layer = g->layer;
    layer.num_kv_heads = HEADS;
    layer.k_dim = K_DIM;
    layer.v_dim = V_DIM;
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 16});
    for (int b = 0; b < g->num; b++) {
        const branch *own = &g->branches[b];
        int32_t counts[MAX_BRANCHES] = {0};
        if (own->parent >= 0) CHECK(kvc_copy_prefix(cache, own->parent, b, own->fork) == KVC_OK);
        counts[b] = own->length - kvc_next_position(cache, b);
        if (counts[b] > 0) CHECK(kvc_commit(put_any(cache, b + 1, counts)) == KVC_OK);
        if (own->removed) CHECK(kvc_remove(cache, b, own->removed, own->removed + REMOVED, 1) == KVC_OK);
    }
    return cache;
}

/* Rows that the tasks of one KV head read. */
static int64_t rows_read(const grove *g, int32_t num_threads) {
    kvc_cache *cache = grow(g);
    int32_t counts[MAX_BRANCHES];
    for (int b = 0; b < g->num; b++) counts[b] = g->branches[b].num_new;
    kvc_batch *batch = put_any(cache, g->num, counts);
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = HEADS * g->group, .num_threads = num_threads};
    kvc_plan *plan = NULL;
    int64_t rows = 0;
    CHECK(kvc_plan_new(batch, &args, &plan) == KVC_OK);
    for (int64_t i = 0; i < plan->jobs.num; i++) rows += plan->jobs.items[i].rows;
    kvc_plan_free(plan);
    kvc_abort(batch);
    CHECKF(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
    return rows;
}

/* A prefix, and num forks of it, each with the same number of rows of its own and one token in the batch. */
static grove forks(int32_t prefix, int num, int32_t own) {
    grove g = {.group = 4, .num = num + 1, .branches = {{-1, 0, prefix, 0, 0}}};
    for (int i = 1; i <= num; i++) g.branches[i] = (branch){0, prefix, prefix + own, 0, 1};
    return g;
}

static void check_read(const grove *g, int32_t num_threads, int64_t right) {
    const int64_t rows = rows_read(g, num_threads);
    CHECKF(rows == right, "%lld rows are read, not %lld", (long long)rows, (long long)right);
}

static void test_read_once(void) {
    grove g = forks(2 * PART, 32, 40);
    check_read(&g, 1, 2 * PART + 32 * 41);
    g = forks(4 * PART, 32, 40);
    check_read(&g, 2, 4 * PART + 32 * 41);
    g = forks(PART + KVC_TILE, 12, 5); /* which ends within a part */
    check_read(&g, 1, PART + KVC_TILE + 12 * 6);
    g = forks(PART + KVC_TILE + 36, 12, 5); /* and within a tile: what is past the last whole one is each one's own */
    check_read(&g, 1, PART + KVC_TILE + 12 * (36 + 6));
    g = forks(KVC_TILE + 36, 2, 5);
    check_read(&g, 1, KVC_TILE + 2 * (36 + 6));
    g = forks(2 * PART, 20, 0);
    g.group = 16; /* 8 sequences in a task */
    check_read(&g, 1, 3 * 2 * PART + 20);
    g = forks(2 * PART, 8, 5);
    g.group = 16;
    for (int i = 1; i <= 8; i++) g.branches[i].num_new = 3; /* 48 query rows: tiled, 5 sequences in a task */
    check_read(&g, 1, 2 * 2 * PART + 8 * (5 + 3));
    g = forks(2 * PART, 32, 0);
    CHECK(rows_read(&g, 64) > 4 * PART); /* with 64 threads, shared rows are read more than once */
}

/* Forks of forks: every stretch once, but where one ends in the middle of a part. */
static void test_read_trees(void) {
    grove g = {.group = 4, .num = 3, .branches = {{-1, 0, PART, 0, 0}}};
    g.branches[1] = g.branches[2] = (branch){0, PART, 3 * PART, 0, 0};
    for (; g.num < 19; g.num++) g.branches[g.num] = (branch){1 + g.num % 2, 3 * PART, 3 * PART, 0, 1};
    check_read(&g, 1, PART + 2 * 2 * PART + 16);
    for (int i = 0; i < 2; i++) /* half a part later */
        g.branches[1 + i].fork = g.branches[0].length = PART + PART / 2;
    check_read(&g, 1, 2 * PART + 3 * PART + 16);
    g.branches[3].parent = 0; /* one leaves early */
    g.branches[3].fork = 64;
    check_read(&g, 1, 2 * PART + 3 * PART + 16 + 3 * PART);
}

/* Rows at the same places that are not the same: nothing is shared. */
static void test_not_shared(void) {
    static const double inv_freq[K_DIM / 2] = {1, 0.5, 0.3, 0.1, 0.03};
    const grove windowed = {.layer.policy = {.kind = KVC_SLIDING, .window = 540},
                            .group = 4,
                            .num = 3, /* the third is 30 rows further: it sees others first */
                            .branches = {{-1, 0, 700, 0, 1}, {0, 700, 700, 0, 1}, {0, 700, 730, 0, 1}}};
    check_read(&windowed, 1, 512 + 2 * 28 + 540);
    const grove moved = {
        .layer.rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = K_DIM / 2, .inv_freq = inv_freq},
        .group = 4,
        .num = 4, /* the fourth has other positions from 300 on */
        .branches = {{-1, 0, 700, 100, 1}, {0, 693, 800, 0, 0}, {0, 693, 720, 0, 0}, {0, 693, 760, 300, 1}}};
    check_read(&moved, 1, (693 + 1) + (753 + 1) - 300 / KVC_TILE * KVC_TILE);
}

/* Begins task 0 of layer 0 again, as soon as no task is running. */
typedef struct rerun {
    kvc_call call;
    kvc_status status;
} rerun;

static void *begin_again(void *context) {
    rerun *r = context;
    r->status = kvc_round_begin(&r->call, 0, 0);
    return NULL;
}

/* A task that waits to be run again is refused if another layer begins first. */
static void test_another_layer_begins(void) {
    const kvc_layer layer = {.num_kv_heads = 2, .k_dim = 4, .v_dim = 4}, layers[] = {layer, layer};
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 2, .num_threads = 2};
    const kvc_put_args put = zero_rows(0, 0);
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){0});
    kvc_attend_args args = {.struct_size = sizeof args};
    kvc_batch *batch = NULL;
    kvc_plan *plan = NULL;
    CHECK(kvc_begin(cache, PART, NULL, NULL, NULL, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
    CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK && kvc_plan_num_tasks(plan) > 1);
    for (int i = 0, num = 0; i < 1000 && num < 20; i++) {
        kvc_call own = {.plan = plan, .args = &args}, other = own;
        rerun again = {.call = own};
        pthread_t thread;
        CHECK(kvc_round_begin(&own, 0, 0) == KVC_OK);
        kvc_round_end(&own, 0, 1);
        CHECK(kvc_round_begin(&own, 0, 1) == KVC_OK);
        CHECK(pthread_create(&thread, NULL, begin_again, &again) == 0);
        usleep(1000); /* in which it begins to wait */
        kvc_round_end(&own, 1, 1);
        const int is_first = kvc_round_begin(&other, 1, 1) == KVC_OK;
        pthread_join(thread, NULL);
        CHECKF(again.status == (is_first ? KVC_ERR_BUSY : KVC_OK), "%d: %s", is_first, kvc_strerror(again.status));
        if (!is_first) kvc_round_end(&again.call, 0, 1);
        CHECK(is_first || kvc_round_begin(&other, 1, 1) == KVC_OK);
        kvc_round_end(&other, 1, 1);
        num += is_first;
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Runs that forks have in common are listed once. */
static void test_listed_once(void) {
    enum { FORKS = 16 };
    const kvc_layer layer = {.num_kv_heads = HEADS, .k_dim = K_DIM, .v_dim = V_DIM};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 48});
    int32_t counts[FORKS] = {2 * PART};
    CHECK(kvc_commit(put_any(cache, 1, counts)) == KVC_OK);
    for (int32_t p = 1; p < 2 * PART; p += 2) CHECK(kvc_remove(cache, 0, p, p + 1, 0) == KVC_OK);
    for (int i = 0; i < FORKS; i++) {
        CHECK(i == 0 || kvc_fork(cache, 0, i) == KVC_OK);
        counts[i] = 1;
    }
    kvc_batch *batch = put_any(cache, FORKS, counts);
    kvc_plan *plan = NULL;
    kvc_plan_args args = {.struct_size = sizeof args, .num_heads = HEADS, .num_threads = 1};
    CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
    int64_t num_segments = 0;
    for (int32_t u = 0; u < plan->num_slices; u++)
        if (plan->slices[u].end_segment > num_segments) num_segments = plan->slices[u].end_segment;
    CHECKF(num_segments == PART + FORKS, "%lld segments", (long long)num_segments);
    kvc_plan_free(plan);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* ---- how even ---------------------------------------------------------------------------------------------------- */

/* The work of the thread that ends last, if free threads begin the tasks in their order. */
static int64_t last_of(const kvc_plan *plan, int num_threads, int64_t *total) {
    int64_t busy[64] = {0}, last = 0;
    int32_t head;
    *total = 0;
    for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) {
        int free = 0;
        for (int t = 1; t < num_threads; t++)
            if (busy[t] < busy[free]) free = t;
        busy[free] += kvc_job_of(plan, i, &head)->work;
        *total += kvc_job_of(plan, i, &head)->work;
        if (busy[free] > last) last = busy[free];
    }
    return last;
}

/* Sequences of these lengths, with tokens for each.  All share the first `shared` rows of the first sequence. */
typedef struct shape {
    const char *name;
    int num_kv_heads, group, num, num_new;
    int32_t shared, lengths[32];
} shape;

static kvc_batch *begin(kvc_cache *cache, int first, int num, int32_t n) {
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch = NULL;
    int32_t *positions = malloc((size_t)(num * n) * sizeof *positions);
    int64_t *ids = malloc((size_t)(num * n) * sizeof *ids);
    for (int i = 0; i < num * n; i++) {
        ids[i] = first + i / n;
        positions[i] = kvc_next_position(cache, ids[i]) + i % n;
    }
    CHECKF(kvc_begin(cache, num * n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_put(batch, 0, &put) == KVC_OK, "%s", kvc_last_error());
    free(positions);
    free(ids);
    return batch;
}

static kvc_cache *shape_cache(const shape *s) {
    const kvc_layer layer = {
        .num_kv_heads = s->num_kv_heads, .k_dim = 1, .v_dim = 1, .k_type = KVC_F16, .v_type = KVC_F16};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 4096});
    for (int i = 0; i < s->num; i++) {
        if (i && s->shared) CHECK(kvc_copy_prefix(cache, 0, i, s->shared) == KVC_OK);
        const int32_t more = s->lengths[i] - kvc_next_position(cache, i);
        if (more > 0) CHECK(kvc_commit(begin(cache, i, 1, more)) == KVC_OK);
    }
    return cache;
}

/* 32 threads are at most a quarter behind, 64 a half, if each has at least so much to do: four parts of what is not cut
 * further, a sequence with few query rows or a token with many; else rows times query rows that take some 100
 * microseconds. */
static void check_even(const shape *s) {
    kvc_cache *cache = shape_cache(s);
    kvc_batch *batch = begin(cache, 0, s->num, s->num_new);
    const int64_t q = (int64_t)s->group * s->num_new, whole = q <= KVC_TASK_QUERIES ? q : s->group;
    const int64_t worth = q > KVC_TASK_QUERIES && s->group < KVC_TASK_QUERIES ? 1 << 15 : 4 * PART * whole;
    for (int threads = 1; threads <= 64; threads++) {
        kvc_plan *plan = NULL;
        const kvc_plan_args args = {
            .struct_size = sizeof args, .num_heads = s->num_kv_heads * s->group, .num_threads = threads};
        CHECK(kvc_plan_new(batch, &args, &plan) == KVC_OK);
        int64_t total, last = last_of(plan, threads, &total);
        if (total >= threads * worth)
            CHECKF(4 * threads * last <= (threads <= 32 ? 5 : 6) * total, "%s, %d new, %d threads: %.3f", s->name,
                   s->num_new, threads, (double)last * threads / (double)total);
        kvc_plan_free(plan);
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static void test_even(void) {
    static const int32_t lengths[] = {1024, 1500, 4096, 5000, 8192, 32768, 131072};
    for (int i = 0; i < 7; i++) {
        check_even(&(shape){"one sequence", 8, 4, 1, 1, 0, {lengths[i]}});
        check_even(&(shape){"one KV head", 1, 16, 1, 1, 0, {lengths[i]}});
        check_even(&(shape){"one KV head, 128 heads", 1, 128, 1, 1, 0, {lengths[i]}});
    }
    shape ragged = {"ragged", 8, 4, 32, 1, 0, {0}}, prefix = {"a prefix of 8,192", 8, 4, 32, 1, 8192, {0}};
    shape prefix_1024 = {"a prefix of 1,024", 8, 4, 32, 1, 1024, {0}};
    for (int i = 0; i < 32; i++) {
        ragged.lengths[i] = 10 + i * i * 9990 / (31 * 31);
        prefix.lengths[i] = 8192 + 10 * i;
        prefix_1024.lengths[i] = 1024 + 3 * i;
    }
    check_even(&ragged);
    check_even(&prefix);
    check_even(&prefix_1024);
    for (int32_t n = 32; n <= 1024; n *= 2) {
        check_even(&(shape){"prompt", 8, 4, 1, n, 0, {4096}});
        check_even(&(shape){"beginning of a prompt", 8, 4, 1, n, 0, {0}});
        check_even(&(shape){"beginning of a prompt, 7 heads a KV head", 2, 7, 1, n, 0, {0}});
        check_even(&(shape){"beginning of a prompt, one head a KV head", 32, 1, 1, n, 0, {0}});
        check_even(&(shape){"beginning of a prompt, one KV head", 1, 16, 1, n, 0, {0}});
        check_even(&(shape){"prompt, one KV head, 128 heads", 1, 128, 1, n, 0, {4096}});
        check_even(&(shape){"prompts of four sequences", 8, 4, 4, n, 0, {4096, 100, 700, 1500}});
    }
}

/* ---- long prompts ------------------------------------------------------------------------------------------------ */

/* Returns the bytes of the plan of a prompt. */
static uint64_t memory_of_prompt(int32_t num_tokens, kvc_policy policy, const uint8_t *non_causal) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 32, .v_dim = 32, .policy = policy};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.num_threads = 1});
    kvc_batch *batch = NULL;
    kvc_plan *plan = NULL;
    CHECK(kvc_begin(cache, num_tokens, NULL, NULL, NULL, &batch) == KVC_OK);
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 16, .non_causal = non_causal};
    CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
    const uint64_t size = plan->link.size;
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return size;
}

/* A plan of twice the prompt takes about twice the memory, and with a window or chunks as much as without. */
static void test_memory_of_prompts(void) {
    enum { TOKENS = 8192 };
    static uint8_t sees_all[2 * TOKENS];
    const kvc_policy full = {.kind = KVC_FULL};
    memset(sees_all, 1, sizeof sees_all);
    for (int i = 0; i < 2; i++) {
        const uint8_t *non_causal = i ? sees_all : NULL;
        const uint64_t once = memory_of_prompt(TOKENS, full, non_causal),
                       twice = memory_of_prompt(2 * TOKENS, full, non_causal);
        CHECKF((double)twice < 2.5 * (double)once, "%d: %llu bytes, and %llu for twice the prompt", i,
               (unsigned long long)once, (unsigned long long)twice);
        for (int32_t window = 100; window < TOKENS; window *= 8) {
            const kvc_policy policies[] = {{.kind = KVC_SLIDING, .window = window},
                                           {.kind = KVC_CHUNKED, .attention_chunk_size = window}};
            for (int p = 0; p < 2; p++) {
                const uint64_t own = memory_of_prompt(TOKENS, policies[p], non_causal);
                CHECKF((double)own < 1.1 * (double)once, "%d: %llu bytes with kind %d of %d, %llu without", i,
                       (unsigned long long)own, policies[p].kind, window, (unsigned long long)once);
            }
        }
    }
}

/* The slices of a prompt have one list of rows, but each needs only those put that it sees itself.  Puts 150 tokens,
 * token `from` the first. */
static void check_prompt_partly_put(int32_t from, int32_t window) {
    enum { TOKENS = 400, PUT = 150, NUM_Q = 8, DIM = 32 };
    static float k[TOKENS * DIM], q[TOKENS * NUM_Q * DIM], out[TOKENS * NUM_Q * DIM];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = {KVC_SLIDING, .window = window}};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.num_threads = 1});
    kvc_batch *batch = NULL;
    kvc_plan *plan;
    int num_run = 0;
    CHECK(kvc_begin(cache, TOKENS, NULL, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, from, PUT, 1, DIM, DIM, k, k);
    const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = NUM_Q};
    const kvc_attend_args attend = float_queries(NUM_Q, DIM, DIM, q, out);
    CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
    for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) {
        int32_t part;
        const kvc_query_slice *slice = kvc_slice_of(plan, kvc_job_of(plan, i, &part), 0);
        const int32_t low = slice->first < window ? 0 : slice->first - window + 1;
        const int is_put = low >= from && slice->first + slice->num_tokens <= from + PUT;
        num_run += is_put;
        CHECKF(kvc_plan_run(plan, 0, &attend, i) == (is_put ? KVC_OK : KVC_ERR_INVALID), "tokens from %d on",
               slice->first);
    }
    CHECK(num_run > 2 && num_run < kvc_plan_num_tasks(plan));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_read_once();
    test_read_trees();
    test_not_shared();
    test_another_layer_begins();
    test_listed_once();
    test_even();
    test_memory_of_prompts();
    check_prompt_partly_put(0, 1000);
    check_prompt_partly_put(100, 40);
    return test_result();
}
