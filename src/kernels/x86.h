/* x86.h: what the instruction sets of x86 have in common.  TARGET is defined before it is included. */
#include <immintrin.h>
#include <string.h>

#include "inline.h"

INLINE void store_f16(void *p, float x) {
    uint16_t bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
    memcpy(p, &bits, sizeof bits);
}

/* The processor's own copy takes whole cache lines without reading first what it overwrites.  It is slow to begin, and
 * the address sanitizer does not see it. */
INLINE void copy_row(void *dst, const void *src, size_t bytes) {
#ifndef HAVE_ADDRESS_SANITIZER
    if (bytes >= 256) {
        __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
        return;
    }
#endif
    memcpy(dst, src, bytes);
}
