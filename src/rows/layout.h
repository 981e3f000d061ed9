/* layout.h: where the rows of a layer lie in a block. */
#ifndef KVC_LAYOUT_H
#define KVC_LAYOUT_H

#include "rows/pool.h"

/* Places the rows of a layer in a block of num_slots slots, behind the first *block_bytes bytes, and adds their size to
 * *block_bytes.  memory: where the block will be allocated; NULL if its pages are not taken as they are faulted.
 * Returns KVC_ERR_INVALID if the block would be too large. */
kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes);

#endif
