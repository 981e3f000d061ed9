#include "attention.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 16 }; /* that one task stores */

/* ---- the cache --------------------------------------------------------------------------------------------------- */

int attention_init(attention *a, const model *m, pool *p, int num_threads, int use_openmp, int type, int window) {
    *a = (attention){.m = m, .pool = p, .num_threads = num_threads, .use_openmp = use_openmp, .type = type};
    const int half = m->head_dim / 2;
    kvc_layer *layers = calloc((size_t)m->num_layers, sizeof *layers);
    a->inv_freq = malloc((size_t)half * sizeof *a->inv_freq);
    a->cosine = malloc(2 * BATCH * (size_t)half * sizeof *a->cosine);
    if (!layers || !a->inv_freq || !a->cosine) {
        free(layers);
        return fail("out of memory");
    }
    a->sine = a->cosine + BATCH * half;
    for (int i = 0; i < half; i++) a->inv_freq[i] = pow(m->rope_theta, -2.0 * i / m->head_dim);
    for (int i = 0; i < m->num_layers; i++)
        layers[i] = (kvc_layer){.num_kv_heads = m->num_kv_heads,
                                .k_dim = m->head_dim,
                                .v_dim = m->head_dim,
                                .k_type = type,
                                .v_type = type,
                                .policy = {.kind = window ? KVC_SLIDING : KVC_FULL, .window = window}};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = m->num_layers,
                               .max_seq_len = window ? window + BATCH : m->max_seq_len,
                               .max_sequences = 1,
                               .num_threads = use_openmp ? num_threads : 1};
    const kvc_status status = kvc_cache_new(&config, &a->cache);
    free(layers);
    return status ? fail("%s", kvc_last_error()) : 0;
}

void attention_destroy(attention *a) {
    kvc_cache_free(a->cache);
    free(a->inv_freq);
    free(a->cosine);
}

/* ---- writing rows ------------------------------------------------------------------------------------------------ */

/* Tokens [first, first + num_tokens) of the batch, and where their keys and values of a layer go. */
typedef struct storing {
    const attention *a;
    int layer, first, num_tokens;
    float *qkv;    /* [n][num_heads + 2 num_kv_heads][head_dim] of the whole batch */
    kvc_span span; /* where these tokens' rows lie, if they are written here */
    atomic_int status;
} storing;

/* f32 to f16, rounded to nearest, ties to even. */
static uint16_t f32_to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00)); /* 65536 and more; NaN */
    if (bits < 0x38800000) { /* below 2^-14 the last digit is worth 2^-24, as it is in an f32 from 0.5 on */
        float x_and_half;
        memcpy(&x_and_half, &bits, sizeof bits);
        x_and_half += 0.5F;
        memcpy(&bits, &x_and_half, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

static uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Whether this runner encodes the type itself; kvc_put encodes the others, which are quantised. */
static int is_float(int type) { return type == KVC_F32 || type == KVC_F16 || type == KVC_BF16; }

/* Writes element i of a row. */
static void set(void *row, int type, int i, float x) {
    if (type == KVC_F32)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = type == KVC_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

/* row = head rotated by the token's position (RoPE): element i pairs with i + half.  row may be head. */
static void rotate(void *row, int type, const float *head, const float *cosine, const float *sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        set(row, type, i, a * cosine[i] - b * sine[i]);
        set(row, type, i + half, b * cosine[i] + a * sine[i]);
    }
}

/* Rotates queries in place, and keys on their way into the cache, or in place for kvc_put. */
static void store_token(const storing *s, int64_t t) {
    const attention *a = s->a;
    const int dim = a->m->head_dim, half = dim / 2;
    const float *cosine = a->cosine + t * half, *sine = a->sine + t * half;
    float *q = s->qkv + t * a->m->qkv_dim, *k = q + a->m->num_heads * dim, *v = k + a->m->num_kv_heads * dim;
    for (int h = 0; h < a->m->num_heads; h++, q += dim) rotate(q, KVC_F32, q, cosine, sine, half);
    for (int h = 0; h < a->m->num_kv_heads; h++, k += dim, v += dim) {
        if (!is_float(a->type)) {
            rotate(k, KVC_F32, k, cosine, sine, half);
            continue;
        }
        /* kvc_slots hands out addresses to write to */
        char *k_row = (char *)s->span.k + h * s->span.k_head_stride + (t - s->first) * s->span.k_row_stride;
        char *v_row = (char *)s->span.v + h * s->span.v_head_stride + (t - s->first) * s->span.v_row_stride;
        rotate(k_row, a->type, k, cosine, sine, half);
        for (int i = 0; i < dim; i++) set(v_row, a->type, i, v[i]);
    }
}

static kvc_status put(const storing *s, int first, int num_tokens) {
    const model *m = s->a->m;
    const int64_t token = m->qkv_dim * (int64_t)sizeof(float);
    const float *k = s->qkv + (int64_t)first * m->qkv_dim + m->num_heads * m->head_dim;
    const kvc_put_args args = {.struct_size = sizeof args,
                               .first = first,
                               .num_tokens = num_tokens,
                               .k = k,
                               .v = k + m->num_kv_heads * m->head_dim,
                               .k_token_stride = token,
                               .v_token_stride = token};
    return kvc_put(s->a->batch, s->layer, &args);
}

/* Task i stores TOKENS tokens; kvc_put may be called for disjoint tokens at the same time. */
static void store_some(void *context, int64_t i) {
    storing *s = context;
    const int begin = s->first + (int)i * TOKENS, last = s->first + s->num_tokens;
    const int end = last - begin < TOKENS ? last : begin + TOKENS;
    for (int t = begin; t < end; t++) store_token(s, t);
    const kvc_status status = is_float(s->a->type) ? KVC_OK : put(s, begin, end - begin);
    if (status) atomic_store(&s->status, (int)status);
}

/* Stores all tokens of the batch, as many at a time as lie side by side. */
static kvc_status store(const attention *a, int layer, int n, float *qkv) {
    const int in_place = is_float(a->type);
    kvc_status status = KVC_OK;
    for (int first = 0; first < n && !status;) {
        storing s = {.a = a, .layer = layer, .first = first, .num_tokens = n, .qkv = qkv};
        if (in_place) status = kvc_slots(a->batch, layer, first, &s.span, sizeof s.span, NULL);
        if (status) break;
        if (in_place) s.num_tokens = s.span.num_rows;
        pool_run(a->pool, store_some, &s, (s.num_tokens + TOKENS - 1) / TOKENS);
        status = in_place ? kvc_written(a->batch, layer, first, s.num_tokens) : (kvc_status)atomic_load(&s.status);
        first += s.num_tokens;
    }
    return status;
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

int attention_begin(attention *a, int n) {
    const int half = a->m->head_dim / 2;
    const int32_t next = kvc_next_position(a->cache, 0);
    int32_t positions[BATCH];
    for (int t = 0; t < n; t++) {
        positions[t] = next + t;
        for (int i = 0; i < half; i++) {
            a->cosine[t * half + i] = (float)cos(positions[t] * a->inv_freq[i]);
            a->sine[t * half + i] = (float)sin(positions[t] * a->inv_freq[i]);
        }
    }
    kvc_status status = kvc_begin(a->cache, n, positions, NULL, NULL, &a->batch);
    if (status) return fail("%s", kvc_last_error());
    if (!a->use_openmp) { /* one plan serves all layers, as they are alike */
        const kvc_plan_args args = {sizeof args, .num_heads = a->m->num_heads, .num_threads = a->num_threads};
        status = kvc_plan_new(a->batch, &args, &a->plan);
    }
    return status ? attention_end(a, fail("%s", kvc_last_error())) : 0;
}

/* The tasks of one layer's attention. */
typedef struct tasks {
    kvc_plan *plan;
    int layer;
    const kvc_attend_args *args;
    atomic_int status;
} tasks;

static void run_task(void *context, int64_t i) {
    tasks *t = context;
    const kvc_status status = kvc_plan_run(t->plan, t->layer, t->args, i);
    if (status) atomic_store(&t->status, (int)status);
}

int attention_attend(attention *a, int layer, int n, float *qkv, float *out) {
    const model *m = a->m;
    const kvc_attend_args args = {
        .struct_size = sizeof args, .q = qkv, .out = out, .q_token_stride = m->qkv_dim * (int64_t)sizeof(float)};
    kvc_status status = store(a, layer, n, qkv);
    if (!status && a->use_openmp) {
        const kvc_plan_args plan = {sizeof plan, .layer = layer, .num_heads = m->num_heads};
        status = kvc_attend(a->batch, &plan, &args);
    } else if (!status) {
        tasks t = {.plan = a->plan, .layer = layer, .args = &args};
        pool_run(a->pool, run_task, &t, kvc_plan_num_tasks(a->plan));
        status = (kvc_status)atomic_load(&t.status);
    }
    return status ? fail("%s", kvc_strerror(status)) : 0; /* kvc_last_error belongs to the thread that failed */
}

int attention_end(attention *a, int status) {
    kvc_batch *batch = a->batch;
    a->batch = NULL;
    if (!status && kvc_commit(batch) == KVC_OK) return 0;
    kvc_abort(batch);
    return status ? status : fail("%s", kvc_last_error());
}
