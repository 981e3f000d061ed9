/* dtype.c: see dtype.h. */
#include "base/dtype.h"

static int is_type(int32_t type) { return type >= 0 && type < KVC_STORED_TYPES; }

const char *kvc_type_name(int32_t type) { return is_type(type) ? KVC_TYPES[type].name : NULL; }

size_t kvc_row_bytes(int32_t type, int32_t dim) {
    if (!is_type(type)) return 0;
    return (size_t)dim / (size_t)KVC_TYPES[type].elements * (size_t)KVC_TYPES[type].bytes;
}
