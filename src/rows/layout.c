/* layout.c: places rows in blocks.  A block holds, for each layer and head of its group, the parts listed at PARTS.
 * Each part is an array with one row for each slot. */
#include "rows/layout.h"

#include "base/dtype.h"
#include "rows/sketch.h"
#include "base/status.h"

/* Returns the bytes of a part of one head, in whole cache lines.  SIZE_MAX / 8: too many. */
static size_t head_bytes(int32_t block_size, size_t row_bytes) {
    if (row_bytes > SIZE_MAX / 16 / (size_t)block_size) return SIZE_MAX / 8;
    return (size_t)kvc_align_up((size_t)block_size * row_bytes, KVC_CACHE_LINE);
}

/* Returns the alignment of a head's keys and values.  If they begin at huge pages, these fill one after the other as
 * tokens come.  But the last huge page of each stays partly empty, so the others must hold at least 7/8 of the head. */
static size_t alignment_of(const kvc_memory *memory, size_t k_bytes, size_t v_bytes, size_t scale_bytes) {
    const size_t filled = k_bytes / KVC_HUGE_PAGE * KVC_HUGE_PAGE + v_bytes / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
    const size_t most = (k_bytes + v_bytes + scale_bytes) / 8;
    return memory && filled >= 7 * most && kvc_memory_is_lazy(memory, filled) ? KVC_HUGE_PAGE : KVC_CACHE_LINE;
}

/* Returns a distance of an odd number of cache lines, so that the same slot of several heads does not fall into the
 * same set of a CPU cache. */
static size_t odd_lines(size_t bytes) { return bytes / KVC_CACHE_LINE % 2 ? bytes : bytes + KVC_CACHE_LINE; }

/* The parts of a head in a block, in this order.  Values are read next after keys, so that hardware prefetching past
 * the end of the keys is of use.  Kernels may read a little behind sketches. */
enum { KEYS, VALUES, K_SCALES, V_SCALES, SKETCHES, PARTS };

kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes) {
    const int has_values = kvc_stores_values(layer), in_key = layer->value_in_key;
    const size_t rows[PARTS] = {[KEYS] = kvc_blocks_bytes(layer->k_type, layer->k_dim),
                                [VALUES] = has_values ? kvc_blocks_bytes(layer->v_type, layer->v_dim) : 0,
                                [K_SCALES] = kvc_row_scale_bytes(layer->k_type),
                                [V_SCALES] = has_values ? kvc_row_scale_bytes(layer->v_type) : 0,
                                [SKETCHES] = layer->sketch_bits ? kvc_sketch_bytes(layer->k_dim) : 0};
    size_t bytes[PARTS], at[PARTS];
    for (int p = 0; p < PARTS; p++) bytes[p] = head_bytes(num_slots, rows[p]);
    if (rows[SKETCHES]) bytes[SKETCHES] += KVC_CACHE_LINE;
    const size_t alignment = alignment_of(memory, bytes[KEYS], bytes[VALUES],
                                          bytes[K_SCALES] + bytes[V_SCALES] + bytes[SKETCHES]),
                 begin = (size_t)kvc_align_up(*block_bytes, alignment);
    size_t end = begin;
    for (int p = 0; p < PARTS; p++) {
        at[p] = end;
        end += bytes[p];
        if (p <= VALUES || p == SKETCHES) end = (size_t)kvc_align_up(end, alignment);
    }
    *layout = (kvc_layout){.num_kv_heads = layer->num_kv_heads,
                           .k_row_bytes = rows[KEYS],
                           .v_stored = rows[VALUES],
                           .v_row_bytes = rows[in_key ? KEYS : VALUES],
                           .head_stride = odd_lines(end - begin),
                           .k_offset = at[KEYS],
                           .v_offset = at[in_key ? KEYS : VALUES],
                           .k_scales = rows[K_SCALES] ? at[K_SCALES] : 0,
                           .num_scales = (rows[K_SCALES] > 0) + (rows[V_SCALES] > 0),
                           .sketch_bytes = rows[SKETCHES],
                           .sketch_offset = at[SKETCHES]};
    layout->v_scales = in_key ? layout->k_scales : rows[V_SCALES] ? at[V_SCALES] : 0;
    if (layout->head_stride > (SIZE_MAX / 8 - *block_bytes) / (size_t)layer->num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID,
                        "a block of %d slots does not fit the address space: give a smaller block_size", num_slots);
    *block_bytes = (size_t)kvc_align_up(begin + layout->head_stride * (size_t)layer->num_kv_heads, alignment);
    return KVC_OK;
}
