/* stride.h: the rows of a layer group with a stride.
 *
 * A layer group with a stride has a row for each block of `stride` positions.  Rows have numbers.  Row r belongs to the
 * positions [r * stride, (r + 1) * stride), and stands at the last one.  Lists of runs have these numbers in place of
 * positions, and so has everything that walks them.  With a stride of 1, both are the same.
 */
#ifndef KVC_STRIDE_H
#define KVC_STRIDE_H

#include <stdint.h>

#include "base/compiler.h"

/* The functions ask for a stride of 1 first: a division takes longer than the rest of most loops that they are in. */

/* Returns the number of rows that stand below a position: the number of the first row that does not. */
static inline int32_t kvc_rows_below(int32_t position, int32_t stride) {
    return stride == 1 ? position : position / stride;
}

/* Returns the position of a row. */
static inline int32_t kvc_position_of(int32_t row, int32_t stride) { return row * stride + (stride - 1); }

/* Returns the last row that a query at a position sees, where it sees no later ones; -1: none. */
static inline int32_t kvc_last_row(int32_t position, int32_t stride) {
    return stride == 1 ? position : (int32_t)(((int64_t)position + 1) / stride) - 1;
}

/* Returns whether a token at a position has a row. */
static inline int kvc_has_row_at(int32_t position, int32_t stride) { return position % stride == stride - 1; }

/* Returns how many of the tokens at these positions have a row. */
static inline int32_t kvc_count_rows_at(const int32_t *positions, int32_t num_tokens, int32_t stride) {
    int32_t num = 0;
    for (int32_t i = 0; i < num_tokens; i++) num += kvc_has_row_at(positions[i], stride);
    return num;
}

/* Returns how many of the tokens at these positions there are up to the one with the num_rows-th row, or all if they
 * have fewer rows.  The Python module calls it. */
KVC_UNUSED static inline int32_t kvc_tokens_with_rows(const int32_t *positions, int32_t num_tokens, int32_t stride,
                                                      int64_t num_rows) {
    int32_t num = 0;
    for (; num < num_tokens && num_rows > 0; num++) num_rows -= kvc_has_row_at(positions[num], stride);
    return num;
}

#endif
