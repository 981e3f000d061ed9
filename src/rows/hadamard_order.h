/* hadamard_order.h: the Hadamard matrices that rows are multiplied by before they are stored: kvc_transform. */
#ifndef KVC_HADAMARD_ORDER_H
#define KVC_HADAMARD_ORDER_H

#include "kernels/kernels.h"

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

#endif
