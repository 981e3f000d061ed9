/* read.h: copies stored rows to callers' arrays. */
#ifndef KVC_READ_H
#define KVC_READ_H

#include "cache/check.h"

/* The tools of one thread to copy the rows of a layer. */
typedef struct kvc_reader {
    const kvc_cache *cache;
    int32_t layer;
    int32_t k_type, v_type; /* what rows are converted to: their own types, if the caller wants them raw */
    kvc_rotator rotator;
} kvc_reader;

/* Returns a reader that converts rows for these arrays.  scratch: see kvc_rotator; NULL if keys are not rotated. */
kvc_reader kvc_reader_for(const kvc_cache *cache, int32_t layer, const kvc_rows_out *out, float *scratch);

/* Copies the rows of a run, converted and with keys rotated for the positions they have now, to the rows of the
 * caller's arrays from `row` on. */
void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t row);

/* Fills rows [begin, end) of the caller's arrays with zeros. */
void kvc_reader_clear(const kvc_reader *reader, const kvc_rows_out *out, int64_t begin, int64_t end);

/* Checks arrays for num_rows rows of a layer, and resolves their strides.  name: of the argument.  batches: the batch
 * axes of keys and of values; NULL if there are no batches. */
kvc_status kvc_resolve_rows_out(const kvc_layer *layer, kvc_rows_out *out, const char *name, int64_t num_rows,
                                const kvc_axis batches[2]);

#endif
