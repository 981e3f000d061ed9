/* driver.c: the bare C calls, timed in C, on a core compiled together with this file.
 *
 * Every measurement returns a kvc_status, and writes the seconds of each of its repetitions. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime */
#endif
#include <stdlib.h>
#include <time.h>

#include "kvcache.h"

#define EXPORT __attribute__((visibility("default")))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

EXPORT const char *driver_error(void) { return kvc_last_error(); }

/* ---- a cache of equal layers ------------------------------------------------------------------------------------- */

typedef struct driver {
    kvc_cache *cache;
    int32_t num_layers, num_kv_heads, head_dim;
} driver;

/* window 0: full attention.  NULL: see driver_error. */
EXPORT driver *driver_new(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int64_t max_seq_len, int32_t type,
                          int32_t window, int32_t block_size, int32_t num_threads) {
    driver *d = malloc(sizeof *d);
    kvc_layer *layers = calloc((size_t)num_layers, sizeof *layers);
    if (!d || !layers) abort();
    *d = (driver){NULL, num_layers, num_kv_heads, head_dim};
    for (int32_t i = 0; i < num_layers; i++) {
        layers[i] = (kvc_layer){.num_kv_heads = num_kv_heads,
                                .k_dim = head_dim,
                                .v_dim = head_dim,
                                .k_type = type,
                                .v_type = type,
                                .policy = {.kind = window ? KVC_SLIDING : KVC_FULL, .window = window}};
    }
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = num_layers,
                               .block_size = block_size,
                               .max_seq_len = max_seq_len,
                               .max_sequences = 1,
                               .num_threads = num_threads};
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

EXPORT int64_t driver_rows_moved(driver *d) {
    kvc_stats stats;
    kvc_get_stats(d->cache, &stats, sizeof stats);
    return stats.rows_moved;
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* The next num_tokens tokens of sequence 0. */
static kvc_status begin(const driver *d, int32_t num_tokens, kvc_batch **batch) {
    int32_t *positions = malloc((size_t)num_tokens * sizeof *positions);
    if (!positions) abort();
    const int32_t next = kvc_next_position(d->cache, 0);
    for (int32_t i = 0; i < num_tokens; i++) positions[i] = next + i;
    const kvc_status status = kvc_begin(d->cache, num_tokens, positions, NULL, NULL, batch);
    free(positions);
    return status;
}

/* Keys, then values, both [num_tokens][num_kv_heads][head_dim] of f32. */
static kvc_put_args rows_at(const driver *d, const float *rows, int32_t num_tokens) {
    const int64_t token = (int64_t)d->num_kv_heads * d->head_dim, head = d->head_dim, f32 = (int64_t)sizeof *rows;
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .num_tokens = num_tokens,
                          .k = rows,
                          .v = rows + num_tokens * token,
                          .k_token_stride = token * f32,
                          .k_head_stride = head * f32,
                          .v_token_stride = token * f32,
                          .v_head_stride = head * f32};
}

/* Appends num_tokens tokens, the same rows in every layer. */
EXPORT kvc_status driver_append(driver *d, const float *rows, int32_t num_tokens) {
    const kvc_put_args args = rows_at(d, rows, num_tokens);
    kvc_batch *batch;
    kvc_status status = begin(d, num_tokens, &batch);
    if (status != KVC_OK) return status;
    for (int32_t layer = 0; status == KVC_OK && layer < d->num_layers; layer++) status = kvc_put(batch, layer, &args);
    if (status == KVC_OK) status = kvc_commit(batch);
    if (status != KVC_OK) kvc_abort(batch);
    return status;
}

/* Steps of one token: the seconds of begin, of put (the mean over the layers) and of commit, each [steps]. */
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
        for (int32_t layer = 0; status == KVC_OK && layer < d->num_layers; layer++)
            status = kvc_put(batch, layer, &args);
        const double t2 = now();
        if (status == KVC_OK) status = kvc_commit(batch);
        const double t3 = now();
        if (status != KVC_OK) {
            kvc_abort(batch);
            return status;
        }
        begins[i] = t1 - t0;
        puts[i] = (t2 - t1) / d->num_layers;
        commits[i] = t3 - t2;
    }
    return KVC_OK;
}

/* Puts num_tokens tokens in each of the layers, and aborts: seconds [num_layers].  Layer i takes its rows at
 * rows + i * step: 0 for the same ones. */
EXPORT kvc_status driver_put(driver *d, const float *rows, int64_t step, int32_t num_tokens, double *seconds) {
    kvc_batch *batch;
    kvc_status status = begin(d, num_tokens, &batch);
    if (status != KVC_OK) return status;
    for (int32_t layer = 0; status == KVC_OK && layer < d->num_layers; layer++) {
        const kvc_put_args args = rows_at(d, rows + layer * step, num_tokens);
        const double start = now();
        status = kvc_put(batch, layer, &args);
        seconds[layer] = now() - start;
    }
    kvc_abort(batch);
    return status;
}

/* One more token: its rows in every layer; then its attention over all there is, reps times in each layer, one layer
 * after the other: seconds [reps][num_layers].  Nothing is committed. */
EXPORT kvc_status driver_attend(driver *d, const float *rows, const float *q, float *out, int32_t num_heads,
                                int32_t num_threads, int32_t reps, double *seconds) {
    const kvc_put_args put = rows_at(d, rows, 1);
    const int64_t head = d->head_dim * (int64_t)sizeof *q;
    const kvc_attend_args args = {.struct_size = sizeof args,
                                  .q = q,
                                  .out = out,
                                  .q_token_stride = num_heads * head,
                                  .q_head_stride = head,
                                  .out_token_stride = num_heads * head,
                                  .out_head_stride = head};
    kvc_batch *batch;
    kvc_status status = begin(d, 1, &batch);
    if (status != KVC_OK) return status;
    for (int32_t layer = 0; status == KVC_OK && layer < d->num_layers; layer++) status = kvc_put(batch, layer, &put);
    for (int32_t i = 0; status == KVC_OK && i < reps * d->num_layers; i++) {
        const kvc_plan_args plan = {.struct_size = sizeof plan,
                                    .layer = i % d->num_layers,
                                    .num_heads = num_heads,
                                    .num_threads = num_threads};
        const double start = now();
        status = kvc_attend(batch, &plan, &args);
        seconds[i] = now() - start;
    }
    kvc_abort(batch);
    return status;
}
