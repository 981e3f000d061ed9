/* events.h: what happened to the full blocks of a prefix, in a ring: with the mutex held. */
#ifndef KVC_EVENTS_H
#define KVC_EVENTS_H

#include "kvcache.h"

typedef struct kvc_events {
    kvc_prefix_event *ring; /* [room] */
    int64_t first, num, num_lost;
    int32_t room; /* 0: nothing is noted */
} kvc_events;

/* Notes an event, in place of the oldest one where there is no room. */
void kvc_events_note(kvc_events *events, kvc_prefix_event_kind kind, int32_t begin, const uint8_t *name);

/* Takes the oldest event; returns whether there was one. */
int kvc_events_take(kvc_events *events, kvc_prefix_event *event);

#endif
