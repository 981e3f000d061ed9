/* sys/stat.h: folders, for the tests in C. */
#include_next <sys/stat.h>

#ifndef TEST_WINDOWS_STAT_H
#define TEST_WINDOWS_STAT_H

#include <direct.h>

#define mkdir(path, mode) _mkdir(path)

#endif
