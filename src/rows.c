/* rows.c: the public functions that read rows: where they are, and copies of them. */
#include <string.h>

#include "dtype.h"
#include "rows.h"
#include "threads.h"

enum { WORTH_THREADS = 1 << 16 }; /* elements; to copy less takes less time than to wake a thread */

/* The rows of a sequence in a layer; NULL if it holds none. */
static const kvc_rows *find_rows(const kvc_cache *cache, int64_t seq_id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    return sequence ? &sequence->rows[cache->group_of[layer]] : NULL;
}

/* Of rows [first, first + num), in order of arrival, as far as there are so many. */
static void list_positions(const kvc_rows *rows, int64_t first, int64_t num, int32_t *positions) {
    int64_t row = 0;
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows) && row - first < num; run++)
        for (int32_t i = 0; i < run->count && row - first < num; i++, row++)
            if (row >= first) positions[row - first] = run->position + i;
}

int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    kvc_lock(cache);
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    const int64_t n = rows ? rows->count : 0;
    if (rows) list_positions(rows, 0, max_positions, positions);
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

kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out) {
    const size_t size = sizeof(kvc_hold) + (size_t)num_runs * sizeof(kvc_block *);
    kvc_hold *hold = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!hold) return kvc_fail(KVC_ERR_NOMEM, "out of memory to hold %d runs", num_runs);
    *hold = (kvc_hold){.cache = cache, .pool = &cache->pools[group], .size = size, .num_blocks = num_runs};
    for (int32_t i = 0; i < num_runs; i++) {
        hold->blocks[i] = runs[i].block;
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

kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at) {
    return (kvc_span){.k = kvc_key_at(at, run->block, run->slot, 0),
                      .v = kvc_value_at(at, run->block, run->slot, 0),
                      .k_head_stride = (int64_t)at->head_stride,
                      .k_row_stride = (int64_t)at->k_row_bytes,
                      .v_head_stride = (int64_t)at->head_stride,
                      .v_row_stride = (int64_t)at->v_row_bytes,
                      .num_rows = run->count,
                      .position = run->position,
                      .delta = run->delta};
}

kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                     int64_t max_spans, int64_t *num_spans, kvc_hold **hold) {
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_size(span_size, kvc_span_least_size, sizeof *spans, "spans");
    if (status == KVC_OK && !num_spans) status = kvc_fail(KVC_ERR_INVALID, "num_spans is NULL");
    if (status != KVC_OK) return status;
    if (hold) *hold = NULL;
    kvc_lock(cache);
    kvc_cache_find(cache, seq_id); /* which waits while they are written */
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    *num_spans = rows ? rows->num : 0;
    for (int64_t i = 0; i < *num_spans && i < max_spans; i++) {
        const kvc_span span = kvc_span_of(kvc_rows_begin(rows) + i, &cache->layouts[cache->layout_of[layer]]);
        kvc_write_struct((char *)spans + (size_t)i * span_size, span_size, &span, sizeof span);
    }
    if (hold && *num_spans && *num_spans <= max_spans)
        status = kvc_hold_runs(cache, kvc_rows_begin(rows), rows->num, cache->group_of[layer], hold);
    return kvc_unlock(cache, status);
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Keys of one head of a run, turned to where they stand. */
static void decode_keys(kvc_reader *reader, const kvc_span *span, int64_t head, const kvc_rows_out *out, char *to) {
    const kvc_cache *cache = reader->cache;
    const kvc_layer *config = &cache->layers[reader->layer];
    const kvc_rope *rope = span->delta ? kvc_rope_of(cache, reader->layer) : NULL;
    const char *from = (const char *)span->k + head * span->k_head_stride;
    if (!rope) {
        cache->kernels->convert[config->k_type][out->type](to, out->k_row_stride, from, span->k_row_stride,
                                                           span->num_rows, config->k_dim);
        return;
    }
    for (int32_t i = 0; i < span->num_rows; i++)
        kvc_turner_turn(&reader->turner, rope, span->delta, to + i * out->k_row_stride, out->type,
                        from + i * span->k_row_stride, config->k_type, config->k_dim);
}

/* Rows of one head. */
static void copy_head(kvc_reader *reader, const kvc_run *part, const kvc_rows_out *out, int64_t at, int64_t head) {
    const kvc_cache *cache = reader->cache;
    const kvc_layer *config = &cache->layers[reader->layer];
    const kvc_span span = kvc_span_of(part, &cache->layouts[cache->layout_of[reader->layer]]);
    if (out->k)
        decode_keys(reader, &span, head, out, (char *)out->k + head * out->k_head_stride + at * out->k_row_stride);
    if (out->v)
        cache->kernels->convert[config->v_type][out->type](
            (char *)out->v + head * out->v_head_stride + at * out->v_row_stride, out->v_row_stride,
            (const char *)span.v + head * span.v_head_stride, span.v_row_stride, part->count, config->v_dim);
}

void kvc_reader_copy(kvc_reader *reader, const kvc_run *part, const kvc_rows_out *out, int64_t at) {
    for (int64_t h = 0; h < reader->cache->layers[reader->layer].num_kv_heads; h++) copy_head(reader, part, out, at, h);
}

static size_t scratch_size(const kvc_cache *cache, int32_t layer) {
    return kvc_turner_floats(cache->layers[layer].k_dim) * sizeof(float);
}

kvc_status kvc_reader_new(kvc_cache *cache, int32_t layer, kvc_reader *reader) {
    *reader = (kvc_reader){.cache = cache, .layer = layer, .turner.kernels = cache->kernels};
    if (!kvc_rope_of(cache, layer)) return KVC_OK;
    reader->turner.scratch = kvc_memory_alloc(&cache->memory, scratch_size(cache, layer), KVC_MEMORY_SCRATCH, -1);
    return reader->turner.scratch ? KVC_OK : kvc_fail(KVC_ERR_NOMEM, "out of memory for a row of layer %d", layer);
}

void kvc_reader_free(kvc_reader *reader) {
    kvc_memory_free(&reader->cache->memory, reader->turner.scratch, scratch_size(reader->cache, reader->layer),
                    KVC_MEMORY_SCRATCH, -1);
}

kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name) {
    kvc_status status = KVC_READ(kvc_rows_out, out, given, name);
    if (status == KVC_OK) status = kvc_check_array(out->type, out->k_row_stride, out->k_head_stride, name);
    return status == KVC_OK ? kvc_check_array(out->type, out->v_row_stride, out->v_head_stride, name) : status;
}

/* What is to be read without the mutex: a copy of the runs, with their blocks pinned. */
typedef struct snapshot {
    kvc_rows rows;
    kvc_hold *hold; /* NULL: there are none, and nothing is to be freed */
    kvc_reader reader;
} snapshot;

static kvc_status take_snapshot(kvc_cache *cache, const kvc_rows *rows, int32_t layer, snapshot *s) {
    kvc_status status = kvc_rows_reserve(&s->rows, &cache->memory, rows->num);
    if (status != KVC_OK) return status;
    memcpy(s->rows.runs, kvc_rows_begin(rows), (size_t)rows->num * sizeof *s->rows.runs);
    s->rows.num = rows->num;
    status = kvc_reader_new(cache, layer, &s->reader);
    if (status == KVC_OK) {
        status = kvc_hold_runs(cache, s->rows.runs, s->rows.num, cache->group_of[layer], &s->hold);
        if (status != KVC_OK) kvc_reader_free(&s->reader);
    }
    if (status != KVC_OK) kvc_rows_free_list(&s->rows, &cache->memory);
    return status;
}

/* Of a sequence that holds at least `least` rows in the layer. */
static kvc_status open_snapshot(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t least, int64_t *num_stored,
                                snapshot *s) {
    *s = (snapshot){0};
    kvc_rows_init(&s->rows);
    kvc_status status = KVC_OK;
    kvc_lock(cache);
    kvc_cache_find(cache, seq_id); /* which waits while they are written */
    const kvc_rows *rows = find_rows(cache, seq_id, layer);
    if (num_stored) *num_stored = rows ? rows->count : 0;
    if (least > (rows ? rows->count : 0))
        status = kvc_fail(KVC_ERR_INDEX, "rows up to %lld are asked for: sequence %lld holds %lld in layer %d",
                          (long long)least, (long long)seq_id, (long long)(rows ? rows->count : 0), layer);
    else if (rows && rows->num)
        status = take_snapshot(cache, rows, layer, s);
    return kvc_unlock(cache, status);
}

static void close_snapshot(snapshot *s) {
    if (!s->hold) return;
    kvc_cache *cache = s->reader.cache;
    kvc_lock(cache);
    kvc_rows_free_list(&s->rows, &cache->memory);
    kvc_reader_free(&s->reader);
    let_go(s->hold);
    kvc_unlock(cache, KVC_OK);
}

typedef struct gathering {
    snapshot *from;
    const kvc_rows_out *out;
    int64_t first, end; /* rows */
} gathering;

static void gather_head(void *context, int64_t head) {
    const gathering *g = context;
    const kvc_rows *rows = &g->from->rows;
    int64_t row = 0; /* in order of arrival, at the beginning of the run */
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); row += run++->count) {
        const int64_t from = row > g->first ? row : g->first,
                      to = row + run->count < g->end ? row + run->count : g->end;
        if (from >= to) continue;
        kvc_run part = *run;
        part.slot += (int32_t)(from - row);
        part.count = (int32_t)(to - from);
        copy_head(&g->from->reader, &part, g->out, from - g->first, head);
    }
}

kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                      const kvc_rows_out *given) {
    kvc_rows_out out;
    snapshot s;
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_rows_out(given, &out, "out");
    if (status == KVC_OK && (first_row < 0 || num_rows < 0 || first_row > INT64_MAX - num_rows))
        status = kvc_fail(KVC_ERR_INVALID, "first_row is %lld and num_rows %lld: neither must be negative",
                          (long long)first_row, (long long)num_rows);
    if (status == KVC_OK) status = open_snapshot(cache, seq_id, layer, first_row + num_rows, out.num_stored, &s);
    if (status != KVC_OK) return status;
    const kvc_layer *config = &cache->layers[layer];
    const int64_t elements = num_rows * config->num_kv_heads * (config->k_dim + config->v_dim);
    const int is_serial = elements < WORTH_THREADS || s.reader.turner.scratch; /* which threads would share */
    gathering g = {&s, &out, first_row, first_row + num_rows};
    if (out.positions) list_positions(&s.rows, first_row, num_rows, out.positions);
    kvc_parallel(is_serial ? 1 : kvc_cache_threads(cache), config->num_kv_heads, gather_head, &g);
    close_snapshot(&s);
    return KVC_OK;
}

/* The latest of those that stand at one position is the one that counts. */
static void find_positions(const kvc_rows *rows, int32_t begin, int32_t end, int32_t *positions) {
    for (int32_t i = 0; i < end - begin; i++) positions[i] = -1;
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++) {
        const kvc_run part = kvc_run_part(run, begin, end);
        for (int32_t i = part.position; i < part.position + part.count; i++) positions[i - begin] = i;
    }
}

/* Zeros in every row of an array [heads][num_rows][dim]. */
static void clear_rows(void *to, int64_t head_stride, int64_t row_stride, int32_t heads, int64_t num_rows,
                       size_t row_bytes) {
    for (int64_t h = 0; to && h < heads; h++)
        for (int64_t i = 0; i < num_rows; i++) memset((char *)to + h * head_stride + i * row_stride, 0, row_bytes);
}

kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                       const kvc_rows_out *given) {
    kvc_rows_out out;
    snapshot s;
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_positions(begin, end);
    if (status == KVC_OK) status = kvc_check_rows_out(given, &out, "out");
    if (status == KVC_OK) status = open_snapshot(cache, seq_id, layer, 0, out.num_stored, &s);
    if (status != KVC_OK) return status;
    const kvc_layer *config = &cache->layers[layer];
    if (out.positions) find_positions(&s.rows, begin, end, out.positions);
    clear_rows(out.k, out.k_head_stride, out.k_row_stride, config->num_kv_heads, end - begin,
               kvc_row_bytes(out.type, config->k_dim));
    clear_rows(out.v, out.v_head_stride, out.v_row_stride, config->num_kv_heads, end - begin,
               kvc_row_bytes(out.type, config->v_dim));
    for (const kvc_run *run = kvc_rows_begin(&s.rows); run < kvc_rows_end(&s.rows); run++) {
        const kvc_run part = kvc_run_part(run, begin, end);
        if (part.count) kvc_reader_copy(&s.reader, &part, &out, part.position - begin);
    }
    close_snapshot(&s);
    return KVC_OK;
}
