/* layout.c: places rows in blocks: see layout.h. */
#include "rows/layout.h"

#include "base/dtype.h"
#include "base/status.h"

/* Returns the bytes of one head's keys, or values, in whole cache lines; in whole huge pages if they fill one and pages
 * are taken as they are faulted.  SIZE_MAX: too many. */
static size_t head_bytes(const kvc_memory *memory, int32_t block_size, size_t row_bytes) {
    if (row_bytes > SIZE_MAX / 8 / (size_t)block_size) return SIZE_MAX;
    const size_t bytes = (size_t)block_size * row_bytes;
    const int fills_pages = bytes >= KVC_HUGE_PAGE && memory && kvc_memory_is_lazy(memory, bytes);
    return (size_t)kvc_align_up(bytes, fills_pages ? KVC_HUGE_PAGE : KVC_CACHE_LINE);
}

/* Returns a distance of an odd number of cache lines, so that the same slot of several heads does not fall into the
 * same set of a CPU cache. */
static size_t odd_lines(size_t bytes) { return bytes / KVC_CACHE_LINE % 2 ? bytes : bytes + KVC_CACHE_LINE; }

/* Places a head's values behind its keys: they are read next, so that hardware prefetching past the end of the keys is
 * of use.  Scales of rows come behind both. */
kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes) {
    layout->num_kv_heads = layer->num_kv_heads;
    layout->k_row_bytes = kvc_blocks_bytes(layer->k_type, layer->k_dim);
    layout->v_stored = layer->value_in_key ? 0 : kvc_blocks_bytes(layer->v_type, layer->v_dim);
    layout->v_row_bytes = layer->value_in_key ? layout->k_row_bytes : layout->v_stored;
    const size_t k_bytes = head_bytes(memory, num_slots, layout->k_row_bytes),
                 v_bytes = head_bytes(memory, num_slots, layout->v_stored),
                 k_scale_bytes = head_bytes(NULL, num_slots, kvc_row_scale_bytes(layer->k_type)),
                 v_scale_bytes =
                     layer->value_in_key ? 0 : head_bytes(NULL, num_slots, kvc_row_scale_bytes(layer->v_type));
    layout->head_stride = odd_lines(k_bytes + v_bytes + k_scale_bytes + v_scale_bytes);
    layout->k_offset = *block_bytes;
    layout->v_offset = layout->k_offset + (layer->value_in_key ? 0 : k_bytes);
    layout->k_scales = k_scale_bytes ? layout->k_offset + k_bytes + v_bytes : 0;
    layout->v_scales = layer->value_in_key ? layout->k_scales
                       : v_scale_bytes     ? layout->k_offset + k_bytes + v_bytes + k_scale_bytes
                                           : 0;
    layout->num_scales = (k_scale_bytes > 0) + (v_scale_bytes > 0);
    if (k_bytes == SIZE_MAX || v_bytes == SIZE_MAX ||
        layout->head_stride > (SIZE_MAX / 4 - *block_bytes) / (size_t)layer->num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID,
                        "a block of %d slots does not fit the address space: give a smaller block_size", num_slots);
    *block_bytes += layout->head_stride * (size_t)layer->num_kv_heads;
    return KVC_OK;
}
