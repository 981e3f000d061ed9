/* dtype.h: sizes of element types, and their names (kvc_type_name in kvcache.h). */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcache.h"

/* A block of a quantised type: its scale, which is an f16, then the elements that share it. */
enum {
    KVC_QUANT_ELEMENTS = 32, /* elements in a block */
    KVC_SCALE_BYTES = 2,
    KVC_Q8_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS,
    KVC_Q4_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS / 2
};

/* Returns the elements in a block of the type, of which a row's length is a multiple; 1 if it is not quantised. */
int32_t kvc_type_elements(int32_t type);

/* Returns the bytes of a row of `dim` elements. */
size_t kvc_row_bytes(int32_t type, int32_t dim);

#endif
