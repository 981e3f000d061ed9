/* Attention against plain arithmetic in double, and the same bits however a sequence is stored and worked on. */
#define _POSIX_C_SOURCE 200809L /* setenv, fork */
#include <float.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/crew.h"
#include "support/isas.h"
#include "support/scene.h"

static const setting usual = {.block_size = 16, .num_threads = 1};

/* One sequence, in f32. */
static scene plain_scene(int num_kv_heads, int group, int dim, int num_stored, int num_new)
{
    return (scene){.layer = {.num_kv_heads = num_kv_heads, .k_dim = dim, .v_dim = dim},
                   .num_heads = num_kv_heads * group,
                   .num_members = 1,
                   .members = {member_of_length(num_stored, num_new)}};
}

/* ---- the plain softmax ------------------------------------------------------------------------------------------- */

static int is_visible(const kvc_policy *policy, int32_t query, int32_t position)
{
    if (position > query)
        return 0;
    if (policy->kind == KVC_CHUNKED)
        return position / policy->attention_chunk_size == query / policy->attention_chunk_size;
    return policy->kind != KVC_SLIDING || position > query - policy->window || position < policy->num_sink_tokens;
}

/* What one query row should give, and how far off a sum in f32 may be. */
typedef struct answer {
    double out[MAX_DIM], lse;
    double out_error[MAX_DIM], lse_error;
} answer;

/* The rows of one member in one layer. */
typedef struct rows {
    const scene *scene;
    const member *member;
    int n;
    float k[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM], v[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM];
} rows;

static const rows *rows_of(const scene *s, int layer, int m)
{
    static rows r;
    r.scene = s;
    r.member = &s->members[m];
    r.n = r.member->num_stored + r.member->num_new;
    for (int j = 0; j < r.n; j++) {
        for (int h = 0; h < s->layer.num_kv_heads; h++) {
            for (int d = 0; d < s->layer.k_dim; d++)
                r.k[j][h][d] = key_element(s, layer, m, j, h, d);
            for (int d = 0; d < s->layer.v_dim; d++)
                r.v[j][h][d] = value_element(s, layer, m, j, h, d);
        }
    }
    return &r;
}

/* A score of row `row`, query head h, and a bound of its error. */
static double score_of(const rows *r, int row, const float *q, int h, int j, double *error)
{
    const scene *s = r->scene;
    const float *k = r->k[j][h * s->layer.num_kv_heads / s->num_heads];
    double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt(s->layer.k_dim), score = 0, size = 0;
    for (int d = 0; d < s->layer.k_dim; d++) {
        double term = (double)q[d] * k[d] * scale;
        score += term;
        size += fabs(term);
    }
    size *= s->layer.k_dim + 4;
    if (s->softcap > 0) {
        score = s->softcap * tanh(score / s->softcap);
        size += 4 * (double)s->softcap;
    }
    if (s->alibi) {
        double bias = (double)s->alibi[h] * -abs(r->member->positions[j] - r->member->positions[row]);
        score += bias;
        size += 3 * fabs(bias);
    }
    *error = size * FLT_EPSILON / 2;
    return score;
}

/* Relative error of rounding to the type of q. */
static double rounding_of(int type)
{
    return type == KVC_F32 ? FLT_EPSILON / 2 : type == KVC_F16 ? 0x1p-11 : 0x1p-8;
}

/* The answer to query head h of row `row`. */
static answer answer_to(const rows *r, int row, const float *q, int h)
{
    static double scores[MAX_POSITIONS];
    const scene *s = r->scene;
    const int32_t *positions = r->member->positions;
    double top = s->sinks ? (double)s->sinks[h] : -INFINITY, low = INFINITY, worst = 0, sum = 0;
    double sizes[MAX_DIM] = {0};
    answer a = {.lse = -INFINITY};
    for (int j = 0; j < r->n; j++) {
        double error = 0;
        scores[j] = -INFINITY;
        if (is_visible(&s->layer.policy, positions[row], positions[j]))
            scores[j] = score_of(r, row, q, h, j, &error);
        if (scores[j] == -INFINITY)
            continue;
        top = fmax(top, scores[j]);
        low = fmin(low, scores[j]);
        worst = fmax(worst, error);
    }
    if (top == -INFINITY)
        return a;
    sum = s->sinks ? exp(s->sinks[h] - top) : 0;
    for (int j = 0; j < r->n; j++) {
        const float *v = r->v[j][h * s->layer.num_kv_heads / s->num_heads];
        double weight = exp(scores[j] - top);
        sum += weight;
        for (int d = 0; d < s->layer.v_dim && weight > 0; d++) {
            a.out[d] += weight * v[d];
            sizes[d] += weight * fabsf(v[d]);
        }
    }
    /* Off are the scores, exp (2 ulp, and what its argument is rounded by), and the sums. */
    double relative = 2 * worst + (r->n + 16 + (low < top ? fmin(top - low, 100) : 0)) * FLT_EPSILON;
    for (int d = 0; d < s->layer.v_dim; d++) {
        a.out[d] /= sum;
        a.out_error[d] = 2 * relative * sizes[d] / sum + rounding_of(s->q_type) * fabs(a.out[d]) + 0x1p-24;
    }
    a.lse = top + log(sum);
    a.lse_error = relative + 4 * FLT_EPSILON * (1 + fabs(a.lse));
    return a;
}

/* What came out for token t of the question, head h. */
static void check_answer(const stage *st, const question *a, const rows *r, int t, int h)
{
    const scene *s = st->scene;
    float q[MAX_DIM], out[MAX_DIM];
    int m = st->member_of[a->first + t], row = st->row_of[a->first + t];
    for (int d = 0; d < s->layer.k_dim; d++)
        q[d] = query_element(s, a->layer, m, row, h, d);
    answer right = answer_to(r, row, q, h);
    read_out(st, a, t, h, out);
    for (int d = 0; d < s->layer.v_dim; d++)
        CHECKF(fabs(out[d] - right.out[d]) <= right.out_error[d],
               "%s: %d rows, token %d, head %d, out[%d] is %g, not %g, off by %g of %g", kvc_isa(), r->n, t, h, d,
               (double)out[d], right.out[d], fabs(out[d] - right.out[d]), right.out_error[d]);
    float lse = a->lse[t * s->num_heads + h];
    CHECKF(lse == right.lse || fabs(lse - right.lse) <= right.lse_error,
           "%s: %d rows, token %d, head %d, lse is %g, not %g", kvc_isa(), r->n, t, h, (double)lse, right.lse);
}

static void check_answers(const stage *st, const question *a)
{
    for (int m = 0; m < st->scene->num_members; m++) {
        const rows *r = rows_of(st->scene, a->layer, m);
        for (int t = 0; t < a->n; t++)
            for (int h = 0; h < st->scene->num_heads && st->member_of[a->first + t] == m; h++)
                check_answer(st, a, r, t, h);
    }
}

/* Tokens [first, first + n) of the batch. */
static void check_range(const stage *st, int first, int n)
{
    question a = question_new(st, 0, first, n);
    CHECKF(kvc_attend(st->batch, &a.plan, &a.args) == KVC_OK, "%s", kvc_last_error());
    check_answers(st, &a);
    question_free(&a);
}

static void check_scene(const scene *s, const setting *how)
{
    stage st = stage_new(s, how);
    check_range(&st, 0, st.num_tokens);
    stage_free(&st);
}

/* ---- against the plain softmax ----------------------------------------------------------------------------------- */

static void test_types(void)
{
    for (int types = 0; types < 27; types++) {
        scene s = plain_scene(2, 2, 40, 37, types % 2 ? 1 : 7);
        s.layer.v_dim = 24;
        s.layer.k_type = types % 3;
        s.layer.v_type = types / 3 % 3;
        s.q_type = types / 9;
        check_scene(&s, &usual);
    }
}

static void test_heads(void)
{
    static const int groups[] = {1, 2, 3, 4, 7, 8, 16};
    for (int i = 0; i < 7; i++) {
        for (int num_kv_heads = 1; num_kv_heads <= 2; num_kv_heads++) {
            for (int num_new = 1; num_new <= 30; num_new = num_new * 3 + 2) { /* 1, 5, 17 */
                scene s = plain_scene(num_kv_heads, groups[i], 8, 20, num_new);
                check_scene(&s, &usual);
            }
        }
    }
}

static void test_dims(void)
{
    static const int dims[] = {1, 8, 40, 64, 128};
    for (int i = 0; i < 25; i++) {
        scene s = plain_scene(1, 2, dims[i % 5], 70, i % 2 ? 1 : 9);
        s.layer.v_dim = dims[i / 5];
        s.layer.k_type = i % 3;
        s.layer.v_type = i % 2;
        check_scene(&s, &usual);
    }
}

static void test_num_tokens(void)
{
    for (int n = 1; n <= 70; n++) {
        scene s = plain_scene(1, 3, 8, n % 3 * 13, n);
        check_scene(&s, &usual);
    }
}

/* Lengths around the edges of tiles (64 rows) and parts (512). */
static void test_lengths(void)
{
    static const int edges[] = {1, 64, 128, 512, 1024, 1536};
    for (int i = 0; i < 6; i++) {
        for (int length = edges[i] - 1; length <= edges[i] + 1; length++) {
            for (int num_new = 1; num_new <= 18; num_new += 17) {
                if (length < num_new)
                    continue;
                scene s = plain_scene(1, 1, 8, length - num_new, num_new);
                s.layer.k_type = s.layer.v_type = KVC_F16;
                check_scene(&s, &usual);
            }
        }
    }
}

static void test_windows(void)
{
    static const int windows[] = {1, 2, 7, 64, 65, 200}, num_sinks[] = {0, 1, 4, 70};
    for (int i = 0; i < 24; i++) {
        int num_sink_tokens = num_sinks[i / 6];
        scene s = plain_scene(1, 2, 8, 300, i % 2 ? 1 : 33);
        s.layer.policy = (kvc_policy){.kind = KVC_SLIDING,
                                      .window = windows[i % 6],
                                      .num_sink_tokens = num_sink_tokens,
                                      .resume_window = i % 3 ? 0 : 210};
        check_scene(&s, &(setting){.block_size = 16, .num_threads = 1, .pass = i % 4 ? 11 : 0});
    }
}

static void test_chunks(void)
{
    static const int sizes[] = {1, 7, 64, 100, 290, 1000};
    for (int i = 0; i < 12; i++) {
        scene s = plain_scene(1, 2, 8, 300, i / 6 ? 1 : 33);
        s.layer.policy = (kvc_policy){
            .kind = KVC_CHUNKED, .attention_chunk_size = sizes[i % 6], .resume_window = i % 2 * 100};
        check_scene(&s, &(setting){.block_size = 16, .num_threads = 1, .pass = i % 4 ? 11 : 0});
    }
}

/* With gaps, repeated and falling positions, a query sees every row at or below its own position. */
static void test_positions(void)
{
    for (int windowed = 0; windowed < 2; windowed++) {
        scene s = plain_scene(2, 2, 8, 150, 20);
        if (windowed)
            s.layer.policy =
                (kvc_policy){.kind = KVC_SLIDING, .window = 90, .num_sink_tokens = 3, .resume_window = 200};
        for (int i = 0; i < 170; i++)
            s.members[0].positions[i] += (i < 150 ? random_int(-5, 6) : random_int(-20, 20)) + 20 * (i > 70);
        for (int i = 0; i < 5; i++)
            s.members[0].positions[i] = 4 - i;
        check_scene(&s, &(setting){.block_size = 7, .num_threads = 1, .pass = 30});
    }
}

static void test_several_sequences(void)
{
    for (int i = 0; i < 4; i++) {
        scene s = plain_scene(2, 3, 8, 0, 3);
        s.num_members = 4;
        s.members[1] = member_of_length(600, 1);
        s.members[2] = member_of_length(63, 2 + 10 * i);
        s.members[3] = member_of_length(100, 1 + i);
        if (i % 2)
            s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 30, .num_sink_tokens = 2};
        check_scene(&s, &(setting){.block_size = 1 + 5 * i, .num_threads = 1});
    }
}

static void test_ranges(void)
{
    scene s = plain_scene(1, 2, 8, 40, 12);
    s.num_members = 2;
    s.members[1] = member_of_length(10, 12);
    stage st = stage_new(&s, &usual);
    for (int first = 0; first < 24; first += 5)
        for (int n = 1; first + n <= 24; n += 3)
            check_range(&st, first, n);
    stage_free(&st);
}

static void test_options(void)
{
    static const float sinks[] = {0.5f, -3, 20, -INFINITY, 0, 1}, alibi[] = {0.5f, 0.01f, -0.1f, 0, 2, 1};
    static const float scales[] = {0, 1, -0.3f, 40}, softcaps[] = {0, 30, 0.5f};
    for (int i = 0; i < 48; i++) {
        scene s = plain_scene(2, 3, 16, 90, i % 5 ? 1 + i % 5 : 40);
        s.sinks = i & 1 ? sinks : NULL;
        s.alibi = i & 2 ? alibi : NULL;
        s.scale = scales[i / 4 % 4];
        s.softcap = softcaps[i / 16];
        if (i % 7 == 0)
            s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 33, .num_sink_tokens = 2};
        check_scene(&s, &usual);
    }
}

/* Scores so far apart that the largest has all the weight. */
static void test_huge_scores(void)
{
    for (int num_new = 1; num_new < 30; num_new += 25) {
        scene s = plain_scene(1, 2, 8, 100, num_new);
        s.scale = 1e30f;
        stage st = stage_new(&s, &usual);
        question a = question_new(&st, 0, 0, num_new);
        const rows *r = rows_of(&s, 0, 0);
        CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK);
        for (int i = 0; i < 2 * num_new; i++) {
            float q[MAX_DIM], out[MAX_DIM];
            double top = -INFINITY, error;
            int best = 0;
            for (int d = 0; d < 8; d++)
                q[d] = query_element(&s, 0, 0, 100 + i / 2, i % 2, d);
            for (int j = 0; j <= 100 + i / 2; j++) {
                double score = score_of(r, 100 + i / 2, q, i % 2, j, &error);
                best = score > top ? j : best;
                top = fmax(top, score);
            }
            read_out(&st, &a, i / 2, i % 2, out);
            CHECK(!memcmp(out, r->v[best][0], 8 * sizeof *out) && fabs(a.lse[i] - top) <= 1e-6 * top);
        }
        question_free(&a);
        stage_free(&st);
    }
}

/* Heads before tokens, lse not wanted, rows far apart: what lies between stays as it was. */
static void test_strides(void)
{
    enum { TOKENS = 6, HEADS = 4, DIM = 5, GAP = 3 };
    static float q[HEADS * TOKENS * (DIM + GAP)], out[HEADS * TOKENS * (DIM + GAP)];
    scene s = plain_scene(2, 2, DIM, 30, TOKENS);
    stage st = stage_new(&s, &usual);
    question a = question_new(&st, 0, 0, TOKENS);
    CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK);
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            memcpy(&q[(h * TOKENS + t) * (DIM + GAP)], a.q + (t * HEADS + h) * DIM * 4, DIM * 4);
    for (size_t i = 0; i < sizeof out / sizeof *out; i++)
        out[i] = 77;
    kvc_attend_args args = a.args;
    args.q = q;
    args.out = out;
    args.lse = NULL;
    args.q_token_stride = args.out_token_stride = (DIM + GAP) * 4;
    args.q_head_stride = args.out_head_stride = TOKENS * (DIM + GAP) * 4;
    CHECK(kvc_attend(st.batch, &a.plan, &args) == KVC_OK);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HEADS; h++) {
            const float *row = &out[(h * TOKENS + t) * (DIM + GAP)];
            CHECK(!memcmp(row, a.out + (t * HEADS + h) * DIM * 4, DIM * 4));
            CHECK(row[DIM] == 77 && row[DIM + GAP - 1] == 77);
        }
    }
    question_free(&a);
    stage_free(&st);
}

/* Rows that no query sees: all of them, as their scores are -inf; and whole tiles and parts of others, which a window
 * and a gap hide from one query and not from the next. */
static void test_nothing_visible(void)
{
    static const float sinks[] = {1, -INFINITY};
    for (int num_new = 1; num_new < 40; num_new += 19) {
        for (int with_sinks = 0; with_sinks < 2; with_sinks++) {
            scene s = plain_scene(1, 2, 8, 600, num_new);
            s.masked_keys = 1;
            s.sinks = with_sinks ? sinks : NULL;
            check_scene(&s, &usual); /* out 0, lse -inf or the sink */
        }
        scene s = plain_scene(1, 2, 8, 700, num_new);
        s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 300, .resume_window = 2000};
        for (int i = 0; i < 700 + num_new; i++)
            s.members[0].positions[i] += i < 650 ? 0 : (i - 650) * 30;
        check_scene(&s, &(setting){.block_size = 64, .num_threads = 1, .pass = 70});
    }
}

/* ---- rows stored on the way -------------------------------------------------------------------------------------- */

/* An attend that is refused has stored nothing. */
static void check_put_without_a_trace(const stage *st, question *a, const source *src)
{
    kvc_put_args put = src->args;
    const void *q = a->args.q;
    put.v = NULL;
    a->args.put = &put;
    CHECK_FAILS(kvc_attend(st->batch, &a->plan, &a->args), KVC_ERR_INVALID, "v", "NULL");
    put = src->args;
    a->args.q = NULL;
    CHECK_FAILS(kvc_attend(st->batch, &a->plan, &a->args), KVC_ERR_INVALID, "q", "NULL");
    a->args.q = q;
    put.num_tokens = 1;
    CHECK_FAILS(kvc_attend(st->batch, &a->plan, &a->args), KVC_ERR_INVALID, "token 1", "layer 0");
    a->args.put = NULL;
    CHECK_FAILS(kvc_attend(st->batch, &a->plan, &a->args), KVC_ERR_INVALID, "token 0", "layer 0");
}

/* Two ranges of tokens, each stored and attended to in one call. */
static void test_put_in_attend(void)
{
    scene s = plain_scene(2, 2, 8, 0, 6);
    pass p = {.n = 6, .positions = {0, 1, 2, 3, 4, 5}, .rows = {0, 1, 2, 3, 4, 5}};
    stage st = {.scene = &s, .cache = scene_cache(&s, &usual), .num_tokens = 6, .row_of = {0, 1, 2, 3, 4, 5}};
    CHECK(kvc_begin(st.cache, p.n, p.positions, p.ids, NULL, &st.batch) == KVC_OK);
    for (int first = 0; first < 6; first += 3) {
        question a = question_new(&st, 0, first, 3);
        source src = source_new(&s, 0, &p, first, 3);
        if (first == 0)
            check_put_without_a_trace(&st, &a, &src);
        a.args.put = &src.args;
        CHECKF(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK, "%s", kvc_last_error());
        check_answers(&st, &a);
        CHECK_FAILS(kvc_attend(st.batch, &a.plan, &a.args), KVC_ERR_INVALID, "put", "before");
        source_free(&src);
        question_free(&a);
    }
    stage_free(&st);
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

/* What came out for member 0, whoever else was there. */
typedef struct bits {
    float out[MAX_NEW * MAX_HEADS * 64], lse[MAX_NEW * MAX_HEADS];
} bits;

static void read_bits(const stage *st, const question *a, bits *b)
{
    const scene *s = st->scene;
    memset(b, 0, sizeof *b);
    for (int t = 0; t < a->n; t++) {
        if (st->member_of[t] != 0)
            continue;
        int row = st->row_of[t] - s->members[0].num_stored;
        for (int h = 0; h < s->num_heads; h++) {
            read_out(st, a, t, h, &b->out[(row * s->num_heads + h) * s->layer.v_dim]);
            b->lse[row * s->num_heads + h] = a->lse[t * s->num_heads + h];
        }
    }
}

static void attend_bits(const scene *s, const setting *how, bits *b)
{
    stage st = stage_new(s, how);
    question a = question_new(&st, 0, 0, st.num_tokens);
    CHECKF(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK, "%s", kvc_last_error());
    read_bits(&st, &a, b);
    question_free(&a);
    stage_free(&st);
}

/* The scene stored and computed in every way, alone and in company. */
static void check_same_bits(const scene *alone)
{
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
    static bits right, got;
    scene together = *alone;
    together.num_members = 3;
    together.members[1] = member_of_length(30, 9);
    together.members[2] = member_of_length(610, 1);
    attend_bits(alone, &(setting){.block_size = 64, .num_threads = 1}, &right);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        attend_bits(alone, &settings[i], &got);
        CHECKF(!memcmp(&got, &right, sizeof right), "%s: setting %zu, %d new tokens", kvc_isa(), i,
               alone->members[0].num_new);
        if (i % 3)
            continue;
        attend_bits(&together, &settings[i], &got);
        CHECKF(!memcmp(&got, &right, sizeof right), "%s: setting %zu in company, %d new tokens", kvc_isa(), i,
               alone->members[0].num_new);
    }
}

/* Enough work for several threads: streamed, in parts. */
static scene long_scene(void)
{
    scene s = plain_scene(2, 4, 32, 1100, 1);
    s.layer.k_type = s.layer.v_type = KVC_F16;
    return s;
}

/* Enough work for several threads: tiled. */
static scene wide_scene(void)
{
    return plain_scene(2, 4, 16, 600, 75);
}

static void test_same_bits(void)
{
    scene s = long_scene();
    check_same_bits(&s);
    s = wide_scene();
    check_same_bits(&s);
    s = plain_scene(1, 3, 8, 700, 2);
    s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 540, .num_sink_tokens = 5};
    check_same_bits(&s);
    s = plain_scene(1, 3, 8, 200, 30);
    s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 70, .num_sink_tokens = 5, .resume_window = 150};
    s.layer.v_type = KVC_BF16;
    s.q_type = KVC_F16;
    check_same_bits(&s);
}

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

/* All tasks of a plan, in any order, on so many threads. */
static void run_plan(kvc_plan *plan, const question *a, int num_threads)
{
    int64_t *order = shuffled(kvc_plan_num_tasks(plan));
    crew_run(plan, a->layer, &a->args, order, num_threads);
    free(order);
}

/* One plan, run again and again: for two layers, by one thread or more, also more than it was told of. */
static void check_tasks(scene s)
{
    static bits right, got;
    s.num_layers = 2;
    stage st = stage_new(&s, &usual);
    kvc_plan *plan = NULL;
    for (int i = 0; i < 8; i++) {
        question a = question_new(&st, i % 2, 0, st.num_tokens);
        a.plan.num_threads = 3;
        CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK);
        read_bits(&st, &a, &right);
        if (!plan)
            CHECKF(kvc_plan_new(st.batch, &a.plan, &plan) == KVC_OK, "%s", kvc_last_error());
        memset(a.out, 0, (size_t)(a.n * a.args.out_token_stride));
        run_plan(plan, &a, i < 2 ? 1 : i);
        read_bits(&st, &a, &got);
        CHECKF(!memcmp(&got, &right, sizeof right), "%s: layer %d, %d threads", kvc_isa(), i % 2, i);
        question_free(&a);
    }
    kvc_plan_free(plan);
    stage_free(&st);
}

/* ---- cancelling -------------------------------------------------------------------------------------------------- */

/* The flag is set before: nothing is written, and without it the same call does it all. */
static void check_cancel(stage *st, question *a, const bits *right)
{
    static bits got;
    volatile int32_t cancel = 1;
    a->args.cancel = &cancel;
    memset(a->out, 0x55, (size_t)(a->n * a->args.out_token_stride));
    CHECK(kvc_attend(st->batch, &a->plan, &a->args) == KVC_ERR_CANCELLED);
    CHECK(strstr(kvc_last_error(), "cancelled"));
    for (int i = 0; i < a->n * a->args.out_token_stride; i++)
        CHECK(a->out[i] == 0x55);
    cancel = 0;
    CHECK(kvc_attend(st->batch, &a->plan, &a->args) == KVC_OK);
    read_bits(st, a, &got);
    CHECK(!memcmp(&got, right, sizeof got));
    a->args.cancel = NULL;
}

static void *set_flag(void *flag)
{
    *(volatile int32_t *)flag = 1;
    return NULL;
}

/* Another thread sets the flag when some tasks have run; the rest do nothing, or are left out altogether.  Nothing of
 * what was begun is found in what is computed next. */
static void check_cancel_in_the_middle(stage *st, question *a, const bits *right, int left_out)
{
    static bits got;
    volatile int32_t cancel = 0;
    kvc_plan *plan;
    pthread_t other;
    kvc_attend_args begun = a->args;
    begun.cancel = &cancel;
    begun.scale = 3;
    CHECK(kvc_plan_new(st->batch, &a->plan, &plan) == KVC_OK);
    int64_t num_tasks = kvc_plan_num_tasks(plan), half = num_tasks / 2 + 1;
    CHECK(half < num_tasks);
    for (int64_t i = 0; i < num_tasks; i++) /* leftovers, if any, come from these tasks */
        CHECK(kvc_plan_run(plan, 0, &begun, i) == KVC_OK);
    for (int64_t i = 0; i < half; i++)
        CHECK(kvc_plan_run(plan, 0, &begun, i) == KVC_OK);
    CHECK(pthread_create(&other, NULL, set_flag, (void *)&cancel) == 0 && pthread_join(other, NULL) == 0);
    for (int64_t i = half; i < num_tasks && !left_out; i++)
        CHECK(kvc_plan_run(plan, 0, &begun, i) == KVC_ERR_CANCELLED);
    memset(a->out, 0, (size_t)(a->n * a->args.out_token_stride));
    if (!left_out) {
        run_plan(plan, a, 2);
        read_bits(st, a, &got);
        CHECK(!memcmp(&got, right, sizeof got));
    }
    kvc_plan_free(plan);
    memset(a->out, 0, (size_t)(a->n * a->args.out_token_stride));
    CHECK(kvc_attend(st->batch, &a->plan, &a->args) == KVC_OK); /* may get the plan that was given back */
    read_bits(st, a, &got);
    CHECK(!memcmp(&got, right, sizeof got));
}

static void test_cancel(void)
{
    static bits right;
    scene scenes[] = {long_scene(), wide_scene()};
    for (int i = 0; i < 2; i++) {
        stage st = stage_new(&scenes[i], &usual);
        question a = question_new(&st, 0, 0, st.num_tokens);
        CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK);
        read_bits(&st, &a, &right);
        check_cancel(&st, &a, &right);
        check_cancel_in_the_middle(&st, &a, &right, 0);
        check_cancel_in_the_middle(&st, &a, &right, 1);
        question_free(&a);
        stage_free(&st);
    }
}

/* ---- a child after fork() ---------------------------------------------------------------------------------------- */

/* The child's exit status: whether it computes what the parent did, in the batch it inherits and in a new cache. */
static int child(stage *st, question *a, const bits *right)
{
    static bits got;
    alarm(120); /* threads that are not there would be waited for without end */
    if (kvc_num_threads() != 1 || kvc_attend(st->batch, &a->plan, &a->args) != KVC_OK)
        return 1;
    read_bits(st, a, &got);
    if (memcmp(&got, right, sizeof got))
        return 2;
    attend_bits(st->scene, &(setting){.block_size = 16, .num_threads = 4}, &got);
    return memcmp(&got, right, sizeof got) ? 3 : 0;
}

static void test_fork(void)
{
    static bits right;
    scene s = long_scene();
    stage st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 4});
    question a = question_new(&st, 0, 0, st.num_tokens);
    CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK); /* with threads, which the child does not inherit */
    read_bits(&st, &a, &right);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(child(&st, &a, &right));
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", (unsigned)status);
    question_free(&a);
    stage_free(&st);
}

/* ---- bad arguments ----------------------------------------------------------------------------------------------- */

static void test_bad_plans(const stage *st, const question *a)
{
    kvc_plan *plan = NULL;
#define BAD(status, name, value, ...)                                                                                  \
    do {                                                                                                               \
        kvc_plan_args args = a->plan;                                                                                  \
        __VA_ARGS__;                                                                                                   \
        CHECK_FAILS(kvc_plan_new(st->batch, &args, &plan), status, name, value);                                       \
        CHECK_FAILS(kvc_attend(st->batch, &args, &a->args), status, name, value);                                      \
    } while (0)
    CHECK_FAILS(kvc_plan_new(st->batch, NULL, &plan), KVC_ERR_INVALID, "plan", "NULL");
    BAD(KVC_ERR_INVALID, "plan", "given as 4", args.struct_size = 4);
    BAD(KVC_ERR_INDEX, "layer", "is -1:", args.layer = -1);
    BAD(KVC_ERR_INDEX, "layer", "is 2:", args.layer = 2);
    BAD(KVC_ERR_INDEX, "first", "is -2:", args.first = -2);
    BAD(KVC_ERR_INDEX, "first", "is 3:", args.first = 3);
    BAD(KVC_ERR_INDEX, "num_tokens", "is -1:", args.num_tokens = -1);
    BAD(KVC_ERR_INDEX, "num_tokens", "is 3:", args.first = 1, args.num_tokens = 3);
    BAD(KVC_ERR_INVALID, "num_heads", "is 0:", args.num_heads = 0);
    BAD(KVC_ERR_INVALID, "num_heads", "is -2:", args.num_heads = -2);
    BAD(KVC_ERR_INVALID, "num_heads", "is 5:", args.num_heads = 5);
    BAD(KVC_ERR_INVALID, "num_heads", "is 2147483646:", args.num_heads = INT32_MAX - 1);
    BAD(KVC_ERR_INVALID, "num_threads", "is -1:", args.num_threads = -1);
    BAD(KVC_ERR_INVALID, "num_threads", "is 4097:", args.num_threads = 4097);
#undef BAD
    CHECK(!plan);
}

static void test_bad_attends(const stage *st, const question *a)
{
#define BAD(name, value, ...)                                                                                          \
    do {                                                                                                               \
        kvc_attend_args args = a->args;                                                                                \
        __VA_ARGS__;                                                                                                   \
        CHECK_FAILS(kvc_attend(st->batch, &a->plan, &args), KVC_ERR_INVALID, name, value);                             \
    } while (0)
    CHECK_FAILS(kvc_attend(st->batch, NULL, &a->args), KVC_ERR_INVALID, "plan", "NULL");
    CHECK_FAILS(kvc_attend(st->batch, &a->plan, NULL), KVC_ERR_INVALID, "args", "NULL");
    BAD("args", "given as 0", args.struct_size = 0);
    BAD("q", "NULL", args.q = NULL);
    BAD("out", "NULL", args.out = NULL);
    BAD("q_type", "is 3:", args.q_type = KVC_Q8_0);
    BAD("q_type", "is -1:", args.q_type = -1);
    BAD("scale", "is inf:", args.scale = INFINITY);
    BAD("scale", "nan", args.scale = NAN);
    BAD("softcap", "is -1:", args.softcap = -1);
    BAD("softcap", "is inf:", args.softcap = INFINITY);
    BAD("softcap", "nan", args.softcap = NAN);
#undef BAD
    for (int i = 0; i < a->n * a->args.out_token_stride; i++)
        CHECK(a->out[i] == 0x7f); /* nothing was written */
}

/* Layers 0 and 1 have not the same shapes; nothing was put in layer 1. */
static void test_bad_arguments(void)
{
    const kvc_layer layers[] = {{.num_kv_heads = 2, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 2, .k_dim = 8, .v_dim = 4}};
    const pass p = {.n = 3, .positions = {5, 3, 4}, .rows = {0, 1, 2}};
    scene s = plain_scene(2, 2, 4, 0, 3);
    stage st = {.scene = &s, .num_tokens = 3, .row_of = {0, 1, 2}};
    st.cache = cache_of(layers, 2, (kvc_config){0});
    CHECK(kvc_begin(st.cache, p.n, p.positions, p.ids, NULL, &st.batch) == KVC_OK);
    question a = question_new(&st, 0, 0, 3);
    test_bad_plans(&st, &a);
    test_bad_attends(&st, &a);
    CHECK_FAILS(kvc_attend(st.batch, &a.plan, &a.args), KVC_ERR_INVALID, "token 0", "layer 0");
    CHECK(scene_put(&s, st.batch, 0, &p, 0, 2) == KVC_OK);
    for (a.plan.num_tokens = 3; a.plan.num_tokens > 0; a.plan.num_tokens--) /* the first of them sees the last */
        CHECK_FAILS(kvc_attend(st.batch, &a.plan, &a.args), KVC_ERR_INVALID, "token 2", "layer 0");
    a.plan.first = a.plan.num_tokens = 1;
    CHECK(kvc_attend(st.batch, &a.plan, &a.args) == KVC_OK);

    kvc_plan *plan;
    CHECK(kvc_plan_new(st.batch, &a.plan, &plan) == KVC_OK);
    CHECK_FAILS(kvc_plan_run(plan, 1, &a.args, 0), KVC_ERR_INVALID, "layer 1", "layer, 0");
    CHECK_FAILS(kvc_plan_run(plan, 2, &a.args, 0), KVC_ERR_INDEX, "layer", "is 2:");
    kvc_put_args put = {.struct_size = sizeof put};
    a.args.put = &put;
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, 0), KVC_ERR_INVALID, "args->put", "NULL");
    a.args.put = NULL;
    CHECK_FAILS(kvc_plan_run(plan, 0, NULL, 0), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, -1), KVC_ERR_INDEX, "task", "is -1:");
    CHECK_FAILS(kvc_plan_run(plan, 0, &a.args, kvc_plan_num_tasks(plan)), KVC_ERR_INDEX, "task", "is ");
    kvc_plan_free(plan);
    kvc_plan_free(NULL);
    question_free(&a);
    kvc_abort(st.batch);
    CHECK(kvc_cache_free(st.cache) == KVC_OK);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static void test_isa(void)
{
    test_types();
    test_heads();
    test_dims();
    test_num_tokens();
    test_lengths();
    test_windows();
    test_chunks();
    test_positions();
    test_several_sequences();
    test_ranges();
    test_options();
    test_huge_scores();
    test_strides();
    test_put_in_attend();
    test_nothing_visible();
    test_same_bits();
    check_tasks(long_scene());
    check_tasks(wide_scene());
    check_tasks(plain_scene(1, 1, 1, 0, 1));
    test_cancel();
    test_fork();
}

int main(void)
{
    test_bad_arguments();
    for_some_isas(test_isa);
    return test_result();
}
