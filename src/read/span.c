/* span.c: kvc_spans and kvc_hold_free: describe rows in place, and keep them from being moved. */
#include "read/span.h"

#include "base/status.h"
#include "read/batch_rows.h"
#include "cache/check.h"
#include "cache/waiting.h"

struct kvc_hold { /* what a caller's view of rows has */
    kvc_cache *cache;
    kvc_pool *pool;
    size_t size; /* bytes of this allocation */
    int64_t num_blocks;
    kvc_block *blocks[];
};

kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out) {
    const size_t size = sizeof(kvc_hold) + (size_t)num_runs * sizeof(kvc_block *);
    kvc_hold *hold = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!hold) return kvc_fail(KVC_ERR_NOMEM, "out of memory to hold %d runs", num_runs);
    *hold = (kvc_hold){.cache = cache, .pool = &cache->pools[group], .size = size, .num_blocks = num_runs};
    for (int32_t i = 0; i < num_runs; i++) {
        hold->blocks[i] = runs[i].block;
        kvc_pool_pin(runs[i].block);
    }
    cache->waiting.num_holds++;
    *out = hold;
    return KVC_OK;
}

void kvc_hold_free(kvc_hold *hold) {
    if (!hold) return;
    kvc_cache *cache = hold->cache;
    kvc_lock(cache);
    for (int64_t i = 0; i < hold->num_blocks; i++) kvc_pool_unpin(hold->pool, hold->blocks[i]);
    cache->waiting.num_holds--;
    kvc_memory_free(&cache->memory, hold, hold->size, KVC_MEMORY_SCRATCH, -1);
    kvc_unlock(cache, KVC_OK);
}

kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at, int32_t stride) {
    const int has_values = at->v_row_bytes != 0;
    return (kvc_span){.k = kvc_key_at(at, run->block, run->slot, 0),
                      .v = has_values ? kvc_value_at(at, run->block, run->slot, 0) : NULL,
                      .k_head_stride = (int64_t)at->head_stride,
                      .k_row_stride = (int64_t)at->k_row_bytes,
                      .v_head_stride = has_values ? (int64_t)at->head_stride : 0,
                      .v_row_stride = (int64_t)at->v_row_bytes,
                      .num_rows = run->count,
                      .position = kvc_position_of(run->position, stride),
                      .delta = run->delta,
                      .k_scales = kvc_scale_at(at, at->k_scales, run->block, run->slot, 0),
                      .v_scales = kvc_scale_at(at, at->v_scales, run->block, run->slot, 0)};
}

/* Writes the runs as spans, as many as there is room for, and sets *num_spans to how many there are.  Holds them if all
 * were written and `hold` is not NULL. */
static kvc_status show_runs(kvc_cache *cache, int32_t layer, const kvc_run *runs, int32_t num_runs, kvc_span *spans,
                            size_t span_size, int64_t max_spans, int64_t *num_spans, kvc_hold **hold) {
    const int32_t stride = cache->pools[cache->group_of[layer]].stride;
    *num_spans = num_runs;
    for (int64_t i = 0; i < num_runs && i < max_spans; i++) {
        const kvc_span span = kvc_span_of(&runs[i], &cache->layouts[cache->layout_of[layer]], stride);
        kvc_write_struct((char *)spans + (size_t)i * span_size, span_size, &span, sizeof span);
    }
    if (!hold || !num_runs || num_runs > max_spans) return KVC_OK;
    return kvc_hold_runs(cache, runs, num_runs, cache->group_of[layer], hold);
}

static kvc_status check_arguments(const kvc_span *spans, size_t span_size, int64_t max_spans, const int64_t *num_spans,
                                  kvc_hold **hold) {
    if (hold) *hold = NULL;
    kvc_status status = kvc_check_output(spans, span_size, max_spans, kvc_span_least_size, sizeof(kvc_span), "spans");
    if (status == KVC_OK && !num_spans) status = kvc_fail(KVC_ERR_INVALID, "num_spans is NULL");
    return status;
}

kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                     int64_t max_spans, int64_t *num_spans, kvc_hold **hold) {
    KVC_TRY(check_arguments(spans, span_size, max_spans, num_spans, hold));
    KVC_TRY(kvc_check_layer(cache, layer));
    kvc_lock(cache);
    kvc_cache_find(cache, seq_id); /* waits while its rows are written */
    const kvc_run_list *list = kvc_runs_of(cache, seq_id, layer);
    kvc_status status = show_runs(cache, layer, list ? kvc_runs_begin(list) : NULL, list ? list->num : 0, spans,
                                  span_size, max_spans, num_spans, hold);
    return kvc_unlock(cache, status);
}

kvc_status kvc_batch_spans(kvc_batch *batch, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                           int64_t max_spans, int64_t *num_spans, kvc_hold **hold) {
    kvc_cache *cache = batch->cache;
    kvc_batch_runs list;
    KVC_TRY(check_arguments(spans, span_size, max_spans, num_spans, hold));
    KVC_TRY(kvc_check_attention(batch, layer, KVC_MAY_LACK_VALUES));
    kvc_lock(cache);
    kvc_status status = kvc_batch_runs_new(batch, layer, seq_id, &list);
    if (status == KVC_OK)
        status = show_runs(cache, layer, list.runs, list.num, spans, span_size, max_spans, num_spans, hold);
    kvc_batch_runs_free(&cache->memory, &list);
    return kvc_unlock(cache, status);
}
