#include "base/slab.h"

#include <stdlib.h>

#include "base/memory.h"

enum { ITEMS = 32 };

/* A mapping of so many blocks, ITEMS or one.  Bit i stands for the i-th. */
struct kvc_slab {
    kvc_slab *next;
    uint8_t *begin;
    size_t item; /* bytes from block to block */
    uint32_t items;
    uint32_t taken, written;
};

static size_t size_of(const kvc_slab *slab) { return slab->items * slab->item; }

static int holds(const kvc_slab *slab, const void *p) { return (uintptr_t)p - (uintptr_t)slab->begin < size_of(slab); }

static int has_room(const kvc_slab *slab, size_t item) {
    return slab->item == item && slab->taken != UINT32_MAX >> (ITEMS - slab->items);
}

/* The slab that holds p; if p is NULL, one with room for an item.  It becomes the first: whoever comes next will
 * probably ask for its neighbour. */
static kvc_slab *find(kvc_slab **slabs, const void *p, size_t item) {
    for (kvc_slab **at = slabs; *at; at = &(*at)->next) {
        kvc_slab *slab = *at;
        if (!(p ? holds(slab, p) : has_room(slab, item))) continue;
        *at = slab->next;
        slab->next = *slabs;
        *slabs = slab;
        return slab;
    }
    return NULL;
}

static kvc_slab *add_slab(kvc_slab **slabs, size_t item) {
    kvc_slab *slab = malloc(sizeof *slab);
    if (!slab) return NULL;
    *slab = (kvc_slab){.next = *slabs, .item = item, .items = ITEMS};
    slab->begin = kvc_pages_map(size_of(slab));
    if (!slab->begin) { /* where addresses are limited, one is better than none */
        slab->items = 1;
        slab->begin = kvc_pages_map(size_of(slab));
    }
    if (!slab->begin) {
        free(slab);
        return NULL;
    }
    return *slabs = slab;
}

static uint32_t bit_of(const kvc_slab *slab, const void *p) {
    return UINT32_C(1) << (size_t)((const uint8_t *)p - slab->begin) / slab->item;
}

void *kvc_slab_take(kvc_slab **slabs, size_t size) {
    const size_t item = (size_t)kvc_align_up(size, kvc_os_page_size());
    kvc_slab *slab = find(slabs, NULL, item);
    if (!slab) slab = add_slab(slabs, item);
    if (!slab) return NULL;
    int i = 0;
    while (slab->taken >> i & 1) i++;
    slab->taken |= UINT32_C(1) << i;
    return slab->begin + (size_t)i * item;
}

void kvc_slab_give(kvc_slab **slabs, void *block) {
    kvc_slab *slab = find(slabs, block, 0);
    slab->taken &= ~bit_of(slab, block);
    slab->written &= ~bit_of(slab, block);
    if (slab->taken) {
        kvc_pages_drop(block, slab->item);
        return;
    }
    *slabs = slab->next;
    kvc_pages_unmap(slab->begin, size_of(slab));
    free(slab);
}

/* Whether all items are written that lie in the huge page; past the last item, none is. */
static int is_written(const kvc_slab *slab, size_t page) {
    const size_t first = page * KVC_HUGE_PAGE / slab->item, last = ((page + 1) * KVC_HUGE_PAGE - 1) / slab->item;
    if (last >= slab->items) return 0;
    for (size_t i = first; i <= last; i++)
        if (!(slab->written >> i & 1)) return 0;
    return 1;
}

int kvc_slab_written(kvc_slab **slabs, uint8_t **p, size_t *size) {
    kvc_slab *slab = find(slabs, *p, 0);
    if (!slab) return 0;
    const size_t at = (size_t)(*p - slab->begin) / slab->item * slab->item;
    size_t page = at / KVC_HUGE_PAGE, end = (at + slab->item - 1) / KVC_HUGE_PAGE + 1; /* one, or two */
    slab->written |= bit_of(slab, *p);
    if (!is_written(slab, page)) page++;
    if (!is_written(slab, end - 1)) end--;
    *p = slab->begin + page * KVC_HUGE_PAGE;
    *size = page < end ? (end - page) * KVC_HUGE_PAGE : 0;
    return 1;
}

void kvc_slab_part(kvc_slab **slabs, void *p) {
    kvc_slab *slab = find(slabs, p, 0);
    if (slab) slab->written &= ~bit_of(slab, p);
}
