/* dtype.h: element types. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcache.h"

/* Bytes of one row of `dim` elements. */
size_t kvc_row_bytes(int32_t type, int32_t dim);

/* "f32", ...; NULL for a number that is no kvc_type. */
const char *kvc_type_name(int32_t type);

#endif
