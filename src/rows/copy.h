/* copy.h: copies the rows of several heads between a block and a caller's arrays, transformed where they are to be. */
#ifndef KVC_COPY_H
#define KVC_COPY_H

#include "kernels/kernels.h"
#include "rows/pool.h"

/* ---- the matrices that rows are multiplied by before they are stored: kvc_transform, and those of types ---------- */

enum { KVC_MOST_KEY_ORDER = 1024, KVC_MOST_VALUE_ORDER = 64 };

/* Returns the largest power of two that divides dim, at most `most`. */
static inline int32_t kvc_order_for(int32_t dim, int32_t most) { return (dim & -dim) < most ? dim & -dim : most; }

enum { KVC_KEYS, KVC_VALUES }; /* what is_value of a function says: which rows of a layer */

/* Returns how the keys, or the values, of a layer are mixed: always, where the type is fitted, else by a transform. */
static inline kvc_mixing kvc_mixing_of(const kvc_layer *layer, int is_value) {
    const int of_values = is_value && !layer->value_in_key;
    const int32_t type = of_values ? layer->v_type : layer->k_type, dim = of_values ? layer->v_dim : layer->k_dim;
    if (KVC_TYPES[type].is_fitted) return (kvc_mixing){kvc_order_for(dim, KVC_MOST_KEY_ORDER), 1};
    const int32_t transform = of_values ? layer->v_transform : layer->k_transform;
    const int is_transformed = transform == KVC_TRANSFORM_HADAMARD && type >= KVC_FLOAT_TYPES;
    const int32_t most = of_values ? KVC_MOST_VALUE_ORDER : KVC_MOST_KEY_ORDER;
    return (kvc_mixing){is_transformed ? kvc_order_for(dim, most) : 0, 0};
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Rows of several heads: their type, the first one, and the bytes from row to row and from head to head.  scales:
 * for a type with row scales, the scale of the first row.  The next row's scale is scale_row bytes behind it, the
 * next head's `head` bytes. */
typedef struct kvc_rows {
    int32_t type;
    char *first;
    int64_t row, head;
    char *scales;
    int64_t scale_row;
} kvc_rows;

/* Returns the keys, or the values, of a layer from a slot on, in a block whose rows these are. */
kvc_rows kvc_stored_rows(const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows, int32_t slot, int is_value);

/* Returns rows of a caller's, whose scales stand behind their elements. */
kvc_rows kvc_given_rows(int32_t type, const void *first, int64_t row_stride, int64_t head_stride, int32_t dim);

/* Returns the rows of head h from row i on, as rows of one head. */
kvc_rows kvc_row_of(const kvc_rows *rows, int64_t i, int64_t h);

/* Returns the rows of head i; or row i of all heads, as if heads were rows. */
kvc_rows kvc_rows_part(const kvc_rows *rows, int64_t i, int by_row);

/* Copies num_rows keys, or values, of each head of a layer from one type and place to another.  Goes through the
 * caller's array in address order.  Rows are transformed where they are quantised or decoded, and not where their type
 * stays. */
void kvc_copy_rows(const kvc_kernels *kernels, const kvc_layer *layer, int is_value, const kvc_rows *to,
                   const kvc_rows *from, int64_t num_rows);

/* Decodes num_rows rows of one head to floats `stride` bytes apart, as they are stored: transformed or not; encodes
 * them. */
void kvc_decode_rows(const kvc_kernels *kernels, float *to, int64_t stride, const kvc_rows *from, int64_t num_rows,
                     int32_t dim);
void kvc_encode_rows(const kvc_kernels *kernels, const kvc_rows *to, const float *from, int64_t stride,
                     int64_t num_rows, int32_t dim);

#endif
