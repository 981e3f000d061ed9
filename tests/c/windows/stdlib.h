/* stdlib.h: what POSIX has in it and Windows lacks, for the tests in C. */
#include_next <stdlib.h>

#ifndef TEST_WINDOWS_STDLIB_H
#define TEST_WINDOWS_STDLIB_H

#include <direct.h>
#include <io.h>
#include <windows.h>

/* Set a variable of the process alone: the C library does not see it, as if another one had set it. */
static inline int setenv(const char *name, const char *value, int replaces) {
    (void)replaces;
    return SetEnvironmentVariableA(name, value) ? 0 : -1;
}

static inline int unsetenv(const char *name) { return setenv(name, NULL, 1); }

static inline char *mkdtemp(char *pattern) { return _mktemp(pattern) && !_mkdir(pattern) ? pattern : NULL; }

#endif
