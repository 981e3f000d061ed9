/* transfer.c: see transfer.h. */
#include "store/transfer.h"

void kvc_transfer_rows(const kvc_transfer *x, int64_t num_rows) {
    /* In a block heads are never closer than rows, so that a side on which they are is the caller's. */
    const int by_row = x->heads > 1 && (x->from_head < x->from_row || x->to_head < x->to_row);
    if (by_row)
        for (int64_t i = 0; i < num_rows; i++)
            x->convert(x->from_type, x->to_type, x->to + i * x->to_row, x->to_head, x->from + i * x->from_row,
                       x->from_head, x->heads, x->dim);
    else
        for (int32_t h = 0; h < x->heads; h++)
            x->convert(x->from_type, x->to_type, x->to + h * x->to_head, x->to_row, x->from + h * x->from_head,
                       x->from_row, num_rows, x->dim);
}
