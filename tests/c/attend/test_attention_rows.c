/* Attention over rows of every type whose keys are off by several deltas, and in trees: against plain arithmetic in
 * double over the decoded rows; the same bits however they are stored and in whatever company; and plans that go out of
 * date. */
#define _DEFAULT_SOURCE /* guarded.h, setenv */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/guarded.h"
#include "support/isas.h"
#include "kernels/kernels.h"
#include "kvcache.h"
#include "support/test.h"

enum { MAX_STORED = 700, MAX_NEW = 40, MAX_TOKENS = 400, MAX_DIM = 576, MAX_HEADS = 6, MAX_MEMBERS = 3, FILLER = 99 };

/* What a cache with sequences 0, 1, ... is made of; zeros for the defaults. */
typedef struct scene {
    kvc_layer layer;
    int num_heads;
    int num_stored[MAX_MEMBERS], num_new[MAX_MEMBERS]; /* per sequence */
    int num_members;
    int moves; /* how many pieces of each sequence are moved apart, before the batch */
    int trees;
    float scale;
} scene;

typedef struct setting {
    int block_size, num_threads;
    int pass;      /* tokens in a pass before the batch; 0: 100 */
    int scattered; /* slots of another sequence, which is gone, between all of them */
    int settled;   /* keys are rotated where they lie */
    const kvc_allocator *allocator;
} setting;

/* It, with its batch open. */
typedef struct stage {
    const scene *scene;
    kvc_cache *cache;
    kvc_batch *batch;
    int n;
    int64_t ids[MAX_MEMBERS * MAX_NEW];
    int rows[MAX_MEMBERS * MAX_NEW]; /* how many of its sequence came before */
    int32_t positions[MAX_MEMBERS * MAX_NEW], parents[MAX_MEMBERS * MAX_NEW];
} stage;

/* ---- storing it -------------------------------------------------------------------------------------------------- */

/* Rows of some tokens, as kvc_put takes them. */
static void put(kvc_batch *batch, const scene *s, int n, const int64_t *ids, const int *rows, int first)
{
    int heads = s->layer.num_kv_heads, k_dim = s->layer.k_dim, v_dim = s->layer.v_dim;
    float *k = malloc((size_t)(n * heads * k_dim) * sizeof *k), *v = malloc((size_t)(n * heads * v_dim) * sizeof *v);
    for (int i = 0; i < n * heads; i++) {
        for (int d = 0; d < k_dim; d++)
            k[i * k_dim + d] = element_of(0, ids[i / heads], rows[i / heads], i % heads * 1024 + d);
        for (int d = 0; d < v_dim; d++)
            v[i * v_dim + d] = element_of(1, ids[i / heads], rows[i / heads], i % heads * 1024 + d);
    }
    put_floats(batch, 0, first, n, heads, k_dim, v_dim, k, s->layer.value_in_key ? NULL : v);
    free(k);
    free(v);
}

static void store(const scene *s, const setting *how, kvc_cache *cache)
{
    int64_t ids[MAX_TOKENS];
    int32_t positions[MAX_TOKENS];
    int rows[MAX_TOKENS], done[MAX_MEMBERS] = {0}, most = how->pass ? how->pass : 100, n;
    do {
        n = 0;
        for (int i = 0; i < most; i++)
            for (int m = 0; m < s->num_members && n < MAX_TOKENS - 1; m++) {
                if (done[m] == s->num_stored[m])
                    continue;
                ids[n] = m;
                positions[n] = rows[n] = done[m]++;
                n++;
                if (how->scattered)
                    ids[n] = FILLER, rows[n] = 0, positions[n++] = 0;
            }
        kvc_batch *batch = NULL;
        if (!n)
            break;
        CHECKF(kvc_begin(cache, n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        put(batch, s, n, ids, rows, 0);
        CHECK(kvc_commit(batch) == KVC_OK);
    } while (n);
    CHECK(kvc_clear_sequence(cache, FILLER) == KVC_OK);
}

/* Each piece lies further from the one before: one more delta. */
static void move_apart(const scene *s, kvc_cache *cache, int m)
{
    for (int i = 1; i <= s->moves; i++)
        CHECKF(kvc_shift(cache, m, kvc_next_position(cache, m) - s->num_stored[m] * i / (s->moves + 1), KVC_END,
                         3 + i + 7 * m) == KVC_OK,
               "%s", kvc_last_error());
}

static void list_tokens(stage *st)
{
    const scene *s = st->scene;
    int last[MAX_MEMBERS][MAX_NEW], done[MAX_MEMBERS] = {0};
    for (int i = 0; i < MAX_NEW; i++)
        for (int m = 0; m < s->num_members; m++) {
            if (i >= s->num_new[m])
                continue;
            int parent = i ? (i * 7 + 3) % (i + 2) - 1 : -1; /* an earlier token of the sequence, or none */
            st->ids[st->n] = m;
            st->rows[st->n] = s->num_stored[m] + i;
            st->positions[st->n] = kvc_next_position(st->cache, m) + (s->trees ? i / 3 : i);
            st->parents[st->n] = parent < 0 || parent >= i ? -1 : last[m][parent];
            last[m][done[m]++] = st->n++;
        }
}

static stage stage_new(const scene *s, const setting *how)
{
    stage st = {.scene = s};
    st.cache = cache_of(&s->layer, 1,
                        (kvc_config){.block_size = how->block_size, .num_threads = how->num_threads,
                                     .allocator = how->allocator});
    store(s, how, st.cache);
    for (int m = 0; m < s->num_members; m++)
        move_apart(s, st.cache, m);
    if (how->settled)
        CHECKF(kvc_settle(st.cache) == KVC_OK, "%s", kvc_last_error());
    list_tokens(&st);
    CHECKF(kvc_begin(st.cache, st.n, st.positions, st.ids, s->trees ? st.parents : NULL, &st.batch) == KVC_OK, "%s",
           kvc_last_error());
    put(st.batch, s, st.n, st.ids, st.rows, 0);
    return st;
}

static void stage_free(stage *st)
{
    CHECKF(kvc_commit(st->batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_validate(st->cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(st->cache) == KVC_OK, "%s", kvc_last_error());
}

/* ---- attending --------------------------------------------------------------------------------------------------- */

typedef struct answers {
    float out[MAX_MEMBERS * MAX_NEW][MAX_HEADS][MAX_DIM], lse[MAX_MEMBERS * MAX_NEW][MAX_HEADS];
} answers;

static kvc_status attend(const stage *st, const uint8_t *non_causal, answers *a)
{
    static float q[MAX_MEMBERS * MAX_NEW][MAX_HEADS][MAX_DIM];
    const scene *s = st->scene;
    memset(a, 0, sizeof *a);
    for (int t = 0; t < st->n; t++)
        for (int h = 0; h < s->num_heads; h++)
            for (int d = 0; d < s->layer.k_dim; d++)
                q[t][h][d] = element_of(2, st->ids[t], st->rows[t], h * 1024 + d);
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = s->num_heads, .non_causal = non_causal};
    const kvc_attend_args args = {.struct_size = sizeof args,
                                  .q = q,
                                  .out = a->out,
                                  .lse = &a->lse[0][0],
                                  .q_token_stride = sizeof *q,
                                  .q_head_stride = sizeof **q,
                                  .out_token_stride = sizeof *a->out,
                                  .out_head_stride = sizeof **a->out,
                                  .lse_token_stride = sizeof *a->lse,
                                  .lse_head_stride = sizeof **a->lse,
                                  .scale = s->scale};
    return kvc_attend(st->batch, &plan, &args);
}

/* ---- plain arithmetic -------------------------------------------------------------------------------------------- */

/* The rows of a member, stored and new, as floats. */
typedef struct rows {
    int num;
    int32_t positions[MAX_STORED + MAX_NEW];
    int tokens[MAX_STORED + MAX_NEW]; /* index in the batch; -1: stored */
    float k[MAX_STORED + MAX_NEW][2][MAX_DIM], v[MAX_STORED + MAX_NEW][2][MAX_DIM];
} rows;

/* What an array becomes when it is stored and read again; it is transformed in blocks of at most `most` elements. */
static void through(int type, int transform, int most, int dim, float *row)
{
    uint8_t stored[MAX_DIM * 4];
    const int is_transformed = transform == KVC_TRANSFORM_HADAMARD && (type == KVC_Q8_0 || type == KVC_Q4_0);
    int order = 32;
    while (is_transformed && order < most && dim % (2 * order) == 0)
        order *= 2;
    if (is_transformed)
        kvc_kernels_scalar.hadamard(row, row, dim, order);
    kvc_kernels_scalar.convert(KVC_F32, type, stored, 0, row, 0, 1, dim);
    kvc_kernels_scalar.convert(type, KVC_F32, row, 0, stored, 0, 1, dim);
    if (is_transformed)
        kvc_kernels_scalar.hadamard(row, row, dim, order);
}

static void add_new(const stage *st, int t, rows *r)
{
    const kvc_layer *layer = &st->scene->layer;
    r->positions[r->num] = st->positions[t];
    r->tokens[r->num] = t;
    for (int h = 0; h < layer->num_kv_heads; h++) {
        for (int d = 0; d < layer->k_dim; d++)
            r->k[r->num][h][d] = element_of(0, st->ids[t], st->rows[t], h * 1024 + d);
        through(layer->k_type, layer->k_transform, 1024, layer->k_dim, r->k[r->num][h]);
        for (int d = 0; d < layer->v_dim; d++)
            r->v[r->num][h][d] = layer->value_in_key ? r->k[r->num][h][d]
                                                     : element_of(1, st->ids[t], st->rows[t], h * 1024 + d);
        if (!layer->value_in_key)
            through(layer->v_type, layer->v_transform, 64, layer->v_dim, r->v[r->num][h]);
    }
    r->num++;
}

static const rows *rows_of(const stage *st, int m)
{
    static rows r;
    r.num = (int)kvc_positions(st->cache, m, 0, r.positions, MAX_STORED);
    const kvc_rows_out out = {.struct_size = sizeof out,
                              .k = r.k,
                              .v = r.v,
                              .k_head_stride = sizeof **r.k,
                              .k_row_stride = sizeof *r.k,
                              .v_head_stride = sizeof **r.v,
                              .v_row_stride = sizeof *r.v};
    CHECKF(kvc_gather(st->cache, m, 0, 0, r.num, &out) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < r.num; i++)
        r.tokens[i] = -1;
    for (int t = 0; t < st->n; t++)
        if (st->ids[t] == m)
            add_new(st, t, &r);
    return &r;
}

static int sees(const stage *st, int token, int32_t position, int other)
{
    if (!st->scene->trees || other < 0)
        return position <= st->positions[token];
    while (token > other)
        token = st->parents[token];
    return token == other;
}

static void check_head(const stage *st, const rows *r, int t, int h, const answers *a)
{
    const scene *s = st->scene;
    static double scores[MAX_STORED + MAX_NEW];
    int kv = h * s->layer.num_kv_heads / s->num_heads;
    double top = -INFINITY, sum = 0, right[MAX_DIM] = {0};
    for (int i = 0; i < r->num; i++) {
        scores[i] = 0;
        for (int d = 0; d < s->layer.k_dim; d++)
            scores[i] += (double)element_of(2, st->ids[t], st->rows[t], h * 1024 + d) * r->k[i][kv][d];
        scores[i] *= s->scale ? (double)s->scale : 1 / sqrt(s->layer.k_dim);
        scores[i] = sees(st, t, r->positions[i], r->tokens[i]) ? scores[i] : -INFINITY;
        top = fmax(top, scores[i]);
    }
    for (int i = 0; i < r->num; i++) {
        double weight = exp(scores[i] - top);
        sum += weight;
        for (int d = 0; d < s->layer.v_dim && weight; d++)
            right[d] += weight * r->v[i][kv][d];
    }
    for (int d = 0; d < s->layer.v_dim; d++)
        CHECKF(fabs(a->out[t][h][d] - right[d] / sum) <= 1e-5, "%s: types %d and %d, token %d, head %d: %g, not %g",
               kvc_isa(), s->layer.k_type, s->layer.v_type, t, h, (double)a->out[t][h][d], right[d] / sum);
    CHECK(fabs(a->lse[t][h] - top - log(sum)) <= 2e-5);
}

static void check_scene(const scene *s, const setting *how)
{
    static answers a;
    stage st = stage_new(s, how);
    CHECKF(attend(&st, NULL, &a) == KVC_OK, "%s", kvc_last_error());
    for (int m = 0; m < s->num_members; m++) {
        const rows *r = rows_of(&st, m);
        for (int t = 0; t < st.n; t++)
            for (int h = 0; h < s->num_heads && st.ids[t] == m; h++)
                check_head(&st, r, t, h, &a);
    }
    stage_free(&st);
}

/* ---- rows of every type ------------------------------------------------------------------------------------------ */

static const double *frequencies(void)
{
    static double inv_freq[32];
    for (int i = 0; i < 32; i++)
        inv_freq[i] = pow(10000, -i / 32.0);
    return inv_freq;
}

static kvc_rope rope_of(int first_dim, int num_freqs, int interleaved)
{
    return (kvc_rope){.kind = KVC_ROPE_FREQUENCIES,
                      .interleaved = interleaved,
                      .first_dim = first_dim,
                      .num_freqs = num_freqs,
                      .inv_freq = frequencies()};
}

/* One sequence of two KV heads. */
static scene plain_scene(int dim, int num_stored, int num_new, int moves)
{
    return (scene){.layer = {.num_kv_heads = 2, .k_dim = dim, .v_dim = dim, .rope = rope_of(0, dim / 2, 0)},
                   .num_heads = 6,
                   .num_stored = {num_stored},
                   .num_new = {num_new},
                   .num_members = 1,
                   .moves = moves};
}

/* All mixes of five types, streamed and in tiles, with none, one and several deltas, transformed and not. */
static void test_types(void)
{
    for (int i = 0; i < 100; i++) {
        scene s = plain_scene(i % 3 ? 32 : 64, 90, i % 2 ? 2 : 19, i / 2 % 4);
        s.layer.v_dim = i % 4 ? 32 : 64;
        s.layer.k_type = i / 2 % 5;
        s.layer.v_type = i / 10 % 5;
        s.layer.k_transform = i / 50;
        s.layer.v_transform = i / 50 && i % 7;
        s.layer.rope = rope_of(i % 3 ? 0 : 16, i % 3 ? 16 : 24, i % 2);
        s.trees = i % 3 == 1;
        check_scene(&s, &(setting){.block_size = 16, .num_threads = 1, .settled = i % 5 == 4});
    }
}

/* Rows that are transformed in blocks of 32, 64, 128, 256 and 512, in one part and in several, settled and not. */
static void test_transforms(void)
{
    static const int dims[] = {96, 192, 128, 256, 512};
    for (int i = 0; i < 20; i++) {
        scene s = plain_scene(dims[i % 5], i < 10 ? 90 : 600, i % 2 ? 1 : 23, i % 4);
        s.layer.v_dim = dims[i / 2 % 5];
        s.layer.k_type = s.layer.v_type = i % 3 ? KVC_Q4_0 : KVC_Q8_0;
        s.layer.k_transform = s.layer.v_transform = KVC_TRANSFORM_HADAMARD;
        s.layer.rope = rope_of(dims[i % 5] - 64, 32, i / 3 % 2);
        check_scene(&s, &(setting){.block_size = 32, .num_threads = 1, .settled = i % 5 == 4});
    }
}

/* Deltas that change so often that hardly a tile is full. */
static void test_many_deltas(void)
{
    for (int i = 0; i < 6; i++) {
        scene s = plain_scene(32, 300, i % 2 ? 1 : 23, 40);
        s.layer.k_type = i / 2 ? KVC_Q8_0 : KVC_F32;
        s.layer.k_transform = s.layer.v_transform = i > 3;
        s.layer.v_type = i > 3 ? KVC_Q4_0 : KVC_F32;
        s.num_members = 2;
        s.num_stored[1] = 70;
        s.num_new[1] = 5;
        check_scene(&s, &(setting){.block_size = 7, .num_threads = 1});
    }
}

/* Values that are the first part of the keys. */
static void test_value_in_key(void)
{
    static const struct {
        int k_dim, v_dim, num_freqs, type;
    } cases[] = {{576, 512, 32, KVC_F32}, {576, 512, 32, KVC_F16}, {576, 512, 32, KVC_BF16}, {576, 512, 32, KVC_Q8_0},
                 {576, 512, 32, KVC_Q4_0}, {5, 3, 1, KVC_F32},     {9, 1, 4, KVC_F16},      {4, 4, 0, KVC_F32},
                 {576, 512, 32, KVC_Q8_0}, {576, 512, 32, KVC_Q4_0}, {96, 32, 16, KVC_Q4_0}, {160, 96, 32, KVC_F16}};
    static answers a;
    for (int i = 0; i < 24; i++) {
        int k_dim = cases[i / 2].k_dim, v_dim = cases[i / 2].v_dim, num_freqs = cases[i / 2].num_freqs;
        scene s = plain_scene(32, 70, i % 2 ? 1 : 5, num_freqs ? 2 : 0);
        s.layer = (kvc_layer){.num_kv_heads = 1, .k_dim = k_dim, .v_dim = v_dim, .value_in_key = 1};
        s.layer.k_type = s.layer.v_type = cases[i / 2].type;
        s.layer.k_transform = s.layer.v_transform = i / 2 > 7;
        if (num_freqs)
            s.layer.rope = rope_of(k_dim - 2 * num_freqs, num_freqs, i / 2 % 2);
        s.num_heads = 5;
        s.scale = 1 / sqrtf(192);
        check_scene(&s, &(setting){.block_size = 16, .num_threads = 1});
        stage st = stage_new(&s, &(setting){.block_size = 16});
        s.scale = 0;
        CHECK_FAILS(attend(&st, NULL, &a), KVC_ERR_INVALID, "scale is 0", "must be given");
        stage_free(&st);
    }
}

/* ---- memory that ends where reading faults ----------------------------------------------------------------------- */

/* An allocator whose memory ends at a guard page, or as near as alignment allows; a block's last row ends there. */
typedef struct guard {
    size_t behind;     /* bytes of a block behind its last row */
    char *first_block; /* NULL: none yet */
    size_t block_size; /* bytes */
} guard;

static size_t guarded_size(const guard *g, size_t size, const kvc_memory_hint *hint)
{
    return hint->kind == KVC_MEMORY_ROWS ? size - g->behind : size;
}

static void *guard_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint)
{
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

static void guard_free(void *user, void *memory, size_t size, const kvc_memory_hint *hint)
{
    uintptr_t end = in_pages((uintptr_t)memory + guarded_size(user, size, hint));
    guarded_free((char *)end, (size_t)(end - (uintptr_t)memory));
}

/* Bytes behind the last row of the first block of sequence 0, which fills its slots one by one. */
static size_t bytes_behind(const stage *st, const guard *g, int block_size)
{
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
static void check_guarded(const scene *s, int block_size)
{
    guard g = {0};
    const kvc_allocator allocator = {
        .struct_size = sizeof allocator, .user = &g, .alloc = guard_alloc, .free = guard_free};
    const setting how = {.block_size = block_size, .num_threads = 1, .allocator = &allocator};
    static answers a;
    stage st = stage_new(s, &how);
    size_t behind = bytes_behind(&st, &g, block_size);
    CHECKF(attend(&st, NULL, &a) == KVC_OK, "%s", kvc_last_error());
    stage_free(&st);
    g.behind = behind;
    check_scene(s, &how);
}

/* All blocks are full, the last tile is not: for one query row, for a few, streamed, and for so many that they are
 * tiled.  Values lie at the end of a block; keys do where they are the values as well. */
static void test_guarded(void)
{
    static const int dims[] = {33, 64, 80, 96, 128}, num_new[] = {1, 2, 17};
    static const int block_sizes[] = {1, 32, 50}, num_rows[] = {77, 96, 150};
    for (int i = 0; i < 5 * 5 * 3 * 2; i++) {
        int type = i % 5, dim = dims[i / 5 % 5], tokens = num_new[i / 25 % 3], size = (type + i / 5 + i / 75) % 3;
        if (dim % kvc_type_elements(type))
            continue;
        scene s = plain_scene(dim, num_rows[size] - tokens, tokens, 0);
        s.layer.k_type = s.layer.v_type = type;
        s.layer.rope = (kvc_rope){0};
        s.layer.value_in_key = i / 75;
        s.scale = 0.1f;
        s.num_heads = tokens > 1 ? 4 : 2;
        check_guarded(&s, block_sizes[size]);
    }
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

/* The output of sequence 0. */
static void attend_alone(const scene *s, const setting *how, answers *of_first)
{
    static answers a;
    stage st = stage_new(s, how);
    int n = 0;
    CHECKF(attend(&st, NULL, &a) == KVC_OK, "%s", kvc_last_error());
    memset(of_first, 0, sizeof *of_first);
    for (int t = 0; t < st.n; t++) {
        if (st.ids[t])
            continue;
        memcpy(of_first->out[n], a.out[t], sizeof *a.out);
        memcpy(of_first->lse[n++], a.lse[t], sizeof *a.lse);
    }
    stage_free(&st);
}

static void check_same_bits(const scene *alone)
{
    static const setting settings[] = {
        {.block_size = 64, .num_threads = 3},
        {.block_size = 1, .num_threads = 2, .pass = 41},
        {.block_size = 16, .num_threads = 8, .scattered = 1},
        {.block_size = 1024, .num_threads = 1, .pass = 130},
    };
    static answers right, got;
    scene together = *alone;
    together.num_members = 3;
    together.num_stored[1] = 50;
    together.num_new[1] = 9;
    together.num_stored[2] = 520;
    together.num_new[2] = 3;
    attend_alone(alone, &(setting){.block_size = 64, .num_threads = 1}, &right);
    for (size_t i = 0; i < 2 * sizeof settings / sizeof *settings; i++) {
        attend_alone(i % 2 ? &together : alone, &settings[i / 2], &got);
        CHECKF(!memcmp(&got, &right, sizeof got), "%s: setting %zu", kvc_isa(), i);
    }
}

static void test_same_bits(void)
{
    for (int i = 0; i < 7; i++) {
        scene s = plain_scene(32, 600, i % 2 ? 4 : 37, i % 5);
        s.layer.k_type = i < 5 ? i : KVC_Q8_0;
        s.layer.v_type = i < 5 ? (i + 1) % 5 : KVC_Q4_0;
        s.layer.k_transform = s.layer.v_transform = i >= 5;
        s.trees = i > 1;
        check_same_bits(&s);
    }
}

/* ---- parts of trees ---------------------------------------------------------------------------------------------- */

/* Rows of tokens from which no query descends need not be there, and what is in their slots is no matter. */
static void test_partial_tree(void)
{
    static answers a;
    static float nan[64];
    for (int i = 0; i < 64; i++)
        nan[i] = NAN;
    for (int num_stored = 0; num_stored < 80; num_stored += 70) {
        scene s = plain_scene(32, num_stored, 6, 0);
        s.trees = 1;
        stage st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
        kvc_abort(st.batch);
        const int32_t parents[] = {-1, 0, 0, 1, 2, -1};
        memcpy(st.parents, parents, sizeof parents);
        CHECK(kvc_begin(st.cache, 6, st.positions, st.ids, parents, &st.batch) == KVC_OK);
        const kvc_put_args bad = {.struct_size = sizeof bad, .first = 5, .num_tokens = 1, .k = nan, .v = nan};
        CHECK(kvc_put(st.batch, 0, &bad) == KVC_OK); /* an unrelated token with values that are no numbers */
        put(st.batch, &s, 2, st.ids, st.rows, 0);
        kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 2, .num_tokens = 2};
        const float q[64] = {1};
        const kvc_attend_args args = {
            .struct_size = sizeof args, .q = q, .out = a.out, .out_token_stride = 256, .out_head_stride = 128};
        CHECKF(kvc_attend(st.batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        const float *out = &a.out[0][0][0];
        for (int i = 0; i < 128; i++)
            CHECK(isfinite(out[i]));
        plan.first = 3;
        plan.num_tokens = 1;
        CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "token 3", "layer 0");
        put(st.batch, &s, 1, st.ids + 3, st.rows + 3, 3);
        CHECKF(kvc_attend(st.batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        for (int i = 0; i < 64; i++)
            CHECK(isfinite(out[i]));
        plan.first = 4; /* its parent, 2, is not there */
        CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "token", "layer 0");
        CHECK(kvc_commit_kept(st.batch, (int32_t[]){0, 1, 3}, 3) == KVC_OK);
        CHECK(kvc_seq_len(st.cache, 0, 0) == num_stored + 3 && kvc_validate(st.cache) == KVC_OK);
        CHECK(kvc_cache_free(st.cache) == KVC_OK);
    }
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* A freed plan is reused only for one like it. */
static void test_plans_of_non_causal(void)
{
    static answers causal, some, again;
    const uint8_t none[9] = {0}, one[9] = {0, 0, 1}, all[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8_t *const given[] = {NULL, none, one, all};
    scene s = plain_scene(32, 40, 9, 1);
    stage st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
    kvc_plan *plans[4], *plan = NULL;
    for (int i = 0; i < 4; i++) {
        const kvc_plan_args args = {.struct_size = sizeof args, .num_heads = 6, .non_causal = given[i]};
        CHECK(kvc_plan_new(st.batch, &args, &plans[i]) == KVC_OK);
        for (int j = 0; j < i; j++)
            CHECK(plans[i] != plans[j]);
        kvc_plan_free(plans[i]);
        CHECK(kvc_plan_new(st.batch, &args, &plan) == KVC_OK && plan == plans[i]);
        kvc_plan_free(plan);
    }
    CHECK(attend(&st, NULL, &causal) == KVC_OK && attend(&st, none, &again) == KVC_OK);
    CHECK(!memcmp(&causal, &again, sizeof again));
    CHECK(attend(&st, one, &some) == KVC_OK);
    for (int t = 0; t < 9; t++) /* the one sees all nine, as does the last */
        CHECK(!memcmp(causal.out[t], some.out[t], sizeof *some.out) == (t != 2));
    CHECK(attend(&st, all, &again) == KVC_OK && !memcmp(some.out[2], again.out[2], sizeof *some.out));
    CHECK(memcmp(causal.out[0], again.out[0], sizeof *again.out));
    stage_free(&st);
}

/* Plans of cross-attention layers end with the rows they go over. */
static void test_plans_of_cross_rows(void)
{
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {KVC_CROSS, .max_len = 5}},
                                {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {KVC_CROSS, .max_len = 5}}};
    const kvc_config config = {
        .struct_size = sizeof config, .layers = layers, .layer_size = sizeof *layers, .num_layers = 3};
    const float rows[] = {1, 2, 3, 4, 5, 6, 7, 8};
    float out[4];
    kvc_cache *cache;
    kvc_batch *batch;
    kvc_plan *plan = NULL, *other = NULL;
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK);
    CHECK(kvc_begin(cache, 1, (int32_t[]){0}, (int64_t[]){4}, NULL, &batch) == KVC_OK);
    kvc_put_args put_args = {.struct_size = sizeof put_args, .num_tokens = 1, .k = rows, .v = rows, .seq_id = 4};
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .layer = 1, .num_heads = 1};
    kvc_attend_args args = {.struct_size = sizeof args, .q = rows, .out = out};
    CHECK_FAILS(kvc_attend(batch, &plan_args, &args), KVC_ERR_INVALID, "sequence 4", "layer 1");
    CHECK(kvc_put(batch, 1, &put_args) == KVC_OK && kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    CHECK(kvc_plan_run(plan, 1, &args, 0) == KVC_OK && out[0] == 1 && out[3] == 4);
    put_args.k = put_args.v = rows + 4;
    CHECK(kvc_put(batch, 2, &put_args) == KVC_OK); /* nothing to the plan of layer 1 */
    CHECKF(kvc_plan_run(plan, 1, &args, 0) == KVC_OK && out[0] == 1, "%s", kvc_last_error());
    CHECK(kvc_put(batch, 1, &put_args) == KVC_OK);
    CHECK_FAILS(kvc_plan_run(plan, 1, &args, 0), KVC_ERR_INVALID, "layer 1", "make another");
    kvc_plan_free(plan);
    CHECK(kvc_plan_new(batch, &plan_args, &other) == KVC_OK && other != plan);
    CHECK(kvc_plan_run(other, 1, &args, 0) == KVC_OK && out[0] == 5 && out[3] == 8);
    kvc_plan_free(other);
    put_args.k = put_args.v = rows;
    args.put = &put_args; /* put and attended to in one call */
    CHECK(kvc_attend(batch, &plan_args, &args) == KVC_OK && out[0] == 1 && out[3] == 4);
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Sequences are apart only where their tokens come one after the other, as many of each. */
static void test_not_in_step(void)
{
    static float k[4 * 3];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4};
    const kvc_config config = {
        .struct_size = sizeof config, .layers = &layer, .layer_size = sizeof layer, .num_layers = 1};
    const kvc_rows_out rows = {.struct_size = sizeof rows, .k = k};
    const kvc_dense_args args = {.struct_size = sizeof args, .rows = &rows, .by_sequence = 1};
    const int64_t ids[][4] = {{5, 5, 6}, {5, 6, 5, 6}, {6, 6, 5, 5}};
    static const char *const wrong[] = {"sequence 5 has 2", "token 1", NULL};
    kvc_cache *cache = NULL;
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK);
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

/* ---- bad arguments ----------------------------------------------------------------------------------------------- */

static void test_bad_dense(const stage *st)
{
    static float k[2 * 40 * 32];
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
    const kvc_rows_out good_rows = {.struct_size = sizeof good_rows, .k = k, .k_row_stride = 128};
    const kvc_dense_args good = {.struct_size = sizeof good, .rows = &good_rows, .num_rows = num};
#define BAD(status, layer, name, value, ...)                                                                           \
    do {                                                                                                               \
        kvc_rows_out rows = good_rows;                                                                                 \
        kvc_dense_args args = good;                                                                                    \
        args.rows = &rows;                                                                                             \
        __VA_ARGS__;                                                                                                   \
        CHECK_FAILS(kvc_dense(st->batch, layer, &args), status, name, value);                                          \
    } while (0)
    BAD(KVC_ERR_INDEX, 1, "layer", "is 1:", (void)args);
    BAD(KVC_ERR_INVALID, 0, "args", "given as 9", args.struct_size = 9);
    BAD(KVC_ERR_INVALID, 0, "rows", "given as 0", rows.struct_size = 0);
    BAD(KVC_ERR_INVALID, 0, "rows", "NULL", args.rows = NULL);
    BAD(KVC_ERR_INVALID, 0, "type", "is 4:", rows.type = KVC_Q4_0);
    BAD(KVC_ERR_INVALID, 0, "strides", "2", rows.k_row_stride = 2);
    BAD(KVC_ERR_INVALID, 0, "mask", "6", args.mask_token_stride = 6);
    BAD(KVC_ERR_INVALID, 0, "num_rows is 14", "15", args.num_rows = 14);
    BAD(KVC_ERR_INVALID, 0, "num_rows is -1", "15", args.num_rows = -1);
    BAD(KVC_ERR_INVALID, 0, "num_rows is 14", "most", args.num_rows = 14, args.by_sequence = 1);
    BAD(KVC_ERR_INVALID, 0, "strides", "6", args.k_batch_stride = 6, args.by_sequence = 1);
#undef BAD
    CHECK_FAILS(kvc_dense(st->batch, 0, NULL), KVC_ERR_INVALID, "args", "NULL");
    CHECK(k[0] == 0 && kvc_dense(st->batch, 0, &good) == KVC_OK && k[0] != 0); /* keys alone */
}

static void test_bad_arguments(void)
{
    static float q[6 * 32 * 5];
    scene s = plain_scene(32, 10, 5, 1);
    stage st = stage_new(&s, &(setting){.block_size = 16});
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 2};
    kvc_attend_args args = {.struct_size = sizeof args, .q = q, .out = q};
    test_bad_dense(&st);
    args.tokens_per_sequence = 2;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "tokens_per_sequence", "is 2:");
    args.tokens_per_sequence = -1;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "tokens_per_sequence", "is -1:");
    args.tokens_per_sequence = 5;
    args.q_batch_stride = 3;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "strides", "3");
    args.q_batch_stride = 0;
    args.lse_batch_stride = 2;
    CHECK_FAILS(kvc_attend(st.batch, &plan, &args), KVC_ERR_INVALID, "lse", "2");
    stage_free(&st);
}

/* ---- everything -------------------------------------------------------------------------------------------------- */

static void test_isa(void)
{
    test_types();
    test_transforms();
    test_many_deltas();
    test_value_in_key();
    test_guarded();
    test_same_bits();
    test_partial_tree();
    test_plans_of_non_causal();
}

int main(void)
{
    test_bad_arguments();
    test_plans_of_cross_rows();
    test_not_in_step();
    for_some_isas(test_isa);
    return test_result();
}
