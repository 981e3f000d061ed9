/* structs.h: copies structs from and to callers, who may have been compiled with an older or a newer version of the
 * header. */
#ifndef KVC_STRUCTS_H
#define KVC_STRUCTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Lists each public struct with the last field of its first version.  Later versions add fields behind it; never change
 * these lines. */
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
    X(kvc_chosen, tail)                  \
    X(kvc_choose_args, num_local)        \
    X(kvc_weights_args, softcap)         \
    X(kvc_masked, end)                   \
    X(kvc_plan_args, non_causal)         \
    X(kvc_dense_args, non_causal)        \
    X(kvc_save_args, fingerprint)        \
    X(kvc_load_args, config)             \
    X(kvc_tokens, digests)               \
    X(kvc_prefix_config, user)           \
    X(kvc_new_block, name)               \
    X(kvc_prefix_event, name)            \
    X(kvc_store, write)

enum {
#define KVC_LEAST_SIZE(type, field) type##_least_size = offsetof(type, field) + sizeof(((type *)0)->field),
    KVC_STRUCT_LIST(KVC_LEAST_SIZE)
#undef KVC_LEAST_SIZE
};

/* Returns KVC_ERR_INVALID if the size that a caller gives is below `least`, the size of the struct's first version.
 * `right` is today's size, for the message. */
kvc_status kvc_check_size(size_t size, size_t least, size_t right, const char *name);

/* Checks a caller's array of at most `max` structs of this size, to be filled in.  It is KVC_ERR_INVALID as well if max
 * is negative, and if the array is NULL and max is above 0.  The argument that has max is called "max_" and the name.
 */
kvc_status kvc_check_output(const void *array, size_t size, int64_t max, size_t least, size_t right, const char *name);

/* Copies a caller's struct of from_size bytes; fields it lacks become 0.  Returns KVC_ERR_INVALID if it is NULL or too
 * small, KVC_ERR_UNSUPPORTED if it sets a field that this version does not know. */
kvc_status kvc_read_struct(void *to, size_t to_size, size_t least, const void *from, size_t from_size,
                           const char *name);

/* Does what kvc_read_struct does, for a struct whose first field is its size: in the copy, it becomes to_size. */
#define KVC_READ(type, to, from, name) kvc_read_sized(to, sizeof(type), type##_least_size, from, name)
kvc_status kvc_read_sized(void *to, size_t to_size, size_t least, const void *from, const char *name);

/* Fills in a caller's struct of to_size bytes; fields that this version does not know become 0. */
void kvc_write_struct(void *to, size_t to_size, const void *from, size_t from_size);

#endif
