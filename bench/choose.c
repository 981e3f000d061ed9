/* choose.c: chooses rows, and times each choice, in a library that holds the core. */
#include "driver.h"

#include "attend/topk.h"
#include "kvcache.h"

/* Makes keys of scores and chooses the `most` best, count times.  keys: room for num; out: for `most`. */
EXPORT void choose_best(const float *scores, int64_t num, int32_t most, uint32_t *keys, int32_t *out, int32_t count,
                        double *seconds) {
    const kvc_entries entries = {.keys = keys, .num = num, .local = num, .local_end = num};
    for (int32_t i = 0; i < count; i++) {
        const double start = now();
        for (int64_t j = 0; j < num; j++) keys[j] = kvc_key_of(scores[j]);
        kvc_topk(&entries, most, out);
        seconds[i] = now() - start;
    }
}

/* Keys of one layer, all in one sequence; the queries of one more token, and its heads' weights. */
typedef struct choose_shape {
    const float *keys, *q, *weights;
    int32_t num_rows, num_heads, dim, type, width, num_threads;
} choose_shape;

/* Chooses count times in an open batch: by kvc_choose, or task by task. */
static kvc_status time_choices(kvc_batch *batch, const choose_shape *s, int32_t *out, int by_tasks, int32_t count,
                               double *seconds) {
    const int64_t row = s->dim * (int64_t)sizeof(float);
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .num_heads = s->num_heads, .num_threads = s->num_threads};
    const kvc_choose_args args = {.struct_size = sizeof args,
                                  .q = s->q,
                                  .weights = s->weights,
                                  .chosen = out,
                                  .q_token_stride = s->num_heads * row,
                                  .q_head_stride = row,
                                  .weights_head_stride = sizeof *s->weights,
                                  .relu = 1,
                                  .width = s->width};
    kvc_plan *plan = NULL;
    kvc_status status = by_tasks ? kvc_plan_new(batch, &plan_args, &plan) : KVC_OK;
    for (int32_t i = 0; status == KVC_OK && i < count; i++) {
        const double start = now();
        if (!by_tasks) status = kvc_choose(batch, &plan_args, &args);
        for (int64_t task = 0; plan && status == KVC_OK && task < kvc_plan_num_tasks(plan); task++)
            status = kvc_plan_choose(plan, 0, &args, task);
        seconds[i] = now() - start;
    }
    kvc_plan_free(plan);
    return status;
}

/* out: [width]. */
EXPORT kvc_status choose_rows(const choose_shape *s, int32_t *out, int32_t by_tasks, int32_t count, double *seconds) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = s->dim, .k_type = s->type, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .max_seq_len = s->num_rows,
                               .num_threads = s->num_threads};
    const kvc_put_args put = {.struct_size = sizeof put,
                              .num_tokens = s->num_rows - 1,
                              .k = s->keys,
                              .k_token_stride = s->dim * (int64_t)sizeof(float)};
    kvc_put_args last = put;
    kvc_cache *cache = NULL;
    kvc_batch *batch = NULL;
    last.num_tokens = 1;
    last.k = s->keys + (s->num_rows - 1) * (int64_t)s->dim;
    kvc_status status = kvc_cache_new(&config, &cache);
    if (status == KVC_OK) status = kvc_begin(cache, s->num_rows - 1, NULL, NULL, NULL, &batch);
    if (status == KVC_OK) status = kvc_put(batch, 0, &put);
    if (status == KVC_OK) status = kvc_commit(batch);
    if (status == KVC_OK) batch = NULL, status = kvc_begin(cache, 1, NULL, NULL, NULL, &batch);
    if (status == KVC_OK) status = kvc_put(batch, 0, &last);
    if (status == KVC_OK) status = time_choices(batch, s, out, by_tasks, count, seconds);
    if (batch) kvc_abort(batch);
    kvc_cache_free(cache);
    return status;
}
