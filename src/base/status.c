/* status.c: reports errors, and has their texts: see status.h. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/compiler.h"

static KVC_THREAD_LOCAL char last_error[512];

void kvc_set_last_error(const char *format, ...) {
    char text[sizeof last_error] = ""; /* args may point into last_error */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
}

const char *kvc_last_error(void) { return last_error; }

const char *kvc_strerror(kvc_status status) {
    switch (status) {
#define STATUS_TEXT(name, value, text) \
    case name: return text;
        KVC_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "unknown status";
}
