/* slab.h: items of memory smaller than a huge page, side by side in a slab, so that several share a huge page. */
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

/* Records that the item at *p is written as a whole.  Sets *p and *size to the huge pages, or none, that it fills
 * together with written items beside it.  Returns 0, and changes nothing, if no slab holds the item. */
int kvc_slab_mark_written(kvc_slab **slabs, uint8_t **p, size_t *size);

/* Forgets that the item at p, if it is from these slabs, is written. */
void kvc_slab_clear_written(kvc_slab **slabs, void *p);

#endif
