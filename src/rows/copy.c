/* copy.c: copies rows between a block and a caller's arrays, and converts their types.  Mixed rows are stored
 * multiplied by a matrix of `order` columns, which is its own inverse (order 0: by none).  An element of a quantised
 * row is stored as a code, which stands for a level times a scale.  A type with row scales has one scale for a row,
 * apart from its codes.  A fitted type has it fitted to all codes: it minimises the squared error. */
#include "rows/copy.h"

#include <math.h>
#include <string.h>

/* ---- rows of one head, or of one token --------------------------------------------------------------------------- */

/* Arguments that all copies of one call share. */
typedef struct transfer {
    const kvc_kernels *kernels;
    kvc_mixing mixing; /* of stored rows */
    int32_t dim;
} transfer;

enum {
    MOST_FLOATS = KVC_MOST_KEY_ORDER, /* that are decoded at once */
    MOST_ROWS = MOST_FLOATS / KVC_QUANT_ELEMENTS
};

/* Decodes columns [first, first + num) of a few rows to f32, `stride` bytes apart. */
static void load_columns(const transfer *x, float *to, int64_t stride, const kvc_rows *from, int64_t num_rows,
                         int32_t first, int32_t num) {
    const char *rows = from->first + kvc_blocks_bytes(from->type, first);
    if (!KVC_TYPES[from->type].has_row_scale) {
        x->kernels->convert(from->type, KVC_F32, to, stride, rows, from->row, num_rows, num);
        return;
    }
    char unpacked[MOST_FLOATS / KVC_QUANT_ELEMENTS * KVC_Q8_0_BYTES]; /* q8_0, whose blocks have scales of their own */
    x->kernels->unpack(from->type, unpacked, rows, from->row, from->scales, from->scale_row, num_rows, num,
                       /* minima */ NULL);
    x->kernels->convert(KVC_Q8_0, KVC_F32, to, stride, unpacked, (int64_t)kvc_row_bytes(KVC_Q8_0, num), num_rows, num);
}

/* Findings about a row, by which it is scaled. */
typedef struct fit {
    float largest; /* magnitude */
    float unit;    /* what a code or level of 1 stands for */
    kvc_level_sums sums;
} fit;

static float scale_of(int32_t type, const fit *row) {
    if (!KVC_TYPES[type].is_fitted) return row->unit;
    const float scale = kvc_add_up(row->sums.products) / kvc_add_up(row->sums.squares);
    return scale <= KVC_LARGEST_F16 ? scale : NAN;
}

/* Returns by how much a row of the best scale has a smaller squared error than a row of zeros. */
static float merit_of(const kvc_level_sums *sums) {
    const float products = kvc_add_up(sums->products);
    return products * products / kvc_add_up(sums->squares);
}

/* Encodes the first num elements of a row, a multiple of KVC_QUANT_ELEMENTS, in the better of two units.  With few
 * levels, it matters where the other elements fall, not only the largest. */
static void encode_in_best_unit(const transfer *x, char *to, const char *from, int32_t num, fit *row) {
    static const float UNITS[2] = {0.96f, 1.06f};
    char other[MOST_FLOATS / 2];
    kvc_level_sums sums[2] = {{{0}, {0}}, {{0}, {0}}};
    x->kernels->encode(KVC_INT4, to, from, num, row->unit * UNITS[0], &sums[0]);
    x->kernels->encode(KVC_INT4, other, from, num, row->unit * UNITS[1], &sums[1]);
    const float merits[2] = {merit_of(&sums[0]), merit_of(&sums[1])}; /* no more precise than a float, on any machine */
    const int best = merits[1] > merits[0];
    if (best) memcpy(to, other, kvc_blocks_bytes(KVC_INT4, num));
    row->unit *= UNITS[best];
    row->sums = sums[best];
}

/* Encodes columns [first, first + num) of a few rows; fits: of rows with a scale, else NULL. */
static void store_columns(const transfer *x, const kvc_rows *to, const float *from, int64_t stride, int64_t num_rows,
                          int32_t first, int32_t num, fit *fits) {
    char *rows = to->first + kvc_blocks_bytes(to->type, first);
    if (!fits) {
        x->kernels->convert(KVC_F32, to->type, rows, to->row, from, stride, num_rows, num);
        return;
    }
    for (int64_t i = 0; i < num_rows; i++) {
        char *const row = rows + i * to->row;
        const char *const floats = (const char *)from + i * stride;
        if (first == 0) fits[i].unit = fits[i].largest / 127; /* levels are for such a unit */
        if (first == 0 && to->type == KVC_INT4)
            encode_in_best_unit(x, row, floats, num, &fits[i]);
        else
            x->kernels->encode(to->type, row, floats, num, fits[i].unit, &fits[i].sums);
    }
}

static void store_scales(const transfer *x, const kvc_rows *to, const fit *fits, int num_rows) {
    float scales[MOST_ROWS];
    char rounded[MOST_ROWS][KVC_SCALE_BYTES];
    for (int i = 0; i < num_rows; i++) scales[i] = scale_of(to->type, &fits[i]);
    x->kernels->convert(KVC_F32, KVC_F16, rounded, 0, scales, 0, 1, num_rows);
    for (int i = 0; i < num_rows; i++) memcpy(to->scales + i * to->scale_row, rounded[i], KVC_SCALE_BYTES);
}

/* Converts a few rows by way of `buffer`, some columns at a time.  If rows have a scale, their largest elements are
 * found first: in rows of more columns than the buffer takes, by a first pass that stores nothing. */
static void convert_few(const transfer *x, const kvc_rows *to, const kvc_rows *from, int64_t num_rows,
                        int32_t columns) {
    float buffer[MOST_FLOATS];
    fit fits[MOST_ROWS];
    const int scales = KVC_TYPES[to->type].has_row_scale, passes = scales && columns < x->dim ? 2 : 1;
    if (scales) memset(fits, 0, (size_t)num_rows * sizeof *fits);
    for (int pass = 0; pass < passes; pass++)
        for (int32_t d = 0; d < x->dim; d += columns) {
            const int32_t num = x->dim - d < columns ? x->dim - d : columns;
            const int64_t stride = num * (int64_t)sizeof *buffer;
            const float *floats = buffer;
            if (from->type == KVC_F32 && (num_rows == 1 || from->row == stride))
                floats = (const float *)(const void *)from->first + d;
            else
                load_columns(x, buffer, stride, from, num_rows, d, num);
            if (x->mixing.order) x->kernels->hadamard(buffer, floats, (int)num_rows * num, x->mixing), floats = buffer;
            for (int64_t i = 0; scales && !pass && i < num_rows; i++) {
                const float most = x->kernels->largest(floats + i * num, num);
                if (most > fits[i].largest) fits[i].largest = most;
            }
            if (pass == passes - 1) store_columns(x, to, floats, stride, num_rows, d, num, scales ? fits : NULL);
        }
    if (scales) store_scales(x, to, fits, (int)num_rows);
}

/* Copies rows whose elements stay as they are, and decodes and encodes others, a buffer full at a time. */
static void convert_rows(const transfer *x, const kvc_rows *to, const kvc_rows *from, int64_t num_rows) {
    const int scales = KVC_TYPES[to->type].has_row_scale || KVC_TYPES[from->type].has_row_scale;
    if (from->type == to->type || (!x->mixing.order && !scales)) {
        x->kernels->convert(from->type, to->type, to->first, to->row, from->first, from->row, num_rows, x->dim);
        for (int64_t i = 0; scales && i < num_rows; i++)
            memcpy(to->scales + i * to->scale_row, from->scales + i * from->scale_row, KVC_SCALE_BYTES);
        return;
    }
    const int32_t most = MOST_FLOATS, order = x->mixing.order,
                  columns = x->dim < most ? x->dim
                            : order       ? most / order * order
                                          : most;
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

kvc_rows kvc_rows_part(const kvc_rows *rows, int64_t i, int by_row) {
    kvc_rows part = kvc_row_of(rows, by_row ? i : 0, by_row ? 0 : i);
    if (by_row) part.row = part.scale_row = rows->head;
    return part;
}

void kvc_copy_rows(const kvc_kernels *kernels, const kvc_layer *layer, int is_value, const kvc_rows *to,
                   const kvc_rows *from, int64_t num_rows) {
    const transfer x = {kernels, kvc_mixing_of(layer, is_value), is_value ? layer->v_dim : layer->k_dim};
    const int32_t heads = layer->num_kv_heads;
    /* Goes row by row where the caller's array has a row's heads side by side: in a block, they lie further apart. */
    const int by_row = heads > 1 && (num_rows == 1 || from->head < from->row || to->head < to->row);
    for (int64_t i = 0; i < (by_row ? num_rows : heads); i++) {
        const kvc_rows to_part = kvc_rows_part(to, i, by_row), from_part = kvc_rows_part(from, i, by_row);
        convert_rows(&x, &to_part, &from_part, by_row ? heads : num_rows);
    }
}

void kvc_decode_rows(const kvc_kernels *kernels, float *to, int64_t stride, const kvc_rows *from, int64_t num_rows,
                     int32_t dim) {
    const transfer x = {kernels, {0, 0}, dim};
    const kvc_rows floats = kvc_given_rows(KVC_F32, to, stride, 0, dim);
    convert_rows(&x, &floats, from, num_rows);
}

void kvc_encode_rows(const kvc_kernels *kernels, const kvc_rows *to, const float *from, int64_t stride,
                     int64_t num_rows, int32_t dim) {
    const transfer x = {kernels, {0, 0}, dim};
    const kvc_rows floats = kvc_given_rows(KVC_F32, from, stride, 0, dim);
    convert_rows(&x, to, &floats, num_rows);
}

kvc_rows kvc_given_rows(int32_t type, const void *first, int64_t row_stride, int64_t head_stride, int32_t dim) {
    char *const rows = (char *)first;
    char *const scales = KVC_TYPES[type].has_row_scale ? rows + kvc_blocks_bytes(type, dim) : rows;
    return (kvc_rows){type, rows, row_stride, head_stride, scales, row_stride};
}

kvc_rows kvc_stored_rows(const kvc_layer *layer, const kvc_layout *at, const uint8_t *rows, int32_t slot,
                         int is_value) {
    const size_t bytes = is_value ? at->v_row_bytes : at->k_row_bytes;
    char *const start = (char *)rows;
    const int64_t row = (int64_t)bytes, head = (int64_t)at->head_stride;
    char *const first = start + (is_value ? at->v_offset : at->k_offset) + (size_t)slot * bytes;
    char *const scales = start + (is_value ? at->v_scales : at->k_scales) + (size_t)slot * KVC_SCALE_BYTES;
    return (kvc_rows){is_value ? layer->v_type : layer->k_type, first, row, head, scales, KVC_SCALE_BYTES};
}
