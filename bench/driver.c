/* driver.c: calls the core and times each call, in a library that holds both. */
#include "driver.h"

#include <math.h>

#include "kvcache.h"

/* ---- a cache of equal layers ------------------------------------------------------------------------------------- */

/* The shape of every layer, and of the cache. */
typedef struct driver_shape {
    int64_t max_seq_len; /* 0: no limit */
    int32_t num_layers, num_kv_heads, k_dim, v_dim;
    int32_t k_type, v_type;
    int32_t value_in_key;
    int32_t window;     /* 0: full attention */
    int32_t block_size; /* 0: the cache's default */
    int32_t num_threads;
} driver_shape;

typedef struct driver {
    kvc_cache *cache;
    driver_shape shape;
} driver;

EXPORT kvc_status driver_new(const driver_shape *shape, driver **made) {
    driver *d = *made = allocate(1, sizeof *d);
    kvc_layer *layers = allocate((size_t)shape->num_layers, sizeof *layers);
    d->shape = *shape;
    for (int32_t i = 0; i < shape->num_layers; i++) {
        layers[i] = (kvc_layer){.num_kv_heads = shape->num_kv_heads,
                                .k_dim = shape->k_dim,
                                .v_dim = shape->v_dim,
                                .k_type = shape->k_type,
                                .v_type = shape->v_type,
                                .value_in_key = shape->value_in_key,
                                .policy = {.kind = shape->window ? KVC_SLIDING : KVC_FULL, .window = shape->window}};
    }
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = shape->num_layers,
                               .block_size = shape->block_size,
                               .max_seq_len = shape->max_seq_len,
                               .max_sequences = 1,
                               .num_threads = shape->num_threads};
    const kvc_status status = kvc_cache_new(&config, &d->cache);
    free(layers);
    if (status != KVC_OK) free(d);
    return status;
}

EXPORT void driver_free(driver *d) {
    kvc_cache_free(d->cache);
    free(d);
}

EXPORT kvc_status driver_truncate(driver *d, int32_t length) { return kvc_truncate(d->cache, 0, length); }

/* Removes every second token of sequence 0, from position 0 on, without moving the others. */
EXPORT kvc_status driver_drop_every_second(driver *d) {
    kvc_status status = KVC_OK;
    const int32_t end = kvc_next_position(d->cache, 0);
    for (int32_t p = 0; status == KVC_OK && p < end; p += 2) status = kvc_remove(d->cache, 0, p, p + 1, 0);
    return status;
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

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

/* Appends num_tokens tokens. */
EXPORT kvc_status driver_append(driver *d, const float *rows, int32_t num_tokens) {
    const kvc_put_args args = rows_at(d, rows, num_tokens);
    kvc_batch *batch;
    TRY(kvc_begin(d->cache, num_tokens, NULL, NULL, NULL, &batch));
    kvc_status status = put_everywhere(d, batch, &args);
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
        TRY(kvc_begin(d->cache, 1, &position, NULL, NULL, &batch));
        const double t1 = now();
        kvc_status status = put_everywhere(d, batch, &args);
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
    TRY(kvc_begin(d->cache, num_tokens, NULL, NULL, NULL, &batch));
    kvc_status status = KVC_OK;
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

/* A forward pass that is aborted at its end.  It has num_tokens tokens.
 * q and out are [num_tokens][num_heads][k_dim or v_dim], of q_type. */
typedef struct driver_pass {
    const float *rows; /* of all tokens, as in rows_at; the same for every layer */
    const void *q;
    void *out;
    int32_t num_tokens, num_heads, num_threads, q_type, precision;
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
                           .num_threads = pass->num_threads,
                           .precision = pass->precision};
}

static kvc_status begin_pass(const driver *d, const driver_pass *pass, kvc_batch **batch) {
    const kvc_put_args put = rows_at(d, pass->rows, pass->num_tokens);
    TRY(kvc_begin(d->cache, pass->num_tokens, NULL, NULL, NULL, batch));
    const kvc_status status = put_everywhere(d, *batch, &put);
    if (status != KVC_OK) kvc_abort(*batch);
    return status;
}

/* Attends `count` times, going round the layers from first_layer on: seconds [count]. */
EXPORT kvc_status driver_attend(driver *d, const driver_pass *pass, int32_t first_layer, int32_t count,
                                double *seconds) {
    const kvc_attend_args args = attend_args(d, pass);
    kvc_batch *batch;
    TRY(begin_pass(d, pass, &batch));
    kvc_status status = KVC_OK;
    for (int32_t i = 0; status == KVC_OK && i < count; i++) {
        const kvc_plan_args plan = plan_args(pass, (first_layer + i) % d->shape.num_layers);
        const double start = now();
        status = kvc_attend(batch, &plan, &args);
        seconds[i] = now() - start;
    }
    kvc_abort(batch);
    return status;
}

/* Attends once in layer 0, and decodes the rows it saw, the pass's own included: k and v are
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
    TRY(begin_pass(d, pass, &batch));
    kvc_status status = kvc_attend(batch, &plan, &args);
    if (status == KVC_OK) status = kvc_dense(batch, 0, &dense);
    kvc_abort(batch);
    return status;
}
