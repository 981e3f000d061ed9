/* tokens.c: compares tokens, and names blocks: see tokens.h. */
#include "prefix/tokens.h"

#include <string.h>

#include "base/blake2b.h"
#include "base/compiler.h"

kvc_token_span kvc_tokens_part(const kvc_tokens *tokens, int64_t begin, int64_t end) {
    if (end > tokens->num_tokens) end = tokens->num_tokens;
    const uint8_t *digests = tokens->digests ? tokens->digests + begin * KVC_NAME_BYTES : NULL;
    return (kvc_token_span){tokens->ids + begin, digests, (int32_t)(end - begin)};
}

const uint8_t *kvc_tokens_digest(const kvc_token_span *tokens, int32_t i) {
    static const uint8_t none[KVC_NAME_BYTES];
    if (!tokens->digests) return NULL;
    const uint8_t *digest = tokens->digests + (size_t)i * KVC_NAME_BYTES;
    return memcmp(digest, none, sizeof none) ? digest : NULL;
}

/* Compares two tokens: ids stand before digests. */
static int compare_one(const kvc_token_span *a, const kvc_token_span *b, int32_t i) {
    const uint8_t *x = kvc_tokens_digest(a, i), *y = kvc_tokens_digest(b, i);
    if (x && y) return memcmp(x, y, KVC_NAME_BYTES);
    if (x || y) return x ? 1 : -1;
    return (a->ids[i] > b->ids[i]) - (a->ids[i] < b->ids[i]);
}

int32_t kvc_tokens_common(const kvc_token_span *a, const kvc_token_span *b) {
    const int32_t num = a->num < b->num ? a->num : b->num;
    if (!a->digests && !b->digests && !memcmp(a->ids, b->ids, (size_t)num * sizeof *a->ids)) return num;
    int32_t i = 0;
    while (i < num && !compare_one(a, b, i)) i++;
    return i;
}

int kvc_tokens_compare(const kvc_token_span *a, const kvc_token_span *b) {
    const int32_t i = kvc_tokens_common(a, b);
    if (i < a->num && i < b->num) return compare_one(a, b, i);
    return (a->num > b->num) - (a->num < b->num);
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

void kvc_name_salt(const void *salt, size_t size, uint8_t *name) {
    kvc_blake2b hash;
    kvc_blake2b_begin(&hash, KVC_NAME_BYTES, NULL, 0, "kvcache salt");
    kvc_blake2b_add(&hash, salt, size);
    kvc_blake2b_end(&hash, name);
}

void kvc_name_root(const uint8_t *salt, const void *identity, size_t size, int64_t state_bytes, uint8_t *name) {
    kvc_blake2b hash;
    const char *use = KVC_IS_BIG_ENDIAN ? "kvcache root, BE" : "kvcache root"; /* neither reads the other's rows */
    kvc_blake2b_begin(&hash, KVC_NAME_BYTES, salt, KVC_NAME_BYTES, use);
    kvc_blake2b_add_ints(&hash, &state_bytes, 1);
    kvc_blake2b_add(&hash, identity, size);
    kvc_blake2b_end(&hash, name);
}

void kvc_name_block(const uint8_t *salt, const uint8_t *parent, const kvc_token_span *tokens, uint8_t *name) {
    int32_t num_ids = 0;
    while (num_ids < tokens->num && !kvc_tokens_digest(tokens, num_ids)) num_ids++;
    const uint8_t has_digests = num_ids < tokens->num;
    kvc_blake2b hash;
    kvc_blake2b_begin(&hash, KVC_NAME_BYTES, salt, KVC_NAME_BYTES, "");
    kvc_blake2b_add(&hash, parent, KVC_NAME_BYTES);
    kvc_blake2b_add(&hash, &has_digests, 1);
    if (!has_digests) kvc_blake2b_add_ints(&hash, tokens->ids, (size_t)tokens->num);
    for (int32_t i = 0; has_digests && i < tokens->num; i++) {
        const uint8_t *digest = kvc_tokens_digest(tokens, i);
        const uint8_t is_digest = digest != NULL;
        kvc_blake2b_add(&hash, &is_digest, 1);
        if (digest)
            kvc_blake2b_add(&hash, digest, KVC_NAME_BYTES);
        else
            kvc_blake2b_add_ints(&hash, &tokens->ids[i], 1);
    }
    kvc_blake2b_end(&hash, name);
}

void kvc_name_blocks(const uint8_t *salt, const uint8_t *parent, const kvc_tokens *tokens, int64_t begin,
                     int32_t block_size, int64_t num, uint8_t *names) {
    for (int64_t i = 0; i < num; i++, begin += block_size, parent = names, names += KVC_NAME_BYTES) {
        const kvc_token_span part = kvc_tokens_part(tokens, begin, begin + block_size);
        kvc_name_block(salt, parent, &part, names);
    }
}
