/* rope.h: rotary positions: what turns a row from the position it was rotated for to another. */
#ifndef KVC_ROPE_H
#define KVC_ROPE_H

#include "kernels/kernels.h"
#include "kvcache.h"

/* KVC_OK, or the sentence that says what is wrong with a layer's rope. */
kvc_status kvc_rope_check(const kvc_layer *layer, int32_t index);

/* Whether both move keys in the same way. */
int kvc_rope_equal(const kvc_rope *a, const kvc_rope *b);

/* Floats of the angles of one distance. */
static inline size_t kvc_rope_angles_size(const kvc_rope *rope) { return 2 * (size_t)rope->num_freqs; }

/* The cosines, then the sines, of delta * inv_freq. */
void kvc_rope_angles(const kvc_rope *rope, int32_t delta, float *angles);

enum { KVC_NEAR = 64 };

/* Angles of many distances.  A distance is a multiple of KVC_NEAR and a rest; the sines of both are computed once and
 * combined, so that few are computed for many distances.  The result depends on the distance alone. */
typedef struct kvc_rope_table {
    double *turns;  /* [1 + KVC_NEAR][kvc_rope_angles_size] cosines, then sines: of `coarse`, and of 0, 1, 2 ... */
    uint64_t known; /* which of the latter are there */
    int32_t coarse; /* 1: none yet */
} kvc_rope_table;

/* As kvc_rope_angles; the table is for one rope, and best asked for rising or falling distances. */
void kvc_rope_angles_from(kvc_rope_table *table, const kvc_rope *rope, int32_t delta, float *angles);

/* Turns a row by these angles, or back by as much. */
void kvc_rope_turn(const kvc_rope *rope, const float *angles, float *row);
void kvc_rope_turn_back(const kvc_rope *rope, const float *angles, float *row);

/* Turns rows of any type.  It keeps the angles of the last distance: rows that lie together mostly move together. */
typedef struct kvc_turner {
    const kvc_kernels *kernels;
    float *scratch; /* of kvc_turner_floats(k_dim) floats */
    const kvc_rope *rope;
    int32_t delta;
} kvc_turner;

static inline size_t kvc_turner_floats(int32_t k_dim) { return 2 * (size_t)k_dim; /* a row and its angles */ }

/* Writes a row of k_dim elements, turned by delta, to where it may lie itself. */
void kvc_turner_turn(kvc_turner *turner, const kvc_rope *rope, int32_t delta, void *to, int32_t to_type,
                     const void *from, int32_t from_type, int32_t k_dim);

#endif
