/* hash.h: the checksum of saved states. */
#ifndef KVC_HASH_H
#define KVC_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Returns XXH64 of `size` bytes, as its specification defines it for a little-endian machine: about as fast as memory,
 * and good at finding damage.  Nobody needs a secret to forge it. */
uint64_t kvc_hash(const void *data, size_t size, uint64_t seed);

/* Computes kvc_hash of bytes that come in parts. */
typedef struct kvc_hasher {
    uint64_t lanes[4];
    uint64_t seed, size; /* size: bytes so far */
    uint8_t rest[32];    /* the last size % 32 of them */
} kvc_hasher;

void kvc_hash_begin(kvc_hasher *hasher, uint64_t seed);
/* Adds bytes and, unless `copy` is NULL, copies them there, in the time of the sums alone.  If `copy` is a multiple
 * of 16, and the bytes so far a multiple of 32, the copy goes past the CPU's caches, which would read each line of
 * memory before it is overwritten. */
void kvc_hash_add(kvc_hasher *hasher, const void *data, size_t size, void *copy);
uint64_t kvc_hash_end(const kvc_hasher *hasher);

#endif
