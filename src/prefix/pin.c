/* pin.c: blocks that are kept, whatever else needs memory: see pin.h. */
#include "prefix/pin.h"

#include <string.h>

static uint64_t size_of(const kvc_pinned *pin) { return sizeof *pin + (uint64_t)pin->num * sizeof(kvc_node *); }

/* Takes memory for a pin of `num` nodes besides those up to `last`, which it lists behind them. */
static kvc_pinned *new_pin(kvc_cache *cache, kvc_node *last, int32_t num) {
    kvc_pinned empty = {.last = last, .num = num, .id = -1};
    for (const kvc_node *node = last; node->parent; node = node->parent) empty.num++;
    kvc_pinned *pin = kvc_memory_alloc(&cache->memory, size_of(&empty), KVC_MEMORY_BOOKKEEPING, -1);
    if (!pin) {
        kvc_set_last_error("out of memory for a pin");
        return NULL;
    }
    *pin = empty;
    for (; last->parent; last = last->parent) pin->nodes[num++] = last;
    return pin;
}

/* Ends a pin that is in no list any more. */
static void end_pin(kvc_cache *cache, kvc_pinned *pin) {
    if (pin->with_state) pin->with_state->num_state_pins--;
    for (int32_t i = pin->num - 1; i >= 0; i--) kvc_node_pin(pin->nodes[i], -1); /* the most recently used ones first */
    kvc_memory_free(&cache->memory, pin, size_of(pin), KVC_MEMORY_BOOKKEEPING, -1);
}

static void add_pin(kvc_prefix *prefix, kvc_pinned *pin) {
    if (pin->with_state) pin->with_state->num_state_pins++;
    for (int32_t i = 0; i < pin->num; i++) kvc_node_pin(pin->nodes[i], 1);
    pin->next = prefix->pins;
    prefix->pins = pin;
}

kvc_pinned *kvc_pin_add(kvc_prefix *prefix, kvc_node *last) {
    kvc_pinned *pin = new_pin(prefix->cache, last, 0);
    if (pin) add_pin(prefix, pin);
    return pin;
}

void kvc_pin_remove(kvc_prefix *prefix, kvc_pinned **at) {
    kvc_pinned *pin = *at;
    *at = pin->next;
    end_pin(prefix->cache, pin);
}

/* ---- pins of prompts --------------------------------------------------------------------------------------------- */

/* Returns where the next pin of the prompt with this name is, from a place in the list on. */
static kvc_pinned **find_from(kvc_pinned **at, const uint8_t *name) {
    while (*at && ((*at)->id != -1 || memcmp((*at)->name, name, KVC_NAME_BYTES))) at = &(*at)->next;
    return at;
}

/* Lists the nodes that hold known tokens or their state, but are not on the path to `last`; returns how many. */
static int32_t list_others(const kvc_match *m, const kvc_node *last, kvc_node **nodes) {
    int32_t num = 0, has_state = !m->with_state;
    for (const kvc_node *node = last; !has_state && node; node = node->parent) has_state = node == m->with_state;
    for (int32_t i = 0; i < m->num && m->pieces[i].begin < m->known; i++) {
        kvc_node *node = kvc_match_node(m, i);
        const kvc_node *path = kvc_match_path(m, m->known);
        while (path->begin > node->begin) path = path->parent;
        if (path == node) continue;
        has_state |= node == m->with_state;
        if (nodes) nodes[num] = node;
        num++;
    }
    if (!has_state && nodes) nodes[num] = m->with_state;
    return num + !has_state;
}

kvc_status kvc_pin_known(kvc_prefix *prefix, const kvc_match *m, const uint8_t *name) {
    kvc_node *last = kvc_match_path(m, m->known);
    kvc_pinned *pin = new_pin(prefix->cache, last, list_others(m, last, NULL));
    if (!pin) return KVC_ERR_NOMEM;
    list_others(m, last, pin->nodes);
    pin->with_state = m->with_state;
    memcpy(pin->name, name, KVC_NAME_BYTES);
    pin->known = m->known;
    pin->num_calls = 1;
    kvc_pinned *covered = NULL; /* they end once this one has begun, so that no node is without a pin meanwhile */
    for (kvc_pinned **at = find_from(&prefix->pins, name), *old; (old = *at); at = find_from(at, name)) {
        pin->num_calls += old->num_calls;
        old->num_calls = 0;
        if (old->known > m->known) {
            at = &old->next;
        } else {
            *at = old->next;
            old->next = covered;
            covered = old;
        }
    }
    add_pin(prefix, pin);
    for (kvc_pinned *old; (old = covered);) {
        covered = old->next;
        end_pin(prefix->cache, old);
    }
    return KVC_OK;
}

void kvc_pin_take_back(kvc_prefix *prefix, const uint8_t *name) {
    kvc_pinned **at = find_from(&prefix->pins, name);
    if (!*at || --(*at)->num_calls) return;
    for (; *at; at = find_from(at, name)) kvc_pin_remove(prefix, at);
}
