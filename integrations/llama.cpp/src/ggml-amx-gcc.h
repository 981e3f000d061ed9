// GCC 12.2's _tile_loadconfig says that it reads 8 bytes, not 64, so that the compiler leaves out the stores of most of
// what ggml configures its tiles (AMX) with, and its first product of quantised weights ends the process.
#pragma once

#ifdef __AMX_TILE__
#include <immintrin.h>

#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64])(config)))
#endif
