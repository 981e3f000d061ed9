/* Attention against plain arithmetic in double over the decoded rows: rows of every type, keys that are off by several
 * deltas, trees, windows.  Bits are the same however a sequence is stored and worked on, and whatever rows hold that it
 * does not see. */
#define _DEFAULT_SOURCE /* guarded.h, setenv */
#include <float.h>

#include "attend/cutting.h"
#include "attend/plan.h"
#include "support/guarded.h"
#include "support/isas.h"
#include "support/memory.h"
#include "support/same.h"

static const setting usual = {.block_size = 16, .num_threads = 1};

/* ---- scenes by chance -------------------------------------------------------------------------------------------- */

static void test_random(void) {
    for (int i = 0; i < (is_full() ? 560 : 70); i++) {
        static scene s;
        s = random_scene(i);
        const setting how = random_setting();
        check_scene(&s, &how);
    }
}

/* Many queries of each type, for which tiles of rows of each type are multiplied. */
static void test_tiled(void) {
    for (int type = 0; type < KVC_STORED_TYPES; type++)
        for (int q_type = 0; q_type < KVC_FLOAT_TYPES; q_type++) {
            static scene s;
            s = plain_scene(1, 4, 64, 150, 12);
            s.layer.k_type = s.layer.v_type = type;
            s.q_type = q_type;
            check_scene(&s, &usual);
        }
}

/* ---- special scores and values ----------------------------------------------------------------------------------- */

/* Scores so far apart that the largest has all the weight. */
static void test_huge_scores(void) {
    for (int num_new = 1; num_new < 30; num_new += 25) {
        scene s = plain_scene(1, 2, 8, 100, num_new);
        s.scale = 1e30f;
        stage *st = stage_new(&s, &usual);
        question a = question_of_all(st);
        const rows *r = rows_of(st, 0, 0);
        CHECK(ask(&a) == KVC_OK);
        for (int i = 0; i < 2 * num_new; i++) {
            float out[MAX_DIM];
            const sight *right = answer_to(st, 0, r, i / 2, i % 2);
            const seen_row *best = right->rows;
            for (int j = 0; j < right->num; j++) best = right->rows[j].score > best->score ? &right->rows[j] : best;
            read_out(&a, i / 2, i % 2, out);
            for (int d = 0; d < 8; d++) CHECK((double)out[d] == best->v[d]);
            CHECK(fabs(a.lse[i] - best->score) <= 1e-6 * best->score);
        }
        question_free(&a);
        stage_free(st);
    }
}

/* Values whose sum over the visible rows is just below the largest float: their average is finite. */
static void test_largest_sums(void) {
    for (int num_new = 1; num_new < 80; num_new += 70)
        for (int type = KVC_F32; type <= KVC_BF16; type += KVC_BF16 - KVC_F32) {
            scene s = plain_scene(2, 4, 32, 2900, num_new);
            s.layer.k_type = s.layer.v_type = type;
            s.value = FLT_MAX * 0.99f / (float)(2900 + num_new);
            stage *st = stage_new(&s, &usual);
            question a = question_of_all(st);
            float out[MAX_DIM];
            CHECK(ask(&a) == KVC_OK);
            for (int i = 0; i < 8 * num_new; i++) {
                read_out(&a, i / 8, i % 8, out);
                for (int d = 0; d < 32; d++)
                    CHECKF(fabsf(out[d] / s.value - 1) < 0x1p-8f, "%s: %g, not %g", kvc_isa(), out[d], s.value);
            }
            question_free(&a);
            stage_free(st);
        }
}

/* Rows that no query sees: all rows, because their scores are -inf; and whole tiles and parts of tiles, which a window
 * and a gap hide from one query and not from the next. */
static void test_nothing_visible(void) {
    static const float sinks[] = {1, -INFINITY};
    const int has_amx = !strncmp(kvc_isa(), "amx", 3); /* infinities of 16 bits become NaN in its tiles */
    for (int num_new = 1; num_new < 40; num_new += 19) {
        scene s = plain_scene(1, 2, 8, 600, num_new);
        s.masked_keys = 1;
        for (int type = KVC_F32; type <= (has_amx ? KVC_F32 : KVC_BF16); type++) {
            s.layer.k_type = type;
            s.sinks = NULL;
            check_scene(&s, &usual); /* out 0, lse -inf or the sink */
            s.sinks = sinks;
            check_scene(&s, &usual);
        }
        s = plain_scene(1, 2, 8, 700, num_new);
        s.layer.policy = (kvc_policy){.kind = KVC_SLIDING, .window = 300, .resume_window = 2000};
        for (int i = 650; i < 700 + num_new; i++) s.members[0].positions[i] += (i - 650) * 30;
        check_scene(&s, &(setting){.block_size = 64, .num_threads = 1, .pass = 70});
    }
}

/* Values that are the first part of the keys. */
static void test_value_in_key(void) {
    static const struct {
        int k_dim, v_dim, num_freqs, type, transform;
    } cases[] = {{576, 512, 32, KVC_F32, 0},  {576, 512, 32, KVC_F16, 0},  {576, 512, 32, KVC_BF16, 0},
                 {576, 512, 32, KVC_Q8_0, 0}, {576, 512, 32, KVC_Q4_0, 0}, {5, 3, 1, KVC_F32, 0},
                 {9, 1, 4, KVC_F16, 0},       {4, 4, 0, KVC_F32, 0},       {576, 512, 32, KVC_Q8_0, 1},
                 {576, 512, 32, KVC_Q4_0, 1}, {96, 32, 16, KVC_Q4_0, 1},   {160, 96, 32, KVC_F16, 1}};
    for (int i = 0; i < 24; i++) {
        const int k_dim = cases[i / 2].k_dim, v_dim = cases[i / 2].v_dim, num_freqs = cases[i / 2].num_freqs;
        scene s = plain_scene(1, 5, k_dim, 70, i % 2 ? 1 : 5);
        s.num_moves = num_freqs ? 2 : 0;
        s.layer.v_dim = v_dim;
        s.layer.value_in_key = 1;
        s.layer.k_type = s.layer.v_type = cases[i / 2].type;
        s.layer.k_transform = s.layer.v_transform = cases[i / 2].transform;
        if (num_freqs) s.layer.rope = rope_of(k_dim - 2 * num_freqs, num_freqs, i / 2 % 2);
        s.scale = 1 / sqrtf(192);
        check_scene(&s, &usual);
        stage *st = stage_new(&s, &usual);
        s.scale = 0;
        question a = question_of_all(st);
        CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "scale is 0", "must be given");
        question_free(&a);
        stage_free(st);
    }
}

/* ---- what is not seen -------------------------------------------------------------------------------------------- */

static void test_unseen(void) {
    static const float slopes[] = {0.5f, 0.25f, 0.125f, 0.01f};
    static const int num_fresh[] = {230, 230, 7, 7, 30, 30};
    const kvc_policy policies[] = {{.kind = KVC_FULL},
                                   {.kind = KVC_SLIDING, .window = 16},
                                   {.kind = KVC_SLIDING, .window = 40, .num_sink_tokens = 5},
                                   {.kind = KVC_CHUNKED, .attention_chunk_size = 30}};
    for (int type = 0; type < KVC_STORED_TYPES; type++)
        for (int i = 0; i < 24; i++) {
            static scene s;
            const int kind = i % 6, total = num_fresh[kind] + (kind % 2 ? 90 : 0);
            if (!is_full() && (type + i / 6 + i) % 3) continue;
            s = plain_scene(2, 2, 64, kind % 2 ? 90 : 0, num_fresh[kind]);
            s.layer.policy = policies[i / 6];
            s.layer.k_type = s.layer.v_type = type;
            s.is_tree = kind == 3;
            s.softcap = kind == 4 ? 20 : 0;
            s.alibi = kind == 0 ? slopes : NULL;
            if (kind == 5) {
                s.is_forked = 1;
                s.num_members = 2;
                s.members[1] = s.members[0];
            }
            for (int at = 0; at < 4; at++) check_unseen(&s, total - 1 - at * num_fresh[kind] / 4);
            for (int at = 44; kind % 2 && at < 90; at += 45) check_unseen(&s, at);
            if (s.is_tree) check_unseen(&s, total - num_fresh[kind]); /* the batch's first token */
        }
}

/* ---- memory that ends where reading faults ----------------------------------------------------------------------- */

/* An allocator whose memory ends at a guard page, or as near as alignment allows; a block's last row ends there. */
typedef struct guard {
    size_t behind;     /* bytes of a block behind its last row */
    char *first_block; /* NULL: none yet */
    size_t block_size; /* bytes */
} guard;

static size_t guarded_size(const guard *g, size_t size, const kvc_memory_hint *hint) {
    return hint->kind == KVC_MEMORY_ROWS ? size - g->behind : size;
}

static void *guard_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    guard *g = user;
    size_t used = (guarded_size(g, size, hint) + alignment - 1) / alignment * alignment;
    char *start = guarded_new(used) - used;
    memset(start, 0xff, used); /* NaN in every type */
    if (hint->kind == KVC_MEMORY_ROWS && !g->first_block) {
        g->first_block = start;
        g->block_size = size;
    }
    return start;
}

static void guard_free(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    uintptr_t end = in_pages((uintptr_t)memory + guarded_size(user, size, hint));
    guarded_free((char *)end, (size_t)(end - (uintptr_t)memory));
}

/* Bytes behind the last row of the first block of sequence 0, which fills its slots one by one. */
static size_t bytes_behind(const stage *st, const guard *g, int block_size) {
    const kvc_layer *layer = &st->scene->layer;
    kvc_span span = {0};
    int64_t num;
    CHECK(kvc_spans(st->cache, 0, 0, &span, sizeof span, 1, &num, NULL) == KVC_OK && num > 0);
    const char *k = (const char *)span.k + (layer->num_kv_heads - 1) * span.k_head_stride,
               *v = (const char *)span.v + (layer->num_kv_heads - 1) * span.v_head_stride;
    const char *end = layer->value_in_key ? k + block_size * span.k_row_stride : v + block_size * span.v_row_stride;
    const ptrdiff_t behind = g->first_block + g->block_size - end;
    CHECKF(behind >= 0 && behind < 128, "%td bytes", behind);
    return (size_t)behind;
}

/* Once to find out what lies behind the rows of a block, which nobody has to read either; and once without it. */
static void check_guarded(const scene *s, int block_size) {
    guard g = {0};
    const kvc_allocator allocator = {
        .struct_size = sizeof allocator, .user = &g, .alloc = guard_alloc, .free = guard_free};
    const setting how = {.block_size = block_size, .num_threads = 1, .allocator = &allocator};
    stage *st = stage_new(s, &how);
    const size_t behind = bytes_behind(st, &g, block_size);
    check_range(st, 0, st->tokens.n);
    stage_free(st);
    g.behind = behind;
    check_scene(s, &how);
}

/* All blocks are full, the last tile is not: for one query row, for a few, streamed, and for so many that they are
 * tiled.  Values lie at the end of a block; keys do where they are the values as well. */
static void test_guarded(void) {
    static const int dims[] = {33, 64, 80, 96, 128}, num_new[] = {1, 2, 17};
    static const int block_sizes[] = {1, 32, 50}, num_rows[] = {77, 96, 150};
    for (int i = 0; i < 5 * 5 * 3 * 2; i++) {
        const int type = i % 5, dim = dims[i / 5 % 5], tokens = num_new[i / 25 % 3], size = (type + i / 5 + i / 75) % 3;
        if (dim % kvc_type_elements(type)) continue;
        scene s = plain_scene(2, tokens > 1 ? 2 : 1, dim, num_rows[size] - tokens, tokens);
        s.layer.k_type = s.layer.v_type = type;
        s.layer.value_in_key = i / 75;
        s.scale = 0.1f;
        check_guarded(&s, block_sizes[size]);
    }
    const kvc_byte_costs costs = kvc_costs_in_bytes;
    precision = KVC_PRECISION_INT8;
    kvc_costs_in_bytes = (kvc_byte_costs){0}; /* as the prompts are short */
    for (int i = 0; i < 5 * 3 * 2; i++) {
        scene s = plain_scene(2, 2, 32 * (1 + i / 5 % 3), num_rows[i % 3] - 17, 17);
        s.layer.k_type = s.layer.v_type = i % 5;
        s.layer.value_in_key = i / 15;
        s.scale = 0.1f;
        check_guarded(&s, block_sizes[i / 5 % 3]);
    }
    precision = KVC_PRECISION_STORED;
    kvc_costs_in_bytes = costs;
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

/* Enough work for several threads: streamed, in parts. */
static scene long_scene(void) {
    scene s = plain_scene(2, 4, 32, 1100, 1);
    s.layer.k_type = s.layer.v_type = KVC_F16;
    return s;
}

/* Enough work for several threads: tiled. */
static scene wide_scene(void) { return plain_scene(2, 4, 16, 600, 75); }

static void test_same_bits(void) {
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
    for (int i = 0; i < 7; i++) {
        s = plain_scene(2, 3, 32, 600, i % 2 ? 4 : 37);
        s.num_moves = i % 5;
        s.layer.rope = rope_of(0, 16, 0);
        s.layer.k_type = i < 5 ? i : KVC_Q8_0;
        s.layer.v_type = i < 5 ? (i + 1) % 5 : KVC_Q4_0;
        s.layer.k_transform = s.layer.v_transform = i >= 5;
        s.is_tree = i > 1;
        check_same_bits(&s);
    }
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* A plan that kvc_attend made serves only calls like its own. */
static void test_plans_of_non_causal(void) {
    const uint8_t none[9] = {0}, one[9] = {0, 0, 1}, all[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8_t *const given[] = {NULL, none, one, all};
    scene s = plain_scene(2, 3, 32, 40, 9);
    stage *st = stage_new(&s, &usual);
    question a[4];
    kvc_plan *plans[4], *plan = NULL;
    for (int i = 0; i < 4; i++) {
        a[i] = question_of_all(st);
        a[i].plan.non_causal = given[i];
        CHECK(kvc_plan_new(st->batch, &a[i].plan, &plans[i]) == KVC_OK);
        for (int j = 0; j < i; j++) CHECK(plans[i] != plans[j]);
        kvc_plan_leave(plans[i]);
        CHECK(kvc_plan_new(st->batch, &a[i].plan, &plan) == KVC_OK && plan == plans[i]);
        kvc_plan_leave(plan);
        CHECK(ask(&a[i]) == KVC_OK);
    }
    for (int t = 0; t < 9; t++) { /* the one sees all nine, as does the last */
        CHECK(same_bits(&a[0], t, &a[1], t) && same_bits(&a[0], t, &a[2], t) == (t != 2));
        CHECK(same_bits(&a[0], t, &a[3], t) == (t == 8));
    }
    CHECK(same_bits(&a[2], 2, &a[3], 2));
    for (int i = 0; i < 4; i++) question_free(&a[i]);
    stage_free(st);
}

static int64_t scratch_of(const memory *m) {
    int64_t bytes = -memory_bytes(m);
    for (int i = 0; i < m->num; i++) bytes += (int64_t)m->live[i].size;
    return bytes;
}

/* Plans that are freed, one after the other, take the memory of a few, however many parts a batch is cut into. */
static void test_memory_of_freed_plans(void) {
    enum { NUM = 64, PART = 4 };
    static memory heap;
    memory_init(&heap);
    scene s = plain_scene(2, 4, 32, 2000, NUM * PART);
    stage *st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1, .allocator = &heap.allocator});
    question a = question_of_all(st);
    const int64_t before = scratch_of(&heap);
    int64_t of_one = 0, most = 0;
    for (int i = 0; i < NUM; i++) {
        kvc_plan *plan = NULL;
        a.plan.first = i * PART;
        a.plan.num_tokens = PART;
        CHECK(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
        const int64_t bytes = scratch_of(&heap) - before;
        if (i == 0) of_one = bytes;
        if (bytes > most) most = bytes;
        kvc_plan_free(plan);
    }
    CHECKF(of_one > 0 && most <= 4 * of_one, "%lld bytes, of one %lld", (long long)most, (long long)of_one);
    question_free(&a);
    stage_free(st);
    CHECK(heap.num == 0);
}

/* ---- dense rows -------------------------------------------------------------------------------------------------- */

/* Sequences are apart only where their tokens come one after the other, as many of each. */
static void test_not_in_step(void) {
    static float k[4 * 3];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4};
    const kvc_rows_out rows = {.struct_size = sizeof rows, .k = k};
    const kvc_dense_args args = {.struct_size = sizeof args, .rows = &rows, .by_sequence = 1};
    const int64_t ids[][4] = {{5, 5, 6}, {5, 6, 5, 6}, {6, 6, 5, 5}};
    static const char *const wrong[] = {"sequence 5 has 2", "token 1", NULL};
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){0});
    for (int i = 0; i < 3; i++) {
        kvc_batch *batch = NULL;
        int32_t num_sequences = 0;
        int64_t most = -1;
        CHECK(kvc_begin(cache, i ? 4 : 3, (int32_t[]){0, 1, 2, 3}, ids[i], NULL, &batch) == KVC_OK);
        const kvc_status status = kvc_dense_sequences(batch, 0, &num_sequences, &most);
        CHECK(wrong[i] ? status == KVC_ERR_INVALID && most == -1 && strstr(kvc_last_error(), wrong[i])
                       : status == KVC_OK && num_sequences == 2 && most == 0);
        CHECK(kvc_dense(batch, 0, &args) == status);
        kvc_abort(batch);
    }
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static void test_bad_dense(void) {
    static float k[2 * 40 * 32], mask[5 * 15];
    scene s = plain_scene(2, 3, 32, 10, 5);
    stage *st = stage_new(&s, &usual);
    int64_t num = -1;
    CHECK_FAILS(kvc_dense_rows(st->batch, -1, &num), KVC_ERR_INDEX, "layer", "is -1:");
    CHECK_FAILS(kvc_dense_rows(st->batch, 1, &num), KVC_ERR_INDEX, "layer", "is 1:");
    CHECK_FAILS(kvc_dense_rows(st->batch, 0, NULL), KVC_ERR_INVALID, "num_rows", "NULL");
    CHECK(num == -1 && kvc_dense_rows(st->batch, 0, &num) == KVC_OK && num == 15);
    int32_t num_sequences = 0;
    CHECK_FAILS(kvc_dense_sequences(st->batch, 1, &num_sequences, &num), KVC_ERR_INDEX, "layer", "is 1:");
    CHECK_FAILS(kvc_dense_sequences(st->batch, 0, NULL, &num), KVC_ERR_INVALID, "num_sequences", "NULL");
    CHECK_FAILS(kvc_dense_sequences(st->batch, 0, &num_sequences, NULL), KVC_ERR_INVALID, "most_rows", "NULL");
    CHECK(kvc_dense_sequences(st->batch, 0, &num_sequences, &num) == KVC_OK && num_sequences == 1 && num == 15);
    const kvc_rows_out good_rows = {.struct_size = sizeof good_rows, .k = k};
    const kvc_dense_args good = {.struct_size = sizeof good, .rows = &good_rows, .num_rows = num};
#define BAD(status, layer, name, value, ...)                                  \
    do {                                                                      \
        kvc_rows_out rows = good_rows;                                        \
        kvc_dense_args args = good;                                           \
        args.rows = &rows;                                                    \
        __VA_ARGS__;                                                          \
        CHECK_FAILS(kvc_dense(st->batch, layer, &args), status, name, value); \
    } while (0)
    BAD(KVC_ERR_INDEX, 1, "layer", "is 1:", (void)args);
    BAD(KVC_ERR_INVALID, 0, "args", "given as 9", args.struct_size = 9);
    BAD(KVC_ERR_INVALID, 0, "rows", "given as 0", rows.struct_size = 0);
    BAD(KVC_ERR_INVALID, 0, "rows", "NULL", args.rows = NULL);
    BAD(KVC_ERR_INVALID, 0, "type", "is 4:", rows.type = KVC_Q4_0);
    BAD(KVC_ERR_INVALID, 0, "rows: k_row_stride", "is 2 bytes:", rows.k_row_stride = 2);
    BAD(KVC_ERR_INVALID, 0, "mask: mask_token_stride", "is 6 bytes:", args.mask = mask, args.mask_token_stride = 6);
    BAD(KVC_ERR_INVALID, 0, "num_rows is 14", "15", args.num_rows = 14);
    BAD(KVC_ERR_INVALID, 0, "num_rows is -1", "15", args.num_rows = -1);
    BAD(KVC_ERR_INVALID, 0, "num_rows is 14", "most", args.num_rows = 14, args.by_sequence = 1);
    BAD(KVC_ERR_INVALID, 0, "rows: k_batch_stride", "is 6 bytes:", args.k_batch_stride = 6, args.by_sequence = 1);
#undef BAD
    CHECK_FAILS(kvc_dense(st->batch, 0, NULL), KVC_ERR_INVALID, "args", "NULL");
    CHECK(k[0] == 0 && kvc_dense(st->batch, 0, &good) == KVC_OK && k[0] != 0); /* keys alone */
    stage_free(st);
}

/* ---- bad arguments ----------------------------------------------------------------------------------------------- */

static void test_bad_plans(const question *a) {
    kvc_plan *plan = NULL;
    kvc_batch *batch = a->stage->batch;
#define BAD(status, name, value, ...)                                         \
    do {                                                                      \
        kvc_plan_args args = a->plan;                                         \
        __VA_ARGS__;                                                          \
        CHECK_FAILS(kvc_plan_new(batch, &args, &plan), status, name, value);  \
        CHECK_FAILS(kvc_attend(batch, &args, &a->args), status, name, value); \
    } while (0)
    CHECK_FAILS(kvc_plan_new(batch, NULL, &plan), KVC_ERR_INVALID, "args", "NULL");
    CHECK_FAILS(kvc_plan_new(batch, &a->plan, NULL), KVC_ERR_INVALID, "plan", "NULL");
    kvc_plan_args small = a->plan;
    small.struct_size = 4;
    CHECK_FAILS(kvc_plan_new(batch, &small, &plan), KVC_ERR_INVALID, "args", "given as 4");
    CHECK_FAILS(kvc_attend(batch, &small, &a->args), KVC_ERR_INVALID, "plan", "given as 4");
    BAD(KVC_ERR_INVALID, "precision", "is 2:", args.precision = 2);
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

static void test_bad_attends(const question *a) {
#define BAD(name, value, ...)                                                                    \
    do {                                                                                         \
        kvc_attend_args args = a->args;                                                          \
        __VA_ARGS__;                                                                             \
        CHECK_FAILS(kvc_attend(a->stage->batch, &a->plan, &args), KVC_ERR_INVALID, name, value); \
    } while (0)
    CHECK_FAILS(kvc_attend(a->stage->batch, NULL, &a->args), KVC_ERR_INVALID, "plan", "NULL");
    CHECK_FAILS(kvc_attend(a->stage->batch, &a->plan, NULL), KVC_ERR_INVALID, "args", "NULL");
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
    BAD("tokens_per_sequence", "is 2:", args.tokens_per_sequence = 2);
    BAD("tokens_per_sequence", "is -1:", args.tokens_per_sequence = -1);
    BAD("q: q_token_stride", "is 3 bytes:", args.q_token_stride = 3);
    BAD("out: out_token_stride", "is 5 bytes:", args.out_token_stride = 5);
    BAD("out: out_head_stride", "is 7 bytes:", args.out_head_stride = 7);
    BAD("lse: lse_token_stride", "is 2 bytes:", args.lse_token_stride = 2);
    BAD("q: q_batch_stride", "is 3 bytes:", args.tokens_per_sequence = 3, args.q_batch_stride = 3);
    BAD("out: out_batch_stride", "is 5 bytes:", args.tokens_per_sequence = 3, args.out_batch_stride = 5);
    BAD("lse: lse_batch_stride", "is 2 bytes:", args.tokens_per_sequence = 3, args.lse_batch_stride = 2);
#undef BAD
    for (int i = 0; i < a->n * a->args.out_token_stride; i++) CHECK(a->out[i] == 0x7f); /* nothing was written */
}

/* Layers 0 and 1 have not the same shapes; nothing was put in layer 1. */
static void test_bad_arguments(void) {
    const kvc_layer layers[] = {{.num_kv_heads = 2, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 2, .k_dim = 8, .v_dim = 4}};
    static const int32_t positions[] = {5, 3, 4};
    scene s = plain_scene(2, 2, 4, 0, 3);
    stage *st = stage_new(&s, &usual);
    memcpy(st->tokens.positions, positions, sizeof positions);
    kvc_abort(st->batch);
    CHECK(kvc_cache_free(st->cache) == KVC_OK);
    st->cache = cache_of(layers, 2, (kvc_config){0});
    CHECK(kvc_begin(st->cache, 3, st->tokens.positions, st->tokens.ids, NULL, &st->batch) == KVC_OK);
    question a = question_of_all(st);
    test_bad_plans(&a);
    test_bad_attends(&a);
    CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "token 0", "layer 0");
    scene_put(&s, &usual, st->batch, 0, &st->tokens, 0, 2);
    for (a.plan.num_tokens = 3; a.plan.num_tokens > 0; a.plan.num_tokens--) /* the first of them sees the last */
        CHECK_FAILS(ask(&a), KVC_ERR_INVALID, "token 2", "layer 0");
    a.plan.first = a.plan.num_tokens = 1;
    CHECK(ask(&a) == KVC_OK);

    kvc_plan *plan;
    CHECK(kvc_plan_new(st->batch, &a.plan, &plan) == KVC_OK);
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
    stage_free(st);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static void test_isa(void) {
    test_random();
    test_tiled();
    test_huge_scores();
    test_largest_sums();
    test_nothing_visible();
    test_value_in_key();
    test_unseen();
    test_guarded();
    test_same_bits();
    check_tasks(long_scene());
    check_tasks(wide_scene());
    test_plans_of_non_causal();
    test_memory_of_freed_plans();
}

int main(void) {
    test_bad_arguments();
    test_bad_dense();
    test_not_in_step();
    for_some_isas(test_isa);
    return test_result();
}
