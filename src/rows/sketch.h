/* sketch.h: sketches of keys, by which a token selects rows.
 *
 * A sketch says of each element of a key which quarter of a normal distribution it is in.  The decoded key is
 * multiplied by the matrix of KVC_INT4 first, which gives y.  u is the root of the mean of y * y.  The code of an
 * element is the number of thresholds -0.98 u, 0 and 0.98 u below it.  A code stands for the level code - 1.5.  The
 * sketch's scale is (y . y) / (y . levels), which leaves no error along the key (Gao and Long 2024, "RaBitQ").
 *
 * Each KVC_QUANT_ELEMENTS elements have 8 bytes.  Byte i has the codes of elements i, i + 8, i + 16 and i + 24, lowest
 * bits first.  The scale, an f16, stands behind all bytes.  It is finite, or NaN where the key has elements that are
 * not.
 */
#ifndef KVC_SKETCH_H
#define KVC_SKETCH_H

#include "kernels/kernels.h"
#include "rows/pool.h"

/* Returns the bytes of a sketch. */
static inline size_t kvc_sketch_bytes(int32_t k_dim) { return (size_t)k_dim / 4 + KVC_SCALE_BYTES; }

/* Returns the matrix by which keys, and queries that are compared with sketches, are multiplied. */
kvc_mixing kvc_sketch_mixing(int32_t k_dim);

/* Makes the sketches of `count` stored keys of each head, from a slot on, in a block whose rows these are.  Does
 * nothing in a layer without sketches. */
void kvc_sketch_rows(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows,
                     int32_t slot, int32_t count);

#endif
