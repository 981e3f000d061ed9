/* atfork.h: handles the process's fork(): keeps caches usable in the child, whatever other threads were doing. */
#ifndef KVC_ATFORK_H
#define KVC_ATFORK_H

#include "cache/cache.h"

/* Registers the handlers of fork().  Call before a cache is made; more calls do nothing.  Returns 0, or an error number
 * if out of memory. */
int kvc_atfork_init(void);

/* Adds a cache, once it can be used, to the list of caches that fork() locks; removes it, before it is freed. */
void kvc_atfork_add(kvc_cache *cache);
void kvc_atfork_remove(kvc_cache *cache);

#endif
