#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILED = 2, MOST_LAYERS = 1024, MOST_DIM = 1 << 15 };

int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: ", program);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    return FAILED;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Reads a whole file, puts a 0 behind it, and sets *size.  Returns NULL, after fail, if it cannot be read. */
static char *read_file(const char *folder, const char *name, size_t *size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    const long end = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
    char *bytes = end < 0 ? NULL : malloc((size_t)end + 1);
    *size = bytes ? (size_t)end : 0;
    if (bytes) rewind(file);
    if (!bytes || fread(bytes, 1, *size, file) != *size) {
        fail("there is no %s/%s, or it cannot be read", folder, name);
        free(bytes);
        bytes = NULL;
    } else {
        bytes[*size] = 0;
    }
    if (file) fclose(file);
    return bytes;
}

/* Finds "name": in JSON, at any depth, and returns the text behind it; NULL if it is missing.  This does for the files
 * that Hugging Face writes.  A runner for other files needs a JSON library. */
static const char *value_of(const char *json, const char *name) {
    static const char *const space = " \t\r\n";
    char quoted[96];
    snprintf(quoted, sizeof quoted, "\"%s\"", name);
    const char *at = json ? strstr(json, quoted) : NULL;
    if (!at) return NULL;
    at += strlen(quoted);
    at += strspn(at, space);
    return *at == ':' ? at + 1 + strspn(at + 1, space) : NULL;
}

static int is_string(const char *value, const char *text) {
    const size_t length = strlen(text);
    return value && *value == '"' && !strncmp(value + 1, text, length) && value[length + 1] == '"';
}

static double number_of(const char *config, const char *name) {
    const char *value = value_of(config, name);
    return value ? strtod(value, NULL) : 0;
}

/* Returns a whole number from 1 to `most`; 0 if the field has no such number. */
static int count_of(const char *config, const char *name, int most) {
    const double number = number_of(config, name);
    return number >= 1 && number <= most ? (int)number : 0;
}

static int read_config(model *m, const char *folder) {
    size_t size;
    char *config = read_file(folder, "config.json", &size);
    if (!config) return FAILED;
    m->num_layers = count_of(config, "num_hidden_layers", MOST_LAYERS);
    m->hidden = count_of(config, "hidden_size", MOST_DIM);
    m->intermediate = count_of(config, "intermediate_size", MOST_DIM);
    m->num_heads = count_of(config, "num_attention_heads", MOST_DIM);
    m->num_kv_heads = count_of(config, "num_key_value_heads", MOST_DIM);
    m->head_dim = count_of(config, "head_dim", MOST_DIM);
    m->max_seq_len = count_of(config, "max_position_embeddings", 1 << 30);
    m->rms_norm_eps = number_of(config, "rms_norm_eps");
    m->rope_theta = number_of(config, "rope_theta");
    const int is_llama = is_string(value_of(config, "model_type"), "llama") &&
                         is_string(value_of(config, "hidden_act"), "silu") &&
                         is_string(value_of(config, "rope_type"), "default") && m->rope_theta > 0 &&
                         count_of(config, "vocab_size", MOST_DIM) == VOCAB && m->num_layers && m->hidden &&
                         m->intermediate && m->num_kv_heads && m->num_heads % m->num_kv_heads == 0 && m->head_dim &&
                         m->num_heads <= MOST_DIM / m->head_dim && m->max_seq_len;
    m->qkv_dim = is_llama ? (m->num_heads + 2 * m->num_kv_heads) * m->head_dim : 0;
    free(config);
    return is_llama ? 0 : fail("%s/config.json is not of a byte-level Llama such as examples/model", folder);
}

/* ---- model.safetensors ------------------------------------------------------------------------------------------- */

/* Safetensors are little-endian. */
static uint32_t bits_of(const char *bytes, int count) {
    uint32_t bits = 0;
    for (int i = count; i-- > 0;) bits = bits << 8 | (unsigned char)bytes[i];
    return bits;
}

static float f16_to_f32(uint32_t bits) {
    const int exponent = bits >> 10 & 31;
    const float digits = (float)(bits & 1023), sign = bits >> 15 ? -1.0F : 1.0F;
    if (exponent == 31) return digits != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(digits + 1024, exponent - 25) : ldexpf(digits, -24));
}

/* A file, and the room for the floats of its tensors that are still to be read. */
typedef struct weights {
    const char *folder, *header, *data; /* header: JSON */
    long long size;                     /* bytes of data */
    float *to;
    int status;
} weights;

/* Reads the tensor NAME.weight, of a layer or, with -1, of the whole model; returns its floats. */
static float *read_tensor(weights *w, const char *name, int layer, int rows, int cols) {
    char whole[80], prefix[32] = "";
    if (layer >= 0) snprintf(prefix, sizeof prefix, "model.layers.%d.", layer);
    snprintf(whole, sizeof whole, "%s%s.weight", prefix, name);
    const char *entry = value_of(w->header, whole), *offsets = value_of(entry, "data_offsets");
    const long long num = (long long)rows * cols;
    long long begin = -1, end = -1;
    if (w->status) return NULL;
    if (!is_string(value_of(entry, "dtype"), "F16") || !offsets || sscanf(offsets, "[%lld,%lld]", &begin, &end) != 2 ||
        begin < 0 || end > w->size || end - begin != 2 * num) {
        w->status = fail("%s/model.safetensors has no tensor %s of %lld f16", w->folder, whole, num);
        return NULL;
    }
    float *read = w->to;
    for (long long i = 0; i < num; i++) *w->to++ = f16_to_f32(bits_of(w->data + begin + 2 * i, 2));
    return read;
}

static void read_layer(model *m, weights *w, int i) {
    const int hidden = m->hidden, q = m->num_heads * m->head_dim, kv = m->num_kv_heads * m->head_dim;
    layer *l = &m->layers[i];
    l->attention_norm = read_tensor(w, "input_layernorm", i, 1, hidden);
    l->qkv = read_tensor(w, "self_attn.q_proj", i, q, hidden);
    read_tensor(w, "self_attn.k_proj", i, kv, hidden); /* behind the queries' */
    read_tensor(w, "self_attn.v_proj", i, kv, hidden);
    l->out = read_tensor(w, "self_attn.o_proj", i, hidden, q);
    l->mlp_norm = read_tensor(w, "post_attention_layernorm", i, 1, hidden);
    l->gate_up = read_tensor(w, "mlp.gate_proj", i, m->intermediate, hidden);
    read_tensor(w, "mlp.up_proj", i, m->intermediate, hidden); /* behind the gates */
    l->down = read_tensor(w, "mlp.down_proj", i, hidden, m->intermediate);
}

/* Reads the tensors of a file of `size` bytes: the bytes of its header, the header, the data. */
static int read_tensors(model *m, const char *folder, char *file, size_t size) {
    const size_t header = size < 8 ? 0 : bits_of(file, 4);
    if (size < 8 || header > size - 8) return fail("%s/model.safetensors is not a whole file", folder);
    const long long hidden = m->hidden,
                    of_layer = hidden * (m->qkv_dim + m->num_heads * m->head_dim + 2) + 3 * hidden * m->intermediate;
    weights w = {folder, file + 8, file + 8 + header, (long long)(size - 8 - header), NULL, 0};
    m->layers = calloc((size_t)m->num_layers, sizeof *m->layers);
    m->weights = malloc((size_t)(m->num_layers * of_layer + (VOCAB + 1) * hidden) * sizeof *m->weights);
    if (!m->layers || !m->weights) return fail("out of memory for the weights of %s", folder);
    w.to = m->weights;
    m->head = m->embedding = read_tensor(&w, "model.embed_tokens", -1, VOCAB, m->hidden);
    for (int i = 0; i < m->num_layers; i++) read_layer(m, &w, i);
    m->norm = read_tensor(&w, "model.norm", -1, 1, m->hidden);
    if (!w.status && 2 * (w.to - m->weights) != w.size) /* a head of its own, or biases: they change the text */
        return fail("%s/model.safetensors has tensors that this program does not read", folder);
    return w.status;
}

int model_read(model *m, const char *folder) {
    size_t size;
    char *file;
    *m = (model){0};
    if (read_config(m, folder) || !(file = read_file(folder, "model.safetensors", &size))) return FAILED;
    const int status = read_tensors(m, folder, file, size);
    free(file);
    return status;
}

void model_free(model *m) {
    free(m->layers);
    free(m->weights);
}

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

/* Several sums side by side, so that compilers can use vectors: they may not reorder additions themselves. */
float dot(const float *a, const float *b, int n) {
    enum { LANES = 16 };
    float sums[LANES] = {0}, sum = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum += a[i] * b[i];
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

/* out = x w^T, or out += x w^T; a task multiplies ROWS rows of the weights. */
typedef struct product {
    float *out;     /* [n][rows] */
    const float *x; /* [n][cols], x_stride floats apart */
    const float *w; /* [rows][cols] */
    int n, rows, cols, x_stride, adds;
} product;

enum { ROWS = 32 }; /* of weights, in one task */

static void multiply_rows(void *context, int64_t task) {
    const product *p = context;
    const int64_t end = (task + 1) * ROWS < p->rows ? (task + 1) * ROWS : p->rows;
    for (int64_t r = task * ROWS; r < end; r++)
        for (int64_t t = 0; t < p->n; t++) {
            float *out = p->out + t * p->rows + r;
            *out = dot(p->x + t * p->x_stride, p->w + r * p->cols, p->cols) + (p->adds ? *out : 0);
        }
}

static void multiply(pool *pool, product p) { pool_run(pool, multiply_rows, &p, (p.rows + ROWS - 1) / ROWS); }

/* out, x [n][dim]; weight [dim] */
static void rms_norm(float *out, const float *x, const float *weight, int n, int dim, double eps) {
    for (int t = 0; t < n; t++, x += dim, out += dim) {
        const float scale = 1 / sqrtf(dot(x, x, dim) / (float)dim + (float)eps);
        for (int i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* gate = silu(gate) * up, for one token of [n][2 intermediate] */
typedef struct gates {
    float *gate_up;
    int intermediate;
} gates;

static void gate_token(void *context, int64_t t) {
    const gates *g = context;
    float *gate = g->gate_up + t * 2 * g->intermediate;
    const float *up = gate + g->intermediate;
    for (int i = 0; i < g->intermediate; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

int state_init(state *s, const model *m) {
    const size_t hidden = (size_t)m->hidden, qkv = (size_t)m->qkv_dim;
    const size_t attended = (size_t)m->num_heads * (size_t)m->head_dim, gate_up = 2 * (size_t)m->intermediate;
    s->memory = calloc(BATCH * (2 * hidden + qkv + attended + gate_up) + VOCAB, sizeof *s->memory);
    if (!s->memory) return 0;
    s->x = s->memory;
    s->normed = s->x + BATCH * hidden;
    s->qkv = s->normed + BATCH * hidden;
    s->attended = s->qkv + BATCH * qkv;
    s->gate_up = s->attended + BATCH * attended;
    s->logits = s->gate_up + BATCH * gate_up;
    return 1;
}

void state_destroy(state *s) { free(s->memory); }

void model_embed(const model *m, state *s, const unsigned char *tokens, int n) {
    for (int t = 0; t < n; t++)
        memcpy(s->x + (size_t)t * (size_t)m->hidden, m->embedding + (size_t)tokens[t] * (size_t)m->hidden,
               (size_t)m->hidden * sizeof *s->x);
}

void model_qkv(const model *m, state *s, pool *p, int layer, int n) {
    const struct layer *l = &m->layers[layer];
    rms_norm(s->normed, s->x, l->attention_norm, n, m->hidden, m->rms_norm_eps);
    multiply(p, (product){s->qkv, s->normed, l->qkv, n, m->qkv_dim, m->hidden, m->hidden, 0});
}

void model_finish(const model *m, state *s, pool *p, int layer, int n) {
    const struct layer *l = &m->layers[layer];
    const int attended = m->num_heads * m->head_dim, inner = m->intermediate;
    multiply(p, (product){s->x, s->attended, l->out, n, m->hidden, attended, attended, 1});
    rms_norm(s->normed, s->x, l->mlp_norm, n, m->hidden, m->rms_norm_eps);
    multiply(p, (product){s->gate_up, s->normed, l->gate_up, n, 2 * inner, m->hidden, m->hidden, 0});
    gates g = {s->gate_up, inner};
    pool_run(p, gate_token, &g, n);
    multiply(p, (product){s->x, s->gate_up, l->down, n, m->hidden, inner, 2 * inner, 1});
}

void model_logits(const model *m, state *s, pool *p, int n) {
    rms_norm(s->normed, s->x + (size_t)(n - 1) * (size_t)m->hidden, m->norm, 1, m->hidden, m->rms_norm_eps);
    multiply(p, (product){s->logits, s->normed, m->head, 1, VOCAB, m->hidden, m->hidden, 0});
}

unsigned char likeliest(const float *logits) {
    int best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    return (unsigned char)best;
}
