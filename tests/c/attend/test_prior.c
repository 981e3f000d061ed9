/* One softmax over the rows of two calls (kvc_attend_args.prior_out): attention to a part of the rows, joined with
 * attention to the others, against plain arithmetic over all. */
#include "support/answers.h"
#include "support/isas.h"

enum { MOST_MASKED = 64 };

/* Masks rows of every member, beside those that the scene masks: before a position of its own, or from there on. */
static void mask_parts(question *a, kvc_masked *masked, const int32_t *cuts, int is_late) {
    const scene *s = a->stage->scene;
    int n = 0;
    for (; n < s->num_masked; n++) masked[n] = s->masked[n];
    for (int m = 0; m < s->num_members; m++, n++) {
        CHECK(n < MOST_MASKED);
        masked[n] = is_late ? (kvc_masked){m, 0, cuts[m]} : (kvc_masked){m, cuts[m], KVC_END};
    }
    a->plan.masked = masked;
    a->plan.masked_size = sizeof *masked;
    a->plan.num_masked = n;
}

/* Runs all tasks of the question's plan, each by itself and the last ones first. */
static void ask_by_tasks(const question *a) {
    kvc_plan *plan;
    CHECK(kvc_plan_new(a->stage->batch, &a->plan, &plan) == KVC_OK);
    for (int64_t i = kvc_plan_num_tasks(plan); i-- > 0;)
        CHECKF(kvc_plan_run(plan, a->layer, &a->args, i) == KVC_OK, "%s", kvc_last_error());
    kvc_plan_free(plan);
}

static void check_joined(const scene *s, const setting *how) {
    stage *st = stage_new(s, how);
    int32_t cuts[MAX_MEMBERS];
    kvc_masked early[MOST_MASKED], late[MOST_MASKED];
    for (int m = 0; m < s->num_members; m++) cuts[m] = random_int(1, 2 + s->members[m].num_stored);
    question first = question_of_all(st), second = question_of_all(st), again = question_of_all(st);
    mask_parts(&first, early, cuts, 0);
    mask_parts(&second, late, cuts, 1);
    mask_parts(&again, late, cuts, 1);
    CHECKF(ask(&first) == KVC_OK, "%s", kvc_last_error());
    second.args.prior_out = again.args.prior_out = first.out;
    second.args.prior_lse = again.args.prior_lse = first.lse;
    second.args.sinks = again.args.sinks = NULL;
    CHECKF(ask(&second) == KVC_OK, "%s", kvc_last_error());
    joined_with = &first;
    check_answers(&second);
    joined_with = NULL;
    ask_by_tasks(&again);
    for (int t = 0; t < second.n; t++) CHECK(same_bits(&again, t, &second, t));

    again.args.out = first.out; /* in place */
    again.args.lse = first.lse;
    CHECKF(ask(&again) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < second.n; t++) CHECK(same_bits(&first, t, &second, t));
    question_free(&first);
    question_free(&second);
    question_free(&again);
    stage_free(st);
}

static void test_random(void) {
    leniency = 3;
    for (int i = 0; i < (is_full() ? 300 : 60); i++) {
        static scene s;
        s = random_scene(i);
        const setting how = random_setting();
        check_joined(&s, &how);
    }
    leniency = 1;
}

/* Attention that saw nothing counts for nothing, whatever its result holds. */
static void test_empty_prior(void) {
    const setting usual = {.block_size = 16, .num_threads = 1};
    scene s = plain_scene(2, 4, 8, 100, 5);
    stage *st = stage_new(&s, &usual);
    question a = question_of_all(st), b = question_of_all(st), prior = question_of_all(st);
    CHECK(ask(&a) == KVC_OK);
    for (int i = 0; i < prior.n * s.num_heads; i++) prior.lse[i] = -INFINITY;
    memset(prior.out, 0xff, (size_t)(prior.n * prior.args.out_token_stride)); /* NaN */
    b.args.prior_out = prior.out;
    b.args.prior_lse = prior.lse;
    CHECK(ask(&b) == KVC_OK);
    for (int t = 0; t < a.n; t++) CHECK(same_bits(&a, t, &b, t));

    const kvc_masked all = {0, 0, KVC_END}; /* and a call that sees nothing keeps what was before */
    b.plan.masked = &all;
    b.plan.masked_size = sizeof all;
    b.plan.num_masked = 1;
    b.args.prior_out = a.out;
    b.args.prior_lse = a.lse;
    CHECK(ask(&b) == KVC_OK);
    for (int t = 0; t < a.n; t++) CHECK(same_bits(&a, t, &b, t));

    wipe(&b);
    b.args.prior_lse = NULL;
    CHECK_FAILS(ask(&b), KVC_ERR_INVALID, "prior_lse", "NULL");
    b.args.prior_out = NULL;
    b.args.prior_lse = a.lse;
    CHECK_FAILS(ask(&b), KVC_ERR_INVALID, "prior_out", "NULL");
    for (int i = 0; i < b.n * b.args.out_token_stride; i++) CHECK(b.out[i] == 0x7f); /* nothing was written */
    question_free(&a);
    question_free(&b);
    question_free(&prior);
    stage_free(st);
}

static void test_isa(void) {
    test_random();
    test_empty_prior();
}

int main(void) {
    for_some_isas(test_isa);
    return test_result();
}
