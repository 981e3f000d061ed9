/* Masked ranges: attention gives the bits of a cache in which the masked rows were never put, whatever these hold.
 * Sequences that share rows hide different rows.  Impossible ranges are refused. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include "attend/plan.h"
#include "support/isas.h"
#include "support/memory.h"
#include "support/scene.h"

static const setting usual = {.block_size = 16}, without = {.block_size = 16, .without = 1};

/* A sequence of two KV heads; some of its positions are to be masked. */
static scene hiding(int group, int num_stored, int num_new) {
    scene s = plain_scene(2, group, 32, num_stored, num_new);
    s.layer.v_dim = 64;
    return s;
}

static void hide(scene *s, int64_t id, int32_t begin, int32_t end) {
    CHECK(s->num_masked < MAX_MASKED);
    s->masked[s->num_masked++] = (kvc_masked){id, begin, end};
}

/* The queries of the tokens at positions from `asked` on. */
static question question_from(const stage *st, int32_t asked) {
    int first = 0;
    while (st->tokens.positions[first] < asked) first++;
    return question_new(st, 0, first, st->tokens.n - first);
}

/* Attends with the scene's ranges masked; tasks: by a plan, whose tasks are run backwards. */
static kvc_status attend(question *a, int num_threads, int tasks) {
    const scene *s = a->stage->scene;
    kvc_plan *plan = NULL;
    a->plan.num_threads = num_threads;
    a->plan.masked = s->masked;
    a->plan.masked_size = sizeof *s->masked;
    a->plan.num_masked = s->num_masked;
    if (!tasks) return ask(a);
    kvc_status status = kvc_plan_new(a->stage->batch, &a->plan, &plan);
    for (int64_t i = status == KVC_OK ? kvc_plan_num_tasks(plan) : 0; status == KVC_OK && i > 0; i--)
        status = kvc_plan_run(plan, 0, &a->args, i - 1);
    kvc_plan_free(plan);
    return status;
}

/* Compares the queries' results.  `right` may come from fewer tokens, because masked tokens are not there. */
static void compare(const question *got, const question *right) {
    const pass *a = &got->stage->tokens, *b = &right->stage->tokens;
    for (int t = 0, j = 0; t < got->n && j < right->n; t++) {
        const int at = got->first + t, other = right->first + j;
        if (a->ids[at] == b->ids[other] && a->rows[at] == b->rows[other])
            CHECKF(same_bits(got, t, right, j++), "sequence %d, position %d", (int)a->ids[at], a->positions[at]);
    }
}

/* The same choice for each of n tokens: masked rows and others, as positions or blocks. */
static kvc_chosen same_choice(int n) {
    enum { WIDTH = 200, MOST = 1600 };
    static int32_t entries[MOST][WIDTH];
    const int block = random_int(0, 2) ? 1 : 7, is_sorted = random_int(0, 2);
    CHECK(n <= MOST);
    for (int i = 0; i < WIDTH; i++) entries[0][i] = is_sorted ? i * 12 / block : random_int(-2, 2900 / block);
    for (int t = 1; t < n; t++) memcpy(entries[t], entries[0], sizeof entries[0]);
    return (kvc_chosen){.struct_size = sizeof(kvc_chosen),
                        .positions = entries[0],
                        .token_stride = sizeof entries[0],
                        .num_choices = 1,
                        .width = WIDTH,
                        .block = block,
                        .tail = random_int(0, 2)};
}

/* Same bits with masked rows and without them, by any number of threads and by tasks; how: as they are stored. */
static void check_bits_of(const scene *s, setting how, int32_t asked) {
    stage *with = stage_new(s, &how);
    how.without = 1;
    stage *other = stage_new(s, &how);
    question got = question_from(with, asked), right = question_from(other, asked);
    CHECKF(ask(&right) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < 4; i++) {
        wipe(&got);
        CHECKF(attend(&got, i < 2 ? 1 : 3, i % 2) == KVC_OK, "%s", kvc_last_error());
        compare(&got, &right);
    }
    const kvc_chosen chosen = same_choice(got.n);
    got.args.chosen = right.args.chosen = &chosen;
    CHECKF(ask(&right) == KVC_OK && attend(&got, 3, 0) == KVC_OK, "%s", kvc_last_error());
    compare(&got, &right);
    question_free(&got);
    question_free(&right);
    stage_free(with);
    stage_free(other);
}

/* ---- scenes ------------------------------------------------------------------------------------------------------ */

/* A scene of any types, lengths and numbers of queries, with a policy, keys that are off by a delta, or sequences that
 * share their stored rows.  Ranges of these rows overlap, touch, repeat, are empty or hold all rows, in no order. */
static scene random_scene(void) {
    static const int lengths[] = {1, 23, 64, 700, 1200, 2560}, queries[] = {1, 1, 2, 7, 49, 80, 300};
    static const int sizes[] = {0, 1, 3, 37, 64, 600};
    const kvc_policy policies[] = {{.kind = KVC_SLIDING, .window = 300},
                                   {.kind = KVC_SLIDING, .window = 600, .num_sink_tokens = 70},
                                   {.kind = KVC_CHUNKED, .attention_chunk_size = 256}};
    const int32_t stored = lengths[random_int(0, 6)];
    const int kind = random_int(0, 4), num_new = queries[random_int(0, kind == 3 ? 6 : 7)];
    int32_t end = stored; /* no query stands below */
    scene s = hiding(random_int(1, 6), stored, num_new);
    s.layer.k_type = random_int(0, KVC_STORED_TYPES);
    s.layer.v_type = random_int(0, KVC_STORED_TYPES);
    if (kind == 1) s.layer.policy = policies[random_int(0, 3)];
    if (kind == 2 && stored > 200) { /* moved down, keys stand at positions that others have, too */
        s.layer.rope = rope_of(0, 16, 0);
        s.num_moves = 1;
        s.delta = random_int(0, 2) ? 50 : -50;
        end += s.delta;
    }
    if (kind == 3) {
        s.is_forked = random_int(0, 2);
        s.num_members = 5;
        for (int m = 1; m < 5; m++) s.members[m] = s.members[0];
    }
    for (int i = random_int(0, 8) ? random_int(1, 9) : 900; i > 0; i--) {
        const int32_t begin = random_int(0, end + 1), size = sizes[random_int(0, i < 9 ? 6 : 3)];
        hide(&s, random_int(0, s.num_members), begin, begin + size < end ? begin + size : end);
    }
    if (!random_int(0, 10)) hide(&s, 0, 0, end);
    return s;
}

static void test_random(void) {
    const int num_scenes = is_full() ? 300 : 40;
    for (int i = 0; i < num_scenes; i++) {
        static scene s; /* large */
        s = random_scene();
        check_bits_of(&s, (setting){.block_size = i % 3 ? 16 : 7}, 0);
    }
}

/* Tokens of the batch, put or not; queries of those after them, or of all. */
static void test_batch_tokens(void) {
    for (int i = 0; i < 4; i++) {
        const setting how = {.block_size = 16, .is_missing = i % 2};
        scene s = hiding(2, 20, i / 2 ? 200 : 40);
        hide(&s, 0, 10, 26);
        check_bits_of(&s, how, 26);
        s = hiding(2, 20, 8);
        hide(&s, 0, 10, 26);
        check_bits_of(&s, how, 26);
        check_bits_of(&s, how, 0);    /* and of the masked ones: few query rows, each alone in its tile */
        hide(&s, 0, 20 + 7, KVC_END); /* padding to the right */
        check_bits_of(&s, how, 26);
    }
}

/* How many rows a plan reads. */
static int64_t rows_read(const stage *st) {
    question a = question_of_all(st);
    kvc_plan *plan = NULL;
    int64_t rows = 0;
    CHECK(attend(&a, 1, 0) == KVC_OK && kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
    for (int64_t j = 0; j < plan->jobs.num; j++) rows += plan->jobs.items[j].rows;
    kvc_plan_free(plan);
    question_free(&a);
    return rows;
}

/* Forks read their rows once as far as they see the same. */
static void test_shared(void) {
    scene s = hiding(2, 2048, 1);
    s.is_forked = 1;
    s.num_members = 2;
    s.members[1] = s.members[0];
    stage *st = stage_new(&s, &usual);
    CHECK(rows_read(st) == 2048 + 2);
    hide(&s, 0, 0, 256);
    hide(&s, 1, 0, 256);
    CHECK(rows_read(st) == 1792 + 2);
    hide(&s, 1, 1100, 1200); /* the second part begins at row 768, more than a tile before 1100 */
    CHECK(rows_read(st) == 512 + 256 + (1792 - 768) + (1692 - 768) + 2);
    s.num_masked = 0;
    hide(&s, 0, 0, 1);
    CHECK(rows_read(st) == 2047 + 2048 + 2);
    stage_free(st);
}

/* Nothing is left to see. */
static void test_all_masked(void) {
    for (int i = 0; i < 4; i++) {
        scene s = hiding(2, 600, i / 2 ? 100 : 1);
        hide(&s, 0, 0, KVC_END);
        stage *st = stage_new(&s, &(setting){.block_size = 16, .is_missing = i % 2});
        question a = question_of_all(st);
        CHECKF(attend(&a, 2, 0) == KVC_OK, "%s", kvc_last_error());
        for (int j = 0; j < a.n * 4 * 64; j++) CHECK(((float *)(void *)a.out)[j] == 0 && a.lse[j / 64] == -INFINITY);
        question_free(&a);
        stage_free(st);
    }
}

/* A call with other ranges gets a plan of its own, one with the same ranges the old one. */
static void test_other_ranges(void) {
    scene s = hiding(2, 300, 2);
    hide(&s, 0, 10, 20);
    stage *st = stage_new(&s, &usual);
    question a = question_of_all(st);
    kvc_plan *first = NULL, *again = NULL, *other[4];
    CHECK(attend(&a, 1, 0) == KVC_OK && kvc_plan_new(st->batch, &a.plan, &first) == KVC_OK);
    kvc_plan_leave(first);
    kvc_masked elsewhere[] = {{0, 10, 20}, {0, 40, 50}};
    a.plan.masked = elsewhere;
    CHECK(kvc_plan_new(st->batch, &a.plan, &again) == KVC_OK && again == first);
    kvc_plan_leave(again);
    for (int i = 0; i < 4; i++) {
        elsewhere[0] = i == 0 ? (kvc_masked){0, 11, 20} : i == 1 ? (kvc_masked){0, 10, 21} : (kvc_masked){0, 10, 20};
        a.plan.num_masked = i == 2 ? 2 : i == 3 ? 0 : 1;
        CHECK(kvc_plan_new(st->batch, &a.plan, &other[i]) == KVC_OK && other[i] != first);
    }
    for (int i = 0; i < 4; i++) kvc_plan_free(other[i]);
    question_free(&a);
    stage_free(st);
}

/* ---- cross-attention --------------------------------------------------------------------------------------------- */

/* Puts an encoder's rows for a stage's sequence; without: those that are not masked. */
static void put_rows(const scene *s, const stage *st, int without_masked) {
    static pass p; /* large */
    p.n = 0;
    for (int32_t row = 0; row < 1500; row++)
        if (!without_masked || !is_masked(s, 0, row)) pass_add(&p, 0, row, row);
    if (p.n) scene_put(s, &without, st->batch, 0, &p, 0, p.n);
}

/* A stage of a cross-attention layer whose batch has two tokens, and no rows. */
static stage *cross_stage(const scene *s) {
    stage *st = calloc(1, sizeof *st);
    *st = (stage){.scene = s, .cache = scene_cache(s, &usual)};
    for (int32_t i = 0; i < 2; i++) pass_add(&st->tokens, 0, 1500 + i, i);
    CHECKF(kvc_begin(st->cache, 2, NULL, NULL, NULL, &st->batch) == KVC_OK, "%s", kvc_last_error());
    return st;
}

/* Rows of an encoder, put in this batch or before it: position is the row's index. */
static void check_cross(int before, int all) {
    scene s = hiding(2, 0, 2);
    s.layer.policy = (kvc_policy){.kind = KVC_CROSS, .max_len = 1500};
    if (all) hide(&s, 0, 0, KVC_END);
    hide(&s, 0, 3, 700);
    hide(&s, 0, 1400, KVC_END);
    stage *with = cross_stage(&s), *other = cross_stage(&s);
    put_rows(&s, with, 0);
    put_rows(&s, other, 1);
    if (before) {
        CHECK(kvc_commit(with->batch) == KVC_OK);
        CHECKF(kvc_begin(with->cache, 2, NULL, NULL, NULL, &with->batch) == KVC_OK, "%s", kvc_last_error());
    }
    question got = question_of_all(with), right = question_of_all(other);
    if (!all) CHECKF(ask(&right) == KVC_OK, "%s", kvc_last_error());
    CHECKF(attend(&got, 1, 0) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < 2 && !all; t++) CHECK(same_bits(&got, t, &right, t));
    for (int i = 0; i < 2 * 4 * 64 && all; i++)
        CHECK(((float *)(void *)got.out)[i] == 0 && got.lse[i / 64] == -INFINITY);
    question_free(&got);
    question_free(&right);
    stage_free(with);
    stage_free(other);
}

static void test_cross(void) {
    for (int i = 0; i < 4; i++) check_cross(i % 2, i / 2);
    scene s = hiding(2, 0, 2);
    s.layer.policy = (kvc_policy){.kind = KVC_CROSS, .max_len = 9};
    hide(&s, 0, 0, 9);
    stage *st = cross_stage(&s);
    question a = question_of_all(st);
    CHECK_FAILS(attend(&a, 1, 0), KVC_ERR_INVALID, "layer 0", "put its rows first");
    question_free(&a);
    stage_free(st);
}

/* ---- failure ----------------------------------------------------------------------------------------------------- */

static kvc_status attend_on_two(void *context) { return attend(context, 2, 0); }

/* Every allocation fails once; a call made again gives the right bits. */
static void test_allocation(void) {
    static memory heap;
    memory_init(&heap);
    scene s = hiding(2, 900, 2);
    s.is_forked = 1;
    s.num_members = 3;
    s.members[1] = s.members[2] = s.members[0];
    hide(&s, 0, 5, 70);
    hide(&s, 2, 600, 650);
    stage *st = stage_new(&s, &(setting){.block_size = 16, .allocator = &heap.allocator});
    stage *other = stage_new(&s, &without);
    question got = question_of_all(st), right = question_of_all(other);
    CHECK(ask(&right) == KVC_OK);
    memory_exhaust(&heap, st->cache, attend_on_two, &got);
    compare(&got, &right);
    question_free(&got);
    question_free(&right);
    stage_free(st);
    stage_free(other);
}

static void test_bad_ranges(void) {
    static const struct {
        kvc_masked second;
        const char *name, *value;
    } bad[] = {{{8, 2, 3}, "masked[1].seq_id", "is 8"},
               {{0, -1, 3}, "masked[1].begin", "is -1"},
               {{0, 4, 3}, "masked[1].end", "is 3"}};
    scene s = hiding(2, 30, 1);
    hide(&s, 0, 2, 5);
    hide(&s, 0, 7, 8);
    stage *st = stage_new(&s, &usual);
    question a = question_of_all(st);
    for (int i = 0; i < 3; i++) {
        s.masked[1] = bad[i].second;
        CHECK_FAILS(attend(&a, 1, 0), KVC_ERR_INVALID, bad[i].name, bad[i].value);
        CHECK_FAILS(attend(&a, 1, 1), KVC_ERR_INVALID, bad[i].name, bad[i].value);
    }
    s.masked[1] = (kvc_masked){0, 7, 7};
    a.plan.num_masked = -1;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "num_masked", "-1");
    a.plan.num_masked = 2;
    a.plan.masked_size = sizeof(kvc_masked) - 1;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "masked", "given as 15");
    a.plan.masked_size = 0;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "masked", "given as 0");
    a.plan.masked_size = sizeof(kvc_masked);
    a.plan.masked = NULL;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "masked is NULL", "2");
    a.plan.num_masked = 0;
    a.plan.masked_size = 3; /* of no element */
    CHECKF(ask(&a) == KVC_OK, "%s", kvc_last_error());
    question_free(&a);
    stage_free(st);
}

static void test_bits(void) {
    test_random();
    test_batch_tokens();
}

int main(void) {
    test_shared();
    test_all_masked();
    test_other_ranges();
    test_cross();
    test_allocation();
    test_bad_ranges();
    for_some_isas(test_bits);
    return test_result();
}
