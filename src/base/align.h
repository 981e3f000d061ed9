/* align.h: rounds sizes up, and lays out several arrays in one allocation. */
#ifndef KVC_ALIGN_H
#define KVC_ALIGN_H

#include <stddef.h>
#include <stdint.h>

enum { KVC_CACHE_LINE = 64 }; /* bytes */

static inline uint64_t kvc_align_up(uint64_t size, size_t alignment) {
    return (size + alignment - 1) / alignment * alignment;
}

/* Appends an array of `bytes` bytes, aligned to a cache line, to an allocation that has *size bytes so far; returns the
 * array's offset. */
static inline uint64_t kvc_add_array(uint64_t *size, uint64_t bytes) {
    const uint64_t at = kvc_align_up(*size, KVC_CACHE_LINE);
    *size = at + bytes;
    return at;
}

/* Appends num arrays: arrays[i] is the bytes of one, and becomes its offset. */
static inline void kvc_add_arrays(uint64_t *size, uint64_t *arrays, int num) {
    for (int i = 0; i < num; i++) arrays[i] = kvc_add_array(size, arrays[i]);
}

#endif
