/* Prompts in bytes.  Results differ from plain arithmetic in double by what rounding to 8 bits makes.  Bits are the
 * same however a prompt is stored and computed, on every instruction set.  Some calls are attended to exactly. */
#define _DEFAULT_SOURCE /* setenv */
#include "attend/cutting.h"
#include "attend/plan.h"
#include "support/isas.h"
#include "support/same.h"

static const setting usual = {.block_size = 16, .num_threads = 1};

/* Whether the kernels that are in use multiply bytes. */
static int multiplies_bytes(void) {
    const char *unknown;
    return kvc_cpu_kernels(&unknown)->bytes.score != NULL;
}

/* Checks that errors in bytes are those of rounding: on average, squares are as large as their variance. */
static void check_spread(const char *what) {
    const double variance = byte_errors.squares / (double)byte_errors.num * MOST_DEVIATIONS * MOST_DEVIATIONS;
    CHECKF(!byte_errors.num || variance < 0.5, "%s: %s: errors have %g times their variance", kvc_isa(), what,
           variance);
    memset(&byte_errors, 0, sizeof byte_errors);
}

/* ---- scenes by chance -------------------------------------------------------------------------------------------- */

/* Makes a scene's rows those of a prompt in bytes: whole blocks of 32 elements, and scores whose errors are small. */
static void fit_to_bytes(scene *s) {
    s->layer.k_dim = (s->layer.k_dim + 31) / 32 * 32;
    s->layer.v_dim = (s->layer.v_dim + 31) / 32 * 32;
    if (fabsf(s->scale) > 0.3f) s->scale = 0.3f;
}

/* Numbers of tokens about the 8 that are attended to exactly. */
static void set_new_tokens(scene *s, int i) {
    static const int nums[] = {9, 8, 17, 10, 7, 33, 9, 64};
    s->members[0] = member_of_length(s->members[0].num_stored, nums[i % 8]);
    if (s->num_members > 2) s->members[1] = member_of_length(s->members[1].num_stored, 9);
}

static void test_random(void) {
    for (int i = 0; i < (is_full() ? 490 : 56); i++) {
        static scene s;
        s = random_scene(i);
        fit_to_bytes(&s);
        set_new_tokens(&s, i);
        if (i % 7 == 0) add_stride(&s);
        const setting how = random_setting();
        check_scene(&s, &how);
    }
    check_spread("random");
}

/* Every type of queries over every type of rows, over several tiles. */
static void test_types(void) {
    for (int type = 0; type < KVC_STORED_TYPES; type++)
        for (int q_type = 0; q_type < KVC_FLOAT_TYPES; q_type++) {
            static scene s;
            s = plain_scene(1, 4, 128, 290, 12);
            s.layer.k_type = s.layer.v_type = type;
            s.q_type = q_type;
            check_scene(&s, &usual);
        }
    check_spread("types");
}

/* Values that are the first part of the keys. */
static void test_value_in_key(void) {
    for (int i = 0; i < 2 * KVC_STORED_TYPES; i++) {
        static scene s;
        s = plain_scene(1, 4, i % 2 ? 576 : 96, 140, 11);
        s.layer.v_dim = i % 2 ? 512 : 32;
        s.layer.value_in_key = 1;
        s.layer.k_type = s.layer.v_type = i / 2;
        s.layer.k_transform = s.layer.v_transform = i % 3 == 0;
        s.num_moves = i % 4 == 1;
        s.layer.rope = rope_of(s.layer.v_dim, 32, i / 2 % 2);
        s.scale = 1 / sqrtf(192);
        check_scene(&s, &usual);
    }
    check_spread("value_in_key");
}

/* ---- rows that are no random numbers ----------------------------------------------------------------------------- */

enum { ROWS = 300, TOKENS = 12, DIM = 64 };

/* The rows of a sequence of one head, of which the last TOKENS are the batch's, and their queries. */
typedef struct content {
    float k[ROWS][DIM], v[ROWS][DIM], q[TOKENS][DIM];
} content;

/* What the queries get. */
typedef struct results {
    float out[TOKENS][DIM], lse[TOKENS];
} results;

static content *content_new(void) {
    static content c;
    for (int i = 0; i < ROWS * DIM; i++) {
        c.k[i / DIM][i % DIM] = random_float();
        c.v[i / DIM][i % DIM] = random_float();
        if (i / DIM < TOKENS) c.q[i / DIM][i % DIM] = random_float();
    }
    return &c;
}

static void scale_rows(float (*rows)[DIM], int num, float factor) {
    for (int i = 0; i < num * DIM; i++) rows[i / DIM][i % DIM] *= factor;
}

static void answer(const content *c, int type, const uint8_t *non_causal, kvc_precision in, results *r) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .k_type = type, .v_type = type};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.num_threads = 1});
    kvc_batch *batch = NULL;
    for (int i = 0; i < 2; i++) {
        const int first = i ? ROWS - TOKENS : 0;
        CHECK(kvc_begin(cache, i ? TOKENS : ROWS - TOKENS, NULL, NULL, NULL, &batch) == KVC_OK);
        put_floats(batch, 0, 0, i ? TOKENS : ROWS - TOKENS, 1, DIM, DIM, c->k[first], c->v[first]);
        if (!i) CHECK(kvc_commit(batch) == KVC_OK);
    }
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 1, .non_causal = non_causal, .precision = in};
    kvc_attend_args args = float_queries(1, DIM, DIM, c->q, r->out);
    args.lse = r->lse;
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Checks that results in bytes are as near the right ones as rows of int8 are: by a share of the size of the weighted
 * values, or `least`. */
static void check_content(const content *c, const char *what, double share, double least) {
    static double k[ROWS][DIM], v[ROWS][DIM], q[DIM];
    static seen_row seen[ROWS];
    results got;
    for (int i = 0; i < ROWS; i++) doubles(k[i], c->k[i], DIM), doubles(v[i], c->v[i], DIM);
    answer(c, KVC_F32, NULL, KVC_PRECISION_INT8, &got);
    for (int t = 0; t < TOKENS; t++) {
        sight right = {.q = doubles(q, c->q[t], DIM), .k_dim = DIM, .v_dim = DIM, .rows = seen};
        double size = 0, off = 0;
        for (; right.num <= ROWS - TOKENS + t; right.num++)
            seen[right.num] = (seen_row){.k = k[right.num], .v = v[right.num]};
        attend_plainly(&right);
        for (int i = 0; i < right.num; i++) size += pow(seen[i].weight, 2) * sum_of_squares(v[i], DIM);
        for (int d = 0; d < DIM; d++) off += pow((double)got.out[t][d] - right.out[d], 2);
        CHECKF(sqrt(off) <= share * sqrt(size) + least, "%s: token %d is off by %g of %g", what, t, sqrt(off),
               sqrt(size));
        CHECKF(fabs((double)got.lse[t] - right.lse) <= 0.01 + 0.003 * fabs(right.lse),
               "%s: token %d: lse is %g, not %g", what, t, (double)got.lse[t], right.lse);
    }
}

static void test_zeros(void) {
    content *c = content_new();
    scale_rows(c->v + 5, 150, 0); /* a tile of them, and parts of others */
    check_content(c, "some values 0", 0.05, 0);
    scale_rows(c->v, ROWS, 0);
    check_content(c, "all values 0", 0, 0);
    c = content_new();
    scale_rows(c->k, 200, 0);
    check_content(c, "some keys 0", 0.05, 0);
    scale_rows(c->q, TOKENS, 0);
    check_content(c, "all queries 0", 0.05, 0);
}

/* Values of any size: tiny ones count as zeros. */
static void test_sizes(void) {
    static const float sizes[] = {1e-38f, 1e-30f, 1e-20f, 1e-17f, 1e-15f, 1e-10f, 1e-4f, 1e4f, 1e12f, 1e30f};
    for (int i = 0; i < 10; i++) {
        content *c = content_new();
        scale_rows(c->v, ROWS, sizes[i]);
        check_content(c, "all values", 0.05, sizes[i] < 1e-16f ? (double)sizes[i] : 0);
        c = content_new();
        scale_rows(c->v + 130, 100, sizes[i]);
        check_content(c, "some values", 0.05, 0);
    }
}

/* The first token of many models has most of the weight and a small value. */
static void test_heavy_key(void) {
    for (int i = 0; i < 4; i++) {
        content *c = content_new();
        for (int t = 0; t < TOKENS; t++)
            for (int d = 0; d < DIM; d++) c->q[t][d] += c->k[0][d] > 0 ? 1.5f : -1.5f; /* a score of 6 */
        scale_rows(c->v, 1, ldexpf(1, -4 * i));
        check_content(c, "heavy key", 0.05, 0);
    }
}

/* A query that is infinite or no number spoils its own result. */
static void test_bad_queries(void) {
    static const float numbers[] = {NAN, INFINITY, -INFINITY, 3e38f};
    results right, got;
    content *c = content_new();
    answer(c, KVC_F32, NULL, KVC_PRECISION_INT8, &right);
    for (int i = 0; i < 4; i++) {
        c->q[3][7] = numbers[i];
        answer(c, KVC_F32, NULL, KVC_PRECISION_INT8, &got);
        for (int t = 0; t < TOKENS; t++)
            CHECK(memcmp(got.out[t], right.out[t], sizeof *got.out) == 0 ? t != 3 : t == 3);
    }
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

static void test_same_bits(void) {
    for (int i = 0; i < (is_full() ? 3 : 1) * KVC_STORED_TYPES; i++) {
        static const float alibi[] = {0.5f, 0.01f, -0.1f, 0, 2, 1};
        scene s = plain_scene(2, 3, 64, 600, i % 2 ? 37 : 9);
        s.layer.k_type = i % KVC_STORED_TYPES;
        s.layer.v_type = (i + i / KVC_STORED_TYPES) % KVC_STORED_TYPES;
        s.layer.k_transform = s.layer.v_transform = i % 3 == 1;
        s.layer.rope = rope_of(0, 32, 0);
        s.num_moves = i % 5;
        s.is_tree = i % 4 == 1;
        s.q_type = i % 3;
        s.softcap = i % 3 == 0 ? 20 : 0;
        s.alibi = i % 4 == 2 ? alibi : NULL;
        check_same_bits(&s);
    }
    scene s = plain_scene(1, 3, 32, 200, 30);
    s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 70, .num_sink_tokens = 5, .resume_window = 150};
    check_same_bits(&s);
    s.layer.policy = (kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = 90, .resume_window = 150};
    check_same_bits(&s);
    check_tasks(plain_scene(2, 4, 64, 600, 75));
}

/* Scene i of those that all sets with products of bytes compute to the same bits. */
static scene scene_of_sets(int i) {
    scene s = plain_scene(2, 3, 32 * (1 + i % 5), 300, 9 + i);
    s.layer.k_type = i % KVC_STORED_TYPES;
    s.layer.v_type = (i + 3) % KVC_STORED_TYPES;
    s.layer.k_transform = i % 2;
    s.layer.rope = rope_of(0, 16, 0);
    s.num_moves = i % 3;
    s.softcap = 0;
    s.layer.policy = i % 4 == 3
                         ? (kvc_policy){.kind = KVC_SLIDING, .window = 100, .num_sink_tokens = 3, .resume_window = 400}
                         : (kvc_policy){.kind = KVC_FULL};
    if (s.layer.policy.kind != KVC_FULL) s.num_moves = 0;
    return s;
}

/* All instruction sets that multiply bytes give the same bits. */
static void test_sets(void) {
    for (int i = 0; i < 2 * KVC_STORED_TYPES; i++) {
        char names[] = KVC_KERNEL_NAMES;
        scene s = scene_of_sets(i);
        setenv("KVCACHE_ISA", "scalar", 1);
        stage *one = stage_new(&s, &usual);
        question right = question_of_all(one);
        CHECK(multiplies_bytes() && ask(&right) == KVC_OK);
        for (char *name = strtok(names, " "); name; name = strtok(NULL, " ")) {
            setenv("KVCACHE_ISA", name, 1);
            if (!kvc_isa() || !multiplies_bytes()) continue;
            stage *st = stage_new(&s, &usual);
            question got = question_of_all(st);
            CHECKF(ask(&got) == KVC_OK, "%s", kvc_last_error());
            check_all_same(&got, &right, "scene", i);
            question_free(&got);
            stage_free(st);
        }
        question_free(&right);
        stage_free(one);
    }
    unsetenv("KVCACHE_ISA");
}

/* Infinite rows and NaN reach the tokens that see them. */
static void test_unseen(void) {
    const kvc_policy policies[] = {{.kind = KVC_FULL},
                                   {.kind = KVC_SLIDING, .window = 40, .num_sink_tokens = 5},
                                   {.kind = KVC_CHUNKED, .attention_chunk_size = 30}};
    for (int i = 0; i < 3 * KVC_STORED_TYPES; i++) {
        static scene s;
        s = plain_scene(2, 2, 64, 90, 230);
        s.layer.k_type = i % KVC_STORED_TYPES;
        s.layer.v_type = (i + i / KVC_STORED_TYPES) % KVC_STORED_TYPES;
        s.layer.policy = policies[i % 3];
        s.softcap = i % 4 == 1 ? 20 : 0;
        s.is_tree = i % 12 == 3; /* where everything is shown: branches lie at other positions than rows */
        for (int at = i % 3; at < 5; at += 2) check_unseen(&s, 319 - at * 50 - i);
        check_unseen(&s, 89 - i);
    }
}

/* ---- what is attended to exactly --------------------------------------------------------------------------------- */

/* Asks for results as rows are stored, and in bytes.  Returns how many tokens of member m got the same bits. */
static int count_same(const stage *st, int m) {
    question exact = question_of_all(st), bytes = question_of_all(st);
    int num = 0;
    exact.plan.masked = bytes.plan.masked = st->scene->masked;
    exact.plan.masked_size = bytes.plan.masked_size = sizeof *st->scene->masked;
    exact.plan.num_masked = bytes.plan.num_masked = st->scene->num_masked;
    exact.plan.precision = KVC_PRECISION_STORED;
    CHECKF(ask(&exact) == KVC_OK && ask(&bytes) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < exact.n; t++) num += st->tokens.ids[t] == m && same_bits(&exact, t, &bytes, t);
    question_free(&exact);
    question_free(&bytes);
    return num;
}

/* A sequence of 8 tokens is attended to exactly, also beside one of 9; and heads are whose dimension is odd. */
static void test_exact(void) {
    static const int dims[][2] = {{64, 64}, {48, 48}, {64, 33}, {40, 64}};
    for (int i = 0; i < 4; i++) {
        scene s = plain_scene(1, 20, 64, 200, 8);
        s.layer.k_dim = dims[i][0];
        s.layer.v_dim = dims[i][1];
        s.num_members = 2;
        s.members[1] = member_of_length(200, 9);
        stage *st = stage_new(&s, &usual);
        CHECK(count_same(st, 0) == 8);
        const int num = count_same(st, 1);
        CHECKF(num == (i || !multiplies_bytes() ? 9 : 0), "%d of 9 tokens, dims %d and %d", num, dims[i][0],
               dims[i][1]);
        question a = question_new(st, 0, 0, 16); /* 8 of each */
        question b = question_new(st, 0, 0, 16);
        b.plan.precision = KVC_PRECISION_STORED;
        CHECK(ask(&a) == KVC_OK && ask(&b) == KVC_OK);
        check_all_same(&a, &b, "dims", i);
        question_free(&a);
        question_free(&b);
        stage_free(st);
    }
}

/* Sequences are multiplied in bytes from as many rows as their types and shapes say.  With fewer they have the bits
 * of exact ones.  Company changes neither.  Masked rows do not count. */
static void test_border(void) {
    static const struct {
        int type, num_kv_heads, group, dim, new, least; /* stored rows from which on they are */
    } shapes[] = {{KVC_INT8, 1, 8, 64, 16, 263}, {KVC_INT4, 1, 8, 64, 16, 263}, {KVC_Q8_0, 36, 3, 64, 171, 486}};
    for (int i = 0; i < 3 * 2; i++) {
        const int below = i % 2, n = shapes[i / 2].new, hidden = i / 2 == 1 ? 40 : 0;
        scene s = plain_scene(shapes[i / 2].num_kv_heads, shapes[i / 2].group, shapes[i / 2].dim,
                              shapes[i / 2].least - below + hidden, n);
        s.layer.k_type = s.layer.v_type = shapes[i / 2].type;
        if (hidden) s.masked[s.num_masked++] = (kvc_masked){0, 10, 10 + hidden};
        stage *st = stage_new(&s, &usual);
        const int num = count_same(st, 0);
        CHECKF(num == (below ? n : 0), "%d of %d tokens are exact, scene %d", num, n, i);
        stage_free(st);
        if (i < 2) check_same_bits(&s);
    }
}

/* Rows of one shape have one rule: they are rounded where a layer's are. */
static void test_border_of_layers(void) {
    for (int i = 0; i < 2; i++) {
        kvc_layer layers[2] = {{.num_kv_heads = 1, .k_dim = 64, .v_dim = 64, .k_type = KVC_INT8, .v_type = KVC_INT8}};
        kvc_batch *batch = NULL;
        kvc_plan *plan;
        layers[1] = layers[0];
        if (i) layers[1].v_type = KVC_F16;
        kvc_cache *cache = cache_of(layers, 2, (kvc_config){.num_threads = 1});
        CHECK(kvc_begin(cache, 600, NULL, NULL, NULL, &batch) == KVC_OK);
        const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 8, .precision = KVC_PRECISION_INT8};
        CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
        CHECK(plan->slices[0].tiled == (i ? KVC_TILED : KVC_IN_BYTES));
        kvc_abort(batch);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* The border is where it is on all processors: on plain C, which multiplies bytes everywhere. */
static void test_borders(void) {
    test_border();
    test_border_of_layers();
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

static void test_isa(void) {
    precision = KVC_PRECISION_INT8;
    test_exact();
    if (!multiplies_bytes()) return;
    test_random();
    test_types();
    test_value_in_key();
    test_zeros();
    test_sizes();
    test_heavy_key();
    test_bad_queries();
    test_same_bits();
    test_unseen();
}

int main(void) {
    precision = KVC_PRECISION_INT8;
    for_isa("scalar", test_borders);
    kvc_costs_in_bytes = (kvc_byte_costs){0}; /* other scenes are short */
    test_sets();
    for_some_isas(test_isa);
    return test_result();
}
