/* environment.c: the variables of the environment: see environment.h. */
#include "base/environment.h"

#if defined(_WIN32)

#include <windows.h>

#include "base/compiler.h"

const char *kvc_environment(const char *name) {
    enum { NAME = 32, LONGEST = 32768, SHOWN = 100 }; /* characters */
    static KVC_THREAD_LOCAL char value[3 * SHOWN + 1];
    wchar_t wide_name[NAME], wide[LONGEST];
    MultiByteToWideChar(CP_UTF8, 0, name, -1, wide_name, NAME);
    const DWORD size = GetEnvironmentVariableW(wide_name, wide, LONGEST);
    const int shown = size < SHOWN ? (int)size : SHOWN;
    value[WideCharToMultiByte(CP_UTF8, 0, wide, shown, value, sizeof value - 1, NULL, NULL)] = 0;
    return size ? value : NULL;
}

#else

#include <stdlib.h>

const char *kvc_environment(const char *name) { return getenv(name); }

#endif
