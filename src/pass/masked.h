/* masked.h: ranges of positions that no query of a call sees (kvc_hidden), per sequence. */
#ifndef KVC_MASKED_H
#define KVC_MASKED_H

#include "cache/batch.h"

typedef struct kvc_hidden_range {
    int32_t sequence;   /* index into batch->sequences */
    int32_t begin, end; /* positions */
} kvc_hidden_range;

/* What is hidden of one sequence. */
typedef struct kvc_hidden_ranges {
    const kvc_hidden_range *ranges; /* [num] ascending, with positions in between that are not hidden */
    int32_t num;
} kvc_hidden_ranges;

/* Returns element i of a caller's array, whose elements have `size` bytes. */
kvc_hidden kvc_hidden_at(const kvc_hidden *given, size_t size, int32_t i);

/* Returns KVC_ERR_INVALID or KVC_ERR_UNSUPPORTED unless this is an array of ranges of the batch's sequences. */
kvc_status kvc_hidden_check(const kvc_batch *batch, const kvc_hidden *given, size_t size, int32_t num);

/* Sorts an array that was checked into ranges[0 .. num), joins those that touch, and fills in
 * by_sequence[0 .. batch->num_sequences). */
void kvc_hidden_sort(const kvc_batch *batch, const kvc_hidden *given, size_t size, int32_t num,
                     kvc_hidden_range *ranges, kvc_hidden_ranges *by_sequence);

/* Returns the first rows of a run at positions of at least *from that are not hidden (count 0: there are none), and
 * sets *from to where the next ones may begin. */
kvc_run kvc_hidden_next(const kvc_hidden_ranges *hidden, const kvc_run *run, int32_t *from);

#endif
