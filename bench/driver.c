/* driver.c: calls the core and times each call, in a library that holds both.
 *
 * Every measurement returns a kvc_status and writes the seconds of each of its repetitions. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime */
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/align.h"
#include "base/dtype.h"
#include "kernels/dispatch.h"
#include "rows/copy.h"
#include "kvcache.h"

#define EXPORT __attribute__((visibility("default")))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

EXPORT const char *driver_error(void) { return kvc_last_error(); }

/* ---- a cache of equal layers ------------------------------------------------------------------------------------- */

/* The shape of every layer, and of the cache; DriverShape in driver.py has the same fields. */
typedef struct driver_shape {
    int64_t max_seq_len;   /* 0: no limit */
    int64_t max_sequences; /* 0: no limit */
    int32_t num_layers, num_kv_heads, k_dim, v_dim;
    int32_t k_type, v_type;
    int32_t value_in_key;
    int32_t window; /* 0: full attention */
    int32_t num_sink_tokens;
    int32_t block_size; /* 0: the cache's default */
    int32_t num_threads;
} driver_shape;

typedef struct driver {
    kvc_cache *cache;
    driver_shape shape;
} driver;

/* Returns NULL after an error, which driver_error describes. */
EXPORT driver *driver_new(const driver_shape *shape) {
    driver *d = malloc(sizeof *d);
    kvc_layer *layers = calloc((size_t)shape->num_layers, sizeof *layers);
    if (!d || !layers) abort();
    *d = (driver){NULL, *shape};
    for (int32_t i = 0; i < shape->num_layers; i++) {
        layers[i] = (kvc_layer){.num_kv_heads = shape->num_kv_heads,
                                .k_dim = shape->k_dim,
                                .v_dim = shape->v_dim,
                                .k_type = shape->k_type,
                                .v_type = shape->v_type,
                                .value_in_key = shape->value_in_key,
                                .policy = {.kind = shape->window ? KVC_SLIDING : KVC_FULL,
                                           .window = shape->window,
                                           .num_sink_tokens = shape->num_sink_tokens}};
    }
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = shape->num_layers,
                               .block_size = shape->block_size,
                               .max_seq_len = shape->max_seq_len,
                               .max_sequences = shape->max_sequences,
                               .num_threads = shape->num_threads};
    const kvc_status status = kvc_cache_new(&config, &d->cache);
    free(layers);
    if (status == KVC_OK) return d;
    free(d);
    return NULL;
}

EXPORT void driver_free(driver *d) {
    kvc_cache_free(d->cache);
    free(d);
}

EXPORT kvc_status driver_truncate(driver *d, int32_t length) { return kvc_truncate(d->cache, 0, length); }

EXPORT kvc_status driver_fork(driver *d, int64_t src, int64_t dst) { return kvc_fork(d->cache, src, dst); }

/* Removes every second token of sequence 0, from position 0 on, without moving the others. */
EXPORT kvc_status driver_drop_every_second(driver *d) {
    kvc_status status = KVC_OK;
    const int32_t end = kvc_next_position(d->cache, 0);
    for (int32_t p = 0; status == KVC_OK && p < end; p += 2) status = kvc_remove(d->cache, 0, p, p + 1, 0);
    return status;
}

EXPORT int64_t driver_rows_moved(driver *d) {
    kvc_stats stats;
    kvc_get_stats(d->cache, &stats, sizeof stats);
    return stats.rows_moved;
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* Begins a batch of the next num_tokens tokens of each sequence in [first_seq, end_seq), one after the other. */
static kvc_status begin(const driver *d, int32_t num_tokens, int64_t first_seq, int64_t end_seq, kvc_batch **batch) {
    const int32_t total = num_tokens * (int32_t)(end_seq - first_seq);
    int32_t *positions = malloc((size_t)total * sizeof *positions);
    int64_t *seq_ids = malloc((size_t)total * sizeof *seq_ids);
    if (!positions || !seq_ids) abort();
    for (int32_t i = 0; i < total; i++) {
        seq_ids[i] = first_seq + i / num_tokens;
        positions[i] = i % num_tokens ? positions[i - 1] + 1 : kvc_next_position(d->cache, seq_ids[i]);
    }
    const kvc_status status = kvc_begin(d->cache, total, positions, seq_ids, NULL, batch);
    free(positions);
    free(seq_ids);
    return status;
}

/* Describes f32 rows: keys [num_tokens][num_kv_heads][k_dim], then values [num_tokens][num_kv_heads][v_dim]. */
static kvc_put_args rows_at(const driver *d, const float *rows, int32_t num_tokens) {
    const driver_shape *s = &d->shape;
    const int64_t f32 = (int64_t)sizeof *rows;
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .num_tokens = num_tokens,
                          .k = rows,
                          .v = s->value_in_key ? NULL : rows + (int64_t)num_tokens * s->num_kv_heads * s->k_dim,
                          .k_token_stride = s->num_kv_heads * s->k_dim * f32,
                          .k_head_stride = s->k_dim * f32,
                          .v_token_stride = s->num_kv_heads * s->v_dim * f32,
                          .v_head_stride = s->v_dim * f32};
}

/* Puts the same rows into every layer. */
static kvc_status put_everywhere(const driver *d, kvc_batch *batch, const kvc_put_args *args) {
    kvc_status status = KVC_OK;
    for (int32_t layer = 0; status == KVC_OK && layer < d->shape.num_layers; layer++)
        status = kvc_put(batch, layer, args);
    return status;
}

/* Appends num_tokens tokens to a sequence. */
EXPORT kvc_status driver_append(driver *d, int64_t seq_id, const float *rows, int32_t num_tokens) {
    const kvc_put_args args = rows_at(d, rows, num_tokens);
    kvc_batch *batch;
    kvc_status status = begin(d, num_tokens, seq_id, seq_id + 1, &batch);
    if (status != KVC_OK) return status;
    status = put_everywhere(d, batch, &args);
    if (status == KVC_OK) status = kvc_commit(batch);
    if (status != KVC_OK) kvc_abort(batch);
    return status;
}

/* Appends `steps` tokens one by one; writes the seconds of begin, of put (its mean over layers) and of commit. */
EXPORT kvc_status driver_steps(driver *d, const float *rows, int32_t steps, double *begins, double *puts,
                               double *commits) {
    const kvc_put_args args = rows_at(d, rows, 1);
    for (int32_t i = 0; i < steps; i++) {
        const int32_t position = kvc_next_position(d->cache, 0);
        kvc_batch *batch;
        const double t0 = now();
        kvc_status status = kvc_begin(d->cache, 1, &position, NULL, NULL, &batch);
        if (status != KVC_OK) return status;
        const double t1 = now();
        status = put_everywhere(d, batch, &args);
        const double t2 = now();
        if (status == KVC_OK) status = kvc_commit(batch);
        const double t3 = now();
        if (status != KVC_OK) {
            kvc_abort(batch);
            return status;
        }
        begins[i] = t1 - t0;
        puts[i] = (t2 - t1) / d->shape.num_layers;
        commits[i] = t3 - t2;
    }
    return KVC_OK;
}

/* Puts num_tokens tokens into each layer, and aborts: seconds [num_layers].  Layer i takes its rows from
 * rows + i * step; a step of 0 gives all layers the same ones. */
EXPORT kvc_status driver_put(driver *d, const float *rows, int64_t step, int32_t num_tokens, double *seconds) {
    kvc_batch *batch;
    kvc_status status = begin(d, num_tokens, 0, 1, &batch);
    if (status != KVC_OK) return status;
    for (int32_t layer = 0; status == KVC_OK && layer < d->shape.num_layers; layer++) {
        const kvc_put_args args = rows_at(d, rows + layer * step, num_tokens);
        const double start = now();
        status = kvc_put(batch, layer, &args);
        seconds[layer] = now() - start;
    }
    kvc_abort(batch);
    return status;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* A forward pass that is aborted at its end: num_tokens tokens of each of the sequences [0, num_seqs), one sequence
 * after the other; q and out are [all tokens][num_heads][k_dim or v_dim], of q_type. */
typedef struct driver_pass {
    const float *rows; /* of all tokens, as in rows_at; the same for every layer */
    const void *q;
    void *out;
    int32_t num_tokens, num_seqs, num_heads, num_threads, q_type;
} driver_pass;

static kvc_attend_args attend_args(const driver *d, const driver_pass *pass) {
    const driver_shape *s = &d->shape;
    const int64_t k_row = (int64_t)kvc_row_bytes(pass->q_type, s->k_dim);
    const int64_t v_row = (int64_t)kvc_row_bytes(pass->q_type, s->v_dim);
    return (kvc_attend_args){.struct_size = sizeof(kvc_attend_args),
                             .q = pass->q,
                             .out = pass->out,
                             .q_type = pass->q_type,
                             .q_token_stride = pass->num_heads * k_row,
                             .q_head_stride = k_row,
                             .out_token_stride = pass->num_heads * v_row,
                             .out_head_stride = v_row,
                             .scale = 1.0F / sqrtf((float)s->k_dim)};
}

static kvc_plan_args plan_args(const driver_pass *pass, int32_t layer) {
    return (kvc_plan_args){.struct_size = sizeof(kvc_plan_args),
                           .layer = layer,
                           .num_heads = pass->num_heads,
                           .num_threads = pass->num_threads};
}

static kvc_status begin_pass(const driver *d, const driver_pass *pass, kvc_batch **batch) {
    const kvc_put_args put = rows_at(d, pass->rows, pass->num_tokens * pass->num_seqs);
    kvc_status status = begin(d, pass->num_tokens, 0, pass->num_seqs, batch);
    if (status != KVC_OK) return status;
    status = put_everywhere(d, *batch, &put);
    if (status != KVC_OK) kvc_abort(*batch);
    return status;
}

/* Attends `count` times, going round the layers from first_layer on: seconds [count]. */
EXPORT kvc_status driver_attend(driver *d, const driver_pass *pass, int32_t first_layer, int32_t count,
                                double *seconds) {
    const kvc_attend_args args = attend_args(d, pass);
    kvc_batch *batch;
    kvc_status status = begin_pass(d, pass, &batch);
    if (status != KVC_OK) return status;
    for (int32_t i = 0; status == KVC_OK && i < count; i++) {
        const kvc_plan_args plan = plan_args(pass, (first_layer + i) % d->shape.num_layers);
        const double start = now();
        status = kvc_attend(batch, &plan, &args);
        seconds[i] = now() - start;
    }
    kvc_abort(batch);
    return status;
}

/* Attends once in layer 0 for one sequence, and decodes the rows it saw, the pass's own included: k and v are
 * [num_kv_heads][num_rows][k_dim or v_dim].  v is NULL where values lie in the keys. */
EXPORT kvc_status driver_attend_and_show(driver *d, const driver_pass *pass, int64_t num_rows, float *k, float *v) {
    const kvc_attend_args args = attend_args(d, pass);
    const kvc_plan_args plan = plan_args(pass, 0);
    const int64_t k_row = d->shape.k_dim * (int64_t)sizeof *k, v_row = d->shape.v_dim * (int64_t)sizeof *v;
    const kvc_rows_out rows = {.struct_size = sizeof rows,
                               .type = KVC_F32,
                               .k = k,
                               .v = v,
                               .k_head_stride = num_rows * k_row,
                               .k_row_stride = k_row,
                               .v_head_stride = num_rows * v_row,
                               .v_row_stride = v_row};
    const kvc_dense_args dense = {.struct_size = sizeof dense, .rows = &rows, .num_rows = num_rows};
    kvc_batch *batch;
    kvc_status status = begin_pass(d, pass, &batch);
    if (status != KVC_OK) return status;
    status = kvc_attend(batch, &plan, &args);
    if (status == KVC_OK) status = kvc_dense(batch, 0, &dense);
    kvc_abort(batch);
    return status;
}

/* ---- kernels alone ----------------------------------------------------------------------------------------------- */

/* What the kernels work on: num_rows rows, a multiple of KVC_TILE, each a key and a value. */
typedef struct driver_kernel {
    const kvc_kernels *kernels;
    int32_t type, kernel_type, dim, num_q, num_rows, q_stride, prefetch_level;
    size_t row_bytes;
    char *rows, *scales, *unpacked; /* scales: of the rows, if they have any; unpacked: a tile of kernel_type, where no
                                       kernel takes `type` */
    float *given, *q, *weights, *scores, *acc, *factor, *max, *sum, *minima;
} driver_kernel;

static void *allocate(size_t bytes) {
    void *p = aligned_alloc(64, (size_t)kvc_align_up(bytes, 64));
    if (!p) abort();
    return p;
}

static float *random_floats(size_t n) {
    float *x = allocate(n * sizeof *x);
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) x[i] = (float)((state = state * 1664525U + 1013904223U) >> 8) / 8388608.0F - 1;
    return x;
}

EXPORT void driver_kernel_free(driver_kernel *k) {
    void *const all[] = {k->rows,   k->given, k->q,   k->weights, k->scores,   k->acc,
                         k->factor, k->max,   k->sum, k->minima,  k->unpacked, k};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Scores queries of 16 bits over rows of the same type as attention does. */
static const kvc_scorer *scorer_of(const driver_kernel *k) {
    const kvc_scorer *as_16 = k->type < KVC_FLOAT_TYPES ? &k->kernels->score_16[k->type] : NULL;
    return as_16 && as_16->score ? as_16 : &k->kernels->score[k->kernel_type];
}

EXPORT driver_kernel *driver_kernel_new(int32_t type, int32_t dim, int32_t num_q, int32_t num_rows) {
    const char *unknown;
    driver_kernel *k = allocate(sizeof *k);
    *k = (driver_kernel){.kernels = kvc_cpu_kernels(&unknown),
                         .type = type,
                         .dim = dim,
                         .num_q = num_q,
                         .num_rows = num_rows,
                         .q_stride = 2 * dim,
                         .prefetch_level = kvc_cpu_prefetch_level(),
                         .row_bytes = kvc_blocks_bytes(type, dim)};
    const size_t scores = (size_t)num_q * KVC_TILE, q = (size_t)num_q * (size_t)k->q_stride;
    k->kernel_type = k->kernels->score[type].score ? type : KVC_Q8_0;
    k->unpacked = allocate(KVC_TILE * kvc_row_bytes(k->kernel_type, dim));
    k->minima = allocate((size_t)(dim / KVC_QUANT_ELEMENTS * KVC_TILE) * sizeof(float));
    k->rows = allocate((size_t)num_rows * (k->row_bytes + kvc_row_scale_bytes(type)));
    k->scales = k->rows + (size_t)num_rows * k->row_bytes;
    k->given = random_floats(scores > (size_t)num_rows * (size_t)dim ? scores : (size_t)num_rows * (size_t)dim);
    k->q = random_floats(q);
    k->weights = random_floats(scores);
    k->scores = allocate(scores * sizeof(float));
    k->acc = allocate(q * sizeof(float));
    k->factor = allocate((size_t)num_q * sizeof(float));
    k->max = allocate((size_t)num_q * sizeof(float));
    k->sum = allocate((size_t)num_q * sizeof(float));
    const kvc_rows rows = {type, k->rows, (int64_t)k->row_bytes, 0, k->scales, KVC_SCALE_BYTES};
    kvc_encode_rows(k->kernels, &rows, k->given, dim * (int64_t)sizeof(float), num_rows, dim);
    if (type < KVC_FLOAT_TYPES && k->kernels->score_16[type].score)
        for (int32_t r = 0; r < num_q; r++) {
            float *row = k->q + r * k->q_stride;
            k->kernels->convert(KVC_F32, type, k->given, 0, row, 0, 1, dim);
            memcpy(row, k->given, kvc_row_bytes(type, dim));
        }
    scorer_of(k)->prepare(k->q, k->q_stride, num_q, dim, 1);
    return k;
}

/* Starts sums and maxima anew, so that they stay numbers however often a kernel runs. */
static void reset(const driver_kernel *k) {
    memset(k->acc, 0, (size_t)k->num_q * (size_t)k->q_stride * sizeof *k->acc);
    memcpy(k->scores, k->given, (size_t)k->num_q * KVC_TILE * sizeof *k->scores);
    for (int32_t r = 0; r < k->num_q; r++) k->factor[r] = 1, k->max[r] = -INFINITY, k->sum[r] = 0;
}

/* Returns a tile as kernels take it; unpacks it if they take it so. */
static const char *tile_of(const driver_kernel *k, int32_t tile) {
    const char *rows = k->rows + tile * KVC_TILE * (int64_t)k->row_bytes;
    if (k->kernel_type == k->type) return rows;
    k->kernels->unpack(k->type, k->unpacked, rows, (int64_t)k->row_bytes, NULL, 0, KVC_TILE, k->dim, k->minima);
    return k->unpacked;
}

/* Multiplies scores, or weights, by the scales of a tile's rows, if these have any. */
static void times_scales(const driver_kernel *k, float *x, int32_t tile) {
    float by[KVC_TILE];
    if (!kvc_row_scale_bytes(k->type)) return;
    k->kernels->convert(KVC_F16, KVC_F32, by, 0, k->scales + tile * KVC_TILE * KVC_SCALE_BYTES, 0, 1, KVC_TILE);
    k->kernels->times(x, k->num_q, by);
}

/* Runs kernel number `kernel` (Kernel.NAMES of driver.py) on a tile, and asks for the rows of the next one. */
static void run_kernel(const driver_kernel *k, int32_t kernel, int32_t tile) {
    const int64_t stride = (int64_t)kvc_blocks_bytes(k->kernel_type, k->dim), bytes = KVC_TILE * (int64_t)k->row_bytes;
    const char *rows = kernel < 2 ? tile_of(k, tile) : NULL;
    const kvc_ahead next = {k->rows + (tile * bytes + bytes) % (k->num_rows * (int64_t)k->row_bytes), (int32_t)bytes,
                            k->prefetch_level};
    switch (kernel) {
    case 0:
        scorer_of(k)->score(k->scores, k->q, k->q_stride, k->num_q, rows, stride, KVC_TILE, k->dim, next);
        times_scales(k, k->scores, tile);
        break;
    case 1:
        times_scales(k, k->scores, tile); /* as weights would be */
        k->kernels->accumulate[k->kernel_type](k->acc, k->q_stride, k->factor, k->weights, k->num_q, rows, stride,
                                               KVC_TILE, k->dim, next);
        break;
    default: k->kernels->softmax(k->scores, k->num_q, KVC_TILE, k->max, k->sum, k->factor, (kvc_ahead){.bytes = 0});
    }
}

/* Goes over all rows `count` times: seconds [count]. */
EXPORT void driver_kernel_run(const driver_kernel *k, int32_t kernel, int32_t count, double *seconds) {
    for (int32_t i = 0; i < count; i++) {
        reset(k);
        const double start = now();
        for (int32_t tile = 0; tile < k->num_rows / KVC_TILE; tile++) run_kernel(k, kernel, tile);
        seconds[i] = now() - start;
    }
}
