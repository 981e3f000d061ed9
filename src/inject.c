/* inject.c: replaces stored rows. */
#include "dtype.h"
#include "rewrite.h"
#include "rows.h"

/* A slot that nobody else looks at can be written to. */
static int is_shared(const void *context, const kvc_run *run, int32_t slot) {
    (void)context;
    return run->block->holders[slot] > 1 || run->block->pins;
}

/* Sees to it that the rows at these positions are this sequence's alone. */
static kvc_status own_rows(kvc_cache *cache, int32_t group, kvc_rows *rows, int32_t begin, int32_t end) {
    const kvc_change change = {.begin = begin, .end = begin, .moved_end = end, .copies = is_shared};
    kvc_draft draft;
    kvc_status status = kvc_draft_make(cache, group, rows, &change, &draft);
    if (status != KVC_OK) return status;
    static const char what[] = "copying rows that are shared";
    if (draft.num_copies) status = kvc_drafts_check(cache, group, &draft, 1, what);
    if (draft.num_copies && status == KVC_OK) status = kvc_check_max_bytes(cache, what);
    if (status == KVC_OK) {
        kvc_draft_copy(cache, group, &draft, NULL);
        kvc_draft_accept(cache, group, rows, &draft);
    } else {
        kvc_draft_discard(cache, group, &draft);
    }
    return status;
}

/* The rows of all heads at one slot; keys turned back to where they were rotated for. */
static void write_row(kvc_reader *reader, const kvc_run *row, const kvc_rows_in *in, int64_t at) {
    const kvc_cache *cache = reader->cache;
    const kvc_layer *config = &cache->layers[reader->layer];
    const kvc_layout *layout = &cache->layouts[cache->layout_of[reader->layer]];
    const kvc_rope *rope = row->delta ? kvc_rope_of(cache, reader->layer) : NULL;
    for (int32_t h = 0; h < config->num_kv_heads; h++) {
        const char *k = (const char *)in->k + h * in->k_head_stride + at * in->k_row_stride;
        uint8_t *key = kvc_key_at(layout, row->block, row->slot, h);
        if (rope)
            kvc_turner_turn(&reader->turner, rope, -row->delta, key, config->k_type, k, in->k_type, config->k_dim);
        else
            cache->kernels->convert[in->k_type][config->k_type](key, 0, k, 0, 1, config->k_dim);
        if (!config->value_in_key)
            cache->kernels->convert[in->v_type][config->v_type](
                kvc_value_at(layout, row->block, row->slot, h), 0,
                (const char *)in->v + h * in->v_head_stride + at * in->v_row_stride, 0, 1, config->v_dim);
    }
}

static void write_rows(kvc_reader *reader, const kvc_rows *rows, int32_t begin, int32_t end, const kvc_rows_in *in) {
    int64_t arrived = 0; /* rows of earlier runs */
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); arrived += run++->count) {
        const kvc_run part = kvc_run_part(run, begin, end);
        for (int32_t i = 0; i < part.count; i++) {
            const kvc_run row = kvc_run_part(&part, part.position + i, part.position + i + 1);
            if (rows->ascending || kvc_rows_find(rows, row.position) == arrived + row.position - run->position)
                write_row(reader, &row, in, row.position - begin);
        }
    }
}

static kvc_status inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                         const kvc_rows_in *in) {
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    kvc_reader reader;
    kvc_status status = kvc_check_idle(sequence);
    if (status != KVC_OK || !sequence) return status;
    const int32_t g = cache->group_of[layer];
    status = kvc_reader_new(cache, layer, &reader);
    if (status != KVC_OK) return status;
    status = own_rows(cache, g, &sequence->rows[g], begin, end);
    if (status == KVC_OK) write_rows(&reader, &sequence->rows[g], begin, end, in);
    kvc_reader_free(&reader);
    return status;
}

static kvc_status check_rows_in(const kvc_layer *layer, const kvc_rows_in *given, kvc_rows_in *in) {
    kvc_status status = KVC_READ(kvc_rows_in, in, given, "in");
    if (status == KVC_OK) status = kvc_check_array(in->k_type, in->k_row_stride, in->k_head_stride, "k");
    if (status == KVC_OK) status = kvc_check_values(layer, in->k, in->v);
    if (status != KVC_OK || layer->value_in_key) return status;
    return kvc_check_array(in->v_type, in->v_row_stride, in->v_head_stride, "v");
}

kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                      const kvc_rows_in *given) {
    kvc_rows_in in;
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_own_rows(cache, layer);
    if (status == KVC_OK && !kvc_keeps_tokens(cache, layer))
        status =
            kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d is a cross-attention layer: its rows are replaced by a put", layer);
    if (status == KVC_OK) status = kvc_check_positions(begin, end);
    if (status == KVC_OK) status = check_rows_in(&cache->layers[layer], given, &in);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, inject(cache, seq_id, layer, begin, end, &in));
}
