/* blake2b.c: BLAKE2b (Saarinen and Aumasson, RFC 7693): see blake2b.h. */
#include "base/blake2b.h"

#include <string.h>

#include "base/compiler.h"

static const uint64_t INITIAL[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

/* Which word of the block goes where, by round.  Rounds 10 and 11 repeat rounds 0 and 1. */
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

static uint64_t load64(const uint8_t *p) {
    uint64_t x = 0;
    if (KVC_IS_BIG_ENDIAN)
        for (int i = 7; i >= 0; i--) x = x << 8 | p[i];
    else
        memcpy(&x, p, sizeof x);
    return x;
}

static uint64_t rotate(uint64_t x, int bits) { return x >> bits | x << (64 - bits); }

KVC_INLINE void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 63);
}

/* Written out, so that v stays in registers and `s` becomes constants: twice as fast as in loops. */
KVC_INLINE void mix_all(uint64_t *v, const uint64_t *m, const uint8_t *s) {
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
}

/* Mixes the block in; `last`: all ones for the last one, else 0. */
static void compress(kvc_blake2b *hash, uint64_t last) {
    uint64_t m[16], v[16];
    hash->size += hash->filled;
    for (int i = 0; i < 16; i++) m[i] = load64(hash->block + 8 * i);
    memcpy(v, hash->h, sizeof hash->h);
    memcpy(v + 8, INITIAL, sizeof INITIAL);
    v[12] ^= hash->size;
    v[14] ^= last;
    mix_all(v, m, SIGMA[0]);
    mix_all(v, m, SIGMA[1]);
    mix_all(v, m, SIGMA[2]);
    mix_all(v, m, SIGMA[3]);
    mix_all(v, m, SIGMA[4]);
    mix_all(v, m, SIGMA[5]);
    mix_all(v, m, SIGMA[6]);
    mix_all(v, m, SIGMA[7]);
    mix_all(v, m, SIGMA[8]);
    mix_all(v, m, SIGMA[9]);
    mix_all(v, m, SIGMA[0]);
    mix_all(v, m, SIGMA[1]);
    for (int i = 0; i < 8; i++) hash->h[i] ^= v[i] ^ v[i + 8];
    hash->filled = 0;
}

void kvc_blake2b_begin(kvc_blake2b *hash, uint32_t digest_size, const void *key, uint32_t key_size,
                       const char *person) {
    uint8_t name[16] = {0};
    for (size_t i = 0; i < sizeof name && person[i]; i++) name[i] = (uint8_t)person[i];
    *hash = (kvc_blake2b){.digest_size = digest_size};
    memcpy(hash->h, INITIAL, sizeof INITIAL);
    hash->h[0] ^= 0x01010000 ^ (uint64_t)key_size << 8 ^ digest_size;
    hash->h[6] ^= load64(name);
    hash->h[7] ^= load64(name + 8);
    if (!key_size) return;
    memcpy(hash->block, key, key_size); /* the rest of the first block is zeros */
    hash->filled = sizeof hash->block;
}

void kvc_blake2b_add(kvc_blake2b *hash, const void *data, size_t size) {
    for (const uint8_t *p = data; size;) {
        if (hash->filled == sizeof hash->block) compress(hash, 0); /* only once more follows: the last one is marked */
        const size_t room = sizeof hash->block - hash->filled, num = size < room ? size : room;
        memcpy(hash->block + hash->filled, p, num);
        hash->filled += (uint32_t)num;
        p += num;
        size -= num;
    }
}

void kvc_blake2b_add_ints(kvc_blake2b *hash, const int64_t *values, size_t num) {
    if (!KVC_IS_BIG_ENDIAN) {
        kvc_blake2b_add(hash, values, num * sizeof *values);
        return;
    }
    for (size_t i = 0; i < num; i++) {
        uint8_t bytes[8];
        for (int k = 0; k < 8; k++) bytes[k] = (uint8_t)((uint64_t)values[i] >> 8 * k);
        kvc_blake2b_add(hash, bytes, sizeof bytes);
    }
}

void kvc_blake2b_end(kvc_blake2b *hash, uint8_t *digest) {
    memset(hash->block + hash->filled, 0, sizeof hash->block - hash->filled);
    compress(hash, UINT64_MAX);
    for (uint32_t i = 0; i < hash->digest_size; i++) digest[i] = (uint8_t)(hash->h[i / 8] >> 8 * (i % 8));
}
