/* environment.c: see environment.h. */
#include "base/environment.h"

#if defined(_WIN32)

#include <windows.h>

#include "base/compiler.h"

const char *kvc_environment(const char *name) {
    enum { NAME = 32, LONGEST = 32768, KEPT = 100 }; /* characters */
    static KVC_THREAD_LOCAL char value[3 * KEPT + 1];
    wchar_t wide_name[NAME], wide[LONGEST];
    MultiByteToWideChar(CP_UTF8, 0, name, -1, wide_name, NAME);
    const DWORD size = GetEnvironmentVariableW(wide_name, wide, LONGEST);
    const int kept = size < KEPT ? (int)size : KEPT;
    value[WideCharToMultiByte(CP_UTF8, 0, wide, kept, value, sizeof value - 1, NULL, NULL)] = 0;
    return size ? value : NULL;
}

#else

#include <stdlib.h>

const char *kvc_environment(const char *name) { return getenv(name); }

#endif
