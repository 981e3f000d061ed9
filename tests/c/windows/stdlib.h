/* stdlib.h: what POSIX has in it and Windows lacks, for the tests in C. */
#include_next <stdlib.h>

#ifndef TEST_WINDOWS_STDLIB_H
#define TEST_WINDOWS_STDLIB_H

#include <direct.h>
#include <io.h>

/* windows.h declares it so, and cannot be included here: immintrin.h includes this file before it has its types. */
__declspec(dllimport) int __stdcall SetEnvironmentVariableA(const char *name, const char *value);

/* Set a variable of the process alone: the C library does not see it, as if another one had set it. */
static inline int setenv(const char *name, const char *value, int replaces) {
    (void)replaces;
    return SetEnvironmentVariableA(name, value) ? 0 : -1;
}

static inline int unsetenv(const char *name) { return setenv(name, NULL, 1); }

/* Makes a temporary folder; newer MinGWs declare a function of their own for it. */
static inline char *make_folder(char *pattern) { return _mktemp(pattern) && !_mkdir(pattern) ? pattern : NULL; }

#define mkdtemp make_folder

#endif
