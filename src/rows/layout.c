/* layout.c: places rows in blocks: see layout.h. */
#include "rows/layout.h"

#include "base/dtype.h"
#include "rows/sketch.h"
#include "base/status.h"

/* Returns the bytes of one head's keys, values or scales, in whole cache lines.  SIZE_MAX / 8: too many. */
static size_t head_bytes(int32_t block_size, size_t row_bytes) {
    if (row_bytes > SIZE_MAX / 16 / (size_t)block_size) return SIZE_MAX / 8;
    return (size_t)kvc_align_up((size_t)block_size * row_bytes, KVC_CACHE_LINE);
}

/* Returns the alignment of a head's keys and values.  Where they begin at huge pages, these are filled one after the
 * other as tokens come.  But the rest of the last one stays empty, so at least 7/8 of the head must lie in others. */
static size_t alignment_of(const kvc_memory *memory, size_t k_bytes, size_t v_bytes, size_t scale_bytes) {
    const size_t filled = k_bytes / KVC_HUGE_PAGE * KVC_HUGE_PAGE + v_bytes / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
    const size_t most = (k_bytes + v_bytes + scale_bytes) / 8;
    return memory && filled >= 7 * most && kvc_memory_is_lazy(memory, filled) ? KVC_HUGE_PAGE : KVC_CACHE_LINE;
}

/* Returns a distance of an odd number of cache lines, so that the same slot of several heads does not fall into the
 * same set of a CPU cache. */
static size_t odd_lines(size_t bytes) { return bytes / KVC_CACHE_LINE % 2 ? bytes : bytes + KVC_CACHE_LINE; }

/* Places a head's values behind its keys: they are read next, so that hardware prefetching past the end of the keys is
 * of use.  Scales of rows come behind both, then sketches, behind which kernels may read a little further. */
kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes) {
    layout->num_kv_heads = layer->num_kv_heads;
    layout->k_row_bytes = kvc_blocks_bytes(layer->k_type, layer->k_dim);
    const int has_values = kvc_stores_values(layer);
    layout->v_stored = has_values ? kvc_blocks_bytes(layer->v_type, layer->v_dim) : 0;
    layout->v_row_bytes = layer->value_in_key ? layout->k_row_bytes : layout->v_stored;
    size_t k_bytes = head_bytes(num_slots, layout->k_row_bytes), v_bytes = head_bytes(num_slots, layout->v_stored);
    const size_t k_scale_bytes = head_bytes(num_slots, kvc_row_scale_bytes(layer->k_type)),
                 v_scale_bytes = has_values ? head_bytes(num_slots, kvc_row_scale_bytes(layer->v_type)) : 0,
                 scale_bytes = k_scale_bytes + v_scale_bytes,
                 sketch_row = layer->sketch_bits ? kvc_sketch_bytes(layer->k_dim) : 0,
                 sketch_bytes = sketch_row ? head_bytes(num_slots, sketch_row) + KVC_CACHE_LINE : 0,
                 alignment = alignment_of(memory, k_bytes, v_bytes, scale_bytes + sketch_bytes);
    k_bytes = (size_t)kvc_align_up(k_bytes, alignment);
    v_bytes = (size_t)kvc_align_up(v_bytes, alignment);
    layout->head_stride = odd_lines(k_bytes + v_bytes + (size_t)kvc_align_up(scale_bytes + sketch_bytes, alignment));
    layout->k_offset = (size_t)kvc_align_up(*block_bytes, alignment);
    layout->v_offset = layout->k_offset + (layer->value_in_key ? 0 : k_bytes);
    layout->k_scales = k_scale_bytes ? layout->k_offset + k_bytes + v_bytes : 0;
    layout->v_scales = layer->value_in_key ? layout->k_scales
                       : v_scale_bytes     ? layout->k_offset + k_bytes + v_bytes + k_scale_bytes
                                           : 0;
    layout->num_scales = (k_scale_bytes > 0) + (v_scale_bytes > 0);
    layout->sketch_bytes = sketch_row;
    layout->sketch_offset = layout->k_offset + k_bytes + v_bytes + scale_bytes;
    if (layout->head_stride > (SIZE_MAX / 8 - *block_bytes) / (size_t)layer->num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID,
                        "a block of %d slots does not fit the address space: give a smaller block_size", num_slots);
    *block_bytes =
        (size_t)kvc_align_up(layout->k_offset + layout->head_stride * (size_t)layer->num_kv_heads, alignment);
    return KVC_OK;
}
