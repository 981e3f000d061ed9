/* keeping.h: retained sequences by id.  Prefixes alone make them; here they are made without one, by src/edit/kept.h.
 */
#ifndef KVC_TEST_KEEPING_H
#define KVC_TEST_KEEPING_H

#include "cache/check.h"
#include "cache/waiting.h"
#include "edit/kept.h"
#include "support/test.h"

static inline kvc_sequence *find_retained(const kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    return sequence && sequence->evicting.is_kept ? sequence : NULL;
}

/* Adds to the pins of retained sequences, and ignores other ids. */
static inline kvc_status pin_retained(kvc_cache *cache, const int64_t *ids, int num, int add) {
    kvc_lock(cache);
    for (int i = 0; i < num; i++) {
        kvc_sequence *sequence = find_retained(cache, ids[i]);
        if (sequence && (add > 0 || sequence->evicting.num_pins)) kvc_cache_pin(cache, sequence, add);
    }
    return kvc_unlock(cache, KVC_OK);
}

/* Retains rows of src at positions [begin, end) under an id that is not used. */
static inline kvc_status retain(kvc_cache *cache, int64_t src_id, int64_t id, int32_t begin, int32_t end) {
    kvc_lock(cache);
    const kvc_sequence *src = kvc_cache_find(cache, src_id);
    kvc_status status = src && src->in_batch ? KVC_OK : kvc_check_idle(src);
    if (status == KVC_OK && kvc_table_find(&cache->sequences, id))
        status = kvc_fail(KVC_ERR_INVALID, "sequence %lld is there", (long long)id);
    kvc_sequence *made = NULL;
    if (status == KVC_OK && src) status = kvc_make_kept(cache, src, id, begin, end, NULL, &made);
    if (made) kvc_cache_set_in_call(cache, id, 1);
    return kvc_unlock(cache, status);
}

/* Retains new rows, pinned, of these layers; NULL: of all.  They must fit a block. */
static inline kvc_status retain_new(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, const uint8_t *layers) {
    uint8_t all[64] = {0};
    CHECK(cache->num_layers <= 64);
    for (int32_t i = 0; i < cache->num_layers; i++) all[i] = (uint8_t)kvc_keeps_tokens(cache, i);
    if (end - begin > kvc_block_size(cache)) return kvc_fail(KVC_ERR_INVALID, "end is %d", end);
    kvc_lock(cache);
    return kvc_unlock(cache, kvc_make_kept_unwritten(cache, id, begin, end, layers ? layers : all, 0));
}

/* Writes the ids of retained sequences, the least recently used first: at most max_ids.  Returns how many there are. */
static inline int64_t list_retained(kvc_cache *cache, int64_t *ids, int64_t max_ids) {
    int64_t num = 0, after = 0;
    kvc_lock(cache);
    for (const kvc_sequence *next = NULL;; num++) {
        const kvc_table *table = &cache->sequences;
        next = NULL;
        for (const kvc_sequence *s = kvc_table_first(table); s && !s->is_hidden; s = kvc_table_next(table, s))
            if (s->evicting.is_kept && s->evicting.used > after && (!next || s->evicting.used < next->evicting.used))
                next = s;
        if (!next) break;
        after = next->evicting.used;
        if (ids && num < max_ids) ids[num] = next->id;
    }
    kvc_unlock(cache, KVC_OK);
    return num;
}

#endif
