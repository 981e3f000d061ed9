/* status.h: how a function says what went wrong. */
#ifndef KVC_STATUS_H
#define KVC_STATUS_H

#include "kvcache.h"

#if defined(__GNUC__)
#define KVC_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define KVC_PRINTF(string, first)
#endif

/* Keeps the sentence for kvc_last_error() of this thread; returns status. */
kvc_status kvc_fail(kvc_status status, const char *format, ...) KVC_PRINTF(2, 3);

#endif
