/* stdlib.h: what POSIX has in it and Windows lacks, for the tests in C. */
#include_next <stdlib.h>

#ifndef TEST_WINDOWS_STDLIB_H
#define TEST_WINDOWS_STDLIB_H

#include <direct.h>
#include <io.h>

/* An empty value is no variable there: programs cannot tell the two apart. */
static inline int setenv(const char *name, const char *value, int replaces) {
    return !replaces && getenv(name) ? 0 : _putenv_s(name, value);
}

static inline int unsetenv(const char *name) { return _putenv_s(name, ""); }

static inline char *mkdtemp(char *pattern) { return _mktemp(pattern) && !_mkdir(pattern) ? pattern : NULL; }

#endif
