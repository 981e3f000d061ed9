/* stdio.h: a folder for temporary files, for the tests in C. */
#include_next <stdio.h>

#ifndef TEST_WINDOWS_STDIO_H
#define TEST_WINDOWS_STDIO_H

#undef P_tmpdir
#define P_tmpdir "C:/Windows/Temp"

#endif
