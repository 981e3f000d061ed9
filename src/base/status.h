/* status.h: reports errors. */
#ifndef KVC_STATUS_H
#define KVC_STATUS_H

#include "base/compiler.h"
#include "kvcache.h"

void kvc_set_last_error(const char *format, ...) KVC_PRINTF(1, 2); /* checks its arguments */

/* Keeps the sentence; is `status`.  A macro, so that compilers and analysers see what a failing function returns. */
#define kvc_fail(status, ...) (kvc_set_last_error(__VA_ARGS__), (status))

/* Returns from the function unless a call returns KVC_OK. */
#define KVC_TRY(call)                              \
    do {                                           \
        const kvc_status kvc_tried = (call);       \
        if (kvc_tried != KVC_OK) return kvc_tried; \
    } while (0)

#endif
