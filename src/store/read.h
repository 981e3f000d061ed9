/* read.h: copies of rows, decoded. */
#ifndef KVC_READ_H
#define KVC_READ_H

#include "store/cache.h"

/* What reads rows of a layer. */
typedef struct kvc_reader {
    kvc_cache *cache;
    int32_t layer;
    kvc_rotator rotator;
} kvc_reader;

/* Copies the rows of a run, decoded, keys turned to where they stand now, to rows `at` and on of the caller's arrays.
 */
void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t at);

/* Zeros in rows [begin, end) of those of one head. */
void kvc_clear_rows(char *head, int64_t row_stride, int64_t begin, int64_t end, size_t row_bytes);

/* Copies and checks the caller's struct. */
kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name);

#endif
