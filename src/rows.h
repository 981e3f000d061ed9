/* rows.h: copies of rows, decoded. */
#ifndef KVC_ROWS_H
#define KVC_ROWS_H

#include "cache.h"

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

/* With the mutex held. */
kvc_status kvc_reader_new(kvc_cache *cache, int32_t layer, kvc_reader *reader);
void kvc_reader_free(kvc_reader *reader);

/* Copies the rows of a run, decoded, keys turned to where they stand now, to rows `at` and on of the caller's arrays.
 */
void kvc_reader_copy(kvc_reader *reader, const kvc_run *run, const kvc_rows_out *out, int64_t at);

/* Copies and checks the caller's struct. */
kvc_status kvc_check_rows_out(const kvc_rows_out *given, kvc_rows_out *out, const char *name);

#endif
