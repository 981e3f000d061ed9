/* events.c: tells routers which blocks there are: their names, and when they come and go. */
#include "prefix/prefix.h"

#include <string.h>

kvc_status kvc_prefix_names(kvc_prefix *prefix, const kvc_tokens *from, uint8_t *names, int64_t max_names,
                            int64_t *num_names) {
    kvc_tokens tokens;
    const int32_t block = prefix->cache->pools[0].block_size;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (max_names < 0 || (max_names && !names))
        return kvc_fail(KVC_ERR_INVALID, "max_names is %lld%s", (long long)max_names,
                        max_names < 0 ? ": it must be at least 0" : " and names is NULL");
    if (!num_names) return kvc_fail(KVC_ERR_INVALID, "num_names is NULL");
    *num_names = tokens.num_tokens / block;
    kvc_name_blocks(prefix->salt, prefix->root, &tokens, 0, block, *num_names < max_names ? *num_names : max_names,
                    names);
    return KVC_OK;
}

void kvc_prefix_note(kvc_prefix *prefix, kvc_prefix_event_kind kind, const kvc_node *node) {
    if (!prefix || !prefix->max_events) return;
    if (prefix->num_events == prefix->max_events) {
        prefix->first_event = (prefix->first_event + 1) % prefix->max_events;
        prefix->num_events--;
        prefix->num_lost++;
    }
    kvc_prefix_event *event = &prefix->events[(prefix->first_event + prefix->num_events++) % prefix->max_events];
    *event = (kvc_prefix_event){.kind = (int32_t)kind};
    if (!node) return;
    event->begin = node->begin;
    memcpy(event->name, node->name, sizeof event->name);
}

kvc_status kvc_prefix_take_events(kvc_prefix *prefix, kvc_prefix_event *events, size_t event_size, int64_t max_events,
                                  int64_t *num_events, int64_t *num_lost) {
    KVC_TRY(kvc_check_output(events, event_size, max_events, kvc_prefix_event_least_size, sizeof *events, "events"));
    if (!num_events || !num_lost) return kvc_fail(KVC_ERR_INVALID, "num_%s is NULL", num_events ? "lost" : "events");
    if (max_events < 0)
        return kvc_fail(KVC_ERR_INVALID, "max_events is %lld: it must be at least 0", (long long)max_events);
    kvc_lock(prefix->cache);
    for (*num_events = 0; prefix->num_events && *num_events < max_events; prefix->num_events--) {
        const kvc_prefix_event *event = &prefix->events[prefix->first_event];
        kvc_write_struct((char *)events + (size_t)(*num_events)++ * event_size, event_size, event, sizeof *event);
        prefix->first_event = (prefix->first_event + 1) % prefix->max_events;
    }
    *num_lost = prefix->num_lost;
    prefix->num_lost = 0;
    return kvc_unlock(prefix->cache, KVC_OK);
}
