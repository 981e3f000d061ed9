/* sketch.c: sketches of keys, by which a token selects rows.  A sketch has two bits for each element of a key, once it
 * is mixed: multiplied by a matrix that is its own inverse.  Fitted types store keys mixed so. */
#include "rows/sketch.h"

#include "rows/copy.h"

kvc_mixing kvc_sketch_mixing(int32_t k_dim) { return (kvc_mixing){kvc_order_for(k_dim, KVC_MOST_KEY_ORDER), 1}; }

enum { MOST_FLOATS = KVC_MOST_KEY_ORDER }; /* that are mixed at once: a row has no more */

/* Makes the sketches of a few keys of one head, or of one token: the first at `to`, the others `stride` bytes apart. */
static void sketch_few(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_rows *keys, uint8_t *to,
                       int64_t stride, int32_t num) {
    const int32_t dim = layer->k_dim, num_floats = num * dim;
    const kvc_mixing stored = kvc_mixing_of(layer, KVC_KEYS);
    float rows[MOST_FLOATS];
    kvc_decode_rows(kernels, rows, dim * (int64_t)sizeof *rows, keys, num, dim);
    if (!stored.has_signs) { /* not of a fitted type: undoes the layer's own transform, and mixes */
        if (stored.order) kernels->hadamard(rows, rows, num_floats, stored);
        kernels->hadamard(rows, rows, num_floats, kvc_sketch_mixing(dim));
    }
    kernels->make_sketches(to, stride, rows, num, dim);
}

void kvc_sketch_rows(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows,
                     int32_t slot, int32_t count) {
    if (!at->sketch_bytes) return;
    const int32_t heads = layer->num_kv_heads, most = MOST_FLOATS / layer->k_dim;
    const int by_row = count < heads; /* takes the heads of one row together, instead of the rows of one head */
    const int32_t num_parts = by_row ? count : heads, num = by_row ? heads : count;
    const int64_t stride = (int64_t)(by_row ? at->head_stride : at->sketch_bytes);
    const kvc_rows keys = kvc_stored_rows(layer, at, rows, slot, KVC_KEYS);
    for (int32_t i = 0; i < num_parts; i++) {
        const kvc_rows part = kvc_rows_part(&keys, i, by_row);
        uint8_t *const to = kvc_sketch_at(at, rows, slot + (by_row ? i : 0), by_row ? 0 : i);
        for (int32_t j = 0; j < num; j += most) {
            const kvc_rows some = kvc_row_of(&part, j, 0);
            sketch_few(kernels, layer, &some, to + j * stride, stride, num - j < most ? num - j : most);
        }
    }
}
