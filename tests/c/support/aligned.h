/* aligned.h: memory of an alignment, to the byte.  Define _POSIX_C_SOURCE or more first, as posix_memalign() needs. */
#ifndef KVC_TEST_ALIGNED_H
#define KVC_TEST_ALIGNED_H

#include <stdlib.h>

#if defined(_WIN32)
#include <malloc.h>
#define aligned_free _aligned_free
static inline void *aligned_new(size_t alignment, size_t size) { return _aligned_malloc(size, alignment); }
#else
#define aligned_free free
static inline void *aligned_new(size_t alignment, size_t size) {
    void *start;
    return posix_memalign(&start, alignment, size) ? NULL : start;
}
#endif

#endif
