/* sketch.c: see sketch.h. */
#include "rows/sketch.h"

#include <math.h>
#include <string.h>

#include "rows/copy.h"

enum {
    MOST_FLOATS = KVC_MOST_KEY_ORDER, /* that are encoded at once: a row has no more */
    MOST_ROWS = MOST_FLOATS / KVC_QUANT_ELEMENTS
};

static const float THRESHOLD = 0.98f;

kvc_mixing kvc_sketch_mixing(int32_t k_dim) { return (kvc_mixing){kvc_order_for(k_dim, KVC_MOST_KEY_ORDER), 1}; }

/* Writes the codes of a block. */
static void store_codes(uint8_t *to, const float *y, float most) {
    enum { BYTES = KVC_QUANT_ELEMENTS / 4 };
    uint8_t codes[KVC_QUANT_ELEMENTS];
    uint64_t quarters[4];
    for (int i = 0; i < KVC_QUANT_ELEMENTS; i++) codes[i] = (uint8_t)((y[i] > -most) + (y[i] > 0) + (y[i] > most));
    memcpy(quarters, codes, sizeof quarters);
    quarters[0] |= quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6; /* within bytes, as codes are below 4 */
    memcpy(to, quarters, BYTES);
}

/* Writes the codes of a mixed key, and returns the scale.  Sums are of every KVC_LANES-th element, so that all
 * compilers round alike. */
static float encode(uint8_t *to, const float *y, int32_t dim) {
    float squares[KVC_LANES] = {0}, products[KVC_LANES] = {0};
    for (int32_t d = 0; d < dim; d += KVC_LANES)
        for (int i = 0; i < KVC_LANES; i++) {
            const float square = y[d + i] * y[d + i];
            squares[i] += square;
        }
    const float sum = kvc_add_up(squares), most = THRESHOLD * sqrtf(sum / (float)dim);
    for (int32_t d = 0; d < dim; d += KVC_LANES)
        for (int i = 0; i < KVC_LANES; i++) {
            const float size = fabsf(y[d + i]), half = size * 0.5f, more = y[d + i] > most || y[d + i] <= -most ? size : 0;
            products[i] += half;
            products[i] += more;
        }
    for (int32_t d = 0; d < dim; d += KVC_QUANT_ELEMENTS) store_codes(to + d / 4, y + d, most);
    const float product = kvc_add_up(products), scale = product == 0 ? 0 : sum / product;
    return scale > KVC_LARGEST_F16 ? KVC_LARGEST_F16 : scale;
}

/* Makes the sketches of a few keys of one head, which lie one after the other. */
static void sketch_few(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_rows *keys, uint8_t *to,
                       int32_t num_rows) {
    const int32_t dim = layer->k_dim;
    const kvc_mixing stored = kvc_mixing_of(layer, 0), wanted = kvc_sketch_mixing(dim);
    const size_t bytes = kvc_sketch_bytes(dim);
    float rows[MOST_FLOATS], scales[MOST_ROWS];
    char rounded[MOST_ROWS][KVC_SCALE_BYTES];
    kvc_decode_rows(kernels, rows, dim * (int64_t)sizeof *rows, keys, num_rows, dim);
    if (!stored.has_signs) { /* stored keys of other types are mixed as sketches are */
        if (stored.order) kernels->hadamard(rows, rows, num_rows * dim, stored);
        kernels->hadamard(rows, rows, num_rows * dim, wanted);
    }
    for (int32_t i = 0; i < num_rows; i++) scales[i] = encode(to + (size_t)i * bytes, rows + i * dim, dim);
    kernels->convert(KVC_F32, KVC_F16, rounded, 0, scales, 0, 1, num_rows);
    for (int32_t i = 0; i < num_rows; i++)
        memcpy(to + (size_t)(i + 1) * bytes - KVC_SCALE_BYTES, rounded[i], KVC_SCALE_BYTES);
}

void kvc_sketch_rows(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows,
                     int32_t slot, int32_t count) {
    if (!at->sketch_bytes) return;
    const int32_t most = MOST_FLOATS / layer->k_dim;
    const kvc_rows keys = kvc_stored_rows(layer, at, rows, slot, 0);
    for (int32_t h = 0; h < layer->num_kv_heads; h++)
        for (int32_t i = 0; i < count; i += most) {
            const kvc_rows some = kvc_row_of(&keys, i, h);
            sketch_few(kernels, layer, &some, kvc_sketch_at(at, rows, slot + i, h),
                       count - i < most ? count - i : most);
        }
}
