/* events.c: what happened to the full blocks of a prefix: see events.h. */
#include "prefix/events.h"

#include <string.h>

void kvc_events_note(kvc_events *events, kvc_prefix_event_kind kind, int32_t begin, const uint8_t *name) {
    if (!events->room) return;
    if (events->num == events->room) {
        events->first = (events->first + 1) % events->room;
        events->num--;
        events->num_lost++;
    }
    kvc_prefix_event *event = &events->ring[(events->first + events->num++) % events->room];
    *event = (kvc_prefix_event){.kind = (int32_t)kind, .begin = begin};
    if (name) memcpy(event->name, name, sizeof event->name);
}

int kvc_events_take(kvc_events *events, kvc_prefix_event *event) {
    if (!events->num) return 0;
    *event = events->ring[events->first];
    events->first = (events->first + 1) % events->room;
    events->num--;
    return 1;
}
