/* same.h: scenes (scene.h) whose results have the same bits, however they are stored and computed, and whatever rows
 * hold that are not seen. */
#ifndef KVC_TEST_SAME_H
#define KVC_TEST_SAME_H

#include "support/answers.h"
#include "support/crew.h"

/* A row of infinities or NaN reaches the tokens that see it, and leaves the others' results as they are. */
static inline void check_unseen(const scene *clean, int bad) {
    static const float numbers[] = {NAN, INFINITY, -INFINITY};
    static scene spoilt;
    spoilt = *clean;
    spoilt.num_bad = 1;
    spoilt.bad = bad;
    spoilt.number = numbers[bad % 3];
    stage *one = stage_new(clean, &(setting){.block_size = 48}),
          *two = stage_new(&spoilt, &(setting){.block_size = 48});
    question a = question_of_all(one), b = question_of_all(two);
    const int num_stored = clean->members[0].num_stored;
    int token = -1;
    CHECKF(ask(&a) == KVC_OK && ask(&b) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < a.n && bad >= num_stored; t++)
        token = one->tokens.ids[t] == 0 && one->tokens.rows[t] == bad ? t : token;
    for (int t = 0; t < a.n; t++) {
        const int has_it = one->tokens.ids[t] == 0 || (clean->is_forked && token < 0);
        const int reaches = has_it && sees(one, t, position_of(clean, 0, bad), token);
        CHECKF(same_bits(&a, t, &b, t) == !reaches, "%s, type %d, policy %d, %d + %d tokens: token %d, the row at %d",
               kvc_isa(), clean->layer.k_type, clean->layer.policy.kind, num_stored, a.n, t, bad);
    }
    question_free(&a);
    question_free(&b);
    stage_free(one);
    stage_free(two);
}

/* The scene stored and computed in every way, alone and in company, gives its first member the same bits.  The other
 * members have rows of their own, or share rows with the first. */
static inline void check_same_bits(const scene *alone) {
    static const setting settings[] = {
        {.block_size = 64, .num_threads = 2},
        {.block_size = 64, .num_threads = 3},
        {.block_size = 64, .num_threads = 8},
        {.block_size = 1, .num_threads = 2},
        {.block_size = 3, .num_threads = 1, .pass = 7},
        {.block_size = 16, .num_threads = 2, .pass = 19},
        {.block_size = 4096, .num_threads = 8},
        {.block_size = 16, .num_threads = 2, .scattered = 1},
        {.block_size = 16, .num_threads = 2, .scattered = 1, .compacted = 1},
        {.block_size = 64, .num_threads = 3, .pass = 33, .scattered = 1},
    };
    static scene together, forked;
    together = forked = *alone;
    together.num_members = forked.num_members = 3;
    together.members[1] = member_of_length(30, 9);
    together.members[2] = member_of_length(610, 1);
    forked.is_forked = 1;
    forked.members[1] = forked.members[2] = forked.members[0];
    stage *one = stage_new(alone, &(setting){.block_size = 64, .num_threads = 1});
    question right = question_of_all(one);
    CHECKF(ask(&right) == KVC_OK, "%s", kvc_last_error());
    for (size_t i = 0; i < 2 * sizeof settings / sizeof *settings; i++) {
        stage *st = stage_new(i % 2 == 0 ? alone : i / 2 % 2 ? &forked : &together, &settings[i / 2]);
        question got = question_of_all(st);
        CHECKF(ask(&got) == KVC_OK, "%s", kvc_last_error());
        for (int t = 0, u = 0; t < got.n; t++)
            if (st->tokens.ids[t] == 0)
                CHECKF(same_bits(&got, t, &right, u++), "%s: setting %zu, %s, types %d and %d, token %d", kvc_isa(),
                       i / 2, i % 2 ? "in company" : "alone", alone->layer.k_type, alone->layer.v_type, t);
        question_free(&got);
        stage_free(st);
    }
    question_free(&right);
    stage_free(one);
}

static inline void check_all_same(const question *a, const question *b, const char *what, int n) {
    for (int t = 0; t < a->n; t++) CHECKF(same_bits(a, t, b, t), "%s: token %d, %s %d", kvc_isa(), t, what, n);
}

/* Runs all tasks of a plan, in any order, on so many threads. */
static inline void run_plan(kvc_plan *plan, const question *a, int num_threads) {
    int64_t *order = shuffled(kvc_plan_num_tasks(plan));
    crew_run(plan, a->layer, &a->args, order, num_threads);
    free(order);
}

/* A plan is run again and again: for two layers, by one thread or more, also by more threads than it was told of. */
static inline void check_tasks(scene s) {
    s.num_layers = 2;
    stage *st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
    kvc_plan *plan = NULL;
    for (int i = 0; i < 8; i++) {
        question a = question_new(st, i % 2, 0, st->tokens.n), right = question_new(st, i % 2, 0, st->tokens.n);
        a.plan.num_threads = 3;
        CHECK(ask(&right) == KVC_OK);
        if (!plan) CHECKF(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK, "%s", kvc_last_error());
        run_plan(plan, &a, i < 2 ? 1 : i);
        check_all_same(&a, &right, "threads", i);
        question_free(&a);
        question_free(&right);
    }
    kvc_plan_free(plan);
    stage_free(st);
}

#endif
