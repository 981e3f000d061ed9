/* rope.h: rotary position embeddings: rotates keys and queries from the position they were rotated for to another. */
#ifndef KVC_ROPE_H
#define KVC_ROPE_H

#include "rows/copy.h"

/* Returns KVC_ERR_INVALID if the rope of a layer is not valid; index: the layer's, for the message. */
kvc_status kvc_rope_check(const kvc_layer *layer, int32_t index);

/* Returns whether both rotate keys alike. */
int kvc_rope_equal(const kvc_rope *a, const kvc_rope *b);

/* Returns the number of floats for the cosines and sines of one distance. */
static inline size_t kvc_rope_angles_size(const kvc_rope *rope) { return 2 * (size_t)rope->num_freqs; }

enum { KVC_NEAR = 64 };

/* Numbers that kvc_rope_angles_from keeps to compute the angles of many distances.  A distance is a multiple of
 * KVC_NEAR, the coarse part, plus a rest.  Cosines and sines of both are computed once and combined by the addition
 * theorems, so that few are computed for many distances.  The result depends on the distance alone. */
typedef struct kvc_rope_table {
    double *angles; /* [1 + KVC_NEAR][kvc_rope_angles_size] for the coarse part, then for the rests 0, 1, 2 ... */
    uint64_t known; /* bit i: angles of rest i are computed */
    int32_t coarse; /* the coarse part that is computed; 1: none yet */
} kvc_rope_table;

/* Computes the cosines, then the sines, of delta * inv_freq.  Use a table for one rope only.  Rising or falling
 * distances are fastest. */
void kvc_rope_angles_from(kvc_rope_table *table, const kvc_rope *rope, int32_t delta, float *angles);

/* Rotates a row by the angles, or back by the angles. */
void kvc_rope_rotate(const kvc_rope *rope, const float *angles, float *row);
void kvc_rope_rotate_back(const kvc_rope *rope, const float *angles, float *row);

/* Rotates rows of any type.  Keeps the angles of the last delta, as adjacent rows mostly have the same. */
typedef struct kvc_rotator {
    const kvc_kernels *kernels;
    float *scratch; /* [kvc_rotator_floats(k_dim)] the angles, then a row */
    const kvc_rope *rope;
    int32_t delta;
} kvc_rotator;

/* Returns the floats of scratch that a rotator of keys of k_dim elements uses. */
static inline size_t kvc_rotator_floats(int32_t k_dim) { return 2 * (size_t)k_dim; }

/* Writes num_rows keys of each head at `from`, rotated by delta, to `to`, which may be the same address.  The types are
 * f32, f16, bf16 or, for keys as the layer stores them, the layer's. */
void kvc_rotator_rotate(kvc_rotator *rotator, const kvc_rope *rope, int32_t delta, const kvc_rows *to,
                        const kvc_rows *from, int32_t num_rows, const kvc_layer *layer);

#endif
