/* rows.c: the public functions that read rows: where they are, and copies of them. */
#include <string.h>

#include "cache.h"

/* The rows of a sequence in a layer; NULL if it holds none. */
static const kvc_rows *find_rows(const kvc_cache *cache, int64_t seq_id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    return sequence ? &sequence->rows[cache->group_of[layer]] : NULL;
}

int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    int64_t n = 0;
    kvc_lock(cache);
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    if (rows)
        for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++)
            for (int32_t i = 0; i < run->count; i++, n++)
                if (n < max_positions) positions[n] = run->position + i;
    kvc_unlock(cache, KVC_OK);
    return n;
}

int64_t kvc_find_row(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t position) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    kvc_lock(cache);
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    const int64_t row = rows ? kvc_rows_find(rows, position) : -1;
    kvc_unlock(cache, KVC_OK);
    return row;
}

struct kvc_hold {
    kvc_cache *cache;
    kvc_pool *pool;
    size_t size; /* of this allocation */
    int64_t num_blocks;
    kvc_block *blocks[];
};

/* Pins the block of every run. */
static kvc_status hold_rows(kvc_cache *cache, const kvc_rows *rows, int32_t group, kvc_hold **out) {
    const size_t size = sizeof(kvc_hold) + (size_t)rows->num * sizeof(kvc_block *);
    kvc_hold *hold = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!hold) return kvc_fail(KVC_ERR_NOMEM, "out of memory to hold %d runs", rows->num);
    *hold = (kvc_hold){.cache = cache, .pool = &cache->pools[group], .size = size, .num_blocks = rows->num};
    for (int32_t i = 0; i < rows->num; i++) {
        hold->blocks[i] = kvc_rows_begin(rows)[i].block;
        kvc_pool_pin(hold->blocks[i]);
    }
    cache->num_holds++;
    *out = hold;
    return KVC_OK;
}

static void let_go(kvc_hold *hold) {
    for (int64_t i = 0; i < hold->num_blocks; i++) kvc_pool_unpin(hold->pool, hold->blocks[i]);
    hold->cache->num_holds--;
    kvc_memory_free(&hold->cache->memory, hold, hold->size, KVC_MEMORY_SCRATCH, -1);
}

void kvc_hold_free(kvc_hold *hold) {
    if (!hold) return;
    kvc_cache *cache = hold->cache;
    kvc_lock(cache);
    let_go(hold);
    kvc_unlock(cache, KVC_OK);
}

static kvc_span span_of(const kvc_run *run, const kvc_layout *at) {
    return (kvc_span){.k = run->block->rows + at->k_offset + (size_t)run->slot * at->k_row_bytes,
                      .v = run->block->rows + at->v_offset + (size_t)run->slot * at->v_row_bytes,
                      .k_head_stride = (int64_t)at->k_head_stride,
                      .k_row_stride = (int64_t)at->k_row_bytes,
                      .v_head_stride = (int64_t)at->v_head_stride,
                      .v_row_stride = (int64_t)at->v_row_bytes,
                      .num_rows = run->count,
                      .position = run->position,
                      .delta = run->delta};
}

kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                     int64_t max_spans, int64_t *num_spans, kvc_hold **hold) {
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK && span_size < sizeof(kvc_span))
        status = kvc_fail(KVC_ERR_INVALID, "span_size is %zu: it must be sizeof(kvc_span), %zu", span_size,
                          sizeof(kvc_span));
    if (status == KVC_OK && !num_spans) status = kvc_fail(KVC_ERR_INVALID, "num_spans is NULL");
    if (status != KVC_OK) return status;
    if (hold) *hold = NULL;
    kvc_lock(cache);
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    *num_spans = rows ? rows->num : 0;
    for (int64_t i = 0; i < *num_spans && i < max_spans; i++) {
        const kvc_span span = span_of(kvc_rows_begin(rows) + i, &cache->layouts[cache->layout_of[layer]]);
        memcpy((char *)spans + (size_t)i * span_size, &span, sizeof span);
    }
    if (hold && *num_spans && *num_spans <= max_spans) status = hold_rows(cache, rows, cache->group_of[layer], hold);
    return kvc_unlock(cache, status);
}

/* Converts num_rows rows of every head of a run to rows `at` of the caller's array. */
static void gather_part(const kvc_cache *cache, int32_t layer, const kvc_run *part, const kvc_rows_out *out,
                        int64_t at) {
    const kvc_layer *config = &cache->layers[layer];
    const kvc_layout *layout = &cache->layouts[cache->layout_of[layer]];
    const kvc_span span = span_of(part, layout);
    for (int64_t h = 0; h < config->num_kv_heads; h++) {
        if (out->k)
            cache->kernels->convert[config->k_type][out->type](
                (char *)out->k + h * out->k_head_stride + at * out->k_row_stride, out->k_row_stride,
                (const char *)span.k + h * span.k_head_stride, span.k_row_stride, part->count, config->k_dim);
        if (out->v)
            cache->kernels->convert[config->v_type][out->type](
                (char *)out->v + h * out->v_head_stride + at * out->v_row_stride, out->v_row_stride,
                (const char *)span.v + h * span.v_head_stride, span.v_row_stride, part->count, config->v_dim);
    }
}

/* A copy of the runs, with their blocks pinned: so that rows can be read without the mutex. */
static kvc_status snapshot(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t end_row, kvc_rows *copy,
                           kvc_hold **hold) {
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    kvc_rows_init(copy);
    if (end_row > (rows ? rows->count : 0))
        return kvc_fail(KVC_ERR_INDEX, "rows up to %lld are asked for: sequence %lld holds %lld in layer %d",
                        (long long)end_row, (long long)seq_id, (long long)(rows ? rows->count : 0), layer);
    if (!rows || !rows->num) return KVC_OK;
    kvc_status status = kvc_rows_reserve(copy, &cache->memory, rows->num);
    if (status != KVC_OK) return status;
    memcpy(copy->runs, kvc_rows_begin(rows), (size_t)rows->num * sizeof *copy->runs);
    copy->num = rows->num;
    status = hold_rows(cache, rows, cache->group_of[layer], hold);
    if (status != KVC_OK) kvc_rows_free_list(copy, &cache->memory);
    return status;
}

kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                      const kvc_rows_out *given) {
    kvc_rows_out out;
    kvc_rows rows;
    kvc_hold *hold = NULL;
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_read_struct(&out, sizeof out, given, given ? given->struct_size : 0, "out");
    if (status == KVC_OK) status = kvc_check_array(out.type, out.k_row_stride, out.k_head_stride, "out");
    if (status == KVC_OK) status = kvc_check_array(out.type, out.v_row_stride, out.v_head_stride, "out");
    if (status == KVC_OK && (first_row < 0 || num_rows < 0 || first_row > INT64_MAX - num_rows))
        status = kvc_fail(KVC_ERR_INVALID, "first_row is %lld and num_rows %lld: neither must be negative",
                          (long long)first_row, (long long)num_rows);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    status = kvc_unlock(cache, snapshot(cache, seq_id, layer, first_row + num_rows, &rows, &hold));
    if (status != KVC_OK || !hold) return status;
    int64_t row = 0; /* in order of arrival, at the beginning of the run */
    for (const kvc_run *run = kvc_rows_begin(&rows); run < kvc_rows_end(&rows); row += run++->count) {
        const int64_t from = row > first_row ? row : first_row, last = first_row + num_rows;
        const int64_t to = row + run->count < last ? row + run->count : last;
        if (from >= to) continue;
        kvc_run part = *run;
        part.slot += (int32_t)(from - row);
        part.count = (int32_t)(to - from);
        gather_part(cache, layer, &part, &out, from - first_row);
    }
    kvc_lock(cache);
    kvc_rows_free_list(&rows, &cache->memory);
    let_go(hold);
    return kvc_unlock(cache, KVC_OK);
}
