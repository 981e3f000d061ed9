/* read.c: the public functions that list the positions of rows, and copy rows.  Rows are numbered in order of arrival,
 * or by position: row i is then the one at position i (in a group with a stride, the i-th row).  They are copied from a
 * snapshot: a copy of the runs, whose blocks are pinned, so that no mutex is held. */
#include "read/read.h"

#include <string.h>

#include "base/dtype.h"
#include "base/parallel.h"
#include "read/batch_rows.h"
#include "read/snapshot.h"
#include "rows/copy.h"
#include "cache/check.h"
#include "cache/waiting.h"

enum { WORTH_THREADS = 1 << 16 }; /* elements */

/* ---- positions --------------------------------------------------------------------------------------------------- */

/* Lists the positions of rows [first, first + num), in order of arrival, or of as far as there are rows. */
static void list_positions(const kvc_run *runs, int32_t num_runs, int32_t stride, int64_t first, int64_t num,
                           int32_t *positions) {
    int64_t row = 0;
    for (int32_t r = 0; r < num_runs && row - first < num; r++)
        for (int32_t i = 0; i < runs[r].count && row - first < num; i++, row++)
            if (row >= first) positions[row - first] = kvc_position_of(runs[r].position + i, stride);
}

static int32_t stride_of(const kvc_cache *cache, int32_t layer) { return cache->pools[cache->group_of[layer]].stride; }

int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions) {
    if (kvc_check_layer(cache, layer) != KVC_OK) return -1;
    kvc_lock(cache);
    const kvc_run_list *list = kvc_runs_of(cache, seq_id, layer);
    const int64_t n = list ? list->num_rows : 0;
    if (n && positions)
        list_positions(kvc_runs_begin(list), list->num, stride_of(cache, layer), 0, max_positions, positions);
    kvc_unlock(cache, KVC_OK);
    return n;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

kvc_reader kvc_reader_for(const kvc_cache *cache, int32_t layer, const kvc_rows_out *out, float *scratch) {
    const kvc_layer *config = &cache->layers[layer];
    return (kvc_reader){.cache = cache,
                        .layer = layer,
                        .k_type = out->raw ? config->k_type : out->type,
                        .v_type = out->raw ? config->v_type : out->type,
                        .rotator = {.kernels = cache->kernels, .scratch = scratch}};
}

void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t row) {
    const kvc_cache *cache = reader->cache;
    const kvc_layer *config = &cache->layers[reader->layer];
    const kvc_layout *layout = &cache->layouts[cache->layout_of[reader->layer]];
    const kvc_rope *rope = run->delta ? kvc_rope_of(cache, reader->layer) : NULL;
    if (out->k) {
        const kvc_rows to = kvc_given_rows(reader->k_type, (char *)out->k + row * out->k_row_stride, out->k_row_stride,
                                           out->k_head_stride, config->k_dim),
                       from = kvc_stored_rows(config, layout, run->block->rows, run->slot, KVC_KEYS);
        if (rope)
            kvc_rotator_rotate(&reader->rotator, rope, run->delta, &to, &from, run->count, config);
        else
            kvc_copy_rows(cache->kernels, config, KVC_KEYS, &to, &from, run->count);
    }
    if (out->v) {
        const kvc_rows to = kvc_given_rows(reader->v_type, (char *)out->v + row * out->v_row_stride, out->v_row_stride,
                                           out->v_head_stride, config->v_dim),
                       from = kvc_stored_rows(config, layout, run->block->rows, run->slot, KVC_VALUES);
        kvc_copy_rows(cache->kernels, config, KVC_VALUES, &to, &from, run->count);
    }
}

void kvc_reader_clear(const kvc_reader *reader, const kvc_rows_out *out, int64_t begin, int64_t end) {
    const kvc_layer *config = &reader->cache->layers[reader->layer];
    const size_t k_bytes = kvc_row_bytes(reader->k_type, config->k_dim),
                 v_bytes = kvc_row_bytes(reader->v_type, config->v_dim);
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < config->num_kv_heads; h++) {
            if (out->k) memset((char *)out->k + h * out->k_head_stride + i * out->k_row_stride, 0, k_bytes);
            if (out->v) memset((char *)out->v + h * out->v_head_stride + i * out->v_row_stride, 0, v_bytes);
        }
}

/* ---- snapshots --------------------------------------------------------------------------------------------------- */

/* A call of kvc_gather or kvc_extract. */
typedef struct copying {
    kvc_cache *cache;
    int32_t layer, num_tasks;
    kvc_snapshot from;
    kvc_rows_out out;
    int64_t first, num_rows; /* rows [first, first + num_rows) in order of arrival; or at positions, if by_position */
    int by_position;         /* gives zeros at a position without a row, the latest row of several */
} copying;

/* Takes a snapshot of runs, and sets *out.num_stored to their number of rows, num_rows, unless it is NULL.  Returns
 * KVC_ERR_INDEX if num_rows is below `least`. */
static kvc_status snap(copying *c, int64_t seq_id, const kvc_run *runs, int32_t num_runs, int64_t num_rows,
                       int64_t least) {
    if (c->out.num_stored) *c->out.num_stored = num_rows;
    if (least > num_rows)
        return kvc_fail(KVC_ERR_INDEX, "rows up to %lld are asked for: sequence %lld holds %lld in layer %d",
                        (long long)least, (long long)seq_id, (long long)num_rows, c->layer);
    const uint64_t floats = kvc_rope_of(c->cache, c->layer) ? kvc_rotator_floats(c->cache->layers[c->layer].k_dim) : 0;
    const uint64_t scratch = (uint64_t)c->num_tasks * floats * sizeof(float);
    return num_rows ? kvc_snapshot_take(c->cache, c->layer, runs, num_runs, scratch, &c->from) : KVC_OK;
}

/* Take a snapshot of a sequence's stored rows, or also of the rows that the open batch (out.batch) has put. */
static kvc_status snap_stored(copying *c, int64_t seq_id, int64_t least) {
    kvc_cache_find(c->cache, seq_id); /* waits while its rows are written */
    const kvc_run_list *list = kvc_runs_of(c->cache, seq_id, c->layer);
    return list ? snap(c, seq_id, kvc_runs_begin(list), list->num, list->num_rows, least)
                : snap(c, seq_id, NULL, 0, 0, least);
}

static kvc_status snap_batch(copying *c, int64_t seq_id, int64_t least) {
    kvc_batch_runs list;
    kvc_status status = kvc_batch_runs_new(c->out.batch, c->layer, seq_id, &list);
    if (status == KVC_OK) status = snap(c, seq_id, list.runs, list.num, list.num_rows, least);
    kvc_batch_runs_free(&c->cache->memory, &list);
    return status;
}

/* Takes a snapshot of a sequence, and begins reading. */
static kvc_status open_snapshot(copying *c, int64_t seq_id, int64_t least) {
    kvc_cache *cache = c->cache;
    if (c->out.batch) {
        kvc_status status = kvc_check_attention(c->out.batch, c->layer, KVC_MAY_LACK_VALUES);
        if (status == KVC_OK && c->out.batch->cache != cache)
            status = kvc_fail(KVC_ERR_INVALID, "out->batch is of another cache");
        if (status != KVC_OK) return status;
    }
    kvc_lock(cache);
    kvc_cache_begin_reading(cache);
    const kvc_status status = c->out.batch ? snap_batch(c, seq_id, least) : snap_stored(c, seq_id, least);
    if (!c->from.num_runs) kvc_cache_end_reading(cache); /* otherwise kvc_snapshot_close does */
    return kvc_unlock(cache, status);
}

/* ---- copying in tasks -------------------------------------------------------------------------------------------- */

kvc_status kvc_resolve_rows_out(const kvc_layer *layer, kvc_rows_out *out, const char *name, int64_t num_rows,
                                const kvc_axis batches[2]) {
    if (!layer->v_dim && out->v)
        return kvc_fail(KVC_ERR_INVALID, "%s.v is given: this layer holds keys alone (v_dim 0); it must be NULL", name);
    kvc_array k = {.name = name,
                   .data = out->k,
                   .is_output = 1,
                   .type = out->raw ? layer->k_type : out->type,
                   .stored = out->raw ? layer->k_type : 0,
                   .length = layer->k_dim,
                   .axes = {KVC_AXIS(out, k_head_stride, layer->num_kv_heads), KVC_AXIS(out, k_row_stride, num_rows)}},
              v = {.name = name,
                   .data = out->v,
                   .is_output = 1,
                   .type = out->raw ? layer->v_type : out->type,
                   .stored = out->raw ? layer->v_type : 0,
                   .length = layer->v_dim,
                   .axes = {KVC_AXIS(out, v_head_stride, layer->num_kv_heads), KVC_AXIS(out, v_row_stride, num_rows)}};
    if (batches) k.axes[2] = batches[0], v.axes[2] = batches[1];
    KVC_TRY(kvc_resolve_array(&k));
    return kvc_resolve_array(&v);
}

/* Copies a task's share of the rows. */
static void copy_task(void *context, int64_t task) {
    const copying *c = context;
    const int64_t begin = task * c->num_rows / c->num_tasks, end = (task + 1) * c->num_rows / c->num_tasks;
    const size_t floats = kvc_rotator_floats(c->cache->layers[c->layer].k_dim);
    float *const scratch = c->from.scratch; /* [num_tasks][floats]; NULL: keys are not rotated */
    kvc_reader reader = kvc_reader_for(c->cache, c->layer, &c->out, scratch ? scratch + (size_t)task * floats : NULL);
    if (c->by_position) kvc_reader_clear(&reader, &c->out, begin, end);
    int64_t row = 0; /* index of the run's first row, in order of arrival */
    for (int32_t i = 0; i < c->from.num_runs; row += c->from.runs[i++].count) {
        const kvc_run *run = &c->from.runs[i];
        const int64_t from = c->first - (c->by_position ? run->position : row); /* row `first`, relative to the run */
        const int64_t low = from + begin > 0 ? from + begin : 0,
                      high = from + end < run->count ? from + end : run->count;
        if (low >= high) continue;
        const kvc_run part = {run->block, run->slot + (int32_t)low, (int32_t)(high - low), run->position + (int32_t)low,
                              run->delta};
        kvc_reader_copy(&reader, &part, &c->out, low - from);
    }
}

/* Returns the number of tasks, one for each thread, that a copy of num_rows rows is worth. */
static int32_t count_tasks(const kvc_cache *cache, int32_t layer, int64_t num_rows) {
    const kvc_layer *config = &cache->layers[layer];
    const double elements = (double)num_rows * config->num_kv_heads * (config->k_dim + config->v_dim);
    const int32_t threads = kvc_threads_for(elements, WORTH_THREADS, kvc_cache_threads(cache));
    return num_rows < threads ? (int32_t)num_rows : threads;
}

/* Sets positions[i] to the position of row begin + i, numbered by position; to -1 if the snapshot has no such row. */
static void find_positions(const kvc_snapshot *s, int32_t begin, int32_t end, int32_t stride, int32_t *positions) {
    for (int32_t i = 0; i < end - begin; i++) positions[i] = -1;
    for (int32_t r = 0; r < s->num_runs; r++) {
        const kvc_run part = kvc_run_part(&s->runs[r], begin, end);
        for (int32_t i = part.position; i < part.position + part.count; i++)
            positions[i - begin] = kvc_position_of(i, stride);
    }
}

/* Copies all rows, and ends reading. */
static void copy_all(copying *c) {
    if (c->num_rows) kvc_parallel(c->num_tasks, c->num_tasks, copy_task, c);
    kvc_snapshot_close(&c->from);
}

kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                      const kvc_rows_out *given) {
    copying c = {.cache = cache, .layer = layer, .first = first_row, .num_rows = num_rows};
    KVC_TRY(kvc_check_layer(cache, layer));
    KVC_TRY(KVC_READ(kvc_rows_out, &c.out, given, "out"));
    KVC_TRY(kvc_resolve_rows_out(&cache->layers[layer], &c.out, "out", num_rows, /* batches */ NULL));
    if (first_row < 0 || num_rows < 0 || first_row > INT64_MAX - num_rows)
        return kvc_fail(KVC_ERR_INVALID, "first_row is %lld and num_rows %lld: neither must be negative",
                        (long long)first_row, (long long)num_rows);
    c.num_tasks = count_tasks(cache, layer, num_rows);
    KVC_TRY(open_snapshot(&c, seq_id, first_row + num_rows));
    if (c.out.positions)
        list_positions(c.from.runs, c.from.num_runs, stride_of(cache, layer), first_row, num_rows, c.out.positions);
    copy_all(&c);
    return KVC_OK;
}

kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                       const kvc_rows_out *given) {
    copying c = {.cache = cache, .layer = layer, .by_position = 1};
    KVC_TRY(kvc_check_layer(cache, layer));
    KVC_TRY(kvc_check_positions(begin, end));
    const int32_t stride = stride_of(cache, layer), first = kvc_rows_below(begin, stride),
                  past = kvc_rows_below(end, stride);
    c.first = first;
    c.num_rows = past - first;
    KVC_TRY(KVC_READ(kvc_rows_out, &c.out, given, "out"));
    KVC_TRY(kvc_resolve_rows_out(&cache->layers[layer], &c.out, "out", c.num_rows, /* batches */ NULL));
    c.num_tasks = count_tasks(cache, layer, c.num_rows);
    KVC_TRY(open_snapshot(&c, seq_id, 0)); /* rows may be missing */
    if (c.out.positions) find_positions(&c.from, first, past, stride, c.out.positions);
    copy_all(&c);
    return KVC_OK;
}
