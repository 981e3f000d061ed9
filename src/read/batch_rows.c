/* batch_rows.c: see batch_rows.h. */
#include "read/batch_rows.h"

/* Sets *has to whether the row of a token was put.  block NULL: its slot is one of the row buffer. */
static kvc_status find_put(const kvc_batch *batch, int32_t layer, const kvc_row_buffer *buffer, const kvc_run *run,
                           int32_t i, int32_t token, int *has) {
    *has = kvc_written_in(batch, kvc_source_of(batch->cache, layer))[token];
    return run->block ? KVC_OK : kvc_row_buffer_has(batch, buffer, layer, token, run->slot + i, has);
}

/* Visits the rows of a run of the batch that were put. */
static kvc_status visit_put(const kvc_batch *batch, int32_t layer, const kvc_row_buffer *buffer, const kvc_run *run,
                            const int32_t *tokens, kvc_batch_rows_fn *visit, void *context) {
    for (int32_t from = 0, i = 0; i <= run->count; i++) {
        int has = 0;
        const kvc_status status = i < run->count ? find_put(batch, layer, buffer, run, i, tokens[i], &has) : KVC_OK;
        if (status != KVC_OK) return status;
        if (has) continue;
        kvc_run part = {run->block, run->slot + from, i - from, run->position + from, run->delta};
        if (!part.block && buffer) part.block = kvc_row_buffer_block(buffer);
        if (part.count) visit(context, &part, tokens + from);
        from = i + 1;
    }
    return KVC_OK;
}

kvc_status kvc_batch_visit(const kvc_batch *batch, int32_t layer, int32_t s, const kvc_row_buffer *buffer,
                           kvc_batch_rows_fn *visit, void *context) {
    const int32_t g = batch->cache->group_of[layer];
    const kvc_run_list *list = &batch->sequences[s].sequence->runs[g];
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int is_cross = pending->to == KVC_TO_CROSS;
    const int32_t *tokens = kvc_order_in(batch, g) + batch->sequences[s].first;
    if (!(is_cross && pending->num))
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) visit(context, run, NULL);
    for (int32_t i = 0; i < pending->num; tokens += pending->runs[i++].count) {
        const kvc_run *run = &pending->runs[i];
        if (is_cross) visit(context, run, NULL);
        const kvc_status status = is_cross ? KVC_OK : visit_put(batch, layer, buffer, run, tokens, visit, context);
        if (status != KVC_OK) return status;
    }
    return KVC_OK;
}

static void count_run(void *to, const kvc_run *run, const int32_t *tokens) {
    (void)run, (void)tokens;
    ++*(int32_t *)to;
}

static void add_run(void *to, const kvc_run *run, const int32_t *tokens) {
    kvc_batch_runs *list = to;
    kvc_run *last = list->num ? &list->runs[list->num - 1] : NULL;
    (void)tokens;
    list->num_rows += run->count;
    if (last && last->block == run->block && last->slot + last->count == run->slot &&
        last->position + last->count == run->position && last->delta == run->delta)
        last->count += run->count;
    else
        list->runs[list->num++] = *run;
}

kvc_status kvc_batch_runs_new(const kvc_batch *batch, int32_t layer, int64_t seq_id, const kvc_row_buffer *buffer,
                              kvc_batch_runs *out) {
    const int32_t s = kvc_batch_find(batch, seq_id);
    int32_t num = 0;
    *out = (kvc_batch_runs){0};
    if (s < 0)
        return kvc_fail(KVC_ERR_INVALID, "seq_id is %lld: the batch has no token of that sequence", (long long)seq_id);
    const kvc_status status = kvc_batch_visit(batch, layer, s, buffer, count_run, &num);
    if (status != KVC_OK || !num) return status;
    out->size = (uint64_t)num * sizeof *out->runs;
    out->runs = kvc_memory_alloc(&batch->cache->memory, out->size, KVC_MEMORY_SCRATCH, -1);
    if (!out->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to read %d runs of layer %d", num, layer);
    return kvc_batch_visit(batch, layer, s, buffer, add_run, out);
}

void kvc_batch_runs_free(kvc_memory *memory, const kvc_batch_runs *list) {
    kvc_memory_free(memory, list->runs, list->size, KVC_MEMORY_SCRATCH, -1);
}
