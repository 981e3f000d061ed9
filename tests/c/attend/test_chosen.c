/* Rows chosen for each token (kvc_chosen): attention over the rows that are listed and seen, against plain arithmetic
 * in double.  Bits depend on these rows alone: not on threads, blocks, other tokens, or how a choice is written down.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include "attend/chosen.h"
#include "cache/cache.h"
#include "support/choices.h"
#include "support/isas.h"
#include "support/memory.h"

/* The core's file once more, which counts the entries and segments that it looks at. */
static int64_t num_looked_at;
#define kvc_first_of(l, entry) (num_looked_at++, kvc_first_of(l, entry))
#define kvc_larger(a, b) (num_looked_at++, kvc_larger(a, b))
#define kvc_chosen_read own_chosen_read
#define kvc_most_chosen own_most_chosen
#define kvc_chosen_check own_chosen_check
#define kvc_list_chosen own_list_chosen
#define kvc_list_seen own_list_seen
#define kvc_list_next own_list_next
#include "attend/chosen.c"
#undef kvc_larger

/* ---- asking ------------------------------------------------------------------------------------------------------ */

/* Attends to chosen rows; tasks: by a plan, whose tasks are run backwards. */
static kvc_status attend(question *a, int num_threads, int tasks) {
    const kvc_chosen given = choice_for(a);
    const int block = given.block ? given.block : 1;
    kvc_plan *plan = NULL;
    a->args.chosen = &given;
    a->plan.num_threads = num_threads;
    a->plan.max_chosen = tasks ? given.width * block + block + tasks : 0;
    kvc_status status = !tasks ? ask(a) : kvc_plan_new(a->stage->batch, &a->plan, &plan);
    for (int64_t i = plan ? kvc_plan_num_tasks(plan) : 0; status == KVC_OK && i > 0; i--)
        status = kvc_plan_run(plan, 0, &a->args, i - 1);
    kvc_plan_free(plan);
    a->args.chosen = NULL;
    return status;
}

/* Makes a choice for all heads, of entries 0.  It is too large for a stack, where compilers put a literal. */
static void choose_anew(int num_tokens, int width, int block, int tail) {
    memset(&chosen, 0, sizeof chosen);
    chosen.num_tokens = num_tokens;
    chosen.num_choices = 1;
    chosen.width = width;
    chosen.block = block;
    chosen.tail = tail;
}

/* The same choice, written down in other ways, gives the same bits. */
static void check_spelling(question *right, question *got) {
    static choice kept;
    kept = chosen;
    for (int t = 0; t < chosen.num_tokens; t++)
        for (int c = 0; c < chosen.num_choices; c++) {
            int32_t *entries = chosen.entries[t][c];
            for (int i = chosen.width - 1; i > 0; i--) {
                const int other = random_int(0, i + 1);
                const int32_t entry = entries[i];
                entries[i] = entries[other];
                entries[other] = entry;
            }
            for (int i = chosen.width; i < MAX_WIDTH && i < chosen.width + 20; i++)
                entries[i] = i % 3 ? -1 : entries[i - chosen.width];
        }
    chosen.width = chosen.width + 20 < MAX_WIDTH ? chosen.width + 20 : MAX_WIDTH;
    wipe(got);
    CHECKF(attend(got, 1, 0) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < got->n; t++) CHECK(same_bits(got, t, right, t));
    chosen = kept;
}

/* The answers of a scene; and the same bits by any number of threads, by tasks, token by token, and stored otherwise.
 */
static void check_chosen(const scene *s, const setting *how) {
    setting otherwise = *how;
    stage *st = stage_new(s, how);
    otherwise.block_size = how->block_size == 16 ? 7 : 16;
    random_choice(st);
    question right = question_of_all(st), got = question_of_all(st);
    CHECKF(attend(&right, 1, 0) == KVC_OK, "%s", kvc_last_error());
    check_chosen_answers(&right);
    for (int i = 1; i < 5; i++) {
        wipe(&got);
        CHECKF(attend(&got, i % 2 ? 8 : i, i > 2 ? i * 1000 : 0) == KVC_OK, "%s", kvc_last_error());
        for (int t = 0; t < got.n; t++) CHECKF(same_bits(&got, t, &right, t), "%s, way %d, token %d", kvc_isa(), i, t);
    }
    check_spelling(&right, &got);
    for (int t = 0; t < right.n && !s->is_tree; t += 1 + right.n / 2) {
        question one = question_new(st, 0, t, 1);
        CHECKF(attend(&one, 1, 0) == KVC_OK, "%s", kvc_last_error());
        CHECK(same_bits(&one, 0, &right, t));
        question_free(&one);
    }
    question_free(&got);
    stage *other = stage_new(s, &otherwise);
    got = question_of_all(other);
    CHECKF(attend(&got, 3, 0) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < got.n; t++) CHECK(same_bits(&got, t, &right, t));
    question_free(&right);
    question_free(&got);
    stage_free(st);
    stage_free(other);
}

static void test_random(void) {
    for (int i = 0; i < (is_full() ? 560 : 24); i++) {
        static scene s;
        s = random_scene(i);
        for (int j = s.is_tree || random_int(0, 3) ? 0 : 5; j > 0; j--) {
            const int32_t begin = random_int(0, 700);
            s.masked[s.num_masked++] = (kvc_masked){random_int(0, s.num_members), begin, begin + random_int(0, 60)};
        }
        const setting how = random_setting();
        check_chosen(&s, &how);
    }
}

/* Rows that are not chosen may hold anything. */
static void test_not_read(void) {
    for (int i = 0; i < 4; i++) {
        question a[2];
        stage *st[2];
        for (int bad = 0; bad < 2; bad++) {
            static scene s[2];
            s[bad] = plain_scene(2, i % 2 ? 4 : 40, 64, 600, 4);
            s[bad].num_bad = bad;
            s[bad].bad = i < 2 ? 301 : 601;
            s[bad].number = i % 2 ? NAN : INFINITY;
            st[bad] = stage_new(&s[bad], &(setting){.block_size = 16});
            a[bad] = question_of_all(st[bad]);
            choose_anew(4, 500, 0, 0);
            for (int t = 0; t < 4; t++)
                for (int j = 0; j < 500; j++) chosen.entries[t][0][j] = j + (j >= 301);
            CHECK(attend(&a[bad], 2, 0) == KVC_OK);
        }
        for (int t = 0; t < 4; t++) CHECK(same_bits(&a[0], t, &a[1], t));
        for (int bad = 0; bad < 2; bad++) {
            question_free(&a[bad]);
            stage_free(st[bad]);
        }
    }
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* A plan is made before any choice, and serves many choices.  A call without a choice, or with a wider choice, needs
 * another plan. */
static void test_plans(void) {
    scene s = plain_scene(2, 2, 64, 300, 2);
    stage *st = stage_new(&s, &(setting){.block_size = 16});
    question a = question_of_all(st);
    kvc_plan *plan = NULL, *dense = NULL;
    choose_anew(2, 5, 0, 0);
    kvc_chosen given = choice_for(&a);
    a.plan.max_chosen = 5;
    CHECK(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, 0), KVC_ERR_INVALID, "chosen is NULL", "max_chosen is 5");
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen is NULL", "max_chosen is 5");
    a.args.chosen = &given;
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < 2; t++) chosen.entries[t][0][0] = i * 50;
        for (int64_t task = 0; task < kvc_plan_num_tasks(plan); task++)
            CHECK(kvc_plan_run(plan, 0, &a.args, task) == KVC_OK);
        check_chosen_answers(&a);
    }
    given.width = 6;
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, 0), KVC_ERR_INVALID, "up to 6 rows", "max_chosen of the plan is 5");
    given.width = 2;
    given.block = 2;
    given.tail = 1;
    CHECK(kvc_plan_run(plan, 0, &a.args, 0) == KVC_OK);
    a.plan.max_chosen = 0;
    CHECK(kvc_plan_new(st->batch, &a.plan, &dense) == KVC_OK && dense != plan);
    CHECK_FAILS(kvc_plan_run(dense, 0, &a.args, 0), KVC_ERR_INVALID, "up to 5 rows", "max_chosen of the plan is 0");
    kvc_plan_free(plan);
    kvc_plan_free(dense);
    question_free(&a);
    stage_free(st);
}

/* A plan has room for lists that are shorter than what they name. */
static void test_plans_of_blocks(void) {
    scene s = plain_scene(2, 2, 64, 300, 2);
    stage *st = stage_new(&s, &(setting){.block_size = 16});
    question a = question_of_all(st);
    kvc_plan *plan = NULL;
    choose_anew(2, 5, 100, 1);
    kvc_chosen given = choice_for(&a);
    a.plan.max_chosen = 599;
    a.plan.chosen_width = 4;
    a.args.chosen = &given;
    CHECK(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, 0), KVC_ERR_INVALID, "chosen->width is 5", "chosen_width of the plan");
    kvc_plan_free(plan);
    a.plan.chosen_width = 5;
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < 5; i++) chosen.entries[t][0][i] = 4 - i; /* which do not ascend */
    CHECK(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
    for (int64_t task = 0; task < kvc_plan_num_tasks(plan); task++)
        CHECK(kvc_plan_run(plan, 0, &a.args, task) == KVC_OK);
    check_chosen_answers(&a);
    kvc_plan_free(plan);
    a.plan.chosen_width = 600;
    CHECK_FAILS(kvc_plan_new(st->batch, &a.plan, &plan), KVC_ERR_INVALID, "chosen_width is 600", "max_chosen, 599");
    a.plan.chosen_width = -1;
    CHECK_FAILS(kvc_plan_new(st->batch, &a.plan, &plan), KVC_ERR_INVALID, "chosen_width is -1", "max_chosen, 599");
    question_free(&a);
    stage_free(st);
}

/* Returns a cache of `num` rows, and in every second case without every second one. */
static kvc_cache *cache_of_rows(const kvc_allocator *allocator, int32_t num_kv_heads, int32_t num, int has_gaps) {
    static float rows[32 * 8 + (1 << 15)];
    static int32_t even[1 << 15];
    kvc_layer layer = {.num_kv_heads = num_kv_heads, .k_dim = 32, .v_dim = 32};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.allocator = allocator});
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, num, NULL, NULL, NULL, &batch) == KVC_OK);
    kvc_put_args put = float_rows(0, num, num_kv_heads, 32, 32, rows, rows);
    put.k_token_stride = put.v_token_stride = sizeof *rows;
    CHECKF(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    for (int32_t i = 0; has_gaps && i < num / 2; i++) even[i] = 2 * i;
    if (has_gaps) CHECK(kvc_keep_positions(cache, 0, even, num / 2) == KVC_OK);
    CHECK(kvc_compact(cache) == KVC_OK);
    return cache;
}

/* Returns how many entries and segments the tasks of a token look at to find its rows: all of them, as positions or as
 * one block. */
static int64_t work_of_lists(int32_t num_rows, int32_t num_kv_heads, int32_t num_threads, int has_gaps) {
    static int32_t all[1 << 15];
    static kvc_segment listed[KVC_SPLIT_ROWS];
    kvc_cache *cache = cache_of_rows(NULL, num_kv_heads, num_rows, has_gaps);
    const kvc_attend_args none = {.struct_size = sizeof none};
    kvc_call call = {.args = &none, .policy = &cache->policies[0]};
    kvc_batch *batch = NULL;
    int64_t found = 0;
    for (int32_t i = 0; i < num_rows; i++) all[i] = i;
    call.chosen = (kvc_chosen){
        .positions = all, .num_choices = 1, .width = has_gaps ? 1 : num_rows, .block = has_gaps ? num_rows : 1};
    const kvc_plan_args args = {.struct_size = sizeof args,
                                .num_heads = num_kv_heads,
                                .num_threads = num_threads,
                                .max_chosen = num_rows,
                                .chosen_width = call.chosen.width};
    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    CHECKF(kvc_plan_new(batch, &args, &call.plan) == KVC_OK, "%s", kvc_last_error());
    num_looked_at = 0;
    for (int64_t i = 0; i < call.plan->jobs.num_tasks; i++) {
        kvc_task t = {.call = &call, .slice = call.plan->slices, .tokens = batch->order, .workspace = NULL};
        t.job = kvc_job_of(call.plan, i, &t.part);
        kvc_row_lister list = own_list_chosen(&t, t.job->split * KVC_SPLIT_ROWS);
        for (int32_t p = 0; p < t.job->num_splits; p++) found += own_list_next(&list, listed, KVC_SPLIT_ROWS);
    }
    /* The own row takes the place of a dropped one behind the last kept row. */
    CHECK(found == num_kv_heads * (has_gaps ? num_rows / 2 + 1 : num_rows));
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return num_looked_at;
}

/* The work of finding chosen rows grows as the list does, not as its square. */
static void test_work_is_linear(void) {
    static const int32_t heads[] = {1, 1, 8, 8}, threads[] = {1, 3, 1, 3};
    for (int i = 0; i < 8; i++) {
        const int64_t few = work_of_lists(1 << 14, heads[i / 2], threads[i / 2], i % 2);
        const int64_t many = work_of_lists(1 << 15, heads[i / 2], threads[i / 2], i % 2);
        CHECKF(many <= 3 * few, "%d: %lld, and %lld for 2 times the rows", i, (long long)few, (long long)many);
        if (threads[i / 2] == 1)
            CHECKF(many < 4LL * heads[i / 2] * (1 << 15), "%d: %lld for each row once", i, (long long)many);
    }
}

/* Returns the bytes of a batch and of its plan for chosen rows, with parents or without. */
static size_t bytes_of_plan(kvc_cache *cache, const memory *heap, int32_t num_stored, int is_tree, int32_t num_chosen) {
    const int32_t positions[] = {num_stored, num_stored + 1, num_stored + 1}, parents[] = {-1, 0, 0};
    const kvc_plan_args args = {
        .struct_size = sizeof args, .num_heads = 1, .num_threads = 1, .max_chosen = num_chosen, .chosen_width = 8};
    kvc_batch *batch = NULL;
    kvc_plan *plan = NULL;
    size_t bytes = 0;
    CHECKF(kvc_begin(cache, 3, is_tree ? positions : NULL, NULL, is_tree ? parents : NULL, &batch) == KVC_OK, "%s",
           kvc_last_error());
    CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < heap->num; i++)
        if (heap->live[i].hint.kind == KVC_MEMORY_SCRATCH) bytes += heap->live[i].size;
    kvc_abort(batch);
    CHECK(kvc_compact(cache) == KVC_OK);
    return bytes;
}

/* A tree behind many rows is put in order by itself: no row before it takes memory. */
static void test_tree_behind_rows(void) {
    enum { NUM = 20000 };
    static memory heap;
    memory_init(&heap);
    kvc_cache *cache = cache_of_rows(&heap.allocator, 1, NUM, 0);
    const size_t line = bytes_of_plan(cache, &heap, NUM, 0, 8), tree = bytes_of_plan(cache, &heap, NUM, 1, 8);
    CHECKF(tree < line + NUM, "%zu bytes, and %zu without parents", tree, line);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Blocks take memory for the rows that there are, not for their positions. */
static void test_large_blocks(void) {
    enum { NUM = 5000 };
    static memory heap;
    memory_init(&heap);
    kvc_cache *cache = cache_of_rows(&heap.allocator, 1, NUM, 0);
    const size_t all = bytes_of_plan(cache, &heap, NUM, 0, NUM + 3);
    const size_t huge = bytes_of_plan(cache, &heap, NUM, 0, INT32_MAX);
    CHECKF(huge == all, "%zu bytes, and %zu for all positions", huge, all);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* ---- failure ----------------------------------------------------------------------------------------------------- */

static void test_bad_choices(void) {
    scene s = plain_scene(2, 2, 64, 30, 2);
    stage *st = stage_new(&s, &(setting){.block_size = 16});
    question a = question_of_all(st);
    choose_anew(2, 5, 0, 0);
    const kvc_chosen good = choice_for(&a);
    kvc_chosen bad = good;
    a.args.chosen = &bad;
    bad.positions = NULL;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->positions", "NULL");
    bad = good, bad.width = 0;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->width", "is 0");
    bad = good, bad.block = -1;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->block", "is -1");
    bad = good, bad.num_choices = 3;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->num_choices", "is 3");
    bad = good, bad.token_stride = 6;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->positions: token_stride", "is 6 bytes:");
    bad = good, bad.struct_size = 8;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen", "given as 8");
    bad = good;
    a.plan.max_chosen = 4;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "up to 5 rows", "is 4");
    a.plan.max_chosen = -1;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "max_chosen", "is -1");
    a.plan.max_chosen = 0;
    a.args.tokens_per_sequence = 2;
    bad.batch_stride = 3;
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "chosen->positions: batch_stride", "is 3 bytes:");
    bad.batch_stride = 0;
    CHECKF(ask(&a) == KVC_OK, "%s", kvc_last_error());
    question_free(&a);
    stage_free(st);
}

int main(void) {
    test_not_read();
    test_plans();
    test_plans_of_blocks();
    test_work_is_linear();
    test_tree_behind_rows();
    test_large_blocks();
    test_bad_choices();
    for_some_isas(test_random);
    return test_result();
}
