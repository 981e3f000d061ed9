/* structs.h: structs that callers hand in or have filled in, which may be of an older version of the header, or of a
 * newer one. */
#ifndef KVC_STRUCTS_H
#define KVC_STRUCTS_H

#include <stddef.h>

#include "base/status.h"

/* Each of them with the last field that the smallest one has: fields that are added later stand behind it, and these
 * lines stay as they are. */
#define KVC_STRUCT_LIST(X)               \
    X(kvc_layer, rope)                   \
    X(kvc_allocator, purge)              \
    X(kvc_config, allocator)             \
    X(kvc_block_info, is_free)           \
    X(kvc_run_info, in_batch)            \
    X(kvc_span, delta)                   \
    X(kvc_rows_out, v_row_stride)        \
    X(kvc_rows_in, v_type)               \
    X(kvc_begin_args, unstored)          \
    X(kvc_put_args, seq_id)              \
    X(kvc_attend_args, lse_batch_stride) \
    X(kvc_plan_args, non_causal)         \
    X(kvc_dense_args, non_causal)

enum {
#define KVC_LEAST_SIZE(type, field) type##_least_size = offsetof(type, field) + sizeof(((type *)0)->field),
    KVC_STRUCT_LIST(KVC_LEAST_SIZE)
#undef KVC_LEAST_SIZE
};

/* KVC_ERR_INVALID unless a size that the caller gives is that of the smallest one at least. */
kvc_status kvc_check_size(size_t size, size_t least, size_t right, const char *name);

/* Copies a caller's struct of from_size bytes; fields that it has not are 0.  KVC_ERR_INVALID where it is NULL or too
 * small, KVC_ERR_UNSUPPORTED where it sets a field that is not known here. */
kvc_status kvc_read_struct(void *to, size_t to_size, size_t least, const void *from, size_t from_size,
                           const char *name);

/* The same of one that begins with its size, which becomes to_size. */
#define KVC_READ(type, to, from, name) kvc_read_sized(to, sizeof(type), type##_least_size, from, name)
kvc_status kvc_read_sized(void *to, size_t to_size, size_t least, const void *from, const char *name);

/* Fills in a caller's struct of to_size bytes; fields that are not known here are 0. */
void kvc_write_struct(void *to, size_t to_size, const void *from, size_t from_size);

#endif
