/* batch_rows.c: the rows that the tokens of a batch might see: stored rows, and the batch's own that were put.  A
 * sequence's pending runs are the slots that the batch has given it.  In a cross-attention layer they hold rows of an
 * encoder, which replace the stored ones. */
#include "read/batch_rows.h"

/* Visits the rows of a run of the batch that were put. */
static void visit_put(const kvc_batch *batch, int32_t layer, const kvc_run *run, const int32_t *tokens,
                      kvc_batch_rows_fn *visit, void *context) {
    const uint8_t *written = kvc_written_in(batch, kvc_source_of(batch->cache, layer));
    for (int32_t from = 0, i = 0; i <= run->count; i++) { /* ends a part at a token that was not put, and at the end */
        if (i < run->count && written[tokens[i]]) continue;
        const kvc_run part = {run->block, run->slot + from, i - from, run->position + from, run->delta};
        if (part.count) visit(context, &part, tokens + from);
        from = i + 1;
    }
}

void kvc_batch_visit(const kvc_batch *batch, int32_t layer, int32_t s, kvc_batch_rows_fn *visit, void *context) {
    const int32_t g = batch->cache->group_of[layer];
    const kvc_run_list *list = &batch->sequences[s].sequence->runs[g];
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int is_cross = pending->to == KVC_TO_CROSS;
    const int32_t *tokens = kvc_order_in(batch, g) + batch->sequences[s].first;
    if (!(is_cross && pending->num))
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) visit(context, run, NULL);
    for (int32_t i = 0; i < pending->num; tokens += pending->runs[i++].count) {
        const kvc_run *run = &pending->runs[i];
        if (is_cross)
            visit(context, run, NULL);
        else
            visit_put(batch, layer, run, tokens, visit, context);
    }
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

kvc_status kvc_batch_runs_new(const kvc_batch *batch, int32_t layer, int64_t seq_id, kvc_batch_runs *out) {
    const int32_t s = kvc_batch_find(batch, seq_id);
    int32_t num = 0;
    *out = (kvc_batch_runs){0};
    if (s < 0)
        return kvc_fail(KVC_ERR_INVALID, "seq_id is %lld: the batch has no token of that sequence", (long long)seq_id);
    kvc_batch_visit(batch, layer, s, count_run, &num);
    if (!num) return KVC_OK;
    out->size = (uint64_t)num * sizeof *out->runs;
    out->runs = kvc_memory_alloc(&batch->cache->memory, out->size, KVC_MEMORY_SCRATCH, -1);
    if (!out->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to read %d runs of layer %d", num, layer);
    kvc_batch_visit(batch, layer, s, add_run, out);
    return KVC_OK;
}

void kvc_batch_runs_free(kvc_memory *memory, const kvc_batch_runs *list) {
    kvc_memory_free(memory, list->runs, list->size, KVC_MEMORY_SCRATCH, -1);
}
