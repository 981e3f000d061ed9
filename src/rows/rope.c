/* rope.c: rotary position embeddings: rotates keys from the position they were rotated for to another.  Pair i of a
 * key's elements is rotated by the distance (delta) times inv_freq[i].  Angles are kept as cosines [num_freqs] and then
 * sines [num_freqs].  The angles of many distances are made from a table (kvc_rope_table), which has those of a
 * multiple of KVC_NEAR, the coarse part, and those of the rests 0 to KVC_NEAR - 1. */
#include "rows/rope.h"

#include <math.h>

#include "base/status.h"

static kvc_status check_frequencies(const kvc_layer *layer, int32_t index) {
    const kvc_rope *rope = &layer->rope;
    if (rope->num_freqs < 1 || !rope->inv_freq)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].rope has %d frequencies%s: it needs at least 1", index,
                        rope->num_freqs, rope->inv_freq ? "" : " at NULL");
    if (rope->first_dim < 0 || rope->first_dim > layer->k_dim || rope->num_freqs > (layer->k_dim - rope->first_dim) / 2)
        return kvc_fail(
            KVC_ERR_INVALID,
            "layers[%d].rope turns elements from first_dim %d on, two for each of %d frequencies: keys have "
            "%d",
            index, rope->first_dim, rope->num_freqs, layer->k_dim);
    if (layer->value_in_key && rope->first_dim < layer->v_dim)
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d].rope.first_dim is %d: it must be at least v_dim, %d, as values lie in the keys",
                        index, rope->first_dim, layer->v_dim);
    for (int32_t i = 0; i < rope->num_freqs; i++)
        if (!isfinite(rope->inv_freq[i]))
            return kvc_fail(KVC_ERR_INVALID, "layers[%d].rope.inv_freq[%d] is %g: it must be finite", index, i,
                            rope->inv_freq[i]);
    return KVC_OK;
}

kvc_status kvc_rope_check(const kvc_layer *layer, int32_t index) {
    switch (layer->rope.kind) {
    case KVC_ROPE_UNKNOWN:
    case KVC_ROPE_NONE: return KVC_OK;
    case KVC_ROPE_FREQUENCIES: return check_frequencies(layer, index);
    case KVC_ROPE_FUNCTION:
        return layer->rope.shift ? KVC_OK : kvc_fail(KVC_ERR_INVALID, "layers[%d].rope.shift is NULL", index);
    default: return kvc_fail(KVC_ERR_INVALID, "layers[%d].rope.kind is %d: no kvc_rope_kind", index, layer->rope.kind);
    }
}

static int frequencies_equal(const kvc_rope *a, const kvc_rope *b) {
    if (a->num_freqs != b->num_freqs || a->first_dim != b->first_dim || !a->interleaved != !b->interleaved) return 0;
    if (a->inv_freq == b->inv_freq) return 1;
    int32_t i = 0;
    while (i < a->num_freqs && a->inv_freq[i] == b->inv_freq[i]) i++;
    return i == a->num_freqs;
}

int kvc_rope_equal(const kvc_rope *a, const kvc_rope *b) {
    if (a->kind != b->kind) return 0;
    if (a->kind == KVC_ROPE_FREQUENCIES) return frequencies_equal(a, b);
    return a->kind != KVC_ROPE_FUNCTION || (a->shift == b->shift && a->user == b->user);
}

/* Computes the cosines, then the sines, of delta * inv_freq. */
static void compute_angles_f32(const kvc_rope *rope, int32_t delta, float *angles) {
    for (int32_t i = 0; i < rope->num_freqs; i++) {
        const double angle = delta * rope->inv_freq[i]; /* may be many full rotations: too large for f32 */
        angles[i] = (float)cos(angle);
        angles[rope->num_freqs + i] = (float)sin(angle);
    }
}

/* Computes the cosines, then the sines, of distance * inv_freq in f64. */
static void compute_angles(const kvc_rope *rope, int32_t distance, double *angles) {
    for (int32_t i = 0; i < rope->num_freqs; i++) {
        angles[i] = cos(distance * rope->inv_freq[i]);
        angles[rope->num_freqs + i] = sin(distance * rope->inv_freq[i]);
    }
}

void kvc_rope_angles_from(kvc_rope_table *table, const kvc_rope *rope, int32_t delta, float *angles) {
    const int32_t n = rope->num_freqs, rest = delta & (KVC_NEAR - 1), coarse = delta - rest;
    double *a = table->angles, *b = a + kvc_rope_angles_size(rope) * (size_t)(1 + rest);
    if (table->coarse != coarse) compute_angles(rope, coarse, a);
    if (!(table->known >> rest & 1)) compute_angles(rope, rest, b);
    table->coarse = coarse;
    table->known |= (uint64_t)1 << rest;
    for (int32_t i = 0; i < n; i++) { /* cos(x + y) and sin(x + y) */
        angles[i] = (float)(a[i] * b[i] - a[n + i] * b[n + i]);
        angles[n + i] = (float)(a[n + i] * b[i] + a[i] * b[n + i]);
    }
}

/* Rotates pairs (x[i], y[i]), `stride` floats apart; back if sign is -1.  restrict lets compilers vectorise. */
static inline void rotate_pairs(float *restrict x, float *restrict y, int32_t stride, const float *restrict cosines,
                                const float *restrict sines, int32_t n, float sign) {
    for (int32_t i = 0; i < n; i++) {
        const float a = x[i * stride], b = y[i * stride], s = sign * sines[i];
        x[i * stride] = a * cosines[i] - b * s;
        y[i * stride] = b * cosines[i] + a * s;
    }
}

static inline void rotate(const kvc_rope *rope, const float *angles, float *row, float sign) {
    const int32_t n = rope->num_freqs;
    float *x = row + rope->first_dim;
    if (rope->interleaved)
        rotate_pairs(x, x + 1, 2, angles, angles + n, n, sign);
    else
        rotate_pairs(x, x + n, 1, angles, angles + n, n, sign);
}

void kvc_rope_rotate(const kvc_rope *rope, const float *angles, float *row) { rotate(rope, angles, row, 1); }

void kvc_rope_rotate_back(const kvc_rope *rope, const float *angles, float *row) { rotate(rope, angles, row, -1); }

void kvc_rotator_rotate(kvc_rotator *rotator, const kvc_rope *rope, int32_t delta, const kvc_rows *to,
                        const kvc_rows *from, int32_t num_rows, const kvc_layer *layer) {
    const kvc_kernels *kernels = rotator->kernels;
    const int32_t dim = layer->k_dim;
    const kvc_mixing mixing = kvc_mixing_of(layer, KVC_KEYS);
    float *angles = rotator->scratch, *row = angles + kvc_rope_angles_size(rope);
    if (rope != rotator->rope || delta != rotator->delta) compute_angles_f32(rope, delta, angles);
    rotator->rope = rope;
    rotator->delta = delta;
    for (int32_t h = 0; h < layer->num_kv_heads; h++)
        for (int32_t i = 0; i < num_rows; i++) {
            const kvc_rows from_row = kvc_row_of(from, i, h), to_row = kvc_row_of(to, i, h);
            kvc_decode_rows(kernels, row, 0, &from_row, 1, dim);
            /* Quantised keys are stored mixed, by a matrix that is its own inverse. */
            if (mixing.order && from->type >= KVC_FLOAT_TYPES) kernels->hadamard(row, row, dim, mixing);
            kvc_rope_rotate(rope, angles, row);
            if (mixing.order && to->type >= KVC_FLOAT_TYPES) kernels->hadamard(row, row, dim, mixing);
            kvc_encode_rows(kernels, &to_row, row, 0, 1, dim);
        }
}
