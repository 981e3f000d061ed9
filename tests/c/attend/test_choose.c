/* kvc_choose chooses the rows that plain arithmetic in double chooses.  If queries and keys are whole numbers, the two
 * agree exactly.  Bits depend on the rows that a token sees alone: not on threads, blocks, or other tokens. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */

#include "support/answers.h"
#include "support/isas.h"

enum { MAX_CHOICES = 8, MAX_WIDTH = 1500, MAX_TOKENS = 160, MAX_AMONG = 300 };

/* What is asked about all tokens of a stage's batch, and what comes out. */
typedef struct choosing {
    const stage *stage;
    int is_exact; /* arithmetic in floats does not round */
    char *q;
    kvc_plan_args plan;
    kvc_choose_args args;
    float elements[MAX_TOKENS][MAX_HEADS][MAX_DIM]; /* of queries */
    float weights[MAX_TOKENS][MAX_HEADS];
    int32_t among[MAX_TOKENS][MAX_CHOICES][MAX_AMONG];
    int32_t chosen[MAX_TOKENS][MAX_CHOICES][MAX_WIDTH + 1]; /* one more, which is never written */
    float scores[MAX_TOKENS][MAX_CHOICES][MAX_WIDTH + 1];
} choosing;

/* ---- what is to come out ----------------------------------------------------------------------------------------- */

/* The score of row j for choice c of token t, and a bound of its error. */
static candidate score_row(const choosing *a, const rows *r, int t, int c, int j) {
    const scene *s = a->stage->scene;
    const int32_t at = a->stage->tokens.positions[t], position = r->positions[j];
    const int heads = s->num_heads / a->args.num_choices;
    candidate e = {.id = entry_of(&a->args, position), .is_forced = must_choose(&a->args, at, 1, position)};
    for (int h = c * heads; h < (c + 1) * heads; h++) {
        const double *k_row = r->k[j][h * s->layer.num_kv_heads / s->num_heads];
        double product = 0, size = 0, q_square = 0, k_square = 0;
        for (int d = 0; d < s->layer.k_dim; d++) {
            const double q = a->elements[t][h][d], k = k_row[d];
            product += q * k;
            size += fabs(q * k);
            q_square += q * q;
            k_square += k * k;
        }
        const double scale = a->args.scale != 0 ? (double)a->args.scale : 1 / sqrt(s->layer.k_dim);
        const double weight = a->args.weights ? (double)a->weights[t][h] : 1;
        e.score += head_score(&a->args, s->layer.k_dim, product, weight);
        /* Queries are rounded to 8 bits for keys with one scale, which kernels may have transformed. */
        const double rough = KVC_TYPES[s->layer.k_type].has_row_scale ? 0.01 * sqrt(q_square * k_square) : 0;
        e.error += fabs(weight * scale) * ((s->layer.k_dim + s->num_heads + 8) * FLT_EPSILON * size + rough);
        if (s->num_moves || s->layer.k_transform)
            e.error += fabs(weight * scale) * 3e-5 * (1 + sqrt(q_square * k_square));
        if (s->layer.k_type == KVC_BF16 || s->layer.k_type == KVC_F16) e.error += fabs(weight * scale) * 1e-5 * size;
    }
    if (a->is_exact) e.error = 0;
    return e;
}

/* Lists the entries that token t may choose, the chosen ones first; returns their number. */
static int list_entries(const choosing *a, const rows *r, int t, int c, candidate *list) {
    int n = 0;
    for (int j = 0; j < r->num; j++) {
        const int sees_all = a->plan.non_causal && a->plan.non_causal[t]; /* in scenes without a policy */
        if (!sees_all && !sees(a->stage, t, r->positions[j], r->tokens[j])) continue;
        if (may_choose(&a->args, a->among[t][c], 1, r->positions[j])) list[n++] = score_row(a, r, t, c, j);
    }
    return choose_plainly(list, n, a->args.width);
}

/* Checks the choice of token t, among the entries that it may choose. */
static void check_choice(const choosing *a, int t, int c, candidate *list, int num) {
    const int32_t *chosen = a->chosen[t][c];
    const float *scores = a->scores[t][c];
    const int width = a->args.width, expected = num < width ? num : width;
    double least = INFINITY, most = -INFINITY; /* of what is chosen and what is not, as it may be off */
    for (int i = expected; i < width; i++) CHECK(chosen[i] == -1 && scores[i] == -INFINITY);
    CHECK(chosen[width] == -7 && scores[width] == -7);
    for (int i = 0; a->is_exact && i < expected; i++)
        CHECKF(chosen[i] == list[i].id &&
                   (isnan(list[i].score) ? isnan(scores[i]) : (double)scores[i] == list[i].score),
               "%s: token %d, choice %d, entry %d of %d is %d with %g, not %d with %g", kvc_isa(), t, c, i, expected,
               chosen[i], (double)scores[i], list[i].id, list[i].score);
    if (a->is_exact) return;
    int num_forced = 0, found = 0;
    for (int i = 0; i < num; i++) num_forced += list[i].is_forced;
    qsort(list, (size_t)num, sizeof *list, by_entry);
    for (int i = 0; i < num; i++) {
        const int is_chosen = found < expected && chosen[found] == list[i].id;
        if (is_chosen)
            CHECKF(fabs((double)scores[found] - list[i].score) <= list[i].error,
                   "%s: type %d, token %d, choice %d: %d scores %g, not %g, off by %g of %g", kvc_isa(),
                   a->stage->scene->layer.k_type, t, c, list[i].id, (double)scores[found], list[i].score,
                   fabs((double)scores[found] - list[i].score), list[i].error);
        found += is_chosen;
        if (num_forced <= width && list[i].is_forced) {
            CHECK(is_chosen);
            continue;
        }
        if (is_chosen) least = fmin(least, list[i].score + list[i].error);
        if (!is_chosen && (num_forced <= width || list[i].is_forced)) most = fmax(most, list[i].score - list[i].error);
    }
    CHECKF(found == expected, "%s: token %d, choice %d: %d of %d entries are right", kvc_isa(), t, c, found, expected);
    CHECKF(least >= most, "%s: token %d, choice %d: %g is chosen and %g is not", kvc_isa(), t, c, least, most);
}

static void check_choices(const choosing *a) {
    static candidate list[MAX_POSITIONS];
    for (int m = 0; m < a->stage->scene->num_members; m++) {
        const rows *r = rows_of(a->stage, 0, m);
        for (int t = 0; t < a->stage->tokens.n; t++)
            for (int c = 0; c < a->args.num_choices && a->stage->tokens.ids[t] == m; c++)
                check_choice(a, t, c, list, list_entries(a, r, t, c, list));
    }
}

/* ---- asking ------------------------------------------------------------------------------------------------------ */

static void wipe_choice(choosing *a) {
    for (int t = 0; t < a->stage->tokens.n; t++)
        for (int c = 0; c < a->args.num_choices; c++)
            for (int i = 0; i <= MAX_WIDTH; i++) a->chosen[t][c][i] = -7, a->scores[t][c][i] = -7;
}

/* Describes arrays of all tokens, and asks for `width` entries. */
static choosing *choosing_new(const stage *st, int width) {
    choosing *a = calloc(1, sizeof *a);
    question q = question_new(st, 0, 0, st->tokens.n);
    CHECK(a && st->tokens.n <= MAX_TOKENS && width <= MAX_WIDTH);
    a->stage = st;
    a->q = q.q;
    a->plan = q.plan;
    a->plan.masked = st->scene->masked;
    a->plan.masked_size = sizeof *st->scene->masked;
    a->plan.num_masked = st->scene->num_masked;
    a->args = (kvc_choose_args){.struct_size = sizeof a->args,
                                .q = a->q,
                                .chosen = a->chosen[0][0],
                                .scores = a->scores[0][0],
                                .q_token_stride = q.args.q_token_stride,
                                .q_head_stride = q.args.q_head_stride,
                                .weights_token_stride = sizeof *a->weights,
                                .weights_head_stride = sizeof **a->weights,
                                .among_token_stride = sizeof *a->among,
                                .among_choice_stride = sizeof **a->among,
                                .chosen_token_stride = sizeof *a->chosen,
                                .chosen_choice_stride = sizeof **a->chosen,
                                .scores_token_stride = sizeof *a->scores,
                                .scores_choice_stride = sizeof **a->scores,
                                .q_type = st->scene->q_type,
                                .scale = st->scene->scale,
                                .num_choices = 1,
                                .width = width};
    for (int t = 0; t < st->tokens.n; t++)
        for (int h = 0; h < st->scene->num_heads; h++)
            for (int d = 0; d < st->scene->layer.k_dim; d++)
                a->elements[t][h][d] = query_element(st->scene, 0, (int)st->tokens.ids[t], st->tokens.rows[t], h, d);
    free(q.out);
    free(q.lse);
    return a;
}

static void choosing_free(choosing *a) {
    free(a->q);
    free(a);
}

/* tasks: by a plan, whose tasks are run backwards. */
static kvc_status choose(choosing *a, int num_threads, int tasks) {
    kvc_plan *plan = NULL;
    a->plan.num_threads = num_threads;
    a->plan.num_choices = tasks ? a->args.num_choices : 0;
    if (!tasks) return kvc_choose(a->stage->batch, &a->plan, &a->args);
    kvc_status status = kvc_plan_new(a->stage->batch, &a->plan, &plan);
    for (int64_t i = plan ? kvc_plan_num_tasks(plan) : 0; status == KVC_OK && i > 0; i--)
        status = kvc_plan_choose(plan, 0, &a->args, i - 1);
    kvc_plan_free(plan);
    return status;
}

static int same_choices(const choosing *a, int t, const choosing *b, int u) {
    const size_t size = (size_t)a->args.num_choices * sizeof a->chosen[t][0];
    return !memcmp(a->chosen[t], b->chosen[u], size) && !memcmp(a->scores[t], b->scores[u], size);
}

/* ---- choices by chance ------------------------------------------------------------------------------------------- */

static void random_arguments(choosing *a) {
    static const int blocks[] = {0, 1, 1, 3, 16, 128}, forced[] = {0, 0, 0, 1, 5};
    const int heads = a->stage->scene->num_heads, kv_heads = a->stage->scene->layer.num_kv_heads;
    const int longest = (int)a->stage->scene->members[0].num_stored + 20;
    kvc_choose_args *args = &a->args;
    do args->num_choices = random_int(1, heads < MAX_CHOICES ? heads + 1 : MAX_CHOICES + 1);
    while (heads % args->num_choices || (args->num_choices % kv_heads && kv_heads % args->num_choices));
    args->block = one_of(blocks, 6);
    args->relu = random_int(0, 2);
    args->num_first = one_of(forced, 5);
    args->num_local = one_of(forced, 5);
    args->width = random_int(0, 3) ? random_int(1, 20) : random_int(1, longest < MAX_WIDTH ? longest : MAX_WIDTH);
    args->weights = random_int(0, 3) ? a->weights[0] : NULL;
    args->among = random_int(0, 3) ? NULL : a->among[0][0];
    args->among_width = random_int(0, MAX_AMONG);
    for (int t = 0; t < a->stage->tokens.n; t++) {
        for (int h = 0; h < heads; h++) a->weights[t][h] = a->is_exact ? (float)random_int(-2, 5) : random_float();
        for (int c = 0; c < args->num_choices; c++)
            for (int i = 0; i < args->among_width; i++)
                a->among[t][c][i] = random_int(0, 9) ? random_int(0, longest) : random_int(0, 2) ? -5 : INT32_MAX;
    }
}

/* Copies what is asked, about other or the same tokens. */
static void ask_the_same(choosing *to, const choosing *from) {
    const kvc_choose_args own = to->args;
    to->args = from->args;
    to->is_exact = from->is_exact;
    to->args.q = own.q, to->args.chosen = own.chosen, to->args.scores = own.scores;
    to->args.weights = from->args.weights ? to->weights[0] : NULL;
    to->args.among = from->args.among ? to->among[0][0] : NULL;
    memcpy(to->weights, from->weights, sizeof to->weights);
    memcpy(to->among, from->among, sizeof to->among);
}

/* Token t alone gets the same. */
static void check_alone(const choosing *all, choosing *got, int t) {
    got->plan.first = t;
    got->plan.num_tokens = 1;
    got->args.q = all->q + t * all->args.q_token_stride;
    if (got->args.weights) got->args.weights = got->weights[t];
    if (got->args.among) got->args.among = got->among[t][0];
    got->args.chosen = got->chosen[t][0];
    got->args.scores = got->scores[t][0];
    wipe_choice(got);
    CHECKF(choose(got, 1 + t % 3, 0) == KVC_OK, "%s", kvc_last_error());
    CHECK(same_choices(got, t, all, t));
}

/* The choices of a scene; and the same bits by any number of threads, by tasks, token by token, and stored otherwise.
 */
static void check_scene_choices(const scene *s, const setting *how, int is_exact) {
    setting otherwise = *how;
    stage *st = stage_new(s, how);
    choosing *right = choosing_new(st, 1), *got = choosing_new(st, 1);
    right->is_exact = is_exact;
    random_arguments(right);
    ask_the_same(got, right);
    wipe_choice(right);
    CHECKF(choose(right, 1, 0) == KVC_OK, "%s", kvc_last_error());
    check_choices(right);
    for (int i = 1; i < 5; i++) {
        wipe_choice(got);
        CHECKF(choose(got, i % 2 ? 8 : i, i > 2) == KVC_OK, "%s", kvc_last_error());
        for (int t = 0; t < st->tokens.n; t++) CHECK(same_choices(got, t, right, t));
    }
    for (int t = 0; t < st->tokens.n; t += 1 + st->tokens.n / 3) check_alone(right, got, t);
    choosing_free(got);
    otherwise.block_size = how->block_size == 16 ? 7 : 16;
    stage *other = stage_new(s, &otherwise);
    got = choosing_new(other, 1);
    ask_the_same(got, right);
    wipe_choice(got);
    CHECKF(choose(got, 3, 0) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < st->tokens.n; t++) CHECK(same_choices(got, t, right, t));
    choosing_free(got);
    choosing_free(right);
    stage_free(other);
    stage_free(st);
}

static void test_random(void) {
    static const int exact[] = {KVC_F32, KVC_F16, KVC_BF16, KVC_INT8, KVC_Q8_0}, dims[] = {32, 64, 128};
    for (int i = 0; i < (is_full() ? 560 : 40); i++) {
        static scene s;
        s = random_scene(i);
        s.layer.v_dim = s.layer.v_type = s.layer.v_transform = 0;
        s.is_whole = random_int(0, 3) > 0;
        if (s.is_whole) {
            s.layer.k_type = exact[i % 5];
            s.layer.k_dim = one_of(dims, 3);
            s.layer.k_transform = 0;
            s.layer.rope = (kvc_rope){.kind = KVC_ROPE_NONE};
            s.scale = 1;
        }
        for (int j = random_int(0, 3) ? 0 : 5; j > 0; j--) {
            const int32_t begin = random_int(0, 700), end = begin + random_int(0, 60), m = random_int(0, s.num_members);
            /* What a masked token of a tree holds does not follow from its position. */
            if (!s.is_tree || end <= s.members[m].num_stored) s.masked[s.num_masked++] = (kvc_masked){m, begin, end};
        }
        const setting how = random_setting();
        check_scene_choices(&s, &how, s.is_whole);
    }
}

/* ---- edges ------------------------------------------------------------------------------------------------------- */

/* Asks about a scene of whole numbers with these arguments, and checks what comes out. */
static void check_exact(const scene *s, kvc_choose_args wanted, const float *weights, const uint8_t *non_causal) {
    stage *st = stage_new(s, &(setting){.block_size = 16});
    choosing *a = choosing_new(st, wanted.width);
    a->is_exact = 1;
    a->plan.non_causal = non_causal;
    a->args.num_choices = wanted.num_choices ? wanted.num_choices : 1;
    a->args.relu = wanted.relu;
    a->args.block = wanted.block;
    a->args.num_first = wanted.num_first;
    a->args.num_local = wanted.num_local;
    for (int t = 0; t < st->tokens.n && weights; t++)
        memcpy(a->weights[t], weights, (size_t)s->num_heads * sizeof(float));
    if (weights) a->args.weights = a->weights[0];
    wipe_choice(a);
    CHECKF(choose(a, 2, 0) == KVC_OK, "%s", kvc_last_error());
    check_choices(a);
    choosing_free(a);
    stage_free(st);
}

static scene whole_scene(int type, int num_stored, int num_new) {
    scene s = plain_scene(1, 16, 64, num_stored, num_new);
    s.layer.k_type = type;
    s.layer.v_dim = 0;
    s.layer.rope.kind = KVC_ROPE_NONE;
    s.is_whole = 1;
    s.scale = 1;
    return s;
}

/* As many rows as are chosen, one more and one less; and one row. */
static void test_edges(void) {
    static const int widths[] = {1, 63, 64, 65, 129, 700};
    for (int i = 0; i < 6; i++)
        for (int rows = widths[i] - 1; rows <= widths[i] + 1; rows++) {
            static scene s;
            if (rows < 1) continue;
            s = whole_scene(i % 2 ? KVC_INT8 : KVC_F32, rows - 1, 1);
            check_exact(&s, (kvc_choose_args){.width = widths[i], .relu = i % 3 == 0}, NULL, NULL);
        }
}

/* If all scores are equal, the first positions are chosen, beside the forced ones. */
static void test_plateaus(void) {
    static const float zeros[MAX_HEADS],
        falling[MAX_HEADS] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    for (int type = KVC_F32; type <= KVC_INT8; type += KVC_INT8 - KVC_F32)
        for (int i = 0; i < 6; i++) {
            static scene s;
            s = whole_scene(type, 900, 3);
            check_exact(&s,
                        (kvc_choose_args){.width = 100,
                                          .relu = i % 2,
                                          .block = i > 3 ? 4 : 1,
                                          .num_first = i % 3 * 7,
                                          .num_local = i > 1 ? 60 : 0},
                        i % 2 ? falling : zeros, NULL);
        }
}

/* NaN is the largest score, whatever hid it; infinities are ordinary ones. */
static void test_not_finite(void) {
    static const float numbers[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 18; i++) {
        static scene s;
        s = whole_scene(i % 3, 300, 4);
        s.num_bad = 1;
        s.bad = i % 2 ? 299 : 300; /* a stored row, or one of the batch */
        s.number = numbers[i / 6];
        check_exact(&s, (kvc_choose_args){.width = 5, .relu = i / 3 % 2, .block = i % 5 == 4 ? 8 : 1}, NULL, NULL);
    }
}

/* The choices, and the scores, of keys with one scale a row are the same bits on every instruction set. */
static void check_same_on_sets(void) {
    static const int types[] = {KVC_INT8, KVC_INT6, KVC_INT4};
    static int32_t chosen[3][4][2][MAX_WIDTH + 1];
    static float scores[3][4][2][MAX_WIDTH + 1];
    for (int i = 0; i < 3; i++) {
        static scene s;
        random_state = 77;
        s = plain_scene(1, 40, 128, 1400, 4);
        s.layer.k_type = types[i];
        s.layer.v_dim = 0;
        s.layer.k_transform = KVC_TRANSFORM_HADAMARD;
        s.layer.rope = rope_of(64, 32, 1);
        s.num_moves = 5;
        stage *st = stage_new(&s, &(setting){.block_size = 64});
        choosing *a = choosing_new(st, 300);
        for (int t = 0; t < 4; t++)
            for (int h = 0; h < 40; h++) a->weights[t][h] = random_float();
        a->args.weights = a->weights[0];
        a->args.relu = 1;
        a->args.num_choices = 2;
        wipe_choice(a);
        CHECKF(choose(a, 1, 0) == KVC_OK, "%s", kvc_last_error());
        check_choices(a);
        for (int t = 0; t < 4; t++) {
            if (strcmp(kvc_isa(), "scalar")) {
                CHECKF(!memcmp(chosen[i][t], a->chosen[t], sizeof chosen[i][t]), "%s chooses others", kvc_isa());
                CHECKF(!memcmp(scores[i][t], a->scores[t], sizeof scores[i][t]), "%s scores otherwise", kvc_isa());
            }
            memcpy(chosen[i][t], a->chosen[t], sizeof chosen[i][t]);
            memcpy(scores[i][t], a->scores[t], sizeof scores[i][t]);
        }
        choosing_free(a);
        stage_free(st);
    }
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* A plan serves one number of choices, layers of keys alone and nothing else.  Its tasks may be run again. */
static void test_plans(void) {
    static scene s;
    s = whole_scene(KVC_F32, 3000 - 2, 2);
    stage *st = stage_new(&s, &(setting){.block_size = 64, .num_threads = 4});
    choosing *a = choosing_new(st, 40), *right = choosing_new(st, 40);
    question attention = question_of_all(st);
    kvc_plan *plan = NULL;
    a->plan.num_threads = right->plan.num_threads = 4;
    a->args.num_choices = right->args.num_choices = 2;
    wipe_choice(a), wipe_choice(right);
    CHECK(kvc_choose(st->batch, &right->plan, &right->args) == KVC_OK);
    a->plan.num_choices = 2;
    CHECK(kvc_plan_new(st->batch, &a->plan, &plan) == KVC_OK);
    const int64_t num_tasks = kvc_plan_num_tasks(plan);
    CHECKF(num_tasks > 4, "%d tasks", (int)num_tasks); /* each slice has several splits */
    for (int round = 0; round < 3; round++) {
        wipe_choice(a);
        for (int64_t i = 0; i < num_tasks; i++) {
            CHECK(kvc_plan_choose(plan, 0, &a->args, (i * 5 + 1) % num_tasks) == KVC_OK);
            if (round == 1 && i % 2) CHECK(kvc_plan_choose(plan, 0, &a->args, i) == KVC_OK);
        }
        for (int t = 0; t < 2; t++) CHECK(same_choices(a, t, right, t));
    }
    CHECK_FAILS(kvc_plan_choose(plan, 0, &a->args, num_tasks), KVC_ERR_INDEX, "task is", "the plan has");
    CHECK_FAILS(kvc_plan_run(plan, 0, &attention.args, 0), KVC_ERR_UNSUPPORTED, "layer 0", "keys alone");
    CHECK_FAILS(ask(&attention), KVC_ERR_UNSUPPORTED, "layer 0", "keys alone");
    a->args.num_choices = 4;
    CHECK_FAILS(kvc_plan_choose(plan, 0, &a->args, 0), KVC_ERR_INVALID, "num_choices is 4", "made for 2");
    CHECK_FAILS(kvc_plan_choose(plan, 1, &a->args, 0), KVC_ERR_INDEX, "layer is 1", "1 layers");
    kvc_plan_free(plan);
    question_free(&attention);
    choosing_free(right);
    choosing_free(a);
    stage_free(st);
}

typedef struct rerun {
    kvc_plan *plan;
    const kvc_choose_args *args;
    int64_t first;
} rerun;

/* ---- failure ----------------------------------------------------------------------------------------------------- */

/* Layers: keys alone, then keys and values. */
static void test_bad_arguments(void) {
    kvc_layer layers[2] = {{.num_kv_heads = 4, .k_dim = 32}, {.num_kv_heads = 4, .k_dim = 32, .v_dim = 32}};
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){.block_size = 16});
    static float k[4 * 32], q[8 * 32];
    int32_t chosen[8];
    kvc_batch *batch = NULL;
    CHECK(kvc_begin(cache, 1, NULL, NULL, NULL, &batch) == KVC_OK);
    kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 8};
    kvc_choose_args good = {.struct_size = sizeof good,
                            .q = q,
                            .q_head_stride = 32 * sizeof *q,
                            .chosen = chosen,
                            .width = 8},
                    bad;
    CHECK_FAILS(kvc_choose(batch, &plan, &good), KVC_ERR_INVALID, "token 0", "not put");
    const kvc_put_args put = float_rows(0, 1, 4, 32, 0, k, NULL);
    CHECK(kvc_put(batch, 0, &put) == KVC_OK);
    CHECKF(kvc_choose(batch, &plan, &good) == KVC_OK, "%s", kvc_last_error());
    CHECK(chosen[0] == 0 && chosen[1] == -1 && chosen[7] == -1);
    bad = good, bad.q = NULL;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "q is NULL", "q");
    bad = good, bad.chosen = NULL;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "chosen is NULL", "chosen");
    bad = good, bad.width = 0;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "width is 0", "at least 1");
    bad = good, bad.among_width = -1;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "among_width is -1", "at least 0");
    bad = good, bad.block = -2;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "block is -2", "at least 0");
    bad = good, bad.num_first = -1;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "num_first is -1", "at least 0");
    bad = good, bad.num_local = -1;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "num_local is -1", "at least 0");
    bad = good, bad.scale = INFINITY;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "scale is inf", "finite");
    bad = good, bad.num_choices = 3;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "num_choices is 3", "num_heads, 8");
    bad = good, bad.q_type = KVC_INT8;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "q_type is 9", "KVC_BF16");
    bad = good, bad.chosen_token_stride = 6;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "chosen", "6");
    bad = good, bad.struct_size = 8;
    CHECK_FAILS(kvc_choose(batch, &plan, &bad), KVC_ERR_INVALID, "args", "8");
    plan.max_chosen = 5;
    CHECK_FAILS(kvc_choose(batch, &plan, &good), KVC_ERR_INVALID, "max_chosen is 5", "keys alone");
    plan.max_chosen = 0;
    plan.layer = 1;
    CHECK_FAILS(kvc_choose(batch, &plan, &good), KVC_ERR_UNSUPPORTED, "layer 1", "holds values");
    plan.num_choices = 2;
    kvc_plan *made = NULL;
    CHECK_FAILS(kvc_plan_new(batch, &plan, &made), KVC_ERR_INVALID, "num_choices is 2", "layer 1");
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_edges();
    test_plateaus();
    test_not_finite();
    test_plans();
    test_bad_arguments();
    for_each_isa(check_same_on_sets);
    for_some_isas(test_random);
    return test_result();
}
