/* Masked ranges: attention gives the bits of a cache in which the masked rows were never put, whatever these hold,
 * while sequences that share rows hide different ones; and ranges that cannot be are refused. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include <math.h>
#include <stdlib.h>

#include "attend/work.h"
#include "support/isas.h"
#include "support/memory.h"
#include "support/test.h"

enum { MAX_MASKED = 1024, MAX_BATCH = 400, MAX_STORED = 3000, MAX_MEMBERS = 5, KEYS, VALUES, QUERIES };

/* Sequences 0, 1, ..., of which some positions are masked; zeros for the defaults. */
typedef struct scene {
    kvc_layer layer; /* f32 or what it says; 2 heads, of 32 and 64 elements */
    int32_t group;   /* query heads per KV head; 0: 2 */
    int32_t members; /* 0: 1 */
    int32_t stored, fresh; /* tokens of each sequence: those before the batch, and in it */
    int32_t asked;         /* queries are asked for positions from here on */
    int is_forked;         /* all have the stored rows of sequence 0, in the same slots */
    int32_t cut, delta;    /* tokens from position `cut` on move by delta, once they are stored */
    int is_missing;        /* masked tokens of the batch are not put */
    int32_t block_size;
    int32_t num_masked;
    kvc_masked masked[MAX_MASKED]; /* as of the time of the batch */
} scene;

typedef struct stage {
    kvc_cache *cache;
    kvc_batch *batch;
    int n; /* tokens of the batch */
    int64_t ids[MAX_BATCH];
    int32_t positions[MAX_BATCH];
} stage;

typedef struct answers {
    int n;
    float *q, *out, *lse;
} answers;

/* ---- what rows hold ---------------------------------------------------------------------------------------------- */

static int is_masked(const scene *s, int64_t id, int32_t position)
{
    for (int32_t i = 0; i < s->num_masked; i++)
        if (s->masked[i].seq_id == id && position >= s->masked[i].begin && position < s->masked[i].end)
            return 1;
    return 0;
}

/* Where a token is once tokens have moved. */
static int32_t moved(const scene *s, int32_t position) { return position + (position >= s->cut ? s->delta : 0); }

/* Whether a type holds NaN. */
static int is_float(const scene *s) { return s->layer.k_type <= KVC_BF16 && s->layer.v_type <= KVC_BF16; }

/* Rows of n tokens, as kvc_put takes them.  spoilt: they are to be seen by nobody. */
static void put(kvc_batch *batch, const scene *s, int first, int n, const int64_t *ids, const int32_t *positions,
                const char *spoilt)
{
    const int heads = s->layer.num_kv_heads, k_row = heads * s->layer.k_dim, v_row = heads * s->layer.v_dim;
    float *k = malloc((size_t)(n * k_row) * sizeof *k), *v = malloc((size_t)(n * v_row) * sizeof *v);
    for (int t = 0; t < n; t++) {
        for (int d = 0; d < k_row; d++)
            k[t * k_row + d] = spoilt[t] ? NAN : element_of(KEYS, ids[t], positions[t], d);
        for (int d = 0; d < v_row; d++)
            v[t * v_row + d] = spoilt[t] ? INFINITY : element_of(VALUES, ids[t], positions[t], d);
    }
    put_floats(batch, 0, first, n, heads, s->layer.k_dim, s->layer.v_dim, k, v);
    free(k);
    free(v);
}

/* ---- storing it -------------------------------------------------------------------------------------------------- */

/* Stores the tokens of sequence id, `content` says whose rows they hold.  without: those that are masked are left out,
 * else they are spoilt, if that is possible. */
static void store(kvc_cache *cache, const scene *s, int64_t id, int64_t content, int without)
{
    static int64_t ids[MAX_STORED], contents[MAX_STORED];
    static int32_t positions[MAX_STORED];
    static char spoilt[MAX_STORED];
    int n = 0;
    for (int32_t p = 0; p < s->stored; p++) {
        const int hides = is_masked(s, id, moved(s, p));
        if (hides && without)
            continue;
        spoilt[n] = (char)(hides && is_float(s) && !s->is_forked);
        ids[n] = id;
        contents[n] = content;
        positions[n++] = p;
    }
    kvc_batch *batch = NULL;
    if (!n)
        return;
    CHECKF(kvc_begin(cache, n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    put(batch, s, 0, n, contents, positions, spoilt);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

static void store_all(kvc_cache *cache, const scene *s, int without)
{
    for (int64_t id = 0; id < s->members; id++) {
        if (!s->is_forked || without)
            store(cache, s, id, s->is_forked ? 0 : id, without);
        else if (id == 0)
            store(cache, s, 0, 0, 0);
        else
            CHECK(kvc_fork(cache, 0, id) == KVC_OK);
    }
    for (int64_t id = 0; s->delta && id < s->members; id++)
        CHECKF(kvc_shift(cache, id, s->cut, KVC_END, s->delta) == KVC_OK, "%s", kvc_last_error());
}

static kvc_cache *new_cache(scene *s, const kvc_allocator *allocator)
{
    s->layer.num_kv_heads = 2;
    s->layer.k_dim = 32;
    s->layer.v_dim = 64;
    s->group = s->group ? s->group : 2;
    s->members = s->members ? s->members : 1;
    return cache_of(&s->layer, 1,
                    (kvc_config){.block_size = s->block_size ? s->block_size : 16, .allocator = allocator});
}

/* Opens the batch, and puts its tokens.  without: those that are masked are no tokens of it. */
static void open_batch(stage *st, const scene *s, int without)
{
    static const char fine[1], spoilt[1] = {1};
    for (int64_t id = 0; id < s->members; id++)
        for (int32_t i = 0; i < s->fresh; i++) {
            const int32_t position = moved(s, s->stored - 1) + 1 + i;
            if (without && is_masked(s, id, position))
                continue;
            st->ids[st->n] = id;
            st->positions[st->n++] = position;
        }
    CHECKF(kvc_begin(st->cache, st->n, st->positions, st->ids, NULL, &st->batch) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < st->n; t++) {
        const int hides = is_masked(s, st->ids[t], st->positions[t]);
        if (!hides || !s->is_missing)
            put(st->batch, s, t, 1, &st->ids[t], &st->positions[t], hides && is_float(s) ? spoilt : fine);
    }
}

static stage stage_new(scene *s, int without, const kvc_allocator *allocator)
{
    stage st = {.cache = new_cache(s, allocator)};
    store_all(st.cache, s, without);
    open_batch(&st, s, without);
    return st;
}

static void stage_free(stage *st)
{
    kvc_abort(st->batch);
    CHECKF(kvc_validate(st->cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(st->cache) == KVC_OK, "%s", kvc_last_error());
}

/* ---- attending --------------------------------------------------------------------------------------------------- */

static answers answers_new(const scene *s, const stage *st, int first)
{
    answers a = {.n = st->n - first};
    const int heads = 2 * s->group, row = heads * s->layer.k_dim;
    a.q = malloc((size_t)(a.n * row) * sizeof *a.q);
    a.out = malloc((size_t)(a.n * heads * s->layer.v_dim) * sizeof *a.out);
    a.lse = malloc((size_t)(a.n * heads) * sizeof *a.lse);
    for (int t = 0; t < a.n; t++)
        for (int d = 0; d < row; d++)
            a.q[t * row + d] = element_of(QUERIES, st->ids[first + t], st->positions[first + t], d);
    return a;
}

static void answers_free(answers *a)
{
    free(a->q);
    free(a->out);
    free(a->lse);
}

/* The first token of the batch whose query is asked for. */
static int first_asked(const scene *s, const stage *st)
{
    int first = 0;
    while (st->positions[first] < s->asked)
        first++;
    return first;
}

static kvc_plan_args plan_of(const scene *s, const stage *st, int hides, int32_t num_threads)
{
    return (kvc_plan_args){.struct_size = sizeof(kvc_plan_args),
                           .first = first_asked(s, st),
                           .num_heads = 2 * s->group,
                           .num_threads = num_threads,
                           .masked = hides ? s->masked : NULL,
                           .masked_size = sizeof *s->masked,
                           .num_masked = hides ? s->num_masked : 0};
}

static kvc_attend_args args_of(const scene *s, const answers *a)
{
    const int64_t f = sizeof(float);
    return (kvc_attend_args){.struct_size = sizeof(kvc_attend_args),
                             .q = a->q,
                             .out = a->out,
                             .lse = a->lse,
                             .q_token_stride = 2 * s->group * s->layer.k_dim * f,
                             .q_head_stride = s->layer.k_dim * f,
                             .out_token_stride = 2 * s->group * s->layer.v_dim * f,
                             .out_head_stride = s->layer.v_dim * f,
                             .lse_token_stride = 2 * s->group * f,
                             .lse_head_stride = f};
}

/* Attends to all that is asked; tasks: by a plan, whose tasks are run backwards. */
static kvc_status attend(const scene *s, const stage *st, int hides, int32_t num_threads, int tasks, const answers *a)
{
    const kvc_plan_args plan_args = plan_of(s, st, hides, num_threads);
    const kvc_attend_args args = args_of(s, a);
    kvc_plan *plan = NULL;
    if (!tasks)
        return kvc_attend(st->batch, &plan_args, &args);
    kvc_status status = kvc_plan_new(st->batch, &plan_args, &plan);
    for (int64_t i = status == KVC_OK ? kvc_plan_num_tasks(plan) : 0; status == KVC_OK && i > 0; i--)
        status = kvc_plan_run(plan, 0, &args, i - 1);
    kvc_plan_free(plan);
    return status;
}

/* Compares what the queries got; `right` may be that of fewer tokens. */
static void compare(const scene *s, const stage *st, const answers *got, const stage *right_st, const answers *right)
{
    const int heads = 2 * s->group, first = st->n - got->n, right_first = right_st->n - right->n;
    const size_t row = (size_t)(heads * s->layer.v_dim);
    for (int t = 0, j = 0; t < got->n; t++) {
        if (j == right->n || st->ids[first + t] != right_st->ids[right_first + j] ||
            st->positions[first + t] != right_st->positions[right_first + j])
            continue; /* a masked token */
        CHECKF(!memcmp(got->out + (size_t)t * row, right->out + (size_t)j * row, row * sizeof *got->out) &&
                   !memcmp(got->lse + t * heads, right->lse + j * heads, (size_t)heads * sizeof *got->lse),
               "sequence %d, position %d: lse is %g, not %g", (int)st->ids[first + t], st->positions[first + t],
               (double)got->lse[t * heads], (double)right->lse[j * heads]);
        j++;
    }
}

/* Same bits with masked rows and without them, by any number of threads and by tasks. */
static void check_bits(scene s)
{
    stage with = stage_new(&s, 0, NULL), without = stage_new(&s, 1, NULL);
    answers got = answers_new(&s, &with, first_asked(&s, &with));
    answers right = answers_new(&s, &without, first_asked(&s, &without));
    CHECKF(attend(&s, &without, 0, 1, 0, &right) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < 4; i++) {
        memset(got.out, 0x7f, (size_t)(got.n * 2 * s.group * s.layer.v_dim) * sizeof *got.out);
        CHECKF(attend(&s, &with, 1, i < 2 ? 1 : 3, i % 2, &got) == KVC_OK, "%s", kvc_last_error());
        compare(&s, &with, &got, &without, &right);
    }
    answers_free(&got);
    answers_free(&right);
    stage_free(&with);
    stage_free(&without);
}

static void hide(scene *s, int64_t id, int32_t begin, int32_t end)
{
    CHECK(s->num_masked < MAX_MASKED);
    s->masked[s->num_masked++] = (kvc_masked){id, begin, end};
}

static const double frequencies[16] = {1, 0.5, 0.25, 0.125, 0.0625, 0.03, 0.01, 0.003, 1e-3, 1e-4, 1, 1, 1, 1, 1, 1};
static const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 16, .inv_freq = frequencies};

/* ---- scenes ------------------------------------------------------------------------------------------------------ */

/* Padding to the left, as in a batch of prompts, with queries few and many. */
static void test_types(void)
{
    static const int32_t types[] = {KVC_F32, KVC_F16, KVC_BF16, KVC_Q8_0, KVC_Q4_0};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int32_t fresh = 1; fresh <= 80; fresh += 79) {
            scene s = {.layer = {.k_type = types[i], .v_type = types[i]}, .stored = 700, .fresh = fresh};
            hide(&s, 0, 0, 37);
            check_bits(s);
            hide(&s, 0, 300, 301);
            hide(&s, 0, 640, 699);
            s.layer.k_type = KVC_F16;
            check_bits(s);
        }
}

static void test_lengths(void)
{
    for (int32_t stored = 0; stored < 2600; stored += stored < 70 ? 23 : 611)
        for (int32_t fresh = 1; fresh <= 300; fresh *= 7)
            for (int group = 1; group <= 5; group += 4) {
                scene s = {.stored = stored, .fresh = fresh, .group = group};
                hide(&s, 0, stored / 3, stored / 2);
                hide(&s, 0, stored / 4, stored / 3 + 5);
                hide(&s, 0, 0, 1);
                s.asked = stored; /* queries of masked tokens would be others */
                while (is_masked(&s, 0, s.asked))
                    s.asked++;
                if (s.asked < stored + fresh)
                    check_bits(s);
            }
}

/* Ranges that overlap, touch, repeat, are empty or beyond all, and are in no order. */
static void test_ranges(void)
{
    scene s = {.stored = 1300, .fresh = 3, .block_size = 7};
    hide(&s, 0, 900, 960);
    hide(&s, 0, 40, 80);
    hide(&s, 0, 80, 90);
    hide(&s, 0, 50, 60);
    hide(&s, 0, 40, 80);
    hide(&s, 0, 500, 500);
    hide(&s, 0, 39, 41);
    hide(&s, 0, 5000, KVC_END);
    check_bits(s);
    for (int i = 0; i < 900; i++)
        hide(&s, 0, i * 37 % 1300, i * 37 % 1300 + i % 3);
    check_bits(s);
    s.num_masked = 0;
    for (int32_t p = 0; p < 1300; p += 2) /* every other row */
        hide(&s, 0, p, p + 1);
    check_bits(s);
    hide(&s, 0, 0, 1300); /* all that is stored */
    check_bits(s);
}

static void test_policies(void)
{
    const kvc_policy policies[] = {{.kind = KVC_SLIDING, .window = 300},
                                   {.kind = KVC_SLIDING, .window = 600, .num_sink_tokens = 70},
                                   {.kind = KVC_CHUNKED, .attention_chunk_size = 256}};
    for (int i = 0; i < 3; i++)
        for (int32_t fresh = 1; fresh <= 70; fresh += 23) {
            scene s = {.layer.policy = policies[i], .stored = 1000, .fresh = fresh};
            hide(&s, 0, 3, 41); /* sinks */
            hide(&s, 0, 60, 75);
            hide(&s, 0, 640, 820);
            hide(&s, 0, 990, 996);
            check_bits(s);
        }
}

/* Tokens of the batch, put or not; queries of those after them, or of all. */
static void test_batch_tokens(void)
{
    for (int is_missing = 0; is_missing < 2; is_missing++)
        for (int32_t fresh = 8; fresh <= 200; fresh *= 5) {
            scene s = {.stored = 20, .fresh = fresh, .is_missing = is_missing, .asked = 26};
            hide(&s, 0, 10, 26);
            check_bits(s);
            s.asked = 0; /* and of the masked ones: few query rows, each alone in its tile */
            if (fresh == 8)
                check_bits(s);
            hide(&s, 0, 20 + fresh - 1, KVC_END); /* padding to the right */
            s.asked = 26;
            s.fresh = fresh;
            if (fresh == 8)
                check_bits(s);
        }
}

/* Keys that are off by a delta; moved down, they stand at positions that others have, too. */
static void test_deltas(void)
{
    for (int32_t fresh = 1; fresh <= 64; fresh *= 8)
        for (int32_t delta = -50; delta <= 50; delta += 100) {
            scene s = {.layer.rope = rope, .stored = 800, .fresh = fresh, .cut = 600, .delta = delta};
            hide(&s, 0, 100, 110);
            hide(&s, 0, 540, 580);
            hide(&s, 0, 590 + delta, 610 + delta);
            hide(&s, 0, 700, 731);
            check_bits(s);
        }
}

/* Sequences that share their stored rows, and hide the same of them, others, or none. */
static void test_forks(void)
{
    for (int32_t fresh = 1; fresh <= 80; fresh += 79)
        for (int is_forked = 0; is_forked < 2; is_forked++) {
            scene s = {.stored = 1200, .fresh = fresh, .members = 5, .is_forked = is_forked};
            hide(&s, 1, 0, 12);
            hide(&s, 2, 0, 12);
            hide(&s, 3, 700, 900);
            hide(&s, 4, 701, KVC_END);
            s.masked[s.num_masked - 1].end = 1199;
            hide(&s, 2, 1100, 1150);
            check_bits(s);
            s.num_masked = 0;
            hide(&s, 4, 600, 1000);
            check_bits(s);
        }
}

/* How many rows a plan reads. */
static int64_t rows_read(const scene *s, const stage *st)
{
    const kvc_plan_args args = plan_of(s, st, 1, 1);
    kvc_plan *plan = NULL;
    int64_t rows = 0;
    CHECK(kvc_plan_new(st->batch, &args, &plan) == KVC_OK);
    for (int64_t j = 0; j < plan->num_jobs; j++)
        rows += plan->jobs[j].rows;
    kvc_plan_free(plan);
    return rows;
}

/* Forks read their rows once as far as they see the same. */
static void test_shared(void)
{
    scene s = {.stored = 1024, .fresh = 1, .members = 2, .is_forked = 1};
    stage st = stage_new(&s, 0, NULL);
    CHECK(rows_read(&s, &st) == 1024 + 2);
    hide(&s, 0, 0, 64);
    hide(&s, 1, 0, 64);
    CHECK(rows_read(&s, &st) == 960 + 2);
    hide(&s, 1, 800, 900); /* from row 512 on, the second part: two whole tiles and more of it are before 800 */
    CHECK(rows_read(&s, &st) == 512 + 192 + (960 - 704) + (860 - 704) + 2);
    s.num_masked = 0;
    hide(&s, 0, 0, 1);
    CHECK(rows_read(&s, &st) == 1023 + 1024 + 2);
    stage_free(&st);
}

/* Nothing is left to see. */
static void test_all_masked(void)
{
    for (int32_t fresh = 1; fresh <= 100; fresh += 99)
        for (int is_missing = 0; is_missing < 2; is_missing++) {
            scene s = {.stored = 600, .fresh = fresh, .is_missing = is_missing};
            hide(&s, 0, 0, KVC_END);
            stage st = stage_new(&s, 0, NULL);
            answers a = answers_new(&s, &st, 0);
            CHECKF(attend(&s, &st, 1, 2, 0, &a) == KVC_OK, "%s", kvc_last_error());
            for (int i = 0; i < a.n * 4 * 64; i++)
                CHECK(a.out[i] == 0 && a.lse[i / 64] == -INFINITY);
            answers_free(&a);
            stage_free(&st);
        }
}

/* A call with other ranges gets a plan of its own, one with the same ranges the old one. */
static void test_other_ranges(void)
{
    scene s = {.stored = 300, .fresh = 2};
    hide(&s, 0, 10, 20);
    stage st = stage_new(&s, 0, NULL);
    kvc_plan *first, *again, *other[4];
    kvc_plan_args args = plan_of(&s, &st, 1, 1);
    CHECK(kvc_plan_new(st.batch, &args, &first) == KVC_OK);
    kvc_plan_free(first);
    kvc_masked elsewhere[] = {{0, 10, 20}, {0, 40, 50}};
    args.masked = elsewhere;
    CHECK(kvc_plan_new(st.batch, &args, &again) == KVC_OK && again == first);
    kvc_plan_free(again);
    for (int i = 0; i < 4; i++) {
        elsewhere[0] = i == 0 ? (kvc_masked){0, 11, 20} : i == 1 ? (kvc_masked){0, 10, 21} : (kvc_masked){0, 10, 20};
        args.num_masked = i == 2 ? 2 : i == 3 ? 0 : 1;
        CHECK(kvc_plan_new(st.batch, &args, &other[i]) == KVC_OK && other[i] != first);
    }
    for (int i = 0; i < 4; i++)
        kvc_plan_free(other[i]);
    stage_free(&st);
}

/* ---- cross-attention --------------------------------------------------------------------------------------------- */

/* Rows of an encoder, put in this batch or before it: position is the row's index. */
static void check_cross(int before, int all)
{
    scene s = {.layer.policy = {.kind = KVC_CROSS, .max_len = 1500}, .stored = 1500, .fresh = 2};
    static int64_t ids[MAX_STORED];
    static int32_t rows[MAX_STORED];
    static char fine[MAX_STORED];
    int32_t kept = 0;
    if (all)
        hide(&s, 0, 0, KVC_END);
    hide(&s, 0, 3, 700);
    hide(&s, 0, 1400, KVC_END);
    for (int32_t i = 0; i < s.stored; i++)
        rows[i] = i;
    stage with = {.cache = new_cache(&s, NULL), .n = 2}, without = {.cache = new_cache(&s, NULL), .n = 2};
    for (int i = 0; i < (before ? 2 : 1); i++) {
        if (with.batch)
            CHECK(kvc_commit(with.batch) == KVC_OK);
        CHECKF(kvc_begin(with.cache, 2, NULL, NULL, NULL, &with.batch) == KVC_OK, "%s", kvc_last_error());
        if (i == 0)
            put(with.batch, &s, 0, s.stored, ids, rows, fine);
    }
    for (int32_t i = 0; i < s.stored; i++)
        if (!is_masked(&s, 0, i))
            rows[kept++] = i;
    CHECKF(kvc_begin(without.cache, 2, NULL, NULL, NULL, &without.batch) == KVC_OK, "%s", kvc_last_error());
    answers got = answers_new(&s, &with, 0), right = answers_new(&s, &without, 0);
    if (kept) {
        put(without.batch, &s, 0, kept, ids, rows, fine);
        CHECKF(attend(&s, &without, 0, 1, 0, &right) == KVC_OK, "%s", kvc_last_error());
    } else {
        memset(right.out, 0, 2 * 4 * 64 * sizeof *right.out);
        for (int i = 0; i < 2 * 4; i++)
            right.lse[i] = -INFINITY;
    }
    CHECKF(attend(&s, &with, 1, 1, 0, &got) == KVC_OK, "%s", kvc_last_error());
    compare(&s, &with, &got, &without, &right);
    answers_free(&got);
    answers_free(&right);
    stage_free(&with);
    stage_free(&without);
}

static void test_cross(void)
{
    for (int before = 0; before < 2; before++)
        for (int all = 0; all < 2; all++)
            check_cross(before, all);
    scene s = {.layer.policy = {.kind = KVC_CROSS, .max_len = 9}, .fresh = 1};
    hide(&s, 0, 0, 9);
    stage st = {.cache = new_cache(&s, NULL), .n = 1};
    CHECK(kvc_begin(st.cache, 1, NULL, NULL, NULL, &st.batch) == KVC_OK);
    answers a = answers_new(&s, &st, 0);
    CHECK_FAILS(attend(&s, &st, 1, 1, 0, &a), KVC_ERR_INVALID, "layer 0", "put k and v first");
    answers_free(&a);
    stage_free(&st);
}

/* ---- failure ----------------------------------------------------------------------------------------------------- */

/* Every allocation fails once; a call made again gives the right bits. */
static void test_allocation(void)
{
    static memory heap;
    memory_init(&heap);
    scene s = {.stored = 900, .fresh = 2, .members = 3, .is_forked = 1};
    hide(&s, 0, 5, 70);
    hide(&s, 2, 600, 650);
    stage st = stage_new(&s, 0, &heap.allocator), without = stage_new(&s, 1, NULL);
    answers got = answers_new(&s, &st, 0), right = answers_new(&s, &without, 0);
    CHECK(attend(&s, &without, 0, 1, 0, &right) == KVC_OK);
    int fail_after = 0;
    kvc_status status;
    do {
        heap.fail_after = fail_after++;
        heap.failed = 0;
        status = attend(&s, &st, 1, 2, 0, &got);
        heap.fail_after = -1;
        CHECK(status == (heap.failed ? KVC_ERR_NOMEM : KVC_OK) && kvc_validate(st.cache) == KVC_OK);
    } while (status != KVC_OK && fail_after < 10);
    CHECKF(fail_after > 1 && status == KVC_OK, "%d", fail_after);
    compare(&s, &st, &got, &without, &right);
    answers_free(&got);
    answers_free(&right);
    stage_free(&st);
    stage_free(&without);
}

static void test_bad_ranges(void)
{
    scene s = {.stored = 30, .fresh = 1};
    hide(&s, 0, 2, 5);
    hide(&s, 0, 7, 8);
    stage st = stage_new(&s, 0, NULL);
    answers a = answers_new(&s, &st, 0);
    const kvc_attend_args args = args_of(&s, &a);
    const struct {
        kvc_masked second;
        const char *name, *value;
    } bad[] = {{{8, 2, 3}, "masked[1].seq_id", "is 8"},
               {{0, -1, 3}, "masked[1].begin", "is -1"},
               {{0, 4, 3}, "masked[1].end", "is 3"}};
    for (int i = 0; i < 3; i++) {
        s.masked[1] = bad[i].second;
        CHECK_FAILS(attend(&s, &st, 1, 1, 0, &a), KVC_ERR_INVALID, bad[i].name, bad[i].value);
        CHECK_FAILS(attend(&s, &st, 1, 1, 1, &a), KVC_ERR_INVALID, bad[i].name, bad[i].value);
    }
    s.masked[1] = (kvc_masked){0, 7, 7};
    kvc_plan_args plan = plan_of(&s, &st, 1, 1);
    plan.num_masked = -1;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "num_masked", "-1");
    plan.num_masked = 2;
    plan.masked_size = sizeof(kvc_masked) - 1;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "masked", "given as 15");
    plan.masked_size = 0;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "masked", "given as 0");
    plan.masked_size = sizeof(kvc_masked);
    plan.masked = NULL;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "masked is NULL", "2");
    plan.num_masked = 0;
    plan.masked_size = 3; /* of no element */
    CHECKF(kvc_attend(st.batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    answers_free(&a);
    stage_free(&st);
}

static void test_bits(void)
{
    test_types();
    test_lengths();
    test_ranges();
    test_policies();
    test_batch_tokens();
    test_deltas();
    test_forks();
}

int main(void)
{
    test_shared();
    test_all_masked();
    test_other_ranges();
    test_cross();
    test_allocation();
    test_bad_ranges();
    for_some_isas(test_bits);
    return test_result();
}
