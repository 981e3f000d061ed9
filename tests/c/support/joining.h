/* joining.h: attention to a part of the rows, joined with attention to the others in one softmax
 * (kvc_attend_args.prior_out), against plain arithmetic over all (answers.h). */
#ifndef KVC_TEST_JOINING_H
#define KVC_TEST_JOINING_H

#include "support/answers.h"

enum { MOST_MASKED = 64 };

/* Adds masks to the scene's: each member hides its rows before its cut (is_late), or from its cut on. */
static inline void mask_parts(question *a, kvc_masked *masked, const int32_t *cuts, int is_late) {
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
static inline void ask_by_tasks(const question *a) {
    kvc_plan *plan;
    CHECK(kvc_plan_new(a->stage->batch, &a->plan, &plan) == KVC_OK);
    for (int64_t i = kvc_plan_num_tasks(plan); i-- > 0;)
        CHECKF(kvc_plan_run(plan, a->layer, &a->args, i) == KVC_OK, "%s", kvc_last_error());
    kvc_plan_free(plan);
}

/* Attends to a part of the rows, and joins the result with attention to the others. */
static inline void check_joined(const scene *s, const setting *how) {
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

#endif
