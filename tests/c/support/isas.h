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

static inline void for_isa(const char *name, void (*test)(void)) {
    setenv("KVCACHE_ISA", name, 1);
    if (kvc_isa())
        test();
    else
        printf("no %s here: not tested\n", name);
    unsetenv("KVCACHE_ISA");
}

static inline void for_each_isa(void (*test)(void)) {
    char names[] = KVC_KERNEL_NAMES;
    for (char *name = strtok(names, " "); name; name = strtok(NULL, " ")) for_isa(name, test);
}

/* Runs a test with the best set of this machine; in a full run with each: test_kernels.c tests the kernels of all. */
static inline void for_some_isas(void (*test)(void)) {
    if (is_full())
        for_each_isa(test);
    else
        test();
}

/* Returns the name of an instruction set that this machine has; which one, a number decides. */
static inline const char *choose_isa(uint8_t by) {
    static char names[] = KVC_KERNEL_NAMES, *list[16];
    static int num;
    for (char *name = num ? NULL : strtok(names, " "); name; name = strtok(NULL, " ")) {
        setenv("KVCACHE_ISA", name, 1);
        if (kvc_isa()) list[num++] = name;
    }
    return list[by % num];
}

#endif
