/* inject.c: replaces stored rows. */
#include "dtype.h"
#include "rewrite.h"

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
    status = draft.num_copies ? kvc_check_max_bytes(cache, "copying rows that are shared") : KVC_OK;
    if (status == KVC_OK) {
        kvc_draft_copy(cache, group, &change, &draft, NULL);
        kvc_draft_accept(cache, group, rows, &change, &draft);
    } else {
        kvc_draft_discard(cache, group, &draft);
    }
    return status;
}

/* The row of one head, at its slot; keys turned back to where they were rotated for. */
static void write_row(const kvc_cache *cache, int32_t layer, const kvc_run *row, const kvc_rows_in *in, int64_t at,
                      float *scratch) {
    const kvc_layer *config = &cache->layers[layer];
    const kvc_layout *layout = &cache->layouts[cache->layout_of[layer]];
    const kvc_rope *rope = row->delta ? kvc_rope_of(cache, layer) : NULL;
    uint8_t *slot_k = row->block->rows + layout->k_offset + (size_t)row->slot * layout->k_row_bytes;
    uint8_t *slot_v = row->block->rows + layout->v_offset + (size_t)row->slot * layout->v_row_bytes;
    float *angles = scratch, *turned = scratch + config->k_dim;
    if (rope) kvc_rope_angles(rope, -row->delta, angles);
    for (int32_t h = 0; h < config->num_kv_heads; h++) {
        const char *k = (const char *)in->k + h * in->k_head_stride + at * in->k_row_stride;
        int32_t type = in->k_type;
        if (rope) {
            cache->kernels->convert[type][KVC_F32](turned, 0, k, 0, 1, config->k_dim);
            kvc_rope_turn(rope, angles, turned);
            k = (const char *)turned;
            type = KVC_F32;
        }
        cache->kernels->convert[type][config->k_type](slot_k + (size_t)h * layout->k_head_stride, 0, k, 0, 1,
                                                      config->k_dim);
        if (!config->value_in_key)
            cache->kernels->convert[in->v_type][config->v_type](
                slot_v + (size_t)h * layout->v_head_stride, 0,
                (const char *)in->v + h * in->v_head_stride + at * in->v_row_stride, 0, 1, config->v_dim);
    }
}

static void write_rows(const kvc_cache *cache, int32_t layer, const kvc_rows *rows, int32_t begin, int32_t end,
                       const kvc_rows_in *in, float *scratch) {
    int64_t arrived = 0; /* rows of earlier runs */
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); arrived += run++->count) {
        const kvc_run part = kvc_run_part(run, begin, end);
        for (int32_t i = 0; i < part.count; i++) {
            const kvc_run row = kvc_run_part(&part, part.position + i, part.position + i + 1);
            if (rows->ascending || kvc_rows_find(rows, row.position) == arrived + row.position - run->position)
                write_row(cache, layer, &row, in, row.position - begin, scratch);
        }
    }
}

static kvc_status inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                         const kvc_rows_in *in) {
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    kvc_status status = kvc_check_idle(sequence);
    if (status != KVC_OK || !sequence) return status;
    const int32_t g = cache->group_of[layer];
    const size_t size = 2 * (size_t)cache->layers[layer].k_dim * sizeof(float); /* a row and its angles */
    float *scratch = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!scratch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a row of layer %d", layer);
    status = own_rows(cache, g, &sequence->rows[g], begin, end);
    if (status == KVC_OK) write_rows(cache, layer, &sequence->rows[g], begin, end, in, scratch);
    kvc_memory_free(&cache->memory, scratch, size, KVC_MEMORY_SCRATCH, -1);
    return status;
}

static kvc_status check_rows_in(const kvc_layer *layer, const kvc_rows_in *given, kvc_rows_in *in) {
    kvc_status status = kvc_read_struct(in, sizeof *in, given, given ? given->struct_size : 0, "in");
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
