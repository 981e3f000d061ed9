#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FAILED = 2, MOST_LAYERS = 1024, MOST_DIM = 1 << 20, PATH = 1024 };
enum { MOST_CONFIG = 1 << 20, MOST_HEADER = 1 << 24 }; /* bytes */

int fail(const char *format, ...) {
    char said[2 * PATH];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(said, sizeof said, format, arguments) < 0) said[0] = 0;
    va_end(arguments);
    for (unsigned char *c = (unsigned char *)said; *c; c++) { /* names may not steer a terminal */
        if (*c == 0xc2 && c[1] && c[1] < 0xa0) *c++ = '?', *c = '?';
        if (*c < ' ' || *c == 127) *c = '?';
    }
    fprintf(stderr, "%s: %s\n", program, said);
    return FAILED;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct file {
    FILE *stream;
    char path[PATH];
    long long size; /* bytes */
} file;

static int file_open(file *f, const char *folder, const char *name) {
    const int length = snprintf(f->path, sizeof f->path, "%s/%s", folder, name);
    struct stat found;
    if (length < 0 || length >= (int)sizeof f->path) return fail("the folder's name is too long: %.40s...", folder);
    if (stat(f->path, &found) != 0) return fail("there is no %s, or it cannot be read", f->path);
    if (!S_ISREG(found.st_mode)) return fail("%s is not a file", f->path);
    f->size = found.st_size;
    f->stream = fopen(f->path, "rb");
    return f->stream ? 0 : fail("there is no %s, or it cannot be read", f->path);
}

/* Reads the next `size` bytes, and puts a 0 behind them; NULL, after fail, if there are fewer, or without memory. */
static void *file_read(file *f, size_t size) {
    char *bytes = malloc(size + 1);
    if (!bytes) {
        fail("out of memory for %zu bytes of %s", size, f->path);
    } else if (fread(bytes, 1, size, f->stream) != size) {
        fail("%s cannot be read", f->path);
        free(bytes);
        bytes = NULL;
    } else {
        bytes[size] = 0;
    }
    return bytes;
}

/* Finds "name": in JSON, at any depth, and returns what follows; NULL without it, or if that is null.  This does for
 * the files that Hugging Face writes; a runner that is to understand others needs a JSON library. */
static const char *value_of(const char *json, const char *name) {
    static const char *const space = " \t\r\n";
    char quoted[80];
    snprintf(quoted, sizeof quoted, "\"%s\"", name);
    const char *at = strstr(json, quoted);
    if (!at) return NULL;
    at += strlen(quoted);
    at += strspn(at, space);
    if (*at != ':') return NULL;
    at += 1 + strspn(at + 1, space);
    return strncmp(at, "null", 4) ? at : NULL;
}

static int is_string(const char *value, const char *text) {
    const size_t length = strlen(text);
    return value && *value == '"' && !strncmp(value + 1, text, length) && value[length + 1] == '"';
}

/* ---- config.json ------------------------------------------------------------------------------------------------- */

/* The field's value, a whole number from 1 to most; without the field, `otherwise`, unless that is 0. */
static int read_count(const char *config, const char *path, const char *name, int most, int otherwise, int *count) {
    const char *value = value_of(config, name);
    const double number = value ? strtod(value, NULL) : otherwise;
    if (!value && !otherwise) return fail("%s has no %s", path, name);
    if (!(number >= 1 && number <= most) || number != floor(number))
        return fail("%s: %s must be a whole number from 1 to %d", path, name, most);
    *count = (int)number;
    return 0;
}

static int read_positive(const char *config, const char *path, const char *name, double otherwise, double *number) {
    const char *value = value_of(config, name);
    *number = value ? strtod(value, NULL) : otherwise;
    return *number > 0 && isfinite(*number) ? 0 : fail("%s: %s must be a positive number", path, name);
}

/* Refuses what this forward pass does not do: ignored, it would give text that is wrong and looks right. */
static int check_family(const char *config, const char *path) {
    const char *rope = value_of(config, "rope_type"), *activation = value_of(config, "hidden_act");
    if (!is_string(value_of(config, "model_type"), "llama")) return fail("%s: model_type must be \"llama\"", path);
    if (activation && !is_string(activation, "silu")) return fail("%s: hidden_act must be \"silu\"", path);
    if (!rope) rope = value_of(config, "type");
    return rope && !is_string(rope, "default") ? fail("%s: rope_type must be \"default\"", path) : 0;
}

static int read_fields(model *m, const char *config, const char *path) {
    int vocab = 0, status = check_family(config, path);
    if (!status) status = read_count(config, path, "vocab_size", MOST_DIM, 0, &vocab);
    if (!status && vocab != VOCAB)
        status = fail("%s: vocab_size is %d: tokens are bytes here, so it must be %d", path, vocab, VOCAB);
    if (!status) status = read_count(config, path, "num_hidden_layers", MOST_LAYERS, 0, &m->num_layers);
    if (!status) status = read_count(config, path, "hidden_size", MOST_DIM, 0, &m->hidden);
    if (!status) status = read_count(config, path, "intermediate_size", MOST_DIM, 0, &m->intermediate);
    if (!status) status = read_count(config, path, "num_attention_heads", MOST_DIM, 0, &m->num_heads);
    if (!status) status = read_count(config, path, "num_key_value_heads", MOST_DIM, m->num_heads, &m->num_kv_heads);
    if (!status) status = read_count(config, path, "head_dim", MOST_DIM, m->hidden / m->num_heads, &m->head_dim);
    if (!status) status = read_count(config, path, "max_position_embeddings", 1 << 30, 0, &m->max_seq_len);
    if (!status) status = read_positive(config, path, "rms_norm_eps", 1e-6, &m->rms_norm_eps);
    if (!status) status = read_positive(config, path, "rope_theta", 10000, &m->rope_theta);
    if (status) return status;
    const char *tied = value_of(config, "tie_word_embeddings");
    m->is_tied = tied && !strncmp(tied, "true", 4);
    if (m->num_heads % m->num_kv_heads)
        return fail("%s: num_attention_heads, %d, must be a multiple of num_key_value_heads, %d", path, m->num_heads,
                    m->num_kv_heads);
    if (m->head_dim % 2)
        return fail("%s: head_dim must be even, as halves are rotated together, not %d", path, m->head_dim);
    if ((m->num_heads + 2LL * m->num_kv_heads) * m->head_dim > MOST_DIM)
        return fail("%s: %d heads of %d are more than any model's", path, m->num_heads, m->head_dim);
    m->qkv_dim = (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
    return 0;
}

static int read_config(model *m, const char *folder) {
    file f = {0};
    char *text = NULL;
    int status = file_open(&f, folder, "config.json");
    if (!status && f.size > MOST_CONFIG) status = fail("%s is too large for a configuration", f.path);
    if (!status && !(text = file_read(&f, (size_t)f.size))) status = FAILED;
    if (!status) status = read_fields(m, text, f.path);
    free(text);
    if (f.stream) fclose(f.stream);
    return status;
}

/* ---- model.safetensors ------------------------------------------------------------------------------------------- */

/* A tensor of the model, [rows][cols], or [cols] where rows is 0, and where its bytes lie in the file. */
typedef struct tensor {
    char name[64];
    int rows, cols;
    float **to;      /* where the address of its floats goes; NULL: they follow the tensor before */
    long long begin; /* behind the header */
    int bytes;       /* of an element */
    int is_bf16;
} tensor;

static long long num_elements(const tensor *t) { return (t->rows ? t->rows : 1LL) * t->cols; }

/* Adds a tensor to the list, of a layer or, with -1, of none; returns the next place in the list. */
static tensor *add_tensor(tensor *t, const char *name, int layer, int rows, int cols, float **to) {
    *t = (tensor){.rows = rows, .cols = cols, .to = to};
    if (layer < 0)
        snprintf(t->name, sizeof t->name, "%s.weight", name);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s.weight", layer, name);
    return t + 1;
}

/* Lists all tensors that there must be, in the order of their use; returns how many: 9 a layer, and at most 3. */
static int list_tensors(model *m, tensor *list) {
    const int hidden = m->hidden, inner = m->intermediate;
    const int q = m->num_heads * m->head_dim, kv = m->num_kv_heads * m->head_dim;
    tensor *t = add_tensor(list, "model.embed_tokens", -1, VOCAB, hidden, &m->embedding);
    for (int i = 0; i < m->num_layers; i++) {
        layer *l = &m->layers[i];
        t = add_tensor(t, "input_layernorm", i, 0, hidden, &l->attention_norm);
        t = add_tensor(t, "self_attn.q_proj", i, q, hidden, &l->qkv);
        t = add_tensor(t, "self_attn.k_proj", i, kv, hidden, NULL);
        t = add_tensor(t, "self_attn.v_proj", i, kv, hidden, NULL);
        t = add_tensor(t, "self_attn.o_proj", i, hidden, q, &l->out);
        t = add_tensor(t, "post_attention_layernorm", i, 0, hidden, &l->mlp_norm);
        t = add_tensor(t, "mlp.gate_proj", i, inner, hidden, &l->gate_up);
        t = add_tensor(t, "mlp.up_proj", i, inner, hidden, NULL);
        t = add_tensor(t, "mlp.down_proj", i, hidden, inner, &l->down);
    }
    t = add_tensor(t, "model.norm", -1, 0, hidden, &m->norm);
    if (!m->is_tied) t = add_tensor(t, "lm_head", -1, VOCAB, hidden, &m->head);
    return (int)(t - list);
}

/* Reads where a tensor lies; data_size: bytes after the header. */
static int place_tensor(tensor *t, const char *header, long long data_size, const char *path) {
    char entry[256] = "";
    const char *found = value_of(header, t->name);
    if (!found) return fail("%s has no tensor %s", path, t->name);
    if (sscanf(found, "{%255[^}]", entry) != 1) return fail("%s: tensor %s has no description", path, t->name);
    const char *dtype = value_of(entry, "dtype"), *shape = value_of(entry, "shape");
    const char *offsets = value_of(entry, "data_offsets");
    t->is_bf16 = is_string(dtype, "BF16");
    t->bytes = is_string(dtype, "F32") ? 4 : t->is_bf16 || is_string(dtype, "F16") ? 2 : 0;
    if (!t->bytes) return fail("%s: tensor %s must be of type F32, F16 or BF16", path, t->name);
    long long dims[2] = {0, 0}, end = -1;
    const int num_dims = shape ? sscanf(shape, "[ %lld , %lld", &dims[0], &dims[1]) : 0;
    if (t->rows && (num_dims != 2 || dims[0] != t->rows || dims[1] != t->cols))
        return fail("%s: tensor %s must have the shape [%d, %d]", path, t->name, t->rows, t->cols);
    if (!t->rows && (num_dims != 1 || dims[0] != t->cols))
        return fail("%s: tensor %s must have the shape [%d]", path, t->name, t->cols);
    if (!offsets || sscanf(offsets, "[ %lld , %lld ]", &t->begin, &end) != 2 || t->begin < 0 || end > data_size ||
        t->begin > end || end - t->begin != num_elements(t) * t->bytes)
        return fail("%s: the data_offsets of tensor %s are not those of %lld elements within the file", path, t->name,
                    num_elements(t));
    return 0;
}

/* Refuses a file with more, such as biases, which ignored would give text that is wrong and looks right. */
static int place_tensors(tensor *list, int count, const char *header, long long data_size, const char *path) {
    long long left = data_size;
    for (int i = 0; i < count; i++) {
        const int status = place_tensor(&list[i], header, data_size, path);
        if (status) return status;
        left -= num_elements(&list[i]) * list[i].bytes;
    }
    return left ? fail("%s has other tensors than those of a plain Llama, or some lie within each other", path) : 0;
}

/* Safetensors are little-endian. */
static uint32_t bits_of(const unsigned char *bytes, int count) {
    uint32_t bits = 0;
    for (int i = count; i-- > 0;) bits = bits << 8 | bytes[i];
    return bits;
}

static float f16_to_f32(uint32_t bits) {
    const int exponent = bits >> 10 & 31;
    const float digits = (float)(bits & 1023), sign = bits >> 15 ? -1.0F : 1.0F;
    if (exponent == 31) return digits != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(digits + 1024, exponent - 25) : ldexpf(digits, -24));
}

static float element(const tensor *t, const unsigned char *bytes) {
    const uint32_t bits = bits_of(bytes, t->bytes);
    if (t->bytes == 2 && !t->is_bf16) return f16_to_f32(bits);
    const uint32_t whole = t->is_bf16 ? bits << 16 : bits;
    float x;
    memcpy(&x, &whole, sizeof x);
    return x;
}

static int read_tensor(const tensor *t, file *f, long long data, float *to) {
    if (fseeko(f->stream, (off_t)(data + t->begin), SEEK_SET) != 0) return fail("%s cannot be read", f->path);
    unsigned char *bytes = file_read(f, (size_t)(num_elements(t) * t->bytes));
    if (!bytes) return FAILED;
    int is_finite = 1;
    for (long long i = 0; i < num_elements(t); i++) {
        to[i] = element(t, bytes + i * t->bytes);
        is_finite &= isfinite(to[i]) != 0;
    }
    free(bytes);
    return is_finite ? 0 : fail("%s: tensor %s has an element that is no finite number", f->path, t->name);
}

/* Reads all weights into one block of memory, which is taken only after every size has been compared with the file. */
static int read_tensors(model *m, const tensor *list, int count, file *f, long long data) {
    long long total = 0;
    int status = 0;
    for (int i = 0; i < count; i++) total += num_elements(&list[i]);
    m->weights = malloc((size_t)total * sizeof *m->weights);
    if (!m->weights) return fail("out of memory for %lld weights", total);
    float *to = m->weights;
    for (int i = 0; i < count && !status; i++) {
        status = read_tensor(&list[i], f, data, to);
        if (list[i].to) *list[i].to = to;
        to += num_elements(&list[i]);
    }
    if (m->is_tied) m->head = m->embedding;
    return status;
}

static int read_weights(model *m, file *f) {
    unsigned char size_bytes[8];
    if (f->size < 8 || fread(size_bytes, 1, 8, f->stream) != 8)
        return fail("%s is too short to be a safetensors file", f->path);
    const long long size = bits_of(size_bytes, 4);
    if (bits_of(size_bytes + 4, 4) || size > MOST_HEADER || size > f->size - 8)
        return fail("%s is no whole safetensors file: its header ends outside of it, or is larger than any", f->path);
    char *text = file_read(f, (size_t)size);
    tensor *list = malloc((size_t)(9 * m->num_layers + 3) * sizeof *list);
    int status = text && list ? 0 : text ? fail("out of memory for a list of tensors") : FAILED;
    if (!status) {
        const int count = list_tensors(m, list);
        status = place_tensors(list, count, text, f->size - 8 - size, f->path);
        if (!status) status = read_tensors(m, list, count, f, 8 + size);
    }
    free(text);
    free(list);
    return status;
}

int model_read(model *m, const char *folder) {
    *m = (model){0};
    int status = read_config(m, folder);
    if (status) return status;
    m->layers = calloc((size_t)m->num_layers, sizeof *m->layers);
    if (!m->layers) return fail("out of memory for %d layers", m->num_layers);
    file f = {0};
    status = file_open(&f, folder, "model.safetensors");
    if (!status) status = read_weights(m, &f);
    if (f.stream) fclose(f.stream);
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
