/* slab.h: items of memory side by side in a slab, so that their ends share huge pages. */
#ifndef KVC_SLAB_H
#define KVC_SLAB_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvc_slab kvc_slab;

/* Takes an item of `size` bytes from one of *slabs or from a new slab.  Its memory is taken from the system as it is
 * faulted.  NULL if memory is exhausted. */
void *kvc_slab_take(kvc_slab **slabs, size_t size);

/* Gives an item back. */
void kvc_slab_give(kvc_slab **slabs, void *item);

/* Records whether the item at p is written as a whole.  Does nothing if no slab holds the item. */
void kvc_slab_mark(kvc_slab **slabs, void *p, int is_written);

/* Returns whether written items fill the huge page at p; 0 if no slab holds the page. */
int kvc_slab_fills(kvc_slab **slabs, const void *p);

#endif
