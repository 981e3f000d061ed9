/* scratch.h: memory for the length of a call or a batch; a cache keeps some of it for the next one.  All functions are
 * called with the mutex held. */
#ifndef KVC_SCRATCH_H
#define KVC_SCRATCH_H

#include "cache/cache.h"

/* Returns whether scratch of at least `size` bytes is kept. */
int kvc_scratch_has(const kvc_cache *cache, uint64_t size);

/* Takes scratch of at least *size bytes, NULL if out of memory, and sets *size to its size; gives it back, with that
 * size. */
void *kvc_scratch_take(kvc_cache *cache, uint64_t *size);
void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size);

/* Frees all scratch that is kept. */
void kvc_scratch_free(kvc_cache *cache);

#endif
