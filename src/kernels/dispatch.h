/* dispatch.h: which kernels this machine can run. */
#ifndef KVC_CPU_H
#define KVC_CPU_H

#include "kernels/kernels.h"

/* The best table for this machine, or the one that the environment variable KVCACHE_ISA names ("" names none).  NULL,
 * with *wanted the value of the variable, if that is not to be had here. */
const kvc_kernels *kvc_cpu_kernels(const char **wanted);

/* The level of the cache that rows are best asked for into, a tile ahead: 1 or 2. */
int kvc_cpu_prefetch_level(void);

#endif
