/* dtype.c: see dtype.h. */
#include "base/dtype.h"

/* Name of each type, and elements and bytes of a block of it, in the order of kvc_type. */
static const struct {
    const char *name;
    int32_t elements, bytes;
} types[] = {{"f32", 1, 4},
             {"f16", 1, 2},
             {"bf16", 1, 2},
             {"q8_0", KVC_QUANT_ELEMENTS, KVC_Q8_0_BYTES},
             {"q4_0", KVC_QUANT_ELEMENTS, KVC_Q4_0_BYTES}};

const char *kvc_type_name(int32_t type) {
    return type >= 0 && type < (int32_t)(sizeof types / sizeof *types) ? types[type].name : NULL;
}

int32_t kvc_type_elements(int32_t type) { return types[type].elements; }

size_t kvc_row_bytes(int32_t type, int32_t dim) {
    return (size_t)dim / (size_t)types[type].elements * (size_t)types[type].bytes;
}
