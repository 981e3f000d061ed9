/* copy.c: see copy.h. */
#include "rows/copy.h"

#include <string.h>

/* ---- rows of one head, or of one token --------------------------------------------------------------------------- */

/* What the copies of one call have in common. */
typedef struct transfer {
    const kvc_kernels *kernels;
    int32_t order; /* of the matrix that stored rows are multiplied by; 0: by none */
    int32_t dim;
} transfer;

enum { MOST_FLOATS = KVC_MOST_KEY_ORDER }; /* that are decoded at once */

/* Decodes columns [first, first + num) of a few rows. */
static void load_columns(const transfer *x, float *to, int64_t stride, const kvc_rows *from, int64_t num_rows,
                         int32_t first, int32_t num) {
    const char *rows = from->first + kvc_blocks_bytes(from->type, first);
    if (!KVC_TYPES[from->type].has_row_scale) {
        x->kernels->convert(from->type, KVC_F32, to, stride, rows, from->row, num_rows, num);
        return;
    }
    char unpacked[MOST_FLOATS / KVC_QUANT_ELEMENTS * KVC_Q8_0_BYTES];
    x->kernels->unpack(from->type, unpacked, rows, from->row, from->scales, from->scale_row, num_rows, num, NULL);
    x->kernels->convert(KVC_Q8_0, KVC_F32, to, stride, unpacked, (int64_t)kvc_row_bytes(KVC_Q8_0, num), num_rows, num);
}

/* Encodes columns [first, first + num) of a few rows; largest: the magnitudes by which rows are scaled, if they are. */
static void store_columns(const transfer *x, const kvc_rows *to, const float *from, int64_t stride, int64_t num_rows,
                          int32_t first, int32_t num, const float *largest) {
    char *rows = to->first + kvc_blocks_bytes(to->type, first);
    if (!KVC_TYPES[to->type].has_row_scale) {
        x->kernels->convert(KVC_F32, to->type, rows, to->row, from, stride, num_rows, num);
        return;
    }
    for (int64_t i = 0; i < num_rows; i++)
        x->kernels->encode_int8(rows + i * to->row, to->scales + i * to->scale_row,
                                (const float *)(const void *)((const char *)from + i * stride), num, largest[i]);
}

/* Converts a few rows by way of `buffer`, some columns at a time.  Where rows have a scale, their largest elements are
 * found before; in long rows, by a first pass over all columns. */
static void convert_few(const transfer *x, const kvc_rows *to, const kvc_rows *from, int64_t num_rows,
                        int32_t columns) {
    float buffer[MOST_FLOATS], largest[MOST_FLOATS / KVC_QUANT_ELEMENTS] = {0};
    const int scales = KVC_TYPES[to->type].has_row_scale, passes = scales && columns < x->dim ? 2 : 1;
    for (int pass = 0; pass < passes; pass++)
        for (int32_t d = 0; d < x->dim; d += columns) {
            const int32_t num = x->dim - d < columns ? x->dim - d : columns;
            const int64_t stride = num * (int64_t)sizeof *buffer;
            const float *floats = buffer;
            if (from->type == KVC_F32 && (num_rows == 1 || from->row == stride))
                floats = (const float *)(const void *)from->first + d;
            else
                load_columns(x, buffer, stride, from, num_rows, d, num);
            if (x->order) x->kernels->hadamard(buffer, floats, (int)num_rows * num, x->order), floats = buffer;
            for (int64_t i = 0; scales && !pass && i < num_rows; i++) {
                const float most = x->kernels->largest(floats + i * num, num);
                if (most > largest[i]) largest[i] = most;
            }
            if (pass == passes - 1) store_columns(x, to, floats, stride, num_rows, d, num, largest);
        }
}

static void convert_rows(const transfer *x, const kvc_rows *to, const kvc_rows *from, int64_t num_rows) {
    const int scales = KVC_TYPES[to->type].has_row_scale || KVC_TYPES[from->type].has_row_scale;
    if (from->type == to->type || (!x->order && !scales)) {
        x->kernels->convert(from->type, to->type, to->first, to->row, from->first, from->row, num_rows, x->dim);
        for (int64_t i = 0; scales && i < num_rows; i++)
            memcpy(to->scales + i * to->scale_row, from->scales + i * from->scale_row, KVC_SCALE_BYTES);
        return;
    }
    const int32_t most = MOST_FLOATS, columns = x->dim < most ? x->dim : x->order ? most / x->order * x->order : most;
    const int64_t rows = most / columns;
    for (int64_t i = 0; i < num_rows; i += rows) {
        const kvc_rows to_some = kvc_row_of(to, i, 0), from_some = kvc_row_of(from, i, 0);
        convert_few(x, &to_some, &from_some, num_rows - i < rows ? num_rows - i : rows, columns);
    }
}

/* ---- rows of several heads --------------------------------------------------------------------------------------- */

kvc_rows kvc_row_of(const kvc_rows *rows, int64_t i, int64_t h) {
    kvc_rows row = *rows;
    row.first += i * rows->row + h * rows->head;
    row.scales += i * rows->scale_row + h * rows->head;
    return row;
}

/* Returns the rows of head i; or row i of all heads, as if heads were rows. */
static kvc_rows part_of(const kvc_rows *rows, int64_t i, int by_row) {
    kvc_rows part = kvc_row_of(rows, by_row ? i : 0, by_row ? 0 : i);
    if (by_row) part.row = part.scale_row = rows->head;
    return part;
}

void kvc_copy_rows(const kvc_kernels *kernels, const kvc_layer *layer, int is_value, const kvc_rows *to,
                   const kvc_rows *from, int64_t num_rows) {
    const transfer x = {kernels, is_value ? kvc_value_order(layer) : kvc_key_order(layer),
                        is_value ? layer->v_dim : layer->k_dim};
    const int32_t heads = layer->num_kv_heads;
    /* In a block heads are never closer than rows, so that a side on which they are is the caller's. */
    const int by_row = heads > 1 && (num_rows == 1 || from->head < from->row || to->head < to->row);
    for (int64_t i = 0; i < (by_row ? num_rows : heads); i++) {
        const kvc_rows to_part = part_of(to, i, by_row), from_part = part_of(from, i, by_row);
        convert_rows(&x, &to_part, &from_part, by_row ? heads : num_rows);
    }
}

void kvc_decode_rows(const kvc_kernels *kernels, float *to, int64_t stride, const kvc_rows *from, int64_t num_rows,
                     int32_t dim) {
    const transfer x = {kernels, 0, dim};
    const kvc_rows floats = kvc_given_rows(KVC_F32, to, stride, 0, dim);
    convert_rows(&x, &floats, from, num_rows);
}

void kvc_encode_rows(const kvc_kernels *kernels, const kvc_rows *to, const float *from, int64_t stride,
                     int64_t num_rows, int32_t dim) {
    const transfer x = {kernels, 0, dim};
    const kvc_rows floats = kvc_given_rows(KVC_F32, from, stride, 0, dim);
    convert_rows(&x, to, &floats, num_rows);
}

kvc_rows kvc_given_rows(int32_t type, const void *first, int64_t row, int64_t head, int32_t dim) {
    char *const rows = (char *)first;
    char *const scales = KVC_TYPES[type].has_row_scale ? rows + kvc_blocks_bytes(type, dim) : rows;
    return (kvc_rows){type, rows, row, head, scales, row};
}

kvc_rows kvc_stored_rows(const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows, int32_t slot,
                         int is_value) {
    const size_t bytes = is_value ? at->v_row_bytes : at->k_row_bytes;
    char *const start = (char *)rows;
    return (kvc_rows){is_value ? layer->v_type : layer->k_type,
                      start + (is_value ? at->v_offset : at->k_offset) + (size_t)slot * bytes,
                      (int64_t)bytes,
                      (int64_t)at->head_stride,
                      start + (is_value ? at->v_scales : at->k_scales) + (size_t)slot * KVC_SCALE_BYTES,
                      KVC_SCALE_BYTES};
}
