/* scratch.h: memory for the length of a call or a batch, of which a cache keeps some for the next one.  All functions
 * are called with the mutex held. */
#ifndef KVC_SCRATCH_H
#define KVC_SCRATCH_H

#include "store/cache.h"

/* Whether scratch of at least `size` bytes is kept. */
int kvc_scratch_has(const kvc_cache *cache, uint64_t size);

/* Returns scratch of at least *size bytes, NULL if there is no memory; *size becomes its size, with which it is given
 * back. */
void *kvc_scratch_take(kvc_cache *cache, uint64_t *size);
void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size);

/* Frees all scratch that is kept. */
void kvc_scratch_free(kvc_cache *cache);

#endif
