/* value.h: wraps what is put into a store, so that whatever comes back is what was stored under that name, or refused.
 *
 * A value is a header of KVC_VALUE_HEADER bytes and the payload; kvcache/stores/values.py says what stands where. */
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
