/* dtype.h: element types. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcache.h"

/* A block of a quantised type: its scale, an f16, then the elements that share it. */
enum {
    KVC_QUANT_ELEMENTS = 32, /* in a block */
    KVC_SCALE_BYTES = 2,
    KVC_Q8_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS,
    KVC_Q4_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS / 2
};

/* Elements in a block of the type, 1 if it is not quantised: a row's length is a multiple of it. */
int32_t kvc_type_elements(int32_t type);

/* Bytes of one row of `dim` elements. */
size_t kvc_row_bytes(int32_t type, int32_t dim);

/* "f32", ...; NULL for a number that is no kvc_type. */
const char *kvc_type_name(int32_t type);

#endif
