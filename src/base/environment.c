/* environment.c: see environment.h. */
#include "base/environment.h"

#if defined(_WIN32)

#include <string.h>
#include <windows.h>

#include "base/compiler.h"

const char *kvc_environment(const char *name) {
    static KVC_THREAD_LOCAL char value[128];
    const DWORD size = GetEnvironmentVariableA(name, value, sizeof value);
    if (size >= sizeof value) strcpy(value, "...");
    return size ? value : NULL;
}

#else

#include <stdlib.h>

const char *kvc_environment(const char *name) { return getenv(name); }

#endif
