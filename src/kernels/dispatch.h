/* dispatch.h: which kernels this machine runs. */
#ifndef KVC_DISPATCH_H
#define KVC_DISPATCH_H

#include "kernels/kernels.h"

/* Chooses the best table for this machine, or the one that the environment variable KVCACHE_ISA names, if it is not
 * empty.  NULL if that does not run here; *wanted becomes the variable's value then. */
const kvc_kernels *kvc_cpu_kernels(const char **wanted);

/* Returns the level of the cache, 1 or 2, into which rows are best prefetched a tile ahead. */
int kvc_cpu_prefetch_level(void);

#endif
