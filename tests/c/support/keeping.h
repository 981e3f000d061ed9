/* keeping.h: retained sequences by id.  Prefixes alone make them; here they are made without one, by src/edit/kept.h.
 */
#ifndef KVC_TEST_KEEPING_H
#define KVC_TEST_KEEPING_H

#include "cache/check.h"
#include "cache/waiting.h"
#include "edit/kept.h"
#include "support/test.h"

enum { MOST_PIECES = 16, MOST_GROUPS = 16 };

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

/* Uses retained sequences, the first last, and ignores other ids. */
static inline kvc_status touch_retained(kvc_cache *cache, const int64_t *ids, int num) {
    kvc_lock(cache);
    for (int i = num - 1; i >= 0; i--)
        if (find_retained(cache, ids[i]))
            kvc_cache_use(cache, find_retained(cache, ids[i]), ++cache->evicting.num_uses);
    return kvc_unlock(cache, KVC_OK);
}

/* Makes dst of what matches, up to `length`, of retained sequences by rising position.  Other ids count as evicted. */
static inline kvc_status attach_retained(kvc_cache *cache, const int64_t *ids, int num, int64_t dst, int32_t length,
                                         int32_t *matched) {
    kvc_piece pieces[MOST_PIECES];
    kvc_lock(cache);
    kvc_sequence *old = kvc_cache_find(cache, dst);
    kvc_status status = kvc_check_idle(old);
    if (status == KVC_OK && old && kvc_sequence_holds(old)) status = kvc_fail(KVC_ERR_INVALID, "dst holds rows");
    int32_t last = -1;
    for (int i = 0; status == KVC_OK && i < num; i++) {
        kvc_sequence *rows = find_retained(cache, ids[i]);
        if (rows && rows->call.in_place) rows = NULL;
        pieces[i] = (kvc_piece){rows, rows ? kvc_sequence_first(rows) : -1, KVC_END};
        if (rows && pieces[i].begin <= last) status = kvc_fail(KVC_ERR_INVALID, "ids[%d] stands before others", i);
        if (rows) last = kvc_sequence_last(rows);
    }
    *matched = 0;
    if (status == KVC_OK) {
        kvc_covered covered[MOST_GROUPS];
        kvc_piece_list found = kvc_pieces_begin(cache, pieces, num, covered);
        *matched = kvc_pieces_match(&found, length);
    }
    if (*matched) status = kvc_attach_pieces(cache, pieces, num, dst, *matched);
    if (status == KVC_OK && old) kvc_cache_drop(cache, old); /* all its rows have expired */
    kvc_unlock(cache, KVC_OK);
    if (status == KVC_OK) touch_retained(cache, ids, num);
    return status;
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
