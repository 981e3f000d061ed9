/* Values of stores: the bytes that Python makes of the same payload, and every other byte is refused. */
#include "prefix/value.h"

#include "support/test.h"

enum { PAYLOAD = 45, SIZE = KVC_VALUE_HEADER + PAYLOAD };

static const char *const headers[] = {
    "6b7663616368652076616c75650d0a1a01000000800000002d0000000000000017473682ba61ad5f3b9bf656f9530f31aa61c9bc02e4a294"
    "75c9739f32fd39af61822b59dd3973d97d268f318a339d548f200715aaf8c74eb2a1a1c2523e1ec91e645adf000000000000000000000000"
    "00000000000000000000000000000000",
    "6b7663616368652076616c75650d0a1a01000100800000002d0000000000000017473682ba61ad5f3b9bf656f9530f31aa61c9bc02e4a294"
    "75c9739f32fd39af61822b59dd3973d97d268f318a339d548f200715aaf8c74eb2a1a1c2523e1ec9f75f6f61e88d6ac140a16bdec1c95d7f"
    "e6c3f8dc5a5f518822535fbb53e57d06"};

static kvc_crc crc;
static uint8_t name[KVC_NAME_BYTES], value[SIZE + 1];

static kvc_value_owner owner_of(const char *model, const char *secret) {
    kvc_value_owner owner;
    kvc_value_owner_init(&owner, model, (int64_t)strlen(model), secret, (int64_t)strlen(secret));
    return owner;
}

static kvc_status check(int64_t size, const kvc_value_owner *owner) {
    return kvc_value_check(value, size, name, owner, &crc);
}

/* tests/support/values.py makes these headers for the same name, model, payload and secret. */
static void test_bytes(const kvc_value_owner *owner, const char *expected) {
    char text[2 * KVC_VALUE_HEADER + 1] = {0};
    for (int i = 0; i < KVC_NAME_BYTES; i++) name[i] = (uint8_t)i;
    for (int i = 0; i < PAYLOAD; i++) value[KVC_VALUE_HEADER + i] = (uint8_t)(i * i % 251);
    kvc_value_pack(value, PAYLOAD, name, owner, &crc);
    kvc_hex(text, value, KVC_VALUE_HEADER);
    CHECKF(!strcmp(text, expected), "%s", text);
    CHECKF(check(SIZE, owner) == KVC_OK, "%s", kvc_last_error());
}

static void test_refusals(const kvc_value_owner *owner, const char *other_secret) {
    const kvc_value_owner other_model = owner_of("b model", owner->has_key ? "secret" : "");
    const kvc_value_owner other_key = owner_of("a model", other_secret);
    for (int64_t size = 0; size < SIZE; size++) CHECK(check(size, owner) == KVC_ERR_FORMAT);
    CHECK(check(SIZE + 1, owner) == KVC_ERR_FORMAT);
    for (int bit = 0; bit < 8 * SIZE; bit++) {
        value[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECKF(check(SIZE, owner) == KVC_ERR_FORMAT, "bit %d", bit);
        value[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK_FAILS(check(100, owner), KVC_ERR_FORMAT, "value", "100");
    CHECK_FAILS(check(SIZE, &other_model), KVC_ERR_FORMAT, "byte 64", "another model");
    CHECK_FAILS(check(SIZE, &other_key), KVC_ERR_FORMAT, "is not what was stored", "");
    name[31] ^= 1;
    CHECK_FAILS(check(SIZE, owner), KVC_ERR_FORMAT, "byte 32", "another name");
    name[31] ^= 1;
    CHECK(check(SIZE, owner) == KVC_OK);
}

/* Returns the CRC-32 of bytes, bit by bit. */
static uint32_t slow_crc(const uint8_t *p, int64_t size, uint32_t sum) {
    for (; size; size--, p++)
        for (int bit = 0; bit < 8; bit++) {
            const uint32_t is_odd = (sum ^ (uint32_t)(*p >> bit)) & 1;
            sum = sum >> 1 ^ (is_odd ? 0xedb88320 : 0);
        }
    return sum;
}

/* Payloads of every size up to four times what is summed up at once, at every alignment. */
static void test_sizes(void) {
    static uint8_t room[KVC_VALUE_HEADER + 240];
    const kvc_value_owner owner = owner_of("a model", "");
    for (int begin = 0; begin < 16; begin++)
        for (int64_t size = 0; size <= 200; size++) {
            uint8_t *own = room + begin;
            for (int64_t i = 0; i < size; i++) own[KVC_VALUE_HEADER + i] = (uint8_t)(i * 37 + size);
            kvc_value_pack(own, size, name, &owner, &crc);
            const uint32_t sum = ~slow_crc(own + KVC_VALUE_HEADER, size, slow_crc(own, 96, UINT32_MAX));
            CHECKF((uint32_t)kvc_get_integer(own + 96, 8) == sum, "%d bytes", (int)size);
        }
}

int main(void) {
    const kvc_value_owner plain = owner_of("a model", ""), secret = owner_of("a model", "secret");
    memset(&crc, 0xff, sizeof crc);
    kvc_crc_init(&crc);
    test_bytes(&plain, headers[0]);
    test_refusals(&plain, "secret");
    test_bytes(&secret, headers[1]);
    test_refusals(&secret, "another");
    test_refusals(&secret, "");
    test_sizes();
    return test_result();
}
