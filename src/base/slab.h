/* slab.h: blocks smaller than a huge page, side by side, so that several share one. */
#ifndef KVC_SLAB_H
#define KVC_SLAB_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvc_slab kvc_slab;

/* Memory for one block of `size` bytes, from one of *slabs or a new one; it is taken from the system as it is touched.
 * NULL: there is none. */
void *kvc_slab_take(kvc_slab **slabs, size_t size);

/* Gives it back. */
void kvc_slab_give(kvc_slab **slabs, void *block);

/* Whether the block at *p is from one of these slabs and, from now on, written as a whole.  If so, *p and *size become
 * the huge pages, or none, in which it lies together with blocks beside it that are. */
int kvc_slab_written(kvc_slab **slabs, uint8_t **p, size_t *size);

/* The block at p, if it is from one of these slabs, is not written as a whole any more. */
void kvc_slab_part(kvc_slab **slabs, void *p);

#endif
