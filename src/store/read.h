/* read.h: copies stored rows to callers' arrays, decoded. */
#ifndef KVC_READ_H
#define KVC_READ_H

#include "store/cache.h"

/* What one thread uses to decode the rows of a layer. */
typedef struct kvc_reader {
    kvc_cache *cache;
    int32_t layer;
    kvc_rotator rotator;
} kvc_reader;

/* Copies the rows of a run, decoded and with keys rotated for the positions they have now, to rows `at` and following
 * of the caller's arrays. */
void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t at);

/* Fills rows [begin, end) of a head with zeros. */
void kvc_clear_rows(char *head, int64_t row_stride, int64_t begin, int64_t end, size_t row_bytes);

/* Copies the caller's struct and checks it. */
kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name);

#endif
