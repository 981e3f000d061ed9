/* scene.h: sequences to attend over.  What a row holds follows from its sequence and its place there, so that the same
 * sequence can be stored in many ways: in other blocks, passes and company, with holes, by more threads. */
#ifndef KVC_SCENE_H
#define KVC_SCENE_H

#include <math.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "kvcache.h"
#include "support/test.h"

enum {
    MAX_MEMBERS = 4,
    MAX_POSITIONS = 1700,
    MAX_NEW = 80,
    MAX_DIM = 128,
    MAX_KV_HEADS = 2,
    MAX_HEADS = 32,
    FILLER = 1000 /* id of the sequence whose slots lie between */
};

/* A sequence: what is stored before the batch, and its tokens of the batch. */
typedef struct member {
    int32_t num_stored, num_new;
    int32_t positions[MAX_POSITIONS]; /* the stored rows', then the new ones' */
} member;

typedef struct scene {
    kvc_layer layer;
    int num_layers; /* all alike; 0: one */
    int num_heads, q_type;
    float scale, softcap;
    const float *sinks, *alibi;
    int masked_keys; /* keys are -inf: no query sees them */
    int num_members; /* their sequence ids are 0, 1, 2, ... */
    member members[MAX_MEMBERS];
} scene;

/* How a scene is stored and computed; zeros for the defaults. */
typedef struct setting {
    int block_size, num_threads;
    int pass;      /* tokens in a pass before the batch; 0: MAX_NEW */
    int scattered; /* slots of a cleared sequence lie between all others */
    int compacted; /* the holes were closed */
} setting;

/* A cache with the scene in it, and its batch open. */
typedef struct stage {
    const scene *scene;
    kvc_cache *cache;
    kvc_batch *batch;
    int num_tokens; /* in the batch */
    int member_of[MAX_MEMBERS * MAX_NEW];
    int row_of[MAX_MEMBERS * MAX_NEW]; /* its row in its member */
} stage;

/* Positions 0 .. num_stored - 1, and num_new more. */
static inline member member_of_length(int32_t num_stored, int32_t num_new)
{
    member m = {.num_stored = num_stored, .num_new = num_new};
    CHECK(num_stored + num_new <= MAX_POSITIONS && num_new <= MAX_NEW);
    for (int32_t i = 0; i < num_stored + num_new; i++)
        m.positions[i] = i;
    return m;
}

/* ---- what rows hold ---------------------------------------------------------------------------------------------- */

enum { IS_K, IS_V, IS_Q };

/* An element of a row, of [-1, 1), with no more bits than the type holds. */
static inline float scene_element(int what, int type, int layer, int m, int row, int head, int d)
{
    uint32_t x = (uint32_t)row * 0x9e3779b1u + (uint32_t)((layer * 4 + m) * 4 + what) * 0x7feb352du +
                 (uint32_t)(head * MAX_DIM + d) * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    x ^= x >> 15;
    return type == KVC_F32 ? (float)(x >> 8) * 0x1p-23f - 1 : (float)(x >> 24) * 0x1p-7f - 1;
}

static inline float key_element(const scene *s, int layer, int m, int row, int head, int d)
{
    return s->masked_keys ? -INFINITY : scene_element(IS_K, s->layer.k_type, layer, m, row, head, d);
}

static inline float value_element(const scene *s, int layer, int m, int row, int head, int d)
{
    return scene_element(IS_V, s->layer.v_type, layer, m, row, head, d);
}

/* Positive where keys are masked, so that scores are -inf and not NaN. */
static inline float query_element(const scene *s, int layer, int m, int row, int head, int d)
{
    float q = scene_element(IS_Q, s->q_type, layer, m, row, head, d);
    return s->masked_keys ? fabsf(q) + 1 : q;
}

/* ---- storing it -------------------------------------------------------------------------------------------------- */

/* The tokens of one pass. */
typedef struct pass {
    int n;
    int32_t positions[2 * MAX_MEMBERS * MAX_NEW];
    int64_t ids[2 * MAX_MEMBERS * MAX_NEW];
    int rows[2 * MAX_MEMBERS * MAX_NEW];
} pass;

static inline void pass_add(pass *p, int64_t id, int row, int32_t position)
{
    p->ids[p->n] = id;
    p->rows[p->n] = row;
    p->positions[p->n++] = position;
}

/* Keys and values of tokens [first, first + n) of a pass in a layer, as kvc_put takes them. */
typedef struct source {
    float *k, *v;
    kvc_put_args args;
} source;

static inline source source_new(const scene *s, int layer, const pass *p, int first, int n)
{
    int heads = s->layer.num_kv_heads, k_dim = s->layer.k_dim, v_dim = s->layer.v_dim;
    source src = {.k = malloc((size_t)(n * heads * k_dim) * sizeof(float)),
                  .v = malloc((size_t)(n * heads * v_dim) * sizeof(float))};
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < heads; h++) {
            int m = (int)p->ids[first + t] % MAX_MEMBERS, row = p->rows[first + t];
            for (int d = 0; d < k_dim; d++)
                src.k[(t * heads + h) * k_dim + d] = key_element(s, layer, m, row, h, d);
            for (int d = 0; d < v_dim; d++)
                src.v[(t * heads + h) * v_dim + d] = value_element(s, layer, m, row, h, d);
        }
    }
    src.args = (kvc_put_args){.struct_size = sizeof src.args,
                              .first = first,
                              .num_tokens = n,
                              .k = src.k,
                              .v = src.v,
                              .k_token_stride = (int64_t)sizeof(float) * heads * k_dim,
                              .k_head_stride = (int64_t)sizeof(float) * k_dim,
                              .v_token_stride = (int64_t)sizeof(float) * heads * v_dim,
                              .v_head_stride = (int64_t)sizeof(float) * v_dim};
    return src;
}

static inline void source_free(source *src)
{
    free(src->k);
    free(src->v);
}

static inline kvc_status scene_put(const scene *s, kvc_batch *batch, int layer, const pass *p, int first, int n)
{
    source src = source_new(s, layer, p, first, n);
    kvc_status status = kvc_put(batch, layer, &src.args);
    source_free(&src);
    return status;
}

/* Opens a batch with the tokens of a pass, put in every layer. */
static inline kvc_batch *scene_begin(const scene *s, kvc_cache *cache, const pass *p)
{
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, p->n, p->positions, p->ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < (s->num_layers ? s->num_layers : 1); l++)
        CHECKF(scene_put(s, batch, l, p, 0, p->n) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

/* The next tokens of all members, `most` of each, mixed: those that are stored before, or new. */
static inline void pass_fill(pass *p, const scene *s, int *next, int most, int is_new, const setting *how)
{
    p->n = 0;
    for (int i = 0; i < most; i++) {
        for (int m = 0; m < s->num_members; m++) {
            const member *who = &s->members[m];
            if (next[m] >= who->num_stored + (is_new ? who->num_new : 0))
                continue;
            pass_add(p, m, next[m], who->positions[next[m]]);
            next[m]++;
            if (how->scattered && !is_new)
                pass_add(p, FILLER, 0, 0);
        }
    }
}

static inline kvc_cache *scene_cache(const scene *s, const setting *how)
{
    kvc_layer layers[4];
    int num_layers = s->num_layers ? s->num_layers : 1;
    for (int l = 0; l < num_layers; l++)
        layers[l] = s->layer;
    return cache_of(layers, num_layers, (kvc_config){.block_size = how->block_size, .num_threads = how->num_threads});
}

static inline stage stage_new(const scene *s, const setting *how)
{
    static pass p; /* large */
    int next[MAX_MEMBERS] = {0};
    stage st = {.scene = s, .cache = scene_cache(s, how)};
    for (pass_fill(&p, s, next, how->pass ? how->pass : MAX_NEW, 0, how); p.n;
         pass_fill(&p, s, next, how->pass ? how->pass : MAX_NEW, 0, how))
        CHECKF(kvc_commit(scene_begin(s, st.cache, &p)) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_clear_sequence(st.cache, FILLER) == KVC_OK);
    if (how->compacted)
        CHECK(kvc_compact(st.cache) == KVC_OK);
    pass_fill(&p, s, next, MAX_NEW, 1, how);
    st.batch = scene_begin(s, st.cache, &p);
    st.num_tokens = p.n;
    for (int t = 0; t < p.n; t++) {
        st.member_of[t] = (int)p.ids[t];
        st.row_of[t] = p.rows[t];
    }
    return st;
}

static inline void stage_free(stage *st)
{
    CHECKF(kvc_commit(st->batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_validate(st->cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(st->cache) == KVC_OK, "%s", kvc_last_error());
}

/* ---- attending --------------------------------------------------------------------------------------------------- */

/* The queries of tokens [first, first + n) of a stage's batch, and room for what comes out, each in its own memory, of
 * exactly its size. */
typedef struct question {
    int layer, first, n;
    char *q, *out;
    float *lse;
    kvc_plan_args plan;
    kvc_attend_args args;
} question;

static inline question question_new(const stage *st, int layer, int first, int n)
{
    const scene *s = st->scene;
    int64_t element = s->q_type == KVC_F32 ? 4 : 2, k_row = element * s->layer.k_dim, v_row = element * s->layer.v_dim;
    question a = {.layer = layer, .first = first, .n = n};
    a.q = malloc((size_t)(n * s->num_heads * k_row));
    a.out = malloc((size_t)(n * s->num_heads * v_row));
    a.lse = malloc((size_t)(n * s->num_heads) * sizeof *a.lse);
    memset(a.out, 0x7f, (size_t)(n * s->num_heads * v_row));
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < s->num_heads; h++) {
            float row[MAX_DIM];
            for (int d = 0; d < s->layer.k_dim; d++)
                row[d] = query_element(s, layer, st->member_of[first + t], st->row_of[first + t], h, d);
            kvc_kernels_scalar.convert(KVC_F32, s->q_type, a.q + (t * s->num_heads + h) * k_row, 0, row, 0, 1,
                                                           s->layer.k_dim);
        }
    }
    a.plan = (kvc_plan_args){.struct_size = sizeof a.plan,
                             .layer = layer,
                             .first = first,
                             .num_tokens = n,
                             .num_heads = s->num_heads};
    a.args = (kvc_attend_args){.struct_size = sizeof a.args,
                               .q = a.q,
                               .out = a.out,
                               .lse = a.lse,
                               .sinks = s->sinks,
                               .alibi = s->alibi,
                               .q_token_stride = s->num_heads * k_row,
                               .q_head_stride = k_row,
                               .out_token_stride = s->num_heads * v_row,
                               .out_head_stride = v_row,
                               .lse_token_stride = s->num_heads * (int64_t)sizeof *a.lse,
                               .lse_head_stride = sizeof *a.lse,
                               .q_type = s->q_type,
                               .scale = s->scale,
                               .softcap = s->softcap};
    return a;
}

static inline void question_free(question *a)
{
    free(a->q);
    free(a->out);
    free(a->lse);
}

/* What came out for token t (of the range), head h. */
static inline void read_out(const stage *st, const question *a, int t, int h, float *row)
{
    const scene *s = st->scene;
    const char *from = a->out + t * a->args.out_token_stride + h * a->args.out_head_stride;
    kvc_kernels_scalar.convert(s->q_type, KVC_F32, row, 0, from, 0, 1, s->layer.v_dim);
}

#endif
