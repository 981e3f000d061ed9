/* ggml.c: does the same work in ggml.  Speaks the protocol of kvcache/tools/peers/serve.py over stdin and stdout.
 *
 * Modes
 *   flash    flash_attn_ext over a token-major cache, f32 sums asked for; any type
 *   matmul   mul_mat, soft_max_ext, mul_mat, with V stored transposed; not for quantised types, which cannot be
 *            appended to a transposed V
 *   append   set_rows of num_tokens tokens of K and V, from f32, into a token-major cache */
#include "driver.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ggml-cpu.h"
#include "ggml.h"

enum { MAX_WORKS = 16, GRAPH_NODES = 64 };

/* Returns a roughly normal number of unit variance: the sum of 4 uniform ones. */
static float noise(void) {
    static uint64_t state = 88172645463325252U;
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum += (float)(state >> 40) / 16777216.0F - 0.5F;
    }
    return sum * 1.7320508F;
}

static float *noises(int64_t count) {
    float *x = malloc((size_t)count * sizeof *x);
    if (!x) abort();
    for (int64_t i = 0; i < count; i++) x[i] = noise();
    return x;
}

static enum ggml_type type_of(const char *name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char *known = ggml_type_name((enum ggml_type)t);
        if (known && !strcmp(known, name)) return (enum ggml_type)t;
    }
    return GGML_TYPE_COUNT;
}

typedef struct work {
    struct ggml_context *ctx;
    struct ggml_cgraph **graphs; /* [num_layers] */
    struct ggml_cplan *plans;
    void *scratch;
    struct ggml_tensor *q, *out; /* of layer 0 */
    float *k, *v; /* the contents of layer 0: [context][num_kv_heads][head_dim]; v transposed in mode matmul */
    int64_t heads, kv_heads, dim, context, tokens;
    int num_layers, next, transposed, attends;
} work;

static void drop(work *w) {
    if (w->ctx) ggml_free(w->ctx);
    free(w->graphs);
    free(w->plans);
    free(w->scratch);
    free(w->k);
    free(w->v);
    *w = (work){0};
}

static void fill(struct ggml_tensor *t, const float *from) {
    const int64_t n = ggml_nelements(t), width = t->ne[0];
    if (t->type == GGML_TYPE_F32)
        memcpy(t->data, from, (size_t)n * sizeof *from);
    else if (t->type == GGML_TYPE_F16)
        ggml_fp32_to_fp16_row(from, t->data, n);
    else if (t->type == GGML_TYPE_BF16)
        ggml_fp32_to_bf16_row(from, t->data, n);
    else
        ggml_quantize_chunk(t->type, from, t->data, 0, n / width, width, NULL);
}

/* Views a token-major cache as [head_dim][context][num_kv_heads]. */
static struct ggml_tensor *by_head(const work *w, struct ggml_tensor *t) {
    const size_t head = ggml_row_size(t->type, w->dim), token = ggml_row_size(t->type, w->dim * w->kv_heads);
    struct ggml_tensor *view =
        ggml_view_4d(w->ctx, t, w->dim, w->kv_heads, w->context, 1, head, token, token * (size_t)w->context, 0);
    return ggml_permute(w->ctx, view, 0, 2, 1, 3);
}

static struct ggml_tensor *attention(const work *w, struct ggml_tensor *k, struct ggml_tensor *v,
                                     struct ggml_tensor *mask) {
    const float scale = 1.0F / sqrtf((float)w->dim);
    struct ggml_tensor *q = ggml_permute(w->ctx, w->q, 0, 2, 1, 3), *out;
    if (!w->transposed) {
        out = ggml_flash_attn_ext(w->ctx, q, by_head(w, k), by_head(w, v), mask, scale, 0, 0);
        ggml_prec_set_acc(out, GGML_PREC_F32);
        return out;
    }
    const size_t row = ggml_row_size(v->type, w->context);
    v = ggml_view_3d(w->ctx, v, w->context, w->dim, w->kv_heads, row, row * (size_t)w->dim, 0);
    out = ggml_soft_max_ext(w->ctx, ggml_mul_mat(w->ctx, by_head(w, k), q), mask, scale, 0);
    return ggml_cont(w->ctx, ggml_permute(w->ctx, ggml_mul_mat(w->ctx, v, out), 0, 2, 1, 3));
}

/* Makes the mask: the last num_tokens rows are the queries' own, and each query sees the rows up to its own. */
static struct ggml_tensor *causal_mask(const work *w) {
    struct ggml_tensor *mask =
        ggml_new_tensor_4d(w->ctx, w->transposed ? GGML_TYPE_F32 : GGML_TYPE_F16, w->context, w->tokens, 1, 1);
    float *x = malloc((size_t)(w->context * w->tokens) * sizeof *x);
    if (!x) abort();
    for (int64_t i = 0; i < w->tokens; i++)
        for (int64_t j = 0; j < w->context; j++)
            x[i * w->context + j] = j <= w->context - w->tokens + i ? 0 : -INFINITY;
    fill(mask, x);
    free(x);
    return mask;
}

/* Sets up layers and graphs; returns "ok" or the reason why not. */
static const char *set_up(work *w, const char *mode, const char *type_name, int threads) {
    const enum ggml_type type = type_of(type_name);
    const int64_t row = w->dim * w->kv_heads, elements = row * w->context;
    w->transposed = !strcmp(mode, "matmul");
    w->attends = w->transposed || !strcmp(mode, "flash");
    if (type == GGML_TYPE_COUNT || (!w->attends && strcmp(mode, "append"))) return "no such mode or type";
    if (w->transposed && ggml_is_quantized(type)) return "no transposed V of a quantised type";

    const size_t layers = (size_t)w->num_layers, of_q = (size_t)(w->dim * w->heads * w->tokens) * sizeof(float);
    const size_t scores = (size_t)(w->tokens * w->context * w->heads) * sizeof(float);
    size_t bytes = layers * (2 * ggml_row_size(type, row) * (size_t)w->context + (1U << 18)) + (1U << 22);
    bytes += (size_t)(w->tokens * w->context) * 4 + (layers * 4 + 2) * of_q + layers * (w->transposed ? 2 * scores : 0);
    w->ctx = ggml_init((struct ggml_init_params){bytes, NULL, false});
    w->graphs = calloc(layers, sizeof *w->graphs);
    w->plans = calloc(layers, sizeof *w->plans);
    if (!w->ctx || !w->graphs || !w->plans) return "out of memory";
    w->k = noises(elements);
    w->v = noises(elements);
    w->q = ggml_new_tensor_3d(w->ctx, GGML_TYPE_F32, w->dim, w->heads, w->tokens);
    for (int64_t i = 0; i < ggml_nelements(w->q); i++) ((float *)w->q->data)[i] = noise();
    struct ggml_tensor *mask = w->attends ? causal_mask(w) : NULL, *source = NULL, *at = NULL;
    if (!w->attends) {
        source = ggml_new_tensor_2d(w->ctx, GGML_TYPE_F32, row, w->tokens);
        at = ggml_new_tensor_1d(w->ctx, GGML_TYPE_I64, w->tokens);
        memcpy(source->data, w->k, (size_t)(row * w->tokens) * sizeof(float));
        for (int64_t i = 0; i < w->tokens; i++) ((int64_t *)at->data)[i] = w->context - w->tokens + i;
    }

    struct ggml_tensor *first_k = NULL, *first_v = NULL;
    size_t scratch = 0;
    for (size_t l = 0; l < layers; l++) {
        struct ggml_tensor *k = ggml_new_tensor_2d(w->ctx, type, row, w->context);
        struct ggml_tensor *v = w->transposed ? ggml_new_tensor_2d(w->ctx, type, w->context, row)
                                              : ggml_new_tensor_2d(w->ctx, type, row, w->context);
        if (l == 0) {
            fill(first_k = k, w->k);
            fill(first_v = v, w->v);
        } else {
            memcpy(k->data, first_k->data, ggml_nbytes(k));
            memcpy(v->data, first_v->data, ggml_nbytes(v));
        }
        w->graphs[l] = ggml_new_graph_custom(w->ctx, GRAPH_NODES, false);
        if (w->attends) {
            struct ggml_tensor *out = attention(w, k, v, mask);
            if (l == 0) w->out = out;
            ggml_build_forward_expand(w->graphs[l], out);
        } else {
            ggml_build_forward_expand(w->graphs[l], ggml_set_rows(w->ctx, k, source, at));
            ggml_build_forward_expand(w->graphs[l], ggml_set_rows(w->ctx, v, source, at));
        }
        w->plans[l] = ggml_graph_plan(w->graphs[l], threads, NULL);
        w->plans[l].n_threads = threads;
        if (w->plans[l].work_size > scratch) scratch = w->plans[l].work_size;
    }
    w->scratch = malloc(scratch + 64);
    if (!w->scratch) return "out of memory";
    for (size_t l = 0; l < layers; l++) w->plans[l].work_data = w->scratch;
    return "ok";
}

/* Runs the next layer; returns its seconds, or a negative number after an error. */
static double run(work *w) {
    const int layer = w->next;
    w->next = (layer + 1) % w->num_layers;
    const double start = now();
    if (ggml_graph_compute(w->graphs[layer], &w->plans[layer]) != GGML_STATUS_SUCCESS) return -1;
    return now() - start;
}

/* Returns the relative error of layer 0 against float64 over the values as they were given, for the last query token
 * and every third head. */
static double error_of(const work *w) {
    const int64_t row = w->dim * w->kv_heads, token = w->tokens - 1;
    double *weights = malloc((size_t)w->context * sizeof *weights), difference = 0, size = 0;
    if (!weights) abort();
    for (int64_t h = 0; h < w->heads; h += 3) {
        const int64_t offset = h / (w->heads / w->kv_heads) * w->dim;
        const float *q = (const float *)w->q->data + (token * w->heads + h) * w->dim;
        const float *out = (const float *)w->out->data + (token * w->heads + h) * w->dim;
        double sum = 0;
        for (int64_t j = 0; j < w->context; j++) {
            double score = 0;
            for (int64_t d = 0; d < w->dim; d++) score += (double)q[d] * w->k[j * row + offset + d];
            sum += weights[j] = exp(score / sqrt((double)w->dim)); /* unit normal data: no overflow */
        }
        for (int64_t d = 0; d < w->dim; d++) {
            double x = 0;
            for (int64_t j = 0; j < w->context; j++)
                x += weights[j] * (w->transposed ? w->v[(offset + d) * w->context + j] : w->v[j * row + offset + d]);
            x /= sum;
            difference += (out[d] - x) * (out[d] - x);
            size += x * x;
        }
    }
    free(weights);
    return sqrt(difference / size);
}

int main(void) {
    static work works[MAX_WORKS];
    char line[512], mode[32], type[32];
    ggml_cpu_init();
    while (fgets(line, sizeof line, stdin)) {
        int id = 0, count, threads;
        char verb[16] = "";
        sscanf(line, "%15s %d", verb, &id);
        work *w = &works[id < 0 || id >= MAX_WORKS ? 0 : id];
        if (!strcmp(verb, "shape")) {
            drop(w);
            int heads, kv_heads, dim, context, tokens, layers;
            if (sscanf(line, "%*s %*d %31s %31s %d %d %d %d %d %d %d", mode, type, &threads, &heads, &kv_heads, &dim,
                       &context, &tokens, &layers) != 9) {
                printf("no: cannot read the shape");
            } else {
                w->heads = heads, w->kv_heads = kv_heads, w->dim = dim;
                w->context = context, w->tokens = tokens, w->num_layers = layers;
                const char *answer = set_up(w, mode, type, threads);
                if (strcmp(answer, "ok")) drop(w);
                printf(strcmp(answer, "ok") ? "no: %s" : "%s", answer);
            }
        } else if (!strcmp(verb, "run") && w->graphs && sscanf(line, "%*s %*d %d", &count) == 1) {
            printf("ok");
            for (int i = 0; i < count; i++) printf(" %.9f", run(w));
        } else if (!strcmp(verb, "error") && w->attends && w->graphs) {
            w->next = 0;
            run(w);
            printf("ok %.3e", error_of(w));
        } else if (!strcmp(verb, "drop")) {
            drop(w);
            printf("ok");
        } else {
            printf("no: %s of what was not set up", verb);
        }
        putchar('\n');
        fflush(stdout);
    }
    return 0;
}
