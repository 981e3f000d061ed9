/* span.h: rows where they lie, and the holds that keep them there. */
#ifndef KVC_SPAN_H
#define KVC_SPAN_H

#include "store/cache.h"

/* Returns where the rows of a run lie, as callers see them. */
kvc_span kvc_span_of(const kvc_run *run, const kvc_layout *at);

/* Pins the block of every run, until kvc_hold_free; with the mutex held. */
kvc_status kvc_hold_runs(kvc_cache *cache, const kvc_run *runs, int32_t num_runs, int32_t group, kvc_hold **out);

#endif
