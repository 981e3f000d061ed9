/* copy.c: see copy.h. */
#include "rows/copy.h"

/* What the copies of one call have in common. */
typedef struct transfer {
    const kvc_kernels *kernels;
    int32_t from_type, to_type;
    int32_t order; /* of the matrix that stored rows are multiplied by; 0: by none */
    int32_t dim;
} transfer;

/* Converts columns [first, first + num) of a few rows by way of `buffer`, where they are transformed. */
static void transform_rows(const transfer *x, float *buffer, char *to, int64_t to_stride, const char *from,
                           int64_t from_stride, int64_t num_rows, int32_t first, int32_t num) {
    const kvc_kernels *kernels = x->kernels;
    const int64_t stride = num * (int64_t)sizeof *buffer;
    to += kvc_row_bytes(x->to_type, first);
    from += kvc_row_bytes(x->from_type, first);
    const int lies_ready = x->from_type == KVC_F32 && (num_rows == 1 || from_stride == stride);
    if (!lies_ready) kernels->convert(x->from_type, KVC_F32, buffer, stride, from, from_stride, num_rows, num);
    kernels->hadamard(buffer, lies_ready ? (const void *)from : buffer, (int)num_rows * num, x->order);
    kernels->convert(KVC_F32, x->to_type, to, to_stride, buffer, stride, num_rows, num);
}

static void convert_rows(const transfer *x, char *to, int64_t to_stride, const char *from, int64_t from_stride,
                         int64_t num_rows) {
    if (!x->order || x->from_type == x->to_type) {
        x->kernels->convert(x->from_type, x->to_type, to, to_stride, from, from_stride, num_rows, x->dim);
        return;
    }
    float buffer[KVC_MOST_KEY_ORDER];
    const int32_t most = KVC_MOST_KEY_ORDER;
    const int32_t columns = x->dim < most ? x->dim : most / x->order * x->order, rows = most / columns;
    for (int64_t i = 0, n; i < num_rows; i += n) {
        n = num_rows - i < rows ? num_rows - i : rows;
        for (int32_t d = 0; d < x->dim; d += columns)
            transform_rows(x, buffer, to + i * to_stride, to_stride, from + i * from_stride, from_stride, n, d,
                           x->dim - d < columns ? x->dim - d : columns);
    }
}

static void copy_rows(const transfer *x, int32_t heads, char *to, kvc_strides to_at, const char *from,
                      kvc_strides from_at, int64_t num_rows) {
    /* In a block heads are never closer than rows, so that a side on which they are is the caller's. */
    const int by_row = heads > 1 && (num_rows == 1 || from_at.head < from_at.row || to_at.head < to_at.row);
    if (by_row)
        for (int64_t i = 0; i < num_rows; i++)
            convert_rows(x, to + i * to_at.row, to_at.head, from + i * from_at.row, from_at.head, heads);
    else
        for (int32_t h = 0; h < heads; h++)
            convert_rows(x, to + h * to_at.head, to_at.row, from + h * from_at.head, from_at.row, num_rows);
}

void kvc_copy_keys(const kvc_kernels *kernels, const kvc_layer *layer, void *to, kvc_strides to_at, const void *from,
                   kvc_strides from_at, int64_t num_rows) {
    const transfer x = {kernels, from_at.type, to_at.type, kvc_key_order(layer), layer->k_dim};
    copy_rows(&x, layer->num_kv_heads, to, to_at, from, from_at, num_rows);
}

void kvc_copy_values(const kvc_kernels *kernels, const kvc_layer *layer, void *to, kvc_strides to_at, const void *from,
                     kvc_strides from_at, int64_t num_rows) {
    const transfer x = {kernels, from_at.type, to_at.type, kvc_value_order(layer), layer->v_dim};
    copy_rows(&x, layer->num_kv_heads, to, to_at, from, from_at, num_rows);
}
