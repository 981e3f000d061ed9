/* blake2b.h: BLAKE2b (RFC 7693), for names that nobody can guess or forge. */
#ifndef KVC_BLAKE2B_H
#define KVC_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvc_blake2b {
    uint64_t h[8];
    uint64_t size; /* bytes that are mixed into h */
    uint8_t block[128];
    uint32_t filled; /* bytes of the block that wait to be mixed in */
    uint32_t digest_size;
} kvc_blake2b;

/* Begins a digest of 1 to 64 bytes, with a key of up to 64 bytes (NULL: none) and a personalisation of up to 16
 * characters ("": none). */
void kvc_blake2b_begin(kvc_blake2b *hash, uint32_t digest_size, const void *key, uint32_t key_size, const char *person);
void kvc_blake2b_add(kvc_blake2b *hash, const void *data, size_t size);
/* Adds integers, little-endian. */
void kvc_blake2b_add_ints(kvc_blake2b *hash, const int64_t *values, size_t num);
/* Sets digest_size bytes. */
void kvc_blake2b_end(kvc_blake2b *hash, uint8_t *digest);

#endif
