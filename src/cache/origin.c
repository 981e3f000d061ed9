/* origin.c: which prefixes have forgotten tokens whose rows a sequence may hold: see origin.h. */
#include "cache/origin.h"

enum { BITS_SIZE = KVC_NUM_BITS * sizeof(kvc_bit) };

int32_t kvc_origin_take_bit(kvc_cache *cache) {
    int32_t best = 0;
    if (!cache->prefixes.bits) {
        cache->prefixes.bits = kvc_memory_alloc(&cache->memory, BITS_SIZE, KVC_MEMORY_BOOKKEEPING, -1);
        if (!cache->prefixes.bits) return -1;
        for (int32_t i = 0; i < KVC_NUM_BITS; i++) cache->prefixes.bits[i] = (kvc_bit){0};
    }
    for (int32_t i = 1; i < KVC_NUM_BITS; i++)
        if (cache->prefixes.bits[i].num_users < cache->prefixes.bits[best].num_users) best = i;
    kvc_bit *bit = &cache->prefixes.bits[best];
    if (!bit->num_users++) bit->taken = cache->prefixes.num_forgets;
    return best;
}

void kvc_origin_give_bit(kvc_cache *cache, int32_t bit) {
    int64_t num_users = 0;
    cache->prefixes.bits[bit].num_users--;
    for (int32_t i = 0; i < KVC_NUM_BITS; i++) num_users += cache->prefixes.bits[i].num_users;
    if (num_users) return;
    kvc_memory_free(&cache->memory, cache->prefixes.bits, BITS_SIZE, KVC_MEMORY_BOOKKEEPING, -1);
    cache->prefixes.bits = NULL;
}

void kvc_origin_forget(kvc_cache *cache, int32_t bit) {
    cache->prefixes.bits[bit].forgot = ++cache->prefixes.num_forgets;
}

int kvc_origin_has(const kvc_cache *cache, const kvc_sequence *sequence, int32_t bit) {
    const kvc_origin *origin = &sequence->origin;
    const kvc_bit *of = &cache->prefixes.bits[bit];
    if (!sequence->follower && of->forgot > origin->as_of && of->forgot > of->taken) return 1;
    return (origin->forgotten_in >> bit & 1) && origin->as_of > of->taken;
}

/* Returns the bits that a sequence has. */
static uint64_t bits_of(const kvc_cache *cache, const kvc_sequence *sequence) {
    uint64_t bits = 0;
    for (int32_t i = 0; cache->prefixes.bits && i < KVC_NUM_BITS; i++)
        bits |= (uint64_t)kvc_origin_has(cache, sequence, i) << i;
    return bits;
}

void kvc_origin_renew(const kvc_cache *cache, kvc_sequence *sequence) {
    sequence->origin.forgotten_in = bits_of(cache, sequence);
    sequence->origin.as_of = cache->prefixes.num_forgets;
}

void kvc_origin_mark(const kvc_cache *cache, kvc_sequence *sequence, int32_t bit) {
    kvc_origin_renew(cache, sequence);
    sequence->origin.forgotten_in |= UINT64_C(1) << bit;
}

void kvc_origin_add(const kvc_cache *cache, kvc_sequence *sequence, const kvc_sequence *more) {
    kvc_origin *origin = &sequence->origin;
    const int64_t num_forgets = more->origin.num_forgets, none = INT64_MAX;
    kvc_origin_renew(cache, sequence);
    origin->forgotten_in |= bits_of(cache, more);
    if (origin->num_forgets == none)
        origin->prefix = more->origin.prefix;
    else if (num_forgets < none && more->origin.prefix != origin->prefix)
        origin->prefix = 0;
    if (num_forgets < origin->num_forgets) origin->num_forgets = num_forgets;
}

void kvc_origin_keep(const kvc_cache *cache, kvc_sequence *sequence, int64_t prefix) {
    if (cache->prefixes.num_forgets < sequence->origin.num_forgets)
        sequence->origin.num_forgets = cache->prefixes.num_forgets;
    sequence->origin.prefix = prefix;
}

void kvc_origin_reset(const kvc_cache *cache, kvc_sequence *sequence) {
    sequence->origin = (kvc_origin){.as_of = cache->prefixes.num_forgets, .num_forgets = INT64_MAX};
}
