/* A call attends to a part of the rows, and joins the result of another call for the other rows (prior_out in
 * kvc_attend_args).  The test compares it with plain arithmetic over all rows. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "support/isas.h"
#include "support/joining.h"

static void test_random(void) {
    leniency = 3;
    for (int i = 0; i < (is_full() ? 300 : 30); i++) {
        static scene s;
        s = random_scene(i);
        if (i % 4 == 0) add_stride(&s);
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

/* Makes a question write floats, whatever its queries are. */
static void write_floats(question *a, float *out) {
    const int64_t row = a->stage->scene->layer.v_dim * (int64_t)sizeof *out;
    a->args.out = out;
    a->args.out_is_f32 = 1;
    a->args.out_head_stride = row;
    a->args.out_token_stride = a->stage->scene->num_heads * row;
}

/* Queries of 16 bits may have results of f32.  Rounded, they are the results of 16 bits.  Results that are joined as
 * floats lose nothing. */
static void test_floats(void) {
    enum { TOKENS = 3, HEADS = 8, DIM = 64, SIZE = TOKENS * HEADS * DIM };
    static float all[SIZE], part[SIZE], joined[SIZE];
    static uint16_t rounded[SIZE];
    for (int type = KVC_F16; type <= KVC_BF16; type++) {
        scene s = plain_scene(2, 4, DIM, 600, TOKENS);
        s.q_type = type;
        stage *st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
        question a = question_of_all(st), b = question_of_all(st), whole = question_of_all(st);
        const kvc_masked late = {0, 300, KVC_END}, early = {0, 0, 300};
        CHECKF(ask(&whole) == KVC_OK, "%s", kvc_last_error());
        write_floats(&whole, all);
        CHECKF(ask(&whole) == KVC_OK, "%s", kvc_last_error());
        kvc_kernels_scalar.convert(KVC_F32, type, rounded, 0, all, 0, 1, SIZE);
        CHECK(!memcmp(rounded, whole.out, sizeof rounded));
        a.plan.masked = &late, b.plan.masked = &early;
        a.plan.num_masked = b.plan.num_masked = 1;
        a.plan.masked_size = b.plan.masked_size = sizeof late;
        write_floats(&a, part);
        write_floats(&b, joined);
        b.args.prior_out = part;
        b.args.prior_lse = a.lse;
        CHECKF(ask(&a) == KVC_OK && ask(&b) == KVC_OK, "%s", kvc_last_error());
        for (int i = 0; i < SIZE; i++) CHECKF(fabsf(joined[i] - all[i]) < 1e-6f, "%g", (double)(joined[i] - all[i]));
        b.args.out_token_stride = 2;
        CHECK_FAILS(ask(&b), KVC_ERR_INVALID, "out", "2");
        question_free(&a);
        question_free(&b);
        question_free(&whole);
        stage_free(st);
    }
}

static void test_isa(void) {
    test_random();
    test_floats();
    test_empty_prior();
}

int main(void) {
    for_some_isas(test_isa);
    return test_result();
}
