/* scene.h: sequences to attend over.  The contents of a row follow from its sequence and its number there.  So the same
 * sequence can be stored in many ways: in other blocks, passes and company, with holes, or without the rows that a call
 * hides. */
#ifndef KVC_SCENE_H
#define KVC_SCENE_H

#include <math.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "kernels/kernels.h"
#include "kvcache.h"
#include "support/test.h"
#include "world/attention.h"

enum {
    MAX_MEMBERS = 5,
    MAX_POSITIONS = 3000,
    MAX_NEW = 310,
    MAX_PASS = MAX_MEMBERS * MAX_NEW * 2,
    MAX_DIM = SIGHT_DIM,
    MAX_KV_HEADS = 2,
    MAX_HEADS = 128,
    MAX_MASKED = 1024,
    FILLER = 1000 /* id of the sequence whose slots lie between */
};

/* A sequence: what is stored before the batch, and its tokens of the batch. */
typedef struct member {
    int32_t num_stored, num_new;
    int32_t positions[MAX_POSITIONS]; /* the stored rows', then the new ones', before rows are moved */
} member;

typedef struct scene {
    kvc_layer layer;
    int num_layers; /* all alike; 0: one */
    int num_heads, q_type;
    float scale, softcap;
    const float *sinks, *alibi;
    int masked_keys; /* keys are -inf: no query sees them */
    int is_whole;    /* elements are integers, which int8 and q8_0 store as they are */
    float value;     /* of each element of the values; 0: they differ */
    int is_tree;     /* each token of the batch descends from an earlier token of its sequence, or from no token */
    int is_forked;   /* all members have the stored rows of member 0, in the same slots */
    int num_moves;   /* how many pieces of each sequence are moved apart once they are stored */
    int32_t delta;   /* by how much; 0: each by another distance */
    int num_bad;     /* 1: row `bad` of member 0 holds `number`s */
    int bad;
    float number;
    int num_masked;
    kvc_masked masked[MAX_MASKED]; /* as of the time of the batch */
    int num_members;               /* their sequence ids are 0, 1, 2, ... */
    member members[MAX_MEMBERS];
} scene;

/* How a scene is stored and computed; zeros for the defaults. */
typedef struct setting {
    int block_size, num_threads;
    int pass;       /* tokens of each member in a pass before the batch; 0: 80 */
    int scattered;  /* slots of a cleared sequence lie between the slots of passes */
    int thinned;    /* one position behind each stored row stood another one, which was removed */
    int compacted;  /* the holes were closed */
    int without;    /* masked rows were never put; else they are no numbers, if that is possible */
    int is_missing; /* masked tokens of the batch are not put */
    const kvc_allocator *allocator;
} setting;

/* The tokens of one pass; rows: their numbers in their members. */
typedef struct pass {
    int n;
    int32_t positions[MAX_PASS], parents[MAX_PASS];
    int64_t ids[MAX_PASS];
    int rows[MAX_PASS];
} pass;

/* A cache with the scene in it, and its batch open. */
typedef struct stage {
    const scene *scene;
    kvc_cache *cache;
    kvc_batch *batch;
    pass tokens;
} stage;

/* Positions 0 .. num_stored - 1, and num_new more. */
static inline member member_of_length(int32_t num_stored, int32_t num_new) {
    member m = {.num_stored = num_stored, .num_new = num_new};
    CHECK(num_stored + num_new <= MAX_POSITIONS && num_new <= MAX_NEW);
    for (int32_t i = 0; i < num_stored + num_new; i++) m.positions[i] = i;
    return m;
}

/* One sequence. */
static inline scene plain_scene(int num_kv_heads, int group, int dim, int num_stored, int num_new) {
    return (scene){.layer = {.num_kv_heads = num_kv_heads, .k_dim = dim, .v_dim = dim},
                   .num_heads = num_kv_heads * group,
                   .num_members = 1,
                   .members = {member_of_length(num_stored, num_new)}};
}

/* Rotates pairs of elements from first_dim on, of 64. */
static inline kvc_rope rope_of(int first_dim, int num_freqs, int interleaved) {
    static double inv_freq[MAX_DIM / 2];
    for (int i = 0; i < MAX_DIM / 2; i++) inv_freq[i] = pow(10000, -i / 32.0);
    return (kvc_rope){.kind = KVC_ROPE_FREQUENCIES,
                      .interleaved = interleaved,
                      .first_dim = first_dim,
                      .num_freqs = num_freqs,
                      .inv_freq = inv_freq};
}

/* ---- where rows stand, and what they hold ------------------------------------------------------------------------ */

/* The beginning of the piece that move i, from 1 on, moves once the earlier moves are done, and the distance. */
static inline int32_t begin_of(const scene *s, int m, int i, int32_t *delta) {
    const member *who = &s->members[m];
    int32_t next = who->num_stored ? who->positions[who->num_stored - 1] + 1 : 0;
    for (int j = 1; j <= i; j++) {
        *delta = s->delta ? s->delta : 3 + j + 7 * m;
        next += j < i ? *delta : 0;
    }
    return next - who->num_stored * i / (s->num_moves + 1);
}

/* The position of a row at the time of the batch. */
static inline int32_t position_of(const scene *s, int m, int row) {
    int32_t position = s->members[m].positions[row], delta = 0;
    for (int i = 1; i <= s->num_moves; i++) {
        const int32_t begin = begin_of(s, m, i, &delta);
        position += position >= begin || row >= s->members[m].num_stored ? delta : 0;
    }
    return position;
}

static inline int is_masked(const scene *s, int64_t id, int32_t position) {
    return hides_row(s->masked, s->num_masked, id, position);
}

static inline int is_float(int type) { return type <= KVC_BF16; }

/* Whether a row is to be seen by nobody, so that it may hold what it likes. */
static inline int is_spoilt(const scene *s, const setting *how, int m, int row) {
    const int is_shared = s->is_forked && row < s->members[m].num_stored;
    return s->num_masked && !how->without && !is_shared && is_float(s->layer.k_type) && is_float(s->layer.v_type) &&
           is_masked(s, m, position_of(s, m, row));
}

enum { IS_K, IS_V, IS_Q };

/* An element of a row, of [-1, 1); as a query of 16 bits, with no more bits than the type holds. */
static inline float scene_element(const scene *s, int what, int layer, int m, int row, int head, int d) {
    const int content = s->is_forked && row < s->members[0].num_stored ? 0 : m;
    const float x = element_of(what, layer * MAX_MEMBERS + content, row, head * 1024 + d);
    if (what == IS_V && s->value != 0) return s->value;
    if (what != IS_Q && s->num_bad && m == 0 && row == s->bad && d % 7 == 3) return s->number;
    if (s->is_whole) return d % KVC_QUANT_ELEMENTS ? floorf(x * 4) : x < 0 ? -127 : 127;
    return what == IS_Q && s->q_type != KVC_F32 ? floorf(x * 128) / 128 : x;
}

static inline float key_element(const scene *s, int layer, int m, int row, int head, int d) {
    return s->masked_keys ? -INFINITY : scene_element(s, IS_K, layer, m, row, head, d);
}

/* Positive where keys are masked, so that scores are -inf and not NaN. */
static inline float query_element(const scene *s, int layer, int m, int row, int head, int d) {
    const float q = scene_element(s, IS_Q, layer, m, row, head, d);
    return s->masked_keys ? fabsf(q) + 1 : q;
}

/* ---- storing it -------------------------------------------------------------------------------------------------- */

static inline void pass_add(pass *p, int64_t id, int row, int32_t position) {
    CHECK(p->n < MAX_PASS);
    p->ids[p->n] = id;
    p->rows[p->n] = row;
    p->positions[p->n++] = position;
}

static inline int scene_stride(const scene *s) { return s->layer.policy.stride > 1 ? s->layer.policy.stride : 1; }

/* Whether the scene's layers have rows at a position. */
static inline int has_row(const scene *s, int32_t position) { return (position + 1) % scene_stride(s) == 0; }

/* Keys and values of tokens [first, first + n) of a pass in a layer, as kvc_put takes them. */
typedef struct source {
    float *k, *v;
    kvc_put_args args;
} source;

static inline source source_new(const scene *s, const setting *how, int layer, const pass *p, int first, int n) {
    const int heads = s->layer.num_kv_heads, k_dim = s->layer.k_dim, v_dim = s->layer.v_dim;
    source src = {.k = malloc((size_t)(n * heads * k_dim) * sizeof(float)),
                  .v = malloc((size_t)(n * heads * v_dim) * sizeof(float))};
    for (int t = first, num = 0; t < first + n; t++) {
        const int m = (int)p->ids[t] % FILLER, row = p->rows[t], spoilt = is_spoilt(s, how, m, row);
        if (!has_row(s, p->positions[t])) continue;
        for (int i = 0; i < heads * k_dim; i++)
            src.k[num * heads * k_dim + i] = spoilt ? NAN : key_element(s, layer, m, row, i / k_dim, i % k_dim);
        for (int i = 0; i < heads * v_dim; i++)
            src.v[num * heads * v_dim + i] =
                spoilt ? INFINITY : scene_element(s, IS_V, layer, m, row, i / v_dim, i % v_dim);
        num++;
    }
    src.args = float_rows(first, n, heads, k_dim, v_dim, src.k, s->layer.value_in_key || !v_dim ? NULL : src.v);
    return src;
}

static inline void source_free(source *src) {
    free(src->k);
    free(src->v);
}

static inline void scene_put(const scene *s, const setting *how, kvc_batch *batch, int layer, const pass *p, int first,
                             int n) {
    source src = source_new(s, how, layer, p, first, n);
    CHECKF(kvc_put(batch, layer, &src.args) == KVC_OK, "%s", kvc_last_error());
    source_free(&src);
}

/* Opens a batch with the tokens of a pass, put in every layer. */
static inline kvc_batch *scene_begin(const scene *s, const setting *how, kvc_cache *cache, const pass *p,
                                     const int32_t *parents) {
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, p->n, p->positions, p->ids, parents, &batch) == KVC_OK, "%s", kvc_last_error());
    const int num_layers = s->num_layers ? s->num_layers : 1;
    kvc_put_args keys = zero_rows(0, 0);
    keys.v = NULL;
    if (scene_stride(s) > 1) CHECKF(kvc_put(batch, num_layers, &keys) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < num_layers; l++) {
        if (!how->is_missing) scene_put(s, how, batch, l, p, 0, p->n);
        for (int t = 0; how->is_missing && t < p->n; t++)
            if (!is_masked(s, p->ids[t], p->positions[t])) scene_put(s, how, batch, l, p, t, 1);
    }
    return batch;
}

/* The next stored tokens of all members, mixed.  If others share the rows of a member, only this member's tokens.
 * Returns the number of tokens, with tokens that are left out. */
static inline int pass_fill(pass *p, const scene *s, int *next, const setting *how) {
    const int members = s->is_forked && !how->without ? 1 : s->num_members;
    int num = 0;
    p->n = 0;
    for (int i = 0; i < (how->pass ? how->pass : 80); i++)
        for (int m = 0; m < members; m++) {
            const int row = next[m];
            if (row >= s->members[m].num_stored) continue;
            next[m]++;
            num++;
            if (!how->without || !is_masked(s, m, position_of(s, m, row)))
                pass_add(p, m, row, s->members[m].positions[row]);
            if (how->thinned) pass_add(p, m, 0, s->members[m].positions[row] + 1);
            if (how->scattered) pass_add(p, FILLER, 0, 0);
        }
    return num;
}

static inline kvc_cache *scene_cache(const scene *s, const setting *how) {
    kvc_layer layers[5];
    int num_layers = s->num_layers ? s->num_layers : 1;
    for (int l = 0; l < num_layers; l++) layers[l] = s->layer;
    if (scene_stride(s) > 1) layers[num_layers++] = (kvc_layer){.num_kv_heads = 1, .k_dim = 1}; /* has all tokens */
    return cache_of(
        layers, num_layers,
        (kvc_config){.block_size = how->block_size, .num_threads = how->num_threads, .allocator = how->allocator});
}

static inline void scene_store(const scene *s, const setting *how, kvc_cache *cache) {
    static pass p; /* large */
    const setting all = {.without = how->without};
    int next[MAX_MEMBERS] = {0};
    while (pass_fill(&p, s, next, how))
        if (p.n) CHECKF(kvc_commit(scene_begin(s, &all, cache, &p, NULL)) == KVC_OK, "%s", kvc_last_error());
}

/* The tokens of the batch, of all members in turn. */
static inline void list_tokens(stage *st, const setting *how) {
    const scene *s = st->scene;
    int last[MAX_MEMBERS][MAX_NEW];
    for (int i = 0; i < MAX_NEW; i++)
        for (int m = 0; m < s->num_members; m++) {
            const int row = s->members[m].num_stored + i, parent = i ? (i * 7 + 3) % (i + 2) - 1 : -1;
            if (i >= s->members[m].num_new) continue;
            const int32_t position = position_of(s, m, row) - (s->is_tree ? i - i / 3 : 0);
            if (how->without && is_masked(s, m, position)) continue;
            st->tokens.parents[st->tokens.n] = parent < 0 || parent >= i ? -1 : last[m][parent];
            last[m][i] = st->tokens.n;
            pass_add(&st->tokens, m, row, position);
        }
}

static inline stage *stage_new(const scene *s, const setting *how) {
    stage *st = calloc(1, sizeof *st);
    int32_t delta = 0;
    st->scene = s;
    st->cache = scene_cache(s, how);
    scene_store(s, how, st->cache);
    for (int m = 1; m < s->num_members && s->is_forked && !how->without; m++)
        CHECK(kvc_fork(st->cache, 0, m) == KVC_OK);
    CHECK(kvc_clear_sequence(st->cache, FILLER) == KVC_OK);
    for (int m = 0; m < s->num_members && how->thinned; m++) {
        const member *who = &s->members[m];
        CHECKF(kvc_keep_positions(st->cache, m, who->positions, who->num_stored) == KVC_OK, "%s", kvc_last_error());
    }
    if (how->compacted) CHECK(kvc_compact(st->cache) == KVC_OK);
    for (int m = 0; m < s->num_members; m++)
        for (int i = 1; i <= s->num_moves; i++) {
            const int32_t begin = begin_of(s, m, i, &delta);
            CHECKF(kvc_shift(st->cache, m, begin, KVC_END, delta) == KVC_OK, "%s", kvc_last_error());
        }
    list_tokens(st, how);
    st->batch = scene_begin(s, how, st->cache, &st->tokens, s->is_tree ? st->tokens.parents : NULL);
    return st;
}

static inline void stage_free(stage *st) {
    kvc_abort(st->batch);
    CHECKF(kvc_validate(st->cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_cache_free(st->cache) == KVC_OK, "%s", kvc_last_error());
    free(st);
}

/* ---- attending --------------------------------------------------------------------------------------------------- */

static kvc_precision precision; /* of the plans of questions to come */

/* The queries of tokens [first, first + n) of a stage's batch, and room for what comes out, each in its own memory, of
 * exactly its size. */
typedef struct question {
    const stage *stage;
    int layer, first, n;
    char *q, *out;
    float *lse;
    kvc_plan_args plan;
    kvc_attend_args args;
} question;

static inline question question_new(const stage *st, int layer, int first, int n) {
    const scene *s = st->scene;
    const int64_t size = s->q_type == KVC_F32 ? 4 : 2, k_row = size * s->layer.k_dim, v_row = size * s->layer.v_dim;
    question a = {.stage = st, .layer = layer, .first = first, .n = n};
    a.q = malloc((size_t)(n * s->num_heads * k_row));
    a.out = malloc((size_t)(n * s->num_heads * v_row));
    a.lse = malloc((size_t)(n * s->num_heads) * sizeof *a.lse);
    memset(a.out, 0x7f, (size_t)(n * s->num_heads * v_row));
    for (int i = 0; i < n * s->num_heads; i++) {
        const int t = first + i / s->num_heads, h = i % s->num_heads;
        float row[MAX_DIM];
        for (int d = 0; d < s->layer.k_dim; d++)
            row[d] = query_element(s, layer, (int)st->tokens.ids[t], st->tokens.rows[t], h, d);
        kvc_kernels_scalar.convert(KVC_F32, s->q_type, a.q + i * k_row, 0, row, 0, 1, s->layer.k_dim);
    }
    a.plan = (kvc_plan_args){.struct_size = sizeof a.plan,
                             .layer = layer,
                             .first = first,
                             .num_tokens = n,
                             .num_heads = s->num_heads,
                             .precision = precision};
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

static inline question question_of_all(const stage *st) { return question_new(st, 0, 0, st->tokens.n); }

/* Leaves out strides of rows that lie side by side, or not. */
static inline void leave_out(int64_t *head_stride, int64_t *token_stride, int64_t row, int64_t heads) {
    if (*head_stride != row) return;
    if (*token_stride == heads * row && random_int(0, 2)) *token_stride = 0;
    if (random_int(0, 2)) *head_stride = 0;
}

static inline kvc_status ask(const question *a) {
    const scene *s = a->stage->scene;
    const int64_t size = s->q_type == KVC_F32 ? 4 : 2, heads = s->num_heads;
    kvc_attend_args args = a->args;
    leave_out(&args.q_head_stride, &args.q_token_stride, size * s->layer.k_dim, heads);
    leave_out(&args.out_head_stride, &args.out_token_stride, size * s->layer.v_dim, heads);
    leave_out(&args.lse_head_stride, &args.lse_token_stride, sizeof *a->lse, heads);
    return kvc_attend(a->stage->batch, &a->plan, &args);
}

static inline void question_free(question *a) {
    free(a->q);
    free(a->out);
    free(a->lse);
}

/* The result for token t (of the range), head h. */
static inline void read_out(const question *a, int t, int h, float *row) {
    const scene *s = a->stage->scene;
    const char *from = a->out + t * a->args.out_token_stride + h * a->args.out_head_stride;
    kvc_kernels_scalar.convert(s->q_type, KVC_F32, row, 0, from, 0, 1, s->layer.v_dim);
}

/* Whether tokens t of a and u of b got the same bits. */
static inline int same_bits(const question *a, int t, const question *b, int u) {
    const size_t out = (size_t)a->args.out_token_stride, lse = (size_t)a->args.lse_token_stride;
    return !memcmp(a->out + (size_t)t * out, b->out + (size_t)u * out, out) &&
           !memcmp((char *)a->lse + (size_t)t * lse, (char *)b->lse + (size_t)u * lse, lse);
}

/* Makes sure that what is found later was written since. */
static inline void wipe(question *a) {
    memset(a->out, 0x7f, (size_t)(a->n * a->args.out_token_stride));
    memset(a->lse, 0x7f, (size_t)(a->n * a->args.lse_token_stride));
}

#endif
