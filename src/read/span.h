/* span.h: describes rows in place (kvc_span), and holds, which keep them from being moved. */
#ifndef KVC_SPAN_H
#define KVC_SPAN_H

#include "cache/cache.h"

/* Describes the rows of a run, of a group with a stride or 1, as a kvc_span. */
kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at, int32_t stride);

/* Makes a hold, which pins the block of every run until kvc_hold_free; call with the mutex held. */
kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out);

#endif
