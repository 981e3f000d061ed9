/* masked.h: ranges of positions that no query of a call sees (kvc_masked), per sequence. */
#ifndef KVC_MASKED_H
#define KVC_MASKED_H

#include "cache/batch.h"

typedef struct kvc_masked_range {
    int32_t sequence;   /* index into batch->sequences */
    int32_t begin, end; /* positions; of a group with a stride, rows */
} kvc_masked_range;

/* The masked positions of one sequence. */
typedef struct kvc_masked_ranges {
    const kvc_masked_range *ranges; /* [num] ascending, with positions in between that are not masked */
    int32_t num;
} kvc_masked_ranges;

/* Returns element i of a caller's array, whose elements have `size` bytes. */
kvc_masked kvc_masked_at(const kvc_masked *given, size_t size, int32_t i);

/* Returns KVC_ERR_INVALID or KVC_ERR_UNSUPPORTED unless this is an array of ranges, at least one, of the batch's
 * sequences. */
kvc_status kvc_masked_check(const kvc_batch *batch, const kvc_masked *given, size_t size, int32_t num);

/* Sorts an array that was checked into ranges[0 .. num), for rows of a group, joins those that touch, and fills in
 * by_sequence[0 .. batch->num_sequences). */
void kvc_masked_sort(const kvc_batch *batch, int32_t group, const kvc_masked *given, size_t size, int32_t num,
                     kvc_masked_range *ranges, kvc_masked_ranges *by_sequence);

/* Returns the first consecutive rows of a run, at positions of at least *from, that are not masked; their count may be
 * 0.  Sets *from to where the next rows that are not masked may begin. */
kvc_run kvc_masked_next(const kvc_masked_ranges *masked, const kvc_run *run, int32_t *from);

#endif
