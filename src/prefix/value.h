/* value.h: wraps what is put into a store, so that whatever comes back is what was stored under that name, or refused.
 *
 * A value is a header of KVC_VALUE_HEADER bytes and the payload.  Integers are little-endian:
 *
 *   offset  bytes
 *     0      16    "kvcache value\r\n\x1a"
 *    16       2    version of this format, 1
 *    18       2    kind of checksum: 0 is CRC-32, 1 a MAC
 *    20       4    bytes of the header, 128
 *    24       8    bytes of the payload
 *    32      32    BLAKE2b, for "kvcache key", of the name in hexadecimal digits
 *    64      32    BLAKE2b, for "kvcache digest", of BLAKE2b of the identity: the model, the shape and the types
 *    96      32    checksum of the 96 bytes above and the payload; a CRC-32 is followed by 28 zeros
 *
 * The MAC is BLAKE2b, for "kvcache value", whose key is BLAKE2b of the secret.  CRC-32 finds accidents: every burst of
 * up to 32 bits, and all but one in 4 billion of other changes.  It takes a sixth of the time of the MAC. */
#ifndef KVC_VALUE_H
#define KVC_VALUE_H

#include "kvcache.h"

enum { KVC_VALUE_HEADER = 128 };

/* The owner to which a value is bound, besides its name. */
typedef struct kvc_value_owner {
    uint8_t model[KVC_NAME_BYTES]; /* stands for the model, the shapes and the types */
    uint8_t key[64];               /* of the MAC */
    int32_t has_key;               /* 0: values have a CRC-32 in place of a MAC */
} kvc_value_owner;

/* Sets an owner, of an identity and a secret, if that has any bytes. */
void kvc_value_owner_init(kvc_value_owner *owner, const void *identity, int64_t size, const void *secret,
                          int64_t secret_size);

/* What CRC-32 is computed with: `byte` has the sum of each byte, `word` the sums of the 8 bytes of a word with other
 * words behind it. */
typedef struct kvc_crc {
    uint32_t byte[256], word[8][256];
} kvc_crc;

void kvc_crc_init(kvc_crc *crc);

/* Writes the header of a value whose payload of `size` bytes stands behind it. */
void kvc_value_pack(uint8_t *value, int64_t size, const uint8_t *name, const kvc_value_owner *owner,
                    const kvc_crc *crc);

/* Returns KVC_ERR_FORMAT unless a value of `size` bytes was packed under this name by this owner. */
kvc_status kvc_value_check(const uint8_t *value, int64_t size, const uint8_t *name, const kvc_value_owner *owner,
                           const kvc_crc *crc);

/* Writes 2 * num digits. */
void kvc_hex(char *text, const uint8_t *bytes, int num);

/* Write and read an integer of `num` bytes, little-endian. */
void kvc_put_integer(uint8_t *bytes, int num, uint64_t value);
uint64_t kvc_get_integer(const uint8_t *bytes, int num);

#endif
