/* dtype.h: element types. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcache.h"

enum {                          /* Quantised types */
       KVC_QUANT_ELEMENTS = 32, /* that share a scale */
       KVC_SCALE_BYTES = 2,     /* of the scale, an f16, which comes first */
       KVC_Q8_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS,
       KVC_Q4_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS / 2
};

/* The number that the elements of a row must be a multiple of. */
int32_t kvc_type_elements(int32_t type);

/* Bytes of one row of `dim` elements. */
size_t kvc_row_bytes(int32_t type, int32_t dim);

/* "f32", ...; NULL for a number that is no kvc_type. */
const char *kvc_type_name(int32_t type);

#endif
