/* isas.h: runs a test once for each instruction set.  To be included with _POSIX_C_SOURCE or more, for setenv. */
#ifndef KVC_TEST_ISAS_H
#define KVC_TEST_ISAS_H

#include <stdio.h>
#include <stdlib.h>

#include "kvcache.h"

/* The last one is what the library chooses.  Of those for AVX-512, which differ in single instructions, that is the
 * best: test_kernels.c looks at the others. */
static inline void for_each_isa(void (*test)(void))
{
    static const char *const isas[] = {"scalar", "avx2", ""};
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        setenv("KVCACHE_ISA", isas[i], 1);
        if (kvc_isa())
            test();
        else
            printf("no %s here: not tested\n", isas[i]);
    }
}

#endif
