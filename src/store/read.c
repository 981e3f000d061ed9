/* read.c: the public functions that list the positions of rows, and copy rows. */
#include "store/read.h"

#include <string.h>

#include "base/dtype.h"
#include "base/parallel.h"
#include "store/row_buffer.h"
#include "store/span.h"
#include "store/check.h"
#include "store/waiting.h"

enum { WORTH_THREADS = 1 << 16 }; /* elements; copying fewer takes less time than waking a thread */

/* ---- positions --------------------------------------------------------------------------------------------------- */

/* Lists the positions of rows [first, first + num), in order of arrival, or of as far as there are rows. */
static void list_positions(const kvc_run *runs, int32_t num_runs, int64_t first, int64_t num, int32_t *positions) {
    int64_t row = 0;
    for (const kvc_run *run = runs; run < runs + num_runs && row - first < num; run++)
        for (int32_t i = 0; i < run->count && row - first < num; i++, row++)
            if (row >= first) positions[row - first] = run->position + i;
}

int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    kvc_lock(cache);
    const kvc_run_list *list = kvc_runs_of(cache, seq_id, layer);
    const int64_t n = list ? list->num_rows : 0;
    if (n) list_positions(kvc_runs_begin(list), list->num, 0, max_positions, positions);
    kvc_unlock(cache, KVC_OK);
    return n;
}

int64_t kvc_find_row(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t position) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    kvc_lock(cache);
    const kvc_run_list *list = kvc_runs_of(cache, seq_id, layer);
    const int64_t row = list ? kvc_runs_find(list, position) : -1;
    kvc_unlock(cache, KVC_OK);
    return row;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Decodes the keys of one head of a span, rotated for their present positions. */
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
        kvc_rotator_rotate(&reader->rotator, rope, span->delta, to + i * out->k_row_stride, out->type,
                           from + i * span->k_row_stride, config->k_type, config->k_dim);
}

/* Copies the rows of one head of a run to rows `at` and following of the caller's arrays. */
static void copy_head(kvc_reader *reader, const kvc_run *part, const kvc_rows_out *out, int64_t at, int64_t head) {
    const kvc_cache *cache = reader->cache;
    const kvc_layer *config = &cache->layers[reader->layer];
    const kvc_span span = kvc_span_of(part, kvc_layout_in(cache, reader->layer, part->block));
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

void kvc_clear_rows(char *head, int64_t row_stride, int64_t begin, int64_t end, size_t row_bytes) {
    for (int64_t i = begin; i < end; i++) memset(head + i * row_stride, 0, row_bytes);
}

/* ---- snapshots --------------------------------------------------------------------------------------------------- */

/* A copy of a sequence's runs, whose blocks are pinned, to read rows without the mutex. */
typedef struct snapshot {
    kvc_cache *cache;
    int32_t layer, num_runs; /* num_runs 0: there is nothing to read, nor to free */
    kvc_run *runs;
    float *scratch; /* [num_tasks][kvc_rotator_floats]; NULL: keys are not rotated */
    uint64_t size;  /* bytes of runs and scratch, one allocation */
} snapshot;

static kvc_status take_snapshot(kvc_cache *cache, const kvc_run_list *list, int32_t layer, int32_t num_tasks,
                                snapshot *s) {
    const uint64_t floats = kvc_rope_of(cache, layer) ? kvc_rotator_floats(cache->layers[layer].k_dim) : 0;
    *s = (snapshot){.cache = cache, .layer = layer};
    kvc_add_array(&s->size, (uint64_t)list->num * sizeof *s->runs);
    const uint64_t scratch = kvc_add_array(&s->size, (uint64_t)num_tasks * floats * sizeof *s->scratch);
    s->runs = kvc_memory_alloc(&cache->memory, s->size, KVC_MEMORY_SCRATCH, -1);
    if (!s->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to read %d runs of layer %d", list->num, layer);
    if (floats) s->scratch = (void *)((char *)s->runs + scratch);
    s->num_runs = list->num;
    for (int32_t i = 0; i < s->num_runs; i++) {
        s->runs[i] = kvc_runs_begin(list)[i];
        kvc_pool_pin(s->runs[i].block);
    }
    return KVC_OK;
}

/* Takes a snapshot of a sequence in a layer, for num_tasks tasks that copy its rows, and begins reading.  KVC_ERR_INDEX
 * if the sequence holds fewer than `least` rows.  Sets *num_stored, unless num_stored is NULL, to the number of rows.
 */
static kvc_status open_snapshot(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t least, int32_t num_tasks,
                                int64_t *num_stored, snapshot *s) {
    *s = (snapshot){0};
    kvc_status status = KVC_OK;
    kvc_lock(cache);
    kvc_cache_begin_reading(cache);
    kvc_cache_find(cache, seq_id); /* waits while its rows are written */
    const kvc_run_list *list = kvc_runs_of(cache, seq_id, layer);
    const int64_t stored = list ? list->num_rows : 0;
    if (num_stored) *num_stored = stored;
    if (least > stored)
        status = kvc_fail(KVC_ERR_INDEX, "rows up to %lld are asked for: sequence %lld holds %lld in layer %d",
                          (long long)least, (long long)seq_id, (long long)stored, layer);
    else if (stored)
        status = take_snapshot(cache, list, layer, num_tasks, s);
    if (!s->num_runs) kvc_cache_end_reading(cache);
    return kvc_unlock(cache, status);
}

static void close_snapshot(snapshot *s) {
    if (!s->num_runs) return;
    kvc_cache *cache = s->cache;
    kvc_lock(cache);
    for (int32_t i = 0; i < s->num_runs; i++)
        kvc_pool_unpin(&cache->pools[cache->group_of[s->layer]], s->runs[i].block);
    kvc_memory_free(&cache->memory, s->runs, s->size, KVC_MEMORY_SCRATCH, -1);
    kvc_cache_end_reading(cache);
    kvc_unlock(cache, KVC_OK);
}

/* ---- copying in tasks -------------------------------------------------------------------------------------------- */

kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name) {
    kvc_status status = KVC_READ(kvc_rows_out, out, given, name);
    if (status == KVC_OK) status = kvc_check_array(out->type, out->k_row_stride, out->k_head_stride, name);
    return status == KVC_OK ? kvc_check_array(out->type, out->v_row_stride, out->v_head_stride, name) : status;
}

/* One call of kvc_gather or kvc_extract. */
typedef struct copying {
    kvc_cache *cache;
    int32_t layer, num_tasks;
    snapshot from;
    kvc_rows_out out;
    int64_t first, num_rows; /* rows [first, first + num_rows) in order of arrival; or positions, if by_position */
    int by_position;         /* gives zeros at a position without a row, the latest row of several */
} copying;

/* Copies rows [first + begin, first + end) of one head. */
static void copy_range(const copying *c, kvc_reader *reader, int64_t head, int64_t begin, int64_t end) {
    const kvc_layer *config = &c->cache->layers[reader->layer];
    const kvc_rows_out *out = &c->out;
    if (c->by_position && out->k)
        kvc_clear_rows((char *)out->k + head * out->k_head_stride, out->k_row_stride, begin, end,
                       kvc_row_bytes(out->type, config->k_dim));
    if (c->by_position && out->v)
        kvc_clear_rows((char *)out->v + head * out->v_head_stride, out->v_row_stride, begin, end,
                       kvc_row_bytes(out->type, config->v_dim));
    int64_t row = 0; /* index of the run's first row, in order of arrival */
    for (int32_t i = 0; i < c->from.num_runs; row += c->from.runs[i++].count) {
        const kvc_run *run = &c->from.runs[i];
        const int64_t from = c->first - (c->by_position ? run->position : row); /* row `first`, relative to the run */
        const int64_t low = from + begin > 0 ? from + begin : 0,
                      high = from + end < run->count ? from + end : run->count;
        if (low >= high) continue;
        const kvc_run part = {run->block, run->slot + (int32_t)low, (int32_t)(high - low), run->position + (int32_t)low,
                              run->delta};
        copy_head(reader, &part, out, low - from, head);
    }
}

/* Copies a task's share of the rows, which are counted head after head. */
static void copy_task(void *context, int64_t task) {
    const copying *c = context;
    const kvc_layer *config = &c->cache->layers[c->layer];
    kvc_reader reader = {.cache = c->cache, .layer = c->layer, .rotator.kernels = c->cache->kernels};
    if (c->from.scratch) reader.rotator.scratch = c->from.scratch + (size_t)task * kvc_rotator_floats(config->k_dim);
    const int64_t all = c->num_rows * config->num_kv_heads, share = (all - 1) / c->num_tasks + 1;
    const int64_t end = (task + 1) * share < all ? (task + 1) * share : all;
    for (int64_t i = task * share, n; i < end; i += n) {
        const int64_t head = i / c->num_rows, row = i % c->num_rows;
        n = end - i < c->num_rows - row ? end - i : c->num_rows - row;
        copy_range(c, &reader, head, row, row + n);
    }
}

/* Returns the number of tasks, one for each thread, that a copy of num_rows rows is worth. */
static int32_t count_tasks(const kvc_cache *cache, int32_t layer, int64_t num_rows) {
    const kvc_layer *config = &cache->layers[layer];
    const double rows = (double)num_rows * config->num_kv_heads;
    if (rows * (config->k_dim + config->v_dim) < WORTH_THREADS) return 1;
    const int32_t threads = kvc_cache_threads(cache);
    return rows < threads ? (int32_t)rows : threads;
}

/* Sets positions[i] to begin + i if there is a row at that position, else to -1. */
static void find_positions(const snapshot *s, int32_t begin, int32_t end, int32_t *positions) {
    for (int32_t i = 0; i < end - begin; i++) positions[i] = -1;
    for (int32_t r = 0; r < s->num_runs; r++) {
        const kvc_run part = kvc_run_part(&s->runs[r], begin, end);
        for (int32_t i = part.position; i < part.position + part.count; i++) positions[i - begin] = i;
    }
}

/* Copies all rows, and ends reading. */
static void copy_all(copying *c) {
    if (c->num_rows) kvc_parallel(c->num_tasks, c->num_tasks, copy_task, c);
    close_snapshot(&c->from);
}

kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                      const kvc_rows_out *given) {
    copying c = {.cache = cache, .layer = layer, .first = first_row, .num_rows = num_rows};
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_rows_out(given, &c.out, "out");
    if (status == KVC_OK && (first_row < 0 || num_rows < 0 || first_row > INT64_MAX - num_rows))
        status = kvc_fail(KVC_ERR_INVALID, "first_row is %lld and num_rows %lld: neither must be negative",
                          (long long)first_row, (long long)num_rows);
    if (status != KVC_OK) return status;
    c.num_tasks = count_tasks(cache, layer, num_rows);
    status = open_snapshot(cache, seq_id, layer, first_row + num_rows, c.num_tasks, c.out.num_stored, &c.from);
    if (status != KVC_OK) return status;
    if (c.out.positions) list_positions(c.from.runs, c.from.num_runs, first_row, num_rows, c.out.positions);
    copy_all(&c);
    return KVC_OK;
}

kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                       const kvc_rows_out *given) {
    copying c = {.cache = cache, .layer = layer, .first = begin, .num_rows = (int64_t)end - begin, .by_position = 1};
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_positions(begin, end);
    if (status == KVC_OK) status = kvc_check_rows_out(given, &c.out, "out");
    if (status != KVC_OK) return status;
    c.num_tasks = count_tasks(cache, layer, c.num_rows);
    status = open_snapshot(cache, seq_id, layer, 0, c.num_tasks, c.out.num_stored, &c.from);
    if (status != KVC_OK) return status;
    if (c.out.positions) find_positions(&c.from, begin, end, c.out.positions);
    copy_all(&c);
    return KVC_OK;
}
