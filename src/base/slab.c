/* slab.c: items of memory side by side in a slab, which is one mapping, so that their ends share huge pages. */
#include "base/slab.h"

#include <stdlib.h>

#include "base/align.h"
#include "base/pages.h"

enum {
    ITEMS = 64,            /* most items in a slab: one bit each of a uint64_t */
    SLAB_BYTES = 64 << 20, /* addresses of a slab, unless one item needs more */
};

/* A mapping, divided into items of equal size. */
struct kvc_slab {
    kvc_slab *next;
    uint8_t *begin;
    size_t item_bytes;       /* from item to item */
    uint32_t num_items;      /* at most ITEMS */
    uint64_t taken, written; /* bit i: whether item i is */
};

static size_t size_of(const kvc_slab *slab) { return slab->num_items * slab->item_bytes; }

static int holds(const kvc_slab *slab, const void *p) { return (uintptr_t)p - (uintptr_t)slab->begin < size_of(slab); }

static int has_free_item(const kvc_slab *slab, size_t item_bytes) {
    return slab->item_bytes == item_bytes && slab->taken != UINT64_MAX >> (ITEMS - slab->num_items);
}

/* Finds the slab that holds p or, if p is NULL, one with a free item of this size.  Moves it to the front of the list,
 * as the next call probably asks for a neighbour. */
static kvc_slab *find(kvc_slab **slabs, const void *p, size_t item_bytes) {
    for (kvc_slab **at = slabs; *at; at = &(*at)->next) {
        kvc_slab *slab = *at;
        if (!(p ? holds(slab, p) : has_free_item(slab, item_bytes))) continue;
        *at = slab->next;
        slab->next = *slabs;
        *slabs = slab;
        return slab;
    }
    return NULL;
}

static kvc_slab *add_slab(kvc_slab **slabs, size_t item_bytes) {
    kvc_slab *slab = malloc(sizeof *slab);
    if (!slab) return NULL;
    const size_t fit = SLAB_BYTES / item_bytes;
    *slab = (kvc_slab){.next = *slabs, .item_bytes = item_bytes, .num_items = fit > ITEMS ? ITEMS : (uint32_t)fit};
    if (fit) slab->begin = kvc_pages_map(size_of(slab));
    if (!slab->begin) { /* the item is large, or addresses are scarce */
        slab->num_items = 1;
        slab->begin = kvc_pages_map(size_of(slab));
    }
    if (!slab->begin) {
        free(slab);
        return NULL;
    }
    return *slabs = slab;
}

static uint64_t bit_of(const kvc_slab *slab, const void *p) {
    return UINT64_C(1) << (size_t)((const uint8_t *)p - slab->begin) / slab->item_bytes;
}

void *kvc_slab_take(kvc_slab **slabs, size_t size) {
    const size_t item_bytes = (size_t)kvc_align_up(size, kvc_os_page_size());
    kvc_slab *slab = find(slabs, NULL, item_bytes);
    if (!slab) slab = add_slab(slabs, item_bytes);
    if (!slab) return NULL;
    int i = 0;
    while (slab->taken >> i & 1) i++; /* find and add_slab left a free item */
    slab->taken |= UINT64_C(1) << i;
    return slab->begin + (size_t)i * item_bytes;
}

void kvc_slab_give(kvc_slab **slabs, void *item) {
    kvc_slab *slab = find(slabs, item, /* item_bytes */ 0);
    slab->taken &= ~bit_of(slab, item);
    slab->written &= ~bit_of(slab, item);
    if (slab->taken) {
        kvc_pages_drop(item, slab->item_bytes);
        return;
    }
    *slabs = slab->next;
    kvc_pages_unmap(slab->begin, size_of(slab));
    free(slab);
}

void kvc_slab_mark(kvc_slab **slabs, void *p, int is_written) {
    kvc_slab *slab = find(slabs, p, /* item_bytes */ 0);
    if (!slab) return;
    slab->written &= ~bit_of(slab, p);
    if (is_written) slab->written |= bit_of(slab, p);
}

int kvc_slab_fills(kvc_slab **slabs, const void *p) {
    const kvc_slab *slab = find(slabs, p, /* item_bytes */ 0);
    if (!slab) return 0;
    const size_t begin = (size_t)((const uint8_t *)p - slab->begin);
    const size_t first = begin / slab->item_bytes, last = (begin + KVC_HUGE_PAGE - 1) / slab->item_bytes;
    if (last >= slab->num_items) return 0;
    for (size_t i = first; i <= last; i++)
        if (!(slab->written >> i & 1)) return 0;
    return 1;
}
