/* hash.h: the checksum of saved states. */
#ifndef KVC_HASH_H
#define KVC_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Returns XXH64 of `size` bytes, as its specification defines it for a little-endian machine: about as fast as memory,
 * and good at finding damage.  Nobody needs a secret to forge it. */
uint64_t kvc_hash(const void *data, size_t size, uint64_t seed);

#endif
