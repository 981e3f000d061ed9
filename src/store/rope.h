/* rope.h: rotary position embeddings: rotates keys and queries from the position they were rotated for to another. */
#ifndef KVC_ROPE_H
#define KVC_ROPE_H

#include "kernels/kernels.h"
#include "kvcache.h"

/* KVC_ERR_INVALID if a layer's rope is not valid; index: of the layer. */
kvc_status kvc_rope_check(const kvc_layer *layer, int32_t index);

/* Whether both rotate keys alike. */
int kvc_rope_equal(const kvc_rope *a, const kvc_rope *b);

/* Floats of the cosines and sines for one distance. */
static inline size_t kvc_rope_angles_size(const kvc_rope *rope) { return 2 * (size_t)rope->num_freqs; }

/* Computes the cosines, then the sines, of delta * inv_freq. */
void kvc_rope_angles(const kvc_rope *rope, int32_t delta, float *angles);

enum { KVC_NEAR = 64 };

/* What kvc_rope_angles_from keeps to compute the angles of many distances.  A distance is a multiple of KVC_NEAR, the
 * coarse part, and a rest; cosines and sines of both are computed once and combined by the addition theorems, so that
 * few are computed for many distances.  The result depends on the distance alone. */
typedef struct kvc_rope_table {
    double *angles; /* [1 + KVC_NEAR][kvc_rope_angles_size] of the coarse part, then of the rests 0, 1, 2 ... */
    uint64_t known; /* bit i: angles of rest i are computed */
    int32_t coarse; /* 1: none is computed yet */
} kvc_rope_table;

/* Does the same as kvc_rope_angles, but for rounding.  Every call for a table gives the same rope; rising or
 * falling distances are fastest. */
void kvc_rope_angles_from(kvc_rope_table *table, const kvc_rope *rope, int32_t delta, float *angles);

/* Rotates a row by these angles, or back by as much. */
void kvc_rope_rotate(const kvc_rope *rope, const float *angles, float *row);
void kvc_rope_rotate_back(const kvc_rope *rope, const float *angles, float *row);

/* Rotates rows of any type.  Keeps the angles of the last distance, as rows side by side mostly move together. */
typedef struct kvc_rotator {
    const kvc_kernels *kernels;
    float *scratch; /* [kvc_rotator_floats(k_dim)] the angles, then a row */
    const kvc_rope *rope;
    int32_t delta;
} kvc_rotator;

static inline size_t kvc_rotator_floats(int32_t k_dim) { return 2 * (size_t)k_dim; }

/* Writes the row of k_dim elements at `from`, rotated by delta, to `to`, which may be the same. */
void kvc_rotator_rotate(kvc_rotator *rotator, const kvc_rope *rope, int32_t delta, void *to, int32_t to_type,
                        const void *from, int32_t from_type, int32_t k_dim);

#endif
