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

/* A copy of keys, or of values: addresses are those of the first row of head 0, strides are in bytes. */
typedef struct kvc_transfer {
    const kvc_kernels *kernels;
    int32_t from_type, to_type;
    int32_t order; /* of the matrix that stored rows are multiplied by (kvc_key_order, kvc_value_order); 0: by none */
    char *to;
    const char *from;
    int64_t to_row, to_head, from_row, from_head;
    int32_t heads, dim;
} kvc_transfer;

/* Converts num_rows rows of each head, going through the caller's array in address order.  Rows are transformed where
 * they are quantised or decoded, and not where their type stays. */
void kvc_transfer_rows(const kvc_transfer *x, int64_t num_rows);

#endif
