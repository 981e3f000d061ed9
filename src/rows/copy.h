/* copy.h: copies the rows of several heads between a block and a caller's arrays, transformed where they are to be. */
#ifndef KVC_COPY_H
#define KVC_COPY_H

#include "kernels/kernels.h"

/* ---- the Hadamard matrices that rows are multiplied by before they are stored: kvc_transform --------------------- */

enum { KVC_MOST_KEY_ORDER = 1024, KVC_MOST_VALUE_ORDER = 64 };

/* Returns the largest power of two that divides dim, at most `most`. */
static inline int32_t kvc_order_for(int32_t dim, int32_t most) { return (dim & -dim) < most ? dim & -dim : most; }

/* Return the order of the matrix that the keys, or the values, of a layer are multiplied by; 0: by none. */
static inline int32_t kvc_key_order(const kvc_layer *layer) {
    const int is_transformed = layer->k_transform == KVC_TRANSFORM_HADAMARD && layer->k_type >= KVC_FLOAT_TYPES;
    return is_transformed ? kvc_order_for(layer->k_dim, KVC_MOST_KEY_ORDER) : 0;
}

static inline int32_t kvc_value_order(const kvc_layer *layer) {
    const int is_transformed = layer->v_transform == KVC_TRANSFORM_HADAMARD && layer->v_type >= KVC_FLOAT_TYPES;
    if (layer->value_in_key) return kvc_key_order(layer);
    return is_transformed ? kvc_order_for(layer->v_dim, KVC_MOST_VALUE_ORDER) : 0;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* How rows of several heads lie: their type, and the bytes from row to row and from head to head. */
typedef struct kvc_strides {
    int32_t type;
    int64_t row, head;
} kvc_strides;

/* Copy num_rows keys, or values, of each head of a layer from one type and place to another; `to` and `from` are the
 * first rows of head 0.  Goes through the caller's array in address order.  Rows are transformed where they are
 * quantised or decoded, and not where their type stays. */
void kvc_copy_keys(const kvc_kernels *kernels, const kvc_layer *layer, void *to, kvc_strides to_at, const void *from,
                   kvc_strides from_at, int64_t num_rows);
void kvc_copy_values(const kvc_kernels *kernels, const kvc_layer *layer, void *to, kvc_strides to_at, const void *from,
                     kvc_strides from_at, int64_t num_rows);

#endif
