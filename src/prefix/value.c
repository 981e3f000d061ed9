/* value.c: wraps what is put into a store, and checks what comes back: see value.h. */
#include "prefix/value.h"

#include <string.h>

#include "base/blake2b.h"
#include "base/status.h"

enum { FIELDS = 96, CHECKSUM = 32, VERSION = 1 };
static const char MAGIC[] = "kvcache value\r\n\x1a";

void kvc_hex(char *text, const uint8_t *bytes, int num) {
    for (int i = 0; i < 2 * num; i++) text[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 ? 0 : 4) & 15];
}

void kvc_put_integer(uint8_t *bytes, int num, uint64_t value) {
    for (int i = 0; i < num; i++, value >>= 8) bytes[i] = (uint8_t)value;
}

uint64_t kvc_get_integer(const uint8_t *bytes, int num) {
    uint64_t value = 0;
    for (int i = num - 1; i >= 0; i--) value = value << 8 | bytes[i];
    return value;
}

/* Sets a digest of bytes. */
static void digest(uint8_t *to, uint32_t size, const char *person, const void *data, size_t data_size) {
    kvc_blake2b hash;
    kvc_blake2b_begin(&hash, size, NULL, 0, person);
    kvc_blake2b_add(&hash, data, data_size);
    kvc_blake2b_end(&hash, to);
}

void kvc_value_owner_init(kvc_value_owner *owner, const void *identity, int64_t size, const void *secret,
                          int64_t secret_size) {
    uint8_t named[64];
    digest(named, sizeof named, "", identity, (size_t)size);
    digest(owner->model, sizeof owner->model, "kvcache digest", named, sizeof named);
    digest(owner->key, sizeof owner->key, "", secret, (size_t)secret_size);
    owner->has_key = secret_size > 0;
}

/* ---- checksums --------------------------------------------------------------------------------------------------- */

enum {
    WORDS = 5,       /* words of 8 bytes that are summed up side by side: their lookups do not wait for each other */
    STEP = 8 * WORDS /* bytes of them */
};

void kvc_crc_init(kvc_crc *crc) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t sum = i;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
        crc->byte[i] = sum;
    }
    for (int i = 0; i < 256; i++) {
        uint32_t sum = crc->byte[i];
        for (int zeros = 1; zeros < STEP; zeros++) {
            sum = sum >> 8 ^ crc->byte[sum & 255];
            if (zeros >= STEP - 8) crc->word[STEP - 1 - zeros][i] = sum;
        }
    }
}

/* Returns the sum of 8 bytes with STEP - 8 zeros behind them, on top of `sum`. */
static inline uint32_t sum_of(const kvc_crc *crc, uint32_t sum, const uint8_t *p) {
    sum ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    return crc->word[0][sum & 255] ^ crc->word[1][sum >> 8 & 255] ^ crc->word[2][sum >> 16 & 255] ^
           crc->word[3][sum >> 24] ^ crc->word[4][p[4]] ^ crc->word[5][p[5]] ^ crc->word[6][p[6]] ^ crc->word[7][p[7]];
}

static uint32_t add_bytes(const kvc_crc *crc, uint32_t sum, const uint8_t *p, int64_t size) {
    for (; size; size--) sum = sum >> 8 ^ crc->byte[(sum ^ *p++) & 255];
    return sum;
}

/* Returns the sum of these bytes behind the bytes of `sum`.  Word i of the next step is summed up on top of sums[i]. */
static uint32_t add_crc(const kvc_crc *crc, uint32_t sum, const uint8_t *p, int64_t size) {
    uint32_t sums[WORDS] = {sum};
    if (size < STEP) return add_bytes(crc, sum, p, size);
    for (; size >= 2 * STEP; size -= STEP, p += STEP) {
        sums[0] = sum_of(crc, sums[0], p); /* a loop, which GCC does not unroll at -O2, is slower */
        sums[1] = sum_of(crc, sums[1], p + 8);
        sums[2] = sum_of(crc, sums[2], p + 16);
        sums[3] = sum_of(crc, sums[3], p + 24);
        sums[4] = sum_of(crc, sums[4], p + 32);
    }
    sum = 0;
    for (int i = 0; i < WORDS; i++) sum = add_bytes(crc, sum ^ sums[i], p + 8 * i, 8);
    return add_bytes(crc, sum, p + STEP, size - STEP);
}

/* Sets the checksum of a value with a payload of `size` bytes. */
static void sum_up(uint8_t *checksum, const uint8_t *value, int64_t size, const kvc_value_owner *owner,
                   const kvc_crc *crc) {
    if (owner->has_key) {
        kvc_blake2b hash;
        kvc_blake2b_begin(&hash, CHECKSUM, owner->key, sizeof owner->key, "kvcache value");
        kvc_blake2b_add(&hash, value, FIELDS);
        kvc_blake2b_add(&hash, value + KVC_VALUE_HEADER, (size_t)size);
        kvc_blake2b_end(&hash, checksum);
    } else {
        const uint32_t fields = add_crc(crc, ~(uint32_t)0, value, FIELDS);
        kvc_put_integer(checksum, CHECKSUM, (uint32_t)~add_crc(crc, fields, value + KVC_VALUE_HEADER, size));
    }
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static void write_fields(uint8_t *fields, int64_t size, const uint8_t *name, const kvc_value_owner *owner) {
    char key[2 * KVC_NAME_BYTES];        /* under which Python stores it */
    memcpy(fields, MAGIC, sizeof MAGIC); /* its last byte is written over */
    kvc_put_integer(fields + 16, 2, VERSION);
    kvc_put_integer(fields + 18, 2, owner->has_key != 0);
    kvc_put_integer(fields + 20, 4, KVC_VALUE_HEADER);
    kvc_put_integer(fields + 24, 8, (uint64_t)size);
    kvc_hex(key, name, KVC_NAME_BYTES);
    digest(fields + 32, KVC_NAME_BYTES, "kvcache key", key, sizeof key);
    memcpy(fields + 64, owner->model, sizeof owner->model);
}

void kvc_value_pack(uint8_t *value, int64_t size, const uint8_t *name, const kvc_value_owner *owner,
                    const kvc_crc *crc) {
    write_fields(value, size, name, owner);
    sum_up(value + FIELDS, value, size, owner, crc);
}

/* Returns what it says of a value that a byte of its header differs. */
static const char *what_differs(int byte) {
    return byte < 16   ? "it does not begin as a value does"
           : byte < 18 ? "it is of another version"
           : byte < 20 ? "it was stored with a secret, or this one without"
           : byte < 24 ? "its header is damaged"
           : byte < 32 ? "its length is not what its header says"
           : byte < 64 ? "it was stored under another name"
                       : "it is of another model or shape";
}

kvc_status kvc_value_check(const uint8_t *value, int64_t size, const uint8_t *name, const kvc_value_owner *owner,
                           const kvc_crc *crc) {
    uint8_t expected[KVC_VALUE_HEADER];
    uint8_t difference = 0;
    if (size < KVC_VALUE_HEADER) return kvc_fail(KVC_ERR_FORMAT, "the value has %lld bytes", (long long)size);
    write_fields(expected, size - KVC_VALUE_HEADER, name, owner);
    for (int i = 0; i < FIELDS; i++)
        if (value[i] != expected[i])
            return kvc_fail(KVC_ERR_FORMAT, "the value is not what was stored: byte %d is %d, not %d: %s", i, value[i],
                            expected[i], what_differs(i));
    sum_up(expected + FIELDS, value, size - KVC_VALUE_HEADER, owner, crc);
    for (int i = FIELDS; i < KVC_VALUE_HEADER; i++) difference |= value[i] ^ expected[i]; /* in the same time always */
    return difference ? kvc_fail(KVC_ERR_FORMAT, "the value is not what was stored: its checksum differs") : KVC_OK;
}
