/* rows.h: copies of rows, decoded. */
#ifndef KVC_ROWS_H
#define KVC_ROWS_H

#include "store/cache.h"

/* A run as memory. */
kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at);

/* Pins the block of every run; with the mutex held. */
kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out);

/* What reads rows of a layer. */
typedef struct kvc_reader {
    kvc_cache *cache;
    int32_t layer;
    kvc_turner turner;
} kvc_reader;

/* Copies the rows of a run, decoded, keys turned to where they stand now, to rows `at` and on of the caller's arrays.
 */
void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t at);

/* Zeros in rows [begin, end) of those of one head. */
void kvc_clear_rows(char *head, int64_t row_stride, int64_t begin, int64_t end, size_t row_bytes);

/* Copies and checks the caller's struct. */
kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name);

#endif
