/* status.h: reports errors. */
#ifndef KVC_STATUS_H
#define KVC_STATUS_H

#include "base/compiler.h"
#include "kvcache.h"

/* Keeps the formatted sentence for kvc_last_error() on this thread; returns status. */
kvc_status kvc_fail(kvc_status status, const char *format, ...) KVC_PRINTF(2, 3);

/* Returns from the function unless a call returns KVC_OK. */
#define KVC_TRY(call)                              \
    do {                                           \
        const kvc_status kvc_tried = (call);       \
        if (kvc_tried != KVC_OK) return kvc_tried; \
    } while (0)

#endif
