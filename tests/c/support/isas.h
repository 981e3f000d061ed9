/* isas.h: runs a test once for each instruction set of this build.  Define _POSIX_C_SOURCE or more first, as setenv()
 * needs. */
#ifndef KVC_TEST_ISAS_H
#define KVC_TEST_ISAS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kvcache.h"
#include "support/test.h"

static inline void for_each_isa(void (*test)(void))
{
    char names[] = KVC_KERNEL_NAMES;
    for (char *name = strtok(names, " "); name; name = strtok(NULL, " ")) {
        setenv("KVCACHE_ISA", name, 1);
        if (kvc_isa())
            test();
        else
            printf("no %s here: not tested\n", name);
    }
    unsetenv("KVCACHE_ISA");
}

/* The same; in a quick run only with the best set of this machine. */
static inline void for_some_isas(void (*test)(void))
{
    if (is_quick())
        test();
    else
        for_each_isa(test);
}

#endif
