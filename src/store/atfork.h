/* atfork.h: keeps caches usable in the child of a process that forks while other threads use them. */
#ifndef KVC_ATFORK_H
#define KVC_ATFORK_H

#include "store/cache.h"

/* Has fork() call this file.  Call before a cache is made, any number of times.  Not 0: there is no memory for that. */
int kvc_atfork_init(void);

/* Adds a cache, once it can be used, to those that fork() locks; takes it out, before it is freed. */
void kvc_atfork_watch(kvc_cache *cache);
void kvc_atfork_unwatch(kvc_cache *cache);

#endif
