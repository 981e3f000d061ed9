/* atfork.h: what keeps caches usable in the child of a process that forks while other threads use them. */
#ifndef KVC_ATFORK_H
#define KVC_ATFORK_H

#include "store/cache.h"

/* To be called before a cache is made, any number of times; not 0: there is no memory. */
int kvc_atfork_init(void);

/* A cache that can be used, until it is about to be freed. */
void kvc_atfork_watch(kvc_cache *cache);
void kvc_atfork_unwatch(kvc_cache *cache);

#endif
