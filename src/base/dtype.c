/* dtype.c: the names and sizes of element types: see dtype.h. */
#include "base/dtype.h"

static int is_type(int32_t type) { return type >= 0 && type < KVC_STORED_TYPES; }

const char *kvc_type_name(int32_t type) { return is_type(type) ? KVC_TYPES[type].name : NULL; }

size_t kvc_row_bytes(int32_t type, int32_t dim) {
    return is_type(type) && dim >= 0 ? kvc_blocks_bytes(type, dim) + kvc_row_scale_bytes(type) : 0;
}
