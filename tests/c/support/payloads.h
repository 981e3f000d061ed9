/* payloads.h: parts of calls that carry blocks between caches and stores, each by itself. */
#ifndef PAYLOADS_H
#define PAYLOADS_H

#include <string.h>

#include "base/status.h"
#include "prefix/fetch.h"
#include "prefix/match.h"
#include "prefix/prefix.h"

/* Returns the bytes of a payload in which no layer is missing, with the largest state of any prefix. */
static inline int64_t payload_bytes(kvc_cache *cache) {
    int64_t most = 0;
    kvc_lock(cache);
    for (const kvc_prefix *prefix = cache->prefixes.first; prefix; prefix = prefix->next)
        if (prefix->state_bytes > most) most = prefix->state_bytes;
    kvc_unlock(cache, KVC_OK);
    return kvc_most_payload_bytes(cache, most);
}

/* Writes the names of the full blocks that a fetch of the first num_tokens tokens reads from a store that has all. */
static inline kvc_status missing_blocks(kvc_prefix *prefix, const kvc_tokens *from, int64_t num_tokens, uint8_t *names,
                                        int64_t max_names, int32_t *first, int64_t *num_names) {
    kvc_tokens tokens;
    uint8_t name[KVC_NAME_BYTES];
    const int32_t block = prefix->cache->pools[0].block_size;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (num_tokens > tokens.num_tokens) num_tokens = tokens.num_tokens;
    kvc_prefix_lock(prefix);
    kvc_match m;
    const kvc_status status = kvc_match_find(prefix, &tokens, num_tokens, &m);
    if (status != KVC_OK) return kvc_unlock(prefix->cache, status);
    kvc_match_touch(&m);
    *first = m.known / block;
    memcpy(name, kvc_match_path(&m, m.known)->named.name, sizeof name);
    kvc_match_free(prefix->cache, &m);
    kvc_unlock(prefix->cache, KVC_OK);
    *num_names = num_tokens / block - *first;
    kvc_name_blocks(prefix->salt, name, &tokens, (int64_t)*first * block, block,
                    *num_names < max_names ? *num_names : max_names, names);
    return KVC_OK;
}

/* Adds block number `block` of a prompt from its payload. */
static inline kvc_status add_payload(kvc_prefix *prefix, const kvc_tokens *from, int32_t block, const void *payload,
                                     int64_t size, int32_t *is_kept) {
    kvc_tokens tokens;
    kvc_fetch fetch;
    uint8_t name[KVC_NAME_BYTES];
    int32_t known, is_new;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    kvc_prefix_lock(prefix);
    KVC_TRY(kvc_unlock(prefix->cache, kvc_fetch_begin(&fetch, prefix, &tokens, tokens.num_tokens, &known, name)));
    const kvc_status status = kvc_prefix_add_block(&fetch, block, payload, size, is_kept, &is_new);
    kvc_lock(prefix->cache);
    kvc_fetch_touch(&fetch);
    return kvc_unlock(prefix->cache, status);
}

#endif
