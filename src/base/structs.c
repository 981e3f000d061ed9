/* structs.c: copies structs from and to callers of other versions, whose structs may be shorter or longer. */
#include "base/structs.h"

#include <inttypes.h>
#include <string.h>

kvc_status kvc_check_size(size_t size, size_t least, size_t right, const char *name) {
    if (size >= least) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s: its size is given as %zu: it must be sizeof, %zu", name, size, right);
}

kvc_status kvc_check_output(const void *array, size_t size, int64_t max, size_t least, size_t right, const char *name) {
    KVC_TRY(kvc_check_size(size, least, right, name));
    if (max < 0) return kvc_fail(KVC_ERR_INVALID, "max_%s is %" PRId64 ": it must be at least 0", name, max);
    if (array || !max) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is NULL: there is to be room for %" PRId64, name, max);
}

kvc_status kvc_read_struct(void *to, size_t to_size, size_t least, const void *from, size_t from_size,
                           const char *name) {
    if (!from) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", name);
    KVC_TRY(kvc_check_size(from_size, least, to_size, name));
    for (size_t i = to_size; i < from_size; i++)
        if (((const uint8_t *)from)[i])
            return kvc_fail(KVC_ERR_UNSUPPORTED, "%s sets a field that this version of the library does not know",
                            name);
    kvc_write_struct(to, to_size, from, from_size);
    return KVC_OK;
}

kvc_status kvc_read_sized(void *to, size_t to_size, size_t least, const void *from, const char *name) {
    size_t size = 0;
    if (from) memcpy(&size, from, sizeof size);
    const kvc_status status = kvc_read_struct(to, to_size, least, from, size, name);
    if (status == KVC_OK) memcpy(to, &to_size, sizeof to_size);
    return status;
}

void kvc_write_struct(void *to, size_t to_size, const void *from, size_t from_size) {
    const size_t size = to_size < from_size ? to_size : from_size;
    memcpy(to, from, size);
    memset((char *)to + size, 0, to_size - size);
}
