/* span.h: rows where they lie, and the holds that keep them there. */
#ifndef KVC_SPAN_H
#define KVC_SPAN_H

#include "store/cache.h"

/* A run as memory. */
kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at);

/* Pins the block of every run; with the mutex held. */
kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out);

#endif
