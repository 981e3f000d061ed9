/* copy.h: copies the rows of several heads between a block and a caller's arrays. */
#ifndef KVC_COPY_H
#define KVC_COPY_H

#include "kernels/kernels.h"

/* A copy of keys, or of values: addresses are those of the first row of head 0, strides are in bytes. */
typedef struct kvc_transfer {
    const kvc_kernels *kernels;
    int32_t from_type, to_type;
    int32_t order; /* of the matrix that stored rows are multiplied by (hadamard_order.h); 0: by none */
    char *to;
    const char *from;
    int64_t to_row, to_head, from_row, from_head;
    int32_t heads, dim;
} kvc_transfer;

/* Converts num_rows rows of each head, going through the caller's array in address order.  Rows are transformed where
 * they are quantised or decoded, and not where their type stays. */
void kvc_transfer_rows(const kvc_transfer *x, int64_t num_rows);

#endif
