/* pin.c: blocks that are kept, whatever else needs memory: see pin.h.
 *
 * A pin belongs to a prompt, and lists the nodes (blocks) that it pins: first those beside the path, whose rows the
 * prompt matched as well, then the path from the last node up to the root.  If a prompt is pinned again when fewer of
 * its tokens are known, the old pin stays, too.  The set of pins is sorted by the names of prompts, and a prompt's pins
 * by the tokens that they know, the fewest first.  Only a prompt's first pin counts the calls. */
#include "prefix/pin.h"

#include <string.h>

#include "space/evict.h"

/* Returns the bytes of a pin's list, which count for max_bytes. */
static int64_t counted_bytes(const kvc_pinned *pin) { return pin->room * (int64_t)sizeof(kvc_node *); }

static uint64_t size_of(const kvc_pinned *pin) { return sizeof *pin + (uint64_t)counted_bytes(pin); }

/* Takes memory for a pin of `num` nodes besides those up to `last`, which it lists behind them. */
static kvc_pinned *new_pin(kvc_cache *cache, kvc_node *last, int32_t num) {
    kvc_pinned empty = {.room = num};
    for (const kvc_node *node = last; node->parent; node = node->parent) empty.room++;
    kvc_pinned *pin = kvc_memory_alloc(&cache->memory, size_of(&empty), KVC_MEMORY_BOOKKEEPING, -1);
    if (!pin) {
        kvc_set_last_error("out of memory for a pin");
        return NULL;
    }
    *pin = empty;
    cache->prefixes.prompt_bytes += counted_bytes(pin);
    for (; last->parent; last = last->parent) pin->nodes[num++] = last;
    return pin;
}

static void begin_pin(kvc_pinned *pin) {
    if (pin->with_state) kvc_checkpoints_pin(&pin->with_state->tree->checkpoints, pin->with_state, 1);
    for (; pin->num < pin->room; pin->num++) kvc_node_pin(pin->nodes[pin->num], 1);
}

/* Ends the pin of the last node and of the state, which may free their nodes. */
static void unpin_last(kvc_pinned *pin) {
    if (pin->with_state) kvc_checkpoints_pin(&pin->with_state->tree->checkpoints, pin->with_state, -1);
    pin->with_state = NULL;
    kvc_node_pin(pin->nodes[--pin->num], -1);
}

/* Ends a pin that is in no list and no set. */
static void end_pin(kvc_cache *cache, kvc_pinned *pin) {
    while (pin->num) unpin_last(pin);
    cache->prefixes.prompt_bytes -= counted_bytes(pin);
    kvc_memory_free(&cache->memory, pin, size_of(pin), KVC_MEMORY_BOOKKEEPING, -1);
}

/* A place in the set of pins: a pin goes before the other pins of its prompt. */
typedef struct place {
    kvc_links *above;
    int side;
} place;

/* Returns the pin that knows the fewest tokens of the prompt with a name; NULL if the prompt has no pin. */
static kvc_pinned *find(const kvc_sorted *pins, const uint8_t *name, place *to) {
    kvc_pinned *found = NULL;
    *to = (place){0};
    for (kvc_links *next = pins->root; next; next = to->above->below[to->side]) {
        kvc_pinned *pin = (kvc_pinned *)(void *)next;
        const int order = memcmp(pin->name, name, KVC_NAME_BYTES);
        to->above = next;
        to->side = order < 0;
        if (!order) found = pin; /* and looks for one before it, at side 0 */
    }
    return found;
}

/* Returns how many pieces to pin: those that begin among the known tokens.  If they end before the last known token,
 * the next piece, too: fewer tokens would be known without it. */
static int32_t count_pieces(const kvc_match *m) {
    int32_t num = 0, end = 0;
    for (; num < m->num && m->pieces[num].begin < m->known; num++)
        if (m->pieces[num].end > end) end = m->pieces[num].end;
    return num + (num < m->num && end < m->known);
}

/* Lists the nodes of the pieces to pin, and the node with the state, but not those on the path to `last`.  Returns how
 * many; nodes NULL: counts them only. */
static int32_t list_others(const kvc_match *m, const kvc_node *last, kvc_node **nodes) {
    const int32_t end = count_pieces(m);
    int32_t num = 0, has_state = !m->with_state; /* is listed, or on the path, or there is none */
    for (const kvc_node *node = last; !has_state && node; node = node->parent) has_state = node == m->with_state;
    const kvc_node *path = last;
    for (int32_t i = end - 1; i >= 0; i--) {
        kvc_node *node = kvc_match_node(m, i);
        while (path->begin > node->begin) path = path->parent;
        if (path == node) continue;
        has_state |= node == m->with_state;
        if (nodes) nodes[num] = node;
        num++;
    }
    if (!has_state && nodes) nodes[num] = m->with_state;
    return num + !has_state;
}

/* Adds a pin to the set, and ends the pins of the same prompt that know no more tokens. */
static void replace_others(kvc_prefix *prefix, kvc_pinned *pin) {
    kvc_sorted *pins = &prefix->tree->pins;
    kvc_pinned *covered = NULL;
    place to;
    for (kvc_pinned *old; (old = find(pins, pin->name, &to));) {
        pin->num_calls += old->num_calls;
        old->num_calls = 0;
        if (old->known > pin->known) break;
        kvc_sorted_remove(pins, &old->links);
        old->next = covered;
        covered = old;
    }
    kvc_sorted_insert(pins, &pin->links, to.above, to.side);
    for (kvc_pinned *old; (old = covered);) {
        covered = old->next;
        end_pin(prefix->cache, old);
    }
}

/* Returns the bytes of the pins of a prompt that know at most so many tokens. */
static int64_t bytes_of(const kvc_sorted *pins, const uint8_t *name, int32_t known) {
    int64_t bytes = 0;
    place to;
    const kvc_pinned *pin = find(pins, name, &to);
    for (; pin && !memcmp(pin->name, name, KVC_NAME_BYTES) && pin->known <= known;
         pin = (const kvc_pinned *)(const void *)kvc_sorted_beside(&pin->links, KVC_HIGH))
        bytes += counted_bytes(pin);
    return bytes;
}

kvc_status kvc_pin_known(kvc_prefix *prefix, const kvc_match *m, const uint8_t *name) {
    kvc_cache *cache = prefix->cache;
    kvc_node *last = kvc_match_path(m, m->known);
    const int64_t replaced = bytes_of(&prefix->tree->pins, name, m->known);
    kvc_pinned *pin = new_pin(cache, last, list_others(m, last, /* only count */ NULL));
    if (!pin) return KVC_ERR_NOMEM;
    list_others(m, last, pin->nodes);
    pin->with_state = m->with_state;
    memcpy(pin->name, name, KVC_NAME_BYTES);
    pin->known = m->known;
    pin->num_calls = 1;
    begin_pin(pin);                           /* before others end, so that no node is without a pin meanwhile */
    cache->prefixes.prompt_bytes -= replaced; /* the pins that end need no room */
    const kvc_need need = {.cache = cache, .what = "pinning a prompt"};
    const kvc_status status = kvc_make_room(&need);
    cache->prefixes.prompt_bytes += replaced;
    if (status == KVC_OK)
        replace_others(prefix, pin);
    else
        end_pin(cache, pin);
    return status;
}

void kvc_pin_take_back(kvc_prefix *prefix, const uint8_t *name) {
    kvc_sorted *pins = &prefix->tree->pins;
    place to;
    kvc_pinned *pin = find(pins, name, &to);
    if (!pin || --pin->num_calls) return;
    for (; pin; pin = find(pins, name, &to)) {
        kvc_sorted_remove(pins, &pin->links);
        end_pin(prefix->cache, pin);
    }
}

int kvc_pins_end_some(kvc_tree *tree, int num) {
    for (kvc_pinned *pin; num > 0 && (pin = (kvc_pinned *)(void *)tree->pins.root); num--) {
        if (pin->num > 1) {
            unpin_last(pin);
        } else { /* with its last node, the pin ends */
            kvc_sorted_remove(&tree->pins, &pin->links);
            end_pin(tree->cache, pin);
        }
    }
    return tree->pins.root != NULL;
}
