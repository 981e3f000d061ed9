/* c_example.c: a step of the C example, with its own attention over a kvcache or with llama2.c's over plain arrays.
 * Matrix code, weights, threads and all else of the step are the same. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime */
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention.h"

#define EXPORT __attribute__((visibility("default")))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- llama2.c's way ---------------------------------------------------------------------------------------------- */

/* Keys and values in f32, token after token; each query head goes over all of them by itself. */
typedef struct flat {
    const model *m;
    pool *pool;
    const double *inv_freq; /* [head_dim / 2] radians per position */
    int length, kv_dim;     /* tokens stored; floats of one token's keys */
    float *k, *v;           /* [num_layers][max_seq_len][kv_dim] */
    float *scores;          /* [num_heads][max_seq_len] */
    float *cosine, *sine;   /* [head_dim / 2] of the token's position */
} flat;

static int flat_init(flat *f, const model *m, pool *p, const double *inv_freq) {
    *f = (flat){.m = m, .pool = p, .inv_freq = inv_freq, .kv_dim = m->num_kv_heads * m->head_dim};
    const size_t rows = (size_t)m->num_layers * (size_t)m->max_seq_len, half = (size_t)m->head_dim / 2;
    f->k = calloc(rows * (size_t)f->kv_dim, sizeof *f->k);
    f->v = calloc(rows * (size_t)f->kv_dim, sizeof *f->v);
    f->scores = calloc((size_t)m->num_heads * (size_t)m->max_seq_len, sizeof *f->scores);
    f->cosine = calloc(2 * half, sizeof *f->cosine);
    if (f->cosine) f->sine = f->cosine + half;
    return f->k && f->v && f->scores && f->cosine;
}

static void flat_destroy(flat *f) {
    free(f->k);
    free(f->v);
    free(f->scores);
    free(f->cosine);
}

static void flat_begin(flat *f) {
    for (int i = 0; i < f->m->head_dim / 2; i++) {
        f->cosine[i] = (float)cos(f->length * f->inv_freq[i]);
        f->sine[i] = (float)sin(f->length * f->inv_freq[i]);
    }
}

/* to = from, rotated to the token's position; they may be the same. */
static void flat_rotate(const flat *f, float *to, const float *from) {
    const int half = f->m->head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * f->cosine[i] - b * f->sine[i];
        to[i + half] = b * f->cosine[i] + a * f->sine[i];
    }
}

static float plain_dot(const float *a, const float *b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The attention of one layer: what pool_run hands to each query head. */
typedef struct flat_layer {
    const flat *f;
    const float *k, *v; /* [max_seq_len][kv_dim] */
    const float *q;     /* [num_heads][head_dim] */
    float *out;         /* [num_heads][head_dim] */
    float (*dot)(const float *, const float *, int);
} flat_layer;

static void softmax(float *x, int n) {
    float max = x[0], sum = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > max) max = x[i];
    for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - max);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

static void flat_head(void *context, int64_t h) {
    const flat_layer *l = context;
    const flat *f = l->f;
    const int dim = f->m->head_dim, n = f->length + 1;
    const int64_t kv_head = h / (f->m->num_heads / f->m->num_kv_heads);
    const float *q = l->q + h * dim, *k = l->k + kv_head * dim, *v = l->v + kv_head * dim;
    float *scores = f->scores + h * f->m->max_seq_len, *out = l->out + h * dim;
    for (int t = 0; t < n; t++) scores[t] = l->dot(q, k + (int64_t)t * f->kv_dim, dim) / sqrtf((float)dim);
    softmax(scores, n);
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < dim; i++) out[i] += scores[t] * v[(int64_t)t * f->kv_dim + i];
}

static void flat_attend(flat *f, int layer, float *qkv, float *out, int uses_dot) {
    const model *m = f->m;
    const int64_t rows = (int64_t)layer * m->max_seq_len, last = (rows + f->length) * f->kv_dim;
    const float *k = qkv + m->num_heads * m->head_dim;
    for (int h = 0; h < m->num_heads; h++) flat_rotate(f, qkv + h * m->head_dim, qkv + h * m->head_dim);
    for (int h = 0; h < m->num_kv_heads; h++) flat_rotate(f, f->k + last + h * m->head_dim, k + h * m->head_dim);
    memcpy(f->v + last, k + f->kv_dim, (size_t)f->kv_dim * sizeof *k);
    flat_layer l = {f, f->k + rows * f->kv_dim, f->v + rows * f->kv_dim, qkv, out, uses_dot ? dot : plain_dot};
    pool_run(f->pool, flat_head, &l, m->num_heads);
}

/* ---- steps with either attention --------------------------------------------------------------------------------- */

enum { KVCACHE, PLAIN, DOT }; /* whose attention; DOT: llama2.c's with the dot product of the matrix code */

typedef struct runner {
    model m;
    state s;
    pool *p;
    attention a;
    flat f;
} runner;

EXPORT void runner_free(runner *r) {
    flat_destroy(&r->f);
    attention_destroy(&r->a);
    pool_free(r->p);
    state_destroy(&r->s);
    model_free(&r->m);
    free(r);
}

/* Returns NULL after an error, which is printed to stderr. */
EXPORT runner *runner_new(const char *folder, int num_threads, int type) {
    runner *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    int status = model_read(&r->m, folder);
    if (!status && !state_init(&r->s, &r->m)) status = fail("out of memory");
    if (!status && !(r->p = pool_new(num_threads, 0))) status = fail("there cannot be %d threads", num_threads);
    if (!status) status = attention_init(&r->a, &r->m, r->p, num_threads, 0, type, 0);
    if (!status && !flat_init(&r->f, &r->m, r->p, r->a.inv_freq)) status = fail("out of memory");
    if (!status) return r;
    runner_free(r);
    return NULL;
}

EXPORT const float *runner_logits(const runner *r) { return r->s.logits; }

/* Makes a forward pass of one token; returns the seconds of attention in all layers, storing included. */
static double step(runner *r, int whose, unsigned char token, int *status) {
    double start = now(), seconds;
    if (whose == KVCACHE)
        *status = attention_begin(&r->a, 1);
    else
        flat_begin(&r->f);
    seconds = now() - start;
    model_embed(&r->m, &r->s, &token, 1);
    for (int layer = 0; layer < r->m.num_layers && !*status; layer++) {
        model_qkv(&r->m, &r->s, r->p, layer, 1);
        start = now();
        if (whose == KVCACHE)
            *status = attention_attend(&r->a, layer, 1, r->s.qkv, r->s.attended);
        else
            flat_attend(&r->f, layer, r->s.qkv, r->s.attended, whose == DOT);
        seconds += now() - start;
        model_finish(&r->m, &r->s, r->p, layer, 1);
    }
    start = now();
    if (whose == KVCACHE)
        *status = attention_end(&r->a, *status);
    else
        r->f.length++;
    seconds += now() - start;
    model_logits(&r->m, &r->s, r->p, 1);
    return seconds;
}

/* Appends tokens to the cache and to the arrays. */
EXPORT int runner_feed(runner *r, const unsigned char *tokens, int count) {
    int status = 0;
    for (int i = 0; i < count && !status; i++)
        for (int whose = KVCACHE; whose <= PLAIN && !status; whose++) step(r, whose, tokens[i], &status);
    return status;
}

/* Appends a token `count` times and takes it back; writes the seconds of attention and of the whole step, [count]. */
EXPORT int runner_steps(runner *r, int whose, unsigned char token, int count, double *attention, double *whole) {
    int status = 0;
    for (int i = 0; i < count && !status; i++) {
        const double start = now();
        attention[i] = step(r, whose, token, &status);
        whole[i] = now() - start;
        if (whose == KVCACHE && !status)
            status = (int)kvc_truncate(r->a.cache, 0, kvc_next_position(r->a.cache, 0) - 1);
        else
            r->f.length--;
    }
    return status;
}
