/* dense.c: the public functions for callers with an attention of their own: rows and mask, as plain arrays. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "rows.h"
#include "sheet.h"

/* One row on its way: rows are sorted by position, runs are copied as they lie. */
typedef struct dense_row {
    int32_t position;
    int32_t token;   /* of the batch; -1: stored */
    int64_t arrived; /* in order of arrival: decides between equal positions */
    kvc_run run;     /* of this row alone */
} dense_row;

/* The rows of sequence s of the batch: all that are stored, then those of the batch that were put. */
typedef struct walker {
    const kvc_batch *batch;
    int32_t layer;
    const kvc_sheet *sheet; /* the layer's */
    dense_row *rows;        /* NULL: they are only counted */
    int64_t num;
    kvc_status status; /* KVC_ERR_GONE where rows are */
} walker;

static void add_run(walker *w, const kvc_run *run, const int32_t *tokens) {
    const uint8_t *written = kvc_written_in(w->batch, kvc_source_of(w->batch->cache, w->layer));
    for (int32_t i = 0; i < run->count; i++) {
        int has = !tokens || written[tokens[i]];
        if (!run->block && w->status == KVC_OK)
            w->status = kvc_sheet_has(w->batch, w->sheet, w->layer, tokens[i], run->slot + i, &has);
        if (!has) continue;
        if (w->rows) {
            kvc_run row = kvc_run_part(run, run->position + i, run->position + i + 1);
            if (!row.block) row.block = kvc_sheet_block(w->sheet);
            w->rows[w->num] = (dense_row){row.position, tokens ? tokens[i] : -1, w->num, row};
        }
        w->num++;
    }
}

static void add_sequence(walker *w, int32_t s) {
    const kvc_batch *batch = w->batch;
    const int32_t g = batch->cache->group_of[w->layer];
    const int is_cross = g >= batch->cache->num_token_groups;
    const kvc_rows *rows = &batch->sequences[s].sequence->rows[g];
    const kvc_pending *pending = is_cross ? kvc_pending_of(batch, g, s) : kvc_own_pending(batch, g, s);
    const int32_t *tokens = batch->order + batch->sequences[s].first;
    if (!(is_cross && pending->num))
        for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++) add_run(w, run, NULL);
    for (int32_t i = 0; i < pending->num; tokens += pending->runs[i++].count)
        add_run(w, &pending->runs[i], is_cross ? NULL : tokens);
}

static kvc_status count_rows(const kvc_batch *batch, int32_t layer, const kvc_sheet *sheet, int64_t *num) {
    walker w = {.batch = batch, .layer = layer, .sheet = sheet};
    for (int32_t s = 0; s < batch->num_sequences; s++) add_sequence(&w, s);
    *num = w.num;
    return w.status;
}

kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows) {
    kvc_status status = kvc_check_attention(batch->cache, layer);
    kvc_sheet *sheet = NULL;
    if (status == KVC_OK && !num_rows) status = kvc_fail(KVC_ERR_INVALID, "num_rows is NULL");
    if (status == KVC_OK) status = kvc_sheet_enter(batch, layer, KVC_SHEET_READ, &sheet);
    if (status == KVC_OK) status = count_rows(batch, layer, sheet, num_rows);
    kvc_sheet_leave(batch->cache, sheet);
    return status;
}

static int by_position(const void *a, const void *b) {
    const dense_row *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->arrived < y->arrived ? -1 : 1;
}

/* They nearly always are. */
static int is_sorted(const dense_row *rows, int64_t num) {
    int64_t i = 1;
    while (i < num && rows[i - 1].position <= rows[i].position) i++;
    return i >= num;
}

/* ---- mask -------------------------------------------------------------------------------------------------------- */

static int sees(const kvc_batch *batch, const kvc_policy *policy, int32_t token, const dense_row *row, int sees_all) {
    const int32_t position = batch->positions[token], p = row->position;
    if (policy->kind == KVC_CROSS) return 1;
    if (batch->parents && row->token >= 0 ? !kvc_descends(batch, token, row->token) : !sees_all && p > position)
        return 0;
    return p >= kvc_policy_lowest(policy, position) || p < kvc_policy_sinks(policy);
}

/* The mask of one sequence's rows, [first, first + num) of all. */
static void fill_mask(const kvc_batch *batch, const kvc_policy *policy, int32_t s, const dense_row *rows, int64_t first,
                      int64_t num, const kvc_dense_args *args) {
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        float *mask = (float *)(void *)((char *)args->mask + t * args->mask_token_stride) + first;
        const int sees_all = args->non_causal && args->non_causal[t], own = batch->sequence_of[t] == s;
        for (int64_t i = 0; i < num; i++) mask[i] = own && sees(batch, policy, t, &rows[i], sees_all) ? 0 : -INFINITY;
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Rows that lie side by side are copied together. */
static void copy_sorted(kvc_reader *reader, const dense_row *rows, int64_t num, const kvc_rows_out *out, int64_t at) {
    for (int64_t i = 0, n; i < num; i += n) {
        kvc_run run = rows[i].run;
        for (n = 1; i + n < num && rows[i + n].run.block == run.block && rows[i + n].run.slot == run.slot + n &&
                    rows[i + n].run.delta == run.delta;)
            n++;
        run.count = (int32_t)n;
        kvc_reader_copy(reader, &run, out, at + i);
    }
}

/* Which of the batch's sequences has the lowest id above the last one; -1: none. */
static int32_t next_member(const kvc_batch *batch, int32_t last) {
    int32_t next = -1;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const int64_t id = batch->sequences[s].sequence->id;
        if (last >= 0 && id <= batch->sequences[last].sequence->id) continue;
        if (next < 0 || id < batch->sequences[next].sequence->id) next = s;
    }
    return next;
}

static void fill(const kvc_batch *batch, kvc_reader *reader, const kvc_dense_args *args, const kvc_rows_out *out,
                 const kvc_sheet *sheet, dense_row *rows) {
    const kvc_policy *policy = &batch->cache->policies[batch->cache->group_of[reader->layer]];
    int64_t done = 0;
    for (int32_t s = next_member(batch, -1); s >= 0; s = next_member(batch, s)) {
        walker w = {.batch = batch, .layer = reader->layer, .sheet = sheet, .rows = rows};
        add_sequence(&w, s);
        if (!is_sorted(rows, w.num)) qsort(rows, (size_t)w.num, sizeof *rows, by_position);
        copy_sorted(reader, rows, w.num, out, done);
        for (int64_t i = 0; out->positions && i < w.num; i++) out->positions[done + i] = rows[i].position;
        if (args->mask) fill_mask(batch, policy, s, rows, done, w.num, args);
        done += w.num;
    }
}

static kvc_status make_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args, const kvc_rows_out *out,
                             const kvc_sheet *sheet) {
    kvc_cache *cache = batch->cache;
    kvc_reader reader;
    int64_t num;
    kvc_status status = count_rows(batch, layer, sheet, &num);
    if (status != KVC_OK) return status;
    if (out->num_stored) *out->num_stored = num;
    if (args->num_rows != num)
        return kvc_fail(KVC_ERR_INVALID, "num_rows is %lld: there are %lld in layer %d", (long long)args->num_rows,
                        (long long)num, layer);
    if (num == 0) return KVC_OK;
    const uint64_t size = (uint64_t)num * sizeof(dense_row);
    kvc_lock(cache);
    status = kvc_reader_new(cache, layer, &reader);
    dense_row *rows = status == KVC_OK ? kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1) : NULL;
    if (status == KVC_OK && !rows) {
        kvc_reader_free(&reader);
        status = kvc_fail(KVC_ERR_NOMEM, "out of memory for a list of %lld rows", (long long)num);
    }
    kvc_unlock(cache, status);
    if (status != KVC_OK) return status;
    fill(batch, &reader, args, out, sheet, rows);
    kvc_lock(cache);
    kvc_memory_free(&cache->memory, rows, size, KVC_MEMORY_SCRATCH, -1);
    kvc_reader_free(&reader);
    return kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *given) {
    kvc_cache *cache = batch->cache;
    kvc_dense_args args;
    kvc_rows_out out;
    kvc_sheet *sheet;
    kvc_status status = KVC_READ(kvc_dense_args, &args, given, "args");
    if (status == KVC_OK) status = kvc_check_attention(cache, layer);
    if (status == KVC_OK) status = kvc_check_rows_out(args.rows, &out, "rows");
    if (status == KVC_OK) status = kvc_check_array(KVC_F32, args.mask_token_stride, 0, "mask");
    if (status == KVC_OK) status = kvc_sheet_enter(batch, layer, KVC_SHEET_READ, &sheet);
    if (status != KVC_OK) return status;
    status = make_dense(batch, layer, &args, &out, sheet);
    kvc_sheet_leave(cache, sheet);
    return status;
}
